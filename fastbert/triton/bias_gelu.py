"""bias_gelu in Triton: GELU(x + bias) in one pass; the backward also sums up the bias's gradient in one pass.

A program owns a tile of rows by columns; in the backward it loops over a share of the rows and keeps the sums of its
columns in registers. Bytes moved: forward x and y; backward dy, x and dx, and 4 bytes of partial sums per program and
column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import sums
from fastbert.triton.common import Config, launch, pick, rows_of
from fastbert.triton.gelu import gelu, gelu_derivative, is_short

FORWARD = {80: lambda channels: Config({"ROWS": 4, "COLUMNS": 512}, num_warps=4)}
BACKWARD = {80: lambda channels: Config({"ROWS": 8, "COLUMNS": 128}, num_warps=4)}
PROGRAMS = 4  # per multiprocessor, in the backward


@triton.jit
def _load(x, bias, at, column, inside, channels, BIAS: tl.constexpr):
    v = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + column, column < channels, other=0.0).to(tl.float32)[None, :]
    return v


# ---- forward


@triton.jit(do_not_specialize=["rows"])
def _forward(x, bias, y, rows, channels, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    v = _load(x, bias, at, column, inside, channels, True)
    tl.store(y + at, gelu(v, TANH, is_short(y)), inside)


def forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    y, channels = x.new_empty(x.shape), x.shape[-1]
    config = pick(FORWARD, x.device, channels)
    rows = rows_of(x).shape[0]
    grid = triton.cdiv(rows, config.tiles["ROWS"]), triton.cdiv(channels, config.tiles["COLUMNS"])
    launch(_forward, grid, x, bias, y, rows, channels, config=config, TANH=approximate == "tanh")
    return y


# ---- backward: dx = dy * GELU'(x + bias), dbias = sum of dx over the rows


@triton.jit(do_not_specialize=["rows", "share"])
def _backward(
    dy, x, bias, dx, partials, rows, channels, share,
    BIAS: tl.constexpr, TANH: tl.constexpr, SHORT: tl.constexpr, NEED_DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, share, ROWS):
        row = program * share + first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        at = row[:, None] * channels + column[None, :]
        v = _load(x, bias, at, column, inside, channels, BIAS)
        slope = gelu_derivative(v, TANH, SHORT)
        d = tl.load(dy + at, inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, d, inside)
        if NEED_DBIAS:
            total += d
    if NEED_DBIAS:
        tl.store(partials + program * channels + column, tl.sum(total, 0), column < channels)


def backward(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str, need_dbias: bool) -> tuple[Tensor, Tensor]:
    """bias: None if x includes it already, as in dense_gelu; dbias then has x's dtype."""
    dy, x = dy.contiguous(), x.contiguous()
    dtype, bias = (x.dtype, None) if bias is None else (bias.dtype, bias.contiguous())
    dx, channels, rows = x.new_empty(x.shape), x.shape[-1], rows_of(x).shape[0]
    config = pick(BACKWARD, x.device, channels)
    across = triton.cdiv(channels, config.tiles["COLUMNS"])
    share, programs = sums.share(rows, config.tiles["ROWS"], sums.programs(x.device, PROGRAMS) // max(1, across))
    partials = x.new_empty((programs, 1, channels) if need_dbias else (0,), dtype=torch.float32)
    launch(
        _backward, (across, programs), dy, x, bias, dx, partials, rows, channels, share,
        config=config, BIAS=bias is not None, TANH=approximate == "tanh", NEED_DBIAS=need_dbias,
        SHORT=dtype.itemsize == 2,  # dbias sums the derivative before it is rounded
    )  # fmt: skip
    return dx, sums.add_up(partials, [dtype])[0] if need_dbias else x.new_empty(0, dtype=dtype)
