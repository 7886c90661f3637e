"""Fixtures: NaN in uninitialised memory, one seed, and every backend in turn."""

import ctypes
import gc
import os
from dataclasses import dataclass

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test uses the network

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the workers share the CPU

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels run on the CPU

import cuda_on_cpu
import triton_interpreter

import fastbert
from fastbert import backends

if not torch.cuda.is_available():
    cuda_on_cpu.install()
    triton_interpreter.install()

if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
    mallopt(-6, 1)  # M_PERTURB: fills allocated memory, also that of the extension's tensors, which torch does not fill


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items):
    """Marks tests with `slow_on(*backends)` as `slow` for these backends; those of GPUs only where the CPU runs them.

    The slow tests of tests/package come first: they run whole pages and trainings for minutes each, and at the end one
    worker would be busy alone.
    """
    items.sort(key=lambda item: not ("package" in item.path.parts and item.get_closest_marker("slow")))
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if backend in ("triton", "cuda") and torch.cuda.is_available():
            continue
        if any(backend in mark.args for mark in item.iter_markers("slow_on")):
            item.add_marker("slow")


def pytest_collection_finish():
    """Exempts what was imported from garbage collection: a full collection would walk over millions of objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or Triton's bindings report at the end that their functions leaked


@pytest.fixture(autouse=True)
def strict():
    """Unwritten memory is NaN, nondeterministic operators are errors, and random numbers are the same in each run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(trylast=True)  # after the plugins that print the report, or send it to the process that does
def pytest_runtest_logreport(report):
    """Ends the process after a failure that made the GPU unusable: all later tests would fail for that alone.

    After an illegal access, for example, every CUDA call fails until the process ends. pytest-xdist replaces a worker
    that is gone, and lists its last test once more, as crashed.
    """
    if not report.failed or not (problem := gpu_problem()):
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)  # an orderly exit would use the GPU
    pytest.exit(f"the GPU was lost in {report.nodeid}: {problem}")


def gpu_problem() -> str | None:
    """The error that the GPU reports for earlier work, if this process has used one."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@dataclass
class Run:
    """One backend of one op: its name and the device to test it on."""

    name: str
    op: str
    device: str
    skipped: bool = False

    def why_not(self, dtype: torch.dtype, backward: bool) -> str | None:
        return backends.why_not(self.name, self.op, self.device, dtype, backward)

    def require(self, dtype: torch.dtype, backward: bool = False) -> None:
        if reason := self.why_not(dtype, backward):
            self.skip(reason)

    def require_emulation(self) -> None:
        if self.name != "cuda" or self.device != "cpu":
            self.skip("for CUDA kernels on the CPU")

    @property
    def rounds_fma_twice(self) -> bool:
        """Whether a fused multiply-add is rounded twice: Triton's interpreter does that, no device does."""
        return self.name == "triton" and self.device == "cpu"

    def skip(self, reason: str) -> None:
        self.skipped = True
        pytest.skip(f"{self.name}: {reason}")


@pytest.fixture(params=backends.BACKENDS)
def backend(request):
    """Forces each backend in turn for the op of the test class, and asserts that it, and nothing else, ran.

    The class has a `dtype` if the op does not take float32.
    """
    op = request.cls.op
    device = "cuda" if torch.cuda.is_available() and request.param != "cpu" else "cpu"
    run = Run(request.param, op, device)
    run.require(getattr(request.cls, "dtype", torch.float32))
    before = backends.calls()
    with fastbert.backend(request.param):
        yield run
    ran = {name for (primitive, name), n in backends.calls().items() if n > before.get((primitive, name), 0)}
    assert run.skipped or ran == {request.param}, f"expected only {request.param} to run, but {ran or 'nothing'} did"


@pytest.fixture
def accelerate():
    """Hugging Face's accelerate as in a new process: it keeps the precision of the first Accelerator or Trainer."""
    library = pytest.importorskip("accelerate", reason="tests Hugging Face's accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
