"""Checks which modules of a live model can be computed from their parameters, without being called, and which cannot.

A check raises Fallback with the reason: hooks would see packed tensors; a replaced module, or one with its own forward,
might mix tokens. Checks belong to every forward, because users hook, wrap and replace modules between forwards; `Kept`
(`fastbert/parts.py`) skips them for modules that have not changed since the last one.
"""

import re
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fastbert.distances import MPNET_BUCKETS
from fastbert.layer import ACTIVATIONS, GELU_FORMS
from fastbert.parts import (
    AttentionParts,
    has_own_forward,
    hooks,
    is_plain,
    is_prepared,
    ordinary,
    probability,
    unchanged,
)
from fastbert.random import ATTENTION_BITS, ROW_BITS, is_expressible

# Hooks of these libraries work with packed tensors as well: FSDP2's gather weights, transformers' record outputs.
FRAMEWORKS = ("transformers.", "torch.distributed.")
# Those of them by which transformers records: they stay after the first forward that records, and are idle in others.
CAPTURING = ("transformers.utils.output_capturing",)
# Those that embedding tables may have: they record, or let the inputs require gradients. NEFTune's counts tokens.
ON_EMBEDDINGS = ("transformers.utils.", "transformers.modeling_utils")


# Methods that transformers' forwards call, if their class has them, and whose results fastbert computes itself.
HELPERS = (
    "feed_forward_chunk",
    "ff_chunk",
    "transpose_for_scores",
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
)
_helpers: dict[type, tuple[str, ...]] = {}
_theirs: set[FunctionType] = set()  # those that `_is_theirs` has found: they last as long as their modules


class Fallback(Exception):
    """The reason why a forward runs the original computation."""


def _instead_of(module: nn.Module, kind: type[nn.Module]) -> str:
    """The reason, as text, why a module is not a plain one of that kind."""
    name = kind.__name__
    if type(module).forward is not kind.forward:
        cls = type(module)
        return f"a {cls.__module__}.{cls.__qualname__} is in place of a {name}"
    if has_own_forward(module):
        return f"a {name} has a forward of its own"
    if hooks(module):
        return f"a {name} has hooks (of pruning, for one)"
    return f"a {name} has no bias, or other parameters than usual"


def is_lora(module: nn.Module) -> bool:
    """Whether it is LoRA around a plain Linear, which treats each token separately: it is called on packed tokens."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return False
    base = getattr(module, "base_layer", None)
    return isinstance(base, nn.Linear) and unchanged(base, nn.Linear) and not any(map(hooks, module.modules()))


def check_leaf(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Checks a Linear or LayerNorm. Returns whether it is plain, so that its parameters may be read."""
    if kind is nn.Linear:
        return check_linear(module)
    check_norm(module)
    return True


def check_linear(module: nn.Module) -> bool:
    """Checks a Linear. Returns whether it is plain; otherwise it is LoRA around one, or prepared."""
    plain = is_plain(module, nn.Linear)
    if not (plain or is_lora(module) or is_prepared(module)):
        raise Fallback(_instead_of(module, nn.Linear))
    weight = module._parameters.get("weight")  # None if there is no such parameter
    if not ordinary(weight):
        raise Fallback(f"the weight of a Linear is a {type(weight).__name__}")
    return plain


def check_norm(module: nn.Module) -> None:
    if not is_plain(module, nn.LayerNorm) or module.bias is None or module.weight.dim() != 1:
        raise Fallback(_instead_of(module, nn.LayerNorm))


def check_activation(module: nn.Module) -> None:
    known = type(module) is nn.GELU or type(module).__name__ in GELU_FORMS
    if not known or hooks(module) or has_own_forward(module):
        raise Fallback(f"the activation is {type(module).__name__}, not GELU, or has hooks")


def check_dropout(module: nn.Module | None) -> None:
    """Checks the dropout before a sum or after the embeddings."""
    if module is not None:
        _check_dropout(module, probability(module), ROW_BITS)


def check_attention_dropout(attention: AttentionParts) -> None:
    _check_dropout(attention.dropout, attention.p, ATTENTION_BITS)


def _check_dropout(module: nn.Module, p: float, bits: int) -> None:
    """p: the probability with which the module drops now."""
    if type(module) is not nn.Dropout or not is_plain(module, nn.Dropout):
        raise Fallback(_instead_of(module, nn.Dropout))
    if not is_expressible(p, bits):
        raise Fallback(f"dropout of {p} is not a multiple of 2**-{bits}, nor near one between 0 and 1")


def check_embedding(module: nn.Module) -> None:
    """Checks an embedding table, or an adapter around one."""
    base = getattr(module, "base_layer", module)
    plain = isinstance(base, nn.Embedding) and base.max_norm is None and not base.scale_grad_by_freq
    if not plain or hooks(module, ON_EMBEDDINGS) or has_own_forward(module):
        raise Fallback(_instead_of(module, nn.Embedding))


def check_positions(encoder: nn.Module) -> None:
    """Checks the tables of relative positions, and how a DeBERTa maps distances to their rows."""
    if hasattr(encoder, "relative_attention_bias"):
        check_methods(encoder, "compute_position_bias", "relative_position_bucket")
        check_embedding(encoder.relative_attention_bias)
        rows = encoder.relative_attention_bias.weight.shape[0]
        if rows < MPNET_BUCKETS:
            raise Fallback(f"relative_attention_bias has {rows} rows, fewer than transformers reads")
        return
    check_methods(encoder, "get_rel_embedding", "get_rel_pos", "get_attention_mask")
    if not encoder.relative_attention:
        return
    check_embedding(encoder.rel_embeddings)
    if hasattr(encoder, "LayerNorm"):
        check_norm(encoder.LayerNorm)
    buckets, farthest = encoder.position_buckets, encoder.max_relative_positions
    if buckets > 0 and (buckets < 4 or buckets % 2 or buckets // 2 >= farthest - 1):
        raise Fallback(f"position_buckets is {buckets} beside max_relative_positions of {farthest}")


def check_direction(attention: nn.Module) -> None:
    if getattr(attention, "is_causal", False):
        raise Fallback(f"a {type(attention).__name__} is causal")


def check_attention_to_positions(attention: nn.Module) -> None:
    check_methods(attention, "disentangled_attention_bias")
    for name in ("pos_key_proj", "pos_query_proj"):
        if hasattr(attention, name):
            check_linear(getattr(attention, name))
    check_dropout(getattr(attention, "pos_dropout", None))


def check_convolution(module: nn.Module) -> None:
    """Checks DeBERTa-v2's ConvLayer, whose Conv1d is called on packed tokens."""
    conv = module.conv
    if not is_plain(conv, nn.Conv1d) or conv.kernel_size[0] % 2 == 0:
        raise Fallback(_instead_of(conv, nn.Conv1d))
    if module.conv_act not in ACTIVATIONS:
        raise Fallback(f"conv_act is {module.conv_act!r}")
    check_norm(module.LayerNorm)
    check_dropout(module.dropout)


def version() -> tuple[int, ...]:
    """The first two numbers of transformers' version."""
    import transformers

    return tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])


def check_own(module: nn.Module, but_of: tuple[str, ...] = ()) -> None:
    """Checks that the module's class has transformers' own forward and HELPERS, and that it has no hooks but those of
    the libraries `but_of`."""
    cls = type(module)
    if not _is_theirs(cls.forward):
        raise Fallback(f"a {cls.__name__} computes something of its own")
    check_methods(module, *_helpers_of(cls))
    if hooks(module, but_of):
        raise Fallback(f"a hook sits on a {type(module).__name__}, which would see packed tensors")


def _helpers_of(cls: type) -> tuple[str, ...]:
    """Those of HELPERS that the class has."""
    known = None if torch.compiler.is_compiling() else _helpers.get(cls)
    if known is None:
        known = tuple([name for name in HELPERS if hasattr(cls, name)])
        if not torch.compiler.is_compiling():
            _helpers[cls] = known
    return known


def check_methods(module: nn.Module, *names: str) -> None:
    """Checks that methods whose results fastbert computes itself are transformers' own, if the module has them."""
    for name in names:
        method, of_class = getattr(module, name, None), getattr(type(module), name, None)
        if method is None:
            continue
        # Dynamo compares __func__ rightly where it is read as an attribute, not by getattr with a default.
        bound = type(method) is MethodType
        of_it = method.__func__ is of_class and method.__self__ is module if bound else method is of_class
        if not of_it or not _is_theirs(of_class):
            raise Fallback(f"a {type(module).__name__} has a {name} of its own")


def check_attention_function(name: str) -> None:
    """Checks that the attention implementation of that name is transformers' own, or ours."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is not None and not _written_in(function).startswith(("transformers.", "fastbert.")):
        given = getattr(function, "__qualname__", type(function).__qualname__)
        raise Fallback(f"the attention implementation {name!r} is another function, {given}")


def _is_theirs(function: Any) -> bool:
    """Whether transformers wrote the function, and all that functools has wrapped around it. (Its `__module__` does not
    tell: a wrapper copies it, and Dynamo in torch 2.15 takes it from the globals.)"""
    remembers = not torch.compiler.is_compiling() and type(function) is FunctionType
    if remembers and function in _theirs:
        return True
    inner, writer = function, _written_in(function)
    while writer.startswith("transformers.") and getattr(inner, "__wrapped__", None) is not None:
        inner = inner.__wrapped__
        writer = _written_in(inner)
    found = writer.startswith("transformers.models.")
    if found and remembers:
        _theirs.add(function)
    return found


def _written_in(function: Any) -> str:
    """The module whose globals the function has; "" for other objects that can be called."""
    return getattr(function, "__globals__", {}).get("__name__", "")
