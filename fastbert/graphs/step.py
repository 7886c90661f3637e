"""A training step as CUDA graphs: forward, loss and backward in one replay."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.graphs.buckets import NAME, Bucket, Field, Form, size_of
from fastbert.graphs.capture import CudaGraphs, Recorder
from fastbert.graphs.forward import LOGITS_OF_TOKENS
from fastbert.graphs.graphed import Graph, Graphed
from fastbert.heads import (
    HEADS,
    IGNORED,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    Body,
)
from fastbert.ops import checks
from fastbert.ops.op import autocast_on
from fastbert.ops.padding import places
from fastbert.padding import Packing

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")
PAIR_LABELS = ("next_sentence_label", "sentence_order_label")
POSITIONS = ("start_positions", "end_positions")
LABELS = ("labels", *PAIR_LABELS, *POSITIONS)


class GraphedStep(Graphed):
    """`loss = model(**batch).loss; loss.backward()` as one replay, made by `graph`. Attributes: model, buckets, report.

        step = fastbert.graph(model.train(), max_tokens=(8192,), max_sequences=64, training=True)
        for batch in loader:  # of fastbert.data.PackingCollator, at most 8192 tokens each
            loss = step(**batch)
            optimizer.step()
            optimizer.zero_grad()

    Gradients belong to the graph: they are computed in its memory, which the parameters have as `.grad` until
    `zero_grad`. Where there is a `.grad` already they are added to it, as ever.
    """

    MODELS = tuple(kind for kind in HEADS if kind is not BertForMultipleChoice)

    def __init__(
        self,
        model: nn.Module,
        max_tokens: Iterable[int],
        max_sequences: int,
        max_seqlen: int | None,
        max_labels: int | None = None,
        recorder: Callable[[torch.device], Recorder] = CudaGraphs,
    ) -> None:
        """recorder: captures on a device; tests replace it. The other arguments as in `graph`."""
        self._mode = getattr(model, "training", None)
        self._of_words = isinstance(model, (BertForMaskedLM, BertForPreTraining))
        super().__init__(model, max_tokens, max_sequences, max_seqlen, recorder)
        self._max_labels = None if max_labels is None else size_of("max_labels", max_labels)
        if max_labels is not None and not self._of_words:
            raise TypeError(f"{NAME}: max_labels goes with a masked LM, not {type(model).__name__}")

    def __call__(self, *, gradient: Tensor | float = 1.0, **batch: Any) -> Tensor:
        """The loss, a scalar on the model's device; gradients are added to the parameters' `.grad`.

        batch: what the model takes, padded or packed, with its labels, all on the host or all on the model's device.
        Host input is checked as on a CPU and needs no synchronisation; on the device a mask, cu_seqlens without
        max_seqlen, and labels without labelled_rows cost one. gradient: what `loss.backward` takes: 1 / n to accumulate
        over n batches, or the scale of a GradScaler (`scaler.scale(torch.ones((), device=...))`).
        Under autocast the graph is one of autocast. Raises TypeError for other arguments, ValueError for a batch
        without labels, RuntimeError without gradients, within a capture and for a model in another mode than it was
        captured in, and as the model does.
        """
        if unknown := batch.keys() - {*INPUTS, *LABELS, "labelled_rows"}:
            raise TypeError(f"{NAME}: no graph of a step takes {', '.join(sorted(unknown))}; call the model itself")
        with self._lock:
            self._look_at_model()
            with self._recorder.in_order():
                inputs, packing = self._pack(batch)
                rows, fields = self._labels(batch, packing)
                bucket, obstacle = self._bucket_for(packing)
                if bucket is not None and (obstacle := self._too_many_labels(bucket, rows)) is None:
                    return self._replay(bucket, inputs._asdict() | rows, fields, packing, gradient)
            self.report.ran_directly(obstacle)
        return self._run_directly(batch, gradient)

    # -- the model

    def _refuse_model(self) -> None:
        super()._refuse_model()
        if not self._snapshot.parameters:
            raise RuntimeError(f"{NAME}: no parameter of the model requires a gradient")
        if self._body.encoder.recomputing is not None:
            raise RuntimeError(f"{NAME}: gradient checkpointing is on, and reads random states, which no capture may")
        hooks = [each for m in self._snapshot.modules for each in (m._backward_hooks, m._backward_pre_hooks)]
        hooks += [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in self._snapshot.parameters]
        if any(any(each) if isinstance(each, tuple) else each for each in hooks):
            raise RuntimeError(f"{NAME}: the model has backward hooks; a replay runs no Python, so they would not run")

    def _refuse_call(self) -> None:
        if self.model.training != self._mode:
            modes = {True: "training", False: "evaluation"}
            raise RuntimeError(
                f"{NAME}: the model is in {modes[self.model.training]} mode, and the graph of {modes[self._mode]} mode"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(f"{NAME}: gradients are off; a step computes them: call it outside torch.no_grad()")

    # -- a batch

    def _labels(self, batch: dict[str, Any], packing: Packing) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """The batch's labels, checked, as rows of the buffer by name; and which of them are floats."""
        given = {name: batch[name] for name in LABELS if batch.get(name) is not None}
        if not given:
            raise ValueError(f"{NAME}: the batch has {', '.join(sorted(batch))}; expected labels")
        body = Body(NAME, batch["input_ids"], None, packing, (None, None))
        checks.same_device(NAME, {"input_ids": batch["input_ids"], **given})
        rows, floats = {}, []
        for name, labels in given.items():
            rows[name] = self._label_rows(body, name, labels)
            if rows[name].is_floating_point():
                floats.append(name)
                rows[name] = rows[name].flatten().view(torch.int32)
        if self._of_words and "labels" in rows:
            rows["labelled_rows"] = self._labelled_rows(batch, rows["labels"], packing)
        return rows, tuple(floats)

    def _label_rows(self, body: Body, name: str, labels: Tensor) -> Tensor:
        if name in POSITIONS:
            return body.sequence_labels(name, labels, None)
        if name in PAIR_LABELS:
            return body.sequence_labels(name, labels, 2)
        config, model = self.model.config, self.model
        if isinstance(model, BertForSequenceClassification) and isinstance(labels, Tensor):
            if model.problem_of(labels) != "single_label_classification":
                return self._scores(body, labels)
        classes = config.vocab_size if self._of_words else config.num_labels
        if isinstance(model, (BertForReplacedTokenDetection, BertForNextSentencePrediction)):
            classes = 2
        of_tokens = self._of_words or isinstance(model, LOGITS_OF_TOKENS)
        return body.token_labels(labels, classes) if of_tokens else body.sequence_labels(name, labels, classes)

    def _scores(self, body: Body, labels: Tensor) -> Tensor:
        """(B, num_labels) float32."""
        classes, batch = self.model.config.num_labels, body.packing.batch
        labels = labels.reshape(-1, 1) if classes == 1 else labels
        checks.shape(NAME, "labels", labels, (batch, classes), "(B, num_labels)")
        checks.same_device(NAME, {"labels": labels, "input_ids": body.hidden})
        return labels.float().contiguous()

    def _labelled_rows(self, batch: dict[str, Any], labels: Tensor, packing: Packing) -> Tensor:
        rows = batch.get("labelled_rows")
        if rows is None:
            return (labels != IGNORED).nonzero().squeeze(-1)
        if packing.seqlen is not None:
            raise ValueError(f"{NAME}: labelled_rows goes with packed labels, (T,) with cu_seqlens")
        checks.integers(NAME, labelled_rows=rows)
        checks.shape(NAME, "labelled_rows", rows, (None,), "(L,)")
        return places(NAME, labels, rows, packing.tokens)

    def _room_for_labels(self, bucket: Bucket) -> int:
        return min(bucket.tokens, self._max_labels or -(-bucket.tokens // 4))

    def _too_many_labels(self, bucket: Bucket, rows: dict[str, Tensor]) -> str | None:
        room = self._room_for_labels(bucket)
        too_many = "labelled_rows" in rows and rows["labelled_rows"].shape[0] > room
        return f"a batch has more than {room} labelled tokens (max_labels)" if too_many else None

    def _run_directly(self, batch: dict[str, Any], gradient: Tensor | float) -> Tensor:
        loss = self.model(**self._on_device(batch), **self.model.loss_options).loss
        loss.backward(torch.as_tensor(gradient, dtype=loss.dtype, device=loss.device))
        return loss.detach()

    # -- a replay

    def _replay(
        self,
        bucket: Bucket,
        rows: dict[str, Any],
        floats: tuple[str, ...],
        packing: Packing,
        gradient: Tensor | float,
    ) -> Tensor:
        graph = self._graph_of(bucket, rows, floats)
        rows["filled"] = torch.full((1,), packing.batch, device=packing.cu_seqlens.device)
        begin = 0.0 if isinstance(gradient, Tensor) else gradient
        rows["gradient"] = rows["filled"].new_full((1,), begin, dtype=torch.float64).view(torch.int32)
        if "labelled_rows" in rows:
            rows["labels"], rows["labelled_rows"] = self._fill_up(bucket, rows["labels"], rows["labelled_rows"])
        graph.form.send(graph.buffer, rows, packing)
        if isinstance(gradient, Tensor):
            _scalar(graph.views["gradient"]).copy_(gradient)
        loss, *gradients = graph.outputs
        _add_gradients(graph.replay, self._snapshot.parameters, gradients)
        self.report.replays[bucket.tokens] += 1
        return loss.clone()

    def _fill_up(self, bucket: Bucket, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Labels at these rows alone, and as many rows as there is room for: distinct, those added without a label."""
        labels = torch.full_like(labels, IGNORED).index_copy_(0, rows, labels[rows])
        free = self._room_for_labels(bucket) - rows.shape[0]
        spare = torch.arange(labels.shape[0], bucket.tokens, device=rows.device)[:free]
        added = [rows, spare]
        if spare.shape[0] < free:
            others = torch.ones_like(labels, dtype=torch.bool).index_fill_(0, rows, False)
            added.append(others.nonzero_static(size=free - spare.shape[0]).squeeze(-1))
        return labels, torch.cat(added)

    def _graph_of(self, bucket: Bucket, rows: dict[str, Tensor], floats: tuple[str, ...]) -> Graph:
        device = self._device.type
        autocast = torch.get_autocast_dtype(device) if autocast_on(device) else None
        names = tuple(name for name in (*LABELS, "labelled_rows") if name in rows)
        return self._captured(bucket, names, floats, autocast)

    def _form(self, bucket: Bucket, names: tuple[str, ...], floats: tuple[str, ...], autocast: Any) -> Form:
        del autocast
        of_tokens = self._of_words or isinstance(self.model, LOGITS_OF_TOKENS)
        fields = [Field("gradient", 2), Field("filled", 1)]  # the first is float64, which has to begin at 8 bytes
        for name in names:
            if name in floats:
                fields.append(Field(name, bucket.slots * self.model.config.num_labels))
            elif name == "labelled_rows":
                fields.append(Field(name, self._room_for_labels(bucket), fill=None))  # distinct, in the capture too
            elif name in POSITIONS:
                fields.append(Field(name, bucket.slots, fill=bucket.longest))  # beyond the text: left out
            else:
                size = bucket.tokens if name == "labels" and of_tokens else bucket.slots
                fields.append(Field(name, size, fill=IGNORED))
        return Form(bucket, *fields)

    def _run(
        self, bucket: Bucket, views: dict[str, Tensor], names: tuple[str, ...], floats: tuple[str, ...], autocast: Any
    ) -> tuple[Tensor | None, ...]:
        """The loss, and the gradient of every parameter."""
        del autocast  # which the caller is in; but casts of weights that it has kept are none of the graph's
        torch.clear_autocast_cache()
        labels = {name: views[name] for name in names}
        for name in floats:
            labels[name] = labels[name].view(torch.float32).view(bucket.slots, -1)
        ends, filled = views["cu_seqlens"], views["filled"][0]
        out = self.model(
            views["input_ids"],
            token_type_ids=views["token_type_ids"] if self.model.config.family.token_types else None,
            position_ids=views["position_ids"],
            packing=Packing(ends, bucket.longest, bucket.tokens, bucket.slots, filled=filled),
            **labels,
            **self.model.loss_options,
        )
        begin = _scalar(views["gradient"]).to(out.loss.dtype)
        parameters = self._snapshot.parameters
        gradients = torch.autograd.grad(out.loss, parameters, begin, allow_unused=True)
        torch.clear_autocast_cache()
        return out.loss.detach(), *(None if g is None else g.contiguous() for g in gradients)


def _scalar(gradient: Tensor) -> Tensor:
    return gradient.view(torch.float64)[0]


def _add_gradients(replay: Callable[[], None], parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Replays, and adds the gradients that it computes to the parameters' own, which may be in the same memory."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    overwritten = [g for p, g in pairs if p.grad is g]
    kept = torch._foreach_mul(overwritten, 1) if overwritten else []
    others = [(p.grad, g) for p, g in pairs if p.grad is not None and p.grad is not g]
    replay()
    if overwritten:
        torch._foreach_add_(overwritten, kept)
    if others:
        torch._foreach_add_([mine for mine, _ in others], [g for _, g in others])
    for p, g in pairs:
        if p.grad is None:
            p.grad = g
