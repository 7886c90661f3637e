"""relative_attention in Triton: attention whose scores also depend on the distance i - j of query i and key j.

Programs, loops, dropout and uncovered tokens are as in attention.py. New is how positions enter a tile of scores. Its
M queries and N keys have M + N - 1 distances, and those of one row, or of one column, are all different modulo N. So
the queries are multiplied with the table's rows of 2 N distances: `upper`, the N from the tile's own distance (of its
first query and first key) on, and `lower`, the N below it. For each residue modulo N, a row of the tile needs one of
the two, which makes one tile [M, N], query by distance. Rotating row m of it by m puts it in the order of the keys.
The keys are multiplied with their table likewise, by columns. The backward makes the same rotations in reverse, so that
dS by distance is one product away from dQ, dK and the tables' gradients. All this stays within the program: no tensor
of tokens by distances, or by slots, is in memory, and the rows of the tables that a tile reads are in a cache.

A separate kernel computes the tables' gradients, without atomics. A program takes one diagonal of tiles, which all have
the same 2 N distances, of one head in a group of sequences. It keeps the sums for these distances in registers and
writes them once; other kernels add up the groups, and then the distances of each slot, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import sums
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
    work_of,
)
from fastbert.triton.common import Config, architecture, launch

SLOTS = 16  # per program that sums the distances of each slot


def _tiles(M: int, N: int, num_warps: int, num_stages: int = 1) -> Config:
    """N: a power of two, a multiple of M, and either a divisor or a multiple of 64."""
    return Config({"M": M, "N": N}, num_warps, num_stages)


# Arguments: padded head size, bits per element, few: as in attention.py. Chosen by compiling; docs/attention.md says
# what spills with which version of Triton.
def _small(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 16 if bits == 32 else 32, 8)


def _tables_80(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 16 if bits == 32 or width <= 32 else 32, 8)


def _forward_90(width: int, bits: int, few: bool) -> Config:
    return _tiles(32, 32, 4) if bits == 16 and width <= 64 else _small(width, bits, few)


def _square(width: int, bits: int, few: bool) -> Config:
    return _tiles(16, 16, 8)


def _prepare_90(width: int, bits: int, few: bool) -> Config:
    return _square(width, bits, few) if bits == 32 else _tiles(64, 64, 8)


FORWARD = {80: _small, 90: _forward_90}
PREPARE = {80: _square, 90: _prepare_90}
KEYS = {80: _small}  # dK and dV
QUERIES = {80: _square}  # dQ
TABLES = {80: _tables_80}
BY_SLOT = {80: lambda width, bits, few: Config({"SLOTS": SLOTS}, num_warps=4)}

_VARYING = [*VARYING, "farthest", "width", "before", "each"]


# ---- distances


@triton.jit
def _slots_of(slots, distance, farthest, width):
    """The slots of distances, clamped to 0 to width - 1 whatever `slots` holds."""
    place = tl.minimum(tl.maximum(distance, -farthest), farthest) + farthest
    return tl.minimum(tl.maximum(tl.load(slots + place), 0), width - 1)


@triton.jit
def _slots_of_tile(slots, apart, farthest, width, N: tl.constexpr):
    """(upper, lower): the slots of the N distances from `apart` on, and of the N below it."""
    distance = apart + tl.arange(0, N)
    return _slots_of(slots, distance, farthest, width), _slots_of(slots, distance - N, farthest, width)


@triton.jit
def _rows_of(table, slot, head, heads, D: tl.constexpr, WIDTH: tl.constexpr):
    """[slots, WIDTH] of one head of a table (W, H, D)."""
    return load_rows(table + head * D, slot, 0, heads * D, D, WIDTH, False)


@triton.jit
def _distances_to_keys(upper, lower, M: tl.constexpr, N: tl.constexpr):
    """[M, N] by query and key, from upper and lower, [M, N] each by query and distance."""
    query, key = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return tl.gather(tl.where(key <= query, upper, lower), (query - key) & (N - 1), 1)


@triton.jit
def _distances_to_queries(upper, lower, M: tl.constexpr, N: tl.constexpr):
    """[M, N] by query and key, from upper and lower, [N, N] each by distance and key."""
    query, key, distance = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, N)[:, None]
    return tl.gather(tl.where(distance + key < N, upper, lower), (query - key) & (N - 1), 0)


@triton.jit
def _keys_to_distances(ds, M: tl.constexpr, N: tl.constexpr):
    """(upper, lower): ds as [M, N] each by query and distance, zeros at distances that a query does not have."""
    query, distance = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    turned = tl.gather(ds, (query - distance) & (N - 1), 1)
    zero = tl.zeros_like(turned)
    return tl.where(distance <= query, turned, zero), tl.where(distance <= query, zero, turned)


@triton.jit
def _queries_to_distances(ds, M: tl.constexpr, N: tl.constexpr):
    """(upper, lower): ds as [N, N] each by distance and key, zeros at distances that a key does not have."""
    distance, key = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    query = (distance + key) & (N - 1)
    turned = tl.gather(ds, query & (M - 1), 0)
    zero = tl.zeros_like(turned)
    is_upper = distance + key < N
    return tl.where(is_upper & (query < M), turned, zero), tl.where(is_upper | (query >= M), zero, turned)


# ---- scores


@triton.jit
def _scores(
    q, k, query, key, apart, length, slots, keys, queries, bias, farthest, width, head, heads, scale,
    PRECISION: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """log2(e) times the scores of queries [M] by keys [N] in float32; -inf at keys beyond the sequence's end.

    apart: the distance between the tile's first query and first key.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    upper_slot, lower_slot = _slots_of_tile(slots, apart, farthest, width, N)
    if keys is not None:
        upper = tl.dot(q, tl.trans(_rows_of(keys, upper_slot, head, heads, D, WIDTH)), input_precision=PRECISION)
        lower = tl.dot(q, tl.trans(_rows_of(keys, lower_slot, head, heads, D, WIDTH)), input_precision=PRECISION)
        s += _distances_to_keys(upper, lower, M, N)
    if queries is not None:
        upper = tl.dot(_rows_of(queries, upper_slot, head, heads, D, WIDTH), tl.trans(k), input_precision=PRECISION)
        lower = tl.dot(_rows_of(queries, lower_slot, head, heads, D, WIDTH), tl.trans(k), input_precision=PRECISION)
        s += _distances_to_queries(upper, lower, M, N)
    s *= scale * LOG2E
    if bias is not None:
        slot = _slots_of(slots, query[:, None] - key[None, :], farthest, width)
        s += tl.load(bias + head * width + slot) * LOG2E
    return tl.where((key < length)[None, :], s, float("-inf"))


# ---- forward


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    qkv, slots, keys, queries, bias, cu_seqlens, rng, out, lse, tokens, batch, longest, farthest, width, tiles, fill,
    heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, FILL: tl.constexpr,
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
    place = qkv + start * stride + head * D
    q = load_rows(place, query, length, stride, D, WIDTH, True)
    acc = tl.zeros((M, WIDTH), tl.float32)
    largest, total = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
    for first in range(0, length, N):
        key = first + tl.arange(0, N)
        k = load_rows(place + heads * D, key, length, stride, D, WIDTH, True)
        s = _scores(
            q, k, query, key, tile * M - first, length, slots, keys, queries, bias, farthest, width, head, heads,
            scale, PRECISION, D, WIDTH, M, N,
        )  # fmt: skip
        acc, largest, total = softmax_step(
            acc, largest, total, s, place + 2 * heads * D, key, query, first, length, stride, k0, k1, head, sequence,
            threshold, DROPOUT, True, PRECISION, D, WIDTH, M, N,
        )  # fmt: skip
    acc = acc * (keep_scale / total)[:, None]
    store_rows(out + (start * heads + head) * D, acc, query, length, heads * D, D, WIDTH)
    tl.store(lse + head.to(tl.int64) * tokens + start + query, (largest + tl.log2(total)) / LOG2E, query < length)


def forward(
    qkv: Tensor, slots: Tensor, keys: Tensor | None, queries: Tensor | None, bias: Tensor | None, cu_seqlens: Tensor,
    max_seqlen: int, scale: float, dropout_p: float, rng: Tensor | None, site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _Call(qkv, (slots, keys, queries, bias), cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    return call.forward(_forward, FORWARD, rng)


# ---- backward: P, F, delta and dS are as in attention.py; with dA[i, d] = dS[i, i - d] and dB[d, j] = dS[j + d, j],
# dQ = (dS K + dA Pk) scale, dK = (dS^T Q + dB^T Pq) scale, and by distance dPk = dA^T Q scale, dPq = dB K scale,
# dt = the sums of dA's columns


@triton.jit(do_not_specialize=_VARYING)
def _prepare(
    qkv, slots, keys, queries, bias, cu_seqlens, out, lse, dout, dqkv, delta, shift, inverse,
    tokens, batch, longest, farthest, width, tiles, fill, heads, scale,
    PRECISION: tl.constexpr, FILL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """delta, shift and inverse of every row, with P = exp2(scores - shift) * inverse, as in attention.py."""
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
        place = qkv + start * stride + head * D
        q = load_rows(place, query, length, stride, D, WIDTH, True)
        largest, total = tl.full((M,), LOWEST, tl.float32), tl.zeros((M,), tl.float32)
        for first in range(0, length, N):
            key = first + tl.arange(0, N)
            k = load_rows(place + heads * D, key, length, stride, D, WIDTH, True)
            s = _scores(
                q, k, query, key, tile * M - first, length, slots, keys, queries, bias, farthest, width, head, heads,
                scale, PRECISION, D, WIDTH, M, N,
            )  # fmt: skip
            maximum = tl.maximum(largest, tl.max(s, 1))
            total = total * tl.exp2(largest - maximum) + tl.sum(tl.exp2(s - maximum[:, None]), 1)
            largest = maximum
    tl.store(shift + row, largest, inside)
    tl.store(inverse + row, 1.0 / total, inside)


@triton.jit
def _weights(
    q, k, values, douts, rows, delta, shift, inverse, query, key, top, first, length, stride, slots, keys, queries,
    bias, farthest, width, scale, k0, k1, head, heads, sequence, threshold, keep_scale,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """P F, dS and dO of the queries from `top` on by the keys from `first` on, in the inputs' dtype."""
    s = _scores(
        q, k, query, key, top - first, length, slots, keys, queries, bias, farthest, width, head, heads, scale,
        PRECISION, D, WIDTH, M, N,
    )  # fmt: skip
    s = tl.where((query < length)[:, None], s, float("-inf"))  # where q is 0, exp2 of the keys' part may overflow
    v = load_rows(values, key, length, stride, D, WIDTH, True)
    do = load_rows(douts, query, length, heads * D, D, WIDTH, True)
    dropped, ds = score_gradients(
        s, v, do, rows + query, delta, shift, inverse, query, first, length, k0, k1, head, sequence, threshold,
        keep_scale, DROPOUT, PRECISION, M, N,
    )  # fmt: skip
    return dropped, ds, do


@triton.jit(do_not_specialize=_VARYING)
def _backward(
    qkv, slots, keys, queries, bias, cu_seqlens, rng, dout, delta, shift, inverse, dqkv,
    tokens, batch, longest, farthest, width, tiles, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys."""
    tile, head, sequence = longest_first(tl.program_id(0), tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    first = tile * N
    if first >= length:
        return
    k0, k1 = key_words(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows, key = head.to(tl.int64) * tokens + start, first + tl.arange(0, N)
    k = load_rows(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
    dk, dv = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    for top in tl.range(0, length, M, disable_licm=True):
        query = top + tl.arange(0, M)
        q = load_rows(qkv + place, query, length, stride, D, WIDTH, True)
        dropped, ds, do = _weights(
            q, k, qkv + place + 2 * heads * D, dout + (start * heads + head) * D, rows, delta, shift, inverse,
            query, key, top, first, length, stride, slots, keys, queries, bias, farthest, width, scale, k0, k1,
            head, heads, sequence, threshold, keep_scale, DROPOUT, PRECISION, D, WIDTH, M, N,
        )  # fmt: skip
        dv = tl.dot(tl.trans(dropped), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        if queries is not None:
            upper, lower = _queries_to_distances(ds, M, N)
            upper_slot, lower_slot = _slots_of_tile(slots, top - first, farthest, width, N)
            table = _rows_of(queries, upper_slot, head, heads, D, WIDTH)
            dk = tl.dot(tl.trans(upper), table, dk, input_precision=PRECISION)
            table = _rows_of(queries, lower_slot, head, heads, D, WIDTH)
            dk = tl.dot(tl.trans(lower), table, dk, input_precision=PRECISION)
    store_rows(dqkv + place + heads * D, dk * scale, key, length, stride, D, WIDTH)
    store_rows(dqkv + place + 2 * heads * D, dv, key, length, stride, D, WIDTH)


@triton.jit(do_not_specialize=_VARYING)
def _backward_queries(
    qkv, slots, keys, queries, bias, cu_seqlens, rng, dout, delta, shift, inverse, dqkv,
    tokens, batch, longest, farthest, width, tiles, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries."""
    tile, head, sequence = longest_first(tl.program_id(0), tiles, heads, cu_seqlens, batch, tokens, longest)
    start, length = bounds(cu_seqlens, sequence, tokens, longest)
    top = tile * M
    if top >= length:
        return
    k0, k1 = key_words(rng, site, DROPOUT)
    stride = 3 * heads * D
    place = start * stride + head * D
    rows, query = head.to(tl.int64) * tokens + start, top + tl.arange(0, M)
    q = load_rows(qkv + place, query, length, stride, D, WIDTH, True)
    dq = tl.zeros((M, WIDTH), tl.float32)
    for first in tl.range(0, length, N, disable_licm=True):
        key = first + tl.arange(0, N)
        k = load_rows(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
        _, ds, _ = _weights(
            q, k, qkv + place + 2 * heads * D, dout + (start * heads + head) * D, rows, delta, shift, inverse,
            query, key, top, first, length, stride, slots, keys, queries, bias, farthest, width, scale, k0, k1,
            head, heads, sequence, threshold, keep_scale, DROPOUT, PRECISION, D, WIDTH, M, N,
        )  # fmt: skip
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if keys is not None:
            upper, lower = _keys_to_distances(ds, M, N)
            upper_slot, lower_slot = _slots_of_tile(slots, top - first, farthest, width, N)
            dq = tl.dot(upper, _rows_of(keys, upper_slot, head, heads, D, WIDTH), dq, input_precision=PRECISION)
            dq = tl.dot(lower, _rows_of(keys, lower_slot, head, heads, D, WIDTH), dq, input_precision=PRECISION)
    store_rows(dqkv + place, dq * scale, query, length, stride, D, WIDTH)


# ---- the tables' gradients


@triton.jit(do_not_specialize=_VARYING)
def _backward_tables(
    qkv, slots, keys, queries, bias, cu_seqlens, rng, dout, delta, shift, inverse, dkeys, dqueries, dbias,
    tokens, batch, longest, farthest, width, tiles, before, each, heads, scale, threshold, keep_scale, site,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sums by distance over one diagonal of tiles of one head, in a group of `each` sequences.

    before: the number of diagonals with a negative distance. dkeys and dqueries: (groups, diagonals, 2 N, H, D), dbias:
    (groups, diagonals, 2 N, H), for the distances from apart - N on; None if there is no such table.
    """
    diagonal, head, group = work_of(tl.program_id(0), tiles, heads)
    apart = (diagonal - before) * M
    k0, k1 = key_words(rng, site, DROPOUT)
    stride = 3 * heads * D
    keys_upper, keys_lower = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    queries_upper, queries_lower = tl.zeros((N, WIDTH), tl.float32), tl.zeros((N, WIDTH), tl.float32)
    bias_upper, bias_lower = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for turn in range(0, tl.minimum(each, batch - group * each)):
        sequence = group * each + turn
        start, length = bounds(cu_seqlens, sequence, tokens, longest)
        place = start * stride + head * D
        begin = (tl.maximum(-apart, 0) + N - 1) // N * N
        for first in tl.range(begin, tl.minimum(length, length - apart), N, disable_licm=True):
            top = first + apart
            query, key = top + tl.arange(0, M), first + tl.arange(0, N)
            q = load_rows(qkv + place, query, length, stride, D, WIDTH, True)
            k = load_rows(qkv + place + heads * D, key, length, stride, D, WIDTH, True)
            _, ds, _ = _weights(
                q, k, qkv + place + 2 * heads * D, dout + (start * heads + head) * D,
                head.to(tl.int64) * tokens + start, delta, shift, inverse,
                query, key, top, first, length, stride, slots, keys, queries, bias, farthest, width, scale, k0, k1,
                head, heads, sequence, threshold, keep_scale, DROPOUT, PRECISION, D, WIDTH, M, N,
            )  # fmt: skip
            if dkeys is not None or dbias is not None:
                upper, lower = _keys_to_distances(ds, M, N)
                if dkeys is not None:
                    keys_upper = tl.dot(tl.trans(upper), q, keys_upper, input_precision=PRECISION)
                    keys_lower = tl.dot(tl.trans(lower), q, keys_lower, input_precision=PRECISION)
                if dbias is not None:
                    bias_upper += tl.sum(upper.to(tl.float32), 0)
                    bias_lower += tl.sum(lower.to(tl.float32), 0)
            if dqueries is not None:
                upper, lower = _queries_to_distances(ds, M, N)
                queries_upper = tl.dot(upper, k, queries_upper, input_precision=PRECISION)
                queries_lower = tl.dot(lower, k, queries_lower, input_precision=PRECISION)
    row = (group * tiles + diagonal).to(tl.int64) * 2 * N  # that of `lower`'s first distance
    distance = tl.arange(0, N)
    if dkeys is not None:
        at = dkeys + (row * heads + head) * D
        store_rows(at, keys_lower, distance, N, heads * D, D, WIDTH)
        store_rows(at, keys_upper, distance + N, 2 * N, heads * D, D, WIDTH)
    if dqueries is not None:
        at = dqueries + (row * heads + head) * D
        store_rows(at, queries_lower, distance, N, heads * D, D, WIDTH)
        store_rows(at, queries_upper, distance + N, 2 * N, heads * D, D, WIDTH)
    if dbias is not None:
        at = dbias + (row + distance) * heads + head
        tl.store(at, bias_lower)
        tl.store(at + N * heads, bias_upper)


@triton.jit(do_not_specialize=_VARYING)
def _by_slot(
    by_distance, slots, table, rows, farthest, width, before, heads, scale, slot_stride, head_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Some slots of one head of a table's gradient, from by_distance, (rows, H, D) in the order of the diagonals."""
    slot, head = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.program_id(1)
    total = tl.zeros((SLOTS, WIDTH), tl.float32)
    for first in range(0, rows, N):
        distance = (first // (2 * N) - before) * M - N + first % (2 * N) + tl.arange(0, N)
        same = (slot[:, None] == _slots_of(slots, distance, farthest, width)[None, :]).to(tl.float32)
        if tl.max(tl.max(same, 1), 0) > 0:
            x = load_rows(by_distance + head * D, first + tl.arange(0, N), rows, heads * D, D, WIDTH, True)
            total = tl.dot(same, x, total, input_precision="ieee")
    column = tl.arange(0, WIDTH)
    at = slot[:, None].to(tl.int64) * slot_stride + head * head_stride + column[None, :]
    tl.store(table + at, total * scale, (slot < width)[:, None] & (column < D)[None, :])


def backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, slots: Tensor, keys: Tensor | None, queries: Tensor | None,
    bias: Tensor | None, cu_seqlens: Tensor, max_seqlen: int, scale: float, dropout_p: float, rng: Tensor | None,
    site: int, table_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _Call(qkv, (slots, keys, queries, bias), cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    if architecture(qkv.device) < 90:  # there the TF32 products would spill, as in attention.py
        call.constants["PRECISION"] = "ieee"
    dqkv, dout = call.qkv.new_empty(call.qkv.shape), dout.contiguous()
    if call.tokens:
        statistics = call.statistics(_prepare, PREPARE, dout, out, lse, dqkv)
        inputs = call.qkv, *call.tables, call.cu_seqlens, rng, dout, *statistics
        for kernel, table, side in ((_backward, KEYS, "N"), (_backward_queries, QUERIES, "M")):
            config = call.pick(table)
            tiles = call.tiles(config.tiles[side])
            launch(
                kernel, (tiles * call.heads * call.batch,), *inputs, dqkv, *call.sizes, tiles, call.heads,
                *call.scalars, config=config, DROPOUT=call.drops, **call.constants,
            )  # fmt: skip
    if not table_gradients:
        return dqkv, *[(qkv if table is None else table).new_empty(0) for table in call.tables[1:]]
    if not call.tokens:
        return dqkv, *[qkv.new_empty(0) if table is None else torch.zeros_like(table) for table in call.tables[1:]]
    return dqkv, *_table_gradients(call, inputs)


def _table_gradients(call: "_Call", inputs: tuple) -> list[Tensor]:
    config = call.pick(TABLES)
    M, N = config.tiles["M"], config.tiles["N"]
    before = (call.tiles(N) - 1) * (N // M)
    diagonals = before + call.tiles(M)
    programs = triton.cdiv(sums.programs(call.qkv.device, 4), max(1, diagonals * call.heads))
    each, groups = sums.share(call.batch, 1, programs)
    partials = [
        None if table is None else table.new_empty((groups, diagonals * 2 * N, call.heads, size), dtype=torch.float32)
        for table, size in zip(call.tables[1:], (call.D, call.D, 1), strict=True)
    ]
    launch(
        _backward_tables, (diagonals * call.heads * groups,), *inputs, *partials, *call.sizes, diagonals, before, each,
        call.heads, *call.scalars, config=config, DROPOUT=call.drops, **call.constants,
    )  # fmt: skip
    return [call.by_slot(*pair, before, M, N) for pair in zip(partials, call.tables[1:], strict=True)]


class _Call(Call):
    """The call of attention.py with tables: slots, keys, queries and bias."""

    def __init__(self, qkv, tables, *rest):
        super().__init__(qkv, *rest)
        self.tables = [None if table is None else table.contiguous() for table in tables]
        slots, keys, queries, bias = self.tables
        self.slots = bias.shape[1] if keys is None and queries is None else (queries if keys is None else keys).shape[0]
        self.sizes = *self.sizes, slots.shape[0] // 2, self.slots

    def by_slot(self, partials: Tensor | None, table: Tensor | None, before: int, M: int, N: int) -> Tensor:
        """The gradient of a table, (W, H, D) or (H, W), from partials, (groups, rows, H, D or 1)."""
        if table is None:
            return self.qkv.new_empty(0)
        _, rows, heads, size = partials.shape
        by_distance = partials.sum(0)
        scale, strides = (1.0, (1, self.slots)) if table.dim() == 2 else (self.scalars[0], (heads * size, size))
        grad, config = torch.empty_like(table), self.pick(BY_SLOT)
        launch(
            _by_slot, (triton.cdiv(self.slots, config.tiles["SLOTS"]), heads), by_distance, self.tables[0], grad, rows,
            *self.sizes[-2:], before, heads, scale, *strides,
            config=config, M=M, N=N, D=size, WIDTH=max(16, triton.next_power_of_2(size)),
        )  # fmt: skip
        return grad
