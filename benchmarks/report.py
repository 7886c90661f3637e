"""python -m benchmarks.report: docs/performance.md and its plot, from the files of benchmarks.run and nothing else.

Reads RESULTS/<device>/*.jsonl, draws RESULTS/<device>/speedup.svg, and writes the page: a line for each case, every
case in which another contender is faster than fastbert, and where the numbers come from. Files of small sizes (_tiny,
_quick) and of runs that were cut short (.partial) are ignored.

A ratio is a contender's time over fastbert's, median over the rounds of one interleaved run: above 1 fastbert is
faster. fastbert's time is that of the first of OURS that took part, the form that demands the least of a user.
"""

import argparse
import difflib
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import spread

ROOT = Path(__file__).resolve().parent.parent
NO_RESULTS = ("_tiny", "_quick", ".partial")  # in names
TREE = {None: " (tree not checked)", True: " and changes", False: ""}  # by `dirty`; None where there was no git
_SKIP = "fastbert.accelerate, skip_logits"
OURS = ("fastbert", "fastbert.accelerate", _SKIP, "fastbert, packed input", "fastbert.graph")
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


def ratio(theirs: Line, own: Line) -> Ratio:
    """The ratio of two contenders that were timed in the same rounds."""
    return spread([a / b for a, b in zip(theirs["samples"], own["samples"], strict=False)])


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
    def ratios(self) -> dict[str, Ratio]:
        """The ratios by contender, fastbert's other forms included, but not its forced backends."""
        own = self.own
        others = {name: line for name, line in self.timed.items() if line is not own and "samples" in own}
        return {name: ratio(line, own) for name, line in others.items() if name in OURS or not is_ours(name)}

    @property
    def memory(self) -> float | None:
        """fastbert's peak memory over the baseline's; None if either is too small to measure (below 1 MB)."""
        baseline = next((line for line in self.lines.values() if "baseline" in line), {})
        peaks = [line.get("memory", 0) for line in (self.own, baseline)]
        return peaks[0] / peaks[1] if min(peaks) >= 1e6 else None


def is_ours(name: str) -> bool:
    return name.startswith("fastbert")


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
        return File(path.name, {"left_out": [], **head}, cases_of(lines))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no results file of benchmarks.run: {error!r}") from error


def read(folder: Path) -> dict[str, list[File]]:
    """The results files by device."""
    paths = [p for p in sorted(folder.glob("*/*.jsonl")) if not any(part in p.stem for part in NO_RESULTS)]
    return {device: list(map(read_file, of)) for device, of in itertools.groupby(paths, lambda p: p.parent.name)}


# ---- tables


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for readers of its source."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table(cases: Sequence[Case]) -> str:
    """A line for each case and run; a column for each contender that was timed beside fastbert in one of them."""
    compared = {name for case in cases for name in case.ratios}
    names = [name for name in dict.fromkeys(name for case in cases for name in case.lines) if name in compared]
    header = ["case", "type", "ms", "% floor", "% library", "memory", *(SHORT.get(name, name) for name in names)]
    return aligned(header, [_cells(case, names) for case in cases])


def _cells(case: Case, names: Sequence[str]) -> list[str]:
    own, ratios = case.own, case.ratios
    time = milliseconds(own["median"]) if "median" in own else _problem(own)
    shares = (number(share(own, bound), ".0f") for bound in ("floor", "library"))
    others = (f"{ratios[name][0]:.2f}" if name in ratios else _problem(case.lines.get(name, {})) for name in names)
    return [case.title, case.facts["dtype"], time, *shares, number(case.memory, ".2f"), *others]


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


def tables(cases: Sequence[Case]) -> dict[str, str]:
    """The tables by family."""
    found = {name: [case for case in cases if case.family == name] for name in ("modules", "ops", "growth")}
    return {name: table(members) for name, members in found.items() if members}


def not_installed(cases: Iterable[Case]) -> list[str]:
    """The contenders that are not installed, each with the command that installs it."""
    mark, lines = "not installed: ", (line for case in cases for line in case.lines.values())
    absent = {line["name"]: line["absent"] for line in lines if line.get("absent", "").startswith(mark)}
    return [f"{name} (`{how.removeprefix(mark)}`)" for name, how in absent.items()]


def slower(device: str, cases: Iterable[Case]) -> Iterator[tuple[float, list[str]]]:
    """Every case in which another contender is faster than one of fastbert's forms, by a hundredth or more: the ratio,
    and a line of a table."""
    for case in cases:
        timed = case.timed
        for ours, theirs in itertools.product(filter(timed.get, OURS), (name for name in timed if not is_ours(name))):
            times, low, high = ratio(timed[ours], timed[theirs])
            if round(times, 2) > 1:
                spread = f"{low:.2f}–{high:.2f}{'' if low > 1 else ', in the noise'}"
                title = f"{case.title}, {case.facts['dtype']}"
                yield times, [title, device, ours, theirs, f"{times:.2f}", spread]


# ---- the page

HEAD = """\
# How fast

Every case that was measured, and everybody it was measured against. `make bench` measures again within a quarter of an
hour; `python -m benchmarks.report` then writes this page from the files under `benchmarks/results`.

Under a name: that contender's time over fastbert's, so above 1 fastbert is faster (median over the rounds of one
interleaved run). ms: fastbert's own median. % floor: of what peak rate and bandwidth, measured in the same run, allow.
% library: of what the library's own matrix products, timed in the same case, allow. memory: fastbert's peak over the
baseline's (HF SDPA, PyTorch). `wrong`: not timed, because its result was.
[benchmarks.md](benchmarks.md) says how it is measured."""


def page(results: Mapping[str, Sequence[File]]) -> str:
    found = [one for device, files in results.items() for file in files for one in slower(device, file.cases)]
    rows = [cells for _, cells in sorted(found, key=lambda one: (-one[0], one[1]))]
    header = ("case", "device", "fastbert's form", "faster", "times", "20th to 80th percentile")
    losses = aligned(header, rows) if rows else "In no case that was measured."
    parts = [section(device, files) for device, files in results.items()] or ["No results."]
    return "\n\n".join([HEAD, *parts, "## When is it slower", losses]) + "\n"


def section(device: str, files: Sequence[File]) -> str:
    cases = [case for file in files for case in file.cases]
    found, parts = tables(cases), [f"## {device}", origin(files)]
    plot = f"![time of each contender over fastbert's](../benchmarks/results/{device}/speedup.svg)"
    parts += [found["modules"], plot] if "modules" in found else []
    parts += [folded("Operations", found["ops"])] if "ops" in found else []
    parts += [folded("How cost grows with tokens and with length", found["growth"])] if "growth" in found else []
    wrong = [f"{n} in {case.title}" for case in cases for n, at in case.lines.items() if is_ours(n) and "problem" in at]
    parts += [f"**Wrong or failed, and so not timed: {'; '.join(wrong)}.**"] if wrong else []
    left_out = [f"{' '.join(one['case'].split())} ({one['reason']})" for file in files for one in file.head["left_out"]]
    parts += [folded(f"Left out: {len(left_out)} cases", "; ".join(left_out))] if left_out else []
    missing = not_installed(cases)
    return "\n\n".join([*parts, *[f"Not installed: {'; '.join(missing)}."] * bool(missing)])


def origin(files: Sequence[File]) -> str:
    """Where the numbers of a device come from, a line for each file."""
    rows = []
    for name, head in ((file.name, file.head) for file in files):
        commit = (head["commit"] or "unknown")[:9] + TREE[head["dirty"]]
        rows.append([name, head["date"][:10], commit, head["versions"]["torch"], head["machine"], str(head["load"])])
    return aligned(("file", "date", "commit", "torch", "machine", "load before"), rows)


def folded(title: str, text: str) -> str:
    """A text that GitHub shows when its title is clicked."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def draw(cases: Sequence[Case], path: Path) -> None:
    """A row for each case, a dot for each contender: its time over fastbert's. The same bytes for the same results."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": "fastbert", "svg.fonttype": "none", "font.size": 8}
    figure = Figure(figsize=(8, 1.5 + 0.28 * len(cases)))
    axes = figure.subplots()
    for name in dict.fromkeys(name for case in cases for name in case.ratios if not is_ours(name)):
        ratios = {place: case.ratios[name] for place, case in enumerate(cases) if name in case.ratios}
        middle, low, high = zip(*ratios.values(), strict=True)
        ends = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        axes.errorbar(middle, list(ratios), xerr=ends, fmt="o", markersize=4, label=SHORT.get(name, name))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), [f"{case.title}, {case.facts['dtype']}" for case in cases])
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
    except (OSError, ValueError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    new = page(results)
    if options.check:
        old = options.page.read_text(encoding="utf-8")
        sys.stdout.writelines(difflib.unified_diff(*(t.splitlines(True) for t in (old, new)), "page", "results"))
        return 0 if old == new else 1
    for device, files in results.items():
        modules = [case for file in files for case in file.cases if case.family == "modules" and case.ratios]
        draw(modules, options.results / device / "speedup.svg") if modules else None
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
