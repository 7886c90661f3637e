"""Replaces files as a whole: after an error, a full disk or a kill, the previous file is still there."""

import errno
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A new binary file beside `path` that takes its place when the block ends without an error.

    The file is opened before the block runs, so a missing folder is reported before any work is done. The block may
    also let a library write to the file's name. Threads and processes may replace one path at the same time: the last
    one wins. The file gets the mode of any new file. A link to a file is replaced, not the file, which in a cache may
    belong to others; a device or a pipe is written to as it is. Raises OSError that names `path` if writing fails.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    part = _part_of(path)
    _remove_leftovers(path)
    try:
        with part.open("xb") as file:
            mode = os.fstat(file.fileno()).st_mode
            yield file
        with part.open("rb+") as written:  # some libraries have replaced the file that was opened
            os.fsync(written.fileno())
        os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if cause := _system_error(error, part):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        if isinstance(error, OSError) and error.errno is None:  # NumPy's, for a write that was cut short
            raise OSError(f"{path}: {error}") from error
        raise
    _sync_names(path.parent)


def require_readable(paths: Iterable[Path]) -> None:
    """Raises OSError if one cannot be opened, so that a missing file is found before hours of work on those before it.
    Pipes and devices are not opened, because what they hold would be lost."""
    for path in paths:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            path.open("rb").close()


@contextmanager
def part_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, for what will take its place once it is whole. It is removed when the block ends."""
    _remove_leftovers(path)
    part = _part_of(path)
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


_locked: dict[str, object] = {}  # directories, by this process


@contextmanager
def alone_in(directory: Path, does: str) -> Iterator[None]:
    """Locks the file .lock of a directory, at most until this process ends. Raises RuntimeError, which says what this
    `does`, if another process or thread has locked it. Where there are no locks, only threads keep each other out."""
    place, mine, taken = os.path.realpath(directory), object(), f"another run {does} {directory}"
    if _locked.setdefault(place, mine) is not mine:
        raise RuntimeError(taken)
    try:
        with open(directory / ".lock", "w") as file:
            _lock(file, taken)
            yield
    finally:
        del _locked[place]


def _lock(file: IO[str], taken: str) -> None:
    """Until the file is closed. Processes that are forked meanwhile, such as a loader's workers, do not hold it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise RuntimeError(taken) from None
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes have left: files and folders of this module beside `path` in which nothing was
    written for a day."""
    named = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{8}}\.part")
    for left in filter(lambda each: named.fullmatch(each.name), path.parent.glob(f"{glob.escape(path.name)}.*.part")):
        with suppress(OSError):  # another process may be quicker
            written = max(each.stat().st_mtime for each in (left, *left.rglob("*")))
            if time.time() - written > 86400:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _system_error(error: BaseException, part: Path) -> OSError | None:
    """The system's error in writing `part`, even if a library has raised its own error instead; None for others."""
    cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save raises one for a full disk
    if isinstance(cause, OSError):
        return cause if cause.errno and cause.filename in (None, str(part)) else None
    number = re.search(r"(?:\(os error |Os \{ code: )(\d+)", str(error))  # as Rust writes it: safetensors, tokenizers
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file by this text, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def _sync_names(directory: Path) -> None:
    """Makes a new name in the directory survive a power loss. Windows has no such call, nor have some file systems."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
