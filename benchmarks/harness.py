"""Times contenders side by side, and only those whose results are right.

`measure` checks each contender's accuracy first: one that is wrong, or fails, is reported as such and never timed.
Then, round after round, every contender runs once, in shuffled order, so that disturbances of the machine affect all
alike. A contender's ratio is the median over the rounds of the baseline's seconds / its seconds: above 1 is faster.

On a CPU a sample is enough calls in a row to be far above the clock's resolution, with warm caches. On CUDA it is one
call between two events, with the L2 cache overwritten before; a second such call measures only the device's time.
"""

import contextlib
import ctypes
import math
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from fastbert import backends, testing

Call = Callable[[], object]
Timer = Callable[[Call, int], float]  # (call, repeats) -> seconds a call
Verify = Callable[[str], list[testing.Row]]  # a contender's name -> its tensors under the accuracy rule

LEAST = 5  # rounds that run, however long they take
RESTS = 100  # the most pauses, in case threads never come to rest
WARMED = 0.2  # seconds: if a case's shortest call takes less, an uncounted sample precedes each of its samples
ALIKE = 10  # times the first yardstick's error: PyTorch's ways of computing a case differed by at most 3.2
LEAST_COSINE = 0.995  # between a quantized model's hidden states and the truth
PRODUCTS = "matrix products alone"  # prefix of the bounds that `library_floor` contains


@dataclass(frozen=True)
class Work:
    """The work of one call, which is the same for every contender.

    tokens: real ones, not padding. flops, bytes: 0 where they mean nothing. floor: seconds (see floor.py). rest: the
    part of the floor outside matrix products; together with the library's own time for the products, it is the floor
    that this library can reach.
    """

    tokens: int
    flops: float = 0
    bytes: float = 0
    floor: float | None = None
    rest: float | None = None


@dataclass
class Row:
    """One contender. problem: why it was not timed. ran: the backends that ran. seconds: one number a round.

    absent: why it was not even tried: not installed, or not made for such a case. bound: whether this is no contender
    but the time of unavoidable work, without a result to verify. device: seconds of the device alone, without the host.
    """

    name: str
    problem: str | None = None
    absent: str | None = None
    accuracy: list[testing.Row] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    bound: bool = False


def spread(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the 20th and the 80th percentile."""
    cuts = statistics.quantiles(numbers, n=5, method="inclusive") if len(numbers) > 1 else list(numbers) * 4
    return statistics.median(numbers), cuts[0], cuts[-1]


@dataclass
class Report:
    """The rows of one case; `case` describes it, as facts for a reader and for JSON."""

    case: dict[str, object]
    work: Work
    baseline: str
    rows: list[Row]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def ratio(self, name: str) -> float | None:
        """Median of the per-round ratios to the baseline; None unless both were timed."""
        pairs = list(zip(self.row(self.baseline).seconds, self.row(name).seconds, strict=False))
        return statistics.median(base / own for base, own in pairs) if pairs else None

    @property
    def library_floor(self) -> float | None:
        """Seconds: the products' time in the faster library in this same run, plus the floor of everything else."""
        products = [row.seconds for row in self.rows if row.bound and row.seconds and row.name.startswith(PRODUCTS)]
        rest = self.work.rest
        return min(map(statistics.median, products)) + rest if products and rest is not None else None

    def lines(self) -> list[dict[str, object]]:
        """A line of a results file for each contender, with all that tables need. Microseconds, bytes."""
        return [self._line(row) for row in self.rows]

    def _line(self, row: Row) -> dict[str, object]:
        facts: dict[str, object] = {"case": self.case, "name": row.name}
        facts |= {"baseline": True} if row.name == self.baseline else {}
        facts |= {key: value for key in ("bound", "absent", "problem") if (value := getattr(row, key))}
        if row.accuracy:
            facts["error"] = worst(row.accuracy)
        if row.ran:
            facts["ran"] = "+".join(sorted(set(row.ran.values())))
        if row.seconds:
            times = dict(zip(("median", "p20", "p80"), spread(row.seconds), strict=True))
            times |= {} if row.bound else {"floor": self.work.floor, "library": self.library_floor}
            facts |= {key: microseconds(value) for key, value in times.items() if value}
            numbers = {"ratio": rounded(self.ratio(row.name) or 0, 4), "memory": row.peak_bytes}
            numbers |= {} if row.bound else {key: int(getattr(self.work, key)) for key in ("tokens", "flops", "bytes")}
            facts |= {key: value for key, value in numbers.items() if value}
            facts |= {"repeats": row.repeats} if row.repeats > 1 else {}
            facts["samples"] = list(map(microseconds, row.seconds))
        if row.device:
            facts["device"] = microseconds(statistics.median(row.device))
            facts["device_samples"] = list(map(microseconds, row.device))
        return facts


def microseconds(seconds: float) -> float:
    return rounded(seconds * 1e6)


def rounded(number: float, digits: int = 6) -> float:
    """Rounds to so many significant digits; a whole number becomes an int, which JSON writes without `.0`."""
    found = float(f"{number:.{digits}g}")
    return int(found) if found.is_integer() else found


def worst(tensors: Iterable[testing.Row]) -> float | str:
    """The largest error, in units of what the accuracy rule allows; as text if JSON cannot represent it (NaN, inf)."""
    shares = [tensor.error / tensor.bound if tensor.bound else float(not tensor.ok) for tensor in tensors]
    found = max(shares, key=lambda share: (math.isnan(share), share))
    return rounded(found, 3) if math.isfinite(found) else str(found)


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
    device_timer: Timer | None = None,
    sample: float | None = None,
    pause: float | None = None,
) -> Report:
    """Verifies every contender, then times those that are right, interleaved.

    verify: made by `by_the_rule`. bounds: calls timed beside the contenders, without verification. others: rows of
    contenders that have nothing to run. rounds: 0 only verifies; after `limit` seconds no new round begins, except for
    the first LEAST. launches: on CUDA, whether the host's time before the device can begin counts, as in a whole model.
    sample: the least seconds of a sample; 0 is a single call, the default on CUDA. An uncounted sample precedes each,
    unless every call is long: the system may wake a thread on the processor of the thread that waits for it, and takes
    a while to correct that. pause: seconds before a contender's turn, repeated until the threads of the previous one
    have come to rest. A contender that fails is not timed any further. Raises ValueError for a baseline that is no
    contender.
    """
    if baseline not in contenders:
        raise ValueError(f"measure: the baseline {baseline!r} is none of {', '.join(contenders)}")
    timer = timer or (cuda_timer(device, launches=launches) if device == "cuda" else host_timer())
    device_timer = device_timer or (busy_timer(device) if device == "cuda" else None)
    sample = (0.0 if device == "cuda" else 0.01) if sample is None else sample
    pause = (0.0 if device == "cuda" else 0.01) if pause is None else pause
    rows = [_examine(name, call, verify, device, bool(rounds)) for name, call in contenders.items()]
    rows += [Row(name, bound=True) for name in (bounds or {}) if rounds]
    calls = {**contenders, **(bounds or {})}
    timed = [row for row in rows if not row.problem]
    shortest = math.inf
    for row in timed if rounds and sample else []:
        shortest = min(shortest, _uncounted(row, calls[row.name], timer, sample))
    order, deadline = random.Random(0), time.monotonic() + limit
    for done in range(rounds):
        if done >= LEAST and time.monotonic() > deadline:
            break
        for row in order.sample(timed, len(timed)):
            _rest(pause)
            if shortest < WARMED:
                _uncounted(row, calls[row.name], timer, sample)
            row.seconds.extend(_timed(row, calls[row.name], timer))
            row.device.extend(_timed(row, calls[row.name], device_timer) if device_timer else [])
    return Report(dict(case), work, baseline, [*rows, *others])


def _rest(pause: float) -> None:
    """Sleeps until the process's threads do. OpenMP's threads go on spinning for a millisecond or so after their last
    work, ONNX Runtime's for thirty, and the next contender would share the processor with them."""
    for _ in range(RESTS if pause else 0):
        busy = time.process_time()
        time.sleep(pause)
        if time.process_time() - busy < pause / 10:
            return


def _uncounted(row: Row, call: Call, timer: Timer, sample: float) -> float:
    """The seconds of a call in a sample that does not count; infinite if it fails. If the sample was too short, because
    the one before was disturbed, the next ones have more repeats."""
    seconds = min(_timed(row, call, timer), default=math.inf)
    row.repeats = max(row.repeats, math.ceil(sample / max(seconds, 1e-9)))
    return seconds


def _timed(row: Row, call: Call, timer: Timer) -> list[float]:
    """The seconds of a sample, if any. After a first failure nothing is timed, and the row keeps only the problem."""
    if row.problem:
        return []
    try:
        seconds = timer(call, row.repeats)
        return [] if math.isnan(seconds) else [seconds]
    except Exception as error:
        row.problem = failure(error)
        row.seconds.clear()
        row.device.clear()
        return []


def _examine(name: str, call: Call, verify: Verify, device: str, is_timed: bool) -> Row:
    """Verifies a contender and runs it: to warm it up, to see which backends it uses and, once warm, its memory."""
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
    """An error in the words of a results file, without the folders of this machine that it names."""
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", str(error).partition("\n")[0])
    return f"failed: {type(error).__name__}: {line}"


def by_the_rule(
    result_of: Callable[[str], testing.Result],
    truth: Callable[[], testing.Result],
    yardsticks: Iterable[str],
    *,
    factor: float = 2.0,
    quantized: Iterable[str] = (),
) -> Verify:
    """Makes the `verify` of `measure`, by the accuracy rule of fastbert.testing.

    yardsticks: the contenders that are PyTorch's own. The first one has to work; another that fails, or is so far from
    the first that it must be wrong, is left out, because its error would excuse everybody's.
    quantized: contenders with int8 or fp8 products, to which the rule does not apply: the mean cosine between their
    outputs and the truth has to be at least LEAST_COSINE.
    """
    names = list(yardsticks)

    @cache  # runs only when needed, so that a failure is reported with the contender that it concerns
    def standard() -> tuple[testing.Result, dict[str, testing.Result]]:
        right, found = truth(), {names[0]: result_of(names[0])}
        for name in names[1:]:
            with contextlib.suppress(Exception):  # its own row says why
                result = result_of(name)
                found |= {name: result} if _alike(result, found[names[0]], right, factor) else {}
        return right, found

    def verify(name: str) -> list[testing.Row]:
        right, pytorch = standard()
        result = pytorch[name] if name in pytorch else result_of(name)
        if name in quantized:
            return [_by_cosine(tensor, result.outputs[tensor], right.outputs[tensor]) for tensor in right.outputs]
        return testing.compare(result, right, pytorch.values(), factor=factor)

    return verify


def _alike(result: testing.Result, first: testing.Result, truth: testing.Result, factor: float) -> bool:
    """Whether each error of a yardstick is within the rule by the first one, or at most ALIKE times the first one's."""
    rows = testing.compare(result, truth, [first], factor=factor)
    return all(replace(row, bound=max(row.bound, ALIKE * row.baseline)).ok for row in rows)


def _by_cosine(name: str, found: torch.Tensor, truth: torch.Tensor) -> testing.Row:
    """The cosine of rows, on average; the error is 1 minus it."""
    cosine = torch.nn.functional.cosine_similarity(found.double(), truth.double(), dim=-1).mean()
    return testing.Row(f"1 - cosine of {name}", 1 - float(cosine), 1 - LEAST_COSINE, 0.0)


# ---- memory


def peak_bytes(call: Call, device: str) -> int | None:
    """Bytes that one call takes beyond those held before it: of device memory, or of the process's resident pages."""
    if device != "cuda":
        return _resident_peak(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _resident_peak(call: Call) -> int | None:
    """None where Linux does not count it. First returns freed memory that malloc keeps, which would hide new pages."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except (OSError, AttributeError):
        call()
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ---- clocks


def host_timer(clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Times a call by the host's clock, over `repeats` calls in a row."""

    def seconds(call: Call, repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    return seconds


FLUSHED = 512 << 20  # bytes
SHORTEST, LONGEST = 1 << 20, 1 << 27  # clock cycles that the device sleeps: half a millisecond, a fifteenth of a second


def cuda_timer(device: str = "cuda", launches: bool = False) -> Timer:
    """Times a call by CUDA events, with cold caches.

    Overwriting a buffer of 512 MiB empties the L2 cache, and takes so long that the host has launched the first kernels
    of `call` before it ends: the launches of short calls do not count. launches: the host waits for that end before it
    launches, so that they do count.
    """
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=device)

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


def busy_timer(device: str = "cuda") -> Timer:
    """Times only the device's part of a call by CUDA events, with cold caches.

    The device sleeps while the host launches. If it wakes up before the host is done, the call is repeated after a
    sleep twice as long. NaN for a call that waits for the device, or launches more than its queue holds (a thousand).
    """
    flush, cycles = torch.empty(FLUSHED, dtype=torch.uint8, device=device), defaultdict(lambda: SHORTEST)

    def once(call: Call) -> float:
        while cycles[call] <= LONGEST:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(cycles[call])
            start.record()
            call()
            end.record()
            was_asleep = not start.query()
            end.synchronize()
            if was_asleep:
                return start.elapsed_time(end) * 1e-3
            cycles[call] *= 2
        return math.nan

    return lambda call, repeats: sum(once(call) for _ in range(repeats)) / repeats
