"""scaled_linear: a dense layer for inference whose product is in fp8 (e4m3), with a factor per row of x and of weight.

PyTorch's `torch._scaled_mm` computes the products. The kernels here prepare its input: they write the e4m3 rows in the
same pass that computes GELU or LayerNorm.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.layer_norm import add_layer_norm_ref
from fastbert.ops.op import Primitive
from fastbert.ops.packed_linear import quantize_rows, refuse_gradients

E4M3 = torch.float8_e4m3fn
MULTIPLE = 16  # K and C are multiples of this
_OP = "scaled_linear"


class Scaled(NamedTuple):
    """Rows in e4m3, (..., K), and the float32 factor by which each has to be multiplied, (..., 1)."""

    rows: Tensor
    factors: Tensor


# ---- plain PyTorch


def scaled_linear_ref(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`scaled_linear` in plain PyTorch."""
    return _product_ref(Scaled(*quantize_rows(x, E4M3)), weight, scale, bias)


def _product_ref(x: Scaled, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        y = F.linear(x.rows.float(), weight.float()) * (x.factors * scale)
    return (y if bias is None else y + bias).bfloat16()


def _rows(x, bias, approximate):
    x = x.float() if bias is None else x.float() + bias.float()
    x = F.gelu(x, approximate=approximate) if approximate else x
    return quantize_rows(x.bfloat16(), E4M3)


def _layer_norm(x, residual, weight, bias, x_bias, eps):
    y = add_layer_norm_ref(x, residual, weight, bias, eps, x_bias=x_bias)
    return y, *quantize_rows(y, E4M3)


# ---- schemas


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


ROWS = Primitive(
    "scaled_rows_fwd",  # approximate: "" for no GELU
    "(Tensor x, Tensor? bias, str approximate) -> (Tensor rows, Tensor factors)",
    lambda x, bias, approximate: _empty_rows(x),
    _rows,
)
LAYER_NORM = Primitive(
    "scaled_layer_norm_fwd",
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? x_bias, float eps)"
    " -> (Tensor y, Tensor rows, Tensor factors)",
    lambda x, *_: (x.new_empty(x.shape), *_empty_rows(x)),
    _layer_norm,
)


# ---- the op


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """A dense layer with its product in fp8. It has no backward.

    x: (..., K) bfloat16 with at least two dimensions; each row is rounded to e4m3 with its own factor, its largest
    magnitude / 448. weight: (C, K) float8_e4m3fn and scale: (C,) float32, the channels' factors, from
    `quantize_weight`. bias: (C,) bfloat16 or None. K and C are multiples of 16. Returns (..., C) bfloat16. Sums are
    float32; on a GPU, fast accumulation (use_fast_accum of `torch._scaled_mm`) keeps some 14 bits of them (e4m3 has 4).
    A row with a NaN or an infinity gives NaN. Rows of more than 8192 elements run in plain PyTorch.
    Raises ValueError (shapes, devices), TypeError (dtypes), RuntimeError where a gradient is live.

    Equivalent to, but for the rounding of x::

        F.linear(x, weight.float() * scale[:, None], bias)
    """
    _check(x, weight, scale, bias)
    refuse_gradients(_OP, x, scale, bias)
    backend = choose(x)
    rows = quantized(backend, x.reshape(-1, x.shape[-1]))
    return product(backend, rows, weight.contiguous(), scale.contiguous(), bias).view(*x.shape[:-1], len(weight))


def choose(x: Tensor) -> str:
    return backends.choose(_OP, x.device.type, x.dtype, backward=False, size=x.shape[-1])


def quantized(backend: str, x: Tensor, bias: Tensor | None = None, approximate: str = "") -> Scaled:
    """x + bias, or its GELU if `approximate` is not empty, as e4m3 rows for a product."""
    return Scaled(*ROWS(backend, x, bias, approximate))


def problem_on(device: torch.device) -> str | None:
    """Why products in fp8 cannot run on this device, or None if they can. It tries a small one."""
    if device.type not in backends.SERVES["cuda"]:
        return "it runs on GPUs only, from sm_90 on"
    if reason := backends.why_not("cuda", _OP, device.type, torch.bfloat16):
        return reason
    ones, factors = torch.ones(MULTIPLE, MULTIPLE, device=device), torch.ones(MULTIPLE, 1, device=device)
    try:
        product("cuda", Scaled(ones.to(E4M3), factors), ones.to(E4M3), factors[:, 0], None)
    except (RuntimeError, ValueError) as error:
        return f"torch._scaled_mm: {error}"
    return None


def product(backend: str, x: Scaled, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """(T, K) -> (T, C) bfloat16, by `torch._scaled_mm` unless `backend` is plain PyTorch."""
    if backend == "reference":
        return _product_ref(x, weight, scale, bias)
    given = x.rows, weight.T, x.factors, scale[None]
    return torch._scaled_mm(*given, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    given = {"x": (x, torch.bfloat16), "weight": (weight, E4M3), "scale": (scale, torch.float32)}
    given |= {} if bias is None else {"bias": (bias, torch.bfloat16)}
    for name, (tensor, dtype) in given.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            raise TypeError(f"{_OP}: {name} is {getattr(tensor, 'dtype', type(tensor).__name__)}; expected {dtype}")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{_OP}: x has shape {tuple(x.shape)}; expected (..., K) with at least two dimensions, K > 0")
    checks.shape(_OP, "weight", weight, (None, x.shape[-1]), "(C, K)")
    if any(size % MULTIPLE for size in weight.shape):
        raise ValueError(f"{_OP}: weight has shape {tuple(weight.shape)}; expected multiples of {MULTIPLE}")
    checks.shape(_OP, "scale", scale, weight.shape[:1], "(C,)")
    if bias is not None:
        checks.shape(_OP, "bias", bias, weight.shape[:1], "(C,)")
    checks.same_device(_OP, {"x": x, "weight": weight, "scale": scale, "bias": bias})
