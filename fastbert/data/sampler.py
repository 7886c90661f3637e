"""Samplers for `DataLoader(batch_sampler=...)`: which examples form a batch, and which process gets it.

Batches depend only on seed and epoch, so all processes and any number of workers see the same ones. Ranks take batches
in turn. Every example is in one batch of one rank, except those that drop_last leaves out. All ranks have equally many
batches: some are halved for that, or with drop_last the last ones left out.
"""

import bisect
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler


def mixed(seed: int, number: int) -> int:
    """A seed for each number, an epoch's or a rank's. Unlike sums, those of two seeds do not meet."""
    return zlib.crc32(f"{seed} {number}".encode())


class _BatchSampler(Sampler[list[int]]):
    """Handles the order, the ranks and the first batch. A subclass's `_fill` returns where batches end in an order, and
    `_fits` says whether examples of the present order may form a batch."""

    drop_last = False

    def __init__(
        self, count: int, shuffle: bool, seed: int, rank: int, world_size: int, min_examples: int, **limit: int
    ) -> None:
        """limit: the subclass's, by name."""
        for name, value in {**limit, "min_examples": min_examples}.items():
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}; expected a whole number, at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"{type(self).__name__}: rank is {rank}; expected 0 to {world_size - 1} (world_size - 1)")
        self.count, self.shuffle, self.seed = count, shuffle, seed
        self.rank, self.world_size, self.min_examples = rank, world_size, min_examples
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
        self._ends = self._even(self._top_up(self._fill(self._order)))

    def _top_up(self, ends: list[int]) -> list[int]:
        """Moves examples from the batch before the last to the last, if that has fewer than min_examples. They stay
        where they are if one of the two would then break a limit."""
        if len(ends) < 2:
            return ends
        start, middle, end = [0, *ends][-3:]
        moved = min(middle, end - self.min_examples)
        possible = moved - start >= self.min_examples and self._fits(moved, end)
        return [*ends[:-2], moved, end] if possible else ends

    def _even(self, ends: list[int]) -> list[int]:
        """Halves the last of the largest batches until their number is a multiple of world_size; with drop_last, leaves
        out the last ones."""
        if self.drop_last:
            if 0 < len(ends) < self.world_size:
                count = f"{len(ends)} whole batches"
                raise ValueError(f"{type(self).__name__}: {count} for {self.world_size} ranks; expected one for each")
            return ends[: len(ends) - len(ends) % self.world_size]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        while len(sizes) % self.world_size:
            largest = max(range(len(sizes)), key=lambda batch: (sizes[batch], batch))
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
        if self.min_examples > 1 and self._may_top_up():
            values["min_examples"] = self.min_examples
        if self.world_size > 1:
            values["sharing"] = 2  # before there was this entry, the first of the largest batches was halved
        return {"sampler": type(self).__name__, **values}

    def _may_top_up(self) -> bool:
        """Whether the last batch of an epoch may have fewer than min_examples."""
        return True


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
        min_examples: int = 1,
    ) -> None:
        """count: the number of examples. drop_last: leaves out the last batch of each epoch if it is smaller, and as
        many more as the ranks cannot share evenly. min_examples: if the last batch has fewer, it takes some of the one
        before, where both then have enough.
        Raises ValueError for invalid numbers, and if batches cannot be split evenly among the ranks."""
        self._batch_size, self.drop_last = batch_size, drop_last
        super().__init__(count, shuffle, seed, rank, world_size, min_examples, batch_size=batch_size)

    @property
    def batch_size(self) -> int | None:
        """None if batches before the last may be smaller. (Hugging Face's accelerate would leave them out.)"""
        return None if self.min_examples > 1 and self._may_top_up() else self._batch_size

    def _fill(self, order: Tensor) -> list[int]:
        whole = [*range(self._batch_size, self.count + 1, self._batch_size)]
        return whole if self.drop_last or self.count % self._batch_size == 0 else [*whole, self.count]

    def _fits(self, first: int, last: int) -> bool:
        return last - first <= self._batch_size

    def _may_top_up(self) -> bool:
        return not self.drop_last and 0 < self.count % self._batch_size < self.min_examples

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "batch_size": self._batch_size, "drop_last": self.drop_last}


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
        min_examples: int = 1,
    ) -> None:
        """lengths: tokens in each example. min_examples: as in BatchSizeSampler, within the budget. Raises ValueError
        for an example longer than max_tokens, for invalid numbers, and if batches cannot be split evenly among the
        ranks."""
        self.lengths, self.max_tokens = torch.as_tensor(lengths, dtype=torch.int64), max_tokens
        wrong = ((self.lengths > max_tokens) | (self.lengths < 0)).nonzero().flatten()
        if wrong.numel():
            index = int(wrong[0])
            raise ValueError(
                f"TokenBudgetSampler: example {index} has {self.lengths[index]} tokens; expected at most max_tokens, "
                f"{max_tokens}"
            )
        self._tokens = int(self.lengths.sum())
        super().__init__(len(self.lengths), shuffle, seed, rank, world_size, min_examples, max_tokens=max_tokens)

    def _fill(self, order: Tensor) -> list[int]:
        sums = self.lengths[order].cumsum(0).numpy()  # tokens in the first 1, 2, ... examples
        ends, end, before = [], 0, 0
        while end < len(sums):
            end = bisect.bisect_right(sums, before + self.max_tokens)
            ends.append(end)
            before = int(sums[end - 1])
        return ends

    def _fits(self, first: int, last: int) -> bool:
        return int(self.lengths[self._order[first:last]].sum()) <= self.max_tokens

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "max_tokens": self.max_tokens, "tokens": self._tokens}
