"""python -m benchmarks.run: cases with contenders interleaved, a table for each, one JSON file for each group.

A file is written anew after every case, so a run that is stopped leaves what it has: in NAME.partial.json where
NAME.json has cases that it did not come to. The last table has one line for each case. `pytest benchmarks` runs cases
one contender at a time under pytest-benchmark. docs/benchmarks.md says what the numbers mean.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import fastbert
from benchmarks import cases, contenders, floor, harness, lengths, provenance, selection, sizes, summary
from benchmarks.cases import How, Spec

RESULTS = Path(__file__).resolve().parent / "results"
DIRECTIONS = {"forward": cases.FORWARD, "backward": cases.BACKWARD, "dropout": cases.DROPOUT, "step": cases.STEP}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--groups", nargs="+", choices=selection.GROUPS, default=selection.DEFAULT)
    add("--parts", nargs="+", metavar="PART", help="of the groups: model, encoder, 'masked LM', attention, ...")
    add("--models", nargs="+", choices=sizes.MODELS, help="with any of the next four: everything with everything")
    add("--shapes", nargs="+", metavar="BxS", help="batch x sequence length, as in 8x128")
    add("--layers", type=_positive, help="of the models")
    add("--lengths", nargs="+", choices=lengths.DISTRIBUTIONS)
    add("--directions", nargs="+", choices=DIRECTIONS)
    add("--dtypes", nargs="+", choices=cases.DTYPES, help="default: what the device is good for")
    add("--size", choices=sizes.NAMES, default="full", help="tiny and quick are one small shape each")
    add("--quick", dest="size", action="store_const", const="quick", help="small shapes, few rounds")
    add("--contenders", nargs="+", choices=contenders.NAMES, metavar="NAME", help="only these, beside PyTorch's own")
    add("--compile", action="store_true", help="also contenders that take minutes to make: torch.compile")
    add("--skip", type=_count, default=0, metavar="N", help="leave out the first N cases, as after a lost GPU")
    add("--minutes", type=float, default=math.inf, help="no case begins after that; what is left out is named")
    add("--rounds", type=_positive, help="at most; default: 5 for small sizes, 20")
    add("--verify-only", action="store_true", help="accuracy of every contender, no times, no files")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="folder of the JSON files; default benchmarks/results/<device>")
    add("--name", help="of one JSON file for all groups; default: one for each group")
    add("--seed", type=int, help="of weights and inputs; default: a new one")
    add("--commit", help="for the results, where the tree has no git history")
    options = parser.parse_args(words)
    options.directions = [DIRECTIONS[name] for name in options.directions or ()]
    try:
        options.specs = selection.specs(options)[options.skip :]
    except ValueError as error:
        parser.error(str(error))
    return options


def _count(word: str) -> int:
    return 0 if word == "0" else _positive(word)


def _positive(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return int(word)


class GpuLost(Exception):
    """An error of the device that outlives the call that made it: nothing can be measured in this process any more."""


def require_device(device: str) -> None:
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLost(harness.failure(error)) from error


@dataclass
class Group:
    """What a results file says. left_out: cases without a report, and why. before: cases that the file has had."""

    path: Path
    reports: list[harness.Report] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    before: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.before = {summary.key(report["case"]) for report in json.loads(self.path.read_text())["reports"]}

    @property
    def target(self) -> Path:
        """A run that did not come to all cases of an older one does not take its place."""
        done = {summary.key(report.case) for report in self.reports}
        return self.path if self.before <= done else self.path.with_suffix(".partial.json")


def path_of(name: str, options: argparse.Namespace) -> Path:
    """Of a results file. What is compiled or small has a name of its own."""
    ending = [options.size] * (options.size != "full") + ["compile"] * (options.compile and not options.name)
    ending += [f"from_{options.skip + 1}"] * (options.skip > 0)
    return (options.out or RESULTS / options.device) / f"{'_'.join([name, *ending])}.json"


class Run:
    """One run over cases."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.deadline = options, time.monotonic() + 60 * options.minutes
        self.groups = {name: Group(path_of(options.name or name, options)) for name in options.groups}
        if options.name:
            self.groups = dict.fromkeys(options.groups, self.groups[options.groups[0]])
        self.environment = provenance.environment(options.commit) | {"seed": options.seed}
        self.bad: list[str] = []
        self.lost: str | None = None

    def run(self) -> None:
        """All cases in turn. A case that fails is left out; on an interrupt, all that are left are."""
        reason = None
        for number, (name, spec) in enumerate(self.options.specs, self.options.skip + 1):
            reason = reason or ("no time was left" if self.left() <= 0 else None)
            try:
                if not reason:
                    self.report(name, spec)
            except KeyboardInterrupt:
                reason = "interrupted"
            except Exception as error:  # the other cases are worth having
                self.leave_out(name, spec, harness.failure(error))
                self.bad.append(str(spec))
            try:
                if not reason:
                    require_device(self.options.device)
            except GpuLost as error:
                self.lost = f"GPU lost in case {number}: {spec}"
                reason = f"the GPU was lost in case {number}: {error}"
                continue
            if reason:
                self.leave_out(name, spec, reason)
        for group in self.files():
            self.write(group)

    def files(self) -> list[Group]:
        return list({group.path: group for group in self.groups.values()}.values())

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def how(self) -> How:
        full = self.options.size == "full"
        rounds = 0 if self.options.verify_only else self.options.rounds or (20 if full else 5)
        limit = min(10.0 if full else 1.0, self.left())
        return How(self.options.device, rounds, limit, self.options.contenders, self.options.compile)

    def report(self, name: str, spec: Spec) -> None:
        if not self.options.verify_only:
            floor.ceilings(self.options.device, spec.kind)  # kept: a GPU that is lost later has told them
        report, group = selection.GROUPS[name].report(spec, self.how()), self.groups[name]
        print(report.table(), end="\n\n", flush=True)
        group.reports.append(report)
        wrong = (row.name for row in report.rows if row.problem and row.name.startswith("fastbert"))
        self.bad += [f"{name}: {spec}" for name in wrong]
        self.write(group)

    def leave_out(self, name: str, spec: Spec, reason: str) -> None:
        print(f"{spec}\n  LEFT OUT: {reason}\n", flush=True)
        self.groups[name].left_out.append({"case": str(spec), "reason": reason})

    def write(self, group: Group) -> None:
        """Not without a report: an older file is worth more than an empty one."""
        if self.options.verify_only or not group.reports:
            return
        types = {report.case["dtype"] for report in group.reports}
        known = {name: asdict(floor.ceilings(self.options.device, cases.DTYPES[name])) for name in sorted(types)}
        harness.write(group.target, group.reports, self.environment | {"ceilings": known, "left_out": group.left_out})
        if group.target == group.path:
            group.path.with_suffix(".partial.json").unlink(missing_ok=True)

    def conclude(self) -> int:
        """Prints one line for each case. 1 if fastbert was wrong or failed somewhere, 3 if the GPU was lost."""
        done = [report.to_dict() for group in self.files() for report in group.reports]
        print(summary.text(done))
        if not self.lost:
            fastbert.explain()
        left_out = sum(len(group.left_out) for group in self.files())
        print(f"\n{len(done)} cases; {left_out} left out" if left_out else f"\n{len(done)} cases")
        print("\n".join(["wrong or failed:", *self.bad]) if self.bad else "fastbert was right everywhere")
        for group in self.files():
            if group.target != group.path and group.reports:
                print(f"{group.path} has cases that this run did not come to, and stays: see {group.target.name}")
        print(self.lost or "", end="\n" if self.lost else "")
        return 3 if self.lost else 1 if self.bad else 0


def main(words: list[str] | None = None) -> int:
    """1 if a contender of fastbert was wrong or failed, or a whole case did; 3 if the GPU was lost on the way."""
    options = arguments(words)
    options.seed = torch.seed() if options.seed is None else options.seed
    torch.manual_seed(options.seed)
    machine = provenance.machine()
    if machine["load"] > 0.5 * machine["cores"]:
        print(f"warning: load {machine['load']} on {machine['cores']} cores: others are busy, times will be too long\n")
    run = Run(options)
    run.run()
    return run.conclude()


if __name__ == "__main__":
    sys.exit(main())
