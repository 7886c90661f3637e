"""Defers SIGINT and SIGTERM until the step is done and saved."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ONE_REQUEST = 2.0  # seconds: torchrun passes on to its processes a signal that a scheduler has sent to them, too


class Signalled:
    """number: the signal that was received; 0 as long as there was none."""

    number = 0


@contextmanager
def signals_put_off() -> Iterator[Signalled]:
    """Records the first SIGINT or SIGTERM within the block; when the block ends, the signal takes its usual course.

    A second signal takes its usual course at once, unless it comes within ONE_REQUEST of the first. Ignored signals
    stay ignored. Only the main thread can do this: in other threads, nothing is deferred.
    """
    signalled, process, before = Signalled(), os.getpid(), {}
    since = 0.0  # of the first signal

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if os.getpid() != process:  # in a loader's worker, which the terminal signals too
            restore()
        elif not signalled.number:
            signalled.number, since = number, time.monotonic()
            if callable(signal.getsignal(signal.SIGCHLD)):  # torch's, which raises if the signal kills a worker
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            name = signal.Signals(number).name
            with suppress(OSError):  # there may be no stderr
                os.write(2, f"fastbert: {name}: training ends after this step; again to end it at once\n".encode())
        elif time.monotonic() > since + ONE_REQUEST:
            restore()
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: old for number, old in handlers.items() if old not in (None, signal.SIG_IGN)}
        for number in before:
            signal.signal(number, note)
    try:
        yield signalled
    finally:
        restore()
    if signalled.number:
        signal.raise_signal(signalled.number)
