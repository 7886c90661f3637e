"""A training step as CUDA graphs: forward, loss and backward in one replay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastbert.graphs import labels as labelling
from fastbert.graphs.buckets import IDS, NAME, Bucket, Field, Form
from fastbert.graphs.graphed import Graph, Graphed
from fastbert.graphs.labels import LabelReader, Labels
from fastbert.heads import HEADS, BertForMultipleChoice
from fastbert.model import ModelInputs
from fastbert.ops.op import autocast_on
from fastbert.padding import Packing
from fastbert.parts import hooks

INPUTS = (*IDS, "attention_mask", "cu_seqlens", "max_seqlen", *labelling.NAMES, "labelled_rows")
MODES = {True: "training", False: "evaluation"}


class GraphedStep(Graphed):
    """`loss = model(**batch).loss; loss.backward()` as one replay, made by `graph`. Attributes: model, buckets, report.

        step = fastbert.graph(model.train(), max_tokens=(8192,), max_sequences=64, training=True)
        for batch in loader:  # of fastbert.data.PackingCollator, at most 8192 tokens each
            loss = step(**batch)
            optimizer.step()
            optimizer.zero_grad()

    Gradients are computed in the graph's memory, which becomes the parameters' `.grad` until `zero_grad`; use them on
    the stream of the call. Where a parameter has a `.grad` already, the gradient is added to it, as `backward` does.
    Calls from several threads take turns.
    """

    MODELS = tuple(kind for kind in HEADS if kind is not BertForMultipleChoice)
    GRADIENTS = True

    def _start(self, max_labels: int | None = None) -> None:
        self._reader = LabelReader(self.model, max_labels)
        self._written: set[int] = set()  # the memory of all graphs' outputs

    def __call__(self, *, gradient: Tensor | float | None = None, **batch: Any) -> Tensor:
        """Returns the loss, a scalar on the model's device, and adds gradients to the parameters' `.grad`.

        batch: what the model takes, padded or packed, with its labels, all on the host or all on the model's device.
        Host input is checked as on a CPU and needs no host synchronisation; on the device a mask, cu_seqlens without
        max_seqlen, and a masked LM's labels without labelled_rows cost one each. gradient: what `loss.backward` takes,
        1 when None: 1 / n to accumulate over n batches, or a GradScaler's scale
        (`scaler.scale(torch.ones((), device=...))`). Under autocast, a separate graph is captured for its dtype.
        Raises TypeError for other arguments, ValueError for a batch without labels and a gradient that is no scalar,
        RuntimeError with gradients off, during another capture and for a model in another mode than it was captured in,
        and as the model does.
        """
        if unknown := batch.keys() - set(INPUTS):
            raise TypeError(f"{NAME}: no graph of a step takes {', '.join(sorted(unknown))}; call the model itself")
        gradient = 1.0 if gradient is None else gradient
        if isinstance(gradient, Tensor) and gradient.dim():
            raise ValueError(f"{NAME}: gradient has shape {tuple(gradient.shape)}; expected (), as the loss has")
        with self._lock:
            self._look_at_model()
            with self._recorder.in_order():
                with self._on_host():
                    inputs, packing = self._pack(batch)
                    labels = self._reader.read(batch, packing)
                bucket, obstacle = self._bucket_for(packing, labels)
                if bucket is not None:
                    return self._replay(bucket, inputs, labels, packing, gradient)
            self.report.ran_directly(obstacle)
            return self._run_directly(batch, gradient)

    # -- the model

    def _refuse_model(self) -> None:
        super()._refuse_model()
        kind, given = next(kind for kind in self.MODELS if isinstance(self.model, kind)), type(self.model)
        for name in ("forward", "_classify", "_loss", "_predict"):
            if name in vars(self.model) or getattr(given, name, None) is not getattr(kind, name, None):
                raise TypeError(f"{NAME}: {given.__name__} has a {name} of its own; a step takes {kind.__name__}'s")
        if not self._snapshot.parameters:
            raise RuntimeError(f"{NAME}: no parameter of the model requires a gradient")
        if self._body.encoder.recomputing is not None:
            raise RuntimeError(f"{NAME}: gradient checkpointing is on, and reads random states, which no capture may")
        hooked = any(map(hooks, self._snapshot.modules))
        if hooked or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._snapshot.parameters):
            raise RuntimeError(f"{NAME}: the model has backward hooks; a replay runs no Python, so they would not run")

    def _refuse_call(self) -> None:
        if self.model.training != (then := self._snapshot.training):
            raise RuntimeError(
                f"{NAME}: the model is in {MODES[self.model.training]} mode, and the graph of {MODES[then]} mode"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(f"{NAME}: gradients are off; a step computes them: call it outside torch.no_grad()")

    # -- a call

    def _why_not(self, bucket: Bucket, packing: Packing, labels: Labels) -> str | None:
        if packing.tokens == 0:
            return "a batch has no token"  # then some gradients are None
        room, labelled = self._reader.room(bucket), labels.labelled
        obstacle = super()._why_not(bucket, packing)
        if obstacle is None and labelled is not None and labelled.shape[0] > room:
            return f"a batch has more than {room} labelled tokens (max_labels)"
        return obstacle

    def _run_directly(self, batch: dict[str, Any], gradient: Tensor | float) -> Tensor:
        torch.clear_autocast_cache()  # it may hold casts of weights that have changed since
        loss = self.model(**self._on_device(batch), **self.model.loss_options).loss
        loss.backward(torch.as_tensor(gradient, dtype=loss.dtype, device=loss.device))
        return loss.detach()

    def _replay(
        self, bucket: Bucket, inputs: ModelInputs, labels: Labels, packing: Packing, gradient: Tensor | float
    ) -> Tensor:
        device = self._device.type
        autocast = torch.get_autocast_dtype(device) if autocast_on(device) else None
        graph = self._captured(bucket, *labels.form, autocast)
        rows = self._reader.filled_up(bucket, labels) | _with_spare(inputs, bucket, packing)
        rows["filled"] = packing.cu_seqlens.new_full((1,), packing.batch)
        begin = 1.0 if isinstance(gradient, Tensor) else gradient
        rows["gradient"] = rows["filled"].new_full((1,), begin, dtype=torch.float64).view(torch.int32)
        graph.form.send(graph.buffer, rows, packing)
        if isinstance(gradient, Tensor):
            _scalar(graph.views["gradient"]).copy_(gradient.detach())
        loss, *gradients = graph.outputs
        _add_gradients(graph.replay, self._snapshot.parameters, gradients, self._written)
        self.report.replays[bucket.tokens] += 1
        return loss.clone()

    # -- a graph

    def _capture(self, bucket: Bucket, *key: Any) -> Graph:
        graph = super()._capture(bucket, *key)
        self._written |= {_memory(output) for output in graph.outputs if output is not None}
        return graph

    def _form(self, bucket: Bucket, names: tuple[str, ...], scores: tuple[str, ...], autocast: Any) -> Form:
        del autocast
        # `gradient` comes first: it is float64, which has to begin at a multiple of 8 bytes.
        return Form(bucket, Field("gradient", 2), *self._reader.fields(bucket, names, scores), Field("filled", 1))

    def _run(
        self, bucket: Bucket, views: dict[str, Tensor], names: tuple[str, ...], scores: tuple[str, ...], autocast: Any
    ) -> tuple[Tensor | None, ...]:
        """The loss, and the gradient of every parameter that requires one."""
        del autocast  # the call that captures is under it
        shape = bucket.slots, self.model.config.num_labels
        labels = {
            name: views[name].view(torch.float64).view(shape) if name in scores else views[name] for name in names
        }
        # Leaves for this graph alone. The model's parameters may be part of an autograd graph that is alive, whose
        # stream they remember, and autocast may have cached casts of them.
        leaves = {name: p.detach().requires_grad_(p.requires_grad) for name, p in self.model.named_parameters()}
        arguments = {
            "token_type_ids": views["token_type_ids"] if self.model.config.family.token_types else None,
            "position_ids": views["position_ids"],
            "packing": Packing(
                views["cu_seqlens"], bucket.longest, bucket.tokens, bucket.slots, filled=views["filled"][0]
            ),
        }
        arguments |= labels | self.model.loss_options
        loss = torch.func.functional_call(self.model, leaves, (views["input_ids"],), arguments).loss
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        begin = _scalar(views["gradient"]).to(loss.dtype)
        gradients = torch.autograd.grad(loss, wanted, begin, allow_unused=True)
        return loss.detach(), *(None if g is None else g.contiguous() for g in gradients)


def _scalar(gradient: Tensor) -> Tensor:
    return gradient.view(torch.float64)[0]


def _with_spare(inputs: ModelInputs, bucket: Bucket, packing: Packing) -> dict[str, Tensor]:
    """Ids for all the bucket's tokens. Spare tokens repeat the batch's first token: what is computed from them is
    multiplied by a gradient of 0, which gives 0 only if it is finite, and another token's embedding may not be."""
    rows, spare = {}, bucket.tokens - packing.tokens
    for name in IDS:
        if (row := getattr(inputs, name)) is not None:
            rows[name] = torch.cat([row, row[:1].expand(spare)])
    return rows


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _add_gradients(
    replay: Callable[[], None], parameters: list[Tensor], gradients: list[Tensor | None], written: set[int]
) -> None:
    """Replays, and adds the new gradients to each parameter's `.grad`.

    written: the memory of the outputs of all graphs. What `.grad` holds there is saved first: this replay writes its
    own outputs, and may overwrite those of graphs captured after it, because in the shared pool they may lie where this
    graph has intermediate results.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    at_risk, sums = [], []
    for p, g in pairs:
        if p.grad is not None and _memory(p.grad) in written:
            at_risk.append((p.grad, g))
        elif p.grad is not None and g is not None:
            sums.append((p.grad, g))
    with torch.no_grad():
        kept = torch._foreach_mul([mine for mine, _ in at_risk], 1) if at_risk else []
    replay()
    sums += [(old, g) for (_, g), old in zip(at_risk, kept, strict=True) if g is not None]
    with torch.no_grad():
        if sums:
            torch._foreach_add_(*map(list, zip(*sums, strict=True)))
        if at_risk:
            torch._foreach_copy_([mine for mine, _ in at_risk], kept)
    for p, g in pairs:
        if p.grad is None and g is not None:
            p.grad = g.detach()  # a separate tensor object for the caller; g stays the one that replays write
