"""MaxSim, ColBERT's late interaction: each token of a query is scored by its most similar token in the document."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastbert.ops import checks
from fastbert.ops.numbers import wide

EMPTY = -1e9  # the score of a document without tokens, below all others, as in sentence-transformers


def maxsim(
    queries: Tensor,
    cu_seqlens_q: Tensor,
    documents: Tensor,
    cu_seqlens_d: Tensor,
    *,
    block: int = 1 << 24,
) -> Tensor:
    """(Bq, Bd) scores of packed queries (Tq, D) and documents (Td, D), in float32 or better. Differentiable.

    A score is the sum, over the query's tokens, of the largest dot product with a token of the document; 0 for a query
    without tokens, -1e9 for a document without. cu_seqlens_q (Bq + 1,), cu_seqlens_d (Bd + 1,): int32, where each query
    or document begins. block: how many dot products are in memory at once, but at least those of one query with one
    document. Saved for backward: the vectors and, for each query token and document, the index of the document's token
    with the largest product (the first of equal ones), int64. Reading both cu_seqlens is a host synchronisation.
    Equivalent to torch.stack([torch.stack([(q @ d.T).amax(-1).sum() for d in documents]) for q in queries]) of single
    texts: ColBERT (Khattab and Zaharia, 2020, section 3.3). Raises ValueError and TypeError for tensors that do not fit
    each other.
    """
    rows, columns = _ends("maxsim", queries, cu_seqlens_q, documents, cu_seqlens_d)
    queries, documents = wide(queries), wide(documents)
    lengths, longest = _lengths(rows), max(_lengths(columns), default=0)
    with torch.autocast(queries.device.type, enabled=False):
        found = []
        for first, last in runs(lengths, max(block // max(longest, 1), 1), padded=False):
            part = queries[rows[first] : rows[last]]
            found.append(_of_block(part, lengths[first:last], documents, columns, block))
        return torch.cat(found) if found else queries.new_zeros(0, len(columns) - 1)


def _of_block(queries: Tensor, lengths: list[int], documents: Tensor, ends: list[int], block: int) -> Tensor:
    """Scores (queries, documents): all queries at once, documents block by block."""
    scores = []
    for first, last in runs(_lengths(ends), max(block // max(len(queries), 1), 1)):
        grid, real = _padded(documents[ends[first] : ends[last]], _lengths(ends[first : last + 1]))
        largest = _largest(grid, real, queries)  # (documents, tokens of the queries)
        scores.append(torch.stack([part.sum(-1) for part in largest.split(lengths, -1)]))
        scores[-1] = scores[-1].masked_fill(~real.any(-1), EMPTY)
    return torch.cat(scores, 1) if scores else queries.new_zeros(len(lengths), 0)


def maxsim_pairs(
    queries: Tensor,
    cu_seqlens_q: Tensor,
    documents: Tensor,
    cu_seqlens_d: Tensor,
    *,
    block: int = 1 << 24,
) -> Tensor:
    """(B,) scores of each query with the document of the same index. Arguments, scores and gradients as in `maxsim`.

    Equivalent to maxsim(...).diagonal(). Raises ValueError for unequal numbers, and what `maxsim` raises.
    """
    rows, columns = _ends("maxsim_pairs", queries, cu_seqlens_q, documents, cu_seqlens_d)
    if len(rows) != len(columns):
        raise ValueError(f"maxsim_pairs: there are {len(rows) - 1} queries and {len(columns) - 1} documents")
    queries, documents = wide(queries), wide(documents)
    width = max(_lengths(rows), default=0)
    with torch.autocast(queries.device.type, enabled=False):
        scores = [queries.new_zeros(0)]
        for first, last in runs(_lengths(columns), max(block // max(width, 1), 1)):
            grid, real = _padded(documents[columns[first] : columns[last]], _lengths(columns[first : last + 1]))
            own, _ = _padded(queries[rows[first] : rows[last]], _lengths(rows[first : last + 1]))  # zeros add nothing
            scores.append(_largest(grid, real, own).sum(-1).masked_fill(~real.any(-1), EMPTY))
        return torch.cat(scores)


def _largest(grid: Tensor, real: Tensor, queries: Tensor) -> Tensor:
    """The largest dot product of each query token with a document's tokens, (B, Q); its gradient goes to the first
    token that has it. grid: (B, L, D) documents, with tokens where `real` (B, L) is True. queries: (Q, D) tokens for
    all documents, or (B, Q, D), those of each."""
    products = grid @ queries.mT  # max saves only indices for backward, so these are freed before the next block
    return products.masked_fill(~real.unsqueeze(-1), -torch.inf).max(1).values


def _padded(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(T, D) -> (B, L, D) with zeros after each sequence's tokens, and where the tokens are, (B, L) bool; L >= 1."""
    grid = pad_sequence([*x.split(lengths), x.new_zeros(1, x.shape[1])], batch_first=True)[:-1]
    places = torch.arange(grid.shape[1], device=x.device)
    return grid, places < torch.tensor(lengths, device=x.device).unsqueeze(-1)


def runs(lengths: list[int], budget: int, padded: bool = True) -> Iterator[tuple[int, int]]:
    """Splits sequences into runs of at most `budget` tokens, or of one longer sequence; yields each run's first index
    and the index after its last.

    padded: each sequence of a run counts as many tokens as its longest.
    """
    first, longest, tokens = 0, 0, 0
    for index, length in enumerate(lengths):
        longest, tokens = max(longest, length), tokens + length
        if index > first and (longest * (index + 1 - first) if padded else tokens) > budget:
            yield first, index
            first, longest, tokens = index, length, length
    if lengths:
        yield first, len(lengths)


def _lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def _ends(op: str, queries: Tensor, cu_q: Tensor, documents: Tensor, cu_d: Tensor) -> tuple[list[int], list[int]]:
    """Checks the arguments. Returns both cu_seqlens as lists."""
    checks.floats(op, {"queries": queries, "documents": documents}, {})
    checks.shape(op, "queries", queries, (None, None), "(Tq, D)")
    checks.shape(op, "documents", documents, (None, queries.shape[1]), "(Td, D)", "D that of queries")
    found = []
    for cu_seqlens, tokens in ((cu_q, len(queries)), (cu_d, len(documents))):
        on_host = cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        checks.sequences(op, on_host, tokens, tokens)
        found.append(on_host.tolist())
    return found[0], found[1]
