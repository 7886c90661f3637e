"""FLOPs of fastbert's operators: `import fastbert.flops` tells them to torch.utils.flop_counter.FlopCounterMode.

Counted as PyTorch counts its own: two per multiplication and addition of a matrix product; nothing for sums, softmax,
GELU, LayerNorm and look-ups; attention's weights once more in the backward, which computes them again. Packed tokens
alone count, padding does not. Not imported by fastbert itself, because torch.utils.flop_counter imports Triton.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from fastbert.ops.encoder_layer import DOWN, OUT, UP
from fastbert.ops.op import NAMESPACE

FORMULAS: dict[str, Callable[..., int]] = {}


def _of(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def register(formula: Callable[..., int]) -> Callable[..., int]:
        FORMULAS[name] = formula
        return formula

    return register


def _product(x: Tensor, channels: int) -> int:
    """Of x (..., K) and a weight (channels, K)."""
    return 2 * prod(x.shape) * channels


def _pairs(cu_seqlens: Tensor, max_seqlen: int) -> int:
    """How many pairs of a query and a key there are, in all sequences; the most, if lengths are not known."""
    if isinstance(cu_seqlens, FakeTensor) or cu_seqlens.device.type == "meta":
        return (len(cu_seqlens) - 1) * max_seqlen**2
    return int(cu_seqlens.diff().long().square().sum())


# ---- products


@_of("linear_fwd")
@_of("dense_gelu_fwd")
@_of("cross_entropy_fwd")
@_of("linear_max_fwd")
def _dense(x, weight, *_):
    return _product(x, weight.shape[0])


@_of("linear_bwd")
def _dense_backward(dy, x, weight, need_dx, need_dweight):
    return _product(x, weight.shape[0]) * (need_dx + need_dweight)


@_of("dense_gelu_bwd")
def _dense_gelu_backward(dy, x, weight, preactivation, approximate, *need):
    return _product(x, weight.shape[0]) * sum(need)


@_of("cross_entropy_bwd")
def _cross_entropy_backward(dloss, hidden, weight, labels, dlogits, ignore_index, *need):
    return _product(hidden, weight.shape[0]) * sum(need)


@_of("linear_max_bwd")
def _linear_max_backward(dy, x, weight, rows, *need):
    return 2 * prod(dy.shape) * x.shape[1] * sum(need)  # each maximum comes from one row


@_of("packed_linear_fwd")
@_of("packed_linear_max_fwd")
def _packed(x, weight, scale, bias, channels, *_):
    return _product(x, channels)


# ---- attention


@_of("attention_fwd")
def _attention(qkv, cu_seqlens, max_seqlen, *_):
    return 2 * _attended(qkv, cu_seqlens, max_seqlen)


@_of("attention_bwd")
def _attention_backward(dout, qkv, out, lse, cu_seqlens, max_seqlen, *_):
    return 5 * _attended(qkv, cu_seqlens, max_seqlen)


@_of("relative_attention_fwd")
def _relative(qkv, slots, keys, queries, bias, cu_seqlens, max_seqlen, *_):
    return 2 * _attended(qkv, cu_seqlens, max_seqlen) + _of_positions(qkv, keys, queries)


@_of("relative_attention_bwd")
def _relative_backward(dout, qkv, out, lse, slots, keys, queries, bias, cu_seqlens, max_seqlen, *rest):
    products = 2 + rest[-1]  # again; the gradients of queries and keys; those of the tables
    return 5 * _attended(qkv, cu_seqlens, max_seqlen) + products * _of_positions(qkv, keys, queries)


def _attended(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> int:
    """One product over all pairs of a query and a key. qkv: (T, 3, H, D)."""
    return 2 * _pairs(cu_seqlens, max_seqlen) * qkv.shape[2] * qkv.shape[3]


def _of_positions(qkv: Tensor, *tables: Tensor | None) -> int:
    """Products of all tokens with tables of relative positions, (W, H, D)."""
    return sum(2 * qkv.shape[0] * prod(table.shape) for table in tables if table is not None)


# ---- layers


class _Layer:
    """The sizes of a layer's products. A weight may be packed, so they are read from biases."""

    def __init__(self, hidden: Tensor, context: Tensor | None, parameters: Sequence[Tensor]) -> None:
        (self.tokens, self.width), self.wide = hidden.shape, len(parameters[UP + 1])
        before = sum(len(bias) for bias in parameters[1:OUT:2])  # of queries, keys and values
        self.inner = before // 3 if context is None else context.shape[1]

    def product(self, inner: int, outer: int) -> int:
        return 2 * self.tokens * inner * outer

    def scores(self, cu_seqlens: Tensor, max_seqlen: int) -> int:
        return 2 * _pairs(cu_seqlens, max_seqlen) * self.inner

    def forward(self, cu_seqlens: Tensor | None, max_seqlen: int) -> int:
        after = self.product(self.inner, self.width) + 2 * self.product(self.width, self.wide)
        if cu_seqlens is None:
            return after
        return after + self.product(self.width, 3 * self.inner) + 2 * self.scores(cu_seqlens, max_seqlen)


@_of("encoder_layer_fwd")
def _layer(hidden, context, parameters, cu_seqlens, slots, keys, queries, bias, rng, max_seqlen, *rest):
    return _stack(hidden, context, parameters, (keys, queries), cu_seqlens, max_seqlen, rest[-1])


@_of("packed_layer_fwd")
def _packed_layer(hidden, context, parameters, scales, cu_seqlens, slots, keys, queries, bias, max_seqlen, *rest):
    return _stack(hidden, context, parameters, (keys, queries), cu_seqlens, max_seqlen, rest[-1])


def _stack(hidden, context, parameters, tables, cu_seqlens, max_seqlen, layers):
    """`parameters` has those of each layer in turn."""
    one = _Layer(hidden, context, parameters[: len(parameters) // layers])
    return layers * (one.forward(cu_seqlens, max_seqlen) + _of_positions(hidden, *tables))


@_of("encoder_layer_bwd")
def _layer_backward(
    dy, hidden, context, parameters, saved, cu_seqlens, slots, keys, queries, bias, rng, max_seqlen, *rest
):
    """Down to the first part of the layer that needs a gradient."""
    layer, of_inputs, (*wanted, of_tables) = _Layer(hidden, context, parameters), rest[-1][:2], rest[-1][2:]
    mlp, projection = layer.product(layer.width, layer.wide), layer.product(layer.inner, layer.width)
    below = lambda part: any(of_inputs) or of_tables or any(wanted[:part])  # noqa: E731
    found = mlp * (wanted[DOWN] + below(DOWN) + wanted[UP] + below(UP)) + projection * wanted[OUT]
    if context is not None:
        return found + projection * of_inputs[1]
    if not below(OUT):
        return found
    weights = sum(
        layer.product(layer.width, len(parameters[i + 1])) for i in range(0, len(wanted) + OUT, 2) if wanted[i]
    )
    inputs = layer.product(layer.width, 3 * layer.inner) * of_inputs[0]
    positions = (2 + of_tables) * _of_positions(hidden, keys, queries)
    return found + projection + 5 * layer.scores(cu_seqlens, max_seqlen) + positions + weights + inputs


for _namespace in dict.fromkeys(NAMESPACE.values()):
    for _name, _formula in FORMULAS.items():
        if hasattr(_packets := getattr(torch.ops, _namespace), _name):
            register_flop_formula(getattr(_packets, _name), get_raw=True)(
                lambda *args, out_val=None, formula=_formula: int(formula(*args))
            )
