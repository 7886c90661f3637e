"""Shared by the commands: arguments, reading texts, writing JSON."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastbert import checkpoint
from fastbert.prepared import CONFIG_ENTRY, PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16")
TEXT_FILE = 'texts, one a line ("-" for stdin), or in a column of x.jsonl, x.csv, x.tsv or x.parquet'


def add_model(command: argparse.ArgumentParser, *, required: bool) -> None:
    if required:
        command.add_argument("--model", required=True, help="a directory with a trained model, or its name on the hub")
    else:
        default = "all-MiniLM-L6-v2, if installed"
        command.add_argument("--model", help=f"a directory, or a name on the hub (default: {default})")
    add_runtime(command)


def add_runtime(command: argparse.ArgumentParser, batch_tokens: int | None = 2048, otherwise: str = "") -> None:
    """Adds options for how a model runs. batch_tokens: the default. otherwise: its description if it is None."""
    command.add_argument("--dtype", choices=DTYPES, help="of the computation (default: float32, or as prepared)")
    packed = "weights packed for this processor, or in fp8 for a GPU (default: the model as it is)"
    command.add_argument("--precision", choices=list(PRECISIONS), help=packed)
    help_text = f"at most in a batch (default: {batch_tokens or otherwise})"
    command.add_argument("--batch-tokens", type=int, default=batch_tokens, metavar="N", help=help_text)
    length = "cut texts to N tokens; tag and answer read windows of N (default: the model's length; for answer 384)"
    command.add_argument("--max-length", type=int, metavar="N", help=length)
    command.add_argument("--threads", type=int, metavar="N", help="processor threads (default: PyTorch's)")
    add_device(command)


def model_options(args: argparse.Namespace) -> dict[str, object]:
    """The options for loading a model. Also sets the number of threads. Raises ValueError for numbers below 1."""
    for name in ("batch_tokens", "max_length", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    saved = _saved_precision(args.model)
    device = device_of(args, args.precision or saved)
    dtype = args.dtype or (None if saved else "float32")
    return {"dtype": dtype, "device": device, "precision": args.precision, "max_length": args.max_length}


def _saved_precision(source: str | None) -> str | None:
    """The precision of a prepared model that was saved there. Ignores errors, which loading the model will report."""
    try:
        entry = None if source is None else checkpoint.load(source).config.extra.get(CONFIG_ENTRY)
    except (OSError, ValueError):
        return None
    return entry.get("precision") if isinstance(entry, dict) else None


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is a GPU)")


def device_of(args: argparse.Namespace, precision: str | None) -> str:
    """The device of --device; by default a GPU if there is one, unless `precision` is one for the CPU."""
    return args.device or ("cuda" if torch.cuda.is_available() and precision in (None, "fp8") else "cpu")


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for machines: JSON on stdout")


def add_texts(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("texts", nargs="*", metavar="TEXT", help=what)
    add_text_file(command)


def add_text_file(command: argparse.ArgumentParser, **options: Any) -> None:
    """Adds --text and --column. options: of --text."""
    command.add_argument("--text", **{"type": Path, "metavar": "FILE", "help": TEXT_FILE} | options)
    command.add_argument("--column", metavar="NAME", help='of the file, with the texts (default: "text")')


def texts_of(args: argparse.Namespace, blank: bool = False) -> list[str]:
    """The texts on the command line, or the lines of --text. blank: keeps blank lines."""
    if bool(args.texts) == bool(args.text):
        raise ValueError("expected texts, or --text FILE")
    check_column(args)
    return no_files(args.texts) or [line for line in lines(args.text, args.column) if blank or line.strip()]


def check_column(args: argparse.Namespace) -> None:
    """Raises ValueError for --column without --text."""
    if args.column is not None and not args.text:
        raise ValueError(f"--column is {args.column!r}; expected --text FILE with it")


def no_files(texts: list[str], option: str = "--text") -> list[str]:
    """Returns the texts. Raises ValueError if one is the name of a file, which belongs behind an option."""
    for text in texts:
        if os.path.isfile(text):
            raise ValueError(f"{text} is a file; expected a text, or {option} {text}")
    return texts


def stream(path: Path, column: str | None = None) -> Iterator[str]:
    """The texts of a file, or with "-" of stdin, one after the other. Raises as `texts_of_file` does."""
    from fastbert.data.rows import texts_in, texts_of_file

    if str(path) != "-":
        return texts_of_file(path, column)
    if column is not None:
        raise ValueError(f"--column is {column!r}; stdin has texts, one a line")
    if sys.stdin is None:
        raise ValueError("stdin is closed; expected texts, one a line")
    return texts_in("stdin", sys.stdin.buffer)


def lines(path: Path, column: str | None = None) -> list[str]:
    """All texts of a file, or with "-" of stdin, blank lines included, so that row i of an array belongs to line i."""
    texts = list(stream(path, column))
    if not any(text.strip() for text in texts):
        raise ValueError(f"{path} holds no text")
    return texts


def read(path: Path) -> str:
    """The text of a whole file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def write_json(value: object) -> None:
    escapes = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # else it may break off at a character
    json.dump(value, sys.stdout, indent=1, ensure_ascii=escapes)
    print()


def new_console() -> "Console":
    """rich's Console for stdout. It raises BrokenPipeError, for `main`, where rich's own ends the program with 1."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Piped()


@contextmanager
def while_it_is_read() -> Iterator[None]:
    """Ends the block, without an error, once the reader of stdout, such as `head`, has enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush fails
