"""What stands in for `forward` in an accelerated `transformers` model.

transformers' own code goes on running: the base model calls its embeddings, its encoder and its pooler, the encoder
calls `layer(...)`. Four kinds of stand-in change what passes between them. The base model's packs the batch, once; the
embeddings' and the layers' compute on packed tokens, (1, T, C) between modules; the encoder's unpacks the last hidden
state, once. A forward that cannot be packed raises `CannotPack` before anything is computed, and the original runs.

A stand-in is an object in its module's `__dict__`, holding the module, so it is copied and pickled with it. (A closure
would go on computing the original's weights in a copy; a bound method is not restored by torch.load.) No tensor lives
in one.
"""

import functools
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import ops, packable, padding, random
from fastbert.families import FAMILIES, Family, LayerParts
from fastbert.packable import CannotPack

ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "fastbert")
TENSORS = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
SETTINGS = ("use_cache", "return_dict", "output_hidden_states", "output_attentions", "num_items_in_batch")

MASKED_LM = ("ForMaskedLM", "BertForPreTraining", "AlbertForPreTraining")
# Heads whose loss is over all positions, padding included.
ALL_POSITIONS = (*MASKED_LM, "ForQuestionAnswering", "ForTokenClassification")
# Heads over base models without a pooler that read every token alike. Any other module around one may read the first.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ElectraForPreTraining")


class Report:
    """What `accelerate` did to a model, and what its forwards have done since.

    replaced, not_replaced: module names, with what they are and with the reason. packed: forwards that ran on packed
    tokens. fallbacks: forwards that ran the original computation, by reason. Compiled forwards are not counted: a
    compiled graph would be compiled again for every number. skip_logits: as `accelerate` was asked.
    """

    def __init__(self) -> None:
        self.skip_logits = False
        self.replaced: dict[str, str] = {}
        self.not_replaced: dict[str, str] = {}
        self.packed = 0
        self.fallbacks: Counter[str] = Counter()
        self.active = True

    def ran_packed(self) -> None:
        if not torch.compiler.is_compiling():
            self.packed += 1

    def fell_back(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            return
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            message = f"fastbert: forwards run transformers' own computation where {reason} (said once)"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def __str__(self) -> str:
        lines = [f"replaced: {name or '(the model)'}: {what}" for name, what in self.replaced.items()]
        lines += [f"not replaced: {name or '(the model)'}: {reason}" for name, reason in self.not_replaced.items()]
        lines += [f"forwards packed: {self.packed}, fallen back: {self.fallbacks.total()}"]
        lines += [f"  {count} where {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)


class Call:
    """One packed forward: where its tokens are, its dropout key, and how its layers exchange tensors.

    Layers get it as the keyword `fastbert` that transformers' code hands down; the embeddings, which get no keywords
    from it, find it in `_active`.
    """

    def __init__(
        self, packing: padding.Packing, key: Tensor | None, layers: list[nn.Module], padded: bool, attentions: bool
    ) -> None:
        self.packing, self.key, self.padded, self.attentions = packing, key, padded, attentions
        self._places: dict[int, list[int]] = {}
        for index, layer in enumerate(layers):
            self._places.setdefault(id(layer), []).append(index)
        self._runs: Counter[int] = Counter()

    def index(self, layer: nn.Module) -> int:
        """Which of the forward's layers this run is: of a shared layer the next one, of any other always the same.

        So a layer that gradient checkpointing runs again drops the same elements again.
        """
        places, run = self._places[id(layer)], self._runs[id(layer)]
        self._runs[id(layer)] += 1
        return places[run % len(places)]

    def pack(self, x: Tensor) -> Tensor:
        """(B, S, ...) -> (1, T, ...)."""
        return self.packing.pack(x)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, T, ...) -> (B, S, ...), zeros at padding."""
        return self.packing.unpack(x[0])


class _Active(threading.local):
    def __init__(self) -> None:  # in each thread: torch.compile trips over attributes that come later
        self.call: Call | None = None
        self.obstacle: str | None = None  # why its head cannot do with zeros at padding
        self.rows: Tensor | None = None  # of the flattened batch, the ones that its head reads; None: all


_active = _Active()


@contextmanager
def _calling(call: Call | None) -> Iterator[None]:
    before, _active.call = _active.call, call
    try:
        yield
    finally:
        _active.call = before


# ---- the stand-ins


class StandIn:
    """Callable in place of `module.forward`. Without a `Call` it is the original."""

    def __init__(self, module: nn.Module, key: str, report: Report) -> None:
        self.module, self.key, self.report = module, key, report
        own = vars(module).get("forward")
        # transformers 5.0 leaves the class's own forward, bound, in modules whose outputs it has recorded
        self.before = None if getattr(own, "__func__", None) is type(module).forward else own
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]

    @property
    def __wrapped__(self) -> Callable:
        """The original forward."""
        return self.before or functools.partial(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def family(self) -> Family:
        return FAMILIES[self.key]

    def named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.names, args, strict=False))

    def install(self) -> None:
        self.module.forward = self

    def remove(self) -> None:
        """Puts back what was there, unless someone has wrapped the stand-in: then it stays, and is the original."""
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before


def of(module: nn.Module) -> StandIn | None:
    """The stand-in of a module, also one that others have wrapped with functools.wraps."""
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, StandIn):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def _checked(module: nn.Module) -> StandIn:
    stand_in = of(module)
    if stand_in is None:
        raise CannotPack(f"a {type(module).__name__} was put into the model after fastbert.accelerate")
    if stand_in.before is not None:
        raise CannotPack(f"a {type(module).__name__} had a forward of its own before fastbert.accelerate")
    return stand_in


class ModelForward(StandIn):
    """The base model: decides, packs, and has the original run on the packed batch as one sequence of T tokens."""

    def __init__(self, module: nn.Module, key: str, report: Report, first_token: bool) -> None:
        super().__init__(module, key, report)
        self.first_token = first_token  # whether something around the model may read position 0 by itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.report.active:
            return self.__wrapped__(*args, **kwargs)
        inputs = self.named(args) | kwargs
        try:
            call, packed = self._prepare(inputs)
        except CannotPack as reason:
            self.report.fell_back(reason.args[0])  # torch.compile of torch 2.11 has no str() of an exception
            with _calling(None):
                return _selected(self.__wrapped__(*args, **kwargs))
        with _calling(call):
            output = self.__wrapped__(**packed, fastbert=call)
        self.report.ran_packed()
        return _selected(output)

    def _prepare(self, inputs: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """The call, and what to hand to the original. Raises CannotPack."""
        self._check_use(inputs)
        shape, device = self._check_tensors(inputs)
        layers = self.family.applications(self.module)
        drops = self._check_modules(layers)
        packing = self._plan(inputs.get("attention_mask"), shape, device)
        padded = bool(self._wants("output_hidden_states", inputs))
        padded = padded or any(packable.hooks(layer, packable.FRAMEWORKS) for layer in layers)
        key = random.new_key(device) if drops else None
        call = Call(packing, key, layers, padded, bool(self._wants("output_attentions", inputs)))
        tensors = {name: inputs.get(name) for name in TENSORS if name != "token_type_ids" or self.family.token_types}
        tensors["position_ids"] = self._positions(inputs, shape)
        packed = {name: None if x is None else call.pack(x) for name, x in tensors.items()}
        if packed["position_ids"] is None:
            packed["position_ids"] = packing.positions()[None]
        # transformers hands a 4-D mask on as it is, unread; what the tokens may see is in the call.
        unread = packing.cu_seqlens[None, None, None]
        return call, inputs | packed | {"attention_mask": unread}

    def _check_use(self, inputs: dict[str, Any]) -> None:
        config = self.module.config
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise CannotPack("the model is traced or exported")
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise CannotPack("torch.func transforms it")
        if getattr(config, "is_decoder", False) or getattr(config, "is_causal", None):
            raise CannotPack("the model is a decoder")
        if getattr(config, "position_embedding_type", "absolute") != "absolute":
            raise CannotPack(f"position_embedding_type is {config.position_embedding_type!r}")
        if config._attn_implementation not in ATTENTIONS:
            raise CannotPack(f"the attention implementation is {config._attn_implementation!r}")
        for name, value in inputs.items():
            known = name in TENSORS or name in SETTINGS or name == "attention_mask"
            if value is not None and (not known or (name == "token_type_ids" and not self.family.token_types)):
                raise CannotPack(f"{name} is given")
        if torch.nn.modules.module._has_any_global_hook():
            raise CannotPack("hooks are registered for all modules")

    def _check_tensors(self, inputs: dict[str, Any]) -> tuple[torch.Size, torch.device]:
        """(B, S) and the device. What is wrong with the tensors the original says best."""
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given = ids if embeds is None else embeds
        if (ids is None) == (embeds is None) or not isinstance(given, Tensor):
            raise CannotPack("input_ids and inputs_embeds are not exactly one tensor")
        shape = given.shape[:2]
        if given.dim() != (2 if embeds is None else 3):
            raise CannotPack(f"the input has {given.dim()} dimensions")
        for name in ("token_type_ids", "position_ids"):
            value = inputs.get(name)
            if value is not None and (value.dim() != 2 or value.shape[1] != shape[1]):
                raise CannotPack(f"{name} is not of the input's shape")
        positions = self.module.embeddings.position_embeddings.weight.shape[0]
        first = self.module.embeddings.padding_idx + 1 if self.family.padding_positions else 0
        if inputs.get("position_ids") is None and first + shape[1] > positions:
            raise CannotPack("sequences are longer than the position embeddings")
        return shape, given.device

    def _check_modules(self, layers: list[nn.Module]) -> bool:
        """Whether anything drops."""
        for module in self.family.passages(self.module):
            packable.check_own(module, packable.FRAMEWORKS)
        projection = self.family.projected(self.module)
        if projection is not None:
            packable.check_linear(projection)
        drops = _checked(self.module.embeddings).check()
        _checked(getattr(self.module, self.family.encoder))
        for layer in dict.fromkeys(layers):
            drops = _checked(layer).check() or drops
        return drops

    def _plan(self, mask: Any, shape: torch.Size, device: torch.device) -> padding.Packing:
        """Raises ValueError for a mask that does not fit the batch, CannotPack for one of another kind."""
        if isinstance(mask, Tensor) and mask.dim() == 2 and tuple(mask.shape) != tuple(shape):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; expected that of the input, {tuple(shape)}"
            )
        wide = isinstance(mask, Tensor) and mask.dim() == 4
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() in (2, 4)):
            raise CannotPack("attention_mask is no tensor of two or four dimensions")
        if wide and not (mask.is_floating_point() or (mask.dtype == torch.bool and self._attention != "eager")):
            raise CannotPack(f"attention_mask is a 4-D {mask.dtype}")  # which eager attention adds to the scores
        if mask is not None and mask.device != device:
            raise CannotPack("attention_mask is on another device")
        try:
            packing = padding.plan(mask, *shape, device)
        except ValueError:
            raise CannotPack("attention_mask is no key-padding mask") from None
        if _active.obstacle is not None and packing.indices is not None:
            raise CannotPack(_active.obstacle)
        first_token = self.first_token or getattr(self.module, "pooler", None) is not None
        if first_token and not packing.starts_visible:
            raise CannotPack("position 0 is masked, which a pooler or a head may read")
        return packing

    @property
    def _attention(self) -> str:
        return self.module.config._attn_implementation

    def _positions(self, inputs: dict[str, Any], shape: torch.Size) -> Tensor | None:
        """(B, S), None for the columns."""
        given, ids, embeddings = inputs.get("position_ids"), inputs.get("input_ids"), self.module.embeddings
        if given is None and self.family.padding_positions:
            if ids is not None:
                return embeddings.create_position_ids_from_input_ids(ids, embeddings.padding_idx)
            return embeddings.create_position_ids_from_inputs_embeds(inputs["inputs_embeds"], embeddings.padding_idx)
        return None if given is None else given.expand(shape)

    def _wants(self, name: str, inputs: dict[str, Any]) -> Any:
        """As transformers decides what to record."""
        return inputs.get(name, getattr(self.module.config, name, False))


def _selected(output: Any) -> Any:
    """A base model's output with the rows of the last hidden state that its head reads, (1, L, C)."""
    if _active.rows is None:
        return output
    chosen = output[0].flatten(0, 1).index_select(0, _active.rows)[None]
    if isinstance(output, tuple):
        return (chosen, *output[1:])
    output.last_hidden_state = chosen
    return output


class HeadForward(StandIn):
    """A head whose loss is over all positions.

    Labels of masked tokens count as -100: no prediction is made there. A question-answering loss is a softmax over the
    positions, in which padding's logits count too: only the original has them. With `skip_logits`, a masked-LM head in
    training with labels reads the labelled rows alone, and its logits, which are of those, are left out.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.report.active:
            return self.__wrapped__(*args, **kwargs)
        inputs = self.named(args) | kwargs
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if isinstance(mask, Tensor) and isinstance(labels, Tensor) and mask.shape == labels.shape:
            inputs["labels"] = labels.masked_fill(mask == 0, -100)
        skips = self._skips_logits(inputs)
        before = _active.obstacle, _active.rows
        if inputs.get("start_positions") is not None:
            _active.obstacle = "a question-answering loss counts padding"
        if skips and not torch.compiler.is_compiling():  # where sizes cannot depend on labels
            labels = inputs["labels"].flatten()
            _active.rows = (labels != -100).nonzero().squeeze(-1)
            inputs["labels"] = labels[_active.rows][None]
        try:
            output = self.__wrapped__(**inputs)
        finally:
            _active.obstacle, _active.rows = before
        return _without_logits(output) if skips else output

    def _skips_logits(self, inputs: dict[str, Any]) -> bool:
        """Labels of another shape than the batch's the original refuses best."""
        if not (self.report.skip_logits and self.module.training and type(self.module).__name__.endswith(MASKED_LM)):
            return False
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        batch = inputs.get("inputs_embeds") if ids is None else ids
        return isinstance(labels, Tensor) and isinstance(batch, Tensor) and labels.shape == batch.shape[:2]


def _without_logits(output: Any) -> Any:
    """The output of a masked-LM head with a loss, without the logits after it."""
    if isinstance(output, tuple):
        return (*output[:1], *output[2:])
    name = "prediction_logits" if "prediction_logits" in output else "logits"
    return type(output)(**{key: value for key, value in output.items() if key != name})


class EmbeddingsForward(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _active.call
        if call is None or not self._fused():
            return self.__wrapped__(*args, **kwargs)
        given = self.named(args) | kwargs
        if "input_embeds" in given:  # transformers 5.0's word for it in DistilBERT
            given["inputs_embeds"] = given.pop("input_embeds")
        return self._embed(call, *(given.get(name) for name in TENSORS))

    def _embed(
        self,
        call: Call,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """Ids (1, T) to (1, T, C)."""
        parts, types = self.module, None
        word, padding_idx = parts.word_embeddings.weight, parts.word_embeddings.padding_idx
        hooked = packable.hooks(parts.word_embeddings)
        if inputs_embeds is not None:  # a table of its own, each row used once
            word, padding_idx = inputs_embeds[0], None
            input_ids = torch.arange(word.shape[0], device=word.device)[None]
        if self.family.token_types:
            types = parts.token_type_embeddings.weight
            token_type_ids = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
        hidden = ops.embedding(
            input_ids,
            position_ids,
            token_type_ids,
            word,
            _without_padding_gradient(parts.position_embeddings),
            types,
            parts.LayerNorm.weight,
            parts.LayerNorm.bias,
            parts.LayerNorm.eps,
            padding_idx=padding_idx,
            dropout_p=_probability(parts.dropout),
            rng=call.key,
            site=random.EMBEDDING_SITE,
        )
        # transformers' hook on the word embeddings: with frozen tables and checkpointing, gradients must start here.
        return hidden.requires_grad_() if hooked and torch.is_grad_enabled() else hidden

    def _tables(self) -> list[nn.Module]:
        names = ("word_embeddings", "position_embeddings", *["token_type_embeddings"] * self.family.token_types)
        return [getattr(self.module, name) for name in names]

    def _fused(self) -> bool:
        """Or else, with adapters and sparse gradients, its own code runs on the packed ids."""
        return all(packable.plain(table, nn.Embedding) and not table.sparse for table in self._tables())

    def check(self) -> bool:
        """Whether it drops. Raises CannotPack where even its own code would not do the same to packed ids."""
        parts = self.module
        for table in self._tables():
            base = getattr(table, "base_layer", table)
            plain = isinstance(base, nn.Embedding) and base.max_norm is None and not base.scale_grad_by_freq
            if not plain or packable.hooks(table, ("transformers.",)) or "forward" in vars(table):
                raise CannotPack(f"a {type(table).__name__} in place of an Embedding has hooks or rules of its own")
        packable.check_norm(parts.LayerNorm)
        packable.check_dropout(parts.dropout, random.ROW_BITS)
        return _probability(parts.dropout) > 0


class EncoderForward(StandIn):
    """Where the stack of layers ends, so does packing: once, or (`Call.padded`) at each layer."""

    def __call__(self, *args: Any, fastbert: Call | None = None, **kwargs: Any) -> Any:
        if fastbert is None:
            return self.__wrapped__(*args, **kwargs)
        hidden, *rest = args or (kwargs.pop("hidden_states"),)
        if fastbert.padded:
            return self.__wrapped__(fastbert.unpack(hidden), *rest, fastbert=fastbert, **kwargs)
        output = self.__wrapped__(hidden, *rest, fastbert=fastbert, **kwargs)
        output.last_hidden_state = fastbert.unpack(output.last_hidden_state)
        return output


class LayerForward(StandIn):
    def __call__(self, hidden_states: Tensor, *args: Any, fastbert: Call | None = None, **kwargs: Any) -> Any:
        if fastbert is None:
            return self.__wrapped__(hidden_states, *args, **kwargs)
        hidden = fastbert.pack(hidden_states) if fastbert.padded else hidden_states
        run = functools.partial(self._run, call=fastbert, index=fastbert.index(self.module))
        hidden = self.module._gradient_checkpointing_func(run, hidden) if self._checkpoints() else run(hidden)
        return fastbert.unpack(hidden) if fastbert.padded else hidden

    def _checkpoints(self) -> bool:
        """Whether to recompute in the backward: transformers 5.0 does that around the module's call, later inside."""
        layer = self.module
        return getattr(layer, "gradient_checkpointing", False) and layer.training and not _checkpoints_outside()

    def _run(self, hidden: Tensor, call: Call, index: int) -> Tensor:
        """(1, T, C) to (1, T, C). Reads parameters, so only ever runs within the layer's own call (FSDP2)."""
        parts = self.family.layer.parts(self.module)
        site, out_site, down_site = random.layer_sites(index)
        sequences = (call.packing.cu_seqlens, call.packing.max_seqlen)
        qkv = _project(parts, hidden)
        attending = {
            "scale": parts.attention.scaling,
            "dropout_p": parts.attention_dropout.p if parts.attention.training else 0.0,
            "rng": call.key,
            "site": site,
        }
        context = ops.attention(qkv, *sequences, **attending).flatten(1)[None]
        if call.attentions:  # by a call, whose output transformers records
            weights = call.packing.unpack_weights(ops.attention_weights(qkv, *sequences, **attending))
            parts.attention(context, fastbert=weights)
        hidden = _finish(context, hidden, parts.out, parts.out_dropout, parts.out_norm, call.key, out_site)
        wide = _widen(hidden, parts.up, parts.activation)
        return _finish(wide, hidden, parts.down, parts.down_dropout, parts.down_norm, call.key, down_site)

    def check(self) -> bool:
        """Whether the layer drops anything. Raises CannotPack."""
        layer, facts = self.module, self.family.layer
        parts = facts.parts(layer)
        packable.check_own(layer, but_of=("",))  # its hooks see padded tensors
        for module in facts.inner(layer):
            packable.check_own(module)
        packable.check_own(parts.attention, but_of=("transformers.",))
        _checked(parts.attention)
        for linear in (parts.query, parts.key, parts.value, parts.out, parts.up, parts.down):
            packable.check_linear(linear)
        for norm in (parts.out_norm, parts.down_norm):
            packable.check_norm(norm)
        packable.check_activation(parts.activation)
        packable.check_dropout(parts.attention_dropout, random.ATTENTION_BITS)
        for dropout in (parts.out_dropout, parts.down_dropout):
            packable.check_dropout(dropout, random.ROW_BITS)
        attention = parts.attention.training and parts.attention_dropout.p > 0
        return attention or _probability(parts.out_dropout) > 0 or _probability(parts.down_dropout) > 0


class AttentionForward(StandIn):
    """Gives attention weights to the hook by which transformers records this module's output."""

    def __call__(self, *args: Any, fastbert: Tensor | None = None, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs) if fastbert is None else (args[0], fastbert)


# ---- the parts of a layer, on packed tokens (1, T, C)


def _readable(linear: nn.Module) -> bool:
    return packable.plain(linear, nn.Linear) and linear.bias is not None


def _project(parts: LayerParts, hidden: Tensor) -> Tensor:
    """(1, T, C) to (T, 3, H, D).

    One product with the three weights put together, anew each time: what lived longer would go stale.
    """
    three = (parts.query, parts.key, parts.value)
    if all(map(_readable, three)):
        weight, bias = (torch.cat([getattr(linear, name) for linear in three]) for name in ("weight", "bias"))
        qkv = ops.linear(hidden, weight, bias)
    else:
        qkv = torch.cat([linear(hidden) for linear in three], -1)
    return qkv.view(hidden.shape[1], 3, parts.heads, qkv.shape[-1] // (3 * parts.heads))


def _widen(hidden: Tensor, up: nn.Module, activation: nn.Module) -> Tensor:
    form = activation.approximate if type(activation) is nn.GELU else packable.GELU_FORMS[type(activation).__name__]
    if _readable(up):
        return ops.dense_gelu(hidden, up.weight, up.bias, form)
    return F.gelu(up(hidden), approximate=form)


def _finish(
    x: Tensor,
    residual: Tensor,
    linear: nn.Module,
    dropout: nn.Module | None,
    norm: nn.Module,
    key: Tensor | None,
    site: int,
) -> Tensor:
    """What ends both halves of a layer: projection, then bias, dropout, residual sum and LayerNorm in one pass."""
    x, bias = (ops.linear(x, linear.weight), linear.bias) if _readable(linear) else (linear(x), None)
    dropping = {"dropout_p": _probability(dropout), "rng": key, "site": site}
    return ops.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, x_bias=bias, **dropping)


def _probability(dropout: nn.Module | None) -> float:
    return dropout.p if dropout is not None and dropout.training else 0.0


def _without_padding_gradient(table: nn.Embedding) -> Tensor:
    """The table's weight; where it has a padding_idx, as RoBERTa's positions do, that row gets no gradient."""
    if table.padding_idx is None or not (table.weight.requires_grad and torch.is_grad_enabled()):
        return table.weight
    weight = table.weight.view_as(table.weight)
    weight.register_hook(functools.partial(_without_row, table.padding_idx))
    return weight


def _without_row(row: int, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[row] = 0
    return grad


@functools.cache
def _checkpoints_outside() -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)
