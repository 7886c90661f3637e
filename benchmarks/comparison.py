"""Runs one case with every contender that can run it: each is verified and then timed."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import contenders, harness
from benchmarks.cases import Spec
from benchmarks.contenders.interface import MASKED_LM, OPS, Contender, Runnable, Subject
from benchmarks.harness import Work
from fastbert import testing


@dataclass(frozen=True)
class How:
    """How a case is measured. rounds: 0 only verifies. limit: in seconds. names, slow: see `contenders.of`."""

    device: str
    rounds: int = 5
    limit: float = 1.0
    names: list[str] | None = None
    slow: bool = False


@dataclass(frozen=True)
class Setup:
    """A case that is ready to run. exact: the subject that is verified; truth: the same in float64.

    work: a function, because it may have to measure ceilings. to_time: makes the subject that is timed in place of
    `exact`, where the timed one has dropout, so that its results cannot be compared, or changes its weights. start:
    turns a Runnable into the call that is timed. facts: further facts for the results.
    """

    exact: Subject
    truth: Subject
    work: Callable[[], Work]
    bounds: dict[str, harness.Call] = field(default_factory=dict)
    to_time: Callable[[], Subject] | None = None
    start: Callable[[Runnable, dict[str, Tensor], bool], harness.Call] = Runnable.timed
    facts: dict[str, object] = field(default_factory=dict)


def in_double(subject: Subject, **modules: torch.nn.Module) -> Subject:
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in subject.inputs.items()}
    return dataclasses.replace(subject, inputs=inputs, dtype=torch.float64, **modules)


@dataclass
class Field:
    """The contenders of a case, in the order of tables. others: rows for those that cannot run or failed in set-up."""

    runnables: dict[str, Runnable] = field(default_factory=dict)
    others: list[harness.Row] = field(default_factory=list)
    yardsticks: list[str] = field(default_factory=list)


def gather(people: Iterable[Contender], subject: Subject) -> Field:
    """Asks each contender in turn for its set-up."""
    found = Field()
    for contender in people:
        made = contender.why_not(subject.dtype, subject.batch.device, subject.backward)
        try:
            made = made or contender.make(subject)
        except Exception as error:  # third-party code: whatever it raises is its result
            found.others.append(harness.Row(contender.name, problem=harness.failure(error)))
            continue
        if isinstance(made, str):
            found.others.append(harness.Row(contender.name, absent=made))
        elif made is not None:
            found.runnables[contender.name] = made
            found.yardsticks += [contender.name] * contender.yardstick
    return found


def verifier(found: Field, setup: Setup) -> harness.Verify:
    """Verifies by the accuracy rule; the truth is the baseline's computation in float64."""
    exact, truth = setup.exact, setup.truth
    right = contenders.baseline(exact.part).make(truth)
    return harness.by_the_rule(
        lambda name: found.runnables[name].result(exact.inputs, exact.backward),
        lambda: right.result(truth.inputs, truth.backward),
        found.yardsticks,
        factor=2.0 if exact.part in (*OPS, MASKED_LM) else 3.0,  # hidden states of whole models
        quantized=[contender.name for contender in contenders.ALL if contender.quantized],
    )


def start(found: Field, setup: Setup, people: list[Contender]) -> dict[str, harness.Call]:
    """Returns the calls to time, by contender. A contender that fails here has no call, and a row in `others`."""
    subject, timed, calls = setup.exact, found, {}
    if setup.to_time:
        subject = setup.to_time()
        timed = gather([contender for contender in people if contender.name in found.runnables], subject)
        found.others += timed.others
    for name, runnable in timed.runnables.items():
        try:
            calls[name] = setup.start(runnable, subject.inputs, subject.backward)
        except Exception as error:
            found.others.append(harness.Row(name, problem=harness.failure(error)))
    return calls


def report(spec: Spec, setup: Setup, how: How) -> harness.Report:
    """All contenders on one case, measured or, without rounds, verified. Raises RuntimeError if the baseline fails."""
    people, baseline = contenders.of(spec.part, how.names, how.slow), contenders.baseline(spec.part).name
    found = gather(people, setup.exact)
    calls, batch = start(found, setup, people), setup.exact.batch
    for row in found.others:
        if row.name == baseline:
            raise RuntimeError(f"{baseline}: {row.problem or row.absent}")
    return harness.measure(
        calls,
        verify=verifier(found, setup),
        baseline=baseline,
        work=setup.work() if how.rounds else Work(batch.tokens),
        case=spec.facts() | ({"width": batch.width} if spec.lengths == "text" else {}) | setup.facts,
        bounds=setup.bounds,
        others=found.others,
        device=how.device,
        rounds=how.rounds,
        limit=how.limit,
        launches=spec.part not in OPS,
    )


def alone(spec: Spec, setup: Setup, who: str) -> tuple[harness.Call | None, str]:
    """The verified call of one contender, or None and the reason why it takes no part. Raises AssertionError if its
    result is wrong, and RuntimeError if its set-up fails."""
    people = [c for c in contenders.of(spec.part, slow=True) if c.yardstick or c.name == who]
    found = gather(people, setup.exact)
    if who not in found.runnables:
        return None, _why_absent(who, found) or "repeats another contender"
    testing.assert_rows(verifier(found, setup)(who))
    calls = start(found, setup, people)
    return calls.get(who), _why_absent(who, found) or ""


def _why_absent(who: str, found: Field) -> str | None:
    row = next((row for row in found.others if row.name == who), harness.Row(who))
    if row.problem:
        raise RuntimeError(f"{who}: {row.problem}")
    return row.absent
