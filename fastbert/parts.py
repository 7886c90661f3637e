"""The parts of embeddings and of encoder layers, ours and transformers' alike; which of them are plain, so that their
parameters go into a fused op; and what a model keeps about them from one forward to the next.

`fastbert/families.py` says where each part is, `fastbert/layer.py` computes with them. Hooks, adapters and replacements
come and go between forwards, so every forward asks anew what is plain, or whether anything has changed (`Reading`).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastbert import backends, distances
from fastbert.families import LayerFacts
from fastbert.ops.encoder_layer import DOWN_NORM, OUT_NORM
from fastbert.prepared import PreparedLinear

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class AttentionParts:
    """The parts of a layer's attention.

    module: has the scaling of the scores, and its training mode decides whether attention applies dropout. With
    own_mode, the training mode of `dropout` decides.
    """

    module: nn.Module
    heads: int
    projections: tuple[nn.Module, ...]  # to queries, keys and values; or a single one that gives all three
    dropout: nn.Module
    own_mode: bool = False

    @property
    def training(self) -> bool:
        return self.dropout.training if self.own_mode else self.module.training

    @property
    def p(self) -> float:
        return getattr(self.dropout, "p", 0.0) if self.training else 0.0

    @property
    def scaling(self) -> float:
        module = self.module
        known = module.__dict__.get("scaling")
        if known is not None:
            return known
        if hasattr(module, "pos_att_type"):  # transformers' DeBERTa stores no scaling, nor does its MPNet (last line)
            return distances.disentangled_scaling(module.attention_head_size, module.pos_att_type)
        return module.attention_head_size**-0.5

    def check_dropout(self) -> None:
        """Raises TypeError for a module that does more than nn.Dropout: attention drops inside its kernel, which cannot
        call it."""
        dropout = self.dropout
        idle = not self.training or isinstance(dropout, nn.Identity)
        if not idle and not is_plain_dropout(dropout):
            kind = type(dropout).__name__
            raise TypeError(f"attention drops inside its kernel: expected an nn.Dropout without hooks, given a {kind}")


_AFTER_ATTENTION = (nn.Linear, nn.LayerNorm, nn.Linear, nn.Linear, nn.LayerNorm)
# Number of leaves (with one projection or with three) -> their types where they are plain.
LEAVES = {len(kinds): kinds for kinds in ((*[nn.Linear] * n, *_AFTER_ATTENTION) for n in (1, 3))}


@dataclass(slots=True, eq=False)
class LayerParts:
    """The parts of one layer, found by `fastbert.families.LayerFacts`. None: the family has no such part."""

    attention: AttentionParts
    out: nn.Module
    out_dropout: nn.Module | None
    out_norm: nn.Module
    up: nn.Module
    activation: nn.Module | str
    down: nn.Module
    down_dropout: nn.Module | None
    down_norm: nn.Module
    leaves: tuple[nn.Module, ...]  # the parts with parameters, in the order of `ops.encoder_layer`
    containers: tuple[nn.Module, ...]  # the modules between the layer and its parts, without the attention module
    # Cached results, valid as long as these parts are; None: not computed yet.
    plain: bool | None = None  # whether all leaves are plain
    prepared: tuple[list[Tensor], list[Tensor]] | None = None  # the result of `prepared_parameters`
    dropping: bool | None = None  # the result of `drops`
    lasts: bool = False  # whether the next forward may use this same object

    @classmethod
    def of(cls, layer: nn.Module, facts: LayerFacts) -> "LayerParts":
        """Finds the parts of a layer. Raises AttributeError if one is not in its place."""
        found = facts.find(layer)
        parts = [None if place is None else found[place] for place in facts.places]
        after = 2 + len(facts.projections)
        leaves, containers = ([found[place] for place in places] for places in (facts.leaves, facts.containers))
        attention = AttentionParts(*parts[:2], tuple(parts[2:after]), parts[after], facts.own_mode)
        return cls(attention, *parts[after + 1 :], tuple(leaves), tuple(containers))

    def kinds(self) -> tuple[type[nn.Module], ...]:
        """The types that `leaves` have where they are plain."""
        return LEAVES[len(self.leaves)]

    def drops(self) -> bool:
        if self.dropping is None:
            self.dropping = self.drops_now()
        return self.dropping

    def drops_now(self) -> bool:
        before = self.attention.p > 0 or position_dropout(self.attention.module) > 0
        return before or probability(self.out_dropout) > 0 or probability(self.down_dropout) > 0


@dataclass(slots=True, eq=False)
class EmbeddingParts:
    """The parts of an embeddings module, ours or transformers': word_embeddings, position_embeddings and
    token_type_embeddings (None where the model has no such table; the last may be missing), LayerNorm and dropout.

    plain_words: whether the word embeddings are plain. plain: whether all other parts are.
    """

    words: nn.Module
    positions: nn.Module | None
    types: nn.Module | None
    norm: nn.Module
    dropout: nn.Module
    plain_words: bool
    plain: bool
    lasts: bool = False  # as in LayerParts

    @classmethod
    def of(cls, module: nn.Module) -> "EmbeddingParts":
        words, positions = module.word_embeddings, module.position_embeddings
        types = getattr(module, "token_type_embeddings", None)
        others = module.LayerNorm, module.dropout
        plain = is_plain_embedding(positions) and is_plain_embedding(types) and is_plain_norm(others[0])
        plain = plain and is_plain_dropout(others[1]) and (types is None or types.padding_idx is None)
        return cls(words, positions, types, *others, is_plain_embedding(words), plain)

    def drops(self) -> bool:
        return probability(self.dropout) > 0


# ---- which modules are plain, so that their parameters are read and they are not called

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ORDINARY = (nn.Parameter, Tensor, type(None))


def hooks(module: nn.Module, but_of: tuple[str, ...] = ()) -> bool:
    """Whether the module has hooks, apart from those of the named libraries."""
    kinds = [getattr(module, name) for name in _HOOKS]
    if not any(kinds):
        return False
    owners = ((getattr(hook, "__module__", None) or "") for kind in kinds for hook in kind.values())
    return not but_of or not all(owner.startswith(but_of) for owner in owners)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a forward was set on the module itself, in place of its class's."""
    # Dynamo guards what a module's attribute is, but not which names are missing in its __dict__.
    bound = not torch.compiler.is_compiling() or type(module.forward) is MethodType
    return not bound or "forward" in module.__dict__


def unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module's forward is that of `kind`. Hooks are not looked at."""
    return type(module).forward is kind.forward and not has_own_forward(module)


def ordinary(weight: Tensor | None) -> bool:
    """Whether an op can read the weight: it is not quantised or the like. FSDP2's weights are gathered once their layer
    runs, so they count as ordinary.

    None: a parametrization computes the weight when it is read.
    """
    return type(weight) in _ORDINARY or is_distributed(weight)


def is_distributed(value: Any) -> bool:
    """Whether torch.distributed made its class: of modules that FSDP2 wraps, and of tensors that it shards."""
    return type(value).__module__.startswith("torch.distributed.")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module is `unchanged` and has no hooks. Written for speed, as it is asked of every leaf of every
    layer."""
    cls, own = type(module), module.__dict__
    if (cls is not kind and cls.forward is not kind.forward) or has_own_forward(module):
        return False
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooked


def is_prepared(module: nn.Module) -> bool:
    """Whether the module is a dense layer that `fastbert.prepare` made, without hooks."""
    return isinstance(module, PreparedLinear) and is_plain(module, type(module))


def is_plain_linear(module: nn.Module) -> bool:
    return is_plain(module, nn.Linear) and module.bias is not None and ordinary(module._parameters.get("weight"))


def is_plain_norm(module: nn.Module) -> bool:
    return is_plain(module, nn.LayerNorm) and module.bias is not None and module.weight.dim() == 1


def is_plain_dropout(module: nn.Module | None) -> bool:
    return module is None or is_plain(module, nn.Dropout)


def is_plain_embedding(module: nn.Module | None) -> bool:
    if module is None:
        return True
    if not is_plain(module, nn.Embedding) or not ordinary(module._parameters.get("weight")):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


# ---- which of them drop now


def probability(dropout: nn.Module | None) -> float:
    return getattr(dropout, "p", 0.0) if dropout is not None and dropout.training else 0.0


def position_dropout(attention: nn.Module) -> float:
    """The probability with which DeBERTa's attention drops elements of its relative embeddings."""
    return probability(attention._modules.get("pos_dropout"))


def may_drop(module: nn.Module) -> bool:
    """Whether a forward now may apply dropout inside the module, which is one of ours or a replacement of it."""
    cls = type(module)
    if "drops" in vars(cls) or "drops" in vars(_definer_of_forward(cls)):
        return module.drops()
    parts = list(module.modules())
    return any([part.training for part in parts]) and any([isinstance(x, nn.Dropout) and x.p > 0 for x in parts])


def _definer_of_forward(cls: type[nn.Module]) -> type:
    """The class that defines the forward of cls. An inherited `drops` may not fit a subclass with another forward."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


# ---- the parameters of a layer

_NO_SCALE = torch.empty(0)  # the scale of a dense layer that is not prepared for int8


def plain_parameters(parts: LayerParts) -> list[Tensor] | None:
    """Weights and biases in the order of `ops.encoder_layer`; None unless all of their modules are plain, and so are
    the dropouts before the residual sums."""
    if not (is_plain_dropout(parts.out_dropout) and is_plain_dropout(parts.down_dropout)):
        return None
    if parts.plain is None:
        parts.plain = all(map(is_plain, parts.leaves, parts.kinds()))
    found = []
    for module in parts.leaves if parts.plain else ():
        own = module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or bias is None or not ordinary(weight):
            return None
        found += weight, bias
    return found if found and _over_rows(found) else None


def prepared_parameters(parts: LayerParts) -> tuple[list[Tensor], list[Tensor]] | None:
    """The parameters and scales for `ops.packed_layer`, read once; None where no dense layer is prepared, or a part is
    neither prepared nor plain."""
    if parts.prepared is None:
        parts.prepared = read_prepared(parts)
    return parts.prepared


def read_prepared(parts: LayerParts, before: int = 0) -> tuple[list[Tensor], list[Tensor]] | None:
    """`prepared_parameters` without the cache, and without the first `before` leaves."""
    leaves, kinds = parts.leaves[before:], parts.kinds()[before:]
    if not any([type(module) is PreparedLinear for module in leaves]):
        return None
    found, scales = [], []
    for module, kind in zip(leaves, kinds, strict=True):
        prepared = is_plain(module, PreparedLinear)
        tensors = module.__dict__ if prepared else module._parameters
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or bias is None or not (prepared or (is_plain(module, kind) and ordinary(weight))):
            return None
        found += weight, bias
        if kind is nn.Linear:
            scales.append(_NO_SCALE if (scale := module.__dict__.get("scale")) is None else scale)
    return (found, scales) if _over_rows(found) else None


def _over_rows(parameters: Sequence[Tensor]) -> bool:
    """Whether both LayerNorms have one-dimensional weights. parameters: a layer's, in the order of
    `ops.encoder_layer`."""
    return parameters[OUT_NORM].dim() == parameters[DOWN_NORM].dim() == 1


# ---- what a model keeps about its modules

_hooks_of = itemgetter(*_HOOKS)  # from a module's __dict__
_TABLES = ("_parameters", "_modules")
# Module attributes that neither our forwards read nor `is_plain` and its like.
_UNREAD = (frozenset(vars(nn.Module())) - {"training", *_TABLES}) | frozenset(
    "in_features out_features num_embeddings embedding_dim normalized_shape elementwise_affine inplace kept".split()
)
_KNOWN = ("torch.nn.", "transformers.", "fastbert.")  # no class of these computes an attribute that is read here


class Reading:
    """The cached parts of a module, valid as long as nothing below it changes: no hook is added or removed, no module
    or parameter replaced, no attribute set. Values of tensors may change.

    Every forward checks this for every layer: the check takes 3.5 µs, reading the layer again would take 25 µs.
    """

    def __init__(self, module: nn.Module, parts: Any) -> None:
        self.parts = parts
        self._module = weakref.ref(module)  # weak: the module may hold this object
        modules = list(module.modules())[1:]
        self._own = [vars(each) for each in modules]
        self._children = module._modules  # an entry for it would hold vars(module), which may hold this object
        tables = [self._children, *(table[name] for table in self._own for name in _TABLES)]
        entries = [(table, name) for table in tables for name in table]
        entries += [(table, name) for table in self._own for name in {"forward": 0, **table} if name not in _UNREAD]
        entries += [(table, name) for table in self._own for name in _HOOKS]
        owners, names = zip(*entries, strict=True)
        values = tuple(map(dict.get, owners, names))
        self._hooks = self._hooks_now()
        tables = *self._own, *tables, *chain.from_iterable(map(_hooks_of, self._own))  # whose sizes must not change
        typed = *modules, *(value for value in values if isinstance(value, Tensor))
        self._before = tables, tuple(map(len, tables)), typed, tuple(map(type, typed)), owners, names, values
        self._classes = list(dict.fromkeys(map(type, modules)))  # their forward may be replaced
        self._forwards = [cls.forward for cls in self._classes]

    @staticmethod
    def lasts(module: nn.Module) -> bool:
        """Whether every change can be noticed: not in scripted modules, nor in classes that may compute attributes."""
        modules = list(module.modules())
        tables = [vars(each).get(name) for each in modules for name in _TABLES]
        return all([isinstance(table, dict) for table in tables]) and not any(map(_may_compute, map(type, modules)))

    def _hooks_now(self) -> list[Callable]:
        return list(chain.from_iterable(map(dict.values, chain.from_iterable(map(_hooks_of, self._own)))))

    def holds(self, module: nn.Module) -> bool:
        """Whether the cached parts are still those of this module."""
        if module is not self._module() or module._modules is not self._children:
            return False
        if not _as_before(*self._before):
            return False
        if self._hooks and self._hooks_now() != self._hooks:
            return False
        return [cls.forward for cls in self._classes] == self._forwards


def as_before(
    tables: Sequence[dict],
    sizes: Sequence[int],
    typed: Sequence[Any],
    types: Sequence[type],
    owners: Sequence[dict],
    names: Sequence[str],
    values: Sequence[Any],
) -> bool:
    """Whether `tables` have these sizes, `typed` these types, and `owners` these values under `names` (None: no entry).

    For one layer that is 270 look-ups, which take 8 µs here and 3 µs in C++.
    """
    if tuple(map(len, tables)) != sizes or tuple(map(type, typed)) != types:
        return False
    return all(map(is_, map(dict.get, owners, names), values))


_as_before = as_before if backends.EXTENSION is None else backends.EXTENSION.as_before


class Kept:
    """What a model's forwards found out about its modules, for the next forward. It is empty in a copy or a pickle of
    the model, because it describes the original. A module is kept from the second forward with the same parameters on,
    so parameters that exist for one call only (as with torch.func) are never kept. Replaced parameters stay in memory
    until the next forward."""

    def __init__(self) -> None:
        self._known: list[Reading | list[weakref.ref]] = []  # of each module; a list: its parameters last time
        self.joined: Any = None  # what `fastbert.layer.encoder_layers` found out about all layers together

    def clear(self) -> None:
        """Forgets everything: for a forward that calls the layers as modules."""
        if not torch.compiler.is_compiling():
            self._known, self.joined = [], None

    def part(self) -> None:
        """Forgets the joined layers: for a forward that runs the layers one by one."""
        if not torch.compiler.is_compiling():
            self.joined = None

    def read(self, modules: Sequence[nn.Module], read: Callable[[nn.Module], T]) -> list[T]:
        """The parts of each module: read(module), or the last forward's where they are still valid."""
        if torch.compiler.is_compiling():
            return [read(module) for module in modules]
        known, self._known = [*self._known, *[[]] * len(modules)], []
        found = [_look(module, read, before) for module, before in zip(modules, known, strict=False)]
        self._known = [after for _, after in found]
        return [parts for parts, _ in found]

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Kept, ()


def _look(
    module: nn.Module, read: Callable[[nn.Module], T], before: Reading | list[weakref.ref]
) -> tuple[T, Reading | list[weakref.ref]]:
    """The parts of a module, and what `Kept` remembers of it until the next forward."""
    if isinstance(before, Reading):
        if before.holds(module):
            return before.parts, before
        before = []
    parts, now = read(module), list(map(weakref.ref, module.parameters()))
    same = len(before) == len(now) and all([a() is b() for a, b in zip(before, now, strict=True)])  # == reads values
    if parts is None or not (same and Reading.lasts(module)):
        return parts, now
    parts.lasts = True
    return parts, Reading(module, parts)


def _may_compute(cls: type[nn.Module]) -> bool:
    """Whether this is someone else's subclass of a known class: it may compute what is a plain attribute there."""
    kinds = [kind for kind in cls.__mro__ if kind is not nn.Module and kind.__module__.startswith(_KNOWN)]
    return bool(kinds) and kinds[0] is not cls
