"""One vector per token, for late interaction (ColBERT): the code that inference and training share."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.ops.checks import sequences, values_visible
from fastbert.ops.numbers import wide
from fastbert.ops.padding import cu_seqlens_of


class Expansion(NamedTuple):
    """Tokens of `token_id` that extend a query to `length` tokens.

    attend: other tokens attend to them; if False, they attend to the query's tokens, but no token attends to them.
    fixed: queries may not be longer than `length`.
    """

    length: int
    token_id: int
    attend: bool
    fixed: bool


class TokenVectors(nn.Module):
    """An encoder whose last hidden states are selected, projected and normalised: the part of a multi-vector encoder
    that has weights. `MultiVectorEncoder.vectors` is one."""

    def __init__(
        self,
        encoder: nn.Module,
        dense: Sequence[nn.Module] = (),
        *,
        normalize: bool = True,
        expansion: Expansion | None = None,
        skip_ids: Iterable[int] = (),
        skip_in: tuple[bool, bool] = (False, True),
    ) -> None:
        """encoder: a BertModel without a pooler. dense: layers after it. normalize: to vectors of length 1. expansion:
        of queries. skip_ids: tokens that give no vector; skip_in: whether this holds in queries, and in documents.

        Raises ValueError for an encoder with a pooler, and for one with DeBERTa-v2's convolution together with an
        expansion that is not attended to, because the convolution would mix it into the query.
        """
        super().__init__()
        if getattr(encoder, "pooler", None) is not None:
            raise ValueError("TokenVectors: the encoder has a pooler, which no vector reaches; expected none")
        if expansion and not expansion.attend and getattr(encoder.encoder, "conv", None) is not None:
            raise ValueError(
                "TokenVectors: attend is False; expected True, as DeBERTa-v2's convolution sees all tokens"
            )
        self.encoder, self.dense = encoder, nn.Sequential(*dense)
        self.normalize, self.expansion, self.skip_in = normalize, expansion, skip_in
        self.register_buffer("skip_ids", torch.tensor(sorted(set(skip_ids)), dtype=torch.int64), persistent=False)

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *, query: bool
    ) -> tuple[Tensor, Tensor]:
        """Packed texts (T,), cu_seqlens (B + 1,) int32 -> their vectors (V, D) in float32 or better, and where the
        vectors of each text begin, (B + 1,) int32. Raises what the encoder raises, and ValueError for a query that is
        too long."""
        ends = self.ends(input_ids, cu_seqlens, query=query)
        return self.embed(input_ids, cu_seqlens, max_seqlen, query=query), ends

    def ends(self, input_ids: Tensor, cu_seqlens: Tensor, *, query: bool) -> Tensor:
        """(B + 1,) int32: where the vectors of each text begin."""
        ids, ends, _ = self._expanded(input_ids, cu_seqlens, query)
        if (kept := self._kept(ids, query)) is None:
            return ends
        return F.pad(kept.cumsum(0), (1, 0))[ends.long()].int()

    def embed(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *, query: bool) -> Tensor:
        """The vectors (V, D), without where they begin."""
        ids, ends, unseen = self._expanded(input_ids, cu_seqlens, query)
        if query and self.expansion and max_seqlen is not None:
            max_seqlen = max(max_seqlen, self.expansion.length)
        if unseen is None:
            hidden = self.encoder(ids, cu_seqlens=ends, max_seqlen=max_seqlen).last_hidden_state
        else:
            inputs, packing = self.encoder.pack(ids, None, None, None, None, ends, max_seqlen)
            packing = packing._replace(unseen=unseen)
            hidden = self.encoder(**inputs._asdict(), packing=packing).last_hidden_state
        kept = self._kept(ids, query)
        vectors = wide(self.dense(wide(hidden if kept is None else hidden[kept])))  # autocast narrows dense outputs
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def _kept(self, ids: Tensor, query: bool) -> Tensor | None:
        """Which tokens give a vector, (T,) bool; None if all do."""
        if not self.skip_in[not query] or not len(self.skip_ids):
            return None
        return ~torch.isin(ids, self.skip_ids)

    def _expanded(self, ids: Tensor, cu_seqlens: Tensor, query: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids and cu_seqlens with the queries' expansion tokens, and (T,) bool which these are if no token attends to
        them, else None."""
        added = self.expansion
        if not query or added is None:
            return ids, cu_seqlens, None
        sequences("TokenVectors", cu_seqlens, len(ids), len(ids))
        lengths = cu_seqlens.diff()
        if added.fixed and values_visible(lengths) and len(lengths) and (longest := int(lengths.max())) > added.length:
            raise ValueError(f"TokenVectors: a query has {longest} tokens; expected at most {added.length}")
        ends = cu_seqlens_of(lengths.clamp(min=added.length))
        shifts = torch.repeat_interleave((ends - cu_seqlens)[:-1], lengths.long(), output_size=len(ids))
        places = shifts + torch.arange(len(ids), device=ids.device)
        unseen = torch.ones(int(ends[-1]), dtype=torch.bool, device=ids.device).index_fill(0, places, False)
        expanded = torch.full(unseen.shape, added.token_id, dtype=ids.dtype, device=ids.device)
        return expanded.index_copy(0, places, ids), ends, None if added.attend else unseen
