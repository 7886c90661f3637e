"""fastbert's modules on batches that were packed before: no padding anywhere, no synchronisation."""

import torch
from torch import Tensor

from benchmarks.contenders.interface import ENCODER, MASKED_LM, MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    module = subject.ours.train(backward)
    ends = {"cu_seqlens": batch.packing.cu_seqlens, "max_seqlen": batch.packing.max_seqlen}

    def prepare(**packed: Tensor) -> dict[str, object]:
        return {**packed, **ends}

    return Way(lambda **arguments: subject.output(module(**arguments)), prepare, module=module)


CONTENDER = Contender("fastbert, packed input", (MODEL, ENCODER, MASKED_LM), make)
