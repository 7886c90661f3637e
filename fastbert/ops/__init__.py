"""The operations, usable without the models. Each equals a few lines of PyTorch; fused ones have a `_ref` twin."""

from fastbert.ops.attention import RelativePositions, attention, attention_ref, attention_weights, qkv_attention
from fastbert.ops.bias_gelu import bias_gelu, bias_gelu_ref
from fastbert.ops.cross_entropy import cross_entropy, cross_entropy_ref
from fastbert.ops.dense_gelu import dense_gelu, dense_gelu_ref
from fastbert.ops.embedding import embedding, embedding_ref
from fastbert.ops.encoder_layer import after_attention, after_attention_ref, encoder_layer, encoder_layer_ref
from fastbert.ops.layer_norm import add_layer_norm, add_layer_norm_ref, layer_norm, layer_norm_ref
from fastbert.ops.linear import linear
from fastbert.ops.linear_max import linear_max, linear_max_ref
from fastbert.ops.packed_linear import (
    pack_weight,
    packed_linear,
    packed_linear_max,
    packed_linear_max_ref,
    packed_linear_ref,
    unpack_weight,
)
from fastbert.ops.padding import pack, pack_ref, unpack, unpack_ref
from fastbert.ops.relative_attention import relative_attention, relative_attention_ref
from fastbert.ops.scaled_linear import scaled_linear, scaled_linear_ref

__all__ = [
    "RelativePositions",
    "add_layer_norm",
    "add_layer_norm_ref",
    "after_attention",
    "after_attention_ref",
    "attention",
    "attention_ref",
    "attention_weights",
    "bias_gelu",
    "bias_gelu_ref",
    "cross_entropy",
    "cross_entropy_ref",
    "dense_gelu",
    "dense_gelu_ref",
    "embedding",
    "embedding_ref",
    "encoder_layer",
    "encoder_layer_ref",
    "layer_norm",
    "layer_norm_ref",
    "linear",
    "linear_max",
    "linear_max_ref",
    "pack",
    "pack_ref",
    "pack_weight",
    "packed_linear",
    "packed_linear_max",
    "packed_linear_max_ref",
    "packed_linear_ref",
    "qkv_attention",
    "relative_attention",
    "relative_attention_ref",
    "scaled_linear",
    "scaled_linear_ref",
    "unpack",
    "unpack_ref",
    "unpack_weight",
]
