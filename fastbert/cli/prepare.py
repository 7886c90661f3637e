"""The command prepare: filters and tokenises text files into a token file for training."""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from fastbert.cli.common import add_text_file, stream
from fastbert.cli.progress import progress
from fastbert.files import require_readable


def add(commands) -> None:
    prepare = commands.add_parser("prepare", help="tokenise text files for training, without duplicates if you like")
    add_text_file(prepare, nargs="+", required=True)
    prepare.add_argument("--tokenizer", required=True, metavar="DIR", help="a directory, or a name on the hub")
    prepare.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory, for TokenFile")
    prepare.add_argument("--min-characters", type=int, default=1, metavar="N", help="of a text (default: 1)")
    prepare.add_argument("--max-characters", type=int, default=math.inf, metavar="N", help="of a text (default: any)")
    prepare.add_argument("--letters", type=float, metavar="SHARE", help="least share of letters in a text, 0 to 1")
    prepare.add_argument("--no-duplicates", action="store_true", help="leave out texts that are equal to another")
    prepare.add_argument(
        "--no-near-duplicates", type=float, metavar="SIMILARITY", help="leave out similar texts, as of 0.8 (datasketch)"
    )
    prepare.set_defaults(run=_prepare)


def _prepare(args: argparse.Namespace) -> None:
    from fastbert.data import Filtered, get_tokenizer, write_tokens

    if sum(str(path) == "-" for path in args.text) > 1:
        raise ValueError("--text has - twice; expected it once, because stdin ends")
    require_readable(path for path in args.text if str(path) != "-")
    with progress("preparing") as advance:
        texts = chain.from_iterable(stream(path, args.column) for path in args.text)
        kept = Filtered(_counted(texts, advance), *_filters(args))
        write_tokens(kept, get_tokenizer(args.tokenizer), args.output)
    counts = json.loads((args.output / "tokens.json").read_text())
    print(kept)
    print(f"{args.output}: {counts['texts']} texts, {counts['tokens']} tokens")


def _counted(texts: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    for text in texts:
        yield text
        advance(1)


def _filters(args: argparse.Namespace) -> list:
    from fastbert.data import by_length, by_letters, no_duplicates, no_near_duplicates

    filters = [by_length(args.min_characters, args.max_characters)]
    if args.letters is not None:
        filters.append(by_letters(args.letters))
    if args.no_duplicates:
        filters.append(no_duplicates())
    if args.no_near_duplicates is not None:
        filters.append(no_near_duplicates(args.no_near_duplicates))
    return filters
