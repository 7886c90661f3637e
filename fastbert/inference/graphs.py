"""CUDA graphs of a model for low latency: a forward is one launch instead of hundreds.

A graph runs the same kernels on the same addresses each time. So the input is copied before a replay to a fixed buffer,
as a packed batch with room to spare, called a bucket:

    input_ids   a a a b b . . .     5 tokens in a bucket of 8; 3 are spare
    cu_seqlens  0 3 5 8 8 8         2 sequences; the third holds the spare tokens, the others are empty

Spare tokens (of id 0) form separate sequences, and everything but attention works on single rows, so they do not affect
real tokens. The bucket's longest sequence is captured as a constant: attention launches programs for that length, and
those past the end of a sequence return at once. docs/graph.md describes costs, limits and checks.
"""

import operator
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastbert import backends, layer
from fastbert.heads import (
    HEADS,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForTokenClassification,
)
from fastbert.model import BertModel, ModelInputs
from fastbert.ops import checks
from fastbert.ops.op import autocast_on
from fastbert.padding import Packing

NAME = "fastbert.graph"  # for error messages
MODELS = (BertModel, *HEADS)
# Outputs with a row for each token; others have a row for each sequence, and `logits` depend on the head.
OF_TOKENS = ("last_hidden_state", "prediction_logits", "start_logits", "end_logits")
LOGITS_OF_TOKENS = (BertForMaskedLM, BertForReplacedTokenDetection, BertForTokenClassification)


def graph(
    model: nn.Module,
    max_tokens: Iterable[int] = (64, 128, 256, 512),
    max_sequences: int = 8,
    max_seqlen: int | None = None,
) -> "GraphedModel":
    """The model as CUDA graphs for inference with low latency; it is called like the model.

    model: a BertModel or BertFor... of any family on one GPU, in evaluation mode. max_tokens: the sizes of the buckets.
    A call replays the smallest bucket for its tokens, not counting padding, if it has at most max_sequences sequences
    of at most max_seqlen tokens (default: the model's maximum); other calls run the model itself. All buckets are
    captured here, which runs the model a few times each; capture before other threads use the GPU (docs/graph.md).
    Raises TypeError for another model, ValueError for invalid sizes and a model that is not on one GPU, RuntimeError
    for a model in training mode or with hooks, and under autocast.
    """
    return GraphedModel(model, max_tokens, max_sequences, max_seqlen)


# ---- what a graph has room for


class _Batch(NamedTuple):
    """A call's packed input, on the host or the device."""

    inputs: ModelInputs
    packing: Packing
    choices: int | None = None  # for multiple choice

    @property
    def longest(self) -> int:
        return min(self.packing.max_seqlen, self.packing.tokens)  # people pass the model's maximum


class Bucket(NamedTuple):
    """The most tokens and sequences that a graph takes, and the longest sequence."""

    tokens: int
    sequences: int
    longest: int

    @property
    def slots(self) -> int:
        """Sequences in the captured batch: the caller's, and enough to hold all tokens if all are spare."""
        return self.sequences + -(-self.tokens // self.longest)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.tokens,) * 4 + (self.slots + 1,)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """input_ids, token_type_ids, position_ids, indices in the padded batch, cu_seqlens: copied as one buffer."""
        return buffer.split_with_sizes(self.sizes)

    def write(self, buffer: Tensor, inputs: ModelInputs, packing: Packing) -> None:
        """Writes a batch on the buffer's device, and the spare tokens. No host synchronisation."""
        input_ids, token_type_ids, position_ids, indices, cu_seqlens = self.views(buffer.zero_())
        tokens, sequences = packing.tokens, packing.batch
        input_ids[:tokens] = inputs.input_ids
        position_ids[:tokens] = inputs.position_ids
        if inputs.token_type_ids is not None:
            token_type_ids[:tokens] = inputs.token_type_ids
        if packing.indices is not None:
            indices[:tokens] = packing.indices
        cu_seqlens[: sequences + 1] = packing.cu_seqlens
        spare = torch.arange(1, self.slots - sequences + 1, device=buffer.device)
        cu_seqlens[sequences + 1 :] = (tokens + spare * self.longest).clamp(max=self.tokens)


# ---- capture


class Recorder(Protocol):
    """Records a function that works on fixed memory, so that it can be replayed."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Runs the function. Returns a replay, which runs it again, and its outputs, which a replay overwrites."""

    def in_order(self) -> AbstractContextManager[None]:
        """A block for captures, replays and uses of their memory; the device runs such blocks one after another."""


class CudaGraphs:
    """Records CUDA graphs on one GPU. They share a memory pool, so only one may run at a time."""

    WARM_UPS = 3  # the first compiles and loads kernels and initialises libraries
    alone = threading.Lock()  # PyTorch allows one capture at a time in a process

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"{NAME}: the model is on {device}; CUDA graphs need a GPU")
        with torch.cuda.device(device):
            self.device, self.pool = device, torch.cuda.graph_pool_handle()
            self.stream, self.used = torch.cuda.Stream(), torch.cuda.Event()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        caller, captured = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with self.alone, torch.cuda.stream(self.stream):
            self.stream.wait_stream(caller)
            for _ in range(self.WARM_UPS):
                function()
            with _fresh_workspaces():
                # Restricts only this thread. Others should not use the GPU either: see _fresh_workspaces.
                with torch.cuda.graph(captured, self.pool, self.stream, capture_error_mode="thread_local"):
                    outputs = function()
        return captured.replay, outputs

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{NAME}: called while a graph is being captured; capture the model itself")
            stream = torch.cuda.current_stream()
            stream.wait_event(self.used)
            try:
                yield
            finally:
                self.used.record(stream)


@contextmanager
def _fresh_workspaces() -> Iterator[None]:
    """Makes matrix products in the block allocate new workspaces, from the capture's pool, which lives with its graphs.

    PyTorch keeps one for each stream, and frees it with any graph of that stream (pytorch/pytorch#193402). Clearing
    affects all streams: matrix products queued by another thread lose their workspace. Hence "capture before other
    threads use the GPU".
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _Graph(NamedTuple):
    buffer: Tensor
    replay: Callable[[], None]
    outputs: Any


# ---- the captured model


def _replays(module: nn.Module) -> bool:
    """Whether a module is fastbert's or a plain one of PyTorch's: it computes the same in every forward."""
    leaves = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout)
    own = type(module).__module__.startswith("fastbert.") or isinstance(module, nn.ModuleList)
    return own or any(layer.unchanged(module, kind) for kind in leaves)


class ModelSnapshot:
    """What a capture depends on: a model's modules, hooks, and the addresses and dtypes of its tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.children = [module._modules for module in self.modules]
        self.children_then = [dict(children) for children in self.children]
        self.tables = [table for module in self.modules for table in (module._parameters, module._buffers)]
        self.hooks = [hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.entries = list(chain.from_iterable(table.values() for table in self.tables))
        self.tensors = [tensor for tensor in self.entries if tensor is not None]
        self.addresses = self._addresses()
        self.others = sorted({type(module).__name__ for module in self.modules[1:] if not _replays(module)})

    def _addresses(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self.tensors), *map(operator.attrgetter("dtype"), self.tensors)]

    def has_changed(self) -> bool:
        """Whether a module or tensor was replaced or moved. Values may change in place."""
        now = list(chain.from_iterable(map(dict.values, self.tables)))
        same = len(now) == len(self.entries) and all(map(operator.is_, now, self.entries))
        return not (same and self._addresses() == self.addresses and self.children == self.children_then)

    def device(self) -> torch.device:
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) != 1:
            given = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(f"{NAME}: the model is on {given}; expected one GPU")
        return devices.pop()

    def refuse(self, device: torch.device) -> None:
        """Raises RuntimeError if a replay would not do what the model does."""
        if any([module.training for module in self.modules]):
            raise RuntimeError(f"{NAME}: the model is in training mode; graphs are for inference: call model.eval()")
        if any(self.hooks):
            raise RuntimeError(f"{NAME}: the model has forward hooks; a replay runs no Python, so they would not run")
        if self.others:
            raise RuntimeError(
                f"{NAME}: the model has a {self.others[0]}, whose Python a replay does not run; expected fastbert's "
                "own modules: merge adapters first (merge_and_unload)"
            )
        if autocast_on(device.type):
            raise RuntimeError(
                f"{NAME}: autocast is on, and would convert every weight in every replay; convert the model instead, "
                "as in model.to(torch.bfloat16), and call it outside autocast"
            )

    def refuse_gradients(self) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            raise RuntimeError(
                f"{NAME}: gradients are live, and a replay records none; call it under torch.inference_mode() or "
                "torch.no_grad(), or freeze the model with model.requires_grad_(False)"
            )


# ---- the graphed model


class Report:
    """Counts of calls. replays, captures: by the bucket's tokens. direct: runs of the model itself, by reason."""

    def __init__(self) -> None:
        self.captures: Counter[int] = Counter()
        self.replays: Counter[int] = Counter()
        self.direct: Counter[str] = Counter()

    def ran_directly(self, reason: str) -> None:
        self.direct[reason] += 1
        if self.direct[reason] == 1:
            message = f"{NAME}: calls run the model without a graph where {reason} (said once)"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def __str__(self) -> str:
        lines = [f"calls replayed: {self.replays.total()}, run directly: {self.direct.total()}"]
        lines += [
            f"  {self.replays[tokens]} in the graph of {tokens} tokens, captured {count} x"
            for tokens, count in sorted(self.captures.items())
        ]
        return "\n".join(lines + [f"  {count} directly where {reason}" for reason, count in self.direct.items()])


class GraphedModel:
    """A model that replays graphs of itself, made by `graph`. Attributes: model, buckets, report.

    Calls from several threads take turns. The first call after a change of the model captures again, and must have the
    GPU to itself. Results belong to the caller: later calls do not overwrite them.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: Iterable[int],
        max_sequences: int,
        max_seqlen: int | None,
        recorder: Callable[[torch.device], Recorder] = CudaGraphs,
    ) -> None:
        """recorder: captures on a device; tests replace it. The other arguments as in `graph`."""
        if not isinstance(model, MODELS):
            known = ", ".join(kind.__name__ for kind in MODELS)
            raise TypeError(f"{NAME}: given a {type(model).__name__}; expected one of {known}")
        self.model, self.report = model, Report()
        longest = model.config.max_sequence_length if max_seqlen is None else max_seqlen
        self.buckets = _buckets(max_tokens, max_sequences, longest)
        self._new_recorder, self._lock = recorder, threading.Lock()
        with self._lock:
            self._start_over()
            self._snapshot.refuse(self._device)
            if not _checking():
                with self._recorder.in_order():
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
        """What model(...) returns for the same arguments, on the model's device, without gradients.

        Input is padded or packed as for the model, all on the host or all on the model's device. Host input is checked
        as on a CPU and needs no synchronisation; on the device a mask, or cu_seqlens without max_seqlen, costs one.
        num_choices: for packed input to BertForMultipleChoice.
        Raises TypeError for other arguments (labels, inputs_embeds, output_...), RuntimeError for a model in training
        mode, with hooks or with live gradients, under autocast and within a capture, and as the model does.
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
            with self._recorder.in_order():
                batch = self._read(given, num_choices)
                bucket, obstacle = self._bucket_for(batch)
                if bucket is not None:
                    return self._replay(bucket, batch)
            self.report.ran_directly(obstacle)
        return self._run_directly(given, num_choices)

    # -- the captured model

    def _start_over(self) -> None:
        """Discards all graphs and looks at the model anew."""
        self._graphs: dict[Any, _Graph] = {}
        snapshot = ModelSnapshot(self.model)
        self._device = snapshot.device()
        self._recorder = self._new_recorder(self._device)  # with a new pool: an emptied one cannot be used again
        self._snapshot = snapshot

    def _look_at_model(self) -> None:
        if self._snapshot.has_changed():
            self._start_over()
        self._snapshot.refuse(self._device)
        self._snapshot.refuse_gradients()

    def _settings(self) -> tuple[Any, ...]:
        """What decides which kernels are captured: the backends, and the precision of float32 matrix products."""
        config, dtype = self.model.config, self._snapshot.tensors[0].dtype
        sizes = {"attention": config.head_dim, "add_layer_norm": config.hidden_size, "linear": 0, "dense_gelu": 0}
        sizes |= dict.fromkeys(("embedding", "layer_norm"), config.embedding_width)
        kernels = [
            backends.choose(op, self._device.type, dtype, backward=False, size=size) for op, size in sizes.items()
        ]
        return *kernels, torch.backends.cuda.matmul.fp32_precision

    # -- a call

    def _read(self, given: dict[str, Any], num_choices: int | None) -> _Batch:
        """The arguments, checked and packed by the model or, on the host, by its stand-in without weights."""
        given, choices = self._sequences_of_choices(given, num_choices)
        names = ("input_ids", "token_type_ids", "position_ids")
        ids = {name: given[name] for name in names if given[name] is not None or name == "input_ids"}
        checks.integers(NAME, **ids)
        checks.same_device(NAME, ids)
        device, body = ids["input_ids"].device, self.model if isinstance(self.model, BertModel) else self.model.bert
        if device not in (self._device, torch.device("cpu")):
            raise ValueError(f"{NAME}: the input is on {device}; expected the model's {self._device}, or the host")
        with backends.backend(None):  # a forced backend is for the model, and may not run on the host
            batch = _Batch(*body.pack(**given, inputs_embeds=None), choices)
        config, inputs = self.model.config, batch.inputs
        checks.index_range(NAME, "input_ids", inputs.input_ids, config.vocab_size)
        checks.index_range(NAME, "token_type_ids", inputs.token_type_ids, config.type_vocab_size)
        checks.index_range(NAME, "position_ids", inputs.position_ids, config.max_position_embeddings)
        return batch

    def _sequences_of_choices(
        self, given: dict[str, Any], num_choices: int | None
    ) -> tuple[dict[str, Any], int | None]:
        """For multiple choice: the arguments as B * N sequences instead of (B, N, S), and N."""
        if not isinstance(self.model, BertForMultipleChoice):
            if num_choices is not None:
                raise TypeError(f"{NAME}: num_choices goes with BertForMultipleChoice, not {type(self.model).__name__}")
            return given, None
        ids, cu_seqlens = given["input_ids"], given["cu_seqlens"]
        if cu_seqlens is None and isinstance(ids, Tensor) and ids.dim() == 3:
            flat = {key: value.flatten(0, 1) if isinstance(value, Tensor) else value for key, value in given.items()}
            return flat, ids.shape[1]
        if not isinstance(cu_seqlens, Tensor) or not num_choices or (cu_seqlens.numel() - 1) % num_choices:
            raise ValueError(
                f"{NAME}: BertForMultipleChoice takes input_ids (B, N, S), or (T,) with cu_seqlens and a num_choices "
                f"that divides the number of sequences; num_choices is {num_choices}"
            )
        return given, num_choices

    def _bucket_for(self, batch: _Batch) -> tuple[Bucket | None, str]:
        """The smallest bucket that holds the batch, or why none does."""
        largest = self.buckets[-1]
        if _checking():
            return None, "FASTBERT_CHECK=1 asks for checks that no replay makes"
        if batch.packing.tokens > largest.tokens:
            return None, f"a batch has more than {largest.tokens} tokens"
        if batch.packing.batch > largest.sequences:
            return None, f"a batch has more than {largest.sequences} sequences"
        if batch.longest > largest.longest:
            return None, f"a sequence has more than {largest.longest} tokens"
        return next(bucket for bucket in self.buckets if batch.packing.tokens <= bucket.tokens), ""

    def _run_directly(self, given: dict[str, Any], num_choices: int | None) -> tuple:
        arguments = given if num_choices is None else given | {"num_choices": num_choices}
        on_device = {
            name: value.to(self._device) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        return self.model(**on_device)

    def _replay(self, bucket: Bucket, batch: _Batch) -> tuple:
        buffer, replay, outputs = self._captured(bucket)
        if batch.inputs.input_ids.device == self._device:
            bucket.write(buffer, batch.inputs, batch.packing)
        else:
            # A new one, as the previous copy may not be done; PyTorch recycles it when the copy is.
            pinned = torch.empty(buffer.shape, dtype=torch.int32, pin_memory=True)
            bucket.write(pinned, batch.inputs, batch.packing)
            buffer.copy_(pinned, non_blocking=True)
        replay()
        self.report.replays[bucket.tokens] += 1
        return self._result(outputs, batch, bucket.views(buffer)[3][: batch.packing.tokens])

    def _captured(self, bucket: Bucket) -> _Graph:
        """The bucket's graph under the current settings, captured if it is new."""
        key = bucket.tokens, self._settings()
        if key not in self._graphs:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be overwritten later
                self._graphs[key] = self._capture(bucket)
            self.report.captures[bucket.tokens] += 1
        return self._graphs[key]

    def _capture(self, bucket: Bucket) -> _Graph:
        buffer = torch.empty(sum(bucket.sizes), dtype=torch.int32, device=self._device)
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        bucket.write(buffer, ModelInputs(nothing, None, nothing, None), Packing(nothing.new_zeros(1), 0, 0, 0))
        input_ids, token_type_ids, position_ids, _, cu_seqlens = bucket.views(buffer)
        token_type_ids = token_type_ids if self.model.config.family.token_types else None
        more = {"num_choices": 1} if isinstance(self.model, BertForMultipleChoice) else {}

        def forward() -> tuple:
            return self.model(
                input_ids,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                max_seqlen=bucket.longest,
                **more,
            )

        return _Graph(buffer, *self._recorder.capture(forward))

    def _result(self, outputs: Any, batch: _Batch, indices: Tensor) -> tuple:
        """The batch's part of the outputs, copied into the caller's form."""
        of_answers = isinstance(self.model, BertForQuestionAnswering)
        fill = torch.finfo(outputs.start_logits.dtype).min if of_answers else 0  # at padding, as in the model
        fields = {}
        for name, rows in zip(outputs._fields, outputs, strict=True):
            if rows is None:
                fields[name] = None
            elif name in OF_TOKENS or (name == "logits" and isinstance(self.model, LOGITS_OF_TOKENS)):
                fields[name] = _of_tokens(rows[: batch.packing.tokens], batch.packing, indices, fill)
            else:
                rows = rows[: batch.packing.batch]
                fields[name] = (rows if batch.choices is None else rows.view(-1, batch.choices)).clone()
        return type(outputs)(**fields)


# ---- helpers


def _checking() -> bool:
    return os.environ.get("FASTBERT_CHECK") == "1"


def _buckets(max_tokens: Iterable[int], max_sequences: int, max_seqlen: int) -> tuple[Bucket, ...]:
    if isinstance(max_tokens, str) or not isinstance(max_tokens, Iterable) or not (max_tokens := tuple(max_tokens)):
        raise ValueError(f"{NAME}: max_tokens is {max_tokens!r}; expected the sizes of buckets, as in (64, 128)")
    sizes = sorted({_size("max_tokens", size) for size in max_tokens})
    count, longest = _size("max_sequences", max_sequences), _size("max_seqlen", max_seqlen)
    return tuple(Bucket(size, count, min(longest, size)) for size in sizes)


def _size(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{NAME}: {name} has {value!r}; expected positive ints")
    return value


def _of_tokens(rows: Tensor, packing: Packing, indices: Tensor, fill: float) -> Tensor:
    """A copy of (T, ...) in the caller's form, with `fill` at padding."""
    if packing.indices is None:
        return packing.unpack(rows).clone()
    grid = rows.new_full((packing.batch * packing.seqlen, *rows.shape[1:]), fill)
    return grid.index_copy_(0, indices.long(), rows).unflatten(0, (packing.batch, packing.seqlen))
