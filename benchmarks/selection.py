"""Which cases are measured: by default the ones listed here, the most important first, or what the options name."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import bench_encoder, bench_growth, bench_hf, bench_mlm, bench_ops, provenance, sizes
from benchmarks.bench_hf import ENCODE
from benchmarks.cases import BACKWARD, DROPOUT, FORWARD, STEP, Spec
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL
from benchmarks.sizes import Size

GROUPS = {"encoder": bench_encoder, "mlm": bench_mlm, "ops": bench_ops, "hf": bench_hf, "growth": bench_growth}
DEFAULT = ("encoder", "mlm", "ops", "hf")  # growth takes longer than all of them
SHAPE = {"cpu": "8x128", "cuda": "32x128"}
OPS_SHAPE = {"cpu": "8x128", "cuda": "32x512"}
LAYERS = {"cpu": 2, "cuda": None}  # of a processor's; None: all


@dataclass(frozen=True)
class Pick:
    """Cases of one part: every shape with every distribution of lengths and every direction. dtypes: None for what the
    device is good for. last: they come after all that are not, whatever the group."""

    part: str
    shapes: tuple[str, ...]
    lengths: tuple[str, ...]
    directions: tuple[str, ...]
    models: tuple[str, ...] = ("base",)
    layers: int | None = None
    dtypes: tuple[str, ...] | None = None
    last: bool = False

    def specs(self, dtypes: list[str]) -> Iterator[Spec]:
        for model, shape, lengths in itertools.product(self.models, self.shapes, self.lengths):
            size = sizes.of(shape, model, self.layers)
            for dtype, direction in itertools.product(self.dtypes or dtypes, self.directions):
                yield Spec(self.part, size, lengths, dtype, direction)


_CPU = {
    "encoder": (
        Pick(MODEL, ("1x128",), ("full",), (FORWARD,)),
        Pick(MODEL, ("8x128",), ("half", "full", "text"), (FORWARD,), layers=2),
        Pick(MODEL, ("8x128",), ("half",), (DROPOUT,), layers=2),
        Pick(MODEL, ("8x512",), ("half",), (FORWARD,), layers=2),
        Pick(ENCODER, ("8x128",), ("half",), (FORWARD,), layers=2),
        Pick(MODEL, ("8x128",), ("full",), (DROPOUT,), layers=2, last=True),
        Pick(MODEL, ("8x512",), ("text",), (FORWARD,), layers=2, last=True),
        Pick(MODEL, ("8x128",), ("half",), (BACKWARD,), layers=2, last=True),
        Pick(ENCODER, ("8x128",), ("half",), (BACKWARD,), layers=2, last=True),
        Pick(MODEL, ("8x512",), ("half",), (DROPOUT,), layers=2, last=True),
    ),
    "mlm": (
        Pick(MASKED_LM, ("8x128",), ("half",), (STEP,), layers=2),
        Pick(MASKED_LM, ("8x128",), ("half",), (DROPOUT,), layers=2, last=True),
    ),
    "hf": (
        Pick(ENCODE, ("64x256",), ("text",), (FORWARD,), dtypes=("float32",)),
        Pick(CLASSIFIER, ("8x128",), ("half",), (FORWARD, DROPOUT), layers=2),
    ),
}
_CUDA = {
    "encoder": (
        Pick(MODEL, ("32x128",), ("half", "full", "text"), (FORWARD,)),
        Pick(MODEL, ("1x128",), ("full",), (FORWARD,)),
        Pick(MODEL, ("32x512",), ("half", "full", "text"), (FORWARD,)),
        Pick(MODEL, ("32x128", "32x512"), ("half", "full"), (DROPOUT,)),
        Pick(MODEL, ("32x128",), ("half", "full"), (FORWARD,), models=("large",)),
        Pick(MODEL, ("1x128",), ("full",), (FORWARD,), models=("large",)),
        Pick(MODEL, ("8x128", "8x512"), ("half", "full"), (FORWARD,)),
        Pick(MODEL, ("32x512",), ("half", "full"), (FORWARD, DROPOUT), models=("large",)),
        Pick(ENCODER, ("32x128",), ("half", "full"), (FORWARD, BACKWARD)),
        Pick(MODEL, ("32x128",), ("half",), (FORWARD, BACKWARD), dtypes=("float16", "float32")),
        Pick(MODEL, ("32x128",), ("half", "full"), (BACKWARD,)),
    ),
    "mlm": (
        Pick(MASKED_LM, ("32x128",), ("half", "full"), (STEP, DROPOUT)),
        Pick(MASKED_LM, ("32x512",), ("half",), (STEP,)),
        Pick(MASKED_LM, ("32x128",), ("half",), (STEP,), models=("large",)),
    ),
    "hf": (
        Pick(CLASSIFIER, ("32x128",), ("half", "full"), (FORWARD, DROPOUT)),
        Pick(ENCODE, ("256x256",), ("text",), (FORWARD,), dtypes=("float32",)),
    ),
}
PICKS = {"cpu": _CPU, "cuda": _CUDA}


def dtypes(device: str) -> list[str]:
    """What the device is good for, the most important first."""
    if device == "cuda":
        return ["bfloat16"]
    return ["float32", *["bfloat16"] * provenance.has_bfloat16_products()]


def specs(options: argparse.Namespace) -> list[tuple[str, Spec]]:
    """(group, case) in the order in which they run: all groups in one type before the next, and what comes last.

    Raises ValueError for a part that none of the groups has, for what is no shape, for options that go with nothing
    that is measured, and where no case is left.
    """
    if unknown := set(options.parts or ()) - {part for group in options.groups for part in GROUPS[group].PARTS}:
        raise ValueError(f"no part {', '.join(sorted(unknown))} in the groups {', '.join(options.groups)}")
    _check(options)
    wanted = options.dtypes or dtypes(options.device)
    found = [(group, *item) for group in options.groups for item in _of_group(group, options, wanted)]
    if not found:
        raise ValueError(f"no case of the groups {', '.join(options.groups)} is left by the other options")
    found.sort(key=lambda item: (item[2], [*wanted, item[1].dtype].index(item[1].dtype)))
    return [(group, spec) for group, spec, _ in found]


def _check(options: argparse.Namespace) -> None:
    named = [name for name in ("shapes", "models", "layers") if getattr(options, name)]
    if named and options.size != "full":
        raise ValueError(f"--{named[0]} goes with --size full; {options.size} is one small shape")
    if "growth" in options.groups and (named or options.lengths):
        raise ValueError(f"--{[*named, 'lengths'][0]} does not go with the group growth, which has sizes of its own")


def _of_group(group: str, options: argparse.Namespace, dtypes: list[str]) -> Iterator[tuple[Spec, bool]]:
    """Cases, and whether they come last."""
    parts = [part for part in GROUPS[group].PARTS if part in (options.parts or GROUPS[group].PARTS)]
    named = options.shapes or options.models or options.layers or options.lengths or options.directions
    if group == "growth":
        yield from ((spec, False) for spec in _growth(parts, options, dtypes))
    elif options.size != "full" or named or group == "ops":
        yield from ((spec, False) for spec in _product(group, parts, options, dtypes))
    else:
        for pick in PICKS[options.device][group]:
            if pick.part in parts and (pick.dtypes is None or not options.dtypes):
                yield from ((spec, pick.last) for spec in pick.specs(dtypes))


def _product(group: str, parts: list[str], options: argparse.Namespace, dtypes: list[str]) -> Iterator[Spec]:
    """Everything with everything, of what the options name and, for what they do not, the defaults."""
    is_op, device = group == "ops", options.device
    shapes = options.shapes or [(OPS_SHAPE if is_op else SHAPE)[device]]
    for part, size in itertools.product(parts, _sizes(options, shapes, None if is_op else LAYERS[device])):
        if part == ENCODE:  # a whole library's call
            yield Spec(part, size, "text", "float32", FORWARD)
            continue
        lengths = options.lengths or (bench_ops.CASES[part][1] if is_op else ("half", "full"))
        for item in itertools.product(lengths, dtypes, _directions(group, options)):
            yield Spec(part, size, *item)


def _directions(group: str, options: argparse.Namespace) -> list[str]:
    known = GROUPS[group].DIRECTIONS
    return [direction for direction in known if direction in (options.directions or known)]


def _sizes(options: argparse.Namespace, shapes: list[str], layers: int | None) -> list[Size]:
    if options.size != "full":
        return [sizes.SMALL[options.size]]
    models = options.models or ["base"]
    return [sizes.of(shape, model, options.layers or layers) for model, shape in itertools.product(models, shapes)]


def _growth(parts: list[str], options: argparse.Namespace, dtypes: list[str]) -> Iterator[Spec]:
    """All parts at one size before the next."""
    columns = [[(part, size) for size in bench_growth.sizes(part, options.size)] for part in parts]
    for row in itertools.zip_longest(*columns):
        for item, dtype, direction in itertools.product(filter(None, row), dtypes, _directions("growth", options)):
            yield Spec(*item, "full", dtype, direction)
