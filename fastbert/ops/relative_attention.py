"""relative_attention: attention whose scores also depend on the distance between query and key."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.attention import (
    RelativePositions,
    attention_ref,
    check,
    fake_forward,
    forward,
    grids,
    packed_gradient,
    score_gradients,
)
from fastbert.ops.numbers import wide
from fastbert.ops.op import Primitive, autocast_dtype, first_derivative_only, needs_grad

_OP = "relative_attention"

# ---- plain PyTorch


def _by_slot(ds: Tensor, positions: RelativePositions, width: int, sign: int) -> Tensor:
    """(..., S, S) -> (..., S, W): sums each row's gradients by the slot of their distance.

    sign: -1 where rows are queries, so that the distance i - j falls along a row, 1 where rows are keys. The sum is a
    matrix product, because scattered additions would not be repeatable on a GPU.
    """
    length = ds.shape[-1]
    step = torch.arange(1 - length, length, device=ds.device)  # column minus row
    column = torch.arange(length, device=ds.device)[:, None] + step
    outside = (column < 0) | (column >= length)
    by_step = ds.gather(-1, column.clamp(0, length - 1).expand(*ds.shape[:-1], -1)).masked_fill(outside, 0)
    return by_step @ F.one_hot(positions.of(sign * step), width).to(ds.dtype)


def relative_attention_ref(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    positions: RelativePositions,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`relative_attention` in plain PyTorch, one sequence at a time, differentiable any number of times."""
    options = {"scale": scale, "dropout_p": dropout_p, "rng": rng, "site": site}
    return attention_ref(qkv, cu_seqlens, max_seqlen, **options, positions=positions)


def _forward(qkv, slots, keys, queries, bias, *rest):
    return forward(qkv, *rest, RelativePositions(slots, keys, queries, bias))


def _backward(dout, qkv, out, lse, slots, keys, queries, bias, *rest):
    """As for `attention`, plus the tables. With A[i, w] = Q_i K_w scale: dA[i, w] is the sum of dS[i, j] over the keys
    of slot w; dQ also gets dA K scale; dK_w is the sum of dA[i, w] Q_i scale. B, for `queries`, likewise."""
    *rest, tables = rest
    cu_seqlens, max_seqlen, scale = rest[:3]
    empty = _fake_backward(dout, qkv, out, lse, slots, keys, queries, bias, *rest, tables)
    if qkv.shape[0] == 0:
        return tuple(torch.zeros_like(each) for each in empty)
    positions = RelativePositions(slots, keys, queries, bias)
    ds, weights = score_gradients(dout, qkv, out, lse, *rest, positions)
    (q, k, _), do, *_ = grids(qkv, dout, cu_seqlens, max_seqlen)
    dq, dk = ds @ k, ds.mT @ q
    dkeys, dqueries, dbias = empty[1:]
    if keys is not None:
        da = _by_slot(ds, positions, keys.shape[0], -1)
        dq = dq + da @ wide(keys).transpose(0, 1)
        dkeys = torch.einsum("bhiw,bhid->whd", da, q) * scale if tables else dkeys
    if queries is not None:
        db = _by_slot(ds.mT, positions, queries.shape[0], 1)
        dk = dk + db @ wide(queries).transpose(0, 1)
        dqueries = torch.einsum("bhiw,bhid->whd", db, k) * scale if tables else dqueries
    if bias is not None and tables:
        dbias = _by_slot(ds, positions, bias.shape[1], -1).sum((0, 2))
    dqkv = packed_gradient(dq * scale, dk * scale, weights.mT @ do, qkv, cu_seqlens)
    grads = zip((dkeys, dqueries, dbias), (keys, queries, bias), strict=True)
    return dqkv, *[grad if table is None else grad.to(table.dtype).contiguous() for grad, table in grads]


# ---- schemas


def _fake_forward(qkv, slots, keys, queries, bias, *rest):
    return fake_forward(qkv, *rest)


def _fake_backward(dout, qkv, out, lse, slots, keys, queries, bias, *rest):
    """The gradients of absent tables are empty, and those of all tables if none is needed."""
    wanted = [(qkv, 0) if table is None else (table, table.shape if rest[-1] else 0) for table in (keys, queries, bias)]
    return qkv.new_empty(qkv.shape), *[like.new_empty(shape) for like, shape in wanted]


_SHARED = (
    "Tensor slots, Tensor? position_keys, Tensor? position_queries, Tensor? position_bias, Tensor cu_seqlens,"
    " SymInt max_seqlen, float scale, float dropout_p, Tensor? rng, SymInt site"
)
FWD = Primitive(
    "relative_attention_fwd", f"(Tensor qkv, {_SHARED}) -> (Tensor out, Tensor lse)", _fake_forward, _forward
)
BWD = Primitive(
    "relative_attention_bwd",
    f"(Tensor dout, Tensor qkv, Tensor out, Tensor lse, {_SHARED}, bool table_gradients)"
    " -> (Tensor dqkv, Tensor dposition_keys, Tensor dposition_queries, Tensor dposition_bias)",
    _fake_backward,
    _backward,
)


# ---- the op


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, qkv, slots, keys, queries, bias, cu_seqlens, max_seqlen, scale, dropout_p, rng, site):
        tables = slots, keys, queries, bias
        out, lse = FWD(backend, qkv, *tables, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
        ctx.save_for_backward(qkv, out, lse, *tables, cu_seqlens, rng)
        ctx.backend, ctx.rest = backend, (max_seqlen, scale, dropout_p, site)
        return out

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, saved, dout):
        *tensors, cu_seqlens, rng = saved
        max_seqlen, scale, dropout_p, site = ctx.rest
        wanted = ctx.needs_input_grad[3:6]
        rest = cu_seqlens, max_seqlen, scale, dropout_p, rng, site, any(wanted)
        dqkv, *dtables = BWD(ctx.backend, dout, *tensors, *rest)
        dtables = [grad if want else None for grad, want in zip(dtables, wanted, strict=True)]
        return None, dqkv, None, *dtables, *[None] * 6


def check_positions(op: str, beside: dict[str, Tensor], heads: int, size: int, positions: RelativePositions) -> None:
    """beside: the activation, by its name, whose device and dtype the tables have. heads, size: H and D."""
    if not isinstance(positions, RelativePositions):
        raise TypeError(f"{op}: positions is a {type(positions).__name__}; expected RelativePositions")
    slots, keys, queries, bias = positions
    if not isinstance(slots, Tensor) or slots.dtype != torch.int32:
        given = slots.dtype if isinstance(slots, Tensor) else type(slots).__name__
        raise TypeError(f"{op}: slots is {given}; expected a torch.int32 tensor")
    if slots.dim() != 1 or slots.shape[0] % 2 == 0:
        raise ValueError(f"{op}: slots has shape {tuple(slots.shape)}; expected (2 L - 1,), an odd number")
    names = {"keys": keys, "queries": queries, "bias": bias}
    given = {name: table for name, table in names.items() if table is not None}
    if not given:
        raise ValueError(f"{op}: keys, queries and bias are None; expected at least one (or attention without them)")
    activations, parameters = beside, given
    if checks.autocast_on(slots.device.type):
        activations, parameters = activations | given, {}
    checks.floats(op, activations, parameters)
    checks.same_device(op, beside | {"slots": slots})
    for name, table in given.items():
        checks.shape(op, name, table, *(((None,) * 2, "(H, W)") if name == "bias" else ((None,) * 3, "(W, H, D)")))
    width = bias.shape[-1] if keys is None and queries is None else (queries if keys is None else keys).shape[0]
    if width == 0:
        raise ValueError(f"{op}: the tables have no slot; expected at least one")
    for name, table in given.items():
        shape, letters = ((heads, width), "(H, W)") if name == "bias" else ((width, heads, size), "(W, H, D)")
        checks.shape(op, name, table, shape, letters, "H and D of the heads, one W for all")
    checks.index_range(op, "slots", slots, width)


def relative_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    positions: RelativePositions,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """Self-attention within each sequence, with scores that depend on the distance of query and key as well.

    positions: a `RelativePositions` with at least one table. Its slots: (2 L - 1,) int32, where slots[L - 1 + d], from
    0 to W - 1, is the slot of the distance d = i - j of query i and key j; distances above L - 1 have the slot of
    L - 1, those below 1 - L that of 1 - L. keys and queries: (W, H, D); for each score, the query is also multiplied
    with the slot's row of keys, and the key with the slot's row of queries (DeBERTa's c2p and p2c). bias: (H, W), added
    without the scale (T5's and MPNet's; ALiBi's slopes times distances). Tables are in qkv's dtype or float32; autocast
    converts keys and queries. Everything else as in `attention`, dropout and errors included; IndexError for a slot out
    of range, if values are checked. No fused kernel holds a (T, H, W) or (S, S) tensor in memory. Gradients of tables
    are repeatable, and computed only if needed.

    Equivalent to, for the tokens of each sequence::

        q, k, v = qkv[start:end].permute(1, 2, 0, 3)  # (H, S, D)
        place = torch.arange(end - start)
        w = slots[(place[:, None] - place).clamp(1 - L, L - 1) + L - 1]  # (S, S)
        scores = torch.einsum("hid,hjd->hij", q, k) + torch.einsum("hid,ijhd->hij", q, keys[w])
        scores = (scores + torch.einsum("hjd,ijhd->hij", k, queries[w])) * scale + bias[:, w]
        (F.dropout(scores.softmax(-1), dropout_p) @ v).transpose(0, 1)

    The form is that of He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2021, equation 4.
    """
    check(_OP, qkv, cu_seqlens, max_seqlen, dropout_p, rng)
    check_positions(_OP, {"qkv": qkv}, *qkv.shape[2:], positions)
    return relative_attention_unchecked(qkv, cu_seqlens, max_seqlen, positions, scale, dropout_p, rng, site)


def relative_attention_unchecked(
    qkv, cu_seqlens, max_seqlen, positions, scale=None, dropout_p=0.0, rng=None, site=0
) -> Tensor:
    """`relative_attention` for a forward that has checked cu_seqlens and slots already."""
    checks.dropout(_OP, dropout_p, rng, qkv.device, random.ATTENTION_BITS)
    dtype = autocast_dtype(qkv)
    qkv, (slots, keys, queries, bias) = qkv.to(dtype), positions.beside(dtype)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    live = needs_grad(qkv, keys, queries, bias)
    backend = backends.choose(_OP, qkv.device.type, dtype, backward=live, size=qkv.shape[-1])
    args = (qkv, slots, keys, queries, bias, cu_seqlens, max_seqlen, scale, dropout_p, rng, site)
    return _RelativeAttention.apply(backend, *args) if live else FWD(backend, *args)[0]
