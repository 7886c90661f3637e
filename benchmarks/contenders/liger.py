"""Liger's kernels for what BERT has too: LayerNorm, and the loss fused with its projection.

Its GELU is the tanh form, and it has no residual + LayerNorm.
"""

import torch
from torch import Tensor

from benchmarks.contenders.interface import EPS, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    from liger_kernel.transformers import functional

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.liger_layer_norm(x, weight, bias, EPS)

    def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        rows = labels != -100  # it would compute the logits of the others too
        return functional.liger_fused_linear_cross_entropy(hidden[rows], weight, labels[rows], bias)

    return Way(layer_norm if subject.part == "layer_norm" else cross_entropy)


CONTENDER = Contender(
    "Liger",
    ("layer_norm", "cross_entropy"),
    make,
    needs=("liger_kernel",),
    install="pip install liger-kernel",
    devices=("cuda",),
)
