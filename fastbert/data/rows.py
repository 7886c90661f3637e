"""Rows of files, read lazily: lines of text, JSON lines, CSV and TSV, Parquet."""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastbert.data.tokenizer import text_of
from fastbert.require import require

# ---- text


def read_texts(files: str | Path | Iterable[str | Path]) -> Iterator[str]:
    """Yields the lines of UTF-8 files, one text a line, without line ends. x.gz is decompressed.

    Files are read lazily. Raises FileNotFoundError, and ValueError that names the file and byte of text that is not
    UTF-8, or the damaged .gz file. Bytes are counted after decompression.
    """
    for path in [files] if isinstance(files, (str, Path)) else files:
        with gzip.open(path) if str(path).lower().endswith(".gz") else open(path, "rb") as file:
            yield from texts_in(path, _whole(path, file))


def texts_in(name: str | Path, lines: Iterable[bytes]) -> Iterator[str]:
    """The lines as `read_texts` yields them. name: of the file or stream, for errors."""
    place = 0
    for line in lines:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 at byte {place + error.start}: {error.reason}") from None
        yield (text if place else text.removeprefix("\ufeff")).rstrip("\r\n")
        place += len(line)


def _whole(path: str | Path, file: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


# ---- rows


def texts_of_file(path: str | Path, column: str | None = None) -> Iterator[str]:
    """Yields the texts of a file: x.jsonl and x.ndjson, x.csv and x.tsv, x.parquet (with `pyarrow`), else its lines.

    column: the name of the texts' column, None for "text". All but Parquet may be compressed (x.gz). Blank lines of a
    text file are texts; those of JSON lines are skipped. Raises FileNotFoundError; ValueError with file and place if
    the file is damaged or not UTF-8, lacks the column, or holds something other than text in it, and for a column that
    is named though the file has lines of text.
    """
    reader = reader_of(path)
    if reader is None:
        if column is not None:
            raise ValueError(f"{path} is read as lines of text; expected a file with columns, because of {column!r}")
        yield from read_texts(path)
        return
    column = "text" if column is None else column
    rows = parquet_rows(path, [column]) if reader is parquet_rows else reader(path)
    for place, row in rows:
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            given = "null" if text is None else f"a {type(text).__name__}"
            if not isinstance(row, dict) or column not in row:
                others = f", only {', '.join(list(row)[:9])}" if isinstance(row, dict) and row else ""
                given = f"no column {column!r}{others}"
            raise ValueError(f"{place} of {path} has {given}; expected text in {column!r}")
        yield text_of(f"{place} of {path}", column, text)


def json_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yields ("line 1", its value), ... Blank lines are skipped."""
    for number, line in enumerate(read_texts(path), 1):
        if line.strip():
            try:
                row = json.loads(line, object_pairs_hook=partial(_object, f"line {number} of {path}"))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
            yield f"line {number}", row


def _object(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require_distinct(place, [name for name, _ in pairs])
    return dict(pairs)


def _require_distinct(place: str | Path, names: list[str]) -> None:
    """Raises ValueError for a name that is there twice: a row, which is a dict, would keep only the last value."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{place} has {twice!r} twice; expected each name once")


def csv_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("row 1", its values by the names of the first line), ... Quoted fields may hold line ends.

    In x.tsv, tabs separate the fields. There, a quoted field with line ends and tabs is refused: such files are often
    written without quoting, and a text that begins with a quotation mark would swallow the rows up to the next one."""
    separator = "\t" if str(path).lower().removesuffix(".gz").endswith(".tsv") else ","
    number = 0
    csv.field_size_limit(2**31 - 1)  # some texts are longer than the default, 128 KiB
    lines = (line + "\n" for line in read_texts(path))
    rows = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        _require_distinct(path, rows.fieldnames or [])
        for number, row in enumerate(rows, 1):
            if None in row or None in row.values():
                count = "more" if None in row else "fewer"
                raise ValueError(f"row {number} of {path} has {count} fields than the first line; expected as many")
            if separator == "\t" and any("\t" in value and "\n" in value for value in row.values()):
                raise ValueError(
                    f"row {number} of {path} has a tab and a line end in one quoted field; expected it in x.csv "
                    "or x.jsonl, and a text's own quotation marks doubled, in a field in quotes"
                )
            yield f"row {number}", row
    except csv.Error as error:
        raise ValueError(f"row {number + 1} of {path} is no CSV: {error}") from None


def parquet_rows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("row 1", its values by column), ... columns: which to read, if the file has them; None for all."""
    arrow = require("pyarrow", "pyarrow")
    number = 0
    try:
        with require("pyarrow.parquet", "pyarrow").ParquetFile(path) as file:
            _require_distinct(path, file.schema_arrow.names)
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is no Parquet, or is damaged: {error}") from None


READERS = {
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}


def reader_of(path: str | Path) -> Callable[[str | Path], Iterator[tuple[str, Any]]] | None:
    """The function that reads the rows of a file, by its name's ending; None for endings that are not in READERS.

    Upper and lower case are the same. For x.gz, the ending before .gz counts."""
    return READERS.get(Path(str(path).lower().removesuffix(".gz")).suffix)
