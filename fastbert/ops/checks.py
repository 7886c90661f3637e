"""Argument checks of the ops, in one place for all backends. They run before any kernel."""

import os
from collections.abc import Collection
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fastbert.ops.op import autocast_on
from fastbert.random import threshold

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF, torch.float64)


def shape(op: str, name: str, tensor: Tensor, expected: tuple[int | None, ...], meaning: str, why: str = "") -> None:
    """Raises ValueError unless the shape matches; None stands for any size.

    meaning: the shape in letters. why: where the sizes come from. Callers pass constants for both: formatting a size
    on every call, not only on failure, would tie compiled code to that size.
    """
    have = tensor.shape
    if have == expected:
        return
    if len(have) != len(expected) or any([want is not None and have[i] != want for i, want in enumerate(expected)]):
        sizes = ", ".join("*" if size is None else str(size) for size in expected) + ("," if len(expected) == 1 else "")
        because = f", {why}" if why else ""
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {meaning} = ({sizes}){because}")


def one_device(op: str, tensor: Tensor, *others: Tensor | None) -> None:
    """For operators' fakes: a meta tensor among the arguments makes them run in place of the kernels, which check too.

    Raises ValueError for mixed devices.
    """
    for other in others:
        if other is not None and other.device != tensor.device:
            raise ValueError(f"{op}: an argument is on {other.device}; expected {tensor.device}")


def floats(op: str, activations: dict[str, Tensor], parameters: dict[str, Tensor]) -> None:
    """Checks that activations are floating point, parameters of their dtype or float32 beside half, all on one device.

    Raises TypeError for a wrong dtype or a value that is not a tensor, ValueError for mixed devices.
    """
    tensors = activations | parameters
    if _alike(tensors.values()):
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; expected a tensor")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; expected one of {', '.join(map(str, FLOATS))}")
    dtypes = {tensor.dtype for tensor in activations.values()}
    if torch.float64 in dtypes and len(dtypes) > 1:
        given = ", ".join(f"{name} {tensor.dtype}" for name, tensor in activations.items())
        raise TypeError(f"{op}: float64 does not mix with other dtypes; given {given}")
    allowed = dtypes | ({torch.float32} if torch.float64 not in dtypes else set())
    for name, tensor in parameters.items():
        if tensor.dtype not in allowed:
            raise TypeError(
                f"{op}: {name} is {tensor.dtype}; expected the dtype of {' or '.join(activations)} "
                f"({', '.join(sorted(map(str, dtypes)))}){' or torch.float32' if torch.float64 not in dtypes else ''}"
            )
    same_device(op, tensors)


def _alike(tensors: Collection[Tensor]) -> bool:
    """Whether all are tensors of one floating-point dtype on one device: a fast check for the usual case."""
    first = next(iter(tensors))
    if not isinstance(first, Tensor):
        return False
    dtype, device = first.dtype, first.device
    return dtype in FLOATS and all([isinstance(t, Tensor) and t.dtype == dtype and t.device == device for t in tensors])


def integers(op: str, **tensors: Tensor) -> None:
    """Raises TypeError unless each is an int32 or int64 tensor."""
    for name, tensor in tensors.items():
        if not (isinstance(tensor, Tensor) and tensor.dtype in (torch.int32, torch.int64)):
            given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{op}: {name} is {given}; expected torch.int64 or torch.int32")


def same_device(op: str, tensors: dict[str, Tensor | None]) -> None:
    """Raises ValueError unless all tensors are on one device."""
    if len({tensor.device for tensor in tensors.values() if tensor is not None}) > 1:
        given = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items() if tensor is not None)
        raise ValueError(f"{op}: expected all tensors on one device; given {given}")


def dropout(op: str, p: float, rng: Tensor | None, device: torch.device, bits: int) -> None:
    """Checks that `bits` random bits can express p, and that rng is a key if p > 0. Raises ValueError, TypeError."""
    if threshold(p, bits) == 0:
        return
    if rng is None:
        raise ValueError(f"{op}: dropout_p is {p} but rng is None; expected a key from fastbert.random.new_key")
    if not isinstance(rng, Tensor):
        raise TypeError(f"{op}: rng is a {type(rng).__name__}; expected one torch.int64 key")
    if rng.dtype != torch.int64 or rng.numel() != 1:
        raise TypeError(f"{op}: rng is {rng.dtype} of shape {tuple(rng.shape)}; expected one torch.int64 key")
    if rng.device != device:
        raise ValueError(f"{op}: rng is on {rng.device}; expected the device of the activations, {device}")


def values_visible(tensor: Tensor) -> bool:
    """Whether checks may read values: on the CPU, and on a GPU under FASTBERT_CHECK=1; never in a compiled graph."""
    if without_values(tensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("FASTBERT_CHECK") == "1"


def without_values(tensor: Tensor) -> bool:
    """Whether it stands for tensors of its shape: in a graph that is being compiled, as a fake or meta tensor, or for
    the rows of another within torch.vmap."""
    if torch.compiler.is_compiling() or isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta:
        return True
    return torch._C._functorch.is_batchedtensor(tensor)


def index_range(op: str, name: str, index: Tensor | None, size: int, also: int | None = None) -> None:
    """Raises an IndexError that names the first index outside [0, size) other than `also`, if values may be read."""
    if index is None or not values_visible(index) or index.numel() == 0:
        return
    low, high = (int(bound) for bound in index.aminmax())
    if low >= 0 and high < size:
        return
    bad = (index < 0) | (index >= size)
    if also is not None:
        bad &= index != also
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise IndexError(f"{op}: {name}{list(place)} is {int(index[place])}; expected 0 <= {name} < {size}")


def between(op: str, name: str, values: Tensor, low: float, high: float, why: str) -> None:
    """Raises a ValueError that names the first value outside [low, high], if values may be read. 0.01 more is taken for
    the rounding of a bfloat16."""
    if not values_visible(values):
        return
    bad = ~((values >= low - 0.01) & (values <= high + 0.01))
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{op}: {name}{list(place)} is {values[place].item()}; expected {low} to {high}, {why}")


def sequences(op: str, cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> None:
    """Checks cu_seqlens, (B + 1,) int32: from 0 to `tokens`, never decreasing, no sequence longer than max_seqlen.

    Raises TypeError or ValueError.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        given = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{op}: cu_seqlens is {given}; expected a torch.int32 tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; expected (sequences + 1,)")
    if isinstance(max_seqlen, (Tensor, bool)) or not isinstance(max_seqlen, (Integral, torch.SymInt)):
        raise TypeError(f"{op}: max_seqlen is a {type(max_seqlen).__name__}; expected an int")
    if not torch.compiler.is_compiling() and tokens >= 2**31:  # a compiled graph may not know the number
        raise ValueError(f"{op}: {tokens} tokens; expected fewer than 2**31, which cu_seqlens can count")
    if not values_visible(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    lengths = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    if ends[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{op}: cu_seqlens is {ends}; expected it to start at 0 and never to fall")
    if ends[-1] != tokens:
        raise ValueError(f"{op}: cu_seqlens ends at {ends[-1]}; expected the number of tokens, {tokens}")
    if (longest := max(lengths, default=0)) > max_seqlen:
        raise ValueError(f"{op}: max_seqlen is {max_seqlen}; expected at least the longest sequence, {longest}")


def dense(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, name: str = "x") -> None:
    """Checks x (..., K), weight (C, K) and bias (C,). Raises ValueError, TypeError. name: what the op calls x."""
    activations, parameters = {name: x}, {"weight": weight} | ({} if bias is None else {"bias": bias})
    if isinstance(x, Tensor) and autocast_on(x.device.type):  # which converts all three to one dtype
        activations, parameters = activations | parameters, {}
    floats(op, activations, parameters)
    if x.dim() < 2:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; expected (..., K) with at least two dimensions")
    shape(op, "weight", weight, (None, x.shape[-1]), "(C, K)", f"K the last dimension of {name}")
    if bias is not None:
        shape(op, "bias", bias, (weight.shape[0],), "(C,)", "the first dimension of weight")
