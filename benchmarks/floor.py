"""The floor: the operations and bytes that BERT cannot do without, and the time that they take at a device's ceilings.

Per layer, T real tokens, hidden size h, S2 = sum of squared lengths; a multiply-add is two operations; `element` bytes
an element. Products with h by h weights: 3 for q, k and v, 1 for the output projection, 4 for each half of a
feed-forward that is 4 h wide (12 in all, so 24 T h^2 operations). Attention: Q K^T and P V, 4 h S2; DeBERTa's products
with relative positions are not counted. Every fused pass reads and writes device memory once. A step (forward and
backward) takes the products three times, and attention 3.5 times, because the backward computes the scores again.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, provenance
from benchmarks.harness import Work
from fastbert import testing


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device: FLOP/s of matrix products and of attention, bytes/s. origin: their source."""

    product: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    origin: str


# ---- what has to be done, and the sum over the ops of max(operations / rate, bytes / bandwidth)

ATTENTION = (4, 8)  # elements a token in units of h: forward, backward
LAYER_NORMS = (2 * 3, 2 * 4)


def layer_products(wide: float) -> list[tuple[float, float]]:
    """(weights in units of h^2, elements in units of h that a token reads and writes) of q, k and v, of the projection,
    and of both halves of the feed-forward, which is `wide` h wide."""
    return [(3, 4), (1, 2), (wide, 1 + wide), (wide, 1 + wide)]


def step_elements(wide: float) -> float:
    """Those of all products in a step: GELU's input is saved and read again, gradients of the residual are added."""
    return 3 * sum(elements for _, elements in layer_products(wide)) + 2 * wide + 2


def attention_flops(hidden: int, lengths: Sequence[int]) -> int:
    return 4 * hidden * sum(length * length for length in lengths)


def of_model(
    layers: int,
    hidden: int,
    lengths: Sequence[int],
    ceilings: Ceilings,
    *,
    intermediate: int | None = None,
    step: bool = False,
    element: int = 2,
    vocab: int = 0,
    labelled: int = 0,
    parameters: int = 0,
) -> Work:
    """The work of a model's forward. intermediate: the width of the feed-forward; None for four times the hidden size.
    step: forward and backward. labelled: tokens through a masked-LM head. parameters: of an AdamW step, all in the
    weights' type: weight and two moments are read and written, the gradient is read."""
    tokens, scores, times = sum(lengths), attention_flops(hidden, lengths), 3 if step else 1
    row, weights = tokens * hidden * element, hidden**2 * element  # bytes: a pass over the residual stream; h^2
    head, optimizer = labelled * (2 * hidden**2 + 2 * hidden * vocab), 7 * element * parameters
    wide = (intermediate or 4 * hidden) / hidden
    flops = times * (layers * ((8 + 4 * wide) * tokens * hidden**2 + scores) + head) + step * 0.5 * layers * scores
    elements = step_elements(wide) if step else sum(elements for _, elements in layer_products(wide))
    moved = (elements + sum(ATTENTION[: 1 + step] + LAYER_NORMS[: 1 + step])) * row + times * (4 + 2 * wide) * weights
    rest = _rest_seconds(row, scores, step, ceilings)
    products = _products_seconds(wide, tokens * hidden**2, row, weights, step, ceilings)
    rest = layers * rest + optimizer / ceilings.bandwidth
    floor = layers * products + times * head / ceilings.product + rest
    return Work(tokens, flops, layers * moved + optimizer, floor, rest)


def _products_seconds(wide: float, area: int, row: int, weights: int, step: bool, ceilings: Ceilings) -> float:
    """Seconds of a layer's matrix products, with fused bias and GELU. area: tokens times h^2."""
    if step:
        moved = step_elements(wide) * row + 3 * (4 + 2 * wide) * weights
        return max(3 * (8 + 4 * wide) * area / ceilings.product, moved / ceilings.bandwidth)
    each = layer_products(wide)
    return sum(max(2 * w * area / ceilings.product, (e * row + w * weights) / ceilings.bandwidth) for w, e in each)


def _rest_seconds(row: int, scores: int, step: bool, ceilings: Ceilings) -> float:
    """Seconds of a layer's attention, and of both residual additions with LayerNorm."""
    passes = [(scores / ceilings.attention_forward, ATTENTION[0]), (0, LAYER_NORMS[0])]
    passes += [(2.5 * scores / ceilings.attention_backward, ATTENTION[1]), (0, LAYER_NORMS[1])] if step else []
    return sum(max(seconds, elements * row / ceilings.bandwidth) for seconds, elements in passes)


def of_op(
    tokens: int,
    product: int,
    scores: int,
    moved: float,
    forward: bool,
    backward: bool,
    ceilings: Ceilings,
    sparse: int | None = None,
) -> Work:
    """The work of an op. product, scores: forward operations of a matrix product and of attention. moved: all bytes.
    sparse: operations of the product's backward, if it is none of matrices."""
    products = product * (forward + 2 * backward * (sparse is None))
    rows = backward * (sparse or 0)
    rest = forward * scores / ceilings.attention_forward + backward * 2.5 * scores / ceilings.attention_backward
    rest += rows / ceilings.product
    seconds = max(products / ceilings.product + rest, moved / ceilings.bandwidth)
    return Work(
        tokens, products + rows + scores * (forward + 2.5 * backward), moved, seconds, rest if product else None
    )


# ---- the products as the library runs them


def products_alone(
    shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: str, backward: bool, forward: bool = True
) -> dict[str, harness.Call]:
    """Bounds for `harness.measure`: products of (rows, inner, columns) and, with a backward, those of their gradients.

    There is one bound for each matrix library of PyTorch; the backward always runs in the first library.
    """
    operands = {shape: _operands(*shape, dtype, device) for shape in dict.fromkeys(shapes)}

    def run(linear: Callable[..., Tensor]) -> None:
        for shape in shapes:
            x, weight, bias, dy = operands[shape]
            if forward:
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


_kept: dict = {}  # what `use` has read


def use(file: Path) -> None:
    """Lets `ceilings` return those in a file of benchmarks.gpu.ceilings. Raises ValueError for another device's."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not {"device", "products", "bandwidth"} <= found.keys():
        raise ValueError(f"{file} is no file of benchmarks.gpu.ceilings")
    here = device_name("cuda" if torch.cuda.is_available() else "cpu")
    if found["device"] != here:
        raise ValueError(f"{file.name} has the ceilings of {found['device']}, and this is {here}")
    _kept.update(found)
    ceilings.cache_clear()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else provenance.machine()  # its threads count, too


@functools.cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """The rates of large products and a large copy, from a file (see `use`), or else timed here and now.

    Attention's ceiling is the product's rate, although no implementation of attention reaches it: what is published
    (arXiv:2407.08608) depends on the length.
    """
    kept = _kept.get("products", {}).get(str(dtype).removeprefix("torch."))
    product, copy = (kept, _kept["bandwidth"]) if kept else (product_rate(device, dtype), bandwidth(device))
    return Ceilings(product, product, product, copy, "large products and a copy, measured before the cases")


Shapes = Sequence[tuple[int, int, int]]  # rows, inner, columns
LARGE: dict[str, Shapes] = {
    "cuda": [(8192, 8192, 8192)],
    "cpu": [(1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768)],
}


def product_rate(device: str, dtype: torch.dtype, shapes: Shapes | None = None) -> float:
    """FLOP/s, the best of the shapes (default: large ones) and of PyTorch's libraries, on random data."""
    rates = []
    for rows, inner, columns in shapes or LARGE[device]:
        x, weight, bias, _ = _operands(rows, inner, columns, dtype, device)
        calls = [functools.partial(linear, x, weight, bias) for _, linear in _libraries(dtype, device)]
        rates.append(2 * rows * inner * columns / min(_seconds(call, device) for call in calls))
    return max(rates)


def bandwidth(device: str) -> float:
    """Bytes/s of a large copy, counting both bytes read and bytes written."""
    source = torch.randn((1024 if device == "cuda" else 64) << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(call: harness.Call, device: str) -> float:
    """The best of 20 calls (of fewer if they take a second): an idle processor needs that many to reach its clock."""
    timer, times = harness.cuda_timer(device) if device == "cuda" else harness.host_timer(), []
    while len(times) < 20 and (len(times) < 3 or sum(times) < 1):
        times.append(timer(call, 1))
    return min(times)
