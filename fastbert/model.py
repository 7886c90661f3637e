"""BERT on packed tokens: embeddings, layer, encoder, model.

Everything between the packing of the input and the unpacking of the output sees (T, C), T real tokens, with
`cu_seqlens` and `max_seqlen`. Parameter names are Hugging Face's, but for q, k and v, which are one `qkv`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert import checkpoint, ops, padding, random
from fastbert.config import BertConfig
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


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dropout_p = config.hidden_dropout_prob
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        rng: Tensor | None,
    ) -> Tensor:
        """Ids (T,), or inputs_embeds (T, C) in place of input_ids, to (T, C)."""
        word, _ = leaf_parameters(self.word_embeddings, nn.Embedding)
        padding_idx = self.word_embeddings.padding_idx
        if inputs_embeds is not None:  # a table of its own, each row used once
            word, padding_idx = inputs_embeds, None
            input_ids = torch.arange(inputs_embeds.shape[0], device=inputs_embeds.device)
        return ops.embedding(
            input_ids,
            position_ids,
            torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids,
            word,
            leaf_parameters(self.position_embeddings, nn.Embedding)[0],
            leaf_parameters(self.token_type_embeddings, nn.Embedding)[0],
            *leaf_parameters(self.LayerNorm, nn.LayerNorm),
            self.LayerNorm.eps,
            padding_idx=padding_idx,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            site=random.EMBEDDING_SITE,
        )


class BertOutput(nn.Module):
    """Projection, then bias, dropout, residual sum and LayerNorm in one pass: what ends both halves of a layer."""

    def __init__(self, config: BertConfig, inputs: int, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p, self.site = config.hidden_dropout_prob, site

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
        self.output = BertOutput(config, config.hidden_size, sites[1])

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
    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        sites = random.layer_sites(index)
        self.attention = BertAttention(config, sites)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size, sites[2])

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
    to_ours = staticmethod(checkpoint.to_ours)

    def new_rng(self, device: torch.device) -> Tensor | None:
        """The dropout key of a forward; None, and torch's generator left alone, where nothing drops."""
        drops = any(module.training and getattr(module, "dropout_p", 0) for module in self.modules())
        return random.new_key(device) if drops else None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, for Hugging Face's names too. With strict, RuntimeError comes before any weight changes."""
        state = self.to_ours(state_dict)
        if strict:
            checkpoint.check(self.state_dict(), state)
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """For old names where this module is a part of another, whose load_state_dict runs."""
        own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        state_dict.update({prefix + name: tensor for name, tensor in self.to_ours(own).items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class Saveable(_Loadable):
    """A whole model, with a directory of its own."""

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes config.json and model.safetensors under Hugging Face's names, each whole or not at all."""
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        config = {**self.config.to_dict(), "architectures": [type(self).__name__], "dtype": dtype}
        config.pop("torch_dtype", None)  # the older name of dtype
        checkpoint.write(directory, config, checkpoint.to_hugging_face(self.state_dict()))


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
    """The stack of layers, for training code that has embeddings of its own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(BertLayer(config, i) for i in range(config.num_hidden_layers))
        initialize(self, config.initializer_range)

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
        for layer in self.layer:
            hidden_states, weights = layer(hidden_states, cu_seqlens, max_seqlen, rng, output_attentions)
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
    """Embeddings, encoder and (optionally) pooler; Hugging Face's BertModel on packed tokens."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        initialize(self.embeddings, config.initializer_range)
        if self.pooler is not None:
            initialize(self.pooler, config.initializer_range)

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

        token_type_ids (default 0) and position_ids (default: the column, or for packed input the place in the
        sequence) have the shape of input_ids; inputs_embeds (..., C) replaces input_ids. max_seqlen: the longest
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
        if position_ids is not None:
            return inputs, packing
        if packing and shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"BertModel: sequences are {shape[1]} tokens long; the model has "
                f"{self.config.max_position_embeddings} positions (max_position_embeddings)"
            )
        position_ids = packing.positions() if packing else padding.packed_positions(cu_seqlens, shape[0])
        return inputs._replace(position_ids=position_ids), packing

    def _check_inputs(self, shape, packed, input_ids, token_type_ids, position_ids, inputs_embeds) -> None:
        if len(shape) != (1 if packed else 2):
            expected = "(T,) with cu_seqlens" if packed else "(B, S), or (T,) with cu_seqlens"
            raise ValueError(f"BertModel: input_ids has shape {tuple(shape)}; expected {expected}")
        if inputs_embeds is not None and inputs_embeds.shape[-1] != self.config.hidden_size:
            width = self.config.hidden_size
            raise ValueError(
                f"BertModel: inputs_embeds has shape {tuple(inputs_embeds.shape)}; expected (..., {width})"
            )
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None and ids.shape != shape:
                raise ValueError(
                    f"BertModel: {name} has shape {tuple(ids.shape)}; expected that of the input, {tuple(shape)}"
                )

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, add_pooling_layer: bool = True, dtype: torch.dtype | None = None
    ) -> "BertModel":
        """From a directory with config.json and model.safetensors (or pytorch_model.bin), in evaluation mode.

        Heads of a larger checkpoint are left out, and so is its pooler without add_pooling_layer. dtype: as stored
        when None. Raises FileNotFoundError, ValueError (a corrupt file, a configuration that is no BERT's) and
        RuntimeError (a missing or unexpected parameter).
        """
        config = BertConfig.from_pretrained(directory)
        state = checkpoint.to_ours(checkpoint.read(directory))
        if add_pooling_layer and not any(name.startswith("pooler.") for name in state):
            raise RuntimeError(f"{directory}: the checkpoint has no pooler; pass add_pooling_layer=False")
        if not add_pooling_layer:
            state = {name: tensor for name, tensor in state.items() if not name.startswith("pooler.")}
        with torch.device("meta"):
            model = cls(config, add_pooling_layer)
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise RuntimeError(f"{directory}: {error}") from None
        return model.to(dtype).eval()


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
