"""An op's PyTorch calls under torch.compile, for the one shape of the case."""

import dataclasses

import torch

from benchmarks.contenders import pytorch
from benchmarks.contenders.interface import OPS, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    torch.compiler.reset()  # else the ninth shape would quietly run uncompiled
    way = pytorch.make(subject, batch, dtype, device, backward)
    return dataclasses.replace(way, run=torch.compile(way.run, dynamic=False))


CONTENDER = Contender("PyTorch, torch.compile", OPS, make, slow_to_make=True)
