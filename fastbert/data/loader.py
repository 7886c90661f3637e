"""Loaders: a DataLoader that knows its place in the epoch, and the short ways to one from texts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastbert.data.collator import PackingCollator
from fastbert.data.datasets import ClassificationDataset, MLMDataset
from fastbert.data.sampler import BatchSizeSampler, TokenBudgetSampler


class BatchLoader(DataLoader):
    """A DataLoader over a sampler of this package that can stop in the middle of an epoch and go on there.

    Batches, and with a collator that has a seed the masks, are the same with any number of workers. It leaves torch's
    own generator alone, so what a model draws does not depend on when a loader is started.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchSizeSampler | TokenBudgetSampler,
        collator: PackingCollator,
        **options: Any,
    ) -> None:
        """options: those of DataLoader (num_workers, pin_memory, persistent_workers, ...)."""
        generator = torch.Generator().manual_seed(sampler.seed)  # of the workers' seeds
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collator, **{"generator": generator} | options)
        self._batch = 0  # how many batches of the epoch have been handed out

    def set_epoch(self, epoch: int) -> None:
        """Another order, and other masks, in each epoch; before its first batch. That of a loaded state goes on."""
        if epoch != self.batch_sampler.epoch:
            self._go_to(epoch, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
        if hasattr(self.collate_fn, "set_epoch"):
            self.collate_fn.set_epoch(epoch)
        self._batch = self.batch_sampler.start = batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sampler = self.batch_sampler
        self._batch = sampler.start
        batches = super().__iter__()  # workers begin
        sampler.start = 0
        return self._counted(batches, self._batch)

    def _counted(self, batches: Iterator[dict[str, Any]], before: int) -> Iterator[dict[str, Any]]:
        # The sampler is ahead of what has been handed out, where there are workers; and an evaluation may have run
        # through this loader in between.
        for number, batch in enumerate(batches, before + 1):
            self._batch = number
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches have been handed out, and what batches depend on. Serves all ranks."""
        return {"epoch": self.batch_sampler.epoch, "batch": self._batch, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {**self.batch_sampler.identity(), "mask_seed": getattr(self.collate_fn, "seed", None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration gives what was left of the epoch, nothing where it was at its end; then whole ones.

        Raises ValueError, and changes nothing, if the state is of other data or other batches.
        """
        ours = self._identity()
        other = [name for name, value in ours.items() if name not in state or state[name] != value]
        if other or not {"epoch", "batch"} <= state.keys():
            differences = ", ".join(f"{name} {state.get(name)} (here {ours[name]})" for name in other)
            raise ValueError(
                f"BatchLoader: the state is of another loader: {differences or 'it has no epoch and batch'}"
            )
        self._go_to(state["epoch"], state["batch"])


def create_dataloader(
    dataset: Dataset,
    collator: PackingCollator,
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> BatchLoader:
    """A loader of batches of batch_size examples, or of at most max_tokens tokens.

    shuffle: anew in each epoch (`set_epoch`), as seed says. rank, world_size: of the processes that share the data;
    None asks torch.distributed, and is one process without it (give 0 and 1 where something else shares the batches
    out, as `accelerate` does). All ranks have as many batches: for that some may be halved. options: those of
    DataLoader (num_workers, pin_memory, ...).
    Raises ValueError for both or neither of batch_size and max_tokens, and as the samplers do.
    """
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"create_dataloader: batch_size is {batch_size}, max_tokens is {max_tokens}; expected one of them"
        )
    if rank is None and world_size is None:
        rank, world_size = _process()
    elif rank is None or world_size is None:
        raise ValueError(f"create_dataloader: rank is {rank}, world_size is {world_size}; expected both or neither")
    settings = {"shuffle": shuffle, "seed": seed, "rank": rank, "world_size": world_size}
    if batch_size is not None:
        sampler = BatchSizeSampler(len(dataset), batch_size, **settings)
    else:
        sampler = TokenBudgetSampler(_lengths(dataset), max_tokens, **settings)
    return BatchLoader(dataset, sampler, collator, **options)


def _process() -> tuple[int, int]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _lengths(dataset: Dataset) -> Sequence[int] | torch.Tensor:
    if hasattr(dataset, "lengths"):
        return dataset.lengths
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]


def create_mlm_dataloader(
    texts: Iterable[str],
    tokenizer: Any,
    batch_size: int | None = None,
    mask_probability: float = 0.15,
    *,
    max_tokens: int | None = None,
    max_length: int = 512,
    truncation: bool | str = "split",
    whole_words: bool = False,
    packed: bool = True,
    seed: int = 0,
    **options: Any,
) -> BatchLoader:
    """From texts to batches for a masked LM: MLMDataset, PackingCollator and create_dataloader, which has the rest.

    seed: of the order and of the masks. options: shuffle, rank, world_size, and those of DataLoader.
    """
    dataset = MLMDataset(texts, tokenizer, max_length=max_length, truncation=truncation, whole_words=whole_words)
    collator = PackingCollator(
        tokenizer, mlm_probability=mask_probability, whole_words=whole_words, packed=packed, seed=seed
    )
    return create_dataloader(dataset, collator, batch_size, max_tokens=max_tokens, seed=seed, **options)


def create_classification_dataloader(
    texts: Iterable[str],
    labels: Sequence[Any] | None,
    tokenizer: Any,
    batch_size: int | None = None,
    *,
    pairs: Iterable[str] | None = None,
    max_tokens: int | None = None,
    max_length: int = 512,
    truncation: bool = True,
    num_labels: int | None = None,
    packed: bool = True,
    seed: int = 0,
    **options: Any,
) -> BatchLoader:
    """From texts and labels to batches for a classifier: ClassificationDataset, PackingCollator and create_dataloader.

    options: shuffle, rank, world_size, and those of DataLoader.
    """
    dataset = ClassificationDataset(
        texts, labels, tokenizer, pairs=pairs, max_length=max_length, truncation=truncation, num_labels=num_labels
    )
    collator = PackingCollator(tokenizer, packed=packed)
    return create_dataloader(dataset, collator, batch_size, max_tokens=max_tokens, seed=seed, **options)
