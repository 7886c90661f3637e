"""Compares, searches and quantises embeddings."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops.numbers import wide

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


def similarity(vectors: Tensor, others: Tensor | None = None) -> Tensor:
    """(N, M): cosines of vectors (N, C) with others (M, C), or with each other; 0 for a zero vector.

    Equivalent to `F.cosine_similarity(vectors[:, None], others[None], dim=-1)`. Raises ValueError for other shapes,
    TypeError for other types; the integers of `quantize` are for indexes that read them.
    """
    others = check_vectors(vectors, others)
    return F.normalize(vectors, dim=-1) @ F.normalize(others, dim=-1).T


def check_pairs(vectors: Tensor, others: Tensor) -> None:
    """Raises as `check_vectors`, and ValueError unless there are as many of both."""
    check_vectors(vectors, others, "similarity_pairwise")
    if vectors.shape != others.shape:
        shapes = f"{tuple(vectors.shape)}, others {tuple(others.shape)}"
        raise ValueError(f"similarity_pairwise: vectors has shape {shapes}; expected equal ones, (N, C)")


def pairwise(vectors: Tensor, others: Tensor, measure: str) -> Tensor:
    """(N,): by a measure's name, how similar each row of (N, C) is to the same row of others, (N, C)."""
    if measure == "cosine":
        vectors, others = F.normalize(vectors, dim=-1), F.normalize(others, dim=-1)
    if measure in ("cosine", "dot"):
        return (vectors * others).sum(-1)
    return -torch.linalg.vector_norm(wide(vectors) - wide(others), 1 if measure == "manhattan" else 2, dim=-1)


def distances(vectors: Tensor, others: Tensor, p: int) -> Tensor:
    """(N, M): the p-norms of the differences, in float32 or better. Computed by products, equal vectors would be
    apart."""
    return torch.cdist(wide(vectors), wide(others), p=float(p), compute_mode="donot_use_mm_for_euclid_dist")


def check_count(caller: str, count: Any, name: str = "k") -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{caller}: {name} is {count!r}; expected an int of at least 1")


def require_tensor(caller: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{caller}: given a {type(given).__name__}; expected a Tensor (torch.from_numpy)")


def check_vectors(vectors: Tensor, others: Tensor | None, caller: str = "similarity") -> Tensor:
    """Returns others, or vectors if others is None. Raises ValueError unless both are matrices of one width, TypeError
    unless they are tensors of one floating-point type."""
    others = _check_shapes(vectors, others, caller)
    if not (vectors.is_floating_point() and vectors.dtype == others.dtype):
        raise TypeError(
            f"{caller}: vectors are {vectors.dtype}, others {others.dtype}; expected one floating-point type"
        )
    return others


def _check_shapes(vectors: Tensor, others: Tensor | None, caller: str) -> Tensor:
    others = vectors if others is None else others
    for given in (vectors, others):
        require_tensor(caller, given)
    if vectors.dim() != 2 or others.dim() != 2 or vectors.shape[1] != others.shape[1]:
        raise ValueError(
            f"{caller}: vectors has shape {tuple(vectors.shape)}, others {tuple(others.shape)}; expected (N, C) "
            "and (M, C)"
        )
    return others


def nearest(
    vectors: Tensor,
    others: Tensor,
    k: int,
    measure: Callable[[Tensor, Tensor], Tensor] = similarity,
    *,
    block: tuple[int, int] = (256, 16384),
) -> tuple[Tensor, Tensor]:
    """(scores, indices), each (N, min(k, M)): which of the others (M, C) are most similar to each vector (N, C).

    The best come first, ties in the order of others. measure: gives (n, m) scores of (n, C) and (m, C), larger for more
    similar, as `SentenceEncoder.similarity` does. block: rows and columns of scores that are in memory at once.
    Equivalent to the first k columns of `measure(vectors, others).sort(descending=True, stable=True)`. Raises
    ValueError for other shapes, a k or block below 1, and a score that is NaN.
    """
    _check_shapes(vectors, others, "nearest")
    check_count("nearest", k)
    if min(block) < 1:
        raise ValueError(f"nearest: block is {block}; expected at least (1, 1)")
    found = [_nearest(rows, others, k, measure, block[1]) for rows in vectors.split(block[0])]
    scores, indices = map(torch.cat, zip(*found, strict=True))
    if len(wrong := scores.isnan().nonzero()):  # NaN counts as the largest, so it is among the best
        vector, other = int(wrong[0, 0]), int(indices[tuple(wrong[0])])
        raise ValueError(f"nearest: the score of vectors[{vector}] and others[{other}] is NaN; expected a number")
    return scores, indices


def _nearest(rows: Tensor, others: Tensor, k: int, measure: Callable, columns: int) -> tuple[Tensor, Tensor]:
    best, indices = measure(rows, others[:0]), torch.empty(len(rows), 0, device=rows.device, dtype=torch.int64)
    for start in range(0, len(others), columns):
        scores = measure(rows, others[start : start + columns])
        here = torch.arange(start, start + scores.shape[1], device=rows.device).expand(len(rows), -1)
        best, indices = best_of(torch.cat([best, scores], 1), torch.cat([indices, here], 1), k)
    return best, indices


def best_of(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row and their indices, ties in order of place, which topk does not guarantee."""
    last = scores.topk(min(k, scores.shape[1]))
    places = last.indices
    tied = (scores >= last.values[:, -1:]).sum(1) > places.shape[1]
    places[tied] = scores[tied].sort(descending=True, stable=True).indices[:, : places.shape[1]]
    places = places.sort().values
    order = scores.gather(1, places).sort(descending=True, stable=True)
    return order.values, indices.gather(1, places).gather(1, order.indices)


def quantize(vectors: Tensor, precision: str, calibration: Tensor | None = None) -> Tensor:
    """(N, C) embeddings in another precision.

    "float32", "float16"; "int8" and "uint8": 256 steps between the smallest and the largest number in each column of
    calibration (M, C), to which other numbers are clamped; "binary" and "ubinary": the signs, 8 in a byte, the first in
    the highest bit, (N, ceil(C / 8)) int8 or uint8. calibration: embeddings of typical texts; None takes the vectors
    themselves, at least two, but then the results of two calls cannot be compared. Equivalent to sentence-transformers'
    quantize_embeddings. Raises ValueError for another precision, for shapes that do not fit, for numbers that float16
    cannot hold, and (but for floats) for vectors or a calibration that are not finite; TypeError for anything but
    tensors.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"quantize: precision is {precision!r}; expected {', '.join(PRECISIONS)}")
    for given in (vectors, vectors if calibration is None else calibration):
        require_tensor("quantize", given)
    if vectors.dim() != 2:
        raise ValueError(f"quantize: vectors has shape {tuple(vectors.shape)}; expected (N, C)")
    if precision.startswith("float"):
        converted = vectors.to(getattr(torch, precision))
        if (converted.isinf() & vectors.isfinite()).any():
            raise ValueError(f"quantize: vectors holds numbers beyond {precision}'s largest")
        return converted
    if not vectors.isfinite().all():
        raise ValueError("quantize: vectors holds numbers that are not finite")
    if precision.endswith("binary"):
        return _signs(vectors, precision)
    return _steps(vectors, precision, vectors if calibration is None else calibration)


def _signs(vectors: Tensor, precision: str) -> Tensor:
    bits = F.pad((vectors > 0).to(torch.int32), (0, -vectors.shape[1] % 8))
    values = 2 ** torch.arange(7, -1, -1, device=vectors.device, dtype=torch.int32)
    packed = (bits.unflatten(1, (-1, 8)) * values).sum(-1)
    return (packed - 128).to(torch.int8) if precision == "binary" else packed.to(torch.uint8)


def _steps(vectors: Tensor, precision: str, calibration: Tensor) -> Tensor:
    if calibration.dim() != 2 or calibration.shape[1] != vectors.shape[1] or len(calibration) < 2:
        own = " (the vectors themselves)" if calibration is vectors else ""
        expected = f"(M, {vectors.shape[1]}), M > 1"
        raise ValueError(f"quantize: calibration{own} has shape {tuple(calibration.shape)}; expected {expected}")
    if not calibration.isfinite().all():
        raise ValueError("quantize: calibration holds numbers that are not finite")
    least, largest = calibration.amin(0), calibration.amax(0)
    step = (largest - least) / 255
    places = ((vectors - least) / torch.where(step > 0, step, 1)).clamp(0, 255).to(torch.uint8)
    return (places.to(torch.int16) - 128).to(torch.int8) if precision == "int8" else places
