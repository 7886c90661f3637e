"""BERT in plain PyTorch, as in the paper: the truth that every kernel of fastbert is compared with.

It has no fusion, no packing and none of fastbert's ops: a post-LayerNorm transformer encoder with learned positions,
erf GELU and LayerNorm eps 1e-12 (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018; Vaswani
et al., "Attention Is All You Need", 2017). Parameter names are those of Hugging Face's BertModel, so `load_state_dict`
takes its state. Dropout masks may be passed in, to compare training with another implementation exactly.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.random import EMBEDDING_SITE, layer_sites


class Dropout(nn.Module):
    """nn.Dropout, or multiplication by this site's mask (of 0 and 1 / (1 - p)) if masks are passed in."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, masks: Mapping[int, Tensor] | None) -> Tensor:
        if masks is not None:
            return x * masks[self.site]
        return F.dropout(x, self.p, self.training)


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, EMBEDDING_SITE)

    def forward(self, input_ids, token_type_ids, position_ids, masks):
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x), masks)


class BertSelfAttention(nn.Module):
    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob, site)

    def forward(self, x, visible, masks):
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, D]
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = self.dropout(scores.softmax(-1), masks)
        return (weights @ v).transpose(1, 2).flatten(-2)


class BertOutput(nn.Module):
    """Projection, dropout, residual sum, LayerNorm: the end of both halves of a layer."""

    def __init__(self, config: BertConfig, inputs: int, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob, site)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x, residual, masks):
        return self.LayerNorm(self.dropout(self.dense(x), masks) + residual)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig, sites: tuple[int, int, int]) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, sites[0])
        self.output = BertOutput(config, config.hidden_size, sites[1])

    def forward(self, x, visible, masks):
        return self.output(self.self(x, visible, masks), x, masks)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximate = config.gelu

    def forward(self, x):
        return F.gelu(self.dense(x), approximate=self.approximate)


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        sites = layer_sites(index)
        self.attention = BertAttention(config, sites)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size, sites[2])

    def forward(self, x, visible, masks):
        x = self.attention(x, visible, masks)
        return self.output(self.intermediate(x), x, masks)


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, x, visible, masks) -> list[Tensor]:
        states = [x]
        for layer in self.layer:
            states.append(layer(states[-1], visible, masks))
        return states


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        return torch.tanh(self.dense(x[:, 0]))


class BertModel(nn.Module):
    """BERT. Returns the hidden states (of the embeddings and each layer, (B, S, C)) and the pooled output (B, C).

    input_ids, token_type_ids, position_ids: (B, S) int64. attention_mask: (B, S), nonzero is visible; every sequence
    needs a visible token. masks: dropout masks by site (`fastbert.random.layer_sites`): (B, H, S, S) for attention
    weights, (B, S, C) elsewhere.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        masks: Mapping[int, Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        visible = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embeddings(input_ids, token_type_ids, position_ids, masks)
        states = self.encoder(x, visible, masks)
        return states, self.pooler(states[-1])
