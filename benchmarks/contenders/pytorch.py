"""Each op as the PyTorch calls that it replaces, with padding where those have padding; and other libraries' ops."""

import dataclasses
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.batch import Batch
from benchmarks.contenders.interface import EPS, Runnable, Subject
from fastbert import testing

Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(subject: Subject) -> Runnable:
    return SEQUENCES[subject.part](subject) if subject.part in SEQUENCES else Runnable(ROWS[subject.part])


def compiled(subject: Subject) -> Runnable:
    """The same calls under torch.compile, for the one shape of the case."""
    torch.compiler.reset()  # else the ninth shape would quietly run uncompiled
    found = plain(subject)
    return dataclasses.replace(found, run=torch.compile(found.run, dynamic=False))


def labelled_rows(subject: Subject) -> Runnable:
    """The masked-LM loss on the labelled rows only: what fastbert does, without its kernels."""

    def run(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        rows = labels != -100
        return cross_entropy(hidden[rows], weight, bias, labels[rows])

    return Runnable(run)


def onednn(subject: Subject) -> Runnable:
    """PyTorch's other matrix product on a CPU: the one that its compiler uses in inference."""
    linear = testing.onednn_linear
    if subject.part == "qkv_attention":
        return qkv_attention(subject, linear)
    return Runnable(linear if subject.part == "linear" else lambda x, weight, bias: F.gelu(linear(x, weight, bias)))


# ---- ops on rows


def embedding(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias) -> Tensor:
    z = F.embedding(input_ids, word, 0) + F.embedding(token_type_ids, token_type)
    return F.layer_norm(z + F.embedding(position_ids, position), weight.shape, weight, bias, EPS)


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The loss from the logits of all tokens, as transformers' head computes it."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


ROWS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
    "add_layer_norm": lambda x, residual, weight, bias, x_bias: F.layer_norm(
        x + x_bias + residual, weight.shape, weight, bias, EPS
    ),
    "bias_gelu": lambda x, bias: F.gelu(x + bias),
    "dense_gelu": lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)),
    "linear": F.linear,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
}

# ---- ops on sequences


def attention(subject: Subject) -> Runnable:
    batch, attend = subject.batch, sdpa(subject.batch)
    return Runnable(lambda qkv: attend(*qkv.unbind(2)), lambda qkv: {"qkv": batch.pad(qkv)}, batch.take)


def sdpa(batch: Batch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention on q, k and v, (B, S, H, D) each as in a padded model, with a result of (B, S, H, D)."""
    keys = batch.keys

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2)

    return attend


def qkv_attention(subject: Subject, linear: Linear = F.linear) -> Runnable:
    batch, attend, heads = subject.batch, sdpa(subject.batch), subject.config.num_attention_heads

    def separate(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = zip(weight.chunk(3), bias.chunk(3), strict=True)
        return attend(*(linear(hidden, w, b).unflatten(-1, (heads, -1)) for w, b in parts)).flatten(2)

    return Runnable(separate, lambda hidden, **rest: {"hidden": batch.pad(hidden), **rest}, batch.take)


def linear_max(subject: Subject) -> Runnable:
    """The maxima over the padded grid's logits, as in sentence-transformers' SpladePooling."""
    hidden = ~subject.batch.mask.bool().unsqueeze(-1)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).masked_fill(hidden, -torch.inf).max(1).values

    return Runnable(run, lambda x, **rest: {"x": subject.batch.pad(x), **rest})


def pack(subject: Subject) -> Runnable:
    indices = subject.batch.indices
    return Runnable(lambda x: x.flatten(0, 1)[indices])


def unpack(subject: Subject) -> Runnable:
    indices, shape = subject.batch.indices, tuple(subject.batch.mask.shape)

    def run(x: Tensor) -> Tensor:
        return x.new_zeros(shape[0] * shape[1], x.shape[1]).index_put((indices,), x).unflatten(0, shape)

    return Runnable(run)


SEQUENCES = {f.__name__: f for f in (attention, qkv_attention, linear_max, pack, unpack)}


def sdpa_by(backend: SDPBackend, subject: Subject) -> Runnable | str:
    """SDPA limited to one kernel, which it might not choose by itself. cuDNN's takes a mask in some versions and
    shapes: one call shows whether it does. The choice in the forward also decides the backward."""
    if backend == SDPBackend.FLASH_ATTENTION and not subject.batch.is_full:
        return "takes no mask: full batches only"
    found = attention(subject)

    def run(qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return found.run(qkv)

    made = dataclasses.replace(found, run=run)
    try:
        made.timed(subject.inputs, subject.backward)()
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        return f"torch {torch.__version__} has no {backend.name} for this batch"
    return made


# ---- attention on packed tokens


def jagged(subject: Subject) -> Runnable:
    """F.scaled_dot_product_attention on jagged nested tensors: PyTorch's attention without padding.

    q, k and v are contiguous, as three projections give them: it refuses slices of a single tensor.
    """
    from torch.nested import nested_tensor_from_jagged

    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)  # says that it is a prototype
    ends, lengths = subject.batch.cu_seqlens.long(), subject.batch.lengths
    known = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}  # otherwise a host synchronisation

    def prepare(qkv: Tensor) -> dict[str, Tensor]:
        return {name: x.contiguous() for name, x in zip("qkv", qkv.unbind(1), strict=True)}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (nested_tensor_from_jagged(x, ends, **known).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    return Runnable(run, prepare)


def varlen(subject: Subject) -> Runnable | str:
    """torch.nn.attention.varlen, where this PyTorch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"not in torch {torch.__version__}: pip install --upgrade torch"
    ends, longest = subject.batch.cu_seqlens, subject.batch.max_seqlen
    return Runnable(lambda qkv: varlen_attn(*qkv.unbind(1), ends, ends, longest, longest))


def flash_attention(subject: Subject) -> Runnable:
    """flash-attention's packed attention, which like fastbert's reads the output of one projection."""
    from flash_attn import flash_attn_varlen_qkvpacked_func

    ends, longest = subject.batch.cu_seqlens, subject.batch.max_seqlen
    return Runnable(lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, ends, longest))


# ---- Liger


def liger(subject: Subject) -> Runnable:
    """Liger's kernels for operations of BERT. Its GELU is the tanh form, and it has no residual + LayerNorm."""
    from liger_kernel.transformers import functional

    if subject.part == "layer_norm":
        return Runnable(lambda x, weight, bias: functional.liger_layer_norm(x, weight, bias, EPS))

    def run(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        rows = labels != -100  # Liger would compute the logits of the others too
        return functional.liger_fused_linear_cross_entropy(hidden[rows], weight, labels[rows], bias)

    return Runnable(run)
