"""What tests of benchmarks share: contenders on a clock of their own, and results as files have them."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import batch, contenders, harness, report
from benchmarks.cases import FORWARD, Spec
from benchmarks.comparison import How
from benchmarks.harness import Work
from fastbert import testing

ROOT = Path(__file__).resolve().parents[2]
RIGHT = testing.Row("y", error=1e-7, bound=2e-7, baseline=1e-7)
WRONG = testing.Row("y", error=float("nan"), bound=2e-7, baseline=1e-7)
SDPA = contenders.HF_SDPA.name


def without(monkeypatch, *missing):
    """Makes these modules look as if they were not installed."""
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else known(name))


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


class Clock:
    """A clock that advances only by the durations that its contenders state."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def contender(self, name, *durations):
        """A call that takes each of the durations in turn, and then the last one for ever."""
        left = list(durations)

        def call():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def measure(clock, people, *, verify=lambda name: [RIGHT], rounds=5, **how):
    """Runs harness.measure. people: for each contender its call, or the seconds that its call takes."""
    calls = {name: call if callable(call) else clock.contender(name, call) for name, call in people.items()}
    how = {"work": Work(tokens=100), "baseline": "base", "sample": 0.0, "pause": 0.0, "case": {"op": "sleep"}} | how
    return harness.measure(calls, verify=verify, rounds=rounds, timer=harness.host_timer(clock), **how)


def line(found, name):
    return next(line for line in found.lines() if line["name"] == name)


def shown(found):
    return report.in_full(report.cases_of(found.lines())[0])


# GPU kernels are emulated here, which is slow, and have tests of their own.
NAMES = [c.name for c in contenders.ALL if not c.slow_to_make and c.name not in ("fastbert, triton", "fastbert, cuda")]
VERIFIED, TIMED = How("cpu", rounds=0, names=NAMES), How("cpu", rounds=2, names=NAMES)


def tiny(part, distribution="half", direction=FORWARD, dtype="float32"):
    return Spec(part, batch.SMALL["tiny"], distribution, dtype, direction)


def timed(name, samples, **facts):
    median, low, high = harness.spread(samples)
    facts = {"memory": 10e6, "floor": median / 2, "library": 0.8 * median, **facts}
    return {"name": name, "median": median, "p20": low, "p80": high, "samples": samples, **facts}


MODEL_CASE = {"part": "model", "direction": "forward", "dtype": "float32", "lengths": "half"}
MODEL_CASE |= {"batch": 8, "seqlen": 128, "hidden": 768, "layers": 2}
OP_CASE = {"op": "layer_norm", "direction": "forward", "dtype": "float32", "lengths": "full"}
OP_CASE |= {"batch": 8, "seqlen": 128, "hidden": 768}


def written(path, *found, **more):
    """Writes a results file as benchmarks.run does. found: (case, lines); the first line is the baseline's."""
    head = {"date": "2030-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "dirty": False, "load": 0.1}
    head |= {"machine": "Abacus, 2 threads, AVX2", "versions": {"torch": "2.13.0"}, "left_out": []} | more
    lines = [{"case": case, **line} for case, (first, *rest) in found for line in ({**first, "baseline": True}, *rest)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, [head, *lines])))


def raising(error):
    def act(*args):
        raise error

    return act


ROW_OPS = ["--size", "tiny", "--groups", "ops", "--dtypes", "float32", "--parts", "layer_norm", "bias_gelu"]
ROW_OPS += ["--contenders", "fastbert"]  # four cases


def read(path):
    head, *lines = map(json.loads, path.read_text().splitlines())
    return head, list(report.completed(lines))


def reasons(head):
    return [left["reason"] for left in head["left_out"]]
