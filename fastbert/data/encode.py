"""Tokenises texts into flat arrays, which the data sets hold, and counts the texts that are cut or empty."""

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastbert.data.tokenizer import copy_of
from fastbert.warn import warn

NO_WORD = -1  # word_ids of special tokens
_LONG = 16  # characters for each token that is kept: English has some 4
_SPACE = re.compile(r"\s")


def _numbers(values: Sequence[int | None]) -> np.ndarray:
    return np.array([NO_WORD if value is None else value for value in values], np.int32)


COLUMNS: dict[str, Callable[[Any], np.ndarray]] = {
    "input_ids": lambda encoding: np.array(encoding.ids, np.int32),
    "token_type_ids": lambda encoding: np.array(encoding.type_ids, np.int8),
    "word_ids": lambda encoding: _numbers(encoding.word_ids),
    "offsets": lambda encoding: np.array(encoding.offsets, np.int32),
}


class TokenizedDataset(Dataset):
    """Tokenised examples: dicts of int64 tensors (an entry for each token) and of numbers (labels of the example).

    Tokens are stored in flat arrays of at most 4 bytes an entry, which workers share. lengths: (N,) int64, in tokens.
    vocabulary: a hash of the tokenizer's vocabulary, which a loader keeps in its state.
    """

    def __init__(
        self,
        tokens: Mapping[str, np.ndarray],
        lengths: np.ndarray,
        tokenizer: Any,
        of_examples: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """tokens: arrays (total,) by name. of_examples: arrays (N, ...) by name."""
        self.vocabulary = vocabulary_hash(tokenizer)
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self._ends = self.lengths.cumsum(0)
        self._tokens, self._of_examples = dict(tokens), dict(of_examples or {})

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor | int | float | list[float]]:
        index = range(len(self))[operator.index(index)]  # raises IndexError, resolves negative indices
        tokens = {name: torch.from_numpy(self.rows(name, index).astype(np.int64)) for name in self._tokens}
        return tokens | {name: values[index].tolist() for name, values in self._of_examples.items()}

    def rows(self, name: str, index: int) -> np.ndarray:
        """One example's entries in a column of tokens."""
        end = int(self._ends[index])
        return self._tokens[name][end - int(self.lengths[index]) : end]


def vocabulary_hash(tokenizer: Any) -> str:
    """16 hexadecimal digits, which change if any token has another id. tokenizer: as `copy_of` takes it."""
    vocabulary = getattr(tokenizer, "backend_tokenizer", tokenizer).get_vocab()
    return short_hash(json.dumps(vocabulary, sort_keys=True).encode())


def short_hash(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def encode(
    owner: str,
    inputs: Iterable[Any],
    tokenizer: Any,
    *,
    max_length: int,
    truncation: bool | str,
    where: Callable[[int, int], str],
    columns: Sequence[str] = ("input_ids",),
    pairs: bool = False,
    words: bool = False,
    skip_empty: bool = False,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tokenises texts, pairs of texts or lists of words: columns (total,) by name, and lengths (N,).

    truncation: True cuts at max_length, the longer text of a pair first, and warns once with the count; "split" makes
    several examples of a long text; False raises ValueError. where(i, side): the name in error messages of the first
    (0) or second (1) text of input i. A text without tokens raises ValueError or, with skip_empty, is skipped and
    counted in a warning.
    """
    tokenizer = copy_of(tokenizer)
    _check_max_length(owner, max_length, tokenizer.num_special_tokens_to_add(pairs), pairs)
    rows, seen, cut, empty = {name: [] for name in columns}, 0, 0, 0
    for index, encoding in enumerate(encodings(tokenizer, inputs, words)):
        seen += 1
        if (side := empty_side(encoding, pairs)) is not None:
            if not skip_empty:
                raise ValueError(f"{owner}: {where(index, side)} has no token; expected text")
            empty += 1
            continue
        if len(encoding) > max_length and not truncation:
            raise ValueError(
                f"{owner}: {where(index, 0)} has {len(encoding)} tokens; expected at most max_length, {max_length}"
            )
        cut += len(encoding) > max_length and truncation != "split"
        whole = {name: COLUMNS[name](encoding) for name in columns}
        for piece in pieces(encoding, max_length, truncation == "split"):
            for name, column in whole.items():
                rows[name].append(column[piece])
    of_all = f"of {seen} {'pairs' if pairs else 'texts'} have"
    for count, what in ((cut, f"more than max_length, {max_length}, tokens: cut there"), (empty, "no token: skipped")):
        if count:
            warn(f"{owner}: {count} {of_all} {what}")
    return joined(owner, rows)


def joined(owner: str, rows: Mapping[str, list[np.ndarray]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Concatenated columns, and the lengths of the examples. Raises ValueError if there are none."""
    lengths = np.array([len(row) for row in rows["input_ids"]])
    if not len(lengths):
        raise ValueError(f"{owner}: there is no text; expected at least one")
    return {name: np.concatenate(parts) for name, parts in rows.items()}, lengths


def _check_max_length(owner: str, max_length: int, special: int, pairs: bool) -> None:
    least = special + 1 + pairs  # one token of each text
    if not isinstance(max_length, Integral):
        raise TypeError(f"{owner}: max_length is {max_length!r}; expected a whole number")
    if max_length < least:
        raise ValueError(
            f"{owner}: max_length is {max_length}; expected at least {least}, with the {special} special tokens"
        )


def encodings(tokenizer: Any, inputs: Iterable[Any], words: bool = False, special: bool = True) -> Iterator[Any]:
    """Yields encodings of texts, pairs of texts or lists of words. special: whether to add special tokens."""
    for batch in _batched(inputs):
        yield from tokenizer.encode_batch(batch, is_pretokenized=words, add_special_tokens=special)


class TooLong(ValueError):
    """A text has more tokens than allowed, and texts are not to be cut."""


def cut_encodings(
    tokenizer: Any, inputs: Iterable[Any], max_length: int, truncation: bool = True
) -> Iterator[tuple[Any, slice | np.ndarray]]:
    """Yields encodings of texts or pairs, each with the tokens to keep. At the end, warns how many texts were cut.

    truncation: False raises TooLong instead of cutting. Of a long text only the beginning is tokenised, up to a space
    and to more tokens than are kept.
    """
    inputs, seen, cut = list(inputs), 0, 0
    shorter, sides = zip(*(_beginning(one, _LONG * max_length) for one in inputs), strict=True) if inputs else ((), ())
    for side, encoding in zip(sides, encodings(tokenizer, shorter), strict=True):
        if side is not None and _may_decide(encoding, side, max_length):
            encoding, side = next(encodings(tokenizer, [inputs[seen]])), None  # its tokens are long
        if len(encoding) > max_length and not truncation:
            count = f"{'more than ' if side is not None else ''}{len(encoding)}"
            raise TooLong(f"texts[{seen}] has {count} tokens; expected at most {max_length}")
        seen, cut = seen + 1, cut + (len(encoding) > max_length)
        (piece,) = pieces(encoding, max_length, split=False)
        yield encoding, piece
    if cut:
        warn(f"{cut} of {seen} texts are longer than {max_length} tokens: cut there")


def _beginning(one: Any, characters: int) -> tuple[Any, int | None]:
    """A text or pair in which the one long text ends at the first space after so many characters, and which text that
    is; the whole, and None, if no text is long or both are: which of two is cut depends on both lengths."""
    texts = (one,) if isinstance(one, str) else tuple(one)
    long = [side for side, text in enumerate(texts) if len(text) > characters]
    end = _SPACE.search(texts[long[0]], characters) if len(long) == 1 else None
    if end is None:
        return one, None
    shorter = [text[: end.start()] if side == long[0] else text for side, text in enumerate(texts)]
    return (shorter[0] if isinstance(one, str) else tuple(shorter)), long[0]


def _batched(inputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields lists of at most 1000 inputs, fewer if they are long, because an Encoding takes a lot of memory."""
    batch, characters = [], 0
    for one in inputs:
        batch.append(one)
        characters += len(one) if isinstance(one, str) else sum(map(len, one))
        if len(batch) == 1000 or characters >= 1 << 20:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def empty_side(encoding: Any, pairs: bool) -> int | None:
    """The first text, 0 or 1, that has no token; None if every text has tokens."""
    sides = set(encoding.sequence_ids)
    return next((side for side in range(1 + pairs) if side not in sides), None)


def pieces(encoding: Any, limit: int, split: bool, stride: int = 0) -> list[slice | np.ndarray]:
    """Which tokens each example made of an encoding gets: all, those left after a cut, or one part of the text each.
    stride: how many tokens consecutive parts share."""
    if len(encoding) <= limit:
        return [slice(None)]
    sequences = _numbers(encoding.sequence_ids)
    return _parts(sequences, limit, stride) if split else [_cut(sequences, limit)]


def _parts(sequences: np.ndarray, limit: int, stride: int) -> list[np.ndarray]:
    """Consecutive parts of the text, each between the special tokens before and after it."""
    text, special = np.flatnonzero(sequences == 0), np.flatnonzero(sequences < 0)
    before, after = special[special < text[0]], special[special > text[-1]]
    room = limit - len(special)
    starts = range(0, len(text) - stride, room - stride)
    return [np.concatenate([before, text[start : start + room], after]) for start in starts]


def _may_decide(encoding: Any, side: int, max_length: int) -> bool:
    """Whether more tokens of the text on this side, of which there is only the beginning, might change what is kept."""
    tokens, others = (encoding.sequence_ids.count(s) for s in (side, 1 - side))
    return tokens < max_length or tokens < others + (side == 0)  # `_cut` leaves more of the longer, else of the second


def _cut(sequences: np.ndarray, limit: int) -> np.ndarray:
    """The special tokens and the tokens left of one or two texts, the longer of which is cut first.

    Equivalent to `tokenizers`' "longest_first", which is too slow: for two long texts it also builds all pairs of their
    parts.
    """
    first, second = (int((sequences == side).sum()) for side in (0, 1))
    room = limit - int((sequences < 0).sum())
    short = min(first, second, room // 2)
    left = (room - short, short) if first > second else (short, room - short)
    kept = [(sequences == side) & (np.cumsum(sequences == side) <= left[side]) for side in (0, 1)]
    return np.flatnonzero((sequences < 0) | kept[0] | kept[1])
