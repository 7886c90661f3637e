"""PyTorch's other matrix product on a CPU: the one that its compiler uses in inference."""

import torch
import torch.nn.functional as F

from benchmarks.contenders import pytorch
from benchmarks.contenders.interface import Contender, Subject, Way
from benchmarks.sizes import Batch
from fastbert import testing


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    if subject.part == "linear":
        return Way(testing.onednn_linear)
    if subject.part == "qkv_attention":
        return pytorch.qkv_attention(subject, batch, testing.onednn_linear)
    return Way(lambda x, weight, bias: F.gelu(testing.onednn_linear(x, weight, bias)))


CONTENDER = Contender(
    "PyTorch, oneDNN",
    ("linear", "dense_gelu", "qkv_attention"),
    make,
    devices=("cpu",),
    dtypes=(torch.float32,),
    yardstick=True,
)
