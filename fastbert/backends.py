"""Which kernel runs: this is the only file that decides.

A backend implements ops: `reference` (plain PyTorch, any device), `cpu` (C++), `triton`, `cuda` (C++/CUDA), and for
attention alone `varlen` (PyTorch's varlen_attn). `KERNELS` says what each backend can do, `order` which one is
preferred on which device, `why_not` why one cannot run. The first backend in the order that can run is used; `with
backend("cpu"):` allows only that one and raises its reason if it cannot run, `with backend(attention="cuda"):` does so
for one op.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastbert.warn import warn

BACKENDS = ("reference", "cpu", "triton", "cuda")
LIBRARIES = ("varlen",)  # other people's kernels, each for one op; they run only when asked for by name
REBUILD = "`pip install --no-cache-dir --force-reinstall --no-deps .` in fastbert's source"
OLDEST_TORCH = (2, 11)  # that can load `_C`, whichever torch built it (docs/build.md)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS64 = (*_FLOATS, torch.float64)
_HALF = (torch.bfloat16, torch.float16)
_ANY = (*_FLOATS64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_ON_CPU = "benchmarks/results/cpu/ops.jsonl"
_PREPARED = "benchmarks/results/cpu/prepare.jsonl"
_ON_GPU = "benchmarks/results/h200/ops.jsonl"


@dataclass(frozen=True)
class Kernel:
    """What one backend's implementation of one op can do, and the measurement behind its place in the table.

    dtypes: of the activations. largest: the largest row length (for attention: head size), None for any; sizes must be
    multiples of `multiple`. on_turing: replaces `largest` if PyTorch sees a GPU of sm_75, where a thread block has 64
    KiB of shared memory. dropout: whether it drops the elements that `fastbert.random` says. repeatable: whether its
    backward gives the same bits each time. measured: the file with that measurement. forced_only: runs only if its
    backend is forced, never by preference. leads_on: GPU generations (major compute capability) on which it comes
    before the kernels above it. since: the oldest compute capability that it runs on.
    """

    dtypes: tuple[torch.dtype, ...]
    largest: int | None = None
    on_turing: int | None = None
    multiple: int = 1
    backward: bool = True
    dropout: bool = True
    repeatable: bool = True
    measured: str = "not yet measured"
    forced_only: bool = False
    leads_on: tuple[int, ...] = ()
    since: tuple[int, int] = (0, 0)


# GPU generations whose tensor cores reach full speed only through warpgroup instructions (wgmma, tcgen05). Of our CUDA
# kernels only attention uses Hopper's, for head sizes 40 to 64 in 16 bits. For other head sizes CUDA's attention is
# preferred on Hopper because a layer is then one operator; Triton's has not been measured against it.
_WARPGROUPS = (9, 10)
_BLACKWELL = (10,)

# op -> backend -> kernel, the best first: of the backends that serve the tensor's device, the first that can run does.
# Plain PyTorch (`reference`) always comes last. To add an op or change the order, change this table only. On GPUs, CUDA
# comes before Triton where both do the same work, because calling it costs the host less.
KERNELS: dict[str, dict[str, Kernel]] = {
    "layer_norm": {
        "cpu": Kernel(_FLOATS64, measured=_ON_CPU),
        "cuda": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
    },
    "add_layer_norm": {
        "cpu": Kernel(_FLOATS64, measured=_ON_CPU),
        "cuda": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
    },
    "bias_gelu": {
        "cpu": Kernel(_FLOATS64, measured=_ON_CPU),
        "cuda": Kernel(_FLOATS, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, measured=_ON_GPU),
    },
    "attention": {
        "cpu": Kernel(_FLOATS64, measured="benchmarks/results/cpu/attention.jsonl"),
        "cuda": Kernel(_FLOATS, largest=128, on_turing=127, measured="benchmarks/results/h200/attention_tiles.txt"),
        "triton": Kernel(_FLOATS, largest=128, leads_on=_BLACKWELL, measured=_ON_GPU),
        "varlen": Kernel(_HALF, largest=256, multiple=8, dropout=False, repeatable=False, forced_only=True),
    },
    "relative_attention": {
        "cpu": Kernel(_FLOATS64, measured="benchmarks/results/cpu/relative.jsonl"),
        "triton": Kernel(_FLOATS, largest=128),
        "cuda": Kernel(_FLOATS, largest=128, on_turing=85),  # FMA instructions, no tensor cores
    },
    "embedding": {
        "cpu": Kernel(_FLOATS64, measured=_ON_CPU),
        "cuda": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, largest=8192, measured=_ON_GPU),
    },
    "dense_gelu": {
        "cpu": Kernel(_FLOATS64, measured=_ON_CPU),
        "cuda": Kernel(_FLOATS, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, leads_on=_WARPGROUPS, measured=_ON_GPU),
    },
    "linear": {"cpu": Kernel(_FLOATS64, measured=_ON_CPU), "triton": Kernel(_FLOATS, forced_only=True)},
    "cross_entropy": {
        "cpu": Kernel(_FLOATS64, measured="benchmarks/results/cpu/cross_entropy.jsonl"),
        "cuda": Kernel(_FLOATS, measured=_ON_GPU),
        "triton": Kernel(_FLOATS, measured=_ON_GPU),
    },
    "linear_max": {
        "cpu": Kernel(_FLOATS64, measured="benchmarks/results/cpu/linear_max.jsonl"),
        "triton": Kernel(_FLOATS, measured=_ON_GPU),
    },
    "encoder_layer": {
        "cpu": Kernel(_FLOATS64, measured="benchmarks/results/cpu/short.jsonl"),
        "cuda": Kernel(_FLOATS, largest=8192, measured="benchmarks/results/h200/layer_in_one_call.txt"),
    },
    "packed_linear": {"cpu": Kernel(_FLOATS, backward=False, measured=_PREPARED)},
    "packed_layer": {"cpu": Kernel(_FLOATS, backward=False, measured=_PREPARED)},
    "scaled_linear": {"cuda": Kernel((torch.bfloat16,), largest=8192, backward=False, since=(9, 0))},
    "padding": {
        "cpu": Kernel(_ANY, measured=_ON_CPU),
        "cuda": Kernel(_ANY, measured=_ON_GPU),
        "triton": Kernel(_ANY, measured=_ON_GPU),
    },
}
OPS = tuple(KERNELS)

# The device types whose tensors a backend takes. Triton also takes CPU tensors if its interpreter is on.
SERVES: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "triton": ("cuda",), "cuda": ("cuda",), "varlen": ("cuda",)}


def _listed(device_type: str, op: str) -> tuple[str, ...]:
    preferred = [name for name, kernel in KERNELS[op].items() if not kernel.forced_only]
    return *(name for name in preferred if device_type in SERVES[name]), "reference"


_ON_TURING = " on sm_75"  # appended to a backend's name: its limit there
_LISTED = {device_type: {op: _listed(device_type, op) for op in OPS} for device_type in ("cpu", "cuda")}
# op -> [(backend, largest size, what sizes are multiples of)]; limits on sm_75 have entries of their own
_LIMITS = {
    op: [(name, k.largest, k.multiple) for name, k in kernels.items() if k.largest]
    + [(name + _ON_TURING, k.on_turing, 1) for name, k in kernels.items() if k.on_turing]
    for op, kernels in KERNELS.items()
}


# ---- what this machine can run


def _load_extension() -> tuple[ModuleType | None, str | None]:
    """The compiled module `_C`, or the reason why it is not loaded."""
    try:
        build = importlib.import_module("fastbert._build")
    except ModuleNotFoundError:
        return None, f"fastbert's C++ kernels are not built in this source tree; {REBUILD} builds them"
    if build.NOT_BUILT is not None:
        return None, f"fastbert's C++ kernels are not built, because {build.NOT_BUILT}; {REBUILD} builds them"
    here = str(torch.__version__)
    if tuple(int(part) for part in here.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return None, f"fastbert's C++ kernels need torch {oldest} or newer, this is {here}; `pip install -U torch`"
    try:
        extension = importlib.import_module("fastbert._C")
    except ImportError as error:
        return None, f"fastbert's C++ kernels do not load ({error}); {REBUILD} builds them anew"
    if not hasattr(extension, "as_before"):
        return None, f"fastbert's C++ kernels are older than this source tree; {REBUILD} builds them anew"
    return extension, None


EXTENSION, EXTENSION_PROBLEM = _load_extension()


def _check_cpu_set(named: str | None) -> None:
    """Raises ValueError if `_C` does not use the instruction set that FASTBERT_CPU_SET names."""
    if not named or build_info().get("cpu_set") == named:
        return
    sets = ", ".join(build_info().get("cpu_sets", ()))
    why = f"it is not one of {sets} that this processor has and ATEN_CPU_CAPABILITY allows"
    raise ValueError(f"FASTBERT_CPU_SET={named}: {EXTENSION_PROBLEM or why}")


def build_info() -> dict[str, object]:
    """How `_C` was built (compiler, instruction sets, CUDA architectures); empty when it is not loaded."""
    return EXTENSION.build_info() if EXTENSION else {}


_check_cpu_set(os.environ.get("FASTBERT_CPU_SET"))


@cache
def _cpu_problem() -> str | None:
    if EXTENSION is None:
        return EXTENSION_PROBLEM
    if not build_info()["cpu_set"]:
        sets = ", ".join(build_info()["cpu_sets"])
        return f"this processor has none of the instruction sets built ({sets}), or ATEN_CPU_CAPABILITY forbids them"
    return None


def cpuinfo(*names: str) -> str:
    """The first value in Linux's /proc/cpuinfo under one of the names; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() in names), "")


@cache
def driver_version() -> int:
    """The newest CUDA version that the NVIDIA driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def cuda_name(version: int) -> str:
    """A CUDA version as CUDA writes it: 12.4 for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _has_binary(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `architecture` ("90", "80-real", "90-virtual", "90a-real") holds binaries for a GPU."""
    number, _, kind = architecture.partition("-")
    major, minor = _version(number)
    later = minor < capability[1] and not number.endswith("a")  # code for sm_100a runs on no other GPU
    return kind != "virtual" and major == capability[0] and (minor == capability[1] or later)


def _has_ptx(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether it holds PTX that a driver compiles for such a GPU.

    PTX for sm_75 does not count for newer generations: it lacks kernels that launchers choose there
    (csrc/cuda/mma.cuh).
    """
    number, _, kind = architecture.partition("-")
    major, minor = _version(number)
    ptx = kind != "real" and not number.endswith(("a", "f")) and (major, minor) <= capability
    return ptx and (major > 7 or capability[0] == 7)


def _version(number: str) -> tuple[int, int]:
    return int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])


NOT_FOR_AMD = "its kernels are for NVIDIA's GPUs, and this PyTorch is built for AMD's (ROCm)"


@cache
def _cuda_problem() -> str | None:
    """Why the CUDA kernels cannot be used.

    A driver runs binaries of any CUDA version with its own major number, but compiles PTX of its own version at most.
    https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    if EXTENSION is None:
        return EXTENSION_PROBLEM
    info = build_info()
    if not info["cuda_architectures"]:
        return "built without CUDA (for a torch without it, with USE_CUDA=0, or without nvcc): install fastbert again"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if torch.version.hip:
        return NOT_FOR_AMD
    major, minor = (int(part) for part in str(info["cuda_version"]).split(".")[:2])
    driver = driver_version()
    if driver // 1000 < major:
        return f"driver: it serves CUDA {cuda_name(driver)}, the kernels were built with {major}.{minor}"
    built = info["cuda_architectures"]
    compiles = driver >= 1000 * major + 10 * minor
    why = f"built for {', '.join(built)}"
    if not compiles:
        why += f" by CUDA {major}.{minor}, whose PTX a driver for CUDA {cuda_name(driver)} does not compile"
    served = lambda gpu: any(_has_binary(one, gpu) or (compiles and _has_ptx(one, gpu)) for one in built)  # noqa: E731
    return _gpu_problem(served, why)


def _gpu_problem(served: Callable[[tuple[int, int]], bool], why: str) -> str | None:
    """Why a backend cannot be used, if it does not serve every GPU that PyTorch sees: one choice holds for all of
    them."""
    count = torch.cuda.device_count()
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        if not served(capability):
            others = "" if count == 1 else "; without it in CUDA_VISIBLE_DEVICES it would do"
            which = "this GPU" if count == 1 else f"GPU {index}"
            return f"{why}, {which} is sm_{capability[0]}{capability[1]}{others}"
    return None


@cache
def _has_turing() -> bool:
    """Whether PyTorch sees a GPU older than sm_80. Initialises CUDA, after which a process cannot fork: so call it for
    tensors on GPUs only."""
    if not torch.cuda.is_available():
        return False
    return any(torch.cuda.get_device_capability(index) < (8, 0) for index in range(torch.cuda.device_count()))


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if _interpreting():
        return _interpreter_problem()
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU (TRITON_INTERPRET=1 runs it on the CPU, for tests)"
    if torch.version.hip:
        return NOT_FOR_AMD
    if problem := _gpu_problem(
        lambda capability: capability >= (8, 0), "its configurations are for GPUs from sm_80 on"
    ):
        return problem
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler (gcc, clang or CC)"
    return None


def _interpreter_problem() -> str | None:
    """Why the interpreter cannot run: before Triton 3.7 it uses one-element arrays as numbers, which NumPy 2.4
    forbids."""
    versions = [importlib.import_module(name).__version__ for name in ("triton", "numpy")]
    triton, numpy = (tuple(int(part) for part in version.split(".")[:2]) for version in versions)
    if triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of Triton {versions[0]} needs a NumPy older than 2.4"
    return None


@cache
def _varlen_problem() -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this PyTorch has no torch.nn.attention.varlen"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if problem := _gpu_problem(lambda capability: capability >= (8, 0), "FlashAttention is for GPUs from sm_80 on"):
        return problem
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without FlashAttention"
    call = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return None if "scale" in inspect.signature(call).parameters else "this PyTorch's varlen_attn takes no scale"


_PROBLEMS = {
    "reference": lambda: None,
    "cpu": _cpu_problem,
    "triton": _triton_problem,
    "cuda": _cuda_problem,
    "varlen": _varlen_problem,
}


@cache
def why_not(
    name: str, op: str, device_type: str, dtype: torch.dtype, backward: bool = False, unfit: bool = False
) -> str | None:
    """The reason why a backend cannot run an op on such an input, or None if it can. unfit: its sizes do not fit."""
    if name == "reference":
        return None
    kernel = KERNELS[op].get(name)
    if kernel is None:
        return f"it has no {op} kernel"
    interpreted = name == "triton" and device_type == "cpu" and _interpreting()
    if device_type not in SERVES[name] and not interpreted:
        return f"it does not serve {device_type} tensors"
    if problem := _PROBLEMS[name]():
        return problem
    if device_type == "cuda" and kernel.since > (0, 0):
        wanted = "its {} kernel is for GPUs from sm_{}{} on".format(op, *kernel.since)
        if problem := _gpu_problem(lambda capability: capability >= kernel.since, wanted):
            return problem
    if dtype not in kernel.dtypes:
        return f"its {op} kernel does not take {dtype}"
    if unfit:
        what = {
            "attention": "head sizes",
            "relative_attention": "head sizes",
            "encoder_layer": "what its attention takes, and rows",
        }.get(op, "rows")
        largest = kernel.on_turing if kernel.on_turing and _has_turing() else kernel.largest
        of = f", multiples of {kernel.multiple}" if kernel.multiple > 1 else ""
        return f"its {op} kernel takes {what} of at most {largest}{of}"
    if name == "triton" and dtype == torch.bfloat16 and _interpreting():
        return "Triton's interpreter is wrong for bfloat16"
    if backward and not kernel.backward:
        return f"its {op} kernel has no backward"
    return None


def _why_not_now(name: str, op: str, backward: bool, drops: bool) -> str | None:
    """The reason why a backend cannot run this one call: dropout, or deterministic algorithms."""
    kernel = KERNELS[op].get(name)
    if kernel is None:
        return None
    if drops and not kernel.dropout:
        return f"its {op} kernel has not our dropout, whose masks are the same everywhere; expected dropout_p = 0"
    if backward and not kernel.repeatable and _deterministic():
        return f"deterministic algorithms are asked for, and its {op} kernel's backward is not known to be repeatable"
    return None


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# ---- the choice


@cache
def order(device_type: str, op: str) -> tuple[str, ...]:
    """The backends for an op on tensors of this device type, the best first. The first GPU decides for all."""
    listed = _LISTED.get(device_type, {}).get(op, ("reference",))
    if device_type != "cuda" or not torch.cuda.is_available():
        return listed
    generation = torch.cuda.get_device_capability(0)[0]
    leads = lambda name: name in KERNELS[op] and generation in KERNELS[op][name].leads_on  # noqa: E731
    return tuple(sorted(listed, key=lambda name: not leads(name)))


Forced = dict[str, str]  # op -> the only backend that may run it


def _forcing(before: Forced, name: str | None, ops: dict[str, str | None], everywhere: bool) -> Forced:
    """What is forced within a block, given what was forced before it. everywhere: `name`, which may be None, applies to
    all ops."""
    if everywhere and name not in (None, *BACKENDS):
        hint = f", or {_only_op(name)}={name!r}" if name in LIBRARIES else ""
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}{hint}")
    for op, its in ops.items():
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; expected one of {', '.join(OPS)}")
        if its not in (None, *BACKENDS, *KERNELS[op]):  # one without a kernel raises when the op runs
            raise ValueError(f"{op} has no backend {its!r}; expected one of reference, {', '.join(KERNELS[op])}")
    forced = before if not everywhere else dict.fromkeys(OPS, name) if name else {}
    return {op: its for op, its in (forced | ops).items() if its}


def _only_op(library: str) -> str:
    return next(op for op, kernels in KERNELS.items() if library in kernels)


def _from_environment(text: str) -> Forced:
    """Parses FASTBERT_BACKEND: a backend, op=backend, or both, separated by commas."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    names = [entry for entry in entries if "=" not in entry]
    ops = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return _forcing({}, ",".join(names) or None, ops, everywhere=bool(names))


_of_process = _from_environment(os.environ.get("FASTBERT_BACKEND", ""))
_here = ContextVar("forced", default=_of_process)  # what is forced in this thread, or in this task of asyncio
_blocks: list[list[Forced]] = []  # the backend(...) blocks that are open in any thread, latest last
_latest = _of_process  # that of the latest block: torch.compile guards on globals, but not on context variables
_lock = threading.Lock()
_calls: Counter[tuple[str, str]] = Counter()
_announced = False
_UNCHANGED = object()


@contextlib.contextmanager
def backend(name: str | None = _UNCHANGED, **ops: str | None) -> Iterator[None]:
    """Within this block, and in this thread or asyncio task, every op runs on one backend, backward passes included.

    name: "reference", "cpu", "triton" or "cuda"; None returns to the order of preference. ops: backends of single ops;
    all other ops stay as they are. `backend(attention="varlen")` computes attention by PyTorch's varlen_attn, which
    runs only if it is forced like this, and leaves the rest of the model unchanged. An op that the backend cannot run
    raises RuntimeError with the reason. Code compiled by `torch.compile` follows the latest block that is open in any
    thread (and is compiled again for it). `FASTBERT_BACKEND` ("cuda", "attention=varlen") sets the same for a whole
    process. Raises ValueError for an unknown name.
    """
    before = _here.get()
    block = [_forcing(before, name, ops, everywhere=name is not _UNCHANGED)]
    _here.set(block[0])
    _set_block(block, is_open=True)
    try:
        yield
    finally:
        _here.set(before)  # not by a token: a generator may be closed in another context than it was opened in
        _set_block(block, is_open=False)


def forced() -> tuple[tuple[str, str], ...]:
    """What `backend` forces here, as pairs (op, backend); `backend(None, **dict(forced()))` forces it again."""
    return tuple(_here.get().items())


def as_forced_here(run: Callable) -> Callable:
    """`run` for other threads, or for later: it follows what is forced here and now. Compiled code needs no such care.

    Gradient checkpointing needs it: on a GPU, autograd computes layers again in a thread of its own.
    """
    return run if torch.compiler.is_compiling() else partial(_run_as_forced, run, _here.get())


def _run_as_forced(run: Callable, forced: Forced, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or _here.get() == forced:
        return run(*args, **kwargs)
    with backend(None, **forced):
        return run(*args, **kwargs)


def forced_apart(whole: str, *ops: str) -> bool:
    """Whether one of these ops is forced to another backend than `whole`, the op that contains them. Then `whole`
    cannot replace them."""
    forced = _forced_now()
    return bool(forced) and any(forced.get(op) not in (None, forced.get(whole)) for op in ops)


def _forced_now() -> Forced:
    return _latest if torch.compiler.is_compiling() else _here.get()


def _set_block(block: list[Forced], is_open: bool) -> None:
    global _latest
    with _lock:
        _blocks[:] = [other for other in _blocks if other is not block] + [block] * is_open
        _latest = _blocks[-1][0] if _blocks else _of_process


def _choose(
    forced: str | None,
    op: str,
    device_type: str,
    dtype: torch.dtype,
    backward: bool,
    unfit: tuple[str, ...],
    drops: bool,
) -> str:
    _announce_missing_extension()
    names = (forced,) if forced else order(device_type, op)
    for name in names:
        reason = why_not(name, op, device_type, dtype, backward, _is_unfit(name, unfit))
        reason = _why_not_now(name, op, backward, drops) if reason is None else reason
        if reason is None:
            return name
    raise RuntimeError(f"backend {forced!r} cannot run {op}: {reason}")


# As torch.compiler.assume_constant_result, which would import torch._dynamo, and with it Triton: 1.6 s.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose(
    op: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    backward: bool,
    size: int = 0,
    head_size: int = 0,
    attention: str = "attention",
    drops: bool = False,
) -> str:
    """The backend that runs this call.

    size: the row length, for attention the head size. head_size, attention: for a whole layer, those of its attention.
    drops: whether the call has dropout. Raises RuntimeError if a forced backend cannot run it.
    """
    forced = _forced_now().get(op)
    return _choose(forced, op, device_type, dtype, backward, _unfit(op, size, head_size, attention), drops)


def _unfit(op: str, size: int, head_size: int, attention: str = "attention") -> tuple[str, ...]:
    """The backends that do not take these sizes. torch.compile traces this, so that it guards on the result and not on
    the sizes."""
    over = [name for name, largest, of in _LIMITS[op] if size > largest or (of > 1 and size % of != 0)]
    if head_size:
        over += [name for name, largest, _ in _LIMITS[attention] if head_size > largest]
    return tuple(over)


def _is_unfit(name: str, unfit: tuple[str, ...]) -> bool:
    return name in unfit or (name + _ON_TURING in unfit and _has_turing())


def find(op: str, device_type: str, dtype: torch.dtype, *, backward: bool, size: int = 0) -> str | None:
    """`choose` for an op that can be replaced by smaller ones: None where no backend but `reference` can run it."""
    return _find(_forced_now().get(op), op, device_type, dtype, backward, _unfit(op, size, 0))


def _find(
    forced: str | None, op: str, device_type: str, dtype: torch.dtype, backward: bool, unfit: tuple[str, ...]
) -> str | None:
    names = (forced,) if forced else order(device_type, op)
    usable = (
        name
        for name in names
        if name != "reference" and why_not(name, op, device_type, dtype, backward, _is_unfit(name, unfit)) is None
    )
    return next(usable, None)


_find._dynamo_marked_constant = True  # type: ignore[attr-defined]


def count(primitive: str, name: str) -> None:
    """Records one run for `explain` and `calls`. Calls inside compiled graphs are not recorded."""
    _calls[primitive, name] += 1


def calls() -> dict[tuple[str, str], int]:
    """How often each (primitive, backend), say ("bias_gelu_fwd", "cpu"), has run in this process.

    Calls inside compiled graphs are not counted.
    """
    return dict(_calls)


def _announce_missing_extension() -> None:
    global _announced
    if EXTENSION is None and not _announced:
        _announced = True
        warn(f"{EXTENSION_PROBLEM}; until then other backends run", RuntimeWarning)


def explain() -> None:
    """Prints op x backend on this machine: usable or why not, the measurement behind the order, and how often each
    ran."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"fastbert on {device_type} tensors (* = preferred; runs forward + backward)")
    for op in OPS:
        for name in (*BACKENDS, *LIBRARIES):
            if name == "reference" or name in KERNELS[op]:
                print(f"  {op:18}{_explain_one(op, name, device_type)}")
    print("backends")
    for name in BACKENDS:
        missing = [op for op in OPS if name != "reference" and name not in KERNELS[op]]
        state = _PROBLEMS[name]() or ("usable" if name != "cpu" else f"usable: {_instructions()}")
        print(f"  {name:10} {state}{'; no kernel for ' + ', '.join(missing) if missing else ''}")
    for name in LIBRARIES:
        print(f"  {name:10} {_PROBLEMS[name]() or 'usable: ' + _flash_attention()}; {_only_op(name)} alone, by name")


def _flash_attention() -> str:
    """The FlashAttention that PyTorch's varlen_attn calls: PyTorch's own, unless another one is activated."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() or "FlashAttention 2"


def _instructions() -> str:
    """The instructions that matrix products use, as the layout of packed weights tells."""
    info = build_info()
    _, at_once = info["packed_layout"]
    bfloat16 = "in pairs" if at_once["bfloat16"] > 1 else "as float32"
    tiles = ", these two in tiles" if info["cpu_set"] == "amx" else ""
    if info["cpu_set"] == "avx512_bf16" and "amx_tile" in cpuinfo("flags").split():
        tiles = "; the processor has AMX, but the system, ATEN_CPU_CAPABILITY or FASTBERT_CPU_SET forbids it"
    return f"{info['cpu_set']}; it multiplies float16 as float32, bfloat16 {bfloat16}, int8 by {at_once['int8']}{tiles}"


# op -> its primitives, forward and backward, where their names are not the op's
_COUNTED = {
    "padding": (["padding_pack"], ["padding_unpack"]),
    "packed_linear": (["packed_linear_fwd", "packed_linear_max_fwd"], []),
    "scaled_linear": (["scaled_rows_fwd", "scaled_layer_norm_fwd"], []),
}


def _explain_one(op: str, name: str, device_type: str) -> str:
    names = order(device_type, op)
    preferred = next(n for n in names if why_not(n, op, device_type, torch.float32) is None)
    directions = _COUNTED.get(op, ([f"{op}_fwd"], [f"{op}_bwd"]))
    runs = " + ".join(str(sum(_calls[primitive, name] for primitive in primitives)) for primitives in directions)
    kernel = KERNELS[op].get(name)
    reason = why_not(name, op, device_type, kernel.dtypes[0] if kernel else torch.float32)
    remarks = [f"unusable: {reason}"] if reason else []
    remarks += ["by name only"] if kernel and kernel.forced_only else []
    remarks += ["forward only"] if kernel and not kernel.backward else []
    remarks += [f"order: {kernel.measured}"] if kernel and name == names[0] else []
    return f"{'*' if name == preferred else ' '}{name:10}{runs:>12}  {'; '.join(remarks)}".rstrip()
