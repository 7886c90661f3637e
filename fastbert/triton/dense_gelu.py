"""dense_gelu in Triton: a matrix product with bias and GELU in its epilogue.

A program computes tiles of M tokens by N channels, one after the other, with float32 sums in registers. Tiles are taken
in groups of rows, so that data that is read again is still in the L2 cache. BERT's products are short (K = 768): the
epilogue costs about as many cycles as the product, so tiles are small enough for two programs per multiprocessor, one
of which multiplies while the other applies the GELU. Bytes moved: x, weight and y once (from the cache, x is read C / N
times and weight T / M times), and the pre-activation if it is saved.

The backward computes the derivative in one pass that also sums up dbias, and leaves the products to PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert.triton import bias_gelu
from fastbert.triton.common import Config, architecture, launch, multiprocessors, pick, precision
from fastbert.triton.gelu import gelu, is_short

DESCRIPTORS = 90  # the first architecture that copies tiles by descriptor
ALIGNMENT = 16  # bytes, of the first element and of rows; descriptors and the widest cp.async copies require it
GROUP = 8  # rows of tiles that are computed together
PROGRAMS = 2  # on each multiprocessor
FULL = 132  # multiprocessors of an H100, for which the tiles are chosen


# (M, N, the fewest tiles for which this size is used), largest first
SMALL = ((64, 128, FULL), (64, 64, FULL), (64, 32, 0))
LARGE = ((128, 128, PROGRAMS * FULL), *SMALL)
HIGH = ((128, 64, FULL), *SMALL[1:])  # sm_100 multiplies 64 rows no faster than 128


def _tiles(tokens: int, channels: int, sizes: tuple[tuple[int, int, int], ...]) -> dict[str, int]:
    """M and N: the first of the sizes that gives enough tiles."""
    tiles = lambda m, n: triton.cdiv(tokens, m) * triton.cdiv(channels, n)  # noqa: E731
    return next({"M": m, "N": n} for m, n, enough in sizes if tiles(m, n) >= enough)


def _ampere(tokens: int, channels: int, kind: str, aligned: bool) -> Config:
    """kind: "half", "tf32" or "ieee". aligned: 16 bytes can be copied at a time; else tiles go through registers."""
    if kind == "ieee":
        return Config({"M": 64, "N": 64, "K": 16}, num_warps=4, num_stages=2)
    tiles = _tiles(tokens, channels, SMALL if aligned else SMALL[1:])
    return Config({**tiles, "K": 32 if kind == "half" and aligned else 16}, num_warps=4, num_stages=4)


def _hopper(tokens: int, channels: int, kind: str, aligned: bool) -> Config:
    if kind == "ieee" or not aligned:
        return _ampere(tokens, channels, kind, aligned)
    tiles = _tiles(tokens, channels, LARGE if kind == "half" else SMALL)
    if tiles["M"] == 128:  # 8 warps: with 4, GELU of 128 numbers a thread spills in some versions of Triton
        return Config({**tiles, "K": 64}, num_warps=8, num_stages=3)
    return Config({**tiles, "K": 64 if kind == "half" else 32}, num_warps=4, num_stages=4)


def _blackwell(tokens: int, channels: int, kind: str, aligned: bool) -> Config:
    if kind == "ieee" or not aligned:
        return _ampere(tokens, channels, kind, aligned)
    return Config({**_tiles(tokens, channels, HIGH), "K": 64 if kind == "half" else 32}, num_warps=4, num_stages=4)


FORWARD = {80: _ampere, 90: _hopper, 100: _blackwell}


# ---- forward


@triton.jit
def _load(source, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, DESCRIBED: tl.constexpr):
    """The [R, C] tile at (row, column) of a contiguous (rows, columns) matrix, zeros beyond its end."""
    if DESCRIBED:
        tile = source.load([row, column])
    else:
        down, across = row + tl.arange(0, R), column + tl.arange(0, C)
        at = down.to(tl.int64)[:, None] * columns + across[None, :]
        tile = tl.load(source + at, (down < rows)[:, None] & (across < columns)[None, :], other=0.0)
    return tile


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """(row, column) of a tile: column by column within a group of GROUP rows, group by group."""
    group = tile // (GROUP * across)
    within = tile % (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, weight, bias, y, preactivation, tokens, inner, channels,
    DESCRIBED: tl.constexpr, SAVE: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(tokens, M), tl.cdiv(channels, N)
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        row, column = _place(tile, down, across, GROUP)
        acc = tl.zeros((M, N), tl.float32)
        for k in range(0, inner, K):
            a = _load(x, row * M, k, tokens, inner, M, K, DESCRIBED)
            b = _load(weight, column * N, k, channels, inner, N, K, DESCRIBED)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        token, channel = row * M + tl.arange(0, M), column * N + tl.arange(0, N)
        inside = (token < tokens)[:, None] & (channel < channels)[None, :]
        at = token.to(tl.int64)[:, None] * channels + channel[None, :]
        acc += tl.load(bias + channel, channel < channels, other=0.0).to(tl.float32)[None, :]
        rounded = acc.to(y.dtype.element_ty)  # the backward differentiates at this rounded value
        if SAVE:
            tl.store(preactivation + at, rounded, inside)
        tl.store(y + at, gelu(rounded.to(tl.float32), TANH, is_short(y)), inside)


def forward(x: Tensor, weight: Tensor, bias: Tensor, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    channels, inner = weight.shape
    y = x.new_empty((*x.shape[:-1], channels))
    preactivation = torch.empty_like(y) if save else x.new_empty(0)
    rows, weight = x.flatten(0, -2).contiguous(), weight.contiguous()
    tokens, flag, aligned = rows.shape[0], precision(x), _is_aligned(rows) and _is_aligned(weight)
    config = pick(FORWARD, x.device, tokens, channels, flag if x.dtype == torch.float32 else "half", aligned)
    tiles = triton.cdiv(tokens, config.tiles["M"]) * triton.cdiv(channels, config.tiles["N"])
    described = aligned and architecture(x.device) >= DESCRIPTORS and rows.numel() > 0 and weight.numel() > 0
    if described:
        rows, weight = (_described(t, config.tiles[d], config.tiles["K"]) for t, d in ((rows, "M"), (weight, "N")))
    launch(
        _forward, (min(tiles, PROGRAMS * multiprocessors(x.device)),),
        rows, weight, bias.contiguous(), y, preactivation, tokens, inner, channels, config=config,
        DESCRIBED=described, SAVE=save, TANH=approximate == "tanh", PRECISION=flag, GROUP=GROUP,
    )  # fmt: skip
    return y, preactivation


def _is_aligned(matrix: Tensor) -> bool:
    return matrix.shape[1] * matrix.element_size() % ALIGNMENT == 0 and matrix.data_ptr() % ALIGNMENT == 0


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    strides = [matrix.shape[1], 1]  # not matrix.stride(), which is arbitrary for a contiguous matrix of one row
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, columns])


# ---- backward: dpre = dy * GELU'(preactivation), dx = dpre weight, dweight = dpre^T x, dbias = sum of dpre's rows


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, preactivation: Tensor, approximate: str, need_dx: bool, need_dparams: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dpre, dbias = bias_gelu.backward(dy, preactivation, None, approximate, need_dparams)
    rows, x, weight = dpre.flatten(0, -2), x.contiguous(), weight.contiguous()
    dx = torch.mm(rows, weight).view(x.shape) if need_dx else x.new_empty(0)
    dweight = torch.mm(rows.t(), x.flatten(0, -2)) if need_dparams else x.new_empty(0)
    return dx, dweight, dbias
