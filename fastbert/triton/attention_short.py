"""attention in Triton for batches whose longest sequence has at most 32 tokens.

A program owns ROWS rows of one head: row r is token r % SLOT of its sequence number r // SLOT, and SLOT is 16 or 32.
Its products are batched, [sequences, SLOT, ...], with CHUNK channels at a time so that registers suffice. One
block-diagonal product of all rows would compute two or four times as much, and would multiply a neighbour's NaN by
zero, which is NaN.

All keys of a sequence are in its slot, so softmax needs no loop. The backward computes the weights and their sums
again, reads neither lse nor the output, and gets dQ, dK and dV from 5 products. All programs do the same work whatever
the lengths, so sequences are taken in their order, not the longest first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.attention_tiles import (
    FILL,
    LOG2E,
    LOWEST,
    VARYING,
    Call,
    bounds,
    clear_uncovered,
    keep_blocks,
    key_words,
    load_rows,
    store_rows,
    work_of,
)
from fastbert.triton.common import Config, launch, pick


# Arguments: padded head size, bits per element, and whether rows of a head can be read 16 bytes at a time (otherwise
# each element has an address in registers). Chosen by compiling (docs/triton_report.md), so that no registers spill.
def _tiles_80(width: int, bits: int, whole: bool) -> Config:
    rows, num_warps = (32, 8) if bits == 32 else (64, 4 if whole else 8)
    return Config({"ROWS": rows, "CHUNK": min(width, 32)}, num_warps)


def _tiles_100(width: int, bits: int, whole: bool) -> Config:
    return Config({"ROWS": 32, "CHUNK": 16}, 8) if bits == 32 else _tiles_80(width, bits, whole)


TILES = {80: _tiles_80, 100: _tiles_100}


@triton.jit
def _rows(cu_seqlens, tile, batch, tokens, longest, ROWS: tl.constexpr, SLOT: tl.constexpr):
    """For each row: its sequence, position and token, and its sequence's end. Slots beyond the batch have no tokens."""
    row = tl.arange(0, ROWS)
    sequence, place = tile * (ROWS // SLOT) + row // SLOT, row % SLOT
    start, length = bounds(cu_seqlens, tl.minimum(sequence, batch - 1), tokens, longest)
    return sequence, place, start + place, start + tl.where(sequence < batch, length, 0)


@triton.jit
def _load(x, token, end, stride, D: tl.constexpr, CHUNK: tl.constexpr, SLOT: tl.constexpr):
    """[sequences, SLOT, CHUNK]: the first CHUNK channels of the D that are left from x on."""
    rows = load_rows(x, token, end, stride, D, CHUNK, True)
    return tl.reshape(rows, (token.shape[0] // SLOT, SLOT, CHUNK))


@triton.jit
def _scores(
    x, y, token, end, x_stride, y_stride,
    PRECISION: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """[sequences, SLOT, SLOT]: x y^T of the heads that begin at x and y."""
    s = tl.zeros((token.shape[0] // SLOT, SLOT, SLOT), tl.float32)
    for first in tl.static_range(0, D, CHUNK):
        left = _load(x + first, token, end, x_stride, D - first, CHUNK, SLOT)
        right = _load(y + first, token, end, y_stride, D - first, CHUNK, SLOT)
        s = tl.dot(left, tl.permute(right, 0, 2, 1), s, input_precision=PRECISION)
    return s


@triton.jit
def _mix(
    to, weights, factor, x, token, end, to_stride, x_stride,
    PRECISION: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Writes the product of weights and x, times factor, to the head that begins at `to`."""
    weights = weights.to(x.dtype.element_ty)
    for first in tl.static_range(0, D, CHUNK):
        right = _load(x + first, token, end, x_stride, D - first, CHUNK, SLOT)
        rows = tl.reshape(tl.dot(weights, right, input_precision=PRECISION) * factor, (token.shape[0], CHUNK))
        store_rows(to + first, rows, token, end, to_stride, D - first, CHUNK)


@triton.jit
def _softmax(s, token, end, scale, SLOT: tl.constexpr):
    """exp(scale s - the row's maximum), log2(e) times that maximum, and the row sums."""
    visible = tl.reshape(token < end, (token.shape[0] // SLOT, 1, SLOT))
    s = tl.where(visible, s * (scale * LOG2E), float("-inf"))
    largest = tl.maximum(tl.max(s, 2), LOWEST)
    p = tl.exp2(s - largest[:, :, None])
    return p, largest, tl.sum(p, 2)


@triton.jit
def _keep(k0, k1, place, head, sequence, threshold, SLOT: tl.constexpr):
    """[sequences, SLOT, SLOT] bool: the weights that dropout keeps."""
    keep = keep_blocks(k0, k1, place, 0, head, sequence[:, None], threshold, place.shape[0], SLOT)
    return tl.reshape(keep, (place.shape[0] // SLOT, SLOT, SLOT))


@triton.jit(do_not_specialize=VARYING)
def _forward(
    qkv, cu_seqlens, rng, out, lse, tokens, batch, longest, fill, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, FILL: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    behind = program - (tl.num_programs(0) - fill)
    if behind >= 0:
        clear_uncovered(out, lse, cu_seqlens, behind, batch, tokens, longest, heads, 1, D, WIDTH, FILL)
        return
    _, head, tile = work_of(program, 1, heads)
    sequence, place, token, end = _rows(cu_seqlens, tile, batch, tokens, longest, ROWS, SLOT)
    k0, k1 = key_words(rng, site, DROPOUT)
    queries, part, stride = qkv + head * D, heads * D, 3 * heads * D
    s = _scores(queries, queries + part, token, end, stride, stride, PRECISION, D, CHUNK, SLOT)
    p, largest, total = _softmax(s, token, end, scale, SLOT)
    saved = tl.reshape((largest + tl.log2(total)) / LOG2E, (ROWS,))
    tl.store(lse + head.to(tl.int64) * tokens + token, saved, token < end)
    if DROPOUT:
        p = tl.where(_keep(k0, k1, place, head, sequence, threshold, SLOT), p, 0.0)
    factor = (keep_scale / total)[:, :, None]
    _mix(out + head * D, p, factor, queries + 2 * part, token, end, part, stride, PRECISION, D, CHUNK, SLOT)


@triton.jit(do_not_specialize=VARYING)
def _backward(
    qkv, cu_seqlens, rng, dout, dqkv, tokens, batch, longest, fill, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, FILL: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """As in attention.py, but delta is computed as rowsum(P dO V^T F), which equals rowsum(dO O)."""
    program = tl.program_id(0)
    behind = program - (tl.num_programs(0) - fill)
    if behind >= 0:
        clear_uncovered(dqkv, None, cu_seqlens, behind, batch, tokens, longest, heads, 3, D, WIDTH, FILL)
        return
    _, head, tile = work_of(program, 1, heads)
    sequence, place, token, end = _rows(cu_seqlens, tile, batch, tokens, longest, ROWS, SLOT)
    k0, k1 = key_words(rng, site, DROPOUT)
    queries, part, stride = qkv + head * D, heads * D, 3 * heads * D
    douts, dqueries = dout + head * D, dqkv + head * D
    s = _scores(queries, queries + part, token, end, stride, stride, PRECISION, D, CHUNK, SLOT)
    p, _, total = _softmax(s, token, end, scale, SLOT)
    p = p * (1.0 / total)[:, :, None]
    dp = _scores(douts, queries + 2 * part, token, end, part, stride, PRECISION, D, CHUNK, SLOT)
    dropped = p
    if DROPOUT:
        keep = _keep(k0, k1, place, head, sequence, threshold, SLOT)
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - tl.sum(p * dp, 2)[:, :, None])
    _mix(dqueries, ds, scale, queries + part, token, end, stride, stride, PRECISION, D, CHUNK, SLOT)
    ds, dropped = tl.permute(ds, 0, 2, 1), tl.permute(dropped, 0, 2, 1)
    _mix(dqueries + part, ds, scale, queries, token, end, stride, stride, PRECISION, D, CHUNK, SLOT)
    _mix(dqueries + 2 * part, dropped, 1.0, douts, token, end, stride, part, PRECISION, D, CHUNK, SLOT)


def forward(call: Call, rng: Tensor | None) -> tuple[Tensor, Tensor]:
    out = call.qkv.new_empty((call.tokens, call.heads, call.D))
    lse = call.qkv.new_empty((call.heads, call.tokens), dtype=torch.float32)
    _launch(_forward, call, call.qkv, call.cu_seqlens, rng, out, lse)
    return out, lse


def backward(call: Call, rng: Tensor | None, dout: Tensor) -> Tensor:
    dqkv = call.qkv.new_empty(call.qkv.shape)
    _launch(_backward, call, call.qkv, call.cu_seqlens, rng, dout.contiguous(), dqkv)
    return dqkv


def _launch(kernel, call: Call, *tensors: Tensor | None) -> None:
    slot = 16 if call.longest <= 16 else 32
    config = pick(TILES, call.qkv.device, call.width, 8 * call.qkv.element_size(), call.D % 8 == 0)
    fill, tiles = triton.cdiv(call.tokens, FILL), triton.cdiv(call.batch * slot, config.tiles["ROWS"])
    launch(
        kernel, (fill + tiles * call.heads if call.tokens else 0,), *tensors, *call.sizes, fill, call.heads,
        *call.scalars, config=config, FILL=FILL, SLOT=slot, DROPOUT=call.drops, **call.constants,
    )  # fmt: skip
