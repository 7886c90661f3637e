"""From tokens to texts: one vector of each sequence."""

import torch
from torch import Tensor

from fastbert.ops.numbers import wide
from fastbert.padding import first_tokens

MODES = ("mean", "cls")


def check_mode(mode: str) -> str:
    """The mode itself. Raises ValueError for an unknown one."""
    if mode not in MODES:
        raise ValueError(f"pooling is {mode!r}; expected {' or '.join(map(repr, MODES))}")
    return mode


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """(T, C) packed -> (B, C) in float32 or better: a vector of each sequence, zeros for an empty one. Differentiable.

    mode: "mean" over its tokens, or "cls", its first token; equivalent to
    torch.stack([text.mean(0) for text in hidden.split(lengths)]) and torch.stack([text[0] for text in ...]). Raises
    ValueError for another mode.
    """
    hidden = wide(hidden)
    if check_mode(mode) == "cls":
        return first_tokens(hidden, cu_seqlens)
    lengths = cu_seqlens.diff().long()
    return torch.segment_reduce(hidden, "sum", lengths=lengths) / lengths.clamp(min=1).unsqueeze(-1)
