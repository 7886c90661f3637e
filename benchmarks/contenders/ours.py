"""fastbert: modules on padded batches, as most people call them, and in other forms; ops on packed tokens."""

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

import fastbert
from benchmarks.contenders import hugging_face
from benchmarks.contenders.interface import CLASSIFIER, EPS, OPS, Runnable, Subject
from fastbert import backends, ops
from fastbert.graphs import graph
from fastbert.ops.scaled_linear import problem_on


def plain(subject: Subject) -> Runnable:
    """fastbert on the backend that it chooses by itself."""
    if subject.part in OPS:
        return Runnable(call(subject))
    module = subject.ours.train(subject.backward)
    return Runnable(
        lambda **arguments: subject.output(module(**arguments)),
        subject.padded(subject.mask()),
        subject.packed,
        module,
        hugging_face.hidden_states(module.bert, subject.batch) if subject.part == CLASSIFIER else None,
    )


def packed(subject: Subject) -> Runnable:
    """fastbert on batches that are packed beforehand: no padding anywhere, no host synchronisation."""
    module = subject.ours.train(subject.backward)
    ends = {"cu_seqlens": subject.batch.cu_seqlens, "max_seqlen": subject.batch.max_seqlen}
    return Runnable(lambda **arguments: subject.output(module(**arguments)), lambda **x: {**x, **ends}, module=module)


def accelerated(subject: Subject, **options: bool) -> Runnable:
    """`fastbert.accelerate` on transformers' own modules."""
    module = copy.deepcopy(subject.theirs)
    fastbert.accelerate(module, **options)
    return hugging_face.runnable(module, subject, None)


def prepared(subject: Subject, precision: str | None = None) -> Runnable | str:
    """`fastbert.prepare`: weights packed beforehand, on padded batches."""
    name = precision or ("bf16" if subject.dtype == torch.bfloat16 else "fp32")
    if name == "fp8" and (reason := problem_on(next(subject.ours.parameters()).device)):
        return reason
    module = fastbert.prepare(subject.ours.eval(), name)
    run = lambda **arguments: subject.output(module(**arguments))  # noqa: E731
    return Runnable(run, subject.padded(subject.mask()), subject.packed)


def graphed(subject: Subject) -> Runnable:
    """`fastbert.graph`: our model as a CUDA graph, with one bucket that has room for exactly this batch."""
    batch = subject.batch
    sizes = {"max_tokens": (batch.tokens,), "max_sequences": len(batch.lengths), "max_seqlen": batch.max_seqlen}
    replay = graph(subject.ours.eval(), **sizes)
    mask = None if batch.is_full else batch.mask
    return Runnable(lambda **arguments: subject.output(replay(**arguments)), subject.padded(mask), subject.packed)


# The names under which the table of backends has an op, where they are not its own. An op may use several.
_GOES_THROUGH = {"qkv_attention": ("attention", "linear"), "pack": ("padding",), "unpack": ("padding",)}


def forced(backend: str, subject: Subject) -> Runnable | None:
    """An op on a backend that it would not choose by itself: evidence for the order in which backends are preferred."""
    names, device = _GOES_THROUGH.get(subject.part, (subject.part,)), subject.batch.device
    if any(backends.why_not(backend, op, device, subject.dtype, subject.backward) for op in names):
        return None
    if backend == backends.choose(names[0], device, subject.dtype, backward=subject.backward):
        return None
    run = call(subject)

    def on_backend(**inputs: Tensor) -> Tensor:
        with fastbert.backend(backend):
            return run(**inputs)

    return Runnable(on_backend)


def call(subject: Subject) -> Callable[..., Tensor]:
    """The op of a case as a function of its inputs."""
    batch, part = subject.batch, subject.part
    options = {
        "attention": {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen},
        "qkv_attention": {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen},
        "linear_max": {"cu_seqlens": batch.cu_seqlens},
        "add_layer_norm": {"eps": EPS},
        "layer_norm": {"eps": EPS},
        "embedding": {"eps": EPS, "padding_idx": 0},
    }.get(part, {})
    if part == "qkv_attention":
        options["num_heads"] = subject.config.num_attention_heads
    if part in ("pack", "unpack"):
        options = {"indices": batch.indices}
        options |= {"batch": len(batch.lengths), "seqlen": batch.width} if part == "unpack" else {}
    return functools.partial(getattr(ops, part), **options)
