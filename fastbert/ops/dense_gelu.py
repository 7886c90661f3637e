"""dense_gelu: a dense layer with GELU in the epilogue of its matrix product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.bias_gelu import check_approximate, gelu, gelu_backward
from fastbert.ops.numbers import narrow, wide
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad

# ---- plain PyTorch


def dense_gelu_ref(x: Tensor, weight: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """`dense_gelu` in plain PyTorch; it can be differentiated any number of times."""
    return F.gelu(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)), approximate=approximate)


def _forward(x, weight, bias, approximate, save):
    preactivation = F.linear(x, weight, bias)
    y = narrow(gelu(wide(preactivation), approximate), x.dtype)
    return y, preactivation if save else x.new_empty(0)


def _backward(dy, x, weight, preactivation, approximate, need_dx, need_dparams):
    dpre = gelu_backward(wide(dy), wide(preactivation), approximate)
    dbias = dpre.sum_to_size(weight.shape[:1]).to(x.dtype) if need_dparams else x.new_empty(0)
    dpre = dpre.to(x.dtype)
    dx = dpre @ weight if need_dx else x.new_empty(0)
    dweight = dpre.flatten(0, -2).T @ x.flatten(0, -2) if need_dparams else x.new_empty(0)
    return dx, dweight, dbias


# ---- schemas


def _fake_forward(x, weight, bias, approximate, save):
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save else (0,))


def _fake_backward(dy, x, weight, preactivation, approximate, need_dx, need_dparams):
    dweight, dbias = (x.new_empty(shape if need_dparams else (0,)) for shape in (weight.shape, weight.shape[:1]))
    return x.new_empty(x.shape if need_dx else (0,)), dweight, dbias


FWD = Primitive(
    "dense_gelu_fwd",
    "(Tensor x, Tensor weight, Tensor bias, str approximate, bool save) -> (Tensor y, Tensor preactivation)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "dense_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor preactivation, str approximate, bool need_dx, bool need_dparams)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _fake_backward,
    _backward,
)


# ---- the op


class _DenseGelu(torch.autograd.Function):
    """Parameters are saved as they are given, and cast again in the backward (as in linear.py)."""

    @staticmethod
    def forward(ctx, backend, x, weight, bias, approximate):
        y, preactivation = FWD(backend, x, weight.to(x.dtype), bias.to(x.dtype), approximate, True)
        ctx.save_for_backward(x, weight, preactivation, bias)
        ctx.backend, ctx.approximate = backend, approximate
        return y

    @staticmethod
    @first_derivative_only("dense_gelu")
    def backward(ctx, saved, dy):
        x, weight, preactivation, bias = saved  # the gradients depend on the bias, by the pre-activation
        need_dx, need_dparams = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:4])
        dx, dweight, dbias = BWD(
            ctx.backend, dy, x, weight.to(x.dtype), preactivation, ctx.approximate, need_dx, need_dparams
        )
        return None, dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None


def dense_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU of a dense layer, applied in the epilogue of the matrix product if the backend can.

    x: (..., K) with at least two dimensions, float32, bfloat16, float16 or float64. weight: (C, K) and bias: (C,), in
    x's dtype or float32 (then converted to it; autocast converts all three, as for F.linear). Returns (..., C) in the
    product's dtype. approximate: as in `bias_gelu`. x, weight and the pre-activation are saved for backward.
    Raises ValueError (shapes, devices, approximate) and TypeError (dtypes).

    Equivalent to::

        F.gelu(F.linear(x, weight, bias), approximate=approximate)
    """
    checks.dense("dense_gelu", x, weight, bias)
    check_approximate("dense_gelu", approximate)
    x = x.to(autocast_dtype(x))
    live = needs_grad(x, weight, bias)
    backend = backends.choose("dense_gelu", x.device.type, x.dtype, backward=live)
    if live:
        return _DenseGelu.apply(backend, x, weight, bias, approximate)
    return FWD(backend, x, weight.to(x.dtype), bias.to(x.dtype), approximate, False)[0]
