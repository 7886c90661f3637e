"""Files that are replaced whole: after an error, a full disk or a kill, the file that was there before still is."""

import glob
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A new binary file beside `path` that takes its place when the block ends without an error.

    The file is opened before the block runs, so a missing folder is reported before any work is done. The block may
    also have a library write to the file's name. Threads and processes may replace one path at the same time: the last
    one stays. The mode is that of any new file. Raises OSError with `path` in it where writing fails.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    _remove_leftovers(path)
    try:
        with part.open("xb") as file:
            mode = os.fstat(file.fileno()).st_mode
            yield file
        with part.open("rb+") as written:  # not always the file that was opened: some libraries replace it
            os.fsync(written.fileno())
        os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if cause := _system_error(error, part):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    _sync_names(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed have left of `path`: parts that nobody has written to for a day."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with suppress(OSError):  # another process may be quicker
            if time.time() - part.stat().st_mtime > 86400:
                part.unlink()


def _system_error(error: BaseException, part: Path) -> OSError | None:
    """The system's refusal to write `part`, also where a library has turned it into an error of its own."""
    cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides a full disk in one
    if isinstance(cause, OSError):
        return cause if cause.errno and cause.filename in (None, str(part)) else None
    number = re.search(r"\(os error (\d+)\)", str(error))  # as Rust writes it: safetensors, tokenizers
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


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
