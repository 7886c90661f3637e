"""Tensors of more than 2**31 elements, whose offsets do not fit 32 bits; in bytes they do not from 2**30 elements on.

All rows but a few are zeros, which take no memory on a CPU before they are written. The few, the probes, lie at the
beginning, around 2**30 and 2**31 elements, and at the end. The results for them are compared with the reference, which
gets only these rows.
"""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert import backends, ops, testing

C = 1000  # not a power of two: element 2**31 lies within a row
ROWS = 2**31 // C + 3
PROBED = torch.tensor([0, 1, *[2**n // C + i for n in (30, 31) for i in (-1, 0, 1)], ROWS - 1])
GIB = 2**30
BIG = 2 * ROWS * C  # bytes, in bfloat16

pytestmark = pytest.mark.slow


def free_memory(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture(params=[name for name in backends.BACKENDS if name != "reference"])
def backend(request):
    """The name, and the device of its tensors. Kernels for GPUs run only on a GPU here: on the CPU they take hours."""
    name, device = request.param, "cpu" if request.param == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{name}: no GPU")
    torch.use_deterministic_algorithms(False)  # they fill allocated memory, and so write inputs
    with open(Path(tempfile.gettempdir(), "fastbert-large-tensors"), "w") as turn, fastbert.backend(name):
        fcntl.flock(turn, fcntl.LOCK_EX)  # one at a time, however many processes run tests
        yield name, device


def room_for(backend, op, tensors, on_gpu):
    """Skips the test if the backend or memory is missing. tensors, on_gpu: how many large tensors are written on a CPU,
    and held on a GPU."""
    name, device = backend
    if reason := backends.why_not(name, op, device, torch.bfloat16, True):
        pytest.skip(f"{name}: {reason}")
    needed = (on_gpu if device == "cuda" else tensors) * BIG + 4 * GIB  # the rest of the process, and of the machine
    if (free := free_memory(device)) < needed:
        pytest.skip(f"{device}: {free / GIB:.0f} GiB are free; the test needs {needed / GIB:.0f}")


def normal(*shape, device="cpu"):
    return torch.randn(*shape).bfloat16().to(device)


def large(probes):
    """(ROWS, C): the probes in their rows, zeros elsewhere."""
    x = torch.zeros(ROWS, C, dtype=probes.dtype, device=probes.device)
    x[PROBED.to(x.device)] = probes
    return x


def rows_of(x):
    return x[PROBED.to(x.device)]


def assert_rows(found, call, inputs):
    """found: the outputs, or gradients, of the probed rows. call: the reference, which computes them from `inputs`."""
    truth = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    results = [
        testing.Result(dict(zip("abc", out, strict=False)), {}) for out in (found, call(**truth), call(**inputs))
    ]
    testing.assert_rows(testing.compare(results[0], results[1], results[2:]))


def test_probes_are_where_offsets_overflow():
    assert ROWS * C > 2**31 and PROBED.unique().numel() == len(PROBED) and PROBED.max() == ROWS - 1
    for n in (30, 31):
        assert any(row * C < 2**n < (row + 1) * C for row in PROBED.tolist())


def test_bias_gelu(backend):
    room_for(backend, "bias_gelu", tensors=1, on_gpu=2)
    x, bias = normal(len(PROBED), C, device=backend[1]), normal(C, device=backend[1])
    y = rows_of(ops.bias_gelu(large(x), bias))
    assert_rows([y], lambda x, bias: [ops.bias_gelu_ref(x, bias)], {"x": x, "bias": bias})


def test_bias_gelu_backward(backend):
    room_for(backend, "bias_gelu", tensors=2, on_gpu=4)
    x, dy = (normal(len(PROBED), C, device=backend[1]) for _ in range(2))
    bias = normal(C, device=backend[1]).requires_grad_()
    leaf = large(x).requires_grad_()
    dx, dbias = torch.autograd.grad(ops.bias_gelu(leaf, bias), (leaf, bias), large(dy))

    def reference(x, bias, dy):
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        return torch.autograd.grad(ops.bias_gelu_ref(x, bias), (x, bias), dy)

    assert_rows([rows_of(dx), dbias], reference, {"x": x, "bias": bias.detach(), "dy": dy})


def test_add_layer_norm(backend):
    """Rows of zeros have a variance of 0, and give the bias."""
    room_for(backend, "add_layer_norm", tensors=1, on_gpu=3)
    x, residual = (normal(len(PROBED), C, device=backend[1]) for _ in range(2))
    weight, bias = (normal(C, device=backend[1]) for _ in range(2))
    y = ops.add_layer_norm(large(x), large(residual), weight, bias)
    assert torch.equal(y[7], bias)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    assert_rows([rows_of(y)], lambda **given: [ops.add_layer_norm_ref(**given)], inputs)


def test_embedding_of_many_tokens(backend):
    room_for(backend, "embedding", tensors=1, on_gpu=1)
    device = backend[1]
    word, position, weight, bias = (normal(n, C, device=device) for n in (50, 4, 1, 1))
    ids, positions = torch.randint(0, 50, (ROWS,), device=device), torch.arange(ROWS, device=device) % 4
    given = {"word": word, "position": position, "weight": weight[0], "bias": bias[0]}

    def call(op, ids, positions, word, position, weight, bias):
        return op(ids, positions, None, word, position, None, weight, bias)

    y = rows_of(call(ops.embedding, ids, positions, **given))
    few = {"ids": rows_of(ids), "positions": rows_of(positions)} | given
    assert_rows([y], lambda **few: [call(ops.embedding_ref, **few)], few)


def test_a_table_of_many_rows(backend):
    room_for(backend, "embedding", tensors=0, on_gpu=1)
    device = backend[1]
    word, position, weight, bias = (normal(n, C, device=device) for n in (len(PROBED), 1, 1, 1))
    positions, rest = torch.zeros(len(PROBED), dtype=torch.int64, device=device), (None, weight[0], bias[0])
    y = ops.embedding(PROBED.to(device), positions, None, large(word), position, *rest)
    own = torch.arange(len(PROBED), device=device)
    inputs = {"word": word, "position": position, "weight": weight[0], "bias": bias[0]}
    reference = lambda word, position, weight, bias: [  # noqa: E731
        ops.embedding_ref(own, positions, None, word, position, None, weight, bias)
    ]
    assert_rows([y], reference, inputs)


def test_pack_and_unpack(backend):
    """A few rows out of many and back, and all of them in reverse: rows are copied bit for bit."""
    room_for(backend, "padding", tensors=1, on_gpu=2)
    x, places = normal(len(PROBED), C, device=backend[1]), PROBED.to(backend[1])
    assert torch.equal(ops.pack(large(x)[None], places), x)
    padded = ops.unpack(x, places, 1, ROWS)[0]
    assert torch.equal(rows_of(padded), x) and not padded[7].any() and not padded[ROWS - 5].any()
    del padded
    everything = torch.arange(ROWS, device=backend[1]).flip(0)
    assert torch.equal(ops.pack(large(x)[None], everything)[ROWS - 1 - places], x)


def test_attention(backend):
    """Sequences of 16 tokens; the probed sequences have random values, all others are zeros."""
    room_for(backend, "attention", tensors=1, on_gpu=2)
    length, heads, head_dim, device = 16, 4, 80, backend[1]
    row = 3 * heads * head_dim
    count = 2**31 // (length * row) + 2
    probed = torch.tensor([0, 2**30 // (length * row), 2**31 // (length * row), count - 1], device=device)
    values = normal(len(probed), length, 3, heads, head_dim, device=device)
    qkv = torch.zeros(count, length, 3, heads, head_dim, dtype=torch.bfloat16, device=device)
    qkv[probed] = values
    ends = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    out = ops.attention(qkv.flatten(0, 1), ends, length).unflatten(0, (count, length))[probed]
    few = torch.arange(len(probed) + 1, dtype=torch.int32, device=device) * length
    reference = lambda qkv, ends: [ops.attention_ref(qkv, ends, length)]  # noqa: E731
    assert_rows([out.flatten(0, 1)], reference, {"qkv": values.flatten(0, 1), "ends": few})
