"""The code that Triton kernels share, and what each kernel compiles to."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastbert import random

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from benchmarks.gpu import compiled  # noqa: E402
from benchmarks.gpu import triton_report as report  # noqa: E402
from benchmarks.gpu.compiled import Compiled  # noqa: E402
from fastbert.triton import KERNELS, attention_tiles, common, sums  # noqa: E402
from fastbert.triton.common import Config  # noqa: E402

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ---- choosing and launching


def test_pick_takes_the_newest_architecture_that_is_not_newer_than_the_device():
    """sm_120 and sm_121, which multiply as sm_80 does, count as sm_80."""
    table = {arch: lambda size, arch=arch: Config({"M": arch + size}) for arch in (80, 90, 100)}
    for here, chosen in ((75, 80), (80, 80), (89, 80), (90, 90), (99, 90), (103, 100), (120, 80), (121, 80)):
        with common.recorded(here, lambda *launch: None):
            assert common.pick(table, torch.device("cpu"), 1).tiles["M"] == chosen + 1, here


def test_nothing_is_launched_on_an_empty_grid():
    seen = []
    x = torch.zeros(4)
    with common.recorded(90, lambda *launch: seen.append(launch)):
        common.launch("kernel", (3, 0), x, config=Config())
        common.launch("kernel", (3, 2), x, None, 5, config=Config({"M": 16}), FLAG=True)
    assert seen == [("kernel", (3, 2), (x, None, 5), Config({"M": 16}), {"FLAG": True})]


def test_recording_ends_with_its_block():
    with pytest.raises(KeyError), common.recorded(80, lambda *launch: None):
        assert common.architecture(torch.device("cpu")) == 80
        raise KeyError
    partials = torch.ones(3, 1, 5, device=DEVICE)
    assert torch.equal(sums.add_up(partials, [torch.float32])[0], torch.full((5,), 3.0, device=DEVICE))


@pytest.mark.parametrize("programs", [1, 32, 33, 70, 528])
def test_sums_of_any_number_of_programs(programs):
    """Kernels leave at most 16 partial sums in the interpreter, and hundreds on a GPU. Integers add up exactly."""
    partials = torch.randint(-9, 10, (programs, 2, 67), device=DEVICE).float()
    one, other = sums.add_up(partials, [torch.float32, torch.float16])
    assert torch.equal(one, partials[:, 0].sum(0)) and torch.equal(other, partials[:, 1].sum(0).half())
    one, other = sums.add_up(partials, [torch.float32] * 2)
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()  # an operator's results share none


@pytest.mark.parametrize(
    ("rows", "tile", "programs"), [(1, 8, 264), (1000, 8, 4), (72, 8, 4), (4096, 16, 264), (7, 8, 0)]
)
def test_shares_cover_all_rows_in_whole_tiles(rows, tile, programs):
    each, count = sums.share(rows, tile, programs)
    assert each % tile == 0 and (count - 1) * each < rows <= count * each
    assert count <= max(1, programs)


# ---- tokens that no sequence covers


@triton.jit(do_not_specialize=["batch", "tokens", "longest"])
def _uncovered(out, cu_seqlens, batch, tokens, longest, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    tl.store(out + token, attention_tiles.uncovered_tokens(cu_seqlens, token, batch, tokens, longest))


@pytest.mark.parametrize("batch", range(1, 18))
def test_a_token_is_covered_by_any_of_the_sequences(batch):
    tokens, longest = 60, 3
    lengths = torch.randint(0, 5, (batch,))
    ends = F.pad(lengths.cumsum(0), (1, 0)).clamp(max=tokens)
    covered = torch.zeros(64, dtype=torch.bool)
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        covered[start : min(end, start + longest)] = True
    out = torch.zeros(64, dtype=torch.bool, device=DEVICE)
    with triton_device():
        _uncovered[(1,)](out, ends.int().to(DEVICE), batch, tokens, longest, 64)
    assert torch.equal(out.cpu(), ~covered & (torch.arange(64) < tokens))


# ---- the order of sequences


@triton.jit(do_not_specialize=["batch", "tokens", "longest"])
def _order(out, cu_seqlens, batch, tokens, longest):
    rank = tl.program_id(0)
    _, _, sequence = attention_tiles.longest_first(rank, 1, 1, cu_seqlens, batch, tokens, longest)
    tl.store(out + rank, sequence)


@pytest.mark.parametrize(
    ("batch", "longest", "ordered"), [(128, 65, True), (7, 300, True), (129, 65, False), (9, 64, False)]
)
def test_the_longest_sequence_comes_first(batch, longest, ordered):
    """Sequences of the same length have different ranks; a length beyond max_seqlen counts as max_seqlen."""
    lengths = torch.randint(0, longest + 9, (batch,))
    cu_seqlens, out = F.pad(lengths.cumsum(0), (1, 0)).int(), torch.full((batch,), -1, device=DEVICE)
    with triton_device():
        _order[(batch,)](out, cu_seqlens.to(DEVICE), batch, int(cu_seqlens[-1]), longest)
    expected = lengths.clamp(max=longest).argsort(descending=True, stable=True) if ordered else torch.arange(batch)
    assert torch.equal(out.cpu(), expected)


# ---- random numbers


@triton.jit
def _philox(out, key0, key1):
    zero = tl.zeros((16,), tl.uint32)
    words = common.philox(tl.load(key0), tl.load(key1), zero + tl.arange(0, 16).to(tl.uint32), zero, zero, zero)
    for i in tl.static_range(4):
        tl.store(out + 4 * tl.arange(0, 16) + i, words[i].to(tl.int64))


def test_philox_gives_the_known_answer():
    zero, out = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(16, 4, dtype=torch.int64, device=DEVICE)
    with triton_device():
        _philox[(1,)](out, zero.view(torch.uint32), zero.view(torch.uint32))
    assert [f"{word:08x}" for word in out[0].tolist()] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    counters = torch.arange(16, device=DEVICE)
    key = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert torch.equal(out, torch.stack(random.philox((counters, 0, 0, 0), key), -1))


@triton.jit(do_not_specialize=["site"])
def _row_keep(out, rng, site, tokens, first_channel, threshold, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    k0, k1 = common.site_key(rng, site)
    token = tl.load(tokens + tl.arange(0, ROWS))
    keep = common.row_keep(k0, k1, token, first_channel, threshold, ROWS, CHANNELS)
    at = tl.arange(0, ROWS)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(out + at, keep)


@pytest.mark.parametrize("first_channel", [0, 24])
@pytest.mark.parametrize("site", [0, 1, 37])
def test_row_keep_is_the_contract(first_channel, site):
    """Tokens beyond 2**32 have their own counters. For these the words come from random.philox, as random.row_keep has
    only tokens from 0 on."""
    rows, channels, p = 8, 32, 0.3
    rng = random.new_key(DEVICE)
    out = torch.zeros(rows, channels, dtype=torch.bool, device=DEVICE)
    threshold = common.dropout(p, random.ROW_BITS)[0]
    for first in (0, 2**31 - 4, 2**32 - 4, 3 * 2**40):
        token = first + torch.arange(rows, device=DEVICE)
        with triton_device():
            _row_keep[(1,)](out, rng, site, token, first_channel, threshold, rows, channels)
        assert torch.equal(out, row_keep(rng, site, token, first_channel, channels, p)), first
        if first == 0:
            expected = random.row_keep(rng, site, rows, first_channel + channels, p)
            assert torch.equal(out, expected[:, first_channel:])


def row_keep(rng, site, token, first_channel, channels, p):
    """random.row_keep for any tokens and channels, made of random.philox."""
    group = first_channel // 8 + torch.arange(channels // 8, device=token.device)
    counter = group[None, :], token[:, None] & 0xFFFFFFFF, token[:, None] >> 32, 0
    words = torch.stack(random.philox(counter, random.site_key(rng, site)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)
    return halves >= random.threshold(p, random.ROW_BITS)


def triton_device():
    return torch.cuda.device(DEVICE) if DEVICE == "cuda" else torch.no_grad()


def test_dropout_agrees_with_the_contract():
    for p in (0.1, 0.5, 0.999):
        for bits in (random.ROW_BITS, random.ATTENTION_BITS):
            if round(p * 2**bits) < 2**bits:
                assert common.dropout(p, bits) == (random.threshold(p, bits), random.keep_scale(p, bits))


# ---- dense_gelu's tiles


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((131, 72, 296), id="several tiles a program, by descriptor, none of them whole"),
        pytest.param((600, 8, 40), id="a group of tiles with fewer rows than others"),
        pytest.param((67, 71, 136), id="rows that no descriptor can describe"),
        pytest.param((1, 8, 1), id="one number"),
        pytest.param((5, 0, 24), id="nothing to add up"),
        pytest.param((5, 8, 0), id="no channel"),
        pytest.param((0, 8, 24), id="no token"),
    ],
)
def test_dense_gelu_multiplies_small_integers_exactly(shape, dtype):
    tokens, inner, channels = shape
    x, weight, bias = (
        torch.randint(-3, 4, size, device=DEVICE, dtype=dtype)
        for size in ((tokens, inner), (channels, inner), (channels,))
    )
    y, preactivation = KERNELS["dense_gelu_fwd"](x, weight, bias, "none", True)
    exact = (x.double() @ weight.double().T + bias).to(dtype)
    assert torch.equal(preactivation, exact)
    assert torch.equal(KERNELS["dense_gelu_fwd"](x, weight, bias, "none", False)[0], y)
    assert torch.equal(y[exact > 8], exact[exact > 8]) and (y[exact < -8] <= 0).all() and not y.isnan().any()
    grads = KERNELS["dense_gelu_bwd"](torch.ones_like(y), x, weight, preactivation, "none", True, True)
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape] and not any(g.isnan().any() for g in grads)


def test_dense_gelu_reads_rows_that_begin_anywhere():
    """A view whose first element is not 16-byte aligned, which a descriptor cannot describe."""
    storage = torch.randint(-3, 4, (1 + 8 * 16,), device=DEVICE, dtype=torch.float16)
    x, weight = storage[1:].view(8, 16), torch.ones(4, 16, device=DEVICE, dtype=torch.float16)
    _, preactivation = KERNELS["dense_gelu_fwd"](x, weight, weight[:, 0] * 0, "none", True)
    assert torch.equal(preactivation, x.double().sum(1, keepdim=True).half().expand(8, 4))


# ---- the backward of attention in one pass adds up dQ in global memory, tile of keys after tile of keys


@pytest.mark.slow
def test_the_backward_in_one_pass_repeats_bit_for_bit(monkeypatch):
    """With several tiles of keys, threads read sums that other threads wrote: a race would show in the bits of dQ."""
    gpu, dtype = DEVICE == "cuda", torch.bfloat16 if DEVICE == "cuda" else torch.float16
    lengths, times = (range(65, 513), 100) if gpu else ((65, 129), 2)
    heads = 12 if gpu else 1
    batch = -(-common.multiprocessors(torch.device(DEVICE)) // heads)  # as many programs as fill the device
    passes, launch = [], common._launcher
    monkeypatch.setattr(common, "_launcher", lambda *a: (passes.append(a[4].get("NEED_DQ")), launch(*a)))
    for length, p in itertools.product(lengths, (0.0, 0.1)):
        qkv = torch.randn(batch * length, 3, heads, 64, device=DEVICE, dtype=dtype)
        ends = torch.arange(0, batch * length + 1, length, device=DEVICE, dtype=torch.int32)
        rest = ends, length, 0.125, p, torch.tensor([5], device=DEVICE) if p else None, 0
        out, lse = KERNELS["attention_fwd"](qkv, *rest)
        dout = torch.randn_like(out)
        first, *others = (KERNELS["attention_bwd"](dout, qkv, out, lse, *rest) for _ in range(times))
        assert all(torch.equal(first, other) for other in others), (length, p)
    assert passes.count(True) == len(lengths) * 2 * times and False not in passes


# ---- attention of several short sequences in one program

SHORT = pytest.mark.parametrize("lengths", [(0, 1, 15, 17, 32), (16, 0, 1, 9)], ids=["32", "16"])


def short(lengths, heads, size, p=0.0):
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(DEVICE)
    qkv = torch.randn(int(ends[-1]), 3, heads, size, device=DEVICE, dtype=torch.float16)
    return qkv, (ends, max(lengths), size**-0.5, p, torch.tensor([-5], device=DEVICE) if p else None, 3)


def both(qkv, dout, *rest):
    out, lse = KERNELS["attention_fwd"](qkv, *rest)
    return out, lse.T, KERNELS["attention_bwd"](dout, qkv, out, lse, *rest)


@pytest.mark.parametrize(("longest", "slot"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, None)])
def test_the_longest_sequence_chooses_the_kernels_of_attention(monkeypatch, longest, slot):
    ran, launch = set(), common._launcher
    monkeypatch.setattr(common, "_launcher", lambda *a: (ran.add((a[0].fn.__module__, a[4].get("SLOT"))), launch(*a)))
    qkv, rest = short((1, longest), 1, 16)
    both(qkv, qkv[:, 0], *rest)
    assert ran == {("fastbert.triton.attention" + "_short" * bool(slot), slot)}


@SHORT
def test_a_short_sequence_has_the_same_bits_in_any_company(lengths):
    """Each sequence runs among tokens that are NaN; and before one sequence of NaN, which is long enough to choose the
    same kernels: a product of 16 rows does not always have the bits of a part of one of 32 (numpy's in the interpreter
    does not, with AVX2).
    """
    qkv, rest = short(lengths, 2, 40)
    dout = qkv[:, 0].flip(0)
    expected, longest = both(qkv, dout, *rest), rest[1]
    for start, end in itertools.pairwise(rest[0].tolist()):
        own, length = (qkv[start:end], dout[start:end]), end - start
        among, before = (
            [F.pad(x, (0, 0) * (x.dim() - 1) + more, value=torch.nan) for x in own]
            for more in ((start, len(qkv) - end), (0, longest))
        )
        two = torch.tensor([0, length, length + longest], dtype=torch.int32, device=DEVICE)
        for x, wanted, y in zip(both(*among, *rest), expected, both(*before, two, *rest[1:]), strict=True):
            assert torch.equal(x[start:end], wanted[start:end]) and torch.equal(y[:length], wanted[start:end])


@SHORT
def test_short_sequences_drop_what_the_contract_says(lengths):
    """One-hot values and one-hot output gradients show the mask, in the forward and in the backward."""
    qkv, rest = short(lengths, 2, max(lengths), 0.4)
    names = torch.cat([torch.eye(max(lengths))[:n] for n in lengths]).to(DEVICE).half()[:, None].expand(-1, 2, -1)
    qkv[:, 0], qkv[:, 2] = 0, names
    out, _, dqkv = both(qkv, names, *rest)
    keep = random.attention_keep(rest[4], 3, len(lengths), 2, max(lengths), 0.4) * (256 / 154)  # round(0.4 * 256) = 102
    for sequence, (start, end) in enumerate(itertools.pairwise(rest[0].tolist())):
        weights = keep[sequence, :, : end - start, : end - start] / (end - start)
        for found, wanted in ((out, weights), (dqkv[:, 2], weights.mT)):
            found = found[start:end, :, : end - start].transpose(0, 1).float()
            assert torch.equal(found > 0, wanted > 0) and torch.allclose(found, wanted, 2**-9)


# ---- compiling for GPUs that are not here


def python(*words: str, **more: str) -> subprocess.CompletedProcess:
    """Runs Python in another process, as this one may interpret kernels. more: environment variables for it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)


def triton_report(*words: str) -> subprocess.CompletedProcess:
    return python("-m", "benchmarks.gpu.triton_report", *words)


def rows(text: str) -> list[dict[str, str]]:
    """The rows of all tables of a report, as dictionaries by column name."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines if line != lines[0] and set(line) != {"---"}]


@pytest.mark.slow
def test_dense_gelu_compiles_to_hoppers_instructions_and_spills_nothing():
    result = triton_report(
        "--arch", "90", "--only", "dense_gelu._forward 5 bf16 DESCRIBED=True, SAVE=True", "sums._add_up"
    )
    assert result.returncode == 0, result.stderr
    found = rows(result.stdout)
    assert {row["kernel"] for row in found} == {"dense_gelu._forward", "sums._add_up"}
    half = [row for row in found if "bf16" in row["variant"] and row["kernel"] == "dense_gelu._forward"]
    assert {re.sub(r" \d+", "", row["instructions"]) for row in half} == {"wgmma, TMA"}
    assert {row["spilled"] for row in found} == {"0"}


@pytest.mark.slow
def test_a_configuration_that_spills_fails_the_report():
    """A planted fault: tiles that no multiprocessor has the registers for."""
    planted = (
        "import sys; from fastbert.triton import common, bias_gelu; from benchmarks.gpu import triton_report\n"
        "bias_gelu.FORWARD = {80: lambda channels: common.Config({'ROWS': 16, 'COLUMNS': 1024}, num_warps=1)}\n"
        "sys.argv = ['triton_report', '--arch', '80', '--only', 'bias_gelu._forward 3 bf16 TANH=True']\n"
        "sys.exit(triton_report.main())"
    )
    result = python("-c", planted)
    assert result.returncode == 1 and "sm_80: spills" in result.stderr, result.stderr


@pytest.mark.slow
def test_what_the_report_compiles_is_what_a_launch_finds_in_the_cache(tmp_path):
    """Another process with the same Triton compiles nothing again. This needs no GPU."""
    script = (
        "import sys; from benchmarks.gpu import triton_report; from benchmarks.gpu.triton_calls import BF16, new\n"
        "from fastbert.triton import KERNELS, common; from triton.runtime import driver\n"
        "calls = lambda: KERNELS['bias_gelu_fwd'](new(8191, 3072, dtype=BF16), new(3072, dtype=BF16), 'none')\n"
        "if sys.argv[1] == 'report':\n"
        "    (variant,) = triton_report.variants(90, calls)\n"
        "    sys.exit(triton_report.compile(variant, 90).problem or 0)\n"
        "launcher = lambda kernel, grid, args, config, constants: kernel.run(\n"
        "    *args, grid=tuple(grid), warmup=True, **config.tiles, **constants, **config.options)\n"
        "driver.set_active(triton_report.NoGpu(90))\n"
        "with common.recorded(90, launcher):\n"
        "    calls()\n"
    )
    found = []
    for by in ("report", "launch"):
        result = python("-c", script, by, TRITON_CACHE_DIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        found.append(sorted(path.name for path in tmp_path.iterdir()))
    assert found[0] == found[1] and len(found[0]) == 1


def test_the_check_sees_what_changed():
    """The registers of the worst variant are compared only if the same version of Triton wrote the report."""
    first = Compiled("a._forward", "M=64", "4 warps, 3 stages", 100, 0, 1024, {"wgmma": 2, "TMA": 0})
    second, old = dataclasses.replace(first, variant="M=32", registers=40), {80: [first]}
    table = compiled.markdown(compiled.SHORT, compiled.short(old | {90: [first, second]}))
    assert "| a._forward | sm_90 | 2 | 100 | 0 | 1024 | wgmma |" in table and "| sm_80 | 1 |" in table
    written = f"{report.head()}\n{table}"
    other_version = written.replace(f"Triton {triton.__version__}", "Triton 1.0")

    def differences(text: str, **changes) -> list[str]:
        kernels = {90: [dataclasses.replace(first, **changes), second]}
        return compiled.differences(kernels, report.head(), text, report.INDEPENDENT)

    assert differences(written) == differences(other_version) == []
    assert len(differences(written, registers=101)) == len(differences(written, registers=99)) == 2
    assert differences(other_version, registers=101) == []
    assert len(differences(other_version, instructions={"mma.sync": 1})) == 2
    assert len(compiled.differences({90: []}, report.head(), other_version, report.INDEPENDENT)) == 1


@pytest.mark.slow
def test_the_committed_report_is_what_the_kernels_compile_to():
    result = triton_report("--check", "--arch", "90")
    assert result.returncode == 0, result.stderr


def test_dense_gelu_of_one_row_that_is_a_transposed_column():
    """Contiguous, but with strides (1, 1), which a descriptor refuses."""
    column, weight, bias = (torch.randn(*shape, device=DEVICE).half() for shape in ((64, 1), (16, 64), (16,)))
    one, two = (
        KERNELS["dense_gelu_fwd"](x, weight, bias, "none", False)[0] for x in (column.t(), column.flatten()[None])
    )
    assert torch.equal(one, two)
