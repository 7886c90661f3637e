"""linear: a dense layer, by the fastest library that torch carries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.op import Primitive, autocast_dtype, needs_grad

FWD = Primitive(
    "linear_fwd",
    "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    F.linear,
)


class _Linear(torch.autograd.Function):
    """Gradients are plain PyTorch, so any number of derivatives."""

    @staticmethod
    def forward(ctx, backend, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return FWD(backend, x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        _, need_dx, need_dweight, need_dbias = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        return (
            None,
            dy @ weight if need_dx else None,
            rows.T @ x.flatten(0, -2) if need_dweight else None,
            rows.sum(0) if need_dbias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer.

    x: (..., K) with at least two dimensions, float32, bfloat16, float16 or float64. weight: (C, K) and bias: (C,), of
    x's dtype or float32 (then converted; under autocast all three are, as F.linear does). Returns (..., C) in the
    product's dtype.
    Raises ValueError (shapes, devices) and TypeError (dtypes).

    Equivalent to::

        F.linear(x, weight, bias)
    """
    checks.dense("linear", x, weight, bias)
    dtype = autocast_dtype(x)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    backend = backends.choose("linear", x.device.type, dtype, backward=needs_grad(x, weight, bias))
    if backend == "reference" or not needs_grad(x, weight, bias):
        return FWD(backend, x, weight, bias)
    return _Linear.apply(backend, x, weight, bias)
