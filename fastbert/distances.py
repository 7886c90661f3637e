"""The table slot of each distance between two tokens: DeBERTa-v2's buckets, and those of T5 and MPNet.

They are computed in float32, as in transformers, but with Python's numbers: these tables are also made while a model is
traced, and no compiler may round them differently. Any sequence length works: every distance beyond the end of a table
has the slot at that end.
"""

import functools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

MPNET_BUCKETS = 32  # transformers computes this many, whatever relative_attention_num_buckets is
_MPNET_FARTHEST = 128
KINDS = ("c2p", "p2c")  # the tokens' queries times position keys, the tokens' keys times position queries


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def _disentangled(distance: int, buckets: int, farthest: int) -> int:
    """DeBERTa-v2's bucket of a distance >= 0: up to buckets // 2 one bucket each, beyond that logarithmic ones."""
    middle = buckets // 2
    if buckets < 1 or distance <= middle:
        return distance
    share = float32(float32(math.log(float32(distance / middle))) / _log_of(middle, farthest))
    return math.ceil(float32(share * (middle - 1))) + middle


def _log_of(middle: int, farthest: int) -> float:
    return float32(math.log(float32((farthest - 1) / middle)))


@functools.lru_cache
def disentangled_slots(buckets: int, farthest: int) -> tuple[int, ...]:
    """DeBERTa-v2's slots of the distances i - j from -farthest to farthest, in order.

    buckets: config.position_buckets; below 1 there are none, and distances are clamped to farthest. The slots never
    fall; the first and the last also serve all farther distances.
    """
    span = buckets if buckets > 0 else farthest
    far = [_disentangled(distance, buckets, farthest) for distance in range(farthest + 1)]
    both = [-bucket for bucket in reversed(far[1:])] + far
    return tuple(min(max(bucket + span, 0), 2 * span - 1) for bucket in both)


@functools.lru_cache
def mpnet_slots() -> tuple[int, ...]:
    """MPNet's slots, like `disentangled_slots`: T5's bidirectional buckets; the upper half is for later keys."""
    half = MPNET_BUCKETS // 2
    return tuple(
        _logarithmic(abs(distance), half) + half * (distance < 0)
        for distance in range(-_MPNET_FARTHEST, _MPNET_FARTHEST + 1)
    )


def _logarithmic(distance: int, half: int) -> int:
    exact = half // 2
    if distance < exact:
        return distance
    share = float32(float32(math.log(float32(distance / exact))) / float32(math.log(_MPNET_FARTHEST / exact)))
    return min(exact + int(float32(share * (half - exact))), half - 1)


def disentangled_scaling(head_size: int, kinds: Sequence[str] | None) -> float:
    """DeBERTa's scale, 1 / sqrt(D n): n is 1, plus 1 for each kind of product with positions. The root is in float32,
    as in transformers."""
    terms = 1 + sum([kind in (kinds or ()) for kind in KINDS])
    return 1 / float32(math.sqrt(head_size * terms))


# ---- as tensors


def disentangled(buckets: int, farthest: int, length: int | None, device: torch.device) -> tuple[Tensor, int, int]:
    """The slots of all distances in sequences of this length, or of any length if None: int32 (2 L - 1,), counted from
    the lowest slot in use; then the lowest slot, and the one after the highest.
    """
    if length is None:
        return _every_disentangled(buckets, farthest, device), 0, 2 * (buckets if buckets > 0 else farthest)
    return _kept(disentangled_slots(buckets, farthest), min(length - 1, farthest), device)


def mpnet(device: torch.device) -> Tensor:
    """MPNet's slots of all distances, int32 (257,)."""
    if torch.compiler.is_compiling():
        return _every_mpnet(device)
    return _kept(mpnet_slots(), _MPNET_FARTHEST, device)[0]


def _tensor(slots: Sequence[int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # inference tensors could not be saved for backward
        return torch.tensor(slots, dtype=torch.int32, device=device)


@functools.cache  # without a limit: CUDA graphs read these tensors, and keep only their addresses
def _kept(slots: tuple[int, ...], reach: int, device: torch.device) -> tuple[Tensor, int, int]:
    """The slots of distances up to `reach`, counted from the lowest; the lowest slot, and the one after the highest."""
    middle = len(slots) // 2
    used = slots[middle - reach : middle + reach + 1]
    lowest = min(used)
    return _tensor([slot - lowest for slot in used], device), lowest, max(used) + 1


# In compiled code a tensor may be a fake one, so these are not cached; and they are not traced, but become constants.
# The mark below is what torch.compiler.assume_constant_result sets, but that imports torch._dynamo, and with it Triton.


def _every_disentangled(buckets: int, farthest: int, device: torch.device) -> Tensor:
    return _tensor(disentangled_slots(buckets, farthest), device)


def _every_mpnet(device: torch.device) -> Tensor:
    return _tensor(mpnet_slots(), device)


for _function in (_every_disentangled, _every_mpnet):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
