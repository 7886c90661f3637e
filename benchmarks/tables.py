"""Tables in Markdown that a program writes, people commit, and the program compares: of both compile reports."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A line of a report, as text, and why what it describes cannot be used; empty if it can."""

    columns: tuple[str, ...]
    problem: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(self.columns)} |"


def section(title: str, header: tuple[str, ...], rows: Sequence[Row]) -> str:
    lines = [f"## {title}", "", str(Row(header)), str(Row(("---",) * len(header))), *map(str, rows)]
    return "\n".join(lines) + "\n"


def differences(title: str, rows: Sequence[Row], committed: str, columns: Sequence[int]) -> list[str]:
    """Rows that only one of the two has, by some of their columns."""
    text = committed.partition(f"## {title}\n")[2].partition("\n## ")[0]
    there = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    cut = lambda lines: {" | ".join(line[i] for i in columns) for line in lines}  # noqa: E731
    here, there = cut(row.columns for row in rows), cut(there)
    return [f"+ {line}" for line in sorted(here - there)] + [f"- {line}" for line in sorted(there - here)]


def conclude(
    report: Path,
    head: str,
    header: tuple[str, ...],
    sections: Mapping[str, Sequence[Row]],
    comparable: Sequence[int] | None,
    is_whole: bool,
) -> int:
    """Compares with the report by its comparable columns, or if None writes it, or prints what is only a part of it.

    Returns the exit status: 1 if a row has a problem or differs.
    """
    found = [f"{title}: {row.problem}: {row}" for title, rows in sections.items() for row in rows if row.problem]
    texts = [section(title, header, rows) for title, rows in sections.items()]
    if comparable is not None:
        committed = report.read_text(encoding="utf-8")
        for title, rows in sections.items():
            found += [f"{title}: {line}" for line in differences(title, rows, committed, comparable)]
    elif is_whole:
        report.write_text("\n".join([head, *texts]), encoding="utf-8")
    else:
        print("\n".join(texts))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0
