"""The ops that are farthest from their floor, each run once while a profiler listens.

    ncu --profile-from-start off python -m benchmarks.gpu.worst --results DIR/ops.jsonl [--number 3] [--size full]

They are chosen by the floor's share of fastbert's time in the results file, with one case, the worst, for each op and
direction.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks import batch, bench_ops, comparison, report, run
from benchmarks.report import Case


def worst(cases: Iterable[Case], number: int) -> list[tuple[float, Case]]:
    """(percent of the floor, case), the lowest first, with only one case for each op and direction."""
    found = [(report.share(case.own, "floor"), case) for case in cases if "floor" in case.own and "op" in case.facts]
    first: dict[tuple, tuple[float, Case]] = {}
    for share, case in sorted(found, key=lambda one: one[0]):
        first.setdefault((case.facts["op"], case.facts["direction"]), (share, case))
    return list(first.values())[:number]


def spec_of(case: Case, size: str) -> run.Spec:
    """Raises ValueError for a case that the table of cases does not have, such as one of --shapes."""
    words = ["--groups", "ops", "--size", size, "--dtypes", case.facts["dtype"]]
    words += ["--directions", next(word for word, name in run.DIRECTIONS.items() if name == case.facts["direction"])]
    for _, spec in run.arguments(words).specs:
        if spec.facts().items() <= case.facts.items():
            return spec
    raise ValueError(f"{case.title} is no case of --groups ops --size {size}, and cannot be run again")


def listened_to(spec: run.Spec, device: str) -> None:
    """Runs fastbert's call of a case under the profiler, verified and warmed up before."""
    call, problem = comparison.alone(spec, bench_ops.setup(spec, device), "fastbert")
    if problem:
        raise RuntimeError(problem)
    call()
    if device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worst", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--number", type=int, default=3)
    parser.add_argument("--size", choices=(*batch.SMALL, "full"), default="full", help="as of the results")
    options = parser.parse_args()
    try:
        found = worst(report.read_file(options.results).cases, options.number)
        specs = [spec_of(case, options.size) for _, case in found]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not specs:
        parser.error(f"{options.results} has no op with a floor")
    for (share, case), spec in zip(found, specs, strict=True):
        print(f"{case.title}, {case.facts['dtype']}: {share:.0f} % of the floor", flush=True)
        listened_to(spec, "cuda" if torch.cuda.is_available() else "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
