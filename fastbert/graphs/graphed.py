"""The base class of the graphs of a forward and of a training step."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import backends
from fastbert.graphs.buckets import IDS, NAME, Bucket, Form, buckets_of
from fastbert.graphs.capture import CudaGraphs, ModelSnapshot, Recorder
from fastbert.model import BertModel, ModelInputs, class_name
from fastbert.ops import checks
from fastbert.padding import Packing
from fastbert.warn import warn

CHECKING = "FASTBERT_CHECK=1 asks for checks that no replay makes"


class Report:
    """Counts of calls. replays, captures: by the bucket's tokens. direct: runs without a graph, by reason."""

    def __init__(self) -> None:
        self.captures: Counter[int] = Counter()
        self.replays: Counter[int] = Counter()
        self.direct: Counter[str] = Counter()

    def ran_directly(self, reason: str) -> None:
        self.direct[reason] += 1
        if self.direct[reason] == 1:
            message = f"{NAME}: calls run the model without a graph where {reason} (said once)"
            warn(message, RuntimeWarning)

    def __str__(self) -> str:
        lines = [f"calls replayed: {self.replays.total()}, run directly: {self.direct.total()}"]
        lines += [
            f"  {self.replays[tokens]} in the graph of {tokens} tokens, captured {count} x"
            for tokens, count in sorted(self.captures.items())
        ]
        return "\n".join(lines + [f"  {count} directly where {reason}" for reason, count in self.direct.items()])


class Graph(NamedTuple):
    """A captured function that reads the buffer. outputs: overwritten by each replay."""

    form: Form
    buffer: Tensor
    views: dict[str, Tensor]  # of the buffer
    replay: Callable[[], None]
    outputs: Any


class Graphed:
    """A model, its buckets, and the graphs that were captured of it. Attributes: model, buckets, report."""

    MODELS: tuple[type[nn.Module], ...]  # the classes of models that are accepted
    GRADIENTS = False  # whether graphs compute gradients

    def __init__(
        self,
        model: nn.Module,
        max_tokens: Iterable[int],
        max_sequences: int,
        max_seqlen: int | None,
        recorder: Callable[[torch.device], Recorder] = CudaGraphs,
        **options: Any,
    ) -> None:
        """recorder: makes the Recorder for a device; tests replace it. The other arguments are those of `graph`."""
        if not isinstance(model, self.MODELS):
            known = ", ".join(f"fastbert.{kind.__name__}" for kind in self.MODELS)
            raise TypeError(f"{NAME}: given a {class_name(model)}; expected one of {known}")
        self.model, self.report = model, Report()
        longest = model.config.max_sequence_length if max_seqlen is None else max_seqlen
        self.buckets = buckets_of(max_tokens, max_sequences, longest)
        self._body = model if isinstance(model, BertModel) else model.bert
        self._snapshot = ModelSnapshot(model, self.GRADIENTS)
        self._device = self._snapshot.device()
        self._recorder, self._lock = recorder(self._device), threading.Lock()
        self._graphs: dict[Any, Graph] = {}
        self._refuse_model()
        self._refuse_call()
        self._start(**options)

    def _start(self) -> None:
        """Completes the construction, with the options of the subclass."""
        raise NotImplementedError

    def _refuse_model(self) -> None:
        """Raises an error for a model whose replay would not compute what the model computes."""
        self._snapshot.refuse_python()

    def _refuse_call(self) -> None:
        """Raises RuntimeError if the current modes (training, autocast, gradients) do not fit the graphs."""
        raise NotImplementedError

    def _look_at_model(self) -> None:
        """Checks the modes; the model's structure is checked before each capture, and here under FASTBERT_CHECK=1."""
        self._refuse_call()
        if checking():
            self._snapshot.refuse_a_change()
            self._refuse_model()

    # -- a batch

    def _pack(self, given: dict[str, Any]) -> tuple[ModelInputs, Packing]:
        """The packed ids and their Packing, checked and packed by the model's own code on the device of the input.

        To be called within `_on_host`.
        """
        ids = {name: given.get(name) for name in IDS if given.get(name) is not None or name == "input_ids"}
        checks.integers(NAME, **ids)
        checks.same_device(NAME, ids)
        if (device := ids["input_ids"].device) not in (self._device, torch.device("cpu")):
            raise ValueError(f"{NAME}: the input is on {device}; expected the model's {self._device}, or the host")
        arguments = (
            ids["input_ids"],
            given.get("attention_mask"),
            ids.get("token_type_ids"),
            ids.get("position_ids"),
            None,
            given.get("cu_seqlens"),
            given.get("max_seqlen"),
        )
        inputs, packing = self._body.pack(*arguments)
        config, tables = self.model.config, self._body.embeddings
        checks.index_range(NAME, "input_ids", inputs.input_ids, config.vocab_size)
        if tables.token_type_embeddings is not None:
            checks.index_range(NAME, "token_type_ids", inputs.token_type_ids, config.type_vocab_size)
        if tables.position_embeddings is not None:
            checks.index_range(NAME, "position_ids", inputs.position_ids, config.max_position_embeddings)
        return inputs, packing

    @staticmethod
    def _on_host() -> AbstractContextManager[None]:
        """A context for work on a batch. It lifts a forced backend, which is for the model and may not support CPUs."""
        return backends.backend(None) if backends.forced() else nullcontext()

    def _bucket_for(self, packing: Packing, *more: Any) -> tuple[Bucket | None, str]:
        """The smallest bucket that holds the batch, or why none does. more: as in `_why_not`."""
        if checking():
            return None, CHECKING
        if obstacle := self._why_not(self.buckets[-1], packing, *more):
            return None, obstacle
        return next(bucket for bucket in self.buckets if self._why_not(bucket, packing, *more) is None), ""

    def _why_not(self, bucket: Bucket, packing: Packing, *more: Any) -> str | None:
        """Why a bucket does not hold a batch; None if it does. more: what else subclasses decide by, such as labels."""
        return bucket.why_not(packing)

    def _on_device(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: x.to(self._device) if isinstance(x, Tensor) else x for name, x in given.items()}

    # -- a graph

    def _captured(self, bucket: Bucket, *key: Any) -> Graph:
        """The graph of a bucket under the current settings, captured if it is new. key: what else it depends on."""
        settings = bucket, backends.forced(), torch.backends.cuda.matmul.fp32_precision, key
        if (graph := self._graphs.get(settings)) is None:
            self._snapshot.refuse_a_change()  # what is captured now is replayed beside what was captured before
            self._refuse_model()
            graph = self._capture(bucket, *key)
            self._snapshot.hold_what_was_made()
            self._graphs[settings] = graph
            self.report.captures[bucket.tokens] += 1
        return graph

    def _capture(self, bucket: Bucket, *key: Any) -> Graph:
        form, device = self._form(bucket, *key), self._device
        with torch.inference_mode(False):  # tensors made in inference mode could not be overwritten outside it
            buffer = torch.empty(form.size, dtype=torch.int32, device=device)
            form.write(buffer, {}, Packing(torch.zeros(1, dtype=torch.int32, device=device), 0, 0, 0))
            views = form.views(buffer)
            # The capture leaves the generators' states unchanged, so that a replay draws what the model would draw.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                replay, outputs = self._recorder.capture(lambda: self._run(bucket, views, *key))
        return Graph(form, buffer, views, replay, outputs)

    def _form(self, bucket: Bucket, *key: Any) -> Form:
        """The layout of the buffer, which holds everything that changes between replays."""
        raise NotImplementedError

    def _run(self, bucket: Bucket, views: dict[str, Tensor], *key: Any) -> tuple:
        """The computation that is captured: from the buffer's views to the outputs."""
        raise NotImplementedError


def checking() -> bool:
    return os.environ.get("FASTBERT_CHECK") == "1"
