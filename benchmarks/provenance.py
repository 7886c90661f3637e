"""Where a number comes from: machine, versions, commit, command line; without the machine's host name and paths."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

import fastbert
from fastbert import backends

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "onnxruntime", "openvino", "ctranslate2")


def head(commit: str | None = None, seed: int | None = None) -> dict[str, object]:
    """The first line of a results file.

    commit: for a copy of the tree whose git history is missing or is not the copy's; git is not asked then, and `dirty`
    is None. The entry `load` is the average of the last minute; if it is near the number of threads, other processes
    were busy. `kernels` says how fastbert's own were built; it is empty if they do not load.
    """
    known, dirty = (commit, None) if commit else git_state()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "commit": known,
        "dirty": dirty,
        "seed": seed,
        "machine": machine(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "kernels": backends.build_info(),
    }


def git_state() -> tuple[str | None, bool | None]:
    """The commit, and whether the tree differs from it (results aside); None for each that git cannot tell."""
    commit = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (commit, None if changes is None else bool(changes)) if commit else (None, None)


def command(argv: list[str]) -> str:
    """The command line, with absolute paths cut to their last part."""
    words = ["python", *argv[1:]]
    return " ".join("=".join(Path(p).name if os.path.isabs(p) else p for p in word.split("=")) for word in words)


def machine() -> str:
    processor = backends.cpuinfo("model name") or platform.processor() or platform.machine()
    if family := backends.cpuinfo("cpu family"):  # CPU names in clouds lack the generation
        processor = f"{processor} (family {family}, model {backends.cpuinfo('model')})"
    words = [processor, f"{torch.get_num_threads()} threads", torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        words = [f"{gpu.name} ({gpu.total_memory >> 30} GiB, driver {driver}, CUDA {torch.version.cuda})", *words]
    return ", ".join(words)


def versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "fastbert": fastbert.__version__}
    return own | {name: version for name in PACKAGES if (version := _installed(name))}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*words: str) -> str | None:
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
