"""transformers' own modules with SDPA attention under torch.compile, for the one shape of the case.

On a GPU an inference replays a CUDA graph (mode "reduce-overhead"): what PyTorch offers against launch costs.
"""

import dataclasses

import torch

from benchmarks.contenders import hf_sdpa
from benchmarks.contenders.interface import MODULES, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    torch.compiler.reset()  # else the ninth shape would quietly run uncompiled
    way = hf_sdpa.make(subject, batch, dtype, device, backward)
    mode = "reduce-overhead" if device == "cuda" and not backward else None
    compiled = torch.compile(subject.theirs, dynamic=False, mode=mode)
    return dataclasses.replace(way, run=lambda **arguments: subject.output(compiled(**arguments)))


CONTENDER = Contender(
    "transformers, torch.compile",
    MODULES,
    make,
    needs=("transformers",),
    install="pip install transformers",
    slow_to_make=True,
)
