"""A copy of fastbert whose _C is compiled with other options of CMakeLists.txt."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
JOBS = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))


def build_copy(folder: Path, **variables: str) -> Path:
    """Compiles in folder / "cmake" what has changed; returns folder / "package", which has the copy. Without CUDA."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cmake, ninja = (shutil.which(tool, path=path) or sys.exit(f"{tool} is needed") for tool in ("cmake", "ninja"))
    variables = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CUDA_COMPILER": "NOTFOUND",
        "Python_EXECUTABLE": sys.executable,
        "TORCH_VERSION": torch.__version__,
        "TORCH_DIR": str(Path(torch.__file__).parent),
    } | variables
    tree, package = folder / "cmake", folder / "package"
    options = [f"-D{name}={value}" for name, value in variables.items()]
    subprocess.run([cmake, f"-S{ROOT}", f"-B{tree}", "-GNinja", *options], check=True)
    subprocess.run([cmake, "--build", tree, "--parallel", JOBS], check=True)
    shutil.rmtree(package, ignore_errors=True)
    without = shutil.ignore_patterns("_C.*", "_build.py", "__pycache__")
    shutil.copytree(ROOT / "fastbert", package / "fastbert", ignore=without)
    subprocess.run([cmake, "--install", tree, "--prefix", package / "fastbert"], check=True)
    return package
