"""The CUDA kernels on the CPU: backend "cuda" for CPU tensors, where there is no GPU. See docs/cuda_on_cpu.md."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from fastbert import backends
from fastbert.ops import op

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "fastbert_cuda_on_cpu"
BUILT = Path("tests", "cuda_on_cpu", "libcuda_on_cpu.so")  # in the build folder
ORDERS = ("forward", "reverse", "random:1")


def build(folder: Path, **variables: str) -> str | None:
    """Compiles what has changed. Returns why that is not possible here, or None; raises if the compiler fails."""
    # The environment's tools first, whether it is activated or not: another ninja would compile everything again.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if not cmake or not ninja:
        return "running CUDA kernels on the CPU takes cmake and ninja"
    if not shutil.which("nvcc", path=path) and "CUDA_HOME" not in os.environ:
        return "running CUDA kernels on the CPU takes the headers of a CUDA toolkit (nvcc was not found)"
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "TORCH_DIR": str(Path(torch.__file__).parent),
        "FASTBERT_CUDA_ON_CPU": "ON",
    } | variables
    if "CUDA_HOME" in os.environ:
        variables["CUDAToolkit_ROOT"] = os.environ["CUDA_HOME"]
    configure = [cmake, f"-S{ROOT}", f"-B{folder}", "-GNinja", *(f"-D{k}={v}" for k, v in variables.items())]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        for command in (configure, [cmake, "--build", str(folder), "--parallel", jobs]):
            answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if answer.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{answer.stdout[-4000:]}")
    return None


def folder() -> Path:
    """The build folder. FB_CUDA_ON_CPU_FOLDER names one where the library has been built already."""
    return Path(os.environ.get("FB_CUDA_ON_CPU_FOLDER", ROOT / "build" / "cuda_on_cpu"))


@cache
def problem() -> str | None:
    """Builds and loads the library. Returns why the kernels cannot run here, or None."""
    if "FB_CUDA_ON_CPU_FOLDER" not in os.environ and (reason := build(folder())):
        return reason
    torch.ops.load_library(folder() / BUILT)
    return None


@cache
def library() -> ctypes.CDLL:
    """The C functions of cuda_on_cpu.cpp, instructions.cu and faults.cu."""
    if reason := problem():
        raise RuntimeError(reason)
    return ctypes.CDLL(str(folder() / BUILT))


@cache
def _define() -> torch.library.Library:
    definitions = torch.library.Library(NAMESPACE, "FRAGMENT")
    for primitive in op.PRIMITIVES.values():
        primitive.define(NAMESPACE, definitions)
    return definitions


def operator(name: str) -> Callable:
    """The kernels' operator for CPU tensors, also where backend "cuda" means a GPU."""
    _define()
    library()
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_BEFORE = (backends.SERVES["cuda"], backends._PROBLEMS["cuda"], op.NAMESPACE["cuda"])


def _use(serves: tuple[str, ...], problem, namespace: str) -> None:
    backends.SERVES["cuda"], backends._PROBLEMS["cuda"], op.NAMESPACE["cuda"] = serves, problem, namespace
    backends.why_not.cache_clear()


def install() -> None:
    """Makes backend "cuda" run on CPU tensors. The library is built and loaded on first use."""
    _define()
    _use(("cpu",), problem, NAMESPACE)


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """Within this block "cuda" needs a GPU, as it does for users."""
    now = (backends.SERVES["cuda"], backends._PROBLEMS["cuda"], op.NAMESPACE["cuda"])
    _use(*_BEFORE)
    try:
        yield
    finally:
        _use(*now)


@contextlib.contextmanager
def thread_order(order: str) -> Iterator[None]:
    """The order in which threads and blocks run: "forward", "reverse" or "random:SEED"."""
    set_order = library().cuda_on_cpu_set_order
    set_order(order.encode())
    try:
        yield
    finally:
        set_order(os.environ.get("FB_THREAD_ORDER", "forward").encode())


@contextlib.contextmanager
def shared_memory(kibibytes: int) -> Iterator[None]:
    """Within this `with`, a thread block can use this many KiB: 227 on sm_90, 163 on sm_80, 99 on sm_86, 89 and 120."""
    library().cuda_on_cpu_set_shared_memory(kibibytes << 10)
    try:
        yield
    finally:
        library().cuda_on_cpu_set_shared_memory(227 << 10)


@contextlib.contextmanager
def _architecture(major: int, kibibytes: int) -> Iterator[None]:
    library().cuda_on_cpu_set_architecture(major)
    try:
        with shared_memory(kibibytes):
            yield
    finally:
        library().cuda_on_cpu_set_architecture(9)


def turing() -> contextlib.AbstractContextManager[None]:
    """Within this `with`, the device is an sm_75: 64 KiB per thread block, no cp.async, fp16 products half as deep."""
    return _architecture(7, 64)


def ampere(kibibytes: int = 163) -> contextlib.AbstractContextManager[None]:
    """Within this `with`, the device is an sm_80, or, with 99 KiB per thread block, an sm_86: no warpgroup products."""
    return _architecture(8, kibibytes)


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Within this `with`, the device has this many multiprocessors instead of 3."""
    library().cuda_on_cpu_set_multiprocessors(count)
    try:
        yield
    finally:
        library().cuda_on_cpu_set_multiprocessors(3)


@contextlib.contextmanager
def overlap() -> Iterator[None]:
    """Within this `with`, threads may write to the same global addresses, as they do for invalid inputs."""
    if backends._PROBLEMS["cuda"] is not problem or problem():
        yield
        return
    library().cuda_on_cpu_allow_overlap(True)
    try:
        yield
    finally:
        library().cuda_on_cpu_allow_overlap(False)
