"""fastbert's ops on one backend that it would not choose by itself: what its order of preference rests on."""

import functools

import torch

import fastbert
from benchmarks.contenders import ours
from benchmarks.contenders.interface import OPS, Contender, Subject, Way
from benchmarks.sizes import Batch
from fastbert import backends

# What an op is to the table of backends: itself, but for these. An op may go through several.
_GOES_THROUGH = {"qkv_attention": ("attention", "linear"), "pack": ("padding",), "unpack": ("padding",)}


def make(
    backend: str, subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool
) -> Way | str | None:
    names = _GOES_THROUGH.get(subject.part, (subject.part,))
    if any(backends.why_not(backend, op, device, dtype, backward) for op in names):
        return None
    if backend == backends.choose(names[0], device, dtype, backward=backward):
        return None
    call = ours.call(subject, batch)

    def run(**inputs):
        with fastbert.backend(backend):
            return call(**inputs)

    return Way(run)


CONTENDERS = [Contender(f"fastbert, {name}", OPS, functools.partial(make, name)) for name in backends.BACKENDS]
