"""From attention masks to packed tokens and back.

A padded batch is packed once, before the embeddings, and unpacked once, after the last layer. `plan` understands the
attention masks that callers pass; everything after it works with a `Packing`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert import backends
from fastbert.ops import checks
from fastbert.ops.padding import (
    PLACES,
    cu_seqlens_of,
    is_in_runs,
    pack_unchecked,
    sequence_of,
    unpack_unchecked,
    visible_first,
)


class Packing(NamedTuple):
    """Where the sequences of a batch are among its packed tokens, and how to return to the caller's form.

    It is made and checked once per forward, at the boundary: `plan_or_packed` reads a mask or takes cu_seqlens. Code
    that is handed one relies on it, and does not check again that `indices` are distinct.

    cu_seqlens: (batch + 1,) int32. max_seqlen: at least the longest sequence. tokens: T. seqlen: the width of the
    caller's padded (batch, seqlen) grid, None if the caller's tokens are packed. indices: (T,) int64 rows of the
    flattened grid, None when all are visible. real: (T,) bool, which of those rows are tokens, None when all are.
    starts_visible: whether every sequence has a token in column 0 (unknown in compiled code, and True there).
    filled: (), the number of sequences, the first ones, that are the caller's; the others fill up the batch of a
    captured graph. None when all are the caller's. unseen: (T,) bool, tokens that attend to the others but that no
    token attends to; None when there are none.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    tokens: int
    batch: int
    seqlen: int | None = None
    indices: Tensor | None = None
    real: Tensor | None = None
    starts_visible: bool = True
    filled: Tensor | None = None
    unseen: Tensor | None = None

    def check(self, op: str, rows: Tensor | None, *others: Any) -> None:
        """Raises ValueError unless `rows` has this packing's tokens and the `others`, which also place tokens, are
        None."""
        if any(other is not None for other in others):
            raise ValueError(f"{op}: packing comes in place of attention_mask, cu_seqlens and max_seqlen")
        if rows is None or (not torch.compiler.is_compiling() and rows.shape[0] != self.tokens):
            given = None if rows is None else tuple(rows.shape)
            raise ValueError(f"{op}: given {given} and a packing of {self.tokens} tokens; expected what it packed")

    def pack(self, x: Tensor, fill: int = 0) -> Tensor:
        """The caller's form, (batch, seqlen, ...) or (T, ...) -> (T, ...), with `fill` in rows that are not tokens."""
        if self.seqlen is None:
            return x
        if self.indices is None:
            return x.flatten(0, 1)
        x = pack_unchecked(x, self.indices)
        return x if self.real is None else torch.where(_like(self.real, x), x, fill)

    def unpack(self, x: Tensor) -> Tensor:
        """(T, ...) -> the caller's form, zeros where no token is visible."""
        if self.seqlen is None:
            return x
        if self.indices is None:
            return x.view(self.batch, self.seqlen, *x.shape[1:])
        x = x if self.real is None else torch.where(_like(self.real, x), x, 0)
        return unpack_unchecked(x, self.indices, self.batch, self.seqlen)

    def hand_out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, ...) -> the caller's form, and the same (T, ...) computed from it if gradients are recorded.

        For a tensor that the caller gets and that the model goes on with: its gradient is then found in both.
        """
        state = self.unpack(x)
        return state, self.pack(state) if x.requires_grad and torch.is_grad_enabled() else x

    def unpack_weights(self, weights: Tensor) -> Tensor:
        """Attention weights (batch, H, max_seqlen, max_seqlen) over visible tokens -> (batch, H, seqlen, seqlen)."""
        if self.indices is None:
            return weights
        if self.tokens == 0:
            return weights.new_zeros(*weights.shape[:2], self.seqlen, self.seqlen)
        place = self.unpack(packed_positions(self.cu_seqlens, self.tokens))
        visible = self.visible()
        rows = weights.gather(2, place[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[3]))
        cells = rows.gather(3, place[:, None, None, :].expand(-1, weights.shape[1], self.seqlen, -1))
        return cells.masked_fill(~(visible[:, None, :, None] & visible[:, None, None, :]), 0)

    def first(self, x: Tensor) -> Tensor:
        """(T, C) -> (batch, C): the first token of each sequence, zeros for an empty sequence."""
        if self.indices is None and self.seqlen:  # then no sequence is empty
            return self.unpack(x)[:, 0]
        return first_tokens(x, self.cu_seqlens)

    def visible(self) -> Tensor:
        """Where there is a token: bool, in the caller's form."""
        return self.unpack(torch.ones(self.tokens, dtype=torch.int64, device=self.cu_seqlens.device)) != 0

    def positions(self) -> Tensor:
        """BERT's default position ids, (T,) int64: the column in the padded grid, or the position in the sequence."""
        if self.seqlen is None:
            return packed_positions(self.cu_seqlens, self.tokens)
        if self.indices is None or self.real is not None:  # ONNX's exporter has no remainder by a size
            return self.pack(torch.arange(self.seqlen, device=self.cu_seqlens.device).expand(self.batch, -1))
        return self.indices % self.seqlen

    def spaced(self, margin: int) -> tuple[Tensor, int]:
        """The tokens' places, (T,) int64, in one row with at least `margin` free places before and after each sequence;
        and the row's length."""
        token = torch.arange(self.tokens, device=self.cu_seqlens.device)
        sequence = sequence_of(token.int(), self.cu_seqlens)
        return token + margin * (sequence + 1), self.tokens + margin * (self.batch + 2)

    def grid(self) -> "Packing":
        """The same sequences in a padded grid: the caller's, or for packed input a grid padded on the right."""
        if self.seqlen is not None:
            return self
        sequence, position = _sequence_and_position(self.cu_seqlens, self.tokens)
        return self._replace(seqlen=self.max_seqlen, indices=sequence * self.max_seqlen + position)

    def compact(self) -> "Packing":
        """The same sequences in a grid that is padded on the right and as wide as the longest; in compiled code, which
        does not know that width, the caller's grid."""
        if self.seqlen is None or self.indices is None or self.real is not None:
            return self.grid()
        return self._replace(seqlen=None, indices=None).grid()


def _like(real: Tensor, x: Tensor) -> Tensor:
    return real.view(-1, *[1] * (x.dim() - 1))


def first_tokens(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T, C) packed -> (B, C): the first token of each sequence, zeros for an empty sequence."""
    starts, empty = cu_seqlens[:-1], cu_seqlens[1:] == cu_seqlens[:-1]
    if _is_empty(x):
        return x.new_zeros(starts.shape[0], x.shape[1])
    rows = x[starts.clamp(max=x.shape[0] - 1).long()]
    return rows.masked_fill(empty.unsqueeze(-1), 0)


def _is_empty(x: Tensor) -> bool:
    """Whether there are no tokens; False if a compiled graph does not know their number."""
    if not torch.compiler.is_compiling():
        return x.shape[0] == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # only then: it takes sympy

    return guard_or_false(x.shape[0] == 0)


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(T,) int64: the position of each packed token in its sequence."""
    return _sequence_and_position(cu_seqlens, tokens)[1]


def _sequence_and_position(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed token, (T,) int64, and its position there, (T,) int64."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    sequence = sequence_of(token, cu_seqlens).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, (token - cu_seqlens[sequence]).long()


class Interrupted(ValueError):
    """A mask hides tokens between visible ones, in a model whose distances count columns."""


def plan_or_packed(
    op: str,
    shape: torch.Size,
    device: torch.device,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    in_runs: bool = False,
) -> Packing:
    """The Packing of a model's input, checked: of shape (B, S) by its mask, or of shape (T,) by cu_seqlens.

    max_seqlen: for packed input; read from cu_seqlens when None (one host synchronisation). in_runs: as in `plan`.
    Raises ValueError and TypeError that name `op`, and what `plan` raises.
    """
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"{op}: max_seqlen goes with cu_seqlens; a padded batch has its own")
        return plan(attention_mask, *shape, device, in_runs)
    if attention_mask is not None:
        raise ValueError(f"{op}: expected attention_mask or cu_seqlens, not both")
    tokens = shape[0]
    checks.sequences(op, cu_seqlens, tokens if max_seqlen is None else max_seqlen, tokens)
    if cu_seqlens.device != device:
        raise ValueError(f"{op}: the input is on {device} and cu_seqlens on {cu_seqlens.device}; expected one device")
    batch = cu_seqlens.shape[0] - 1
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if batch else 0
    return Packing(cu_seqlens, max_seqlen, tokens, batch)


def plan(
    attention_mask: Tensor | None, batch: int, seqlen: int, device: torch.device, in_runs: bool = False
) -> Packing:
    """Makes a Packing from an attention mask, with at most one host synchronisation; with none if the mask is None.

    attention_mask: None; (B, S), nonzero is visible, with padding anywhere; or Hugging Face's broadcast masks of three
    or four dimensions, (B, 1, 1, S) or (B, 1, S, S) with equal rows: bool (True is visible) or additive float (0 is
    visible, -1e4 and below is not). in_runs: the distance between two tokens is that of their columns, so padding may
    be on both sides of a row's tokens but not between them. Raises ValueError for a mask of another shape, and for one
    that is not a key-padding mask (causal, per query, a bias); TypeError for a dtype that no mask has; with in_runs
    Interrupted, a ValueError, for padding between tokens.

    In code compiled by torch.compile, for fake tensors, and for the masks of torch.vmap's rows, sizes cannot depend on
    the mask: all batch * seqlen rows stay, visible ones first and zeros after them. There, and in programs of
    torch.export, a RuntimeError is raised in place of Interrupted. Within torch.vmap, masks of floats raise
    RuntimeError, and with in_runs all do.
    """
    if torch.jit.is_tracing():
        raise RuntimeError("torch.jit.trace would fix the mask that it sees; use torch.export or torch.compile")
    if attention_mask is None:
        ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen
        return Packing(ends, seqlen, batch * seqlen, batch, seqlen)
    if not torch.compiler.is_compiling() and isinstance(attention_mask, Tensor):
        _check_vmapped(attention_mask, in_runs)
    visible, only_keys = visible_keys(attention_mask, batch, seqlen, device)
    if checks.without_values(visible):
        if only_keys is not None:
            raise ValueError(
                "attention_mask: a compiled graph, or torch.vmap, cannot look at a mask's values; pass a (B, S) mask"
            )
        if in_runs:
            torch._assert_async(is_in_runs(visible), _INTERRUPTED)
        return _compiled_plan(visible)
    backend = backends.choose("padding", visible.device.type, torch.bool, backward=False)
    places, cu_seqlens, facts = PLACES(backend, visible)
    if only_keys is not None:
        facts = torch.cat([facts, only_keys.to(facts.dtype).view(1)])
    tokens, longest, starts_visible, whole, *ok = facts.tolist()
    if not all(ok):
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is no key-padding mask: its rows differ, or it "
            "holds values of another kind of mask (causal, per-query and, in two dimensions, additive masks and biases "
            "are not supported)"
        )
    if in_runs and not whole:
        raise Interrupted(_INTERRUPTED)
    if tokens == batch * seqlen:
        return Packing(cu_seqlens, seqlen, tokens, batch, seqlen)
    return Packing(cu_seqlens, longest, tokens, batch, seqlen, places[:tokens], starts_visible=bool(starts_visible))


def _check_vmapped(mask: Tensor, in_runs: bool) -> None:
    """Raises RuntimeError for a mask of torch.vmap's rows whose values would have to be looked at."""
    if not torch._C._functorch.is_batchedtensor(mask):
        return
    if in_runs:
        raise RuntimeError("torch.vmap hides whether padding is between tokens; expected one mask for all its rows")
    if mask.is_floating_point():
        raise RuntimeError(f"torch.vmap hides the values of attention_mask, {mask.dtype}; expected bool or integers")


_INTERRUPTED = "attention_mask hides tokens between visible ones; expected padding before and after them only"


def _compiled_plan(visible: Tensor) -> Packing:
    batch, seqlen = visible.shape
    cu_seqlens = cu_seqlens_of(visible.sum(1))
    indices = visible_first(visible)
    real = torch.arange(batch * seqlen, device=visible.device) < cu_seqlens[-1]
    return Packing(cu_seqlens, seqlen, batch * seqlen, batch, seqlen, indices, real)


def visible_keys(mask: Tensor, batch: int, seqlen: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(B, S) bool, and whether the mask masks keys and nothing else: a bool scalar, or None if its form implies it."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}; expected a tensor")
    if mask.is_complex():
        raise TypeError(f"attention_mask is {mask.dtype}; expected bool, an integer or a float")
    if mask.device != device:
        checks.same_device("attention_mask", {"attention_mask": mask, "the input": torch.empty(0, device=device)})
    if mask.dim() == 2:
        checks.shape("attention_mask", "attention_mask", mask, (batch, seqlen), "(B, S)")
        if not mask.is_floating_point():
            return mask != 0, None
        only_keys = ((mask > -1e4) & (mask < torch.inf)).all()  # other values belong to a 4-D mask, or to none
        if checks.without_values(mask):
            torch._assert_async(only_keys, "attention_mask: an additive mask in two dimensions is not supported")
            only_keys = None
        return mask != 0, only_keys
    wide = mask.unsqueeze(1) if mask.dim() == 3 else mask
    if (
        wide.dim() != 4
        or wide.shape[0] not in (1, batch)
        or wide.shape[2] not in (1, seqlen)
        or wide.shape[3] != seqlen
    ):
        expected = f"(B, S), (B, 1, 1, S) or (B, 1, S, S) with B = {batch}, S = {seqlen}"
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {expected}")
    rows = wide[:, :1, :1]
    repeated = wide.shape[1:3] == (1, 1) or wide.stride()[1:3] == (0, 0)
    only_keys = None if repeated else (wide == rows).all()
    visible = rows != 0
    if mask.dtype.is_floating_point:
        visible = rows == 0
        hard = (visible | (rows <= -1e4)).all()
        only_keys = hard if only_keys is None else hard & only_keys
    return visible.reshape(visible.shape[0], seqlen).expand(batch, seqlen), only_keys
