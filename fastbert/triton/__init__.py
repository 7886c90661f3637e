"""The Triton kernels, by the names of the primitives that they implement. Importing this imports Triton."""

from fastbert.triton import bias_gelu, layer_norm

KERNELS = {
    "layer_norm_fwd": layer_norm.forward,
    "layer_norm_bwd": layer_norm.backward,
    "add_layer_norm_fwd": layer_norm.add_forward,
    "add_layer_norm_bwd": layer_norm.add_backward,
    "bias_gelu_fwd": bias_gelu.forward,
    "bias_gelu_bwd": bias_gelu.backward,
}
