"""`fastbert.accelerate` on transformers' own modules; of a masked LM also without the logits that no loss needs."""

import copy
import functools

import torch

import fastbert
from benchmarks.contenders import hf_sdpa
from benchmarks.contenders.interface import CLASSIFIER, MASKED_LM, MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch

NAME = "fastbert.accelerate"
SKIPPING = f"{NAME}, skip_logits"


def make(skip_logits: bool, subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    module = copy.deepcopy(subject.theirs)
    fastbert.accelerate(module, skip_logits=skip_logits)
    return hf_sdpa.way(module, subject, batch, backward, None)


_NEEDS = {"needs": ("transformers",), "install": "pip install transformers"}
CONTENDERS = (
    Contender(NAME, (MODEL, CLASSIFIER, MASKED_LM), functools.partial(make, False), **_NEEDS),
    Contender(SKIPPING, (MASKED_LM,), functools.partial(make, True), **_NEEDS),
)
