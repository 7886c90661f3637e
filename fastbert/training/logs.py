"""Loggers: functions log(values, step). The names of the values begin with "train/" or "evaluation/"."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fastbert.files import write_text
from fastbert.require import require

Log = Callable[[dict[str, float], int], None]
TABLES = ("train", "evaluation")


@contextlib.contextmanager
def opened_logs(directory: Path, step: int, max_steps: int, progress: bool, tensorboard: bool) -> Iterator[list[Log]]:
    """Opens the loggers: CSV tables in a directory and, if wanted, a progress bar and TensorBoard."""
    with contextlib.ExitStack() as stack:
        logs: list[Log] = [partial(_to_csv, directory)]
        if progress:
            logs.append(stack.enter_context(_progress_bar(step, max_steps)))
        if tensorboard:
            writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
            board = stack.enter_context(writer(directory, purge_step=step + 1))
            logs.append(lambda values, step: [board.add_scalar(name, x, step) for name, x in values.items()])
        yield logs


@contextlib.contextmanager
def _progress_bar(step: int, max_steps: int) -> Iterator[Log]:
    progress = require("rich.progress", "rich").Progress
    with progress(*progress.get_default_columns(), "{task.fields[shown]}") as bar:
        task = bar.add_task("training", total=max_steps, completed=step, shown="")

        def log(values: dict[str, float], step: int) -> None:
            if "train/loss" in values:
                skipped = values["train/skipped_steps"]
                shown = f"loss {values['train/loss']:.4f}{f', {skipped} steps skipped' if skipped else ''}"
                bar.update(task, completed=step, shown=shown)

        yield log


def _to_csv(directory: Path, values: dict[str, float], step: int) -> None:
    for table in TABLES:
        row = {name[len(table) + 1 :]: x for name, x in values.items() if name.startswith(f"{table}/")}
        if row:
            append_row(directory / f"{table}.csv", {"step": step, **row})


def append_row(path: Path, row: dict[str, float]) -> None:
    """Appends a row to a CSV table. New names become its last columns, empty in earlier rows."""
    with path.open("a+", newline="") as file:
        file.seek(0)
        rows = csv.DictReader(file)
        names = list(rows.fieldnames or ())
        new = [name for name in row if name not in names]
        if not new:
            csv.DictWriter(file, names, lineterminator="\n").writerow(row)
            return
        rows = [*rows, row]
    text = io.StringIO()
    writer = csv.DictWriter(text, names + new, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def keep_rows(path: Path, step: int) -> None:
    """Drops rows of later steps, and a truncated last row. Raises ValueError for a file that is no such table."""
    if path.exists():
        try:
            header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
            kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= step]
        except ValueError as error:  # UnicodeDecodeError too
            raise ValueError(
                f"{path} is no table of a trainer: {error}; expected a step at the start of rows"
            ) from None
        write_text(path, "".join([header, *kept] if kept else []))
