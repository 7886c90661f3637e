"""linear_max: the largest logit of each sequence for each class, from hidden states, without the logits in memory."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.numbers import narrow, wide
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad
from fastbert.ops.padding import sequence_of

CHUNK = 4096  # plain PyTorch computes the logits of this many classes at a time

# ---- plain PyTorch


def linear_max_ref(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """`linear_max` in plain PyTorch, differentiable any number of times. It holds the logits of a whole sequence."""
    parameters = [None if t is None else wide(t.to(x.dtype)) for t in (weight, bias)]
    if cu_seqlens.shape[0] == 1:
        return x.new_empty(0, weight.shape[0])
    texts = x.split(cu_seqlens.diff().tolist())
    empty = wide(x).new_full((weight.shape[0],), -torch.inf)
    tops = [F.linear(wide(text), *parameters).max(0).values if len(text) else empty for text in texts]
    return torch.stack(tops).to(x.dtype)


def chunks(classes: int) -> Iterator[slice]:
    """CHUNK classes at a time."""
    return (slice(first, first + CHUNK) for first in range(0, max(classes, 1), CHUNK))


def _forward(x, weight, bias, cu_seqlens, need_rows):
    token = torch.arange(x.shape[0], device=cu_seqlens.device, dtype=torch.int32)
    sequences, parts = sequence_of(token, cu_seqlens), []
    for chunk in chunks(weight.shape[0]):
        logits = F.linear(wide(x), wide(weight[chunk]), None if bias is None else wide(bias[chunk]))
        parts.append(_first_maxima(logits, sequences, cu_seqlens.shape[0] - 1))
    y, rows = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return narrow(y, x.dtype), rows.int() if need_rows else rows.new_empty(0, dtype=torch.int32)


def maxima(logits: Tensor, sequences: Tensor, count: int) -> Tensor:
    """(count + 1, V): the maxima of the tokens of each sequence, and of those outside all. NaN is the largest."""
    top = logits.new_full((count + 1, logits.shape[1]), -torch.inf)
    return top.scatter_reduce(0, sequences.unsqueeze(-1).expand_as(logits), logits, "amax")


def _first_maxima(logits, sequences, count):
    """The maxima of each sequence, and the first row of each maximum (or -1)."""
    index, tokens, top = sequences.unsqueeze(-1).expand_as(logits), logits.shape[0], maxima(logits, sequences, count)
    highest = top.gather(0, index)
    highest = (logits == highest) | (logits.isnan() & highest.isnan())
    places = torch.arange(tokens, device=logits.device).unsqueeze(-1)
    rows = torch.full_like(top, tokens, dtype=torch.int64)
    rows = rows.scatter_reduce(0, index, torch.where(highest, places, tokens), "amin")
    return top[:count], torch.where(rows == tokens, -1, rows)[:count]


def _backward(dy, x, weight, rows, need_dx, need_dweight):
    tokens, dweight = x.shape[0], []
    target, dx = torch.where(rows < 0, tokens, rows).long(), torch.zeros_like(wide(x)) if need_dx else x.new_empty(0)
    for chunk in chunks(weight.shape[0]):
        dlogits = wide(x).new_zeros(tokens + 1, weight[chunk].shape[0])  # the last row is for empty sequences
        dlogits = dlogits.scatter_add_(0, target[:, chunk], wide(dy[:, chunk]))[:tokens]
        if need_dx:
            dx = dx + dlogits @ wide(weight[chunk])
        if need_dweight:
            dweight.append((dlogits.T @ wide(x)).to(x.dtype))
    return narrow(dx, x.dtype), torch.cat(dweight) if need_dweight else x.new_empty(0)


def _dbias(dy, rows):
    return torch.where(rows < 0, 0, wide(dy)).sum(0).to(dy.dtype)


# ---- schemas


def _fake_forward(x, weight, bias, cu_seqlens, need_rows):
    shape = cu_seqlens.shape[0] - 1, weight.shape[0]
    return x.new_empty(shape), x.new_empty(shape if need_rows else (0,), dtype=torch.int32)


def _fake_backward(dy, x, weight, rows, need_dx, need_dweight):
    return x.new_empty(x.shape if need_dx else (0,)), x.new_empty(weight.shape if need_dweight else (0,))


# rows: (B, V) int32, the row of x that gave each maximum; -1 for an empty sequence.
FWD = Primitive(
    "linear_max_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool need_rows) -> (Tensor y, Tensor rows)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "linear_max_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor rows, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    _fake_backward,
    _backward,
)


# ---- the op


class _LinearMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, weight, bias, cu_seqlens):
        y, rows = FWD(backend, x, weight, bias, cu_seqlens, True)
        ctx.save_for_backward(x, weight, rows)
        ctx.backend = backend
        return y

    @staticmethod
    @first_derivative_only("linear_max")
    def backward(ctx, saved, dy):
        _, need_dx, need_dweight, need_dbias, _ = ctx.needs_input_grad
        dx = dweight = None
        if need_dx or need_dweight:
            dx, dweight = BWD(ctx.backend, dy, *saved, need_dx, need_dweight)
        dbias = _dbias(dy, saved[-1]) if need_dbias else None
        return None, dx if need_dx else None, dweight if need_dweight else None, dbias, None


def linear_max(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """The largest logit of each class over the tokens of each sequence: SPLADE makes a text's vector from these.

    x: (T, C) packed tokens, float32, bfloat16, float16 or float64. weight: (V, C) and bias: (V,), in x's dtype or
    float32 (then converted to it; autocast converts all three). cu_seqlens: (B + 1,) int32. Returns (B, V) in the
    product's dtype; -inf for an empty sequence. The logits, (T, V), are never in memory as a whole; the row of each
    maximum, (B, V) int32, is saved for backward. Logits are compared in float32 (float64), before they are rounded.

    The gradient goes to the row of the maximum, the first one if several are equal (torch.amax spreads it over them);
    an empty sequence has none. A NaN counts as the largest. Raises ValueError (shapes, devices, cu_seqlens on a CPU or
    under FASTBERT_CHECK=1) and TypeError (dtypes).

    Equivalent to::

        torch.stack([F.linear(text, weight, bias).max(0).values for text in x.split(lengths)])
    """
    op = "linear_max"
    checks.dense(op, x, weight, bias)
    checks.shape(op, "x", x, (None, weight.shape[1]), "(T, C)")
    checks.sequences(op, cu_seqlens, x.shape[0], x.shape[0])
    checks.same_device(op, {"x": x, "cu_seqlens": cu_seqlens})
    dtype = autocast_dtype(x)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    live = needs_grad(x, weight, bias)
    backend = backends.choose(op, x.device.type, dtype, backward=live)
    if live:
        return _LinearMax.apply(backend, x, weight, bias, cu_seqlens)
    return FWD(backend, x, weight, bias, cu_seqlens, False)[0]
