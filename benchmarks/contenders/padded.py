"""Packed inputs as a (B, S) batch with a mask, and results packed again."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.contenders.interface import PER_TOKEN, Subject
from benchmarks.sizes import Batch

_FILL = {"labels": -100}
_PACKED_ONLY = ("labelled_rows",)


def prepare(batch: Batch, mask: Tensor | None, name: str = "attention_mask") -> Callable[..., dict[str, Tensor]]:
    """Pads each input; adds the mask under its name, and no argument at all where nothing is masked: that is each
    implementation's fastest way to be told so."""

    def grid(**packed: Tensor) -> dict[str, Tensor]:
        padded = {key: batch.pad(x, _FILL.get(key, 0)) for key, x in packed.items() if key not in _PACKED_ONLY}
        return padded if mask is None else padded | {name: mask}

    return grid


def collect(subject: Subject, batch: Batch) -> Callable[[Tensor], Tensor]:
    return batch.take if subject.part in PER_TOKEN else lambda result: result
