"""One thread, and ceilings that are measured in no time."""

import pytest
import torch

from benchmarks import floor, harness


@pytest.fixture(autouse=True)
def one_thread():
    """Uses one thread: on a busy machine, the threads of tiny ops wait for each other far longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    """Measures each ceiling with a single sample: no test depends on their values."""
    monkeypatch.setattr(floor, "_seconds", lambda call, device: max(harness.host_timer()(call, 1), 1e-9))
