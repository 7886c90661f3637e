"""The shapes that are measured, by name, and a batch of one of them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import harness
from fastbert import BertConfig, padding


@dataclass(frozen=True)
class Size:
    """`batch` sequences of at most `seqlen` tokens through the BERT of `config`."""

    batch: int
    seqlen: int
    config: BertConfig


def _bert(preset: str = "bert-base-uncased", **changes: int) -> BertConfig:
    # Without dropout: two implementations with masks of their own have no result to compare.
    return replace(BertConfig.preset(preset), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


BASE, LARGE = _bert(), _bert("bert-large-uncased")
SMALL = {
    # For tests, and for tools that watch every access: an odd length, head size 64.
    "tiny": Size(3, 17, _bert("bert-tiny", vocab_size=1000, num_hidden_layers=1)),
    "quick": Size(2, 64, _bert(vocab_size=2048, num_hidden_layers=1)),
}
NAMES = (*SMALL, "full")


def for_ops(name: str, device: str) -> Size:
    if name in SMALL:
        return SMALL[name]
    return Size(32, 512, BASE) if device == "cuda" else Size(8, 128, BASE)


def for_encoders(name: str, device: str, layers: int | None = None) -> list[Size]:
    """The most important first, for runs that are cut short. layers: instead of each size's own."""
    if name in SMALL:
        found = [SMALL[name]]
    elif device == "cuda":
        found = [Size(32, 128, BASE), Size(32, 512, BASE), Size(32, 512, LARGE), Size(32, 128, LARGE)]
        found += [Size(8, 512, BASE), Size(1, 128, BASE), Size(1, 128, LARGE)]
    else:
        two = replace(BASE, num_hidden_layers=2)
        found = [Size(8, 128, two), Size(4, 512, two), Size(1, 128, two)]
    return [s if layers is None else replace(s, config=replace(s.config, num_hidden_layers=layers)) for s in found]


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
    def indices(self) -> Tensor:
        """(T,) int64: rows of the flattened grid."""
        return self.mask.flatten().nonzero().squeeze(-1)

    def pad(self, x: Tensor) -> Tensor:
        """Packed (T, ...) to (batch, seqlen, ...), zeros at padding."""
        rows = x.new_zeros(*self.mask.shape, *x.shape[1:])
        return rows.index_put(self.mask.nonzero(as_tuple=True), x)

    def take(self, x: Tensor) -> Tensor:
        """(batch, seqlen, ...) to packed (T, ...)."""
        return x[self.mask]


def make_batch(size: Size, distribution: str, device: str) -> Batch:
    lengths = harness.lengths(distribution, size.batch, size.seqlen)
    mask = torch.arange(size.seqlen, device=device) < torch.tensor(lengths, device=device)[:, None]
    packing = padding.plan(mask, size.batch, size.seqlen, mask.device)
    return Batch(lengths, mask, None if distribution == "full" else mask[:, None, None], packing)
