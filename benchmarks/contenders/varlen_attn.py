"""PyTorch's attention on packed tokens (torch.nn.attention.varlen), where this PyTorch has it."""

import torch
from torch import Tensor

from benchmarks.contenders.interface import Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way | str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"not in torch {torch.__version__}: pip install --upgrade torch"
    ends, longest = batch.packing.cu_seqlens, batch.packing.max_seqlen

    def run(qkv: Tensor) -> Tensor:
        return varlen_attn(*qkv.unbind(1), ends, ends, longest, longest)

    return Way(run)


CONTENDER = Contender(
    "PyTorch varlen_attn", ("attention",), make, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)
)
