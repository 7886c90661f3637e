"""CUDA on the CPU: its instructions agree with the PTX manual, and it reports every planted fault.

If there is a GPU, the instructions run on it too.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import fragments
from torch import Tensor

import fastbert
from fastbert import backends, ops
from fastbert.ops.op import PRIMITIVES


def run(library: ctypes.CDLL, name: str, *args) -> None:
    """Calls a launcher of instructions.cu or faults.cu; raises RuntimeError with the message that it returns."""
    launcher = getattr(library, name)
    launcher.restype = ctypes.c_char_p
    error = launcher(*(ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else arg for arg in args))
    if error:
        raise RuntimeError(error.decode())


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL:
    if reason := cuda_on_cpu.problem():
        pytest.skip(reason)
    return cuda_on_cpu.library()


@pytest.fixture(scope="module")
def compiled() -> ctypes.CDLL:
    """instructions.cu, compiled for the GPU."""
    if not torch.cuda.is_available() or not shutil.which("nvcc"):
        pytest.skip("this takes a GPU and nvcc")
    library = cuda_on_cpu.ROOT / "build" / "instructions.so"
    source = Path(cuda_on_cpu.__file__).with_name("instructions.cu")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    which = ["-gencode=arch=compute_90a,code=sm_90a", "-DFB_HOPPER"] if is_hopper else ["-arch=native"]
    options = ["-std=c++17", *which, "-shared", "-Xcompiler=-fPIC"]
    subprocess.run(["nvcc", *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(params=("emulated", "compiled"))
def machine(request):
    """A function (name, *tensors) that runs an instruction and leaves its results in the tensors."""
    library = request.getfixturevalue(request.param)

    def instruction(name: str, *args) -> None:
        if request.param == "emulated":
            return run(library, name, *args)
        on_device = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in args]
        run(library, name, *on_device)
        for arg, result in zip(args, on_device, strict=True):
            if isinstance(arg, Tensor):
                arg.copy_(result)

    return instruction


# ---- instructions


def places(figure: str) -> tuple[Tensor, Tensor]:
    """The lane, and the element of the lane, at each place of a matrix."""
    entries = [[entry.split(".") for entry in line.split()] for line in figure.split("\n") if line]
    return torch.tensor([[[int(n) for n in entry] for entry in row] for row in entries]).unbind(-1)


def distribute(matrix: Tensor, figure: str) -> Tensor:
    """The matrix as registers, [lane, element]."""
    lane, element = places(figure)
    registers = matrix.new_zeros(32, int(element.max()) + 1)
    registers[lane, element] = matrix
    return registers


def collect(registers: Tensor, figure: str) -> Tensor:
    lane, element = places(figure)
    return registers[lane, element]


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_mma(machine, dtype):
    a, b, c = integers(16, 16, dtype=dtype), integers(16, 8, dtype=dtype), integers(16, 8, dtype=torch.float32)
    d = distribute(c, fragments.C)
    machine("run_mma", distribute(a, fragments.A), distribute(b, fragments.B), d, dtype == torch.bfloat16)
    assert torch.equal(collect(d, fragments.C), c + a.float() @ b.float())


def test_mma_half_as_deep(machine):
    """m16n8k8 has the layout of the first 8 columns of A and the first 8 rows of B."""
    a, b = integers(16, 16, dtype=torch.float16), integers(16, 8, dtype=torch.float16)
    c = integers(16, 8, dtype=torch.float32)
    d = distribute(c, fragments.C)
    machine("run_mma_of_eight", distribute(a, fragments.A), distribute(b, fragments.B), d)
    assert torch.equal(collect(d, fragments.C), c + a[:, :8].float() @ b[:8].float())


def test_mma_with_two_registers_exchanged_is_wrong(machine):
    """This shows that the tests above notice mixed-up indices."""
    a, b = integers(16, 16, dtype=torch.float16), integers(16, 8, dtype=torch.float16)
    exchanged = distribute(a, fragments.A)[:, [0, 1, 4, 5, 2, 3, 6, 7]].contiguous()
    d = torch.zeros(32, 4)
    machine("run_mma", exchanged, distribute(b, fragments.B), d, False)
    assert not torch.equal(collect(d, fragments.C), a.float() @ b.float())


@pytest.mark.parametrize("value", (1.0, -0.0, 2.0**-24, 65504.0, torch.inf, -torch.inf, torch.nan, 1 / 3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_mma_of_one_value(machine, dtype, value):
    """Denormals, infinities and values that use every digit are multiplied like any other."""
    a, b, d = torch.zeros(16, 16, dtype=dtype), torch.zeros(16, 8, dtype=dtype), torch.zeros(32, 4)
    a[5, 3], b[3, 2] = value, 1
    machine("run_mma", distribute(a, fragments.A), distribute(b, fragments.B), d, dtype == torch.bfloat16)
    expected = a.float() @ b.float()
    torch.testing.assert_close(collect(d, fragments.C), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("left", ("shared", "registers", "registers, by row"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_wgmma(machine, request, dtype, left):
    """Four warps multiply 64 x 64 matrices. A product that does not add discards what was in the accumulator."""
    if "compiled" in request.node.name and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is for sm_90")
    a, b = integers(64, 64, dtype=dtype), integers(64, 64, dtype=dtype)
    c, by_row = integers(64, 64, dtype=torch.float32), left.endswith("by row")
    tiles = c.unflatten(0, (4, 16)).unflatten(2, (8, 8)).transpose(1, 2)  # [warp, columns / 8, 16, 8]
    d = torch.stack([torch.stack([distribute(tile, fragments.C) for tile in row]) for row in tiles])
    machine("run_wgmma", a, b, d, left == "shared", by_row, dtype == torch.bfloat16)
    found = torch.stack([torch.stack([collect(tile, fragments.C) for tile in row]) for row in d])
    product = a.float() @ (b.float() if by_row else b.float().mT)
    expected = product if left == "registers" else c + product
    assert torch.equal(found.transpose(1, 2).flatten(2).flatten(0, 1), expected)


@pytest.mark.parametrize("transposed", (False, True))
def test_ldmatrix(machine, transposed):
    rows = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    registers = torch.zeros(32, 4, 2, dtype=torch.int16)
    machine("run_ldmatrix", rows, registers, transposed)
    figure = fragments.LDMATRIX_TRANS if transposed else fragments.LDMATRIX
    for matrix in range(4):
        assert torch.equal(collect(registers[:, matrix], figure), rows[matrix])


def test_cp_async_copies_what_it_is_told_and_zeros(machine):
    source, copied = torch.randint(1, 256, (3, 32, 16), dtype=torch.uint8), torch.zeros(3, 32, 16, dtype=torch.uint8)
    machine("run_cp_async", source, copied)
    expected = source.clone()
    expected[0][torch.arange(16) >= torch.arange(32)[:, None]] = 0
    assert torch.equal(copied, expected)


def test_shuffles(machine):
    results = torch.zeros(7, 32, dtype=torch.int32)
    machine("run_shuffles", results)
    assert results.tolist() == [
        [5] * 32,  # from lane 5
        [1] * 8 + [9] * 8 + [17] * 8 + [25] * 8,  # from lane 9 in segments of 8: from the second lane of each
        [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12]
        + [19, 18, 17, 16, 23, 22, 21, 20, 27, 26, 25, 24, 31, 30, 29, 28],  # xor 3
        [0, 1, 0, 1, 2, 3, 4, 5, 8, 9, 8, 9, 10, 11, 12, 13]
        + [16, 17, 16, 17, 18, 19, 20, 21, 24, 25, 24, 25, 26, 27, 28, 29],  # up 2 in segments of 8
        [2, 3, 4, 5, 6, 7, 6, 7, 10, 11, 12, 13, 14, 15, 14, 15]
        + [18, 19, 20, 21, 22, 23, 22, 23, 26, 27, 28, 29, 30, 31, 30, 31],  # down 2
        # xor 4 in segments of 4: earlier segments can be read; for later ones a lane gets its own value
        [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11]
        + [16, 17, 18, 19, 16, 17, 18, 19, 24, 25, 26, 27, 24, 25, 26, 27],
        list(range(31, -1, -1)),  # 8 bytes
    ]


def test_votes(machine):
    results = torch.zeros(5, 32, dtype=torch.int32)
    machine("run_votes", results)
    two_groups = [0x00005555, 0xAAAA0000 - 2**32] * 16
    assert results.tolist() == [[0x49249249] * 32, two_groups, [1] * 32, [0] * 32, [1] * 32]


@pytest.mark.parametrize(("sequences", "most"), ((5, 1), (33, 3), (32, 700), (256, 700)))
def test_attention_takes_the_longest_sequence_first(machine, sequences, most):
    """Sequences of the same length have different ranks; a length beyond max_seqlen counts as max_seqlen."""
    lengths, longest = torch.randint(0, most + 1, (sequences,)), max(1, most - most // 8)
    cu_seqlens, step = F.pad(lengths.cumsum(0), (1, 0)).int(), max(1, sequences // 16)
    found = torch.zeros(sequences, dtype=torch.int32)
    machine("run_order", cu_seqlens, found, sequences, int(cu_seqlens[-1]), longest, step)
    expected = lengths.clamp(max=longest).argsort(descending=True, stable=True)
    assert torch.equal(found.long()[::step], expected[::step])


# ---- faults

RACE = r"race: thread \d+ of block 0 (reads|writes) byte \d+ of the {} bytes of {}, which thread \d+ (wrote|read) at "
GLOBAL = r"race: thread (\d+) of block (0|1) {} an address of global memory that thread \1 of block (?!\2)(0|1) writes"
EARLY_READ = (
    r"thread (\d+) of block 0 reads .* of copied before thread \1 has waited for the cp.async to it at faults.cu"
)
MISALIGNED = r"misaligned: an access of thread \d+ of block 0 to 'struct Vec', .* aligned to {} bytes, at .*faults.cu"
UNALIGNED = r"thread \d+ of block 0 gives {} an address that is not aligned to 16 bytes, at faults.cu"
FAULTS = {  # name: the expected message; which threads it names may depend on their order
    "missing_barrier": RACE.format(256, "values"),
    "reused_buffer": RACE.format(8, "warp_sums"),
    "missing_syncwarp": RACE.format(256, "values"),
    "divergent_barrier": r"divergent __syncthreads: thread \d+ of block 0 is at faults.cu:\d+, thread \d+ at faults",
    "early_return": r"__syncthreads at faults.cu:\d+ waits for threads that have exited, such as thread 5 of block 0",
    "deadlock": "deadlock of block 0: thread 0 is at __syncwarp, thread 3 is at __syncthreads, thread 4 is at __",
    "missing_lane": r"thread (7|39) of block 0 exits while lanes of its warp wait for it at a shuffle",
    "not_in_the_mask": r"thread \d+ of block 0 calls a shuffle with a mask that it is not in",
    "from_outside_the_mask": r"thread (0|32) of block 0 shuffles from lane 20, which is not in the mask",
    "short_wait": EARLY_READ,
    "missing_wait": EARLY_READ,
    "no_wait": r"thread \d+ of block 0 exits with a cp.async under way",
    "wait_without_barrier": RACE.format(1024, "copied"),
    "row_guard": "out of bounds: thread 63 of block 0 writes byte 252 of the 252 bytes of row, at faults.cu",
    "beyond_dynamic": "out of bounds: thread 63 of block 0 writes byte 63 of the 63 bytes of dynamic shared memory",
    "unwritten": r"thread (9|41) of block 0 reads byte (36|164) of the 256 bytes of values, which nothing wrote",
    "misaligned_global": MISALIGNED.format(16),
    "misaligned_shared": MISALIGNED.format(8),
    "misaligned_copy": UNALIGNED.format("cp.async"),
    "misaligned_ldmatrix": UNALIGNED.format("ldmatrix"),
    "misaligned_matrix": r"thread \d+ of block 0 gives wgmma a matrix that is not aligned to 1024 bytes",
    "unfinished_product": r"thread \d+ of block 0 exits with a wgmma under way",
    "missing_warp": r"divergent wgmma: thread 96 has run 0, thread 0 of its warpgroup 1",
    "blocks_collide": GLOBAL.format("writes"),
    "block_reads_another": GLOBAL.format("reads"),
    "large_array": "too much shared memory: 53248 bytes of arrays with values",
    "too_much_dynamic": "bad launch: 232449 bytes of shared memory",
    "empty_grid": r"bad launch: a grid of \(0, 1, 1\) blocks",
    "long_grid": r"bad launch: a grid of \(1, 65536, 1\) blocks",
    "large_block": r"bad launch: a block of \(1025, 1, 1\) threads",
}


@pytest.mark.parametrize("order", cuda_on_cpu.ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(emulated, name, order):
    with cuda_on_cpu.thread_order(order), pytest.raises(RuntimeError, match=FAULTS[name]):
        run(emulated, "run_fault", name.encode(), torch.zeros(1024))


@pytest.mark.parametrize("order", cuda_on_cpu.ORDERS)
@pytest.mark.parametrize("name", ("right: short_wait<0>", "right: with_barriers", "right: counts", "right: matrix"))
def test_what_is_right_is_not_reported(emulated, name, order):
    with cuda_on_cpu.thread_order(order):
        run(emulated, "run_fault", name.encode(), torch.zeros(1024))


def test_a_fault_leaves_nothing_behind(emulated):
    """The threads of a failed launch are abandoned; the next launch starts afresh."""
    results = []
    for _ in range(2):
        results.append(torch.zeros(1024))
        run(emulated, "run_fault", b"right: with_barriers", results[-1])
        for name in FAULTS:
            with pytest.raises(RuntimeError):
                run(emulated, "run_fault", name.encode(), torch.zeros(1024))
    assert torch.equal(*results)


# ---- the package's kernels


def calls(dtype: torch.dtype) -> dict:
    """op -> (function, its tensors)"""
    rows, channels = 7, 72
    x, residual = torch.randn(2, rows, channels, dtype=dtype).unbind()
    weight, bias = torch.randn(2, channels, dtype=dtype).unbind()
    key = fastbert.random.new_key()
    ends = torch.tensor([0, 37, 37, 40, 110], dtype=torch.int32)
    qkv = torch.randn(110, 3, 2, 32, dtype=dtype)
    slots, bias_of_slots = torch.arange(-9, 10).abs().int(), torch.randn(2, 10)
    keys, queries = torch.randn(2, 10, 2, 8, dtype=dtype).unbind()

    dense_weight, dense_bias = torch.randn(16, channels, dtype=dtype), torch.randn(16, dtype=dtype)
    table, bias_of_classes = torch.randn(277, channels, dtype=dtype), torch.randn(277, dtype=dtype)
    labels = torch.randint(277, (rows,))
    ids, lookups = torch.arange(rows).remainder(2).expand(3, -1), torch.randn(3, 4, channels, dtype=dtype).unbind()

    def relative(qkv, *tables):
        positions = ops.RelativePositions(slots, *tables)
        return ops.relative_attention(qkv, ends[:4], 37, positions, dropout_p=0.25, rng=key)

    return {
        "bias_gelu": (ops.bias_gelu, (x, bias)),
        "layer_norm": (ops.layer_norm, (x, weight, bias)),
        "add_layer_norm": (
            lambda *tensors: ops.add_layer_norm(*tensors, dropout_p=0.25, rng=key),
            (x, residual, weight, bias),
        ),
        "embedding": (lambda *tables: ops.embedding(*ids, *tables, dropout_p=0.25, rng=key), (*lookups, weight, bias)),
        "attention": (lambda qkv: ops.attention(qkv, ends, 70, dropout_p=0.25, rng=key), (qkv,)),
        "relative_attention": (relative, (qkv[:40, ..., :8], keys, queries, bias_of_slots)),
        "dense_gelu": (ops.dense_gelu, (x, dense_weight, dense_bias)),
        "cross_entropy": (lambda *tensors: ops.cross_entropy(*tensors, labels), (x, table, bias_of_classes)),
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("op", list(calls(torch.float32)))
def test_order_of_threads_changes_no_bit(op, dtype):
    if torch.cuda.is_available():
        pytest.skip("backend 'cuda' is the GPU's")
    if reason := backends.why_not("cuda", op, "cpu", dtype, backward=True):
        pytest.skip(reason)
    function, tensors = calls(dtype)[op]
    results = []
    for order in cuda_on_cpu.ORDERS:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with cuda_on_cpu.thread_order(order), fastbert.backend("cuda"):
            y = function(*leaves)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for others in zip(*results, strict=True):
        assert all(torch.equal(others[0], other) and other.isfinite().all() for other in others)


def test_sums_over_more_blocks_than_a_tile_of_partial_sums(emulated):
    """132 multiprocessors leave 132 rows of partial sums; integers add up exactly in any order."""
    if torch.cuda.is_available():
        pytest.skip("backend 'cuda' is the GPU's")
    dy, x = integers(2300, 8, dtype=torch.float32), torch.full((2300, 8), 50.0)
    signs = torch.tensor([1.0, -1.0]).repeat(2300, 4)
    mean, rstd = torch.zeros(2300), torch.ones(2300)
    with cuda_on_cpu.multiprocessors(132):
        _, of_gelu = PRIMITIVES["bias_gelu_bwd"]("cuda", dy, x, torch.zeros(8), "none", True)
        _, dweight, dbias = PRIMITIVES["layer_norm_bwd"]("cuda", dy, signs, torch.ones(8), mean, rstd, True)
    assert torch.equal(of_gelu, dy.sum(0)) and torch.equal(dbias, dy.sum(0))
    assert torch.equal(dweight, (dy * signs).sum(0))


def exact(dtype: torch.dtype) -> list[tuple]:
    """(primitive, arguments) with exact results, however the machine rounds exponentials and square roots.

    GELU is the identity or 0 so far from 0; rows of 1 and -1 have a variance of 1; equal scores give means.
    """
    rows, channels = 5, 64
    x, bias = integers(rows, channels, dtype=dtype) * 16, integers(channels, dtype=dtype) * 16
    dy, weight = integers(rows, channels, dtype=dtype), integers(channels, dtype=dtype)
    signs = torch.tensor([1.0, -1.0]).repeat(rows, channels // 2).to(dtype)
    mean, rstd, labels = torch.zeros(rows), torch.ones(rows), torch.tensor([0, 1, -100, 1, 1])
    qkv = integers(96, 3, 2, 64, dtype=dtype)
    qkv[:, 0] = 0
    ends, key = torch.tensor([0, 64, 96], dtype=torch.int32), fastbert.random.new_key()
    return [
        ("bias_gelu_fwd", (x, bias, "none")),
        ("bias_gelu_fwd", (x, bias, "tanh")),
        ("bias_gelu_bwd", (dy, x, bias, "none", True)),
        ("dense_gelu_fwd", (dy, 16 * torch.eye(channels, dtype=dtype), bias, "none", True)),
        ("cross_entropy_fwd", (256 * signs[:, :2], torch.eye(2, dtype=dtype), 2 * weight[:2], labels, -100, True)),
        ("layer_norm_fwd", (signs, weight, bias, 0.0)),
        ("layer_norm_bwd", (dy, signs, weight, mean, rstd, True)),
        ("add_layer_norm_fwd", (x, signs - x, weight, bias, None, None, 0.0, 0.0, 0)),
        ("add_layer_norm_bwd", (dy, x, signs - x, weight, mean, rstd, bias, key, 0.5, 3, True)),
        ("attention_fwd", (qkv, ends, 64, 0.125, 0.5, key, 3)),
    ]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_both_machines_are_exact_where_that_is_possible(emulated, device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this takes a GPU")
    for name, args in exact(dtype):
        args = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
        run = cuda_on_cpu.operator(name) if device == "cpu" else PRIMITIVES[name].operator("cuda")
        results, expected = (
            r if isinstance(r, tuple) else (r,) for r in (run(*args), PRIMITIVES[name].reference(*args))
        )
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(a, b) or (name, i) == ("attention_fwd", 1), (name, i)  # the lse, a logarithm
