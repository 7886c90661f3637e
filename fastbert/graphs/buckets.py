"""Buckets: how much a graph has room for, and the buffer that a batch is copied to.

    input_ids   a a a b b . . .     5 tokens in a bucket of 8, of sequences of at most 4; 3 are spare
    cu_seqlens  0 3 5 5 5 8         2 sequences of at most 3; the others are empty, or hold the spare tokens

Spare tokens (of id 0) form separate sequences, and everything but attention works on single rows, so they do not affect
real tokens. The bucket's longest sequence is captured as a constant: attention launches programs for that length, and
those past the end of a sequence return at once.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.padding import Packing

NAME = "fastbert.graph"  # for error messages
IDS = ("input_ids", "token_type_ids", "position_ids")  # each with one entry per token


class Bucket(NamedTuple):
    """The most tokens and sequences that a graph takes, and the longest sequence."""

    tokens: int
    sequences: int
    longest: int

    @property
    def slots(self) -> int:
        """Sequences in the captured batch: the caller's, and enough to hold all tokens if all are spare."""
        return self.sequences + -(-self.tokens // self.longest)

    def why_not(self, packing: Packing) -> str | None:
        """Why a batch does not fit; None if it does."""
        if packing.tokens > self.tokens:
            return f"a batch has more than {self.tokens} tokens"
        if packing.batch > self.sequences:
            return f"a batch has more than {self.sequences} sequences"
        if min(packing.max_seqlen, packing.tokens) > self.longest:  # callers may pass the model's maximum
            return f"a sequence has more than {self.longest} tokens"
        return None


class Field(NamedTuple):
    """A part of the buffer, `size` numbers. fill: the value where the batch has none; None means 0, 1, 2, ..."""

    name: str
    size: int
    fill: int | None = 0

    def blank(self, device: torch.device) -> Tensor:
        if self.fill is None:
            return torch.arange(self.size, dtype=torch.int32, device=device)
        return torch.full((self.size,), self.fill, dtype=torch.int32, device=device)


class Form:
    """The layout of a bucket's int32 buffer: the `more` fields, the ids of tokens and cu_seqlens, contiguous."""

    def __init__(self, bucket: Bucket, *more: Field) -> None:
        self.bucket = bucket
        ids = (Field(name, bucket.tokens) for name in IDS)
        self.fields = (*more, *ids, Field("cu_seqlens", bucket.slots + 1))
        self.size = sum(field.size for field in self.fields)
        self._blanks = cache(self._new_blanks)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        parts = buffer.split_with_sizes([field.size for field in self.fields])
        return {field.name: part for field, part in zip(self.fields, parts, strict=True)}

    def send(self, buffer: Tensor, rows: dict[str, Tensor | None], packing: Packing) -> None:
        """Writes a batch, which is on the buffer's device or on the host (then one copy). No host synchronisation."""
        if packing.cu_seqlens.device == buffer.device:
            return self.write(buffer, rows, packing)
        # A new pinned buffer, as the previous copy may still run; PyTorch reuses the memory after the copy.
        pinned = torch.empty(self.size, dtype=torch.int32, pin_memory=True)
        self.write(pinned, rows, packing)
        buffer.copy_(pinned, non_blocking=True)

    def write(self, buffer: Tensor, rows: dict[str, Tensor | None], packing: Packing) -> None:
        """rows: integers on the buffer's device with which fields begin; the rest of each field gets its fill value."""
        *blanks, ends = self._blanks(buffer.device)
        pieces = []
        for field, blank in zip(self.fields, blanks, strict=False):
            row = rows.get(field.name)
            pieces += [blank] if row is None else [row, blank[row.shape[0] :]]
        spare = ends[packing.batch + 1 :].clamp(min=packing.tokens)
        torch.cat([*pieces, packing.cu_seqlens, spare], out=buffer)

    def _new_blanks(self, device: torch.device) -> list[Tensor]:
        """Every field's content without a batch. Spare sequences end at multiples of `longest`, at most at `tokens`."""
        *blanks, ends = (field.blank(device) for field in self.fields)
        spare = torch.arange(1, self.bucket.slots - self.bucket.sequences + 1, device=device) * self.bucket.longest
        ends[self.bucket.sequences + 1 :] = spare.clamp(max=self.bucket.tokens)
        return [*blanks, ends]


def buckets_of(max_tokens: Iterable[int], max_sequences: int, max_seqlen: int) -> tuple[Bucket, ...]:
    """One bucket for each size, the smallest first. Raises ValueError for invalid sizes."""
    if isinstance(max_tokens, str) or not isinstance(max_tokens, Iterable) or not (max_tokens := tuple(max_tokens)):
        raise ValueError(f"{NAME}: max_tokens is {max_tokens!r}; expected the sizes of buckets, as in (64, 128)")
    sizes = sorted({size_of("max_tokens", size) for size in max_tokens})
    count, longest = size_of("max_sequences", max_sequences), size_of("max_seqlen", max_seqlen)
    return tuple(Bucket(size, count, min(longest, size)) for size in sizes)


def size_of(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{NAME}: {name} has {value!r}; expected positive ints")
    return value
