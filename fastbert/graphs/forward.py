"""A model's forward as CUDA graphs, in inference."""

from typing import Any

import torch
from torch import Tensor

from fastbert.graphs.buckets import NAME, Bucket, Field, Form
from fastbert.graphs.graphed import Graphed, checking
from fastbert.heads import (
    HEADS,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForTokenClassification,
)
from fastbert.model import BertModel
from fastbert.ops.op import autocast_on
from fastbert.padding import Packing

# Outputs with a row for each token; others have a row for each sequence, and `logits` depend on the head.
OF_TOKENS = ("last_hidden_state", "prediction_logits", "start_logits", "end_logits")
LOGITS_OF_TOKENS = (BertForMaskedLM, BertForReplacedTokenDetection, BertForTokenClassification)


class GraphedModel(Graphed):
    """A model that replays graphs of itself, made by `graph`. Attributes: model, buckets, report.

    Calls from several threads take turns. The first call under another backend or precision of matrix products captures
    again, and must have the GPU to itself. Results belong to the caller: later calls do not overwrite them.
    """

    MODELS = (BertModel, *HEADS)

    def _start(self) -> None:
        if not checking():
            with self._lock, self._recorder.in_order():
                for bucket in reversed(self.buckets):  # smaller ones reuse the memory of the largest
                    self._captured(bucket)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        num_choices: int | None = None,
        **others: Any,
    ) -> tuple:
        """Returns what model(...) returns for the same arguments, on the model's device, without gradients.

        Input is padded or packed as for the model, all on the host or all on the model's device. Host input is checked
        as on a CPU and needs no host synchronisation; on the device a mask, or cu_seqlens without max_seqlen, costs
        one. num_choices: for packed input to BertForMultipleChoice.
        Raises TypeError for other arguments (labels, inputs_embeds, output_...), RuntimeError for a model in training
        mode or with gradients that are needed, under autocast and during another capture, and as the model does.
        """
        if others:
            raise TypeError(f"{NAME}: no graph takes {', '.join(others)}; call the model itself")
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
        }
        with self._lock:
            self._look_at_model()
            self._refuse_gradients()
            with self._recorder.in_order():
                sequences, choices = self._sequences_of_choices(given, num_choices)
                with self._on_host():
                    inputs, packing = self._pack(sequences)
                bucket, obstacle = self._bucket_for(packing)
                if bucket is not None:
                    return self._replay(bucket, inputs._asdict(), packing, choices)
            self.report.ran_directly(obstacle)
        return self.model(**self._on_device(given if num_choices is None else given | {"num_choices": num_choices}))

    # -- the model

    def _refuse_model(self) -> None:
        super()._refuse_model()
        if any(module.training for module in self._snapshot.modules):
            raise RuntimeError(f"{NAME}: a part of the model is in training mode; call model.eval()")

    def _refuse_call(self) -> None:
        if self.model.training:
            raise RuntimeError(
                f"{NAME}: the model is in training mode; call model.eval(), or make a graph with training=True"
            )
        if autocast_on(self._device.type):
            raise RuntimeError(
                f"{NAME}: autocast is on, and would convert every weight in every replay; convert the model instead, "
                "as in model.to(torch.bfloat16), and call it outside autocast"
            )

    def _refuse_gradients(self) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._snapshot.tensors):
            raise RuntimeError(
                f"{NAME}: gradients are live, and a replay records none; call it under torch.inference_mode() or "
                "torch.no_grad(), or freeze the model with model.requires_grad_(False)"
            )

    # -- a call

    def _sequences_of_choices(
        self, given: dict[str, Any], num_choices: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """For multiple choice, the arguments with (B, N, S) flattened to B * N sequences, and N; else N is None."""
        if not isinstance(self.model, BertForMultipleChoice):
            if num_choices is not None:
                raise TypeError(f"{NAME}: num_choices goes with BertForMultipleChoice, not {type(self.model).__name__}")
            return given, None
        ids, cu_seqlens = given["input_ids"], given["cu_seqlens"]
        if cu_seqlens is None and isinstance(ids, Tensor) and ids.dim() == 3:
            if num_choices not in (None, ids.shape[1]):
                raise ValueError(f"{NAME}: num_choices is {num_choices}; expected that of the input, {ids.shape[1]}")
            flat = {key: value.flatten(0, 1) if isinstance(value, Tensor) else value for key, value in given.items()}
            return flat, ids.shape[1]
        if not isinstance(cu_seqlens, Tensor) or not num_choices or (cu_seqlens.numel() - 1) % num_choices:
            raise ValueError(
                f"{NAME}: BertForMultipleChoice takes input_ids (B, N, S), or (T,) with cu_seqlens and a num_choices "
                f"that divides the number of sequences; num_choices is {num_choices}"
            )
        return given, num_choices

    def _replay(self, bucket: Bucket, rows: dict[str, Any], packing: Packing, choices: int | None) -> tuple:
        graph = self._captured(bucket)
        graph.form.send(graph.buffer, rows | {"indices": packing.indices}, packing)
        graph.replay()
        self.report.replays[bucket.tokens] += 1
        return self._result(graph.outputs, packing, choices, graph.views["indices"][: packing.tokens])

    def _form(self, bucket: Bucket) -> Form:
        return Form(bucket, Field("indices", bucket.tokens))

    @torch.no_grad()
    def _run(self, bucket: Bucket, views: dict[str, Tensor]) -> tuple:
        more = {"num_choices": 1} if isinstance(self.model, BertForMultipleChoice) else {}
        return self.model(
            views["input_ids"],
            token_type_ids=views["token_type_ids"] if self.model.config.family.token_types else None,
            position_ids=views["position_ids"],
            cu_seqlens=views["cu_seqlens"],
            max_seqlen=bucket.longest,
            **more,
        )

    def _result(self, outputs: Any, packing: Packing, choices: int | None, indices: Tensor) -> tuple:
        """The batch's part of the outputs, copied into the caller's form."""
        of_answers = isinstance(self.model, BertForQuestionAnswering)
        fill = torch.finfo(outputs.start_logits.dtype).min if of_answers else 0  # at padding, as in the model
        fields = {}
        for name, rows in zip(outputs._fields, outputs, strict=True):
            if rows is None:
                fields[name] = None
            elif name in OF_TOKENS or (name == "logits" and isinstance(self.model, LOGITS_OF_TOKENS)):
                fields[name] = _of_tokens(rows[: packing.tokens], packing, indices, fill)
            else:
                rows = rows[: packing.batch]
                fields[name] = (rows if choices is None else rows.view(-1, choices)).clone()
        return type(outputs)(**fields)


def _of_tokens(rows: Tensor, packing: Packing, indices: Tensor, fill: float) -> Tensor:
    """A copy of (T, ...) in the caller's form, with `fill` at padding."""
    if packing.indices is None:
        return packing.unpack(rows).clone()
    grid = rows.new_full((packing.batch * packing.seqlen, *rows.shape[1:]), fill)
    return grid.index_copy_(0, indices.long(), rows).unflatten(0, (packing.batch, packing.seqlen))
