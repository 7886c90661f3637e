"""Shared by all ops: defining a primitive, running it on the chosen backend, refusing second derivatives."""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastbert import backends

# The operator namespace of each backend: `_C` implements `fastbert` for CPU and CUDA, the module `fastbert.triton`
# implements `fastbert_triton`, and so on. All have the same schemas, but `fastbert_varlen` has attention's alone.
NAMESPACE = {"cpu": "fastbert", "cuda": "fastbert", "triton": "fastbert_triton", "varlen": "fastbert_varlen"}
_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in dict.fromkeys(NAMESPACE.values())}
PRIMITIVES: dict[str, "Primitive"] = {}
_INSTEAD = (
    "; use torch.autograd.grad, or their twins in plain PyTorch, as fastbert.ops.layer_norm_ref is one of "
    "fastbert.ops.layer_norm"
)


class Primitive:
    """One direction of an op, e.g. `layer_norm_bwd`: a schema and a fake for every backend, and plain PyTorch.

    schema: in torch's syntax, without the name. fake: maps fake inputs to empty outputs; by contract every
    implementation returns newly allocated outputs, which are contiguous where the fake's are. reference: the
    implementation of the `reference` backend. also: the backends of `backends.LIBRARIES` that implement it too.
    """

    def __init__(self, name: str, schema: str, fake: Callable, reference: Callable, also: tuple[str, ...] = ()) -> None:
        self.name, self.schema, self.fake, self.reference = name, schema, fake, reference
        PRIMITIVES[name] = self
        self.define("fastbert", _LIBRARIES["fastbert"])
        for backend in ("triton", *also):
            self._define_in_python(backend)

    def _define_in_python(self, backend: str) -> None:
        """Registers the kernels of a backend written in Python, for CPU tensors too: `backends` lets these through only
        in tests, for example to Triton's interpreter."""
        library = _LIBRARIES[NAMESPACE[backend]]
        self.define(NAMESPACE[backend], library)
        for device_type in ("CUDA", "CPU"):
            library.impl(self.name, functools.partial(_run, f"fastbert.{backend}", self.name), device_type)

    def define(self, namespace: str, library: torch.library.Library) -> None:
        library.define(self.name + self.schema)
        torch.library.register_fake(f"{namespace}::{self.name}", self.fake, lib=library)

    def __call__(self, backend: str, *args):
        """Runs on `backend`, which `backends.choose` returned, with autocast disabled."""
        if not torch.compiler.is_compiling():
            backends.count(self.name, backend)
        run = self._reference if backend == "reference" else self.operator(backend)
        device_type = args[0].device.type
        if not autocast_on(device_type):
            return run(*args)
        with torch.autocast(device_type, enabled=False):
            return run(*args)

    def _reference(self, *args):
        """Makes the inputs contiguous, because PyTorch's own kernels round differently for other strides."""
        return self.reference(*map(_contiguous, args))

    def operator(self, backend: str) -> Callable:
        return getattr(getattr(torch.ops, NAMESPACE[backend]), self.name).default


def _contiguous(arg):
    if isinstance(arg, Tensor):
        return arg.contiguous()
    return [_contiguous(each) for each in arg] if isinstance(arg, (list, tuple)) else arg


def _run(module: str, name: str, *args):
    """Imports the module of kernels, and with it Triton for example, only when the first of them runs."""
    return importlib.import_module(module).KERNELS[name](*args)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient is live: recording is on and one of the tensors requires it.

    Raises RuntimeError in forward-mode differentiation, where the operator would drop the tangent silently, and where
    torch.func would differentiate, which takes other Functions than these.
    """
    live = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        return live
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise RuntimeError("fastbert's operators have no forward-mode derivative" + _INSTEAD)
    if live and torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("torch.func cannot differentiate fastbert's operators" + _INSTEAD)
    return live


def autocast_on(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a matrix product on `tensor`: autocast's where that is on and applies, else the tensor's own."""
    device_type = tensor.device.type
    if autocast_on(device_type) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return tensor.dtype


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, count, *tensors):
        ctx.op = op
        return tuple(tensor.clone() for tensor in tensors[:count])  # views could not be modified in place

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"fastbert.ops.{ctx.op} has no second derivative; differentiate fastbert.ops.{ctx.op}_ref instead"
        )


def first_derivative_only(op: str) -> Callable:
    """Decorates `backward(ctx, saved, *grads)` of an autograd.Function; saved: its saved tensors, unpacked once.

    Differentiating the gradients again raises RuntimeError instead of giving wrong results.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def checked(ctx, *grads):
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            given = [r for r in results if r is not None]
            inputs = [t for t in (*saved, *grads) if t is not None and t.is_floating_point()]
            marked = iter(_NoSecondDerivative.apply(op, len(given), *given, *inputs))
            return tuple(None if r is None else next(marked) for r in results)

        return checked

    return decorate
