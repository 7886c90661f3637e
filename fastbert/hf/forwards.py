"""The forwards that replace those of an accelerated `transformers` model.

transformers' own code keeps running: the base model calls its embeddings, its encoder and its pooler, the encoder calls
`layer(...)`. The replacements change the tensors that pass between them. The base model's packs the batch, once; the
embeddings' and the layers' compute on packed tokens, (1, T, C) between modules; the encoder's unpacks the last hidden
state, once. A forward that cannot be packed raises `Fallback` before anything is computed, and the original runs.

A replacement is an object in its module's `__dict__` that holds the module, so it is copied and pickled with it. (In a
copied model, a closure would still compute with the original's weights; torch.load does not restore a bound method.)
Its only tensors are in its `Kept`, which is empty in a copy.
"""

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastbert import backends, layer, padding, random
from fastbert.families import FAMILIES, Family
from fastbert.hf import supported
from fastbert.hf.supported import Fallback
from fastbert.labels import IGNORED
from fastbert.ops.checks import values_visible
from fastbert.parts import (
    EmbeddingParts,
    Kept,
    LayerParts,
    hooks,
    is_distributed,
    plain_parameters,
    prepared_parameters,
    probability,
)
from fastbert.warn import warn

ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "fastbert")
TENSORS = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
SETTINGS = ("use_cache", "return_dict", "output_hidden_states", "output_attentions", "num_items_in_batch")
# Keywords that count although no model's forward names them: transformers' attention functions read them, or (the last)
# a decorator of forward gives them another name.
READ = frozenset(
    "dropout scaling softmax_scale is_causal position_bias sliding_window softcap s_aux cache block_table k_cache "
    "v_cache cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k query_length position_ids target_dtype "
    "deterministic use_top_left_mask attn_implementation kernel_options past_key_values".split()
)

MASKED_LM = ("ForMaskedLM", "BertForPreTraining", "AlbertForPreTraining")
# Heads whose loss is computed over all positions, padding included.
ALL_POSITIONS = (*MASKED_LM, "ForQuestionAnswering", "ForTokenClassification")
# Heads that treat every token alike, over base models without a pooler. Other modules around one may read the first.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ElectraForPreTraining")


class Report:
    """What `accelerate` did to a model, and what its forwards have done since.

    replaced: what was replaced, by module name. not_replaced: the reason, by module name. packed: the number of
    forwards on packed tokens. fallbacks: the number of forwards that ran the original computation, by reason. Compiled
    forwards are not counted, because torch.compile would recompile for every count. skip_logits: as given to
    `accelerate`. active: whether any of its models is still accelerated.
    """

    def __init__(self) -> None:
        self.skip_logits = False
        self.replaced: dict[str, str] = {}
        self.not_replaced: dict[str, str] = {}
        self.packed = 0
        self.fallbacks: Counter[str] = Counter()
        self.accelerations: list[Acceleration] = []

    @property
    def active(self) -> bool:
        return any([each.active for each in self.accelerations])

    def ran_packed(self) -> None:
        if not torch.compiler.is_compiling():
            self.packed += 1

    def fell_back(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            if not _is_exporting():
                _warn_of_compiled(reason)
            return
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            message = f"fastbert: forwards run transformers' own computation where {reason} (said once)"
            warn(message, RuntimeWarning)

    def __str__(self) -> str:
        lines = [f"replaced: {name or '(the model)'}: {what}" for name, what in self.replaced.items()]
        lines += [f"not replaced: {name or '(the model)'}: {reason}" for name, reason in self.not_replaced.items()]
        lines += [f"forwards packed: {self.packed}, fallen back: {self.fallbacks.total()}"]
        lines += [f"  {count} where {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)


def _warn_of_compiled(reason: str) -> None:
    warn(f"fastbert: what is compiled is transformers' own computation, because {reason}", RuntimeWarning)


# torch.compiler.assume_constant_result sets this, but imports Dynamo, for a second: the call runs where it is traced.
_warn_of_compiled._dynamo_marked_constant = True


class Acceleration:
    """What the replacements of one base model share.

    key: the model's in FAMILIES. active: whether its replacements run. They ask this, because `restore` cannot remove a
    replacement that somebody has wrapped.
    """

    def __init__(self, key: str, report: Report) -> None:
        self.key, self.report, self.active = key, report, True


class Call:
    """One packed forward: where its tokens are, its dropout key, its layers, and how they exchange tensors.

    Layers get it as the keyword `fastbert`, which transformers' code passes down; the embeddings and the encoders of
    DeBERTa and MPNet, which get no keywords, find it in `_active`.
    """

    def __init__(
        self,
        packing: padding.Packing,
        key: Tensor | None,
        layers: list[nn.Module],
        parts: dict[int, EmbeddingParts | LayerParts],
        padded: bool,
        attentions: bool,
        watched: bool,
        kept: Kept,
    ) -> None:
        """parts: by id() of the embeddings or the layer. kept: the base model's. padded: layers exchange (B, S, C),
        because hooks on layers or output_hidden_states read it. watched: something reads the tensors between layers, or
        has to be called there."""
        self.packing, self.key, self.parts, self.padded, self.attentions = packing, key, parts, padded, attentions
        self.layers, self.watched, self.kept = layers, watched, kept
        self.encoder_layer = backends.as_forced_here(layer.encoder_layer)  # checkpointing may call it in another thread
        self.ahead: Tensor | None = None  # (1, T, C), the last layer's output, if the first layer has computed all
        self.distances: layer.Distances | None = None
        self.weights: dict[int, Tensor] = {}  # attention weights by turn, if no hook of transformers records them
        self._turns: dict[int, list[int]] = {}
        for turn, each in enumerate(layers):
            self._turns.setdefault(id(each), []).append(turn)
        self._runs: Counter[int] = Counter()

    def turn(self, module: nn.Module) -> int:
        """Which of the forward's layers this run is: for a shared layer the next one, for any other always the same.

        So a layer that gradient checkpointing recomputes drops the same elements again.
        """
        turns, run = self._turns[id(module)], self._runs[id(module)]
        self._runs[id(module)] += 1
        return turns[run % len(turns)]

    def look_ahead(self, hidden: Tensor) -> None:
        """Computes all layers at once, if that is possible: then every layer just returns their output."""
        if self.watched:
            self.kept.part()
        else:
            parts = [self.parts[id(each)] for each in self.layers]
            given = hidden.squeeze(0), self.packing, self.key, self.kept, self.distances
            y = layer.encoder_layers(parts, *given)
            self.ahead = None if y is None else y[None]

    def pack(self, x: Tensor) -> Tensor:
        """(B, S, ...) -> (1, T, ...)."""
        return self.packing.pack(x)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, T, ...) -> (B, S, ...), zeros at padding."""
        return self.packing.unpack(x[0])


class _Active(threading.local):
    def __init__(self) -> None:  # runs in each thread: torch.compile fails on attributes that are added later
        self.call: Call | None = None
        self.obstacle: str | None = None  # the reason why the head cannot take zeros at padding
        self.rows: Tensor | None = None  # which rows of the flattened batch the head reads; None: all


_active = _Active()


@contextmanager
def _calling(call: Call | None) -> Iterator[None]:
    before, _active.call = _active.call, call
    try:
        yield
    finally:
        _active.call = before


# ---- the replacements

# Attributes of a function that torch.export, typing.get_type_hints and debuggers read.
OF_A_FUNCTION = frozenset(
    "__annotations__ __closure__ __code__ __defaults__ __globals__ __kwdefaults__ __name__ __qualname__".split()
)


class Replacement:
    """Is called in place of `module.forward`, and looks like that function to `inspect` and the like.

    Subclasses define `run`, which takes the arguments of the original. Inside the base model, without a `Call`, it runs
    the original.
    """

    def __init__(self, module: nn.Module, shared: Acceleration) -> None:
        self.module, self.shared, self.report = module, shared, shared.report
        own = vars(module).get("forward")
        # transformers 5.0 leaves the class's forward as a bound method in modules whose outputs it has recorded
        self.before = None if getattr(own, "__func__", None) is type(module).forward else own
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self.names = tuple(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
        self.kept = Kept()
        self.__doc__, self.__module__ = self.__wrapped__.__doc__, self.__wrapped__.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # bound to it as a method, as Accelerator.unwrap_model does
            args = args[1:]
        return _without_views(self.module, self.run(*args, **kwargs))

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable:
        """The original forward, under the name by which inspect and functools look for it."""
        return self.before or MethodType(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        if name in OF_A_FUNCTION and "module" in vars(self):
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.shared.key]

    @property
    def active(self) -> bool:
        return self.shared.active

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.names, args, strict=False)) | kwargs

    def refuses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there are too many arguments, or one is given twice: the original then raises TypeError."""
        return len(args) > len(self.names) or any([name in kwargs for name in self.names[: len(args)]])

    def install(self) -> None:
        self.module.forward = self

    def remove(self) -> None:
        """Puts the original back. If the replacement has been wrapped since, it stays there and runs the original."""
        if _unbound(vars(self.module).get("forward")) is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before


def of(module: nn.Module) -> Replacement | None:
    """The replacement of a module, also if it has been wrapped with functools.wraps; None if there is none."""
    forward = _unbound(vars(module).get("forward"))
    while forward is not None and not isinstance(forward, Replacement):
        forward = _unbound(getattr(forward, "__wrapped__", None))
    return forward


def _unbound(forward: Any) -> Any:
    return forward.__func__ if isinstance(forward, MethodType) else forward


def _without_views(module: nn.Module, output: Any) -> Any:
    """The output of a module; where FSDP2 wraps it, with copies of tensors that are views: FSDP2 has hooks on outputs,
    which get lost if a view is changed in place, and warns of views."""
    if torch.compiler.is_compiling() or not is_distributed(module):
        return output
    viewed = lambda x: isinstance(x, Tensor) and x.requires_grad and x._base is not None  # noqa: E731
    return tree_map(lambda x: x.clone() if viewed(x) else x, output)


def _checked(module: nn.Module) -> Replacement:
    replacement = of(module)
    if replacement is None:
        raise Fallback(f"a {type(module).__name__} was put into the model after fastbert.accelerate")
    if replacement.module is not module:
        raise Fallback(f"a {type(module).__name__} has the forward of another one")
    if replacement.before is not None:
        raise Fallback(f"a {type(module).__name__} had a forward of its own before fastbert.accelerate")
    return replacement


def _check_uncalled(module: nn.Module, but_of: tuple[str, ...] = ()) -> None:
    """Checks a module that is not called, because fastbert computes what it does: nothing may be around its forward."""
    supported.check_own(module, but_of)
    forward = _unbound(module.forward)
    if not (isinstance(forward, Replacement) or forward is type(module).forward):
        raise Fallback(f"a {type(module).__name__} has a forward of its own")


def _is_exporting() -> bool:
    # In torch 2.11, is_exporting() is true wherever torch.compile traces; the flag that it reads later is right there.
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


class ModelForward(Replacement):
    """The base model: decides whether to pack, packs, and runs the original on one sequence of all T tokens."""

    def __init__(self, module: nn.Module, shared: Acceleration, first_token: bool) -> None:
        super().__init__(module, shared)
        self.first_token = first_token  # whether something around the model may read position 0 by itself
        # transformers passes a 4-D mask on without reading it; its first MPNets add a dimension to one of three.
        self.mask_dims = 3 if self.family.relative == "bias" and supported.version() < (5, 9) else 4

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or self.refuses(args, kwargs):
            return self.original(*args, **kwargs)
        inputs = self.named(args, kwargs)
        try:
            call, packed = self._prepare(inputs)
        except Fallback as reason:
            self._forget()
            self.report.fell_back(reason.args[0])  # torch.compile in torch 2.11 cannot trace str() of an exception
            with _calling(None):
                return _selected(self.original(*args, **kwargs))
        with _calling(call):
            output = self.original(**packed, fastbert=call)
        self.report.ran_packed()
        return _selected(output)

    def _forget(self) -> None:
        """Frees what packed forwards have kept: the originals do not need it."""
        if not torch.compiler.is_compiling():
            for each in filter(None, map(of, self.module.modules())):
                each.kept.clear()

    def _prepare(self, inputs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """The call, and the arguments for the original. Raises Fallback."""
        self._check_use(inputs)
        shape, device = self._check_tensors(inputs)
        layers = self.family.layers_in_order(self.module)
        parts, drops = self._check_modules(layers)
        packing = self._plan(inputs.get("attention_mask"), shape, device)
        attentions, padded = (bool(self._wants(f"output_{kind}", inputs)) for kind in ("attentions", "hidden_states"))
        padded = padded or any([hooks(each, supported.FRAMEWORKS) for each in layers])
        watched = padded or attentions or self._has_calls_between(layers)
        key = random.new_key(device) if drops else None
        call = Call(packing, key, layers, parts, padded, attentions, watched, self.kept)
        tensors = {name: inputs.get(name) for name in TENSORS if name != "token_type_ids" or self.family.token_types}
        tensors["position_ids"] = self._positions(inputs, shape)
        if tensors.get("token_type_ids") is not None:
            tensors["token_type_ids"] = tensors["token_type_ids"].expand(shape)  # may be one row, like position_ids
        packed = {name: None if x is None else call.pack(x) for name, x in tensors.items()}
        if packed["position_ids"] is None:
            packed["position_ids"] = packing.positions()[None]
        unread = packing.cu_seqlens.expand(*[1] * (self.mask_dims - 1), -1)  # the real mask is in the call's packing
        return call, inputs | packed | {"attention_mask": unread}

    def _has_calls_between(self, layers: list[nn.Module]) -> bool:
        """Whether something needs each layer to be called: hooks, a forward that has been wrapped or compiled, gradient
        checkpointing, or a DeBERTa, whose layers project distances and whose convolution follows the first. The same
        holds for the groups of shared layers."""
        if self.family.relative == "disentangled":
            return True
        containers = self.family.containers(self.module)
        groups = containers[2:]  # after the embeddings and the encoder, whose forwards are replaced
        if any([hooks(each, supported.CAPTURING) for each in (*layers, *containers)]):
            return True
        if not all([isinstance(vars(each).get("forward"), Replacement) for each in (*layers, *containers[:2])]):
            return True
        if any(["forward" in vars(each) for each in groups]):
            return True
        return any([_does_more(each) for each in (*layers, *groups)])

    def _check_use(self, inputs: dict[str, Any]) -> None:
        config = self.module.config
        if torch.jit.is_tracing() or _is_exporting():
            raise Fallback("the model is traced or exported")
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise Fallback("torch.func transforms it")
        if getattr(config, "is_decoder", False) or getattr(config, "is_causal", None):
            raise Fallback("the model is a decoder")
        if getattr(config, "position_embedding_type", "absolute") != "absolute":
            raise Fallback(f"position_embedding_type is {config.position_embedding_type!r}")
        if getattr(self.module, "z_steps", 0) > 1:
            raise Fallback("the last layer runs several times (z_steps)")
        if config._attn_implementation not in ATTENTIONS:
            raise Fallback(f"the attention implementation is {config._attn_implementation!r}")
        supported.check_attention_function(config._attn_implementation)
        for name, value in inputs.items():
            if value is not None and not self._may_have(name):
                raise Fallback(f"{name} is given")
        if torch.nn.modules.module._has_any_global_hook():
            raise Fallback("hooks are registered for all modules")

    def _may_have(self, name: str) -> bool:
        """Whether packed forwards support this argument, or transformers ignores it, so that it can be passed on."""
        if name in TENSORS or name in SETTINGS or name == "attention_mask":
            return True
        return name not in self.names and name not in READ

    def _check_tensors(self, inputs: dict[str, Any]) -> tuple[torch.Size, torch.device]:
        """(B, S) and the device. Raises Fallback for wrong tensors, because the original reports the error best."""
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given = ids if embeds is None else embeds
        if (ids is None) == (embeds is None) or not isinstance(given, Tensor):
            raise Fallback("input_ids and inputs_embeds are not exactly one tensor")
        shape = given.shape[:2]
        if given.dim() != (2 if embeds is None else 3):
            raise Fallback(f"the input has {given.dim()} dimensions")
        for name in ("token_type_ids", "position_ids"):
            value = inputs.get(name)
            if value is not None and tuple(value.shape) not in (tuple(shape), (1, shape[1])):
                raise Fallback(f"{name} is not of the input's shape")
        table = self.module.embeddings.position_embeddings
        first = self.module.embeddings.padding_idx + 1 if self.family.padding_positions else 0
        if table is not None and inputs.get("position_ids") is None and first + shape[1] > table.weight.shape[0]:
            raise Fallback("sequences are longer than the position embeddings")
        return shape, given.device

    def _check_modules(self, layers: list[nn.Module]) -> tuple[dict[int, EmbeddingParts | LayerParts], bool]:
        """The parts of the embeddings and of each layer, and whether any of them applies dropout. Raises Fallback."""
        supported.check_methods(self.module, "_create_attention_masks")
        for module in self.family.containers(self.module):
            supported.check_own(module, supported.FRAMEWORKS)
        projection = self.family.projected(self.module)
        if projection is not None:
            supported.check_linear(projection)
        encoder_drops = _checked(getattr(self.module, self.family.encoder)).check()
        parts = {id(each): _checked(each).check() for each in (self.module.embeddings, *dict.fromkeys(layers))}
        return parts, encoder_drops or any([part.drops() for part in parts.values()])

    def _plan(self, mask: Any, shape: torch.Size, device: torch.device) -> padding.Packing:
        """Raises ValueError for a mask that does not fit the batch, Fallback for one of another kind."""
        if isinstance(mask, Tensor) and mask.dim() == 2 and tuple(mask.shape) != tuple(shape):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; expected that of the input, {tuple(shape)}"
            )
        if shape[1] == 0:
            raise Fallback("sequences are of length 0")
        wide = isinstance(mask, Tensor) and mask.dim() == 4
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() in (2, 4)):
            raise Fallback("attention_mask is no tensor of two or four dimensions")
        if wide and not (mask.is_floating_point() or (mask.dtype == torch.bool and self._attention != "eager")):
            raise Fallback(f"attention_mask is a 4-D {mask.dtype}")  # which eager attention adds to the scores
        if wide and self.family.relative == "disentangled":
            raise Fallback("attention_mask is 4-D, and DeBERTa reads its numbers as true or false")
        if mask is not None and mask.device != device:
            raise Fallback("attention_mask is on another device")
        if mask is not None and self.family.relative == "disentangled" and not _of_0_and_1(mask):
            raise Fallback("attention_mask has other numbers than 0 and 1, by which DeBERTa multiplies its embeddings")
        try:
            packing = padding.plan(mask, *shape, device, in_runs=self.family.relative is not None)
        except padding.Interrupted:
            raise Fallback("padding is between visible tokens, whose distances count columns") from None
        except ValueError:
            raise Fallback("attention_mask is no key-padding mask") from None
        if _active.obstacle is not None and packing.indices is not None:
            raise Fallback(_active.obstacle)
        first_token = self.first_token or getattr(self.module, "pooler", None) is not None
        if first_token and not packing.starts_visible:
            raise Fallback("position 0 is masked, which a pooler or a head may read")
        return packing

    @property
    def _attention(self) -> str:
        return self.module.config._attn_implementation

    def _positions(self, inputs: dict[str, Any], shape: torch.Size) -> Tensor | None:
        """Position ids, (B, S); None means the column of each token."""
        given, ids = inputs.get("position_ids"), inputs.get("input_ids")
        if given is not None or not self.family.padding_positions:
            return None if given is None else given.expand(shape)
        before = self.module.embeddings.padding_idx
        if ids is None:
            return torch.arange(before + 1, before + 1 + shape[1], device=inputs["inputs_embeds"].device).expand(shape)
        token = ids.ne(before).long()
        return token.cumsum(1) * token + before

    def _wants(self, name: str, inputs: dict[str, Any]) -> Any:
        """Whether to record an output, decided as transformers does: by the argument, or else by the config.

        In models whose encoders record themselves (DeBERTa, MPNet), None counts as not given.
        """
        given, default = inputs.get(name), getattr(self.module.config, name, False)
        unanswered = given is None and (name not in inputs or self.family.relative is not None)
        return default if unanswered else given


def _selected(output: Any) -> Any:
    """A base model's output, its last hidden state reduced to the rows that the head reads, (1, L, C)."""
    if _active.rows is None:
        return output
    chosen = output[0].flatten(0, 1).index_select(0, _active.rows)[None]
    if isinstance(output, tuple):
        return (chosen, *output[1:])
    output.last_hidden_state = chosen
    return output


def _of_0_and_1(mask: Tensor) -> bool:
    """Whether a mask has no other numbers, as far as they may be read."""
    return mask.dtype == torch.bool or not values_visible(mask) or bool(((mask == 0) | (mask == 1)).all())


class HeadForward(Replacement):
    """A head whose loss is computed over all positions.

    Labels of masked tokens count as -100, because no prediction is made there. A question-answering loss is a softmax
    over the positions, in which padding's logits count too: only the original computes these. With `skip_logits`, a
    masked-LM head in training with labels reads the labelled rows alone, and its output omits their logits.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or self.refuses(args, kwargs):
            return self.original(*args, **kwargs)
        inputs = self.named(args, kwargs)
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if isinstance(mask, Tensor) and isinstance(labels, Tensor) and labels.dim() == 2:
            inputs["labels"] = _of_visible_tokens(labels, mask)
        skips = self._skips_logits(inputs)
        before = _active.obstacle, _active.rows
        if inputs.get("start_positions") is not None:
            _active.obstacle = "a question-answering loss counts padding"
        if skips and not torch.compiler.is_compiling():  # in compiled code, sizes cannot depend on labels
            labels = inputs["labels"].flatten()
            _active.rows = (labels != IGNORED).nonzero().squeeze(-1)
            inputs["labels"] = labels[_active.rows][None]
        try:
            output = self.original(**inputs)
        finally:
            _active.obstacle, _active.rows = before
        return _without_logits(output) if skips else output

    def _skips_logits(self, inputs: dict[str, Any]) -> bool:
        """Whether to skip them. Labels of another shape than the batch's are left for the original to refuse."""
        if not (self.report.skip_logits and self.module.training and type(self.module).__name__.endswith(MASKED_LM)):
            return False
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        batch = inputs.get("inputs_embeds") if ids is None else ids
        return isinstance(labels, Tensor) and isinstance(batch, Tensor) and labels.shape == batch.shape[:2]


def _of_visible_tokens(labels: Tensor, mask: Tensor) -> Tensor:
    """Labels (B, S), -100 at masked tokens. A mask that is no key-padding mask, which only the original takes, masks
    none."""
    if mask.shape == labels.shape:
        return labels.masked_fill(mask == 0, IGNORED)
    if mask.dim() != 4 or not (mask.is_floating_point() or mask.dtype == torch.bool):
        return labels
    try:
        visible, only_keys = padding.visible_keys(mask, *labels.shape, labels.device)
    except ValueError:
        return labels
    known = only_keys is None or (not torch.compiler.is_compiling() and bool(only_keys))
    return labels.masked_fill(~visible, IGNORED) if known else labels


def _without_logits(output: Any) -> Any:
    """The output of a masked-LM head with a loss, without the logits after it."""
    if isinstance(output, tuple):
        return (*output[:1], *output[2:])
    name = "prediction_logits" if "prediction_logits" in output else "logits"
    return type(output)(**{key: value for key, value in output.items() if key != name})


class EmbeddingsForward(Replacement):
    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _active.call
        if call is None:
            return self.original(*args, **kwargs)
        given = self.named(args, kwargs)
        if "input_embeds" in given:  # its name in transformers 5.0's DistilBERT
            given["inputs_embeds"] = given.pop("input_embeds")
        tensors = [None if (x := given.get(name)) is None else x[0] for name in TENSORS]
        inside = self.module.embed_proj if self.family.projects_sum else None
        return layer.embed(call.parts[id(self.module)], *tensors, call.key, inside)[None]

    def check(self) -> EmbeddingParts:
        """The parts. Raises Fallback if packed ids would not get the same embeddings as padded ones."""
        (parts,) = self.kept.read([self.module], self._read)
        return parts

    def _read(self, module: nn.Module) -> EmbeddingParts:
        for name in ("word_embeddings", "position_embeddings", *["token_type_embeddings"] * self.family.token_types):
            if getattr(module, name) is not None:
                supported.check_embedding(getattr(module, name))
        supported.check_norm(module.LayerNorm)
        supported.check_dropout(module.dropout)
        return EmbeddingParts.of(module)


class EncoderForward(Replacement):
    """Unpacks after the last layer; with `Call.padded`, before the first one, and each layer packs and unpacks."""

    def check(self) -> bool:
        """Whether it applies dropout outside its layers."""
        return False

    def run(self, *args: Any, fastbert: Call | None = None, **kwargs: Any) -> Any:
        if fastbert is None:
            return self.original(*args, **kwargs)
        hidden, *rest = args or (kwargs.pop("hidden_states"),)
        if fastbert.padded:
            return self.original(fastbert.unpack(hidden), *rest, fastbert=fastbert, **kwargs)
        output = self.original(hidden, *rest, fastbert=fastbert, **kwargs)
        output.last_hidden_state = fastbert.unpack(output.last_hidden_state)
        return output


class RelativeEncoderForward(Replacement):
    """Runs DeBERTa's and MPNet's layers itself, because their encoders pass no keywords to layers, compute the
    distances between all packed tokens, and record what their layers return. Hooks on a layer see as many positional
    arguments as in the original, without the mask and the bias, and what it returns there."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        call, encoder = _active.call, self.module
        if call is None:
            return self.original(*args, **kwargs)
        given = self.named(args, kwargs)
        call.distances = layer.distances_of(encoder, call.packing)
        embedded = given["hidden_states"]
        hidden = call.unpack(embedded) if call.padded else embedded
        states, more = [hidden], (given.get("attention_mask"), None)[: 2 if self.family.relative == "bias" else 1]
        for turn, each in enumerate(encoder.layer):
            hidden = each(hidden, *more, fastbert=call)[0]
            if turn == 0 and getattr(encoder, "conv", None) is not None:
                hidden = self._convolve(call, embedded, hidden)
            states.append(hidden)
        last = hidden if call.padded else call.unpack(hidden)
        return self._output((*states[:-1], last), call, given)

    def _convolve(self, call: Call, embedded: Tensor, hidden: Tensor) -> Tensor:
        packed = (call.pack(hidden) if call.padded else hidden).squeeze(0)
        packed = layer.convolve(self.module.conv, embedded.squeeze(0), packed, call.packing, call.key)[None]
        return call.unpack(packed) if call.padded else packed

    def _output(self, states: tuple[Tensor, ...], call: Call, given: dict[str, Any]) -> Any:
        """The output as transformers' encoders return it. A DeBERTa takes its last hidden state from hidden_states."""
        from transformers.modeling_outputs import BaseModelOutput

        shown = states if given.get("output_hidden_states") else None
        weights = tuple(call.weights[turn] for turn in sorted(call.weights)) if given.get("output_attentions") else None
        output = BaseModelOutput(last_hidden_state=states[-1], hidden_states=shown, attentions=weights)
        return output if given.get("return_dict", self.family.relative == "disentangled") else output.to_tuple()

    def check(self) -> bool:
        """Whether its convolution applies dropout. Raises Fallback for tables or modules that are not as expected."""
        encoder, conv = self.module, getattr(self.module, "conv", None)
        supported.check_positions(encoder)
        if conv is None:
            return False
        _check_uncalled(conv)
        supported.check_convolution(conv)
        return probability(conv.dropout) > 0


class LayerForward(Replacement):
    def run(self, hidden_states: Tensor, *args: Any, fastbert: Call | None = None, **kwargs: Any) -> Any:
        if fastbert is None:
            return self.original(hidden_states, *args, **kwargs)
        turn = fastbert.turn(self.module)
        if turn == 0:
            fastbert.look_ahead(hidden_states)
        if fastbert.ahead is not None:
            return self._output(fastbert.ahead, fastbert, turn)
        hidden = fastbert.pack(hidden_states) if fastbert.padded else hidden_states
        run = functools.partial(self._run, call=fastbert, turn=turn)
        hidden = self.module._gradient_checkpointing_func(run, hidden) if self._checkpoints() else run(hidden)
        return self._output(fastbert.unpack(hidden) if fastbert.padded else hidden, fastbert, turn)

    def _output(self, hidden: Tensor, call: Call, turn: int) -> Any:
        """What transformers' layer returns: DeBERTa's and MPNet's a tuple."""
        if self.family.relative is None:
            return hidden
        weights = call.weights.get(turn)
        return (hidden,) if weights is None and self.family.relative == "bias" else (hidden, weights)

    def _checkpoints(self) -> bool:
        """Whether to checkpoint here: transformers 5.0 does it around the module's call, later versions in forward."""
        return _checkpoints(self.module) and not _checkpoints_outside()

    def _run(self, hidden: Tensor, call: Call, turn: int) -> Tensor:
        """(1, T, C) to (1, T, C)."""
        parts = call.parts[id(self.module)]
        given = call.packing, call.key, turn, call.attentions, call.distances
        y, weights = call.encoder_layer(parts, hidden.squeeze(0), *given)
        if call.attentions and self.family.relative is not None:
            call.weights[turn] = weights
        elif call.attentions:  # handed to the attention module, whose output transformers records
            parts.attention.module(hidden, fastbert=weights)
        return y.unsqueeze(0)

    def check(self) -> LayerParts:
        """The parts, each of which fastbert can compute or may call. Raises Fallback."""
        supported.check_own(self.module, but_of=("",))  # its hooks see padded tensors
        if self.family.relative == "bias" and (self.module._backward_hooks or self.module._backward_pre_hooks):
            raise Fallback(f"a backward hook on a {type(self.module).__name__} sees the gradient of position_bias")
        (parts,) = self.kept.read([self.module], self._read)
        return parts

    def _read(self, module: nn.Module) -> LayerParts:
        try:
            parts = LayerParts.of(module, self.family.layer)
        except AttributeError:
            raise Fallback(f"a {type(module).__name__} has other parts than usual") from None
        for container in parts.containers:
            _check_uncalled(container)
        _check_uncalled(parts.attention.module, but_of=("transformers.",))
        _checked(parts.attention.module)
        if plain_parameters(parts) is None and prepared_parameters(parts) is None:
            leaves = zip(parts.leaves, parts.kinds(), strict=True)
            parts.plain = all([supported.check_leaf(module, kind) for module, kind in leaves])
        supported.check_activation(parts.activation)
        supported.check_attention_dropout(parts.attention)
        supported.check_direction(parts.attention.module)
        if self.family.layer.of_positions:
            supported.check_attention_to_positions(parts.attention.module)
        for dropout in (parts.out_dropout, parts.down_dropout):
            supported.check_dropout(dropout)
        return parts


class AttentionForward(Replacement):
    """Returns attention weights that it is given, for the hook by which transformers records this module's output."""

    def run(self, *args: Any, fastbert: Tensor | None = None, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if fastbert is None else (args[0], fastbert)


def _does_more(module: nn.Module) -> bool:
    """Whether calling the module may do more than run its forward."""
    own = type(module).__module__.startswith("transformers.models.")
    return not own or module._compiled_call_impl is not None or _checkpoints(module)


def _checkpoints(module: nn.Module) -> bool:
    return module.training and getattr(module, "gradient_checkpointing", False)


@functools.cache
def _checkpoints_outside() -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)
