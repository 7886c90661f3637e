"""Each op as the PyTorch calls that it replaces, with padding where those have padding."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.interface import EPS, OPS, Contender, Subject, Way
from benchmarks.sizes import Batch

NAME = "PyTorch"


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    if subject.part in ROWS:
        return Way(ROWS[subject.part])
    return SEQUENCES[subject.part](subject, batch)


# ---- ops on rows


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> Tensor:
    return F.layer_norm(x + x_bias + residual, weight.shape, weight, bias, EPS)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def dense_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def embedding(
    input_ids: Tensor,
    position_ids: Tensor,
    token_type_ids: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    z = F.embedding(input_ids, word, 0) + F.embedding(token_type_ids, token_type)
    return F.layer_norm(z + F.embedding(position_ids, position), weight.shape, weight, bias, EPS)


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The logits of all tokens, as transformers' head has it."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


ROWS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": layer_norm,
    "add_layer_norm": add_layer_norm,
    "bias_gelu": bias_gelu,
    "dense_gelu": dense_gelu,
    "linear": F.linear,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
}

# ---- ops that know sequences: (subject, batch) -> Way


def attention(subject: Subject, batch: Batch) -> Way:
    return Way(lambda qkv: _sdpa(*qkv.unbind(2), batch), lambda qkv: {"qkv": batch.pad(qkv)}, batch.take)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """(B, S, H, D) each, as a padded model has them, to (B, S, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=batch.keys).transpose(1, 2)


def qkv_attention(subject: Subject, batch: Batch, linear: Callable[..., Tensor] = F.linear) -> Way:
    def separate(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = zip(weight.chunk(3), bias.chunk(3), strict=True)
        q, k, v = (linear(hidden, w, b).unflatten(-1, (subject.config.num_attention_heads, -1)) for w, b in parts)
        return _sdpa(q, k, v, batch).flatten(2)

    return Way(separate, lambda hidden, **rest: {"hidden": batch.pad(hidden), **rest}, batch.take)


def pack(subject: Subject, batch: Batch) -> Way:
    indices = batch.indices
    return Way(lambda x: x.flatten(0, 1)[indices])


def unpack(subject: Subject, batch: Batch) -> Way:
    indices, shape = batch.indices, tuple(batch.mask.shape)

    def run(x: Tensor) -> Tensor:
        return x.new_zeros(shape[0] * shape[1], x.shape[1]).index_put((indices,), x).unflatten(0, shape)

    return Way(run)


SEQUENCES: dict[str, Callable[[Subject, Batch], Way]] = {
    "attention": attention,
    "qkv_attention": qkv_attention,
    "pack": pack,
    "unpack": unpack,
}

CONTENDER = Contender(NAME, OPS, make, yardstick=True)
