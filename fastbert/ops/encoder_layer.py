"""encoder_layer: a whole post-norm layer in one call, because on small batches the way to a dozen takes longest."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.attention import attention_ref
from fastbert.ops.bias_gelu import check_approximate
from fastbert.ops.dense_gelu import dense_gelu_ref
from fastbert.ops.layer_norm import add_layer_norm_ref, statistics
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad


class Settings(NamedTuple):
    """What the primitives take beside tensors. site: of attention; the next two are those of the residual sums."""

    max_seqlen: int
    heads: int
    scale: float
    attention_p: float
    out_p: float
    down_p: float
    site: int
    approximate: str
    dtype: torch.dtype  # of the products
    out_eps: float
    down_eps: float


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
) -> Tensor:
    """`encoder_layer` in plain PyTorch, any number of derivatives."""
    rates = attention_dropout_p, dropout_p
    settings = _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps)
    return _plain(hidden, parameters, cu_seqlens, rng, settings)


def _plain(hidden: Tensor, parameters: Sequence[Tensor], cu_seqlens: Tensor, rng: Tensor | None, s: Settings) -> Tensor:
    *projections, out, out_norm, up, down, down_norm = zip(parameters[::2], parameters[1::2], strict=True)
    weight, bias = (torch.cat(parts).to(s.dtype) for parts in zip(*projections, strict=True))
    qkv = F.linear(hidden.to(s.dtype), weight, bias).unflatten(-1, (3, s.heads, -1))
    dropping = {"dropout_p": s.attention_p, "rng": rng, "site": s.site}
    x = attention_ref(qkv, cu_seqlens, s.max_seqlen, scale=s.scale, **dropping).flatten(1)
    dropping = {"dropout_p": s.out_p, "rng": rng, "site": s.site + 1}
    x = F.linear(x, out[0].to(s.dtype))
    hidden = add_layer_norm_ref(x, hidden, *out_norm, s.out_eps, x_bias=out[1], **dropping)
    x = dense_gelu_ref(hidden.to(s.dtype), *up, s.approximate)
    dropping = {"dropout_p": s.down_p, "rng": rng, "site": s.site + 2}
    x = F.linear(x, down[0].to(s.dtype))
    return add_layer_norm_ref(x, hidden, *down_norm, s.down_eps, x_bias=down[1], **dropping)


def _forward(hidden, parameters, cu_seqlens, rng, *settings):
    *settings, _ = settings
    return _plain(hidden, parameters, cu_seqlens, rng, Settings(*settings)), []


def _backward(dy, hidden, parameters, saved, cu_seqlens, rng, *settings):
    """By autograd, from the inputs alone."""
    *settings, needed = settings
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, *parameters)]
    with torch.enable_grad():
        y = _plain(inputs[0], inputs[1:], cu_seqlens, rng, Settings(*settings))
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy))
    dhidden, *grads = [next(found) if need else x.new_empty(0) for x, need in zip(inputs, needed, strict=True)]
    return dhidden, grads


# ---- schemas


def _fake_forward(hidden, parameters, cu_seqlens, rng, max_seqlen, heads, *settings):
    *_, dtype, _, _, save = settings
    y = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, dtype))
    if not save:
        return y, []
    tokens, width = hidden.shape
    inner = parameters[0].shape[0] // (3 if len(parameters) == 12 else 1)  # heads x head size
    empty = lambda *shape: hidden.new_empty(shape, dtype=dtype)  # noqa: E731
    qkv, context = empty(tokens, 3, heads, inner // heads), empty(tokens, heads, inner // heads)
    lse, numbers = statistics(context).mT.contiguous(), [statistics(hidden) for _ in range(4)]
    wide = empty(tokens, parameters[-6].shape[0])
    saved = [qkv, context, lse, empty(tokens, width), *numbers[:2], torch.empty_like(y), wide, empty(tokens, width)]
    return y, [*saved, *numbers[2:]]


def _fake_backward(dy, hidden, parameters, saved, cu_seqlens, rng, *settings):
    dhidden, *grads = [
        tensor.new_empty(tensor.shape if need else (0,))
        for tensor, need in zip((hidden, *parameters), settings[-1], strict=True)
    ]
    return dhidden, grads


_SETTINGS = (
    "Tensor cu_seqlens, Tensor? rng, SymInt max_seqlen, int heads, float scale, float attention_p, float out_p,"
    " float down_p, int site, str approximate, ScalarType dtype, float out_eps, float down_eps"
)
FWD = Primitive(
    "encoder_layer_fwd",
    f"(Tensor hidden, Tensor[] parameters, {_SETTINGS}, bool save) -> (Tensor y, Tensor[] saved)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "encoder_layer_bwd",
    f"(Tensor dy, Tensor hidden, Tensor[] parameters, Tensor[] saved, {_SETTINGS}, int[] needed)"
    " -> (Tensor dhidden, Tensor[] dparameters)",
    _fake_backward,
    _backward,
)


# ---- the op


class _EncoderLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, settings, hidden, cu_seqlens, rng, *parameters):
        y, saved = FWD(backend, hidden, parameters, cu_seqlens, rng, *settings, True)
        ctx.save_for_backward(hidden, cu_seqlens, rng, *parameters, *saved)
        ctx.backend, ctx.settings, ctx.count = backend, settings, len(parameters)
        return y

    @staticmethod
    @first_derivative_only("encoder_layer")
    def backward(ctx, saved, dy):
        hidden, cu_seqlens, rng, *rest = saved
        parameters, kept = rest[: ctx.count], rest[ctx.count :]
        need = (ctx.needs_input_grad[2], *ctx.needs_input_grad[5:])
        given = (dy, hidden, parameters, kept, cu_seqlens, rng, *ctx.settings, [int(x) for x in need])
        dhidden, grads = BWD(ctx.backend, *given)
        dhidden, *grads = (grad if needed else None for grad, needed in zip((dhidden, *grads), need, strict=True))
        return None, None, dhidden, None, None, *grads


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
) -> Tensor:
    """A whole post-norm layer (Devlin et al., "BERT", 2018) on packed tokens.

    hidden: (T, C), float32, bfloat16, float16 or float64. parameters: weight and bias of the projection to queries,
    keys and values, (3C, C), or of three of (C, C); of the projection after attention, (C, C); of its LayerNorm, (C,);
    of the MLP's two, (I, C) and (C, I); of its LayerNorm. They are of hidden's dtype or float32. cu_seqlens,
    max_seqlen, scale and rng as in `attention`. eps: of both LayerNorms. site: that of attention; site + 1 and + 2 are
    those of the two dropouts before the residual sums, of dropout_p. Returns (T, C) in hidden's dtype (under autocast,
    whose dtype the products have, float32 for float32).
    Where the ops that it is made of run on the same backend, it gives their bits. The backward keeps of a token hidden,
    7C + I numbers, and one for each head; the GELU is computed again.
    Raises ValueError (shapes, devices, cu_seqlens, dropout) and TypeError (dtypes).

    Equivalent to::

        qkv = F.linear(hidden, qkv_weight, qkv_bias).view(T, 3, num_heads, C // num_heads)
        x = attention(qkv, cu_seqlens, max_seqlen, dropout_p=attention_dropout_p).flatten(1)
        hidden = F.layer_norm(F.dropout(F.linear(x, out_weight, out_bias), dropout_p) + hidden, ...)
        x = F.gelu(F.linear(hidden, up_weight, up_bias))
        F.layer_norm(F.dropout(F.linear(x, down_weight, down_bias), dropout_p) + hidden, ...)
    """
    _check(hidden, parameters, num_heads, cu_seqlens, max_seqlen, eps, approximate)
    checks.dropout("encoder_layer", attention_dropout_p, rng, hidden.device, random.ATTENTION_BITS)
    checks.dropout("encoder_layer", dropout_p, rng, hidden.device, random.ROW_BITS)
    rates = attention_dropout_p, dropout_p
    settings = _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps)
    live = needs_grad(hidden, *parameters)
    backend = backends.choose("encoder_layer", hidden.device.type, settings.dtype, backward=live)
    return run_layer(backend, live and backend != "reference", hidden, parameters, cu_seqlens, rng, settings)


def run_layer(
    backend: str,
    live: bool,
    hidden: Tensor,
    parameters: Sequence[Tensor],
    cu_seqlens: Tensor,
    rng: Tensor | None,
    settings: Settings,
) -> Tensor:
    """`encoder_layer` on a backend that has been chosen, of arguments that have been checked. live: with a backward."""
    if live:
        return _EncoderLayer.apply(backend, settings, hidden, cu_seqlens, rng, *parameters)
    return FWD(backend, hidden, parameters, cu_seqlens, rng, *settings, False)[0]


def _settings(hidden, parameters, num_heads, max_seqlen, scale, rates, site, approximate, eps) -> Settings:
    """rates: of attention's dropout, and of both dropouts before the residual sums."""
    attention_p, p = rates
    scale = (parameters[-10].shape[1] // num_heads) ** -0.5 if scale is None else scale
    dtype = autocast_dtype(hidden)
    return Settings(max_seqlen, num_heads, scale, attention_p, p, p, site, approximate, dtype, eps, eps)


def _check(hidden, parameters, num_heads, cu_seqlens, max_seqlen, eps, approximate):
    op, count = "encoder_layer", len(parameters)
    if count not in (12, 16):
        raise ValueError(f"{op}: {count} parameters; expected 12, or 16 with three projections")
    checks.floats(op, {"hidden": hidden}, {f"parameters[{i}]": each for i, each in enumerate(parameters)})
    checks.shape(op, "hidden", hidden, (None, None), "(T, C)")
    width, heads_width, inner = hidden.shape[1], parameters[-10].shape[-1], parameters[-4].shape[-1]
    rows = [3 * heads_width] if count == 12 else [heads_width] * 3
    shapes = [(n, width) for n in rows] + [(width, heads_width), (width,), (inner, width), (width, inner), (width,)]
    for i, expected in enumerate(shapes):
        checks.shape(op, f"parameters[{2 * i}]", parameters[2 * i], expected, "its place's")
        checks.shape(op, f"parameters[{2 * i + 1}]", parameters[2 * i + 1], expected[:1], "that weight's rows")
    if num_heads < 1 or heads_width % num_heads:
        raise ValueError(f"{op}: num_heads is {num_heads}; expected a divisor of {heads_width}")
    checks.sequences(op, cu_seqlens, max_seqlen, hidden.shape[0])
    checks.same_device(op, {"hidden": hidden, "cu_seqlens": cu_seqlens})
    check_approximate(op, approximate)
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; expected eps >= 0")
