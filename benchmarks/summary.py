"""What reports come to: one line for each case, with the ratio to each contender. Works on reports as JSON has them.

A ratio is a contender's seconds over fastbert's, median over the rounds of one interleaved run: above 1 fastbert is
faster. fastbert's are those of the first of OURS that took part: the way that asks least of a user.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

OURS = (
    "fastbert",
    "fastbert.accelerate",
    "fastbert.accelerate, skip_logits",
    "fastbert, packed input",
    "fastbert.graph",
)
MODELS = {768: "base", 1024: "large"}
_SHORT = {
    "transformers sdpa": "HF SDPA",
    "transformers eager": "HF eager",
    "transformers, torch.compile": "HF compiled",
    "transformers flash_attention_2": "HF flash",
    "torch.nn.TransformerEncoder": "TransformerEncoder",
    "PyTorch, torch.compile": "PyTorch compiled",
    "fastbert, packed input": "packed",
    "fastbert.accelerate": "accelerate",
    "fastbert.accelerate, skip_logits": "skip_logits",
    "fastbert.graph": "graph",
}


@dataclass(frozen=True)
class Ratio:
    """Median and the 20th and 80th percentile over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}"


def ratio(theirs: Mapping, own: Mapping) -> Ratio:
    """Of two rows that were timed in the same rounds."""
    pairs = [a / b for a, b in zip(theirs["seconds"], own["seconds"], strict=False)]
    cuts = statistics.quantiles(pairs, n=5, method="inclusive") if len(pairs) > 1 else pairs * 4
    return Ratio(statistics.median(pairs), cuts[0], cuts[-1])


def timed(report: Mapping) -> dict[str, Mapping]:
    return {row["name"]: row for row in report["rows"] if row.get("seconds")}


def is_ours(name: str) -> bool:
    return name.startswith("fastbert")


def own(report: Mapping) -> Mapping | None:
    """The row that stands for fastbert, right or wrong; None if none took part."""
    rows = {row["name"]: row for row in report["rows"] if not row.get("absent")}
    return next((rows[name] for name in OURS if name in rows), None)


def ratios(report: Mapping) -> dict[str, Ratio]:
    """Contender -> ratio; fastbert's other ways of use too, but neither forced backends nor bounds."""
    mine = own(report)
    if mine is None or not mine.get("seconds"):
        return {}
    others = {name: row for name, row in timed(report).items() if row is not mine and not row.get("bound")}
    return {name: ratio(row, mine) for name, row in others.items() if not is_ours(name) or name in OURS}


def wrong(report: Mapping) -> list[str]:
    """fastbert's ways of use, and backends, that were wrong or failed."""
    return [row["name"] for row in report["rows"] if is_ours(row["name"]) and row.get("problem")]


def key(case: Mapping) -> str:
    """The same for the same case, whoever measured it."""
    return json.dumps(case, sort_keys=True)


def title(case: Mapping) -> str:
    """A case in words, without its type."""
    if "texts" in case:
        return f"{case['part']}, {case['texts']} texts, {case['model']}"
    words = [case["op"] if "op" in case else f"{case['part']} {MODELS.get(case['hidden'], case['hidden'])}"]
    words[0] += f", {case['layers']} layers" if case.get("layers", 1) != 1 else ""
    words += [case["direction"], f"{case['batch']} × {case['seqlen']}", case["lengths"]]
    return ", ".join(words)


def title_of_growth(case: Mapping) -> str:
    """A case of `growth` in words, without its size and direction."""
    who = case["op"] if "op" in case else f"{case['part']}, 1 layer"
    return f"{who}, {MODELS.get(case['hidden'], case['hidden'])}, {case['dtype']}"


def short(name: str) -> str:
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class Line:
    """One case, from every run that measured it. own: fastbert's row of the first run; None if it took no part."""

    case: Mapping
    own: Mapping | None
    ratios: dict[str, Ratio]
    rows: dict[str, Mapping]
    memory: float | None  # fastbert's peak over the baseline's, of the first run

    def cells(self, names: Sequence[str]) -> list[str]:
        own = self.own or {}
        cells = [title(self.case), self.case["dtype"]]
        cells += [milliseconds(own["median"]) if "median" in own else _problem(self.own)]
        cells += [_percent(own.get(name)) for name in ("percent_of_floor", "percent_of_library")]
        cells += ["–" if self.memory is None else f"{self.memory:.2f}"]
        return [*cells, *(str(self.ratios.get(name) or _problem(self.rows.get(name))) for name in names)]


def lines(reports: Iterable[Mapping]) -> list[Line]:
    """Runs of the same case with other contenders share a line: a ratio is within one run."""
    same: dict[str, list[Mapping]] = {}
    for report in reports:
        same.setdefault(key(report["case"]), []).append(report)
    found = []
    for members in same.values():
        together: dict[str, Ratio] = {}
        rows: dict[str, Mapping] = {}
        for report in members:
            together = ratios(report) | together
            rows = {row["name"]: row for row in report["rows"]} | rows
        found.append(Line(members[0]["case"], own(members[0]), together, rows, memory(members[0])))
    return found


def memory(report: Mapping) -> float | None:
    """fastbert's peak over the baseline's; None where one of them is below what can be told from nothing."""
    rows = (own(report), timed(report).get(report["baseline"]))
    peaks = [row.get("peak_megabytes") if row else None for row in rows]
    return peaks[0] / peaks[1] if all(peak and peak >= 1 for peak in peaks) else None


def columns(found: Iterable[Line]) -> list[str]:
    """Contenders that were timed against fastbert somewhere, as in the rows of reports."""
    found = list(found)
    timed = {name for line in found for name in line.ratios}
    return list(dict.fromkeys(name for line in found for name in line.rows if name in timed))


def milliseconds(seconds: float) -> str:
    """Three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _problem(row: Mapping | None) -> str:
    """Why there is no ratio, in a word; a dash for who was not there."""
    return (row.get("problem") or "–").partition(":")[0] if row else "–"


HEADER = ("case", "type", "ms", "% floor", "% library", "memory")


def table(reports: Sequence[Mapping]) -> str:
    """Markdown, aligned for readers of the text."""
    found = lines(reports)
    names = columns(found)
    return aligned([*HEADER, *map(short, names)], [line.cells(names) for line in found])


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def families(reports: Iterable[Mapping]) -> dict[str, list[Mapping]]:
    """Reports that share a table: of modules, of ops, of growth."""
    found: dict[str, list[Mapping]] = {"modules": [], "ops": [], "growth": []}
    for report in reports:
        case = report["case"]
        found["growth" if "grows" in case else "ops" if "op" in case else "modules"].append(report)
    return {name: members for name, members in found.items() if members}


def text(reports: Sequence[Mapping]) -> str:
    """All tables, and who was not there."""
    parts = [table(members) for members in families(reports).values()]
    missing = absent(reports)
    parts += ["\n".join(f"not installed: {name}: {how}" for name, how in missing.items())] if missing else []
    legend = "under a name: its time over fastbert's; above 1 fastbert is faster (docs/benchmarks.md has the rest)"
    return "\n\n".join([*parts, legend]) if parts else ""


def absent(reports: Iterable[Mapping]) -> dict[str, str]:
    """Contenders that are not installed -> the command that installs them."""
    mark, rows = "not installed: ", (row for report in reports for row in report["rows"])
    return {row["name"]: row["absent"].removeprefix(mark) for row in rows if row.get("absent", "").startswith(mark)}
