"""cross_entropy in Triton: the products are the library's; one kernel computes the losses from the logits, and replaces
the logits by their gradient.

A program owns a row of logits. Rows begin at multiples of 128 bytes, whatever the number of classes: the library's fast
products need 16. Nothing reads what lies between them. The bias joins here and not in the product: the library adds one
to rows with a stride only by writing it to every row first.

The first pass over a row finds the largest logit and the sum of exponentials, separately for each column of the tile,
and rescales the sum where a larger logit comes. For a backward, a second pass, mostly from the L2 cache, turns the
logits into softmax - onehot. Bytes moved: the logits read once, or twice and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.triton.common import Config, launch, pick


def _config(classes: int) -> Config:
    columns = max(16, min(4096, triton.next_power_of_2(classes)))
    return Config({"COLUMNS": columns}, num_warps=max(1, columns // 512))


FORWARD = {80: _config}
LINE = 128  # bytes


# ---- forward


@triton.jit
def _biased(logits, bias, column, end):
    """Logits of some columns, -inf from `end` on."""
    x = tl.load(logits + column, column < end, other=float("-inf")).to(tl.float32)
    return x + tl.load(bias + column, column < end, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["ignore_index"])
def _forward(
    logits, bias, labels, losses, classes, stride, ignore_index, NEED_DLOGITS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    given = tl.load(labels + row).to(tl.int64)
    labelled = given != ignore_index
    label = tl.minimum(tl.maximum(given, 0), classes - 1)  # -1 where there is no class
    known = labelled & (label >= 0)
    picked = tl.load(logits + label, known, other=0.0).to(tl.float32)
    picked += tl.load(bias + label, known, other=0.0).to(tl.float32)
    largest = tl.full((COLUMNS,), -3.4028234663852886e38, tl.float32)  # not -inf: -inf - -inf is NaN
    total = tl.zeros((COLUMNS,), tl.float32)
    end = tl.where(labelled, classes, 0)  # a row without a label is not read
    for first in range(0, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = _biased(logits, bias, column, end)
        excess = x - largest
        decay = tl.exp(-tl.abs(excess))  # one exponential serves both cases
        total = tl.where(excess > 0.0, total * decay + 1.0, total + decay)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    total = tl.where(labelled, tl.sum(total * tl.exp(largest - top), 0), 1.0)
    tl.store(losses + row, tl.where(labelled, top - picked + tl.log(total), 0.0))
    if NEED_DLOGITS:
        tl.debug_barrier()  # the other warps have read their logits before these are overwritten
        for first in range(0, classes, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            x = _biased(logits, bias, column, end)
            p = tl.exp(x - top) / total
            d = tl.where(column == label, p - 1.0, p)
            tl.store(logits + column, tl.where(column < end, d, 0.0), column < classes)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, ignore_index: int, need_dlogits: bool
) -> tuple[Tensor, Tensor]:
    classes, line = weight.shape[0], LINE // hidden.element_size()
    logits = hidden.new_empty_strided((hidden.shape[0], classes), (triton.cdiv(classes, line) * line, 1))
    torch.mm(hidden.contiguous(), weight.contiguous().t(), out=logits)
    losses = hidden.new_empty(labels.shape, dtype=torch.float32)
    launch(
        _forward, labels.shape, logits, bias.contiguous(), labels.contiguous(), losses,
        classes, logits.stride(0), ignore_index,
        config=pick(FORWARD, hidden.device, classes), NEED_DLOGITS=need_dlogits,
    )  # fmt: skip
    return losses.sum() / _count(labels, ignore_index), logits if need_dlogits else hidden.new_empty(0)


def _count(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels != ignore_index).sum().clamp(min=1)


# ---- backward: dlogits is softmax - onehot. dloss / count is multiplied in after the first product, and into the
# smaller operand of the second: it does not underflow in float16 there, and costs no pass over the logits


def backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, dlogits: Tensor, ignore_index: int,
    need_dhidden: bool, need_dparams: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden, weight = hidden.contiguous(), weight.contiguous()
    scale, dtype = dloss / _count(labels, ignore_index), hidden.dtype
    dhidden = ((dlogits @ weight).float() * scale).to(dtype) if need_dhidden else hidden.new_empty(0)
    if not need_dparams:
        return dhidden, hidden.new_empty(0), hidden.new_empty(0)
    dweight = dlogits.T @ (hidden.float() * scale).to(dtype)
    return dhidden, dweight, (dlogits.sum(0, dtype=torch.float32) * scale).to(dtype)
