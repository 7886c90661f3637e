"""Types of options for argparse: what cannot work is refused before anything is measured."""

import argparse
import math
import tempfile
from pathlib import Path


def count(word: str) -> int:
    return 0 if word == "0" else positive(word)


def positive(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return int(word)


def duration(word: str) -> float:
    if not 0 < float(word) < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no time above 0")
    return float(word)


def output(word: str) -> Path:
    """A file that can be written, in a folder that is made."""
    path = Path(word)
    try:
        writable(path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{word} is a folder")
    return path


def writable(folder: Path) -> None:
    """Makes the folder, if there is none, and a file in it that vanishes. Raises OSError if it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
