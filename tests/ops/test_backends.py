"""Which backend runs, and what the message says if none can."""

import asyncio
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import cuda_on_cpu
import pytest
import torch

import fastbert
from fastbert import backends, ops
from fastbert.ops.op import PRIMITIVES

X, BIAS = torch.randn(3, 8), torch.randn(8)


@pytest.fixture(autouse=True)
def cuda_needs_a_gpu():
    with cuda_on_cpu.uninstalled():
        yield


def ran():
    return {key for key, n in backends.calls().items() if key[0] == "bias_gelu_fwd" and n}


def run_python(code, **environment):
    import os

    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_forcing_reference_is_for_this_thread_and_ends_with_the_block():
    seen, everything = [], dict.fromkeys(backends.OPS, "reference")
    with fastbert.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backends.forced()))
        thread.start()
        thread.join()
        assert dict(backends.forced()) == everything and seen == [()]
        with fastbert.backend(None):
            assert backends.forced() == ()
        assert dict(backends.forced()) == everything
    assert backends.forced() == ()


def test_one_op_can_be_forced_and_the_others_stay_as_they_are():
    with fastbert.backend(attention="reference"):
        assert backends.forced() == (("attention", "reference"),)
        with fastbert.backend("cpu", attention="cuda"):
            inside = backends.forced()
            assert dict(inside) == dict.fromkeys(backends.OPS, "cpu") | {"attention": "cuda"}
            with fastbert.backend(attention=None, padding="reference"):
                assert "attention" not in dict(backends.forced())
                assert dict(backends.forced())["padding"] == "reference"
            assert backends.forced() == inside
        with fastbert.backend(None):
            assert backends.forced() == ()
            with fastbert.backend(None, **dict(inside)):
                assert backends.forced() == inside
    assert backends.forced() == () and backends._latest == {}


def test_only_that_op_runs_there():
    before = backends.calls()
    with fastbert.backend(bias_gelu="reference"):
        ops.bias_gelu(X, BIAS)
        ops.layer_norm(X, BIAS, BIAS)
    ran = {key for key, n in backends.calls().items() if n > before.get(key, 0)}
    usual = backends.choose("layer_norm", "cpu", torch.float32, backward=False)
    assert ran == {("bias_gelu_fwd", "reference"), ("layer_norm_fwd", usual)}


def test_the_forced_backend_runs_the_backward_too_wherever_that_is_called():
    x = X.clone().requires_grad_()
    before = backends.calls().get(("bias_gelu_bwd", "reference"), 0)
    with fastbert.backend("reference"):
        y = ops.bias_gelu(x, BIAS)
    y.sum().backward()
    assert backends.calls()["bias_gelu_bwd", "reference"] == before + 1


def test_counters_count():
    with fastbert.backend("reference"):
        before = backends.calls().get(("bias_gelu_fwd", "reference"), 0)
        ops.bias_gelu(X, BIAS)
        ops.bias_gelu(X, BIAS)
    assert backends.calls()["bias_gelu_fwd", "reference"] == before + 2


def test_a_task_does_not_see_the_blocks_of_another():
    """Neither while they are open nor after the first of two has closed before the second."""
    seen, opened = [], asyncio.Event()

    async def first():
        with fastbert.backend("reference"):
            opened.set()
            await asyncio.sleep(0)
            seen.append(backends.forced())

    async def second():
        await opened.wait()
        seen.append(backends.forced())
        with fastbert.backend(bias_gelu="cpu"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(first(), second())

    asyncio.run(both())
    assert sorted(map(len, seen)) == [0, len(backends.OPS)] and backends.forced() == ()


@pytest.mark.parametrize("problem", [backends._cuda_problem, backends._triton_problem], ids=("cuda", "triton"))
def test_gpus_of_amd_are_refused(monkeypatch, problem):
    """PyTorch calls them cuda too, and gives them capabilities like (9, 4)."""
    pytest.importorskip("triton")
    machine_with(monkeypatch, [(9, 4)])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(backends, "EXTENSION", object())
    info = {"cuda_architectures": ["90"], "cuda_version": "12.8"}
    monkeypatch.setattr(backends, "build_info", lambda: info)
    assert problem.__wrapped__() == backends.NOT_FOR_AMD


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown backend 'gpu'; expected one of reference, cpu, triton, cuda"):
        with fastbert.backend("gpu"):
            pass
    with pytest.raises(ValueError, match="unknown backend 'cpu,cuda'"):
        backends._from_environment("cpu, cuda")
    result = run_python("import fastbert", FASTBERT_BACKEND="gpu")
    assert result.returncode and "unknown backend 'gpu'" in result.stderr
    for ops_, words in (
        ({"attention": "gpu"}, "attention has no backend 'gpu'; expected one of reference, cpu, cuda, triton, varlen"),
        ({"linear": "varlen"}, "linear has no backend 'varlen'"),
        ({"atention": "cuda"}, "unknown op 'atention'; expected one of layer_norm, "),
    ):
        with pytest.raises(ValueError, match=words), fastbert.backend(**ops_):
            pass
    assert backends.forced() == ()


def test_a_forced_backend_that_cannot_run_says_why(monkeypatch):
    with fastbert.backend("cuda"), pytest.raises(RuntimeError, match="backend 'cuda' cannot run linear"):
        ops.linear(X, torch.ones(4, X.shape[1]), torch.ones(4))
    with fastbert.backend("cuda"), pytest.raises(RuntimeError, match="it does not serve cpu tensors"):
        ops.bias_gelu(X, BIAS)
    if backends.why_not("cpu", "bias_gelu", "cpu", torch.float32) is None:
        monkeypatch.setitem(backends.KERNELS["bias_gelu"], "cpu", backends.Kernel((torch.float32,), backward=False))
        backends.why_not.cache_clear()
        with fastbert.backend("cpu"), pytest.raises(RuntimeError, match="has no backward"):
            ops.bias_gelu(X.clone().requires_grad_(), BIAS)
        monkeypatch.undo()
        backends.why_not.cache_clear()


@pytest.mark.parametrize(
    "triton, numpy, works", [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.7.1", "2.5.0", True)]
)
def test_an_interpreter_that_numpy_has_left_behind_is_not_usable(monkeypatch, triton, numpy, works):
    for name, version in (("triton", triton), ("numpy", numpy)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    problem = backends._interpreter_problem()
    assert problem is None if works else "Triton 3.6.0 needs a NumPy older than 2.4" in problem


def test_the_environment_forces_a_backend():
    code = (
        "import torch, fastbert; fastbert.ops.bias_gelu(torch.ones(2, 2), torch.ones(2));"
        "print(fastbert.backends.calls())\n"
        "with fastbert.backend('cpu'): pass\n"
        "print(set(fastbert.backends._latest.values()))"  # what compiled code follows
    )
    calls, latest = run_python(code, FASTBERT_BACKEND="reference").stdout.splitlines()
    assert "'reference'): 1" in calls and latest == "{'reference'}"


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", {}),
        ("attention=varlen", {"attention": "varlen"}),
        ("reference, attention=cpu", dict.fromkeys(backends.OPS, "reference") | {"attention": "cpu"}),
    ],
)
def test_the_environment_forces_single_ops(text, forced):
    assert backends._from_environment(text) == forced


def test_compiled_code_follows_the_block():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.bias_gelu(x, BIAS), fullgraph=True, backend="eager")
    compiled(X)
    for block in (fastbert.backend("cuda"), fastbert.backend(bias_gelu="cuda")):
        with block, pytest.raises(Exception, match="does not serve cpu tensors"):
            compiled(X)
        compiled(X)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("torch.__version__, NOT_BUILT = '2.10.3', None", "need torch 2.11 or newer, this is 2.10.3"),
        pytest.param(
            "NOT_BUILT = 'FASTBERT_BUILD=0 was set'",
            "are not built, because FASTBERT_BUILD=0 was set",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_extension_that_does_not_fit_is_refused_and_others_take_over(tmp_path, build, words):
    """With a torch that is too old `_C` is not even loaded. One warning, at the first call, says what to run."""
    code = f"""
import sys, types, warnings, torch
module = types.ModuleType("fastbert._build")
exec({build!r}, {{"torch": torch}}, module.__dict__)
sys.modules["fastbert._build"] = module
import fastbert
assert "fastbert._C" not in sys.modules and fastbert.backends.EXTENSION is None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        fastbert.ops.bias_gelu(torch.ones(2, 2), torch.ones(2))
print(len(caught), caught[0].message)
print(fastbert.backends.why_not("cpu", "bias_gelu", "cpu", torch.float32))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    warned, reason = result.stdout.splitlines()
    assert warned.startswith("1 ") and words in warned and "pip install" in warned and words in reason


def test_explain_names_every_op_and_backend(capsys):
    fastbert.explain()
    text = capsys.readouterr().out
    for name in (*backends.OPS, *backends.BACKENDS, *backends.LIBRARIES):
        assert name in text
    assert "does not serve cpu tensors" in text or torch.cuda.is_available()


def test_explain_counts_every_forward_and_backward(capsys, monkeypatch):
    runs = {(name, "reference"): 1 for name in PRIMITIVES if name.endswith(("_fwd", "_bwd", "_pack", "_unpack"))}
    monkeypatch.setattr(backends, "_calls", Counter(runs))
    fastbert.explain()
    rows = [line for line in capsys.readouterr().out.splitlines() if "reference " in line and " + " in line]
    counted = [int(number) for row in rows for number in re.findall(r"(\d+) \+ (\d+)", row)[0]]
    assert len(rows) == len(backends.OPS) and sum(counted) == len(runs)


WITHOUT_IT = "without it in CUDA_VISIBLE_DEVICES it would do"


@pytest.mark.parametrize(
    ("architecture", "capability", "serves"),
    [
        ("80-real", (8, 0), True),
        ("80-real", (8, 9), True),  # binaries run on later minor versions
        ("80-real", (9, 0), False),
        ("86-real", (8, 0), False),
        ("75-real", (7, 5), True),
        ("75-virtual", (7, 5), True),
        ("75-virtual", (8, 0), False),  # its PTX lacks kernels that launchers choose there
        ("75-virtual", (9, 0), False),
        ("90-virtual", (9, 0), True),
        ("90-virtual", (12, 0), True),  # PTX runs on everything later
        ("90-virtual", (8, 9), False),
        ("90", (10, 0), True),
        ("90a-real", (9, 0), True),
        ("90a", (10, 0), False),  # architecture-specific PTX is not forward compatible
        ("100-real", (10, 3), True),
        ("100a-real", (10, 3), False),  # "a": for this very GPU
        ("100f-real", (10, 3), True),  # "f": for its family
        ("120a-real", (12, 1), False),
    ],
)
def test_which_gpus_a_build_serves(architecture, capability, serves):
    assert (backends._has_binary(architecture, capability) or backends._has_ptx(architecture, capability)) is serves


BUILT = "built for 80-real"
TOO_OLD = "built for 80-real, 90 by CUDA 12.8, whose PTX a driver for CUDA 12.0 does not compile"


@pytest.mark.parametrize(
    ("architectures", "driver", "gpus", "problem"),
    [
        ("80-real", 12000, [(8, 0)], None),  # older than the build, but of the same major version
        ("80-real", 13000, [(8, 9)], None),
        ("80-real", 13000, [(8, 9), (8, 0)], None),
        ("80-real", 11080, [(8, 0)], "driver: it serves CUDA 11.8, the kernels were built with 12.8"),
        ("80-real", 12080, [(9, 0)], f"{BUILT}, this GPU is sm_90"),
        ("80-real", 12080, [(8, 0), (9, 0)], f"{BUILT}, GPU 1 is sm_90; {WITHOUT_IT}"),
        ("80-real 90", 12080, [(12, 0)], None),  # compiled by the driver
        ("80-real 90", 12000, [(9, 0), (8, 6)], None),  # binaries, which it does not have to compile
        ("80-real 90", 12000, [(12, 0)], f"{TOO_OLD}, this GPU is sm_120"),
        ("80-real 90", 12000, [(9, 0), (12, 0)], f"{TOO_OLD}, GPU 1 is sm_120; {WITHOUT_IT}"),
    ],
)
def test_which_drivers_and_gpus_a_build_runs_on(monkeypatch, architectures, driver, gpus, problem):
    info = {"cuda_architectures": architectures.split(), "cuda_version": "12.8"}
    monkeypatch.setattr(backends, "EXTENSION", object())
    monkeypatch.setattr(backends, "build_info", lambda: info)
    monkeypatch.setattr(backends, "driver_version", lambda: driver)
    machine_with(monkeypatch, gpus)
    assert backends._cuda_problem.__wrapped__() == problem


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        ([(8, 0)], None),
        ([(9, 0), (8, 6)], None),
        ([(7, 5)], "its configurations are for GPUs from sm_80 on, this GPU is sm_75"),
        ([(9, 0), (7, 5)], f"its configurations are for GPUs from sm_80 on, GPU 1 is sm_75; {WITHOUT_IT}"),
    ],
)
def test_which_gpus_triton_serves(monkeypatch, gpus, problem):
    """Every GPU that PyTorch sees counts, not only the current one."""
    pytest.importorskip("triton")
    machine_with(monkeypatch, gpus)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("CC", "cc")
    assert backends._triton_problem.__wrapped__() == problem


@pytest.mark.parametrize(
    ("gpus", "size", "problem"),
    [
        ([(7, 5)], 127, None),
        ([(7, 5)], 128, "its attention kernel takes head sizes of at most 127"),
        ([(9, 0), (7, 5)], 128, "its attention kernel takes head sizes of at most 127"),
        ([(8, 0)], 128, None),
        ([(8, 0)], 136, "its attention kernel takes head sizes of at most 128"),
    ],
)
def test_little_shared_memory_takes_smaller_heads(monkeypatch, gpus, size, problem):
    machine_with(monkeypatch, gpus)
    monkeypatch.setattr(backends, "_has_turing", backends._has_turing.__wrapped__)
    unfit = backends._is_unfit("cuda", backends._unfit("attention", size, 0))
    monkeypatch.setitem(backends._PROBLEMS, "cuda", lambda: None)
    monkeypatch.setitem(backends.SERVES, "cuda", ("cuda",))
    asked = ("cuda", "attention", "cuda", torch.float16, True, unfit)
    assert backends.why_not.__wrapped__(*asked) == problem
    assert ("cuda" in backends._unfit("encoder_layer", 768, size)) == (size > 128)
    assert "cuda on sm_75" in backends._unfit("encoder_layer", 768, 86, "relative_attention")
    assert "cuda on sm_75" not in backends._unfit("encoder_layer", 768, 85, "relative_attention")


def machine_with(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])


@pytest.mark.parametrize("name", ["reference", "cpu"])  # not this thread's backend, and the same one
def test_compiled_code_follows_blocks_that_are_open_in_other_threads(name):
    """Leaving a `with` block in one thread does not undo one that is still open in another."""
    opened, finish = threading.Event(), threading.Event()

    def other():
        with fastbert.backend(name):
            opened.set()
            finish.wait()

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait()
    with fastbert.backend("cpu"):
        finish.set()
        thread.join()
        assert set(backends._latest.values()) == {"cpu"}
    assert backends._latest == {}


def test_the_table_says_what_its_order_rests_on():
    root = Path(fastbert.__file__).parent.parent
    for op, kernels in backends.KERNELS.items():
        names = {*backends.BACKENDS, *backends.LIBRARIES}
        assert kernels.keys() <= names and (hasattr(ops, op) or op == "padding")
        measured = {kernel.measured for kernel in kernels.values()} - {"not yet measured"}
        assert all((root / path).exists() for path in measured)


@pytest.mark.parametrize(
    ("capability", "first"),
    [((7, 5), "cuda"), ((8, 0), "cuda"), ((8, 9), "cuda"), ((9, 0), "cuda"), ((10, 0), "triton"), ((12, 0), "cuda")],
)
def test_attention_is_tritons_where_ours_does_not_multiply_by_warpgroups(monkeypatch, capability, first):
    machine_with(monkeypatch, [capability])
    order = backends.order.__wrapped__  # without the cache
    assert order("cuda", "attention")[0] == first
    assert order("cuda", "layer_norm") == ("cuda", "triton", "reference")
    assert order("cuda", "linear") == ("reference",)  # Triton's kernel runs only if it is forced
    assert order("cpu", "attention") == ("cpu", "reference")
    assert order("xpu", "attention") == ("reference",)


def test_a_size_that_a_kernel_does_not_take_is_said_before_it_runs():
    limit = backends.KERNELS["layer_norm"]["triton"].largest
    x, weight = torch.randn(2, limit + 1), torch.ones(limit + 1)
    if backends.why_not("triton", "layer_norm", "cpu", torch.float32) is None:
        with fastbert.backend("triton"), pytest.raises(RuntimeError, match=f"takes rows of at most {limit}"):
            ops.layer_norm(x, weight, weight)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ops.layer_norm(x, weight, weight), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), ops.layer_norm(x, weight, weight))
