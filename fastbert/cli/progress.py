"""The progress of a long command, on stderr: a bar on a terminal, else a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 10.0  # seconds


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yields advance(count), to be called after each part. total: the count of all parts; None if unknown."""
    if not sys.stderr.isatty():
        yield _lines(what, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _lines(what: str, total: int | None) -> Callable[[int], None]:
    start = said = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, said
        done, now = done + count, time.monotonic()
        if now - said < INTERVAL or done in (0, total):
            return
        said, rate = now, done / (now - start)
        of_all = "" if total is None else f" of {total}"
        left = "" if total is None else f", {_duration((total - done) / rate)} left"
        print(f"{what}: {done}{of_all} texts, {rate:.0f}/s{left}", file=sys.stderr, flush=True)

    return advance


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
