"""transformers' own modules: what most people run. They also compute padding, except in flash-attention's attention."""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.batch import Batch
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, Runnable, Subject


def runnable(module: nn.Module, subject: Subject, keys: Tensor | None) -> Runnable:
    """A module of transformers on a padded batch. keys: the mask in the form that a bare encoder expects."""
    module.train(subject.backward)
    return Runnable(
        lambda **arguments: subject.output(module(**arguments)),
        subject.padded(keys if subject.part == ENCODER else subject.mask()),
        subject.packed,
        module,
        hidden_states(module.base_model, subject.batch) if subject.part == CLASSIFIER else None,
    )


def hidden_states(body: nn.Module, batch: Batch) -> Callable[..., Tensor]:
    """A function that gives hidden states to verify, for a model whose head has too few logits to judge by."""
    return lambda **arguments: batch.take(body(**arguments).last_hidden_state)


def with_attention(module: nn.Module, name: str) -> nn.Module:
    """A copy with another attention; does what set_attn_implementation does, a method that bare encoders lack."""
    module = copy.deepcopy(module)
    module.config._attn_implementation = name
    return module


def sdpa(subject: Subject) -> Runnable:
    """PyTorch's fused attention: the baseline. For relative positions, transformers has only one implementation."""
    return runnable(subject.theirs, subject, subject.batch.keys)


def eager(subject: Subject) -> Runnable | None:
    """Attention in separate PyTorch calls, which adds its mask to the scores."""
    if subject.config.family.relative:
        return None  # all contenders of transformers use the model's own attention
    keys, dtype = subject.batch.keys, subject.dtype
    if keys is not None:
        keys = torch.zeros(keys.shape, dtype=dtype, device=keys.device).masked_fill(~keys, torch.finfo(dtype).min)
    return runnable(with_attention(subject.theirs, "eager"), subject, keys)


def flash(subject: Subject) -> Runnable | None:
    """Removes padding around each attention call."""
    if subject.config.family.relative:
        return None
    return runnable(with_attention(subject.theirs, "flash_attention_2"), subject, None)


def compiled(subject: Subject) -> Runnable:
    """SDPA under torch.compile, for the one shape of the case.

    On a GPU an inference replays a CUDA graph (mode "reduce-overhead"): what PyTorch offers against launch costs.
    """
    torch.compiler.reset()  # else the ninth shape would quietly run uncompiled
    mode = "reduce-overhead" if subject.batch.device == "cuda" and not subject.backward else None
    module = torch.compile(subject.theirs, dynamic=False, mode=mode)
    return dataclasses.replace(sdpa(subject), run=lambda **arguments: subject.output(module(**arguments)))
