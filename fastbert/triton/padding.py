"""padding in Triton: rows are copied as integers, so one kernel serves all dtypes of the same element size.

pack is a gather. unpack is a gather too: it first stores, for each row of the output, the index of its token or -1, so
that each row is written once, as a token or as zeros. Bytes moved: the tokens read, the output written, and 8 bytes per
index; unpack moves 8 more per index, and 16 per row of the output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import Config, launch, pick


def _gather_config(width: int) -> Config:
    columns = min(1024, triton.next_power_of_2(width))
    return Config({"ROWS": 2048 // columns, "COLUMNS": columns}, num_warps=4)


GATHER = {80: _gather_config}
INVERT = {80: lambda: Config({"ROWS": 1024}, num_warps=4)}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["rows", "sources"])
def _gather(x, source, y, rows, sources, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y[row] = x[source[row]], or zeros if x has no such row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = tl.load(source + row, row < rows, other=-1).to(tl.int64)
    known = inside & ((place >= 0) & (place < sources))[:, None]
    value = tl.load(x + place[:, None] * width + column[None, :], known, other=0)
    tl.store(y + row[:, None] * width + column[None, :], value, inside)


def _fill(y: Tensor, x: Tensor, sources: int, source: Tensor, width: int) -> Tensor:
    """Fills y's rows of `width` elements with the rows of x that `source` names; x has `sources` rows. Returns y."""
    rows, bits, config = source.shape[0], BITS[x.element_size()], pick(GATHER, x.device, max(1, width))
    grid = triton.cdiv(rows, config.tiles["ROWS"]), triton.cdiv(width, config.tiles["COLUMNS"])
    launch(_gather, grid, x.contiguous().view(bits), source, y.view(bits), rows, sources, width, config=config)
    return y


@triton.jit(do_not_specialize=["tokens", "places"])
def _invert(indices, token_of, tokens, places, ROWS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(indices + token, token < tokens, other=-1).to(tl.int64)
    tl.store(token_of + place, token, (place >= 0) & (place < places))


def pack(x: Tensor, indices: Tensor) -> Tensor:
    y = x.new_empty((indices.shape[0], *x.shape[2:]))
    return _fill(y, x, x.shape[0] * x.shape[1], indices.contiguous(), x.shape[2:].numel())


def unpack(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    tokens, places, config = indices.shape[0], batch * seqlen, pick(INVERT, x.device)
    token_of = indices.new_full((places,), -1)
    grid = (triton.cdiv(tokens, config.tiles["ROWS"]),)
    launch(_invert, grid, indices.contiguous(), token_of, tokens, places, config=config)
    return _fill(x.new_empty((batch, seqlen, *x.shape[1:])), x, tokens, token_of, x.shape[1:].numel())
