"""transformers' own modules with attention in separate PyTorch calls."""

import copy

import torch

from benchmarks.contenders import hf_sdpa
from benchmarks.contenders.interface import MODULES, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    module = with_attention(subject.theirs, "eager")
    keys = batch.keys
    if keys is not None:  # eager attention adds its mask to the scores
        keys = torch.zeros(keys.shape, dtype=dtype, device=device).masked_fill(~keys, torch.finfo(dtype).min)
    return hf_sdpa.way(module, subject, batch, backward, keys)


def with_attention(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """A copy with another attention; what set_attn_implementation does, which a bare encoder does not have."""
    module = copy.deepcopy(module)
    module.config._attn_implementation = name
    return module


CONTENDER = Contender(
    "transformers eager", MODULES, make, needs=("transformers",), install="pip install transformers", yardstick=True
)
