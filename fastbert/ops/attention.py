"""attention: softmax(Q K^T) V within each sequence of a packed batch, reading the QKV projection's output in place."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.linear import linear
from fastbert.ops.numbers import narrow, wide
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad
from fastbert.ops.padding import sequence_of

# ---- plain PyTorch: packed tokens are copied to a padded (B, H, S, D) grid, and results are gathered from it


def _grid(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> tuple[Tensor, Tensor]:
    """For each cell of a (B, S) grid, the token that belongs there, and whether there is one."""
    position = torch.arange(max_seqlen, device=cu_seqlens.device)
    visible = position < (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    return (cu_seqlens[:-1, None] + position).clamp(max=tokens - 1), visible


def locate(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each token, its sequence, its position in it, and whether the grid has a cell for it."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    sequence = sequence_of(token, cu_seqlens)
    inside = token < cu_seqlens[-1]
    sequence = torch.where(inside, sequence, 0)
    position = token - cu_seqlens[sequence]
    inside = inside & (position >= 0) & (position < max_seqlen)
    return sequence, torch.where(inside, position, 0), inside


def _spread(x: Tensor, cells: Tensor, visible: Tensor) -> Tensor:
    """(T, ..., H, D) -> (B, ..., H, S, D), zeros in cells without a token (so that nothing leaks from them)."""
    grid = wide(x)[cells].masked_fill(~visible.view(*visible.shape, *[1] * (x.dim() - 1)), 0)  # [B, S, ..., H, D]
    return grid.movedim(1, -2)


def _gather(grid: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(B, H, S, ...) -> (T, H, ...), zeros for tokens outside every sequence."""
    sequence, position, inside = locate(cu_seqlens, grid.shape[2], tokens)
    rows = grid.transpose(1, 2)[sequence, position]
    return rows.masked_fill(~inside.view(-1, *[1] * (rows.dim() - 1)), 0)


class RelativePositions(NamedTuple):
    """What the distance between a query and a key adds to their score: see `relative_attention`.

    slots: (2 L - 1,) int32, the slot (an index into the tables) of each distance i - j from 1 - L to L - 1; larger
    distances have the slot of the nearer end. keys, queries: tables (W, H, D). bias: a table (H, W). Each may be None.
    """

    slots: Tensor
    keys: Tensor | None = None
    queries: Tensor | None = None
    bias: Tensor | None = None

    def of(self, distance: Tensor) -> Tensor:
        """The slots of distances i - j, int64."""
        farthest = self.slots.shape[0] // 2
        return self.slots[distance.clamp(-farthest, farthest) + farthest].long()

    def beside(self, dtype: torch.dtype) -> "RelativePositions":
        """The tables as attention in `dtype` takes them: keys and queries in it, the bias in float32 at least."""
        keys, queries = (None if table is None else table.to(dtype) for table in (self.keys, self.queries))
        return RelativePositions(self.slots, keys, queries, None if self.bias is None else wide(self.bias))

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """What is added to the scores: (B, H, S, S), or (H, S, S) for a bias alone. q and k: (B, H, S, D)."""
        place = torch.arange(q.shape[-2], device=q.device)
        slots = self.of(place[:, None] - place)  # [i, j]
        shape = *q.shape[:2], *slots.shape
        total = q.new_zeros(())
        if self.bias is not None:  # not by indexing, which ONNX cannot translate after a slice
            total = wide(self.bias).index_select(1, slots.flatten()).unflatten(1, slots.shape)
        if self.keys is not None:
            total = total + (q * scale @ wide(self.keys).permute(1, 2, 0)).gather(-1, slots.expand(shape))
        if self.queries is not None:
            total = total + (k * scale @ wide(self.queries).permute(1, 2, 0)).gather(-1, slots.mT.expand(shape)).mT
        return total


def attention_op(positions: RelativePositions | None) -> str:
    """The name of the op that computes attention with these positions."""
    return "attention" if positions is None else "relative_attention"


def tables_beside(positions: RelativePositions | None, dtype: torch.dtype) -> Sequence[Tensor | None]:
    """Slots, keys, queries and bias as primitives take them beside activations in `dtype`."""
    return (None,) * 4 if positions is None else positions.beside(dtype)


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float, positions: RelativePositions | None = None) -> Tensor:
    scores = q * scale @ k.mT
    if positions is not None:
        scores = scores + positions.scores(q, k, scale)
    return scores.masked_fill_(~visible[:, None, None, :], -torch.inf)


def _dropout(scores: Tensor, p: float, rng: Tensor | None, site: int) -> Callable[[Tensor], Tensor]:
    """The dropout of (B, H, S, S) scores as a function, which is its own adjoint."""
    if random.threshold(p, random.ATTENTION_BITS) == 0:
        return lambda grid: grid
    keep, scale = random.attention_keep(rng, site, *scores.shape[:3], p), random.keep_scale(p, random.ATTENTION_BITS)
    return lambda grid: torch.where(keep, grid * scale, 0)


def attention_weights(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    positions: RelativePositions | None = None,
) -> Tensor:
    """The weights that `attention` applies to V, dropout included: (B, H, max_seqlen, max_seqlen), zeros at padding.

    Plain PyTorch on any device; returns qkv's dtype. It needs memory for B * H * max_seqlen**2 numbers. Arguments as in
    `attention`; positions as in `relative_attention`.
    """
    check("attention", qkv, cu_seqlens, max_seqlen, dropout_p, rng)
    if qkv.shape[0] == 0:
        return qkv.new_zeros(cu_seqlens.shape[0] - 1, qkv.shape[2], max_seqlen, max_seqlen)
    cells, visible = _grid(cu_seqlens, max_seqlen, qkv.shape[0])
    q, k, _ = _spread(qkv, cells, visible).unbind(1)
    with torch.autocast(qkv.device.type, enabled=False):
        scores = _scores(q, k, visible, qkv.shape[-1] ** -0.5 if scale is None else scale, positions)
    weights = scores.softmax(-1).masked_fill(~(visible[:, None, :, None] & visible[:, None, None, :]), 0)
    return _dropout(weights, dropout_p, rng, site)(weights).to(qkv.dtype)


def attention_to_seen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    unseen: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    positions: RelativePositions | None = None,
) -> Tensor:
    """`attention` in which no token attends to those marked in `unseen`, (T,) bool. Does not check its arguments.

    Plain PyTorch on any device, with memory for B * H * max_seqlen**2 numbers. For short texts, such as ColBERT's
    queries, which end in mask tokens. A sequence whose tokens are all unseen gives zeros.
    """
    if qkv.shape[0] == 0:
        return qkv[:, 0]
    cells, visible = _grid(cu_seqlens, max_seqlen, qkv.shape[0])
    q, k, v = _spread(qkv, cells, visible).unbind(1)
    keys = visible & ~unseen[cells]
    some = keys.any(-1, keepdim=True)
    with torch.autocast(qkv.device.type, enabled=False):
        weights = _scores(q, k, keys | ~some, scale, positions).softmax(-1)
        out = _dropout(weights, dropout_p, rng, site)(weights.masked_fill(~some[:, None, None], 0)) @ v
    return _gather(out, cu_seqlens, qkv.shape[0]).to(qkv.dtype)


def attention_ref(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    positions: RelativePositions | None = None,
) -> Tensor:
    """`attention` (`relative_attention` if positions are given) in plain PyTorch, one sequence at a time. It can be
    differentiated any number of times."""
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for sequence, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        q, k, v = wide(qkv[start:end]).permute(1, 2, 0, 3)  # [H, S, D] each
        scores = q @ k.mT * scale
        if positions is not None:
            scores = (scores[None] + positions.scores(q[None], k[None], scale))[0]
        weights = scores.softmax(-1)
        if random.threshold(dropout_p, random.ATTENTION_BITS):
            keep = random.attention_keep(rng, site, sequence + 1, q.shape[0], end - start, dropout_p)[-1]
            weights = weights * keep * random.keep_scale(dropout_p, random.ATTENTION_BITS)
        outputs.append((weights @ v).transpose(0, 1))
    outputs.append(wide(qkv[cu_seqlens[-1] :, 0]) * 0)  # tokens outside every sequence
    return torch.cat(outputs).to(qkv.dtype)


def forward(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site, positions=None):
    """The primitive `attention_fwd`, or `relative_attention_fwd` if positions are given."""
    tokens = qkv.shape[0]
    if tokens == 0:
        return fake_forward(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    cells, visible = _grid(cu_seqlens, max_seqlen, tokens)
    q, k, v = _spread(qkv, cells, visible).unbind(1)
    scores = _scores(q, k, visible, scale, positions)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _dropout(weights, dropout_p, rng, site)(weights) @ v / total
    lse = (largest + total.log()).squeeze(-1)
    return narrow(_gather(out, cu_seqlens, tokens), qkv.dtype), _gather(lse, cu_seqlens, tokens).T.contiguous()


def score_gradients(dout, qkv, out, lse, cu_seqlens, max_seqlen, scale, dropout_p, rng, site, positions=None):
    """The gradients of the scores, and the weights that V was multiplied by (dropout included): (B, H, S, S) each.

    With P = exp(S - lse), M the dropout factors and D = rowsum(dO * O): dP = dO V^T M, dS = P (dP - D) (Dao et al.,
    "FlashAttention", 2022, appendix B). qkv, out and dout are packed.
    """
    (q, k, v), do, cells, visible = grids(qkv, dout, cu_seqlens, max_seqlen)
    delta = _spread((wide(dout) * wide(out)).sum(-1, keepdim=True), cells, visible)
    p = _scores(q, k, visible, scale, positions).sub_(_spread(lse.T.unsqueeze(-1), cells, visible)).exp_()
    p = (p / p.sum(-1, keepdim=True)).masked_fill_(~visible[:, None, :, None], 0)  # lse is rounded, this sum is not
    drop = _dropout(p, dropout_p, rng, site)
    return p * (drop(do @ v.mT) - delta), drop(p)


def grids(qkv, dout, cu_seqlens, max_seqlen):
    """(q, k, v) and the output's gradient as (B, H, S, D) grids, and what `_grid` returns."""
    cells, visible = _grid(cu_seqlens, max_seqlen, qkv.shape[0])
    return _spread(qkv, cells, visible).unbind(1), _spread(dout, cells, visible), cells, visible


def packed_gradient(dq, dk, dv, qkv, cu_seqlens):
    return torch.stack([_gather(g, cu_seqlens, qkv.shape[0]) for g in (dq, dk, dv)], 1).to(qkv.dtype)


def _backward(dout, qkv, out, lse, cu_seqlens, max_seqlen, scale, *rest):
    """dV = (P M)^T dO, dQ = dS K scale, dK = dS^T Q scale."""
    if qkv.shape[0] == 0:
        return torch.empty_like(qkv, memory_format=torch.contiguous_format)
    ds, weights = score_gradients(dout, qkv, out, lse, cu_seqlens, max_seqlen, scale, *rest)
    (q, k, _), do, *_ = grids(qkv, dout, cu_seqlens, max_seqlen)
    return packed_gradient(ds @ k * scale, ds.mT @ q * scale, weights.mT @ do, qkv, cu_seqlens)


# ---- schemas


def fake_forward(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site):
    tokens, _, heads, head_dim = qkv.shape
    lse_dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    return qkv.new_empty((tokens, heads, head_dim)), qkv.new_empty((heads, tokens), dtype=lse_dtype)


FWD = Primitive(
    "attention_fwd",
    "(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, float scale, float dropout_p, Tensor? rng, SymInt site)"
    " -> (Tensor out, Tensor lse)",
    fake_forward,
    forward,
    also=("varlen",),
)
BWD = Primitive(
    "attention_bwd",
    "(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens, SymInt max_seqlen, float scale,"
    " float dropout_p, Tensor? rng, SymInt site) -> Tensor dqkv",
    lambda dout, qkv, *rest: qkv.new_empty(qkv.shape),
    _backward,
    also=("varlen",),
)


# ---- the ops


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site):
        out, lse = FWD(backend, qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
        ctx.save_for_backward(qkv, out, lse, cu_seqlens, rng)
        ctx.backend, ctx.rest = backend, (max_seqlen, scale, dropout_p, site)
        return out

    @staticmethod
    @first_derivative_only("attention")
    def backward(ctx, saved, dout):
        qkv, out, lse, cu_seqlens, rng = saved
        max_seqlen, scale, dropout_p, site = ctx.rest
        dqkv = BWD(ctx.backend, dout, qkv, out, lse, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
        return None, dqkv, *[None] * 6


def check(op: str, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, rng: Tensor | None) -> None:
    checks.floats(op, {"qkv": qkv}, {})
    checks.shape(op, "qkv", qkv, (None, 3, None, None), "(T, 3, H, D)")
    if qkv.shape[-1] == 0:
        raise ValueError(f"{op}: qkv has shape {tuple(qkv.shape)}; expected a head size D > 0")
    checks.sequences(op, cu_seqlens, max_seqlen, qkv.shape[0])
    checks.same_device(op, {"qkv": qkv, "cu_seqlens": cu_seqlens})
    checks.dropout(op, dropout_p, rng, qkv.device, random.ATTENTION_BITS)


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """Self-attention within each sequence of a packed batch.

    qkv: (T, 3, H, D), queries, keys and values of T packed tokens, float32, bfloat16, float16 or float64.
    cu_seqlens: (B + 1,) int32; sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1]; sequences may be empty.
    max_seqlen: an int, at least the length of the longest sequence. scale: D**-0.5 by default. dropout_p is rounded to
    a multiple of 1/256; rng and site are as in `add_layer_norm`; `fastbert.random.attention_keep` defines the mask.
    Returns (T, H, D) in qkv's dtype (under autocast, in its dtype); a token outside every sequence gets zeros. Scores
    and sums are float32. qkv, the output and one number per token and head are saved for backward.
    Raises ValueError (shapes, devices, cu_seqlens, dropout) and TypeError (dtypes). The values of cu_seqlens are
    checked on a CPU, and on a GPU under FASTBERT_CHECK=1.

    Equivalent to, for the tokens of each sequence::

        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=scale).transpose(0, 1)
    """
    check("attention", qkv, cu_seqlens, max_seqlen, dropout_p, rng)
    return attention_unchecked(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)


def attention_unchecked(qkv, cu_seqlens, max_seqlen, scale=None, dropout_p=0.0, rng=None, site=0) -> Tensor:
    """`attention` for a forward that has checked cu_seqlens already, so that no layer reads its values again."""
    checks.dropout("attention", dropout_p, rng, qkv.device, random.ATTENTION_BITS)
    qkv = qkv.to(autocast_dtype(qkv))
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    live = needs_grad(qkv)
    device_type, size = qkv.device.type, qkv.shape[-1]
    drops = True if dropout_p > 0 else False  # a plain bool, even if torch.compile has a symbol for dropout_p
    backend = backends.choose("attention", device_type, qkv.dtype, backward=live, size=size, drops=drops)
    args = (qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    return _Attention.apply(backend, *args) if live else FWD(backend, *args)[0]


def project_qkv(hidden: Tensor, weight: Tensor, bias: Tensor, num_heads: int) -> Tensor:
    """(T, C) -> (T, 3, H, D): one product with weight (3C, C), plus bias (3C,), whose rows are in the order q, k, v."""
    checks.dense("qkv_attention", hidden, weight, bias, name="hidden")
    width = hidden.shape[-1]
    if hidden.dim() != 2:
        raise ValueError(f"qkv_attention: hidden has shape {tuple(hidden.shape)}; expected packed tokens, (T, C)")
    checks.shape("qkv_attention", "weight", weight, (3 * width, width), "(3C, C)")
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"qkv_attention: num_heads is {num_heads}; expected a divisor of C = {width}")
    return linear(hidden, weight, bias).view(hidden.shape[0], 3, num_heads, width // num_heads)


def qkv_attention(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    num_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """Projects to queries, keys and values in one product, and runs `attention` on that without a transpose.

    hidden: (T, C) packed tokens. weight: (3C, C) and bias: (3C,), the rows of q, k and v one after the other, in
    hidden's dtype or float32 (then converted to it; autocast converts all three). The rest as in `attention`. Returns
    (T, C). Raises as `attention` does, and ValueError for a num_heads that does not divide C.

    Equivalent to::

        qkv = F.linear(hidden, weight, bias).view(T, 3, num_heads, C // num_heads)
        attention(qkv, cu_seqlens, max_seqlen).flatten(1)
    """
    qkv = project_qkv(hidden, weight, bias, num_heads)
    out = attention(qkv, cu_seqlens, max_seqlen, scale=scale, dropout_p=dropout_p, rng=rng, site=site)
    return out.flatten(1)
