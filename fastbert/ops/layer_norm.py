"""layer_norm; and add_layer_norm, which is bias, dropout, residual sum and LayerNorm in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.numbers import in_one_dtype, narrow, wide
from fastbert.ops.op import Primitive, first_derivative_only, needs_grad

# ---- plain PyTorch


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
    """`layer_norm` in plain PyTorch; it can be differentiated any number of times."""
    return F.layer_norm(wide(x), weight.shape, wide(weight), wide(bias), eps).to(x.dtype)


def add_layer_norm_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`add_layer_norm` in plain PyTorch; it can be differentiated any number of times."""
    z = wide(x) if x_bias is None else wide(x) + wide(x_bias)
    z = drop_rows(z, dropout_p, rng, site) + wide(residual)
    return F.layer_norm(z, weight.shape, wide(weight), wide(bias), eps).to(torch.promote_types(x.dtype, residual.dtype))


def drop_rows(z: Tensor, p: float, rng: Tensor | None, site: int) -> Tensor:
    """Dropout of a row op, its own adjoint. Row t of the flattened leading dimensions is token t of the mask."""
    if random.threshold(p, random.ROW_BITS) == 0:
        return z
    keep = random.row_keep(rng, site, z[..., 0].numel(), z.shape[-1], p).view(z.shape)
    return torch.where(keep, z * random.keep_scale(p, random.ROW_BITS), 0)


def norm_forward(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of the rows of z.

    Rows are shifted by their mean before PyTorch's kernel, so that a large offset costs no accuracy. The shift is
    clamped to the row's minimum and maximum, so that a constant row gives exactly the bias.
    """
    shift = z.mean(-1, keepdim=True).clamp(*torch.aminmax(z, dim=-1, keepdim=True))
    y, left, rstd = torch.native_layer_norm(z - shift, weight.shape, wide(weight), wide(bias), eps)
    return y, (shift + left).squeeze(-1), rstd.squeeze(-1)


def norm_backward(
    dy: Tensor, z: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_dparams: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dz, dweight and dbias (both empty if not needed). The saved mean is rounded; its error is subtracted too.

    With g = dy * weight and n = (z - mean) * rstd: dz = rstd * (g - mean(g) - n * mean(g * n)).
    """
    centered = z - mean.unsqueeze(-1)
    left, wide_weight = centered.mean(-1, keepdim=True), wide(weight)
    dz, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy,
        centered,
        weight.shape,
        left,
        rstd.unsqueeze(-1),
        wide_weight,
        wide_weight,
        [True, need_dparams, need_dparams],
    )
    if not need_dparams:
        return dz, weight.new_empty(0), weight.new_empty(0)
    return dz, dweight.to(weight.dtype), dbias.to(weight.dtype)


def _forward(x, weight, bias, eps):
    y, mean, rstd = norm_forward(wide(x), weight, bias, eps)
    return narrow(y, x.dtype), mean, rstd


def _backward(dy, x, weight, mean, rstd, need_dparams):
    dx, *dparams = norm_backward(wide(dy), wide(x), weight, mean, rstd, need_dparams)
    return dx.to(x.dtype), *dparams


def _sum(x, residual, x_bias, dropout_p, rng, site):
    z = wide(x) if x_bias is None else wide(x) + wide(x_bias)
    return drop_rows(z, dropout_p, rng, site) + wide(residual)


def _add_forward(x, residual, weight, bias, x_bias, rng, eps, dropout_p, site):
    y, mean, rstd = norm_forward(_sum(x, residual, x_bias, dropout_p, rng, site), weight, bias, eps)
    return narrow(y, torch.promote_types(x.dtype, residual.dtype)), mean, rstd


def _one_gradient(x: Tensor, residual: Tensor, dropout_p: float) -> bool:
    """Whether x and residual have the same gradient: the primitive then returns it as dresidual, and an empty dx."""
    return x.dtype == residual.dtype and random.threshold(dropout_p, random.ROW_BITS) == 0


def _add_backward(dy, x, residual, weight, mean, rstd, x_bias, rng, dropout_p, site, need_dparams):
    z = _sum(x, residual, x_bias, dropout_p, rng, site)
    dz, *dparams = norm_backward(wide(dy), z, weight, mean, rstd, need_dparams)
    dx = drop_rows(dz, dropout_p, rng, site)
    with_bias = need_dparams and x_bias is not None
    dx_bias = dx.sum_to_size(x_bias.shape).to(x_bias.dtype) if with_bias else x.new_empty(0)
    dx = x.new_empty(0) if _one_gradient(x, residual, dropout_p) else dx.to(x.dtype)
    return dx, dz.to(residual.dtype), *dparams, dx_bias


# ---- schemas


def statistics(x: Tensor) -> Tensor:
    """An empty `mean` or `rstd` for the rows of x."""
    return x.new_empty(x.shape[:-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _fake_parameters(weight: Tensor, need_dparams: bool) -> tuple[Tensor, Tensor]:
    shape = weight.shape if need_dparams else (0,)
    return weight.new_empty(shape), weight.new_empty(shape)


def _fake_add_forward(x, residual, weight, bias, x_bias, rng, eps, dropout_p, site):
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return y, statistics(x), statistics(x)


def _fake_add_backward(dy, x, residual, weight, mean, rstd, x_bias, rng, dropout_p, site, need_dparams):
    with_bias = need_dparams and x_bias is not None
    dx_bias = x_bias.new_empty(x_bias.shape) if with_bias else x.new_empty(0)
    dparams = _fake_parameters(weight, need_dparams)
    dx = x.new_empty((0,) if _one_gradient(x, residual, dropout_p) else x.shape)
    return dx, residual.new_empty(x.shape), *dparams, dx_bias


FWD = Primitive(
    "layer_norm_fwd",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    lambda x, weight, bias, eps: (x.new_empty(x.shape), statistics(x), statistics(x)),
    _forward,
)
BWD = Primitive(
    "layer_norm_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool need_dparams)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    lambda dy, x, weight, mean, rstd, need: (x.new_empty(x.shape), *_fake_parameters(weight, need)),
    _backward,
)
ADD_FWD = Primitive(
    "add_layer_norm_fwd",
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias, Tensor? rng,"
    " float eps, float dropout_p, SymInt site) -> (Tensor y, Tensor mean, Tensor rstd)",
    _fake_add_forward,
    _add_forward,
)
ADD_BWD = Primitive(
    "add_layer_norm_bwd",
    "(Tensor dy, Tensor x, Tensor residual, Tensor weight, Tensor mean, Tensor rstd, Tensor? x_bias, Tensor? rng,"
    " float dropout_p, SymInt site, bool need_dparams)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias, Tensor dx_bias)",
    _fake_add_backward,
    _add_backward,
)


# ---- the ops


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, weight, bias, eps):
        y, mean, rstd = FWD(backend, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.backend = backend
        return y

    @staticmethod
    @first_derivative_only("layer_norm")
    def backward(ctx, saved, dy):
        need_dparams = any(ctx.needs_input_grad[2:4])
        return None, *BWD(ctx.backend, dy, *saved, need_dparams), None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, residual, weight, bias, x_bias, rng, eps, dropout_p, site):
        y, mean, rstd = ADD_FWD(backend, x, residual, weight, bias, x_bias, rng, eps, dropout_p, site)
        ctx.save_for_backward(x, residual, weight, mean, rstd, x_bias, rng)
        ctx.backend, ctx.dropout_p, ctx.site = backend, dropout_p, site
        return y

    @staticmethod
    @first_derivative_only("add_layer_norm")
    def backward(ctx, saved, dy):
        need_dparams = any(ctx.needs_input_grad[3:6])
        dx, dresidual, *dparams, dx_bias = ADD_BWD(ctx.backend, dy, *saved, ctx.dropout_p, ctx.site, need_dparams)
        if _one_gradient(saved[0], saved[1], ctx.dropout_p):
            dx = dresidual
        return None, dx, dresidual, *dparams, dx_bias if ctx.needs_input_grad[5] else None, None, None, None, None


def _check(op: str, activations: dict[str, Tensor], parameters: dict[str, Tensor], eps: float) -> None:
    checks.floats(op, activations, parameters)
    x = activations["x"]
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., C) with C > 0")
    for name, tensor in activations.items():
        checks.shape(op, name, tensor, tuple(x.shape), "x's")
    for name, tensor in parameters.items():
        checks.shape(op, name, tensor, (x.shape[-1],), "(C,)", "the last dimension of x")
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; expected eps >= 0")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
    """LayerNorm over the last dimension (Ba, Kiros and Hinton, 2016).

    x: (..., C) float32, bfloat16, float16 or float64. weight, bias: (C,), in x's dtype or float32 beside half
    precision. eps is added to the variance in float32. Returns x's shape and dtype; statistics are float32 (float64
    for float64), and a constant row gives exactly `bias`. x and two numbers per row are saved for backward.
    Raises ValueError (shapes, devices, eps) and TypeError (dtypes).

    Equivalent to::

        F.layer_norm(x, weight.shape, weight, bias, eps)
    """
    _check("layer_norm", {"x": x}, {"weight": weight, "bias": bias}, eps)
    weight, bias = in_one_dtype(weight, bias)
    live = needs_grad(x, weight, bias)
    backend = backends.choose("layer_norm", x.device.type, x.dtype, backward=live, size=x.shape[-1])
    return _LayerNorm.apply(backend, x, weight, bias, eps) if live else FWD(backend, x, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """LayerNorm of residual + dropout(x + x_bias): what follows each of BERT's output projections, in one pass.

    x, residual: (..., C), any of float32, bfloat16, float16 (they may differ), or both float64. weight, bias, x_bias:
    (C,), in a dtype of x or residual, or in float32. Returns the promoted dtype of x and residual (so the residual
    stream stays float32 under autocast). dropout_p in [0, 1) is rounded to a multiple of 2**-16; rng is an int64 key
    from `fastbert.random.new_key`, and site the number of the place in the model; `fastbert.random.row_keep` defines
    the mask. x, residual and two numbers per row are saved for backward.
    Raises ValueError (shapes, devices, eps, dropout) and TypeError (dtypes).

    Equivalent to::

        x = F.dropout(x + x_bias, dropout_p)
        F.layer_norm(x + residual, weight.shape, weight, bias, eps)
    """
    parameters = {"weight": weight, "bias": bias} | ({} if x_bias is None else {"x_bias": x_bias})
    _check("add_layer_norm", {"x": x, "residual": residual}, parameters, eps)
    checks.dropout("add_layer_norm", dropout_p, rng, x.device, random.ROW_BITS)
    weight, bias = in_one_dtype(weight, bias)
    live = needs_grad(x, residual, weight, bias, x_bias)
    backend = backends.choose("add_layer_norm", x.device.type, x.dtype, backward=live, size=x.shape[-1])
    args = (x, residual, weight, bias, x_bias, rng, eps, dropout_p, site)
    return _AddLayerNorm.apply(backend, *args) if live else ADD_FWD(backend, *args)[0]
