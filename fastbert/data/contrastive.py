"""Pairs, triplets and larger tuples of texts for contrastive training, in columns (anchor, positive, negative, ...)."""

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
    """Reads the columns of JSON lines, CSV or Parquet: {"anchor": [...], "positive": [...]}; of several files, one file
    after the other.

    x.parquet is read with the package `pyarrow`. In x.csv and x.tsv the first line names the columns. Any other file is
    read as JSON lines: one object a line, all with the same names; blank lines are skipped; x.jsonl.gz is decompressed.
    If each column is a text file with one text a line: {"anchor": list(read_texts(file)), ...}. Raises
    FileNotFoundError; ValueError that names a damaged file, the line or row (from 1) if it is not an object with the
    same names as the others, the column if a value is null or a name is there twice, and a file without a row.
    """
    columns: dict[str, list[Any]] = {}
    for path in [files] if isinstance(files, (str, Path)) else files:
        place = None
        for place, row in (reader_of(path) or json_rows)(path):
            if not isinstance(row, dict) or not row or (columns and row.keys() != columns.keys()):
                expected = ", ".join(columns) or "an object"
                raise ValueError(f"read_columns: {place} of {path} has {_shown(row)}; expected {expected}")
            for name, value in row.items():
                if value is None:
                    raise ValueError(f"read_columns: {place} of {path} has null for {name}; expected a value")
                columns.setdefault(name, []).append(value)
        if place is None:
            raise ValueError(f"read_columns: {path} has no row; expected at least one")
    return columns


def _shown(row: Any) -> str:
    return ", ".join(row) if isinstance(row, dict) and row else f"{row!r:.60}"


class ContrastiveDataset(TokenizedDataset):
    """Tuples of texts that belong together, with or without scores.

    Examples: input_ids, the tokens of all texts of a tuple; column_lengths, the number of tokens of each text; labels,
    the scores. `lengths`, which TokenBudgetSampler reads, counts the tokens of the whole tuple.
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
        """columns: the anchors first, then their positives, then hard negatives, under any names. scores: for each
        tuple a number or a list of numbers, as the loss expects. prompts: by column, a text to put before its texts.

        max_length: the limit of a text with its prompt and special tokens; one number, or one by column. truncation:
        True cuts there, and warns once per column with the count; False raises ValueError. Raises ValueError for
        columns of unequal length, a text without tokens (or, with a prompt, with nothing but white space), fewer than
        two columns, a prompt or max_length for an unknown column, a column without max_length where it is given by
        column, and scores that are not finite or of unequal length; TypeError for columns that are not a mapping, and
        texts that are not strings.
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
    """Reorders the tokens from column after column to tuple after tuple; within a tuple, columns keep their order."""
    ends = lengths.T.ravel().cumsum().reshape(lengths.T.shape).T  # where each text ends in the concatenated columns
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

    The batch holds input_ids (T,), cu_seqlens and max_seqlen as PackingCollator makes them, with all anchors first,
    then all positives, and so on; columns, an int, the number of texts in a tuple; keys, (columns, B) int64, hashes of
    the texts' tokens, so that equal texts have equal keys; and labels, (B,) or (B, k) float32, the scores.
    """

    min_examples = 2  # for loaders: losses that compare the tuples of a batch refuse a single one

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | int]:
        """Makes the batch. Raises ValueError for tuples of unequal size, and for examples of another data set."""
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
    """A 64-bit hash. The probability that any two of 10⁵ different texts get the same hash is 3 in 10¹⁰."""
    digest = blake2b(tokens.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
