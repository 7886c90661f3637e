"""`pytest benchmarks` finds bench_*.py; plain `pytest` does not come here (testpaths)."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--size", default="quick", choices=("tiny", "quick", "full"), help="shapes: benchmarks/sizes.py")
    parser.addoption("--layers", type=int, help="layers of the models of --size full; default: two on a CPU")
    parser.addoption("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the device is good for")
    parser.addoption("--slow", action="store_true", help="also contenders that take minutes to make (torch.compile)")


def pytest_collect_file(file_path, parent):
    if file_path.match("bench_*.py"):
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def alone(benchmark, request, device):
    """Verifies one contender on one case and lets pytest-benchmark time it; or skips it, and says why."""
    from benchmarks import cases, contenders, harness, selection, sizes

    option = request.config.getoption

    def run(setup, part, distribution, direction, who):
        slow = {contender.name for contender in contenders.ALL if contender.slow_to_make}
        if who in slow and not option("--slow"):
            pytest.skip("slow to make: --slow")
        layers = option("--layers") or selection.LAYERS[device]
        size = sizes.SMALL.get(option("--size")) or sizes.of(selection.SHAPE[device], layers=layers)
        dtype = option("--dtype") or selection.dtypes(device)[0]
        spec = cases.Spec(part, size, distribution, dtype, direction)
        call, reason = cases.alone(spec, setup(spec, device), who, device)
        if call is None:
            pytest.skip(reason)
        benchmark.group = f"{part} {direction} {dtype} {distribution}"
        benchmark(harness.synchronised(call, device))

    return run
