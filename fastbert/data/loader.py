"""A DataLoader that can resume within an epoch, and functions that make one from texts."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastbert.data.collator import PackingCollator
from fastbert.data.datasets import ClassificationDataset, MLMDataset
from fastbert.data.encode import short_hash
from fastbert.data.sampler import BatchSizeSampler, TokenBudgetSampler, mixed
from fastbert.warn import warn

_LATER = ("mask_probability", "whole_words")  # earlier states do not have them


class BatchLoader(DataLoader):
    """A DataLoader over one of this package's samplers that can stop within an epoch and continue there.

    Batches do not depend on the number of workers, nor do masks if the collator has a seed. Workers draw different
    numbers in each rank. Torch's global generator is not used, so starting a loader does not change what a model draws;
    but by a collator that masks without a seed, and for the seeds of its workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchSizeSampler | TokenBudgetSampler,
        collator: Callable[[list[Any]], Any],
        **options: Any,
    ) -> None:
        """collator: copied, so that several loaders may be given the same one. options: for DataLoader (num_workers,
        pin_memory, persistent_workers, ...)."""
        collator = copy.copy(collator)  # with an epoch of its own
        if not getattr(collator, "draws", False):  # otherwise torch's generator, for the workers' seeds too
            options = {"generator": torch.Generator().manual_seed(mixed(sampler.seed, sampler.rank))} | options
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collator, **options)
        if hasattr(collator, "set_epoch"):
            sampler.followers.append(collator)
        self._batch = 0  # how many batches of the epoch have been handed out
        self._ended: int | None = None  # the epoch that came to its end, if none was chosen since

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch, which decides the order and the masks. Call it before the epoch's first batch.

        If a loaded state is of this epoch, it continues where the state was saved. A UserWarning says so where training
        goes on without this call, and so with the same order and masks; evaluations, without gradients, may do that.
        """
        self._ended = None
        if epoch != self.batch_sampler.epoch:
            self._go_to(epoch, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._ended = None
        self.batch_sampler.set_epoch(epoch)
        self._batch = self.batch_sampler.start = batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sampler = self.batch_sampler
        if sampler.shuffle and self._ended == sampler.epoch and torch.is_grad_enabled():
            warn(
                f"BatchLoader: epoch {sampler.epoch} again, with the same order and masks; call set_epoch(epoch) before"
                " each epoch of training (shuffle=False for evaluations)"
            )
        self._batch = sampler.start
        batches = super().__iter__()  # starts the workers and the sampler, which reads `start`
        sampler.start = 0
        return self._counted(batches, self._batch, sampler.epoch)

    def _counted(self, batches: Iterator[dict[str, Any]], before: int, epoch: int) -> Iterator[dict[str, Any]]:
        # Counted here because workers run the sampler ahead, and because iterations of this loader may overlap.
        for number, batch in enumerate(batches, before + 1):
            self._batch = number
            yield batch
        self._ended = epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were yielded, and all that batches depend on. The same on all ranks."""
        return {"epoch": self.batch_sampler.epoch, "batch": self._batch, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        masks = {"mask_seed": "seed", "mask_probability": "mlm_probability", "whole_words": "whole_words"}
        more: dict[str, Any] = {name: getattr(self.collate_fn, attribute, None) for name, attribute in masks.items()}
        more["vocabulary"] = _vocabulary(self.dataset)
        return {**self.batch_sampler.identity(), **more, "lengths": self._lengths_hash}

    @cached_property
    def _lengths_hash(self) -> str | None:
        """Changes with the number of tokens of any example; None if these numbers are not known."""
        lengths = getattr(self.dataset, "lengths", None)
        return None if lengths is None else short_hash(np.asarray(lengths, np.int64).tobytes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state: the next iteration yields the rest of its epoch, which may be empty.

        Later iterations yield whole epochs. Raises ValueError and changes nothing if the state is from other data,
        another vocabulary or other batches.
        """
        ours = self._identity()
        given = {name: ours[name] for name in _LATER} | dict(state)
        other = [name for name, value in ours.items() if name not in given or given[name] != value]
        if other or not {"epoch", "batch"} <= state.keys():
            differences = ", ".join(f"{name} {state.get(name)} (here {ours[name]})" for name in other)
            hint = (
                "; expected the tokenizer of that run, saved rather than trained anew" if "vocabulary" in other else ""
            )
            raise ValueError(
                f"BatchLoader: the state is of another loader: {differences or 'it has no epoch and batch'}{hint}"
            )
        self._go_to(state["epoch"], state["batch"])


def _vocabulary(dataset: Any) -> str | None:
    """The hash of a data set's vocabulary. For torch's ConcatDataset, Subset and the like, the first hash inside."""
    if dataset is None or hasattr(dataset, "vocabulary"):
        return getattr(dataset, "vocabulary", None)
    inner = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])
    return next(filter(None, map(_vocabulary, inner)), None)


def create_dataloader(
    dataset: Dataset,
    collator: Callable[[list[Any]], Any],
    batch_size: int | None = None,
    *,
    max_tokens: int | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> BatchLoader:
    """Creates a loader of batches of batch_size examples, or of at most max_tokens tokens.

    drop_last: leaves out the last batch if it has fewer than batch_size examples. shuffle: each epoch (`set_epoch`) has
    another order, determined by seed. rank, world_size: this process's number and the number of processes that share
    the data; None takes them from torch.distributed, or means a single process (pass 0 and 1 if something else, such as
    `accelerate`, distributes the batches). All ranks get equally many batches; some batches may be halved for that, or
    left out with drop_last. A ContrastiveCollator's last batch takes a tuple of the one before rather than have one
    (halved batches of three, or of two, have one nonetheless).
    options: for DataLoader (num_workers, pin_memory, ...).
    Raises ValueError unless exactly one of batch_size and max_tokens is given, for drop_last with max_tokens, and as
    the samplers do; TypeError for a stream and for examples that are no mappings.
    """
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"create_dataloader: batch_size is {batch_size}, max_tokens is {max_tokens}; expected one of them"
        )
    if drop_last and batch_size is None:
        raise ValueError("create_dataloader: drop_last goes with batch_size; by max_tokens no batch is whole")
    if rank is None and world_size is None:
        rank, world_size = _process()
    elif rank is None or world_size is None:
        raise ValueError(f"create_dataloader: rank is {rank}, world_size is {world_size}; expected both or neither")
    if not hasattr(dataset, "__len__"):
        given = f"create_dataloader: a {type(dataset).__name__} has no length"
        raise TypeError(f"{given}; for a stream: DataLoader(dataset, batch_size, collate_fn=collator)")
    settings = {"shuffle": shuffle, "seed": seed, "rank": rank, "world_size": world_size}
    settings["min_examples"] = getattr(collator, "min_examples", 1)
    if batch_size is not None:
        sampler = BatchSizeSampler(len(dataset), batch_size, drop_last=drop_last, **settings)
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
    if len(dataset) and not isinstance(dataset[0], Mapping):
        given = f"create_dataloader: dataset[0] is a {type(dataset[0]).__name__}"
        raise TypeError(f"{given}; expected a mapping with input_ids, as MLMDataset(texts, tokenizer) gives")
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
    """Batches of texts for a masked LM: MLMDataset, PackingCollator and create_dataloader in one call.

    seed: for the order and the masks. options: shuffle, rank, world_size, and DataLoader's. Raises as the three do.
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
    """Batches of labelled texts: ClassificationDataset, PackingCollator and create_dataloader in one call.

    options: shuffle, rank, world_size, and DataLoader's. Raises as the three do.
    """
    dataset = ClassificationDataset(
        texts, labels, tokenizer, pairs=pairs, max_length=max_length, truncation=truncation, num_labels=num_labels
    )
    collator = PackingCollator(tokenizer, packed=packed)
    return create_dataloader(dataset, collator, batch_size, max_tokens=max_tokens, seed=seed, **options)
