"""Tests with a sanitized `_C`; run.py starts this with the sanitizers' runtimes preloaded.

python in_python.py FOLDER [pytest arguments]     the tests, on the package in FOLDER
python in_python.py FOLDER --overread BACKEND     a wrong call, which AddressSanitizer has to report
python in_python.py FOLDER --fault NAME           a kernel of tests/cuda_on_cpu/faults.cu, likewise
"""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cuda_on_cpu

import fastbert
from fastbert import backends


def is_sanitized(folder: str) -> None:
    """Asserts that fastbert comes from `folder`. Later changes of sys.path by pytest come after the import."""
    assert Path(fastbert.__file__).is_relative_to(Path(folder).resolve()), f"{fastbert.__file__} is not in {folder}"
    assert backends.EXTENSION, backends.EXTENSION_PROBLEM


def overread(backend: str) -> None:
    """Calls bias_gelu on a tensor of 17 elements in memory for 16."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    elements = (ctypes.c_float * 17).from_address(malloc(ctypes.c_size_t(16 * 4)))
    with fastbert.backend(backend):
        fastbert.ops.bias_gelu(torch.frombuffer(elements, dtype=torch.float32), torch.zeros(17))


def fault(name: str) -> None:
    memory = torch.zeros(1024)
    cuda_on_cpu.library().run_fault(name.encode(), ctypes.c_void_p(memory.data_ptr()))


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    is_sanitized(folder)
    match arguments:
        case ["--overread", backend]:
            cuda_on_cpu.install()
            overread(backend)
        case ["--fault", name]:
            fault(name)
        case _:
            sys.exit(pytest.main(arguments))
