"""packed_layer: `encoder_layer` for inference, whose products take packed weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention import RelativePositions, attention_ref
from fastbert.ops.layer_norm import add_layer_norm_ref
from fastbert.ops.op import Primitive
from fastbert.ops.packed_linear import packed_linear_ref


def packed_layer_ref(
    hidden: Tensor,
    context: Tensor | None,
    parameters: Sequence[Tensor],
    scales: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    slots: Tensor | None,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    position_bias: Tensor | None,
    max_seqlen: int,
    heads: int,
    scale: float,
    approximate: str,
    out_eps: float,
    down_eps: float,
    layers: int,
) -> Tensor:
    """Post-norm layers in plain PyTorch. `fastbert.layer` calls the operator for layers of prepared modules.

    context: the output of the layer's attention, if that ran before; then cu_seqlens is None, and the projections are
    left out. parameters: those of `encoder_layer`; any weight of a product may be packed. scales: the scale of each
    product as `packed_linear` takes it; without elements if it takes none. slots and what follows: the tables of
    `relative_attention`, the same in all layers; None for plain attention. layers: the number of layers, whose
    parameters and scales follow each other; with several there is no context.
    """
    tables = position_keys, position_queries, position_bias
    positions = None if slots is None else RelativePositions(slots, *tables)
    for i in range(layers):
        own, of = (given[i * len(given) // layers : (i + 1) * len(given) // layers] for given in (parameters, scales))
        sizes = max_seqlen, heads, scale, approximate, out_eps, down_eps
        hidden = _one_layer(hidden, context, own, of, cu_seqlens, positions, *sizes)
    return hidden


def _one_layer(
    hidden, context, parameters, scales, cu_seqlens, positions, max_seqlen, heads, scale, approximate, out_eps, down_eps
) -> Tensor:
    *projections, out, out_norm, up, down, down_norm = zip(parameters[::2], parameters[1::2], strict=True)
    if context is None:
        each = [_dense(hidden, *part, of) for part, of in zip(projections, scales[:-3], strict=True)]
        qkv = _between(torch.cat(each, -1), out, *projections).unflatten(-1, (3, heads, -1))
        context = attention_ref(qkv, cu_seqlens, max_seqlen, scale=scale, positions=positions).flatten(1)
    x = _dense(context.to(hidden.dtype), out[0], torch.zeros_like(out[1]), scales[-3])
    hidden = add_layer_norm_ref(x, hidden, *out_norm, out_eps, x_bias=out[1])
    x = _between(_dense(hidden, *up, scales[-2], approximate), up, down)
    x = _dense(x.to(hidden.dtype), down[0], torch.zeros_like(down[1]), scales[-1])
    return add_layer_norm_ref(x, hidden, *down_norm, down_eps, x_bias=down[1])


def _between(x: Tensor, *products: Sequence[Tensor]) -> Tensor:
    """x as it is kept between these products: in bfloat16 if all are int8 in a float32 model."""
    quantized = all(weight.dtype == torch.int8 for weight, _ in products)
    return x.bfloat16() if quantized and x.dtype == torch.float32 else x


def _dense(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, approximate: str | None = None) -> Tensor:
    if weight.dim() > 2:
        return packed_linear_ref(x, weight, scale if scale.numel() else None, bias, len(bias), approximate)
    y = F.linear(x, weight, bias)
    return y if approximate is None else F.gelu(y, approximate=approximate)


def _fake(hidden, context, parameters, scales, cu_seqlens, slots, keys, queries, bias, *settings):
    checks.one_device("packed_layer", hidden, context, *parameters, *scales, cu_seqlens, slots, keys, queries, bias)
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


FWD = Primitive(
    "packed_layer_fwd",
    "(Tensor hidden, Tensor? context, Tensor[] parameters, Tensor[] scales, Tensor? cu_seqlens, Tensor? slots,"
    " Tensor? position_keys, Tensor? position_queries, Tensor? position_bias, SymInt max_seqlen, int heads,"
    " float scale, str approximate, float out_eps, float down_eps, int layers) -> Tensor",
    _fake,
    packed_layer_ref,
)
