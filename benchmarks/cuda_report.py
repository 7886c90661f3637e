"""Compiles every CUDA kernel for four architectures, without a GPU.

    python -m benchmarks.cuda_report [--arch 80 90 100 120] [--check]

Needs nvcc (CUDA_HOME or PATH), c++filt, and a disassembler: the toolkit's cuobjdump, or the one in Triton's package.
Writes docs/cuda_report.md; with some of the architectures prints their tables instead; with --check compares with it.
Exit status 1: a kernel spills registers; or --check found a difference.
"""

import argparse
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import tables
from benchmarks.tables import Row

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "cuda_report.md"
FLAGS = "-std=c++17 -O3 -DNDEBUG -DFB_CUDA -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v".split()  # as of the build
INSTRUCTIONS = {
    "LDG.128": r"\bLDG\.[\w.]*128", "STG.128": r"\bSTG\.[\w.]*128", "HMMA": r"\bHMMA\b", "LDGSTS": r"\bLDGSTS\b",
    "LDSM": r"\bLDSM\b", "LDL+STL": r"\b(?:LDL|STL)\b",
}  # fmt: skip
HEADER = ("file", "kernel", "threads", "registers", "spilled", "shared", "occupancy", *INSTRUCTIONS)
INDEPENDENT = (0, 1, 2)  # the columns that are the same in every release of nvcc


@dataclass(frozen=True)
class Multiprocessor:
    """What bounds the blocks that run at a time. From the CUDA programming guide's table of compute capabilities."""

    warps: int
    blocks: int
    shared: int  # bytes
    registers: int = 65536

    def occupancy(self, threads: int, registers: int, shared: int) -> int:
        """Percent of the warps. Registers are given out to a warp in 256s and to 4 warps at a time, shared memory in
        128s and 1024 bytes of it to the system."""
        warps = math.ceil(threads / 32)
        room = self.registers // (math.ceil(registers * 32 / 256) * 256) // 4 * 4
        by_shared = self.shared // (math.ceil((shared + 1024) / 128) * 128)
        return 100 * min(self.blocks, self.warps // warps, room // warps, by_shared) * warps // self.warps


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 << 10),
    90: Multiprocessor(64, 32, 228 << 10),
    100: Multiprocessor(64, 32, 228 << 10),
    120: Multiprocessor(48, 24, 100 << 10),
}


# ---- the tools


@cache
def nvcc() -> Path | None:
    beside = Path(os.environ["CUDA_HOME"], "bin", "nvcc") if os.environ.get("CUDA_HOME") else None
    found = str(beside) if beside and beside.exists() else shutil.which("nvcc")
    return Path(found) if found else None


@cache
def tool(name: str) -> str:
    """nvcc's neighbour, one on the PATH, or Triton's."""
    package = importlib.util.find_spec("triton")
    bundled = [Path(p, "backends", "nvidia", "bin") for p in package.submodule_search_locations] if package else []
    for folder in (nvcc().parent, *map(Path, os.environ["PATH"].split(os.pathsep)), *bundled):
        if (folder / name).exists():
            return str(folder / name)
    raise FileNotFoundError(f"{name} is neither beside nvcc, nor on the PATH, nor in Triton's package")


def run(*words: str | Path, stdin: str | None = None) -> str:
    """Standard output and error."""
    result = subprocess.run(words, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}:\n{result.stdout}")
    return result.stdout


def release() -> str:
    return re.search(r"release [\d.]+, V([\d.]+)", run(nvcc(), "--version")).group(1)


# ---- compiling


def short(name: str) -> str:
    """A demangled kernel's name and template arguments, without its namespaces and parameters."""
    name = name.removeprefix("void ").replace("fastbert::cuda::", "").replace("(anonymous namespace)::", "")
    name = name.replace("__nv_bfloat16", "bf16").replace("__half", "half")
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def of_kernels(text: str, heading: str) -> dict[str, str]:
    """What follows each heading, whose group is a kernel's mangled name."""
    parts = re.split(heading, text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def compiled(source: Path, architecture: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        log = run(nvcc(), *FLAGS, code, "--keep", "--keep-dir", folder, "-cubin", "-o", cubin, source)
        ptx = Path(folder, f"{source.stem}.ptx").read_text(encoding="utf-8")
        code = run(tool("cuobjdump"), "-sass", cubin)
    logs = of_kernels(log, r"Compiling entry function '(\w+)'")
    texts, disassembled = of_kernels(ptx, r"\.entry (\w+)"), of_kernels(code, r"Function : (\w+)")
    names = run(tool("c++filt"), stdin="\n".join(logs)).splitlines()
    at_launch = set(re.findall(r"^\.extern \.shared .* (\w+)\[\];", ptx, re.MULTILINE))  # arrays of a size it gives
    rows = [
        row(source.name, short(name), architecture, logs[kernel], texts[kernel], disassembled[kernel], at_launch)
        for kernel, name in zip(logs, names, strict=True)
    ]
    return sorted(rows, key=lambda row: row.columns)


def row(file: str, name: str, architecture: int, log: str, ptx: str, code: str, at_launch: set[str]) -> Row:
    number = lambda pattern: int((re.search(pattern, log) or [0, 0])[1])  # noqa: E731
    registers, static = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    spilled = max(number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"))
    shared = f"{static} + launch's" if at_launch.intersection(re.findall(r"\w+", ptx)) else str(static)
    bounds = re.search(r"\.(?:max|req)ntid ([\d, ]+)", ptx)
    threads = math.prod(map(int, bounds[1].split(","))) if bounds else 0
    occupancy = f"{MULTIPROCESSORS[architecture].occupancy(threads, registers, static)}%" if threads else "?"
    counts = [len(re.findall(pattern, code)) for pattern in INSTRUCTIONS.values()]
    columns = (file, name, str(threads or "?"), str(registers), str(spilled), shared, occupancy, *map(str, counts))
    return Row(columns, f"spills {spilled} bytes" if spilled else "")


def compile_all(architectures: list[int]) -> dict[str, list[Row]]:
    """A section's rows by its title."""
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    jobs = [(source, architecture) for architecture in architectures for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda job: compiled(*job), jobs))
    sections: dict[str, list[Row]] = {f"sm_{architecture}": [] for architecture in architectures}
    for (_, architecture), rows in zip(jobs, found, strict=True):
        sections[f"sm_{architecture}"] += rows
    return sections


# ---- the report


def head() -> str:
    return f"""# What the CUDA kernels compile to

nvcc {release()}. Written by `make compile-report`, which needs no GPU: every kernel of `csrc/cuda`, compiled by

    nvcc {" ".join(FLAGS)}

Threads are a block's, registers a thread's; spilled and shared are bytes. Occupancy is the percentage of a
multiprocessor's warps that registers, threads and the shared memory shown leave room for; where a launch asks for more
shared memory, which the compiler does not see, it may be less. The other columns count instructions: loads and stores
of 16 bytes, matrix products (HMMA), `cp.async` (LDGSTS), `ldmatrix` (LDSM), and local memory (LDL and STL).
"""


def comparable(committed: str) -> tuple[int, ...]:
    """The columns to compare: between releases of nvcc registers and instructions may differ."""
    return tuple(range(len(HEADER))) if f"\nnvcc {release()}. " in committed else INDEPENDENT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_report", description=__doc__.splitlines()[0])
    every = list(MULTIPROCESSORS)
    parser.add_argument("--arch", nargs="+", type=int, choices=every, default=every)
    parser.add_argument("--check", action="store_true", help="compare with docs/cuda_report.md instead of writing it")
    options = parser.parse_args()
    if nvcc() is None:
        parser.error("there is no nvcc (CUDA_HOME, PATH)")
    sections = compile_all(options.arch)
    columns = comparable(REPORT.read_text(encoding="utf-8")) if options.check else None
    return tables.conclude(REPORT, head(), HEADER, sections, columns, set(options.arch) == set(every))


if __name__ == "__main__":
    sys.exit(main())
