"""fastbert as people call it: modules on padded batches, ops on packed tokens, whatever backend it chooses."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contenders import hf_sdpa, padded
from benchmarks.contenders.interface import CLASSIFIER, EPS, MODULES, OPS, Contender, Subject, Way
from benchmarks.sizes import Batch
from fastbert import ops


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    if subject.part in OPS:
        return Way(call(subject, batch))
    module = subject.ours.train(backward)
    return Way(
        lambda **arguments: subject.output(module(**arguments)),
        padded.prepare(batch, None if batch.is_full else batch.mask.long()),
        padded.collect(subject, batch),
        module,
        hf_sdpa.hidden_states(module.bert, batch) if subject.part == CLASSIFIER else None,
    )


def call(subject: Subject, batch: Batch) -> Callable[..., Tensor]:
    """The op of a case as a function of its inputs."""
    ends, longest, heads = batch.packing.cu_seqlens, batch.packing.max_seqlen, subject.config.num_attention_heads
    indices, shape = batch.indices, tuple(batch.mask.shape)
    calls = {
        "attention": lambda qkv: ops.attention(qkv, ends, longest),
        "qkv_attention": lambda hidden, weight, bias: ops.qkv_attention(hidden, weight, bias, heads, ends, longest),
        "add_layer_norm": lambda x, residual, weight, bias, x_bias: ops.add_layer_norm(
            x, residual, weight, bias, EPS, x_bias=x_bias
        ),
        "layer_norm": lambda x, weight, bias: ops.layer_norm(x, weight, bias, EPS),
        "embedding": lambda **tensors: ops.embedding(**tensors, eps=EPS, padding_idx=0),
        "pack": lambda x: ops.pack(x, indices),
        "unpack": lambda x: ops.unpack(x, indices, *shape),
    }
    plain = {name: getattr(ops, name) for name in ("dense_gelu", "linear", "bias_gelu", "cross_entropy")}
    return (calls | plain)[subject.part]


CONTENDER = Contender("fastbert", (*MODULES, *OPS), make)
