"""packed_linear and packed_layer: floats follow the accuracy rule; int8 results are exact, being sums of integers."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from op_suite import VALUE_ERROR, assert_same_bits_for_any_number_of_threads, normal
from test_encoder_layer import ONE, REST, THREE, plain_layer
from test_relative_attention import SLOTS

import fastbert
from fastbert import backends, ops, testing
from fastbert.ops import packed_layer
from fastbert.ops.packed_linear import FWD, FWD_MAX, layout, quantize_weight, with_sums

FLOATS = (torch.float32, torch.bfloat16)  # dtypes of weights
OF_X = (*FLOATS, torch.float16)  # dtypes of x beside int8 weights
GELUS = (None, "none", "tanh")
PANEL = layout(torch.float32)[0]  # channels in a panel
needs_kernels = pytest.mark.skipif(backends._cpu_problem() is not None, reason=str(backends._cpu_problem()))

# Rows, K and C.
SIZES = [
    pytest.param((5, 7, 11), id="odd"),
    pytest.param((1, 1, 1), id="smallest"),
    pytest.param((145, 300, 33), id="more rows than a block, and K than a chain"),
    pytest.param((3, 515, 529), id="more channels than are finished at once, and two chains of K"),
    pytest.param((13, 64, 64), id="whole panels, a row more than a tile"),
    pytest.param((21, 1024, 35), id="rows that begin in one set of the cache"),
]


def product(x, weight, bias=None, approximate=None):
    return ops.packed_linear(x, ops.pack_weight(weight), None, bias, len(weight), approximate)


def product8(x, weight, factor=None, bias=None, approximate=None):
    """weight: (C, K), int8. factor: one for each channel, 1 by default."""
    factor = torch.ones(len(weight)) if factor is None else factor
    return ops.packed_linear(x, ops.pack_weight(weight), with_sums(factor, weight), bias, len(weight), approximate)


def integers(most, *shape):
    return torch.randint(-most, most + 1, shape)


def in_int8(rows, inner):
    """Integers (rows, inner) that quantisation does not change: the largest magnitude of each row is 127."""
    x = integers(127, rows, inner)
    x[torch.arange(rows), torch.arange(rows) % inner] = 127
    return x


def identity(size):
    return torch.eye(size, dtype=torch.int8)


def assert_rounded_once(y, before, wide, approximate):
    """Asserts that y, of 16 bits, is the float32 result `wide`, rounded. GELU with erf has a shorter polynomial for 16
    bits: there y is GELU of `before` up to 2^-12.7 of its distance to max(before, 0), and float32's rounding."""
    if approximate != "none":
        assert torch.equal(y, wide.to(y.dtype))
        return
    v = before.double()
    below = v.abs() * 0.5 * torch.special.erfc(v.abs() * 0.5**0.5)
    truth = v.clamp(min=0) - below
    rounding = torch.finfo(y.dtype).eps / 2 * truth.abs() + 2**-23 * v.abs()
    assert ((y.double() - truth).abs() <= rounding + 2**-12.7 * below).all()


class TestFloats:
    op = "packed_linear"

    def inputs(self, size, dtype):
        """The bias is float32, with numbers that bfloat16 represents too."""
        rows, inner, channels = size
        return {
            "x": normal(rows, inner, dtype=dtype, device="cpu"),
            "weight": normal(channels, inner, dtype=dtype, device="cpu", scale=2 * max(1, inner) ** -0.5),
            "bias": normal(channels, dtype=torch.bfloat16, device="cpu").float(),
        }

    @pytest.mark.parametrize("approximate", GELUS)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("size", SIZES)
    def test_accuracy(self, backend, size, dtype, approximate):
        def ours(x, weight, bias):
            return product(x, weight, bias.float(), approximate)

        def library(linear):
            def call(x, weight, bias):
                y = linear(x, weight, bias.to(x.dtype))
                return y if approximate is None else F.gelu(y, approximate=approximate)

            return call

        contenders = [library(F.linear), library(testing.onednn_linear)]
        inputs = self.inputs(size, dtype)
        testing.assert_accurate(ours, library(F.linear), contenders, inputs, gradients=False)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("size", SIZES)
    def test_small_integers_give_exact_results(self, backend, size, dtype):
        rows, inner, channels = size
        x, weight, bias = integers(8, rows, inner), integers(8, channels, inner), integers(99, channels)
        expected = x @ weight.T + bias
        assert torch.equal(product(x.to(dtype), weight.to(dtype), bias.float()), expected.to(dtype))

    @pytest.mark.parametrize("approximate", GELUS)
    def test_bfloat16_is_float32_rounded_once(self, backend, approximate):
        x, weight, bias = self.inputs((145, 300, 33), torch.bfloat16).values()
        wide = [product(x.float(), weight.float(), bias, gelu) for gelu in (None, approximate)]
        assert_rounded_once(product(x, weight, bias, approximate), *wide, approximate)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_sizes_of_nothing(self, backend, dtype):
        for rows, inner, channels in ((0, 7, 11), (5, 7, 0), (0, 0, 0)):
            y = product(**self.inputs((rows, inner, channels), dtype))
            assert y.shape == (rows, channels) and y.dtype == dtype
        inputs = self.inputs((13, 0, 19), dtype)
        assert torch.equal(product(**inputs), inputs["bias"].to(dtype).expand(13, 19))

    def test_leading_dimensions(self, backend):
        x, weight, bias = self.inputs((12, 7, 11), torch.float32).values()
        flat = product(x, weight, bias)
        for leading in ((3, 4), (2, 1, 6)):
            assert torch.equal(product(x.view(*leading, 7), weight, bias), flat.view(*leading, 11))

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_x_that_lies_apart_in_memory(self, backend, dtype):
        x, weight, bias = self.inputs((12, 7, 11), dtype).values()
        apart = testing.strided(x)
        assert not apart.is_contiguous()
        assert torch.equal(product(apart, weight, bias), product(x, weight, bias))
        assert torch.equal(product(x[:1].expand(5, 7), weight, bias), product(x[:1].repeat(5, 1), weight, bias))

    def test_without_bias(self, backend):
        x, weight, bias = self.inputs((5, 7, 11), torch.float32).values()
        assert torch.equal(product(x, weight), product(x, weight, torch.zeros_like(bias)))

    def test_a_live_gradient_is_refused(self, backend):
        x, weight, bias = self.inputs((5, 7, 11), torch.float32).values()
        expected = product(x, weight, bias)
        x.requires_grad_()
        with pytest.raises(RuntimeError, match=r"prepared weights are for inference; expected torch.no_grad\(\)"):
            product(x, weight, bias)
        with torch.no_grad():
            assert torch.equal(product(x, weight, bias), expected)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode"):
            product(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()), weight, bias)

    def test_a_live_gradient_of_a_parameter_is_refused_too(self, backend):
        inputs = TestInt8().inputs((5, 7, 11), torch.float32)
        product8(**inputs)
        for name in ("factor", "bias"):
            with pytest.raises(RuntimeError, match="prepared weights are for inference"):
                product8(**inputs | {name: inputs[name].clone().requires_grad_()})

    def test_compiles_to_one_graph_for_any_number_of_rows(self, backend):
        x, weight, bias = self.inputs((9, 7, 11), torch.float32).values()
        product(x, weight, bias)  # eager calls are counted, compiled ones are not
        packed = ops.pack_weight(weight)

        def plain(x):
            return F.gelu(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)), approximate="tanh")

        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        ours = lambda x: ops.packed_linear(x, packed, None, bias, 11, "tanh")  # noqa: E731
        compiled = torch.compile(ours, fullgraph=True, backend=counter)
        for rows in (9, 8, 5, 2):
            testing.assert_accurate(compiled, plain, [plain], {"x": x[:rows]}, gradients=False)
        assert counter.frame_count <= 2


class TestInt8:
    op = "packed_linear"

    def inputs(self, size, dtype):
        rows, inner, channels = size
        weight, factor = quantize_weight(normal(channels, inner, dtype=torch.float32, device="cpu"))
        bias = normal(channels, dtype=torch.float32, device="cpu")
        return {"x": normal(rows, inner, dtype=dtype, device="cpu"), "weight": weight, "factor": factor, "bias": bias}

    @pytest.mark.parametrize("size", SIZES)
    def test_integers_give_exact_results(self, backend, size):
        rows, inner, channels = size
        x, weight, bias = in_int8(rows, inner), integers(127, channels, inner).to(torch.int8), integers(99, channels)
        expected = x @ weight.long().T + bias
        assert expected.abs().max() < 2**24
        assert torch.equal(product8(x.float(), weight, bias=bias.float()), expected.float())

    @pytest.mark.parametrize("dtype", OF_X, ids=str)
    def test_rows_are_quantised_by_their_largest_magnitude_ties_to_even(self, backend, dtype):
        """Rows of multiples of 1/4 up to 127, times a factor: a product with the identity shows their int8 numbers."""
        halves = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 62.5, -63.5, 126.5, -126.5, 0.25, -0.75, -127]
        nearest = [127, 0, 2, 2, 0, -2, -2, 62, -64, 126, -126, 0, -1, -127]
        rows = torch.tensor(halves)[None] * torch.tensor([[1.0], [-1.0], [2.0], [0.5], [2.0**-20]])
        expected = torch.tensor(nearest)[None] * torch.tensor([[1.0], [-1.0], [2.0], [0.5], [2.0**-20]])
        if dtype == torch.float16:
            rows, expected = rows[:4], expected[:4]  # float16 does not represent the last row
        got = product8(rows.to(dtype), identity(len(halves)))
        assert torch.equal(rows.to(dtype).float(), rows) and torch.equal(got, expected.to(dtype))

    @pytest.mark.parametrize("inner", [3072, 3075, 1 << 16], ids=["bert-base", "no whole group", "the longest"])
    def test_the_largest_sums_are_exact(self, backend, inner):
        x = torch.stack([torch.full((inner,), 127), torch.full((inner,), -127), in_int8(1, inner)[0].sign() * 127])
        x[2, x[2] == 0] = 127
        weight = torch.stack([torch.full((inner,), n) for n in (127, -127, -128)] + [integers(1, inner) * 127])
        expected = x @ weight.T
        assert expected.abs().max() < 2**31
        assert torch.equal(product8(x.float(), weight.to(torch.int8)), expected.float())

    @pytest.mark.parametrize("dtype", OF_X, ids=str)
    def test_rows_of_zeros_and_of_less_than_2_to_the_minus_100_count_as_zeros(self, backend, dtype):
        x = torch.zeros(4, 37)
        x[1, 36], x[2, 5], x[3, 36] = 2.0**-101, -(2.0**-126), 2.0**-100
        held = x.to(dtype)[3, 36].float()  # zero in float16
        expected = torch.zeros(4, 37)
        expected[3, 36] = 127 * (held / 127)
        assert torch.equal(product8(x.to(dtype), identity(37)), expected.to(dtype))

    @pytest.mark.parametrize("approximate", GELUS)
    @pytest.mark.parametrize("dtype", OF_X, ids=str)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_row_that_is_not_finite_gives_nan_and_changes_no_other(self, backend, bad, dtype, approximate):
        inputs = self.inputs((302, 151, 19), dtype)  # the bad number at each place of a row in turn
        expected = product8(**inputs, approximate=approximate)
        inputs["x"][torch.arange(151) * 2, torch.arange(151)] = bad
        y = product8(**inputs, approximate=approximate)
        assert y[::2].isnan().all() and torch.equal(y[1::2], expected[1::2])

    def test_numbers_near_the_largest(self, backend):
        high = torch.finfo(torch.float32).max
        x = torch.tensor([[high, -high, 0, high / 127], [high, 1, 2, 3]])
        expected = torch.tensor([[127.0, -127, 0, 1], [127, 0, 0, 0]]) * (high / 127)
        assert torch.equal(product8(x, identity(4)), expected)

    def test_more_than_35_dB_of_a_random_product(self, backend):
        """Rounding to max / 127 leaves 43 dB if the largest of 768 normal numbers is 3.2; two such factors leave 40."""
        x, weight = (normal(rows, 768, dtype=torch.float32, device="cpu") for rows in (64, 96))
        truth = x.double() @ weight.double().T
        error = product8(x, *quantize_weight(weight)).double() - truth
        assert 10 * torch.log10(truth.square().sum() / error.square().sum()) > 35

    @pytest.mark.parametrize("approximate", GELUS[1:])
    def test_gelu_by_the_rule(self, backend, approximate):
        """The fused GELU is compared with GELU of the result without it."""
        inputs = self.inputs((145, 300, 33), torch.float32)
        inputs["factor"] /= 20
        before = product8(**inputs)

        def gelu(v):
            return F.gelu(v, approximate=approximate)

        ours = lambda v: product8(**inputs, approximate=approximate)  # noqa: E731
        testing.assert_accurate(ours, gelu, [gelu], {"v": before}, gradients=False)

    @pytest.mark.parametrize("approximate", GELUS)
    @pytest.mark.parametrize("dtype", OF_X[1:], ids=str)
    def test_half_precision_is_float32_rounded_once(self, backend, dtype, approximate):
        inputs = self.inputs((13, 37, 19), dtype)
        wide = [product8(**inputs | {"x": inputs["x"].float()}, approximate=gelu) for gelu in (None, approximate)]
        assert_rounded_once(product8(**inputs, approximate=approximate), *wide, approximate)

    def test_sizes_of_nothing(self, backend):
        for rows, inner, channels in ((0, 7, 11), (5, 7, 0), (0, 0, 0)):
            assert product8(**self.inputs((rows, inner, channels), torch.float32)).shape == (rows, channels)
        inputs = self.inputs((33, 0, 19), torch.float32)
        for rows in 33, 400, 1000, 33:
            [torch.full((rows,), torch.nan) for _ in range(12)]  # NaN where the factors of rows will be
            assert torch.equal(product8(**inputs | {"x": torch.zeros(rows, 0)}), inputs["bias"].expand(rows, 19))

    def test_leading_dimensions_and_x_that_lies_apart_in_memory(self, backend):
        inputs = self.inputs((12, 7, 11), torch.float32)
        flat, x = product8(**inputs), inputs.pop("x")
        assert torch.equal(product8(x.view(2, 1, 6, 7), **inputs), flat.view(2, 1, 6, 11))
        assert torch.equal(product8(testing.strided(x), **inputs), flat)


# ---- the kernels compared with plain PyTorch, and with themselves


def on_cpu(call, *args, **kwargs):
    with fastbert.backend("cpu"):
        return call(*args, **kwargs)


def _quantized(size, dtype):
    return TestInt8().inputs(size, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", OF_X, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_int8_gives_the_bits_of_plain_pytorch(size, dtype, with_bias):
    x, weight, factor, bias = _quantized(size, dtype).values()
    x *= torch.logspace(-3, 3, len(x))[:, None].to(dtype)  # no two rows have the same factor
    call = (x, ops.pack_weight(weight), with_sums(factor, weight), bias if with_bias else None, len(weight))
    assert torch.equal(on_cpu(ops.packed_linear, *call), ops.packed_linear_ref(*call))


def _calls(size):
    """Kind of weight -> (a call for x, x)."""
    floats, quantized = TestFloats().inputs(size, torch.float32), _quantized(size, torch.bfloat16)
    x, weight, bias = floats.values()
    packed, halves = ops.pack_weight(weight), ops.pack_weight(weight.bfloat16())
    narrow, scale = ops.pack_weight(quantized["weight"]), with_sums(quantized["factor"], quantized["weight"])
    return {
        "float32": (lambda x: ops.packed_linear(x, packed, None, bias, len(weight), "none"), x),
        "bfloat16": (lambda x: ops.packed_linear(x, halves, None, bias, len(weight), "tanh"), x.bfloat16()),
        "int8": (lambda x: ops.packed_linear(x, narrow, scale, bias, len(weight), "none"), quantized["x"]),
    }


@needs_kernels
@pytest.mark.parametrize("size", [(300, 300, 200), (1, 300, 2000), (128, 300, 90)], ids=["rows", "channels", "both"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_same_bits_for_any_number_of_threads(kind, size):
    call, x = _calls(size)[kind]
    assert_same_bits_for_any_number_of_threads(lambda: [call(x)])


@needs_kernels
@pytest.mark.parametrize("size", [(290, 300, 50), (290, 1024, 19)], ids=["plain", "rows share sets of the cache"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_row_has_the_same_bits_alone_and_among_others(kind, size):
    call, x = _calls(size)[kind]
    together = on_cpu(call, x)
    for rows in (*range(1, 30), 144, 145, 288, 289):  # every size of a tile, and of a block
        assert torch.equal(on_cpu(call, x[:rows]), together[:rows])
        assert torch.equal(on_cpu(call, x[-rows:]), together[-rows:])
    for row in (5, 96, 97, 143, 144, 287, 288, 289):
        assert torch.equal(on_cpu(call, x[row : row + 1]), together[row : row + 1])


# The numbers are integers divided by 64: torch's random normal numbers depend on the instruction set.
INT8_RESULTS = """
import hashlib, torch
from fastbert import backends, ops
from fastbert.ops.packed_linear import quantize_weight, with_sums
torch.manual_seed(0)
number = lambda *shape: torch.randint(-300, 301, shape) / 64
digest = hashlib.sha256()
for rows, inner, channels in ((5, 7, 11), (13, 64, 64), (145, 301, 33), (3, 515, 529), (2, 3072, 40)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, (weight, factor) = number(rows, inner).to(dtype), quantize_weight(number(channels, inner))
        y = ops.packed_linear(x, ops.pack_weight(weight), with_sums(factor, weight), number(channels), channels)
        digest.update(y.float().numpy().tobytes())
results = digest.hexdigest()
"""


@needs_kernels
@pytest.mark.parametrize("cpu_set", [*backends.build_info().get("cpu_sets", ()), None])
def test_every_instruction_set_gives_the_same_int8_results(cpu_set):
    """The best set runs in this process, each other one in a process of its own. None stands for plain PyTorch."""
    best, sets = backends.build_info()["cpu_set"], backends.build_info()["cpu_sets"]
    if cpu_set == best:
        pytest.skip("that is what the tests above run on")
    if cpu_set in sets[sets.index(best) :]:
        pytest.skip(f"this processor has no {cpu_set}")
    code = INT8_RESULTS + "print(backends.build_info()['cpu_set'], {name for _, name in backends.calls()}, results)"
    env = os.environ | {"FASTBERT_CPU_SET": cpu_set or ""} | ({} if cpu_set else {"ATEN_CPU_CAPABILITY": "default"})
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if f"FASTBERT_CPU_SET={cpu_set}: it is not" in there.stderr:
        pytest.skip(f"this processor has no {cpu_set}")
    there.check_returncode()
    ran, backend, results = there.stdout.split()
    assert (ran, backend) == (str(cpu_set), "{'cpu'}" if cpu_set else "{'reference'}")
    here = {}
    on_cpu(exec, INT8_RESULTS, here)
    assert here["results"] == results


# ---- packing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (17, 3), (16, 4), (33, 257), (63, 6), (0, 4), (5, 0)], ids=str)
def test_unpacking_gives_back_every_bit(size, dtype):
    """The weights are random bits, NaN and infinities among them."""
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    information = torch.iinfo(bits)
    weight = torch.randint(information.min, information.max + 1, size).to(bits).view(dtype)
    for given in (weight, weight.T.contiguous().T):
        packed = ops.pack_weight(given)
        assert packed.is_contiguous() and packed.shape[0] == -(-size[0] // PANEL)
        unpacked = ops.unpack_weight(packed, *size)
        assert unpacked.dtype == dtype and torch.equal(unpacked.view(bits), weight.view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_what_packing_adds_is_zeros(dtype):
    assert ops.pack_weight(torch.ones(33, 257, dtype=dtype)).sum(dtype=torch.float64) == 33 * 257


def test_packing_leaves_a_weight_where_it_is():
    for device in ("cpu", "meta"):
        weight = torch.ones(PANEL, 1, device=device)
        packed = ops.pack_weight(weight)
        assert packed.device == weight.device and packed.shape == (1, 1, PANEL, 1)
        assert device == "meta" or packed.data_ptr() != weight.data_ptr()


def test_quantised_weights_are_the_nearest():
    weight = torch.randn(40, 77) * torch.logspace(-12, 12, 40)[:, None]
    weight[3], weight[4] = 0, 1e-44
    quantized, factor = quantize_weight(weight)
    usual = torch.arange(40) != 4  # its factor would be too small for float32
    assert quantized.dtype == torch.int8 and (quantized.abs().amax(1)[usual] == 127 * (factor[usual] != 0)).all()
    error = weight.double() - quantized.double() * factor.double()[:, None]
    assert (error.abs() <= factor[:, None].double() * (0.5 + 2**-16) + 1e-44).all()
    assert not quantized[3].any() and factor[3] == 0


def test_a_weight_that_cannot_be_packed_is_refused():
    for weight, error, words in (
        (torch.zeros(3, 4, dtype=torch.float16), TypeError, "weight is torch.float16; expected one of torch.float32"),
        (torch.zeros(3), ValueError, r"weight has shape \(3,\); expected \(C, K\)"),
        (torch.zeros(3, 4, 5), ValueError, r"weight has shape \(3, 4, 5\)"),
    ):
        with pytest.raises(error, match=words):
            ops.pack_weight(weight)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(torch.tensor([[1.0, bad]]))


# ---- wrong calls


X, BIAS, SCALE = torch.zeros(5, 7), torch.zeros(11), torch.zeros(2, 11)
OTHER = torch.zeros(1, 4, PANEL * 2, 4, dtype=torch.int8)  # the layout of no instruction set
GIVEN = {"x": X, "weight": torch.zeros(11, 7), "scale": None, "bias": BIAS, "channels": 11, "approximate": None}
BYTES = {"weight": torch.zeros(11, 7, dtype=torch.int8), "scale": SCALE}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "x is list beside a weight of torch.float32; expected torch.float32"),
        ({"x": X.half()}, TypeError, "x is torch.float16 beside a weight of torch.float32; expected torch.float32"),
        ({"x": X.bfloat16()}, TypeError, "x is torch.bfloat16 beside a weight of torch.float32"),
        (BYTES | {"x": X.double()}, TypeError, "x is torch.float64 .*float32 or torch.bfloat16 or torch.float16"),
        ({"weight": torch.zeros(1, 7, 16).double()}, TypeError, "weight is torch.float64; expected one of"),
        ({"weight": [[1.0]]}, TypeError, "weight is list; expected one of"),
        ({"x": X[0]}, ValueError, r"x has shape \(7,\); expected \(..., K\) with at least two dimensions"),
        ({"x": X[:, 1:]}, ValueError, r"weight has shape .*; expected what pack_weight gives for \(C, K\) = "),
        ({"channels": 200}, ValueError, "weight has shape"),
        ({"weight": OTHER.float()}, ValueError, "weight has shape"),
        (BYTES | {"weight": OTHER}, ValueError, "weight has shape"),
        (BYTES | {"scale": None}, ValueError, "scale is None beside a weight of torch.int8"),
        ({"scale": SCALE}, ValueError, "scale is given beside a weight of torch.float32"),
        (BYTES | {"scale": SCALE[0]}, ValueError, r"scale has shape \(11,\); expected C channels' = \(2, 11\)"),
        (BYTES | {"scale": SCALE.double()}, TypeError, "scale is torch.float64; expected torch.float32"),
        ({"bias": BIAS[1:]}, ValueError, r"bias has shape \(10,\)"),
        ({"bias": BIAS.bfloat16()}, TypeError, "bias is torch.bfloat16; expected torch.float32"),
        ({"bias": BIAS.to("meta")}, ValueError, "expected all tensors on one device; given .* bias on meta"),
        ({"approximate": "erf"}, ValueError, "approximate is 'erf'; expected 'none' .erf. or 'tanh'"),
    ],
)
def test_bad_input(change, error, words):
    call = GIVEN | change
    if isinstance(call["weight"], torch.Tensor) and call["weight"].dim() == 2:
        call["weight"] = ops.pack_weight(call["weight"])
    with pytest.raises(error, match=f"packed_linear: {words}"):
        ops.packed_linear(**call)


def _operator_call(kind):
    weight = ops.pack_weight((GIVEN | BYTES if kind == "int8" else GIVEN)["weight"])
    return {"x": X, "weight": weight, "scale": SCALE if kind == "int8" else None, "bias": BIAS, "channels": 11}


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("float32", {"x": X[0]}, "x has shape"),
        ("float32", {"x": X.double()}, "x is Double"),
        ("float32", {"x": X.int()}, "x is Int"),
        ("float32", {"x": X.half()}, "x is Half beside a weight of Float"),
        ("float32", {"x": X[:, 1:]}, "weight has shape"),
        ("float32", {"channels": 17}, "scale|weight has shape|bias has shape"),
        ("float32", {"channels": -1}, "channels is -1"),
        ("float32", {"scale": SCALE}, "scale is given"),
        ("float32", {"weight": torch.zeros(1, 7, PANEL, 1).half()}, "weight is Half"),
        ("float32", {"weight": torch.zeros(1, PANEL, 7, 1).transpose(1, 2)}, "weight is not contiguous"),
        ("float32", {"bias": BIAS.bfloat16()}, "bias is BFloat16"),
        ("float32", {"bias": torch.zeros(22)[::2]}, "bias is not contiguous"),
        ("float32", {"bias": BIAS[1:]}, "bias has shape"),
        ("float32", {"approximate": "erf"}, "approximate is 'erf'"),
        ("int8", {"scale": None}, "scale is None"),
        ("int8", {"scale": SCALE[:1]}, "scale has shape"),
        ("int8", {"scale": SCALE.double()}, "scale is Double"),
        ("int8", {"scale": torch.zeros(11, 2).T}, "scale is not contiguous"),
        ("int8", {"weight": OTHER}, "weight has shape"),
        ("int8", {"x": torch.zeros(1, (1 << 16) + 1)}, r"K is 65537; expected at most 2\*\*16"),
    ],
)
def test_the_operator_refuses_bad_tensors(kind, change, words):
    call = _operator_call(kind) | {"approximate": ""}
    assert torch.ops.fastbert.packed_linear_fwd(*call.values()).shape == (5, 11)
    with pytest.raises((ValueError, RuntimeError), match=words):
        torch.ops.fastbert.packed_linear_fwd(*(call | change).values())


@needs_kernels
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_operator_is_what_its_schema_and_its_fake_say(kind):
    x, *rest = _operator_call(kind).values()
    for given in (x, testing.strided(x), x.view(1, 5, 1, 7)):
        call = given, *rest, "none"
        torch.library.opcheck(FWD.operator("cpu"), call, test_utils=("test_schema", "test_faketensor"))


# ---- packed_linear_max

MAXIMA = {  # lengths of sequences, K and C
    "few tokens, many channels": ((3, 0, 13), 64, 5000),
    "some channels at a time": ((700, 0, 1, 399), 70, 700),
    "no sequence": ((), 7, 11),
    "no token": ((0, 0), 7, 11),
    "no channel": ((2, 3), 7, 0),
}


def _maxima_call(kind, lengths, inner, channels):
    """The arguments of packed_linear_max. NaN, infinities, and equal rows are among the tokens."""
    weight, bias, tokens = torch.randn(channels, inner), torch.randn(channels), sum(lengths)
    x, scale = torch.randn(tokens, inner), None
    if tokens > 100:
        x[3, 5], x[-2], x[tokens // 2] = torch.nan, x[-1], torch.inf
    if kind == "int8":
        weight, factor = quantize_weight(weight)
        scale = with_sums(factor, weight)
    else:
        x, weight = x.to(getattr(torch, kind)), weight.to(getattr(torch, kind))
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return x, ops.pack_weight(weight), scale, bias, channels, ends


@needs_kernels
@pytest.mark.parametrize("case", MAXIMA.values(), ids=MAXIMA)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_maxima_are_those_of_the_product(kind, case):
    *call, ends = _maxima_call(kind, *case)
    logits = on_cpu(ops.packed_linear, *call)
    empty = logits.new_full((call[-1],), -torch.inf)
    texts = logits.split(ends.diff().tolist()) if len(ends) > 1 else ()
    truth = [text.max(0).values if len(text) else empty for text in texts]
    found = on_cpu(ops.packed_linear_max, *call, ends)
    assert found.dtype == call[0].dtype and found.shape == (len(ends) - 1, call[-1])
    assert not truth or torch.equal(found.nan_to_num(nan=1e9), torch.stack(truth).nan_to_num(nan=1e9))
    plain = ops.packed_linear_max_ref(*call, ends)
    assert torch.equal(found.isnan(), plain.isnan())
    if kind == "int8":
        assert torch.equal(found.nan_to_num(), plain.nan_to_num())
    assert_same_bits_for_any_number_of_threads(lambda: [ops.packed_linear_max(*call, ends).nan_to_num(nan=1e9)])
    for given in (call[0], testing.strided(call[0])):
        given = given, *call[1:], ends
        torch.library.opcheck(FWD_MAX.operator("cpu"), given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": X[None]}, ValueError, r"x has shape \(1, 5, 7\); expected \(T, K\)"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "cu_seqlens ends at 4; expected .* 5"),
        ({"cu_seqlens": torch.tensor([0, 5])}, TypeError, "cu_seqlens is torch.int64"),
        ({"bias": BIAS.bfloat16()}, TypeError, "bias is torch.bfloat16; expected torch.float32"),
        ({"x": X.clone().requires_grad_()}, RuntimeError, "prepared weights are for inference"),
    ],
)
def test_bad_input_for_the_maxima(change, error, words):
    call = _operator_call("float32") | {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)} | change
    with pytest.raises(error, match=f"packed_linear_max: {words}"):
        ops.packed_linear_max(**call)


# ---- packed_layer

LENGTHS, WIDTH, HEADS, WIDE = (70, 0, 1, 31), 24, 3, 40
KINDS = {  # the dtypes of the hidden state and of packed weights
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.float32, torch.int8),
    "int8 beside bf16": (torch.bfloat16, torch.int8),
    "some int8": (torch.bfloat16, torch.int8),  # except IN_BF16
}
IN_BF16 = "k", "up"
PLAIN = {"all packed": (), "the last is plain": ("down",), "one is packed": ("q", "k", "qkv", "out", "down")}


class Layer:
    """A layer's arguments. plain: names of products whose weights are not packed."""

    def __init__(self, projections, kind, plain=(), lengths=LENGTHS):
        dtype, weights = KINDS[kind]
        self.positions = None
        sizes = {"qkv": (3 * WIDTH, WIDTH), "up": (WIDE, WIDTH), "down": (WIDTH, WIDE)}
        self.hidden = normal(sum(lengths), WIDTH, dtype=dtype, device="cpu")
        self.ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.longest = max(lengths, default=0)
        self.plain, self.parameters, self.scales = [], [], []  # plain: weights and biases before packing
        for name in f"{projections} {REST}".split()[::2]:
            part = name.split("_")[0]
            if part in ("norm", "last"):
                pair = [normal(WIDTH, dtype=torch.float32, device="cpu") * 0.3 + one for one in (1, 0)]
                self.plain += pair
                self.parameters += pair
                continue
            rows, columns = sizes.get(part, (WIDTH, WIDTH))
            weight = normal(rows, columns, dtype=dtype, device="cpu", scale=2 * columns**-0.5)
            bias = normal(rows, dtype=dtype, device="cpu", scale=0.3)
            self.plain += weight, bias
            scale = torch.empty(0)
            if part not in plain:
                bias = bias.float()
                if weights == torch.int8 and not (kind == "some int8" and part in IN_BF16):
                    weight, factor = quantize_weight(weight)
                    scale = with_sums(factor, weight)
                weight = ops.pack_weight(weight)
            self.parameters += weight, bias
            self.scales.append(scale)

    def call(self, approximate="none"):
        tensors = self.hidden, None, self.parameters, self.scales, self.ends, *(self.positions or [None] * 4)
        return *tensors, self.longest, HEADS, (WIDTH // HEADS) ** -0.5, approximate, 1e-5, 1e-12, 1


def by_single_ops(layer, approximate="none"):
    """Computes the layer by calling its ops one after the other."""

    def between(x, *products):
        quantized = all(weight.dtype == torch.int8 for weight, _ in products)
        return x.bfloat16() if quantized and x.dtype == torch.float32 else x

    def dense(x, part, scale, approximate=None, with_bias=True):
        weight, bias = part[0], part[1] if with_bias else None
        if weight.dim() > 2:
            scale = scale if scale.numel() else None
            return ops.packed_linear(x, weight, scale, bias, len(part[1]), approximate)
        return ops.linear(x, weight, bias) if approximate is None else ops.dense_gelu(x, weight, bias, approximate)

    hidden = layer.hidden
    *projections, out, norm, up, down, last = zip(layer.parameters[::2], layer.parameters[1::2], strict=True)
    *of_projections, of_out, of_up, of_down = layer.scales
    each = [dense(hidden, part, scale) for part, scale in zip(projections, of_projections, strict=True)]
    qkv = between(torch.cat(each, -1), out, *projections).unflatten(-1, (3, HEADS, -1))
    if layer.positions is None:
        context = ops.attention(qkv, layer.ends, layer.longest)
    else:
        context = ops.relative_attention(qkv, layer.ends, layer.longest, layer.positions.beside(qkv.dtype))
    context = context.flatten(1).to(hidden.dtype)
    x = dense(context, out, of_out, with_bias=False)
    middle = ops.add_layer_norm(x, hidden, *norm, 1e-5, x_bias=out[1])
    wide = between(dense(middle, up, of_up, approximate), up, down).to(hidden.dtype)
    x = dense(wide, down, of_down, with_bias=False)
    return ops.add_layer_norm(x, middle, *last, 1e-12, x_bias=down[1])


@needs_kernels
@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("projections", "wide", "lengths"),
    [(ONE, WIDE, LENGTHS), (THREE, WIDE, LENGTHS), (ONE, 2048, (20, 1, 13))],
    ids=["one projection", "three", "rows that would share sets of the cache"],  # and so have a longer stride
)
def test_a_layer_gives_the_bits_of_the_single_ops(projections, wide, lengths, kind, plain, monkeypatch):
    monkeypatch.setitem(globals(), "WIDE", wide)
    approximate = "tanh" if kind == "int8" else "none"
    layer = Layer(projections, kind, PLAIN[plain], lengths)
    assert 0 < sum(weight.dim() > 2 for weight in layer.parameters) < len(layer.parameters)
    whole = packed_layer.FWD("cpu", *layer.call(approximate))
    assert torch.equal(whole, on_cpu(by_single_ops, layer, approximate))


def tables_of_distances(kind):
    keys, queries = (normal(6, HEADS, WIDTH // HEADS, dtype=KINDS[kind][0], device="cpu") for _ in range(2))
    return ops.RelativePositions(SLOTS["any"], keys, queries, normal(HEADS, 6, dtype=torch.float32, device="cpu"))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_distances_give_the_bits_of_the_single_ops(kind):
    layer = Layer(THREE, kind, PLAIN["the last is plain"])
    layer.positions = tables_of_distances(kind)
    whole = packed_layer.FWD("cpu", *layer.call("tanh"))
    assert torch.equal(whole, on_cpu(by_single_ops, layer, "tanh"))
    layer.positions = None
    assert not torch.equal(whole, packed_layer.FWD("cpu", *layer.call("tanh")))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_attention_gives_the_bits_of_the_single_ops(kind):
    layer = Layer(ONE, kind, PLAIN["the last is plain"])
    hidden, _, parameters, scales, ends, *settings = layer.call("tanh")
    weight, bias, *parameters = parameters
    scale, *scales = scales
    qkv = ops.packed_linear(hidden, weight, scale if scale.numel() else None, bias, 3 * WIDTH)
    qkv = qkv.bfloat16() if kind == "int8" else qkv
    context = on_cpu(ops.attention, qkv.unflatten(-1, (3, HEADS, -1)), ends, layer.longest).flatten(1).to(hidden.dtype)
    for given in (context, testing.strided(context)):
        after = packed_layer.FWD("cpu", hidden, given, parameters, scales, None, *settings)
        assert torch.equal(after, packed_layer.FWD("cpu", *layer.call("tanh")))
    plain = packed_layer.FWD("reference", hidden, context, parameters, scales, None, *settings)
    assert (plain - after).abs().max() <= 0.02 * plain.abs().max()
    for wrong, words in ((context[:-1], "shape"), (context[0], "shape"), (context.double(), "is Double")):
        with pytest.raises(VALUE_ERROR, match=f"context (has )?{words}"):
            packed_layer.FWD("cpu", hidden, wrong, parameters, scales, None, *settings)
    with pytest.raises(VALUE_ERROR, match="10 parameters; expected 12 or 16"):
        packed_layer.FWD("cpu", hidden, None, parameters, scales, ends, *settings)


@pytest.mark.parametrize("projections", [ONE, THREE], ids=["one projection", "three"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_kernels)])
def test_a_layer_is_accurate(backend, projections):
    """The kernels and the reference follow the accuracy rule for whole models."""
    layer = Layer(projections, "fp32")
    options = {"eps": 1e-5, "approximate": "none", "attention_dropout_p": 0.0, "dropout_p": 0.0, "rng": None, "site": 0}

    def library(linear):
        def call(hidden, **parameters):
            given = [parameters[str(i)] for i in range(len(parameters))]
            return plain_layer(hidden, given, HEADS, layer.ends, layer.longest, **options, linear=linear)

        return call

    def ours(hidden, **_):
        *call, _, layers = layer.call()
        return packed_layer.FWD(backend, *call, 1e-5, layers)

    inputs = {"hidden": layer.hidden} | {str(i): tensor for i, tensor in enumerate(layer.plain)}
    contenders = [library(F.linear), library(testing.onednn_linear)]
    testing.assert_accurate(ours, library(F.linear), contenders, inputs, factor=3.0, gradients=False)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_kernels)])
def test_several_layers_in_one_call(backend):
    first, second = (Layer(THREE, "int8", PLAIN["the last is plain"]) for _ in range(2))
    hidden, _, parameters, scales, *rest, _ = first.call()
    both = hidden, None, parameters + second.parameters, scales + second.scales, *rest
    second.hidden = packed_layer.FWD(backend, *first.call())
    assert torch.equal(packed_layer.FWD(backend, *both, 2), packed_layer.FWD(backend, *second.call()))


@needs_kernels
@pytest.mark.parametrize("distances", [False, True], ids=["plain", "distances"])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_blocks_give_the_bits_of_the_single_ops(kind, threads, distances):
    """From 64 rows for each thread on, a thread takes blocks of rows through a whole layer."""
    first, second = (Layer(THREE, kind, lengths=(300, 0, 1, 151)) for _ in range(2))
    first.positions = second.positions = tables_of_distances(kind) if distances else None
    hidden, _, parameters, scales, *rest, _ = first.call("tanh")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = packed_layer.FWD("cpu", hidden, None, parameters + second.parameters, scales + second.scales, *rest, 2)
        second.hidden = on_cpu(by_single_ops, first, "tanh")
        assert torch.equal(both, on_cpu(by_single_ops, second, "tanh"))
        context = normal(452, WIDTH, dtype=hidden.dtype, device="cpu")
        given = hidden, context, parameters[6:], scales[3:], *[None] * 5, *rest[5:], 1
        after = packed_layer.FWD("cpu", *given)
    finally:
        torch.set_num_threads(before)
    cut = slice(7, 80)  # too few rows for blocks
    assert torch.equal(after[cut], packed_layer.FWD("cpu", hidden[cut], context[cut], *given[2:]))


@needs_kernels
def test_several_layers_that_do_not_fit():
    hidden, _, parameters, scales, *rest, _ = Layer(THREE, "int8").call()
    for context, layers, words in (
        (None, 0, "0 layers; expected one, or several"),
        (None, 3, "16 tensors of 3 layers"),
        (None, 2, "8 parameters; expected 12 or 16"),
        (hidden, 2, "2 layers; expected one, or several without a context"),
    ):
        with pytest.raises(VALUE_ERROR, match=words):
            packed_layer.FWD("cpu", hidden, context, parameters, scales, *rest, layers)


@needs_kernels
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_a_layer_of_no_token(lengths):
    for kind in KINDS:
        layer = Layer(THREE, kind, lengths=lengths)
        assert packed_layer.FWD("cpu", *layer.call()).shape == (0, WIDTH)


@needs_kernels
def test_a_layer_of_a_hidden_state_that_lies_apart_in_memory():
    layer = Layer(THREE, "int8")
    expected = packed_layer.FWD("cpu", *layer.call())
    layer.hidden = testing.strided(layer.hidden)
    assert torch.equal(packed_layer.FWD("cpu", *layer.call()), expected)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_its_schema_and_its_fake_say(kind):
    layer = Layer(THREE, kind, ("up",), (5, 3))
    tests = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(packed_layer.FWD.operator("cpu"), layer.call(), **tests)


@needs_kernels
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer: layer.parameters.pop(), "15 parameters; expected 12 or 16"),
        (lambda layer: layer.scales.pop(), "5 scales; expected 6"),
        (lambda layer: layer.parameters.__setitem__(1, torch.zeros(1, WIDTH)), "a bias has shape"),
        (lambda layer: layer.parameters.__setitem__(1, torch.zeros(21)), "projections give 21 and 24"),
        (lambda layer: layer.scales.__setitem__(5, torch.empty(0)), "scale is None beside int8"),
        (lambda layer: layer.parameters.__setitem__(10, torch.zeros(WIDE, WIDTH).double()), "weight is Double"),
        (lambda layer: setattr(layer, "hidden", layer.hidden[0]), "hidden has shape"),
        (lambda layer: setattr(layer, "hidden", layer.hidden[:, 1:]), "weight has shape"),
        (lambda layer: setattr(layer, "hidden", layer.hidden.double()), "weight is Float; expected Double"),
        (lambda layer: setattr(layer, "ends", layer.ends.long()), "cu_seqlens is Long"),
        (lambda layer: setattr(layer, "ends", None), "neither context nor cu_seqlens"),
        (lambda layer: setattr(layer, "positions", (SLOTS["any"], None, None, None)), "expected at least one"),
        (lambda layer: setattr(layer, "positions", (SLOTS["any"].long(), None, None, torch.ones(HEADS, 2))), "slots"),
        (lambda layer: setattr(layer, "positions", (None, None, None, torch.ones(HEADS, 2))), "without slots"),
        (
            lambda layer: setattr(layer, "positions", (SLOTS["any"], None, None, torch.ones(HEADS, 6, device="meta"))),
            "is on meta",
        ),
        (lambda layer: setattr(layer, "ends", layer.ends.to("meta")), "is on meta"),
        (lambda layer: layer.scales.__setitem__(1, layer.scales[1].to("meta")), "is on meta"),
    ],
)
def test_the_operator_refuses_a_layer_that_does_not_fit(change, words):
    layer = Layer(THREE, "int8", ("q",))
    packed_layer.FWD("cpu", *layer.call())
    change(layer)
    with pytest.raises((ValueError, RuntimeError), match=words):
        packed_layer.FWD("cpu", *layer.call())


@needs_kernels
@pytest.mark.parametrize("approximate", ["x", ""])
def test_the_operator_refuses_another_gelu(approximate):
    with pytest.raises(VALUE_ERROR, match="expected 'none' or 'tanh'"):
        packed_layer.FWD("cpu", *Layer(THREE, "fp32", PLAIN["one is packed"]).call(approximate))
