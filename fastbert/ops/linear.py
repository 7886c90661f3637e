"""linear: a dense layer, computed by our own kernel or by a library that PyTorch carries, whichever is faster."""

import functools

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


def gradients(dy, x, weight, need_dx, need_dweight):
    dx = dy @ weight if need_dx else x.new_empty(0)
    return dx, dy.flatten(0, -2).T @ x.flatten(0, -2) if need_dweight else x.new_empty(0)


BWD = Primitive(
    "linear_bwd",
    "(Tensor dy, Tensor x, Tensor weight, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    lambda dy, x, weight, need_dx, need_dweight: (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight else (0,)),
    ),
    gradients,
)


class _Linear(torch.autograd.Function):
    """With create_graph, gradients are computed in plain PyTorch, which can be differentiated any number of times."""

    @staticmethod
    def forward(ctx, backend, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.backend = backend
        return FWD(backend, x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        _, *needed, need_dbias = ctx.needs_input_grad
        run = gradients if torch.is_grad_enabled() else functools.partial(BWD, ctx.backend)
        dx, dweight = run(dy, *ctx.saved_tensors, *needed) if any(needed) else (None, None)
        return None, dx, dweight, dy.flatten(0, -2).sum(0) if need_dbias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer: x times the transposed weight, plus bias.

    x: (..., K) with at least two dimensions, float32, bfloat16, float16 or float64. weight: (C, K) and bias: (C,), in
    x's dtype or float32 (then converted to it; autocast converts all three, as for F.linear). Returns (..., C) in the
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
