"""The floor: the operations and bytes that BERT cannot do without, and the time that they take at a device's ceilings.

Per layer, T real tokens, hidden size h, S2 = sum of squared lengths; a multiply-add is two operations; `element` bytes
an element. Products with h by h weights: q, k, v 3, output projection 1, each half of the feed-forward 4 (12 in all,
so 24 T h^2 operations). Attention: Q K^T and P V, 4 h S2. Every fused pass reads and writes device memory once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks import harness


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device: FLOP/s of matrix products and of attention, bytes/s. origin: who says so."""

    product: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    origin: str


H100 = Ceilings(
    800e12, 333e12, 272e12, 3.0e12, "H100 SXM: measured product and copy; FlashAttention 3 at S = 512, D = 64, bf16"
)

# product of a layer -> (weights in units of h^2, elements of h that a token reads and writes)
PRODUCTS = {"qkv": (3, 4), "projection": (1, 2), "up": (4, 5), "down": (4, 5)}
ATTENTION = (4, 8)  # elements a token, forward and backward
LAYER_NORMS = (2 * 3, 2 * 4)
PRODUCTS_STEP_EXTRA = 10  # in a step GELU's input is saved and read again (8), gradients of the residual are added (2)


# ---- operations and bytes


def squares(lengths: Sequence[int]) -> int:
    return sum(length * length for length in lengths)


def products_flops(layers: int, hidden: int, tokens: int) -> int:
    return layers * 24 * tokens * hidden**2


def attention_flops(layers: int, hidden: int, lengths: Sequence[int]) -> int:
    return layers * 4 * hidden * squares(lengths)


def head_flops(hidden: int, vocab: int, labelled: int) -> int:
    """The masked-LM head, on the labelled tokens only."""
    return labelled * (2 * hidden**2 + 2 * hidden * vocab)


def forward_flops(layers: int, hidden: int, lengths: Sequence[int], vocab: int = 0, labelled: int = 0) -> int:
    products = products_flops(layers, hidden, sum(lengths))
    return products + attention_flops(layers, hidden, lengths) + head_flops(hidden, vocab, labelled)


def step_flops(layers: int, hidden: int, lengths: Sequence[int], vocab: int = 0, labelled: int = 0) -> float:
    """Forward and backward: three times the forward, 3.5 times for attention, whose scores are computed again."""
    return 3 * forward_flops(layers, hidden, lengths, vocab, labelled) + 0.5 * attention_flops(layers, hidden, lengths)


def forward_bytes(layers: int, hidden: int, tokens: int, element: int = 2) -> int:
    return layers * element * (26 * tokens * hidden + 12 * hidden**2)


def step_bytes(layers: int, hidden: int, tokens: int, element: int = 2) -> int:
    return layers * element * (84 * tokens * hidden + 36 * hidden**2)


def adamw_bytes(parameters: int) -> int:
    """One optimizer step in fp32: weight and two moments read and written, gradient read."""
    return 28 * parameters


# ---- time


def forward_seconds(layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2) -> float:
    """Sum over the ops of max(operations / rate, bytes / bandwidth)."""
    tokens, row = sum(lengths), sum(lengths) * hidden * element  # bytes of one pass over the residual stream
    seconds = LAYER_NORMS[0] * row / ceilings.bandwidth
    for weights, elements in PRODUCTS.values():
        moved = elements * row + weights * hidden**2 * element
        seconds += max(2 * weights * tokens * hidden**2 / ceilings.product, moved / ceilings.bandwidth)
    attention = attention_flops(1, hidden, lengths) / ceilings.attention_forward
    return layers * (seconds + max(attention, ATTENTION[0] * row / ceilings.bandwidth))


def step_seconds(layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2) -> float:
    """Forward and backward; products in the backward are twice those of the forward."""
    tokens, row = sum(lengths), sum(lengths) * hidden * element
    moved = (3 * sum(e for _, e in PRODUCTS.values()) + PRODUCTS_STEP_EXTRA) * row + 36 * hidden**2 * element
    seconds = max(3 * products_flops(1, hidden, tokens) / ceilings.product, moved / ceilings.bandwidth)
    seconds += sum(LAYER_NORMS) * row / ceilings.bandwidth
    flops = attention_flops(1, hidden, lengths)
    for work, rate, elements in zip(
        (flops, 2.5 * flops), (ceilings.attention_forward, ceilings.attention_backward), ATTENTION, strict=True
    ):
        seconds += max(work / rate, elements * row / ceilings.bandwidth)
    return layers * seconds


# ---- ceilings


@functools.cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """The known ones of an H100 in bf16; elsewhere a large product and a large copy, timed here and now."""
    if device == "cuda" and dtype == torch.bfloat16 and "H100" in torch.cuda.get_device_name():
        return H100
    rows, megabytes = (8192, 1024) if device == "cuda" else (1024, 64)
    x, weight = torch.randn(rows, 768, device=device, dtype=dtype), torch.randn(3072, 768, device=device, dtype=dtype)
    if device == "cuda":
        x, weight = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    product = 2 * x.numel() * weight.shape[0] / _seconds(lambda: F.linear(x, weight), device)
    source = torch.randn(megabytes << 18, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return Ceilings(product, product, product, bandwidth, "one product and one copy, measured before the cases")


def _seconds(call, device: str) -> float:
    """The best of 20; a processor that was idle needs as many to reach its clock."""
    timer = harness.cuda_timer(device) if device == "cuda" else harness.host_timer()
    return min(timer(call, 1) for _ in range(20))
