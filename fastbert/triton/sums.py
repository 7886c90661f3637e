"""Sums over rows without atomics, in a fixed order.

`add_up` adds up partial sums, one from each program of a kernel.

`by_id` adds up the rows that have the same id:

    ids       4 4 4 4 | 4 4 7 7 | 7 9 9 9      sorted (stable, so that the order of a sum is fixed), in chunks of CHUNK
    heads               4 4       7            a chunk's first run of equal ids, if it continues the chunk before
    runs      4 ...         7 ...   9          one program per run adds up its rows in its first chunk, then its heads

So a program adds up at most CHUNK rows and one partial sum per chunk, even if all rows have the same id. Each row of
the result is written by one program; rows of ids that do not occur keep the zeros of torch.zeros_like. Sorting runs
on the device, without host synchronisation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import Config, launch, multiprocessors, pick

TABLE = {80: lambda columns: Config({"ROWS": 32, "COLUMNS": 64}, num_warps=4)}
BY_ID = {80: lambda channels: Config({"CHUNK": 128, "ROWS": 16, "COLUMNS": 256}, num_warps=4)}


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


# ---- sums by id


@triton.jit
def _ids(ids, at, places):
    """The sorted ids at these places; -1 outside."""
    return tl.load(ids + at, (at >= 0) & (at < places), other=-1).to(tl.int64)


@triton.jit
def _add_rows(
    x, factors, ids, order, first, id, column, places, channels, rows_of_x,
    FACTORS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Partial sums [ROWS, COLUMNS] of the rows of `id` from place `first` to its chunk's end, and their number."""
    place = first + tl.arange(0, CHUNK)
    count = tl.sum(((place // CHUNK == first // CHUNK) & (_ids(ids, place, places) == id)).to(tl.int32), 0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, count, ROWS):
        at = begin + tl.arange(0, ROWS)
        source = tl.load(order + first + at, at < count, other=0)
        row = source % rows_of_x if FACTORS else source
        inside = (at < count)[:, None] & (column < channels)[None, :]
        found = tl.load(x + row[:, None] * channels + column[None, :], inside, other=0.0).to(tl.float32)
        if FACTORS:
            found *= tl.load(factors + source, at < count, other=0.0).to(tl.float32)[:, None]
        total += found
    return total, count


@triton.jit(do_not_specialize=["places", "rows_of_x", "skipped"])
def _sum_heads(
    x, factors, ids, order, heads, places, channels, rows_of_x, skipped,
    FACTORS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = chunk * CHUNK
    id = _ids(ids, first, places)
    if (id == _ids(ids, first - 1, places)) & (id != skipped):
        total, _ = _add_rows(
            x, factors, ids, order, first, id, column, places, channels, rows_of_x, FACTORS, CHUNK, ROWS, COLUMNS
        )
        tl.store(heads + chunk * channels + column, tl.sum(total, 0), column < channels)


@triton.jit(do_not_specialize=["places", "rows_of_x", "skipped"])
def _sum_runs(
    x, factors, ids, order, firsts, heads, sums, places, channels, rows_of_x, skipped,
    FACTORS: tl.constexpr, FIRSTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """FIRSTS: there is a program for each id, and firsts has the place where its run would begin; otherwise there is
    one for each place."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(firsts + program) if FIRSTS else program
    id = _ids(ids, first, places)
    begins = id == program if FIRSTS else id != _ids(ids, first - 1, places)
    if begins & (id != skipped):
        total, count = _add_rows(
            x, factors, ids, order, first, id, column, places, channels, rows_of_x, FACTORS, CHUNK, ROWS, COLUMNS
        )
        chunk = first // CHUNK + 1
        more = first + count == chunk * CHUNK
        while more:
            later = chunk + tl.arange(0, ROWS)
            same = _ids(ids, later * CHUNK, places) == id
            inside = same[:, None] & (column < channels)[None, :]
            total += tl.load(heads + later[:, None] * channels + column[None, :], inside, other=0.0)
            chunk += ROWS
            more = tl.sum(same.to(tl.int32), 0) == ROWS
        tl.store(sums + id * channels + column, tl.sum(total, 0), column < channels)


def by_id(x: Tensor, ids: Tensor, like: Tensor, skipped: int, factors: Tensor | None = None) -> Tensor:
    """The sums of the rows of x, (R, C), with the same id, as a tensor like `like`, (I, C); zeros for other ids.

    ids: R integers, clamped to 0 to I - 1; rows with the id `skipped` are left out. If that is I, so are larger ids.
    factors: as many numbers as ids, which then may be more than R: summand i is row i % R of x times factors[i].
    """
    (rows, channels), sums = x.shape, torch.zeros_like(like, memory_format=torch.contiguous_format)
    ordered, order = torch.sort(ids.flatten().clamp(0, max(len(like) - 1, skipped)), stable=True)
    places, config = len(order), pick(BY_ID, x.device, channels)
    chunks, across = triton.cdiv(places, config.tiles["CHUNK"]), triton.cdiv(channels, config.tiles["COLUMNS"])
    heads, sizes = x.new_empty((chunks, channels), dtype=torch.float32), (places, channels, rows, skipped)
    firsts = None
    if places > len(like):
        firsts = torch.searchsorted(ordered, torch.arange(len(like), device=x.device, dtype=ordered.dtype))
    given, has_factors = (x.contiguous(), factors, ordered, order), factors is not None
    launch(_sum_heads, (chunks, across), *given, heads, *sizes, config=config, FACTORS=has_factors)
    launch(
        _sum_runs, (places if firsts is None else len(like), across), *given, firsts, heads, sums, *sizes,
        config=config, FACTORS=has_factors, FIRSTS=firsts is not None,
    )  # fmt: skip
    return sums
