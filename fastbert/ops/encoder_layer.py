"""encoder_layer: a whole post-norm layer in one call, which saves small batches the overhead of calling a dozen ops."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.attention import RelativePositions, attention_op, attention_ref, tables_beside
from fastbert.ops.bias_gelu import check_approximate
from fastbert.ops.dense_gelu import dense_gelu_ref
from fastbert.ops.layer_norm import add_layer_norm_ref, statistics
from fastbert.ops.op import Primitive, autocast_dtype, autocast_on, first_derivative_only, needs_grad
from fastbert.ops.relative_attention import check_positions


class Settings(NamedTuple):
    """The primitives' arguments beside tensors. site: attention's; the next two are those of the residual sums."""

    max_seqlen: int
    heads: int
    scale: float
    attention_p: float
    out_p: float
    down_p: float
    site: int
    approximate: str
    dtype: torch.dtype  # of the matrix products
    out_eps: float
    down_eps: float


# Where the weight of each part after attention is among a layer's parameters, from the end. Its bias comes next.
OUT, OUT_NORM, UP, DOWN, DOWN_NORM = range(-10, 0, 2)

# ---- plain PyTorch


def encoder_layer_ref(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    num_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    eps: float = 1e-12,
    approximate: str = "none",
    attention_dropout_p: float = 0.0,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 1,
    positions: RelativePositions | None = None,
) -> Tensor:
    """`encoder_layer` in plain PyTorch; it can be differentiated any number of times."""
    rates = attention_dropout_p, dropout_p
    settings = _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps)
    return _plain(hidden, None, parameters, cu_seqlens, positions, rng, settings)


def after_attention_ref(
    context: Tensor,
    hidden: Tensor,
    parameters: Sequence[Tensor],
    *,
    eps: float = 1e-12,
    approximate: str = "none",
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 1,
) -> Tensor:
    """`after_attention` in plain PyTorch; it can be differentiated any number of times."""
    settings = _after_settings(hidden, dropout_p, site, approximate, eps)
    return _plain(hidden, context, parameters, None, None, rng, settings)


def _plain(
    hidden: Tensor,
    context: Tensor | None,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    positions: RelativePositions | None,
    rng: Tensor | None,
    s: Settings,
) -> Tensor:
    *projections, out, out_norm, up, down, down_norm = zip(parameters[::2], parameters[1::2], strict=True)
    if context is None:
        weight, bias = (torch.cat(parts).to(s.dtype) for parts in zip(*projections, strict=True))
        qkv = F.linear(hidden.to(s.dtype), weight, bias).unflatten(-1, (3, s.heads, -1))
        dropping = {"dropout_p": s.attention_p, "rng": rng, "site": s.site}
        dropping |= {"positions": None if positions is None else positions.beside(s.dtype)}
        context = attention_ref(qkv, cu_seqlens, s.max_seqlen, scale=s.scale, **dropping).flatten(1)
    x = F.linear(context.to(s.dtype), out[0].to(s.dtype))
    dropping = {"dropout_p": s.out_p, "rng": rng, "site": s.site + 1}
    hidden = add_layer_norm_ref(x, hidden, *out_norm, s.out_eps, x_bias=out[1], **dropping)
    x = dense_gelu_ref(hidden.to(s.dtype), *up, s.approximate)
    dropping = {"dropout_p": s.down_p, "rng": rng, "site": s.site + 2}
    x = F.linear(x, down[0].to(s.dtype))
    return add_layer_norm_ref(x, hidden, *down_norm, s.down_eps, x_bias=down[1], **dropping)


def _forward(hidden, context, parameters, cu_seqlens, slots, keys, queries, bias, rng, *given):
    *settings, _, layers = given
    settings, count = Settings(*settings), len(parameters) // layers
    positions = None if slots is None else RelativePositions(slots, keys, queries, bias)
    for layer in range(layers):
        own = parameters[layer * count : (layer + 1) * count]
        its = settings._replace(site=settings.site + 3 * layer)
        hidden = _plain(hidden, context, own, cu_seqlens, positions, rng, its)
    return hidden, []


def _backward(dy, hidden, context, parameters, saved, cu_seqlens, slots, keys, queries, bias, rng, *settings):
    """Computes the layer again from its inputs, and differentiates it by autograd."""
    *settings, (*needed, of_tables) = settings
    tables, like = (keys, queries, bias), hidden if context is None else context
    inputs = [None if x is None else x.detach().requires_grad_() for x in (hidden, context, *parameters, *tables)]
    needed = *needed, *[of_tables and table is not None for table in tables]
    positions = None if slots is None else RelativePositions(slots, *inputs[-3:])
    with torch.enable_grad():
        y = _plain(*inputs[:2], inputs[2:-3], cu_seqlens, positions, rng, Settings(*settings))
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy))
    absent = hidden.new_empty(0, dtype=Settings(*settings).dtype)
    likes = hidden, like, *parameters, *[absent if table is None else table for table in tables]
    dhidden, dcontext, *grads = [next(found) if need else x.new_empty(0) for x, need in zip(likes, needed, strict=True)]
    count = len(parameters)
    return dhidden, dcontext, grads[:count], [] if slots is None else grads[count:]


# ---- schemas


def _fake_forward(
    hidden, context, parameters, cu_seqlens, slots, keys, queries, bias, rng, max_seqlen, heads, scale, attention_p,
    out_p, down_p, site, approximate, dtype, out_eps, down_eps, save, layers,
):  # fmt: skip
    checks.one_device("encoder_layer", hidden, context, *parameters, cu_seqlens, slots, keys, queries, bias, rng)
    y = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, dtype))
    if not save:
        return y, []
    tokens, width = hidden.shape
    empty = lambda *shape: hidden.new_empty(shape, dtype=dtype)  # noqa: E731
    attended = []
    if context is None:
        inner = parameters[0].shape[0] // (3 if len(parameters) == 12 else 1)  # heads x head size
        out = empty(tokens, heads, inner // heads)
        attended = [empty(tokens, 3, heads, inner // heads), out, statistics(out).mT.contiguous()]
    numbers, wide = [statistics(hidden) for _ in range(4)], empty(tokens, parameters[UP].shape[0])
    rest = [empty(tokens, width), *numbers[:2], torch.empty_like(y), wide, empty(tokens, width), *numbers[2:]]
    return y, [*attended, *rest]


def _fake_backward(dy, hidden, context, parameters, saved, cu_seqlens, slots, keys, queries, bias, rng, *settings):
    tables, (*needed, of_tables) = (keys, queries, bias), settings[-1]
    checks.one_device("encoder_layer", hidden, dy, context, *parameters, *saved, cu_seqlens, slots, *tables, rng)
    like = hidden if context is None else context
    dhidden, dcontext, *grads = [
        tensor.new_empty(tensor.shape if need else (0,))
        for tensor, need in zip((hidden, like, *parameters), needed, strict=True)
    ]
    dtype = Settings(*settings[:-1]).dtype
    dtables = [
        hidden.new_empty(0, dtype=dtype) if table is None else table.new_empty(table.shape if of_tables else (0,))
        for table in tables
    ]
    return dhidden, dcontext, grads, [] if slots is None else dtables


# Either cu_seqlens is given, for a whole layer, or context, the output of attention, for the rest of it. With slots,
# scores depend on distances, as in relative_attention. layers: where nothing is saved, the parameters of several layers
# may follow each other; each layer has three dropout sites, and the tables are the same.
_SETTINGS = (
    "Tensor? cu_seqlens, Tensor? slots, Tensor? position_keys, Tensor? position_queries, Tensor? position_bias,"
    " Tensor? rng, SymInt max_seqlen, int heads, float scale, float attention_p, float out_p, float down_p,"
    " SymInt site, str approximate, ScalarType dtype, float out_eps, float down_eps"
)
FWD = Primitive(
    "encoder_layer_fwd",
    f"(Tensor hidden, Tensor? context, Tensor[] parameters, {_SETTINGS}, bool save, int layers)"
    " -> (Tensor y, Tensor[] saved)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "encoder_layer_bwd",
    f"(Tensor dy, Tensor hidden, Tensor? context, Tensor[] parameters, Tensor[] saved, {_SETTINGS}, int[] needed)"
    " -> (Tensor dhidden, Tensor dcontext, Tensor[] dparameters, Tensor[] dtables)",
    _fake_backward,
    _backward,
)


# ---- the op


class _EncoderLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, settings, cu_seqlens, rng, slots, keys, queries, bias, hidden, context, *parameters):
        tables = slots, keys, queries, bias
        y, saved = FWD(backend, hidden, context, parameters, cu_seqlens, *tables, rng, *settings, True, 1)
        ctx.save_for_backward(cu_seqlens, rng, *tables, hidden, context, *parameters, *saved)
        ctx.backend, ctx.settings, ctx.count = backend, settings, len(parameters)
        return y

    @staticmethod
    @first_derivative_only("encoder_layer")
    def backward(ctx, saved, dy):
        cu_seqlens, rng, slots, keys, queries, bias, hidden, context, *rest = saved
        parameters, kept = rest[: ctx.count], rest[ctx.count :]
        of_tables, need = ctx.needs_input_grad[5:8], ctx.needs_input_grad[8:]
        given = cu_seqlens, slots, keys, queries, bias, rng, *ctx.settings, [*map(int, need), int(any(of_tables))]
        dhidden, dcontext, grads, dtables = BWD(ctx.backend, dy, hidden, context, parameters, kept, *given)
        found, need = (*(dtables or [None] * 3), dhidden, dcontext, *grads), (*of_tables, *need)
        return *[None] * 5, *[grad if needed else None for grad, needed in zip(found, need, strict=True)]


def encoder_layer(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    num_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    eps: float = 1e-12,
    approximate: str = "none",
    attention_dropout_p: float = 0.0,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 1,
    positions: RelativePositions | None = None,
) -> Tensor:
    """A whole post-norm layer (Devlin et al., "BERT", 2018) on packed tokens.

    hidden: (T, C), float32, bfloat16, float16 or float64. parameters: weight and bias of the projection to queries,
    keys and values, (3C, C), or of three projections, (C, C) each; of the projection after attention, (C, C); of its
    LayerNorm, (C,); of the MLP's two layers, (I, C) and (C, I); of its LayerNorm. They are in hidden's dtype or
    float32. cu_seqlens, max_seqlen, scale and rng as in `attention`. eps: of both LayerNorms. site: that of attention;
    site + 1 and site + 2 are those of the dropouts before the residual sums, with probability dropout_p. positions: as
    in `relative_attention`, which is then the layer's attention, in hidden's dtype or float32. Returns (T, C) in
    hidden's dtype; under autocast the products have autocast's dtype, and a float32 hidden still gives float32.
    The result has the same bits as that of the separate ops on the same backend (on a GPU, `dense_gelu` may round
    differently). Saved for backward are, per token, hidden, 7C + I numbers, four statistics and one number per head;
    the GELU is computed again.
    Raises ValueError (shapes, devices, cu_seqlens, dropout), TypeError (dtypes) and IndexError (slots, if values are
    checked).

    Equivalent to::

        qkv = F.linear(hidden, qkv_weight, qkv_bias).view(T, 3, num_heads, C // num_heads)
        x = attention(qkv, cu_seqlens, max_seqlen, dropout_p=attention_dropout_p).flatten(1)
        hidden = F.layer_norm(F.dropout(F.linear(x, out_weight, out_bias), dropout_p) + hidden, ...)
        x = F.gelu(F.linear(hidden, up_weight, up_bias))
        F.layer_norm(F.dropout(F.linear(x, down_weight, down_bias), dropout_p) + hidden, ...)
    """
    _check(hidden, parameters, num_heads, cu_seqlens, max_seqlen, eps, approximate, positions)
    checks.dropout("encoder_layer", attention_dropout_p, rng, hidden.device, random.ATTENTION_BITS)
    checks.dropout("encoder_layer", dropout_p, rng, hidden.device, random.ROW_BITS)
    rates = attention_dropout_p, dropout_p
    settings = _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps)
    live = needs_grad(hidden, *parameters, *(positions or ()))
    head_size = parameters[OUT].shape[1] // num_heads
    sizes = {"size": hidden.shape[1], "head_size": head_size, "attention": attention_op(positions)}
    backend = backends.choose("encoder_layer", hidden.device.type, settings.dtype, backward=live, **sizes)
    live = live and backend != "reference"
    return run_layer(backend, live, hidden, None, parameters, cu_seqlens, rng, settings, positions=positions)


def after_attention(
    context: Tensor,
    hidden: Tensor,
    parameters: Sequence[Tensor],
    *,
    eps: float = 1e-12,
    approximate: str = "none",
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 1,
) -> Tensor:
    """The rest of `encoder_layer` after attention, for layers whose attention runs on another backend.

    context: (T, D), the output of all heads, in hidden's dtype (under autocast in any dtype but float64). hidden:
    (T, C), the layer's input. parameters: the last ten of `encoder_layer`. The other arguments are as there; site is
    that of attention. Returns (T, C). Raises ValueError and TypeError.

    Equivalent to::

        hidden = F.layer_norm(F.dropout(F.linear(context, out_weight, out_bias), dropout_p) + hidden, ...)
        x = F.gelu(F.linear(hidden, up_weight, up_bias))
        F.layer_norm(F.dropout(F.linear(x, down_weight, down_bias), dropout_p) + hidden, ...)
    """
    op = "after_attention"
    _check_parameters(op, hidden, parameters, (10,))
    checks.floats(op, {"context": context}, {})
    checks.shape(op, "context", context, (hidden.shape[0], parameters[0].shape[1]), "(T, D)")
    checks.same_device(op, {"context": context, "hidden": hidden})
    casts = autocast_on(hidden.device.type) and torch.float64 not in (context.dtype, hidden.dtype)
    if context.dtype != hidden.dtype and not casts:
        raise TypeError(f"{op}: context is {context.dtype} beside hidden of {hidden.dtype}; expected one dtype")
    check_approximate(op, approximate)
    _check_eps(op, eps)
    checks.dropout(op, dropout_p, rng, hidden.device, random.ROW_BITS)
    settings = _after_settings(hidden, dropout_p, site, approximate, eps)
    live = needs_grad(hidden, context, *parameters)
    size = hidden.shape[1]
    backend = backends.choose("encoder_layer", hidden.device.type, settings.dtype, backward=live, size=size)
    return run_layer(backend, live and backend != "reference", hidden, context, parameters, None, rng, settings)


def run_layer(
    backend: str,
    live: bool,
    hidden: Tensor,
    context: Tensor | None,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    rng: Tensor | None,
    settings: Settings,
    layers: int = 1,
    positions: RelativePositions | None = None,
) -> Tensor:
    """`encoder_layer`, or `after_attention` if context is given, on a chosen backend with checked arguments. live:
    whether there is a backward. layers: how many run in a row; 1 if there is a context or a backward."""
    tables = tables_beside(positions, settings.dtype)
    if live:
        return _EncoderLayer.apply(backend, settings, cu_seqlens, rng, *tables, hidden, context, *parameters)
    return FWD(backend, hidden, context, parameters, cu_seqlens, *tables, rng, *settings, False, layers)[0]


def _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps) -> Settings:
    """rates: the probabilities of attention's dropout, and of both dropouts before the residual sums."""
    attention_p, p = rates
    scale = (parameters[OUT].shape[1] // num_heads) ** -0.5 if scale is None else scale
    dtype = autocast_dtype(hidden)
    return Settings(max_seqlen, num_heads, scale, attention_p, p, p, site, approximate, dtype, eps, eps)


def _after_settings(hidden, p, site, approximate, eps) -> Settings:
    return Settings(0, 1, 1.0, 0.0, p, p, site, approximate, autocast_dtype(hidden), eps, eps)


def _check(hidden, parameters, num_heads, cu_seqlens, max_seqlen, eps, approximate, positions):
    op = "encoder_layer"
    heads_width = _check_parameters(op, hidden, parameters, (12, 16))
    if num_heads < 1 or heads_width % num_heads:
        raise ValueError(f"{op}: num_heads is {num_heads}; expected a divisor of {heads_width}")
    checks.sequences(op, cu_seqlens, max_seqlen, hidden.shape[0])
    checks.same_device(op, {"hidden": hidden, "cu_seqlens": cu_seqlens})
    if positions is not None:
        check_positions(op, {"hidden": hidden}, num_heads, heads_width // num_heads, positions)
    check_approximate(op, approximate)
    _check_eps(op, eps)


def _check_parameters(op: str, hidden: Tensor, parameters: Sequence[Tensor], counts: tuple[int, ...]) -> int:
    """Checks hidden too. Returns the width of all heads together."""
    count = len(parameters)
    if count not in counts:
        expected = "12, or 16 with three projections" if 16 in counts else "10"
        raise ValueError(f"{op}: {count} parameters; expected {expected}")
    checks.floats(op, {"hidden": hidden}, {f"parameters[{i}]": each for i, each in enumerate(parameters)})
    checks.shape(op, "hidden", hidden, (None, None), "(T, C)")
    for i in (count + OUT, count + DOWN):  # whose widths the others are compared with
        checks.shape(op, f"parameters[{i}]", parameters[i], (None, None), "its place's")
    width, heads_width, inner = hidden.shape[1], parameters[OUT].shape[1], parameters[DOWN].shape[1]
    rows = {10: [], 12: [3 * heads_width], 16: [heads_width] * 3}[count]
    shapes = [(n, width) for n in rows] + [(width, heads_width), (width,), (inner, width), (width, inner), (width,)]
    for i, expected in enumerate(shapes):
        checks.shape(op, f"parameters[{2 * i}]", parameters[2 * i], expected, "its place's")
        checks.shape(op, f"parameters[{2 * i + 1}]", parameters[2 * i + 1], expected[:1], "that weight's rows")
    return heads_width


def _check_eps(op: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; expected eps >= 0")
