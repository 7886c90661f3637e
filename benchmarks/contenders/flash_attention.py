"""flash-attention's packed attention, which reads the projection's output as fastbert's does."""

import torch
from torch import Tensor

from benchmarks.contenders.interface import Contender, Subject, Way
from benchmarks.sizes import Batch

INSTALL = "pip install flash-attn --no-build-isolation"


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    from flash_attn import flash_attn_varlen_qkvpacked_func

    ends, longest = batch.packing.cu_seqlens, batch.packing.max_seqlen

    def run(qkv: Tensor) -> Tensor:
        return flash_attn_varlen_qkvpacked_func(qkv, ends, longest)

    return Way(run)


CONTENDER = Contender(
    "flash-attention",
    ("attention",),
    make,
    needs=("flash_attn",),
    install=INSTALL,
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
)
