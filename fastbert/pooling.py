"""Pools token vectors to one vector per sequence, as sentence-transformers' Pooling does."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastbert.ops.numbers import wide
from fastbert.ops.padding import cu_seqlens_of
from fastbert.padding import first_tokens, packed_positions

Pool = Callable[[Tensor, Tensor, int], Tensor]  # hidden, cu_seqlens, skip -> vectors; skip: see `pool`


def check_mode(mode: str) -> str:
    """Returns the mode. Raises ValueError for an unknown one."""
    if mode not in POOL:
        raise ValueError(f"pooling is {mode!r}; expected {', '.join(map(repr, MODES[:-1]))} or {MODES[-1]!r}")
    return mode


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: str, skip: int = 0) -> Tensor:
    """(T, C) packed -> (B, C) in float32 or better: one vector per sequence, zeros for an empty one. Differentiable.

    mode: "mean", "max", "cls" (the first token), "lasttoken", "mean_sqrt_len_tokens" (the sum divided by the square
    root of the length), or "weightedmean", whose weights are the tokens' positions, from 1. skip: how many tokens,
    those of a prompt, are left out at the beginning of each sequence; the others keep their positions. Equivalent, for
    "mean", to torch.stack([text[skip:].mean(0) for text in hidden.split(lengths)]). Raises ValueError for another mode.
    """
    take, hidden = POOL[check_mode(mode)], wide(hidden)
    if skip:
        hidden = hidden[packed_positions(cu_seqlens, hidden.shape[0]) >= skip]
        cu_seqlens = cu_seqlens_of((cu_seqlens.diff() - skip).clamp(min=0))
    return take(hidden, cu_seqlens, skip)


def _sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=cu_seqlens.diff().long())


def _lengths(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens.diff().clamp(min=1).to(hidden.dtype).unsqueeze(-1)


def _max(hidden: Tensor, cu_seqlens: Tensor, skip: int) -> Tensor:
    largest = torch.segment_reduce(hidden, "max", lengths=cu_seqlens.diff().long())
    return largest.masked_fill((cu_seqlens.diff() == 0).unsqueeze(-1), 0)


def _last(hidden: Tensor, cu_seqlens: Tensor, skip: int) -> Tensor:
    if hidden.shape[0] == 0:
        return hidden.new_zeros(cu_seqlens.shape[0] - 1, hidden.shape[1])
    rows = hidden[(cu_seqlens[1:] - 1).clamp(min=0).long()]
    return rows.masked_fill((cu_seqlens.diff() == 0).unsqueeze(-1), 0)


def _weighted(hidden: Tensor, cu_seqlens: Tensor, skip: int) -> Tensor:
    places = packed_positions(cu_seqlens, hidden.shape[0])
    weights = (places + skip + 1).to(hidden.dtype).unsqueeze(-1)
    return _sums(hidden * weights, cu_seqlens) / _sums(weights, cu_seqlens).clamp(min=1)


POOL: dict[str, Pool] = {
    "mean": lambda hidden, ends, skip: _sums(hidden, ends) / _lengths(hidden, ends),
    "cls": lambda hidden, ends, skip: first_tokens(hidden, ends),
    "max": _max,
    "mean_sqrt_len_tokens": lambda hidden, ends, skip: _sums(hidden, ends) / _lengths(hidden, ends).sqrt(),
    "weightedmean": _weighted,
    "lasttoken": _last,
}
MODES = tuple(POOL)
