"""BERT and its family on packed tokens: embeddings, layer, encoder, model.

Everything between packing the input and unpacking the output works on (T, C), T real tokens, and a `Packing` that says
where the sequences are. `fastbert/layer.py` computes the layers. Parameter names are those of Hugging Face's BERT for
every family, except that q, k and v are one `qkv`. How a family differs from BERT is stated in `fastbert/families.py`,
which the constructors read.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint as recompute

from fastbert import backends, checkpoint, layer, padding, random
from fastbert.config import BertConfig
from fastbert.distances import MPNET_BUCKETS, disentangled_scaling
from fastbert.families import OURS, groups_of
from fastbert.layer import Distances
from fastbert.ops import checks
from fastbert.padding import Packing
from fastbert.parts import (
    AttentionParts,
    EmbeddingParts,
    Kept,
    LayerParts,
    is_plain,
    may_drop,
    position_dropout,
    probability,
    unchanged,
)
from fastbert.prepared import PreparedLinear, holds_prepared, without_entries

T = TypeVar("T")


def output_item(fields: tuple, at: int | slice | str) -> Any:
    """An output's item by position or name. A slice leaves out fields that are None, so that `output[1:]` is what
    `transformers.Trainer` evaluates."""
    if isinstance(at, str):
        if at not in fields._fields:
            raise KeyError(f"{type(fields).__name__} has no {at!r}; expected one of {', '.join(fields._fields)}")
        return getattr(fields, at)
    part = tuple.__getitem__(fields, at)
    return tuple(field for field in part if field is not None) if isinstance(at, slice) else part


def has_item(fields: tuple, sought: Any) -> bool:
    """Whether an output has a field of that name other than None, as `in` says of transformers' outputs."""
    if isinstance(sought, str):
        return sought in fields._fields and getattr(fields, sought) is not None
    return tuple.__contains__(fields, sought)


def exportable(output: type[T]) -> type[T]:
    """Gives an output's class a name in files: without one, torch.export.save and AOTInductor refuse it."""
    if (register := getattr(_pytree, "_register_namedtuple", None)) is not None:  # private to PyTorch
        register(output, serialized_type_name=f"fastbert.{output.__name__}")
    return output


@exportable
class BertEncoderOutput(NamedTuple):
    """The encoder's output; items by position, by name and by string key. Fields that were not asked for are None, and
    slices leave them out.

    last_hidden_state: (B, S, C), or (T, C) for packed input. hidden_states: num_hidden_layers + 1 such tensors.
    attentions: num_hidden_layers tensors (B, H, S, S), for packed input with S = max_seqlen.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item
    __contains__ = has_item


@exportable
class BertModelOutput(NamedTuple):
    """BertEncoderOutput with pooler_output (B, C), None without a pooling layer."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item
    __contains__ = has_item


class ModelInputs(NamedTuple):
    """BertModel's packed inputs: ids (T,), or inputs_embeds (T, width) in place of input_ids."""

    input_ids: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None


class ModelOptions(TypedDict, total=False):
    """The keyword arguments that all models have; BertModel explains them."""

    cu_seqlens: Tensor | None
    max_seqlen: int | None
    output_hidden_states: bool
    output_attentions: bool
    packing: Packing | None


class BertEmbeddings(nn.Module):
    """Three embedding tables and LayerNorm, of config.embedding_width; then, in ALBERT and ELECTRA, a projection to
    hidden_size. In DeBERTa-v2 the projection comes before LayerNorm. A table that has no rows or is not used is None.

    `position_embeddings.padding_idx` is the padding token's id where positions are counted from the id after it, as in
    RoBERTa.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        family, width = config.family, config.embedding_width
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        padding_idx = config.pad_token_id if family.padding_positions else None
        positions = nn.Embedding(config.max_position_embeddings, width, padding_idx=padding_idx)
        self.position_embeddings = positions if config.extra.get("position_biased_input", True) else None
        types = config.type_vocab_size if family.token_types else 0
        self.token_type_embeddings = nn.Embedding(types, width) if types else None
        self.LayerNorm = nn.LayerNorm(config.hidden_size if family.projects_sum else width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        projects = family.projection and (family.always_projects or width != config.hidden_size)
        self.project = nn.Linear(width, config.hidden_size, bias=not family.projects_sum) if projects else None
        self.projects_sum = family.projects_sum
        self._kept = Kept()

    def drops(self) -> bool:
        return probability(self.dropout) > 0

    def dense_layers(self) -> list[str]:
        """The names of the dense layers that `fastbert.prepare` packs."""
        return [] if self.project is None else ["project"]

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor,
        inputs_embeds: Tensor | None,
        rng: Tensor | None,
    ) -> Tensor:
        """Ids (T,), or inputs_embeds (T, width) in place of input_ids, to (T, C)."""
        inside, after = (self.project, None) if self.projects_sum else (None, self.project)
        (parts,) = self._kept.read([self], EmbeddingParts.of)
        x = layer.embed(parts, input_ids, token_type_ids, position_ids, inputs_embeds, rng, inside)
        return x if after is None else layer.dense(x, after).to(x.dtype)  # under autocast hidden states stay float32


class BertOutput(nn.Module):
    """Projection, dropout, residual sum, LayerNorm: the end of both halves of a layer."""

    def __init__(self, config: BertConfig, inputs: int, drops: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob if drops else 0.0)

    def drops(self) -> bool:
        return probability(self.dropout) > 0

    def forward(self, x: Tensor, residual: Tensor, rng: Tensor | None, site: int) -> Tensor:
        return layer.project_add_norm(x, residual, self.dense, self.dropout, self.LayerNorm, rng, site)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads, self.scaling = config.num_attention_heads, config.head_dim**-0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.output = BertOutput(config, config.hidden_size, config.family.layer.out_dropout is not None)
        if config.family.relative == "disentangled":
            self._add_positions(config)

    def _add_positions(self, config: BertConfig) -> None:
        """Adds what only DeBERTa-v2's attention has, under transformers' names."""
        self.pos_att_type, self.share_att_key = config.position_kinds, config.extra["share_att_key"]
        self.scaling = disentangled_scaling(config.head_dim, self.pos_att_type)
        if not config.extra["relative_attention"]:
            return
        self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        for kind, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
            if kind in self.pos_att_type and not self.share_att_key:
                setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size))

    def drops(self) -> bool:
        inside = self.training and getattr(self.dropout, "p", 0.0) > 0
        return inside or position_dropout(self) > 0 or may_drop(self.output)

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        rng: Tensor | None,
        turn: int,
        output_attentions: bool = False,
        given: Distances | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        parts = AttentionParts(self, self.num_attention_heads, (self.qkv,), self.dropout)
        context, weights = layer.attend(parts, hidden, packing, rng, turn, output_attentions, given)
        return self.output(context, hidden, rng, random.layer_sites(turn)[1]), weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        checkpoint.merge_qkv(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximate = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        return layer.up_gelu(x, self.dense, self.approximate)


class BertLayer(nn.Module):
    """One layer, computed as a whole. Modules in it with hooks, wrapped (LoRA) or replaced are called on packed
    tokens."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size, config.family.layer.down_dropout is not None)

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        rng: Tensor | None = None,
        turn: int = 0,
        output_attentions: bool = False,
        given: Distances | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (T, C) to (T, C), and the attention weights in the caller's form if they are asked for.

        turn: which layer of the forward this is, for its dropout (ALBERT's layers run several times). given: the
        distances that scores depend on, in DeBERTa-v2 and MPNet.
        """
        parts = self._parts()
        if parts is not None:
            return layer.encoder_layer(parts, hidden, packing, rng, turn, output_attentions, given)
        hidden, weights = self.attention(hidden, packing, rng, turn, output_attentions, given)
        return self.output(self.intermediate(hidden), hidden, rng, random.layer_sites(turn)[2]), weights

    def drops(self) -> bool:
        attention, output = self.attention, self.output
        if type(attention).forward is BertAttention.forward and type(output).forward is BertOutput.forward:
            return attention.drops() or output.drops()
        return any([may_drop(part) for part in self.children()])

    def _parts(self) -> LayerParts | None:
        """The parts, if the modules around the leaves are the original ones without hooks, so that they need not be
        called; else None."""
        try:
            parts = LayerParts.of(self, OURS)
        except AttributeError:
            return None
        plain = is_plain(parts.attention.module, BertAttention)
        for module, kind in zip(parts.containers, (BertOutput, BertIntermediate, BertOutput), strict=True):
            plain = plain and is_plain(module, kind)
        return parts if plain else None


class BertConvolution(nn.Module):
    """DeBERTa-v2's convolution of the embeddings; the first layer's output is added to it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, kernel = config.hidden_size, config.extra["conv_kernel_size"]
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=config.extra["conv_groups"])
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.conv_act = config.extra["conv_act"]

    def drops(self) -> bool:
        return probability(self.dropout) > 0

    def forward(self, embedded: Tensor, hidden: Tensor, packing: Packing, rng: Tensor | None) -> Tensor:
        """(T, C) each to (T, C)."""
        return layer.convolve(self, embedded, hidden, packing, rng)


class _Loadable(nn.Module):
    """A module that loads state dicts with Hugging Face's names or ours. If one does not fit, nothing is changed."""

    config: BertConfig

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family)

    def to_ours(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Renames parameters from the family's names in Hugging Face's models, or ours, to ours."""
        return checkpoint.to_ours(state, self._names)

    def to_hugging_face(self, state: Mapping[str, Tensor], *, tied: bool = True) -> dict[str, Tensor]:
        """Renames parameters, or their gradients and the like, from our names to the family's; bit for bit.

        tied: with the second names of tied tensors, which state dicts of models have and files do not.
        """
        return checkpoint.to_hugging_face(state, self._names, tied=tied)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """nn.Module.load_state_dict that takes Hugging Face's names too. With strict, a RuntimeError is raised before
        any weight changes."""
        state = self.to_ours(state_dict)
        if strict:
            checkpoint.check(self.state_dict(), state, self._names)
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Translates names when this module is part of another one, whose load_state_dict runs."""
        own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        state_dict.update({prefix + name: tensor for name, tensor in self.to_ours(own).items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def class_name(x: object) -> str:
    """The class with its package, as transformers' classes have the same names as ours: "transformers.BertModel"."""
    return f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"


def require_class(owner: str, name: str, value: object, *classes: type) -> None:
    """Raises TypeError unless the argument called `name` is of one of these classes of fastbert."""
    if not isinstance(value, classes):
        expected = " or ".join(f"fastbert.{known.__name__}" for known in classes)
        raise TypeError(f"{owner}: {name} is a {class_name(value)}; expected a {expected}")


def require_ours(owner: str, model: object) -> None:
    """Raises TypeError for a model of another library. One that is compiled or wrapped is ours as well."""
    if not isinstance(getattr(model, "config", None), BertConfig):
        raise TypeError(f"{owner}: model is a {class_name(model)}; expected a model of fastbert")


class Saveable(_Loadable):
    """A whole model, which can be saved to a directory. kind: what follows "Bert" in the name of its class."""

    kind = "Model"

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes config.json and model.safetensors under Hugging Face's names, each whole or not at all."""
        name = self.config.family.class_name(self.kind)
        dtype = str(self.dtype).removeprefix("torch.")
        given = self.config.to_dict()
        if not holds_prepared(self):
            given = without_entries(given)  # of a prepared model whose configuration this one was made from
        config = {**given, "architectures": [name], "dtype": dtype}
        config.pop("torch_dtype", None)  # the older name of dtype
        checkpoint.write(directory, config, self.to_hugging_face(self.state_dict(), tied=False))

    @property
    def _body(self) -> "BertModel":
        return getattr(self, "bert", self)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters; shared ones count once. exclude_embeddings: without embedding tables.

        Those of a prepared model count, too, but as none that can be trained.
        """
        tables = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        left_out = set(map(id, tables)) if exclude_embeddings else ()
        counted = (p for p in self.parameters() if id(p) not in left_out)
        packed = sum(m.numbers() for m in self.modules() if isinstance(m, PreparedLinear) and not only_trainable)
        return packed + sum(p.numel() for p in counted if p.requires_grad or not only_trainable)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._body.embeddings.word_embeddings

    def resize_token_embeddings(self, vocab_size: int) -> nn.Embedding:
        """Cuts the vocabulary, or adds tokens, initialised as in a new model. Returns the new table.

        A masked-LM head and `config.vocab_size` change with it. Make optimizers afterwards, because the parameters are
        new ones. Raises ValueError unless vocab_size is a positive integer, and for a vocabulary that loses
        pad_token_id.
        """
        for module in self.modules():
            if hasattr(module, "config"):
                module.config = module.config.changed(vocab_size=vocab_size)
        self._body.embeddings.word_embeddings = _resized(self.get_input_embeddings(), vocab_size, self.config)
        return self.get_input_embeddings()

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """In training, layers save only their input and are computed again in the backward, with the same dropout.

        gradient_checkpointing_kwargs: those of `torch.utils.checkpoint.checkpoint`; {"use_reentrant": False} when None.
        every_n_layers: 1 for all layers, n for every n-th. Raises ValueError for offload, which fastbert does not have,
        and for use_reentrant in DeBERTa-v2 and MPNet, whose layers share tables.
        """
        if self.config.family.relative and (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_enable: use_reentrant is True; expected False, as the layers of "
                f"{self.config.family.name} share tensors that only the newer kind can go back through"
            )
        if offload or not isinstance(every_n_layers, int) or every_n_layers < 1:
            given = f"every_n_layers is {every_n_layers!r} and offload is {offload!r}"
            raise ValueError(f"gradient_checkpointing_enable: {given}; expected a number above 0, and False")
        self._body.encoder.recomputing = (every_n_layers, gradient_checkpointing_kwargs or {"use_reentrant": False})

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The newer name of `gradient_checkpointing_enable` in transformers."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        self._body.encoder.recomputing = None


def _resized(words: nn.Embedding, rows: int, config: BertConfig) -> nn.Embedding:
    """A table with `rows` rows, which begins with the rows of `words`."""
    new = nn.Embedding(rows, words.embedding_dim, padding_idx=words.padding_idx).to(words.weight)
    initialize(new, config.initializer_range)
    kept = min(rows, words.num_embeddings)
    new.weight.data[:kept] = words.weight.data[:kept]
    new.weight.requires_grad_(words.weight.requires_grad)
    return new.train(words.training)


@torch.no_grad()
def initialize(module: nn.Module, std: float) -> None:
    """Initialises as BERT's own code does: normal weights, zero biases, LayerNorm at identity, a zero row for
    padding."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding, nn.Conv1d)):
            part.weight.normal_(0, std)
        if isinstance(part, (nn.Linear, nn.Conv1d)) and part.bias is not None:
            part.bias.zero_()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx].zero_()


def _is_readable(module: nn.Module) -> bool:
    """Whether the layer's parts may be read: calling a subclass, a compiled layer or one with hooks may do more than
    BertLayer.forward."""
    return type(module) is BertLayer and module._compiled_call_impl is None and is_plain(module, BertLayer)


class BertEncoder(_Loadable):
    """The stack of layers, for training code with its own embeddings.

    In ALBERT a layer runs several times, each time with other dropout masks.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        require_class("BertEncoder", "config", config, BertConfig)
        self.config = config
        layers, groups = config.num_hidden_layers, config.layer_groups
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(groups or layers))
        self.order = groups_of(layers, groups) if groups else None
        self.recomputing: tuple[int, dict[str, Any]] | None = None  # every n layers; torch's arguments
        self._kept = Kept()
        self.conv = BertConvolution(config) if config.extra.get("conv_kernel_size") else None
        if config.family.relative == "bias":
            self.relative_attention_bias = nn.Embedding(MPNET_BUCKETS, config.num_attention_heads)
        elif config.family.relative == "disentangled":
            self._add_positions(config)
        initialize(self, config.initializer_range)

    def _add_positions(self, config: BertConfig) -> None:
        """Adds DeBERTa-v2's table of relative embeddings and its settings, under transformers' names."""
        self.relative_attention = config.extra["relative_attention"]
        if self.relative_attention:
            self.position_buckets, self.max_relative_positions = config.extra["position_buckets"], config.farthest
            span = self.position_buckets if self.position_buckets > 0 else self.max_relative_positions
            self.rel_embeddings = nn.Embedding(2 * span, config.hidden_size)
        if "layer_norm" in config.extra["norm_rel_ebd"]:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family, encoder=True)

    def drops(self) -> bool:
        """Whether a forward now would apply dropout."""
        return self._drops(self._readable())

    def _drops(self, readable: list[LayerParts | None]) -> bool:
        if self.conv is not None and may_drop(self.conv):
            return True
        layers = zip(self.layer, readable, strict=True)
        return any([may_drop(each) if parts is None else parts.drops() for each, parts in layers])

    def _readable(self) -> list[LayerParts | None]:
        """The parts of each module in `layer`; None for one that has to be called."""
        if not all(map(_is_readable, self.layer)):
            self._kept.clear()
            return [None] * len(self.layer)
        return self._kept.read(list(self.layer), BertLayer._parts)

    def dense_layers(self) -> list[str]:
        """The names of the dense layers that `fastbert.prepare` packs."""
        return [f"layer.{i}.{part}" for i, each in enumerate(self.layer) for part in OURS.dense_in(each)]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        packing: Packing | None = None,
        rng: Tensor | None = None,
    ) -> BertEncoderOutput:
        """Padded (B, S, C) with a mask (see `fastbert.padding.plan`), or packed (T, C) with cu_seqlens (B + 1,) int32.

        max_seqlen: the longest sequence; computed when None (one host synchronisation). rng: the dropout key of this
        forward, drawn from torch's generator when None. Padding rows of the output are zeros. packing: replaces
        cu_seqlens for packed hidden states, from code that has checked it; last_hidden_state then stays packed.
        Raises ValueError, TypeError.
        """
        handed_down = packing is not None
        if handed_down:
            packing.check("BertEncoder", hidden_states, attention_mask, cu_seqlens, max_seqlen)
        else:
            packing = self._packing(hidden_states, attention_mask, cu_seqlens, max_seqlen)
            hidden_states = packing.pack(hidden_states)
        readable = self._readable()
        rng = random.new_key(hidden_states.device) if rng is None and self._drops(readable) else rng
        given = layer.distances_of(self, packing)
        watched = output_hidden_states or output_attentions or self.conv is not None
        hidden = None if watched else self._at_once(readable, hidden_states, packing, rng, given)
        states, attentions = [], []
        if hidden is None:
            self._kept.part()
            options = (output_hidden_states, output_attentions, given)
            hidden, states, attentions = self._one_by_one(hidden_states, packing, rng, *options)
        if not handed_down:
            hidden = states[-1] if states else packing.unpack(hidden)
        return BertEncoderOutput(
            hidden,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )

    def _in_turn(self, of_layers: Sequence[T]) -> list[T]:
        """The items of layers in the order in which a forward runs them; shared layers come several times."""
        return list(of_layers) if self.order is None else [of_layers[index] for index in self.order]

    def _recomputes(self) -> bool:
        return self.recomputing is not None and self.training and torch.is_grad_enabled()

    def _at_once(
        self,
        readable: list[LayerParts | None],
        hidden: Tensor,
        packing: Packing,
        rng: Tensor | None,
        given: Distances | None,
    ) -> Tensor | None:
        """The output of all layers, computed at once; None where each has to be called."""
        if self._recomputes() or torch.nn.modules.module._has_any_global_hook():
            return None
        return layer.encoder_layers(self._in_turn(readable), hidden, packing, rng, self._kept, given)

    def _one_by_one(
        self,
        hidden: Tensor,
        packing: Packing,
        rng: Tensor | None,
        output_hidden_states: bool,
        output_attentions: bool,
        given: Distances | None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """The last hidden state, packed; all of them in the caller's form, or none; and each layer's attention weights
        or None."""
        states, attentions = [], []

        def record(hidden: Tensor) -> Tensor:
            if output_hidden_states:
                state, hidden = packing.hand_out(hidden)
                states.append(state)
            return hidden

        embedded = hidden = record(hidden)
        for turn, each in enumerate(self._in_turn(self.layer)):
            run = self._recomputed(each, turn)
            hidden, weights = run(hidden, packing, rng, turn, output_attentions, given)
            if turn == 0 and self.conv is not None:
                hidden = self.conv(embedded, hidden, packing, rng)
            hidden = record(hidden)
            attentions.append(weights)
        return hidden, states, attentions

    def _recomputed(self, module: nn.Module, turn: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The layer; with gradient checkpointing wrapped, if its turn is one of those that are computed again."""
        if not self._recomputes():
            return module
        every, arguments = self.recomputing
        if turn % every:
            return module
        return functools.partial(recompute, backends.as_forced_here(module), **arguments)

    def _packing(
        self, hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Packing:
        width, packed = self.config.hidden_size, cu_seqlens is not None
        if hidden.dim() != (2 if packed else 3) or hidden.shape[-1] != width:
            expected = f"(T, {width}) with cu_seqlens"
            expected = expected if packed else f"(B, S, {width}), or {expected}"
            raise ValueError(f"BertEncoder: hidden_states has shape {tuple(hidden.shape)}; expected {expected}")
        form = (hidden.shape[:-1], hidden.device)
        in_runs = self.config.family.relative is not None
        return padding.plan_or_packed("BertEncoder", *form, attention_mask, cu_seqlens, max_seqlen, in_runs)


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class BertModel(Saveable):
    """Embeddings, encoder and (optionally) pooler; Hugging Face's BertModel, RobertaModel, ... on packed tokens.

    add_pooling_layer: None adds one if the family has a pooler (DistilBERT, ELECTRA and DeBERTa-v2 have none).
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__()
        require_class("BertModel", "config", config, BertConfig)
        if add_pooling_layer and config.family.pooler_dense is None:
            raise ValueError(f"BertModel: add_pooling_layer is {add_pooling_layer}; {config.family.name} has no pooler")
        if add_pooling_layer is None:
            add_pooling_layer = config.family.pooler_dense is not None
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        initialize(self.embeddings, config.initializer_range)
        if self.pooler is not None:
            initialize(self.pooler, config.initializer_range)
        if "sinusoidal_pos_embds" in config.family.own and config.extra["sinusoidal_pos_embds"]:
            table = self.embeddings.position_embeddings.weight
            table.data.copy_(_sinusoids(*table.shape))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        packing: Packing | None = None,
    ) -> BertModelOutput:
        """Padded (B, S) ids with a mask (see `fastbert.padding.plan`), or packed (T,) ids with cu_seqlens (B + 1,).

        token_type_ids (default 0; DistilBERT and MPNet have none) and position_ids (default: the column, or for packed
        input the position in the sequence) have the shape of input_ids; inputs_embeds (..., config.embedding_width)
        replaces input_ids. In RoBERTa, XLM-RoBERTa, CamemBERT and MPNet, default position_ids count the row's tokens
        other than pad_token_id, from pad_token_id + 1, whatever the mask says; tokens with that id have position
        pad_token_id. In DeBERTa-v2 and MPNet, no padding may lie between a row's tokens. max_seqlen: the longest
        sequence; computed when None (one host synchronisation). Padding rows of the output are zeros, and the pooler
        reads the first visible token of each sequence (zeros where there is none). packing: the one that `pack`
        returned together with the other arguments; last_hidden_state then stays packed.
        Raises ValueError, TypeError, and IndexError for an id out of range.
        """
        inputs = (input_ids, token_type_ids, position_ids, inputs_embeds)
        handed_down = packing is not None
        if handed_down:
            packing.check("BertModel", position_ids, attention_mask, cu_seqlens, max_seqlen)
        else:
            given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seqlens, max_seqlen)
            inputs, packing = self.pack(*given)
        # A BertEncoder draws its dropout key itself, once it has read its layers.
        draws = type(self.encoder) is BertEncoder and unchanged(self.encoder, BertEncoder)
        drops = may_drop(self.embeddings) or (not draws and may_drop(self.encoder))
        rng = random.new_key(packing.cu_seqlens.device) if drops else None
        hidden, states, attentions = self.encoder(
            self.embeddings(*inputs, rng),
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            packing=packing,
            rng=rng,
        )
        last = hidden
        if states and not handed_down:
            last = states[-1]
        elif not handed_down:
            last, hidden = packing.hand_out(hidden) if self.pooler else (packing.unpack(hidden), hidden)
        pooled = self.pooler(packing.first(hidden)) if self.pooler else None
        return BertModelOutput(last, pooled, states, attentions)

    def pack(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[ModelInputs, Packing]:
        """Checks and packs the arguments of `forward`."""
        inputs = ModelInputs(input_ids, token_type_ids, position_ids, inputs_embeds)
        shape = self._check_inputs(inputs, packed=cu_seqlens is not None)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        form, in_runs = (shape, tokens.device), self.config.family.relative is not None
        packing = padding.plan_or_packed("BertModel", *form, attention_mask, cu_seqlens, max_seqlen, in_runs)
        if position_ids is None:
            position_ids = self._positions(input_ids, packing)
        else:
            position_ids = packing.pack(position_ids.expand(shape))  # may be one row (1, S), as in Hugging Face
        ids, types, embeds = (
            None if x is None else packing.pack(x) for x in (input_ids, token_type_ids, inputs_embeds)
        )
        return ModelInputs(ids, types, position_ids, embeds), packing

    def _positions(self, input_ids: Tensor | None, packing: Packing) -> Tensor:
        """The default position ids, (T,) int64. input_ids: in the caller's form."""
        counts = self.config.family.padding_positions and input_ids is not None
        self._check_lengths(packing, counts)
        before = self.config.pad_token_id
        if counts and packing.seqlen is not None:  # over the whole row, whatever the mask says
            columns = torch.arange(packing.seqlen, device=input_ids.device).expand(packing.batch, -1)
            return packing.pack(_count(input_ids.flatten(), before, columns.flatten()).view(input_ids.shape))
        columns = packing.positions()
        if counts:
            return _count(input_ids, before, columns)
        return columns + (before + 1) if self.config.family.padding_positions else columns

    def _check_lengths(self, packing: Packing, counts: bool) -> None:
        """Raises ValueError for sequences with more tokens than there are positions; for packed ones, if their lengths
        may be read. counts: positions count tokens, so that the table's check says which token has none."""
        limit, tokens = self.config.max_sequence_length, packing.max_seqlen if counts else packing.seqlen
        if not self.config.extra.get("position_biased_input", True):
            return
        if packing.seqlen is None:  # max_seqlen may be more than the longest has
            if counts or packing.max_seqlen <= limit or not packing.batch:
                return
            if not checks.values_visible(packing.cu_seqlens):
                return
            tokens = int(packing.cu_seqlens.diff().max())
        if tokens > limit:
            after = "" if limit == self.config.max_position_embeddings else " after pad_token_id"
            raise ValueError(
                f"BertModel: sequences are {tokens} tokens long; the model has {limit} positions{after} "
                "(max_position_embeddings)"
            )

    def _check_inputs(self, inputs: ModelInputs, packed: bool) -> torch.Size:
        """Checks the inputs. Returns their shape, (B, S) or (T,)."""
        input_ids, token_type_ids, position_ids, inputs_embeds = inputs
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("BertModel: expected exactly one of input_ids and inputs_embeds")
        for name, given in inputs._asdict().items():
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(f"BertModel: {name} is a {type(given).__name__}; expected a tensor")
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
        if len(shape) != (1 if packed else 2):
            expected = "(T,) with cu_seqlens" if packed else "(B, S), or (T,) with cu_seqlens"
            raise ValueError(f"BertModel: input_ids has shape {tuple(shape)}; expected {expected}")
        if inputs_embeds is not None and inputs_embeds.shape[-1] != (width := self.config.embedding_width):
            given = tuple(inputs_embeds.shape)
            raise ValueError(f"BertModel: inputs_embeds has shape {given}; expected (..., {width})")
        if token_type_ids is not None and not self.config.family.token_types:
            raise ValueError(f"BertModel: token_type_ids is given; expected None, {self.config.family.name} has none")
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            one_row = name == "position_ids" and not packed and ids is not None and ids.shape == (1, *shape[1:])
            if ids is not None and ids.shape != shape and not one_row:
                given = tuple(ids.shape)
                raise ValueError(f"BertModel: {name} has shape {given}; expected that of the input, {tuple(shape)}")
        return shape

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | checkpoint.Checkpoint,
        *,
        add_pooling_layer: bool | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> "BertModel":
        """Loads a directory with config.json and model.safetensors, whole or in shards (or pytorch_model.bin).

        source: may also be a model's name on the Hugging Face hub (`fastbert.hub`). Heads of a larger checkpoint are
        left out, and so is its pooler with add_pooling_layer=False. dtype: a torch dtype or its name; as stored when
        None or "auto". The model is in evaluation mode. Raises FileNotFoundError, ValueError (a corrupt file, a
        configuration of an unknown family) and RuntimeError (a missing or unexpected parameter).
        """
        return checkpoint.load(source).make(lambda config: cls(config, add_pooling_layer), dtype)

    def select(self, state: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
        """A checkpoint's state, without its pooler if this model has none. Raises RuntimeError for a missing pooler."""
        if self.pooler is None:
            return {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
        has_body = any(name.startswith(checkpoint.BODY) for name in state)  # else `check` says which names are wrong
        if has_body and not any(name.startswith("pooler.") for name in state):
            raise RuntimeError("the checkpoint has no pooler; pass add_pooling_layer=False")
        return state


def count_parameters(config: BertConfig) -> int:
    """The number of parameters of a BertModel of this configuration; shared ones count once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertModel(config).parameters())


def _sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width): sines in even channels, cosines in odd ones (Vaswani et al., 2017, 3.5)."""
    channel, position = torch.arange(width), torch.arange(positions, dtype=torch.float64)
    angle = position[:, None] / 10000 ** (2 * (channel // 2).double() / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())


def _count(ids: Tensor, padding_idx: int, places: Tensor) -> Tensor:
    """RoBERTa's position ids of ids (T,), int64: tokens count from padding_idx + 1 in each row, without those that are
    padding_idx, whose position is padding_idx.

    places: (T,), the index of each id in its row.
    """
    token = (ids != padding_idx).long()
    counts = token.cumsum(0)
    first = torch.arange(ids.shape[0], device=ids.device) - places
    return (counts - (counts - token)[first]) * token + padding_idx
