"""BERT and its family on packed tokens: embeddings, layer, encoder, model.

Everything between the packing of the input and the unpacking of the output sees (T, C), T real tokens, with
`cu_seqlens` and `max_seqlen`. Parameter names are those of Hugging Face's BERT for every family, but for q, k and v,
which are one `qkv`. Where a family differs from BERT, `fastbert/families.py` says so and the constructors read it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import checkpoint, ops, padding, random
from fastbert.config import BertConfig
from fastbert.families import groups_of
from fastbert.ops.attention import project_qkv
from fastbert.padding import Packing


class BertEncoderOutput(NamedTuple):
    """Indexable, and by name. Fields that were not asked for are None.

    last_hidden_state: (B, S, C), or (T, C) for packed input. hidden_states: num_hidden_layers + 1 such tensors.
    attentions: num_hidden_layers tensors (B, H, S, S), for packed input with S = max_seqlen.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class BertModelOutput(NamedTuple):
    """As BertEncoderOutput, with pooler_output (B, C), None without a pooling layer."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PackedInput(NamedTuple):
    """What BertModel computes on: ids (T,), or inputs_embeds (T, C) in place of input_ids, and where sequences end."""

    input_ids: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int


def leaf_parameters(leaf: nn.Module, kind: type[nn.Module]) -> tuple[Tensor, Tensor]:
    """weight and bias (if it has one) of a leaf that an op computes without calling it.

    Raises TypeError where that would ignore something: a replaced or wrapped leaf (adapters, quantisation), or hooks.
    """
    hooks = leaf._forward_hooks or leaf._forward_pre_hooks or leaf._backward_hooks or leaf._backward_pre_hooks
    if type(leaf).forward is not kind.forward or hooks:
        raise TypeError(
            f"fastbert computes a plain {kind.__name__} without calling it, so hooks on it and replacements are not "
            f"possible; this one is a {type(leaf).__name__}{' with hooks' if hooks else ''}"
        )
    return leaf.weight, getattr(leaf, "bias", None)


class _FrozenRow(torch.autograd.Function):
    """A table, of which one row gets no gradient."""

    @staticmethod
    def forward(ctx, table: Tensor, row: int) -> Tensor:
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad[ctx.row] = 0
        return grad, None


class BertEmbeddings(nn.Module):
    """Three tables and LayerNorm, of config.embedding_width; then, in ALBERT and ELECTRA, a projection to hidden_size.

    `position_embeddings.padding_idx` is that of padding tokens where positions are counted after it, as in RoBERTa.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        family, width = config.family, config.embedding_width
        self.dropout_p = config.hidden_dropout_prob
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        padding_idx = config.pad_token_id if family.padding_positions else None
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width, padding_idx=padding_idx)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if family.token_types else None
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        projects = family.projection and (family.always_projects or width != config.hidden_size)
        self.project = nn.Linear(width, config.hidden_size) if projects else None

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        rng: Tensor | None,
    ) -> Tensor:
        """Ids (T,), or inputs_embeds (T, width) in place of input_ids, to (T, C)."""
        word, _ = leaf_parameters(self.word_embeddings, nn.Embedding)
        position, _ = leaf_parameters(self.position_embeddings, nn.Embedding)
        token_type, padding_idx = None, self.word_embeddings.padding_idx
        if self.position_embeddings.padding_idx is not None:  # the op leaves out a row of the words alone
            position = _FrozenRow.apply(position, self.position_embeddings.padding_idx)
        if self.token_type_embeddings is not None:
            token_type, _ = leaf_parameters(self.token_type_embeddings, nn.Embedding)
            token_type_ids = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
        if inputs_embeds is not None:  # a table of its own, each row used once
            word, padding_idx = inputs_embeds, None
            input_ids = torch.arange(inputs_embeds.shape[0], device=inputs_embeds.device)
        x = ops.embedding(
            input_ids,
            position_ids,
            token_type_ids,
            word,
            position,
            token_type,
            *leaf_parameters(self.LayerNorm, nn.LayerNorm),
            self.LayerNorm.eps,
            padding_idx=padding_idx,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            site=random.EMBEDDING_SITE,
        )
        if self.project is None:
            return x
        return ops.linear(x, *leaf_parameters(self.project, nn.Linear)).to(x.dtype)  # under autocast a float32 stream


class BertOutput(nn.Module):
    """Projection, then bias, dropout, residual sum and LayerNorm in one pass: what ends both halves of a layer."""

    def __init__(self, config: BertConfig, inputs: int, site: int, drops: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p, self.site = config.hidden_dropout_prob if drops else 0.0, site

    def forward(self, x: Tensor, residual: Tensor, rng: Tensor | None) -> Tensor:
        weight, bias = leaf_parameters(self.dense, nn.Linear)
        return ops.add_layer_norm(
            ops.linear(x, weight),
            residual,
            *leaf_parameters(self.LayerNorm, nn.LayerNorm),
            self.LayerNorm.eps,
            x_bias=bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            site=self.site,
        )


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig, sites: tuple[int, int, int]) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.dropout_p, self.site = config.attention_probs_dropout_prob, sites[0]
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        drops = config.family.layer.out_dropout is not None
        self.output = BertOutput(config, config.hidden_size, sites[1], drops)

    def forward(
        self, hidden: Tensor, cu_seqlens: Tensor, max_seqlen: int, rng: Tensor | None, output_attentions: bool
    ) -> tuple[Tensor, Tensor | None]:
        qkv = project_qkv(hidden, *leaf_parameters(self.qkv, nn.Linear), self.heads)
        dropout = {"dropout_p": self.dropout_p if self.training else 0.0, "rng": rng, "site": self.site}
        context = ops.attention(qkv, cu_seqlens, max_seqlen, **dropout).flatten(1)
        weights = ops.attention_weights(qkv, cu_seqlens, max_seqlen, **dropout) if output_attentions else None
        return self.output(context, hidden, rng), weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        checkpoint.merge_qkv(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximate = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        return ops.dense_gelu(x, *leaf_parameters(self.dense, nn.Linear), self.approximate)


class BertLayer(nn.Module):
    """index: where it is in the encoder, which decides its dropout sites."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        sites = random.layer_sites(index)
        self.attention = BertAttention(config, sites)
        self.intermediate = BertIntermediate(config)
        drops = config.family.layer.down_dropout is not None
        self.output = BertOutput(config, config.intermediate_size, sites[2], drops)

    def forward(
        self,
        hidden: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        rng: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (T, C) to (T, C), and the attention weights (B, H, max_seqlen, max_seqlen) if asked for."""
        hidden, weights = self.attention(hidden, cu_seqlens, max_seqlen, rng, output_attentions)
        return self.output(self.intermediate(hidden), hidden, rng), weights


class _Loadable(nn.Module):
    """State dicts in and out: Hugging Face's names or ours in, and nothing changed when one does not fit."""

    config: BertConfig

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family)

    def to_ours(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From the family's names in Hugging Face's models, or ours, to ours."""
        return checkpoint.to_ours(state, self._names)

    def to_hugging_face(self, state: Mapping[str, Tensor], *, tied: bool = True) -> dict[str, Tensor]:
        """From our names to the family's, of parameters or of what belongs to them (gradients), bit for bit.

        tied: with the second names of tied tensors, which models have and files have not.
        """
        return checkpoint.to_hugging_face(state, self._names, tied=tied)

    def new_rng(self, device: torch.device) -> Tensor | None:
        """The dropout key of a forward; None, and torch's generator left alone, where nothing drops."""
        drops = any(module.training and getattr(module, "dropout_p", 0) for module in self.modules())
        return random.new_key(device) if drops else None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, for Hugging Face's names too. With strict, RuntimeError comes before any weight changes."""
        state = self.to_ours(state_dict)
        if strict:
            checkpoint.check(self.state_dict(), state, self._names)
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """For old names where this module is a part of another, whose load_state_dict runs."""
        own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        state_dict.update({prefix + name: tensor for name, tensor in self.to_ours(own).items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class Saveable(_Loadable):
    """A whole model, with a directory of its own. kind: what follows "Bert" in the name of its class."""

    kind = "Model"

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes config.json and model.safetensors under Hugging Face's names, each whole or not at all."""
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        name = self.config.family.class_name(self.kind)
        config = {**self.config.to_dict(), "architectures": [name], "dtype": dtype}
        config.pop("torch_dtype", None)  # the older name of dtype
        checkpoint.write(directory, config, self.to_hugging_face(self.state_dict(), tied=False))


@torch.no_grad()
def initialize(module: nn.Module, std: float) -> None:
    """Normal weights, zero biases, LayerNorm at identity, a zero row for padding (as in BERT's own code)."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.normal_(0, std)
        if isinstance(part, nn.Linear):
            part.bias.zero_()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx].zero_()


class BertEncoder(_Loadable):
    """The stack of layers, for training code that has embeddings of its own.

    In ALBERT a layer runs several times, each time with dropout of its own.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        layers, groups = config.num_hidden_layers, config.layer_groups
        self.layer = nn.ModuleList(BertLayer(config, i) for i in range(groups or layers))
        self.order = groups_of(layers, groups) if groups else None
        initialize(self, config.initializer_range)

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family, encoder=True)

    def _runs(self, rng: Tensor | None) -> list[tuple[BertLayer, Tensor | None]]:
        """The layers of a forward in turn, and the dropout key of each.

        A shared layer keeps the sites that it was made with; the key moves on instead, to those of its turn.
        """
        if self.order is None:
            return [(layer, rng) for layer in self.layer]
        moves = [random.layer_sites(turn)[0] - random.layer_sites(index)[0] for turn, index in enumerate(self.order)]
        keys = [random.site_key(rng, move) if rng is not None and move else rng for move in moves]
        return [(self.layer[index], key) for index, key in zip(self.order, keys, strict=True)]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        rng: Tensor | None = None,
    ) -> BertEncoderOutput:
        """Padded (B, S, C) with a mask (see `fastbert.padding.plan`), or packed (T, C) with cu_seqlens (B + 1,) int32.

        max_seqlen: the longest sequence; computed when None (one host synchronisation). rng: the dropout key of this
        forward, drawn from torch's generator when None. Padding rows of the output are zeros.
        Raises ValueError, TypeError.
        """
        width = self.config.hidden_size
        packed = cu_seqlens is not None
        if hidden_states.dim() != (2 if packed else 3) or hidden_states.shape[-1] != width:
            expected = (
                f"(T, {width}) with cu_seqlens" if packed else f"(B, S, {width}), or (T, {width}) with cu_seqlens"
            )
            raise ValueError(f"BertEncoder: hidden_states has shape {tuple(hidden_states.shape)}; expected {expected}")
        packing = None
        if packed:
            max_seqlen = _packed_input("BertEncoder", attention_mask, cu_seqlens, max_seqlen, hidden_states)
        else:
            _no_max_seqlen("BertEncoder", max_seqlen)
            packing = padding.plan(attention_mask, *hidden_states.shape[:2], hidden_states.device)
            hidden_states, cu_seqlens, max_seqlen = packing.pack(hidden_states), packing.cu_seqlens, packing.max_seqlen
        if rng is None:
            rng = self.new_rng(hidden_states.device)
        states, attentions = [hidden_states], []
        for layer, key in self._runs(rng):
            hidden_states, weights = layer(hidden_states, cu_seqlens, max_seqlen, key, output_attentions)
            states = [*states, hidden_states] if output_hidden_states else [hidden_states]
            attentions.append(weights)
        if packing is not None:
            states = [packing.unpack(state) for state in states]
            attentions = [None if weights is None else packing.unpack_weights(weights) for weights in attentions]
        return BertEncoderOutput(
            states[-1],
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class BertModel(Saveable):
    """Embeddings, encoder and (optionally) pooler; Hugging Face's BertModel, RobertaModel, ... on packed tokens.

    add_pooling_layer: None for one where the family has one (DistilBERT and ELECTRA have none).
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__()
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
    ) -> BertModelOutput:
        """Padded (B, S) ids with a mask (see `fastbert.padding.plan`), or packed (T,) ids with cu_seqlens (B + 1,).

        token_type_ids (default 0; DistilBERT has none) and position_ids (default: the column, or for packed input the
        place in the sequence) have the shape of input_ids; inputs_embeds (..., config.embedding_width) replaces
        input_ids. In RoBERTa, XLM-RoBERTa and CamemBERT position_ids count, from pad_token_id + 1, the tokens of the
        row that are not pad_token_id, whatever the mask says; those that are have pad_token_id. max_seqlen: the longest
        sequence; computed when None (one host synchronisation). Padding rows of the output are zeros, and the pooler
        reads the first visible token of each sequence (zeros where there is none).
        Raises ValueError, TypeError, and IndexError for an id out of range.
        """
        inputs, packing = self.pack(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seqlens, max_seqlen
        )
        rng = self.new_rng(inputs.cu_seqlens.device)
        last, states, attentions = self.encoder(
            self.embeddings(inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.inputs_embeds, rng),
            cu_seqlens=inputs.cu_seqlens,
            max_seqlen=inputs.max_seqlen,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            rng=rng,
        )
        pooled = self.pooler(padding.first_tokens(last, inputs.cu_seqlens)) if self.pooler else None
        if packing:
            last, states, attentions = packing.unpack(last), *unpack_records(packing, states, attentions)
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
    ) -> tuple[PackedInput, Packing | None]:
        """The arguments of `forward`, checked and packed, and the way back; None where they were packed already."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("BertModel: expected exactly one of input_ids and inputs_embeds")
        packed = cu_seqlens is not None
        for name, given in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(f"BertModel: {name} is a {type(given).__name__}; expected a tensor")
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
        if position_ids is not None and not packed and position_ids.shape == (1, *shape[1:]):
            position_ids = position_ids.expand(shape)  # one row for all, as Hugging Face takes it
        self._check_inputs(shape, packed, input_ids, token_type_ids, position_ids, inputs_embeds)
        inputs = (input_ids, token_type_ids, position_ids, inputs_embeds)
        if packed:
            packing = None
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            max_seqlen = _packed_input("BertModel", attention_mask, cu_seqlens, max_seqlen, tokens)
        else:
            _no_max_seqlen("BertModel", max_seqlen)
            packing = padding.plan(attention_mask, *shape, self.embeddings.word_embeddings.weight.device)
            cu_seqlens, max_seqlen = packing.cu_seqlens, packing.max_seqlen
            inputs = (None if x is None else packing.pack(x) for x in inputs)
        inputs = PackedInput(*inputs, cu_seqlens, max_seqlen)
        if position_ids is None:
            inputs = inputs._replace(position_ids=self._positions(input_ids, inputs, packing))
        return inputs, packing

    def _positions(self, input_ids: Tensor | None, inputs: PackedInput, packing: Packing | None) -> Tensor:
        """(T,) int64, the default position ids. input_ids: in the caller's form."""
        before = self.embeddings.position_embeddings.padding_idx
        counts = before is not None and input_ids is not None
        if packing:
            self._check_length(packing.max_seqlen if counts else packing.seqlen)
            if counts:
                return packing.pack(_count(input_ids, before))
            columns = packing.positions()
        else:
            given = inputs.inputs_embeds if input_ids is None else input_ids
            columns = padding.packed_positions(inputs.cu_seqlens, given.shape[0])
            if counts:
                return _count_packed(input_ids, before, columns)
        return columns if before is None else columns + (before + 1)

    def _check_length(self, tokens: int) -> None:
        limit = self.config.max_sequence_length
        if tokens > limit:
            after = "" if limit == self.config.max_position_embeddings else " after pad_token_id"
            raise ValueError(
                f"BertModel: sequences are {tokens} tokens long; the model has {limit} positions{after} "
                "(max_position_embeddings)"
            )

    def _check_inputs(self, shape, packed, input_ids, token_type_ids, position_ids, inputs_embeds) -> None:
        if len(shape) != (1 if packed else 2):
            expected = "(T,) with cu_seqlens" if packed else "(B, S), or (T,) with cu_seqlens"
            raise ValueError(f"BertModel: input_ids has shape {tuple(shape)}; expected {expected}")
        width = self.config.embedding_width
        if inputs_embeds is not None and inputs_embeds.shape[-1] != width:
            raise ValueError(
                f"BertModel: inputs_embeds has shape {tuple(inputs_embeds.shape)}; expected (..., {width})"
            )
        if token_type_ids is not None and self.embeddings.token_type_embeddings is None:
            raise ValueError(f"BertModel: token_type_ids is given; expected None, {self.config.family.name} has none")
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None and ids.shape != shape:
                raise ValueError(
                    f"BertModel: {name} has shape {tuple(ids.shape)}; expected that of the input, {tuple(shape)}"
                )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path | checkpoint.Checkpoint,
        *,
        add_pooling_layer: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> "BertModel":
        """From a directory with config.json and model.safetensors (or pytorch_model.bin), in evaluation mode.

        Heads of a larger checkpoint are left out, and so is its pooler with add_pooling_layer=False. dtype: as stored
        when None. Raises FileNotFoundError, ValueError (a corrupt file, a configuration of no family that is known)
        and RuntimeError (a missing or unexpected parameter).
        """
        found = checkpoint.load(directory)
        with torch.device("meta"):
            model = cls(found.config, add_pooling_layer)
        return found.fill(model, dtype)

    def select(self, state: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
        """The state of a checkpoint without a pooler that this model does not have."""
        if self.pooler is None:
            return {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
        if not any(name.startswith("pooler.") for name in state):
            raise RuntimeError("the checkpoint has no pooler; pass add_pooling_layer=False")
        return state


def count_parameters(config: BertConfig) -> int:
    """How many parameters a BertModel of this configuration has, shared ones once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertModel(config).parameters())


def _sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width): sines in even channels, cosines in odd ones (Vaswani et al., 2017, 3.5)."""
    channel, position = torch.arange(width), torch.arange(positions, dtype=torch.float64)
    angle = position[:, None] / 10000 ** (2 * (channel // 2).double() / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())


def _count(ids: Tensor, padding_idx: int) -> Tensor:
    """(B, S) ids to int64: which token of its row each is, from padding_idx + 1; padding_idx has padding_idx."""
    token = (ids != padding_idx).long()
    return token.cumsum(1) * token + padding_idx


def _count_packed(ids: Tensor, padding_idx: int, places: Tensor) -> Tensor:
    """`_count` of packed ids (T,). places: (T,), where each is in its sequence."""
    token = (ids != padding_idx).long()
    counts = token.cumsum(0)
    first = torch.arange(ids.shape[0], device=ids.device) - places
    return (counts - (counts - token)[first]) * token + padding_idx


def unpack_records(
    packing: Packing, states: tuple[Tensor, ...] | None, attentions: tuple[Tensor, ...] | None
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """hidden_states and attentions of packed tokens, where they were asked for, in the padded form."""
    states = states and tuple(packing.unpack(state) for state in states)
    return states, attentions and tuple(packing.unpack_weights(weights) for weights in attentions)


def _packed_input(
    name: str, attention_mask: Tensor | None, cu_seqlens: Tensor, max_seqlen: int | None, packed: Tensor
) -> int:
    """max_seqlen of packed input (T, ...), read from cu_seqlens when it was not given; both checked."""
    tokens = packed.shape[0]
    if attention_mask is not None:
        raise ValueError(f"{name}: expected attention_mask or cu_seqlens, not both")
    ops.checks.sequences(name, cu_seqlens, tokens if max_seqlen is None else max_seqlen, tokens)
    ops.checks.same_device(name, {"the input": packed, "cu_seqlens": cu_seqlens})
    if max_seqlen is None:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return max_seqlen


def _no_max_seqlen(name: str, max_seqlen: int | None) -> None:
    if max_seqlen is not None:
        raise ValueError(f"{name}: max_seqlen goes with cu_seqlens; a padded batch has its own")
