"""Pairs, triplets and larger tuples of texts for contrastive training: columns as anchor, positive, negative."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert.data.collator import PackingCollator, column_of, labels_of
from fastbert.data.datasets import check_counts, check_truncation
from fastbert.data.encode import TokenizedDataset, encode
from fastbert.data.rows import json_rows, reader_of
from fastbert.data.tokenizer import strings


def read_columns(files: str | Path | Iterable[str | Path]) -> dict[str, list[Any]]:
    """The columns of JSON lines, CSV or Parquet: {"anchor": [...], "positive": [...]}, of several files one after the
    other.

    x.parquet is read with the package `pyarrow`, x.csv and x.tsv by the names of their first line, any other file as
    JSON lines, one object a line with the same names in all, blank lines skipped; x.jsonl.gz is decompressed. For
    columns that are text files, one text a line: {"anchor": list(read_texts(file)), ...}. Raises FileNotFoundError;
    ValueError with the file for a damaged one, with the line or the row (from 1) for what is no such object, and with
    the column too for a value that is null.
    """
    columns: dict[str, list[Any]] = {}
    for path in [files] if isinstance(files, (str, Path)) else files:
        for place, row in (reader_of(path) or json_rows)(path):
            if not isinstance(row, dict) or not row or (columns and row.keys() != columns.keys()):
                expected = ", ".join(columns) or "an object"
                raise ValueError(f"read_columns: {place} of {path} has {_shown(row)}; expected {expected}")
            for name, value in row.items():
                if value is None:
                    raise ValueError(f"read_columns: {place} of {path} has null for {name}; expected a value")
                columns.setdefault(name, []).append(value)
    return columns


def _shown(row: Any) -> str:
    return ", ".join(row) if isinstance(row, dict) and row else f"{row!r:.60}"


class ContrastiveDataset(TokenizedDataset):
    """Tuples of texts that belong together, with scores or without.

    Examples: input_ids, the tokens of all texts of a tuple; column_lengths, how many each has; labels, the scores. A
    length, for TokenBudgetSampler, is that of the whole tuple.
    """

    def __init__(
        self,
        columns: Mapping[str, Iterable[str]],
        tokenizer: Any,
        *,
        scores: Sequence[Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        max_length: int | Mapping[str, int] = 512,
        truncation: bool = True,
    ) -> None:
        """columns: the anchors first, their positives, then hard negatives, under any names. scores: for each tuple a
        number or a list of them, as the loss wants them. prompts: by column, what is put before each of its texts.

        max_length: of each text with its prompt and special tokens, or by column. truncation: True cuts there, and
        warns once a column with the count; False raises ValueError. Raises ValueError for columns of unequal length, a
        text without tokens (or, with a prompt, of nothing but white space), fewer than two columns, a prompt for no
        column, max_length of other columns, and scores that are not finite or of unequal length; TypeError for columns
        without names, and texts that are not strings.
        """
        owner, prompts = "ContrastiveDataset", dict(prompts or {})
        check_truncation(owner, truncation, True, False)
        if not isinstance(columns, Mapping):
            raise TypeError(f"{owner}: columns is a {type(columns).__name__}; expected a mapping from names to texts")
        texts = {name: list(strings(owner, name, column)) for name, column in columns.items()}
        if len(texts) < 2 or not prompts.keys() <= texts.keys():
            given = f"columns {list(texts)} and prompts for {list(prompts)}"
            raise ValueError(f"{owner}: there are {given}; expected two columns or more, and prompts for some of them")
        lengths_of = max_length if isinstance(max_length, Mapping) else dict.fromkeys(texts, max_length)
        if lengths_of.keys() != texts.keys():
            raise ValueError(f"{owner}: max_length is of {list(lengths_of)}; expected one of each of {list(texts)}")
        check_counts(owner, **texts, scores=scores)
        encoded = [
            encode(
                owner,
                _prompted(owner, name, column, prompts.get(name)),
                tokenizer,
                max_length=lengths_of[name],
                truncation=truncation,
                where=lambda index, side, name=name: f"{name}[{index}]",
            )
            for name, column in texts.items()
        ]
        lengths = np.stack([lengths for _, lengths in encoded], 1)  # (N, columns)
        tokens = _by_tuple([tokens["input_ids"] for tokens, _ in encoded], lengths)
        labels = {} if scores is None else {"labels": _score_array(owner, scores)}
        super().__init__({"input_ids": tokens}, lengths.sum(1), tokenizer, {"column_lengths": lengths, **labels})


def _prompted(owner: str, name: str, texts: list[str], prompt: str | None) -> list[str]:
    if prompt is None:
        return texts
    empty = next((index for index, text in enumerate(texts) if not text.strip()), None)
    if empty is not None:
        raise ValueError(f"{owner}: {name}[{empty}] has no token; expected text")
    return [prompt + text for text in texts]


def _by_tuple(columns: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """From the tokens of each column to those of each tuple, column after column, one tuple after the other."""
    ends = lengths.T.ravel().cumsum().reshape(lengths.T.shape).T  # of each text among all columns' tokens
    counts = lengths.ravel()
    shifts = (ends - lengths).ravel() - (counts.cumsum() - counts)
    return np.concatenate(columns)[np.repeat(shifts, counts) + np.arange(counts.sum())]


def _score_array(owner: str, scores: Sequence[Any]) -> np.ndarray:
    """(N,) or (N, k) float32. Raises ValueError for anything else, and for NaN and infinity."""
    try:
        array = np.asarray(scores, dtype=np.float32)
    except (ValueError, TypeError):
        array = np.empty(0, np.float32)
    if array.ndim not in (1, 2) or len(array) != len(scores):
        raise ValueError(f"{owner}: scores begin {list(scores)[:3]!r:.80}; expected a number, or equally many, each")
    if not np.isfinite(array).all():
        raise ValueError(f"{owner}: scores[{np.argwhere(~np.isfinite(array))[0][0]}] is not finite")
    return array


class ContrastiveCollator:
    """Packs tuples of a ContrastiveDataset into one batch of texts: no padding, and no sorting by length.

    The batch holds input_ids (T,), cu_seqlens and max_seqlen as PackingCollator makes them, of all anchors, then all
    positives, and so on; columns, an int, how many texts a tuple has; keys, (columns, B) int64, hashes of the texts'
    tokens, the same for equal ones; and labels, (B,) or (B, k) float32, the scores.
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | int]:
        """Raises ValueError for tuples of unequal size, and for examples of another data set."""
        lengths = column_of("column_lengths", examples)
        if lengths is None or len({len(row) for row in lengths}) > 1:
            sizes = None if lengths is None else sorted({len(row) for row in lengths})
            raise ValueError(f"ContrastiveCollator: tuples have {sizes} texts; expected one number of them")
        texts = [torch.as_tensor(e["input_ids"]).split(row) for e, row in zip(examples, lengths, strict=True)]
        batch = PackingCollator()([{"input_ids": text} for column in zip(*texts, strict=True) for text in column])
        keys = torch.tensor([[_key(text) for text in column] for column in zip(*texts, strict=True)])
        scores = labels_of(examples)
        return batch | {"columns": len(lengths[0]), "keys": keys} | ({} if scores is None else {"labels": scores})


def _key(tokens: Tensor) -> int:
    """64 bits: that two of 10⁵ different texts get the same has a probability of 3 in 10¹⁰."""
    digest = blake2b(tokens.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
