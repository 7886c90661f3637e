"""The measuring is measured: no time for a wrong result, ratios by hand, and a run on a GPU machine rehearsed."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_encoder, bench_ops, floor, harness, on_gpu, provenance, run, sizes
from benchmarks.harness import Work
from benchmarks.on_gpu import Part
from fastbert import backends, testing

ROOT = Path(__file__).resolve().parent.parent

RIGHT = testing.Row("y", error=1e-7, bound=2e-7, baseline=1e-7)
WRONG = testing.Row("y", error=float("nan"), bound=2e-7, baseline=1e-7)


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of tiny ops wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    how = {"work": Work(tokens=100), "baseline": "base", "sample": 0.0, "case": {"op": "sleep"}} | how
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
    contenders = {  # a warm-up and a calibration come first
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
    assert clock.order.count("base") == 2 + 5 * 10


def test_bounds_are_timed_but_no_contenders():
    clock = Clock()
    contenders = {"base": clock.contender("base", 2.0)}
    report = measure(clock, contenders, bounds={"products": clock.contender("products", 1.0)})
    assert report.row("products").bound and report.speedup("products") == 2.0
    assert report.to_dict()["rows"][1]["tokens_per_second"] is None and "(products)" in report.table()


def test_one_round_has_no_spread():
    clock = Clock()
    assert measure(clock, {"base": clock.contender("base", 1.0)}, rounds=1).row("base").spread == (1.0, 1.0)


def test_three_rounds_whatever_the_limit():
    clock = Clock()
    assert len(measure(clock, {"base": clock.contender("base", 1.0)}, rounds=9, limit=0).row("base").seconds) == 3


def test_no_rounds_verify_only():
    clock = Clock()
    report = measure(clock, {"base": clock.contender("base", 1.0)}, rounds=0)
    assert clock.order == ["base"] and "right, not timed" in report.table()


def test_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline 'base' is none of ours"):
        measure(Clock(), {"ours": lambda: None})


def test_lengths():
    assert harness.lengths("full", 3, 128) == [128] * 3
    half = harness.lengths("half", 8, 1000)
    assert half == harness.lengths("half", 8, 1000) != harness.lengths("half", 8, 1000, seed=1)
    assert sorted(half) != half and all(100 <= length <= 900 for length in half)
    assert [int((length - 100) // 100) for length in sorted(half)] == list(range(8))
    with pytest.raises(ValueError, match="unknown distribution 'most'"):
        harness.lengths("most", 8, 128)


def test_padding_is_nobody_s_token():
    size = sizes.SMALL["tiny"]
    real = sum(harness.lengths("half", size.batch, size.seqlen))
    assert sizes.make_batch(size, "half", "cpu").tokens == real < size.batch * size.seqlen
    report = bench_encoder.report(
        "encoder", size, "half", "float32", "forward", "cpu", rounds=2, limit=1, compiled=False
    )
    assert report.work.tokens == real and not any(row.problem for row in report.rows)


# ---- floor


def test_floor_formulas_by_hand():
    """Two sequences of 3 and 1 tokens, hidden size 2, 5 layers: 24·4·4 + 4·2·10 operations a layer."""
    assert floor.forward_flops(5, 2, [3, 1]) == 5 * (384 + 80)
    assert floor.step_flops(5, 2, [3, 1]) == 5 * (3 * 384 + 3.5 * 80)
    assert floor.forward_flops(5, 2, [3, 1], vocab=7, labelled=2) == 5 * (384 + 80) + 2 * (8 + 28)
    assert floor.forward_bytes(5, 2, 4) == 5 * (52 * 2 * 4 + 24 * 4)
    assert floor.step_bytes(5, 2, 4) == 5 * (168 * 2 * 4 + 72 * 4)
    assert floor.adamw_bytes(10) == 280


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
    assert flops / 1e12 == pytest.approx(teraflops, rel=0.025 if teraflops < 0.1 else 6e-3)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=6e-3)


# ---- cases and results


def test_every_op_is_measured():
    from fastbert import ops

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
    right = bench_ops.ops.layer_norm
    monkeypatch.setattr(bench_ops.ops, "layer_norm", lambda *args: right(*args) * (1 + 1e-4))
    case = ("layer_norm", sizes.SMALL["tiny"], "full", "float32", "forward+backward", "cpu")
    report = bench_ops.report(*case, rounds=2, limit=1, compiled=False)
    assert report.row("fastbert").problem.startswith("wrong") and report.row("PyTorch").seconds


def test_a_planted_fault_in_the_model_is_not_timed(monkeypatch):
    """Sequences that see each other."""
    right = bench_ops.ops.attention
    faulty = lambda qkv, ends, longest, **rest: right(qkv, ends[[0, -1]], qkv.shape[0], **rest)  # noqa: E731
    monkeypatch.setattr(bench_ops.ops, "attention", faulty)
    case = ("encoder", sizes.SMALL["tiny"], "half", "float32", "forward", "cpu")
    report = bench_encoder.report(*case, rounds=2, limit=1, compiled=False)
    assert all(row.problem.startswith("wrong") for row in report.rows if row.name.startswith("fastbert"))
    assert report.row(bench_encoder.BASELINE).seconds


def test_results_name_commit_versions_and_machine_but_no_host_and_no_path(tmp_path):
    words = ["--size", "tiny", "--groups", "ops", "--dtypes", "float32", "--rounds", "2", "--seed", "5"]
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
    monkeypatch.setattr(provenance, "_output", lambda *words: None)
    assert provenance.git_state() == (None, None) and provenance.environment("def")["commit"] == "def"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident pages")
def test_peak_memory_of_a_call_is_counted():
    def call():
        return torch.ones(8 << 20), torch.ones(4 << 20) + 1  # 32 MiB, and 16 MiB twice

    assert 60e6 < harness.peak_bytes(call, "cpu") < 90e6


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


def test_parts_share_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE", 0.2)
    sleep = python("import time; time.sleep(30)")
    parts = [Part("long", sleep, 0, 60), Part("no time", sleep, 5, 60)]
    outcomes, _ = rehearse(parts, tmp_path, minutes=2 / 60)
    assert outcomes["long"].state == "timed out" and outcomes["long"].seconds < 8  # stopped by the total, not its own
    assert outcomes["no time"].state == "skipped" and outcomes["no time"].reason == "0 s left, it needs 5"


@pytest.mark.parametrize("architecture", [None, "9.0"])
def test_the_real_parts_are_few_files_and_small_without_a_gpu(architecture, tmp_path):
    parts = {part.name: part for part in on_gpu.all_parts(architecture, tmp_path, "abc")}
    assert list(parts)[:3] == ["build", "explain", "parity"]
    assert ("--quick" in parts["encoder"].command) == (architecture is None)
    assert parts["build"].environment.get("TORCH_CUDA_ARCH_LIST") == architecture
    assert {name for name, part in parts.items() if part.gpu} == {"memcheck", "encoder-compiled", "ops-compiled"}
    for part in parts.values():
        if "benchmarks.run" in part.command:  # options that exist
            run.arguments(part.command[part.command.index("benchmarks.run") + 1 :])
