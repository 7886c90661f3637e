"""Batches without padding: a collator that packs tokenised examples, and a sampler that fills a budget of tokens.

The collator runs on the host, where lengths and labels are known, and hands them on (`cu_seqlens`, `max_seqlen`,
`labelled_rows`), so that no model has to ask a GPU for them::

    sampler = TokenBudgetSampler([len(example["input_ids"]) for example in dataset], max_tokens=8192)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackingCollator(tokenizer, mlm_probability=0.15))
    for batch in loader:
        loss = model(**batch).loss  # fastbert.BertForMaskedLM, or another of its models

`transformers.Trainer` takes the collator as its `data_collator`; docs/heads.md shows how it takes the sampler.
"""

import bisect
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fastbert.ops.padding import ends_of

IGNORED = -100  # the label of what has none
_OF_TOKENS = ("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask")
_LABELS = ("labels", "label", "label_ids")  # what data sets call them
_OF_SEQUENCES = ("next_sentence_label", "start_positions", "end_positions")  # more labels of whole examples


class PackingCollator:
    """Packs a list of tokenised examples into one batch of `fastbert`'s models.

    An example is a mapping with input_ids, and optionally token_type_ids, attention_mask (padding, where it is 0, is
    left out; it has to be at the end), special_tokens_mask, and labels (also `label`, `label_ids`): an int or a float
    for the example, ints for each token, or floats for several classes at once. Other entries are left out. The batch
    holds

    - input_ids, position_ids and, if the examples have them, token_type_ids: (T,) int64
    - cu_seqlens: (B + 1,) int32, and max_seqlen: an int
    - labels: (B,) int64 or float32, (T,) int64, or (B, classes) float32
    - next_sentence_label, start_positions, end_positions: (B,) int64, if the examples have them
    - labelled_rows: (L,) int64, with masking only: the rows that have a label

    With an mlm_probability it masks tokens for a masked LM, anew each time: that share of all tokens but special ones
    is to be predicted; of these 80 % become the mask token, 10 % a random token, 10 % stay (Devlin et al., "BERT",
    2018, 3.1). Labels are then its own, those of the examples are left out.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        mlm_probability: float | None = None,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
        special_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        max_length: int | None = None,
        return_position_ids: bool = True,
        seed: int | None = None,
    ) -> None:
        """tokenizer: from `transformers` or `tokenizers`, asked for mask_token_id, vocab_size and special_ids where
        these are not given; only masking needs them.

        max_tokens, max_length: of a batch and of an example (a model's max_position_embeddings); what is longer raises
        ValueError in a call. seed: None draws from torch's generator of the process: `torch.manual_seed` decides, and
        in the workers of a DataLoader, which seed theirs from it, the number of workers too. With a seed, masks depend
        on it, the epoch (`set_epoch`) and the tokens of the batch alone: the same with any number of workers, and
        after a restart in the middle of an epoch.
        Raises ValueError for values that make no sense.
        """
        self.mlm_probability, self.seed, self.return_position_ids = mlm_probability, seed, return_position_ids
        self.max_tokens, self.max_length = max_tokens, max_length
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live on see it change
        if mlm_probability is not None:
            self.mask_token_id = _mask_token_id(tokenizer) if mask_token_id is None else mask_token_id
            self.vocab_size = _vocab_size(tokenizer) if vocab_size is None else vocab_size
            self.special_ids = torch.tensor(_special_ids(tokenizer) if special_ids is None else list(special_ids))
            self._check_masking()

    def _check_masking(self) -> None:
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"PackingCollator: mlm_probability is {self.mlm_probability}; expected a number in (0, 1]")
        for name in ("mask_token_id", "vocab_size"):
            if getattr(self, name) is None:
                raise ValueError(f"PackingCollator: masking needs {name}, or a tokenizer that has it")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"PackingCollator: mask_token_id is {self.mask_token_id}; expected an id below {self.vocab_size}"
            )

    def set_epoch(self, epoch: int) -> None:
        """For other masks in each epoch, where there is a seed; before the epoch's first batch."""
        self._epoch.fill_(epoch)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | int]:
        """The batch. Raises ValueError for examples that are too long, or that do not fit each other or themselves."""
        if not examples:
            raise ValueError("PackingCollator: expected at least one example")
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        tokens = {name: _flat(name, _column(name, examples), lengths) for name in _OF_TOKENS}
        labels = None if self.mlm_probability else _labels(examples)
        if isinstance(labels, list):
            tokens["labels"], labels = _flat("labels", labels, lengths), None
        tokens, lengths = _without_padding(tokens, lengths)
        self._check_sizes(lengths)
        special = tokens.pop("special_tokens_mask")
        batch = {**tokens, "cu_seqlens": ends_of(lengths), "max_seqlen": int(lengths.max())}
        if self.return_position_ids:
            batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        if labels is not None:
            batch["labels"] = labels
        batch |= {name: _stacked(column) for name in _OF_SEQUENCES if (column := _column(name, examples))}
        if self.mlm_probability:
            batch |= self._masked(batch["input_ids"], special)
        return {name: value for name, value in batch.items() if value is not None}

    def _check_sizes(self, lengths: Tensor) -> None:
        for name, limit in {"max_tokens": self.max_tokens, "max_length": self.max_length}.items():
            if limit is not None and (lengths > limit).any():
                index = int((lengths > limit).nonzero()[0])
                raise ValueError(
                    f"PackingCollator: example {index} of the batch has {lengths[index]} tokens; expected at most "
                    f"{name}, {limit}"
                )
        if self.max_tokens is not None and lengths.sum() > self.max_tokens:
            raise ValueError(
                f"PackingCollator: the batch has {lengths.sum()} tokens; expected at most max_tokens, {self.max_tokens}"
            )

    def _masked(self, ids: Tensor, special: Tensor | None) -> dict[str, Tensor]:
        """input_ids, labels and labelled_rows of a masked LM. One random number a token decides its fate."""
        generator, p = self._generator(ids), self.mlm_probability
        fate = torch.rand(ids.shape, generator=generator)
        words = torch.randint(self.vocab_size, ids.shape, generator=generator)
        special = torch.isin(ids, self.special_ids) | (False if special is None else special != 0)
        chosen = (fate < p) & ~special
        replaced = torch.where(fate < 0.8 * p, self.mask_token_id, torch.where(fate < 0.9 * p, words, ids))
        return {
            "input_ids": torch.where(chosen, replaced, ids),
            "labels": torch.where(chosen, ids, IGNORED),
            "labelled_rows": chosen.nonzero().squeeze(-1),
        }

    def _generator(self, ids: Tensor) -> torch.Generator | None:
        if self.seed is None:
            return None
        start = zlib.crc32(f"{self.seed} {int(self._epoch)}".encode())
        return torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes(), start))


def _column(name: str, examples: Sequence[Mapping[str, Any]]) -> list | None:
    """That entry of every example; None where no example has it. Raises ValueError where some have."""
    has = [name in example for example in examples]
    if not any(has):
        return None
    if not all(has):
        raise ValueError(f"PackingCollator: example {has.index(False)} of the batch has no {name}; others have")
    return [example[name] for example in examples]


def _flat(name: str, rows: list | None, lengths: Tensor) -> Tensor | None:
    """One entry for each token, (T,) int64."""
    if rows is None:
        return None
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    for index, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if row.shape != (length,):
            raise ValueError(
                f"PackingCollator: {name} of example {index} of the batch has shape {tuple(row.shape)}; expected an "
                f"entry for each of its {length} tokens"
            )
    return torch.cat(rows)


def _stacked(values: list) -> Tensor:
    """One entry for each example: int64, or float32 if one of them is a float."""
    values = [torch.as_tensor(value) for value in values]
    floating = any(value.is_floating_point() for value in values)
    return torch.stack(values).to(torch.float32 if floating else torch.int64)


def _labels(examples: Sequence[Mapping[str, Any]]) -> Tensor | list | None:
    """The labels of the examples, stacked; or, of tokens, as a list for each example."""
    columns = (_column(name, examples) for name in _LABELS)
    labels = next((column for column in columns if column is not None), None)
    if labels is None:
        return None
    of_tokens = all(label.dim() == 1 and not label.is_floating_point() for label in map(torch.as_tensor, labels))
    return labels if of_tokens else _stacked(labels)


def _without_padding(tokens: dict[str, Tensor | None], lengths: Tensor) -> tuple[dict[str, Tensor | None], Tensor]:
    """The tokens whose attention_mask is not 0, and how many each example has; without attention_mask."""
    mask = tokens.pop("attention_mask")
    if mask is None or mask.all():
        return tokens, lengths
    visible, sequence = mask != 0, torch.arange(len(lengths)).repeat_interleave(lengths)
    late = visible[1:] & ~visible[:-1] & (sequence[1:] == sequence[:-1])
    if late.any():
        index = int(sequence[1:][late][0])
        raise ValueError(f"PackingCollator: example {index} of the batch has padding before tokens; expected it after")
    lengths = torch.bincount(sequence[visible], minlength=len(lengths))
    return {name: None if row is None else row[visible] for name, row in tokens.items()}, lengths


# ---- what a tokenizer says: `transformers` has attributes, `tokenizers` methods


def _mask_token_id(tokenizer: Any) -> int | None:
    if hasattr(tokenizer, "token_to_id"):
        return tokenizer.token_to_id("[MASK]")
    return getattr(tokenizer, "mask_token_id", None)


def _vocab_size(tokenizer: Any) -> int | None:
    if hasattr(tokenizer, "get_vocab_size"):
        return tokenizer.get_vocab_size()
    return None if tokenizer is None else len(tokenizer)


def _special_ids(tokenizer: Any) -> list[int]:
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        return [index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return list(getattr(tokenizer, "all_special_ids", ()))


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of examples that together have at most max_tokens tokens, for `DataLoader(batch_sampler=...)`.

    Examples are taken in order, or shuffled anew in each epoch, and a batch ends before the example that would exceed
    the budget. Batches depend on seed and epoch alone: the same in every process, with any number of workers.
    """

    def __init__(
        self, lengths: Sequence[int] | Tensor, max_tokens: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        """lengths: of every example, in tokens. Raises ValueError for one longer than max_tokens, with its index."""
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        wrong = ((self.lengths > max_tokens) | (self.lengths < 0)).nonzero().flatten()
        if wrong.numel():
            index = int(wrong[0])
            raise ValueError(
                f"TokenBudgetSampler: example {index} has {self.lengths[index]} tokens; expected at most max_tokens, "
                f"{max_tokens}"
            )
        self.max_tokens, self.shuffle, self.seed = max_tokens, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """For another order in each epoch; before the epoch's first batch. (transformers.Trainer calls it.)"""
        count = len(self.lengths)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        self._order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        self._ends = self._fill(self.lengths[self._order].cumsum(0).tolist())

    def _fill(self, sums: list[int]) -> list[int]:
        """Where batches end, given how many tokens the first 1, 2, ... examples have."""
        ends, end, before = [], 0, 0
        while end < len(sums):
            end = bisect.bisect_right(sums, before + self.max_tokens)
            ends.append(end)
            before = sums[end - 1]
        return ends

    def __iter__(self) -> Iterator[list[int]]:
        starts = [0, *self._ends]
        for start, end in zip(starts, self._ends, strict=False):
            yield self._order[start:end].tolist()

    def __len__(self) -> int:
        """The number of batches in this epoch; shuffled, it differs a little from epoch to epoch."""
        return len(self._ends)
