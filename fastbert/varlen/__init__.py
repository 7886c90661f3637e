"""PyTorch's varlen_attn, by the names of the primitives that it implements. Importing this imports torch._dynamo."""

from fastbert.varlen import attention

KERNELS = {"attention_fwd": attention.forward, "attention_bwd": attention.backward}
