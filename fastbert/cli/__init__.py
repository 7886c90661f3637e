"""The command `fastbert`: search and embeddings, predictions, and tools around a model."""

import argparse
import os
import sys
import warnings

import fastbert
from fastbert.cli import embeddings, predictions, prepare, serve, tools
from fastbert.cli.common import while_it_is_read
from fastbert.cli.embeddings import show_results

__all__ = ["main", "show_results"]

_MENDABLE = (OSError, ValueError, TypeError, IndexError, RuntimeError, AssertionError, ModuleNotFoundError)
INTERRUPTED = 130  # as shells say it


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns 0 on success, 1 for a failed check, 2 with a line on stderr for a user's mistake, 130
    after Ctrl-C. With FASTBERT_TRACEBACK=1 in the environment, errors have a traceback."""
    args = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings(), while_it_is_read():
            warnings.showwarning = _warn
            return args.run(args) or 0
        return 0  # nobody reads on
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except _MENDABLE as error:
        if os.environ.get("FASTBERT_TRACEBACK") == "1":
            raise
        missing = isinstance(error, ModuleNotFoundError) and "pip install" not in str(error)
        _say((str(error) or type(error).__name__) + (f"; to install it: pip install {error.name}" if missing else ""))
        return 2


def _warn(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """Shows warnings in one line, except those for developers."""
    if not issubclass(category, (DeprecationWarning, FutureWarning)):
        _say(str(message))


def _say(message: str) -> None:
    print(f"fastbert: {'; '.join(line.strip() for line in message.splitlines() if line.strip())}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fastbert", description="BERT encoders without work on padding.")
    parser.add_argument("--version", action="version", version=f"fastbert {fastbert.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for group in (embeddings, predictions, serve, prepare, tools):
        group.add(commands)
    return parser
