"""Training of multi-vector encoders: losses on MaxSim scores, with negatives from all processes or with a teacher."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastbert.maxsim import maxsim, maxsim_pairs
from fastbert.ops.padding import cu_seqlens_of
from fastbert.token_vectors import TokenVectors
from fastbert.training.contrastive import ContrastiveModel, GradCache, _Gather
from fastbert.training.contrastive_losses import _margins, _scores


class Texts(NamedTuple):
    """The packed vectors of texts, (V, D), and where those of each text begin, (B + 1,) int32."""

    vectors: Tensor
    cu_seqlens: Tensor


class MultiVectorOutput(NamedTuple):
    """loss: a scalar. queries, documents: this process's own, documents column by column."""

    loss: Tensor
    queries: Texts
    documents: Texts


class MultiVectorModel(nn.Module):
    """A TokenVectors and a loss on the queries and documents of a batch of tuples of texts, for AMPTrainer.

    vectors: `MultiVectorEncoder(...).vectors`; its encoder is trained with it. loss: MaxSimNegatives, MaxSimMargins or
    MaxSimDistillation, or a callable that takes queries and documents (Texts) and scores (or None) and returns the mean
    over the queries. If its attribute `in_batch` is true, it also takes each query's own document, (B,) int64.
    """

    label_counts = staticmethod(ContrastiveModel.label_counts)

    def __init__(
        self,
        vectors: TokenVectors,
        loss: Callable[..., Tensor],
        *,
        max_tokens: int | None = None,
        all_processes: bool = True,
    ) -> None:
        """max_tokens: computes the vectors by GradCache, in chunks of this many tokens; None computes them at once.

        all_processes: in training, a loss with in-batch negatives gets the documents of all processes. Evaluation
        always uses this process's documents alone. Raises ValueError for invalid values.
        """
        super().__init__()
        self.vectors, self.loss, self.all_processes = vectors, loss, all_processes
        cached = (self._queries, self._documents)
        self.embed = cached if max_tokens is None else tuple(GradCache(embed, max_tokens) for embed in cached)

    def _queries(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        return self.vectors.embed(input_ids, cu_seqlens, max_seqlen, query=True)

    def _documents(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        return self.vectors.embed(input_ids, cu_seqlens, max_seqlen, query=False)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        columns: int = 2,
        labels: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> MultiVectorOutput:
        """Takes a batch of ContrastiveCollator: packed texts, all queries, then all positives, and so on.

        labels: the scores. keys: what the collator adds for InBatchNegatives(skip_equal=True); not read here. Raises
        ValueError if the texts do not form tuples of `columns`, and as the loss does.
        """
        texts = len(cu_seqlens) - 1
        if columns < 2 or texts % columns:
            raise ValueError(
                f"MultiVectorModel: there are {texts} texts in {columns} columns; expected at least two columns of "
                "equally many texts"
            )
        if isinstance(self.embed[0], GradCache) and any(isinstance(part, FSDPModule) for part in self.modules()):
            raise ValueError("MultiVectorModel: max_tokens goes with DDP; FSDP2 needs as many forwards in each process")
        count = texts // columns
        queries = self._texts(True, input_ids, cu_seqlens[: count + 1], max_seqlen)
        documents = self._texts(False, input_ids, cu_seqlens[count:], max_seqlen)
        with torch.autocast(input_ids.device.type, enabled=False):
            return MultiVectorOutput(self._loss_of(queries, documents, labels), queries, documents)

    def _texts(self, query: bool, input_ids: Tensor, ends: Tensor, max_seqlen: int | None) -> Texts:
        start, end = int(ends[0]), int(ends[-1])
        ids, ends = input_ids[start:end], ends - start
        vectors = self.embed[not query](ids, ends, max_seqlen)
        return Texts(vectors, self.vectors.ends(ids, ends, query=query))

    def _loss_of(self, queries: Texts, documents: Texts, scores: Tensor | None) -> Tensor:
        if not getattr(self.loss, "in_batch", False):
            return self.loss(queries, documents, scores)
        own = torch.arange(len(queries.cu_seqlens) - 1, device=queries.cu_seqlens.device)
        together = self.training and self.all_processes and dist.is_available() and dist.is_initialized()
        if together and dist.get_world_size() > 1:
            documents, before = _everyone(documents)
            own = own + before
        return self.loss(queries, documents, scores, own)


def _everyone(texts: Texts) -> tuple[Texts, int]:
    """The texts of all processes, and how many of them come before this process's."""
    lengths = texts.cu_seqlens.diff()
    sizes = torch.tensor([len(lengths), len(texts.vectors)], device=lengths.device)
    found = [torch.empty_like(sizes) for _ in range(dist.get_world_size())]
    dist.all_gather(found, sizes)
    counts, tokens = (list(column) for column in zip(*(each.tolist() for each in found), strict=True))
    vectors, lengths = _Gather.apply(texts.vectors, tokens), _Gather.apply(lengths, counts)
    return Texts(vectors, cu_seqlens_of(lengths)), sum(counts[: dist.get_rank()])


# ---- losses


@dataclass(frozen=True)
class MaxSimNegatives:
    """Cross entropy of finding each query's document among all documents of the batch, by scale * MaxSim.

    mean: divides MaxSim by the number of the query's vectors. sentence-transformers'
    MultiVectorMultipleNegativesRankingLoss.
    """

    scale: float = 1.0
    mean: bool = False
    in_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive("MaxSimNegatives", scale=self.scale)

    def __call__(
        self, queries: Texts, documents: Texts, scores: Tensor | None = None, own: Tensor | None = None
    ) -> Tensor:
        """Returns a scalar, the mean over queries. own: (B,) int64, which document is each query's; None for documents
        0 to B - 1. Raises ValueError for scores, and for fewer than two documents."""
        if scores is not None:
            raise ValueError("MaxSimNegatives: the batch has scores, which this loss does not read; expected none")
        _check_queries("MaxSimNegatives", queries)
        if len(documents.cu_seqlens) < 3:
            raise ValueError("MaxSimNegatives: there is one document; expected at least 2, of which one is wrong")
        found = _divided(maxsim(*queries, *documents), queries, self.mean)
        own = torch.arange(len(found), device=found.device) if own is None else own
        return F.cross_entropy(self.scale * found, own)


@dataclass(frozen=True)
class MaxSimMargins:
    """(margin - teacher's margin)², the mean over negatives.

    A margin is MaxSim of the positive minus MaxSim of a negative. mean: as in MaxSimNegatives. sentence-transformers'
    MultiVectorMarginMSELoss.
    """

    mean: bool = False

    def __call__(self, queries: Texts, documents: Texts, scores: Tensor | None = None) -> Tensor:
        """Returns a scalar. scores: the teacher's, (B, 1 + negatives), the positive's first; or its margins, (B,
        negatives), or (B,) with one negative. Raises ValueError for other scores, and without negatives."""
        found = _own_scores("MaxSimMargins", queries, documents, self.mean)
        margins = _margins("MaxSimMargins", scores, found, len(found), found.shape[1] - 1)
        return F.mse_loss(found[:, :1] - found[:, 1:], margins)


@dataclass(frozen=True)
class MaxSimDistillation:
    """KL(teacher || student) of the softmaxed scores of each query's documents, the mean over queries.

    temperature: of both softmaxes; teacher_temperature: of the teacher's, if it differs. The loss is multiplied by
    temperature² (Hinton et al., 2015). mean: as in MaxSimNegatives. sentence-transformers'
    MultiVectorDistillKLDivLoss, whose student_temperature is `temperature` here.
    """

    temperature: float = 1.0
    teacher_temperature: float | None = None
    mean: bool = False

    def __post_init__(self) -> None:
        teacher = self.temperature if self.teacher_temperature is None else self.teacher_temperature
        _check_positive("MaxSimDistillation", temperature=self.temperature, teacher_temperature=teacher)

    def __call__(self, queries: Texts, documents: Texts, scores: Tensor | None = None) -> Tensor:
        """Returns a scalar. scores: (B, documents of a query). Raises ValueError for others, and for a single
        document."""
        found = _own_scores("MaxSimDistillation", queries, documents, self.mean)
        scores = _scores("MaxSimDistillation", scores, found, tuple(found.shape))
        teacher = self.temperature if self.teacher_temperature is None else self.teacher_temperature
        student = (found / self.temperature).log_softmax(-1)
        target = (scores / teacher).log_softmax(-1)
        return F.kl_div(student, target, reduction="batchmean", log_target=True) * self.temperature**2


def _own_scores(owner: str, queries: Texts, documents: Texts, mean: bool) -> Tensor:
    """(B, documents of a query): MaxSim. Raises ValueError for fewer than two documents of a query."""
    count, total = (len(texts.cu_seqlens) - 1 for texts in (queries, documents))
    _check_queries(owner, queries)
    if total < 2 * count:
        raise ValueError(f"{owner}: a query has {total // count} document; expected at least 2")
    columns = []
    for first in range(0, total, count):
        ends = documents.cu_seqlens[first : first + count + 1]
        part = documents.vectors[int(ends[0]) : int(ends[-1])]
        columns.append(maxsim_pairs(*queries, part, ends - ends[0]))
    return _divided(torch.stack(columns, 1), queries, mean)


def _check_queries(owner: str, queries: Texts) -> None:
    if len(queries.cu_seqlens) < 2:
        raise ValueError(f"{owner}: there is no query; expected at least 1")


def _divided(scores: Tensor, queries: Texts, mean: bool) -> Tensor:
    return scores / queries.cu_seqlens.diff().clamp(min=1).to(scores).unsqueeze(-1) if mean else scores


def _check_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{owner}: {name} is {value}; expected a positive number")
