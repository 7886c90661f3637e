import pytest
import torch
import torch.nn.functional as F
from op_suite import OpSuite, normal, pytest_generate_tests  # noqa: F401

from fastbert import backends, ops


class TestBiasGelu(OpSuite):
    op = "bias_gelu"
    parameters = ("bias",)
    shapes = [
        pytest.param((5, 7), id="odd-columns"),  # not a multiple of any vector width
        pytest.param((1, 1), id="one-element"),
        pytest.param((17, 3072), id="bert-base"),
        pytest.param((2, 3, 40), id="three-dimensions"),  # leading dimensions, tail after a vector
        pytest.param((40,), id="one-dimension"),
        pytest.param((50, 40), id="rows-that-blocks-share-unevenly"),
    ]

    # x times the normal distribution function, from its tables
    known = {0.0: 0.0, 1.0: 0.8413447460685429, -1.0: -0.15865525393145707, 2.0: 1.9544997361036416}

    def inputs(self, shape, dtype, device):
        # three standard deviations wide: reaches both tails, where 1 + erf cancels
        x = normal(*shape, dtype=dtype, device=device, scale=3)
        return {"x": x, "bias": normal(shape[-1], dtype=dtype, device=device)}

    def empty(self, dtype, device):
        return self.inputs((0, 8), dtype, device)

    def ours(self, x, bias):
        return ops.bias_gelu(x, bias)

    def truth(self, x, bias):
        return 0.5 * (x + bias) * (1 + torch.erf((x + bias) * 0.5**0.5))

    def contenders(self):
        return [lambda x, bias: F.gelu(x + bias).to(x.dtype)]

    def primitive_calls(self, inputs):
        x, bias = inputs.values()
        yield "bias_gelu_fwd", (x, bias, "none")
        yield "bias_gelu_bwd", (x, x, bias, "none", True)
        yield "bias_gelu_bwd", (x, x, bias, "none", False)

    def test_values_at_the_edges(self, backend):
        """Known values and limits. On a CPU F.gelu(inf) is NaN; ours is not."""
        x = torch.tensor([*self.known, 1e30, -1e30, torch.inf, -torch.inf, torch.nan], device=backend.device)
        y = self.ours(x, torch.zeros_like(x)).cpu()
        known = torch.tensor(list(self.known.values()))
        assert ((y[: len(known)] - known).abs() <= 2**-22 * known.abs()).all()  # two units in the last place
        assert y[len(known) : -1].tolist() == [torch.tensor(1e30).item(), 0, torch.inf, 0]
        assert y[-1].isnan()

    def test_negative_tail_keeps_its_digits(self, backend):
        """v (1 + erf(v / sqrt 2)) / 2 cancels for v < 0: at -6 no digit is left. Kernels have to do better."""
        if backend.name == "reference":
            backend.skip("the reference is F.gelu, which cancels")
        x = torch.linspace(-12, 0, 4801, dtype=torch.float64)
        y = ops.bias_gelu(x.float().to(backend.device), torch.zeros(4801, device=backend.device)).cpu().double()
        truth = x.float().double() * 0.5 * torch.special.erfc(-x.float().double() * 0.5**0.5)
        units = 8 + backend.rounds_fma_twice * x**2 / 4
        assert ((y - truth).abs() <= units * 2**-23 * truth.abs()).all()

    @pytest.mark.slow_on("triton")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=("bfloat16", "float16"))
    def test_every_number_of_16_bits(self, backend, dtype):
        """For 16 bits kernels use shorter polynomials. Beside the rounding of the result, GELU may be off by 2^-12.7
        times its distance to max(v, 0), and the derivative by 2^-12 (1 + v²) times the tail. AVX-512's rounding to
        bfloat16 also flushes numbers below the smallest normal one, 2^-126, to zero."""
        backend.require(dtype, backward=True)
        if backend.name == "reference":
            backend.skip("the reference is F.gelu, which cancels")
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = x[x.abs() <= 10].to(backend.device).requires_grad_()  # no NaN
        y = ops.bias_gelu(x, torch.zeros_like(x))
        y.sum().backward()
        v, info = x.detach().cpu().double(), torch.finfo(dtype)
        tail = 0.5 * torch.special.erfc(v.abs() * 0.5**0.5)
        below = tail - v.abs() * (-v.square() / 2).exp() / (2 * torch.pi) ** 0.5  # the derivative for v < 0
        least, avx512 = info.smallest_normal, backends.build_info().get("cpu_set") in ("avx512_bf16", "amx")
        flushes = dtype == torch.bfloat16 and backend.name == "cpu" and avx512

        def rounding(truth):
            exact = (info.eps / 2 * truth.abs()).clamp(min=info.eps * least)
            return exact.where(truth.abs() > least, least) if flushes else exact

        for ours, truth, also in (
            (y, v.clamp(min=0) - v.abs() * tail, 2**-12.7 * v.abs() * tail),
            (x.grad, torch.where(v > 0, 1 - below, below), 2**-12 * (1 + v.square()) * tail),
        ):
            assert ((ours.detach().cpu().double() - truth).abs() <= rounding(truth) + also).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=("float32", "float16"))
    def test_unaligned_memory(self, backend, dtype):
        backend.require(dtype)
        inputs = self.inputs((5, 264), dtype, backend.device)  # 264: one vector beyond what 32 threads hold
        self.assert_accurate_unaligned(backend, inputs, dtype, *inputs)

    def test_a_bias_may_begin_anywhere(self, backend):
        backend.require(torch.float16)
        self.assert_bits_whatever_parameters_begin_at(backend, self.inputs((300, 40), torch.float16, backend.device))

    def test_forward_mode_is_refused(self, backend):
        """jvp is refused; the operator alone would drop the tangent without a word."""
        inputs = self.inputs((3, 8), torch.float64, backend.device)
        backend.require(torch.float64, backward=True)
        self.ours(**inputs)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(lambda x: self.ours(x, inputs["bias"]), (inputs["x"],), (inputs["x"],))

    def test_torch_func_does_not_differentiate(self, backend):
        inputs = self.inputs((3, 8), torch.float64, backend.device)
        backend.require(torch.float64, backward=True)
        self.ours(**inputs)
        with pytest.raises(RuntimeError, match="torch.func cannot differentiate .*layer_norm_ref"):
            torch.func.grad(lambda x: self.ours(x, inputs["bias"]).sum())(inputs["x"])

    def test_gradient_at_the_edges(self, backend):
        backend.require(torch.float32, backward=True)
        x = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf], device=backend.device, requires_grad=True)
        ops.bias_gelu(x, torch.zeros_like(x)).sum().backward()
        assert x.grad.tolist() == [0.5, 1, 0, 1, 0]


class TestBiasGeluTanh(TestBiasGelu):
    """gelu_new, the tanh form of GELU."""

    test_negative_tail_keeps_its_digits = test_every_number_of_16_bits = None  # the tanh form has its own tail

    known = {0.0: 0.0, 1.0: 0.8411919906082768, -1.0: -0.15880800939172324, 2.0: 1.954597694087775}

    def ours(self, x, bias):
        return ops.bias_gelu(x, bias, approximate="tanh")

    def truth(self, x, bias):
        v = x + bias
        return 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))

    def contenders(self):
        return [lambda x, bias: F.gelu(x + bias, approximate="tanh").to(x.dtype)]


@pytest.mark.parametrize(
    ("x", "bias", "approximate", "error", "words"),
    [
        (torch.zeros(2, 4), torch.zeros(3), "none", ValueError, r"bias has shape \(3,\); expected \(C,\) = \(4,\)"),
        (torch.zeros(2, 4), torch.zeros(1, 4), "none", ValueError, "bias has shape"),
        (torch.zeros(()), torch.zeros(1), "none", ValueError, "x has shape"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4), "none", TypeError, "x is torch.int64"),
        (torch.zeros(2, 4), torch.zeros(4).bfloat16(), "none", TypeError, "bias is torch.bfloat16"),
        (torch.zeros(2, 4), torch.zeros(4, device="meta"), "none", ValueError, "x on cpu, bias on meta"),
        (torch.zeros(2, 4), [0, 0, 0, 0], "none", TypeError, "bias is a list"),
        (torch.zeros(2, 4), None, "none", TypeError, "bias is a NoneType"),
        (torch.zeros(2, 4), torch.zeros(4), "erf", ValueError, "approximate is 'erf'; expected 'none'"),
    ],
)
def test_bad_input_is_refused(x, bias, approximate, error, words):
    with pytest.raises(error, match=words):
        ops.bias_gelu(x, bias, approximate)
