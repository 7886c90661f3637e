"""The package with a sanitized `_C`, in an interpreter that run.py starts with the sanitizers' runtimes preloaded.

python in_python.py FOLDER [pytest arguments]   the tests, on the package in FOLDER
python in_python.py FOLDER --overread           a wrong call, which AddressSanitizer has to report
"""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert import backends


def is_sanitized(folder: str) -> None:
    """pytest may put the source tree first on sys.path, but fastbert is imported already."""
    assert Path(fastbert.__file__).is_relative_to(Path(folder).resolve()), f"{fastbert.__file__} is not in {folder}"
    assert backends.EXTENSION, backends.EXTENSION_PROBLEM


def overread() -> None:
    """A tensor of 17 elements in memory for 16."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    elements = (ctypes.c_float * 17).from_address(malloc(ctypes.c_size_t(16 * 4)))
    with fastbert.backend("cpu"):
        fastbert.ops.bias_gelu(torch.frombuffer(elements, dtype=torch.float32), torch.zeros(17))


if __name__ == "__main__":
    is_sanitized(sys.argv[1])
    sys.exit(overread() if sys.argv[2:] == ["--overread"] else pytest.main(sys.argv[2:]))
