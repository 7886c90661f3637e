"""Batches: the number of sequences, their lengths, and the BERT that they go through.

Lengths have three distributions:

full   every sequence as long as the grid is wide: no padding, nothing to gain from packing.
half   uniform in 10 to 90 % of the grid's width, which stays the nominal one: a fixed bucket, half empty.
text   paragraphs of Python's own documentation through all-MiniLM-L6-v2's tokenizer, special tokens included, cut at
       the nominal width; the grid is as wide as the longest sequence, as tokenizers pad. The order is random, as in
       shuffled training data.

A batch takes the middle of each of `batch` equal slices of its distribution, in random order, so that a small batch is
typical too: a random sample may contain a text of 2194 tokens, and be nearly all padding.
"""

import functools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastbert import BertConfig

DISTRIBUTIONS = ("full", "half", "text")

# fmt: off
# The 0th to 100th percentile of the lengths of 2608 paragraphs (Python 3.11), in tokens; a test computes them again.
TEXT = (
    3, 4, 4, 5, 5, 6, 6, 7, 8, 9, 9, 9, 10, 10, 11, 12, 12, 12, 13, 13, 14, 15, 15, 16, 16, 17, 17, 18, 18, 19, 19, 20,
    20, 21, 21, 22, 23, 23, 24, 24, 25, 26, 26, 27, 28, 28, 29, 29, 30, 31, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41,
    42, 43, 44, 45, 46, 47, 48, 50, 51, 52, 53, 55, 56, 58, 61, 62, 63, 65, 67, 69, 71, 73, 75, 78, 81, 84, 87, 90, 93,
    98, 102, 108, 115, 122, 131, 146, 161, 187, 245, 2194,
)
# fmt: on


def draw(distribution: str, batch: int, seqlen: int, seed: int = 0) -> list[int]:
    """Returns the lengths of a batch. seed: determines their order."""
    if distribution == "full":
        return [seqlen] * batch
    generator = random.Random(seed)
    shares = [(place + 0.5) / batch for place in range(batch)]
    generator.shuffle(shares)
    if distribution == "text":
        return [min(seqlen, TEXT[round(100 * share)]) for share in shares]
    return [max(1, round((0.1 + 0.8 * share) * seqlen)) for share in shares]


@dataclass(frozen=True)
class Size:
    """`batch` sequences of at most `seqlen` tokens through the model of `config`."""

    batch: int
    seqlen: int
    config: BertConfig

    def facts(self) -> dict[str, int]:
        found = {"batch": self.batch, "seqlen": self.seqlen, "hidden": self.config.hidden_size}
        return found | ({} if self.config.model_type == "bert" else {"family": self.config.family.name})


def _bert(preset: str = "bert-base-uncased", **changes: int) -> BertConfig:
    # Without dropout: two implementations with different masks have no result to compare.
    return replace(BertConfig.preset(preset), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
_NO_WORK = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
MODELS = {
    "base": _bert(),
    "large": _bert("bert-large-uncased"),
    "minilm": _bert(**_MINILM),
    "deberta-v3": _bert("microsoft/deberta-v3-base", pooler_dropout=0.0),
    "mpnet": _bert("microsoft/mpnet-base"),
    "no-work": _bert(**_NO_WORK),  # twelve layers with almost no computation: what is left is overhead
}
SMALL = {
    # For tests, and for tools that check every memory access: an odd length, head size 64.
    "tiny": Size(3, 17, _bert("bert-tiny", vocab_size=1000, num_hidden_layers=1)),
    "quick": Size(2, 64, _bert(vocab_size=2048, num_hidden_layers=1)),
}


def size_of(shape: str, model: str = "base", layers: int | None = None) -> Size:
    """The size of a shape in words, "8x128": batch by sequence length. layers: None keeps the model's number."""
    batch, _, seqlen = shape.partition("x")
    if not (batch.isdecimal() and seqlen.isdecimal() and int(batch) and int(seqlen)):
        raise ValueError(f"{shape!r} is no shape; expected batch x sequence length, as in 8x128")
    config = MODELS[model] if layers is None else replace(MODELS[model], num_hidden_layers=layers)
    return Size(int(batch), int(seqlen), config)


@dataclass(frozen=True)
class Batch:
    """Which tokens of a (batch, width) grid are real: padding is on the right."""

    lengths: list[int]
    width: int
    device: str

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_full(self) -> bool:
        return min(self.lengths) == self.width

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @functools.cached_property
    def mask(self) -> Tensor:
        """Which tokens are real, (batch, width) bool."""
        return torch.arange(self.width, device=self.device) < torch.tensor(self.lengths, device=self.device)[:, None]

    @functools.cached_property
    def keys(self) -> Tensor | None:
        """The mask as (batch, 1, 1, width); None when nothing is masked: each implementation's fastest case."""
        return None if self.is_full else self.mask[:, None, None]

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int().to(self.device)

    @property
    def indices(self) -> Tensor:
        """The rows of the flattened grid that hold real tokens, (T,) int64."""
        return self.mask.flatten().nonzero().squeeze(-1)

    def pad(self, x: Tensor, fill: int = 0) -> Tensor:
        """Packed (T, ...) to (batch, width, ...), `fill` at padding."""
        rows = x.new_full((*self.mask.shape, *x.shape[1:]), fill)
        return rows.index_put(self.mask.nonzero(as_tuple=True), x)

    def take(self, x: Tensor) -> Tensor:
        """(batch, width, ...) to packed (T, ...)."""
        return x[self.mask]


def make_batch(size: Size, distribution: str, device: str) -> Batch:
    """Makes a batch. The grid is `size.seqlen` wide; for "text" it is as wide as the longest sequence."""
    lengths = draw(distribution, size.batch, size.seqlen)
    return Batch(lengths, max(lengths) if distribution == "text" else size.seqlen, device)
