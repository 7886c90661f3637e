"""`pytest benchmarks` collects bench_*.py; plain `pytest` does not look into this folder (testpaths)."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--size", default="quick", choices=("tiny", "quick", "full"), help="shapes: benchmarks/batch.py")
    parser.addoption("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the device is good for")
    parser.addoption("--slow", action="store_true", help="also contenders that take minutes to make (torch.compile)")


def pytest_collect_file(file_path, parent):
    return pytest.Module.from_parent(parent, path=file_path) if file_path.match("bench_*.py") else None


@pytest.fixture
def alone(benchmark, request):
    """Verifies one contender on one case and lets pytest-benchmark time it, or skips it with the reason."""
    from benchmarks import batch, cases, comparison, contenders

    device, option = "cuda" if torch.cuda.is_available() else "cpu", request.config.getoption

    def run(setup, part, distribution, direction, who):
        slow = {contender.name for contender in contenders.ALL if contender.slow_to_make}
        if who in slow and not option("--slow"):
            pytest.skip("slow to make: --slow")
        full = batch.size_of("8x128", layers=2) if device == "cpu" else batch.size_of("32x128")
        dtype = option("--dtype") or cases.dtypes(device)[0]
        spec = cases.Spec(part, batch.SMALL.get(option("--size"), full), distribution, dtype, direction)
        call, reason = comparison.alone(spec, setup(spec, device), who)
        if call is None:
            pytest.skip(reason)
        benchmark.group = f"{part} {direction} {dtype} {distribution}"
        benchmark(call if device == "cpu" else lambda: (call(), torch.cuda.synchronize()))

    return run
