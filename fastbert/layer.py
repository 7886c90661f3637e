"""How embeddings and an encoder layer are computed on packed tokens: for our own modules and for transformers' alike.

Both come apart into the same parts; `fastbert/families.py` says where to find them. A part that is what it looks like
(a plain nn.Linear, nn.Embedding, nn.LayerNorm or nn.Dropout) is not called: its parameters go into a fused op. One that
is not (wrapped by LoRA, quantised, replaced, or with hooks) is called, on packed tokens.

A layer whose parts are all plain is one op, where a backend has it: on small batches the way to a dozen ops takes
longer than they do. What else belongs here: another attention (relative or rotary positions) in `attend`, another MLP
(gated) in place of `up_gelu`, and a pre-norm layer beside `encoder_layer`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import backends, ops, random
from fastbert.families import LayerFacts
from fastbert.ops import checks
from fastbert.ops.attention import attention_unchecked
from fastbert.ops.encoder_layer import Settings, run_layer
from fastbert.ops.layer_norm import drop_rows
from fastbert.ops.op import autocast_dtype, needs_grad
from fastbert.ops.packed_layer import FWD as PACKED_LAYER
from fastbert.padding import Packing
from fastbert.prepared import PreparedLinear

# transformers' activation modules that are a GELU, and which form of it.
GELU_FORMS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}


@dataclass(slots=True)
class AttentionParts:
    """module: with its `scaling`; its mode, not that of the nn.Dropout, decides whether attention drops."""

    module: nn.Module
    heads: int
    projections: tuple[nn.Module, ...]  # to queries, keys and values, or one to all three
    dropout: nn.Module

    @property
    def p(self) -> float:
        return getattr(self.dropout, "p", 0.0) if self.module.training else 0.0

    def check_dropout(self) -> None:
        """Attention drops inside its kernel, so nothing could call a module that does more. Raises TypeError."""
        dropout = self.dropout
        idle = not self.module.training or isinstance(dropout, nn.Identity)
        if not idle and not is_plain_dropout(dropout):
            kind = type(dropout).__name__
            raise TypeError(f"attention drops inside its kernel: expected an nn.Dropout without hooks, given a {kind}")


_AFTER_ATTENTION = (nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear, nn.LayerNorm)
LEAVES = {len(kinds): kinds for kinds in ((*[nn.Linear] * n, *_AFTER_ATTENTION) for n in (1, 3))}  # by how many


@dataclass(slots=True)
class LayerParts:
    """The parts of one layer. `fastbert.families.LayerFacts` says which is which; None where the family has none."""

    attention: AttentionParts
    out: nn.Module
    out_dropout: nn.Module | None
    out_norm: nn.Module
    up: nn.Module
    activation: nn.Module | str
    down: nn.Module
    down_dropout: nn.Module | None
    down_norm: nn.Module
    leaves: tuple[nn.Module, ...]  # what has parameters, in the order of `ops.encoder_layer`
    containers: tuple[nn.Module, ...]  # between the layer and its parts, the attention module apart
    plain: bool | None = None  # whether all that has parameters is; None where nobody has looked at it in this forward

    @classmethod
    def of(cls, layer: nn.Module, facts: LayerFacts) -> "LayerParts":
        """Raises AttributeError where a part is not in its place."""
        found = facts.find(layer)
        parts = [None if place is None else found[place] for place in facts.places]
        after = 2 + len(facts.projections)
        leaves, containers = ([found[place] for place in places] for places in (facts.leaves, facts.containers))
        attention = AttentionParts(*parts[:2], tuple(parts[2:after]), parts[after])
        return cls(attention, *parts[after + 1 :], tuple(leaves), tuple(containers))

    def kinds(self) -> tuple[type[nn.Module], ...]:
        """What `leaves` are where they are plain."""
        return LEAVES[len(self.leaves)]

    def drops(self) -> bool:
        return self.attention.p > 0 or probability(self.out_dropout) > 0 or probability(self.down_dropout) > 0


# ---- what may be read instead of called


def hooks(module: nn.Module, but_of: tuple[str, ...] = ()) -> bool:
    """Whether the module has hooks, apart from those of the named libraries."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not any(kinds):
        return False
    owners = ((getattr(hook, "__module__", None) or "") for kind in kinds for hook in kind.values())
    return not but_of or not all(owner.startswith(but_of) for owner in owners)


def unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what `kind` does from its parameters; hooks apart."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


_NO_SCALE = torch.empty(0)  # of a dense layer that is not prepared for int8
_ORDINARY = (nn.Parameter, Tensor, type(None))


def ordinary(weight: Tensor | None) -> bool:
    """No quantised tensor or the like, which an op could not read. FSDP2's are ordinary once their layer runs.

    None: the weight is computed by a parametrization when it is read.
    """
    kind = type(weight)
    return kind in _ORDINARY or kind.__module__.startswith("torch.distributed.")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """`unchanged`, and no hooks; read where it is quickest, because it is asked of every leaf of every layer."""
    cls, own = type(module), module.__dict__
    if (cls is not kind and cls.forward is not kind.forward) or "forward" in own:
        return False
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooked


def is_plain_linear(module: nn.Module) -> bool:
    return is_plain(module, nn.Linear) and module.bias is not None and ordinary(module._parameters.get("weight"))


def is_plain_norm(module: nn.Module) -> bool:
    return is_plain(module, nn.LayerNorm) and module.bias is not None and module.weight.dim() == 1


def is_plain_dropout(module: nn.Module | None) -> bool:
    return module is None or is_plain(module, nn.Dropout)


def is_plain_embedding(module: nn.Module | None) -> bool:
    if module is None:
        return True
    if not is_plain(module, nn.Embedding) or not ordinary(module._parameters.get("weight")):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def probability(dropout: nn.Module | None) -> float:
    return getattr(dropout, "p", 0.0) if dropout is not None and dropout.training else 0.0


def _definer_of_forward(cls: type[nn.Module]) -> type:
    """Where a subclass computes something of its own, the `drops` that it inherits may not fit."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def drops(module: nn.Module) -> bool:
    """Whether a forward now may drop something within the module, one of ours or whatever stands in its place."""
    cls = type(module)
    if "drops" in vars(cls) or "drops" in vars(_definer_of_forward(cls)):
        return module.drops()
    parts = list(module.modules())
    return any([part.training for part in parts]) and any([isinstance(x, nn.Dropout) and x.p > 0 for x in parts])


# ---- parts on packed tokens


def dense(x: Tensor, linear: nn.Module) -> Tensor:
    """(T, K) -> (T, C)."""
    return ops.linear(x, linear.weight, linear.bias) if is_plain_linear(linear) else linear(x)


def norm(x: Tensor, layer_norm: nn.Module) -> Tensor:
    if is_plain_norm(layer_norm):
        return ops.layer_norm(x, layer_norm.weight, layer_norm.bias, layer_norm.eps)
    return layer_norm(x)


def project_qkv(hidden: Tensor, projections: tuple[nn.Module, ...], heads: int) -> Tensor:
    """(T, C) -> (T, 3, H, D).

    Where the weights are three, they are put together anew each time: what lived longer would go stale. Their products
    are put together instead where those are smaller (csrc/cpu/encoder_layer.cpp does the same).
    """
    few = not torch.compiler.is_compiling() and hidden.shape[0] <= hidden.shape[1]
    if len(projections) == 1:
        qkv = dense(hidden, projections[0])
    elif not few and all(map(is_plain_linear, projections)):
        weight, bias = (torch.cat([getattr(linear, name) for linear in projections]) for name in ("weight", "bias"))
        qkv = ops.linear(hidden, weight, bias)
    else:
        qkv = torch.cat([dense(hidden, linear) for linear in projections], -1)
    return qkv.reshape(hidden.shape[0], 3, heads, qkv.shape[-1] // (3 * heads))


def up_gelu(hidden: Tensor, up: nn.Module, activation: nn.Module | str) -> Tensor:
    """(T, C) -> (T, intermediate size). activation: a GELU's module, or the name of its form."""
    form = gelu_form(activation)
    if is_plain_linear(up):
        return ops.dense_gelu(hidden, up.weight, up.bias, form)
    return F.gelu(up(hidden), approximate=form)


def gelu_form(activation: nn.Module | str) -> str:
    """A form's name, or that of a GELU's module."""
    if isinstance(activation, str):
        return activation
    return activation.approximate if type(activation) is nn.GELU else GELU_FORMS[type(activation).__name__]


def project_add_norm(
    x: Tensor,
    residual: Tensor,
    linear: nn.Module,
    dropout: nn.Module | None,
    layer_norm: nn.Module,
    rng: Tensor | None,
    site: int,
) -> Tensor:
    """What ends both halves of a layer: a projection, then bias, dropout, residual sum and LayerNorm in one pass."""
    x, bias = (ops.linear(x, linear.weight), linear.bias) if is_plain_linear(linear) else (linear(x), None)
    if is_plain_norm(layer_norm) and is_plain_dropout(dropout):
        dropping = {"dropout_p": probability(dropout), "rng": rng, "site": site}
        return ops.add_layer_norm(
            x, residual, layer_norm.weight, layer_norm.bias, layer_norm.eps, x_bias=bias, **dropping
        )
    return norm(drop(x if bias is None else x + bias, dropout, rng, site) + residual, layer_norm)


def drop(x: Tensor, dropout: nn.Module | None, rng: Tensor | None, site: int) -> Tensor:
    """Dropout outside a fused op: the same elements that it would drop."""
    return drop_rows(x, probability(dropout), rng, site) if is_plain_dropout(dropout) else dropout(x)


# ---- the whole


def attend(
    parts: AttentionParts, hidden: Tensor, packing: Packing, rng: Tensor | None, site: int, with_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """(T, C) -> what the heads give, (T, C), and the attention weights in the caller's form where they are wanted."""
    parts.check_dropout()
    attending = (packing.cu_seqlens, packing.max_seqlen)
    options = {"scale": parts.module.scaling, "dropout_p": parts.p, "rng": rng, "site": site}
    if with_weights and torch.is_grad_enabled():
        return _attend_by_weights(parts, hidden, packing, options)
    qkv = project_qkv(hidden, parts.projections, parts.heads)
    context = attention_unchecked(qkv, *attending, **options).flatten(1)
    weights = packing.unpack_weights(ops.attention_weights(qkv, *attending, **options)) if with_weights else None
    return context, weights


def _attend_by_weights(
    parts: AttentionParts, hidden: Tensor, packing: Packing, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`attend` with the weights in the graph of the output, so that gradients with respect to them explain it.

    As in transformers' eager attention, a projection that a loss does not depend on gets no gradient.
    """
    each = [dense(hidden, linear) for linear in parts.projections]
    q, k, v = (x.unflatten(-1, (parts.heads, -1)) for x in (each if len(each) == 3 else each[0].chunk(3, -1)))
    scored = torch.stack([q, k, v.detach()], 1)
    weights = ops.attention_weights(scored, packing.cu_seqlens, packing.max_seqlen, **options)
    weights, grid = packing.unpack_weights(weights), packing.grid()
    context = weights @ grid.unpack(v).transpose(1, 2)
    return grid.pack(context.transpose(1, 2)).flatten(1), weights


def encoder_layer(
    parts: LayerParts, hidden: Tensor, packing: Packing, rng: Tensor | None, turn: int, with_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A post-norm layer: (T, C) -> (T, C), and the attention weights in the caller's form where they are wanted.

    rng: the dropout key of the forward. turn: which layer of the forward this is, from 0, for its dropout sites. Reads
    parameters, so it may only run within the layer's own call (FSDP2 gathers them there).
    """
    whole = None if with_weights else _as_one(parts, hidden, packing, rng, turn)
    if whole is None and not with_weights:
        whole = _as_prepared(parts, hidden, packing)
    if whole is not None:
        return whole, None
    sites = random.layer_sites(turn)
    context, weights = attend(parts.attention, hidden, packing, rng, sites[0], with_weights)
    hidden = project_add_norm(context, hidden, parts.out, parts.out_dropout, parts.out_norm, rng, sites[1])
    wide = up_gelu(hidden, parts.up, parts.activation)
    return project_add_norm(wide, hidden, parts.down, parts.down_dropout, parts.down_norm, rng, sites[2]), weights


def _as_one(parts: LayerParts, hidden: Tensor, packing: Packing, rng: Tensor | None, turn: int) -> Tensor | None:
    """The layer in one call, or two around another backend's attention; None where a part is not plain, or no backend
    has an op for the whole."""
    parameters, dtype = _parameters(parts), autocast_dtype(hidden)
    if parameters is None or not (is_plain_dropout(parts.out_dropout) and is_plain_dropout(parts.down_dropout)):
        return None
    live, attention, form = needs_grad(hidden, *parameters), parts.attention, gelu_form(parts.activation)
    device = hidden.device.type
    backend = backends.find("encoder_layer", device, dtype, backward=live, size=hidden.shape[1])
    if backend is None:
        return None
    attention.check_dropout()
    rates = attention.p, probability(parts.out_dropout), probability(parts.down_dropout)
    for p, bits in zip(rates, (random.ATTENTION_BITS, random.ROW_BITS, random.ROW_BITS), strict=True):
        if p:
            checks.dropout("encoder_layer", p, rng, hidden.device, bits)
    sizes = packing.max_seqlen, attention.heads, attention.module.scaling
    eps = parts.out_norm.eps, parts.down_norm.eps
    settings = Settings(*sizes, *rates, random.layer_sites(turn)[0], form, dtype, *eps)
    if attends_elsewhere(backend, device, dtype, live, parameters[-10].shape[1] // attention.heads):
        context, _ = attend(attention, hidden, packing, rng, settings.site, False)
        return run_layer(backend, live, hidden, context, parameters[-10:], None, rng, settings)
    return run_layer(backend, live, hidden, None, parameters, packing.cu_seqlens, rng, settings)


def _as_prepared(parts: LayerParts, hidden: Tensor, packing: Packing) -> Tensor | None:
    """The layer in one call where some of its dense layers are prepared and the others plain; else None."""
    if not any([type(module) is PreparedLinear for module in parts.leaves]):
        return None
    found, scales = [], []
    for module, kind in zip(parts.leaves, parts.kinds(), strict=True):
        prepared = is_plain(module, PreparedLinear)
        tensors = module.__dict__ if prepared else module._parameters
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or bias is None or not (prepared or (is_plain(module, kind) and ordinary(weight))):
            return None
        found += weight, bias
        if kind is nn.Linear:
            scales.append(_NO_SCALE if (scale := module.__dict__.get("scale")) is None else scale)
    backend = backends.find("packed_layer", hidden.device.type, hidden.dtype, backward=False)
    if backend is None or parts.drops() or needs_grad(hidden, *found):
        return None
    form, attention = gelu_form(parts.activation), parts.attention
    sizes = packing.cu_seqlens, packing.max_seqlen, attention.heads, attention.module.scaling
    return PACKED_LAYER(backend, hidden, found, scales, *sizes, form, parts.out_norm.eps, parts.down_norm.eps)


def attends_elsewhere(backend: str, device_type: str, dtype: torch.dtype, live: bool, head_size: int) -> bool:
    """Whether another backend is the choice for attention. On a CPU there is none."""
    if device_type == "cpu":
        return False
    return backends.choose("attention", device_type, dtype, backward=live, size=head_size) != backend


def _parameters(parts: LayerParts) -> list[Tensor] | None:
    """Weights and biases in the order of `ops.encoder_layer`; None unless all of their modules are plain."""
    if parts.plain is None:
        parts.plain = all([is_plain(module, kind) for module, kind in zip(parts.leaves, parts.kinds(), strict=True)])
    found = []
    for module in parts.leaves if parts.plain else ():
        own = module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or bias is None or not ordinary(weight):
            return None
        found += weight, bias
    return found or None


def embed(
    module: nn.Module,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor,
    inputs_embeds: Tensor | None,
    rng: Tensor | None,
) -> Tensor:
    """Ids (T,), or inputs_embeds (T, width) in place of input_ids, to (T, width): rows summed, LayerNorm, dropout.

    module: holds word_embeddings, position_embeddings, token_type_embeddings (which may be missing or None), LayerNorm
    and dropout, ours or transformers'.
    """
    words, positions = module.word_embeddings, module.position_embeddings
    types = getattr(module, "token_type_embeddings", None)
    if types is not None and token_type_ids is None:
        token_type_ids = torch.zeros_like(position_ids)
    tables = (words if inputs_embeds is None else None, positions, types)
    fused = all(map(is_plain_embedding, tables)) and is_plain_norm(module.LayerNorm)
    fused = fused and (types is None or types.padding_idx is None)
    if not (fused and is_plain_dropout(module.dropout)):
        x = (words(input_ids) if inputs_embeds is None else inputs_embeds) + positions(position_ids)
        x = x if types is None else x + types(token_type_ids)
        return drop(norm(x, module.LayerNorm), module.dropout, rng, random.EMBEDDING_SITE)
    word, padding_idx = words.weight, words.padding_idx
    if inputs_embeds is not None:  # rows of a table, each used once
        word, padding_idx = inputs_embeds, None
        input_ids = torch.arange(inputs_embeds.shape[0], device=inputs_embeds.device)
    return ops.embedding(
        input_ids,
        position_ids,
        token_type_ids,
        word,
        positions.weight,
        None if types is None else types.weight,
        module.LayerNorm.weight,
        module.LayerNorm.bias,
        module.LayerNorm.eps,
        padding_idx=padding_idx,
        position_padding_idx=positions.padding_idx,
        dropout_p=probability(module.dropout),
        rng=rng,
        site=random.EMBEDDING_SITE,
    )
