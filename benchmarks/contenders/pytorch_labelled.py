"""The masked-LM loss in PyTorch, on the labelled rows only: what fastbert does, without its kernels."""

import torch
from torch import Tensor

from benchmarks.contenders import pytorch
from benchmarks.contenders.interface import Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    def run(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        rows = labels != -100
        return pytorch.cross_entropy(hidden[rows], weight, bias, labels[rows])

    return Way(run)


CONTENDER = Contender("PyTorch, labelled rows", ("cross_entropy",), make, yardstick=True)
