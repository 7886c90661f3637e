"""Shared by the attention kernels: sequences of a packed batch, tiles of a head, dropout, and a step of softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.attention_tuned import TUNED
from fastbert.triton.common import architecture, dropout, launch, multiprocessors, philox, pick, precision, site_key

FILL = 128  # tokens per program that clears uncovered ones
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # no score but -inf is below it, and exp2(-inf - LOWEST) is 0, not NaN
LARGE = tl.constexpr(32.0)  # an lse above this is rounded so coarsely that weights computed from it are wrong
ORDERED = tl.constexpr(128)  # at most this many sequences are sorted by length; larger ones are balanced as they come
SHORT = 32  # attention_short.py takes batches whose longest sequence has at most this many tokens
ONE_TILE = tl.constexpr(64)  # sequences of up to this many tokens have one tile each: no need to sort them

# Arguments that vary from call to call: Triton must not compile another kernel for values of another divisibility.
VARYING = ["tokens", "batch", "longest", "tiles", "fill", "threshold", "site"]


# ---- sequences


@triton.jit
def bounds(cu_seqlens, sequence, tokens, longest):
    """(first token, length) of a sequence, clamped to the tokens and to `longest` whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), tokens)
    return start.to(tl.int64), tl.minimum(end - start, longest)


@triton.jit
def uncovered_tokens(cu_seqlens, token, batch, tokens, longest):
    """Which tokens no sequence covers.

    If cu_seqlens is not sorted, the binary search may find the wrong sequence, but a token counts as covered only if
    the sequence that was found contains it.
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
    start = tl.maximum(tl.load(cu_seqlens + sequence), 0)  # clamped as in bounds
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, batch))
    covered = (start <= token) & (token < end) & (token - start < longest)
    return (token < tokens) & ~covered


@triton.jit
def clear_rows(x, token, rows, columns, COLUMNS: tl.constexpr):
    """Writes zeros to the rows of x (tokens, columns) that `rows` selects."""
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = token.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(x + at, tl.zeros_like(at).to(x.dtype.element_ty), rows[:, None] & (column < columns)[None, :])


@triton.jit
def clear_uncovered(
    x, lse, cu_seqlens, program, batch, tokens, longest, heads,
    PARTS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Writes zeros for tokens that no sequence covers, to x (tokens, PARTS, heads, D) and to lse unless it is None."""
    token = program * FILL + tl.arange(0, FILL)
    uncovered = uncovered_tokens(cu_seqlens, token, batch, tokens, longest)
    if tl.max(uncovered.to(tl.int32), 0) > 0:
        clear_rows(x, token, uncovered, PARTS * heads * D, WIDTH)
        if lse is not None:
            for head in range(0, heads):
                tl.store(lse + head * tokens.to(tl.int64) + token, tl.zeros((FILL,), tl.float32), uncovered)


@triton.jit
def load_rows(x, row, length, stride, D: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """[rows, WIDTH] of a head of a sequence that begins at x; zeros beyond D and, with CHECK, beyond its end."""
    column = tl.arange(0, WIDTH)
    at = x + row[:, None].to(tl.int64) * stride + column[None, :]
    if CHECK:
        return tl.load(at, (row < length)[:, None] & (column < D)[None, :], other=0.0)
    if D < WIDTH:
        return tl.load(at, (column < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(x, value, row, length, stride, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(
        x + row[:, None].to(tl.int64) * stride + column[None, :], value, (row < length)[:, None] & (column < D)[None, :]
    )


@triton.jit
def work_of(program, tiles, heads):
    """(tile, head, sequence). Tiles of a head are neighbours in the grid, so that they find its keys in the cache."""
    return program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def sequence_of_rank(cu_seqlens, rank, batch, tokens, longest):
    """The sequence that comes after `rank` others: those that are longer, or as long and earlier in the batch."""
    sequence = tl.arange(0, ORDERED)
    _, length = bounds(cu_seqlens, tl.minimum(sequence, batch - 1), tokens, longest)
    length = tl.where(sequence < batch, length, -1)
    longer = length[:, None] > length[None, :]
    earlier = (length[:, None] == length[None, :]) & (sequence[:, None] < sequence[None, :])
    before = tl.sum((longer | earlier).to(tl.int32), 0)
    return tl.sum(tl.where(before == rank, sequence, 0), 0)


@triton.jit
def longest_first(program, tiles, heads, cu_seqlens, batch, tokens, longest):
    """(tile, head, sequence), the longest sequences first in the grid, so that short ones fill the gaps at its end."""
    tile, head, sequence = work_of(program, tiles, heads)
    if (batch <= ORDERED) & (longest > ONE_TILE):
        sequence = sequence_of_rank(cu_seqlens, sequence, batch, tokens, longest)
    return tile, head, sequence


# ---- scores


@triton.jit
def key_words(rng, site, DROPOUT: tl.constexpr):
    if DROPOUT:
        k0, k1 = site_key(rng, site)
    else:
        k0, k1 = 0, 0
    return k0, k1


@triton.jit
def keep_mask(k0, k1, query, first_key, head, sequence, threshold, M: tl.constexpr, N: tl.constexpr):
    """[M, N] bool: the weights that dropout keeps, for queries [M] and N keys from first_key on, a multiple of N.

    Random bytes come in blocks of 64 keys: for a smaller N, a part of the block's mask is taken.
    """
    if N >= 64:
        return keep_blocks(k0, k1, query, first_key, head, sequence, threshold, M, N)
    keep = keep_blocks(k0, k1, query, first_key // 64 * 64, head, sequence, threshold, M, 64)
    parts = tl.reshape(keep.to(tl.int32), (M, 64 // N, N))
    here = tl.arange(0, 64 // N)[None, :, None] == first_key % 64 // N
    return tl.sum(tl.where(here, parts, 0), 1) > 0


@triton.jit
def keep_blocks(k0, k1, query, first_key, head, sequence, threshold, M: tl.constexpr, N: tl.constexpr):
    """keep_mask for whole blocks of 64 keys, or for the first 16 or 32 keys of a block.

    sequence: a scalar, or [M, 1] if the queries belong to several sequences.
    """
    BLOCKS: tl.constexpr = (N + 63) // 64
    WORDS: tl.constexpr = N // 16 // BLOCKS  # used of a call; word w of a block's 4 calls serves keys 16 w to 16 w + 15
    zero = tl.zeros((M, 4 * BLOCKS), tl.uint32)
    group = (first_key // 64 * 4 + tl.arange(0, 4 * BLOCKS)).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        k0, k1, zero + group[None, :], zero + query.to(tl.uint32)[:, None], zero + head.to(tl.uint32),
        zero + sequence.to(tl.uint32),
    )  # fmt: skip
    if WORDS == 1:
        words = w0
    elif WORDS == 2:
        words = tl.join(w0, w1)
    else:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, 4 BLOCKS, x, y] holds word 2x + y
    words = tl.reshape(words, (M, BLOCKS, 4, WORDS)).trans(0, 1, 3, 2)  # [M, BLOCKS, word, c]
    shift = tl.reshape((tl.arange(0, 4) * 8).to(tl.uint32), (1, 1, 1, 1, 4))
    byte = (tl.reshape(words, (M, BLOCKS, WORDS, 4, 1)) >> shift) & 0xFF  # [M, BLOCKS, word, c, byte of the word]
    # key = 16 word + 8 high + 2 c + low
    byte = tl.reshape(byte, (M, BLOCKS, WORDS, 4, 2, 2)).trans(0, 1, 2, 4, 3, 5)
    return tl.reshape(byte, (M, N)) >= threshold


@triton.jit
def softmax_step(
    acc, largest, total, s, values, key, query, first, length, stride, k0, k1, head, sequence, threshold,
    DROPOUT: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, for the keys from `first` on. s: log2(e) times their scores."""
    maximum = tl.maximum(largest, tl.max(s, 1))
    p = tl.exp2(s - maximum[:, None])
    shrink = tl.exp2(largest - maximum)
    total = total * shrink + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(keep_mask(k0, k1, query, first, head, sequence, threshold, M, N), p, 0.0)
    v = load_rows(values, key, length, stride, D, WIDTH, CHECK)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, maximum, total


@triton.jit
def score_gradients(
    s, v, do, rows, delta, shift, inverse, query, first_key, length, k0, k1, head, sequence, threshold, keep_scale,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """P F and dS of a tile, queries by keys, in the inputs' dtype. s: log2(e) times the scores."""
    inside = query < length
    p = tl.exp2(s - tl.load(shift + rows, inside, other=0.0)[:, None])
    p = p * tl.load(inverse + rows, inside, other=0.0)[:, None]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dropped = p
    if DROPOUT:
        keep = keep_mask(k0, k1, query, first_key, head, sequence, threshold, M, N)
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - tl.load(delta + rows, inside, other=0.0)[:, None])
    return dropped.to(v.dtype), ds.to(v.dtype)


# ---- calls


class Call:
    """The arguments that forward and backward share, prepared for the kernels."""

    def __init__(self, qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site):
        self.qkv, self.cu_seqlens = qkv.contiguous(), cu_seqlens.contiguous()
        self.tokens, _, self.heads, self.D = qkv.shape
        self.batch, self.longest = cu_seqlens.shape[0] - 1, min(max_seqlen, self.tokens)
        self.short = self.longest <= SHORT
        self.sizes = self.tokens, self.batch, self.longest
        threshold, keep_scale = dropout(dropout_p, 8)
        self.scalars = scale, threshold, keep_scale, site
        self.width = max(16, triton.next_power_of_2(self.D))
        self.drops = threshold > 0
        self.constants = {"PRECISION": precision(qkv), "D": self.D, "WIDTH": self.width}
        self.tables = []

    def tiles(self, size: int) -> int:
        return max(1, triton.cdiv(self.longest, size))

    def pick(self, table, kernel: str = ""):
        """The entry of attention_tuned.py for `kernel` and this shape if there is one, else the table's."""
        few = self.longest <= 64 or self.tiles(128) * self.heads * self.batch < multiprocessors(self.qkv.device)
        shape = self.width, 8 * self.qkv.element_size(), few
        tuned = TUNED.get((kernel, architecture(self.qkv.device), *shape))
        return pick(table, self.qkv.device, *shape) if tuned is None else tuned

    def forward(self, kernel, table, rng: Tensor | None, name: str = "") -> tuple[Tensor, Tensor]:
        """The output, and the logarithm of the sum of the exponentials of each row's scores."""
        out = self.qkv.new_empty((self.tokens, self.heads, self.D))
        lse = self.qkv.new_empty((self.heads, self.tokens), dtype=torch.float32)
        self._launch_filling(
            kernel, self.pick(table, name), (rng, out, lse), self.scalars, {"DROPOUT": self.drops} | self.constants
        )
        return out, lse

    def statistics(self, kernel, table, dout: Tensor, out: Tensor, lse: Tensor, dqkv: Tensor) -> list[Tensor]:
        """Returns delta, shift and inverse, and writes zeros to dqkv for tokens that no sequence covers."""
        found = [lse.new_empty(lse.shape) for _ in range(3)]
        rows = out.contiguous(), lse.contiguous(), dout, dqkv, *found
        self._launch_filling(kernel, self.pick(table), rows, self.scalars[:1], self.constants)
        return found

    def _launch_filling(self, kernel, config, rows, scalars, constants) -> None:
        """Programs for the tiles of M queries, and behind them those for tokens that no sequence covers."""
        fill, tiles = triton.cdiv(self.tokens, FILL), self.tiles(config.tiles["M"])
        programs = fill + tiles * self.heads * self.batch if self.tokens else 0
        launch(
            kernel, (programs,), self.qkv, *self.tables, self.cu_seqlens, *rows, *self.sizes, tiles, fill, self.heads,
            *scalars, config=config, FILL=FILL, **constants,
        )  # fmt: skip
