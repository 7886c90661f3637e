"""Memory of packed weights: no two share any, it lasts as long as they are in use, and it may have huge pages."""

import gc
import mmap
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from fastbert import huge_pages, ops
from fastbert.prepared import PreparedLinear

needs_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux alone")
SMAPS = Path("/proc/self/smaps")


def overlap(tensors):
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    return any(end > begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def flags_of(address):
    """Linux's flags of the mapping that an address is in."""
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([^\n]*)", SMAPS.read_text(), re.M | re.S)
    return next(flags.split() for begin, end, flags in found if int(begin, 16) <= address < int(end, 16))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int8), ids=str)
@pytest.mark.parametrize("shape", ((1,), (3, 5, 7), (0, 4), (), (2, huge_pages.REGION // 4 + 3)), ids=str)
def test_a_tensor_like_any_other(shape, dtype):
    with torch.device("meta"):  # the default device while a model is built without memory
        made = huge_pages.empty(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.device.type == "cpu" and made.is_contiguous()
    assert made.data_ptr() % 64 == 0
    assert torch.equal(made.fill_(3), torch.full(shape, 3, dtype=dtype))
    assert made.untyped_storage().nbytes() == made.nbytes  # so that a saved tensor takes no more


def test_none_has_memory_of_another():
    region = huge_pages.REGION
    sizes = [1, 63, 64, 65, 1 << 20, region - 5, region + 5, 1, 3 << 20, region // 2, 7]
    made = [huge_pages.empty((size,), torch.int8).fill_(i) for i, size in enumerate(sizes)]
    assert not overlap(made)
    assert all((tensor == i).all() for i, tensor in enumerate(made))


def test_none_has_memory_of_another_threads():
    made = []

    def work():
        made.extend([huge_pages.empty((4097,), torch.int8) for _ in range(500)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 4000 and not overlap(made)


@needs_linux
def test_a_region_goes_with_the_last_of_its_tensors():
    large = huge_pages.REGION - (1 << 20)
    huge_pages._last = None  # begins a new region, without other tests' tensors
    first = huge_pages.empty((large,), torch.int8)
    second = huge_pages.empty((1000,), torch.int8).fill_(7)
    region = huge_pages._last
    assert second.data_ptr() == first.data_ptr() + large
    del first
    gc.collect()
    assert region() is not None and (second == 7).all()
    view = second[3:]
    del second
    gc.collect()
    assert (view == 7).all()
    del view
    gc.collect()
    assert region() is None
    assert huge_pages.empty((5,), torch.int8).fill_(1).sum() == 5


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="no forks")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parents():
    with huge_pages._lock:
        child = os.fork()
        if not child:
            signal.alarm(10)
            os._exit(int(huge_pages.empty((5,), torch.int8).fill_(1).sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def skip_without_huge_pages():
    """Skips if this kernel has none, and fails if it has."""
    with mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE) as plain, pytest.raises(OSError):
        plain.madvise(mmap.MADV_HUGEPAGE)
    pytest.skip("this kernel has no huge pages")


@needs_linux
@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps")
def test_linux_is_asked_for_huge_pages():
    made = PreparedLinear.of(nn.Linear(1024, 1024), "fp32")
    if "hg" not in flags_of(made.weight.data_ptr()):
        skip_without_huge_pages()


@needs_linux
@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps")
def test_the_gradient_of_a_large_vocabulary():
    """It is that of a table with only the rows that are used, zero elsewhere, and in huge pages."""
    ids, positions = torch.tensor([7, 19_999, 7, 12_345]), torch.arange(4)
    weight, bias = torch.ones(1024), torch.zeros(1024)
    small, of_positions = torch.randn(3, 1024), torch.randn(4, 1024)
    large = torch.zeros(20_000, 1024).index_copy(0, ids[[0, 1, 3]], small)
    gradients = []
    for table, rows in ((large, ids), (small, torch.tensor([0, 1, 0, 2]))):
        y = ops.embedding(rows, positions, None, table.requires_grad_(), of_positions, None, weight, bias)
        gradients += torch.autograd.grad(y, table, torch.arange(4096.0).view(4, 1024).sin())
    assert torch.equal(gradients[0][ids[[0, 1, 3]]], gradients[1]) and gradients[1].all(1).all()
    assert gradients[0].count_nonzero() == gradients[1].count_nonzero()
    if "hg" not in flags_of(gradients[0][10_000].data_ptr()):
        skip_without_huge_pages()
