"""make test-sanitizers: the C++ and CUDA under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

1. loops.cpp runs csrc/cpu/loops without torch: for races, and on buffers of exactly the required size. It also runs
   with the loops for AVX-512 and for AVX-512 BF16, whose intrinsics avx512.h computes on every processor, with AMX's
   tiles in plain C++, and with AVX2's VNNI.
2. The CUDA kernels on the CPU (tests/cuda_on_cpu) without torch: for races between the threads of a block.
3. The whole `_C`, and the CUDA kernels on the CPU, in Python, on the tests of their ops.

A sanitizer that reports nothing passes everything, so each program first makes wrong calls that have to be reported;
`--self-test` stops after those of the loops. Everything is built in build/sanitize, with g++ or the GCC named by CXX.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cuda_on_cpu
from build_copy import JOBS, ROOT, build_copy

HERE, OUT = ROOT / "tests" / "sanitizers", ROOT / "build" / "sanitize"
CXX = os.environ.get("CXX", "g++")
X86 = platform.machine() == "x86_64"
PROCESSOR = set(Path("/proc/cpuinfo").read_text().split())

# -g1 has the line numbers of a report; -g takes twice as long to compile.
FLAGS = "-std=c++20 -Wall -Wextra -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all".split()
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python never frees some of its memory
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_interceptors_accesses=1",  # the scheduler of CUDA threads calls memcpy on their fibers
}

OPS = (
    "bias_gelu layer_norm attention relative_attention embedding dense_gelu linear packed_linear padding "
    "cross_entropy linear_max"
).split()
TESTS = [f"tests/ops/test_{op}.py" for op in OPS]
SELECTION = "({}) and not compile and not opcheck"
ON = {"cpu": "cpu or packed_layer or few_rows or products_of_gradients", "cuda": "cuda"}


@dataclass(frozen=True)
class Driver:
    """loops.cpp and the loops under one sanitizer. faults: the report expected for each wrong call."""

    name: str
    sanitizer: str
    faults: dict[str, str]
    isa: str = "avx2" if X86 else "generic"
    options: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        return str(OUT / self.name)


RACES = {"race": "ThreadSanitizer: data race"}
MEMORY = {
    "overwrite": "AddressSanitizer: heap-buffer-overflow",
    "overread": "AddressSanitizer: heap-buffer-overflow",
    "overflow": "runtime error: signed integer overflow",
}
CUDA_RACES = ("missing_barrier", "reused_buffer", "missing_syncwarp", "wait_without_barrier")
CUDA_MEMORY = {  # faults in shared memory
    "row_guard": "runtime error: index 63 out of bounds",
    "beyond_dynamic": "AddressSanitizer: use-after-poison",
    "misaligned_shared": "runtime error: store to misaligned address",
}
EVEX = OUT / "evex"
DRIVERS = [Driver("loops-threads", "thread", RACES), Driver("loops-memory", "address,undefined", MEMORY)]
if X86:  # compiled with AVX2's flags; isa is just a namespace that has all loops
    WIDE = ("-include", str(HERE.parent / "avx512_on_cpu" / "avx512.h"))
    DRIVERS += [Driver("loops-memory-avx512", "address,undefined", MEMORY, "avx512", (*WIDE, "-DFB_AVX512_ON_CPU=1"))]
    BF16 = (*WIDE, "-DFB_AVX512_ON_CPU=3")
    DRIVERS += [Driver("loops-memory-bf16", "address,undefined", MEMORY, "avx512", BF16)]
    DRIVERS += [Driver("loops-memory-tiles", "address,undefined", MEMORY, "avx512", (*BF16, "-DFB_TILES"))]
    if {"avx_vnni", "avx512_vnni"} & PROCESSOR:
        DRIVERS += [Driver("loops-memory-vnni", "address,undefined", MEMORY, options=("-mavxvnni", f"-B{EVEX}/"))]


def run(command: list[str], **environment: str) -> None:
    print("+", shlex.join(command), flush=True)
    if subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode:
        sys.exit(f"test-sanitizers: failed: {shlex.join(command)}")


def expect(report: str, command: list[str], **environment: str) -> None:
    """Runs the command, which has to fail with this report."""
    answer = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if answer.returncode == 0 or report not in answer.stderr:
        sys.exit(f"{answer.stderr}\ntest-sanitizers: no '{report}' from {shlex.join(command)}")
    print(f"  {report!r}, as it has to be, from {shlex.join(command[-2:])}", flush=True)


def fixed_addresses() -> list[str]:
    """GCC's sanitizer runtimes fail at random on kernels that randomise addresses more than they expect."""
    prefix = ["setarch", platform.machine(), "--addr-no-randomize"]
    works = shutil.which("setarch") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if works else []


# ---- the loops


def cmake_list(name: str) -> list[str]:
    """The compiler options that CMakeLists.txt calls `name`."""
    return re.search(rf"set\({name} (.*)\)", (ROOT / "CMakeLists.txt").read_text())[1].split()


def build(driver: Driver) -> None:
    target = cmake_list("FLAGS_avx2") if X86 else []  # for wide vectors too
    sources = [str(path.relative_to(ROOT)) for path in (HERE / "loops.cpp", *sorted(ROOT.glob("csrc/cpu/loops/*.cpp")))]
    options = [f"-DFB_ISA={driver.isa}", *driver.options, f"-fsanitize={driver.sanitizer}", "-Wno-psabi", "-Icsrc"]
    # The last -O counts.
    run([CXX, *cmake_list("LOOP_FLAGS"), *target, *FLAGS, *options, *sources, "-pthread", "-o", driver.program])


def write_assembler() -> None:
    """Writes the `as` that `-B` names. If the processor has VNNI only in AVX-512's encoding, it assembles that one."""
    EVEX.mkdir(parents=True, exist_ok=True)
    without = "" if "avx_vnni" in PROCESSOR else 'for file; do :; done; sed -i "s/{vex} vpdp/vpdp/" "$file"\n'
    (EVEX / "as").write_text(f'#!/bin/sh\n{without}exec as "$@"\n')
    (EVEX / "as").chmod(0o755)


def build_drivers() -> None:
    write_assembler()
    with ThreadPoolExecutor(int(JOBS)) as pool:
        list(pool.map(build, reversed(DRIVERS)))  # the longest first


def self_test(prefix: list[str]) -> None:
    for driver in DRIVERS:
        for fault, report in driver.faults.items():
            expect(report, [*prefix, driver.program, fault], **OPTIONS)


# ---- the whole of _C


def test_package(package: Path, cuda: Path | None, prefix: list[str]) -> None:
    python = [*prefix, sys.executable, str(HERE / "in_python.py"), str(package)]
    environment = OPTIONS | {"PYTHONPATH": str(package), "LD_PRELOAD": preload()}
    if cuda:
        environment["FB_CUDA_ON_CPU_FOLDER"] = str(cuda)
    for backend in ("cpu", "cuda") if cuda else ("cpu",):
        expect("AddressSanitizer: heap-buffer-overflow", [*python, "--overread", backend], **environment)
        if backend == "cuda":
            for fault, report in CUDA_MEMORY.items():
                expect(report, [*python, "--fault", fault], **environment)
        selection = SELECTION.format(ON[backend])
        run([*python, "-q", "-p", "no:cacheprovider", "-k", selection, *TESTS], **environment)


def preload() -> str:
    """LD_PRELOAD for a Python without sanitizers: their runtimes, and libstdc++, whose exceptions they intercept."""
    libraries = ("libasan.so", "libubsan.so", "libstdc++.so")
    return " ".join(subprocess.check_output([CXX, f"-print-file-name={name}"], text=True).strip() for name in libraries)


# ---- the CUDA kernels on the CPU


def build_cuda_kernels(sanitizer: str) -> Path | None:
    tree = OUT / f"cuda-{sanitizer.replace(',', '-')}"
    print(f"+ building {tree}", flush=True)
    if reason := cuda_on_cpu.build(tree, CMAKE_CXX_COMPILER=CXX, FASTBERT_SANITIZE=sanitizer):
        print(f"  left out: {reason}")
        return None
    return tree


def test_cuda_threads(prefix: list[str]) -> None:
    tree = build_cuda_kernels("thread")
    if tree is None:
        return
    program = [*prefix, str(tree / "tests" / "cuda_on_cpu" / "cuda_on_cpu")]
    for fault in CUDA_RACES:
        expect(RACES["race"], [*program, fault], **OPTIONS)
    run(program, **OPTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--self-test", action="store_true", help="only make the wrong calls")
    only_self_test, start = parser.parse_args().self_test, time.monotonic()
    prefix = fixed_addresses()
    build_drivers()
    self_test(prefix)
    if not only_self_test:
        for driver in DRIVERS:
            run([*prefix, driver.program], **OPTIONS)
        test_cuda_threads(prefix)
        package = build_copy(OUT, CMAKE_CXX_COMPILER=CXX, FASTBERT_SANITIZE="address,undefined")
        test_package(package, build_cuda_kernels("address,undefined"), prefix)
    what = "planted faults reported" if only_self_test else "no fault but the planted ones"
    print(f"test-sanitizers: {what}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
