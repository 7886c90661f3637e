"""scaled_layer: `encoder_layer` for inference, with its matrix products in fp8."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops.attention import attention_unchecked
from fastbert.ops.scaled_linear import LAYER_NORM, Scaled, product, quantized


class Dense(NamedTuple):
    """A dense layer: weight (C, K) float8_e4m3fn, scale (C,) float32, bias (C,) bfloat16."""

    weight: Tensor
    scale: Tensor
    bias: Tensor


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor
    eps: float


class Parameters(NamedTuple):
    """The parameters of a layer. qkv: None if its attention ran before."""

    qkv: Dense | None
    out: Dense
    out_norm: Norm
    up: Dense
    down: Dense
    down_norm: Norm


def scaled_layer(
    backend: str,
    hidden: Tensor,
    rows: Scaled | None,
    context: Tensor | None,
    parameters: Parameters,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    heads: int,
    scale: float,
    approximate: str,
) -> tuple[Tensor, Scaled]:
    """A post-norm layer of `scaled_linear`s: four passes, four products and attention.

    hidden: (T, C) bfloat16. rows: hidden in e4m3, as the layer before returned it; computed here if None. context:
    the output of the layer's attention, (T, C), if that ran before. Returns the output, in bfloat16 and in e4m3.
    """
    p = parameters
    if context is None:
        rows = quantized(backend, hidden) if rows is None else rows
        qkv = product(backend, rows, *p.qkv).unflatten(-1, (3, heads, -1))
        context = attention_unchecked(qkv, cu_seqlens, max_seqlen, scale=scale).flatten(1)
    rows = quantized(backend, context.bfloat16())  # under autocast, attention may have returned float16
    hidden, rows = _project_add_norm(backend, rows, hidden, p.out, p.out_norm)
    wide = product(backend, rows, p.up.weight, p.up.scale, None)
    rows = quantized(backend, wide, p.up.bias, approximate)
    return _project_add_norm(backend, rows, hidden, p.down, p.down_norm)


def _project_add_norm(backend: str, x: Scaled, residual: Tensor, dense: Dense, norm: Norm) -> tuple[Tensor, Scaled]:
    y = product(backend, x, dense.weight, dense.scale, None)
    y, *rows = LAYER_NORM(backend, y, residual, norm.weight, norm.bias, dense.bias, norm.eps)
    return y, Scaled(*rows)


def joined(parts: Sequence[Dense]) -> Dense:
    """One dense layer in place of several with the same input; it returns their outputs side by side."""
    weights, scales, biases = zip(*parts, strict=True)
    weight = torch.cat([each.view(torch.uint8) for each in weights]).view(weights[0].dtype)
    return Dense(weight, torch.cat(scales), torch.cat(biases))
