"""One line in which requests wait, in tokens, and the threads that compute them in packed batches.

First come, first served, and no timer: a batch is what waits when a thread is free, up to a number of tokens. Packing
makes a batch cost its tokens, so short texts do not wait for long ones to be sorted away.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastbert.serving.errors import Problem

LOG = logging.getLogger("fastbert.serving")


class Lane(Protocol):
    """What may be computed together: a model at one task, with the same options; from several threads at once."""

    def compute(self, rows: Sequence[Any]) -> Sequence[Any]:
        """A result for each row."""


class Done(NamedTuple):
    """The results of a request, in the order of its rows, and the seconds it waited and was computed."""

    results: list[Any]
    waited: float
    computed: float


class Batch(NamedTuple):
    """Rows of one lane: the requests, and which of its rows each gives."""

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
        """Tokens."""
        return sum(self.lengths[self.taken :])

    def take(self, budget: int, always: bool) -> range:
        """The next rows that fit; always: at least one."""
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
    """Admits whole requests as long as few enough tokens wait, and computes their rows, those of a lane together."""

    def __init__(
        self,
        *,
        workers: int = 1,
        batch_tokens: int = 16384,
        waiting_tokens: int = 1 << 20,
        stall_seconds: float = 60.0,
        on_batch: Callable[[Batch, float], None] = lambda batch, seconds: None,
    ) -> None:
        """workers: threads, each with a batch of its own. batch_tokens: of a batch, but at least one row.
        waiting_tokens: of all that wait; a request alone may be larger. stall_seconds: a batch that takes longer is a
        stall. on_batch: is told of each, and its seconds, by the thread that computed it. Raises ValueError for numbers
        below 1."""
        sizes = {"workers": workers, "batch_tokens": batch_tokens, "waiting_tokens": waiting_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.batch_tokens, self.waiting_tokens, self.stall_seconds = batch_tokens, waiting_tokens, stall_seconds
        self.on_batch = on_batch
        self._line: OrderedDict[_Request, None] = OrderedDict()  # those with rows that nobody has taken yet
        self._tokens = 0  # of these rows
        self._changed, self._closing = threading.Condition(), False
        self._computing_since: dict[threading.Thread, float] = {}
        self._rate = 0.0  # tokens a second, of one thread, of late
        self._threads = [
            threading.Thread(target=self._run, name=f"fastbert-inference-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, rows: Sequence[Any], lengths: Sequence[int]) -> Future:
        """A future of `Done`, or of what the lane raises; once it is cancelled, no more of its rows are computed.

        lengths: of the rows, in tokens. Raises Problem if too much waits, or the queue is closed.
        """
        request = _Request(lane, rows, lengths)
        if not rows:
            request.future.set_result(Done([], 0.0, 0.0))
            return request.future
        with self._changed:
            if self._closing:
                raise Problem(503, "Unhealthy", "the service is shutting down")
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
        """Of one that is done, has failed or was cancelled, nothing waits any more."""
        with self._changed:
            self._tokens -= request.waiting
            request.taken = len(request.rows)
            self._line.pop(request, None)

    def check_room(self, waiting: int, more: int, what: str) -> None:
        """Raises Problem, 429, if more tokens would wait than may; where none wait, any number may. what: waits, told
        to the client."""
        if waiting and waiting + more > self.waiting_tokens:
            raise Problem(429, "Overloaded", f"{what}; try again later", retry_after=self.seconds_of(waiting))

    def waiting(self) -> tuple[int, int]:
        """Requests and tokens that are not computed yet."""
        with self._changed:
            return len(self._line), self._tokens

    def seconds_of(self, tokens: int) -> float:
        """How long so many tokens take, judging by the last batches; 1 if nothing was computed yet."""
        return tokens / (self._rate * len(self._threads)) if self._rate else 1.0

    @property
    def stalled(self) -> str | None:
        """Why nothing can be expected of a thread; None if all is well."""
        with self._changed:
            since = min(self._computing_since.values(), default=None)
        if not all(thread.is_alive() for thread in self._threads) and not self._closing:
            return "an inference thread has ended"
        if since is not None and (seconds := time.monotonic() - since) > self.stall_seconds:
            return f"a batch has been computed for {seconds:.0f} s"
        return None

    def close(self, timeout: float | None = None) -> None:
        """Computes what waits, admits no more, and waits for the threads; timeout: seconds, for all of them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(until and max(0.0, until - time.monotonic()))

    # ---- the threads

    def _run(self) -> None:
        while batch := self._next():
            try:
                results = batch.lane.compute(batch.rows)
                if len(results) != len(batch.rows):
                    raise RuntimeError(f"{len(results)} results for {len(batch.rows)} rows")
                self._deliver(batch, iter(results))
            except Exception as error:  # a model's, out of memory: these requests fail, and the next are computed
                for request, _ in batch.parts:
                    request.fail(error)
            self._finished(batch)

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
            self._rate += (batch.tokens / max(seconds, 1e-6) - self._rate) * (0.2 if self._rate else 1.0)
        try:
            self.on_batch(batch, seconds)
        except Exception:  # the next requests do not suffer for it
            LOG.exception("on_batch failed")

    def _next(self) -> Batch | None:
        """The next batch, when there is one; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closing)
            if not self._line:
                return None
            self._computing_since[threading.current_thread()] = time.monotonic()
            batch = self._batch()
            if self._line:
                self._changed.notify()  # there is more, for another thread
            return batch

    def _batch(self) -> Batch:
        """Rows of the first request's lane, in the order of the line."""
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
