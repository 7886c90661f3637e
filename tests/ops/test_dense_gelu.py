import itertools

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from op_suite import ProductSuite, one_element_in, pytest_generate_tests, slow_interpreted  # noqa: F401

from fastbert import ops, testing
from fastbert.ops.op import PRIMITIVES, Primitive


class TestDenseGelu(ProductSuite):
    op = "dense_gelu"
    gain = 2
    shapes = [
        pytest.param((5, 7, 11), id="odd"),
        pytest.param((33, 768, 3072), id="bert-base", marks=pytest.mark.slow_on("triton", "cuda", "reference")),
        pytest.param((70, 72, 136), id="tails-of-small-tiles"),  # of the CUDA kernel; tests have 3 multiprocessors
        pytest.param((130, 136, 200), id="tails-of-large-tiles", marks=slow_interpreted),  # its last step is in slot 0
        pytest.param((1, 64, 16), id="one-token"),
    ]
    approximate = "none"

    def ours(self, x, weight, bias):
        return ops.dense_gelu(x, weight, bias, self.approximate)

    def truth(self, x, weight, bias):
        v = x @ weight.T + bias
        return 0.5 * v * (1 + torch.erf(v * 0.5**0.5))

    def contenders(self):
        def linear(x, weight, bias):
            return F.gelu(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)), approximate=self.approximate)

        def product(x, weight, bias):
            return F.gelu(x @ weight.to(x.dtype).T + bias.to(x.dtype), approximate=self.approximate)

        def onednn(x, weight, bias):
            return F.gelu(testing.onednn_linear(x, weight, bias), approximate=self.approximate)

        return [linear, product, onednn]

    def test_second_derivative_by_the_bias_alone_is_refused(self, backend):
        self.assert_no_second_derivative_by(backend, "bias")

    def primitive_calls(self, inputs):
        x, weight, bias = inputs.values()
        pre = x @ weight.T
        yield "dense_gelu_fwd", (x, weight, bias, self.approximate, True)
        yield "dense_gelu_fwd", (x, weight, bias, self.approximate, False)
        for need in itertools.product((True, False), repeat=2):
            yield "dense_gelu_bwd", (pre, x, weight, pre, self.approximate, *need)

    def test_three_dimensions(self, backend):
        inputs = self.inputs((6, 7, 11), torch.float32, backend.device)
        flat = self.ours(**inputs)
        assert torch.equal(self.ours(**inputs | {"x": inputs["x"].view(2, 3, 7)}).flatten(0, 1), flat)

    def test_autocast(self, backend):
        backend.require(torch.bfloat16)
        inputs = self.inputs((6, 7, 11), torch.float32, backend.device)
        expected = self.ours(**{name: t.bfloat16() for name, t in inputs.items()})
        with torch.autocast(backend.device, torch.bfloat16):
            assert torch.equal(self.ours(**inputs), expected)

    @pytest.mark.parametrize("frozen", [("weight", "bias"), ("x",)])
    def test_frozen_inputs_cost_no_product(self, backend, frozen):
        """The backward returns empty tensors for gradients that are not needed; autograd asks only for the others."""
        backend.require(torch.float32, backward=True)
        inputs = self.inputs((6, 7, 11), torch.float32, backend.device)
        self.ours(**inputs)
        x, weight, bias = inputs.values()
        need = "x" not in frozen, "weight" not in frozen
        pre = x @ weight.T
        grads = PRIMITIVES["dense_gelu_bwd"](backend.name, pre, x, weight, pre, self.approximate, *need)
        assert [g.numel() > 0 for g in grads] == [need[0], need[1], need[1]]
        seen = []
        original = PRIMITIVES["dense_gelu_bwd"].__class__.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Primitive, "__call__", lambda s, *a: (seen.append((s.name, a[-2:])), original(s, *a))[1])
            leaves = {n: t.clone().requires_grad_(n not in frozen) for n, t in inputs.items()}
            self.ours(**leaves).sum().backward()
        assert ("dense_gelu_bwd", need) in seen

    def test_the_backward_differentiates_where_the_forward_was(self, backend):
        """y is GELU of the saved, rounded pre-activation, and of the right form, which the rule cannot tell."""
        backend.require(torch.float16, backward=True)
        inputs = self.inputs((70, 72, 136), torch.float16, backend.device)
        y, saved = PRIMITIVES["dense_gelu_fwd"](backend.name, *inputs.values(), self.approximate, True)
        expected = F.gelu(saved.double(), approximate=self.approximate)
        # half a unit in the last place, and GELU's error for 16 bits
        assert ((y - expected).abs() <= 1.3 * 2**-11 * expected.abs() + 2**-18).all()
        assert torch.equal(PRIMITIVES["dense_gelu_fwd"](backend.name, *inputs.values(), self.approximate, False)[0], y)

    def test_the_cuda_kernel_takes_rows_of_whole_16_bytes(self, backend):
        """Other inputs take the library's product and an elementwise kernel, which need no shared memory."""
        backend.require_emulation()
        with cuda_on_cpu.shared_memory(16):
            for shape, dtype in (((5, 7, 16), torch.float16), ((5, 16, 7), torch.float16), ((5, 8, 8), torch.float32)):
                self.ours(**self.inputs(shape, dtype, "cpu"))
            inputs = self.inputs((5, 8, 8), torch.float16, "cpu")
            for name in ("x", "weight"):
                one_element_in(self.ours, name)(**inputs)
            with pytest.raises(RuntimeError, match="32768 bytes of shared memory"):
                self.ours(**inputs)

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("float16", "bfloat16"))
    def test_on_sm_75(self, backend, dtype):
        """fp16 takes products half as deep and synchronous copies; bf16 takes the library's product."""
        backend.require_emulation()
        with cuda_on_cpu.turing():
            for shape in ((70, 72, 136), (130, 40, 264)):  # small tiles, and large ones
                testing.assert_accurate(self.ours, self.truth, self.contenders(), self.inputs(shape, dtype, "cpu"))


class TestDenseGeluTanh(TestDenseGelu):
    approximate = "tanh"

    def truth(self, x, weight, bias):
        v = x @ weight.T + bias
        return 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(4)}, ValueError, "at least two dimensions"),
        ({"weight": torch.zeros(3, 5)}, ValueError, r"has shape \(3, 5\); expected \(C, K\) = \(\*, 4\), K the last"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\); expected \(C,\) = \(3,\)"),
        ({"weight": torch.zeros(3, 4).half()}, TypeError, "weight is torch.float16"),
        ({"approximate": "fast"}, ValueError, "approximate is 'fast'"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.dense_gelu(**{"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": torch.zeros(3)} | change)
