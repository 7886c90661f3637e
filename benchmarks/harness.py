"""Times contenders side by side, and only those that are right.

`measure` asks for each contender's accuracy first: one that is wrong, or fails, is reported as such and never timed.
Then, round after round, every contender runs once in a shuffled order, so that what disturbs the machine disturbs all
of them alike. A contender's speedup is the median over the rounds of baseline's seconds / its seconds: above 1 is
faster.

On a CPU a sample is enough calls in a row to be far above the clock's resolution, with warm caches. On CUDA it is one
call between two events, with the L2 cache overwritten before.
"""

import contextlib
import ctypes
import json
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import provenance
from fastbert import backends, testing

Call = Callable[[], object]
Timer = Callable[[Call, int], float]  # (call, repeats) -> seconds a call
Verify = Callable[[str], list[testing.Row]]  # a contender's name -> its tensors under the accuracy rule


@dataclass(frozen=True)
class Work:
    """What one call has to do, whoever does it.

    tokens: real ones; padding is nobody's work. flops, bytes: 0 where they say nothing. floor: seconds (see floor.py).
    rest: the part of the floor that is no matrix product; with the time of the products as the library runs them it
    makes the floor that this library can reach.
    """

    tokens: int
    flops: float = 0
    bytes: float = 0
    floor: float | None = None
    rest: float | None = None


@dataclass
class Row:
    """One contender. problem: why it was not timed. ran: primitive -> backend. seconds: one number a round.

    absent: why it was not even tried: not installed, or not for such a case. bound: the time of something that cannot
    be avoided, not a contender: it has no result to be right or wrong.
    """

    name: str
    problem: str | None = None
    absent: str | None = None
    accuracy: list[testing.Row] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)
    bound: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20th and the 80th percentile."""
        if len(self.seconds) == 1:
            return self.median, self.median
        cuts = statistics.quantiles(self.seconds, n=5, method="inclusive")
        return cuts[0], cuts[-1]


@dataclass
class Report:
    """The rows of one case; `case` is what was asked, as facts for a reader and for JSON."""

    case: dict[str, object]
    work: Work
    baseline: str
    rows: list[Row]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def speedup(self, name: str) -> float | None:
        """Median of the per-round ratios to the baseline; None unless both were timed."""
        pairs = list(zip(self.row(self.baseline).seconds, self.row(name).seconds, strict=False))
        return statistics.median(base / own for base, own in pairs) if pairs else None

    @property
    def library_floor(self) -> float | None:
        """Seconds: the products as the faster library ran them in this very run, and the floor of everything else."""
        products = [row.median for row in self.rows if row.bound and row.seconds and row.name.startswith(PRODUCTS)]
        return min(products) + self.work.rest if products and self.work.rest is not None else None

    def table(self) -> str:
        title = "  ".join(f"{name} {value}" for name, value in self.case.items())
        heading = f"{'':36} {'median ms':>10} {'p20':>10} {'p80':>10} {'speedup':>8} {'tokens/s':>10}"
        heading += f" {'GB/s':>7} {'TFLOP/s':>8} {'% floor':>7} {'% lib':>7} {'peak MB':>8}  ran on"
        absent = [f"{row.name} ({row.absent})" for row in self.rows if row.absent]
        last = [f"  not run: {'; '.join(absent)}"] if absent else []
        return "\n".join([title, heading, *(self._line(row) for row in self.rows if not row.absent), *last])

    def _line(self, row: Row) -> str:
        name = f"  {f'({row.name})' if row.bound else row.name:34}"
        if row.problem:
            return f"{name} NOT TIMED: {row.problem}"
        if not row.seconds:
            return f"{name} right, not timed  {_backends(row)}"
        cells = [f"{seconds * 1e3:#10.4g}" for seconds in (row.median, *row.spread)]
        numbers = self._numbers(row)
        for key, width, decimals in _COLUMNS:
            value = numbers[key]
            cells.append(f"{'-':>{width}}" if value is None else f"{value:{width}.{decimals}f}")
        return f"{name} {' '.join(cells)}  {_backends(row)}".rstrip()

    def _numbers(self, row: Row) -> dict[str, float | None]:
        """What a table and a JSON file say about a row that was timed, beside its times."""
        work, median, library = self.work, row.median, self.library_floor
        return {
            "speedup": self.speedup(row.name),
            "tokens_per_second": None if row.bound else work.tokens / median,
            "gigabytes_per_second": work.bytes / median / 1e9 if work.bytes and not row.bound else None,
            "teraflops": work.flops / median / 1e12 if work.flops and not row.bound else None,
            "percent_of_floor": 100 * work.floor / median if work.floor and not row.bound else None,
            "percent_of_library": 100 * library / median if library and not row.bound else None,
            "peak_megabytes": None if row.peak_bytes is None else row.peak_bytes / 1e6,
        }

    def to_dict(self) -> dict:
        """Plain values for JSON: what the table says, and every sample behind it."""
        rows = []
        for row in self.rows:
            if row.absent:
                rows.append({"name": row.name, "absent": row.absent})
                continue
            facts = {"name": row.name, "problem": row.problem, "ran": row.ran, "bound": row.bound}
            facts |= {"tensors": len(row.accuracy), "accuracy": [_accuracy(tensor) for tensor in _worst(row.accuracy)]}
            if row.seconds:
                p20, p80 = row.spread
                facts |= {"median": row.median, "p20": p20, "p80": p80, **self._numbers(row)}
                facts |= {"repeats": row.repeats, "seconds": row.seconds}
            rows.append(facts)
        return {"case": self.case, "work": asdict(self.work), "baseline": self.baseline, "rows": rows}


LEAST = 5  # rounds, whatever they take
PRODUCTS = "matrix products alone"  # how the bounds begin that `library_floor` is made of
_COLUMNS = (
    ("speedup", 8, 2),
    ("tokens_per_second", 10, 0),
    ("gigabytes_per_second", 7, 1),
    ("teraflops", 8, 3),
    ("percent_of_floor", 7, 0),
    ("percent_of_library", 7, 0),
    ("peak_megabytes", 8, 1),
)


def _worst(tensors: list[testing.Row], count: int = 3) -> list[testing.Row]:
    """Those nearest to their bound, or furthest beyond: a model has hundreds."""
    return sorted(tensors, key=lambda t: (t.ok, -t.error / t.bound if t.bound else 0.0))[:count]


def _accuracy(tensor: testing.Row) -> dict[str, object]:
    """The rule's numbers, as text where JSON has none for them (NaN, infinity)."""
    numbers = {name: v if isinstance(v, str) or math.isfinite(v) else str(v) for name, v in asdict(tensor).items()}
    return numbers | {"ok": tensor.ok}


def _backends(row: Row) -> str:
    return "+".join(sorted(set(row.ran.values())))


# ---- measuring


def measure(
    contenders: Mapping[str, Call],
    *,
    verify: Verify,
    baseline: str,
    work: Work,
    case: Mapping[str, object],
    bounds: Mapping[str, Call] | None = None,
    others: Iterable[Row] = (),
    device: str = "cpu",
    rounds: int = 20,
    limit: float = math.inf,
    launches: bool = False,
    timer: Timer | None = None,
    sample: float | None = None,
    pause: float | None = None,
) -> Report:
    """Verifies every contender, times those that are right, interleaved.

    verify: `by_the_rule` makes one. bounds: timed beside the contenders, nothing to verify. others: rows of those who
    have nothing to run. rounds: 0 verifies only; after `limit` seconds no new one begins, the first LEAST apart.
    launches: on CUDA, whether what the host does before the device can begin is counted, as in a whole model. sample:
    seconds that one sample lasts at least; 0 is a single call, the default on CUDA. pause: seconds before each sample;
    on a CPU the threads of whoever ran before go on spinning for a millisecond or so. Who fails is not timed any
    further. Raises ValueError for a baseline that is no contender.
    """
    if baseline not in contenders:
        raise ValueError(f"measure: the baseline {baseline!r} is none of {', '.join(contenders)}")
    timer = timer or (cuda_timer(device, launches=launches) if device == "cuda" else host_timer())
    sample = (0.0 if device == "cuda" else 0.01) if sample is None else sample
    pause = (0.0 if device == "cuda" else 0.01) if pause is None else pause
    rows = [_examine(name, call, verify, device, bool(rounds)) for name, call in contenders.items()]
    rows += [Row(name, bound=True) for name in (bounds or {}) if rounds]
    calls = {**contenders, **(bounds or {})}
    timed = [row for row in rows if not row.problem]
    for row in timed if rounds and sample else []:
        if seconds := _timed(row, calls[row.name], timer):
            row.repeats = max(1, math.ceil(sample / max(seconds, 1e-9)))
    order, deadline = random.Random(0), time.monotonic() + limit
    for done in range(rounds):
        if done >= LEAST and time.monotonic() > deadline:
            break
        for row in order.sample(timed, len(timed)):
            time.sleep(pause)
            seconds = _timed(row, calls[row.name], timer)
            row.seconds += [] if seconds is None else [seconds]
    return Report(dict(case), work, baseline, [*rows, *others])


def _timed(row: Row, call: Call, timer: Timer) -> float | None:
    """Seconds of a sample; None from the first failure on, which is all that the row says then."""
    if row.problem:
        return None
    try:
        return timer(call, row.repeats)
    except Exception as error:
        row.problem, row.seconds = failure(error), []
        return None


def _examine(name: str, call: Call, verify: Verify, device: str, is_timed: bool) -> Row:
    """Verifies a contender and runs it, to warm it up, to see which kernels it takes and, once warm, what memory."""
    row = Row(name)
    try:
        row.accuracy = verify(name)
        wrong = [str(tensor) for tensor in row.accuracy if not tensor.ok]
        if wrong or not row.accuracy:
            row.problem = f"wrong: {'; '.join(wrong)}" if wrong else "nothing was verified"
            return row
        before = Counter(backends.calls())
        call()
        row.ran = dict((Counter(backends.calls()) - before).keys())
        row.peak_bytes = peak_bytes(call, device) if is_timed else None
    except Exception as error:  # whatever a contender raises is its result
        row.problem = failure(error)
        row.accuracy = []
    return row


def failure(error: Exception) -> str:
    """What a results file keeps of an error: not the folders of this machine that it names."""
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", str(error).partition("\n")[0])
    return f"failed: {type(error).__name__}: {line}"


def by_the_rule(
    result_of: Callable[[str], testing.Result],
    truth: Callable[[], testing.Result],
    yardsticks: Iterable[str],
    *,
    factor: float = 2.0,
) -> Verify:
    """`verify` of `measure` by fastbert.testing's rule.

    yardsticks: the contenders that are PyTorch's own. The first one has to work; another that fails is none.
    """
    names = list(yardsticks)

    @cache  # not before it is asked for: what fails here is then reported with the contender that it concerns
    def standard() -> tuple[testing.Result, dict[str, testing.Result]]:
        right, found = truth(), {names[0]: result_of(names[0])}
        for name in names[1:]:
            with contextlib.suppress(Exception):  # its own row says why
                found[name] = result_of(name)
        return right, found

    def verify(name: str) -> list[testing.Row]:
        right, pytorch = standard()
        result = pytorch[name] if name in pytorch else result_of(name)
        return testing.compare(result, right, pytorch.values(), factor=factor)

    return verify


def forward(run: Callable[..., Tensor], arguments: Mapping[str, object]) -> Call:
    """The call to time: run(**arguments) without a graph."""

    def call():
        with torch.no_grad():
            return run(**arguments)

    return call


def forward_backward(
    run: Callable[..., Tensor], arguments: Mapping[str, object], parameters: Iterable[Tensor] = ()
) -> Call:
    """The call to time: run(**arguments) and the gradients of its floating-point arguments and of `parameters`."""
    leaves = {name: leaf(value) for name, value in arguments.items()}
    wanted = [value for value in leaves.values() if isinstance(value, Tensor) and value.requires_grad]
    wanted += list(parameters)
    cotangent = None

    def call():
        nonlocal cotangent
        result = run(**leaves)
        cotangent = torch.randn_like(result) if cotangent is None else cotangent
        return torch.autograd.grad(result, wanted, cotangent)

    return call


def leaf(value: object) -> object:
    """A tensor that gradients stop at, with value's memory; anything but a floating-point tensor as it is."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def peak_bytes(call: Call, device: str) -> int | None:
    """Memory that one call takes beyond what is held before it: of the device, or the process's resident pages."""
    if device != "cuda":
        return _resident_peak(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _resident_peak(call: Call) -> int | None:
    """None where Linux does not count it. Freed memory that malloc keeps goes back first: it would hide new pages."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        call()
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def synchronised(call: Call, device: str) -> Call:
    """For clocks of the host: returns when the device is done."""
    return call if device != "cuda" else lambda: (call(), torch.cuda.synchronize())[0]


# ---- clocks


def host_timer(clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Seconds a call by the host's clock, over `repeats` calls in a row."""

    def seconds(call: Call, repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    return seconds


def cuda_timer(device: str = "cuda", launches: bool = False) -> Timer:
    """Seconds a call by CUDA events, with cold caches.

    Overwriting the buffer empties the L2 cache, and takes long enough (512 MiB) for the host to have launched the first
    kernels of `call` when it ends, so that short calls are not measured by their launches. launches: the host waits for
    that end, and they are.
    """
    flush = torch.empty(512 << 20, dtype=torch.uint8, device=device)

    def seconds(call: Call, repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            if launches:
                torch.cuda.synchronize(device)
            start.record()
            call()
            end.record()
            end.synchronize()
            total += start.elapsed_time(end) * 1e-3
        return total / repeats

    return seconds


# ---- results


def write(path: Path, reports: Iterable[Report], environment: Mapping[str, object] | None = None) -> None:
    """One JSON file: where and with what it was measured, then the reports. The old one is there until it is whole."""
    content = {**(environment or provenance.environment()), "reports": [report.to_dict() for report in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".writing")
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)
