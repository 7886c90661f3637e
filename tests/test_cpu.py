"""What holds for the C++ kernels on a CPU together: threads, processes, memory, instruction sets."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert import BertConfig, BertModel, backends, ops, random, testing

pytestmark = pytest.mark.skipif(backends._cpu_problem() is not None, reason=str(backends._cpu_problem()))

ROWS, C, LENGTHS = 700, 96, (300, 1, 0, 17, 382)


def _dropout(site):
    return {"dropout_p": 0.1, "rng": torch.tensor([77]), "site": site}


def _cases():
    """name -> (op, inputs): big enough for several threads and for several chunks of column sums."""
    x, y, w, b = torch.randn(ROWS, C), torch.randn(ROWS, C), torch.randn(C), torch.randn(C)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    ids, tables = torch.randint(50, (3, ROWS)), [torch.randn(50, C) for _ in range(3)]
    return {
        "layer_norm": (ops.layer_norm, {"x": x, "weight": w, "bias": b}),
        "add_layer_norm": (
            lambda **given: ops.add_layer_norm(**given, **_dropout(1)),
            {"x": x, "residual": y, "weight": w, "bias": b, "x_bias": b.flip(0)},
        ),
        "bias_gelu": (ops.bias_gelu, {"x": x, "bias": b}),
        "attention": (
            lambda qkv: ops.attention(qkv, ends, max(LENGTHS), **_dropout(2)),
            {"qkv": torch.randn(ROWS, 3, 3, 32)},
        ),
        "embedding": (
            lambda word, position, token_type, weight, bias: ops.embedding(
                *ids, word, position, token_type, weight, bias, **_dropout(3)
            ),
            {**dict(zip(("word", "position", "token_type"), tables, strict=True)), "weight": w, "bias": b},
        ),
    }


@pytest.mark.parametrize("name", _cases())
def test_same_bits_for_any_number_of_threads(name):
    op, inputs = _cases()[name]
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            with fastbert.backend("cpu"):
                results.append(testing.evaluate(op, inputs))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for key, value in {**results[0].outputs, **results[0].gradients}.items():
            assert torch.equal({**other.outputs, **other.gradients}[key], value), key


@pytest.fixture
def model():
    torch.manual_seed(3)
    return BertModel(replace(BertConfig.preset("bert-tiny"), vocab_size=200)).eval()


def _encode(model):
    ids = torch.arange(2 * 37).view(2, 37) % 190
    mask = torch.arange(37) < torch.tensor([[37], [20]])
    with torch.no_grad():
        return model(ids, mask).last_hidden_state


def test_eight_threads_get_the_same_answers(model):
    expected = _encode(model)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: _encode(model), range(40)):
            assert torch.equal(got, expected)


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
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def _run(capability, *words):
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=900)


def test_older_processors_are_served_by_the_reference():
    code = (
        "import torch, fastbert; fastbert.ops.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8));"
        "print(fastbert.backends.build_info()['cpu_set'], fastbert.backends.calls())"
    )
    assert _run("default", "-c", code).stdout.strip() == "None {('layer_norm_fwd', 'reference'): 1}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_each_instruction_set_passes(capability):
    """The ops' suites with this set forced; AVX-512's BF16 instructions, where there are any, go with avx512."""
    code = "from fastbert import backends; print(backends.build_info()['cpu_set'])"
    if not _run(capability, "-c", code).stdout.startswith(capability):
        pytest.skip(f"this processor has no {capability}")
    names = ("bias_gelu", "layer_norm", "attention", "embedding", "dense_gelu", "linear")
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in names]
    result = _run(capability, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu", *files)
    assert result.returncode == 0, result.stdout[-4000:]


def test_masks_are_those_of_random_py():
    """Integers through attention and LayerNorm's dropout say exactly which elements were kept."""
    rng, p = torch.tensor([123456789012345]), 0.3
    values = torch.eye(130)[:, None, None].expand(130, 3, 1, 130).clone()
    values[:, :2] = 0  # equal scores: every weight is 1 / 130
    ends = torch.tensor([0, 130], dtype=torch.int32)
    with fastbert.backend("cpu"):
        out = ops.attention(values, ends, 130, dropout_p=p, rng=rng, site=5)[:, 0]
    keep = random.attention_keep(rng, 5, 1, 1, 130, p)[0, 0]
    assert torch.equal(out != 0, keep)
