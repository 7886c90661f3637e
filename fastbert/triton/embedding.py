"""embedding in Triton: sums table rows, LayerNorm and dropout in one pass; the tables' gradients without atomics.

A program owns whole rows, as in layer_norm.py, and uses its LayerNorm. The backward computes z, the sum of table rows,
again and writes dz once, in float32. Then each table's gradient is the sum of dz's rows by id (sums.py).
Bytes moved: forward the rows and y; backward dy and the rows read, dz written and read once more for each table, the
gradients, and partial sums as in layer_norm.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import layer_norm, sums
from fastbert.triton.common import dropout, launch, pick, row_keep, site_key
from fastbert.triton.layer_norm import normalize, normalize_backward

FORWARD, BACKWARD, PROGRAMS = layer_norm.FORWARD, layer_norm.BACKWARD, layer_norm.PROGRAMS


@triton.jit
def _nearest(id, inside, rows):
    """Ids, clamped to the table's rows; -1 outside, or if the table is empty."""
    return tl.where(inside, tl.minimum(tl.maximum(id, 0), rows - 1), -1)


@triton.jit
def _rows(table, ids, token, tokens, column, rows, channels, CHECKED: tl.constexpr):
    """The rows of ids; if CHECKED, NaN for an id that is out of range."""
    id = tl.load(ids + token, token < tokens, other=-1).to(tl.int64)
    row = _nearest(id, token < tokens, rows)
    inside = (row >= 0)[:, None] & (column < channels)[None, :]
    x = tl.load(table + row[:, None] * channels + column[None, :], inside, other=0.0).to(tl.float32)
    return tl.where((id == row)[:, None], x, float("nan")) if CHECKED else x


@triton.jit
def _sum(
    input_ids, position_ids, token_type_ids, word, position, token_type, token, column,
    tokens, channels, words, positions, types, TYPES: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    z = _rows(word, input_ids, token, tokens, column, words, channels, CHECKED)
    z += _rows(position, position_ids, token, tokens, column, positions, channels, CHECKED)
    if TYPES:
        z += _rows(token_type, token_type_ids, token, tokens, column, types, channels, CHECKED)
    return z


class _Inputs:
    """The arguments that determine z and the dropout mask, prepared for the kernels."""

    def __init__(self, ids, tables, rng, dropout_p, site):
        self.ids = [None if i is None else i.contiguous() for i in ids]
        self.tables = [None if table is None else table.contiguous() for table in tables]
        self.tokens, self.channels = ids[0].numel(), tables[0].shape[1]
        self.sizes = [0 if table is None else table.shape[0] for table in tables]
        threshold, keep_scale = dropout(dropout_p, 16)
        self.dropout = threshold, keep_scale, site
        self.flags = {"TYPES": tables[2] is not None, "DROPOUT": threshold > 0}


# ---- forward


@triton.jit(do_not_specialize=["tokens", "words", "positions", "types", "threshold", "site"])
def _forward(
    input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng, y, mean, rstd,
    tokens, channels, words, positions, types, eps, threshold, keep_scale, site,
    TYPES: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (column < channels)[None, :]
    z = _sum(
        input_ids, position_ids, token_type_ids, word, position, token_type, token, column,
        tokens, channels, words, positions, types, TYPES, CHECKED=True,
    )  # fmt: skip
    z, row_mean, row_rstd = normalize(z, inside, channels, eps)
    w = tl.load(weight + column, column < channels, other=0.0).to(tl.float32)
    b = tl.load(bias + column, column < channels, other=0.0).to(tl.float32)
    out = z * row_rstd[:, None] * w[None, :] + b[None, :]
    if DROPOUT:
        k0, k1 = site_key(rng, site)
        out = tl.where(row_keep(k0, k1, token, 0, threshold, ROWS, WIDTH), out * keep_scale, 0.0)
    tl.store(y + token[:, None] * channels + column[None, :], out, inside)
    tl.store(mean + token, row_mean, token < tokens)
    tl.store(rstd + token, row_rstd, token < tokens)


def forward(
    input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None, word: Tensor, position: Tensor,
    token_type: Tensor | None, weight: Tensor, bias: Tensor, rng: Tensor | None,
    eps: float, dropout_p: float, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tables = word, position, token_type
    inputs = _Inputs((input_ids, position_ids, token_type_ids), tables, rng, dropout_p, site)
    y = word.new_empty((*input_ids.shape, inputs.channels), dtype=_result_dtype(tables))
    mean, rstd = (word.new_empty(input_ids.shape, dtype=torch.float32) for _ in range(2))
    config = pick(FORWARD, word.device, inputs.channels)
    launch(
        _forward, (triton.cdiv(inputs.tokens, config.tiles["ROWS"]),), *inputs.ids, *inputs.tables,
        weight.contiguous(), bias.contiguous(), rng, y, mean, rstd,
        inputs.tokens, inputs.channels, *inputs.sizes, eps, *inputs.dropout, config=config, **inputs.flags,
    )  # fmt: skip
    return y, mean, rstd


def _result_dtype(tables: tuple[Tensor | None, ...]) -> torch.dtype:
    word, position, *rest = (table.dtype for table in tables if table is not None)
    return torch.promote_types(torch.promote_types(word, position), rest[0] if rest else position)


# ---- backward: dropout is applied to dy; dz, dweight and dbias follow as in layer_norm.py, and a table's gradient is
# the sum of dz by id


@triton.jit(do_not_specialize=["tokens", "words", "positions", "types", "share", "threshold", "site"])
def _backward(
    dy, input_ids, position_ids, token_type_ids, word, position, token_type, weight, mean, rstd, rng, dz_out, partials,
    tokens, channels, words, positions, types, share, threshold, keep_scale, site,
    TYPES: tl.constexpr, DROPOUT: tl.constexpr, NEED_DZ: tl.constexpr, NEED_DPARAMS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, column < channels, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, share, ROWS):
        token = program * share + first + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & (column < channels)[None, :]
        at = token[:, None] * channels + column[None, :]
        # After an id out of range the saved mean is NaN, and so is all that follows from it.
        z = _sum(
            input_ids, position_ids, token_type_ids, word, position, token_type, token, column,
            tokens, channels, words, positions, types, TYPES, CHECKED=False,
        )  # fmt: skip
        d = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        if DROPOUT:
            k0, k1 = site_key(rng, site)
            d = tl.where(row_keep(k0, k1, token, 0, threshold, ROWS, WIDTH), d * keep_scale, 0.0)
        row_mean = tl.load(mean + token, token < tokens, other=0.0)
        row_rstd = tl.load(rstd + token, token < tokens, other=0.0)
        n, dz = normalize_backward(d, z, w, row_mean, row_rstd, inside, channels)
        if NEED_DZ:
            tl.store(dz_out + at, dz, inside)
        if NEED_DPARAMS:
            dweight += d * n
            dbias += d
    if NEED_DPARAMS:
        to = partials + program * 2 * channels + column
        tl.store(to, tl.sum(dweight, 0), column < channels)
        tl.store(to + channels, tl.sum(dbias, 0), column < channels)


def backward(
    dy: Tensor, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None, word: Tensor, position: Tensor,
    token_type: Tensor | None, weight: Tensor, mean: Tensor, rstd: Tensor, rng: Tensor | None,
    dropout_p: float, site: int, padding_idx: int, need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tables, (*need_tables, need_dparams) = (word, position, token_type), need
    inputs = _Inputs((input_ids, position_ids, token_type_ids), tables, rng, dropout_p, site)
    tokens, channels = inputs.tokens, inputs.channels
    config = pick(BACKWARD, dy.device, channels)
    share, programs = sums.share(tokens, config.tiles["ROWS"], sums.programs(dy.device, PROGRAMS))
    dz = mean.new_empty((tokens, channels) if any(need_tables) else (0,))
    partials = mean.new_empty((programs, 2, channels) if need_dparams else (0,))
    launch(
        _backward, (programs,), dy.contiguous(), *inputs.ids, *inputs.tables, weight.contiguous(), mean.contiguous(),
        rstd.contiguous(), rng, dz, partials, tokens, channels, *inputs.sizes, share, *inputs.dropout,
        config=config, **inputs.flags, NEED_DZ=any(need_tables), NEED_DPARAMS=need_dparams,
    )  # fmt: skip
    dtables = [
        sums.by_id(dz, ids, table, padding) if needed else mean.new_empty(0)
        for ids, table, padding, needed in zip(inputs.ids, tables, (padding_idx, -1, -1), need_tables, strict=True)
    ]
    dparams = sums.add_up(partials, [weight.dtype] * 2) if need_dparams else [weight.new_empty(0) for _ in range(2)]
    return *dtables, *dparams
