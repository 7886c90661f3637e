"""The labels of a training batch, in the form in which a graph's buffer holds them."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.graphs.buckets import NAME, Bucket, Field, size_of
from fastbert.graphs.forward import LOGITS_OF_TOKENS
from fastbert.heads import (
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    Body,
)
from fastbert.labels import IGNORED, NAMES, PAIRS, POSITIONS
from fastbert.ops import checks
from fastbert.ops.padding import places
from fastbert.padding import Packing

BEYOND = 2**31 - 1  # a position beyond every text, so the loss ignores it


class Labels(NamedTuple):
    """rows: labels by field, integers, or float64 viewed as pairs of int32. scores: the names of the float64 fields.
    labelled: (L,) the rows of a masked LM's tokens that have a label, None for other heads."""

    rows: dict[str, Tensor]
    scores: tuple[str, ...]
    labelled: Tensor | None

    @property
    def form(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a graph depends on: the names of all fields, and of those with scores."""
        rows = ("labelled_rows",) if self.labelled is not None else ()
        return (*(name for name in NAMES if name in self.rows), *rows), self.scores


class LabelReader:
    """Reads the labels of a model's batches, and lays out their part of the buffer. max_labels: as in `graph`."""

    def __init__(self, model: nn.Module, max_labels: int | None) -> None:
        self.model = model
        self.of_words = isinstance(model, (BertForMaskedLM, BertForPreTraining))
        self.of_tokens = self.of_words or isinstance(model, LOGITS_OF_TOKENS)
        self.max_labels = None if max_labels is None else size_of("max_labels", max_labels)
        if max_labels is not None and not self.of_words:
            raise TypeError(f"{NAME}: max_labels goes with a masked LM, not {type(model).__name__}")

    # -- a batch

    def read(self, batch: dict[str, Any], packing: Packing) -> Labels:
        """The labels of a batch, checked. Raises as the model does, and ValueError for a batch without labels."""
        given = {name: batch[name] for name in NAMES if batch.get(name) is not None}
        expected = set(POSITIONS) if isinstance(self.model, BertForQuestionAnswering) else given.keys()
        if not given or expected - given.keys():
            raise ValueError(f"{NAME}: the batch has {', '.join(sorted(batch))}; expected its labels")
        for name, labels in given.items():
            if not isinstance(labels, Tensor):
                raise TypeError(f"{NAME}: {name} is a {type(labels).__name__}; expected a tensor")
        checks.same_device(NAME, {"input_ids": batch["input_ids"], **given})
        body = Body(NAME, batch["input_ids"], None, packing, (None, None))
        rows = {name: self._row(body, name, labels) for name, labels in given.items()}
        scores = tuple(name for name, row in rows.items() if row.is_floating_point())
        rows |= {name: rows[name].flatten().view(torch.int32) for name in scores}
        return Labels(rows, scores, self._labelled(batch, rows, packing))

    def _row(self, body: Body, name: str, labels: Tensor) -> Tensor:
        if name in POSITIONS:
            return _places_of_answers(body.sequence_labels(name, labels, None), body.packing)
        if name in PAIRS:
            return body.sequence_labels(name, labels, 2)
        model, classes = self.model, self.model.config.num_labels
        if isinstance(model, BertForSequenceClassification):
            if model.problem_of(labels) != "single_label_classification":
                return _scores(body, labels, classes)
        if self.of_words:
            classes = model.config.vocab_size
        if isinstance(model, (BertForReplacedTokenDetection, BertForNextSentencePrediction)):
            classes = 2
        return body.token_labels(labels, classes) if self.of_tokens else body.sequence_labels(name, labels, classes)

    def _labelled(self, batch: dict[str, Any], rows: dict[str, Tensor], packing: Packing) -> Tensor | None:
        given = batch.get("labelled_rows")
        if given is None:
            return (rows["labels"] != IGNORED).nonzero().squeeze(-1) if self.of_words and "labels" in rows else None
        if not self.of_words:
            raise TypeError(f"{NAME}: labelled_rows goes with a masked LM, not {type(self.model).__name__}")
        if "labels" not in rows or packing.seqlen is not None:
            raise ValueError(f"{NAME}: labelled_rows goes with packed labels, (T,) with cu_seqlens")
        checks.integers(NAME, labelled_rows=given)
        checks.shape(NAME, "labelled_rows", given, (None,), "(L,)")
        return places(NAME, rows["labels"], given, packing.tokens, name="labelled_rows")

    # -- the buffer

    def room(self, bucket: Bucket) -> int:
        """How many tokens of a batch may be labelled."""
        return min(bucket.tokens, self.max_labels or -(-bucket.tokens // 4))

    def fields(self, bucket: Bucket, names: tuple[str, ...], scores: tuple[str, ...]) -> list[Field]:
        """The fields of the labels. Those with scores come first, as float64 has to begin at multiples of 8 bytes."""
        fields = [Field(name, 2 * bucket.slots * self.model.config.num_labels) for name in scores]
        for name in names:
            if name == "labelled_rows":
                fields.append(Field(name, self.room(bucket), fill=None))  # rows must be distinct, in the capture too
            elif name in POSITIONS:
                fields.append(Field(name, bucket.slots, fill=BEYOND))
            elif name not in scores:
                size = bucket.tokens if name == "labels" and self.of_tokens else bucket.slots
                fields.append(Field(name, size, fill=IGNORED))
        return fields

    def filled_up(self, bucket: Bucket, labels: Labels) -> dict[str, Tensor]:
        """The rows for the buffer. For a masked LM, only labelled rows keep their labels, and labelled_rows is filled
        up to the bucket's room with other, distinct rows, which have no label."""
        rows = labels.labelled
        if rows is None:
            return labels.rows
        given = labels.rows["labels"]
        free = self.room(bucket) - rows.shape[0]
        spare = torch.arange(given.shape[0], bucket.tokens, device=rows.device)[:free]
        added = [rows, spare]
        if spare.shape[0] < free:
            others = torch.ones_like(given, dtype=torch.bool).index_fill_(0, rows, False)
            added.append(others.nonzero_static(size=free - spare.shape[0]).squeeze(-1))
        kept = torch.full_like(given, IGNORED).index_copy_(0, rows, given[rows])
        return labels.rows | {"labels": kept, "labelled_rows": torch.cat(added)}


def _scores(body: Body, labels: Tensor, classes: int) -> Tensor:
    """Labels that are numbers, checked, as (B, num_labels) float64."""
    labels = labels.reshape(-1, 1) if classes == 1 else labels
    checks.shape(NAME, "labels", labels, (body.packing.batch, classes), "(B, num_labels)")
    return labels.double().contiguous()


def _places_of_answers(positions: Tensor, packing: Packing) -> Tensor:
    """Answer positions (B,), from columns of a padded batch to places among the visible tokens of each sequence."""
    positions = positions.clamp(0, BEYOND)  # a negative position counts as 0
    if packing.indices is None:
        return positions
    visible = packing.visible()
    place = (visible.cumsum(1) - 1).masked_fill(~visible, BEYOND)
    column = positions.long().clamp(max=packing.seqlen).unsqueeze(1)
    return F.pad(place, (0, 1), value=BEYOND).gather(1, column).squeeze(1)
