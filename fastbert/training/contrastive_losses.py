"""Losses on the embeddings of texts that belong together.

Each takes embeddings (columns, B, C), float32 or float64: the anchors, their positives, and hard negatives after them.
Losses that compare texts of different examples set `in_batch`, and are told which rows are this process's own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops.checks import between, values_visible

WHOLE = slice(None)


def contrastive_loss(
    anchors: Tensor,
    candidates: Tensor,
    targets: Tensor | None = None,
    *,
    scale: float = 20.0,
    similarity: str = "cosine",
    ignored: Tensor | None = None,
) -> Tensor:
    """Cross entropy of finding each anchor's own text among all candidates: a scalar, the mean over anchors.

    anchors: (B, C). candidates: (N, C). targets: (B,) int64, the candidate that belongs to each anchor; None for rows 0
    to B - 1. scale: the factor of similarities, 1 / temperature. similarity: "cosine" or "dot". ignored: (B, N) bool,
    which candidates do not count as negatives of an anchor; must be False for its own text. InfoNCE (van den Oord et
    al., 2018, equation 4); MultipleNegativesRanking (Henderson et al., 2017, section 4.4). Equivalent to
    F.cross_entropy((scale * F.normalize(anchors) @ F.normalize(candidates).T).masked_fill(ignored, -inf), targets).
    Raises ValueError for fewer than two candidates, which leave nothing to learn, and for invalid options.
    """
    _check_options("contrastive_loss", scale, similarity)
    if len(candidates) < 2:
        raise ValueError(
            f"contrastive_loss: there is {len(candidates)} candidate; expected at least 2, of which one is wrong: "
            "batches of two examples or more, or hard negatives"
        )
    if similarity == "cosine":
        anchors, candidates = F.normalize(anchors, dim=-1), F.normalize(candidates, dim=-1)
    targets = torch.arange(len(anchors), device=anchors.device) if targets is None else targets
    logits = scale * (anchors @ candidates.T)
    return F.cross_entropy(logits if ignored is None else logits.masked_fill(ignored, -math.inf), targets)


@dataclass(frozen=True)
class InBatchNegatives:
    """`contrastive_loss` with the positives and hard negatives of the whole batch as candidates for each anchor.

    symmetric: averages this loss with the reverse one, which finds each positive's anchor among all anchors. Hard
    negatives are candidates for anchors only. skip_equal: texts that the batch itself shows to be right do not count as
    negatives: for an anchor, candidates (hard negatives too) that equal its positive or that of an equal anchor; for a
    positive, anchors that equal its own or that of an equal positive.
    """

    scale: float = 20.0
    symmetric: bool = False
    similarity: str = "cosine"
    skip_equal: bool = False
    in_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_options("InBatchNegatives", self.scale, self.similarity)

    def __call__(
        self, embeddings: Tensor, scores: Tensor | None = None, own: slice = WHOLE, keys: Tensor | None = None
    ) -> Tensor:
        """Returns a scalar, the mean over own anchors. keys: (columns, B) int64, only for skip_equal; equal texts have
        equal keys. Raises ValueError for scores, for keys without skip_equal or skip_equal without keys, and if there
        is no negative."""
        _check("InBatchNegatives", embeddings, scores)
        if (keys is not None) != self.skip_equal or (keys is not None and keys.shape != embeddings.shape[:2]):
            given = "none" if keys is None else f"of shape {tuple(keys.shape)}"
            expected = f"{tuple(embeddings.shape[:2])}, as ContrastiveCollator makes them"
            expected = expected if self.skip_equal else "none without skip_equal"
            raise ValueError(f"InBatchNegatives: keys are {given}; expected {expected}")
        options = {"scale": self.scale, "similarity": self.similarity}
        anchors, positives, candidates = embeddings[0], embeddings[1], embeddings[1:].flatten(0, 1)
        targets = torch.arange(len(anchors), device=anchors.device)[own]
        ignored = (None, None) if keys is None else _right(keys, targets)
        loss = contrastive_loss(anchors[own], candidates, targets, ignored=ignored[0], **options)
        if not self.symmetric:
            return loss
        return (loss + contrastive_loss(positives[own], anchors, targets, ignored=ignored[1], **options)) / 2


def _right(keys: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Which texts are right for a row beside its own: they make up a pair of the batch with the row's text. Of the
    candidates for the rows' anchors, (len(own), candidates) bool, and of the anchors for their positives, (len(own),
    B)."""
    anchors, candidates = _numbered(keys[0]), _numbered(keys[1:].flatten())
    positives, rows = candidates[: len(anchors)], torch.arange(len(own), device=own.device)
    is_pair = torch.zeros(len(anchors), len(candidates), dtype=torch.bool, device=keys.device)
    is_pair[anchors, positives] = True
    of_anchors, of_positives = is_pair[anchors[own]][:, candidates], is_pair[anchors][:, positives[own]].T.contiguous()
    of_anchors[rows, own] = of_positives[rows, own] = False
    return of_anchors, of_positives


def _numbered(keys: Tensor) -> Tensor:
    """Numbers below len(keys), equal where keys are. torch.unique would wait for the GPU."""
    ordered, order = keys.sort()
    numbers = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    return torch.empty_like(numbers).scatter_(0, order, numbers)


@dataclass(frozen=True)
class Triplet:
    """max(0, |anchor - positive| - |anchor - negative| + margin), the mean over triplets (Schroff et al., 2015).

    distance: "euclidean", or "cosine" for 1 - cosine.
    """

    margin: float = 5.0
    distance: str = "euclidean"

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"Triplet: margin is {self.margin}; expected a number that is not negative")
        if self.distance not in ("euclidean", "cosine"):
            raise ValueError(f"Triplet: distance is {self.distance!r}; expected 'euclidean' or 'cosine'")

    def __call__(self, embeddings: Tensor, scores: Tensor | None = None) -> Tensor:
        """Returns a scalar. Raises ValueError for anything but triplets, and for scores."""
        _check("Triplet", embeddings, scores, columns=3)
        anchor, *others = embeddings
        if self.distance == "cosine":
            near, far = (1 - F.cosine_similarity(anchor, other, dim=-1) for other in others)
        else:
            near, far = (torch.linalg.vector_norm(anchor - other, dim=-1) for other in others)
        return (near - far + self.margin).relu().mean()


@dataclass(frozen=True)
class CosineMSE:
    """(cosine - score)², the mean over pairs."""

    def __call__(self, embeddings: Tensor, scores: Tensor | None = None) -> Tensor:
        """Returns a scalar. scores: (B,), from -1 to 1. Raises ValueError for anything but scored pairs, and for other
        scores if values may be read."""
        _check("CosineMSE", embeddings, columns=2)
        scores = _scores("CosineMSE", scores, embeddings, embeddings.shape[1:2])
        between("CosineMSE", "scores", scores, -1, 1, "the range of cosines: divide others, such as those of 0 to 5")
        return F.mse_loss(F.cosine_similarity(*embeddings, dim=-1), scores)


@dataclass(frozen=True)
class CoSENT:
    """log(1 + sum of exp(scale * (cosine of i - cosine of j))) over all i and j where pair i has a lower score than j.

    Only the order of scores matters. CoSENT (Su, 2022, https://kexue.fm/archives/8847).
    """

    scale: float = 20.0
    in_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_options("CoSENT", self.scale)

    def __call__(self, embeddings: Tensor, scores: Tensor | None = None, own: slice = WHOLE) -> Tensor:
        """Returns a scalar, for the whole batch whichever rows are own. scores: (B,). Raises ValueError for anything
        but two or more scored pairs."""
        _check("CoSENT", embeddings, columns=2)
        if embeddings.shape[1] < 2:
            raise ValueError("CoSENT: the batch has one pair; expected at least two, whose scores it compares")
        scores = _scores("CoSENT", scores, embeddings, embeddings.shape[1:2])
        cosines = self.scale * F.cosine_similarity(*embeddings, dim=-1)
        differences = (cosines[:, None] - cosines).masked_fill(scores[:, None] >= scores, -math.inf)
        return torch.cat([differences.flatten(), cosines.new_zeros(1)]).logsumexp(0)


@dataclass(frozen=True)
class MarginMSE:
    """(margin - teacher's margin)², the mean over negatives.

    A margin is the similarity to the positive minus that to a negative. MarginMSE (Hofstätter et al., "Improving
    efficient neural ranking models with cross-architecture knowledge distillation", 2020, equation 5). similarity:
    "dot" or "cosine".
    """

    similarity: str = "dot"

    def __post_init__(self) -> None:
        _check_options("MarginMSE", 1.0, self.similarity)

    def __call__(self, embeddings: Tensor, scores: Tensor | None = None) -> Tensor:
        """Returns a scalar. scores: the teacher's, (B, 1 + negatives), the positive's first; or its margins, (B,
        negatives), or (B,) with one negative. Raises ValueError for other scores, and without negatives."""
        negatives = len(embeddings) - 2
        _check("MarginMSE", embeddings, columns=max(len(embeddings), 3))
        margins = _margins("MarginMSE", scores, embeddings, embeddings.shape[1], negatives)
        if self.similarity == "cosine":
            embeddings = F.normalize(embeddings, dim=-1)
        products = (embeddings[:1] * embeddings[1:]).sum(-1)
        return F.mse_loss((products[:1] - products[1:]).T, margins)


class Matryoshka:
    """Another loss on shortened embeddings: the weighted sum over `dims`.

    For each dim in dims, the loss gets the first `dim` numbers of the embeddings, normalised to length 1. Matryoshka
    representation learning (Kusupati et al., 2022, equation 1). dims: should include the hidden size, or whole
    embeddings are not trained. weights: one for each of dims, by default 1. Raises ValueError for invalid values.
    """

    def __init__(
        self, loss: Callable[..., Tensor], dims: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        self.loss, self.dims = loss, tuple(dims)
        self.weights = (1.0,) * len(self.dims) if weights is None else tuple(weights)
        self.in_batch, self.skip_equal = (getattr(loss, name, False) for name in ("in_batch", "skip_equal"))
        if not self.dims or any(not isinstance(dim, int) or dim < 1 for dim in self.dims):
            raise ValueError(f"Matryoshka: dims are {self.dims}; expected one positive int or more")
        if len(self.weights) != len(self.dims):
            raise ValueError(f"Matryoshka: there are {len(self.weights)} weights and {len(self.dims)} dims")

    def __call__(self, embeddings: Tensor, scores: Tensor | None = None, *more: slice | Tensor) -> Tensor:
        """Returns a scalar. more: the loss's further arguments. Raises ValueError for dims above C, and as the loss."""
        if max(self.dims) > embeddings.shape[-1]:
            raise ValueError(
                f"Matryoshka: dims are {self.dims}; expected at most the embeddings' size, {embeddings.shape[-1]}"
            )
        parts = (F.normalize(embeddings[..., :dim], dim=-1) for dim in self.dims)
        return sum(weight * self.loss(part, scores, *more) for weight, part in zip(self.weights, parts, strict=True))


def _check_options(owner: str, scale: float, similarity: str = "cosine") -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{owner}: scale is {scale}; expected a positive number")
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"{owner}: similarity is {similarity!r}; expected 'cosine' or 'dot'")


def _check(owner: str, embeddings: Tensor, scores: Tensor | None = None, columns: int | None = None) -> None:
    if embeddings.dim() != 3 or len(embeddings) != (columns or max(len(embeddings), 2)):
        expected = f"({columns or 'at least 2'} columns, B, C)"
        raise ValueError(f"{owner}: embeddings have shape {tuple(embeddings.shape)}; expected {expected}")
    if scores is not None:
        raise ValueError(f"{owner}: the batch has scores, which this loss does not read; expected none")


def _scores(owner: str, scores: Tensor | None, embeddings: Tensor, *shapes: Sequence[int]) -> Tensor:
    """The scores, in the embeddings' dtype. Raises ValueError for another shape and, if values may be read, for NaN or
    infinity."""
    expected = " or ".join(str(tuple(shape)) for shape in shapes)
    if scores is None:
        raise ValueError(f"{owner}: the batch has no scores; expected {expected}")
    if tuple(scores.shape) not in map(tuple, shapes):
        raise ValueError(f"{owner}: scores have shape {tuple(scores.shape)}; expected {expected}")
    if values_visible(scores) and not scores.isfinite().all():
        raise ValueError(f"{owner}: scores have NaN or infinity; expected finite numbers")
    return scores.to(embeddings.dtype)


def _margins(owner: str, scores: Tensor | None, embeddings: Tensor, count: int, negatives: int) -> Tensor:
    """(count, negatives): the teacher's margins, given as such or as scores, positives first. Raises as _scores."""
    shapes = [(count, 1 + negatives), (count, negatives), *([(count,)] if negatives == 1 else [])]
    scores = _scores(owner, scores, embeddings, *shapes).view(count, -1)
    return scores[:, :1] - scores[:, 1:] if scores.shape[1] > negatives else scores
