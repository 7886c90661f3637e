"""transformers' own modules with PyTorch's fused attention: what most people run, and the baseline."""

import torch
from torch import Tensor, nn

from benchmarks.contenders import padded
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MODULES, Contender, Subject, Way
from benchmarks.sizes import Batch

NAME = "transformers sdpa"


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    return way(subject.theirs, subject, batch, backward, batch.keys)


def way(module: nn.Module, subject: Subject, batch: Batch, backward: bool, keys: Tensor | None) -> Way:
    """A module of transformers' on a padded batch. keys: the mask as its encoder, called alone, expects it."""
    module.train(backward)
    mask = keys if subject.part == ENCODER else None if batch.is_full else batch.mask.long()
    return Way(
        lambda **arguments: subject.output(module(**arguments)),
        padded.prepare(batch, mask),
        padded.collect(subject, batch),
        module,
        hidden_states(module.bert, batch) if subject.part == CLASSIFIER else None,
    )


def hidden_states(body: nn.Module, batch: Batch):
    """Of a model with a head whose logits are too few to judge by."""
    return lambda **arguments: batch.take(body(**arguments).last_hidden_state)


CONTENDER = Contender(NAME, MODULES, make, needs=("transformers",), install="pip install transformers", yardstick=True)
