"""bias_gelu in Triton: GELU(x + bias) in one pass, and in the backward the bias's gradient with it.

Programs own tiles of rows by columns; in the backward they walk down a share of the rows with their columns' sums in
registers. Bytes moved: forward x and y; backward dy, x and dx, and 4 C bytes of partial sums a program and column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import sums
from fastbert.triton.common import Config, launch, pick, rows_of
from fastbert.triton.gelu import gelu, gelu_derivative

FORWARD = {80: lambda channels: Config({"ROWS": 4, "COLUMNS": 512}, num_warps=4)}
BACKWARD = {80: lambda channels: Config({"ROWS": 8, "COLUMNS": 128}, num_warps=4)}
PROGRAMS = 4  # a multiprocessor, in the backward


@triton.jit
def _load(x, bias, at, column, inside, channels):
    shift = tl.load(bias + column, column < channels, other=0.0).to(tl.float32)
    return tl.load(x + at, inside, other=0.0).to(tl.float32) + shift[None, :]


# ---- forward


@triton.jit
def _forward(x, bias, y, rows, channels, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    tl.store(y + at, gelu(_load(x, bias, at, column, inside, channels), TANH), inside)


def forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    y, channels = x.new_empty(x.shape), x.shape[-1]
    config = pick(FORWARD, x.device, channels)
    rows = rows_of(x).shape[0]
    grid = triton.cdiv(rows, config.tiles["ROWS"]), triton.cdiv(channels, config.tiles["COLUMNS"])
    launch(_forward, grid, x, bias, y, rows, channels, config=config, TANH=approximate == "tanh")
    return y


# ---- backward: dx = dy * GELU'(x + bias), dbias = sum of dx over the rows


@triton.jit
def _backward(
    dy, x, bias, dx, partials, rows, channels, share,
    TANH: tl.constexpr, NEED_DBIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, share, ROWS):
        row = program * share + first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        at = row[:, None] * channels + column[None, :]
        slope = gelu_derivative(_load(x, bias, at, column, inside, channels), TANH)
        d = tl.load(dy + at, inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, d, inside)
        if NEED_DBIAS:
            total += d
    if NEED_DBIAS:
        tl.store(partials + program * channels + column, tl.sum(total, 0), column < channels)


def backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str, need_dbias: bool) -> tuple[Tensor, Tensor]:
    dy, x, bias = dy.contiguous(), x.contiguous(), bias.contiguous()
    dx, channels, rows = x.new_empty(x.shape), x.shape[-1], rows_of(x).shape[0]
    config = pick(BACKWARD, x.device, channels)
    across = triton.cdiv(channels, config.tiles["COLUMNS"])
    share, programs = sums.share(rows, config.tiles["ROWS"], sums.programs(x.device, PROGRAMS) // max(1, across))
    partials = x.new_empty((programs, 1, channels) if need_dbias else (0,), dtype=torch.float32)
    launch(
        _backward, (programs, across), dy, x, bias, dx, partials, rows, channels, share,
        config=config, TANH=approximate == "tanh", NEED_DBIAS=need_dbias,
    )  # fmt: skip
    return dx, sums.add_up(partials, [bias.dtype])[0] if need_dbias else bias.new_empty(0)
