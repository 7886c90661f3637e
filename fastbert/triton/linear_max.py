"""linear_max in Triton: the largest logit of each sequence for each class, with logits in registers only.

Forward: a program owns a tile of classes of one sequence. It takes the sequence's rows tile by tile, multiplies, and
updates a running maximum and its row. Programs of all sequences for one tile of classes are neighbours, so the weights
come from the L2 cache for all but the first. Bytes moved: the weights and x once (from the cache, x is read V / CLASSES
times), y and rows once.

Backward: for each gradient that is not zero, dx adds up a row of the weights, by the row of the maximum (sums.py), and
dweight a row of x. Sums have a fixed order, without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import Config, launch, pick, precision
from fastbert.triton.sums import by_id


def _forward_config(inner: int, kind: str) -> Config:
    """kind: "half", "tf32" or "ieee" (products in ordinary float32 arithmetic)."""
    if kind == "ieee":
        return Config({"ROWS": 32, "CLASSES": 64, "K": 16}, num_warps=4, num_stages=2)
    return Config({"ROWS": 64, "CLASSES": 128, "K": 64 if kind == "half" else 32}, num_warps=8, num_stages=3)


def _dweight_config(inner: int) -> Config:
    return Config({"CLASSES": 16, "CHANNELS": 128}, num_warps=4)


FORWARD, DWEIGHT = {80: _forward_config}, {80: _dweight_config}
NO_ROW = tl.constexpr(2**31 - 1)


def _kind(x: Tensor) -> str:
    return precision(x) if x.dtype == torch.float32 else "half"


@triton.jit
def _bounds(cu_seqlens, sequence, tokens):
    """The first row of a sequence and the one after its last, within x whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), tokens)
    return start, tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), tokens)


# ---- forward


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _forward(
    x, weight, bias, cu_seqlens, y, rows, tokens, inner, classes, sequences,
    HAS_BIAS: tl.constexpr, NEED_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    sequence, tile = tl.program_id(0) % sequences, tl.program_id(0) // sequences
    index = tile * CLASSES + tl.arange(0, CLASSES)
    known = index < classes
    start, end = _bounds(cu_seqlens, sequence, tokens)
    offset = tl.zeros((CLASSES,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + index, known, other=0.0).to(tl.float32)
    best = tl.full((CLASSES,), float("-inf"), tl.float32)
    place = tl.full((CLASSES,), -1, tl.int32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        logits = tl.zeros((ROWS, CLASSES), tl.float32)
        for k in range(0, inner, K):
            channel = k + tl.arange(0, K)
            a = tl.load(
                x + row.to(tl.int64)[:, None] * inner + channel[None, :],
                (row < end)[:, None] & (channel < inner)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                weight + index.to(tl.int64)[:, None] * inner + channel[None, :],
                known[:, None] & (channel < inner)[None, :], other=0.0,
            )  # fmt: skip
            logits = tl.dot(a, b.T, logits, input_precision=PRECISION)
        logits += offset[None, :]
        here = (row < end)[:, None] & (index >= 0)[None, :]
        is_nan = logits != logits
        top = tl.max(tl.where(here & ~is_nan, logits, float("-inf")), 0)
        with_nan = tl.max((here & is_nan).to(tl.int32), 0) > 0
        highest = here & tl.where(with_nan[None, :], is_nan, logits == top[None, :])
        found = tl.min(tl.where(highest, row[:, None], NO_ROW), 0)  # the first row of equal maxima
        top = tl.where(with_nan, float("nan"), top)
        wins = (place < 0) | ((with_nan | (top > best)) & (best == best))
        best, place = tl.where(wins, top, best), tl.where(wins, found, place)
    at = sequence.to(tl.int64) * classes + index
    tl.store(y + at, best, known)
    if NEED_ROWS:
        tl.store(rows + at, place, known)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, need_rows: bool
) -> tuple[Tensor, Tensor]:
    (tokens, inner), classes, sequences = x.shape, weight.shape[0], cu_seqlens.shape[0] - 1
    y = x.new_empty(sequences, classes)
    rows = x.new_empty(y.shape if need_rows else (0,), dtype=torch.int32)
    config = pick(FORWARD, x.device, inner, _kind(x))
    launch(
        _forward, (sequences * triton.cdiv(classes, config.tiles["CLASSES"]),),
        x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), cu_seqlens.contiguous(), y,
        rows, tokens, inner, classes, sequences, config=config,
        HAS_BIAS=bias is not None, NEED_ROWS=need_rows, PRECISION=precision(x),
    )  # fmt: skip
    return y, rows


# ---- backward: dx[row[b, v]] += dy[b, v] weight[v], dweight[v] = sum of dy[b, v] x[row[b, v]]


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _dweight(
    dy, rows, x, dweight, tokens, inner, classes, sequences, CLASSES: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.zeros((CLASSES, CHANNELS), tl.float32)
    before = tl.zeros((), tl.int64)  # of a sequence in dy
    for _ in range(0, sequences):
        at = before + index
        place = tl.load(rows + at, index < classes, other=-1)
        live = (place >= 0) & (place < tokens)
        d = tl.load(dy + at, live, other=0.0).to(tl.float32)
        live = live & (d != 0.0)
        found = tl.load(
            x + place.to(tl.int64)[:, None] * inner + channel[None, :],
            live[:, None] & (channel < inner)[None, :], other=0.0,
        )  # fmt: skip
        sums += tl.where(live, d, 0.0)[:, None] * found.to(tl.float32)
        before += classes
    at = index.to(tl.int64)[:, None] * inner + channel[None, :]
    tl.store(dweight + at, sums, (index < classes)[:, None] & (channel < inner)[None, :])


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rows: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    (tokens, inner), (sequences, classes) = x.shape, dy.shape
    dx = x.new_empty(0)
    dweight = x.new_empty(weight.shape if need_dweight else (0,))
    dy, rows, sizes = dy.contiguous(), rows.contiguous(), (tokens, inner, classes, sequences)
    if need_dx:
        counts = (dy != 0) & (rows >= 0) & (rows < tokens)
        dx = by_id(weight, torch.where(counts, rows, tokens), x, tokens, dy)
    if need_dweight:
        config = pick(DWEIGHT, x.device, inner)
        grid = triton.cdiv(classes, config.tiles["CLASSES"]), triton.cdiv(inner, config.tiles["CHANNELS"])
        launch(_dweight, grid, dy, rows, x.contiguous(), dweight, *sizes, config=config)
    return dx, dweight
