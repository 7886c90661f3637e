"""Rehearses a run on a GPU machine: every part ends as it should, and leaves its results even if it is cut off."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import run
from benchmarks.gpu import on_gpu, sweep
from benchmarks.gpu.on_gpu import Outcome, Part

ROOT = Path(__file__).resolve().parents[2]


def python(*lines):
    return [sys.executable, "-c", "\n".join(lines)]


def rehearse(parts, out, minutes=1.0, earlier=None):
    outcomes = on_gpu.run(parts, out, minutes, gpu=False, earlier=earlier)
    summary = json.loads((out / "summary.json").read_text())
    assert [part["name"] for part in summary["parts"]] == [part.name for part in parts]
    return {outcome.name: outcome for outcome in outcomes}, (out / "log.txt").read_text()


def test_parts_end_as_they_should(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE", 0.3)
    child = tmp_path / "child"
    sleeper = f"import pathlib, os, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(60)"
    stubborn = python(  # ignores SIGINT, and has a child
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
    """Whether a process ends soon. A zombie counts as ended: an orphan may stay one if nothing reaps it."""
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


@pytest.mark.slow
def test_a_later_call_goes_on_where_an_earlier_one_ended(tmp_path):
    """On another machine with a copy of the folder: parts that are ok are skipped, except those that it needs again."""
    begun = tmp_path / "begun"
    told = python(
        "import sys, time",
        f"with open({str(begun)!r}, 'a') as file: print(*sys.argv[1:], file=file)",
        "skip = int(sys.argv[sys.argv.index('--skip') + 1]) if '--skip' in sys.argv else 0",
        "print(f'case {skip + 1} of 4')",
        "print('cut off before case 3: an op' if skip < 2 else 'whole')",
    )
    hung = python("import time", "print('case 1 of 9\\ncase 2 of 9', flush=True)", "time.sleep(60)")
    end = "raise SystemExit(0 if '--skip' in sys.argv else 3)"
    lost = python("import sys", "print('GPU lost in case 1: an op')", end)
    parts = [
        Part("ok", python(f"open({str(begun)!r}, 'a').write('ok\\n')"), 0, 20),
        Part("build", python(f"open({str(begun)!r}, 'a').write('build\\n')"), 0, 20, again=True),
        Part("cut", told, 0, 20, told=True),
        Part("hung", hung, 0, 3, told=True),
        Part("no time", told, 90, 90, told=True),
        Part("lost", lost, 30, 20, told=True),
    ]
    first, _ = rehearse(parts, tmp_path / "first")
    assert first["cut"] == Outcome("cut", "unfinished", first["cut"].seconds, "cut off before case 3: an op", 2)
    assert (first["hung"].state, first["hung"].behind) == ("timed out", 2)
    assert (first["lost"].state, first["lost"].behind) == ("failed", 1)
    earlier = on_gpu.taken_over(tmp_path / "first", tmp_path / "second")
    assert earlier == first
    (tmp_path / "second" / "ceilings.json").write_text("{}")
    parts[2] = Part("cut", told, 0, 20, told=True, ceilings=tmp_path / "second" / "ceilings.json")
    second, log = rehearse(parts, tmp_path / "second", minutes=2, earlier=earlier)
    assert second["ok"] == first["ok"] and (second["cut"].state, second["cut"].behind) == ("ok", 0)
    assert second["hung"].state == "timed out" and "==== hung behind case 2" in log  # and resumes after that case
    assert (second["lost"].state, second["lost"].reason) == ("failed", "GPU lost in case 1: an op; exit status 3")
    words = begun.read_text().splitlines()
    assert [line for line in words if not line.startswith("--")] == ["ok", "build", "build"]
    assert [line for line in words if "--skip 2" in line] == [f"--minutes 0.02 --ceilings {parts[2].ceilings} --skip 2"]


def test_ncu_is_asked_where_it_can_count_and_ops_were_measured(tmp_path):
    ceilings, ops = tmp_path / "ceilings.json", tmp_path / "ops.jsonl"
    assert on_gpu.no_counters(ceilings, ops) == "no op was measured"
    ops.touch()
    assert on_gpu.no_counters(ceilings, ops) is None
    ceilings.write_text(json.dumps({"no ncu": "==ERROR== ERR_NVGPUCTRPERM"}))
    assert on_gpu.no_counters(ceilings, ops) == "==ERROR== ERR_NVGPUCTRPERM"
    part = Part("ncu", python("print('never')"), 0, 20, unless=lambda: on_gpu.no_counters(ceilings, ops))
    assert on_gpu.why_skipped(part, 60, gpu=True) == "==ERROR== ERR_NVGPUCTRPERM"


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
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # no nvcc there: CMake will say so
    assert on_gpu.toolkit() == {}
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(listed))
    assert on_gpu.toolkit() == {}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about kernels that cannot run")
def test_kernels_that_are_missing_on_a_gpu_are_a_failure(tmp_path):
    explain = next(part for part in on_gpu.all_parts("9.0", tmp_path, None) if part.name == "explain")
    outcomes, log = rehearse([explain], tmp_path)
    assert outcomes["explain"].state == "failed" and "\ncuda cannot run: " in log


def test_a_pytorch_that_does_not_answer_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "IMPORT", 0.05)
    assert on_gpu.capability() is None and "did not say" in capsys.readouterr().out


@pytest.mark.slow
def test_tests_that_are_cut_off_leave_what_has_failed(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time\n\ndef test_wrong():\n    assert 'this' == 'that'\n\ndef test_slow():\n    time.sleep(60)\n"
    )
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    options = [word for word in on_gpu.parity() if not word.endswith(".py")]
    files = [str(tmp_path / name) for name in ("test_broken.py", "test_slow.py")]
    for limit in (8, 50):  # on a busy machine the first limit may pass before the tests begin
        outcomes, log = rehearse([Part("parity", [*options, *files], 0, limit)], tmp_path)
        assert outcomes["parity"].state == "timed out" and outcomes["parity"].seconds < limit + on_gpu.GRACE + 5
        if "FAILED" in log:
            break
    head, _, end = log.partition("= FAILURES =")
    assert "test_slow.py::test_wrong" in head and "FAILED" in head
    assert "assert 'this' == 'that'" in end and "No module named 'no_such_module'" in log


# The environment without pytest-xdist's variables: with them, a pytest that is started here would act as a worker.
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


# Test number 3 loses the GPU, which is faked in torch.cuda: after it every call of synchronize raises.
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
    """Runs, with tests/conftest.py, tests of which number 1 fails and number 3 loses the GPU."""
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


@pytest.mark.slow
def test_a_lost_gpu_ends_the_tests_and_says_where(tmp_path):
    code, output = with_a_fault(tmp_path)
    assert code == 2 and "the GPU was lost in test_fault.py::test_kernel[3]: CUDA error: an illegal memory" in output
    assert output.count("2 failed, 2 passed") == 1 and "test_kernel[4]" not in output


@pytest.mark.slow
def test_a_worker_that_lost_the_gpu_is_gone_after_its_report(tmp_path):
    code, output = with_a_fault(tmp_path, PYTEST_XDIST_WORKER="gw0")
    assert code == 1 and "test_kernel[3] FAILED" in output
    assert "test_kernel[4]" not in output and "2 passed" not in output  # no later test, and no summary


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_a_worker_that_lost_the_gpu_is_replaced(tmp_path):
    code, output = with_a_fault(tmp_path, "-n", "1")
    assert code == 1 and "replacing crashed worker" in output and "test_kernel[5]" in output
    assert "3 failed, 4 passed" in output  # test 3 counts twice, as failed and as crashed


@pytest.mark.slow
def test_a_part_hears_the_signal_that_its_caller_ignores(tmp_path):
    """The caller ignores SIGINT, as under nohup. The part must still get it: pytest then prints what has failed."""
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
    assert list(parts)[:3] == ["ceilings", "build", "explain"]
    assert ("full" in parts["encoder"].command) == (architecture is not None)
    assert parts["build"].environment["TORCH_CUDA_ARCH_LIST"] == (architecture or "9.0")
    assert {name for name, part in parts.items() if part.gpu} == {"ncu", "racecheck", "memcheck", "compiled"}
    written = {"log.txt", "summary.json", sweep.FILE.name}
    written |= {Path(word).name for part in parts.values() for word in part.command if word.endswith(".json")}
    for part in parts.values():
        if "benchmarks.run" in part.command:  # its options have to exist
            words = part.words(100)
            options = run.arguments(words[words.index("benchmarks.run") + 1 :])
            assert options.specs and 0 < options.minutes * 60 < 100
            assert part.name != "memcheck" or {spec.dtype for _, spec in options.specs} == {"bfloat16", "float32"}
            written |= {file.path.name for file in run.Run(options).files.values() if not options.verify_only}
    assert len(written) <= 8  # no more come back from a lent machine
    assert sum(part.least for part in parts.values()) < 540


def test_what_matters_most_has_time_even_if_everything_before_takes_all_of_its_own(tmp_path):
    """Calls on bare machines: the first measures ops and models, the second finds what can be faster, and the third
    tests whether results are right."""
    left, parts, calls = 9 * 60 - on_gpu.GRACE - 15, on_gpu.all_parts("9.0", tmp_path, None), []  # 15: PyTorch's import
    again = sum(part.most for part in parts if part.again)
    for part in (part for part in parts if not part.again):
        if not calls or calls[-1][0] < part.most:
            calls.append((left - again, []))
        calls[-1] = calls[-1][0] - part.most, [*calls[-1][1], part.name]
    measured = ["ceilings", "verify", "ops", "encoder"]
    assert [names for _, names in calls[:2]] == [measured, ["profile", "sweep", "repeat", "ncu", "racecheck"]]
    assert calls[2][1] == ["parity", "memcheck", "models"] and len(calls) == 4


@pytest.mark.slow
def test_a_benchmark_ends_with_its_time(tmp_path):
    """The machine's command on one small case: the benchmark gets its limit, concludes, and leaves its results."""
    words = ["--size", "tiny", "--groups", "ops", "--parts", "bias_gelu", "--contenders", "fastbert"]
    command = [sys.executable, "-m", "benchmarks.run", *words, "--dtypes", "float32", "--out", str(tmp_path)]
    outcomes, log = rehearse([Part("ops", command, 5, 55, told=True)], tmp_path, minutes=1.2)
    head = json.loads((tmp_path / "ops_tiny.jsonl").read_text().splitlines()[0])
    assert outcomes["ops"].state == "ok" and "--minutes 0.5" in head["command"]
    assert "fastbert was right everywhere" in log


def test_parity_is_every_test_that_a_gpu_is_for():
    files = [Path(word) for word in on_gpu.parity() if word.endswith(".py")]
    assert [file.stem for file in files[:2]] == ["test_attention", "test_layer_norm"] and len(set(files)) == len(files)
    assert all((ROOT / file).exists() for file in files)
    left_out = {path.stem for path in ROOT.glob("tests/**/test_*.py")} - {file.stem for file in files}
    assert left_out <= {f"test_{name}" for name in on_gpu.ELSEWHERE} and "test_harness" in left_out
