"""attention in Triton: softmax(Q K^T) V within each sequence of a packed batch, on the projection's output in place.

A program owns a tile of queries of one head of one sequence and loops over the sequence's keys with an online softmax
(Dao, "FlashAttention-2", 2023). Programs of tiles behind a sequence's end return at once, so nothing is computed for
padding, and one long sequence is spread over the chip like many short ones. The first programs of the grid write zeros
for tokens that no sequence covers: every row of the output is written whatever cu_seqlens holds.

The backward needs qkv, the output and one number a row. There are no atomics. Where sequences are short (ONE_PASS) and
a program for each head and sequence fills the chip, one kernel computes all three gradients, with 5 products for each
pair of tiles, and adds up dQ in float32. Elsewhere one kernel computes dK and dV and another dQ, with 7 products.

The dropout mask is one byte a score, 16 keys a Philox call, in the order of the mma accumulator. In that layout the
permutations below cost nothing, which is why scores are always queries by keys, never transposed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import (
    Config,
    architecture,
    dropout,
    launch,
    multiprocessors,
    philox,
    pick,
    precision,
    site_key,
)

FILL = 128  # tokens searched by a program that looks for uncovered ones
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # below all scores but -inf, of which exp2(s - LOWEST) is 0 and no NaN
LARGE = tl.constexpr(32.0)  # lse beyond this is rounded so much that weights computed from it are wrong


def _tiles(M: int, N: int, num_warps: int, num_stages: int = 1, **more: bool) -> Config:
    return Config({"M": M, "N": N, **more}, num_warps, num_stages)


# Arguments: padded head size, bits of an element, few: whether tiles of 128 queries are too few to fill the chip.
# Chosen by compiling (docs/triton_report.md), so that nothing spills. RELOAD: queries are read again for every tile of
# keys, because float32, and mma.sync at D = 128, leave too few registers to hold them.
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
    return _keys_80(width, bits, few) if bits == 32 else _tiles(128, 64, 8)


def _keys_100(width: int, bits: int, few: bool) -> Config:
    return _keys_80(width, bits, few) if bits == 32 else _tiles(64, 64, 4 if width == 16 else 8)


def _queries_80(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 64, 8) if bits == 32 else _tiles(64, 64, 8, 2)


FORWARD = {80: _forward_80, 90: _forward_90, 100: _forward_100}
PREPARE = {80: _prepare_80}
KEYS = {80: _keys_80, 90: _keys_90, 100: _keys_100}  # dK and dV, and in one pass dQ
QUERIES = {80: _queries_80}  # dQ
ONE_PASS = {80: lambda width, bits, few: 0, 90: lambda width, bits, few: 512 if width <= 64 and bits == 16 else 0}

# They vary from call to call: Triton must not compile a kernel for each divisibility of theirs.
_VARYING = ["tokens", "batch", "longest", "tiles", "fill", "threshold", "site"]


# ---- loading and storing


@triton.jit
def _bounds(cu_seqlens, sequence, tokens, longest):
    """(first token, length) of a sequence, within the tokens and no longer than `longest` whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), tokens)
    return start.to(tl.int64), tl.minimum(end - start, longest)


@triton.jit
def _uncovered(cu_seqlens, token, batch, tokens, longest):
    """Which tokens no sequence covers.

    In a cu_seqlens that is not sorted the search may find the wrong sequence; the comparison after it is always right.
    """
    low = tl.zeros_like(token)
    high = low + batch
    step = batch
    while step > 0:
        middle = (low + high) // 2
        below = (tl.load(cu_seqlens + middle) <= token) & (middle < high)
        low, high = tl.where(below, tl.minimum(middle + 1, batch), low), tl.where(below, high, middle)
        step = step // 2
    sequence = tl.maximum(low - 1, 0)
    start = tl.maximum(tl.load(cu_seqlens + sequence), 0)  # as in _bounds
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, batch))
    covered = (start <= token) & (token < end) & (token - start < longest)
    return (token < tokens) & ~covered


@triton.jit
def _clear(x, token, rows, columns, COLUMNS: tl.constexpr):
    """Writes zeros to the rows of x (tokens, columns) that `rows` selects."""
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = token.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(x + at, tl.zeros_like(at).to(x.dtype.element_ty), rows[:, None] & (column < columns)[None, :])


@triton.jit
def _load(x, row, length, stride, D: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """[rows, WIDTH] of a head of a sequence that begins at x; zeros behind its end and beyond D."""
    column = tl.arange(0, WIDTH)
    at = x + row[:, None].to(tl.int64) * stride + column[None, :]
    if CHECK:
        return tl.load(at, (row < length)[:, None] & (column < D)[None, :], other=0.0)
    if D < WIDTH:
        return tl.load(at, (column < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _store(x, value, row, length, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(
        x + row[:, None].to(tl.int64) * stride + column[None, :], value, (row < length)[:, None] & (column < D)[None, :]
    )


# ---- scores


@triton.jit
def _keep(k0, k1, query, first_key, head, sequence, threshold, M: tl.constexpr, N: tl.constexpr):
    """[M, N] bool: the weights that dropout keeps, of queries [M] and keys from first_key on; N is a multiple of 64."""
    BLOCKS: tl.constexpr = N // 64
    zero = tl.zeros((M, 4 * BLOCKS), tl.uint32)
    group = (first_key // 64 * 4 + tl.arange(0, 4 * BLOCKS)).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        k0, k1, zero + group[None, :], zero + query.to(tl.uint32)[:, None], zero + head.to(tl.uint32),
        zero + sequence.to(tl.uint32),
    )  # fmt: skip
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, 4 BLOCKS, x, y], word 2x + y
    words = tl.reshape(words, (M, BLOCKS, 4, 2, 2)).trans(0, 1, 3, 4, 2)  # [M, BLOCKS, x, y, c]
    shift = tl.reshape((tl.arange(0, 4) * 8).to(tl.uint32), (1, 1, 1, 1, 4))
    byte = (tl.reshape(words, (M, BLOCKS, 4, 4, 1)) >> shift) & 0xFF  # [M, BLOCKS, word, c, byte of the word]
    byte = tl.reshape(byte, (M, BLOCKS, 4, 4, 2, 2)).trans(0, 1, 2, 4, 3, 5)  # key = 16 word + 8 high + 2 c + low
    return tl.reshape(byte, (M, N)) >= threshold


@triton.jit
def _scores(q, k, key, length, scale, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """log2(e) scale Q K^T in float32, -inf at keys behind the sequence's end."""
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
    """One step of the online softmax: the keys from `first` on."""
    if RELOAD:
        q = _load(queries, query, length, stride, D, WIDTH, True)
    key = first + tl.arange(0, N)
    s = _scores(q, _load(keys, key, length, stride, D, WIDTH, CHECK), key, length, scale, CHECK, PRECISION)
    maximum = tl.maximum(largest, tl.max(s, 1))
    p = tl.exp2(s - maximum[:, None])
    shrink = tl.exp2(largest - maximum)
    total = total * shrink + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(_keep(k0, k1, query, first, head, sequence, threshold, M, N), p, 0.0)
    v = _load(values, key, length, stride, D, WIDTH, CHECK)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, maximum, total


# ---- forward


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    qkv, cu_seqlens, rng, out, lse, tokens, batch, longest, tiles, fill, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, RELOAD: tl.constexpr, FILL: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < fill:
        token = program * FILL + tl.arange(0, FILL)
        uncovered = _uncovered(cu_seqlens, token, batch, tokens, longest)
        if tl.max(uncovered.to(tl.int32), 0) > 0:
            _clear(out, token, uncovered, heads * D, WIDTH)
            for head in range(0, heads):
                tl.store(lse + head * tokens.to(tl.int64) + token, tl.zeros((FILL,), tl.float32), uncovered)
        return
    tile, head, sequence = _work_of(program - fill, tiles, heads)
    start, length = _bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    k0, k1 = _key(rng, site, DROPOUT)
    query, stride = tile * M + tl.arange(0, M), 3 * heads * D
    queries = qkv + start * stride + head * D
    keys, values = queries + heads * D, queries + 2 * heads * D
    q = _load(queries, query, length, stride, D, WIDTH, True)
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
    _store(out + (start * heads + head) * D, acc, query, length, heads * D, D, WIDTH)
    tl.store(lse + head.to(tl.int64) * tokens + start + query, (largest + tl.log2(total)) / LOG2E, query < length)


@triton.jit
def _work_of(program, tiles, heads):
    """(tile, head, sequence). Tiles of one head are neighbours in the grid: they read the same keys, from the cache."""
    return program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def _key(rng, site, DROPOUT: tl.constexpr):
    if DROPOUT:
        k0, k1 = site_key(rng, site)
    else:
        k0, k1 = 0, 0
    return k0, k1


def forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, dropout_p: float, rng: Tensor | None, site: int
) -> tuple[Tensor, Tensor]:
    call = _Call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    out = qkv.new_empty((call.tokens, call.heads, call.D))
    lse = qkv.new_empty((call.heads, call.tokens), dtype=torch.float32)
    config = call.pick(FORWARD)
    fill, tiles = triton.cdiv(call.tokens, FILL), call.tiles(config.tiles["M"])
    programs = fill + tiles * call.heads * call.batch
    launch(
        _forward, (programs if call.tokens else 0,), call.qkv, call.cu_seqlens, rng, out, lse,
        *call.sizes, tiles, fill, call.heads, *call.scalars,
        config=config, FILL=FILL, DROPOUT=call.drops, **call.constants,
    )  # fmt: skip
    return out, lse


# ---- backward: with P = exp(S - lse), F the dropout factors and delta = rowsum(dO O): dV = (P F)^T dO, dP = dO V^T F,
# dS = P (dP - delta), dQ = dS K scale, dK = dS^T Q scale


@triton.jit(do_not_specialize=_VARYING)
def _prepare(
    qkv, cu_seqlens, out, lse, dout, dqkv, delta, shift, inverse, tokens, batch, longest, tiles, fill, heads, scale,
    PRECISION: tl.constexpr, FILL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """delta, shift and inverse of every row, with P = exp2(scores - shift) * inverse.

    Usually shift is lse and inverse 1. Where |lse| > LARGE they are the largest score and 1 / sum, computed again.
    """
    program = tl.program_id(0)
    if program < fill:
        token = program * FILL + tl.arange(0, FILL)
        uncovered = _uncovered(cu_seqlens, token, batch, tokens, longest)
        if tl.max(uncovered.to(tl.int32), 0) > 0:
            _clear(dqkv, token, uncovered, 3 * heads * D, WIDTH)
        return
    tile, head, sequence = _work_of(program - fill, tiles, heads)
    start, length = _bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    query = tile * M + tl.arange(0, M)
    inside, row = query < length, head.to(tl.int64) * tokens + start + query
    o = _load(out + (start * heads + head) * D, query, length, heads * D, D, WIDTH, True)
    do = _load(dout + (start * heads + head) * D, query, length, heads * D, D, WIDTH, True)
    tl.store(delta + row, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), inside)
    saved = tl.load(lse + row, inside, other=0.0)
    largest, total = saved * LOG2E, tl.full((M,), 1.0, tl.float32)
    if tl.max(tl.abs(saved), 0) > LARGE:
        stride = 3 * heads * D
        queries = qkv + start * stride + head * D
        q = _load(queries, query, length, stride, D, WIDTH, True)
        largest, total = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
        for first in range(0, length, N):
            key = first + tl.arange(0, N)
            k = _load(queries + heads * D, key, length, stride, D, WIDTH, True)
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
    """P F and dS of a tile of queries by keys, in the inputs' dtype."""
    inside = query < length
    s = _scores(q, k, key, length, scale, True, PRECISION)
    p = tl.exp2(s - tl.load(shift + rows, inside, other=0.0)[:, None])
    p = p * tl.load(inverse + rows, inside, other=0.0)[:, None]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dropped = p
    if DROPOUT:
        keep = _keep(k0, k1, query, first_key, head, sequence, threshold, M, N)
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - tl.load(delta + rows, inside, other=0.0)[:, None])
    return dropped.to(q.dtype), ds.to(q.dtype)


@triton.jit(do_not_specialize=_VARYING)
def _backward(
    qkv, cu_seqlens, rng, dout, delta, shift, inverse, dqkv, sums, tokens, batch, longest, tiles, heads,
    scale, threshold, keep_scale, site,
    NEED_DQ: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; with NEED_DQ of all tiles of a sequence, one after the other, and dQ."""
    tile, head, sequence = _work_of(tl.program_id(0), tiles, heads)
    start, length = _bounds(cu_seqlens, sequence, tokens, longest)
    if tile * N >= length:
        return
    k0, k1 = _key(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows = head.to(tl.int64) * tokens + start
    douts, dqueries = dout + (start * heads + head) * D, sums + (start * heads + head) * D
    last = length if NEED_DQ else tl.minimum(tile * N + N, length)
    for first in range(tile * N, last, N):
        key = first + tl.arange(0, N)
        k = _load(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
        v = _load(qkv + place + 2 * heads * D, key, length, stride, D, WIDTH, True)
        dk, dv = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
        # Loop-invariant code motion would keep the operands made of k and v in registers, and spill.
        for top in tl.range(0, length, M, disable_licm=True):
            query = top + tl.arange(0, M)
            q = _load(qkv + place, query, length, stride, D, WIDTH, True)
            do = _load(douts, query, length, heads * D, D, WIDTH, True)
            dropped, ds = _weights(
                q, k, v, do, rows + query, delta, shift, inverse, query, key, first, length, scale, k0, k1, head,
                sequence, threshold, keep_scale, DROPOUT, PRECISION, M, N,
            )  # fmt: skip
            dv = tl.dot(tl.trans(dropped), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
            if NEED_DQ:
                dq = tl.dot(ds, k, input_precision=PRECISION)
                if first > 0:
                    dq += _load(dqueries, query, length, heads * D, D, WIDTH, True)
                if first + N < length:
                    _store(dqueries, dq, query, length, heads * D, D, WIDTH)
                else:
                    _store(dqkv + place, dq * scale, query, length, stride, D, WIDTH)
        _store(dqkv + place + heads * D, dk * scale, key, length, stride, D, WIDTH)
        _store(dqkv + place + 2 * heads * D, dv, key, length, stride, D, WIDTH)
        if NEED_DQ:
            tl.debug_barrier()  # for the next tile of keys, threads read sums that other threads wrote


@triton.jit(do_not_specialize=_VARYING)
def _backward_queries(
    qkv, cu_seqlens, rng, dout, delta, shift, inverse, dqkv, tokens, batch, longest, tiles, heads,
    scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries."""
    tile, head, sequence = _work_of(tl.program_id(0), tiles, heads)
    start, length = _bounds(cu_seqlens, sequence, tokens, longest)
    if tile * M >= length:
        return
    k0, k1 = _key(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows, query = head.to(tl.int64) * tokens + start, tile * M + tl.arange(0, M)
    q = _load(qkv + place, query, length, stride, D, WIDTH, True)
    douts = dout + (start * heads + head) * D
    do = _load(douts, query, length, heads * D, D, WIDTH, True)
    dq = tl.zeros((M, WIDTH), tl.float32)
    for first in tl.range(0, length, N, disable_licm=True):
        key = first + tl.arange(0, N)
        k = _load(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
        v = _load(qkv + place + 2 * heads * D, key, length, stride, D, WIDTH, True)
        _, ds = _weights(
            q, k, v, do, rows + query, delta, shift, inverse, query, key, first, length, scale, k0, k1, head, sequence,
            threshold, keep_scale, DROPOUT, PRECISION, M, N,
        )  # fmt: skip
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    _store(dqkv + place, dq * scale, query, length, stride, D, WIDTH)


def backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, dropout_p: float, rng: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    call = _Call(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    dqkv, dout = call.qkv.new_empty(call.qkv.shape), dout.contiguous()
    if call.tokens == 0:
        return dqkv
    config = call.pick(PREPARE)
    delta, shift, inverse = (lse.new_empty(lse.shape) for _ in range(3))
    fill, tiles = triton.cdiv(call.tokens, FILL), call.tiles(config.tiles["M"])
    # On Ampere the TF32 products of the backward with dropout would spill.
    constants = call.constants | ({"PRECISION": "ieee"} if architecture(qkv.device) < 90 else {})
    launch(
        _prepare, (fill + tiles * call.heads * call.batch,), call.qkv, call.cu_seqlens, out.contiguous(),
        lse.contiguous(), dout, dqkv, delta, shift, inverse, *call.sizes, tiles, fill, call.heads, scale,
        config=config, FILL=FILL, **constants,
    )  # fmt: skip
    config, sequence_heads = call.pick(KEYS), call.heads * call.batch
    N = config.tiles["N"]
    enough = call.longest <= N or sequence_heads >= multiprocessors(qkv.device)
    one_pass = enough and call.longest <= call.pick(ONE_PASS)
    inputs = call.qkv, call.cu_seqlens, rng, dout, delta, shift, inverse, dqkv
    sums = out.new_empty(out.shape if one_pass and call.longest > N else (0,), dtype=torch.float32)
    tiles = 1 if one_pass else call.tiles(N)
    launch(
        _backward, (tiles * sequence_heads,), *inputs, sums, *call.sizes, tiles, call.heads, *call.scalars,
        config=config, NEED_DQ=one_pass, DROPOUT=call.drops, **constants,
    )  # fmt: skip
    if not one_pass:
        config = call.pick(QUERIES)
        tiles = call.tiles(config.tiles["M"])
        launch(
            _backward_queries, (tiles * sequence_heads,), *inputs, *call.sizes, tiles, call.heads, *call.scalars,
            config=config, DROPOUT=call.drops, **constants,
        )  # fmt: skip
    return dqkv


class _Call:
    """The arguments that forward and backward share, prepared for their kernels."""

    def __init__(self, qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site):
        self.qkv, self.cu_seqlens = qkv.contiguous(), cu_seqlens.contiguous()
        self.tokens, _, self.heads, self.D = qkv.shape
        self.batch, self.longest = cu_seqlens.shape[0] - 1, min(max_seqlen, self.tokens)
        self.sizes = self.tokens, self.batch, self.longest
        threshold, keep_scale = dropout(dropout_p, 8)
        self.scalars = scale, threshold, keep_scale, site
        self.width = max(16, triton.next_power_of_2(self.D))
        self.drops = threshold > 0
        self.constants = {"PRECISION": precision(qkv), "D": self.D, "WIDTH": self.width}

    def tiles(self, size: int) -> int:
        return max(1, triton.cdiv(self.longest, size))

    def pick(self, table):
        few = self.tiles(128) * self.heads * self.batch < multiprocessors(self.qkv.device)
        return pick(table, self.qkv.device, self.width, 8 * self.qkv.element_size(), few)
