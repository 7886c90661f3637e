"""`fastbert.graph`: our model as a CUDA graph, of a bucket with room for exactly this batch."""

import torch
from torch import Tensor

from benchmarks.contenders import padded
from benchmarks.contenders.interface import MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    from fastbert.inference.graphs import graph

    graphed = graph(
        subject.ours.eval(),
        max_tokens=(batch.tokens,),
        max_sequences=len(batch.lengths),
        max_seqlen=batch.packing.max_seqlen,
    )

    def run(**arguments: Tensor) -> Tensor:
        return subject.output(graphed(**arguments))

    prepare = padded.prepare(batch, None if batch.is_full else batch.mask)
    return Way(run, prepare, padded.collect(subject, batch))


CONTENDER = Contender(
    "fastbert.graph",
    (MODEL,),
    make,
    needs=("fastbert.graph",),
    install="pip install .",
    devices=("cuda",),
    inference=True,
)
