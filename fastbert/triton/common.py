"""Shared by all Triton kernels: choosing a configuration, launching, and the random numbers of dropout.

Kernel files import torch, triton and each other only. Nothing is tuned at run time: each kernel file has a table of
configurations, by architecture and shape, and `python -m benchmarks.gpu.triton_report` compiles all of them.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

T = TypeVar("T")

# ---- configurations


@dataclass(frozen=True)
class Config:
    """How a kernel is compiled: its tile sizes (constexpr arguments by name), warps, and stages of its pipelines."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        """The options of Triton's compiler, passed to the kernel beside its arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


_assumed: int | None = None  # the architecture that `recorded` configures for


@functools.cache
def _properties(index: int) -> tuple[int, int]:
    """(architecture as 10 * major + minor, multiprocessors) of a GPU."""
    found = torch.cuda.get_device_properties(index)
    return 10 * found.major + found.minor, found.multi_processor_count


def architecture(device: torch.device) -> int:
    """80, 90, 100, ...: a key of the configuration tables. The interpreter runs Hopper's configurations.

    80 for sm_120 and sm_121 too: like sm_86 and sm_89, they multiply with mma.sync and have 99 KiB of shared memory.
    """
    here = _assumed
    if here is None:
        here = _properties(device.index or 0)[0] if device.type == "cuda" else 90
    return 80 if here >= 120 else here


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device. 4 in the interpreter, so that tests run several programs."""
    if device.type != "cuda":
        return 4 if _assumed is None else 132
    return _properties(device.index or 0)[1]


def pick(table: Mapping[int, Callable[..., T]], device: torch.device, *shape) -> T:
    """The entry for a shape of the newest architecture in the table that is not newer than the device's."""
    here = architecture(device)
    known = [arch for arch in table if arch <= here] or [min(table)]
    return table[max(known)](*shape)


# ---- launching

Launcher = Callable[..., None]


def _launch_now(kernel, grid: Sequence[int], args: tuple, config: Config, constants: Mapping[str, object]) -> None:
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[tuple(grid)](*args, **config.tiles, **constants, **config.options)


_launcher: Launcher = _launch_now


def launch(kernel, grid: Sequence[int], *args, config: Config, **constants) -> None:
    """Runs kernel(*args, **config.tiles, **constants) on the device and current stream of its tensors.

    args: tensors (None for an absent one), ints and floats, in the kernel's order. constants: constexpr arguments.
    An empty grid launches nothing.
    """
    if 0 not in grid:
        _launcher(kernel, grid, args, config, constants)


@contextlib.contextmanager
def recorded(architecture: int, launcher: Launcher) -> Iterator[None]:
    """Within this block, launches configured for `architecture` go to `launcher`, not to a GPU. For compile reports."""
    global _assumed, _launcher
    before = _assumed, _launcher
    _assumed, _launcher = architecture, launcher
    try:
        yield
    finally:
        _assumed, _launcher = before


def rows_of(x: Tensor) -> Tensor:
    """(..., C) as contiguous (rows, C)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def precision(x: Tensor) -> str:
    """How tl.dot multiplies float32: "tf32" where PyTorch's setting allows it for its own products, else "ieee"."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# ---- random numbers, as fastbert/random.py defines them


def dropout(p: float, bits: int) -> tuple[int, float]:
    """(threshold, scale): elements whose `bits` random bits are below the threshold are dropped, the others scaled."""
    dropped = round(p * 2**bits)
    return dropped, 2**bits / (2**bits - dropped)


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Philox4x32-7; counters are uint32 tensors of one shape, keys uint32 scalars."""
    for _ in tl.static_range(7):
        hi0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        hi2 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        lo0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        lo2 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = hi2 ^ c1 ^ k0, lo2, hi0 ^ c3 ^ k1, lo0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def site_key(rng, site):
    """The two key words of a site; rng points to one int64."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15 - (1 << 64)
    offset = tl.mul(tl.full((), golden, tl.int64), site.to(tl.int64), sanitize_overflow=False)
    key = tl.add(tl.load(rng), offset, sanitize_overflow=False).to(tl.uint64, bitcast=True)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def row_keep(k0, k1, token, first_channel, threshold, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """[ROWS, CHANNELS] bool: the elements that dropout of a row op keeps. token: the rows, [ROWS] int64.

    CHANNELS and first_channel are multiples of 8. One call of philox decides 8 channels, with 16 bits each.
    """
    GROUPS: tl.constexpr = CHANNELS // 8
    zero = tl.zeros((ROWS, GROUPS), tl.uint32)
    group = (first_channel // 8 + tl.arange(0, GROUPS)).to(tl.uint32)
    low, high = (token & 0xFFFFFFFF).to(tl.uint32), (token >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(k0, k1, zero + group[None, :], zero + low[:, None], zero + high[:, None], zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, GROUPS, x, y], word 2x + y
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, CHANNELS)) >= threshold
