"""python -m benchmarks.run: cases with contenders interleaved, a table for each, one results file for each group.

A file is written anew after every case, so a run that is stopped keeps its results: in NAME.partial.jsonl if NAME.jsonl
has cases, or contenders in them, that the run does not have. The last table has one line for each case.
`pytest benchmarks` runs cases one contender at a time under pytest-benchmark. docs/benchmarks.md says what the numbers
mean.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

import torch

import fastbert
from benchmarks import (
    batch,
    bench_models,
    bench_ops,
    cases,
    comparison,
    contenders,
    floor,
    harness,
    provenance,
    report,
    retrieval,
)
from benchmarks.cases import LIBRARY, Spec
from benchmarks.comparison import How
from benchmarks.contenders.interface import OPS
from benchmarks.options import count, duration, positive, writable
from fastbert import files

SAME = ("machine", "versions", "dirty", "kernels")  # beside the commit, what a run that adds to another has to share
RESULTS = Path(__file__).resolve().parent / "results"
DIRECTIONS = {"forward": cases.FORWARD, "backward": cases.BACKWARD, "alone": cases.ALONE}
DIRECTIONS |= {"dropout": cases.DROPOUT, "step": cases.STEP}
_OTHERS = ("PyTorch varlen_attn", "flash-attention")
GROWTH = ("transformers sdpa", "PyTorch", "fastbert", "fastbert, packed input", *_OTHERS)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", nargs="+", choices=cases.GROUPS, default=cases.DEFAULT)
    add("--parts", nargs="+", metavar="PART", help="of the groups: model, encoder, 'masked LM', attention, ...")
    add("--models", nargs="+", choices=batch.MODELS, help="this and the next five: in place of what the table has")
    add("--shapes", nargs="+", metavar="BxS", help="batch x sequence length, as in 8x128")
    add("--layers", type=positive, help="of the models")
    add("--lengths", nargs="+", choices=batch.DISTRIBUTIONS)
    add("--directions", nargs="+", choices=DIRECTIONS)
    add("--dtypes", nargs="+", choices=cases.DTYPES, help="default: what the device is good for")
    add("--size", choices=(*batch.SMALL, "full"), default="full", help="tiny and quick are one small shape each")
    add("--quick", dest="size", action="store_const", const="quick", help="small shapes, few rounds")
    add("--contenders", nargs="+", choices=contenders.NAMES, metavar="NAME", help="only these, beside PyTorch's own")
    add("--compile", action="store_true", help="also contenders that take minutes to make: torch.compile")
    add("--skip", type=count, default=0, metavar="N", help="go on behind case N")
    add("--add", action="store_true", help="to what the results file has, if it is of the same commit and machine")
    add("--ceilings", type=Path, help="file of benchmarks.gpu.ceilings, in place of measuring them again")
    add("--minutes", type=duration, default=math.inf, help="no case begins after that; others are named")
    add("--rounds", type=positive, help="at most; default: 5 for small sizes, 20")
    add("--verify-only", action="store_true", help="accuracy of every contender, no times, no files")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="folder of the results; default benchmarks/results/<device>")
    add("--name", help="of one file for all groups; default: one for each group")
    add("--seed", type=int, help="of weights and inputs; default: a new one")
    add("--commit", help="for the results, where git does not know the tree's")
    options = parser.parse_args(words)
    options.directions = [DIRECTIONS[name] for name in options.directions or ()]
    try:
        floor.use(options.ceilings) if options.ceilings else None
        specs = cases.specs(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.skip > len(specs):
        parser.error(f"--skip {options.skip}: there are {len(specs)} cases")
    options.specs = specs[options.skip :]
    return options


# ---- results files


class Results:
    """One results file: a head, and a line for each contender and case."""

    def __init__(self, name: str, options: argparse.Namespace, head: dict[str, object]) -> None:
        """Results of small sizes, and with torch.compile, go to files with names of their own."""
        ending = [options.size] * (options.size != "full") + ["compile"] * (options.compile and not options.name)
        self.path = (options.out or RESULTS / options.device) / f"{'_'.join([name, *ending])}.jsonl"
        self.partial = self.path.with_suffix(".partial.jsonl")
        self.ceilings: dict[str, dict] = {}
        self.head, self.lines = head | {"ceilings": self.ceilings, "left_out": []}, []
        self.before = _tried(_read(self.path)[1])  # in the file of an older run
        for path in (self.partial, self.path) if options.add else ():
            old, lines = _read(path)
            if lines and old["commit"] == head["commit"] and not self.lines:
                self._continue(path, old, lines, {str(spec) for _, spec in options.specs})

    def _continue(self, path: Path, old: dict, lines: list[dict], to_do: set[str]) -> None:
        """Adds to an older run's lines. Raises ValueError unless its numbers can stand beside this run's."""
        for name in SAME:
            if old.get(name) != self.head[name]:
                known = f"its {name} is {old.get(name)}, this run's {self.head[name]}"
                raise ValueError(f"{path} cannot be added to: {known}")
        again = {name: self.head[name] for name in ("date", "command", "seed", "ceilings")}
        kept = [left for left in old["left_out"] if left["case"] not in to_do]
        self.head, self.lines = old | {"left_out": kept, "continued": [*old.get("continued", ()), again]}, lines

    @property
    def target(self) -> Path:
        """The file to write: results do not replace an older file unless they have all its cases and contenders."""
        return self.path if self.before <= _tried(self.lines) else self.partial

    def add(self, done: harness.Report, device: str) -> None:
        found = done.lines()
        self.lines = [line for line in self.lines if line["case"] != found[0]["case"]] + found
        dtype = done.case["dtype"]
        rates = dataclasses.asdict(floor.ceilings(device, cases.DTYPES[dtype]))
        self.ceilings[dtype] = {k: v if isinstance(v, str) else harness.rounded(v) for k, v in rates.items()}

    def write(self) -> None:
        """Writes nothing without a case: an older file is worth more than an empty one."""
        if not self.lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            json.dumps(line, separators=(",", ":"), allow_nan=False)
            for line in (self.head, *report.shortened(self.lines))
        )
        files.write_text(self.target, "\n".join(lines) + "\n")
        if self.target == self.path:
            self.partial.unlink(missing_ok=True)


GPU_LOST = "the GPU was lost in case"


def _tried(lines: list[dict]) -> set[tuple[str, str]]:
    """(case, contender) of all that were not absent."""
    return {(json.dumps(line["case"], sort_keys=True), line["name"]) for line in lines if "absent" not in line}


def _read(path: Path) -> tuple[dict, list[dict]]:
    """Head and lines of a results file; both empty if it is missing. Raises ValueError if it is no results file."""
    if not path.exists():
        return {}, []
    file = report.read_file(path)
    return dict(file.head), [line for case in file.cases for line in case.lines.values()]


# ---- running


class GpuLost(Exception):
    """A device error that persists after the call that caused it: this process cannot measure anything any more."""


def require_device(device: str) -> None:
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLost(harness.failure(error)) from error


def measured(spec: Spec, how: How) -> harness.Report:
    if spec.part in LIBRARY:
        return retrieval.report(spec, how)
    if spec.grows:
        how = dataclasses.replace(how, names=[name for name in GROWTH if how.names is None or name in how.names])
    return comparison.report(spec, (bench_ops if spec.part in OPS else bench_models).setup(spec, how.device), how)


class Run:
    """One run over cases."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises ValueError and OSError if the device is missing, or the results have no place to go."""
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch finds no GPU")
        self.options, self.deadline = options, time.monotonic() + 60 * options.minutes
        head = json.loads(json.dumps(provenance.head(options.commit, options.seed)))  # as a file gives it back
        names = dict.fromkeys(options.name or group for group in options.groups)
        self.files = {name: Results(name, options, head) for name in names}
        for results in self.files.values() if not options.verify_only else ():
            writable(results.path.parent)
        self.done: list[harness.Report] = []
        self.bad: list[str] = []
        self.lost: str | None = None
        self.cut: str | None = None
        self.right = 0  # results of fastbert

    def run(self) -> None:
        """Runs all cases in turn. A case that fails is left out; after an interrupt, so are all remaining ones."""
        reason, behind = None, self.options.skip
        for number, (group, spec) in enumerate(self.options.specs, behind + 1):
            results = self.files[self.options.name or group]
            reason = reason or ("no time was left" if time.monotonic() >= self.deadline else None)
            failed = reason
            if not reason:
                print(f"case {number} of {behind + len(self.options.specs)}", flush=True)
            try:
                if not reason:
                    self.measure(spec, results)
            except KeyboardInterrupt:
                reason = failed = "interrupted"
            except Exception as error:  # the other cases run all the same
                failed = harness.failure(error)
                self.bad.append(str(spec))
            if reason and not self.lost and not self.cut:
                self.cut = f"cut off before case {number}: {spec}"
            if failed:
                print(f"{spec}\n  LEFT OUT: {failed}\n", flush=True)
                results.head["left_out"].append({"case": str(spec), "reason": failed})
            try:
                require_device(self.options.device) if not reason else None
            except GpuLost as error:
                self.lost = f"GPU lost in case {number}: {spec}"
                reason = f"{GPU_LOST} {number}: {error}"
        for results in self.files.values():
            self.write(results)

    def measure(self, spec: Spec, results: Results) -> None:
        options, full = self.options, self.options.size == "full"
        rounds = 0 if options.verify_only else options.rounds or (20 if full else 5)
        limit = min(10.0 if full else 1.0, self.deadline - time.monotonic())
        if rounds:
            floor.ceilings(options.device, spec.kind)  # measured now and kept, in case the GPU is lost later
        done = measured(spec, How(options.device, rounds, limit, options.contenders, options.compile))
        print(report.in_full(report.cases_of(done.lines())[0]), end="\n\n", flush=True)
        self.done.append(done)
        ours = [row for row in done.rows if report.is_ours(row.name)]
        self.bad += [f"{row.name}: {spec}" for row in ours if row.problem]
        self.right += sum(bool(row.accuracy) and not row.problem for row in ours)
        if rounds:
            results.add(done, options.device)
            self.write(results)

    def write(self, results: Results) -> None:
        if not self.options.verify_only:
            results.write()

    def conclude(self) -> int:
        """Prints one line for each case. Returns 1 if fastbert was wrong or failed somewhere, 3 if the GPU was lost."""
        found = report.cases_of(line for done in self.done for line in done.lines())
        print(*report.tables(found).values(), *map("not installed: {}".format, report.not_installed(found)), sep="\n\n")
        print("\nunder a name: its time over fastbert's; above 1 fastbert is faster (docs/benchmarks.md has the rest)")
        if not self.lost:
            fastbert.explain()
        left_out = sum(len(results.head["left_out"]) for results in self.files.values())
        print(f"\n{len(found)} cases" + f"; {left_out} left out" * bool(left_out))
        good = "fastbert was right everywhere" if self.right else "fastbert took no part"
        print("\n".join(["wrong or failed:", *self.bad]) if self.bad else good)
        for results in self.files.values():
            if results.lines and results.target != results.path:
                lacks = f"{results.path} has cases or contenders that this run lacks, and stays"
                print(f"{lacks}: see {results.target.name}")
        print(self.lost or self.cut or "", end="\n" if self.lost or self.cut else "")
        return 3 if self.lost else 1 if self.bad else 0


def main(words: list[str] | None = None) -> int:
    """Returns 1 if one of fastbert's contenders was wrong or failed, or a whole case failed; 3 if the GPU was lost; 2,
    before anything is measured, if results could not be written."""
    options = arguments(words)
    options.seed = torch.seed() if options.seed is None else options.seed
    torch.manual_seed(options.seed)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.5 * cores:
        print(f"warning: load {load:.2f} on {cores} cores: others are busy, times will be too long\n")
    try:
        run = Run(options)
    except (OSError, ValueError) as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return 2
    run.run()
    return run.conclude()


if __name__ == "__main__":
    sys.exit(main())
