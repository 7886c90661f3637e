"""Loads a model for inference: in a dtype on a device, or prepared in a precision."""

from typing import Protocol

import torch

from fastbert import prepared
from fastbert.model import Saveable
from fastbert.preparation import prepare


class Read(Protocol):
    def __call__(self, *, dtype: torch.dtype | str | None) -> Saveable: ...


def load(
    read: Read,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    precision: str | None,
) -> Saveable:
    """Returns read(dtype=dtype) on the device or, with a precision, what `fastbert.prepare` makes of a float32 model.

    Raises ValueError as `prepare` does, and for a precision together with a dtype other than float32 or with a device
    that the precision is not for.
    """
    if precision is None:
        return read(dtype=dtype).to(device)
    if dtype not in (None, "auto", "float32", torch.float32):
        raise ValueError(f"dtype is {dtype} beside precision {precision!r}; expected float32, which it is made from")
    home = prepared.home(precision)
    if device is not None and torch.device(device).type != home.type:
        raise ValueError(f"device is {device} beside precision {precision!r}; expected {home}, which it is made for")
    return prepare(read(dtype=torch.float32).to(home if device is None else device), precision)
