"""Samplers for `DataLoader(batch_sampler=...)`: which examples form a batch, and which process gets it.

Batches depend only on seed and epoch, so all processes and any number of workers see the same ones. Ranks take batches
in turn. Every example is in one batch of one rank, except those that drop_last leaves out. All ranks have equally many
batches.
"""

import bisect
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler


def mixed(seed: int, number: int) -> int:
    """A seed for each number, an epoch's or a rank's. Unlike sums, those of two seeds do not meet."""
    return zlib.crc32(f"{seed} {number}".encode())


class _BatchSampler(Sampler[list[int]]):
    """Handles the order, the ranks and the first batch. A subclass's `_fill` returns where batches end in an order."""

    def __init__(self, count: int, shuffle: bool, seed: int, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"{type(self).__name__}: rank is {rank}; expected 0 to {world_size - 1} (world_size - 1)")
        self.count, self.shuffle, self.seed = count, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.start = 0  # the first batch of the next iterator
        self.followers: list[Any] = []  # a collator whose masks depend on the epoch
        self.set_epoch(0)

    @property
    def sampler(self) -> "_BatchSampler":
        """Itself: Hugging Face's accelerate, which wraps a batch sampler, calls batch_sampler.sampler.set_epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch, which decides the order. Call it before the first batch, as transformers.Trainer does."""
        self.epoch = epoch
        for follower in self.followers:
            follower.set_epoch(epoch)
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        self._order = torch.randperm(self.count, generator=generator) if self.shuffle else torch.arange(self.count)
        self._ends = self._even(self._fill(self._order))

    def _even(self, ends: list[int]) -> list[int]:
        """Halves the largest batches until their number is a multiple of world_size."""
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        while len(sizes) % self.world_size:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            if sizes[largest] < 2:
                raise ValueError(
                    f"{type(self).__name__}: {len(sizes)} batches of one example each cannot be shared evenly by "
                    f"{self.world_size} ranks; expected larger batches, or a number of examples that they divide"
                )
            half = sizes[largest] // 2
            sizes[largest : largest + 1] = sizes[largest] - half, half
        return list(accumulate(sizes))

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.start)  # a generator would read `start` only when the first batch is asked for

    def _batches(self, first: int) -> Iterator[list[int]]:
        starts = [0, *self._ends]
        for batch in range(first * self.world_size + self.rank, len(self._ends), self.world_size):
            yield self._order[starts[batch] : self._ends[batch]].tolist()

    def __len__(self) -> int:
        """How many batches this rank has in this epoch; with a token budget it varies a little with the order."""
        return len(self._ends) // self.world_size

    def identity(self) -> dict[str, Any]:
        """All that batches depend on besides the epoch."""
        values = {"examples": self.count, "shuffle": self.shuffle, "seed": self.seed, "world_size": self.world_size}
        return {"sampler": type(self).__name__, **values}


class BatchSizeSampler(_BatchSampler):
    """Batches of batch_size examples, in order or shuffled in each epoch. The last batch may be smaller."""

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """count: the number of examples. drop_last: leaves out the last batch of each epoch if it is smaller.
        Raises ValueError for invalid numbers, and if batches cannot be split evenly among the ranks."""
        if batch_size < 1:
            raise ValueError(f"BatchSizeSampler: batch_size is {batch_size}; expected at least 1")
        self.batch_size, self.drop_last = batch_size, drop_last
        super().__init__(count, shuffle, seed, rank, world_size)

    def _fill(self, order: Tensor) -> list[int]:
        whole = [*range(self.batch_size, self.count + 1, self.batch_size)]
        return whole if self.drop_last or self.count % self.batch_size == 0 else [*whole, self.count]

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "batch_size": self.batch_size, "drop_last": self.drop_last}


class TokenBudgetSampler(_BatchSampler):
    """Batches of at most max_tokens tokens: a batch ends before the example that would exceed the budget.

    Examples are taken in order, or shuffled in each epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """lengths: tokens in each example. Raises ValueError for an example longer than max_tokens, and if batches
        cannot be split evenly among the ranks."""
        self.lengths, self.max_tokens = torch.as_tensor(lengths, dtype=torch.int64), max_tokens
        wrong = ((self.lengths > max_tokens) | (self.lengths < 0)).nonzero().flatten()
        if wrong.numel():
            index = int(wrong[0])
            raise ValueError(
                f"TokenBudgetSampler: example {index} has {self.lengths[index]} tokens; expected at most max_tokens, "
                f"{max_tokens}"
            )
        self._tokens = int(self.lengths.sum())
        super().__init__(len(self.lengths), shuffle, seed, rank, world_size)

    def _fill(self, order: Tensor) -> list[int]:
        sums = self.lengths[order].cumsum(0).numpy()  # tokens in the first 1, 2, ... examples
        ends, end, before = [], 0, 0
        while end < len(sums):
            end = bisect.bisect_right(sums, before + self.max_tokens)
            ends.append(end)
            before = int(sums[end - 1])
        return ends

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "max_tokens": self.max_tokens, "tokens": self._tokens}
