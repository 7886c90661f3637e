"""SPLADE: a contrastive loss with regularisers that make the vectors of queries and documents sparse."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fastbert.training.contrastive_losses import WHOLE


@dataclass(frozen=True)
class Flops:
    """The sum over words of the squared mean weight, which measures the cost of a search (Paria et al., 2020).

    threshold: vectors with at most this many nonzero weights count as zeros, also in the mean (Shen et al., "Exploring
    l0 sparsification for inference-free sparse retrievers", 2025); None counts all vectors. Raises ValueError for a
    negative threshold.
    """

    threshold: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"Flops: threshold is {self.threshold}; expected at least 0, or None")

    def __call__(self, vectors: Tensor) -> Tensor:
        """(N, V) -> a scalar. Without a threshold, equivalent to vectors.mean(0).square().sum()."""
        if self.threshold is not None:
            dense = (vectors != 0).sum(1) > self.threshold
            vectors = vectors * dense.to(vectors.dtype).unsqueeze(1)
        return vectors.mean(0).square().sum()


class Splade:
    """A loss of this package, plus weighted regularisers of the anchors' vectors and of all other vectors.

    For a ContrastiveModel of a BertForSparseEmbedding, with a loss that compares by dot products: InBatchNegatives(1.0,
    similarity="dot"), MarginMSE(). Equivalent to the sum of the terms that sentence-transformers' SpladeLoss returns
    (Formal et al., "From distillation to hard negative sampling", 2022). Regularisers see the texts of all processes.
    """

    in_batch: ClassVar[bool] = True

    def __init__(
        self,
        loss: Callable[..., Tensor],
        document_weight: float,
        query_weight: float | None = None,
        *,
        document_regularizer: Callable[[Tensor], Tensor] = Flops(),  # noqa: B008
        query_regularizer: Callable[[Tensor], Tensor] = Flops(),  # noqa: B008
        symmetric: bool = False,
    ) -> None:
        """document_weight: lambda_d, the weight of the regulariser of all texts but anchors. query_weight: lambda_q,
        the weight of the anchors' regulariser; None omits it. A regulariser takes vectors, (N, V), and returns a
        scalar. symmetric: anchors are documents too, and all are regularised together. Raises ValueError for a weight
        that is negative or not finite, and for query_weight together with symmetric.
        """
        for name, weight in (("document_weight", document_weight), ("query_weight", query_weight)):
            if weight is not None and not 0 <= weight < math.inf:
                raise ValueError(f"Splade: {name} is {weight}; expected a number from 0 on")
        if symmetric and query_weight is not None:
            raise ValueError(f"Splade: query_weight is {query_weight} with symmetric; expected None: all are documents")
        self.loss, self.document_weight, self.query_weight = loss, document_weight, query_weight
        self.document_regularizer, self.query_regularizer = document_regularizer, query_regularizer
        self.symmetric, self.strength = symmetric, 1.0
        self.skip_equal = getattr(loss, "skip_equal", False)

    def __call__(
        self, embeddings: Tensor, scores: Tensor | None = None, own: slice = WHOLE, *more: Tensor | None
    ) -> Tensor:
        """Returns a scalar: the loss over own anchors, plus the regularisers of the whole batch times `strength`, which
        SpladeWarmup changes. more: the loss's further arguments. Raises ValueError as the loss does."""
        if getattr(self.loss, "in_batch", False):
            loss = self.loss(embeddings, scores, own, *more)
        else:
            loss = self.loss(embeddings[:, own], None if scores is None else scores[own])
        documents = embeddings[0 if self.symmetric else 1 :].flatten(0, 1)
        regularizer = self.document_weight * self.document_regularizer(documents)
        if self.query_weight is not None:
            regularizer = regularizer + self.query_weight * self.query_regularizer(embeddings[0])
        return loss + self.strength * regularizer


class SpladeWarmup:
    """Raises the regularisers of a Splade from zero to their full weights over the first steps.

    Pass it to a trainer as the scheduler: it also steps the scheduler of the learning rates, and its state is in
    checkpoints, so a resumed run continues where it was. strength = min(1, step / steps) ** power, as
    sentence-transformers' SpladeRegularizerWeightSchedulerCallback: power 2 is "quadratic", 1 is "linear".
    """

    def __init__(self, loss: Splade, steps: int, scheduler: LRScheduler | None = None, *, power: float = 2.0) -> None:
        """scheduler: changes the learning rates; None for constant ones. Raises TypeError for a loss that is no Splade,
        ValueError for steps below 1 and a power that is not positive."""
        if not isinstance(loss, Splade):
            raise TypeError(f"SpladeWarmup: loss is a {type(loss).__name__}; expected a Splade")
        if not isinstance(steps, int) or steps < 1 or not 0 < power < math.inf:
            raise ValueError(f"SpladeWarmup: steps is {steps!r} and power {power!r}; expected positive numbers")
        self.loss, self.steps, self.scheduler, self.power = loss, steps, scheduler, power
        self._set(0)

    def _set(self, taken: int) -> None:
        self.taken = taken
        self.loss.strength = min(1.0, taken / self.steps) ** self.power

    def step(self) -> None:
        """Call it after each step of the optimizer."""
        if self.scheduler is not None:
            self.scheduler.step()
        self._set(self.taken + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "scheduler": self.scheduler and self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if only one of the state and this object has a scheduler."""
        if (state["scheduler"] is None) != (self.scheduler is None):
            here, there = ("one" if part is not None else "none" for part in (self.scheduler, state["scheduler"]))
            raise ValueError(f"SpladeWarmup: the state has {there} of a scheduler, this has {here}; expected the same")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._set(state["taken"])
