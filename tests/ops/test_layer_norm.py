import pytest
import torch
import torch.nn.functional as F
from op_suite import OpSuite, normal, pytest_generate_tests, slow_interpreted  # noqa: F401

from fastbert import backends, ops, random, testing

EPS = 1e-12


def plain(x, weight, bias, eps=EPS):
    """LayerNorm by its definition, in the dtypes of its inputs."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def fused(x, weight, bias, eps=EPS):
    """PyTorch's kernel; mixed dtypes are computed in float32, as under autocast."""
    if weight.dtype != x.dtype:
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


SHAPES = [
    pytest.param((5, 7), id="odd-columns"),
    pytest.param((17, 768), id="bert-base"),
    pytest.param((3, 1024), id="bert-large"),
    pytest.param((2, 3, 40), id="three-dimensions"),
    pytest.param((5, 12), id="vectors-of-four-but-not-of-eight"),
    pytest.param((33,), id="one-dimension"),
]


class Rows(OpSuite):
    """Tests that depend on how a row is split over threads."""

    def test_a_float32_bias_beside_a_16_bit_weight_gets_a_float32_gradient(self, backend):
        backend.require(torch.bfloat16, backward=True)
        inputs = self.inputs((257, 8), torch.bfloat16, backend.device)
        inputs["bias"] = inputs["bias"].float().requires_grad_()
        y = self.ours(**inputs)
        y.backward(torch.ones_like(y))
        assert inputs["bias"].grad.tolist() == [257.0] * 8  # bfloat16 has 256 and 258

    @pytest.mark.parametrize(
        "size",
        [
            pytest.param((3, 8), id="one-vector"),
            pytest.param((50, 512), id="more-rows-than-threads-hold", marks=slow_interpreted),
            pytest.param((40, 520), id="a-vector-beyond-a-power-of-2", marks=slow_interpreted),
            pytest.param((5, 1032), id="a-vector-beyond-a-warp-s-row"),
            pytest.param((7, 2050), id="pairs-but-no-vectors", marks=slow_interpreted),
            pytest.param((2, 4096), id="the-longest-that-triton-keeps-whole"),
            pytest.param((9, 4104), id="triton-s-last-chunk-is-short", marks=slow_interpreted),
            pytest.param((2, 8192), id="the-longest", marks=slow_interpreted),
        ],
    )
    def test_rows_of_any_length(self, backend, size):
        kernel = backends.KERNELS[self.op].get(backend.name)
        if kernel and kernel.largest and size[-1] > kernel.largest:
            backend.skip("too long a row")
        self.assert_accurate(backend, self.inputs(size, torch.float32, backend.device), torch.float32)

    @pytest.mark.slow_on("triton")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=("float32", "float16"))
    @pytest.mark.parametrize("columns", [264, pytest.param(1288, marks=pytest.mark.slow_on("triton", "cuda"))])
    def test_unaligned_memory(self, backend, dtype, columns):
        backend.require(dtype)
        inputs = self.inputs((5, columns), dtype, backend.device)
        self.assert_accurate_unaligned(backend, inputs, dtype, *inputs, "dy")

    def test_parameters_may_begin_anywhere(self, backend):
        backend.require(torch.float16)
        self.assert_bits_whatever_parameters_begin_at(backend, self.inputs((3, 768), torch.float16, backend.device))


class TestLayerNorm(Rows):
    op = "layer_norm"
    parameters = ("weight", "bias")
    shapes = SHAPES

    def inputs(self, shape, dtype, device):
        return {
            "x": normal(*shape, dtype=dtype, device=device) + 0.5,
            "weight": normal(shape[-1], dtype=dtype, device=device),
            "bias": normal(shape[-1], dtype=dtype, device=device),
        }

    def empty(self, dtype, device):
        return self.inputs((0, 8), dtype, device)

    def ours(self, x, weight, bias):
        return ops.layer_norm(x, weight, bias, EPS)

    def truth(self, x, weight, bias):
        return plain(x, weight, bias)

    def contenders(self):
        return [lambda **i: plain(**i).to(i["x"].dtype), lambda **i: fused(**i).to(i["x"].dtype)]

    def primitive_calls(self, inputs):
        x, weight, bias = inputs.values()
        stats = [torch.ones(x.shape[:-1], device=x.device) for _ in range(2)]
        yield "layer_norm_fwd", (x, weight, bias, EPS)
        yield "layer_norm_bwd", (x, x, weight, *stats, True)
        yield "layer_norm_bwd", (x, x, weight, *stats, False)

    @pytest.mark.parametrize("value", [0.1, -3e4, 12345.678, 1e-30])
    @pytest.mark.parametrize("columns", [768, 1000])
    def test_constant_row_gives_exactly_the_bias(self, backend, value, columns):
        inputs = self.inputs((3, columns), torch.float32, backend.device)
        inputs["x"] = torch.full_like(inputs["x"], value)
        y = self.ours(**inputs)
        assert torch.equal(y, inputs["bias"].expand_as(y))

    def test_variance_near_eps(self, backend):
        inputs = self.inputs((9, 768), torch.float32, backend.device)
        inputs["x"] = (inputs["x"] - 0.5) * torch.logspace(-8, -4, 9, device=backend.device)[:, None]
        y, truth = self.ours(**inputs), self.truth(**{n: t.double() for n, t in inputs.items()})
        assert (y - truth).abs().max() <= 1e-6 * truth.abs().max()  # only float32's rounding: the mean is near 0

    def test_offset_rows(self, backend):
        """Mean 1e4, deviation 1: the input holds 1e4 to 2**-10, so differences from the mean are exact to 2**-11."""
        inputs = self.inputs((9, 768), torch.float32, backend.device)
        inputs["x"] = inputs["x"] + 1e4
        y, truth = self.ours(**inputs), self.truth(**{n: t.double() for n, t in inputs.items()})
        assert (y - truth).abs().max() <= 1e-5 * truth.abs().max()

    @pytest.mark.parametrize("columns", [64, 768, *(pytest.param(n, marks=slow_interpreted) for n in (1500, 4100))])
    def test_a_mean_that_float32_does_not_hold(self, backend, columns):
        """Eighths above 2**20, the finest of float32 there: the rounded mean is off by a fifth of the deviation.

        The kernel has to subtract the mean's rounding error too, forward and backward; PyTorch is off by a half.
        """
        inputs = self.inputs((32, columns), torch.float32, backend.device)
        inputs["x"] = 2.0**20 + torch.randint(0, 8, (32, columns), device=backend.device) / 8
        y, truth = self.ours(**inputs), self.truth(**{n: t.double() for n, t in inputs.items()})
        assert (y - truth).abs().max() <= 1e-6 * truth.abs().max()
        if backend.why_not(torch.float32, True) is None:
            wide = {n: t.double().requires_grad_() for n, t in inputs.items()}
            own = {n: t.requires_grad_() for n, t in inputs.items()}
            dy = torch.randn_like(truth, dtype=torch.float32)
            found = torch.autograd.grad(self.ours(**own), list(own.values()), dy)
            right = torch.autograd.grad(self.truth(**wide), list(wide.values()), dy.double())
            for gradient, exact in zip(found, right, strict=True):
                assert (gradient - exact).abs().max() <= 1e-6 * exact.abs().max()

    @pytest.mark.parametrize("size", [1e4, *(pytest.param(n, marks=slow_interpreted) for n in (10, 1e2, 1e6, 1e8))])
    @pytest.mark.parametrize("place", [0, -1])
    def test_one_outlier_in_a_row(self, backend, size, place):
        """BERT's hidden states have such channels. All of dweight's error is in one number, so PyTorch's error is the
        worst over several orders of the rows."""
        both = backend.why_not(torch.float32, True) is None
        orders = [
            lambda f=f, by=by, **i: f(**i | {"x": i["x"].roll(by, 0)}).roll(-by, 0)
            for f in self.contenders()
            for by in (0, 7, 21, 32)
        ]
        for columns in (8, 48, 768):
            inputs = self.inputs((64, columns), torch.float32, backend.device)
            inputs["x"][:, place] += size
            testing.assert_accurate(self.ours, self.truth, orders, inputs, gradients=both)

    def test_large_values_do_not_overflow_half(self, backend):
        backend.require(torch.float16)
        inputs = self.inputs((4, 768), torch.float16, backend.device)
        inputs["x"] = (inputs["x"].float() * 1e4).clamp(-6e4, 6e4).half()
        truth = self.truth(**{n: t.double() for n, t in inputs.items()})
        assert (self.ours(**inputs) - truth).abs().max() <= 2**-10 * truth.abs().max()


class TestAddLayerNorm(Rows):
    op = "add_layer_norm"
    parameters = ("weight", "bias", "x_bias")
    shapes = SHAPES
    dropout = {}

    def inputs(self, shape, dtype, device):
        return {
            "x": normal(*shape, dtype=dtype, device=device),
            "residual": normal(*shape, dtype=dtype, device=device) + 0.5,
            "weight": normal(shape[-1], dtype=dtype, device=device),
            "bias": normal(shape[-1], dtype=dtype, device=device),
            "x_bias": normal(shape[-1], dtype=dtype, device=device),
        }

    def empty(self, dtype, device):
        return self.inputs((0, 8), dtype, device)

    def ours(self, x, residual, weight, bias, x_bias):
        return ops.add_layer_norm(x, residual, weight, bias, EPS, x_bias=x_bias, **self.dropout_arguments(x))

    def factor_of(self, x):
        """The factors by which dropout multiplies x."""
        return 1

    def truth(self, x, residual, weight, bias, x_bias):
        return plain((x + x_bias) * self.factor_of(x) + residual, weight, bias)

    def contenders(self):
        def sum_of(x, residual, x_bias, **_):
            return (x + x_bias) * self.factor_of(x) + residual

        def result(norm, inputs):
            y = norm(sum_of(**inputs), inputs["weight"], inputs["bias"])
            return y.to(torch.promote_types(inputs["x"].dtype, inputs["residual"].dtype))

        return [lambda **i: result(plain, i), lambda **i: result(fused, i)]

    def primitive_calls(self, inputs):
        x, residual, weight, bias, x_bias = inputs.values()
        stats = [torch.ones(x.shape[:-1], device=x.device) for _ in range(2)]
        rng = random.new_key(x.device)
        for b in (x_bias, None):
            yield "add_layer_norm_fwd", (x, residual, weight, bias, b, rng, EPS, 0.1, 3)
            yield "add_layer_norm_fwd", (x, residual.float(), weight, bias, b, None, EPS, 0.0, 3)
            for need in (True, False):
                yield "add_layer_norm_bwd", (x, x, residual, weight, *stats, b, rng, 0.1, 3, need)

    def test_autocast_residual_stream(self, backend):
        """Under autocast x is half precision and the residual float32. The result is float32 and as accurate."""
        backend.require(torch.bfloat16)
        inputs = self.inputs((17, 768), torch.float32, backend.device)
        inputs["x"] = inputs["x"].bfloat16()
        assert self.ours(**inputs).dtype == torch.float32
        self.assert_accurate(backend, inputs, torch.bfloat16)

    @pytest.mark.parametrize(
        "others",
        [
            pytest.param({"x": torch.float32}, id="a-narrow-residual"),
            pytest.param({"residual": torch.float32}, id="a-narrow-x"),
            pytest.param({"residual": torch.bfloat16}, id="two-half-types"),
            pytest.param({"weight": torch.float32, "bias": torch.float32}, id="a-narrow-x_bias"),
            pytest.param({"x_bias": torch.float32}, id="a-wide-x_bias"),
        ],
    )
    def test_types_may_differ(self, backend, others):
        for dtype in (torch.float16, *others.values()):
            backend.require(dtype)
        inputs = self.inputs((5, 48), torch.float16, backend.device)
        inputs |= {name: inputs[name].to(dtype) for name, dtype in others.items()}
        both = backend.why_not(torch.float16, True) is None
        testing.assert_accurate(self.ours, self.truth, self.contenders()[:1], inputs, gradients=both)

    def test_without_x_bias(self, backend):
        inputs = self.inputs((5, 40), torch.float32, backend.device) | {"x_bias": None}
        both = backend.why_not(torch.float32, True) is None
        zero = lambda f: lambda **i: f(**i | {"x_bias": torch.zeros(40, device=backend.device)})  # noqa: E731
        testing.assert_accurate(
            self.ours, zero(self.truth), [zero(c) for c in self.contenders()], inputs, gradients=both
        )

    def test_constant_row_gives_exactly_the_bias(self, backend):
        inputs = self.inputs((3, 768), torch.float32, backend.device)
        inputs["x_bias"] = torch.full((768,), 0.25, device=backend.device)
        inputs["x"] = torch.full_like(inputs["x"], 0.5)
        inputs["residual"] = torch.full_like(inputs["x"], 0.1)
        y = ops.add_layer_norm(*list(inputs.values())[:4], EPS, x_bias=inputs["x_bias"])
        assert torch.equal(y, inputs["bias"].expand_as(y))


class TestAddLayerNormDropout(TestAddLayerNorm):
    """With dropout: the truth multiplies by the mask that fastbert.random specifies, so the comparison is exact."""

    key, p, site = 0x123456789ABCDEF, 0.1, 7

    def factor_of(self, x):
        keep = random.row_keep(torch.tensor([self.key]), self.site, x[..., 0].numel(), x.shape[-1], self.p)
        factor = keep.view(x.shape).to(x.device, torch.float64) * (65536 / (65536 - 6554))  # round(0.1 * 2**16) = 6554
        return factor.to(x.dtype)

    def test_dropped_elements_are_the_contract_s(self, backend):
        """x = 1 and residual = 0 show the mask itself: in each row LayerNorm's output has only two values."""
        x = torch.ones(300, 200, device=backend.device)  # every row loses some, and more rows than a thread's share
        one, zero = torch.ones(200, device=backend.device), torch.zeros(200, device=backend.device)
        y = ops.add_layer_norm(x, x * 0, one, zero, EPS, **self.dropout_arguments(x))
        assert torch.equal(y > 0, self.factor_of(x) > 0)

    @pytest.mark.slow_on("triton", "cuda")
    def test_rows_whose_number_takes_more_than_16_bits(self, backend):
        """Rows from 2**16 on drop other elements than the first rows. A row that drops none is constant and gives 0."""
        x = torch.ones(2**16 + 8, 8, device=backend.device)
        one, zero = torch.ones(8, device=backend.device), torch.zeros(8, device=backend.device)
        y = ops.add_layer_norm(x, x * 0, one, zero, EPS, **self.dropout_arguments(x))
        kept = self.factor_of(x) > 0
        assert torch.equal(y > 0, kept & ~kept.all(1, keepdim=True))
        assert not torch.equal(kept[-8:], kept[:8])


BAD = {"x": torch.zeros(2, 4), "residual": torch.zeros(2, 4), "weight": torch.zeros(4), "bias": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"residual": torch.zeros(3, 4)}, ValueError, r"residual has shape \(3, 4\); expected x's = \(2, 4\)"),
        ({"weight": torch.zeros(5)}, ValueError, r"weight has shape \(5,\); expected \(C,\) = \(4,\)"),
        ({"x_bias": torch.zeros(5)}, ValueError, "x_bias has shape"),
        ({"x": torch.zeros(2, 4).double()}, TypeError, "float64 does not mix with other dtypes"),
        ({"weight": torch.zeros(4).half()}, TypeError, "weight is torch.float16"),
        ({"residual": torch.zeros(2, 4, device="meta")}, ValueError, "residual on meta"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"dropout_p": 0.1}, ValueError, "rng is None"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; expected 0 <= dropout_p < 1"),
        ({"dropout_p": 1e-6}, ValueError, "16 random bits an element round to 0"),
        ({"dropout_p": 0.1, "rng": torch.zeros(1)}, TypeError, "rng is torch.float32"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2, dtype=torch.int64)}, TypeError, r"shape \(2,\)"),
        ({"x": torch.zeros(2, 0), "residual": torch.zeros(2, 0)}, ValueError, "with C > 0"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.add_layer_norm(**BAD | change)
    if not change.keys() - {"x", "weight", "eps"} and "float64" not in words:
        with pytest.raises(error, match=words):
            ops.layer_norm(**{n: v for n, v in (BAD | change).items() if n != "residual"})


def test_an_eps_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="eps is nan"):
        ops.layer_norm(torch.randn(2, 8), torch.ones(8), torch.zeros(8), float("nan"))
