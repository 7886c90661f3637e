"""Compiles every Triton kernel, in every configuration of its tables, for three architectures, without a GPU.

    python -m benchmarks.gpu.triton_report [--arch 80 90 100] [--only TEXT ...] [--check]

The package's own functions run on meta tensors for a list of calls, and what they would launch is compiled as Triton's
JIT compiler would. Writes build/triton_report.md and, in short, docs/triton_report.md; with --only (parts of a line's
beginning) prints such lines instead; with --check compares with the short one. Exit status 1: a configuration does not
compile, spills registers, or needs more shared memory than there is; or --check found a difference.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu import compiled, triton_calls
from benchmarks.gpu.compiled import Compiled
from fastbert.triton import common

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may have
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "u1",
}  # fmt: skip
INSTRUCTIONS = {
    "tcgen05": r"\btcgen05\.mma", "wgmma": r"\bwgmma\.mma_async", "mma.sync": r"\bmma\.sync",
    "TMA": r"\bcp\.async\.bulk\.tensor", "cp.async": r"\bcp\.async\.c[ag]\b",
}  # fmt: skip
INDEPENDENT = ("kernel", "GPU", "variants", "instructions")  # the columns that are the same in every version of Triton


# ---- what to compile


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: what triton.compile takes, in a form that can be compared."""

    kernel: object
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    aligned: tuple[int, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    def __str__(self) -> str:
        return f"{self.name} {self.types} {self.constexprs}"

    @property
    def types(self) -> str:
        """Of the tensors, in the order of the arguments, and how many have each."""
        found = Counter(re.findall(r"(?:\*|tensordesc<)(\w+)", " ".join(dict(self.signature).values())))
        return ", ".join(f"{count} {name}" for name, count in found.items())

    @property
    def constexprs(self) -> str:
        declared = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        return ", ".join(f"{name}={value}" for name, value in self.constants if name in declared)


def variants(architecture: int) -> list[Variant]:
    """What the calls of triton_calls launch, each variant once, in order."""
    found: dict[Variant, None] = {}

    def record(kernel, grid, args, config, constants):
        found.setdefault(_specialised(kernel, args, config, constants))

    with common.recorded(architecture, record):
        triton_calls.run()
    return list(found)


def _specialised(kernel, args: tuple, config: common.Config, constants: dict) -> Variant:
    values = dict(zip(kernel.arg_names, args, strict=False)) | dict(config.tiles) | constants
    types, fixed, aligned = {}, {}, []
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        types[parameter.name] = "constexpr" if parameter.is_constexpr else _type(value, parameter.do_not_specialize)
        if types[parameter.name] == "constexpr":
            fixed[parameter.name] = value
        elif not parameter.do_not_specialize and _is_aligned(value):
            aligned.append(index)
    return Variant(kernel, tuple(types.items()), tuple(fixed.items()), tuple(aligned), tuple(config.options.items()))


def _type(value, do_not_specialize: bool) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if value is None or (type(value) is int and value == 1 and not do_not_specialize):
        return "constexpr"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return type(number) is int and number % 16 == 0


# ---- compiling


def compile(variant: Variant, architecture: int) -> Compiled:
    options = dict(variant.options)
    launch = f"{options['num_warps']} warps, {options['num_stages']} stages"
    start = (variant.name, f"{variant.types} {variant.constexprs}", launch)
    constants = {(variant.kernel.arg_names.index(name),): value for name, value in variant.constants}
    hints = {(index,): [["tt.divisibility", 16]] for index in variant.aligned}
    try:
        source = ASTSource(variant.kernel, dict(variant.signature), constants, hints)
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        registers, spilled = assembled(binary.asm["ptx"], architecture)
    except Exception as error:
        return Compiled(*start, problem=f"does not compile: {_reason(error)}")
    shared = binary.metadata.shared
    used = {name: len(re.findall(pattern, binary.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()}
    problem = f"spills {spilled} bytes" if spilled else ""
    if shared > SHARED[architecture]:
        problem = f"needs {shared} bytes of shared memory, of {SHARED[architecture]}"
    return Compiled(*start, registers, spilled, shared, used, problem)


def _reason(error: BaseException) -> str:
    """What Triton says of the innermost of its nested errors."""
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
spilled and shared are bytes, of shared memory at most {SHARED[80]} on sm_80 and {SHARED[90]} from sm_90 on: the most of
all variants of a kernel, which `build/triton_report.md` lists. TMA is Hopper's engine for copies of tiles.
"""


def main() -> int:
    return compiled.main("triton_report", __doc__, list(SHARED), compile_all, head, INDEPENDENT)


if __name__ == "__main__":
    sys.exit(main())
