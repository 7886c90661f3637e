"""padding: finds the real tokens of a padded batch; pack takes them out with one gather, unpack puts them back."""

import torch
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.op import Primitive, first_derivative_only, needs_grad

# ---- plain PyTorch


def pack_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`pack` in plain PyTorch; it can be differentiated any number of times."""
    return x.flatten(0, 1)[indices]


def unpack_ref(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`unpack` in plain PyTorch; it can be differentiated any number of times."""
    rows = x.new_zeros(batch * seqlen, *x.shape[1:]).index_put((indices,), x)
    return rows.view(batch, seqlen, *x.shape[1:])


def _pack(x, indices):
    return x.flatten(0, 1).index_select(0, indices)


def _unpack(x, indices, batch, seqlen):
    rows = x.new_zeros((batch * seqlen, *x.shape[1:]))
    return rows.index_copy_(0, indices, x).view(batch, seqlen, *x.shape[1:])


def cu_seqlens_of(lengths: Tensor) -> Tensor:
    """cu_seqlens, (B + 1,) int32, for sequences of these lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def places_in_torch(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PLACES: the indices b * S + s of all tokens, visible ones first; cu_seqlens; facts. No host synchronisation."""
    lengths = visible.sum(1)
    longest = lengths.max() if lengths.numel() else lengths.new_zeros(())
    facts = torch.stack([lengths.sum(), longest, visible[:, :1].all().long(), is_in_runs(visible).long()])
    return visible_first(visible), cu_seqlens_of(lengths), facts


def is_in_runs(visible: Tensor) -> Tensor:
    """() bool: whether no row has padding between two of its tokens."""
    before = visible.cumsum(1)
    return ~(~visible & (before > 0) & (before < visible.sum(1, keepdim=True))).any()


def sequence_of(token: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sequence of each packed token, int64, from its number, int32; B for tokens outside every sequence."""
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


def visible_first(visible: Tensor) -> Tensor:
    """(B * S,) int64: all indices b * S + s, first those of visible tokens, then those of padding, each in order."""
    return (~visible.flatten()).to(torch.uint8).argsort(stable=True)


# ---- schemas: pack and unpack are each other's adjoint, so neither has a backward of its own


def _fake_places(visible):
    ends = visible.new_empty(visible.shape[0] + 1, dtype=torch.int32)
    return visible.new_empty(visible.numel(), dtype=torch.int64), ends, visible.new_empty(4, dtype=torch.int64)


# The sizes of PLACES' results do not depend on the mask, so that on a GPU one host synchronisation, for its facts, is
# enough: the number of tokens, the longest row's, 1 if no row begins with padding, 1 if none has it between tokens.
PLACES = Primitive("padding_places", "(Tensor visible) -> (Tensor, Tensor, Tensor)", _fake_places, places_in_torch)
PACK = Primitive(
    "padding_pack",
    "(Tensor x, Tensor indices) -> Tensor",
    lambda x, indices: x.new_empty((indices.shape[0], *x.shape[2:])),
    _pack,
)
UNPACK = Primitive(
    "padding_unpack",
    "(Tensor x, Tensor indices, SymInt batch, SymInt seqlen) -> Tensor",
    lambda x, indices, batch, seqlen: x.new_empty((batch, seqlen, *x.shape[1:])),
    _unpack,
)


# ---- the ops


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, indices):
        ctx.save_for_backward(indices)
        ctx.backend, ctx.shape = backend, (x.shape[0], x.shape[1])
        return PACK(backend, x, indices)

    @staticmethod
    @first_derivative_only("pack")
    def backward(ctx, saved, dy):
        return None, UNPACK(ctx.backend, dy, *saved, *ctx.shape), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, x, indices, batch, seqlen):
        ctx.save_for_backward(indices)
        ctx.backend = backend
        return UNPACK(backend, x, indices, batch, seqlen)

    @staticmethod
    @first_derivative_only("unpack")
    def backward(ctx, saved, dy):
        return None, PACK(ctx.backend, dy, *saved), None, None, None


def places(op: str, x: Tensor, indices: Tensor, rows: int, name: str = "indices") -> Tensor:
    """Checks that indices are on x's device, in range and distinct (fast if in order). Returns them as int64."""
    checks.same_device(op, {"x": x, name: indices})
    checks.index_range(op, name, indices, rows)
    if checks.values_visible(indices) and not (indices[1:] > indices[:-1]).all():
        if indices.unique().numel() < indices.numel():
            raise ValueError(f"{op}: {name} has repeated entries; expected distinct rows")
    return indices.long()


def pack(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of a padded batch that `indices` names, one after the other.

    x: (B, S, ...) of any dtype. indices: (T,) integers, distinct rows of the flattened batch, b * S + s. Returns
    (T, ...). Differentiable for floating-point x; rows that are not named get zero gradients.
    Raises IndexError (on a CPU, or under FASTBERT_CHECK=1), ValueError and TypeError.

    Equivalent to::

        x.flatten(0, 1)[indices]
    """
    checks.integers("pack", indices=indices)
    if x.dim() < 2:
        raise ValueError(f"pack: x has shape {tuple(x.shape)}; expected (B, S, ...)")
    checks.shape("pack", "indices", indices, (None,), "(T,)")
    indices = places("pack", x, indices, x.shape[0] * x.shape[1])
    return pack_unchecked(x, indices)


def pack_unchecked(x: Tensor, indices: Tensor) -> Tensor:
    """`pack` with indices that are known to be distinct and in range."""
    live = needs_grad(x)
    backend = backends.choose("padding", x.device.type, x.dtype, backward=live)
    return _Pack.apply(backend, x, indices) if live else PACK(backend, x, indices)


def unpack(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `pack`: row t of x becomes row indices[t] of a padded batch, which is zero elsewhere.

    x: (T, ...) of any dtype. indices: (T,) integers, distinct. Returns (batch, seqlen, ...). Differentiable for
    floating-point x. Raises as `pack` does.

    Equivalent to::

        y = x.new_zeros(batch * seqlen, *x.shape[1:])
        y[indices] = x
        y.view(batch, seqlen, *x.shape[1:])
    """
    checks.integers("unpack", indices=indices)
    if x.dim() < 1:
        raise ValueError("unpack: x has shape (); expected (T, ...)")
    checks.shape("unpack", "indices", indices, (x.shape[0],), "(T,)", "a place for each row of x")
    return unpack_unchecked(x, places("unpack", x, indices, batch * seqlen), batch, seqlen)


def unpack_unchecked(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`unpack` with indices that are known to be distinct and in range."""
    live = needs_grad(x)
    backend = backends.choose("padding", x.device.type, x.dtype, backward=live)
    return _Unpack.apply(backend, x, indices, batch, seqlen) if live else UNPACK(backend, x, indices, batch, seqlen)
