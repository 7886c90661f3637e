"""scaled_linear: how e4m3 rounds is known exactly, and sums of small integers are exact in fp8 too."""

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from op_suite import normal
from torch._subclasses.fake_tensor import FakeTensorMode

import fastbert
from fastbert import backends, ops, testing
from fastbert.ops.packed_linear import quantize_rows, quantize_weight
from fastbert.ops.scaled_linear import E4M3, LAYER_NORM, ROWS, scaled_linear_ref

GELUS = ("", "none", "tanh")
BFLOAT16 = torch.bfloat16

# Rows and channels.
SIZES = [
    pytest.param((5, 48), id="small"),
    pytest.param((3, 41), id="odd"),
    pytest.param((9, 1024), id="a-warp-s-row"),
    pytest.param((3, 1032), id="a-vector-beyond-it"),
    pytest.param((2, 3, 3072), id="three-warps"),
    pytest.param((2, 8192), id="the-longest"),
]


def some(device, *shape, scale=1.0):
    return normal(*shape, dtype=BFLOAT16, device=device, scale=scale)


def rows_near(rows, factors, truth):
    """Whether rows are truth / factors rounded to e4m3, which has 4 bits of precision, and numbers from 2**-9 on."""
    expected = truth.double() / factors.double()
    allowed = (expected.abs() * 2**-4).clamp(min=2.0**-10) * (1 + 1e-6)
    return bool(((rows.double() - expected).abs() <= allowed).all())


class TestScaledLinear:
    op, dtype = "scaled_linear", BFLOAT16

    @pytest.mark.parametrize("size", SIZES)
    def test_rows_are_rounded_to_e4m3(self, backend, size):
        magnitudes = torch.logspace(-6, 6, size[0], device=backend.device).to(BFLOAT16)
        x = some(backend.device, *size) * magnitudes.view(-1, *[1] * (len(size) - 1))
        rows, factors = ROWS(backend.name, x, None, "")
        assert rows.dtype == E4M3 and rows.shape == x.shape and factors.shape == (*x.shape[:-1], 1)
        assert torch.equal(factors, x.float().abs().amax(-1, keepdim=True) / torch.full_like(factors, 448))
        assert rows_near(rows, factors, x) and (rows.float().abs().amax(-1) == 448).all()
        expected = x.float() * (torch.full_like(factors, 448) / x.float().abs().amax(-1, keepdim=True))
        assert torch.equal(rows.float(), expected.to(E4M3).float())

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("approximate", GELUS)
    @pytest.mark.parametrize("size", SIZES)
    def test_gelu_first(self, backend, size, approximate, with_bias):
        """The rows are those of GELU rounded to bfloat16, which may be a unit in the last place away from the truth.

        A factor comes from one bfloat16 number, so it has that number's rounding error, half a unit: 2**-8.
        """
        x, bias = some(backend.device, *size), some(backend.device, size[-1]) if with_bias else None
        truth = x.double() if bias is None else x.double() + bias.double()
        truth = F.gelu(truth, approximate=approximate) if approximate else truth
        rows, factors = ROWS(backend.name, x, bias, approximate)
        near = rows.double() * factors
        allowed = torch.maximum(truth.abs() * (2**-4 + 2**-7), factors.double() * 2**-10 + truth.abs() * 2**-7)
        assert ((near - truth).abs() <= allowed).all()
        assert torch.allclose(factors.double() * 448, truth.abs().amax(-1, keepdim=True), rtol=2**-8, atol=0)

    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("size", SIZES)
    def test_layer_norm_first(self, backend, size, with_bias):
        x, residual = some(backend.device, *size), some(backend.device, *size)
        weight, bias, x_bias = (some(backend.device, size[-1]) for _ in range(3))
        given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "x_bias": x_bias if with_bias else None}
        made, eps = [], 1e-12 if with_bias else 0.3

        def ours(x, residual, weight, bias, x_bias):
            made[:] = LAYER_NORM(backend.name, x, residual, weight, bias, x_bias, eps)
            return made[0]

        def plain(x, residual, weight, bias, x_bias):
            z = x + residual if x_bias is None else x + x_bias + residual
            return F.layer_norm(z, weight.shape, weight, bias, eps)

        testing.assert_accurate(ours, plain, [plain], given, gradients=False)
        y, rows, factors = made
        expected = quantize_rows(y, E4M3)
        assert torch.equal(rows.float(), expected[0].float()) and torch.equal(factors, expected[1])

    def test_rows_without_a_scale(self, backend):
        """A row that is not finite spoils only itself. Rows of zeros, or of numbers like 2**-101, become zeros."""
        x = some(backend.device, 5, 48)
        x[0, 3], x[1, 47], x[2] = torch.nan, -torch.inf, 0
        x[3] = 2.0**-101
        rows, factors = ROWS(backend.name, x, None, "")
        assert factors[:2].isnan().all() and (rows[:4].float() == 0).all()
        assert (factors[2:4] == 0).all() and rows_near(rows[4], factors[4], x[4])

    def test_memory_that_lies_apart_or_is_not_aligned(self, backend):
        x, bias = some(backend.device, 6, 1040), some(backend.device, 1040)
        expected = ROWS(backend.name, x, bias, "none")
        strided = ROWS(backend.name, testing.strided(x), testing.strided(bias), "none")
        shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        for found in (strided, ROWS(backend.name, shifted, bias, "none")):
            assert torch.equal(found[0].float(), expected[0].float()) and torch.equal(found[1], expected[1])

    def test_products_of_small_integers_are_exact(self, backend):
        """Rows that e4m3 represents exactly: integers up to 7, and a 448 that makes the factor 1."""
        x, weight = (torch.randint(-7, 8, (n, 32), device=backend.device).to(BFLOAT16) for n in (5, 48))
        x[:, 0] = weight[:, 1] = 448
        x[:, 1] = weight[:, 0] = 0
        bias = torch.randint(-99, 99, (48,), device=backend.device).to(BFLOAT16)
        quantized, scale = quantize_weight(weight, E4M3)
        assert torch.equal(quantized.float(), weight.float()) and (scale == 1).all()
        expected = x.double() @ weight.double().T
        assert torch.equal(ops.scaled_linear(x, quantized, scale, None), expected.to(BFLOAT16))
        leading = ops.scaled_linear(x.view(1, 5, 1, 32), quantized, scale, bias)
        assert torch.equal(leading.view(5, 48), (expected + bias).to(BFLOAT16))

    def test_error_of_a_product(self, backend):
        """25 dB and more: the relative error of each factor is at most 2**-4, and mostly uniform."""
        x, weight = some(backend.device, 64, 768), some(backend.device, 96, 768, scale=0.04)
        truth = x.double() @ weight.double().T
        error = ops.scaled_linear(x, *quantize_weight(weight, E4M3), None).double() - truth
        assert 10 * torch.log10(truth.square().sum() / error.square().sum()) > 25

    def test_no_rows(self, backend):
        weight, scale = quantize_weight(some(backend.device, 16, 32), E4M3)
        assert ops.scaled_linear(some(backend.device, 0, 32), weight, scale, None).shape == (0, 16)

    def test_fakes_match(self, backend):
        x, parameter = some(backend.device, 2, 3, 48), some(backend.device, 48)
        for primitive, given in ((ROWS, (x, None, "tanh")), (LAYER_NORM, (x, x, parameter, parameter, None, 1e-5))):
            real = primitive(backend.name, *given)
            with FakeTensorMode() as mode:
                fakes = primitive.fake(*(mode.from_tensor(g) if isinstance(g, torch.Tensor) else g for g in given))
            assert [(f.shape, f.dtype, f.stride()) for f in fakes] == [(r.shape, r.dtype, r.stride()) for r in real]


def test_compiled_whole():
    weight, scale = quantize_weight(some("cpu", 16, 32), E4M3)
    x = some("cpu", 3, 32)
    with fastbert.backend("reference"):
        compiled = torch.compile(ops.scaled_linear, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, weight, scale, None), scaled_linear_ref(x, weight, scale, None))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 32)}, TypeError, "x is torch.float32; expected torch.bfloat16"),
        ({"x": None}, TypeError, "x is NoneType"),
        ({"x": torch.zeros(32, dtype=BFLOAT16)}, ValueError, "at least two dimensions"),
        ({"x": torch.zeros(2, 48, dtype=BFLOAT16)}, ValueError, r"weight has shape \(16, 32\); expected \(C, K\)"),
        ({"weight": torch.zeros(16, 32, dtype=torch.int8)}, TypeError, "weight is torch.int8"),
        ({"weight": torch.zeros(17, 32).to(E4M3)}, ValueError, "expected multiples of 16"),
        ({"scale": torch.zeros(15)}, ValueError, "scale has shape"),
        ({"bias": torch.zeros(16)}, TypeError, "bias is torch.float32"),
        ({"bias": torch.zeros(8, dtype=BFLOAT16)}, ValueError, "bias has shape"),
        ({"scale": torch.zeros(16, device="meta")}, ValueError, "on meta"),
        ({"x": torch.zeros(2, 32, dtype=BFLOAT16, requires_grad=True)}, RuntimeError, "for inference"),
    ],
)
def test_what_is_refused(changes, error, message):
    given = {
        "x": torch.zeros(2, 32, dtype=BFLOAT16),
        "weight": torch.zeros(16, 32).to(E4M3),
        "scale": torch.zeros(16),
        "bias": None,
    }
    with pytest.raises(error, match=message):
        ops.scaled_linear(**given | changes)


def test_older_gpus_are_refused(monkeypatch):
    """Both the choice of a backend and the launcher refuse GPUs before sm_90."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 9))
    monkeypatch.setitem(backends._PROBLEMS, "cuda", lambda: None)
    monkeypatch.setitem(backends.SERVES, "cuda", ("cuda",))
    backends.why_not.cache_clear()
    try:
        reason = backends.why_not("cuda", "scaled_linear", "cuda", BFLOAT16)
    finally:
        backends.why_not.cache_clear()
    assert reason == "its scaled_linear kernel is for GPUs from sm_90 on, this GPU is sm_89"
    if torch.cuda.is_available() or cuda_on_cpu.problem():
        pytest.skip("the CUDA kernels do not run on the CPU here")
    with cuda_on_cpu.turing(), pytest.raises(RuntimeError, match="no products in fp8 before sm_90"):
        ROWS("cuda", some("cpu", 2, 16), None, "")
