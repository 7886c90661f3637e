"""Compiles every CUDA kernel for five architectures, without a GPU.

    python -m benchmarks.gpu.cuda_report [--arch 75 80 90 100 120] [--only TEXT ...] [--check]

Needs nvcc (CUDA_HOME or PATH), c++filt, and a disassembler: the toolkit's cuobjdump, or the one in Triton's package.
Writes build/cuda_report.md and a short docs/cuda_report.md. With only some of the architectures or kernels it prints
their tables instead; with --check it compares with the short file. Exit status 1: a kernel spills more than FEW bytes,
or --check found a difference.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks.gpu import compiled
from benchmarks.gpu.compiled import ROOT, Compiled

GPUS = (75, 80, 90, 100, 120)
FLAGS = "-std=c++17 -O3 -DNDEBUG -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v".split()  # as in the build
INSTRUCTIONS = {
    "LDG.128": r"\bLDG\.[\w.]*128", "STG.128": r"\bSTG\.[\w.]*128", "HMMA": r"\bHMMA\b", "LDGSTS": r"\bLDGSTS\b",
    "LDSM": r"\bLDSM\b", "LDL+STL": r"\b(?:LDL|STL)\b", "HGMMA": r"\bHGMMA\b",
}  # fmt: skip
HOPPER = "attention_wgmma.cu"  # compiled for sm_90a alone; empty elsewhere
FEW = 64  # spilled bytes that are allowed: addresses, outside of the loops of products; not worth one block less
INDEPENDENT = ("kernel", "GPU", "variants")  # the columns that are the same in every release of nvcc

# ---- the tools


@cache
def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return (shutil.which("nvcc", path=f"{home}/bin") if home else None) or shutil.which("nvcc")


@cache
def tool(name: str) -> str:
    """The path of a tool: beside nvcc, on the PATH, or in Triton's package."""
    package = importlib.util.find_spec("triton")
    bundled = [f"{path}/backends/nvidia/bin" for path in package.submodule_search_locations] if package else []
    found = shutil.which(name, path=os.pathsep.join([os.path.dirname(nvcc()), os.environ["PATH"], *bundled]))
    if not found:
        raise FileNotFoundError(f"{name} is neither beside nvcc, nor on the PATH, nor in Triton's package")
    return found


def run(*words: str | Path, stdin: str | None = None) -> str:
    """Runs a command; returns its standard output and error."""
    result = subprocess.run(words, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}:\n{result.stdout}")
    return result.stdout


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
    """The text after each heading, by the kernel's mangled name, which the heading's group captures."""
    parts = re.split(heading, text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def compile(source: Path, gpu: int) -> list[Compiled]:
    with tempfile.TemporaryDirectory() as folder:
        number, more = (f"{gpu}a", ["-DFB_HOPPER"]) if (source.name, gpu) == (HOPPER, 90) else (gpu, [])
        cubin, code = Path(folder, "kernels.cubin"), f"-gencode=arch=compute_{number},code=sm_{number}"
        log = run(nvcc(), *FLAGS, *more, code, "--keep", "--keep-dir", folder, "-cubin", "-o", cubin, source)
        ptx = Path(folder, f"{source.stem}.ptx").read_text(encoding="utf-8")
        disassembled = of_kernels(run(tool("cuobjdump"), "-sass", cubin), r"Function : (\w+)")
    logs, texts = of_kernels(log, r"Compiling entry function '(\w+)'"), of_kernels(ptx, r"\.entry (\w+)")
    names = map(short, run(tool("c++filt"), stdin="\n".join(logs)).splitlines())
    at_launch = set(re.findall(r"^\.extern \.shared .* (\w+)\[\];", ptx, re.MULTILINE))  # arrays with a size by launch
    found = []
    for kernel, name in zip(logs, names, strict=True):
        asks = ", shared memory" if at_launch.intersection(re.findall(r"\w+", texts[kernel])) else ""
        bounds = re.search(r"\.(?:max|req)ntid ([\d, ]+)", texts[kernel])
        threads = math.prod(map(int, bounds[1].split(","))) if bounds else "?"
        used = {what: len(re.findall(pattern, disassembled[kernel])) for what, pattern in INSTRUCTIONS.items()}
        name, bracket, arguments = f"{source.name} {name}".partition("<")
        found.append(Compiled(name, bracket + arguments, f"{threads} threads{asks}", *_used(logs[kernel], used)))
    return sorted(found, key=lambda kernel: kernel.cells)


def _used(log: str, instructions: dict[str, int]) -> tuple[int, int, int, dict[str, int], str]:
    """Registers, spilled bytes, shared bytes, instructions, and the problem with them, if any."""
    patterns = (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    registers, shared, *spills = (int((re.search(pattern, log) or [0, 0])[1]) for pattern in patterns)
    return registers, max(spills), shared, instructions, f"spills {max(spills)} bytes" if max(spills) > FEW else ""


def compile_all(gpus: Sequence[int], only: Sequence[str]) -> dict[int, list[Compiled]]:
    if nvcc() is None:
        sys.exit("there is no nvcc (CUDA_HOME, PATH)")
    jobs = list(product(gpus, sorted((ROOT / "csrc" / "cuda").glob("*.cu"))))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda job: compile(job[1], job[0]), jobs))
    kernels: dict[int, list[Compiled]] = {gpu: [] for gpu in gpus}
    for (gpu, _), some in zip(jobs, found, strict=True):
        kernels[gpu] += [k for k in some if not only or any(text in " ".join(k.cells) for text in only)]
    return kernels


def head() -> str:
    release = re.search(r"release [\d.]+, V([\d.]+)", run(nvcc(), "--version")).group(1)
    return f"""# What the CUDA kernels compile to

Compiler: nvcc {release}. Written by `make compile-report`, which needs no GPU: every kernel of `csrc/cuda`, by

    nvcc {" ".join(FLAGS)}

Registers are a thread's; spilled and shared are bytes: the most of all variants of a kernel, which
`build/cuda_report.md` lists. Shared memory of a size that a launch gives comes on top: the compiler does not see it.
Instructions are counted there: loads and stores of 16 bytes, matrix products (HMMA; by warpgroups HGMMA, compiled for
sm_90a), `cp.async` (LDGSTS), `ldmatrix` (LDSM), and local memory (LDL and STL).
"""


if __name__ == "__main__":
    sys.exit(compiled.main("cuda_report", __doc__, GPUS, compile_all, head, INDEPENDENT))
