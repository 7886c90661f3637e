"""Sums over rows without atomics: each program of a kernel writes a partial sum, and this adds them up in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import Config, launch, multiprocessors, pick

TABLE = {80: lambda columns: Config({"ROWS": 32, "COLUMNS": 64}, num_warps=4)}


def share(rows: int, tile: int, programs: int) -> tuple[int, int]:
    """(rows per program, number of programs): whole tiles each, at most `programs`. Depends on the arguments alone."""
    each = max(1, triton.cdiv(triton.cdiv(rows, tile), max(1, programs))) * tile
    return each, triton.cdiv(rows, each)


def programs(device: torch.device, per_multiprocessor: int) -> int:
    return multiprocessors(device) * per_multiprocessor


@triton.jit(do_not_specialize=["count"])
def _add_up(partials, total, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < columns)[None, :]
        sums += tl.load(partials + row[:, None].to(tl.int64) * columns + column[None, :], inside, other=0.0)
    tl.store(total + column, tl.sum(sums, 0), column < columns)


def add_up(partials: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Sums partials, (programs, quantities, C) float32, over the programs: (C,) for each quantity, in its dtype."""
    count, quantities, channels = partials.shape
    total = partials.new_empty((quantities, channels))
    config, columns = pick(TABLE, partials.device, channels), quantities * channels
    grid = (triton.cdiv(columns, config.tiles["COLUMNS"]),)
    launch(_add_up, grid, partials, total, count, columns, config=config)
    return [row.to(dtype, copy=True) for row, dtype in zip(total, dtypes, strict=True)]
