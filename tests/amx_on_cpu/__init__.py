"""Emulates AMX on a processor that has AVX-512 BF16 but no matrix unit: emulator.c, loaded by LD_PRELOAD."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from fastbert import backends

SOURCE = Path(__file__).with_name("emulator.c")
LIBRARY = SOURCE.parents[2] / "build" / "amx_on_cpu" / "emulator.so"


@cache
def problem() -> str | None:
    """Why instructions of AMX cannot be run here, emulated or not; None if they can."""
    if cpu_set() == "amx":
        return None
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AMX is emulated on Linux on x86-64"
    if cpu_set() != "avx512_bf16":
        return "AMX is emulated on processors with AVX-512 BF16, as its products' surroundings take that"
    return None if shutil.which("cc") else "emulating AMX takes a C compiler, cc"


def environment() -> dict[str, str]:
    """The variables that give a process AMX, in addition to this one's environment. Compiles the emulator."""
    if cpu_set() == "amx":
        return {}
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        part = LIBRARY.with_suffix(f".{os.getpid()}")  # other processes may do the same
        subprocess.run(["cc", "-O3", "-mavx2", "-mfma", "-shared", "-fPIC", "-o", part, SOURCE, "-ldl"], check=True)
        part.replace(LIBRARY)
    return {"LD_PRELOAD": str(LIBRARY)}


def cpu_set() -> str | None:
    return backends.build_info().get("cpu_set")
