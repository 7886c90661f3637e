"""Wrong results are not timed, contenders are interleaved, and ratios equal those computed by hand."""

import functools
import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from bench.measured import RIGHT, WRONG, Clock, line, measure, shown

from benchmarks import harness, report
from benchmarks.harness import Row, Work
from fastbert import testing


def test_a_wrong_contender_is_not_timed():
    clock, rows = Clock(), {"base": [RIGHT], "wrong": [RIGHT, WRONG], "unverified": []}
    found = measure(clock, dict.fromkeys(rows, 1.0), verify=rows.get)
    assert set(clock.order) == {"base"}
    assert "samples" not in line(found, "wrong") and line(found, "wrong")["error"] == "nan"
    assert "error       nan" in found.row("wrong").problem and "wrong: NOT TIMED: wrong" in shown(found)
    assert found.row("unverified").problem == "nothing was verified" and found.ratio("wrong") is None
    json.dumps(found.lines(), allow_nan=False)


def test_a_contender_that_fails_leaves_the_others_their_times():
    """Whether it fails at once or only while it is timed."""

    def broken():
        raise RuntimeError("/some/where/kernel.so has no image; a/b is 1/2\nand a long story")

    calls = iter([None] * 4)
    people = {"base": 1.0, "broken": broken, "tires": lambda: next(calls)}
    found = measure(Clock(), people, rounds=9, bounds={"bound": lambda: next(calls)})
    assert found.row("broken").problem == "failed: RuntimeError: kernel.so has no image; a/b is 1/2"
    assert shown(found).count("NOT TIMED: failed: StopIteration") == 2
    assert len(line(found, "base")["samples"]) == 9 and found.ratio("base") == 1.0
    assert not any("samples" in line(found, name) for name in ("broken", "tires", "bound"))


def test_nobody_is_timed_beside_threads_of_another_that_still_spin():
    spinning, shared = [], []

    def spin(until):
        while time.monotonic() < until:
            pass

    def leaves_a_thread_behind():
        spinning.append(threading.Thread(target=spin, args=(time.monotonic() + 0.06,)))
        spinning[-1].start()

    def looks():
        shared.append(any(thread.is_alive() for thread in spinning))

    people = {"base": leaves_a_thread_behind, "ours": looks}
    measure(Clock(), people, verify=lambda name: [RIGHT], pause=0.02)
    assert len(shared) > 5 and not any(shared[-5:])  # earlier calls are not timed


@pytest.mark.parametrize(("seconds", "is_warm"), [(0.05, True), (0.3, False)])
def test_a_brief_contender_is_warm_when_it_is_timed(seconds, is_warm):
    """Here a contender's first call after another's takes twice as long; for brief calls, it is not counted."""
    clock, last = Clock(), []

    def call(name):
        clock.now += seconds * (1 if last == [name] else 2)
        last[:] = [name]

    people = {name: functools.partial(call, name) for name in ("base", "ours")}
    found = measure(clock, people, sample=0.01, rounds=9)
    samples = [sample for name in people for sample in line(found, name)["samples"]]
    assert len(samples) == 18
    assert all(math.isclose(sample, seconds * 1e6) for sample in samples) == is_warm


def test_a_wrong_baseline_gives_no_ratios():
    found = measure(Clock(), {"base": 1.0, "ours": 1.0}, verify=lambda name: [RIGHT if name == "ours" else WRONG])
    assert line(found, "ours")["median"] == 1e6 and "ratio" not in line(found, "ours")


@pytest.mark.parametrize("wrong", [False, True])
def test_the_accuracy_rule_decides(wrong):
    """With the accuracy rule itself, on a real op: a result that is off by 1e-5 is refused."""
    inputs = {"x": torch.randn(64), "bias": torch.randn(64)}
    plain = lambda x, bias: torch.nn.functional.gelu(x + bias)  # noqa: E731
    ways = {"base": plain, "ours": (lambda x, bias: plain(x, bias) + 1e-5) if wrong else plain}
    evaluate = lambda name: testing.evaluate(ways[name], inputs)  # noqa: E731
    verify = harness.by_the_rule(evaluate, lambda: testing.evaluate(plain, inputs, dtype=torch.float64), ["base"])
    found = measure(Clock(), dict.fromkeys(ways, 1.0), verify=verify)
    assert bool(found.row("ours").problem) == wrong and not found.row("base").problem
    assert (line(found, "ours")["error"] > 1) == wrong


def test_a_yardstick_that_fails_is_none():
    """Only the first yardstick has to work. If another one fails, say out of memory, the rest are still verified."""
    results = {"base": testing.Result({"y": torch.ones(2)}, {})}
    verify = harness.by_the_rule(results.__getitem__, lambda: results["base"], ["base", "eager"])
    assert verify("base")[0].ok
    with pytest.raises(KeyError, match="eager"):
        verify("eager")


def test_a_yardstick_that_is_wrong_excuses_nobody():
    """A result with 50 % too much stays wrong beside a yardstick with 30 %; PyTorch's ways differ by a few times."""
    sizes = {"base": 1 + 1e-6, "eager": 1.3, "oneDNN": 1 + 5e-6, "ours": 1.5, "near": 1 + 9e-6}
    results = {name: testing.Result({"y": torch.full((2,), size)}, {}) for name, size in sizes.items()}
    truth = testing.Result({"y": torch.ones(2, dtype=torch.float64)}, {})
    verify = harness.by_the_rule(results.__getitem__, lambda: truth, ["base", "eager", "oneDNN"])
    assert [verify(name)[0].ok for name in sizes] == [True, False, True, False, True]


def test_contenders_are_interleaved_in_changing_order():
    clock, names = Clock(), ("base", "b", "c")
    measure(clock, dict.fromkeys(names, 1.0), rounds=12)
    rounds = [tuple(clock.order[-36:][i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(order) == sorted(names) for order in rounds) and len(set(rounds)) > 2


def test_medians_percentiles_and_ratios_by_hand():
    """The machine is ten times slower in the third round, which changes neither that round's ratio nor the median."""
    clock = Clock()
    base, ours = (2.0, 4.0, 40.0, 6.0, 8.0), (1.0, 1.0, 10.0, 3.0, 2.0)  # ratios 2, 4, 4, 2, 4
    people = {"base": clock.contender("base", 9.0, 9.0, *base), "ours": clock.contender("ours", 9.0, 9.0, *ours)}
    found = measure(clock, people, work=Work(tokens=100, flops=6e12, bytes=3e9, floor=0.5))  # 9.0: warm-up and memory
    facts = line(found, "ours")
    assert facts["samples"] == [1e6 * seconds for seconds in ours] and facts["median"] == 2e6
    assert (facts["p20"], facts["p80"]) == (1e6, 4.4e6)  # sorted 1 1 2 3 10: places 0.8 and 3.2
    assert facts["ratio"] == 4.0  # the ratio of the medians would be 3
    assert facts["floor"] == 5e5 and report.share(facts, "floor") == pytest.approx(25)
    cells = [cell.strip() for cell in shown(found).splitlines()[-1].split("|")]
    assert cells[5:9] == ["4.00", "50", "1.5", "3.000"]  # real tokens a second, GB/s, TFLOP/s


def test_the_floor_of_a_library_is_its_own_products_and_the_rest():
    """Products take 2 s in the faster library and the rest 1 s, so a contender of 6 s reaches 50 % of that floor.

    Bounds are timed, but they are not contenders.
    """
    bounds, clock = {harness.PRODUCTS: 2.5, f"{harness.PRODUCTS}, oneDNN": 2.0}, Clock()
    bounds = {name: clock.contender(name, seconds) for name, seconds in bounds.items()}
    work = Work(tokens=100, floor=1.5, rest=1.0)
    found = measure(clock, {"base": 6.0}, bounds=bounds, work=work)
    assert found.library_floor == pytest.approx(3.0) and report.share(line(found, "base"), "library") == 50
    assert line(found, harness.PRODUCTS)["ratio"] == 2.4 and "tokens" not in line(found, harness.PRODUCTS)
    assert f"({harness.PRODUCTS})" in shown(found) and list(report.cases_of(found.lines())[0].timed) == ["base"]
    assert measure(Clock(), {"base": 6.0}, work=work).library_floor is None


def test_samples_and_rounds():
    """Short calls are repeated; five rounds run whatever the limit; with 0 rounds nothing is timed."""
    clock = Clock()
    found = measure(clock, {"base": 0.001, "long": 5.0}, sample=0.0095)
    assert (found.row("base").repeats, found.row("long").repeats) == (10, 1)
    assert line(found, "base")["median"] == 1000
    # Three calls come first: to warm up, to measure memory and to choose the repeats. With a short call in the case, an
    # uncounted sample precedes each sample.
    assert (clock.order.count("base"), clock.order.count("long")) == (3 + 2 * 5 * 10, 3 + 2 * 5)
    measure(clock := Clock(), {"base": 0.3, "long": 5.0}, sample=0.0095)
    assert (clock.order.count("base"), clock.order.count("long")) == (3 + 5, 3 + 5)
    assert len(measure(Clock(), {"base": 1.0}, rounds=9, limit=0).row("base").seconds) == 5
    assert harness.spread([1.0]) == (1.0, 1.0, 1.0)
    assert "base: right, not timed" in shown(measure(Clock(), {"base": 1.0}, rounds=0))
    with pytest.raises(ValueError, match="baseline 'base' is none of ours"):
        measure(Clock(), {"ours": 1.0})


def test_a_disturbed_call_does_not_decide_how_long_samples_are():
    """The call that chooses the repeats takes a hundred times as long as the others."""
    clock = Clock()
    found = measure(clock, {"base": clock.contender("base", 1e-4, 1e-4, 1e-2, 1e-4)}, sample=0.01)
    assert found.row("base").repeats in (100, 101) and len(clock.order) >= 3 + 5 * 100


def test_who_is_absent_is_in_the_table_and_in_the_results():
    others = [Row("engine", absent="not installed: pip install engine"), Row("broken", problem="failed: OSError: no")]
    found = measure(Clock(), {"base": 1.0}, others=others)
    assert "not run: engine (not installed: pip install engine)" in shown(found)
    assert "broken: NOT TIMED: failed: OSError: no" in shown(found)
    case = {"op": "sleep"}
    assert line(found, "engine") == {"case": case, "name": "engine", "absent": "not installed: pip install engine"}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts resident pages")
def test_peak_memory_of_a_call_is_counted():
    def call():
        return torch.ones(8 << 20), torch.ones(4 << 20) + 1  # 32 MiB, and 16 MiB twice

    assert 60e6 < harness.peak_bytes(call, "cpu") < 90e6
