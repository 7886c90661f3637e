"""Compiles every CUDA kernel for four architectures, without a GPU.

    python -m benchmarks.gpu.cuda_report [--arch 80 90 100 120] [--check]

Needs nvcc (CUDA_HOME or PATH), c++filt, and a disassembler: the toolkit's cuobjdump, or the one in Triton's package.
Writes build/cuda_report.md and, in short, docs/cuda_report.md; with some of the architectures prints their tables
instead; with --check compares with the short one. Exit status 1: a kernel spills registers; or --check found a
difference.
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

from benchmarks.gpu import compiled
from benchmarks.gpu.compiled import ROOT, Compiled

FLAGS = "-std=c++17 -O3 -DNDEBUG -DFB_CUDA -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v".split()  # as of the build
INSTRUCTIONS = {
    "LDG.128": r"\bLDG\.[\w.]*128", "STG.128": r"\bSTG\.[\w.]*128", "HMMA": r"\bHMMA\b", "LDGSTS": r"\bLDGSTS\b",
    "LDSM": r"\bLDSM\b", "LDL+STL": r"\b(?:LDL|STL)\b",
}  # fmt: skip
INDEPENDENT = ("kernel", "GPU", "variants")  # the columns that are the same in every release of nvcc


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


def compile(source: Path, architecture: int) -> list[Compiled]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        log = run(nvcc(), *FLAGS, code, "--keep", "--keep-dir", folder, "-cubin", "-o", cubin, source)
        ptx = Path(folder, f"{source.stem}.ptx").read_text(encoding="utf-8")
        code = run(tool("cuobjdump"), "-sass", cubin)
    logs = of_kernels(log, r"Compiling entry function '(\w+)'")
    texts, disassembled = of_kernels(ptx, r"\.entry (\w+)"), of_kernels(code, r"Function : (\w+)")
    names = map(short, run(tool("c++filt"), stdin="\n".join(logs)).splitlines())
    at_launch = set(re.findall(r"^\.extern \.shared .* (\w+)\[\];", ptx, re.MULTILINE))  # arrays of a size it gives
    found = [
        of_kernel(f"{source.name} {name}", architecture, logs[kernel], texts[kernel], disassembled[kernel], at_launch)
        for kernel, name in zip(logs, names, strict=True)
    ]
    return sorted(found, key=lambda kernel: kernel.cells)


def of_kernel(name: str, architecture: int, log: str, ptx: str, code: str, at_launch: set[str]) -> Compiled:
    number = lambda pattern: int((re.search(pattern, log) or [0, 0])[1])  # noqa: E731
    registers, shared = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    spilled = max(number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"))
    bounds = re.search(r"\.(?:max|req)ntid ([\d, ]+)", ptx)
    threads = math.prod(map(int, bounds[1].split(","))) if bounds else 0
    launch = f"{threads or '?'} threads"
    launch += f", occupancy {MULTIPROCESSORS[architecture].occupancy(threads, registers, shared)}%" if threads else ""
    launch += ", shared memory" if at_launch.intersection(re.findall(r"\w+", ptx)) else ""
    used = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    kernel, bracket, arguments = name.partition("<")
    problem = f"spills {spilled} bytes" if spilled else ""
    return Compiled(kernel, bracket + arguments, launch, registers, spilled, shared, used, problem)


def compile_all(architectures: list[int]) -> dict[int, list[Compiled]]:
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    jobs = [(source, architecture) for architecture in architectures for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda job: compile(*job), jobs))
    kernels: dict[int, list[Compiled]] = {architecture: [] for architecture in architectures}
    for (_, architecture), some in zip(jobs, found, strict=True):
        kernels[architecture] += some
    return kernels


# ---- the report


def head() -> str:
    return f"""# What the CUDA kernels compile to

Compiler: nvcc {release()}. Written by `make compile-report`, which needs no GPU: every kernel of `csrc/cuda`, by

    nvcc {" ".join(FLAGS)}

Registers are a thread's; spilled and shared are bytes: the most of all variants of a kernel, which
`build/cuda_report.md` lists. What a launch asks for in shared memory beside that the compiler does not see; occupancy
there, the percentage of a multiprocessor's warps that registers, threads and the shared memory shown leave room for,
may then be less. Instructions are counted there: loads and stores of 16 bytes, matrix products (HMMA), `cp.async`
(LDGSTS), `ldmatrix` (LDSM), and local memory (LDL and STL).
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.cuda_report", description=__doc__.splitlines()[0])
    every = list(MULTIPROCESSORS)
    parser.add_argument("--arch", nargs="+", type=int, choices=every, default=every)
    parser.add_argument("--check", action="store_true", help="compare with docs/cuda_report.md instead of writing it")
    options = parser.parse_args()
    if nvcc() is None:
        parser.error("there is no nvcc (CUDA_HOME, PATH)")
    is_whole = set(options.arch) == set(every)
    return compiled.conclude("cuda_report", head(), compile_all(options.arch), INDEPENDENT, options.check, is_whole)


if __name__ == "__main__":
    sys.exit(main())
