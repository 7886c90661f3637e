"""python -m benchmarks.report: a plot and the tables of docs/performance.md, from the JSON files of benchmarks.run.

Reads RESULTS/<device>/*.json, draws into RESULTS/<device>/plots (or OUT/<device>), and writes the part of
docs/performance.md between its two marker comments: tables, the cases in which somebody is faster than fastbert, and
where every number comes from. Files of small sizes (_tiny, _quick) and of runs that were cut short (.partial) are left
alone.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import summary
from benchmarks.summary import Ratio

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
NO_RESULTS = ("_tiny", "_quick", ".partial")  # in names
TREE = {None: " (tree not checked)", True: " and changes", False: ""}  # by `dirty`; None where there was no git


@dataclass(frozen=True)
class File:
    """One results file. content: as benchmarks.run wrote it, today or earlier."""

    name: str
    content: Mapping

    @property
    def reports(self) -> list[Mapping]:
        return self.content["reports"]


def read(folder: Path) -> dict[str, list[File]]:
    """Device -> its files. Raises ValueError for a file that is no results file, with its name."""
    found: dict[str, list[File]] = {}
    for path in sorted(folder.glob("*/*.json")):
        if any(part in path.stem for part in NO_RESULTS):
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("reports"), list):
            raise ValueError(f"{path} is no results file of benchmarks.run: it has no list `reports`")
        found.setdefault(path.parent.name, []).append(File(path.name, content))
    return found


# ---- tables


@dataclass(frozen=True)
class Slower:
    """A contender that was faster than one of fastbert's ways in one case."""

    device: str
    case: str
    ours: str
    theirs: str
    ratio: Ratio  # fastbert's seconds over theirs

    @property
    def cells(self) -> list[str]:
        noise = "" if self.ratio.low > 1 else ", in the noise"
        spread = f"{self.ratio.low:.2f}–{self.ratio.high:.2f}{noise}"
        return [self.case, self.device, self.ours, self.theirs, f"{self.ratio.median:.2f}", spread]


def slower(device: str, reports: Sequence[Mapping]) -> Iterator[Slower]:
    """Every case in which somebody else's time is below that of a way to use fastbert, by a hundredth or more."""
    for report in reports:
        rows = summary.timed(report)
        title = f"{summary.title(report['case'])}, {report['case']['dtype']}"
        for ours in (name for name in summary.OURS if name in rows):
            for name, row in rows.items():
                if summary.is_ours(name) or row.get("bound"):
                    continue
                found = summary.ratio(rows[ours], row)
                if round(found.median, 2) > 1:
                    yield Slower(device, title, ours, name, found)


def slower_section(results: Mapping[str, Sequence[File]]) -> str:
    found = [s for device, files in results.items() for file in files for s in slower(device, file.reports)]
    if not found:
        return "In no case that was measured."
    found.sort(key=lambda s: (-s.ratio.median, s.case, s.device, s.ours, s.theirs))
    header = ("case", "device", "fastbert's way", "faster", "times", "20th to 80th percentile")
    return summary.aligned(header, [s.cells for s in found])


def origin(files: Sequence[File]) -> str:
    """Where the numbers of a device come from, a line for each file."""
    rows = []
    for file in files:
        content, versions, machine = file.content, file.content["versions"], file.content["machine"]
        commit = (content["commit"] or "unknown")[:9] + TREE[content["dirty"]]
        gpu = machine.get("gpu")
        where = f"{gpu['name']}, " if gpu else ""
        where += f"{machine['processor']}, {machine['threads']} threads, {machine['instruction_set']}"
        rows.append([file.name, content["date"][:10], commit, versions["torch"], where, str(machine["load"])])
    return summary.aligned(("file", "date", "commit", "torch", "machine", "load before"), rows)


def device_section(device: str, files: Sequence[File], plots: Path, readme: Path) -> str:
    parts = [f"### {device}", origin(files)]
    reports = [report for file in files for report in file.reports]
    tables = summary.families(reports)
    parts += [summary.table(tables["modules"])] if "modules" in tables else []
    parts += [folded("Operations", summary.table(tables["ops"]))] if "ops" in tables else []
    images = {name: f"![{name}]({_relative(plots / f'{name}.svg', readme)})" for name in figures(reports)}
    parts += [images.pop("speedup")] if "speedup" in images else []
    parts += [folded("How cost grows", "\n\n".join(images.values()))] if images else []
    wrong = [f"{name} in {summary.title(report['case'])}" for report in reports for name in summary.wrong(report)]
    if wrong:
        parts.append(f"**Wrong or failed, and so not timed: {'; '.join(wrong)}.**")
    left_out = [entry for file in files for entry in file.content.get("left_out", [])]
    if left_out:
        cases = "; ".join(f"{' '.join(entry['case'].split())} ({entry['reason']})" for entry in left_out)
        parts.append(folded(f"Left out: {len(left_out)} cases", cases))
    missing = summary.absent(reports)
    if missing:
        parts.append("Not installed: " + "; ".join(f"{name} (`{how}`)" for name, how in missing.items()) + ".")
    return "\n\n".join(parts)


def folded(title: str, text: str) -> str:
    """Shown by GitHub when it is clicked."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def _relative(path: Path, readme: Path) -> str:
    return Path(os.path.relpath(path.resolve(), readme.resolve().parent)).as_posix()


LEGEND = """\
Under a name: that contender's time over fastbert's, so above 1 fastbert is faster (median over the rounds of one
interleaved run). ms: fastbert's own median. % floor: of what peak rate and bandwidth, measured in the same run, allow.
% library: of what the library's own matrix products, timed in the same case, allow. memory: fastbert's peak over the
baseline's (HF SDPA, PyTorch). `wrong`: not timed, because its result was.
[benchmarks.md](benchmarks.md) says how it is measured."""


def block(results: Mapping[str, Sequence[File]], folders: Mapping[str, Path], readme: Path) -> str:
    """What stands between the markers."""
    if not results:
        return f"{START}\n\nNo results.\n\n{END}"
    parts = [device_section(device, files, folders[device], readme) for device, files in results.items()]
    parts = [LEGEND, *parts, "### When is it slower", slower_section(results)]
    return "\n\n".join([START, *parts, END])


def replaced(text: str, new: str, readme: Path) -> str:
    """The README with another block. Raises ValueError unless the markers are there, once, in order."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{readme}: expected {START} and, after it, {END}, once each")
    return text[: text.index(START)] + new + text[text.index(END) + len(END) :]


# ---- plots


def figures(reports: Sequence[Mapping]) -> dict[str, Sequence[Mapping]]:
    """Name of a plot -> the reports that it shows."""
    tables, found = summary.families(reports), {}
    if modules := [report for report in tables.get("modules", []) if summary.own(report)]:
        found["speedup"] = modules
    for report in tables.get("growth", []):
        case = report["case"]
        found.setdefault(f"growth_{case.get('op') or case['part']}_{case['dtype']}", []).append(report)
    return found


def draw(reports: Sequence[Mapping], folder: Path) -> list[Path]:
    """One SVG for each figure: the same bytes for the same reports."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "fastbert", "font.size": 8, "axes.spines.top": False}
    matplotlib.rcParams["axes.spines.right"] = False
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, members in figures(reports).items():
        figure = growth(members) if name.startswith("growth") else speedup(members)
        paths.append(folder / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None}, bbox_inches="tight")
    return paths


def speedup(reports: Sequence[Mapping]):
    """A row for each case, a dot for each contender: its time over fastbert's."""
    from matplotlib.figure import Figure

    lines = summary.lines(reports)
    figure = Figure(figsize=(8, 1.5 + 0.28 * len(lines)))
    axes = figure.subplots()
    for name in (name for name in summary.columns(lines) if not summary.is_ours(name)):
        found = {place: line.ratios[name] for place, line in enumerate(lines) if name in line.ratios}
        middle = [ratio.median for ratio in found.values()]
        spread = [[r.median - r.low for r in found.values()], [r.high - r.median for r in found.values()]]
        axes.errorbar(middle, list(found), xerr=spread, fmt="o", markersize=4, label=summary.short(name))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(lines)), [f"{summary.title(line.case)}, {line.case['dtype']}" for line in lines])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.invert_yaxis()
    axes.set_xlabel("time of the contender / time of fastbert (right of 1: fastbert is faster)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def growth(reports: Sequence[Mapping]):
    """Time and memory over size, a column for each direction, with the floor."""
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(report["case"]["direction"] for report in reports))
    figure = Figure(figsize=(4 * len(directions), 5))
    grid = figure.subplots(2, len(directions), squeeze=False, sharex=True)
    for column, direction in enumerate(directions):
        members = [report for report in reports if report["case"]["direction"] == direction]
        _lines(grid[0][column], members, "median", 1e3, "ms")
        _lines(grid[1][column], members, "peak_megabytes", 1, "MB")
        floors = [(r["case"][r["case"]["grows"]], r["work"]["floor"] * 1e3) for r in members if r["work"]["floor"]]
        grid[0][column].plot(*zip(*floors, strict=True), "k--", linewidth=0.8, label="floor") if floors else None
        grid[0][column].set_title(f"{summary.title_of_growth(members[0]['case'])}, {direction}")
        grid[1][column].set_xlabel({"tokens": "tokens", "seqlen": "tokens a sequence"}[members[0]["case"]["grows"]])
    grid[0][0].legend(frameon=False)
    figure.tight_layout()
    return figure


def _lines(axes, reports: Sequence[Mapping], value: str, scale: float, unit: str) -> None:
    """One line for each contender."""
    points: dict[str, list[tuple[int, float]]] = {}
    for report in reports:
        for name, row in summary.timed(report).items():
            if row.get(value) and not row.get("bound"):
                size = report["case"][report["case"]["grows"]]
                points.setdefault(name, []).append((size, row[value] * scale))
    for name, line in points.items():
        axes.plot(*zip(*sorted(line), strict=True), marker=".", label=summary.short(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)


# ---- command line


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="has a folder per device")
    parser.add_argument("--out", type=Path, help="plots go to OUT/<device>; default RESULTS/<device>/plots")
    parser.add_argument("--readme", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the README is not what files give")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    try:
        results, text = read(options.results), options.readme.read_text(encoding="utf-8")
        folders = {d: options.out / d if options.out else options.results / d / "plots" for d in results}
        new = replaced(text, block(results, folders, options.readme), options.readme)
    except (OSError, ValueError) as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    if options.check:
        sys.stdout.writelines(difflib.unified_diff(*(t.splitlines(True) for t in (text, new)), "README", "results"))
        return 0 if text == new else 1
    for device, files in results.items():
        for path in draw([report for file in files for report in file.reports], folders[device]):
            print(path)
    options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
