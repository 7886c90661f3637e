"""What all C++ kernels for CPUs share: threads, processes, memory, instruction sets."""

import contextlib
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from op_suite import assert_same_bits_for_any_number_of_threads

import fastbert
from fastbert import BertConfig, BertModel, backends, ops, random, testing
from fastbert.ops.op import PRIMITIVES

pytestmark = pytest.mark.skipif(backends._cpu_problem() is not None, reason=str(backends._cpu_problem()))

ROWS, C, LENGTHS = 700, 96, (300, 1, 0, 17, 382)


def _dropout(site):
    return {"dropout_p": 0.1, "rng": torch.tensor([77]), "site": site}


def _cases():
    """name -> (op, inputs): big enough for several threads and for several chunks of column sums."""
    x, y, w, b = torch.randn(ROWS, C), torch.randn(ROWS, C), torch.randn(C), torch.randn(C)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    slots = (torch.arange(-60, 61).clamp(-20, 19) + 20).int()
    ids, tables = torch.randint(50, (3, ROWS)), [torch.randn(50, C) for _ in range(3)]
    projected = {"qkv": torch.randn(ROWS, 3, 3, 32)}
    shapes = {"keys": (40, 3, 32), "queries": (40, 3, 32), "bias": (3, 40)}
    tables_of_positions = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {
        "layer_norm": (ops.layer_norm, {"x": x, "weight": w, "bias": b}),
        "add_layer_norm": (
            lambda **given: ops.add_layer_norm(**given, **_dropout(1)),
            {"x": x, "residual": y, "weight": w, "bias": b, "x_bias": b.flip(0)},
        ),
        "bias_gelu": (ops.bias_gelu, {"x": x, "bias": b}),
        "bias_gelu by tanh": (partial(ops.bias_gelu, approximate="tanh"), {"x": x, "bias": b}),
        "attention": (lambda qkv: ops.attention(qkv, ends, max(LENGTHS), **_dropout(2)), projected),
        "relative_attention": (
            lambda qkv, **tables: ops.relative_attention(
                qkv, ends, max(LENGTHS), ops.RelativePositions(slots, **tables), **_dropout(2)
            ),
            projected | tables_of_positions,
        ),
        "embedding": (
            lambda word, position, token_type, weight, bias: ops.embedding(
                *ids, word, position, token_type, weight, bias, **_dropout(3)
            ),
            {**dict(zip(("word", "position", "token_type"), tables, strict=True)), "weight": w, "bias": b},
        ),
        "linear_max": (
            lambda **given: ops.linear_max(**given, cu_seqlens=ends).clamp(min=-9),
            {"x": x, "weight": torch.randn(900, C), "bias": torch.randn(900)},
        ),
    }


def _everything(op, inputs):
    result = testing.evaluate(op, inputs)
    return [*result.outputs.values(), *result.gradients.values()]


@pytest.mark.parametrize("name", _cases())
def test_same_bits_for_any_number_of_threads(name):
    op, inputs = _cases()[name]
    assert_same_bits_for_any_number_of_threads(lambda: _everything(op, inputs))


@pytest.mark.parametrize("D", [32, 48, 80, 128])
@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, (20, 5), (700,), (0, 130, 1, 0)],
    ids=["shared by the threads", "too little to share", "split by queries", "with nothing at both ends"],
)
def test_attention_has_the_same_bits_for_any_number_of_threads(lengths, D):
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    inputs = {"qkv": torch.randn(sum(lengths), 3, 3, D)}
    op = lambda qkv: ops.attention(qkv, ends, max(lengths), **_dropout(2))  # noqa: E731
    assert_same_bits_for_any_number_of_threads(lambda: _everything(op, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_sequence_has_the_same_bits_in_any_company_and_for_any_number_of_threads(dtype):
    """Threads and other sequences decide how its queries are shared out. Values that nearly cancel between blocks of
    keys, with weights that differ little, show in which order they are added."""
    length = 1120
    qkv, dout = torch.randn(length, 3, 1, 64), torch.randn(length, 1, 64).to(dtype)
    qkv[:, 0] *= 0.3
    qkv[512:768, 2] += 300
    qkv[768:1024, 2] -= 300

    def attend(sequences):
        ends = torch.arange(sequences + 1, dtype=torch.int32) * length
        leaf = qkv.to(dtype).repeat(sequences, 1, 1, 1).requires_grad_()
        out = ops.attention(leaf, ends, length)
        out.backward(dout.repeat(sequences, 1, 1))
        return out[:length].detach(), leaf.grad[:length]

    assert_same_bits_for_any_number_of_threads(lambda: attend(1))
    with fastbert.backend("cpu"):
        for alone, accompanied in zip(attend(1), attend(4), strict=True):
            assert torch.equal(alone, accompanied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_have_the_same_bits_for_any_number_of_threads(dtype):
    """Covers the loss and its gradient to the logits; the products with that gradient may run in a library."""
    hidden, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((ROWS, C), (900, C), (900,)))
    arguments = hidden, weight, bias, torch.randint(900, (ROWS,)), -100, True
    assert_same_bits_for_any_number_of_threads(lambda: PRIMITIVES["cross_entropy_fwd"]("cpu", *arguments))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return BertModel(replace(BertConfig.preset("bert-tiny"), vocab_size=200)).eval()


def _encode(model):
    ids = torch.arange(2 * 37).view(2, 37) % 190
    mask = torch.arange(37) < torch.tensor([[37], [20]])
    with torch.no_grad():
        return model(ids, mask).last_hidden_state


@pytest.mark.parametrize("precision", [None, "int8"])
def test_eight_threads_get_the_same_answers(model, precision):
    model = model if precision is None else fastbert.prepare(model, precision)
    expected = _encode(model)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: _encode(model), range(40)):
            assert torch.equal(got, expected)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread has nobody to wake")
def test_prepared_layers_do_not_wake_threads_for_each_loop():
    """Once another thread has run a parallel loop, OpenMP's threads go to sleep at the end of each loop."""
    resource = pytest.importorskip("resource")
    shape = BertConfig(vocab_size=200, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    model, calls = fastbert.prepare(BertModel(shape).eval(), "int8"), 20
    sleeps = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw  # noqa: E731
    computed, end = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (torch.ones(2**20).exp(), computed.set(), end.wait(60)))
        computed.wait()
        _encode(model)
        before = sleeps()
        for _ in range(calls):
            _encode(model)
        found = (sleeps() - before) / calls
        end.set()
    assert found < shape.num_hidden_layers  # each layer has several loops


def _child(model, queue):
    torch.set_num_threads(1)  # as DataLoader's workers do: GNU OpenMP does not survive a fork
    queue.put(_encode(model).numpy())


def test_a_forked_child_gets_the_same_answers(model):
    expected, context = _encode(model), multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(model, queue))
    child.start()
    got = torch.from_numpy(queue.get(timeout=60))
    child.join(60)
    assert child.exitcode == 0
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-20)  # one thread: the library's sums may differ


def _resident() -> int:
    """Resident bytes, after freed memory is returned: how much the allocator keeps of it varies more than the bound."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_300_calls_leave_nothing_behind():
    cases = list(_cases().values())

    def calls(n):
        for _ in range(n):
            for op, inputs in cases:
                testing.evaluate(op, inputs)

    calls(100)
    before = _resident()
    calls(300)
    assert _resident() - before < 8 << 20


@pytest.mark.parametrize("op", [ops.bias_gelu, ops.layer_norm])
def test_column_sums_of_many_rows_keep_their_digits(op):
    names = ("x", "bias") if op is ops.bias_gelu else ("x", "weight", "bias")
    inputs = {name: torch.randn(*((200_000, 8) if name == "x" else (8,))) + 1 for name in names}
    plain = (lambda x, bias: F.gelu(x + bias)) if op is ops.bias_gelu else lambda x, weight, bias: F.layer_norm(
        x, weight.shape, weight, bias, 1e-12
    )  # fmt: skip
    with fastbert.backend("cpu"):
        testing.assert_accurate(op, plain, [plain], inputs)


def test_column_sums_over_several_chunks_are_exact_for_integers():
    """Each row is counted once, also at the borders of chunks and of blocks."""
    dy, signs = torch.randint(-8, 9, (ROWS, C)).float(), torch.tensor([1.0, -1.0]).repeat(ROWS, C // 2)
    mean, rstd, ones = torch.zeros(ROWS), torch.ones(ROWS), torch.ones(C)
    _, of_gelu = torch.ops.fastbert.bias_gelu_bwd(dy, torch.full((ROWS, C), 50.0), ones, "none", True)
    _, dweight, dbias = torch.ops.fastbert.layer_norm_bwd(dy, signs, ones, mean, rstd, True)
    assert torch.equal(of_gelu, dy.sum(0)) and torch.equal(dbias, dy.sum(0))
    assert torch.equal(dweight, (dy * signs).sum(0))


def test_no_channels():
    x, bias = torch.zeros(3, 0, requires_grad=True), torch.zeros(0, requires_grad=True)
    ops.bias_gelu(x, bias).sum().backward()
    assert x.grad.shape == (3, 0) and bias.grad.shape == (0,)
    empty, ids = torch.zeros(5, 0), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="C > 0"):
        ops.embedding(ids, ids, None, empty, empty, None, bias, bias)


def test_compiled_code_does_not_read_beyond_a_table():
    tables = [torch.randn(5, 8) for _ in range(2)]

    def call(ids):
        return ops.embedding(ids, torch.zeros_like(ids), None, *tables, None, torch.ones(8), torch.ones(8))

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"input_ids\[1\] is 99; expected 0 <= input_ids < 5"):
        compiled(torch.tensor([1, 99, -3]))


def test_tables_that_do_not_lie_as_the_loops_want_them():
    """Transposed tables and tables of another dtype work; only the rows that are looked up are copied."""
    tables = [torch.randn(8, 50).T, torch.randn(50, 8).bfloat16(), torch.randn(50, 8)]
    ids, ones = torch.randint(50, (3, 20)), torch.ones(8)
    leaves = [table.clone(memory_format=torch.preserve_format).requires_grad_() for table in tables]
    got = ops.embedding(*ids, *leaves, ones, ones)
    expected = ops.embedding(*ids, *(table.float().contiguous() for table in tables), ones, ones)
    assert got.dtype == torch.float32 and torch.equal(got, expected)
    got.sum().backward()
    assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape for leaf in leaves)


def test_fakes_agree_for_mixed_dtypes_and_frozen_parameters():
    x, w = torch.randn(4, 16, dtype=torch.bfloat16), torch.ones(16)
    y, mean, rstd = torch.ops.fastbert.add_layer_norm_fwd(x, x, w, w, w, None, 1e-12, 0.0, 0)
    for need in (True, False):
        for bias in (w, None):
            args = (y, x, x, w, mean, rstd, bias, None, 0.0, 0, need)
            torch.library.opcheck(torch.ops.fastbert.add_layer_norm_bwd.default, args, test_utils=("test_faketensor",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_record_nothing_within_and_hand_out_no_views(dtype):
    """Results of matrix products are no views either: autograd refuses in-place changes of a Function's views."""
    x, w, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 5, 8), (6, 8), (6,)))
    for op in (ops.linear, ops.dense_gelu):
        expected = torch.autograd.grad(op(x, w, b).sum(), b)
        assert torch.equal(torch.autograd.grad(op(x, w, b).add_(1).sum(), b)[0], expected[0])
    outputs = torch.ops.fastbert.linear_fwd(x, w, b), *torch.ops.fastbert.dense_gelu_fwd(x, w, b, "none", True)
    outputs += torch.ops.fastbert.dense_gelu_bwd(outputs[1].detach(), x, w, outputs[2].detach(), "none", True, True)
    assert {y.grad_fn.name() for y in outputs} == {"torch::autograd::WarnNotImplemented"}  # the dispatcher's, on each
    assert not any(y._is_view() for y in outputs)


def test_a_first_gradient_can_be_modified_in_place():
    x = torch.randn(3, 8, requires_grad=True)
    y = ops.layer_norm(x, torch.ones(8), torch.zeros(8))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    expected = 2 * dx.detach()
    assert torch.equal(dx.mul_(2).detach(), expected)


def _run(*words, **environment):
    env = os.environ | environment
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=900)


def _half_calls():
    """name -> (op, activations, float32 parameters)"""
    x, y, w, b = torch.randn(33, 40) * 3, torch.randn(33, 40), torch.randn(40), torch.randn(40)
    ids = torch.randint(9, (2, 33))
    return {
        "layer_norm": (ops.layer_norm, (x,), (w, b)),
        "add_layer_norm": (lambda x, y, w, b: ops.add_layer_norm(x, y, w, b, **_dropout(1)), (x, y), (w, b)),
        "bias_gelu": (lambda x, b: ops.bias_gelu(x, b, approximate="tanh"), (x,), (b,)),
        "embedding": (lambda x, y, w, b: ops.embedding(*ids, None, x, y, None, w, b), (x, y), (w, b)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _half_calls())
def test_half_precision_is_float32_rounded_once(name, dtype):
    """Results and gradients are, bit for bit, the float32 ones rounded by PyTorch: to the nearest, ties to even. (GELU
    with erf is computed differently for 16 bits: test_every_number_of_16_bits.)"""
    op, activations, parameters = _half_calls()[name]
    half = [t.to(dtype).requires_grad_() for t in activations]
    wide = [t.detach().float().requires_grad_() for t in half]
    with fastbert.backend("cpu"):
        y, expected = op(*half, *parameters), op(*wide, *parameters)
        dy = torch.randn_like(y)
        gradients, wanted = torch.autograd.grad(y, half, dy), torch.autograd.grad(expected, wide, dy.float())
    for got, right in zip((y, *gradients), (expected, *wanted), strict=True):
        assert torch.equal(got, right.to(dtype))


def test_rounding_without_instructions_for_it():
    """Runs the test above with AVX2 on a processor that would use AVX-512."""
    if backends.build_info()["cpu_set"] in ("avx2", "avx2_vnni"):
        pytest.skip("that is what the tests above run on")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "rounded_once", __file__)
    result = _run(*words, FASTBERT_CPU_SET="avx2")
    assert result.returncode == 0, result.stdout[-4000:]


def test_older_processors_are_served_by_the_reference():
    code = (
        "import torch, fastbert; fastbert.ops.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8));"
        "print(fastbert.backends.build_info()['cpu_set'], fastbert.backends.calls());"
        "print(torch.ops.fastbert.linear_fwd(torch.ones(64, 768), torch.ones(3840, 768), None).unique().item())"
    )
    result = _run("-c", code, ATEN_CPU_CAPABILITY="default", FASTBERT_CPU_SET="")
    assert result.stdout.splitlines() == ["None {('layer_norm_fwd', 'reference'): 1}", "768.0"]


@pytest.mark.parametrize("limit", [{}, pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, marks=pytest.mark.slow)], ids=str)
def test_an_instruction_set_can_be_named(limit):
    code = "from fastbert import backends; print(backends.build_info()['cpu_set'])"
    assert _run("-c", code, **limit, FASTBERT_CPU_SET="avx2").stdout.strip() == "avx2"
    if limit:
        assert _run("-c", code, **limit, FASTBERT_CPU_SET="").stdout.startswith("avx2")


@pytest.mark.parametrize("named", ["avx512", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sse2", "AVX2"))])
def test_an_instruction_set_that_there_is_not_is_refused(named):
    result = _run("-c", "import fastbert", ATEN_CPU_CAPABILITY="avx2", FASTBERT_CPU_SET=named)
    assert f"ValueError: FASTBERT_CPU_SET={named}: it is not one of avx2, " in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cpu_set", ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"])
def test_each_instruction_set_passes(cpu_set):
    """Runs the suites of the ops whose loops are compiled for the instruction set, on backend "cpu"."""
    if cpu_set == backends.build_info()["cpu_set"]:
        pytest.skip("that is what all tests run on")
    if f"FASTBERT_CPU_SET={cpu_set}: it is not" in _run("-c", "import fastbert", FASTBERT_CPU_SET=cpu_set).stderr:
        pytest.skip(f"this processor has no {cpu_set}")
    names = ("packed_linear",)
    if "vnni" not in cpu_set:
        names += ("bias_gelu", "layer_norm", "attention", "relative_attention", "embedding", "dense_gelu", "linear")
        names += ("cross_entropy", "linear_max")
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in names]
    selection = "cpu or not (reference or triton or cuda)"  # tests that name no backend are of the CPU's kernels, too
    result = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, *files, FASTBERT_CPU_SET=cpu_set)
    assert result.returncode == 0, result.stdout[-4000:]


def test_masks_are_those_of_random_py():
    """One-hot values through attention show exactly which weights were kept."""
    rng, p = torch.tensor([123456789012345]), 0.3
    values = torch.eye(130)[:, None, None].expand(130, 3, 1, 130).clone()
    values[:, :2] = 0  # equal scores: every weight is 1 / 130
    ends = torch.tensor([0, 130], dtype=torch.int32)
    with fastbert.backend("cpu"):
        out = ops.attention(values, ends, 130, dropout_p=p, rng=rng, site=5)[:, 0]
    keep = random.attention_keep(rng, 5, 1, 1, 130, p)[0, 0]
    assert torch.equal(out != 0, keep)
