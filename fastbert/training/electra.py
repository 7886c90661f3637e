"""ELECTRA's two models, trained together."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.heads import BertForMaskedLM, BertForReplacedTokenDetection
from fastbert.labels import IGNORED
from fastbert.model import Saveable, require_class
from fastbert.ops.numbers import wide
from fastbert.training.losses import Batch


class ElectraPretrainingOutput(NamedTuple):
    """losses: the generator's, and the discriminator's times its weight. loss: their sum."""

    loss: Tensor
    losses: tuple[Tensor, Tensor]


class ElectraPretraining(nn.Module):
    """A generator that fills masks, and a discriminator that finds the tokens it replaced, trained together.

    loss = masked-LM loss + weight * replaced-token loss (Clark et al., "ELECTRA", 2020, section 2). generator: a
    BertForMaskedLM. discriminator: a BertForReplacedTokenDetection, or a module that takes the batch with labels (T,),
    1 for replaced tokens, and returns the mean loss over all tokens as `loss`. They may share embeddings, as in
    `discriminator.bert.embeddings.word_embeddings = generator.bert.embeddings.word_embeddings`. Raises TypeError for
    another generator, or another of fastbert's models as discriminator; ValueError for different vocabularies and for a
    weight that is negative or not finite.
    """

    def __init__(self, generator: BertForMaskedLM, discriminator: nn.Module, weight: float = 50.0) -> None:
        super().__init__()
        require_class("ElectraPretraining", "generator", generator, BertForMaskedLM)
        if isinstance(discriminator, Saveable):
            require_class("ElectraPretraining", "discriminator", discriminator, BertForReplacedTokenDetection)
        drawn = generator.config.vocab_size
        read = getattr(getattr(discriminator, "config", None), "vocab_size", drawn)
        if drawn != read:
            raise ValueError(f"ElectraPretraining: the models have {drawn} and {read} tokens; expected one vocabulary")
        if not 0 <= weight < math.inf:
            raise ValueError(f"ElectraPretraining: weight is {weight}; expected a number that is not negative")
        self.generator, self.discriminator, self.weight = generator, discriminator, weight

    def forward(
        self, input_ids: Tensor, labels: Tensor, labelled_rows: Tensor | None = None, **packed: Any
    ) -> ElectraPretrainingOutput:
        """Takes a batch of PackingCollator: input_ids (T,) with masks; labels (T,), the masked tokens' ids or -100.

        packed: cu_seqlens, max_seqlen, and other arguments for both models. Raises ValueError for padded input.
        """
        if packed.get("cu_seqlens") is None:
            raise ValueError("ElectraPretraining: expected packed input, (T,) with cu_seqlens and max_seqlen")
        rows = (labels != IGNORED).nonzero().squeeze(-1) if labelled_rows is None else labelled_rows
        body, masked = self.generator.bert, labels.index_select(0, rows)
        hidden = body(input_ids, **packed).last_hidden_state.index_select(0, rows)
        logits = wide(self.generator.cls.predictions(hidden, body.embeddings.word_embeddings.weight))
        generator_loss = F.cross_entropy(logits, masked, reduction="sum") / max(len(rows), 1)
        drawn = sample(logits)
        filled = input_ids.index_copy(0, rows, drawn)
        replaced = torch.zeros_like(labels).index_copy(0, rows, (drawn != masked).to(labels.dtype))
        discriminator_loss = self.discriminator(input_ids=filled, labels=replaced, **packed).loss
        losses = (generator_loss, self.weight * discriminator_loss)
        return ElectraPretrainingOutput(losses[0] + losses[1], losses)

    @staticmethod
    def label_counts(batch: Batch) -> Tensor:
        """The number of masked tokens for the generator, and of all tokens for the discriminator."""
        masked = (batch["labels"] != IGNORED).sum()
        return torch.stack([masked, masked.new_tensor(batch["input_ids"].numel())]).double()


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(L, V) -> (L,): a draw from softmax(logits) in each row, by the Gumbel-max trick."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
