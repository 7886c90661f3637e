"""A case: one part on one batch, by everybody who can, verified and then timed."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from benchmarks import contenders, harness, lengths
from benchmarks.contenders.interface import MASKED_LM, OPS, Contender, Subject, Way, result, timed
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size
from fastbert import testing

FORWARD, BACKWARD = "forward", "forward+backward"
DROPOUT, STEP = "forward+backward, dropout 0.1", "step with AdamW, dropout 0.1"
DIRECTIONS = (FORWARD, BACKWARD, DROPOUT, STEP)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
P = 0.1  # of dropout, where a direction has it


@dataclass(frozen=True)
class Spec:
    """What is asked for. part: an op or a module, or what a group calls its own (see each bench_*.py)."""

    part: str
    size: Size
    lengths: str
    dtype: str
    direction: str

    def __post_init__(self) -> None:
        for name, known in (("lengths", lengths.DISTRIBUTIONS), ("dtype", DTYPES), ("direction", DIRECTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")

    @property
    def kind(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def backward(self) -> bool:
        return self.direction != FORWARD

    @property
    def has_dropout(self) -> bool:
        return self.direction in (DROPOUT, STEP)

    def facts(self) -> dict[str, object]:
        """As a report has them; layers only where there are whole ones."""
        found = {"op" if self.part in OPS else "part": self.part, "direction": self.direction, "dtype": self.dtype}
        found |= {"lengths": self.lengths, **self.size.facts()}
        return found if self.part in OPS else found | {"layers": self.size.config.num_hidden_layers}

    def __str__(self) -> str:
        return "  ".join(str(value) for value in self.facts().values())


@dataclass(frozen=True)
class How:
    """How it is measured. rounds: 0 verifies only. limit: seconds of a case. names, slow: see `contenders.of`."""

    device: str
    rounds: int = 5
    limit: float = 1.0
    names: list[str] | None = None
    slow: bool = False


@dataclass
class Field:
    """Who takes part in a case, in the order of tables. others: who does not, or failed to be set up, as rows."""

    ways: dict[str, Way] = field(default_factory=dict)
    others: list[harness.Row] = field(default_factory=list)
    yardsticks: list[str] = field(default_factory=list)


def gather(people: Iterable[Contender], subject: Subject, batch: Batch, spec: Spec, device: str) -> Field:
    """Asks each contender in turn for its way."""
    found = Field()
    for contender in people:
        way = contender.why_not(spec.kind, device, spec.backward)
        try:
            way = way or contender.make(subject, batch, spec.kind, device, spec.backward)
        except Exception as error:  # somebody else's code: whatever it raises is its result
            found.others.append(harness.Row(contender.name, problem=harness.failure(error)))
            continue
        if isinstance(way, str):
            found.others.append(harness.Row(contender.name, absent=way))
        elif way is not None:
            found.ways[contender.name] = way
            found.yardsticks += [contender.name] * contender.yardstick
    return found


@dataclass(frozen=True)
class Setup:
    """A case made ready. exact: what is verified, truth: the same in float64.

    work: a function, for it may have to measure ceilings. to_time: makes what is timed in place of `exact`, where that
    has dropout, and so nothing to compare, or changes its weights. start: from a way to the call that is timed. facts:
    more of them, for the report.
    """

    batch: Batch
    exact: Subject
    truth: Subject
    work: Callable[[], Work]
    bounds: dict[str, harness.Call] = field(default_factory=dict)
    to_time: Callable[[], Subject] | None = None
    start: Callable[[Way, dict, bool], harness.Call] = timed
    facts: dict[str, object] = field(default_factory=dict)

    def subject_to_time(self) -> Subject:
        return self.to_time() if self.to_time else self.exact


def wide(subject: Subject, **modules: torch.nn.Module) -> Subject:
    """The same in float64."""
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in subject.inputs.items()}
    return dataclasses.replace(subject, inputs=inputs, **modules)


def verifier(found: Field, setup: Setup, spec: Spec, device: str) -> harness.Verify:
    """By the accuracy rule; the truth is the baseline's computation in float64."""
    right = contenders.baseline(spec.part).make(setup.truth, setup.batch, torch.float64, device, spec.backward)
    return harness.by_the_rule(
        lambda name: result(found.ways[name], setup.exact.inputs, spec.backward),
        lambda: result(right, setup.truth.inputs, spec.backward),
        found.yardsticks,
        factor=2.0 if spec.part in (*OPS, MASKED_LM) else 3.0,  # hidden states of whole models
    )


def start(found: Field, setup: Setup, people: list[Contender], spec: Spec, device: str) -> dict[str, harness.Call]:
    """The calls to time, of those who take part. Who fails here is moved to the others."""
    subject, ways, calls = setup.subject_to_time(), found, {}
    if subject is not setup.exact:
        ways = gather([c for c in people if c.name in found.ways], subject, setup.batch, spec, device)
        found.others += ways.others
    for name, way in ways.ways.items():
        try:
            calls[name] = setup.start(way, subject.inputs, spec.backward)
        except Exception as error:
            found.others.append(harness.Row(name, problem=harness.failure(error)))
    return calls


def report(spec: Spec, setup: Setup, how: How) -> harness.Report:
    """Everybody on one case, measured or, without rounds, verified. Raises RuntimeError without a baseline."""
    people, baseline = contenders.of(spec.part, how.names, how.slow), contenders.baseline(spec.part).name
    found = gather(people, setup.exact, setup.batch, spec, how.device)
    calls = start(found, setup, people, spec, how.device)
    for row in found.others:
        if row.name == baseline:
            raise RuntimeError(f"{baseline}: {row.problem or row.absent}")
    width = {"width": setup.batch.mask.shape[1]} if spec.lengths == "text" else {}
    return harness.measure(
        calls,
        verify=verifier(found, setup, spec, how.device),
        baseline=baseline,
        work=setup.work() if how.rounds else Work(setup.batch.tokens),
        case=spec.facts() | width | setup.facts,
        bounds=setup.bounds,
        others=found.others,
        device=how.device,
        rounds=how.rounds,
        limit=how.limit,
        launches=spec.part not in OPS,
    )


def alone(spec: Spec, setup: Setup, who: str, device: str) -> tuple[harness.Call | None, str]:
    """The call of one contender, verified; or None and why there is none. Raises AssertionError for a wrong one."""
    known = contenders.of(spec.part, slow=True)
    people = [contender for contender in known if contender.yardstick or contender.name == who]
    found = gather(people, setup.exact, setup.batch, spec, device)
    for row in found.others:
        if row.name == who:
            return None, row.absent or row.problem
    if who not in found.ways:
        return None, "repeats another contender"
    testing.assert_rows(verifier(found, setup, spec, device)(who))
    return start(found, setup, people, spec, device)[who], ""
