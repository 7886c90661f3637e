"""Builds fastbert._C with CMake against torch's stable ABI: headers of the environment's torch, for 2.11 and later.

FASTBERT_BUILD=0 installs pure Python; FASTBERT_BUILD=1 fails if _C cannot be built; if unset, _C is built if torch and
a C++ compiler are present. The CUDA kernels are built if torch has CUDA, or USE_CUDA=1 or TORCH_CUDA_ARCH_LIST is set;
USE_CUDA=0 leaves them out, as in PyTorch's own build.
CMakeLists.txt describes what is built.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)  # TORCH_TARGET_VERSION in CMakeLists.txt
COMMON_ARCHITECTURES = ("7.5", "8.0", "9.0+PTX", "10.0", "12.0")

PURE = """\
TORCH_VERSION = None
CUDA_VERSION = None
CUDA_ARCHITECTURES = ()
CPU_SETS = ()
COMPILER = None
NOT_BUILT = {reason!r}
"""


def ask_torch(expression: str) -> Any:
    """The value of a Python expression of JSON's types by the torch that fastbert will run with; None without torch.

    pip builds in isolation, where torch is not importable: it keeps the interpreter, but sets PYTHONPATH to a folder of
    its own. Without that variable, the same interpreter finds the environment's torch. If torch is importable already
    (no isolation, or the user's own PYTHONPATH), that torch is the right one.
    """
    query = f"import json, os, torch; print(json.dumps({expression}))"
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    for env in (dict(os.environ), outside):
        answer = subprocess.run([sys.executable, "-c", query], env=env, capture_output=True, text=True)
        if answer.returncode == 0:
            return json.loads(answer.stdout.splitlines()[-1])
    return None


def find_torch() -> tuple[str, str] | None:
    """Version and folder of the torch that fastbert will run with, or None."""
    found = ask_torch("[torch.__version__, os.path.dirname(torch.__file__)]")
    return found and tuple(found)


def find_compiler() -> str | None:
    """Path of the C++ compiler: CXX, or else the usual names. Ends with an error if CXX names none that there is."""
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)[0]] if named else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, candidates)), None)
    if named and found is None:
        sys.exit(f"fastbert: CXX is {named!r}, and there is no {candidates[0]}")
    return found


def why_not(torch: tuple[str, str] | None, compiler: str | None) -> str | None:
    """Why _C cannot be built here, or None; in words that "… when fastbert was installed" can follow."""
    if not sys.platform.startswith("linux"):
        return f"the platform was {sys.platform}, not Linux,"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python is free-threaded, which the stable ABI leaves out,"
    if torch is None:
        return "torch was not found"
    if tuple(map(int, re.findall(r"\d+", torch[0])[:2])) < OLDEST_TORCH:
        return f"torch was {torch[0]}, older than {'.'.join(map(str, OLDEST_TORCH))},"
    if compiler is None:
        return "no C++ compiler was found"
    return None


def cuda_architectures(torch_cuda_arch_list: str) -> str:
    """TORCH_CUDA_ARCH_LIST as CMAKE_CUDA_ARCHITECTURES: "8.0;9.0+PTX" is "80-real;90-real;90-virtual"."""
    architectures = []
    for entry in re.split(r"[\s;,]+", torch_cuda_arch_list.strip(" ;,")):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if not match:
            sys.exit(
                f"fastbert: TORCH_CUDA_ARCH_LIST: {entry!r} is not understood; write it like 8.0;9.0+PTX, or Common"
            )
        number = match[1] + match[2]
        architectures += [f"{number}-real"] + [f"{number}-virtual"] * bool(match[3])
    return ";".join(architectures)


def nvcc_architectures() -> set[str]:
    """What nvcc compiles for, as "9.0". If CMake finds an nvcc that is not on PATH: what each has since CUDA 12."""
    home = os.environ.get("CUDA_HOME")
    try:
        command = [os.path.join(home, "bin", "nvcc") if home else "nvcc", "--list-gpu-arch"]
        listed = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        listed = "compute_75 compute_80 compute_90"
    return {f"{number[:-1]}.{number[-1]}" for number in re.findall(r"compute_(\d+)\b", listed)}


def common_architectures() -> str:
    known = nvcc_architectures()
    return ";".join(one for one in COMMON_ARCHITECTURES if one.removesuffix("+PTX") in known)


def default_architectures() -> str:
    """Those of this machine's GPUs, as far as there are kernels for them, or the common ones."""
    gpus = ask_torch("sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})") or []
    own = [f"{major}.{minor}" for major, minor in gpus if (major, minor) >= (7, 5)]
    return ";".join(own) + "+PTX" if own and nvcc_architectures().issuperset(own) else common_architectures()


def wanted_architectures() -> str:
    """What to compile the CUDA kernels for, as CMake writes it; empty if they are not wanted."""
    use, listed = os.environ.get("USE_CUDA", "").upper(), os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if use in ("0", "OFF", "NO", "FALSE", "N"):
        return ""
    if listed.lower() == "common":
        listed = common_architectures()
    elif not listed and (use or ask_torch("torch.version.cuda")):
        listed = default_architectures()
    return cuda_architectures(listed) if listed else ""


def max_jobs() -> int:
    """MAX_JOBS, or as many compiler processes as processors and memory (2 GiB each) allow."""
    if wish := os.environ.get("MAX_JOBS"):
        if not wish.isdecimal() or int(wish) < 1:
            sys.exit(f"fastbert: MAX_JOBS is {wish!r}; expected a whole number, at least 1")
        return int(wish)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    of_container = Path("/sys/fs/cgroup/memory.max")
    if of_container.exists() and (limit := of_container.read_text().strip()).isdecimal():
        limits.append(int(limit))
    return max(1, min(len(os.sched_getaffinity(0)), min(limits) // 2**31))


def cmake_build(torch: tuple[str, str], target: Path) -> None:
    """Configures, compiles, and installs _C and _build.py into target."""
    # If an environment's Python is called by its path, its bin folder may not be on PATH.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if not cmake or not ninja:
        sys.exit("fastbert: cmake and ninja are needed: pip install cmake ninja, or FASTBERT_BUILD=0 to do without _C")
    version, folder = torch
    build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    # CMake looks for these once and caches them, so a build folder is valid for one set of them only.
    variables = map(os.environ.get, ("CXX", "CXXFLAGS", "CUDA_HOME", "CUDAFLAGS", "LDFLAGS"))
    kept = json.dumps([version, folder, *variables, shutil.which("nvcc")])
    stamp = build_dir / "built_for.json"
    if not stamp.exists() or stamp.read_text() != kept:
        shutil.rmtree(build_dir, ignore_errors=True)
        build_dir.mkdir(parents=True)
        stamp.write_text(kept)
    configure = [
        *(cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"),
        *(f"-DTORCH_VERSION={version}", f"-DTORCH_DIR={folder}"),
        f"-DFASTBERT_CUDA_ARCHITECTURES={wanted_architectures()}",
    ]
    try:
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", str(max_jobs())], check=True)
        subprocess.run([cmake, "--install", str(build_dir), "--prefix", str(target), "--strip"], check=True)
    except subprocess.CalledProcessError:
        sys.exit(
            f"\nfastbert: building the kernels against torch {version} in {folder} failed; the reason stands above."
            "\nFASTBERT_BUILD=0 installs fastbert without them: it then runs on Triton and plain PyTorch."
        )


def decide() -> tuple[tuple[str, str] | None, str | None]:
    """The torch to build against, or None and the reason."""
    wish = os.environ.get("FASTBERT_BUILD", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"fastbert: FASTBERT_BUILD is {wish!r}; it can be 0 (pure Python), 1 (kernels or an error) or unset")
    if wish == "0":
        return None, "FASTBERT_BUILD=0 was set"
    torch = find_torch()
    reason = why_not(torch, find_compiler())
    if reason and wish == "1":
        sys.exit(f"fastbert: FASTBERT_BUILD=1 asks for compiled kernels, but {reason}")
    return (None, reason) if reason else (torch, None)


def main() -> None:
    torch, reason = decide()

    class BuildPy(build_py):
        """Copies the Python files, then adds _C and _build.py, or _build.py alone."""

        def run(self):
            super().run()
            target = ROOT / "fastbert" if self.editable_mode else Path(self.build_lib).resolve() / "fastbert"
            target.mkdir(parents=True, exist_ok=True)
            for stale in (*target.glob("_C.*"), *target.glob("_build.py")):
                stale.unlink()
            if torch:
                return cmake_build(torch, target)
            (target / "_build.py").write_text(PURE.format(reason=f"{reason} when fastbert was installed"))
            print(
                f"fastbert: installing without compiled kernels: {reason}."
                "\nTo have them, install torch and a C++ compiler, then run: pip install --force-reinstall --no-deps ."
                "\nuv and python -m build hide the environment's torch; --no-build-isolation shows it."
            )

    class Wheel(Distribution):
        def has_ext_modules(self):
            return torch is not None

    options = {"bdist_wheel": {"py_limited_api": "cp310"}} if torch else {}  # one wheel for this and later Pythons
    setup(distclass=Wheel, cmdclass={"build_py": BuildPy}, options=options)


if __name__ == "__main__":
    main()
