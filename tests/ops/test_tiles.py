"""Products on the matrix unit (AMX). On a processor without one, a test runs this file again with an emulated one."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import amx_on_cpu
import pytest
import torch

import fastbert
from fastbert import backends, ops
from fastbert.ops.packed_linear import quantize_weight, with_sums

EMULATED = hasattr(ctypes.CDLL(None), "amx_dots")
HERE = Path(__file__).parent
needs_tiles = pytest.mark.skipif(
    backends.build_info().get("cpu_set") != "amx",
    reason="this process has no matrix unit; a test below starts one that has",
)
counts_instructions = pytest.mark.skipif(not EMULATED, reason="instructions are counted where they are emulated")


def counted(name: str) -> int:
    return ctypes.c_long.in_dll(ctypes.CDLL(None), f"amx_{name}").value


def signs(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).bfloat16()


def pack(weight):
    return ops.pack_weight(weight), None, None, len(weight)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33, 47, 64, 143, 145, 177, 300])
def test_small_integers_are_exact(rows):
    """Sizes around those of tiles, blocks of tiles and chains of sums. NaN and infinity stay in their rows."""
    for inner in (1, 2, 31, 32, 33, 64, 80, 511, 513, 546, 1100):
        x, bad = signs(rows, inner), rows // 2
        x[bad] = torch.tensor([torch.inf, torch.nan])[torch.randint(2, (inner,))]
        finite = torch.arange(rows) != bad
        for channels in (1, 16, 33, 70):
            weight = signs(channels, inner)
            y = ops.packed_linear(x, *pack(weight))
            assert torch.equal(y[finite], (x.float() @ weight.float().T).bfloat16()[finite])
            assert not y[bad].isfinite().any()


@needs_tiles
def test_rows_are_the_same_among_any_others():
    x, weight = torch.randn(150, 300).bfloat16(), torch.randn(40, 300).bfloat16()
    y = ops.packed_linear(x, *pack(weight))
    for first, last in ((0, 1), (7, 40), (31, 47), (100, 150)):
        assert torch.equal(ops.packed_linear(x[first:last], *pack(weight)), y[first:last])


@needs_tiles
def test_attention_through_blocks_of_keys():
    """Each row rescales its sums differently, because the rows' largest scores come in different blocks."""
    keys, D = 1100, 32
    qkv = torch.randn(keys, 3, 1, D).bfloat16()
    qkv[:, 1] *= torch.linspace(0.5, 3, keys)[:, None, None]
    ends = torch.tensor([0, keys], dtype=torch.int32)
    both = [qkv.clone().requires_grad_(), qkv.double().requires_grad_()]
    found, expected = (ops.attention(x, ends, keys) for x in both)
    gradient = torch.randn(keys, 1, D).bfloat16()
    found.backward(gradient), expected.backward(gradient.double())
    for ours, truth in ((found, expected), (both[0].grad, both[1].grad)):
        assert (ours.double() - truth).abs().max() < 2**-6 * truth.abs().max()


def calls() -> dict:
    """name -> a function that multiplies bf16 or int8"""
    x, weight, labels = torch.randn(70, 64).bfloat16(), torch.randn(90, 64).bfloat16(), torch.randint(90, (70,))
    bias = torch.zeros(90).bfloat16()
    ends = torch.tensor([0, 33, 70], dtype=torch.int32)
    quantized, factor = quantize_weight(weight)
    scale = with_sums(factor, quantized)

    def attention():
        qkv = torch.randn(70, 3, 2, 32).bfloat16().requires_grad_()
        ops.attention(qkv, ends, 37).sum().backward()

    return {
        "packed_linear, bf16": lambda: ops.packed_linear(x, *pack(weight)),
        "packed_linear, int8": lambda: ops.packed_linear(x, ops.pack_weight(quantized), scale, None, 90),
        "attention": attention,
        "cross_entropy": lambda: ops.cross_entropy(x, weight, bias, labels),
        "linear_max": lambda: ops.linear_max(x, weight, bias, ends),
    }


@needs_tiles
@counts_instructions
@pytest.mark.parametrize("name", calls())
def test_tiles_are_used_and_released(name):
    before = counted("dots")
    calls()[name]()
    assert counted("dots") > before
    assert counted("awake") == 0


@needs_tiles
@counts_instructions
@pytest.mark.parametrize("rows, loads", [(144, 1), (16, 1.5)], ids=["whole blocks", "one tile of rows"])
def test_no_product_is_computed_twice(rows, loads):
    """There are as many multiplications as tiles, and no more loads than the unit has time for."""
    before = counted("dots"), counted("loads")
    ops.packed_linear(signs(rows, 768), *pack(signs(3072, 768)))
    dots = counted("dots") - before[0]
    assert dots == rows // 16 * 3072 // 16 * 768 // 32
    # 144 rows are four and a half blocks; sums are loaded again twice, after 8 steps of a tile.
    assert counted("loads") - before[1] <= dots * (loads * 1.06 + 2 / 24)


# ---- where there is no matrix unit


def run(*words: str, **environment: str) -> str:
    """Runs Python with a matrix unit and returns its output. Asserts that it succeeds."""
    if problem := amx_on_cpu.problem():
        pytest.skip(problem)
    environment = {**os.environ, **amx_on_cpu.environment(), **environment}
    answer = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=1800)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    return answer.stdout


def run_tests(*names: str, select: str) -> None:
    code = "import sys, pytest; from fastbert import backends; assert backends.build_info()['cpu_set'] == 'amx'; "
    code += "sys.exit(pytest.main())"
    files = [str(HERE.parent / f"{name}.py") for name in names]
    run("-c", code, "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", select, *files)


OPS = [f"ops/test_{op}" for op in ("packed_linear", "attention", "relative_attention", "cross_entropy", "linear_max")]


def test_this_file_with_a_matrix_unit():
    if EMULATED:
        pytest.skip("this is that")
    run_tests("ops/test_tiles", select="not matrix_unit")


def test_half_precision_with_a_matrix_unit():
    run_tests(*OPS, select="(cpu or packed_layer) and (bfloat16 or int8) and not long_sequences and not largest_score")


@pytest.mark.slow
def test_everything_with_a_matrix_unit():
    """All tests of the ops on the CPU, except those named half_precision, and models in bf16 and int8."""
    run_tests(*OPS, "models/test_prepare", select="(cpu or packed_layer or prepare) and not half_precision")


def test_a_matrix_unit_can_be_turned_off():
    code = "import fastbert; fastbert.explain()"
    products = "it multiplies float16 as float32, bfloat16 in pairs, int8 by 4, these two in tiles"
    assert f"usable: amx; {products}" in run("-c", code)
    assert "usable: avx512_bf16; " in run("-c", code, ATEN_CPU_CAPABILITY="avx512")


def test_explain_says_that_a_matrix_unit_is_not_used(monkeypatch, capsys):
    if backends.build_info().get("cpu_set") != "avx512_bf16":
        pytest.skip("needs AVX-512 BF16 without a matrix unit")
    monkeypatch.setattr(backends, "cpuinfo", lambda *names: "avx512_bf16 amx_bf16 amx_tile")
    fastbert.explain()
    assert "the processor has AMX, but the system" in capsys.readouterr().out
