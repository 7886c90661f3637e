"""attention in Triton: softmax(Q K^T) V within each sequence of a packed batch.

The kernels read the projection's output in place. A program owns a tile of queries of one head of one sequence and
loops over the sequence's keys with an online softmax (Dao, "FlashAttention-2", 2023). Programs whose tile lies beyond
their sequence's end return at once, so nothing is computed for padding, and one long sequence is spread over the chip
like many short ones. The last programs of the grid write zeros for tokens that no sequence covers, so every row of the
output is written whatever cu_seqlens holds.

The backward needs qkv, the output and one number per row, and no atomics. Where sequences are short (ONE_PASS), and one
program per head and sequence fills the chip or one tile holds all keys, one kernel computes all three gradients, with 5
products for each pair of tiles, and accumulates dQ in float32. Elsewhere one kernel computes dK and dV, and another dQ,
with 7 products.

Sequences of at most 32 tokens would leave most of a tile empty: attention_short.py puts several into one tile.

Dropout takes one random byte per score; a Philox call serves 16 keys, in the order of the mma accumulator. In that
layout the permutations of keep_mask cost nothing; therefore scores are always queries by keys, never transposed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import attention_short
from fastbert.triton.attention_tiles import (
    LARGE,
    LOG2E,
    LOWEST,
    VARYING,
    Call,
    bounds,
    clear_uncovered,
    key_words,
    load_rows,
    longest_first,
    score_gradients,
    softmax_step,
    store_rows,
)
from fastbert.triton.common import Config, architecture, launch, multiprocessors


def _tiles(M: int, N: int, num_warps: int, num_stages: int = 1, **more: bool) -> Config:
    return Config({"M": M, "N": N, **more}, num_warps, num_stages)


# Arguments: padded head size, bits per element, few: whether tiles of 128 queries are too few to fill the chip, or too
# large for the longest sequence. Tiles were chosen by compiling (docs/triton_report.md), so that no registers spill;
# entries of attention_tuned.py take precedence. RELOAD: queries are read again for every tile of keys, because float32,
# and mma.sync at D = 128, leave too few registers to keep them.
def _forward_80(width: int, bits: int, few: bool) -> Config:
    if bits == 32:
        return _tiles(16, 64, 8, RELOAD=True)
    if width > 64:
        return _tiles(64, 64, 8, 2, RELOAD=True)
    return _tiles(64 if few else 128, 64, 4 if few else 8, 3 if few else 2, RELOAD=False)


def _forward_90(width: int, bits: int, few: bool) -> Config:
    if bits == 32:
        return _forward_80(width, bits, few)
    return _tiles(64 if few else 128, 64, 8 if width > 64 and not few else 4, 2 if width > 64 else 3, RELOAD=False)


def _forward_100(width: int, bits: int, few: bool) -> Config:
    if bits == 32 or width > 64 or few:
        return _forward_90(width, bits, few)
    return _tiles(128, 64, 8, 3, RELOAD=False)


def _prepare_80(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 16, 4) if bits == 32 else _tiles(64, 64, 8 if width > 64 else 4)


def _keys_80(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 64, 16 if width > 64 else 8) if bits == 32 else _tiles(64 if width > 64 else 128, 64, 8)


def _keys_90(width: int, bits: int, few: bool) -> Config:
    return _keys_80(width, bits, few) if bits == 32 else _tiles(128, 64, 8, 1 if width > 64 else 2)


def _keys_100(width: int, bits: int, few: bool) -> Config:
    return _keys_80(width, bits, few) if bits == 32 else _tiles(64, 64, 4 if width == 16 else 8)


def _queries_80(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 64, 8) if bits == 32 else _tiles(64, 64, 8, 2)


FORWARD = {80: _forward_80, 90: _forward_90, 100: _forward_100}
PREPARE = {80: _prepare_80}
KEYS = {80: _keys_80, 90: _keys_90, 100: _keys_100}  # dK and dV; in one pass, dQ too
QUERIES = {80: _queries_80}  # dQ
ONE_PASS = {80: lambda width, bits, few: 0, 90: lambda width, bits, few: 512 if width <= 64 and bits == 16 else 0}


# ---- scores


@triton.jit
def _scores(q, k, key, length, scale, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """log2(e) scale Q K^T in float32; -inf at keys beyond the sequence's end."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    if CHECK:
        s = tl.where((key < length)[None, :], s, float("-inf"))
    return s


@triton.jit
def _attend(
    acc, largest, total, q, queries, keys, values, first, length, stride, scale, k0, k1, query, head, sequence,
    threshold, DROPOUT: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr, RELOAD: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, for the tile of keys from `first` on."""
    if RELOAD:
        q = load_rows(queries, query, length, stride, D, WIDTH, True)
    key = first + tl.arange(0, N)
    s = _scores(q, load_rows(keys, key, length, stride, D, WIDTH, CHECK), key, length, scale, CHECK, PRECISION)
    return softmax_step(
        acc, largest, total, s, values, key, query, first, length, stride, k0, k1, head, sequence, threshold,
        DROPOUT, CHECK, PRECISION, D, WIDTH, M, N,
    )  # fmt: skip


# ---- forward


@triton.jit(do_not_specialize=VARYING)
def _forward(
    qkv, cu_seqlens, rng, out, lse, tokens, batch, longest, tiles, fill, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, RELOAD: tl.constexpr, FILL: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    behind = program - (tl.num_programs(0) - fill)
    if behind >= 0:
        clear_uncovered(out, lse, cu_seqlens, behind, batch, tokens, longest, heads, 1, D, WIDTH, FILL)
        return
    tile, head, sequence = longest_first(program, tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    k0, k1 = key_words(rng, site, DROPOUT)
    query, stride = tile * M + tl.arange(0, M), 3 * heads * D
    queries = qkv + start * stride + head * D
    keys, values = queries + heads * D, queries + 2 * heads * D
    q = load_rows(queries, query, length, stride, D, WIDTH, True)
    acc = tl.zeros((M, WIDTH), tl.float32)
    largest = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    whole = length // N * N
    for first in range(0, whole, N):
        acc, largest, total = _attend(
            acc, largest, total, q, queries, keys, values, first, length, stride, scale, k0, k1, query, head, sequence,
            threshold, DROPOUT, False, PRECISION, RELOAD, D, WIDTH, M, N,
        )  # fmt: skip
    if whole < length:
        acc, largest, total = _attend(
            acc, largest, total, q, queries, keys, values, whole, length, stride, scale, k0, k1, query, head, sequence,
            threshold, DROPOUT, True, PRECISION, RELOAD, D, WIDTH, M, N,
        )  # fmt: skip
    acc = acc * (keep_scale / total)[:, None]
    store_rows(out + (start * heads + head) * D, acc, query, length, heads * D, D, WIDTH)
    tl.store(lse + head.to(tl.int64) * tokens + start + query, (largest + tl.log2(total)) / LOG2E, query < length)


def forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, dropout_p: float, rng: Tensor | None, site: int
) -> tuple[Tensor, Tensor]:
    call = Call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    if call.short:
        return attention_short.forward(call, rng)
    return call.forward(_forward, FORWARD, rng, "forward")


# ---- backward: with P = exp(S - lse), F the dropout factors and delta = rowsum(dO O): dV = (P F)^T dO, dP = dO V^T F,
# dS = P (dP - delta), dQ = dS K scale, dK = dS^T Q scale


@triton.jit(do_not_specialize=VARYING)
def _prepare(
    qkv, cu_seqlens, out, lse, dout, dqkv, delta, shift, inverse, tokens, batch, longest, tiles, fill, heads, scale,
    PRECISION: tl.constexpr, FILL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """delta, shift and inverse of every row, with P = exp2(scores - shift) * inverse.

    Usually shift is lse (to base 2) and inverse is 1. For a tile with an |lse| > LARGE, the rows' largest scores and
    1 / sum are computed again and used instead.
    """
    program = tl.program_id(0)
    behind = program - (tl.num_programs(0) - fill)
    if behind >= 0:
        clear_uncovered(dqkv, None, cu_seqlens, behind, batch, tokens, longest, heads, 3, D, WIDTH, FILL)
        return
    tile, head, sequence = longest_first(program, tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    query = tile * M + tl.arange(0, M)
    inside, row = query < length, head.to(tl.int64) * tokens + start + query
    o = load_rows(out + (start * heads + head) * D, query, length, heads * D, D, WIDTH, True)
    do = load_rows(dout + (start * heads + head) * D, query, length, heads * D, D, WIDTH, True)
    tl.store(delta + row, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), inside)
    saved = tl.load(lse + row, inside, other=0.0)
    largest, total = saved * LOG2E, tl.full((M,), 1.0, tl.float32)
    if tl.max(tl.abs(saved), 0) > LARGE:
        stride = 3 * heads * D
        queries = qkv + start * stride + head * D
        q = load_rows(queries, query, length, stride, D, WIDTH, True)
        largest, total = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
        for first in range(0, length, N):
            key = first + tl.arange(0, N)
            k = load_rows(queries + heads * D, key, length, stride, D, WIDTH, True)
            s = _scores(q, k, key, length, scale, True, PRECISION)
            maximum = tl.maximum(largest, tl.max(s, 1))
            total = total * tl.exp2(largest - maximum) + tl.sum(tl.exp2(s - maximum[:, None]), 1)
            largest = maximum
    tl.store(shift + row, largest, inside)
    tl.store(inverse + row, 1.0 / total, inside)


@triton.jit
def _weights(
    q, k, v, do, rows, delta, shift, inverse, query, key, first_key, length, scale, k0, k1, head, sequence,
    threshold, keep_scale,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """P F and dS of a tile, queries by keys, in the inputs' dtype."""
    s = _scores(q, k, key, length, scale, True, PRECISION)
    return score_gradients(
        s, v, do, rows, delta, shift, inverse, query, first_key, length, k0, k1, head, sequence, threshold, keep_scale,
        DROPOUT, PRECISION, M, N,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _backward(
    qkv, cu_seqlens, rng, dout, delta, shift, inverse, dqkv, sums, tokens, batch, longest, tiles, heads,
    scale, threshold, keep_scale, site,
    NEED_DQ: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; with NEED_DQ, those of all tiles of a sequence, one after the other, and dQ."""
    tile, head, sequence = longest_first(tl.program_id(0), tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    if tile * N >= length:
        return
    k0, k1 = key_words(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows = head.to(tl.int64) * tokens + start
    douts, dqueries = dout + (start * heads + head) * D, sums + (start * heads + head) * D
    last = length if NEED_DQ else tl.minimum(tile * N + N, length)
    for first in range(tile * N, last, N):
        key = first + tl.arange(0, N)
        k = load_rows(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
        v = load_rows(qkv + place + 2 * heads * D, key, length, stride, D, WIDTH, True)
        dk, dv = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
        # Loop-invariant code motion would keep the operands made from k and v in registers, which would spill.
        for top in tl.range(0, length, M, disable_licm=True):
            query = top + tl.arange(0, M)
            q = load_rows(qkv + place, query, length, stride, D, WIDTH, True)
            do = load_rows(douts, query, length, heads * D, D, WIDTH, True)
            dropped, ds = _weights(
                q, k, v, do, rows + query, delta, shift, inverse, query, key, first, length, scale, k0, k1, head,
                sequence, threshold, keep_scale, DROPOUT, PRECISION, M, N,
            )  # fmt: skip
            dv = tl.dot(tl.trans(dropped), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
            if NEED_DQ:
                dq = tl.dot(ds, k, input_precision=PRECISION)
                if first > 0:
                    dq += load_rows(dqueries, query, length, heads * D, D, WIDTH, True)
                if first + N < length:
                    store_rows(dqueries, dq, query, length, heads * D, D, WIDTH)
                else:
                    store_rows(dqkv + place, dq * scale, query, length, stride, D, WIDTH)
        store_rows(dqkv + place + heads * D, dk * scale, key, length, stride, D, WIDTH)
        store_rows(dqkv + place + 2 * heads * D, dv, key, length, stride, D, WIDTH)
        if NEED_DQ:
            tl.debug_barrier()  # for the next tile of keys, threads read sums of dQ that other threads wrote


@triton.jit(do_not_specialize=VARYING)
def _backward_queries(
    qkv, cu_seqlens, rng, dout, delta, shift, inverse, dqkv, tokens, batch, longest, tiles, heads,
    scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries."""
    tile, head, sequence = longest_first(tl.program_id(0), tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    k0, k1 = key_words(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows, query = head.to(tl.int64) * tokens + start, tile * M + tl.arange(0, M)
    q = load_rows(qkv + place, query, length, stride, D, WIDTH, True)
    douts = dout + (start * heads + head) * D
    do = load_rows(douts, query, length, heads * D, D, WIDTH, True)
    dq = tl.zeros((M, WIDTH), tl.float32)
    for first in tl.range(0, length, N, disable_licm=True):
        key = first + tl.arange(0, N)
        k = load_rows(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
        v = load_rows(qkv + place + 2 * heads * D, key, length, stride, D, WIDTH, True)
        _, ds = _weights(
            q, k, v, do, rows + query, delta, shift, inverse, query, key, first, length, scale, k0, k1, head, sequence,
            threshold, keep_scale, DROPOUT, PRECISION, M, N,
        )  # fmt: skip
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    store_rows(dqkv + place, dq * scale, query, length, stride, D, WIDTH)


def backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, dropout_p: float, rng: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    call = Call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    if call.short:
        return attention_short.backward(call, rng, dout)
    dqkv, dout = call.qkv.new_empty(call.qkv.shape), dout.contiguous()
    if call.tokens == 0:
        return dqkv
    if architecture(qkv.device) < 90:  # there the TF32 products of the backward with dropout would spill
        call.constants["PRECISION"] = "ieee"
    statistics = call.statistics(_prepare, PREPARE, dout, out, lse, dqkv)
    config, sequence_heads = call.pick(KEYS, "keys"), call.heads * call.batch
    N = config.tiles["N"]
    enough = call.longest <= N or sequence_heads >= multiprocessors(qkv.device)
    one_pass = enough and call.longest <= call.pick(ONE_PASS, "one_pass")
    inputs = call.qkv, call.cu_seqlens, rng, dout, *statistics, dqkv
    sums = out.new_empty(out.shape if one_pass and call.longest > N else (0,), dtype=torch.float32)
    tiles = 1 if one_pass else call.tiles(N)
    launch(
        _backward, (tiles * sequence_heads,), *inputs, sums, *call.sizes, tiles, call.heads, *call.scalars,
        config=config, NEED_DQ=one_pass, DROPOUT=call.drops, **call.constants,
    )  # fmt: skip
    if not one_pass:
        config = call.pick(QUERIES, "queries")
        tiles = call.tiles(config.tiles["M"])
        launch(
            _backward_queries, (tiles * sequence_heads,), *inputs, *call.sizes, tiles, call.heads, *call.scalars,
            config=config, DROPOUT=call.drops, **call.constants,
        )  # fmt: skip
    return dqkv
