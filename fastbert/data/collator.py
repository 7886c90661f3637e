"""A collator that makes one batch of tokenised examples, packed or padded, and masks it for a masked LM.

It runs on the host, where lengths and labels are known, and passes them on (`cu_seqlens`, `max_seqlen`,
`labelled_rows`), so that models need no host synchronisation to find them.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.data.sampler import mixed
from fastbert.data.tokenizer import continuation_prefix, copy_of, special_token_id
from fastbert.labels import IGNORED, PAIRS, POSITIONS
from fastbert.ops.padding import cu_seqlens_of

_OF_TOKENS = ("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask")
_LABELS = ("labels", "label", "label_ids")  # names in common data sets


class PackingCollator:
    """Packs a list of tokenised examples into one batch for `fastbert`'s models.

    An example is a mapping with input_ids and optionally token_type_ids, attention_mask (tokens where it is 0 are
    dropped; they must be at the end), special_tokens_mask, word_ids, and labels (or `label`, `label_ids`): an int or a
    float for the example, an int for each token, or a float for each of several classes. Other entries are dropped. The
    batch holds

    - input_ids and, if the examples have them, token_type_ids: (T,) int64
    - cu_seqlens: (B + 1,) int32, and max_seqlen: an int
    - position_ids: (T,) int64, only with return_position_ids; otherwise the model computes them
    - labels: (B,) int64 or float32, (T,) int64, or (B, classes) float32
    - next_sentence_label, sentence_order_label, start_positions, end_positions: (B,) int64, if the examples have them
    - labelled_rows: (L,) int64, only with masking: the rows with a label

    With packed=False the batch is padded: (T,) above becomes (B, S), attention_mask (B, S) int64 is added, and
    position_ids, cu_seqlens, max_seqlen and labelled_rows are omitted.

    With mlm_probability it masks tokens for a masked LM, differently each time: it selects that share of the tokens
    that are not special; of the selected ones 80 % become the mask token, 10 % a random token, 10 % stay (Devlin et
    al., "BERT", 2018, 3.1). Its labels replace those of the examples. With whole_words, all tokens of a word are
    selected together; each is then replaced independently, as in BERT's code.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        mlm_probability: float | None = None,
        whole_words: bool = False,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
        special_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        max_length: int | None = None,
        packed: bool = True,
        pad_token_id: int | None = None,
        return_position_ids: bool = False,
        seed: int | None = None,
    ) -> None:
        """tokenizer: from `transformers` or `tokenizers`; supplies mask_token_id, vocab_size, special_ids and
        pad_token_id unless they are given. Only masking and padding need them.

        whole_words: tokens with the same number in word_ids form a word (-1 or None at special tokens); without
        word_ids, a WordPiece token and the `##` tokens after it do. max_tokens, max_length: limits of a batch and of an
        example in tokens, not counting padding; a call raises ValueError above them. return_position_ids: adds
        positions in the sequence from 0, which do not fit RoBERTa, XLM-RoBERTa, CamemBERT and MPNet. seed: with None,
        masks come from the process's torch generator, so they depend on `torch.manual_seed` and on the number of
        DataLoader workers. With a seed, masks depend only on it, the epoch (`set_epoch`) and the tokens of the batch:
        they are the same for any number of workers, packed or padded, and after a restart within an epoch.
        Raises ValueError for invalid values.
        """
        self.mlm_probability, self.whole_words, self.seed = mlm_probability, whole_words, seed
        self.packed, self.return_position_ids = packed, return_position_ids
        self.max_tokens, self.max_length = max_tokens, max_length
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change
        self.pad_token_id = special_token_id(tokenizer, "pad_token") if pad_token_id is None else pad_token_id
        if not packed and self.pad_token_id is None:
            raise ValueError("PackingCollator: packed=False needs pad_token_id, or a tokenizer that has it")
        if whole_words and mlm_probability is None:
            raise ValueError("PackingCollator: whole_words goes with mlm_probability")
        if mlm_probability is not None:
            self.mask_token_id = special_token_id(tokenizer, "mask_token") if mask_token_id is None else mask_token_id
            self.vocab_size = _vocab_size(tokenizer) if vocab_size is None else vocab_size
            self.special_ids = torch.tensor(_special_ids(tokenizer) if special_ids is None else list(special_ids))
            self._check_masking()
            self._continues = _continuations(tokenizer) if whole_words else None

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

    @property
    def draws(self) -> bool:
        """Whether it draws from torch's generator: it masks, and has no seed."""
        return self.mlm_probability is not None and self.seed is None

    def __copy__(self) -> "PackingCollator":
        """A collator with an epoch of its own."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _epoch=self._epoch.clone().share_memory_())
        return other

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch: with a seed, each epoch has other masks. Call it before the epoch's first batch."""
        self._epoch.fill_(epoch)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | int]:
        """Makes the batch. Raises ValueError for examples that are too long or inconsistent, TypeError for others."""
        if not examples:
            raise ValueError("PackingCollator: expected at least one example")
        if not isinstance(examples[0], Mapping):
            given = f"PackingCollator: an example is a {type(examples[0]).__name__}"
            raise TypeError(f"{given}; expected a mapping with input_ids, as data sets of tokenised texts give")
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        tokens = {name: _flat(name, column_of(name, examples), lengths) for name in _OF_TOKENS}
        if self.whole_words:
            tokens["word_ids"] = _flat("word_ids", _numbered(column_of("word_ids", examples)), lengths)
        labels = None if self.mlm_probability else labels_of(examples)
        if isinstance(labels, list):
            tokens["labels"], labels = _flat("labels", labels, lengths), None
        tokens, lengths = _without_padding(tokens, lengths)
        self._check_sizes(lengths)
        others = {name: _stacked(column) for name in (*PAIRS, *POSITIONS) if (column := column_of(name, examples))}
        if labels is not None:
            others["labels"] = labels
        special, words = tokens.pop("special_tokens_mask"), tokens.pop("word_ids", None)
        if self.mlm_probability:
            tokens |= self._masked(tokens["input_ids"], special, words, lengths)
        tokens = {name: row for name, row in tokens.items() if row is not None}
        return (self._packed(tokens, lengths) if self.packed else self._padded(tokens, lengths)) | others

    def _packed(self, tokens: dict[str, Tensor], lengths: Tensor) -> dict[str, Tensor | int]:
        batch = {**tokens, "cu_seqlens": cu_seqlens_of(lengths), "max_seqlen": int(lengths.max())}
        if self.return_position_ids:
            batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        if self.mlm_probability:
            batch["labelled_rows"] = (tokens["labels"] != IGNORED).nonzero().squeeze(-1)
        return batch

    def _padded(self, tokens: dict[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
        visible = torch.arange(int(lengths.max())) < lengths[:, None]
        fill = {"input_ids": self.pad_token_id, "token_type_ids": 0, "labels": IGNORED}
        grids = {
            name: torch.full(visible.shape, fill[name]).masked_scatter(visible, row) for name, row in tokens.items()
        }
        return {**grids, "attention_mask": visible.long()}

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

    def _masked(self, ids: Tensor, special: Tensor | None, words: Tensor | None, lengths: Tensor) -> dict[str, Tensor]:
        """Masked input_ids, and labels. One random number per token decides whether it is selected and what replaces
        it. With whole_words, that of a word's first token selects the word, and new ones decide the replacements."""
        generator, p = self._generator(ids), self.mlm_probability
        fate = torch.rand(ids.shape, generator=generator)
        random = torch.randint(self.vocab_size, ids.shape, generator=generator)
        special = torch.isin(ids, self.special_ids) | (False if special is None else special != 0)
        chosen = fate < p
        if self.whole_words:
            chosen = chosen[self._first_of_word(ids, special, words, lengths)]
            fate = p * torch.rand(ids.shape, generator=generator)  # decides what replaces a token of a chosen word
        chosen &= ~special
        replaced = torch.where(fate < 0.8 * p, self.mask_token_id, torch.where(fate < 0.9 * p, random, ids))
        return {"input_ids": torch.where(chosen, replaced, ids), "labels": torch.where(chosen, ids, IGNORED)}

    def _first_of_word(self, ids: Tensor, special: Tensor, words: Tensor | None, lengths: Tensor) -> Tensor:
        """(T,): for every token, the row of the first token of its word."""
        if words is not None:
            begins = words != words.roll(1)
        elif self._continues is not None:
            begins = ~self._continues[ids]
        else:
            raise ValueError("PackingCollator: whole_words needs word_ids in the examples, or a WordPiece tokenizer")
        begins[cu_seqlens_of(lengths)[:-1][lengths > 0].long()] = True  # a word ends with its example
        begins[1:] |= special[:-1]  # and at a special token
        return begins.nonzero().squeeze(-1)[begins.cumsum(0) - 1]

    def _generator(self, ids: Tensor) -> torch.Generator | None:
        if self.seed is None:
            return None
        start = mixed(self.seed, int(self._epoch))
        return torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes(), start))


def column_of(name: str, examples: Sequence[Mapping[str, Any]]) -> list | None:
    """The entry `name` of every example; None if no example has it. Raises ValueError if only some examples do."""
    has = [name in example for example in examples]
    if not any(has):
        return None
    if not all(has):
        raise ValueError(f"PackingCollator: example {has.index(False)} of the batch has no {name}; others have")
    return [example[name] for example in examples]


def _numbered(rows: list | None) -> list | None:
    """word_ids with -1 in place of None, which tokenizers give to special tokens."""
    if rows is None:
        return None
    return [[-1 if word is None else word for word in row] if isinstance(row, (list, tuple)) else row for row in rows]


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


def labels_of(examples: Sequence[Mapping[str, Any]]) -> Tensor | list | None:
    """The labels: one per example, stacked in a tensor; one per token, in a list with an entry for each example."""
    columns = (column_of(name, examples) for name in _LABELS)
    labels = next((column for column in columns if column is not None), None)
    if labels is None:
        return None
    missing = [label is None for label in labels]
    if any(missing):
        raise ValueError(f"PackingCollator: the label of example {missing.index(True)} of the batch is None")
    of_tokens = all(label.dim() == 1 and not label.is_floating_point() for label in map(torch.as_tensor, labels))
    return labels if of_tokens else _stacked(labels)


def _without_padding(tokens: dict[str, Tensor | None], lengths: Tensor) -> tuple[dict[str, Tensor | None], Tensor]:
    """Drops the tokens where attention_mask is 0, and attention_mask itself. Returns the new lengths as well."""
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


# ---- reading a tokenizer: `transformers` has attributes, `tokenizers` has methods


def _vocab_size(tokenizer: Any) -> int | None:
    if hasattr(tokenizer, "get_vocab_size"):
        return tokenizer.get_vocab_size()
    return None if tokenizer is None else len(tokenizer)


def _special_ids(tokenizer: Any) -> list[int]:
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        return [index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return list(getattr(tokenizer, "all_special_ids", ()))


def _continuations(tokenizer: Any) -> Tensor | None:
    """(V,) bool: which ids of a WordPiece tokenizer continue a word; None for other tokenizers."""
    prefix = None if tokenizer is None else continuation_prefix(copy_of(tokenizer))
    if prefix is None:
        return None
    vocabulary = tokenizer.get_vocab()
    ids = [index for token, index in vocabulary.items() if token.startswith(prefix)]
    continues = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.bool)
    continues[torch.tensor(ids, dtype=torch.int64)] = True
    return continues
