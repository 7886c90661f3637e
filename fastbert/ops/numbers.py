"""Conversion to the dtype in which an op computes, and back."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the dtype of arithmetic: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def narrow(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, for a forward to return. y.to(dtype) may return y itself; if an autograd.Function then returns that
    result, torch.compile of torch 2.11 makes its gradients zero."""
    return y if y.dtype == dtype else y.to(dtype)


def in_one_dtype(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 if their dtypes differ: LayerNorm's backward, which does not take the bias, gives both gradients
    in the weight's dtype."""
    return (weight, bias) if weight.dtype == bias.dtype else (weight.float(), bias.float())
