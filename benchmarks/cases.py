"""The cases that are measured: a table, the most important first, and the selection that the options make from it."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks import batch
from benchmarks.batch import SMALL, Size
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, OPS
from fastbert import backends

FORWARD, BACKWARD, ALONE = "forward", "forward+backward", "backward alone"
DROPOUT, STEP = "forward+backward, dropout 0.1", "step with AdamW, dropout 0.1"
P = 0.1  # the probability of dropout, in directions that have it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENCODE, RERANK, CONTRASTIVE = LIBRARY = "encode", "rerank", "contrastive step"  # sentence-transformers' own calls


@dataclass(frozen=True)
class Spec:
    """One case. part: an op, a module or one of LIBRARY. grows: what grows from case to case in the group growth."""

    part: str
    size: Size
    lengths: str
    dtype: str
    direction: str
    grows: str = ""

    @property
    def kind(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def forward(self) -> bool:
        return self.direction != ALONE

    @property
    def backward(self) -> bool:
        return self.direction != FORWARD

    @property
    def has_dropout(self) -> bool:
        return self.direction in (DROPOUT, STEP)

    def facts(self) -> dict[str, object]:
        """The facts that results files contain; the number of layers only for parts that have layers."""
        found = {"op" if self.part in OPS else "part": self.part, "direction": self.direction, "dtype": self.dtype}
        found |= {"lengths": self.lengths, **self.size.facts()}
        found |= {} if self.part in OPS else {"layers": self.size.config.num_hidden_layers}
        return found | ({"grows": self.grows} if self.grows else {})

    def __str__(self) -> str:
        return "  ".join(str(value) for value in self.facts().values())


@dataclass(frozen=True)
class Pick:
    """Cases of one part: every model and shape with every distribution of lengths, type and direction.

    dtypes: None for those that suit the device. layers: None for the model's own number. last: runs after all cases
    of all groups that are not last.
    """

    part: str
    shapes: tuple[str, ...]
    lengths: tuple[str, ...]
    directions: tuple[str, ...]
    models: tuple[str, ...] = ("base",)
    layers: int | None = None
    dtypes: tuple[str, ...] | None = None
    grows: str = ""
    last: bool = False

    def specs(self, dtypes: list[str], small: Size | None) -> Iterator[Spec]:
        """The cases. small: a size that replaces all shapes."""
        shapes = itertools.product(self.models, self.shapes)
        sizes = [small] if small else [batch.size_of(shape, model, self.layers) for model, shape in shapes]
        for size, lengths in itertools.product(sizes, self.lengths):
            for dtype, direction in itertools.product(self.dtypes or dtypes, self.directions):
                yield Spec(self.part, size, lengths, dtype, direction, self.grows)


# ---- the table: device -> group -> cases

# The distributions of lengths that make a difference for an op.
LENGTHS = {
    "attention": ("half", "full", "text"),
    "qkv_attention": ("half", "full"),
    "add_layer_norm": ("full",),
    "dense_gelu": ("full",),
    "linear": ("full", "half"),
    "bias_gelu": ("full",),
    "layer_norm": ("full",),
    "embedding": ("full",),
    "cross_entropy": ("full",),
    "linear_max": ("half",),
    "pack": ("half",),
    "unpack": ("half",),
}


def _ops(shape: str, directions: tuple[str, ...]) -> tuple[Pick, ...]:
    return tuple(Pick(op, (shape,), lengths, directions) for op, lengths in LENGTHS.items())


APART = (FORWARD, ALONE)
GPU_OPS = (
    Pick("attention", ("256x64", "128x128", "32x512", "16x1024", "8x2048"), ("full",), APART),
    Pick("layer_norm", ("32x128",), ("full",), APART, models=("large",), dtypes=("float32",)),  # 4096 x 1024
    *_ops("32x512", APART),
)


SHORT = ("1x8", "1x16", "1x32", "1x64", "4x16", "8x32")


def _short() -> tuple[Pick, ...]:
    """The work of single requests, which is so little that overhead counts."""
    alone = Pick(MODEL, ("2x8",), ("full",), (FORWARD, BACKWARD), models=("no-work",), last=True)
    return alone, Pick(MODEL, SHORT, ("full",), (FORWARD,), models=("minilm", "base"), last=True)


def _relative(batch: int) -> Iterator[Pick]:
    """Models whose attention scores depend on distances: by DeBERTa's two products, or MPNet's bias."""
    for models in (("deberta-v3",), ("mpnet",)):
        for seqlen in (128, 512, 64, 256):
            yield Pick(MODEL, (f"{batch}x{seqlen}",), ("full", "half"), (FORWARD, DROPOUT), models, layers=2)


def _growth() -> Iterator[Pick]:
    """Row ops and one layer on 2^7 to 2^16 tokens, attention on 2^13 tokens in sequences of 2^6 to 2^13. All parts run
    at one size before the next size."""
    for n in range(10):
        for part in ("layer_norm", "add_layer_norm", "bias_gelu", ENCODER):
            yield Pick(part, (f"{2**n}x128",), ("full",), (FORWARD, BACKWARD), layers=1, grows="tokens")
        if n < 8:
            shape = f"{2 ** (7 - n)}x{2 ** (6 + n)}"
            yield Pick("attention", (shape,), ("full",), (FORWARD, BACKWARD), layers=1, grows="seqlen")


TABLE: dict[str, dict[str, tuple[Pick, ...]]] = {
    "cpu": {  # models are cut to two layers, except MiniLM and those that show latency
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
        "ops": _ops("8x128", (FORWARD, BACKWARD)),
        "hf": (
            Pick(ENCODE, ("64x256",), ("text",), (FORWARD,), dtypes=("float32",)),
            Pick(CLASSIFIER, ("8x128",), ("half",), (FORWARD, DROPOUT), layers=2),
        ),
        "retrieval": (
            Pick(CONTRASTIVE, ("32x128",), ("half",), (DROPOUT,), models=("minilm",), dtypes=("float32",)),
            Pick(CLASSIFIER, ("32x128",), ("half",), (FORWARD,), models=("minilm",)),
            Pick(RERANK, ("1000x256",), ("text",), (FORWARD,), dtypes=("float32",), last=True),
        ),
        "relative": tuple(_relative(8)),
        "short": _short(),
        "growth": tuple(_growth()),
    },
    "cuda": {
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
        "ops": GPU_OPS,
        "hf": (
            Pick(CLASSIFIER, ("32x128",), ("half", "full"), (FORWARD, DROPOUT)),
            Pick(ENCODE, ("256x256",), ("text",), (FORWARD,), dtypes=("float32",)),
        ),
        "retrieval": (
            Pick(CONTRASTIVE, ("128x128",), ("half",), (DROPOUT,), models=("minilm",), dtypes=("float32",)),
            Pick(CLASSIFIER, ("32x128",), ("half",), (FORWARD,), models=("minilm",)),
            Pick(RERANK, ("1000x256",), ("text",), (FORWARD,), dtypes=("float32",)),
        ),
        "relative": tuple(_relative(32)),
        "short": _short(),
        "growth": tuple(_growth()),
    },
}
GROUPS = tuple(TABLE["cpu"])
DEFAULT = GROUPS[:-1]  # without growth, which takes longer than all others together
DIRECTIONS = {  # of each group
    "encoder": (FORWARD, BACKWARD, DROPOUT),
    "mlm": (DROPOUT, STEP),
    "ops": (FORWARD, BACKWARD, ALONE),
    "hf": (FORWARD, BACKWARD, DROPOUT),
    "retrieval": (FORWARD, DROPOUT),
    "relative": (FORWARD, DROPOUT),
    "short": (FORWARD, BACKWARD),
    "growth": (FORWARD, BACKWARD),
}

# ---- the filter


def dtypes(device: str) -> list[str]:
    """The dtypes that suit the device, the most important first."""
    if device == "cuda":
        return ["bfloat16"]
    return ["float32", *["bfloat16"] * has_bfloat16_products()]


def has_bfloat16_products() -> bool:
    """Whether the processor has bfloat16 products; without them, such a product takes many times as long."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(backends.cpuinfo("flags", "Features").split()))


def specs(options: argparse.Namespace) -> list[tuple[str, Spec]]:
    """(group, case) in the order in which they run: all groups in one type before the next, then those marked `last`.

    An option's values replace those of the table. Raises ValueError for a part that none of the groups has, for an
    invalid shape, for options that the chosen size or groups do not allow, and if no case is left.
    """
    table = [(group, pick) for group in options.groups for pick in TABLE[options.device][group]]
    if unknown := set(options.parts or ()) - {pick.part for _, pick in table}:
        raise ValueError(f"no part {', '.join(sorted(unknown))} in the groups {', '.join(options.groups)}")
    _check(options)
    wanted, found = options.dtypes or dtypes(options.device), {}
    for group, pick in table:
        if changed := _changed(pick, group, options):
            for spec in changed.specs(wanted, SMALL.get(options.size)):
                found.setdefault((group, str(spec)), (pick.last, [*wanted, spec.dtype].index(spec.dtype), group, spec))
    if not found:
        raise ValueError(f"no case of the groups {', '.join(options.groups)} is left by the other options")
    return [(group, spec) for _, _, group, spec in sorted(found.values(), key=lambda case: case[:2])]


def _changed(pick: Pick, group: str, options: argparse.Namespace) -> Pick | None:
    """A line of the table with the values that the options name; None if the options exclude it."""
    if options.parts and pick.part not in options.parts:
        return None
    directions = tuple(d for d in DIRECTIONS[group] if d in options.directions) if options.directions else ()
    if pick.part in LIBRARY:  # of which only the shapes can change
        only = pick.lengths[0], "float32", pick.directions[0]
        asked = zip((options.lengths, options.dtypes, options.directions), only, strict=True)
        if not all(one in (named or [one]) for named, one in asked):
            return None
        _refuse(("models", "layers"), pick, options)
        return replace(pick, shapes=options.shapes or pick.shapes)
    _refuse(("layers",) if pick.part in OPS else (), pick, options)
    named = {name: getattr(options, name) for name in ("shapes", "models", "layers", "lengths", "dtypes")}
    found = replace(pick, **{name: value for name, value in named.items() if value})
    return replace(found, directions=directions) if options.directions else found


def _refuse(names: tuple[str, ...], pick: Pick, options: argparse.Namespace) -> None:
    for name in names:
        if getattr(options, name):
            raise ValueError(f"--{name} does not go with {pick.part}; choose --groups or --parts without it")


def _check(options: argparse.Namespace) -> None:
    named = [name for name in ("shapes", "models", "layers") if getattr(options, name)]
    if named and options.size != "full":
        raise ValueError(f"--{named[0]} goes with --size full; {options.size} is one small shape")
    if "growth" in options.groups and (named or options.lengths):
        raise ValueError(f"--{[*named, 'lengths'][0]} does not go with the group growth, which has its own sizes")
