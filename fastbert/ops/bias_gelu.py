"""bias_gelu: adds the bias of a dense layer and applies GELU, in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.numbers import narrow, wide
from fastbert.ops.op import Primitive, first_derivative_only, needs_grad

# ---- plain PyTorch


def bias_gelu_ref(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`bias_gelu` in plain PyTorch; it can be differentiated any number of times."""
    return F.gelu(x + bias, approximate=approximate).to(x.dtype)


def gelu(v: Tensor, approximate: str) -> Tensor:
    """GELU that is right at infinity (F.gelu gives NaN there on a CPU); beyond 100 it is the identity or 0."""
    return torch.where(v > 100, v, F.gelu(v.clamp(-100, 100), approximate=approximate))


def gelu_backward(dy: Tensor, v: Tensor, approximate: str) -> Tensor:
    """dy * GELU'(v)."""
    return torch.ops.aten.gelu_backward(dy, v.clamp(-100, 100), approximate=approximate)


def _forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return narrow(gelu(wide(x) + wide(bias), approximate), x.dtype)


def _backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str, need_dbias: bool) -> tuple[Tensor, Tensor]:
    dx = gelu_backward(wide(dy), wide(x) + wide(bias), approximate)
    dbias = dx.sum_to_size(bias.shape).to(bias.dtype) if need_dbias else bias.new_empty(0)
    return dx.to(x.dtype), dbias


# ---- schemas

FWD = Primitive(
    "bias_gelu_fwd",
    "(Tensor x, Tensor bias, str approximate) -> Tensor",
    lambda x, bias, approximate: x.new_empty(x.shape),
    _forward,
)
BWD = Primitive(
    "bias_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor bias, str approximate, bool need_dbias) -> (Tensor dx, Tensor dbias)",
    lambda dy, x, bias, approximate, need_dbias: (
        x.new_empty(x.shape),
        bias.new_empty(bias.shape if need_dbias else (0,)),
    ),
    _backward,
)


# ---- the op


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, bias, approximate):
        ctx.save_for_backward(x, bias)
        ctx.backend, ctx.approximate = backend, approximate
        return FWD(backend, x, bias, approximate)

    @staticmethod
    @first_derivative_only("bias_gelu")
    def backward(ctx, saved, dy):
        dx, dbias = BWD(ctx.backend, dy, *saved, ctx.approximate, ctx.needs_input_grad[2])
        return None, dx, dbias, None


def check_approximate(op: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate is {approximate!r}; expected 'none' (erf) or 'tanh'")


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU of x + bias (Hendrycks and Gimpel, 2016), in one pass over x.

    x: (..., C) float32, bfloat16, float16 or float64. bias: (C,), in x's dtype or float32 beside half precision.
    approximate: "none" is the exact erf form that BERT uses, "tanh" is `gelu_new`. Returns x's shape and dtype.
    Sums are in float32 (float64 for float64). GELU(inf) is inf and GELU(-inf) is 0; NaN stays NaN. Only x and bias are
    saved for backward.
    Raises ValueError (shapes, devices, approximate) and TypeError (dtypes).

    Equivalent to::

        F.gelu(x + bias, approximate=approximate)
    """
    checks.floats("bias_gelu", {"x": x}, {"bias": bias})
    if x.dim() == 0:
        raise ValueError("bias_gelu: x has shape (); expected (..., C)")
    checks.shape("bias_gelu", "bias", bias, (x.shape[-1],), "(C,)", "the last dimension of x")
    check_approximate("bias_gelu", approximate)
    live = needs_grad(x, bias)
    backend = backends.choose("bias_gelu", x.device.type, x.dtype, backward=live, size=x.shape[-1])
    return _BiasGelu.apply(backend, x, bias, approximate) if live else FWD(backend, x, bias, approximate)
