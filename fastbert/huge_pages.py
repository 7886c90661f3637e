"""Memory in huge pages for packed weights, which every call reads from beginning to end.

A model has more pages of 4 KiB than a processor's TLB has entries, so reading its weights causes TLB misses again and
again. Packed weights are therefore placed one after the other in large regions, for which Linux is asked for pages of
2 MiB. A region is freed with the last of its tensors.
"""

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

REGION = 32 << 20  # bytes; pages that no tensor has filled take no memory
_LINE = 64  # bytes; tensors are aligned to cache lines

_lock = threading.Lock()
_last: weakref.ref[mmap.mmap] | None = None
_taken = 0  # bytes in use of the last region


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty on the CPU, in huge pages if the system has them."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    region, offset = _take(size)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=offset).view(shape)


def _take(size: int) -> tuple[mmap.mmap, int]:
    """A region, and the offset of `size` free bytes in it."""
    global _last, _taken
    with _lock:
        region = _last and _last()
        if region is None or _taken + size > len(region):
            region = _region(max(size, REGION))
            _last, _taken = weakref.ref(region), 0
        offset = _taken
        _taken += -(-size // _LINE) * _LINE
    return region, offset


def _region(size: int) -> mmap.mmap:
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _begin_anew() -> None:
    """Resets the state in a forked process, because a thread of the parent may have held the lock."""
    global _lock, _last
    _lock, _last = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
