"""The floor: the operations and bytes that BERT cannot do without, and the time that they take at a device's ceilings.

Per layer, T real tokens, hidden size h, S2 = sum of squared lengths; a multiply-add is two operations; `element` bytes
an element. Products with h by h weights: q, k, v 3, output projection 1, each half of the feed-forward 4 (12 in all,
so 24 T h^2 operations). Attention: Q K^T and P V, 4 h S2. Every fused pass reads and writes device memory once.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from fastbert import testing


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device: FLOP/s of matrix products and of attention, bytes/s. origin: who says so."""

    product: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    origin: str


# What tables of floors are computed with; a run measures its own product and copy.
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


def adamw_bytes(parameters: int, element: int = 2) -> int:
    """One optimizer step, all in the weights' type: weight and two moments read and written, gradient read."""
    return 7 * element * parameters


# ---- time: sums over the ops of max(operations / rate, bytes / bandwidth)


def forward_seconds(layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2) -> float:
    products = forward_products_seconds(layers, hidden, sum(lengths), ceilings, element)
    return products + forward_rest_seconds(layers, hidden, lengths, ceilings, element)


def forward_products_seconds(layers: int, hidden: int, tokens: int, ceilings: Ceilings, element: int = 2) -> float:
    """The matrix products, with bias and GELU in them."""
    seconds = 0.0
    for weights, elements in PRODUCTS.values():
        moved = (elements * tokens * hidden + weights * hidden**2) * element
        seconds += max(2 * weights * tokens * hidden**2 / ceilings.product, moved / ceilings.bandwidth)
    return layers * seconds


def forward_rest_seconds(
    layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2
) -> float:
    """Attention, and both residuals with LayerNorm."""
    row = sum(lengths) * hidden * element  # bytes of one pass over the residual stream
    attention = attention_flops(1, hidden, lengths) / ceilings.attention_forward
    seconds = max(attention, ATTENTION[0] * row / ceilings.bandwidth)
    return layers * (seconds + LAYER_NORMS[0] * row / ceilings.bandwidth)


def step_seconds(layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2) -> float:
    """Forward and backward."""
    products = step_products_seconds(layers, hidden, sum(lengths), ceilings, element)
    return products + step_rest_seconds(layers, hidden, lengths, ceilings, element)


def step_products_seconds(layers: int, hidden: int, tokens: int, ceilings: Ceilings, element: int = 2) -> float:
    """Products in the backward are twice those of the forward."""
    elements = 3 * sum(e for _, e in PRODUCTS.values()) + PRODUCTS_STEP_EXTRA
    moved = (elements * tokens * hidden + 36 * hidden**2) * element
    return layers * max(3 * products_flops(1, hidden, tokens) / ceilings.product, moved / ceilings.bandwidth)


def step_rest_seconds(layers: int, hidden: int, lengths: Sequence[int], ceilings: Ceilings, element: int = 2) -> float:
    row, flops = sum(lengths) * hidden * element, attention_flops(1, hidden, lengths)
    seconds = sum(LAYER_NORMS) * row / ceilings.bandwidth
    for work, rate, elements in zip(
        (flops, 2.5 * flops), (ceilings.attention_forward, ceilings.attention_backward), ATTENTION, strict=True
    ):
        seconds += max(work / rate, elements * row / ceilings.bandwidth)
    return layers * seconds


# ---- what the library does with the products


def products_alone(
    shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: str, backward: bool
) -> dict[str, harness.Call]:
    """Products of (rows, inner, columns) and, with a backward, of their gradients, as bounds for `harness.measure`.

    One for each library that PyTorch has for them; the backward is always the first one's.
    """
    operands = {shape: _operands(*shape, dtype, device) for shape in dict.fromkeys(shapes)}

    def run(linear: Callable[..., Tensor]) -> None:
        for shape in shapes:
            x, weight, bias, dy = operands[shape]
            linear(x, weight, bias)
            if backward:
                dy @ weight, dy.T @ x

    return {f"{harness.PRODUCTS}{name}": functools.partial(run, linear) for name, linear in _libraries(dtype, device)}


def _operands(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Input, weight, bias and the gradient of the output."""
    shapes = ((rows, inner), (columns, inner), (columns,), (rows, columns))
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def _libraries(dtype: torch.dtype, device: str) -> list[tuple[str, Callable[..., Tensor]]]:
    found: list[tuple[str, Callable[..., Tensor]]] = [("", F.linear)]
    return found + [(", oneDNN", testing.onednn_linear)] * (device == "cpu" and dtype == torch.float32)


# ---- ceilings


@functools.cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """Of large products and a large copy, timed here and now.

    Attention is held to the product's rate, on an H100 in half precision to the best published ones (see H100): nobody
    has an attention that runs at the product's.
    """
    product, bandwidth = _product_rate(device, dtype), _bandwidth(device)
    origin = "large products and a copy, measured before the cases"
    if device == "cuda" and dtype.itemsize == 2 and _is_sxm_h100(torch.cuda.get_device_name()):
        rates = (H100.attention_forward, H100.attention_backward)
        return Ceilings(product, *rates, bandwidth, f"{origin}; attention: FlashAttention 3, as published")
    return Ceilings(product, product, product, bandwidth, origin)


def _is_sxm_h100(name: str) -> bool:
    """A whole one; those on a PCIe card, and H100 NVL, are slower."""
    return "H100" in name and not {"PCIe", "NVL", "MIG"} & set(name.split())


def _product_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s: of a large product; on a CPU the best of a layer's shapes and of PyTorch's libraries."""
    shapes = [(8192, 8192, 8192)] if device == "cuda" else [(1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768)]
    rates = []
    for rows, inner, columns in shapes:
        x, weight, bias, _ = _operands(rows, inner, columns, dtype, device)
        calls = [functools.partial(linear, x, weight, bias) for _, linear in _libraries(dtype, device)]
        rates.append(2 * rows * inner * columns / min(_seconds(call, device) for call in calls))
    return max(rates)


def _bandwidth(device: str) -> float:
    """Bytes/s, those read and those written."""
    source = torch.randn((1024 if device == "cuda" else 64) << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(call: harness.Call, device: str) -> float:
    """The best of 20 (of fewer that take a second): a processor that was idle needs as many to reach its clock."""
    timer, times = harness.cuda_timer(device) if device == "cuda" else harness.host_timer(), []
    while len(times) < 20 and (len(times) < 3 or sum(times) < 1):
        times.append(timer(call, 1))
    return min(times)
