"""The accuracy rule: the definition of "as accurate as PyTorch" for tests, benchmarks and users' checks.

The truth is computed in float64 on the same rounded inputs. The error of a tensor is its max |difference| from the
truth, e is the largest error among PyTorch's implementations of the same call in the same dtypes, and u is the epsilon
of the tensor's dtype:

    output    error <= 2 e + u * max |truth|          (hidden states of whole models: 3 e)
    gradient  error <= 3 e + u * (largest gradient of that call)
    float64   error <= 1e-12 * (max |truth|, or the largest gradient)

FlashAttention's tests use a similar rule: an error of at most a small multiple of PyTorch's.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastbert.warn import warn


@dataclass(frozen=True)
class Result:
    """A call's outputs, and the gradients of its floating-point inputs, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """The rule for one tensor. baseline: e, PyTorch's largest error."""

    name: str
    error: float
    bound: float
    baseline: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        sign = "<=" if self.ok else "> "
        return f"{self.name:24} error {self.error:9.3e} {sign} {self.bound:9.3e}  (PyTorch {self.baseline:9.3e})"


def evaluate(
    call: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Mapping[str, object],
    *,
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    strided_gradients: bool = False,
) -> Result:
    """Runs `call(**inputs)` on fresh leaf tensors, and a backward with fixed random output gradients.

    inputs: tensors and other arguments; leaves get the same strides. dtype: converts floating-point tensors first
    (float64 for the truth), which does not keep strides. gradients: False for a forward without a graph.
    strided_gradients: True for output gradients that are not contiguous, made by `strided`.
    """
    leaves = {name: _leaf(value, dtype, gradients) for name, value in inputs.items()}
    with torch.set_grad_enabled(gradients):
        result = call(**leaves)
    named = {f"output {i}": t for i, t in enumerate(result)} if isinstance(result, tuple) else {"output": result}
    floating = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    if not gradients:
        return Result(named, {})
    outputs = list(named.values())
    cotangents = [_cotangent(t, i) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, [strided(t) for t in cotangents] if strided_gradients else cotangents)
    zero = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in floating.items()}
    return Result({name: t.detach() for name, t in named.items()}, {f"d{name}": grad for name, grad in zero.items()})


def strided(tensor: Tensor) -> Tensor:
    """A copy that is not contiguous: the last two dimensions are exchanged in memory, and after each element lies one
    that must not be read: NaN, the dtype's largest integer, or True. A tensor without dimensions is returned
    unchanged."""
    if tensor.dim() == 0:
        return tensor
    turned = tensor.mT if tensor.dim() > 1 else tensor
    gap = float("nan") if tensor.is_floating_point() else tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max
    apart = torch.stack([turned, torch.full_like(turned, gap)], -1)[..., 0]
    return apart.mT if tensor.dim() > 1 else apart


def _leaf(value: object, dtype: torch.dtype | None, gradients: bool) -> object:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    copy = _copy(value.detach()) if dtype in (None, value.dtype) else value.detach().to(dtype)
    return copy.requires_grad_(gradients)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides; clone() keeps them only if no memory lies between the elements."""
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or not tensor.numel():
        return copy
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _cotangent(output: Tensor, seed: int) -> Tensor:
    """Normal random numbers that bfloat16 and float16 represent exactly, so that all dtypes get the same values."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(output.shape, generator=generator).bfloat16().half()
    return grad.to(output.device, output.dtype)


def compare(ours: Result, truth: Result, contenders: Iterable[Result], *, factor: float = 2.0) -> list[Row]:
    """Applies the rule to each tensor. contenders: PyTorch's results in the dtypes of `ours`. factor: of e, for
    outputs."""
    contenders = list(contenders)
    largest = max((_magnitude(t) for t in truth.gradients.values()), default=0.0)
    rows = []
    for kind, times in (("outputs", factor), ("gradients", 3.0)):
        results, truths = getattr(ours, kind), getattr(truth, kind)
        if results.keys() != truths.keys():
            raise AssertionError(f"{kind} are {sorted(results)}; the truth has {sorted(truths)}")
        for name, tensor in results.items():
            e = max((_error(getattr(c, kind)[name], truths[name]) for c in contenders), default=0.0)
            scale = largest if kind == "gradients" else _magnitude(truths[name])
            double = tensor.dtype == torch.float64
            bound = 1e-12 * scale if double else times * e + torch.finfo(tensor.dtype).eps * scale
            rows.append(Row(name, _error(tensor, truths[name]), bound, e))
    return rows


def assert_accurate(
    ours: Callable,
    truth: Callable,
    contenders: Iterable[Callable],
    inputs: Mapping[str, object],
    *,
    factor: float = 2.0,
    gradients: bool = True,
) -> list[Row]:
    """Evaluates `ours` and PyTorch's `contenders` on the inputs, and `truth` on them in float64; applies the rule.

    All take the inputs as keyword arguments. A contender that raises RuntimeError, for example because it has no kernel
    for this processor, is left out with a warning; if none is left, RuntimeError says why. Returns the rows. Raises
    AssertionError with the table if a row fails.
    """
    rows = compare(
        evaluate(ours, inputs, gradients=gradients),
        evaluate(truth, inputs, dtype=torch.float64, gradients=gradients),
        _evaluate_those_that_run(contenders, inputs, gradients),
        factor=factor,
    )
    assert_rows(rows)
    return rows


def _evaluate_those_that_run(
    contenders: Iterable[Callable], inputs: Mapping[str, object], gradients: bool
) -> list[Result]:
    results, failures = [], []
    for contender in contenders:
        try:
            results.append(evaluate(contender, inputs, gradients=gradients))
        except RuntimeError as error:
            failures.append(f"{getattr(contender, '__name__', contender)}: {error}")
    if failures and not results:
        raise RuntimeError("none of PyTorch's implementations can run this call:\n" + "\n".join(failures))
    for failure in failures:
        warn(f"left out of the accuracy rule: {failure}")
    return results


def assert_rows(rows: Iterable[Row]) -> None:
    """Raises AssertionError with the table unless every row obeys the rule."""
    rows = list(rows)
    if not all(row.ok for row in rows):
        raise AssertionError("the accuracy rule is broken:\n" + "\n".join(map(str, rows)))


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _error(tensor: Tensor, truth: Tensor) -> float:
    if tensor.shape != truth.shape:
        raise AssertionError(f"shape {tuple(tensor.shape)}; the truth has {tuple(truth.shape)}")
    return _magnitude(tensor.detach().double() - truth.detach().double())


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias.contiguous(), "none", [], "")  # it ignores strides

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), dy.flatten(0, -2).sum(0)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear by oneDNN in float32 on a CPU, as torch.compile computes it for inference; plain F.linear elsewhere.

    It is one of PyTorch's implementations for the accuracy rule, because it sums in another order than MKL.
    """
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    ours = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() and torch.backends.mkldnn.is_available()
    return (_OneDnnLinear.apply if ours else torch.nn.functional.linear)(x, weight, bias)


def on_onednn(model: nn.Module) -> nn.Module:
    """Lets `onednn_linear` compute the dense layers of a model, in place. Returns the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(onednn_linear, weight=module.weight, bias=module.bias)
    return model
