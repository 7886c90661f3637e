"""The shapes that are measured, by name, and a batch of one of them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import lengths
from fastbert import BertConfig, padding


@dataclass(frozen=True)
class Size:
    """`batch` sequences of at most `seqlen` tokens through the BERT of `config`."""

    batch: int
    seqlen: int
    config: BertConfig

    def facts(self) -> dict[str, int]:
        """What a case says about it."""
        return {"batch": self.batch, "seqlen": self.seqlen, "hidden": self.config.hidden_size}


def _bert(preset: str = "bert-base-uncased", **changes: int) -> BertConfig:
    # Without dropout: two implementations with masks of their own have no result to compare.
    return replace(BertConfig.preset(preset), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


BASE, LARGE = _bert(), _bert("bert-large-uncased")
MODELS = {"base": BASE, "large": LARGE}
SMALL = {
    # For tests, and for tools that watch every access: an odd length, head size 64.
    "tiny": Size(3, 17, _bert("bert-tiny", vocab_size=1000, num_hidden_layers=1)),
    "quick": Size(2, 64, _bert(vocab_size=2048, num_hidden_layers=1)),
}
NAMES = (*SMALL, "full")


def of(shape: str, model: str = "base", layers: int | None = None) -> Size:
    """Of a shape as the command line has it, "8x128": batch by sequence length. layers: None keeps the model's own.

    Raises ValueError for what is no shape.
    """
    batch, _, seqlen = shape.partition("x")
    if not (batch.isdecimal() and seqlen.isdecimal() and int(batch) and int(seqlen)):
        raise ValueError(f"{shape!r} is no shape; expected batch x sequence length, as in 8x128")
    config = MODELS[model] if layers is None else replace(MODELS[model], num_hidden_layers=layers)
    return Size(int(batch), int(seqlen), config)


@dataclass(frozen=True)
class Batch:
    """Which tokens of a (batch, seqlen) grid are real, in the forms that implementations ask for.

    mask: (batch, seqlen) bool, padding on the right. keys: it as (batch, 1, 1, seqlen), None when nothing is masked.
    """

    lengths: list[int]
    mask: Tensor
    keys: Tensor | None
    packing: padding.Packing

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_full(self) -> bool:
        return self.keys is None

    @property
    def indices(self) -> Tensor:
        """(T,) int64: rows of the flattened grid."""
        return self.mask.flatten().nonzero().squeeze(-1)

    def pad(self, x: Tensor, fill: int = 0) -> Tensor:
        """Packed (T, ...) to (batch, seqlen, ...), `fill` at padding."""
        rows = x.new_full((*self.mask.shape, *x.shape[1:]), fill)
        return rows.index_put(self.mask.nonzero(as_tuple=True), x)

    def take(self, x: Tensor) -> Tensor:
        """(batch, seqlen, ...) to packed (T, ...)."""
        return x[self.mask]


def make_batch(size: Size, distribution: str, device: str) -> Batch:
    """The grid is `size.seqlen` wide, of "text" as wide as the longest sequence."""
    found = lengths.draw(distribution, size.batch, size.seqlen)
    width = max(found) if distribution == "text" else size.seqlen
    mask = torch.arange(width, device=device) < torch.tensor(found, device=device)[:, None]
    packing = padding.plan(mask, size.batch, width, mask.device)
    return Batch(found, mask, None if min(found) == width else mask[:, None, None], packing)
