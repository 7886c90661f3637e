"""F.scaled_dot_product_attention on jagged nested tensors: PyTorch's attention without padding.

q, k and v are contiguous, as three projections give them: it refuses slices of one.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.interface import Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    from torch.nested import nested_tensor_from_jagged

    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)  # says that it is a prototype
    ends = batch.packing.cu_seqlens.long()
    known = {"min_seqlen": min(batch.lengths), "max_seqlen": max(batch.lengths)}  # else it asks the device

    def prepare(qkv: Tensor) -> dict[str, Tensor]:
        return {name: x.contiguous() for name, x in zip("qkv", qkv.unbind(1), strict=True)}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (nested_tensor_from_jagged(x, ends, **known).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    return Way(run, prepare)


CONTENDER = Contender("PyTorch SDPA, jagged", ("attention",), make)
