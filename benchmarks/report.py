"""python -m benchmarks.report: docs/performance.md and its plots, from the files of benchmarks.run and nothing else.

Reads RESULTS/<device>/*.jsonl, draws RESULTS/<device>/speedup.svg, and writes the page: a table for each file, with the
origin of its numbers, and a list of all cases in which another contender is faster than fastbert. Files of small sizes
(_tiny, _quick) and of runs that were cut short (.partial) are ignored.

A row compares one form of fastbert with the other contenders: the first of OURS that took part, the form that demands
the least of a user, and each of PREPARED. A ratio is a contender's time over that form's, the median over the rounds of
one interleaved run: above 1 fastbert is faster.
"""

import argparse
import difflib
import io
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import spread

ROOT = Path(__file__).resolve().parent.parent
NO_RESULTS = ("_tiny", "_quick", ".partial")  # in names
TREE = {None: " (tree not checked)", True: " and changes", False: ""}  # by `dirty`; None where there was no git
_SKIP = "fastbert.accelerate, skip_logits"
OURS = ("fastbert", "fastbert.accelerate", _SKIP, "fastbert, packed input", "fastbert.graph")
PREPARED = {"fastbert.prepare": "{}, prepared"} | {f"fastbert.prepare, {q}": f"{q}, prepared" for q in ("int8", "fp8")}
MODELS = {768: "base", 1024: "large"}
SHORT = {
    "transformers sdpa": "HF SDPA",
    "transformers eager": "HF eager",
    "transformers, torch.compile": "HF compiled",
    "transformers flash_attention_2": "HF flash",
    "torch.nn.TransformerEncoder": "TransformerEncoder",
    "PyTorch, torch.compile": "PyTorch compiled",
    "fastbert, packed input": "packed",
    "fastbert.accelerate": "accelerate",
    _SKIP: "skip_logits",
    "fastbert.graph": "graph",
}

# ---- what a results file holds

Line = Mapping[str, object]  # one contender in one case; times are microseconds (see harness.Report)
Ratio = tuple[float, float, float]  # median, 20th and 80th percentile over the rounds


def ratios(theirs: Line, own: Line) -> list[float]:
    """The ratio of two contenders in each of the rounds in which both were timed."""
    return [a / b for a, b in zip(theirs["samples"], own["samples"], strict=False)]


def is_slower(times: Sequence[float]) -> bool:
    """Whether ratios are above 1 by a hundredth or more in the median."""
    return statistics.median(times) >= 1.01


def is_steady(times: Sequence[float]) -> bool:
    """Whether ratios are above 1 in at least four of five rounds."""
    return sum(one > 1 for one in times) >= 0.8 * len(times)


@dataclass(frozen=True)
class Case:
    """What one run measured for one case."""

    facts: Mapping
    lines: Mapping[str, Line]

    @property
    def family(self) -> str:
        """The table that the case belongs to."""
        return "growth" if "grows" in self.facts else "ops" if "op" in self.facts else "modules"

    @property
    def title(self) -> str:
        """The case in words, without its dtype."""
        facts = self.facts
        if "texts" in facts:
            return f"{facts['part']}, {facts['texts']} texts, {facts['model']}"
        size = f"{facts.get('family', '')} {MODELS.get(facts.get('hidden'), facts.get('hidden'))}".strip()
        words = [facts["op"] if "op" in facts else f"{facts['part']} {size}"]
        words += [f"{facts['layers']} layers"] if facts.get("layers", 1) != 1 else []
        return ", ".join([*words, facts["direction"], f"{facts['batch']} × {facts['seqlen']}", facts["lengths"]])

    @property
    def timed(self) -> dict[str, Line]:
        """Contenders that were timed; bounds are no contenders."""
        return {name: line for name, line in self.lines.items() if "samples" in line and "bound" not in line}

    @property
    def own(self) -> Line:
        """The line that stands for fastbert, right or wrong; empty if it took no part."""
        lines = (self.lines.get(name, {}) for name in OURS)
        return next((line for line in lines if line and "absent" not in line), {})

    @property
    def rows(self) -> list["Row"]:
        """fastbert's own line first, then its prepared models that were timed."""
        return [Row(self, self.own), *(Row(self, self.timed[name]) for name in PREPARED if name in self.timed)]


@dataclass(frozen=True)
class Row:
    """One form of fastbert in a case. own: its line, empty if it took no part."""

    case: Case
    own: Line

    @property
    def dtype(self) -> str:
        return PREPARED.get(self.own.get("name"), "{}").format(self.case.facts["dtype"])

    @property
    def ratios(self) -> dict[str, Ratio]:
        """The ratios by contender. fastbert's other forms have one only beside the own line, forced backends never."""
        beside = OURS if self.own.get("name") in OURS else ()
        names = [name for name in self.others if name in beside or not is_ours(name)]
        return {name: spread(ratios(self.case.timed[name], self.own)) for name in names}

    @property
    def others(self) -> list[str]:
        """The contenders that were timed in the same case, quantised ones only if this one is."""
        own = self.own.get("name", "")
        timed = self.case.timed if "samples" in self.own else {}
        return [name for name in timed if name != own and (is_quantised(own) or not is_quantised(name))]

    @property
    def memory(self) -> float | None:
        """fastbert's peak memory over the baseline's; None if either is too small to measure (below 1 MB)."""
        baseline = next((line for line in self.case.lines.values() if "baseline" in line), {})
        peaks = [line.get("memory", 0) for line in (self.own, baseline)]
        return peaks[0] / peaks[1] if min(peaks) >= 1e6 else None


def is_ours(name: str) -> bool:
    return name.startswith("fastbert")


def is_quantised(name: str) -> bool:
    return name.endswith(("int8", "fp8"))


OF_CASE = ("case", "floor", "library", "tokens", "flops", "bytes")  # equal in all lines of a case


def shortened(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines as a file has them: a line lacks what the lines before it say of the same case."""
    known: Line = {}
    for line in lines:
        if line["case"] != known.get("case"):
            known = {"case": line["case"]}
            yield line
        else:
            yield {name: value for name, value in line.items() if name not in OF_CASE or known.get(name) != value}
        known |= {name: line[name] for name in OF_CASE if name in line}


def completed(lines: Iterable[Line]) -> Iterator[Line]:
    """The inverse of `shortened`."""
    known: Line = {}
    for line in lines:
        if "case" in line:
            known = {}
        known = known | {name: line[name] for name in OF_CASE if name in line}
        timed = "samples" in line and "bound" not in line
        yield (known if timed else {"case": known["case"]}) | line


def cases_of(lines: Iterable[Line]) -> list[Case]:
    groups = itertools.groupby(lines, key=lambda line: line["case"])
    return [Case(facts, {line["name"]: line for line in members}) for facts, members in groups]


@dataclass(frozen=True)
class File:
    """head: where its numbers come from (see provenance.py), and what was left out."""

    name: str
    head: Mapping
    cases: list[Case]


def read_file(path: Path) -> File:
    """Raises ValueError for a file that is no results file, with its name."""
    try:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found = File(path.name, {"left_out": [], **head}, cases_of(completed(lines)))
        in_page(found)  # fails where something is missing that the page needs
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no results file of benchmarks.run: {error!r}") from error


def read(folder: Path) -> dict[str, list[File]]:
    """The results files by device. Raises ValueError if there are none, or one is no results file."""
    paths = [p for p in sorted(folder.glob("*/*.jsonl")) if not any(part in p.stem for part in NO_RESULTS)]
    if not paths:
        raise ValueError(f"there are no results in {folder}/<device>")
    return {device: list(map(read_file, of)) for device, of in itertools.groupby(paths, lambda p: p.parent.name)}


# ---- tables


Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]  # (header, rows) -> a Markdown table


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`markdown` for a terminal: columns are as wide as their cells."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table(cases: Sequence[Case], form: Table) -> str:
    """A row for each form of fastbert in each case; a column for each contender that was timed beside one of them."""
    rows = [row for case in cases for row in case.rows]
    compared = {name for row in rows for name in row.ratios}
    names = [name for name in dict.fromkeys(name for case in cases for name in case.lines) if name in compared]
    header = ["case", "type", "ms", "% floor", "% library", "memory", *(SHORT.get(name, name) for name in names)]
    return form(header, [_cells(row, names) for row in rows])


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    own, ratios = row.own, row.ratios
    time = milliseconds(own["median"]) if "median" in own else _problem(own)
    bounded = {} if is_quantised(own.get("name", "")) else own  # bounds are those of the case's type
    shares = (number(share(bounded, bound), ".0f") for bound in ("floor", "library"))
    others = (f"{ratios[name][0]:.2f}" if name in ratios else _problem(row.case.lines.get(name, {})) for name in names)
    return [row.case.title, row.dtype, time, *shares, number(row.memory, ".2f"), *others]


def share(line: Line, bound: str) -> float | None:
    """Percent of the floor, or the library's floor, that a line reaches; an op by its device time, if measured."""
    if bound not in line:
        return None
    return 100 * line[bound] / (line.get("device", line["median"]) if "op" in line["case"] else line["median"])


def milliseconds(microseconds: float) -> str:
    """Microseconds as milliseconds, with three digits."""
    value = microseconds / 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _problem(line: Line) -> str:
    """Why there is no ratio, in a word; a dash for a contender that did not run."""
    return line.get("problem", "–").partition(":")[0]


def in_full(case: Case) -> str:
    """The full results of one case, for a terminal."""
    parts, rows = ["  ".join(f"{name} {value}" for name, value in case.facts.items())], []
    has_device = any("device" in line for line in case.lines.values())
    for name, line in case.lines.items():
        if "median" in line:
            per_second = lambda key, unit: line[key] / line["median"] / unit if key in line else None  # noqa: B023, E731
            cells = [f"{line[key] / 1e3:#.4g}" for key in ("median", "p20", "p80")] + [number(line.get("ratio"), ".2f")]
            cells += [number(per_second("tokens", 1e-6), ".0f"), number(per_second("bytes", 1e3), ".1f")]
            cells += [number(per_second("flops", 1e6), ".3f"), number(share(line, "floor"), ".0f")]
            cells += [number(share(line, "library"), ".0f"), number(line.get("memory", 0) / 1e6, ".1f")]
            cells += [number(line.get("device", math.nan) / 1e3, "#.4g")] * has_device
            rows.append([f"({name})" if "bound" in line else name, *cells, line.get("ran", "")])
        elif "absent" not in line:
            why = f"NOT TIMED: {line['problem']}" if "problem" in line else "right, not timed"
            parts.append(f"{name}: {why}  {line.get('ran', '')}".rstrip())
    times = ["median ms", "p20", "p80", "ratio", "tokens/s", "GB/s", "TFLOP/s", "% floor", "% lib", "peak MB"]
    times += [*["device ms"] * has_device, "ran on"]
    parts += [aligned(("", *times), rows)] if rows else []
    absent = [f"{name} ({line['absent']})" for name, line in case.lines.items() if "absent" in line]
    return "\n".join([*parts, *[f"not run: {'; '.join(absent)}"] * bool(absent)])


def tables(cases: Sequence[Case], form: Table = aligned) -> dict[str, str]:
    """The tables by family."""
    found = {name: [case for case in cases if case.family == name] for name in ("modules", "ops", "growth")}
    return {name: table(members, form) for name, members in found.items() if members}


def not_installed(cases: Iterable[Case]) -> list[str]:
    """The contenders that are not installed, each with the command that installs it."""
    mark, lines = "not installed: ", (line for case in cases for line in case.lines.values())
    absent = {line["name"]: line["absent"] for line in lines if line.get("absent", "").startswith(mark)}
    return [f"{name} (`{how.removeprefix(mark)}`)" for name, how in absent.items()]


def slower(cases: Iterable[Case]) -> Iterator[tuple[float, list[str]]]:
    """Each form of fastbert, in each case, that another contender beats (see `is_slower`): the largest of their ratios,
    and a row of a table."""
    for case in cases:
        for row in (Row(case, case.timed[name]) for name in (*OURS, *PREPARED) if name in case.timed):
            found = {name: ratios(row.own, case.timed[name]) for name in row.others if not is_ours(name)}
            marked = {
                name: f"{'' if is_steady(times) else '~'}{SHORT.get(name, name)}" for name, times in found.items()
            }
            faster = [(*spread(times), marked[name]) for name, times in found.items() if is_slower(times)]
            faster.sort(reverse=True)
            told = [f"{name} {times:.2f} ({low:.2f}–{high:.2f})" for times, low, high, name in faster]
            if faster:
                yield faster[0][0], [f"{case.title}, {case.facts['dtype']}", row.own["name"], "; ".join(told)]


# ---- the page

HEAD = """\
# How fast

Every case in the files `benchmarks/results/<device>/*.jsonl`, and everybody it was measured against; services are in
[tasks/serving.md](tasks/serving.md), attention alone on a GPU in [attention.md](attention.md). `make bench` measures a
part of them again within a quarter of an hour; `python -m benchmarks.report` writes this page.

A row is a case and a form of fastbert: its own modules where they took part, and models after `fastbert.prepare` (type:
"prepared"). ms: its median. % floor: of what peak rate and bandwidth, measured on that machine before the cases, allow.
% library: of what the library's own matrix products, timed in the same case, allow (above 100: ours are faster).
memory: its peak over the baseline's (HF SDPA, PyTorch). Under a contender's name: that contender's time over
fastbert's, so above 1 fastbert is faster (median over the rounds of one interleaved run). Quantised models are compared
with every contender, others only with contenders that are not quantised. In `encode`, `rerank` and `contrastive step`,
HF SDPA is sentence-transformers. `wrong`: not timed, because the result was wrong. [benchmarks.md](benchmarks.md) says
how it is measured. AMD's family 25, model 1 is Zen 3; family 25, model 17 is Zen 4; family 26 is Zen 5. Intel's family
6, model 207 is Emerald Rapids; the virtual machine of model 167 has Granite Rapids.

Some floors were computed before `benchmarks/floor.py` had its present rules and are higher, and % floor and % library
with them: of `linear_max` with a backward (as products of all tokens), of 16-bit attention on the H200, also in
models (at a rate that is published for 512 tokens, whatever the length), and of "model 32" (its feed-forward twice as
wide as it is)."""

NOTES = {
    "h200": [
        "These runs had Triton's attention, which Hopper no longer chooses, and layers of three operators or more, "
        "which are one now; their times include the host's. [attention.md](attention.md#on-a-gpu-in-cuda) has the "
        "present attention alone; models have not been timed again."
    ],
    "cpu-avx512-bf16": ["Zen 4 and Zen 5; files whose machine is only AMD EPYC do not say which of the two."],
}

LOSSES = """\
## When is it slower

The time of a form of fastbert over that of each contender that is faster by a hundredth or more in the median: the
median over the rounds, and the 20th and 80th percentiles. ~: it was not faster in at least four of five rounds. All of
them keep the accuracy rule; quantised contenders, which do not, are listed only beside quantised forms."""


def page(results: Mapping[str, Sequence[File]]) -> str:
    parts = [section(device, files) for device, files in results.items()]
    losses = [part for device, files in results.items() for part in lost(device, files)]
    return "\n\n".join([HEAD, *parts, LOSSES, *(losses or ["In no case that was measured."])]) + "\n"


def lost(device: str, files: Sequence[File]) -> list[str]:
    """Where fastbert is slower on a device, the worst first; nothing where it is not."""
    found = [(times, [*cells, file.name]) for file in files for times, cells in slower(file.cases)]
    rows = [cells for _, cells in sorted(found, key=lambda one: (-one[0], one[1]))]
    header = ("case", "fastbert's form", "who is faster, and how many times", "file")
    return [f"### Slower: {device}", markdown(header, rows)] if rows else []


def section(device: str, files: Sequence[File]) -> str:
    """A device's files: whole models first, as they are what people run."""
    cases = [case for file in files for case in file.cases]
    parts = [f"## {device}", *NOTES.get(device, ())]
    if pictured(files):
        parts += [f"![time of each contender over fastbert's](../benchmarks/results/{device}/speedup.svg)"]
    parts += [part for file in sorted(files, key=lambda file: not pictured([file])) for part in in_page(file)]
    wrong = [f"{n} in {case.title}" for case in cases for n, at in case.lines.items() if is_ours(n) and "problem" in at]
    parts += [f"**Wrong or failed, and so not timed: {'; '.join(wrong)}.**"] if wrong else []
    missing = not_installed(cases)
    return "\n\n".join([*parts, *[f"Not installed: {'; '.join(missing)}."] * bool(missing)])


def pictured(files: Sequence[File]) -> list[tuple[str, Case]]:
    """The cases of the plot, with their files' names: 12 layers and texts of up to 128 tokens or more, or all models if
    there are none of these. The tables have the others too."""
    modules = [(file.name, case) for file in files for case in file.cases if case.family == "modules"]
    modules = [(name, case) for name, case in modules if case.rows[0].ratios]
    return [(name, case) for name, case in modules if is_usual(case.facts)] or modules


def is_usual(facts: Mapping) -> bool:
    return facts.get("layers") == 12 and facts["seqlen"] >= 128


def in_page(file: File) -> list[str]:
    """Origin, tables, and what was left out."""
    found, left_out = tables(file.cases, markdown), file.head["left_out"]
    parts = [f"### {file.name}", origin(file)]
    parts += [found["modules"]] if "modules" in found else []
    parts += [folded("Operations", found["ops"])] if "ops" in found else []
    parts += [folded("How cost grows with tokens and with length", found["growth"])] if "growth" in found else []
    listed = "; ".join(f"{' '.join(one['case'].split())} ({one['reason']})" for one in left_out)
    return [*parts, *[folded(f"Left out: {len(left_out)} cases", listed)] * bool(left_out)]


def origin(file: File) -> str:
    """Where the numbers of a file come from."""
    head, counts = file.head, [len(line["samples"]) for case in file.cases for line in case.timed.values()]
    least, most = min(counts, default=0), max(counts, default=0)
    rounds = f"{most} rounds" if least == most else f"{least} to {most} rounds"
    commit = (head["commit"] or "unknown")[:9] + TREE[head["dirty"]]
    facts = [head["date"][:10], f"commit {commit}", f"torch {head['versions']['torch']}", head["machine"]]
    return f"{', '.join(facts)}; {rounds}; load before: {head['load']}"


def folded(title: str, text: str) -> str:
    """A text that GitHub shows when its title is clicked."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def draw(cases: Sequence[tuple[str, Case]], path: Path) -> None:
    """A line for each row of a table of a file, a dot for each contender: its time over fastbert's.

    The same results give the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": "fastbert", "svg.fonttype": "none", "font.size": 8}
    matplotlib.rcParams |= {"font.sans-serif": ["DejaVu Sans"], "ytick.left": False}
    rows = [row for _, case in cases for row in case.rows]
    labels = [f"{row.case.title}, {row.dtype} ({Path(name).stem})" for name, case in cases for row in case.rows]
    figure = Figure(figsize=(8, 1.5 + 0.28 * len(rows)))
    axes = figure.subplots()
    for name in dict.fromkeys(name for row in rows for name in row.ratios if not is_ours(name)):
        ratios = {place: row.ratios[name] for place, row in enumerate(rows) if name in row.ratios}
        medians = [median for median, _, _ in ratios.values()]
        axes.plot(medians, list(ratios), "o", markersize=4, label=SHORT.get(name, name))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.invert_yaxis()
    axes.set_xlabel("time of the contender / time of fastbert (right of 1: fastbert is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None}, bbox_inches="tight")
    path.write_text(re.sub(r" ?\n(?=[MLCQz\"])", " ", drawn.getvalue()))  # a line for each path, not for each point


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="has a folder per device")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not what the files give")
    options = parser.parse_args(words)
    try:
        results = read(options.results)
        old = options.page.read_text(encoding="utf-8") if options.check else ""
    except (OSError, ValueError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    new = page(results)
    if options.check:
        sys.stdout.writelines(difflib.unified_diff(*(t.splitlines(True) for t in (old, new)), "page", "results"))
        return 0 if old == new else 1
    for device, files in results.items():
        if cases := pictured(files):
            draw(cases, options.results / device / "speedup.svg")
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
