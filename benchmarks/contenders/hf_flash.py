"""transformers' own models with flash-attention, which removes padding around each attention call."""

import torch

from benchmarks.contenders import flash_attention, hf_sdpa
from benchmarks.contenders.hf_eager import with_attention
from benchmarks.contenders.interface import CLASSIFIER, MASKED_LM, MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    return hf_sdpa.way(with_attention(subject.theirs, "flash_attention_2"), subject, batch, backward, None)


CONTENDER = Contender(
    "transformers flash_attention_2",
    (MODEL, CLASSIFIER, MASKED_LM),
    make,
    needs=("flash_attn",),
    install=flash_attention.INSTALL,
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
)
