"""Embeddings compared, and in fewer bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


def similarity(vectors: Tensor, others: Tensor | None = None) -> Tensor:
    """(N, M): cosines of vectors (N, C) with others (M, C), or with each other; 0 for a zero vector.

    Equivalent to `F.cosine_similarity(vectors[:, None], others[None], dim=-1)`. Raises ValueError for other shapes.
    """
    others = check_vectors(vectors, others)
    return F.normalize(vectors, dim=-1) @ F.normalize(others, dim=-1).T


def check_vectors(vectors: Tensor, others: Tensor | None) -> Tensor:
    """The others, or the vectors where there are none. Raises ValueError unless both are matrices of one width."""
    others = vectors if others is None else others
    if vectors.dim() != 2 or others.dim() != 2 or vectors.shape[1] != others.shape[1]:
        raise ValueError(
            f"similarity: vectors has shape {tuple(vectors.shape)}, others {tuple(others.shape)}; expected (N, C) "
            "and (M, C)"
        )
    return others


def quantize(vectors: Tensor, precision: str, calibration: Tensor | None = None) -> Tensor:
    """(N, C) embeddings in another precision.

    "float16"; "int8" and "uint8": 256 steps between the least and the largest number that each column of calibration
    (M, C) holds, and what is beyond them as the end; "binary" and "ubinary": the signs, 8 in a byte, (N, ceil(C / 8))
    int8 or uint8, of which the first is the highest bit. calibration: embeddings of typical texts; None takes the
    vectors themselves, and then two calls do not give comparable numbers. Equivalent to sentence-transformers'
    quantize_embeddings. Raises ValueError for another precision, for shapes that do not fit, and for numbers that are
    not finite.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"quantize: precision is {precision!r}; expected {', '.join(PRECISIONS)}")
    if vectors.dim() != 2:
        raise ValueError(f"quantize: vectors has shape {tuple(vectors.shape)}; expected (N, C)")
    if precision.startswith("float"):
        return vectors.to(getattr(torch, precision))
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
    if calibration.dim() != 2 or calibration.shape[1] != vectors.shape[1] or not len(calibration):
        expected = f"(M, {vectors.shape[1]}), M > 0"
        raise ValueError(f"quantize: calibration has shape {tuple(calibration.shape)}; expected {expected}")
    least, largest = calibration.amin(0), calibration.amax(0)
    step = (largest - least) / 255
    places = ((vectors - least) / torch.where(step > 0, step, 1)).clamp(0, 255)
    return (places - 128).to(torch.int8) if precision == "int8" else places.to(torch.uint8)
