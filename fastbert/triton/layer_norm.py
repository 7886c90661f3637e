"""layer_norm and add_layer_norm in Triton: bias, dropout, residual sum and LayerNorm in one pass.

A program owns whole rows, so it computes their statistics in registers. In the backward it loops over a share of the
rows, keeps the sums of columns (dweight, dbias, dx_bias) in registers and writes them once. Beside those sums, a row of
more than WIDEST columns does not fit in registers. It is read in chunks twice, for the means that its gradient needs
and then, from the cache, for the gradient; dropout's bits are computed twice. Bytes moved: forward x, residual and y;
backward dy, x, residual and the gradients; 8 bytes of statistics per row, 12 C of partial sums per program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton import sums
from fastbert.triton.common import Config, dropout, launch, pick, row_keep, rows_of, site_key


def _forward_config(channels: int) -> Config:
    width = max(8, triton.next_power_of_2(channels))
    rows = max(1, min(16, 2048 // width))
    warps = 4 if width <= 2048 else 8 if width == 4096 else 32  # at 8192, 8 or 16 spill for some dtypes, architectures
    return Config({"ROWS": rows, "WIDTH": width}, num_warps=warps)


def _backward_config(channels: int, warps: int = 4) -> Config:
    width = max(8, triton.next_power_of_2(channels))
    rows = max(1, min(16, 2048 // width))
    return Config({"ROWS": rows, "WIDTH": width}, num_warps=warps if width <= 1024 else min(16, width // 256))


FORWARD = {80: _forward_config}
BACKWARD = {80: _backward_config, 100: lambda channels: _backward_config(channels, 8)}  # 4 warps spill on sm_100
WIDE = {80: lambda channels: Config({"ROWS": 1, "WIDTH": 2048}, num_warps=8)}  # backward of rows of more than WIDEST
WIDEST = 4096  # columns
PROGRAMS = 2  # per multiprocessor, in the backward


@triton.jit
def _sum(
    x, residual, x_bias, rng, at, row, column, first, inside, channels, threshold, keep_scale, site,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """z = dropout(x + x_bias) + residual, zeros outside, and the dropout factors, for the columns from `first` on."""
    z = tl.load(x + at, inside, other=0.0).to(tl.float32)
    factor = tl.full((ROWS, WIDTH), 1.0, tl.float32)
    if X_BIAS:
        z += tl.load(x_bias + column, column < channels, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        k0, k1 = site_key(rng, site)
        keep = row_keep(k0, k1, row, first, threshold, ROWS, WIDTH)
        factor = tl.where(keep, keep_scale, 0.0)
        z = tl.where(keep, z * keep_scale, 0.0)
    if RESIDUAL:
        z += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, 0.0), factor


# ---- forward


@triton.jit
def normalize(z, inside, channels, eps):
    """z - mean, mean and rstd of float32 rows; inside, [ROWS, WIDTH], marks the elements that exist."""
    # The clamp to the row's extremes makes the mean of a constant row exact. Other means are corrected for rounding.
    least, most = tl.min(tl.where(inside, z, float("inf")), 1), tl.max(tl.where(inside, z, float("-inf")), 1)
    shift = tl.minimum(tl.maximum(tl.sum(z, 1) / channels, least), most)
    z = tl.where(inside, z - shift[:, None], 0.0)
    correction = tl.sum(z, 1) / channels
    z = tl.where(inside, z - correction[:, None], 0.0)
    return z, shift + correction, tl.rsqrt(tl.sum(z * z, 1) / channels + eps)


@triton.jit(do_not_specialize=["rows", "threshold", "site"])
def _forward(
    x, residual, weight, bias, x_bias, rng, y, mean, rstd, rows, channels, eps, threshold, keep_scale, site,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    z, _ = _sum(
        x, residual, x_bias, rng, at, row, column, 0, inside, channels, threshold, keep_scale, site,
        RESIDUAL, X_BIAS, DROPOUT, ROWS, WIDTH,
    )  # fmt: skip
    z, row_mean, row_rstd = normalize(z, inside, channels, eps)
    w = tl.load(weight + column, column < channels, other=0.0).to(tl.float32)
    b = tl.load(bias + column, column < channels, other=0.0).to(tl.float32)
    tl.store(y + at, z * row_rstd[:, None] * w[None, :] + b[None, :], inside)
    tl.store(mean + row, row_mean, row < rows)
    tl.store(rstd + row, row_rstd, row < rows)


def add_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, x_bias: Tensor | None, rng: Tensor | None,
    eps: float, dropout_p: float, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = _Inputs(x, residual, x_bias, rng, dropout_p, site)
    y = x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    config = pick(FORWARD, x.device, inputs.channels)
    launch(
        _forward, (triton.cdiv(inputs.rows, config.tiles["ROWS"]),),
        inputs.x, inputs.residual, weight.contiguous(), bias.contiguous(), inputs.x_bias, rng, y, mean, rstd,
        inputs.rows, inputs.channels, eps, *inputs.dropout, config=config, **inputs.flags,
    )  # fmt: skip
    return y, mean, rstd


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return add_forward(x, None, weight, bias, None, None, eps, 0.0, 0)


# ---- backward: with n = (z - mean) rstd and g = dy weight, dz = rstd (g - mean(g) - n mean(g n)); dweight and dbias
# are the sums of dy n and dy over the rows, dx is dz with the same dropout, and dx_bias is the sum of dx over the rows


@triton.jit
def normalize_backward(d, z, w, mean, rstd, inside, channels):
    """n and dz of rows. d: dy. w: the weight, [WIDTH]."""
    z = tl.where(inside, z - mean[:, None], 0.0)
    n = tl.where(inside, (z - (tl.sum(z, 1) / channels)[:, None]) * rstd[:, None], 0.0)  # the saved mean is rounded
    g = d * w[None, :]
    dz = rstd[:, None] * (g - (tl.sum(g, 1) / channels)[:, None] - n * (tl.sum(g * n, 1) / channels)[:, None])
    return n, dz


@triton.jit
def _means(
    dy, x, residual, weight, mean, rstd, x_bias, rng, row, rows, channels, threshold, keep_scale, site,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each row's means of z - mean, g and g n, from one pass over its chunks."""
    row_mean = tl.load(mean + row, row < rows, other=0.0)
    row_rstd = tl.load(rstd + row, row < rows, other=0.0)
    sum_z = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gz = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, channels, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        at = row[:, None] * channels + column[None, :]
        z, _ = _sum(
            x, residual, x_bias, rng, at, row, column, first, inside, channels, threshold, keep_scale, site,
            RESIDUAL, X_BIAS, DROPOUT, ROWS, WIDTH,
        )  # fmt: skip
        z = tl.where(inside, z - row_mean[:, None], 0.0)
        g = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        g *= tl.load(weight + column, column < channels, other=0.0).to(tl.float32)[None, :]
        sum_z += z
        sum_g += g
        sum_gz += g * z
    correction, mean_g = tl.sum(sum_z, 1) / channels, tl.sum(sum_g, 1) / channels
    return correction, mean_g, row_rstd * (tl.sum(sum_gz, 1) / channels - correction * mean_g)


@triton.jit(do_not_specialize=["rows", "share", "threshold", "site"])
def _backward(
    dy, x, residual, weight, mean, rstd, x_bias, rng, dx, dresidual, partials,
    rows, channels, share, threshold, keep_scale, site,
    RESIDUAL: tl.constexpr, X_BIAS: tl.constexpr, DROPOUT: tl.constexpr, DX: tl.constexpr, NEED_DPARAMS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, column < channels, other=0.0).to(tl.float32)
    zeros = tl.zeros((ROWS, WIDTH), tl.float32)
    dweight, dbias, dx_bias = (zeros,) * CHUNKS, (zeros,) * CHUNKS, (zeros,) * CHUNKS
    for first in range(0, share, ROWS):
        row = program * share + first + tl.arange(0, ROWS)
        if CHUNKS > 1:
            correction, mean_g, mean_gn = _means(
                dy, x, residual, weight, mean, rstd, x_bias, rng, row, rows, channels, threshold, keep_scale, site,
                RESIDUAL, X_BIAS, DROPOUT, ROWS, WIDTH,
            )  # fmt: skip
        for i in tl.static_range(CHUNKS):
            if CHUNKS > 1:  # loaded chunk by chunk: the whole weight does not fit in registers
                column = i * WIDTH + tl.arange(0, WIDTH)
                w = tl.load(weight + column, column < channels, other=0.0).to(tl.float32)
            inside = (row < rows)[:, None] & (column < channels)[None, :]
            at = row[:, None] * channels + column[None, :]
            z, factor = _sum(
                x, residual, x_bias, rng, at, row, column, i * WIDTH, inside, channels, threshold, keep_scale, site,
                RESIDUAL, X_BIAS, DROPOUT, ROWS, WIDTH,
            )  # fmt: skip
            row_mean = tl.load(mean + row, row < rows, other=0.0)
            row_rstd = tl.load(rstd + row, row < rows, other=0.0)
            d = tl.load(dy + at, inside, other=0.0).to(tl.float32)
            if CHUNKS > 1:
                n = tl.where(inside, (z - row_mean[:, None] - correction[:, None]) * row_rstd[:, None], 0.0)
                dz = row_rstd[:, None] * (d * w[None, :] - mean_g[:, None] - n * mean_gn[:, None])
            else:
                n, dz = normalize_backward(d, z, w, row_mean, row_rstd, inside, channels)
            dropped = tl.where(factor > 0, dz * factor, 0.0)
            if RESIDUAL:
                tl.store(dresidual + at, dz, inside)
            if DX:
                tl.store(dx + at, dropped, inside)
            if NEED_DPARAMS:
                dweight = dweight[:i] + (dweight[i] + d * n,) + dweight[i + 1 :]
                dbias = dbias[:i] + (dbias[i] + d,) + dbias[i + 1 :]
                if X_BIAS:
                    dx_bias = dx_bias[:i] + (dx_bias[i] + tl.where(inside, dropped, 0.0),) + dx_bias[i + 1 :]
    if NEED_DPARAMS:
        quantities: tl.constexpr = 3 if X_BIAS else 2
        for i in tl.static_range(CHUNKS):
            column = i * WIDTH + tl.arange(0, WIDTH)
            to = partials + program * quantities * channels + column
            tl.store(to, tl.sum(dweight[i], 0), column < channels)
            tl.store(to + channels, tl.sum(dbias[i], 0), column < channels)
            if X_BIAS:
                tl.store(to + 2 * channels, tl.sum(dx_bias[i], 0), column < channels)


def add_backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, mean: Tensor, rstd: Tensor, x_bias: Tensor | None,
    rng: Tensor | None, dropout_p: float, site: int, need_dparams: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = _Inputs(x, residual, x_bias, rng, dropout_p, site)
    shared = residual is not None and residual.dtype == x.dtype and not inputs.flags["DROPOUT"]  # dx equals dresidual
    dx = x.new_empty((0,) if shared else x.shape)
    dresidual = dx if residual is None else residual.new_empty(x.shape)
    config = pick(BACKWARD if inputs.channels <= WIDEST else WIDE, x.device, inputs.channels)
    share, programs = sums.share(inputs.rows, config.tiles["ROWS"], sums.programs(x.device, PROGRAMS))
    dtypes = [weight.dtype, weight.dtype] + ([] if x_bias is None else [x_bias.dtype])
    partials = x.new_empty((programs, len(dtypes), inputs.channels) if need_dparams else (0,), dtype=torch.float32)
    launch(
        _backward, (programs,), dy.contiguous(), inputs.x, inputs.residual, weight.contiguous(), mean.contiguous(),
        rstd.contiguous(), inputs.x_bias, rng, dx, dresidual, partials, inputs.rows, inputs.channels, share,
        *inputs.dropout, config=config, **inputs.flags, DX=not shared, NEED_DPARAMS=need_dparams,
        CHUNKS=triton.cdiv(inputs.channels, config.tiles["WIDTH"]),
    )  # fmt: skip
    dparams = sums.add_up(partials, dtypes) if need_dparams else [weight.new_empty(0), weight.new_empty(0)]
    if len(dparams) == 2:
        dparams.append(x.new_empty(0))
    return dx, dresidual, *dparams


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_dparams: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, _, dweight, dbias, _ = add_backward(dy, x, None, weight, mean, rstd, None, None, 0.0, 0, need_dparams)
    return dx, dweight, dbias


class _Inputs:
    """The arguments that determine z, prepared for the kernels."""

    def __init__(self, x, residual, x_bias, rng, dropout_p, site):
        self.x, self.channels = x.contiguous(), x.shape[-1]
        self.rows = rows_of(self.x).shape[0]
        self.residual = None if residual is None else residual.contiguous()
        self.x_bias = None if x_bias is None else x_bias.contiguous()
        threshold, keep_scale = dropout(dropout_p, 16)
        self.dropout = threshold, keep_scale, site
        self.flags = {"RESIDUAL": residual is not None, "X_BIAS": x_bias is not None, "DROPOUT": threshold > 0}
