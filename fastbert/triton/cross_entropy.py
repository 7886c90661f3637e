"""cross_entropy in Triton: PyTorch computes the matrix products, and one kernel computes the losses from the logits and
overwrites the logits with their gradient.

A program owns a row of logits. Rows begin at multiples of 128 bytes, whatever the number of classes: PyTorch's fast
products need 16. In 16 bits they also need a multiple of 8 classes. So, with many rows, the weight is copied and padded
to such a multiple with rows of zeros, and dlogits has columns of zeros there, after its last class. Nothing else reads
the memory between the rows. The bias is added in the kernel, not in the product, which could add it to rows with a
stride only by writing it to every row first.

The first pass over a row finds the largest logit and the sum of exponentials, separately for each column of the tile,
and rescales the sum when it meets a larger logit. For a backward, a second pass, mostly from the L2 cache, turns the
logits into softmax - onehot. Bytes moved: the logits read once, or read twice and written once.
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
PADDED_ROWS, PADDED_CLASSES, PADDING = 256, 1024, 8  # with fewer rows or classes, the copy of the weight does not pay


# ---- padding with classes of zeros


def _padded_classes(hidden: Tensor, weight: Tensor) -> int:
    rows, (classes, inner) = hidden.shape[0], weight.shape
    pays = hidden.element_size() == 2 and rows >= PADDED_ROWS and classes >= PADDED_CLASSES and inner % PADDING == 0
    return triton.cdiv(classes, PADDING) * PADDING if pays else classes


def _stride(classes: int, dtype: torch.dtype) -> int:
    line = LINE // dtype.itemsize
    return triton.cdiv(classes, line) * line


def _with_rows(weight: Tensor, rows: int) -> Tensor:
    """The weight, contiguous, padded with rows of zeros to `rows`."""
    classes, inner = weight.shape
    if rows == classes:
        return weight.contiguous()
    made = weight.new_empty(rows, inner)
    made[:classes], made[classes:] = weight, 0
    return made


def _with_columns(dlogits: Tensor, columns: int) -> Tensor:
    """dlogits with the columns of zeros that the forward wrote after it. A copy made by other code, such as a hook for
    saved tensors, lacks them, which shows in its strides or in the size of its memory."""
    rows, classes = dlogits.shape
    strides = _stride(classes, dlogits.dtype), 1
    if columns == classes or dlogits.stride() != strides or dlogits.storage_offset():
        return dlogits
    bytes = ((rows - 1) * strides[0] + columns) * dlogits.element_size()
    return dlogits.as_strided((rows, columns), strides) if dlogits.untyped_storage().nbytes() == bytes else dlogits


# ---- forward


@triton.jit
def _biased(logits, bias, column, end):
    """The logits of some columns, bias added; -inf from `end` on."""
    x = tl.load(logits + column, column < end, other=float("-inf")).to(tl.float32)
    return x + tl.load(bias + column, column < end, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["padded", "ignore_index"])
def _forward(
    logits, bias, labels, losses, classes, padded, stride, ignore_index,
    NEED_DLOGITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    given = tl.load(labels + row).to(tl.int64)
    labelled = given != ignore_index
    label = tl.minimum(tl.maximum(given, 0), classes - 1)  # of which it is read; -1 if there are no classes
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
    total = tl.where(labelled & (given != label), float("nan"), total)  # no such class: NaN loss and gradient
    tl.store(losses + row, tl.where(labelled, top - picked + tl.log(total), 0.0))
    if NEED_DLOGITS:
        tl.debug_barrier()  # all warps have to read their logits before any are overwritten
        for first in range(0, padded, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            x = _biased(logits, bias, column, end)
            p = tl.exp(x - top) / total
            d = tl.where(column == label, p - 1.0, p)
            tl.store(logits + column, tl.where(column < end, d, 0.0), column < padded)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, ignore_index: int, need_dlogits: bool
) -> tuple[Tensor, Tensor]:
    classes, padded = weight.shape[0], _padded_classes(hidden, weight)
    logits = hidden.new_empty_strided((hidden.shape[0], padded), (_stride(classes, hidden.dtype), 1))
    torch.mm(hidden.contiguous(), _with_rows(weight, padded).t(), out=logits)
    losses = hidden.new_empty(labels.shape, dtype=torch.float32)
    launch(
        _forward, labels.shape, logits, bias.contiguous(), labels.contiguous(), losses,
        classes, padded, logits.stride(0), ignore_index,
        config=pick(FORWARD, hidden.device, classes), NEED_DLOGITS=need_dlogits,
    )  # fmt: skip
    return losses.sum() / _count(labels, ignore_index), logits[:, :classes] if need_dlogits else hidden.new_empty(0)


def _count(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels != ignore_index).sum().clamp(min=1)


# ---- backward: dlogits is softmax - onehot. dloss / count is multiplied in after the first product, and into the
# smaller operand of the second: there it neither underflows in float16 nor costs a pass over the logits


def backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, dlogits: Tensor, ignore_index: int,
    need_dhidden: bool, need_dparams: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden, scale, dtype = hidden.contiguous(), dloss / _count(labels, ignore_index), hidden.dtype
    left, dhidden = _with_columns(dlogits, _padded_classes(hidden, weight)), hidden.new_empty(0)
    if need_dhidden:
        dhidden = ((left @ _with_rows(weight, left.shape[1])).float() * scale).to(dtype)
    if not need_dparams:
        return dhidden, hidden.new_empty(0), hidden.new_empty(0)
    dweight = left.T @ (hidden.float() * scale).to(dtype)
    dbias = (dlogits.sum(0, dtype=torch.float32) * scale).to(dtype)
    return dhidden, dweight[: weight.shape[0]], dbias
