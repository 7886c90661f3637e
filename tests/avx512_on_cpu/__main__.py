"""make test-avx512: fastbert with its loops for AVX-512 and AMX compiled for AVX2, on the tests of ops and of models.

`test_each_instruction_set_passes` is slow because it runs the tests of the ops with each set in turn.
"""

import os
import shutil
import subprocess
import sys

import cuda_on_cpu
from build_copy import ROOT, build_copy

TESTS = [
    *("tests/ops/test_tiles.py", "tests/ops/test_cpu.py"),
    *(f"tests/models/test_{name}.py" for name in ("at_once", "prepare", "model", "family")),
]


def main() -> None:
    package = build_copy(ROOT / "build" / "avx512_on_cpu", FASTBERT_AVX512_ON_CPU="ON")
    for name in ("tests", "benchmarks", "csrc"):
        shutil.copytree(ROOT / name, package / name)
    shutil.copy(ROOT / "pyproject.toml", package)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    environment = os.environ | {"FB_CUDA_ON_CPU_FOLDER": str(cuda_on_cpu.folder())}
    sys.exit(subprocess.run(command, cwd=package, env=environment).returncode)


if __name__ == "__main__":
    main()
