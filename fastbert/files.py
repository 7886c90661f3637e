"""Files that are replaced whole: after an error, a full disk or a kill, the file that was there before still is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A new binary file beside `path` that takes its place when the block ends without an error.

    The file is opened before the block runs, so a missing folder is reported before any work is done. Raises OSError
    with `path` in it where writing fails.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides a full disk in one
        if isinstance(cause, OSError) and cause.errno and cause.filename in (None, str(part)):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    _sync_names(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file by a text in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def _sync_names(directory: Path) -> None:
    """Makes a new name in the directory survive a loss of power; Windows has no such call."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)
