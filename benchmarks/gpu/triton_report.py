"""Compiles every Triton kernel, in every configuration of its tables, for three architectures, without a GPU.

    python -m benchmarks.gpu.triton_report [--arch 80 90 100] [--only TEXT ...] [--check]

The package's own functions run on meta tensors for a list of calls, and what they would launch is compiled as Triton's
JIT compiler would. Writes build/triton_report.md and a short docs/triton_report.md. With --only (parts of a line's
beginning) it prints such lines instead; with --check it compares with the short file. Exit status 1: a configuration
does not compile, spills registers, or needs more shared memory than there is; or --check found a difference.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

from benchmarks.gpu import compiled, triton_calls
from benchmarks.gpu.compiled import Compiled
from fastbert.triton import common

# Bytes that one program may have: of sm_80's configurations as many as sm_86 and sm_89 have, which run them too.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
INSTRUCTIONS = {
    "tcgen05": r"\btcgen05\.mma", "wgmma": r"\bwgmma\.mma_async", "mma.sync": r"\bmma\.sync",
    "TMA": r"\bcp\.async\.bulk\.tensor", "cp.async": r"\bcp\.async\.c[ag]\b",
}  # fmt: skip
INDEPENDENT = ("kernel", "GPU", "variants", "instructions")  # the columns that are the same in every version of Triton


# ---- what to compile


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as requested by Triton's JIT compiler. key: the JIT compiler's own key."""

    kernel: JITFunction
    key: str
    signature: Mapping[str, str] = field(compare=False)
    constants: Mapping[tuple, object] = field(compare=False)  # by the place of the argument
    hints: Mapping[tuple, list] = field(compare=False)  # arguments that are multiples of 16
    options: Mapping[str, int] = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    def __str__(self) -> str:
        return f"{self.name} {self.types} {self.constexprs}"

    @property
    def types(self) -> str:
        """The tensors' element types, in the order of the arguments, with the number of tensors of each."""
        found = Counter(re.findall(r"(?:\*|tensordesc<)(\w+)", " ".join(self.signature.values())))
        return ", ".join(f"{count} {name}" for name, count in found.items())

    @property
    def constexprs(self) -> str:
        declared = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        names = ((self.kernel.arg_names[place[0]], value) for place, value in self.constants.items())
        return ", ".join(f"{name}={value}" for name, value in names if name in declared)


class NoGpu:
    """Stands in for Triton's driver, with all that the JIT compiler asks a driver for before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return -self.architecture  # the compiler caches by device: not a real one's number

    def get_current_stream(self, device: int) -> int:
        return 0


def variants(architecture: int, calls: Callable[[], object] = triton_calls.run) -> list[Variant]:
    """The variants that the calls launch, each once, in order. Their keys in Triton's cache are those of a launch."""
    found: dict[Variant, None] = {}

    def record(kernel, grid, args, config, constants):
        def note(*, fn, compile, **rest):
            hints = compile["configs"][0]
            options = config.options
            new = Variant(kernel, str(compile["key"]), compile["signature"], compile["constants"], hints, options)
            found.setdefault(new)
            return True  # tells Triton not to compile it

        triton.knobs.runtime.jit_cache_hook = note
        kernel.run(*args, grid=tuple(grid), warmup=True, **config.tiles, **constants, **config.options)

    before = driver._active  # not reset_active(), which asks for a GPU
    driver.set_active(NoGpu(architecture))
    try:
        with common.recorded(architecture, record):
            calls()
    finally:
        driver.set_active(before)
        triton.knobs.runtime.jit_cache_hook = None
    return list(found)


# ---- compiling


def compile(variant: Variant, architecture: int) -> Compiled:
    options = variant.options
    launch = f"{options['num_warps']} warps, {options['num_stages']} stages"
    start = (variant.name, f"{variant.types} {variant.constexprs}", launch)
    try:
        source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.hints)
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        registers, spilled = assembled(binary.asm["ptx"], architecture)
    except Exception as error:
        return Compiled(*start, problem=f"does not compile: {_reason(error)}")
    shared = binary.metadata.shared
    used = {name: len(re.findall(pattern, binary.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()}
    problem = f"spills {spilled} bytes" if spilled else ""
    most = SHARED[max(known for known in SHARED if known <= architecture)]
    if shared > most:
        problem = f"needs {shared} bytes of shared memory, of {most}"
    return Compiled(*start, registers, spilled, shared, used, problem)


def _reason(error: BaseException) -> str:
    """The message of the innermost of Triton's nested errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def assembled(ptx: str, architecture: int) -> tuple[int, int]:
    """(registers, bytes spilled) by the assembler that Triton itself uses for the architecture."""
    tools = [triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell]  # for some versions the first is too old
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for tool in tools[:: -1 if architecture >= 100 else 1]:
            command = [tool.path, "-v", "-lineinfo", f"--gpu-name={target}", file.name, "-o", os.devnull]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0:
                return _used(result.stderr)
    raise RuntimeError(result.stderr)


def _used(log: str) -> tuple[int, int]:
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return int(re.search(r"Used (\d+) registers", log).group(1)), max(map(int, spills), default=0)


def compile_all(gpus: Sequence[int], only: Sequence[str]) -> dict[int, list[Compiled]]:
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: there is nothing to compile")
    found = {}
    for gpu in gpus:
        wanted = [v for v in variants(gpu) if not only or any(part in str(v) for part in only)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            done = pool.map(compile, wanted, [gpu] * len(wanted))
            found[gpu] = list({str(variant.cells): variant for variant in done}.values())
    return found


def head() -> str:
    return f"""# What the Triton kernels compile to

Compiler: Triton {triton.__version__}. Written by `make compile-report`, which needs no GPU: every kernel in every
configuration of its tables, for calls of BERT's shapes (`benchmarks/gpu/triton_calls.py`). Registers are a thread's;
spilled and shared are bytes, of shared memory at most {SHARED[90]} on sm_90 and sm_100, and {SHARED[80]} on sm_120,
sm_86 and sm_89 (these two run what is compiled for sm_80): the most of all variants of a kernel, which
`build/triton_report.md` lists. TMA is Hopper's engine for copies of tiles.
"""


def main() -> int:
    return compiled.main("triton_report", __doc__, list(SHARED), compile_all, head, INDEPENDENT)


if __name__ == "__main__":
    sys.exit(main())
