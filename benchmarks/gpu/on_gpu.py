"""One command for a machine with a GPU and little time: build, check, measure, most important first.

    python -m benchmarks.gpu.on_gpu --out DIR [--after DIR] [--minutes 9] [--parts NAME ...] [--commit H] [--rehearse]

Needs no network: torch, Triton, nvcc, cmake, ninja, pytest and transformers have to be installed; contenders that are
not are reported as absent. Every part runs in its own process group within the time that is left; a part that overruns
its limit is stopped, and the next one starts. Benchmarks know their limit, begin no case after it, and name the cases
that they left out. A benchmark that loses the GPU in a case (an illegal access lasts as long as its process) is
restarted after that case, and continues in the same file. The output of the parts goes to DIR/log.txt as they print it,
DIR/summary.json is written anew after every part, and benchmarks write their results anew after every case, so a run
that is cut off keeps what it had. A later call continues with --after DIR, which may be a copy on another machine: it
skips the parts that are ok, except those that every machine needs, and resumes a benchmark where its time was up. DIR
never has more than eight files.
Without a GPU, or with --rehearse, the parts that need one are skipped and the others run on small shapes.
This file runs before anything is built, so it uses only the standard library.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
CONCLUDE = 20  # seconds that a benchmark gets to start, and after its last case has begun
PROCESSES = max(2, min(14, len(os.sched_getaffinity(0)) - 2))  # for the tests: Triton compiles on the CPU
GRACE = 12  # seconds between asking a part to stop (pytest then prints what it has) and killing it
IMPORT = 90  # seconds for PyTorch to say what GPU there is; the first import reads gigabytes
REHEARSED = "9.0"  # the compute capability that a rehearsal builds for, as the Makefile does
CUDA = Path("/usr/local/cuda")  # where to look for a toolkit that is not on PATH
LOST = re.compile(r"^(GPU lost in case (\d+): .*)$", re.MULTILINE)  # benchmarks.run's last line, with exit status 3
CUT = re.compile(r"^(cut off before case (\d+): .*)$", re.MULTILINE)  # or this one, when its time is up
CASE = re.compile(r"^case (\d+) of \d+$", re.MULTILINE)  # its first line on each case
PYTHON = sys.executable


@dataclass(frozen=True)
class Part:
    """A command. Skipped with less than `least` seconds left; stopped after `most`. tool: a program that it needs.

    told: whether it gets its limit, less `conclude` seconds, as --minutes. ceilings: a file to pass to benchmarks.run,
    if it exists. again: whether every call needs it, because its effect is on the machine. unless: returns the reason
    why it cannot run now, or None.
    """

    name: str
    command: list[str]
    least: float
    most: float
    gpu: bool = False
    tool: str | None = None
    told: bool = False
    conclude: float = CONCLUDE
    environment: dict[str, str] = field(default_factory=dict)
    ceilings: Path | None = None
    again: bool = False
    unless: Callable[[], str | None] = lambda: None

    def words(self, limit: float, skip: int = 0) -> list[str]:
        """The command line for `limit` seconds, without the first `skip` cases."""
        told = ["--minutes", f"{max(limit - self.conclude, 1) / 60:.2f}"] if self.told else []
        told += ["--ceilings", str(self.ceilings)] if self.ceilings and self.ceilings.exists() else []
        return [*self.command, *told, *(["--skip", str(skip)] if skip else [])]


@dataclass
class Outcome:
    """How a part ended. behind: the number of the benchmark's case after which a later call continues."""

    name: str
    state: str  # ok, failed, timed out, unfinished or skipped
    seconds: float
    reason: str = ""
    behind: int = 0


def capability() -> str | None:
    """The GPU's compute capability in the form of TORCH_CUDA_ARCH_LIST, say "9.0"; None if PyTorch sees no GPU."""
    query = "import torch; print('%d.%d' % torch.cuda.get_device_capability())"
    try:
        answer = subprocess.run([PYTHON, "-c", query], capture_output=True, text=True, timeout=IMPORT)
    except subprocess.TimeoutExpired:
        print(f"PyTorch did not say within {IMPORT} s whether there is a GPU")
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def toolkit() -> dict[str, str]:
    """The environment that is missing to find nvcc and compute-sanitizer. (Without nvcc, CMake builds for the CPU.)"""
    home = Path(os.environ.get("CUDA_HOME") or CUDA)
    if shutil.which("nvcc") or not (home / "bin" / "nvcc").exists():
        return {}
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    return {"CUDA_HOME": str(home), "PATH": path}


# The test files that cover kernels best, in this order. The others follow, except ELSEWHERE: those use no GPU or are
# about machines without one, and are run there.
FIRST = ("attention", "layer_norm", "bias_gelu", "dense_gelu", "embedding", "cross_entropy", "linear", "padding")
FIRST += ("encoder_layer", "relative_attention", "linear_max", "scaled_linear", "triton", "varlen", "random")
FIRST += ("model", "graph", "graph_step", "heads", "family", "deberta", "accelerate", "still_transformers", "training")
ELSEWHERE = ("as_avx2", "at_once", "batches", "build", "check", "checkpoint", "cli", "clients", "command", "config")
ELSEWHERE += ("contenders", "corpus", "cpu", "cuda_on_cpu", "cuda_report", "data", "data_corpus", "data_tokenizers")
ELSEWHERE += ("datasets", "docs", "examples", "export", "filters", "floor", "gpu_tools", "harness", "huge_pages")
ELSEWHERE += ("malformed", "metrics", "on_gpu", "packed_linear", "page", "queue", "ray", "ray_serve", "report")
ELSEWHERE += ("requirements", "runs", "sentences", "service", "suites", "testing", "tiles", "workers")
COMPILED = ("--contenders", "fastbert", "fastbert.graph", "transformers, torch.compile", "PyTorch, torch.compile")
SMALL = ("--dtypes", "float32", "--rounds", "2", "--contenders", "fastbert", "fastbert.accelerate")  # of a rehearsal
OURS = ("--contenders", "fastbert", "fastbert, triton", "fastbert, cuda")
WATCHED = ("attention", "add_layer_norm", "layer_norm", "bias_gelu", "dense_gelu", "embedding", "cross_entropy")
NCU = ["ncu", "--profile-from-start", "off", "--clock-control", "none"]  # the clocks are not ours to set
for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy"):
    NCU += ["--section", section]
EXPLAIN = "import fastbert, torch; fastbert.explain(); print(torch.__config__.show())"
# A build without CUDA succeeds as well, but everything after it would run on other kernels.
EXPLAIN_ON_GPU = """
import sys
from fastbert import backends
found = {name: backends.why_not(name, "attention", "cuda", torch.float32) for name in ("triton", "cuda")}
sys.exit("\\n".join(f"{name} cannot run: {reason}" for name, reason in found.items() if reason) or 0)
"""


def all_parts(architecture: str | None, out: Path, commit: str | None) -> list[Part]:
    """All parts, in order of importance. If each takes its whole time and every call starts on a bare machine, the
    first call ends with the encoder, the second with racecheck, the third with models. architecture: None rehearses.
    """
    size, gpu = "full" if architecture else "tiny", {"gpu": True}
    ceilings, ops = out / "ceilings.json", out / f"ops{'' if architecture else '_tiny'}.jsonl"
    tool = lambda name, *words: [PYTHON, "-m", f"benchmarks.gpu.{name}", *words]  # noqa: E731
    run = [PYTHON, "-m", "benchmarks.run"]
    bench = [*run, "--size", size, *([] if architecture else SMALL), "--add", "--out", str(out)]
    bench += ["--commit", commit] if commit else []
    models, timed = [*bench, "--name", "models", "--groups"], {"told": True, "ceilings": ceilings}
    build = [PYTHON, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--editable", "."]
    built = {"FASTBERT_BUILD": "1"}
    built["TORCH_CUDA_ARCH_LIST"] = architecture or os.environ.get("TORCH_CUDA_ARCH_LIST", REHEARSED)
    explain = [PYTHON, "-c", EXPLAIN + (EXPLAIN_ON_GPU if architecture else "")]
    number = (architecture or REHEARSED).replace(".", "")
    compile = tool("triton_report", "--arch", number, "--only", "bf16" if architecture else "padding._invert")
    verify = [*run, "--size", "quick" if architecture else size, "--groups", "ops", "--verify-only", *OURS]
    verify += ["--directions", "backward", "--dtypes", *(("bfloat16", "float16") if architecture else ()), "float32"]
    repeat = [PYTHON, "-m", "pytest", "-q", "tests/ops/test_triton.py", "-k", "bit_for_bit"]
    counters = [*NCU, *tool("worst", "--results", str(ops), "--size", size)]
    interpreted = {} if architecture else {"TRITON_INTERPRET": "1"}
    in_triton = {"environment": interpreted, "unless": lambda: no_kernels(interpreted)}
    return [
        Part("ceilings", tool("ceilings", "--out", str(ceilings)), 10, 45),
        Part("build", build, 30, 150, environment=built, again=True, unless=lambda: is_built(architecture)),
        Part("explain", explain, 5, 20, again=True),
        Part("compile", compile, 10, 45, again=True, unless=lambda: no_triton() or unreported(number)),
        Part("verify", verify, 20, 50, told=True),
        Part("ops", [*bench, "--groups", "ops"], 40, 125, **timed),
        Part("encoder", [*models, "encoder"], 40, 75, **timed),
        Part("profile", tool("host_gaps", "--out", str(out / "profile.json"), "--size", size), 20, 40),
        Part("sweep", tool("sweep", "--out", str(out)), 40, 100, told=True, conclude=40, **in_triton),
        Part("repeat", repeat, 10, 45, **in_triton),
        Part("ncu", counters, 20, 45, **gpu, tool="ncu", unless=lambda: no_counters(ceilings, ops)),
        sanitizer("racecheck", ["--dtypes", "bfloat16", "--directions", "backward"], 30, 60),
        Part("parity", parity(FIRST if architecture else ("random",)), 30, 120),
        sanitizer("memcheck", ["--dtypes", "bfloat16", "float32"], 60, 85),
        Part("models", [*models, "mlm", "hf"], 40, 90 if architecture else 150, **timed),
        Part("compiled", [*bench, "--name", "compiled", *COMPILED], 60, 120, **gpu, **timed),
        Part("growth", [*models, "growth"], 40, 90, **timed),
    ]


def sanitizer(tool: str, words: list[str], least: float, most: float) -> Part:
    """fastbert's ops on tiny inputs under one of compute-sanitizer's tools."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += ["--report-api-errors", "no"] * (tool == "memcheck")  # PyTorch makes calls that may fail
    command += ["--launch-timeout", "120"]  # the sanitizer starts slowly
    command += [PYTHON, "-m", "benchmarks.run", "--size", "tiny", "--groups", "ops", "--parts", *WATCHED]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # PyTorch's caching allocator hides out-of-bounds accesses
    how = {"gpu": True, "tool": "compute-sanitizer", "told": True, "conclude": 25, "environment": uncached}
    return Part(tool, [*command, "--verify-only", *words, *OURS], least, most, **how)


def is_built(architecture: str | None) -> str | None:
    """Why not to build: a rehearsal uses existing kernels, because compiling takes minutes. None: build."""
    return None if architecture or not list(ROOT.glob("fastbert/_C*.so")) else "a rehearsal, and there are kernels"


def no_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def no_kernels(environment: Mapping[str, str]) -> str | None:
    """Why Triton's kernels cannot run on the GPU or in its interpreter, according to fastbert; None if they can."""
    query = "import torch; from fastbert import backends\n"
    query += "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    query += "print(backends.why_not('triton', 'attention', device, torch.float32) or '')"
    answer = subprocess.run(
        [PYTHON, "-c", query], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    return answer.stdout.strip() or None


def unreported(number: str) -> str | None:
    return None if number in ("80", "90", "100") else f"benchmarks.gpu.triton_report does not know sm_{number}"


def no_counters(ceilings: Path, ops: Path) -> str | None:
    """Why ncu cannot help: the reason that the part `ceilings` found, or that no op was measured; None if it can."""
    known = json.loads(ceilings.read_text(encoding="utf-8")) if ceilings.exists() else {}
    return known.get("no ncu") or (None if ops.exists() else "no op was measured")


def parity(first: Sequence[str] = FIRST) -> list[str]:
    """The command of the test suite; with pytest-xdist in several processes, each replaced if it loses the GPU.

    first: the files that it begins with; others follow only after FIRST. -v: failures are in the log even if time is up
    before the end.
    """
    files = {path.stem.removeprefix("test_"): path.relative_to(ROOT) for path in (ROOT / "tests").glob("*/test_*.py")}
    names = [name for name in first if name in files]
    names += [name for name in sorted(files) if name not in FIRST + ELSEWHERE] if first == FIRST else []
    command = [PYTHON, "-m", "pytest", "-v", "-m", "not slow", "--tb=short", "-rfE", "--continue-on-collection-errors"]
    command += ["-n", str(PROCESSES)] * (importlib.util.find_spec("xdist") is not None)
    return [*command, *(str(files[name]) for name in names)]


# ---- running


def run(
    parts: Sequence[Part],
    out: Path,
    minutes: float,
    gpu: bool,
    started: float | None = None,
    earlier: Mapping[str, Outcome] | None = None,
) -> list[Outcome]:
    """Runs the parts in order; the log and the summary in `out` are up to date after each.

    All of it ends within `minutes` of `started`, a time of time.monotonic(); default: now. earlier: outcomes of calls
    before this one, by part.
    """
    out.mkdir(parents=True, exist_ok=True)
    started, log = time.monotonic() if started is None else started, out / "log.txt"
    outcomes, known = [], dict(earlier or {})
    log.open("ab" if earlier else "wb").close()
    for part in parts:
        before = known.get(part.name)
        left = 60 * minutes - GRACE - (time.monotonic() - started)
        if before and before.state == "ok" and not part.again:
            outcomes.append(before)
        elif reason := why_skipped(part, left, gpu):
            is_known = before and before.state not in ("ok", "skipped")
            outcomes.append(before if is_known else Outcome(part.name, "skipped", 0.0, reason))
        else:
            outcomes.append(execute(part, left, log, before))
        print(line(outcomes[-1]), flush=True)
        known[part.name] = outcomes[-1]
        summary = {"gpu": gpu, "minutes": minutes, "parts": list(map(asdict, known.values()))}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return outcomes


def taken_over(after: Path, out: Path) -> dict[str, Outcome]:
    """Returns the outcomes of earlier calls, by part, and copies their files to `out`."""
    parts = json.loads((after / "summary.json").read_text(encoding="utf-8"))["parts"]
    out.mkdir(parents=True, exist_ok=True)
    for file in after.iterdir() if after.resolve() != out.resolve() else ():
        shutil.copyfile(file, out / file.name)
    return {part["name"]: Outcome(**part) for part in parts}


def why_skipped(part: Part, left: float, gpu: bool) -> str | None:
    if part.gpu and not gpu:
        return "no GPU"
    if part.tool and not shutil.which(part.tool):
        return f"{part.tool} is not installed"
    if left < part.least:
        return f"{max(left, 0):.0f} s left, it needs {part.least:.0f}"
    return part.unless()


def execute(part: Part, left: float, log: Path, before: Outcome | None = None) -> Outcome:
    """Runs one part and appends its output to the log; prints the end of the output if the part does not succeed.

    If a benchmark loses the GPU in a case, the cases after it run in a new process. before: the outcome of an earlier
    call, whose failures stay failures.
    """
    start, place, skip = time.monotonic(), log.stat().st_size, before.behind if before else 0
    failures = [before.reason] if skip and before.state == "failed" else []
    deadline = start + min(part.most, left)
    while True:
        limit, begin = deadline - time.monotonic(), log.stat().st_size
        with log.open("ab") as file:
            file.write(f"\n==== {part.name}{f' behind case {skip}' if skip else ''}\n".encode())
            file.flush()
            state, reason = _wait(part, part.words(limit, skip), limit, file)
        printed = log.read_bytes()[begin:].decode(errors="replace") if part.told else ""
        found = LOST.findall(printed)
        if state != "failed" or not found or int(found[-1][1]) <= skip:
            break
        failures.append(found[-1][0])
        skip = int(found[-1][1])
        if deadline - time.monotonic() < part.least:
            break
    state, reason, behind = _unfinished(state, reason, printed, skip)
    if failures:
        state, reason = "failed", "; ".join([*failures, *[reason] * (state != "ok")])
    if state not in ("ok", "unfinished"):
        print(log.read_bytes()[place:][-3000:].decode(errors="replace"))
    return Outcome(part.name, state, round(time.monotonic() - start, 1), reason, behind)


def _unfinished(state: str, reason: str, printed: str, skip: int) -> tuple[str, str, int]:
    """(state, reason, the case to continue after, 0 if none is left); a case that did not end in time is given up."""
    cases, cut = CASE.findall(printed), CUT.findall(printed)
    if state == "timed out":
        return state, reason, int(cases[-1]) if cases else skip
    if cut:
        words, number = cut[-1]
        return ("unfinished", words, int(number) - 1) if state == "ok" else (state, reason, int(number) - 1)
    return state, reason, skip if LOST.search(printed) else 0


def _wait(part: Part, words: list[str], limit: float, log: BinaryIO) -> tuple[str, str]:
    """Runs a command for at most `limit` seconds; returns (state, reason)."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 nohup and & have it ignored
    how = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
    try:
        process = subprocess.Popen(words, preexec_fn=listen, **how)
    except OSError as error:
        return "failed", str(error)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return "timed out", f"stopped after {limit:.0f} s"
    finally:
        stop(process)
    return ("ok", "") if code == 0 else ("failed", f"exit status {code}")


def stop(process: subprocess.Popen) -> None:
    """Ends the process and whatever it started."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing was left
    process.wait()


def line(outcome: Outcome) -> str:
    return f"{outcome.name:20} {outcome.state:10} {outcome.seconds:7.1f} s  {outcome.reason}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out")
    parser.add_argument("--after", type=Path, metavar="DIR", help="go on where the call that left this folder ended")
    parser.add_argument("--minutes", type=float, default=9, help="for all parts together")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--commit", help="for the results, where git does not know the tree's")
    parser.add_argument("--rehearse", action="store_true", help="as on a machine without a GPU")
    options, started = parser.parse_args(), time.monotonic()
    os.environ.update(toolkit() | ({"CUDA_VISIBLE_DEVICES": ""} if options.rehearse else {}))
    architecture, out = None if options.rehearse else capability(), options.out.resolve()
    parts = all_parts(architecture, out, options.commit)
    if unknown := set(options.parts or ()) - {part.name for part in parts}:
        parser.error(f"unknown parts {sorted(unknown)}; there are {[part.name for part in parts]}")
    wanted = [part for part in parts if not options.parts or part.name in options.parts]
    try:
        earlier = taken_over(options.after, out) if options.after else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{options.after} is no folder of an earlier call: {error}")
    outcomes = run(wanted, out, options.minutes, architecture is not None, started, earlier)
    print("\n" + "\n".join(map(line, outcomes)))
    return 1 if any(outcome.state in ("failed", "timed out") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
