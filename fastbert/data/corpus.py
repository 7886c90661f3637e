"""Corpora larger than memory: token ids in NumPy's .npy files, written as a stream and memory-mapped for reading.

A directory holds

- tokens.npy: (T,) uint16, or uint32 for large vocabularies: the ids of all texts, without special tokens
- ends.npy: (N,) int64: where each text ends
- words.npy: (T,) bool: where a word begins; omitted for WordPiece, whose `##` prefix shows it
- tokens.json: the special tokens before and after a text, and the numbers T and N
- tokenizer.json, tokenizer_config.json: the tokenizer that was used (`get_tokenizer` reads the directory)
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastbert.data.encode import NO_WORD, encodings, vocabulary_hash
from fastbert.data.rows import texts_of_file
from fastbert.data.tokenizer import Counted, continuation_prefix, copy_of, get_tokenizer, save_tokenizer, text_of
from fastbert.files import part_folder, require_readable, write_text
from fastbert.warn import warn

# ---- writing


class _Column:
    """A .npy file written as a stream. NumPy pads its header, so there is room for the length, written at the end.
    Raises OSError with the path if writing fails."""

    def __init__(self, path: Path, dtype: type) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype), 0
        self.file = open(path, "wb")  # closed by close()
        self.begin = self._header()

    def _header(self) -> int:
        fields = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, fields)
        return self.file.tell()

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        values = np.asarray(values, self.dtype)
        try:
            self.file.write(values.tobytes())
        except OSError as error:
            raise self._named(error) from None
        self.count += len(values)

    def close(self) -> None:
        self.file.seek(0)
        if self._header() != self.begin:
            raise RuntimeError(f"NumPy {np.__version__} leaves no room in .npy headers; expected 1.24 or later")
        self.file.flush()
        os.fsync(self.file.fileno())

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))

    def __enter__(self) -> "_Column":
        return self

    def __exit__(self, kind: type | None, *error: Any) -> None:
        try:
            with self.file:
                if kind is None:
                    self.close()
        except OSError as error:
            raise self._named(error) from None


def write_tokens(texts: Path | Iterable[str | Path], tokenizer: Any, directory: str | Path) -> "TokenFile":
    """Tokenises a corpus into a directory for `TokenFile`, in one pass with little memory.

    texts: a string is a text; a Path is a UTF-8 file with one text a line or, by its name, x.jsonl, x.csv, x.tsv or
    x.parquet, with texts in its column "text". Texts without tokens (empty lines) are skipped, and one warning counts
    them. A text is tokenised in one piece: pass paragraphs rather than books.
    directory: must not exist; it is written within a temporary directory beside it, whose name ends in ".part", and
    moved into place when complete. What a killed run has left there is removed after a day. Raises FileExistsError,
    FileNotFoundError, OSError that names the file if writing fails, ValueError for a file that is not UTF-8 or lacks
    the column, for names of files in place of Paths, and if no text has tokens; TypeError for texts of another type.
    """
    directory, tokenizer = Path(directory), copy_of(tokenizer)
    if directory.exists():
        raise FileExistsError(f"write_tokens: there is a {directory}; expected a new directory")
    if isinstance(texts, (list, tuple)):
        require_readable(each for each in texts if isinstance(each, Path))
        if texts and all(isinstance(each, str) and _is_name_of_file(each) for each in texts):
            raise ValueError(f"write_tokens: texts are names of files; expected texts, or Path({texts[0]!r})")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with part_folder(directory) as part:
        _write(_texts(texts), tokenizer, part)
        os.replace(part, directory)
    return TokenFile(directory)


def _is_name_of_file(text: str) -> bool:
    return (os.sep in text or "." in text) and os.path.isfile(text)


def _texts(sources: Path | Iterable[str | Path]) -> Iterator[str]:
    if isinstance(sources, (str, bytes)):
        raise TypeError(f"write_tokens: texts is a {type(sources).__name__}; expected several strings, or a Path")
    for index, source in enumerate([sources] if isinstance(sources, Path) else sources):
        if isinstance(source, Path):
            yield from texts_of_file(source)
        else:
            yield text_of("write_tokens", f"texts[{index}]", source, "a string or a Path")


def _write(texts: Iterable[str], tokenizer: Any, directory: Path) -> None:
    small = max(tokenizer.get_vocab().values()) < 1 << 16
    dtypes = {"tokens": np.uint16 if small else np.uint32, "ends": np.int64}
    if continuation_prefix(tokenizer) is None:
        dtypes["words"] = np.bool_
    texts, row = Counted(texts), None
    with ExitStack() as stack:
        columns = {name: stack.enter_context(_Column(directory / f"{name}.npy", dtypes[name])) for name in dtypes}
        for row in filter(len, encodings(tokenizer, texts, special=False)):
            columns["tokens"].append(row.ids)
            columns["ends"].append([columns["tokens"].count])
            if "words" in columns:
                columns["words"].append(_starts(row.word_ids))
    if row is None:
        raise ValueError("write_tokens: there is no text with tokens; expected at least one")
    if skipped := texts.count - columns["ends"].count:
        warn(f"write_tokens: {skipped} of {texts.count} texts have no token: skipped")
    before, after = _special_tokens_around(tokenizer, row)
    info = {"before": before, "after": after, "tokens": columns["tokens"].count, "texts": columns["ends"].count}
    write_text(directory / "tokens.json", json.dumps(info))
    save_tokenizer(tokenizer, directory)


def _special_tokens_around(tokenizer: Any, row: Any) -> tuple[list[int], list[int]]:
    """The ids of the special tokens before and after a text. row: an encoding without special tokens."""
    framed = tokenizer.post_process(row)
    special = framed.special_tokens_mask
    before, after = special.index(0), special[::-1].index(0)
    return framed.ids[:before], framed.ids[len(special) - after :]


def _starts(word_ids: list[int | None]) -> np.ndarray:
    words = np.array([-1 if word is None else word for word in word_ids])
    return np.concatenate([[True], words[1:] != words[:-1]])


# ---- reading


class TokenFile(Dataset):
    """A corpus written by `write_tokens`, as examples for a masked LM; long texts are split.

    Examples, as in MLMDataset: input_ids, at most max_length with the special tokens, and word_ids unless the tokenizer
    is a WordPiece. Opening reads tokens.json and the arrays' headers; the first use computes where examples begin, 8
    bytes a text. Pickling stores only the directory's name and max_length, so every worker maps the files itself.
    """

    def __init__(self, directory: str | Path, max_length: int = 512) -> None:
        """Raises FileNotFoundError, and ValueError for damaged files or a max_length without room for text."""
        self.directory, self.max_length = Path(directory), max_length
        info = self._read_info()
        self._before, self._after = (np.array(info[name], np.int64) for name in ("before", "after"))
        self._tokens, self._ends = self._map("tokens.npy", info["tokens"]), self._map("ends.npy", info["texts"])
        has_words = (self.directory / "words.npy").exists()
        self._words = self._map("words.npy", info["tokens"]) if has_words else None
        self._special = len(self._before) + len(self._after)
        self._room = max_length - self._special
        if self._room < 1:
            raise ValueError(
                f"TokenFile: max_length is {max_length}; expected at least {self._special + 1}, with the "
                f"{self._special} special tokens"
            )

    def _read_info(self) -> dict[str, Any]:
        path = self.directory / "tokens.json"
        if not path.exists():
            raise FileNotFoundError(f"TokenFile: there is no {path}; expected a directory of write_tokens")
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        for name in ("before", "after", "tokens", "texts"):
            if name not in info:
                raise ValueError(f"{path} lacks {name}; expected what write_tokens writes")
        return info

    def _map(self, name: str, count: int) -> np.ndarray:
        path = self.directory / name
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if array.shape != (count,):
            raise ValueError(f"{path} has shape {array.shape}; expected ({count},), as tokens.json says")
        return np.asarray(array)

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` that the corpus was written with."""
        return get_tokenizer(self.directory)

    @cached_property
    def vocabulary(self) -> str:
        """A hash of the tokenizer's vocabulary, which a loader keeps in its state."""
        return vocabulary_hash(self.tokenizer)

    @cached_property
    def _parts(self) -> np.ndarray:
        """(N,): the number of examples in the first 1, 2, ... texts."""
        return (-(-np.diff(self._ends, prepend=0) // self._room)).cumsum()

    @property
    def lengths(self) -> Tensor:
        """(len(self),) int64: the length of every example in tokens."""
        lengths = np.full(len(self), self.max_length)
        rest = np.diff(self._ends, prepend=0) - self._room * (np.diff(self._parts, prepend=0) - 1)
        lengths[self._parts - 1] = rest + self._special
        return torch.from_numpy(lengths)

    def __len__(self) -> int:
        return int(self._parts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = range(len(self))[index]  # raises IndexError, resolves negative indices
        text = int(np.searchsorted(self._parts, index, side="right"))
        before, start = (int(self._parts[text - 1]), int(self._ends[text - 1])) if text else (0, 0)
        start += (index - before) * self._room
        part = slice(start, min(start + self._room, int(self._ends[text])))
        example = {"input_ids": torch.from_numpy(np.concatenate([self._before, self._tokens[part], self._after]))}
        if self._words is not None:
            words = self._words[part].cumsum()
            framed = np.pad(words, (len(self._before), len(self._after)), constant_values=NO_WORD)
            example["word_ids"] = torch.from_numpy(framed)
        return example

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "max_length": self.max_length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
