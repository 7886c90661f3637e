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
    """With create_graph, gradients are computed in plain PyTorch, which can be differentiated any number of times.

    Parameters are saved as they are given and cast again in the backward: layers may share them (ALBERT), and a copy
    for each call would be kept until then.
    """

    @staticmethod
    def forward(ctx, backend, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.backend, ctx.bias_dtype = backend, None if bias is None else bias.dtype
        return FWD(backend, x, *_cast(x, weight, bias))

    @staticmethod
    def backward(ctx, dy):
        _, *needed, need_dbias = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        run = gradients if torch.is_grad_enabled() else functools.partial(BWD, ctx.backend)
        dx, dweight = run(dy, x, weight.to(x.dtype), *needed) if any(needed) else (None, None)
        dweight = dweight.to(weight.dtype) if needed[1] else None
        return None, dx, dweight, dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias_dtype) if need_dbias else None


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


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
    x = x.to(autocast_dtype(x))
    backend = backends.choose("linear", x.device.type, x.dtype, backward=needs_grad(x, weight, bias))
    if backend == "reference" or not needs_grad(x, weight, bias):
        return FWD(backend, x, *_cast(x, weight, bias))
    return _Linear.apply(backend, x, weight, bias)
