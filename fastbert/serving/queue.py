"""A queue of requests, with its limits in tokens, and the threads that compute the requests in packed batches.

First come, first served, without a timer: a free thread takes what waits as its batch, up to a number of tokens. A
packed batch costs only its real tokens, so texts of different lengths share it, and none waits to be sorted by length.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastbert.serving.errors import Problem, shutting_down

LOG = logging.getLogger("fastbert.serving")


class Lane(Protocol):
    """One task of one model with fixed options: rows of equal lanes share batches. Several threads use it at once."""

    def compute(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Returns a result for each row."""


class Done(NamedTuple):
    """The results of a request, in the order of its rows, and the seconds it waited and was computed."""

    results: list[Any]
    waited: float
    computed: float


class Batch(NamedTuple):
    """Rows of one lane, as requests with the range of rows that is taken from each."""

    lane: Lane
    parts: list[tuple["_Request", range]]
    tokens: int

    @property
    def rows(self) -> list[Any]:
        return [request.rows[i] for request, part in self.parts for i in part]


@dataclass(eq=False)
class _Request:
    lane: Lane
    rows: Sequence[Any]
    lengths: Sequence[int]
    future: Future = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    taken: int = 0  # rows that are computed, being computed, or given up
    computed: int = 0
    results: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [None] * len(self.rows)

    @property
    def waiting(self) -> int:
        """The number of tokens in the rows that are not taken yet."""
        return sum(self.lengths[self.taken :])

    def take(self, budget: int, always: bool) -> range:
        """Takes the next rows that fit in a budget of tokens. always: takes at least one row."""
        first, used = self.taken, 0
        while self.taken < len(self.rows):
            used += self.lengths[self.taken]
            if used > budget and not (always and self.taken == first):
                break
            self.taken += 1
        if self.taken > first:
            self.started = self.started or time.monotonic()
        return range(first, self.taken)

    def finish(self) -> None:
        now = time.monotonic()
        with suppress(InvalidStateError):  # cancelled meanwhile, or another part of it failed
            self.future.set_result(Done(self.results, self.started - self.arrived, now - self.started))

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class TokenQueue:
    """Admits requests up to a limit of waiting tokens, each as a whole, and computes rows of equal lanes together."""

    def __init__(
        self,
        *,
        workers: int = 1,
        batch_tokens: int = 16384,
        waiting_tokens: int = 1 << 20,
        stall_seconds: float = 60.0,
        longest_wait: float = math.inf,
        on_batch: Callable[[Batch, float], None] = lambda batch, seconds: None,
    ) -> None:
        """workers: threads, each of which computes one batch at a time. batch_tokens: the most in a batch, which has at
        least one row. waiting_tokens: the most that may wait; a request that waits alone may be larger. stall_seconds:
        a batch that takes longer counts as stalled. longest_wait: seconds, for estimates. on_batch: called with each
        batch and its seconds, by the thread that computed it. Raises ValueError if workers, batch_tokens or
        waiting_tokens is below 1."""
        sizes = {"workers": workers, "batch_tokens": batch_tokens, "waiting_tokens": waiting_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.batch_tokens, self.waiting_tokens, self.stall_seconds = batch_tokens, waiting_tokens, stall_seconds
        self.longest_wait, self.on_batch = longest_wait, on_batch
        self._line: OrderedDict[_Request, None] = OrderedDict()  # requests with rows that no thread has taken yet
        self._tokens = 0  # in these rows
        self._changed, self._closing = threading.Condition(), False
        self._computing_since: dict[threading.Thread, float] = {}
        self._recent = 0.0, 0.0  # tokens and seconds of recent batches, of one thread
        self._threads = [
            threading.Thread(target=self._run, name=f"fastbert-inference-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, rows: Sequence[Any], lengths: Sequence[int]) -> Future:
        """Enqueues a request. Returns a future of `Done` or the lane's error; cancelling it drops the remaining rows.

        lengths: the number of tokens in each row. Raises Problem if too many tokens wait, or the queue is closed.
        """
        request = _Request(lane, rows, lengths)
        if not rows:
            request.future.set_result(Done([], 0.0, 0.0))
            return request.future
        with self._changed:
            if self._closing:
                raise shutting_down()
            if not any(thread.is_alive() for thread in self._threads):
                raise Problem(503, "Unhealthy", "the inference threads have ended")
            what = f"{self._tokens} tokens are waiting, and at most {self.waiting_tokens} may"
            self.check_room(self._tokens, request.waiting, what)
            self._line[request] = None
            self._tokens += request.waiting
            self._changed.notify()
        request.future.add_done_callback(lambda _: self._forget(request))
        return request.future

    def _forget(self, request: _Request) -> None:
        """Drops the waiting rows of a request that is done, has failed or was cancelled."""
        with self._changed:
            self._tokens -= request.waiting
            request.taken = len(request.rows)
            self._line.pop(request, None)

    def check_room(self, waiting: int, more: int, what: str) -> None:
        """Raises Problem (429) if `more` tokens would exceed the limit; if none are waiting, any number may. what:
        tells the client what is waiting."""
        if waiting and waiting + more > self.waiting_tokens:
            raise Problem(429, "Overloaded", f"{what}; try again later", retry_after=self.seconds_of(waiting))

    def waiting(self) -> tuple[int, int]:
        """The numbers of requests and tokens that no thread has taken yet."""
        with self._changed:
            return len(self._line), self._tokens

    def seconds_of(self, tokens: int) -> float:
        """An estimate, from recent batches, of the seconds that so many tokens take, but no more than the longest time
        that a request waits; 1 if nothing was computed yet."""
        computed, seconds = self._recent
        return min(tokens * seconds / (computed * len(self._threads)), self.longest_wait) if computed else 1.0

    @property
    def stalled(self) -> str | None:
        """The reason why a thread seems to have stopped computing; None if all is well."""
        with self._changed:
            since = min(self._computing_since.values(), default=None)
        if not all(thread.is_alive() for thread in self._threads) and not self._closing:
            return "an inference thread has ended"
        if since is not None and (seconds := time.monotonic() - since) > self.stall_seconds:
            return f"a batch has been computed for {seconds:.0f} s"
        return None

    def close(self, timeout: float | None = None) -> None:
        """Admits no more requests, computes those that wait, and joins the threads. timeout: seconds for all of it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(until and max(0.0, until - time.monotonic()))

    # ---- the threads

    def _run(self) -> None:
        while batch := self._next():
            self._compute(batch)
            self._finished(batch)

    def _compute(self, batch: Batch) -> None:
        """Computes and delivers. After an error, of the model or for want of memory, each request's rows are computed
        by themselves, and only those fail that fail again."""
        try:
            results = batch.lane.compute(batch.rows)
            if len(results) != len(batch.rows):
                raise RuntimeError(f"{len(results)} results for {len(batch.rows)} rows")
        except Exception as error:
            if len(batch.parts) == 1:
                batch.parts[0][0].fail(error)
                return
            for part in batch.parts:
                self._compute(batch._replace(parts=[part]))
            return
        self._deliver(batch, iter(results))

    def _deliver(self, batch: Batch, results: Any) -> None:
        for request, part in batch.parts:
            request.results[part.start : part.stop] = [next(results) for _ in part]
            with self._changed:  # two threads may have parts of one request
                request.computed += len(part)
                is_complete = request.computed == len(request.rows)
            if is_complete:
                request.finish()

    def _finished(self, batch: Batch) -> None:
        with self._changed:
            seconds = time.monotonic() - self._computing_since.pop(threading.current_thread())
            kept = math.exp(-batch.tokens / self.batch_tokens)  # small batches say little of the rate of large ones
            self._recent = kept * self._recent[0] + batch.tokens, kept * self._recent[1] + seconds
        try:
            self.on_batch(batch, seconds)
        except Exception:  # must not affect the next requests
            LOG.exception("on_batch failed")

    def _next(self) -> Batch | None:
        """Waits for the next batch; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closing)
            if not self._line:
                return None
            self._computing_since[threading.current_thread()] = time.monotonic()
            batch = self._batch()
            if self._line:
                self._changed.notify()  # another thread can take the rest
            return batch

    def _batch(self) -> Batch:
        """Takes rows of the first waiting request's lane, in the order of arrival."""
        lane, parts, left = next(iter(self._line)).lane, [], self.batch_tokens
        for request in self._line:
            if request.lane == lane and (part := request.take(left, always=not parts)):
                parts.append((request, part))
                left -= sum(request.lengths[i] for i in part)
            if left <= 0:
                break
        for request, _ in parts:
            if request.taken == len(request.rows):
                del self._line[request]
        tokens = self.batch_tokens - left
        self._tokens -= tokens
        return Batch(lane, parts, tokens)
