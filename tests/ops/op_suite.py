"""The tests that every op has to pass on every backend. A test file subclasses `OpSuite` and describes its op."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastbert
from fastbert import backends, testing
from fastbert.ops.op import PRIMITIVES

HALF = (torch.bfloat16, torch.float16)
# What an operator's std::invalid_argument becomes in Python: torch 2.15 makes every standard exception of an operator
# a RuntimeError, except for std::out_of_range.
VALUE_ERROR = RuntimeError if torch.torch_version.TorchVersion(torch.__version__) >= (2, 15) else ValueError
# For cases that take Triton's interpreter seconds, although a smaller case runs the same code.
slow_interpreted = pytest.mark.slow_on("triton")


def normal(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(device, dtype)


def device_for(name: str, op: str, dtype: torch.dtype, backward: bool = False) -> str:
    """Where a backend is tested; skips the test if it has no such kernel there."""
    device = "cuda" if torch.cuda.is_available() and name != "cpu" else "cpu"
    if reason := backends.why_not(name, op, device, dtype, backward):
        pytest.skip(f"{name}: {reason}")
    return device


def one_element_in(call: Callable, only: str | None = None) -> Callable:
    """Wraps `call` so that its tensors start one element into their memory, where vectors are not aligned.

    only: the name of the one tensor to shift, "dy" for the gradient of the result. None shifts all of them.
    """

    def shift(name, value):
        if not isinstance(value, Tensor) or not value.is_floating_point() or only not in (None, name):
            return value
        return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)

    def shifted(**inputs):
        result = call(**{name: shift(name, value) for name, value in inputs.items()})
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda dy: shift("dy", dy))
        return result

    return shifted


def assert_same_bits_for_any_number_of_threads(call):
    """Asserts that call(), which returns tensors, gives the same bits with 1, 2, 3 and 5 threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            with fastbert.backend("cpu"):
                results.append(call())
    finally:
        torch.set_num_threads(threads)
    for tensors in zip(*results, strict=True):
        assert all(torch.equal(tensors[0], other) for other in tensors[1:])


class OpSuite:
    """op: its name. shapes: pytest.params whose ids are the reasons for them; tests other than accuracy use the first.

    `inputs` builds the keyword arguments of `ours`, some of them floating-point tensors. `truth` does not use our
    kernels, and runs in float64. `contenders` are PyTorch's own implementations, which run in the given dtypes.
    `parameters` names the inputs that may be float32 beside half-precision activations. p, key, site: of dropout.
    """

    op: str
    shapes: list
    parameters: tuple[str, ...] = ()
    factor = 2.0
    p, key, site = 0.0, 0, 0
    multiplies = False  # True if the op multiplies dense matrices, which a library does on a GPU

    def inputs(self, shape, dtype: torch.dtype, device: str) -> dict:
        raise AssertionError("a suite has inputs")

    def ours(self, **inputs):
        raise AssertionError("a suite has an op")

    def dropout_arguments(self, like: Tensor) -> dict:
        rng = torch.tensor([self.key], device=like.device)
        return {"dropout_p": self.p, "rng": rng, "site": self.site} if self.p else {}

    def truth(self, **inputs):
        raise AssertionError("a suite has a truth")

    def contenders(self) -> list[Callable]:
        raise AssertionError("a suite has contenders")

    def primitive_calls(self, inputs: dict) -> list[tuple]:
        """Yields (name, arguments) of calls that cover the op's primitives, to test their fakes and schemas."""
        raise AssertionError("a suite has primitives")

    def empty(self, dtype: torch.dtype, device: str) -> dict:
        """Inputs without tokens."""
        raise AssertionError("a suite has an empty input")

    def assert_accurate(self, backend, inputs: dict, dtype: torch.dtype, *calls: Callable) -> None:
        """Asserts the accuracy rule for each call, or else for the op; with gradients if the backend has them."""
        both = backend.why_not(dtype, True) is None
        for call in calls or (self.ours,):
            assert testing.assert_accurate(call, self.truth, self.contenders(), inputs, gradients=both)

    def assert_accurate_unaligned(self, backend, inputs: dict, dtype: torch.dtype, *names: str) -> None:
        """`assert_accurate` for aligned tensors, for all shifted by one element, and for each of `names` shifted."""
        calls = (one_element_in(self.ours, only) for only in (None, *names))
        self.assert_accurate(backend, inputs, dtype, self.ours, *calls)

    def assert_bits_whatever_parameters_begin_at(self, backend, inputs: dict) -> None:
        """A parameter may be a part of a flat buffer: it gives the bits of one that was loaded by itself."""
        if backend.name == "triton" and backend.device != "cpu":
            backend.skip("its compiler arranges loads and sums by the alignment of pointers")
        expected = testing.evaluate(self.ours, inputs)
        for name in self.parameters:
            found = testing.evaluate(one_element_in(self.ours, name), inputs)
            for key, value in {**expected.outputs, **expected.gradients}.items():
                assert torch.equal({**found.outputs, **found.gradients}[key], value), (name, key)

    # ---- numbers

    # The code for both is the same: other tests of a suite run it in both.
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.float32,
            pytest.param(torch.bfloat16, marks=pytest.mark.slow_on("cuda")),
            pytest.param(torch.float16, marks=pytest.mark.slow_on("triton")),
            torch.float64,
        ],
        ids=lambda d: str(d).removeprefix("torch."),
    )
    def test_accuracy(self, backend, shape, dtype):
        backend.require(dtype)
        inputs = self.inputs(shape, dtype, backend.device)
        both = backend.why_not(dtype, True) is None
        testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs, factor=self.factor, gradients=both)

    @pytest.mark.parametrize("dtype", HALF, ids=("bfloat16", "float16"))
    def test_float32_parameters_beside_half_activations(self, backend, dtype):
        backend.require(dtype)
        inputs = self.inputs(self.shapes[0].values[0], dtype, backend.device)
        inputs |= {name: inputs[name].float() for name in self.parameters if inputs[name] is not None}
        self.assert_accurate(backend, inputs, dtype)

    def test_gradcheck(self, backend):
        backend.require(torch.float64, backward=True)
        inputs = self.inputs(self.shapes[0].values[0], torch.float64, backend.device)
        names = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
        leaves = [inputs[name].clone().requires_grad_() for name in names]
        call = lambda *tensors: self.ours(**inputs | dict(zip(names, tensors, strict=True)))  # noqa: E731
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)

    def test_non_contiguous_input(self, backend):
        """Inputs and gradients with NaN between their elements in memory give the bits of contiguous ones.

        A GPU's library may use another kernel for other strides, so there products follow the accuracy rule.
        """
        backend.require(torch.float32)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        apart = {name: testing.strided(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        assert not any(value.is_contiguous() for value in apart.values() if isinstance(value, Tensor) and value.dim())
        both = backend.why_not(torch.float32, True) is None
        got = testing.evaluate(self.ours, apart, gradients=both, strided_gradients=both)
        if self.multiplies and backend.device != "cpu":
            truth = testing.evaluate(self.truth, inputs, dtype=torch.float64, gradients=both)
            theirs = [testing.evaluate(contender, inputs, gradients=both) for contender in self.contenders()]
            return testing.assert_rows(testing.compare(got, truth, theirs, factor=self.factor))
        expected = testing.evaluate(self.ours, inputs, gradients=both)
        for name, value in {**expected.outputs, **expected.gradients}.items():
            assert torch.equal({**got.outputs, **got.gradients}[name], value), name

    def test_repeatable_bit_for_bit(self, backend):
        backend.require(torch.float32)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        both = backend.why_not(torch.float32, True) is None
        first, second = (testing.evaluate(self.ours, inputs, gradients=both) for _ in range(2))
        for name, value in {**first.outputs, **first.gradients}.items():
            assert torch.equal({**second.outputs, **second.gradients}[name], value), name

    def test_empty_input(self, backend):
        backend.require(torch.float32)
        inputs = self.empty(torch.float32, backend.device)
        both = backend.why_not(torch.float32, True) is None
        ours = testing.evaluate(self.ours, inputs, gradients=both)
        truth = testing.evaluate(self.truth, inputs, dtype=torch.float64, gradients=both)
        testing.assert_rows(testing.compare(ours, truth, []))

    # ---- autograd and torch.compile

    def test_second_derivative_is_refused(self, backend):
        backend.require(torch.float64, backward=True)
        inputs = self.inputs(self.shapes[0].values[0], torch.float64, backend.device)
        leaves = {
            n: v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in inputs.items()
        }
        floats = [v for v in leaves.values() if isinstance(v, Tensor) and v.requires_grad]
        first = torch.autograd.grad(self.ours(**leaves).square().sum(), floats, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(sum(g.sum() for g in first), floats, allow_unused=True)

    def assert_no_second_derivative_by(self, backend, name: str) -> None:
        """Also where `name` alone is trained, and the op's gradient by it depends on nothing else that is."""
        backend.require(torch.float64, backward=True)
        inputs = self.inputs(self.shapes[0].values[0], torch.float64, backend.device)
        inputs[name].requires_grad_()
        first = torch.autograd.grad(self.ours(**inputs).sum(), inputs[name], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(first.square().sum(), inputs[name])

    def test_fakes_match(self, backend):
        backend.require(torch.bfloat16)
        inputs = self.inputs(self.shapes[0].values[0], torch.bfloat16, backend.device)
        for name, args in self.primitive_calls(inputs):
            primitive = PRIMITIVES[name]
            if name.endswith("_bwd") and backend.why_not(torch.bfloat16, True):
                continue
            real = primitive(backend.name, *args)
            with FakeTensorMode() as mode:
                fake = primitive.fake(*tree_map_only(Tensor, mode.from_tensor, args))
            pairs = zip(tree_leaves(real), tree_leaves(fake), strict=True)
            for a, b in pairs:
                assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), primitive.name
                assert a.stride() == b.stride() or backend.name == "reference", primitive.name

    @pytest.mark.slow_on("triton", "cuda")
    def test_opcheck(self, backend):
        backend.require(torch.float32)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        self.ours(**inputs)
        if backend.name == "reference":
            pytest.skip("the reference backend is plain PyTorch: it has no operator of its own")
        for name, args in self.primitive_calls(inputs):
            primitive = PRIMITIVES[name]
            if name.endswith("_bwd") and backend.why_not(torch.float32, True):
                continue
            permuted = tree_map_only(Tensor, lambda a: a.mT.contiguous().mT if a.dim() > 1 else a, args)
            for some in (args, permuted):
                operator = primitive.operator(backend.name)
                torch.library.opcheck(operator, tuple(some), test_utils=("test_schema", "test_faketensor"))

    @pytest.mark.slow_on("triton", "cuda", "reference")  # whose operators have the same schemas and shapes as the CPU's
    def test_compiles_to_one_graph(self, backend):
        backend.require(torch.float32)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        both = backend.why_not(torch.float32, True) is None
        torch._dynamo.reset()
        compiled = torch.compile(self.ours, fullgraph=True, backend="aot_eager")
        self.ours(**inputs)  # eager calls are counted, compiled ones are not
        testing.assert_accurate(compiled, self.truth, self.contenders(), inputs, factor=self.factor, gradients=both)


class ProductSuite(OpSuite):
    """An op that begins with a matrix product of `shapes` (tokens, inner, outer) and of standard deviation `gain`."""

    parameters = ("weight", "bias")
    multiplies = True
    gain = 1

    def inputs(self, shape, dtype, device):
        tokens, inner, outer = shape
        return {
            "x": normal(tokens, inner, dtype=dtype, device=device),
            "weight": normal(outer, inner, dtype=dtype, device=device, scale=self.gain * inner**-0.5),
            "bias": normal(outer, dtype=dtype, device=device),
        }

    def empty(self, dtype, device):
        return self.inputs((0, 8, 4), dtype, device)

    def test_a_weight_that_calls_share_is_not_saved_for_each_of_them(self, backend):
        """Under autocast, which would make a copy in its dtype for every call. ALBERT's layers share their weights."""
        backend.require(torch.bfloat16, backward=True)
        if backend.name == "reference":
            backend.skip("it may be PyTorch's own product")
        inputs = {n: x.requires_grad_() for n, x in self.inputs((3, 64, 64), torch.float32, backend.device).items()}
        saved, y = {}, inputs.pop("x")
        keep = lambda tensor: saved.update({tensor.untyped_storage().data_ptr(): tensor}) or tensor  # noqa: E731
        with torch.autocast(backend.device, torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                for _ in range(3):
                    y = self.ours(y, **inputs)
        weight = inputs["weight"]
        assert [tensor.dtype for tensor in saved.values() if tensor.shape == weight.shape] == [torch.float32]
        y.sum().backward()
        assert weight.grad.dtype == torch.float32


def pytest_generate_tests(metafunc):  # imported by the test files: one test for each shape
    if "shape" in metafunc.fixturenames and hasattr(metafunc.cls, "shapes"):
        metafunc.parametrize("shape", metafunc.cls.shapes)
