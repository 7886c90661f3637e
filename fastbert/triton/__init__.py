"""The Triton kernels by the name of the primitive that each implements. Importing this module imports Triton."""

import torch.nn.functional as F

from fastbert.ops.linear import gradients
from fastbert.ops.padding import places_in_torch
from fastbert.triton import (
    attention,
    bias_gelu,
    cross_entropy,
    dense_gelu,
    embedding,
    layer_norm,
    linear_max,
    padding,
    relative_attention,
)


def _linear(x, weight, bias):
    """PyTorch's product: with nothing to fuse, no kernel is faster. Its bits depend on the strides of its inputs."""
    return F.linear(x.contiguous(), weight.contiguous(), bias)


KERNELS = {
    "attention_fwd": attention.forward,
    "attention_bwd": attention.backward,
    "relative_attention_fwd": relative_attention.forward,
    "relative_attention_bwd": relative_attention.backward,
    "layer_norm_fwd": layer_norm.forward,
    "layer_norm_bwd": layer_norm.backward,
    "add_layer_norm_fwd": layer_norm.add_forward,
    "add_layer_norm_bwd": layer_norm.add_backward,
    "bias_gelu_fwd": bias_gelu.forward,
    "bias_gelu_bwd": bias_gelu.backward,
    "dense_gelu_fwd": dense_gelu.forward,
    "dense_gelu_bwd": dense_gelu.backward,
    "linear_fwd": _linear,
    "linear_bwd": gradients,
    "linear_max_fwd": linear_max.forward,
    "linear_max_bwd": linear_max.backward,
    "embedding_fwd": embedding.forward,
    "embedding_bwd": embedding.backward,
    "cross_entropy_fwd": cross_entropy.forward,
    "cross_entropy_bwd": cross_entropy.backward,
    "padding_places": places_in_torch,
    "padding_pack": padding.pack,
    "padding_unpack": padding.unpack,
}
