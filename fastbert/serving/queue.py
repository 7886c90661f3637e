"""One line in which requests wait, in tokens, and the thread that computes them in packed batches.

First come, first served, and no timer: a batch is what waits when the thread is free, up to a number of tokens. Packing
makes a batch cost its tokens, so short texts do not wait for long ones to be sorted away.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastbert.serving.errors import Problem


class Lane(Protocol):
    """What may be computed together: a model at one task, with the same options."""

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
    taken: int = 0  # rows that are computed, or being computed
    results: list[Any] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.taken < len(self.rows) and not self.future.cancelled()

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
        return range(first, self.taken)

    def fail(self, error: BaseException) -> None:
        self.taken = len(self.rows)
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error)

    def add(self, results: Sequence[Any]) -> None:
        self.results += results
        if len(self.results) == len(self.rows):
            now = time.monotonic()
            with suppress(InvalidStateError):
                self.future.set_result(Done(self.results, self.started - self.arrived, now - self.started))


class TokenQueue:
    """Admits whole requests as long as few enough tokens wait, and computes their rows, those of a lane together."""

    def __init__(
        self,
        *,
        batch_tokens: int = 16384,
        waiting_tokens: int = 1 << 20,
        stall_seconds: float = 60.0,
        on_batch: Callable[[Batch, float], None] = lambda batch, seconds: None,
    ) -> None:
        """batch_tokens: of a batch, but at least one row. waiting_tokens: of all that wait; a request alone may be
        larger. stall_seconds: a batch that takes longer is a stall. on_batch: is told of each, and its seconds, by the
        thread. Raises ValueError for numbers below 1."""
        for name, value in (("batch_tokens", batch_tokens), ("waiting_tokens", waiting_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.batch_tokens, self.waiting_tokens, self.stall_seconds = batch_tokens, waiting_tokens, stall_seconds
        self.on_batch = on_batch
        self._line: deque[_Request] = deque()
        self._changed, self._closing = threading.Condition(), False
        self._computing_since: float | None = None
        self._rate = 0.0  # tokens a second, of late
        self._thread = threading.Thread(target=self._run, name="fastbert-inference", daemon=True)
        self._thread.start()

    def submit(self, lane: Lane, rows: Sequence[Any], lengths: Sequence[int]) -> Future:
        """A future of `Done`, or of what the lane raises; once it is cancelled, no more of its rows are computed.

        lengths: of the rows, in tokens. Raises Problem if too much waits, or the queue is closed.
        """
        request = _Request(lane, rows, lengths)
        if not rows:
            request.future.set_result(Done([], 0.0, 0.0))
            return request.future
        with self._changed:
            self._line = deque(waiting for waiting in self._line if waiting.is_alive)
            tokens = self._waiting()
            if self._closing:
                raise Problem(503, "Unhealthy", "the service is shutting down")
            self.check_room(tokens, sum(lengths), f"{tokens} tokens are waiting, and at most {self.waiting_tokens} may")
            self._line.append(request)
            self._changed.notify()
        return request.future

    def check_room(self, waiting: int, more: int, what: str) -> None:
        """Raises Problem, 429, if more tokens would wait than may; where none wait, any number may. what: waits, told
        to the client."""
        if waiting and waiting + more > self.waiting_tokens:
            raise Problem(429, "Overloaded", f"{what}; try again later", retry_after=self.seconds_of(waiting))

    def waiting(self) -> tuple[int, int]:
        """Requests and tokens that are not computed yet."""
        with self._changed:
            return len(self._line), self._waiting()

    def _waiting(self) -> int:
        return sum(request.waiting for request in self._line)

    def seconds_of(self, tokens: int) -> float:
        """How long so many tokens take, judging by the last batches; 1 if nothing was computed yet."""
        return tokens / self._rate if self._rate else 1.0

    @property
    def stalled(self) -> str | None:
        """Why nothing can be expected of the thread; None if all is well."""
        since = self._computing_since
        if not self._thread.is_alive() and not self._closing:
            return "the inference thread has ended"
        if since is not None and (seconds := time.monotonic() - since) > self.stall_seconds:
            return f"a batch has been computed for {seconds:.0f} s"
        return None

    def close(self, timeout: float | None = None) -> None:
        """Computes what waits, admits no more, and waits for the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    # ---- the thread

    def _run(self) -> None:
        while batch := self._next():
            self._computing_since = start = time.monotonic()
            try:
                results = batch.lane.compute(batch.rows)
                if len(results) != len(batch.rows):
                    raise RuntimeError(f"{len(results)} results for {len(batch.rows)} rows")
            except Exception as error:  # a model's, out of memory: these requests fail, and the next are computed
                for request, _ in batch.parts:
                    request.fail(error)
            else:
                self._deliver(batch, iter(results))
            seconds, self._computing_since = time.monotonic() - start, None
            self._rate += (batch.tokens / max(seconds, 1e-6) - self._rate) * (0.2 if self._rate else 1.0)
            self.on_batch(batch, seconds)

    @staticmethod
    def _deliver(batch: Batch, results: Any) -> None:
        for request, part in batch.parts:
            request.add([next(results) for _ in part])

    def _next(self) -> Batch | None:
        """The next batch, when there is one; None once the queue is closed and empty."""
        with self._changed:
            while True:
                self._line = deque(request for request in self._line if request.is_alive)
                if self._line:
                    return self._batch()
                if self._closing:
                    return None
                self._changed.wait()

    def _batch(self) -> Batch:
        """Rows of the first request's lane, in the order of the line."""
        lane, parts, left = self._line[0].lane, [], self.batch_tokens
        for request in self._line:
            if request.lane == lane and (part := request.take(left, always=not parts)):
                request.started = request.started or time.monotonic()
                parts.append((request, part))
                left -= sum(request.lengths[i] for i in part)
            if left <= 0:
                break
        self._line = deque(request for request in self._line if request.taken < len(request.rows))
        return Batch(lane, parts, self.batch_tokens - left)
