import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from op_suite import ProductSuite, normal, pytest_generate_tests  # noqa: F401

from fastbert import backends, ops, testing
from fastbert.ops.op import PRIMITIVES

ONEDNN_TAKES = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}


class TestLinear(ProductSuite):
    op = "linear"
    shapes = [
        pytest.param((5, 7, 11), id="odd"),
        pytest.param((288, 768, 768), id="many-rows-of-a-good-number", marks=pytest.mark.slow_on("reference")),
        pytest.param((287, 768, 768), id="many-rows-of-a-bad-number", marks=pytest.mark.slow_on("reference")),
        pytest.param((1, 64, 16), id="one-token"),
        pytest.param((3, 259, 131), id="few-rows-of-odd-length"),
        pytest.param((45, 530, 131), id="few-rows"),
        pytest.param((2, 1200, 1000), id="fewer-rows-than-any-tile"),
    ]

    def ours(self, x, weight, bias):
        return ops.linear(x, weight, bias)

    def truth(self, x, weight, bias):
        return x @ weight.T + bias

    def contenders(self):
        def plain(x, weight, bias):
            return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))

        return [plain, testing.onednn_linear]

    def primitive_calls(self, inputs):
        x, weight, bias = inputs.values()
        yield "linear_fwd", (x, weight, bias)
        yield "linear_fwd", (x, weight, None)
        dy = normal(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
        for need in itertools.product((True, False), repeat=2):
            yield "linear_bwd", (dy, x, weight, *need)

    test_second_derivative_is_refused = None  # its backward is plain PyTorch

    def test_second_derivative(self, backend):
        backend.require(torch.float32, backward=True)
        inputs = self.inputs((5, 7, 11), torch.float32, backend.device)
        leaves = [t.clone().requires_grad_() for t in inputs.values()]

        def penalty(linear):
            dx = torch.autograd.grad(linear(*leaves).square().sum(), leaves[0], create_graph=True)[0]
            return torch.autograd.grad(dx.square().sum(), leaves[1])[0]

        torch.testing.assert_close(penalty(ops.linear), penalty(F.linear))

    def test_without_bias(self, backend):
        inputs = self.inputs((5, 7, 11), torch.float32, backend.device)
        expected = self.ours(inputs["x"], inputs["weight"], torch.zeros_like(inputs["bias"]))
        assert torch.equal(ops.linear(inputs["x"], inputs["weight"]), expected)

    @pytest.mark.parametrize("stride", [0, 7, 20 << 31])
    def test_a_single_row_may_have_any_stride(self, backend, stride):
        backend.require(torch.float32, backward=True)
        inputs = self.inputs((300, 20, 1), torch.float32, backend.device)
        odd = inputs | {"weight": inputs["weight"].as_strided((1, 20), (stride, 1))}
        expected, got = testing.evaluate(self.ours, inputs), testing.evaluate(self.ours, odd)
        for part in ("outputs", "gradients"):
            for name, value in getattr(expected, part).items():
                assert torch.equal(getattr(got, part)[name], value), name

    @pytest.mark.parametrize("frozen", [("weight", "bias"), ("x",)])
    def test_frozen_inputs_get_no_gradient(self, backend, frozen):
        inputs = self.inputs((5, 7, 11), torch.float32, backend.device)
        leaves = {name: t.requires_grad_(name not in frozen) for name, t in inputs.items()}
        self.ours(**leaves).sum().backward()
        assert all((leaf.grad is None) == (name in frozen) for name, leaf in leaves.items())

    def test_autocast(self, backend):
        inputs = self.inputs((5, 7, 11), torch.float32, "cpu")
        self.ours(**self.inputs((5, 7, 11), torch.float32, backend.device))
        if backend.name != "reference":
            backend.skip("bfloat16 is the library's F.linear")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ops.linear(**inputs), F.linear(**inputs))

    def test_bad_input(self, backend):
        x, weight, bias = self.inputs((5, 7, 11), torch.float32, backend.device).values()
        self.ours(x, weight, bias)
        for args, error, words in (
            ((x[0], weight, bias), ValueError, "at least two dimensions"),
            ((x, weight[:, 1:], bias), ValueError, "weight has shape"),
            ((x, weight, bias[1:]), ValueError, "bias has shape"),
            ((x.int(), weight, bias), TypeError, "x is torch.int32"),
            ((x, weight.double(), bias), TypeError, "weight is torch.float64"),
        ):
            with pytest.raises(error, match=words):
                ops.linear(*args)

    def test_rows_that_end_with_their_memory(self, backend):
        """More than a library computes at once, no multiple of 16, in a view that begins inside its storage."""
        inputs = self.inputs((300, 64, 64), torch.float32, backend.device)  # too large for the way of small products
        view = torch.cat([torch.zeros(20, 64, device=backend.device), inputs["x"]])[20:]
        assert torch.equal(self.ours(**inputs | {"x": view}), self.ours(**inputs))

    @pytest.mark.parametrize("behind", (0.0, float("nan")))
    def test_what_lies_behind_the_rows_in_memory_changes_nothing(self, backend, behind):
        inputs = self.inputs((387, 64, 48), torch.float32, backend.device)
        expected = self.ours(**inputs)
        longer = torch.cat([inputs["x"], torch.full((40, 64), behind, device=backend.device)])
        assert torch.equal(self.ours(**inputs | {"x": longer[:387]}), expected)
        assert torch.equal(self.ours(**inputs | {"x": longer[:387].clone()}), expected)


@pytest.mark.slow
@pytest.mark.skipif(backends.EXTENSION is None, reason="without kernels, F.linear's own library computes")
def test_onednn_meets_few_different_numbers_of_rows():
    """It keeps code for each, for good. Products of few rows are our own."""
    some = [*range(1, 300), *range(300, 2001, 17)]
    code = f"""
import torch
from fastbert import ops
weight, bias = torch.randn(12, 2000), torch.randn(12)  # so few channels are the library's on every processor
for rows in {some}:
    out = ops.linear(torch.randn(rows, 2000), weight, bias)
    assert out.shape == (rows, 12)
"""
    env = os.environ | {"ONEDNN_VERBOSE": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    met = set(map(int, re.findall(r",inner_product,.*,mb(\d+)ic2000oc12", run.stdout)))
    if not met:
        pytest.skip("oneDNN computes no float32 product here, or is silent")
    assert platform.machine() != "x86_64" or min(met) > 48
    assert len(met) < 180
    for rows in some[128:]:
        assert min(number for number in met if number >= rows) <= max(1.062 * rows, rows + 1)


@pytest.mark.skipif(backends.EXTENSION is None, reason="of the C++ kernels")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (12, 2000, 700)),
        (torch.float32, (31, 301, 519)),
        (torch.float32, (48, 768, 768)),
        (torch.float16, (8, 301, 519)),
        (torch.bfloat16, (4, 300, 519)),
        (torch.bfloat16, (4, 301, 519)),
    ],
    ids=str,
)
def test_few_rows_have_the_same_bits_in_any_company_and_with_any_number_of_threads(dtype, shape):
    assert_same_bits_in_any_company(dtype, shape, fewer=(1, shape[0] // 3 + 1), threads=(1, 2, 3, 5))


def amd_with_avx512():
    cpu_set = backends.build_info().get("cpu_set") or ""
    return cpu_set.startswith("avx512") and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


packs_in_each_call = pytest.mark.skipif(
    backends.build_info().get("cpu_set") not in ("avx2", "avx2_vnni"), reason="elsewhere libraries compute"
)


@packs_in_each_call
@pytest.mark.parametrize("shape", [(700, 301, 33), (433, 768, 770), (289, 5000, 40), (9000, 17, 16)], ids=str)
def test_many_rows_have_the_same_bits_in_any_company_and_with_any_number_of_threads(shape):
    """With more threads than panels of channels, threads share the rows too. Half of the rows are still too many for
    MKL's small products."""
    inputs = assert_same_bits_in_any_company(torch.float32, shape, fewer=(shape[0] // 2 + 1,), threads=(1, 2, 3, 40))
    testing.assert_accurate(ops.linear, F.linear, [F.linear, testing.onednn_linear], inputs)
    without = ops.linear(inputs["x"], inputs["weight"])
    assert torch.equal(without, ops.linear(**inputs | {"bias": torch.zeros_like(inputs["bias"])}))


@packs_in_each_call
@pytest.mark.parametrize("inner", [1301, 3072])
def test_rows_have_the_same_bits_whether_they_or_the_weights_are_packed(inner):
    """From 16 to 192 rows that nearly fill their panels, rows are packed if there are more than 1024 numbers in."""
    rows = (16, 31, 64, 127, 128, 144, 192)
    inputs = assert_same_bits_in_any_company(torch.float32, (300, inner, 970), fewer=rows, threads=())
    for few in rows:
        assert_same_bits_in_any_company(torch.float32, (few, inner, 970), fewer=(), threads=(1, 2, 3, 20, 40))
    testing.assert_accurate(ops.linear, F.linear, [F.linear, testing.onednn_linear], inputs | {"x": inputs["x"][:127]})


@pytest.mark.skipif(not amd_with_avx512(), reason="elsewhere libraries compute")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, shape) for shape in ((64, 301, 1701), (256, 768, 515), (170, 3072, 41), (200, 17, 70))]
    + [(torch.bfloat16, shape) for shape in ((64, 302, 1701), (201, 301, 41), (384, 768, 515), (170, 3072, 41))],
    ids=str,
)
def test_some_hundred_rows_have_the_same_bits_in_any_company_and_with_any_number_of_threads(dtype, shape, bias):
    if dtype == torch.bfloat16 and backends.build_info()["cpu_set"] != "avx512_bf16":
        pytest.skip("multiplies no pairs")
    inputs = assert_same_bits_in_any_company(dtype, shape, fewer=(1, 2, 3, 29, 64), threads=(1, 2, 3, 40))
    if not bias:
        inputs["bias"] = None
    testing.assert_accurate(ops.linear, F.linear, [F.linear, testing.onednn_linear if bias else F.linear], inputs)
    of_one_text = ops.linear(**inputs | {"x": inputs["x"][None]})
    assert torch.equal(of_one_text[0], ops.linear(**inputs))


@packs_in_each_call
@pytest.mark.parametrize("shape", [(700, 33, 301), (433, 770, 768), (9000, 16, 17)], ids=str)
def test_dx_of_many_rows_has_the_same_bits_in_any_company_and_with_any_number_of_threads(shape):
    rows, inner, channels = shape
    sizes = (rows, channels), (rows, inner), (channels, inner)
    dy, x, weight = (normal(*size, dtype=torch.float32, device="cpu") for size in sizes)
    assert_same_bits_of_rows(
        lambda dy: PRIMITIVES["linear_bwd"]("cpu", dy, x[: len(dy)], weight, True, False)[0],
        dy,
        fewer=(rows // 2 + 1,),
        threads=(1, 2, 3, 40),
    )


def assert_same_bits_in_any_company(dtype, shape, fewer, threads):
    rows, inner, channels = shape
    x, weight, bias = (
        normal(*size, dtype=dtype, device="cpu") for size in ((rows, inner), (channels, inner), (channels,))
    )
    assert_same_bits_of_rows(lambda x: ops.linear(x, weight, bias), x, fewer, threads)
    return {"x": x, "weight": weight, "bias": bias}


def assert_same_bits_of_rows(product, x, fewer, threads):
    """Rows of product(x) have the same bits with `fewer` rows, and in any number of threads."""
    expected, before = product(x), torch.get_num_threads()
    try:
        for number in threads:
            torch.set_num_threads(number)
            assert torch.equal(product(x), expected)
    finally:
        torch.set_num_threads(before)
    for few in fewer:
        assert torch.equal(product(x[:few]), expected[:few])


@pytest.mark.skipif(backends.EXTENSION is None or platform.machine() != "x86_64", reason="of the C++ kernels")
@pytest.mark.parametrize("dtype", ONEDNN_TAKES, ids=str)
def test_16_bit_products_are_our_own_where_pytorch_s_are_slow(dtype):
    x, weight, dy = (normal(*shape, dtype=dtype, device="cpu") for shape in ((400, 96), (80, 96), (400, 80)))
    with torch.profiler.profile() as profile:
        ops.linear(x, weight)
        PRIMITIVES["linear_bwd"]("cpu", dy, x, weight, True, True)
    called = {event.key for event in profile.key_averages()} & {"aten::linear", "aten::mm"}
    assert called == ({"aten::linear", "aten::mm"} if ONEDNN_TAKES[dtype]() else set())


@pytest.mark.skipif(backends.EXTENSION is None, reason="of the C++ kernels")
@pytest.mark.parametrize("dtype", [torch.float32, *ONEDNN_TAKES], ids=str)
@pytest.mark.parametrize("shape", [(290, 300, 530), (1, 2000, 700), (517, 33, 65)], ids=str)
def test_products_of_gradients_stay_in_their_rows(shape, dtype):
    """A number that is not finite reaches what depends on it, and nothing else."""
    rows, inner, channels = shape
    sizes = (rows, channels), (rows, inner), (channels, inner)
    dy, x, weight = (normal(*size, dtype=dtype, device="cpu") for size in sizes)
    plain = PRIMITIVES["linear_bwd"]("cpu", dy, x, weight, True, True)
    dy[-1, 2] = float("nan")
    dx, dweight = PRIMITIVES["linear_bwd"]("cpu", dy, x, weight, True, True)
    assert dx[-1].isnan().all() and torch.equal(dx[:-1], plain[0][:-1])
    others = torch.arange(channels) != 2
    assert dweight[2].isnan().all() and torch.equal(dweight[others], plain[1][others])
