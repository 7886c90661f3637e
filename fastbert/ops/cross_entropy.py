"""cross_entropy: the masked-LM loss from hidden states. The logits exist once; their gradient overwrites them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.numbers import wide
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad

# ---- plain PyTorch


def cross_entropy_ref(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """`cross_entropy` in plain PyTorch; it can be differentiated any number of times."""
    logits = F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
    total = F.cross_entropy(wide(logits), labels.long(), ignore_index=ignore_index, reduction="sum")
    return total / (labels != ignore_index).sum().clamp(min=1)


def _forward(hidden, weight, bias, labels, ignore_index, need_dlogits):
    logits = F.linear(hidden, weight, bias)
    labelled = labels != ignore_index
    target = torch.where(labelled, labels, 0).long().unsqueeze(-1)
    scores = wide(logits)
    lse = scores.logsumexp(-1, keepdim=True)
    losses = torch.where(labelled, (lse - scores.gather(-1, target)).squeeze(-1), 0)
    loss = losses.sum() / labelled.sum().clamp(min=1)
    if not need_dlogits:
        return loss, hidden.new_empty(0)
    probabilities = (scores - lse).exp_()
    dlogits = probabilities.scatter_add_(-1, target, -torch.ones_like(target, dtype=probabilities.dtype))
    return loss, dlogits.masked_fill_(~labelled.unsqueeze(-1), 0).to(hidden.dtype)


def _backward(dloss, hidden, weight, labels, dlogits, ignore_index, need_dhidden, need_dparams):
    """dlogits is softmax - onehot. dloss / count is multiplied in after the first product, and into the smaller operand
    of the second: there it neither underflows in float16 nor costs a pass over the logits."""
    scale = dloss / (labels != ignore_index).sum().clamp(min=1)
    empty = hidden.new_empty(0)
    dhidden = (wide(dlogits @ weight) * scale).to(hidden.dtype) if need_dhidden else empty
    if not need_dparams:
        return dhidden, empty, empty
    dweight = dlogits.T @ (wide(hidden) * scale).to(hidden.dtype)
    return dhidden, dweight, _dbias(dloss, hidden, weight, labels, dlogits, ignore_index)


def _dbias(dloss, hidden, weight, labels, dlogits, ignore_index):
    scale = dloss / (labels != ignore_index).sum().clamp(min=1)
    return (wide(dlogits).sum(0) * scale).to(hidden.dtype)


# ---- schemas


def _fake_forward(hidden, weight, bias, labels, ignore_index, need_dlogits):
    loss = hidden.new_empty((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    if not need_dlogits:
        return loss, hidden.new_empty(0)
    classes, line = weight.shape[0], 128 // hidden.element_size()
    stride = (classes + line - 1) // line * line  # rows at multiples of 128 bytes, for products and vector loads
    return loss, hidden.new_empty_strided((hidden.shape[0], classes), (stride, 1))


def _fake_backward(dloss, hidden, weight, labels, dlogits, ignore_index, need_dhidden, need_dparams):
    dweight, dbias = (hidden.new_empty(s if need_dparams else (0,)) for s in (weight.shape, weight.shape[:1]))
    return hidden.new_empty(hidden.shape if need_dhidden else (0,)), dweight, dbias


FWD = Primitive(
    "cross_entropy_fwd",
    "(Tensor hidden, Tensor weight, Tensor bias, Tensor labels, int ignore_index, bool need_dlogits)"
    " -> (Tensor loss, Tensor dlogits)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "cross_entropy_bwd",
    "(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, Tensor dlogits, int ignore_index,"
    " bool need_dhidden, bool need_dparams) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    _fake_backward,
    _backward,
)


# ---- the op


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, hidden, weight, bias, labels, ignore_index):
        loss, dlogits = FWD(backend, hidden, weight, bias, labels, ignore_index, True)
        ctx.save_for_backward(hidden, weight, labels, dlogits, bias)
        ctx.backend, ctx.ignore_index = backend, ignore_index
        return loss

    @staticmethod
    @first_derivative_only("cross_entropy")
    def backward(ctx, saved, dloss):
        need_dhidden, need_dweight, need_dbias = ctx.needs_input_grad[1:4]
        *of_product, _ = saved  # the bias is saved because all gradients depend on it
        dhidden, dweight, dbias = BWD(ctx.backend, dloss, *of_product, ctx.ignore_index, need_dhidden, need_dweight)
        if need_dbias and not need_dweight:  # a head on frozen embeddings trains its bias alone
            dbias = _dbias(dloss, *of_product, ctx.ignore_index)
        return None, dhidden, dweight, dbias, None, None


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy of the labelled rows, straight from hidden states: the masked-LM loss.

    hidden: (T, C) float32, bfloat16, float16 or float64. weight: (V, C) and bias: (V,), in hidden's dtype or float32
    (then converted to it; autocast converts all three). labels: (T,) int64 or int32, a class or ignore_index. Returns a
    scalar, float32 (float64 for float64); 0 if no row is labelled. Rows without a label are left out before the
    product with `weight`, which costs one host synchronisation on a GPU (in compiled or captured graphs they are
    computed, and have no weight in the loss). One (labelled rows, V) tensor is saved for backward.
    Raises IndexError (a label out of range, on a CPU, or under FASTBERT_CHECK=1; on a GPU without it, the loss and the
    gradients are NaN), ValueError and TypeError.

    Equivalent to::

        F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ignore_index=ignore_index)
    """
    _check(hidden, weight, bias, labels, ignore_index)
    rows = find_labelled_rows(labels, ignore_index)
    if rows is not None and rows.shape[0] < labels.shape[0]:
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    return _apply(hidden, weight, bias, labels, ignore_index)


def cross_entropy_of_rows(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy` that computes all rows; those with the label -100 have no weight in the loss.

    For callers that have gathered the labelled rows already: it never synchronises with the host.
    """
    _check(hidden, weight, bias, labels, -100)
    return _apply(hidden, weight, bias, labels, -100)


def find_labelled_rows(labels: Tensor, ignore_index: int = -100) -> Tensor | None:
    """The indices of the rows with a label, (L,) int64, from labels (T,). One host synchronisation on a GPU.

    Returns None in compiled and captured graphs, and for fake tensors: the number of these rows cannot be known there.
    """
    if checks.without_values(labels) or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return (labels != ignore_index).nonzero().squeeze(-1)


def _check(hidden, weight, bias, labels, ignore_index):
    op = "cross_entropy"
    if not isinstance(bias, Tensor):
        raise TypeError(f"{op}: bias is a {type(bias).__name__}; expected a tensor, (V,)")
    checks.dense(op, hidden, weight, bias, name="hidden")
    checks.shape(op, "hidden", hidden, (None, weight.shape[1]), "(T, C)")
    checks.integers(op, labels=labels)
    checks.shape(op, "labels", labels, (hidden.shape[0],), "(T,)", "a label for each row of hidden")
    checks.same_device(op, {"hidden": hidden, "labels": labels})
    checks.index_range(op, "labels", labels, weight.shape[0], also=ignore_index)


def _apply(hidden, weight, bias, labels, ignore_index):
    hidden, weight, bias = (t.to(autocast_dtype(hidden)) for t in (hidden, weight, bias))
    live = needs_grad(hidden, weight, bias)
    backend = backends.choose("cross_entropy", hidden.device.type, hidden.dtype, backward=live)
    if live:
        return _CrossEntropy.apply(backend, hidden, weight, bias, labels, ignore_index)
    return FWD(backend, hidden, weight, bias, labels, ignore_index, False)[0]
