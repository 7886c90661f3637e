"""The build: what setup.py decides, what is in its wheels and archives, and that `_build.py` is true about `_C`."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from fastbert import backends

ROOT = Path(__file__).resolve().parents[2]
READ_BY_SETUP = ("FASTBERT_BUILD", "USE_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX", "MAX_JOBS", "PYTHONPATH")
CLEAN_ENV = {k: v for k, v in os.environ.items() if k not in READ_BY_SETUP}

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module; the environment has none of the variables that it reads."""
    for name in READ_BY_SETUP:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("fastbert_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(copy):
    """Copies the files that an install needs, without what earlier builds left in the source tree."""
    left_behind = shutil.ignore_patterns("_C.*", "_build.py", "__pycache__")
    for folder in ("csrc", "fastbert"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=left_behind)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def tree(tmp_path):
    return source(tmp_path / "tree")


# ---- decisions


def fake_torch(folder: Path, source: str) -> str:
    """Makes a folder that shadows torch when it is on PYTHONPATH."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(source)
    return str(folder)


def test_torch_is_found_through_pips_isolation(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", fake_torch(tmp_path, "raise ImportError('hidden')"))
    assert setup_py.find_torch() == (torch.__version__, os.path.dirname(torch.__file__))


def test_torch_of_the_users_own_path_comes_first(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", fake_torch(tmp_path, "__version__ = '9.8.7+mine'"))
    assert setup_py.find_torch() == ("9.8.7+mine", str(tmp_path / "torch"))


def test_no_torch_is_a_reason_or_an_error(setup_py, monkeypatch, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    assert setup_py.decide() == (None, "torch was not found")
    monkeypatch.setenv("FASTBERT_BUILD", "1")
    with pytest.raises(SystemExit, match="torch was not found"):
        setup_py.decide()


def test_no_compiler_is_a_reason_or_an_error(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "find_torch", lambda: (torch.__version__, "/torch"))
    monkeypatch.setattr(setup_py.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert setup_py.decide() == (None, "no C++ compiler was found")
    monkeypatch.setenv("FASTBERT_BUILD", "1")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler was found"):
        setup_py.decide()


@pytest.mark.parametrize(
    ("name", "value", "words", "call"),
    [
        (
            "CXX",
            "/nonexistent/c++ -O1",
            "CXX is '/nonexistent/c\\+\\+ -O1', and there is no",
            lambda s: s.find_compiler(),
        ),
        ("MAX_JOBS", "auto", "MAX_JOBS is 'auto'; expected a whole number", lambda s: s.max_jobs()),
        ("MAX_JOBS", "0", "MAX_JOBS is '0'", lambda s: s.max_jobs()),
    ],
)
def test_what_is_named_has_to_be_there(setup_py, monkeypatch, name, value, words, call):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=words):
        call(setup_py)


def test_a_python_without_the_stable_abi_gets_no_kernels(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    monkeypatch.setattr(setup_py, "find_torch", lambda: (torch.__version__, "/torch"))
    assert setup_py.decide() == (None, "this Python is free-threaded, which the stable ABI leaves out,")


def test_fastbert_build_0_asks_for_nothing_else(setup_py, monkeypatch):
    monkeypatch.setenv("FASTBERT_BUILD", "0")
    monkeypatch.setattr(setup_py, "find_torch", lambda: pytest.fail("looked for torch"))
    assert setup_py.decide() == (None, "FASTBERT_BUILD=0 was set")


@pytest.mark.parametrize("value", ["2", "yes", "true"])
def test_other_values_of_fastbert_build_are_refused(setup_py, monkeypatch, value):
    monkeypatch.setenv("FASTBERT_BUILD", value)
    with pytest.raises(SystemExit, match=value):
        setup_py.decide()


@pytest.mark.parametrize(
    "version, old",
    [("2.9.1+cu128", True), ("2.10.0", True), ("2.11.0a0+git1234567", False), ("2.13.0+cpu", False), ("3.0.0", False)],
)
def test_torch_without_the_stable_interface_is_too_old(setup_py, version, old):
    assert bool(setup_py.why_not((version, "/torch"), "/usr/bin/c++")) == old


def test_one_oldest_torch(setup_py):
    major, minor = setup_py.OLDEST_TORCH
    assert f"TORCH_TARGET_VERSION=0x{major:02x}{minor:02x}{0:012x}" in (ROOT / "CMakeLists.txt").read_text()
    assert setup_py.OLDEST_TORCH == backends.OLDEST_TORCH
    assert f'"torch>={major}.{minor}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "given, expected",
    [
        ("8.0;9.0+PTX", "80-real;90-real;90-virtual"),
        ("7.5 8.6", "75-real;86-real"),  # torch takes spaces too
        ("10.0a", "100a-real"),  # two digits, and an architecture without successors
        (" 9.0 ; ", "90-real"),
    ],
)
def test_arch_list(setup_py, given, expected):
    assert setup_py.cuda_architectures(given) == expected


@pytest.mark.parametrize("given", ["90", "sm_90", "Hopper", "9.0+ptx", "8.0;nonsense"])
def test_arch_list_that_is_not_understood(setup_py, given):
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST"):
        setup_py.cuda_architectures(given)


@pytest.mark.parametrize("value", ["0", "OFF", "no", "False"])
def test_use_cuda_0_wants_no_architecture(setup_py, monkeypatch, value):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("USE_CUDA", value)
    assert setup_py.wanted_architectures() == ""


COMMON = "75-real;80-real;90-real;90-virtual"


@pytest.mark.parametrize(
    ("use", "torch_has", "listed", "gpus", "expected"),
    [
        ("", None, "", [], ""),  # this torch could not run them
        ("1", None, "", [], COMMON),
        ("", "13.0", "", [], COMMON),
        ("", "13.0", "", [[8, 0], [9, 0]], "80-real;90-real;90-virtual"),
        ("", "13.0", "", [[7, 0], [9, 0]], "90-real;90-virtual"),  # older than all kernels
        ("", "13.0", "", [[12, 0]], COMMON),  # newer than nvcc
        ("", "13.0", "Common", [[9, 0]], COMMON),
        ("", None, "9.0", [[8, 0]], "90-real"),
    ],
)
def test_architectures_are_those_of_the_list_or_of_the_gpus(
    setup_py, monkeypatch, use, torch_has, listed, gpus, expected
):
    monkeypatch.setenv("USE_CUDA", use)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    monkeypatch.setattr(setup_py, "ask_torch", lambda asked: torch_has if "version.cuda" in asked else gpus)
    monkeypatch.setattr(setup_py, "nvcc_architectures", lambda: {"7.5", "8.0", "9.0"})
    assert setup_py.wanted_architectures() == expected


def test_nvcc_says_what_it_compiles_for(setup_py, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho compute_75; echo compute_90; echo compute_120\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup_py.nvcc_architectures() == {"7.5", "9.0", "12.0"}
    assert setup_py.common_architectures() == "7.5;9.0+PTX;12.0"
    nvcc.unlink()
    assert setup_py.common_architectures() == "7.5;8.0;9.0+PTX"


@pytest.mark.parametrize(
    "processors, gibibytes, expected",
    [(64, 8, 4), (4, 64, 4), (64, 1, 1)],  # limited by memory; by processors; at least one
)
def test_jobs_fit_in_memory(setup_py, monkeypatch, processors, gibibytes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": gibibytes * 2**18, "SC_PAGE_SIZE": 2**12}.__getitem__)
    assert setup_py.max_jobs() == expected
    monkeypatch.setenv("MAX_JOBS", "3")
    assert setup_py.max_jobs() == 3


def configured(folder: Path, architectures: str) -> dict:
    """The contents of `_build.py`, after CMake has configured the build in that folder."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    if not (cmake := shutil.which("cmake", path=path)) or not shutil.which("ninja", path=path):
        pytest.skip("needs cmake and ninja")
    values = {"Python_EXECUTABLE": sys.executable, "TORCH_DIR": os.path.dirname(torch.__file__)}
    values["FASTBERT_CUDA_ARCHITECTURES"] = architectures
    command = [cmake, "-S", ROOT, "-B", folder, "-GNinja", *(f"-D{name}={value}" for name, value in values.items())]
    subprocess.run(command, env=CLEAN_ENV | {"PATH": path}, check=True, capture_output=True)
    facts = {}
    exec((folder / "_build.py").read_text(), facts)
    return facts


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are built on Linux")


@linux
def test_no_architecture_is_no_cuda_even_where_nvcc_is(tmp_path):
    facts = configured(tmp_path, "")
    assert facts["CUDA_VERSION"] is None and facts["CUDA_ARCHITECTURES"] == ()
    assert "nvcc" not in (tmp_path / "build.ninja").read_text()


@linux
@pytest.mark.slow
def test_one_build_folder_with_cuda_and_then_without(tmp_path):
    if configured(tmp_path, "90-real")["CUDA_VERSION"] is None:
        pytest.skip("needs nvcc")
    without = configured(tmp_path, "")
    assert without["CUDA_VERSION"] is None and without["CUDA_ARCHITECTURES"] == ()
    assert "nvcc" not in (tmp_path / "build.ninja").read_text()


# ---- wheels and archives


def test_pure_wheel_holds_nothing_of_an_earlier_build(tree, tmp_path):
    (tree / "fastbert/_C.cpython-311-x86_64-linux-gnu.so").write_bytes(b"stale")
    (tree / "fastbert/_build.py").write_text("NOT_BUILT = None  # stale")
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, env=CLEAN_ENV | {"FASTBERT_BUILD": "0"}, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as contents:
        assert not [name for name in contents.namelist() if "_C." in name]
        facts = {}
        exec(contents.read("fastbert/_build.py"), facts)
    assert facts["NOT_BUILT"] == "FASTBERT_BUILD=0 was set when fastbert was installed"
    assert facts["TORCH_VERSION"] is facts["CUDA_VERSION"] is facts["COMPILER"] is None
    assert facts["CUDA_ARCHITECTURES"] == facts["CPU_SETS"] == ()


def test_a_source_distribution_holds_all_that_its_tests_need(tmp_path):
    """It has every file under version control, except hidden ones, so that tests, docs and examples run from it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    tree = tmp_path / "tree"
    for name in listed.stdout.splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, env=CLEAN_ENV | {"FASTBERT_BUILD": "0"}, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as contents:
        held = {member.name.partition("/")[2] for member in contents}
    missing = set(listed.stdout.splitlines()) - held
    assert {name for name in missing if not name.startswith(".")} == set()
    assert not [name for name in held if name.endswith((".pyc", ".so"))]


@pytest.fixture
def built():
    """`fastbert._build` and `_C.build_info()` of this installation."""
    if backends.EXTENSION is None:
        pytest.skip(backends.EXTENSION_PROBLEM)
    return importlib.import_module("fastbert._build"), backends.EXTENSION.build_info()


def test_facts_belong_to_the_library(built):
    facts, info = built
    assert facts.TORCH_VERSION.split("+")[0] == info["torch_version"]
    assert facts.CUDA_VERSION == info["cuda_version"]
    assert facts.CUDA_ARCHITECTURES == info["cuda_architectures"]
    assert bool(facts.CUDA_VERSION) == bool(facts.CUDA_ARCHITECTURES)
    assert facts.CPU_SETS == info["cpu_sets"] != ()
    assert facts.COMPILER == info["compiler"]
    assert re.fullmatch(r"\w+ \d+(\.\d+)+", facts.COMPILER)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_best_instruction_set_of_this_processor_is_active(built):
    flags = set(re.search(r"^flags\s*:(.*)$|\Z", Path("/proc/cpuinfo").read_text(), re.M).group(0).split())
    if not flags:
        pytest.skip("not an x86 processor")
    best = None
    if {"avx2", "fma", "f16c"} <= flags:
        best = "avx2_vnni" if "avx_vnni" in flags else "avx2"
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
            best = "avx512_vnni" if "avx512_vnni" in flags else "avx512"
        if best == "avx512_vnni" and "avx512_bf16" in flags:
            best = "avx512_bf16"
        if best == "avx512_bf16" and "amx_tile" in flags and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0:
            best = "amx"  # the kernel granted this process AMX
    assert built[1]["cpu_set"] == best


# ---- whole installs in pip's build isolation, which downloads the build tools

REPORT = """
import importlib, json, torch
from fastbert import _build
try:
    library = importlib.import_module("fastbert._C").build_info()
except ImportError:
    library = None
print(json.dumps([_build.__file__, _build.TORCH_VERSION, _build.NOT_BUILT, library, torch.__version__]))
"""


def install(tree: Path, folder: Path, **env: str) -> list:
    """Installs `tree` with pip into a new environment that sees this one's packages; returns what REPORT prints."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(str(Path(torch.__file__).parents[1]))
    pip = [folder / "bin/pip", "install", "-q", "--no-deps", "--ignore-installed", str(tree)]
    subprocess.run(pip, env=CLEAN_ENV | env, check=True, stderr=subprocess.PIPE, text=True)
    report = subprocess.run([folder / "bin/python", "-c", REPORT], cwd=folder, env=CLEAN_ENV, check=True, stdout=-1)
    where, *rest = json.loads(report.stdout)
    assert Path(where).is_relative_to(site)
    return rest


@pytest.mark.slow
def test_isolated_install_builds_against_the_environments_torch(tree, tmp_path):
    env = {"FASTBERT_BUILD": "1", "TORCH_CUDA_ARCH_LIST": "8.0"}
    built_for, not_built, library, running = install(tree, tmp_path / "env", **env)
    assert built_for == running == torch.__version__
    assert not_built is None
    assert library["torch_version"] == running.split("+")[0]


@pytest.mark.slow
def test_isolated_install_without_compiled_kernels(tree, tmp_path):
    built_for, not_built, library, _ = install(tree, tmp_path / "env", FASTBERT_BUILD="0")
    assert (built_for, library) == (None, None)
    assert not_built == "FASTBERT_BUILD=0 was set when fastbert was installed"


@pytest.mark.slow
def test_a_compile_error_is_an_error(tree, tmp_path):
    with open(tree / "csrc/extension.cpp", "a") as source:
        source.write("\n#error planted\n")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        install(tree, tmp_path / "env", TORCH_CUDA_ARCH_LIST="8.0")
    assert "#error planted" in failure.value.stderr
    assert "FASTBERT_BUILD=0 installs fastbert without them" in failure.value.stderr


# ---- one wheel for every torch


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this source tree, with kernels for CPUs only."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
    env = CLEAN_ENV | {"FASTBERT_BUILD": "1", "USE_CUDA": "0"}
    subprocess.run([*command, source(folder / "tree")], env=env, check=True)
    (wheel,) = folder.glob("*-cp310-abi3-linux_*.whl")
    with zipfile.ZipFile(wheel) as contents:
        library = contents.read("fastbert/_C.abi3.so")
    assert str(folder).encode() not in library and os.path.dirname(torch.__file__).encode() not in library
    return wheel


@linux
@pytest.mark.slow
@pytest.mark.parametrize("release", ["torch==2.11.0", "torch"])
def test_one_wheel_runs_with_old_and_new_torch_without_a_compiler(wheel, tmp_path, release):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    env = CLEAN_ENV | {"PATH": str(tmp_path / "env/bin"), "TMPDIR": str(tmp_path)}
    pip = ["pip", "install", "-q", "numpy<2.4", "safetensors", "pytest", "hypothesis", release]
    fetched = subprocess.run(pip, env=env, stderr=subprocess.PIPE, text=True)
    if fetched.returncode:
        pytest.skip(f"pip does not get {release} here: {fetched.stderr.splitlines()[-1]}")
    subprocess.run(["pip", "install", "-q", "--no-deps", wheel], env=env, check=True)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    tests = [f"tests/ops/test_{name}.py" for name in ("checks", "linear", "attention", "embedding", "padding")]
    selected = "(cpu or checks) and not compile and not opcheck"
    command = ["pytest", "-q", "-o", "pythonpath=tests", "-m", "not slow", "-k", selected, *tests]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
