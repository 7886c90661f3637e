"""Tools that evaluate GPU measurements, here made-up ones: gaps between kernels, the worst ops, attention's tiles."""

import importlib.util
import json
import sys

import pytest
import torch

from benchmarks import report, run
from benchmarks.gpu import compiled, host_gaps, worst
from benchmarks.gpu.host_gaps import Span

pytest.importorskip("triton")

from benchmarks.gpu import sweep, triton_report  # noqa: E402
from fastbert.triton import attention, common  # noqa: E402
from fastbert.triton.attention_tuned import TUNED  # noqa: E402
from fastbert.triton.common import Config  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ---- gaps


def test_gaps_are_where_no_kernel_runs():
    """Kernels overlap from 10 to 14, one inside another; the device idles from 18 to 20 and from 21 to 26."""
    spans = [Span("b", 10, 18), Span("a", 4, 14), Span("d", 11, 13), Span("a", 20, 21), Span("c", 26, 27)]
    found = host_gaps.summary(spans)
    assert (found["span"], found["idle"], found["launches"]) == (23, 7, 5)
    assert found["kernels"] == [[11, 2, "a"], [8, 1, "b"], [2, 1, "d"], [1, 1, "c"]]
    assert found["gaps"] == [[5, "c"], [2, "a"]]
    assert "5 launches in 23 us, idle for 7 us (30 %)" in host_gaps.table("a step", found)
    assert host_gaps.summary([])["idle"] == 0


def test_a_step_is_profiled(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["host_gaps", "--out", str(tmp_path / "found.json"), "--size", "tiny"])
    assert host_gaps.main() == 0
    forward, step = json.loads((tmp_path / "found.json").read_text()).values()
    assert 0 <= step["idle"] < step["span"] and step["launches"] > forward["launches"]
    if DEVICE == "cpu":
        assert any("encoder_layer" in name for *_, name in forward["kernels"])
        assert any("Backward" in name for *_, name in step["kernels"])


# ---- the worst ops


def op_case(op, direction, floor, median, **more):
    case = {"op": op, "direction": direction, "dtype": "float32", "lengths": "full", "batch": 3, "seqlen": 17}
    own = {"case": case, "name": "fastbert", "median": median, "floor": floor, "samples": [median]} | more
    return report.Case(case, {"fastbert": own})


def test_the_worst_three_are_by_share_of_the_floor_in_device_time():
    cases = [
        op_case("pack", "forward", 50, 100),
        op_case("linear", "forward", 10, 100, device=12),  # 83 % of device time: the host took the rest
        op_case("attention", "forward", 20, 100),
        op_case("attention", "forward", 30, 100),  # only the worst of an op and direction
        op_case("attention", "backward alone", 40, 100),
        op_case("bias_gelu", "forward", 60, 100),
        report.Case({"op": "unpack", "direction": "forward"}, {"fastbert": {"name": "fastbert", "problem": "wrong"}}),
    ]
    found = [(round(share), case.facts["op"], case.facts["direction"]) for share, case in worst.worst(cases, 3)]
    assert found == [(20, "attention", "forward"), (40, "attention", "backward alone"), (50, "pack", "forward")]


@pytest.mark.slow
def test_the_worst_are_run_again_as_they_were(tmp_path, monkeypatch, capsys):
    """Cases are taken from a results file, and each runs once for the profiler."""
    words = ["--size", "tiny", "--groups", "ops", "--parts", "bias_gelu", "layer_norm", "--rounds", "2"]
    words += ["--directions", "forward", "alone", "--dtypes", "float32", "--contenders", "fastbert"]
    assert run.main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    ran = []
    monkeypatch.setattr(worst, "listened_to", lambda spec, device: ran.append(spec))
    words = ["--results", str(tmp_path / "ops_tiny.jsonl"), "--size", "tiny", "--number", "4"]
    monkeypatch.setattr(sys, "argv", ["worst", *words])
    assert worst.main() == 0
    expected = {(op, way) for op in ("bias_gelu", "layer_norm") for way in ("forward", "backward alone")}
    assert {(spec.part, spec.direction) for spec in ran} == expected
    monkeypatch.undo()
    worst.listened_to(ran[0], "cpu")
    assert capsys.readouterr().out.count("% of the floor") == 4


@pytest.mark.slow
def test_results_that_cannot_be_run_again_are_refused(tmp_path, monkeypatch, capsys):
    """Of models, of shapes that the table of cases does not have, and a file that is missing."""
    path = tmp_path / "ops_tiny.jsonl"
    words = ["--size", "tiny", "--dtypes", "float32", "--contenders", "fastbert", "--out", str(tmp_path)]
    words += ["--rounds", "1", "--device", "cpu", "--directions", "forward"]
    monkeypatch.setattr(sys, "argv", ["worst", "--results", str(path), "--size", "quick"])
    for more, message in (
        ([], "No such file"),
        (["--groups", "encoder", "--parts", "encoder", "--name", "ops"], "has no op with a floor"),
        (["--groups", "ops", "--parts", "pack"], "is no case of --groups ops --size quick"),
    ):
        assert not more or run.main([*words, *more]) == 0
        with pytest.raises(SystemExit) as error:
            worst.main()
        assert error.value.code == 2 and message in capsys.readouterr().err
        path.unlink(missing_ok=True)


def test_a_part_is_not_compared_with_the_whole(monkeypatch, capsys):
    """By cuda_report and triton_report, which are the same program."""
    monkeypatch.setattr(sys, "argv", ["cuda_report", "--check", "--only", "layer_norm"])
    with pytest.raises(SystemExit) as error:
        compiled.main("cuda_report", "Title.", (90,), None, None, ())
    assert error.value.code == 2 and "without --only" in capsys.readouterr().err


# ---- the sweep


@pytest.fixture
def tuned():
    """An empty table of tuned choices; the real one is restored afterwards."""
    before = dict(TUNED)
    TUNED.clear()
    yield TUNED
    TUNED.clear()
    TUNED.update(before)


def target(candidates, kernel="forward", seqlen=65):
    qkv = torch.randn(4 * seqlen, 3, 1, 64, device=DEVICE, dtype=torch.float16)
    ends = torch.arange(0, 4 * seqlen + 1, seqlen, device=DEVICE, dtype=torch.int32)
    return sweep.Target(kernel, qkv, ends, candidates, kernel != "forward", few=DEVICE == "cuda")


def launched(call):
    """The tiles with which a call would launch its kernels; nothing is launched."""
    with pytest.MonkeyPatch.context() as patch:
        configs = []
        patch.setattr(common, "_launcher", lambda kernel, grid, args, config, constants: configs.append(config))
        call()
    return configs


@pytest.mark.slow
def test_the_fastest_tiles_are_written_where_the_kernel_reads_them(tuned, tmp_path, monkeypatch):
    slow, fast, faster = (Config({"M": m, "N": n, "RELOAD": False}, 4, 2) for m, n in ((128, 32), (64, 32), (64, 64)))
    one, seconds = target([slow, fast, faster]), {32: 5.0, 64: 0.9}
    now = launched(one.calls[0])[0]

    def clock(call):
        took = launched(call)[0]
        return 1.0 if took == now else 1.01 if took == slow else seconds[took.tiles["N"]]

    monkeypatch.setattr(sweep, "compiled", lambda target: target.candidates)
    sweep.sweep([one], clock)
    assert tuned == {one.key: faster} and launched(one.calls[0]) == [faster]
    (tmp_path / "written.py").write_text(sweep.text())
    spec = importlib.util.spec_from_file_location("written", tmp_path / "written.py")
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.TUNED == tuned  # the next process will read the same from it
    seconds[64] = 0.99  # within the noise: the tiles in use stay
    tuned.clear()
    sweep.sweep([one], clock)
    assert tuned == {}


def test_tiles_that_compute_something_else_are_never_the_fastest(tuned, monkeypatch):
    right, wrong = (Config({"M": 64, "N": n, "RELOAD": False}, 4, 2) for n in (64, 32))
    one, forward = target([right, wrong]), attention.forward

    def faulty(*args):
        out, lse = forward(*args)
        return (out * (1.02 if tuned.get(one.key) == wrong else 1), lse)

    monkeypatch.setattr(attention, "forward", faulty)
    monkeypatch.setattr(sweep, "compiled", lambda target: target.candidates)
    sweep.sweep([one], lambda call: {None: 1.0, str(right): 0.5, str(wrong): 0.1}[key(tuned.get(one.key))])
    assert tuned == {one.key: right}


def key(choice):
    return None if choice is None else str(choice)


def test_the_backward_takes_its_choices_too(tuned):
    """The choices are dK and dV's tiles, dQ's tiles, and up to which length one kernel computes all three."""
    keys, queries = Config({"M": 64, "N": 64}, 4, 1), Config({"M": 128, "N": 32}, 4, 1)
    one = target([], "keys")
    default = launched(one.calls[0])
    for kernel, choice in (("keys", keys), ("queries", queries), ("one_pass", 0)):
        tuned[(kernel, *one.key[1:])] = choice
    assert launched(one.calls[0]) == [default[0], keys, queries] != default


def test_the_committed_table_is_as_the_sweep_writes_it():
    assert sweep.FILE.read_text(encoding="utf-8") == sweep.text()


def test_tiles_that_do_not_fit_are_out_before_anything_runs(tuned, monkeypatch):
    """Tiles stay only if both variants, with dropout and without, compile, spill nothing and fit in shared memory."""
    small, large = (Config({"M": 64, "N": 64, "RELOAD": False}, 4, stages) for stages in (2, 9))
    monkeypatch.setattr(sweep.triton.knobs.runtime, "interpret", False)

    def variants(gpu, calls):
        return [(tuned[one.key].num_stages, place) for place in range(2)]

    def compile(variant, gpu):
        stages, place = variant
        return triton_report.Compiled("", "", "", problem="needs memory" if stages > 2 and place else "")

    one = target([small, large])
    monkeypatch.setattr(triton_report, "variants", variants)
    monkeypatch.setattr(triton_report, "compile", compile)
    assert sweep.compiled(one) == [small]
