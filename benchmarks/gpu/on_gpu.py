"""One command for a machine with a GPU and little time: build, check, measure, most important first.

    python -m benchmarks.gpu.on_gpu --out DIR [--minutes 9] [--parts build parity ...] [--commit HASH] [--rehearse]

Needs no network: torch, Triton, nvcc, cmake, ninja, pytest and transformers have to be there; contenders that
are not are reported as absent. Every part runs in a process group of its own inside what is left of the time; one that
overruns its limit is stopped and the next one starts. Benchmarks know their limit, begin no case after it, and name
what they left out; one that loses the GPU in a case (an illegal access lasts as long as its process) is started again
behind that case, and goes on in the same file. What the parts print goes to DIR/log.txt as they print it,
DIR/summary.json is written anew after every part, and benchmarks write their results (one file for each group) anew
after every case, so a run that is cut off keeps what it had.
Without a GPU, or with --rehearse, the parts that need one are skipped and the others run on small shapes.
This file runs before anything is built: standard library only.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
CONCLUDE = 20  # seconds that a benchmark gets to start, and after its last case has begun
PROCESSES = max(2, min(8, len(os.sched_getaffinity(0)) // 2))  # of the tests: Triton compiles on the CPU
GRACE = 12  # seconds between asking a part to stop (pytest then prints what it has) and killing it
IMPORT = 90  # seconds for PyTorch to say what GPU there is; the first import reads gigabytes
REHEARSED = "9.0"  # the compute capability that a rehearsal builds for, as the Makefile does
CUDA = Path("/usr/local/cuda")  # where a toolkit is that is not on PATH
LOST = re.compile(r"^(GPU lost in case (\d+): .*)$", re.MULTILINE)  # benchmarks.run's last words, with exit status 3
PYTHON = sys.executable


@dataclass(frozen=True)
class Part:
    """A command. Skipped with less than `least` seconds left; stopped after `most`. tool: a program that it needs.

    told: it is benchmarks.run, and gets its limit, less `conclude` seconds, as --minutes.
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

    def words(self, limit: float, skip: int = 0) -> list[str]:
        """The command line for `limit` seconds, without the first `skip` cases."""
        told = ["--minutes", f"{max(limit - self.conclude, 1) / 60:.2f}"] if self.told else []
        return [*self.command, *told, *(["--skip", str(skip)] if skip else [])]


@dataclass
class Outcome:
    name: str
    state: str  # ok, failed, timed out or skipped
    seconds: float
    reason: str = ""


def capability() -> str | None:
    """The GPU's compute capability as TORCH_CUDA_ARCH_LIST has it, say "9.0"; None where PyTorch sees no GPU."""
    query = "import torch; print('%d.%d' % torch.cuda.get_device_capability())"
    try:
        answer = subprocess.run([PYTHON, "-c", query], capture_output=True, text=True, timeout=IMPORT)
    except subprocess.TimeoutExpired:
        print(f"PyTorch did not say within {IMPORT} s whether there is a GPU")
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def toolkit() -> dict[str, str]:
    """What the environment lacks for nvcc and compute-sanitizer to be found. CMake builds for the CPU without nvcc."""
    home = Path(os.environ.get("CUDA_HOME") or CUDA)
    if shutil.which("nvcc") or not (home / "bin" / "nvcc").exists():
        return {}
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    return {"CUDA_HOME": str(home), "PATH": path}


# The test files that say most about kernels, in this order; then the others, but for those that use no GPU or are about
# machines without one, and have been run there.
FIRST = ("attention", "layer_norm", "bias_gelu", "dense_gelu", "embedding", "cross_entropy", "linear", "padding")
FIRST += ("model", "graph", "heads", "hf", "training")
ELSEWHERE = ("benchmarks", "build", "check", "checkpoint", "config", "cpu", "cuda_on_cpu", "cuda_report", "data")
ELSEWHERE += ("data_corpus", "data_tokenizers", "datasets", "examples", "export", "metrics", "requirements")
ELSEWHERE += ("on_gpu", "sentences", "testing")
COMPILED = ("--contenders", "fastbert", "fastbert.graph", "transformers, torch.compile", "PyTorch, torch.compile")
MEMCHECKED = ("attention", "add_layer_norm", "layer_norm", "bias_gelu", "dense_gelu", "embedding", "cross_entropy")
EXPLAIN = "import fastbert, torch; fastbert.explain(); print(torch.__config__.show())"
# A build that left CUDA out succeeds, and everything after it would run on other kernels.
EXPLAIN_ON_GPU = """
import sys
from fastbert import backends
found = {name: backends.why_not(name, "attention", "cuda", torch.float32) for name in ("triton", "cuda")}
sys.exit("\\n".join(f"{name} cannot run: {reason}" for name, reason in found.items() if reason) or 0)
"""


def all_parts(architecture: str | None, out: Path, commit: str | None) -> list[Part]:
    """In order of importance. architecture: None rehearses."""
    run = [PYTHON, "-m", "benchmarks.run"]
    bench = [*run, "--out", str(out), *([] if architecture else ["--quick"]), *(["--commit", commit] if commit else [])]
    build = [PYTHON, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--editable", "."]
    explain = [PYTHON, "-c", EXPLAIN + (EXPLAIN_ON_GPU if architecture else "")]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # PyTorch's own allocator hides what is out of bounds
    built = {"FASTBERT_BUILD": "1"}
    built["TORCH_CUDA_ARCH_LIST"] = architecture or os.environ.get("TORCH_CUDA_ARCH_LIST", REHEARSED)
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20"]
    memcheck += ["--report-api-errors", "no", "--launch-timeout", "120"]  # PyTorch asks what may fail; it starts slowly
    memcheck += [*run, "--size", "tiny", "--groups", "ops", "--parts", *MEMCHECKED, "--verify-only"]
    memcheck += ["--dtypes", "bfloat16", "float32"]
    sanitizer = {"gpu": True, "tool": "compute-sanitizer"}
    return [
        Part("build", build, 30, 180, environment=built),
        Part("explain", explain, 5, 30),
        Part("parity", parity(), 30, 120),
        Part("encoder", [*bench, "--groups", "encoder"], 40, 120, told=True),
        Part("ops", [*bench, "--groups", "ops"], 40, 75, told=True),
        Part("memcheck", memcheck, 60, 120, told=True, conclude=40, environment=uncached, **sanitizer),
        Part("mlm", [*bench, "--groups", "mlm"], 40, 70, told=True),
        Part("compiled", [*bench, "--name", "compiled", *COMPILED], 60, 150, gpu=True, told=True),
        Part("hf", [*bench, "--groups", "hf"], 40, 70, told=True),
        Part("growth", [*bench, "--groups", "growth"], 40, 120, told=True),
    ]


def parity() -> list[str]:
    """The test suite; in several processes, of which one that loses the GPU is replaced, where pytest-xdist is there.

    -v: what has failed is in the log also when time is up before the end.
    """
    files = {path.stem.removeprefix("test_"): path.relative_to(ROOT) for path in (ROOT / "tests").glob("*/test_*.py")}
    names = [name for name in FIRST if name in files]
    names += [name for name in sorted(files) if name not in FIRST + ELSEWHERE]
    command = [PYTHON, "-m", "pytest", "-v", "-m", "not slow", "--tb=short", "-rfE", "--continue-on-collection-errors"]
    command += ["-n", str(PROCESSES)] * (importlib.util.find_spec("xdist") is not None)
    return [*command, *(str(files[name]) for name in names)]


# ---- running


def run(parts: Sequence[Part], out: Path, minutes: float, gpu: bool, started: float | None = None) -> list[Outcome]:
    """Runs the parts in order; the log and the summary in `out` are up to date after each.

    All of it ends within `minutes` of `started`, a time of time.monotonic(); default: now.
    """
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic() if started is None else started
    outcomes = []
    (out / "log.txt").write_bytes(b"")
    for part in parts:
        left = 60 * minutes - GRACE - (time.monotonic() - started)
        reason = why_skipped(part, left, gpu)
        outcomes.append(Outcome(part.name, "skipped", 0.0, reason) if reason else execute(part, left, out / "log.txt"))
        print(line(outcomes[-1]), flush=True)
        summary = {"gpu": gpu, "minutes": minutes, "parts": [asdict(outcome) for outcome in outcomes]}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return outcomes


def why_skipped(part: Part, left: float, gpu: bool) -> str | None:
    if part.gpu and not gpu:
        return "no GPU"
    if part.tool and not shutil.which(part.tool):
        return f"{part.tool} is not installed"
    return f"{max(left, 0):.0f} s left, it needs {part.least:.0f}" if left < part.least else None


def execute(part: Part, left: float, log: Path) -> Outcome:
    """Runs one part, its output at the end of the log; the last of it is printed too if the part does not succeed.

    Of a benchmark that loses the GPU in a case, what is behind that case runs in the next process.
    """
    start, before, skip, losses = time.monotonic(), log.stat().st_size, 0, []
    deadline = start + min(part.most, left)
    while True:
        limit, place = deadline - time.monotonic(), log.stat().st_size
        with log.open("ab") as file:
            file.write(f"\n==== {part.name}{f' behind case {skip}' if skip else ''}\n".encode())
            file.flush()
            state, reason = _wait(part, part.words(limit, skip), limit, file)
        found = LOST.findall(log.read_bytes()[place:].decode(errors="replace")) if part.told else []
        if state != "failed" or not found or int(found[-1][1]) <= skip:
            break
        losses.append(found[-1][0])
        skip = int(found[-1][1])
        if deadline - time.monotonic() < part.least:
            break
    if losses:
        state, reason = "failed", "; ".join([*losses, *[reason] * (state != "ok")])
    if state != "ok":
        print(log.read_bytes()[before:][-3000:].decode(errors="replace"))
    return Outcome(part.name, state, round(time.monotonic() - start, 1), reason)


def _wait(part: Part, words: list[str], limit: float, log: BinaryIO) -> tuple[str, str]:
    """(state, reason) of a command that may take `limit` seconds."""
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
    parser.add_argument("--minutes", type=float, default=9, help="for all parts together")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--commit", help="for the results, where the tree has no git history")
    parser.add_argument("--rehearse", action="store_true", help="as on a machine without a GPU")
    options, started = parser.parse_args(), time.monotonic()
    os.environ.update(toolkit())
    architecture, out = None if options.rehearse else capability(), options.out.resolve()
    parts = all_parts(architecture, out, options.commit)
    if unknown := set(options.parts or ()) - {part.name for part in parts}:
        parser.error(f"unknown parts {sorted(unknown)}; there are {[part.name for part in parts]}")
    wanted = [part for part in parts if not options.parts or part.name in options.parts]
    outcomes = run(wanted, out, options.minutes, architecture is not None, started)
    print("\n" + "\n".join(map(line, outcomes)))
    return 1 if any(outcome.state in ("failed", "timed out") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
