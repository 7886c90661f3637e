"""attention by torch.nn.attention.varlen: FlashAttention 2, or 3 or 4 where the user has activated it in PyTorch.

What the library leaves open is added here: tokens of no sequence get zeros, and cu_seqlens stays within the tensor.
Each is a pass that our own kernels do not need: over the output in the forward; in the backward over dqkv, after dq, dk
and dv, which come one by one, are put together.
"""

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from fastbert.ops.attention import locate

ALIGNED = 16  # bytes that FlashAttention reads at once


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def _outside(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
    """(T,) bool, which rows the library leaves unwritten. Plain PyTorch, without synchronising."""
    return ~locate(cu_seqlens, max_seqlen, tokens)[2]


def _nothing_to_do(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> bool:
    return qkv.shape[0] == 0 or cu_seqlens.shape[0] == 1 or max_seqlen < 1


def forward(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, dropout_p: float, rng: Tensor | None, site: int
) -> tuple[Tensor, Tensor]:
    tokens, _, heads, head_dim = qkv.shape
    if scale <= 0:  # it takes the largest score before it scales
        raise RuntimeError(f"backend 'varlen' cannot run attention: its scale is {scale}; expected scale > 0")
    if _nothing_to_do(qkv, cu_seqlens, max_seqlen):
        return qkv.new_zeros(tokens, heads, head_dim), qkv.new_zeros(heads, tokens, dtype=torch.float32)
    q, k, v = _aligned(qkv).unbind(1)
    ends = cu_seqlens.clamp(0, tokens)
    lengths = ends, ends, max_seqlen, max_seqlen
    out, lse = varlen_attn(q, k, v, *lengths, return_aux=AuxRequest(lse=True), scale=scale)
    outside = _outside(ends, max_seqlen, tokens)
    return out.contiguous().masked_fill_(outside[:, None, None], 0), lse.contiguous().masked_fill_(outside, 0)


def backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, dropout_p: float, rng: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    if _nothing_to_do(qkv, cu_seqlens, max_seqlen):
        return torch.zeros_like(qkv, memory_format=torch.contiguous_format)
    tokens, ends = qkv.shape[0], cu_seqlens.clamp(0, qkv.shape[0])
    lengths = ends, ends, max_seqlen, max_seqlen
    unused = torch.zeros(2, dtype=torch.uint64, device=qkv.device)  # the state of its dropout, as its forward gives it
    saved = *_aligned(qkv).unbind(1), _aligned(out), lse.contiguous()
    of_each = torch.ops.torch_attn._varlen_attn_backward(_aligned(dout), *saved, *lengths, False, unused, scale)
    return torch.stack(of_each, 1).masked_fill_(_outside(ends, max_seqlen, tokens)[:, None, None, None], 0)
