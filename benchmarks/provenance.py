"""Where a number comes from: machine, versions, commit, command line. No host name and no path of the machine."""

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


def environment(commit: str | None = None) -> dict[str, object]:
    """Everything that a results file says about its origin.

    commit: for a copy of the tree that has no git history; nothing then says whether the copy has changes.
    """
    known, dirty = git_state()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "commit": known or commit,
        "dirty": dirty,
        "machine": machine(),
        "versions": versions(),
    }


def git_state() -> tuple[str | None, bool | None]:
    """Commit, and whether the tree differs from it (results aside); None for what git does not say."""
    commit = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (commit, None if changes is None else bool(changes)) if commit else (None, None)


def command(argv: list[str]) -> str:
    """The command line, absolute paths cut to their last part."""
    words = ["python", *argv[1:]]
    return " ".join("=".join(Path(p).name if os.path.isabs(p) else p for p in word.split("=")) for word in words)


def machine() -> dict[str, object]:
    facts = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),  # of the last minute; near the number of threads, or others were busy
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    gpu = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30),
        "multiprocessors": properties.multi_processor_count,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
    }
    return {**facts, "gpu": gpu}


def versions() -> dict[str, object]:
    """cuda: the one that torch was built with. kernels: how fastbert's own were built, empty where they do not load."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _installed("triton"),
        **{name: _installed(name) for name in ("transformers", "openvino", "ctranslate2")},
        "fastbert": fastbert.__version__,
        "kernels": backends.build_info(),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_bfloat16_products() -> bool:
    """Whether the processor multiplies bfloat16 itself; without that a product of them takes many times as long."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(backends.cpuinfo("flags", "Features").split()))


def _processor() -> str:
    return backends.cpuinfo("model name") or platform.processor() or "unknown"


def _output(*words: str) -> str | None:
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
