"""`pytest benchmarks` finds bench_*.py; plain `pytest` does not come here (testpaths)."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--size", default="quick", choices=("tiny", "quick", "full"), help="shapes: benchmarks/sizes.py")
    parser.addoption("--layers", type=int, help="layers of the encoder benchmarks; default: each size's own")


def pytest_collect_file(file_path, parent):
    if file_path.match("bench_*.py"):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
