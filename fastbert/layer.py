"""How embeddings and encoder layers are computed on packed tokens, for our own modules and for transformers' alike.

Both kinds of modules are split into the same parts (`fastbert/parts.py`). A plain part (an unmodified nn.Linear,
nn.Embedding, nn.LayerNorm or nn.Dropout) is not called: its parameters go into a fused op. Any other part (wrapped by
LoRA, quantised, replaced, or with hooks) is called as a module, on packed tokens.

A layer whose parts are all plain runs as one op where a backend has that op: on small batches the overhead of calling a
dozen ops exceeds their run time. All layers together run as one op where no gradient is needed and nothing needs the
outputs between them. Where scores depend on the distance between tokens (`Distances`), that is so if all layers share
the tables (MPNet); if each projects its own (DeBERTa), each layer is one op. New variants belong here too: another
attention (rotary positions) in `attend`, another MLP (gated) in place of `up_gelu`, and a pre-norm layer beside
`encoder_layer`.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import backends, config, distances, ops, random
from fastbert.ops import checks
from fastbert.ops.attention import (
    RelativePositions,
    attention_op,
    attention_to_seen,
    attention_unchecked,
    tables_beside,
)
from fastbert.ops.encoder_layer import OUT, Settings, run_layer
from fastbert.ops.layer_norm import drop_rows
from fastbert.ops.op import autocast_dtype, autocast_on, needs_grad
from fastbert.ops.packed_layer import FWD as PACKED_LAYER
from fastbert.ops.relative_attention import relative_attention_unchecked
from fastbert.ops.scaled_layer import Norm, Parameters, scaled_layer
from fastbert.ops.scaled_linear import Scaled
from fastbert.ops.scaled_linear import choose as choose_scaled
from fastbert.padding import Packing
from fastbert.parts import (
    AttentionParts,
    EmbeddingParts,
    Kept,
    LayerParts,
    is_plain_dropout,
    is_plain_embedding,
    is_plain_linear,
    is_plain_norm,
    is_prepared,
    plain_parameters,
    prepared_parameters,
    probability,
    read_prepared,
)
from fastbert.prepared import PRECISIONS, PreparedLinear, ScaledLinear, joined_dense

# transformers' activation modules that compute GELU -> its form, as the ops' `approximate`.
GELU_FORMS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}

# Activation functions by the names that configurations use, for poolers and for DeBERTa-v2's convolution.
ACTIVATIONS = {"tanh": torch.tanh, "relu": F.relu} | {
    name: functools.partial(F.gelu, approximate=form) for name, form in config.GELU_FORMS.items()
}


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

    Three weights are concatenated in each call, because a cached copy would go stale. For few tokens on a CPU their
    outputs are smaller and are concatenated instead (joins_weights in csrc/*/encoder_layer.cpp does the same).
    """
    few = hidden.is_cpu and not torch.compiler.is_compiling() and hidden.shape[0] <= hidden.shape[1]
    if len(projections) == 1:
        qkv = dense(hidden, projections[0])
    elif all(map(_is_scaled, projections)):
        qkv = ops.scaled_linear(hidden.bfloat16(), *joined_dense(projections))
    elif not few and all(map(is_plain_linear, projections)):
        weight, bias = (torch.cat([getattr(linear, name) for linear in projections]) for name in ("weight", "bias"))
        qkv = ops.linear(hidden, weight, bias)
    else:
        qkv = torch.cat([dense(hidden, linear) for linear in projections], -1)
    return qkv.reshape(hidden.shape[0], 3, heads, qkv.shape[-1] // (3 * heads))


def _is_scaled(module: nn.Module) -> bool:
    return type(module) is ScaledLinear and is_prepared(module)


def up_gelu(hidden: Tensor, up: nn.Module, activation: nn.Module | str) -> Tensor:
    """(T, C) -> (T, intermediate size). activation: a GELU module, or the name of a form."""
    form = gelu_form(activation)
    if is_plain_linear(up):
        return ops.dense_gelu(hidden, up.weight, up.bias, form)
    return F.gelu(up(hidden), approximate=form)


def gelu_form(activation: nn.Module | str) -> str:
    """The form of a GELU module, as the ops' `approximate`. A form's name is returned unchanged."""
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
    """The end of both halves of a layer: a projection, then bias, dropout, residual sum and LayerNorm in one pass."""
    x, bias = (ops.linear(x, linear.weight), linear.bias) if is_plain_linear(linear) else (linear(x), None)
    if is_plain_norm(layer_norm) and is_plain_dropout(dropout):
        dropping = {"dropout_p": probability(dropout), "rng": rng, "site": site}
        return ops.add_layer_norm(
            x, residual, layer_norm.weight, layer_norm.bias, layer_norm.eps, x_bias=bias, **dropping
        )
    return norm(drop(x if bias is None else x + bias, dropout, rng, site) + residual, layer_norm)


def drop(x: Tensor, dropout: nn.Module | None, rng: Tensor | None, site: int) -> Tensor:
    """Dropout outside a fused op. It drops the same elements that the fused op would."""
    return drop_rows(x, probability(dropout), rng, site) if is_plain_dropout(dropout) else dropout(x)


# ---- distances


class Distances(NamedTuple):
    """What all layers of a forward share in models whose scores depend on the distance between query and key.

    slots: as in `ops.relative_attention`, but counted from the table's slot `first`. rows: (W, C), DeBERTa's relative
    embeddings from the slot `first` on, normalised; every layer projects them. bias: (H, W), MPNet's, the same in all
    layers. encoder: the module with the table that the rows come from.
    """

    slots: Tensor
    first: int
    rows: Tensor | None = None
    bias: Tensor | None = None
    encoder: nn.Module | None = None


def distances_of(encoder: nn.Module, packing: Packing) -> Distances | None:
    """The distances of one forward; None for an encoder whose scores do not depend on them.

    encoder: ours or transformers', which name the tables alike. DeBERTa's slots are only those that a sequence of the
    batch can reach: in DeBERTa-v3, 255 of 512 for 128 tokens.
    """
    device = packing.cu_seqlens.device
    if hasattr(encoder, "relative_attention_bias"):
        return Distances(distances.mpnet(device), 0, bias=_table(encoder.relative_attention_bias).T)
    if not getattr(encoder, "relative_attention", False):
        return None
    longest = None if torch.compiler.is_compiling() else max(packing.max_seqlen, 1)  # symbolic when compiling
    sizes = encoder.position_buckets, encoder.max_relative_positions, longest, device
    slots, first, last = distances.disentangled(*sizes)
    return Distances(slots, first, _rows(encoder, first, last), encoder=encoder)


def _rows(encoder: nn.Module, first: int = 0, last: int | None = None) -> Tensor:
    rows = _table(encoder.rel_embeddings)[first:last]
    return norm(rows, encoder.LayerNorm) if hasattr(encoder, "LayerNorm") else rows


def _table(embedding: nn.Module) -> Tensor:
    if is_plain_embedding(embedding):
        return embedding.weight
    return embedding(torch.arange(embedding.weight.shape[0], device=embedding.weight.device))


def positions_of(
    parts: AttentionParts, given: Distances | None, rng: Tensor | None, turn: int
) -> RelativePositions | None:
    """What the distance between tokens adds to this layer's scores; None if nothing."""
    if given is None or given.rows is None:
        return None if given is None else RelativePositions(given.slots, bias=given.bias)
    module = parts.module
    kinds = [kind for kind in ("p2c", "c2p") if kind in module.pos_att_type]
    if not kinds:
        return None
    rows = _drop_positions(given, module.pos_dropout, rng, random.position_site(turn))
    made = _kept_positions(parts, given, kinds) if rows is given.rows else None
    made = _project_positions(parts, rows, kinds) if made is None else made
    keys, queries = (
        None if (x := made.get(kind)) is None else x.unflatten(-1, (parts.heads, -1)) for kind in distances.KINDS
    )
    return RelativePositions(given.slots, keys, queries)


def _kept_positions(parts: AttentionParts, given: Distances, kinds: list[str]) -> dict[str, Tensor] | None:
    """Position keys and queries by dense layers that `fastbert.prepare` froze: computed once, for all slots. None where
    a module that makes them is not prepared or not plain."""
    encoder, makers = given.encoder, _makers(parts, kinds).values()
    if torch.compiler.is_compiling() or not all(map(is_prepared, makers)):
        return None
    of_rows = [encoder.rel_embeddings, *([encoder.LayerNorm] if hasattr(encoder, "LayerNorm") else [])]
    if not is_plain_embedding(of_rows[0]) or not all(map(is_plain_norm, of_rows[1:])):
        return None

    def make() -> dict[str, Tensor]:
        return {kind: x.contiguous() for kind, x in _project_positions(parts, _rows(encoder), kinds).items()}

    sources = [tensor for each in of_rows for tensor in each.parameters()]
    kept = next(iter(makers)).keep([*sources, *[each.weight for each in makers]], make)
    return {kind: x[given.first :][: given.rows.shape[0]] for kind, x in kept.items()}


def _makers(parts: AttentionParts, kinds: list[str]) -> dict[str, nn.Module]:
    """The dense layers that project positions to queries (p2c) and keys (c2p). With share_att_key they are those that
    project the tokens."""
    module, of_tokens = parts.module, parts.projections
    queries, keys = of_tokens[:2] if len(of_tokens) == 3 else of_tokens * 2
    if not module.share_att_key:
        queries, keys = getattr(module, "pos_query_proj", None), getattr(module, "pos_key_proj", None)
    return {kind: queries if kind == "p2c" else keys for kind in kinds}


def _project_positions(parts: AttentionParts, rows: Tensor, kinds: list[str]) -> dict[str, Tensor]:
    if parts.module.share_att_key and len(parts.projections) == 1:
        return _project_by_qkv(rows, parts.projections[0], kinds)
    return {kind: dense(rows, maker) for kind, maker in _makers(parts, kinds).items()}


def _project_by_qkv(rows: Tensor, qkv: nn.Module, kinds: list[str]) -> dict[str, Tensor]:
    """`_project_positions` by a single projection to queries, keys and values."""
    if is_plain_linear(qkv):  # then only the parts of its weight that are needed
        width = rows.shape[1]
        part = slice(0 if "p2c" in kinds else width, 2 * width if "c2p" in kinds else width)
        both = ops.linear(rows, qkv.weight[part], qkv.bias[part])
        return dict(zip(kinds, both.chunk(len(kinds), -1), strict=True))
    queries, keys, _ = dense(rows, qkv).chunk(3, -1)
    return {kind: queries if kind == "p2c" else keys for kind in kinds}


def _drop_positions(given: Distances, dropout: nn.Module, rng: Tensor | None, site: int) -> Tensor:
    """The rows after dropout. The mask depends on a row's slot in the table, not on how many rows a batch needs."""
    rows, p = given.rows, probability(dropout)
    if not is_plain_dropout(dropout):
        return dropout(rows)
    if random.threshold(p, random.ROW_BITS) == 0:
        return rows
    keep = random.row_keep(rng, site, *rows.shape, p, given.first)
    return torch.where(keep, rows * random.keep_scale(p, random.ROW_BITS), 0)


# ---- whole layers


def attend(
    parts: AttentionParts,
    hidden: Tensor,
    packing: Packing,
    rng: Tensor | None,
    turn: int,
    with_weights: bool,
    given: Distances | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(T, C) -> the heads' output (T, C), and the attention weights in the caller's form if with_weights, else None."""
    prepared = any([isinstance(each, PreparedLinear) for each in parts.projections])
    with _without_autocast(hidden) if prepared else contextlib.nullcontext():
        return _attend(parts, hidden, packing, rng, turn, with_weights, positions_of(parts, given, rng, turn))


def _without_autocast(hidden: Tensor) -> AbstractContextManager:
    """For what is computed beside prepared products: `prepare` has set the dtypes."""
    device = hidden.device.type
    return torch.autocast(device, enabled=False) if autocast_on(device) else contextlib.nullcontext()


def _attend(
    parts: AttentionParts,
    hidden: Tensor,
    packing: Packing,
    rng: Tensor | None,
    turn: int,
    with_weights: bool,
    positions: RelativePositions | None,
) -> tuple[Tensor, Tensor | None]:
    parts.check_dropout()
    if packing.unseen is not None and with_weights:
        raise ValueError("output_attentions of a batch with unseen tokens; expected none of them, or no weights")
    attending = (packing.cu_seqlens, packing.max_seqlen)
    options = {"scale": parts.scaling, "dropout_p": parts.p, "rng": rng, "site": random.layer_sites(turn)[0]}
    if with_weights and torch.is_grad_enabled():
        return _attend_by_weights(parts, hidden, packing, options | {"positions": positions})
    qkv = project_qkv(hidden, parts.projections, parts.heads)
    if packing.unseen is not None:
        context = attention_to_seen(qkv, *attending, packing.unseen, **options, positions=positions)
    elif positions is None:
        context = attention_unchecked(qkv, *attending, **options)
    else:
        context = relative_attention_unchecked(qkv, *attending, positions, **options)
    if not with_weights:
        return context.flatten(1), None
    weights = ops.attention_weights(qkv, *attending, **options, positions=positions)
    return context.flatten(1), packing.unpack_weights(weights)


def _attend_by_weights(
    parts: AttentionParts, hidden: Tensor, packing: Packing, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`attend` with the weights in the output's autograd graph, so that gradients with respect to them can explain it.

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
    parts: LayerParts,
    hidden: Tensor,
    packing: Packing,
    rng: Tensor | None,
    turn: int,
    with_weights: bool = False,
    given: Distances | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A post-norm layer: (T, C) -> (T, C), and the attention weights in the caller's form if with_weights, else None.

    rng: the dropout key of the forward. turn: which layer of the forward this is, from 0, for its dropout sites. given:
    the distances that its scores depend on, or None. Reads parameters, so it may only run within the layer's own call
    (FSDP2 gathers them there).
    """
    context = weights = None
    if with_weights or packing.unseen is not None or _attends_apart(given):
        context, weights = attend(parts.attention, hidden, packing, rng, turn, with_weights, given)
    if not with_weights and not _is_taken_apart():
        place = _Place(packing, rng, turn, given)
        for way in (_as_one, _as_prepared, _as_scaled):
            if (whole := way(parts, hidden, place, context)) is not None:
                return whole, None
    if context is None:
        context, _ = attend(parts.attention, hidden, packing, rng, turn, False, given)
    sites = random.layer_sites(turn)
    hidden = project_add_norm(context, hidden, parts.out, parts.out_dropout, parts.out_norm, rng, sites[1])
    wide = up_gelu(hidden, parts.up, parts.activation)
    return project_add_norm(wide, hidden, parts.down, parts.down_dropout, parts.down_norm, rng, sites[2]), weights


class _Place(NamedTuple):
    """Where in a forward a layer runs."""

    packing: Packing
    rng: Tensor | None
    turn: int
    given: Distances | None

    def positions(self, parts: AttentionParts) -> RelativePositions | None:
        return positions_of(parts, self.given, self.rng, self.turn)


def _attends_apart(given: Distances | None) -> bool:
    """Whether attention is forced to another backend than the layer."""
    return backends.forced_apart("encoder_layer", "attention", *["relative_attention"] * (given is not None))


def _is_taken_apart() -> bool:
    """Whether ops have to run one by one: within vmap, which cannot batch operators that take lists of tensors, or
    because an op inside the layer, other than attention, is forced to another backend than the whole layer."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    of_layer = backends.forced_apart("encoder_layer", "linear", "dense_gelu", "add_layer_norm")
    return of_layer or backends.forced_apart("packed_layer", "packed_linear", "add_layer_norm")


def _as_one(parts: LayerParts, hidden: Tensor, place: _Place, context: Tensor | None) -> Tensor | None:
    """The layer as one op, or as another backend's attention and one op for the rest. With `context`, the output of its
    attention, only the rest.

    None where a part is not plain, or no backend has an op for the whole layer.
    """
    parameters, attention, (packing, rng, turn, _) = plain_parameters(parts), parts.attention, place
    if parameters is None:
        return None
    device, dtype = hidden.device.type, autocast_dtype(hidden)
    find = functools.partial(backends.find, "encoder_layer", device, dtype, size=hidden.shape[1])
    if find(backward=False) is None:
        return None
    attention.check_dropout()
    positions = place.positions(attention) if context is None else None
    live = needs_grad(hidden, context, *parameters, *(positions or ()))
    backend = find(backward=live)
    if backend is None:
        return None
    settings = _settings(parts, hidden, packing, rng, turn, dtype)
    head_size = parameters[OUT].shape[1] // attention.heads
    if context is None and attends_elsewhere(backend, positions, device, dtype, live, head_size):
        context, _ = _attend(attention, hidden, packing, rng, turn, False, positions)
    if context is not None:
        return run_layer(backend, live, hidden, context, parameters[OUT:], None, rng, settings)
    return run_layer(backend, live, hidden, None, parameters, packing.cu_seqlens, rng, settings, positions=positions)


def encoder_layers(
    layers: Iterable[LayerParts | None],
    hidden: Tensor,
    packing: Packing,
    rng: Tensor | None,
    kept: Kept,
    given: Distances | None = None,
) -> Tensor | None:
    """All layers of an encoder, (T, C) -> (T, C), for a caller that needs no outputs between them. They run in one call
    or, where gradients are needed, one after the other without checking each again.

    layers: in order; None for a layer that has to be called as a module. kept: the cache for the next forward. given:
    the distances that scores depend on, or None. Returns None where `encoder_layer` has to run each: a part is not
    plain, layers differ in more than their weights, each layer projects distances, or no backend has an op for them.
    """
    found: list[LayerParts] = []
    if torch.compiler.is_compiling() or packing.unseen is not None or (given is not None and given.rows is not None):
        return None
    if _attends_apart(given) or _is_taken_apart():
        return None
    positions = None if given is None else RelativePositions(given.slots, bias=given.bias)
    for parts in layers:
        if parts is None or not (found or _has_kernel(parts, hidden, positions)):
            return None
        found.append(parts)
    if not found:
        return None
    joined = _joined(found, kept)
    if joined is None:
        return _all_scaled(found, hidden, packing) if given is None else None
    if joined.scales is None:
        return _all_plain(joined, hidden, packing, rng, positions)
    return _all_prepared(joined, hidden, packing, positions)


def _has_kernel(parts: LayerParts, hidden: Tensor, positions: RelativePositions | None) -> bool:
    """Whether one backend may run all layers like this first one: a quick answer before the others are read."""
    if type(parts.out) is ScaledLinear:
        return True
    device, dtype = hidden.device.type, autocast_dtype(hidden)
    backend = backends.find("encoder_layer", device, dtype, backward=False, size=hidden.shape[1])
    if backend is None or device == "cpu":
        return backend is not None
    own = plain_parameters(parts)
    heads_width = 0 if own is None else own[OUT].shape[1]
    return own is not None and not attends_elsewhere(
        backend, positions, device, dtype, False, heads_width // parts.attention.heads
    )


class _Joined(NamedTuple):
    """Layers that differ in nothing but their weights."""

    layers: list[LayerParts]
    parameters: list[Tensor]
    scales: list[Tensor] | None  # as in `ops.packed_layer`; None where all are plain


def _joined(layers: list[LayerParts], kept: Kept) -> _Joined | None:
    """The layers as one; None if they are neither all plain nor all prepared, or not alike. The last forward's result
    is used again if the parts are the same objects, which means that nothing has changed."""
    known = kept.joined
    if known is None or known.layers != layers:
        known = _join_plain(layers) if plain_parameters(layers[0]) else _join_prepared(layers)
        kept.joined = known if all([parts.lasts for parts in layers]) else None
    return known


def _join_plain(layers: list[LayerParts]) -> _Joined | None:
    found = [plain_parameters(parts) for parts in layers]
    if not all(found):
        return None
    for parts in layers:
        parts.attention.check_dropout()
    facts = [(_facts(parts), _rates(parts), own[OUT].shape[1]) for parts, own in zip(layers, found, strict=True)]
    return _join(layers, facts, found, None)


def _join_prepared(layers: list[LayerParts]) -> _Joined | None:
    found = [prepared_parameters(parts) for parts in layers]
    if not all(found) or any([parts.drops() for parts in layers]):
        return None
    parameters, scales = zip(*found, strict=True)
    return _join(layers, list(map(_facts, layers)), parameters, scales)


def _join(
    layers: list[LayerParts],
    facts: Sequence[Any],
    parameters: Sequence[list[Tensor]],
    scales: Sequence[list[Tensor]] | None,
) -> _Joined | None:
    """The layers as one; None if they differ in a fact, or in the number of their parameters."""
    alike = [(len(own), *each) for own, each in zip(parameters, facts, strict=True)]
    if any([each != alike[0] for each in alike]):
        return None
    return _Joined(layers, _flat(parameters), None if scales is None else _flat(scales))


def _flat(tensors: Sequence[list[Tensor]]) -> list[Tensor]:
    return [tensor for own in tensors for tensor in own]


def _all_plain(
    joined: _Joined, hidden: Tensor, packing: Packing, rng: Tensor | None, positions: RelativePositions | None
) -> Tensor | None:
    (layers, parameters, _), device, dtype = joined, hidden.device.type, autocast_dtype(hidden)
    count = len(parameters) // len(layers)
    same = _settings(layers[0], hidden, packing, rng, 0, dtype)
    live = needs_grad(hidden, *parameters, *(positions or ()))
    backend = backends.find("encoder_layer", device, dtype, backward=live, size=hidden.shape[1])
    head_size = parameters[count - 10].shape[1] // same.heads
    if backend is None or attends_elsewhere(backend, positions, device, dtype, live, head_size):
        return None
    given = packing.cu_seqlens, rng
    if not live:
        return run_layer(backend, False, hidden, None, parameters, *given, same, len(layers), positions)
    for turn in range(len(layers)):
        own = parameters[turn * count : (turn + 1) * count]
        its = same._replace(site=random.layer_sites(turn)[0])
        live = needs_grad(hidden, *own, *(positions or ()))
        hidden = run_layer(backend, live, hidden, None, own, *given, its, positions=positions)
    return hidden


def _all_prepared(
    joined: _Joined, hidden: Tensor, packing: Packing, positions: RelativePositions | None
) -> Tensor | None:
    layers, parameters, scales = joined
    hidden = hidden.to(_dtype_beside_prepared(layers[0]))
    backend = backends.find("packed_layer", hidden.device.type, hidden.dtype, backward=False)
    if backend is None or needs_grad(hidden, *parameters, *(positions or ())):
        return None
    given = hidden, None, parameters, scales, packing.cu_seqlens, *tables_beside(positions, hidden.dtype)
    return PACKED_LAYER(backend, *given, packing.max_seqlen, *_facts(layers[0]), len(layers))


def _rates(parts: LayerParts) -> tuple[float, float, float]:
    """The dropout probabilities of attention, of its output and of the MLP's output."""
    return parts.attention.p, probability(parts.out_dropout), probability(parts.down_dropout)


def _facts(parts: LayerParts) -> tuple[int, float, str, float, float]:
    """The number of heads, the scaling, the form of GELU, and the eps of both LayerNorms."""
    attention = parts.attention
    return attention.heads, attention.scaling, gelu_form(parts.activation), parts.out_norm.eps, parts.down_norm.eps


def _settings(
    parts: LayerParts, hidden: Tensor, packing: Packing, rng: Tensor | None, turn: int, dtype: torch.dtype
) -> Settings:
    """The settings for `run_layer`, with dropout probabilities checked."""
    rates = _rates(parts)
    for p, bits in zip(rates, (random.ATTENTION_BITS, random.ROW_BITS, random.ROW_BITS), strict=True):
        if p:
            checks.dropout("encoder_layer", p, rng, hidden.device, bits)
    heads, scaling, form, *eps = _facts(parts)
    # float() lets torch.compile(dynamic=True) read them here. From torch 2.13 on, a number that it first reads in an
    # autograd.Function fails in the next one, and ALBERT runs a layer several times.
    scaling, *eps = [float(number) for number in (scaling, *eps)]
    return Settings(packing.max_seqlen, heads, scaling, *rates, random.layer_sites(turn)[0], form, dtype, *eps)


def _as_prepared(parts: LayerParts, hidden: Tensor, place: _Place, context: Tensor | None) -> Tensor | None:
    """The layer in one call if some of its dense layers are prepared and the others plain; else None. With `context`,
    the output of its attention, only the rest."""
    # Read again: a hook of the layer may have changed them since the forward began.
    found = read_prepared(parts, 0 if context is None else len(parts.attention.projections))
    if found is None or parts.drops_now() or needs_grad(hidden, context, *found[0]):
        return None
    hidden, positions = hidden.to(_dtype_beside_prepared(parts)), None
    backend = backends.find("packed_layer", hidden.device.type, hidden.dtype, backward=False)
    if backend is None:
        return None
    if context is not None:
        context = context.to(hidden.dtype)
    else:
        with _without_autocast(hidden):
            positions = place.positions(parts.attention)
    if needs_grad(*(positions or ())):
        return None
    cu_seqlens = place.packing.cu_seqlens if context is None else None
    given = hidden, context, *found, cu_seqlens, *tables_beside(positions, hidden.dtype)
    return PACKED_LAYER(backend, *given, place.packing.max_seqlen, *_facts(parts), 1)


def _dtype_beside_prepared(parts: LayerParts) -> torch.dtype:
    """The dtype of hidden states beside prepared layers. If a module before them is not prepared, autocast may have
    changed their dtype."""
    return next(PRECISIONS[module.precision] for module in parts.leaves if type(module) is PreparedLinear)


# ---- products in fp8


def _all_scaled(layers: Sequence[LayerParts], hidden: Tensor, packing: Packing) -> Tensor | None:
    """Runs the layers one after the other; each reads the e4m3 rows that the layer before wrote. None where a layer is
    not prepared for fp8, or drops."""
    found, rows = [_scaled_parameters(parts, hidden) for parts in layers], None
    if None in found or any([parts.drops() for parts in layers]):
        return None
    backend = choose_scaled(hidden)
    for parts, own in zip(layers, found, strict=True):
        hidden, rows = _run_scaled(backend, parts, hidden, rows, None, own, packing)
    return hidden


def _as_scaled(parts: LayerParts, hidden: Tensor, place: _Place, context: Tensor | None) -> Tensor | None:
    """As `_as_prepared`, for fp8. Where scores depend on distances, attention runs first, by itself."""
    packing, rng, turn, given = place
    if given is not None and context is None and type(parts.out) is ScaledLinear:
        context, _ = attend(parts.attention, hidden, packing, rng, turn, False, given)
    found = _scaled_parameters(parts, hidden, context)
    if found is None or parts.drops_now():
        return None
    return _run_scaled(choose_scaled(hidden), parts, hidden, None, context, found, packing)[0]


def _run_scaled(
    backend: str,
    parts: LayerParts,
    hidden: Tensor,
    rows: Scaled | None,
    context: Tensor | None,
    parameters: Parameters,
    packing: Packing,
) -> tuple[Tensor, Scaled]:
    attention, form = parts.attention, gelu_form(parts.activation)
    sizes = packing.cu_seqlens, packing.max_seqlen, attention.heads, attention.scaling
    return scaled_layer(backend, hidden, rows, context, parameters, *sizes, form)


def _scaled_parameters(parts: LayerParts, hidden: Tensor, context: Tensor | None = None) -> Parameters | None:
    """The parameters for `scaled_layer`; None where a dense layer is not prepared for fp8, a LayerNorm is not plain, a
    tensor is not bfloat16 or a gradient is needed."""
    projections = parts.attention.projections if context is None else ()
    dense, norms = (*projections, parts.out, parts.up, parts.down), (parts.out_norm, parts.down_norm)
    if not all(map(_is_scaled, dense)) or not all(map(is_plain_norm, norms)):
        return None
    tensors = [hidden, *(tensor for each in norms for tensor in (each.weight, each.bias))]
    if needs_grad(*tensors, context) or any([tensor.dtype != torch.bfloat16 for tensor in tensors]):
        return None
    out_norm, down_norm = (Norm(each.weight, each.bias, each.eps) for each in norms)
    qkv = joined_dense(projections) if projections else None
    return Parameters(qkv, parts.out.dense(), out_norm, parts.up.dense(), parts.down.dense(), down_norm)


def attends_elsewhere(
    backend: str, positions: RelativePositions | None, device_type: str, dtype: torch.dtype, live: bool, head_size: int
) -> bool:
    """Whether attention runs on another backend than `backend`. On a CPU it never does."""
    if device_type == "cpu":
        return False
    return backends.choose(attention_op(positions), device_type, dtype, backward=live, size=head_size) != backend


def convolve(module: nn.Module, embedded: Tensor, hidden: Tensor, packing: Packing, rng: Tensor | None) -> Tensor:
    """DeBERTa-v2's convolution of the embeddings (T, C), added to the first layer's output (T, C), and LayerNorm.

    module: ours or transformers', with conv, dropout, LayerNorm and the name conv_act. All sequences form one row, with
    enough zeros between them that the kernel does not reach from one into the next.
    """
    conv = module.conv
    place, length = packing.spaced(conv.kernel_size[0] // 2)
    row = embedded.new_zeros(length, embedded.shape[1]).index_copy(0, place, embedded)
    out = conv(row.T[None])[0].T[place]
    out = ACTIVATIONS[module.conv_act](drop(out, module.dropout, rng, random.CONVOLUTION_SITE))
    if is_plain_norm(module.LayerNorm):
        return ops.add_layer_norm(out, hidden, module.LayerNorm.weight, module.LayerNorm.bias, module.LayerNorm.eps)
    return module.LayerNorm(out + hidden)


def embed(
    parts: EmbeddingParts,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor,
    inputs_embeds: Tensor | None,
    rng: Tensor | None,
    projection: nn.Module | None = None,
) -> Tensor:
    """Ids (T,), or inputs_embeds (T, width) in place of input_ids, to (T, width): rows summed, LayerNorm, dropout.

    projection: applied to the sum; gives the width of LayerNorm.
    """
    words, positions, types, layer_norm = parts.words, parts.positions, parts.types, parts.norm
    if types is not None and token_type_ids is None:
        token_type_ids = torch.zeros_like(position_ids)
    fused = parts.plain and (parts.plain_words or inputs_embeds is not None) and projection is None
    if not fused:
        x = words(input_ids) if inputs_embeds is None else inputs_embeds
        x = x if positions is None else x + positions(position_ids)
        x = x if types is None else x + types(token_type_ids)
        x = x if projection is None else dense(x, projection)
        return drop(norm(x, layer_norm), parts.dropout, rng, random.EMBEDDING_SITE)
    word, padding_idx = words.weight, words.padding_idx
    if inputs_embeds is not None:  # they are the rows of a table, each used once
        word, padding_idx = inputs_embeds, None
        input_ids = torch.arange(inputs_embeds.shape[0], device=inputs_embeds.device)
    if positions is None:  # DeBERTa-v3 has no such table: one row of zeros serves all
        position_ids, position_padding_idx = torch.zeros_like(position_ids), 0
        position = word.new_zeros(1, word.shape[1])
    else:
        position, position_padding_idx = positions.weight, positions.padding_idx
    return ops.embedding(
        input_ids,
        position_ids,
        token_type_ids if types is not None else None,
        word,
        position,
        None if types is None else types.weight,
        layer_norm.weight,
        layer_norm.bias,
        layer_norm.eps,
        padding_idx=padding_idx,
        position_padding_idx=position_padding_idx,
        dropout_p=probability(parts.dropout),
        rng=rng,
        site=random.EMBEDDING_SITE,
    )
