"""packed_linear: a dense layer for inference, with its weight packed once for this processor's products.

A packed weight has the shape (panels, groups, width, group): panels of `width` channels, which a product reads from
first to last, and groups of numbers of a channel that one instruction adds up. Both sizes depend on the processor, so
packed weights do not belong in files; `unpack_weight` gives back what was packed, bit for bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.bias_gelu import check_approximate
from fastbert.ops.linear_max import chunks, maxima
from fastbert.ops.op import Primitive, needs_grad
from fastbert.ops.padding import sequence_of

WEIGHTS = (torch.float32, torch.bfloat16, torch.int8)
_SMALLEST = 2.0**-100  # beside quantised weights, rows of x whose largest magnitude is below this count as zeros
_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # what a row's largest magnitude is scaled to
# Read at import, because torch.compile cannot trace a call of build_info.
_WIDTH, _GROUPS = backends.build_info().get("packed_layout") or (16, {"float32": 1, "bfloat16": 1, "int8": 2})


def layout(dtype: torch.dtype) -> tuple[int, int]:
    """(width, group) of packed weights of this dtype on this machine: channels per panel, numbers per group."""
    return _WIDTH, _GROUPS[str(dtype).removeprefix("torch.")]


def pack_weight(weight: Tensor) -> Tensor:
    """Packs a weight (C, K) of float32, bfloat16 or int8 for `packed_linear`, padded with zeros. Raises TypeError for
    another dtype, ValueError for another shape."""
    return panels_of(weight).contiguous()


def panels_of(weight: Tensor) -> Tensor:
    """What `pack_weight` returns, but not contiguous: for callers that copy it to memory of their own."""
    if weight.dtype not in WEIGHTS:
        raise TypeError(f"pack_weight: weight is {weight.dtype}; expected one of {', '.join(map(str, WEIGHTS))}")
    checks.shape("pack_weight", "weight", weight, (None, None), "(C, K)")
    width, group = layout(weight.dtype)
    channels, inner = weight.shape
    whole = F.pad(weight.detach(), (0, _padding(inner, group), 0, _padding(channels, width)))
    return whole.view(len(whole) // width, width, whole.shape[1] // group, group).transpose(1, 2)


def unpack_weight(packed: Tensor, channels: int, inner: int) -> Tensor:
    """The weight (channels, inner) that was packed."""
    rows = packed.transpose(1, 2).flatten(0, 1)  # one per channel
    return rows.flatten(1)[:channels, :inner].contiguous()


def quantize_weight(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantises a weight (C, K) to int8 or float8_e4m3fn, with a float32 factor for each channel, (C,). Symmetric: a
    channel's largest magnitude becomes 127, or 448. Raises ValueError for numbers that are not finite.

    Equivalent to::

        factor = weight.abs().amax(1) / 127
        weight.div(factor[:, None]).round().to(torch.int8), factor
    """
    weight = weight.detach().float()
    if not weight.isfinite().all():
        raise ValueError("quantize_weight: the weight has numbers that are not finite")
    factor = weight.abs().amax(1) / _LARGEST[dtype] if weight.shape[1] else weight.new_zeros(weight.shape[0])
    return _rounded(weight / factor.clamp(min=torch.finfo(torch.float32).tiny)[:, None], dtype), factor


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def with_sums(factor: Tensor, weight: Tensor) -> Tensor:
    """The `scale` of `packed_linear`, (2, C): the channels' factors, and the sums over K of the int8 weight (C, K),
    for processors whose int8 instructions take one operand as unsigned."""
    return torch.stack([factor, weight.sum(1, dtype=torch.int32).float()])


def _padding(size: int, unit: int) -> int:
    return -size % unit


# ---- plain PyTorch


def packed_linear_ref(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, channels: int, approximate: str | None = None
) -> Tensor:
    """`packed_linear` in plain PyTorch."""
    y = _product(_left(x, scale), unpack_weight(weight, channels, x.shape[-1]), scale, bias)
    return (y if approximate is None else F.gelu(y, approximate=approximate)).to(x.dtype)


def _left(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of x as they are multiplied, and beside int8 weights the factor of each."""
    return (x.float(), None) if scale is None else quantize_rows(x)


def _product(left: tuple[Tensor, Tensor | None], weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """The product with a plain weight, and its bias, in float32."""
    rows, factor = left
    if scale is None:
        y = F.linear(rows, weight.float())
    else:
        sums = rows.double() @ weight.double().T  # exact
        y = sums.float() * (scale[0] * factor)
    return y if bias is None else y + bias


def packed_linear_max_ref(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, channels: int, cu_seqlens: Tensor
) -> Tensor:
    """`packed_linear_max` in plain PyTorch. It holds the logits of all tokens."""
    logits = _product(_left(x, scale), unpack_weight(weight, channels, x.shape[-1]), scale, bias)
    empty = logits.new_full((channels,), -torch.inf)
    texts = logits.split(cu_seqlens.diff().tolist()) if cu_seqlens.shape[0] > 1 else ()
    tops = [text.max(0).values if len(text) else empty for text in texts]
    return torch.stack(tops).to(x.dtype) if tops else x.new_empty(0, channels)


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantises x (..., K) to int8 or float8_e4m3fn, with a float32 factor for each row, (..., 1).

    A row's largest magnitude becomes 127, or 448. A row with a NaN or an infinity gives zeros with the factor NaN.
    """
    x = x.float()
    high = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    finite = high.isfinite()
    usable = finite & (high >= _SMALLEST)
    largest = torch.full_like(high, _LARGEST[dtype])  # a tensor: for a number, torch multiplies by 1 / number
    rows = _rounded(torch.where(usable, x * (largest / high), 0), dtype)
    return rows, torch.where(finite, torch.where(usable, high / largest, 0), torch.nan)


# ---- schema


def _forward(x, weight, scale, bias, channels, approximate):
    return packed_linear_ref(x, weight, scale, bias, channels, approximate or None)


def _fake(x, weight, scale, bias, channels, approximate):
    return x.new_empty((*x.shape[:-1], channels))


FWD = Primitive(
    "packed_linear_fwd",  # approximate: "" for no GELU
    "(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, SymInt channels, str approximate) -> Tensor",
    _fake,
    _forward,
)


def _forward_max(x, weight, scale, bias, channels, cu_seqlens):
    token = torch.arange(x.shape[0], device=cu_seqlens.device, dtype=torch.int32)
    sequences, left = sequence_of(token, cu_seqlens), _left(x, scale)
    plain, parts = unpack_weight(weight, channels, x.shape[-1]), []
    for chunk in chunks(channels):
        factors = None if scale is None else scale[:, chunk]
        logits = _product(left, plain[chunk], factors, None if bias is None else bias[chunk])
        parts.append(maxima(logits, sequences, cu_seqlens.shape[0] - 1)[:-1])
    return torch.cat(parts, -1).to(x.dtype)


FWD_MAX = Primitive(
    "packed_linear_max_fwd",
    "(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, SymInt channels, Tensor cu_seqlens) -> Tensor",
    lambda x, weight, scale, bias, channels, cu_seqlens: x.new_empty(cu_seqlens.shape[0] - 1, channels),
    _forward_max,
)


# ---- the ops


def packed_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, channels: int, approximate: str | None = None
) -> Tensor:
    """A dense layer with a packed weight, and optionally GELU. It has no backward.

    x: (..., K) with at least two dimensions, in the weight's dtype; beside an int8 weight float32, bfloat16 or float16.
    weight: (C, K) of float32, bfloat16 or int8, packed by `pack_weight`. scale: from `with_sums` for an int8 weight,
    else None. bias: (C,) float32 or None. channels: C. approximate: None for no GELU, "none" (erf) or "tanh". Returns
    (..., C) in x's dtype. Sums are float32, whatever the weight's dtype.

    With an int8 weight, x is quantised to int8 too, each row by its largest magnitude (symmetric, ties to even). Sums
    are then exact, so every processor gives the same; K is at most 2**16. A row with a NaN or an infinity gives NaN.
    Raises ValueError (shapes, devices, approximate), TypeError (dtypes), RuntimeError where a gradient is live.

    Equivalent to::

        F.gelu(F.linear(x, weight, bias), approximate=approximate)
    """
    check_dense("packed_linear", x, weight, scale, bias, channels)
    if approximate is not None:
        check_approximate("packed_linear", approximate)
    refuse_gradients("packed_linear", x, weight, scale, bias)
    backend = backends.choose("packed_linear", x.device.type, x.dtype, backward=False)
    return FWD(backend, x, weight, scale, bias, channels, approximate or "")


def packed_linear_max(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, channels: int, cu_seqlens: Tensor
) -> Tensor:
    """`linear_max` with a packed weight: the largest result of each channel over the tokens of each sequence.

    x: (T, K) packed tokens. weight, scale, bias and channels as in `packed_linear`. cu_seqlens: (B + 1,) int32. Returns
    (B, C) in x's dtype; -inf for an empty sequence. Results are compared in float32, before they are rounded; a NaN
    counts as the largest. It has no backward. Raises what `packed_linear` raises, and ValueError for cu_seqlens (its
    values on a CPU or under FASTBERT_CHECK=1).

    Equivalent to::

        torch.stack([F.linear(text, weight, bias).max(0).values for text in x.split(lengths)])
    """
    op = "packed_linear_max"
    check_dense(op, x, weight, scale, bias, channels)
    checks.shape(op, "x", x, (None, None), "(T, K)")
    checks.sequences(op, cu_seqlens, x.shape[0], x.shape[0])
    checks.same_device(op, {"x": x, "cu_seqlens": cu_seqlens})
    refuse_gradients(op, x, weight, scale, bias)
    backend = backends.choose("packed_linear", x.device.type, x.dtype, backward=False)
    return FWD_MAX(backend, x, weight, scale, bias, channels, cu_seqlens)


def refuse_gradients(op: str, *tensors: Tensor | None) -> None:
    if needs_grad(*tensors):
        raise RuntimeError(f"{op}: prepared weights are for inference; expected torch.no_grad() or inference_mode()")


def check_dense(op: str, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, channels: int) -> None:
    """Checks shapes, devices and dtypes; the weight's dtype decides the others. Raises ValueError and TypeError."""
    allowed = {torch.float32: (torch.float32,), torch.bfloat16: (torch.bfloat16,), torch.int8: checks.FLOATS[:3]}
    if not isinstance(weight, Tensor) or weight.dtype not in allowed:
        given = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{op}: weight is {given}; expected one of {', '.join(map(str, WEIGHTS))}")
    if not isinstance(x, Tensor) or x.dtype not in allowed[weight.dtype]:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        expected = " or ".join(map(str, allowed[weight.dtype]))
        raise TypeError(f"{op}: x is {given} beside a weight of {weight.dtype}; expected {expected}")
    if x.dim() < 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., K) with at least two dimensions")
    quantized, (width, group) = weight.dtype == torch.int8, layout(weight.dtype)
    shape = (-(-channels // width), -(-x.shape[-1] // group), width, group)
    checks.shape(op, "weight", weight, shape, "what pack_weight gives for (C, K)")
    if quantized != (scale is not None):
        raise ValueError(f"{op}: scale is {'None' if quantized else 'given'} beside a weight of {weight.dtype}")
    for name, tensor, expected in (("scale", scale, (2, channels)), ("bias", bias, (channels,))):
        if tensor is None:
            continue
        checks.shape(op, name, tensor, expected, "C channels'")
        if tensor.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; expected torch.float32")
    checks.same_device(op, {"x": x, "weight": weight, "scale": scale, "bias": bias})
