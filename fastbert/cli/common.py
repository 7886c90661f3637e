"""Shared by the commands: arguments, reading texts, writing JSON."""

import argparse
import json
import sys
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_model(command: argparse.ArgumentParser, *, required: bool) -> None:
    if required:
        command.add_argument("--model", required=True, help="a directory with a trained model, or its name on the hub")
    else:
        default = "all-MiniLM-L6-v2, if installed"
        command.add_argument("--model", help=f"a directory, or a name on the hub (default: {default})")
    command.add_argument("--dtype", choices=DTYPES, default="float32")
    add_device(command)


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for machines: JSON on stdout")


def add_texts(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("texts", nargs="*", metavar="TEXT", help=what)
    command.add_argument("--text", type=Path, metavar="FILE", help="texts, one a line")


def texts_of(args: argparse.Namespace) -> list[str]:
    """The texts on the command line, or the lines of --text that are not blank."""
    if bool(args.texts) == bool(args.text):
        raise ValueError("expected texts, or --text FILE")
    return args.texts or [line for line in lines(args.text) if line.strip()]


def lines(path: Path) -> list[str]:
    """All lines of a file, blank ones included, so that row i of an array belongs to line i."""
    text = read(path)
    return text.removesuffix("\n").split("\n")


def read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def write_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=1, ensure_ascii=False)
    print()
