"""Between the routes and the models: limits, encoding, the queue, and clients that go away."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from fastbert.serving.errors import Problem, invalid
from fastbert.serving.metrics import Metrics
from fastbert.serving.models import ServedModel
from fastbert.serving.queue import Lane, TokenQueue

CHARACTERS_PER_TOKEN = 4  # of English text; texts that are not tokenized yet are counted by it
MOST = 10**9  # of any limit
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """inputs: texts or pairs of a request. body: bytes. batch_tokens, waiting_tokens, stall, workers: as of TokenQueue;
    batch_tokens None is 16384 where a model is on a GPU, else 4096, which a processor's caches prefer. Each worker
    computes with `torch.get_num_threads()` threads; give them the cores to share.

    timeout: seconds in which a body arrives, and then those until its answer. Raises ValueError for numbers that are
    not above 0, and enormous ones.
    """

    inputs: int = 32
    body: int = 2_000_000
    batch_tokens: int | None = None
    waiting_tokens: int = 1 << 20
    timeout: float = 60.0
    stall: float = 60.0
    workers: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < MOST:
                raise ValueError(f"{name} is {value}; expected a number above 0, and below {MOST}")


class Found(NamedTuple):
    """results: one for each row. tokens: of all."""

    results: list[Any]
    tokens: int


class Gone(Exception):
    """The client has gone: nobody reads the answer."""


class Service:
    """Models by name, and the one queue in which all their requests wait."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits = Limits()) -> None:  # noqa: B008
        """Raises ValueError for no model, for two of the same name, and for several workers beside a GPU."""
        self.models, self.limits = {model.name: model for model in models}, limits
        if not models or len(self.models) < len(models):
            names = ", ".join(model.name for model in models) or "none"
            raise ValueError(f"models are {names}; expected at least one, each with a name of its own")
        on_gpu = any(model.any.device.type != "cpu" for model in models)
        if on_gpu and limits.workers > 1:
            raise ValueError(f"workers is {limits.workers}; expected 1: a GPU computes one batch after another")
        self.queue = TokenQueue(
            workers=limits.workers,
            batch_tokens=limits.batch_tokens or (16384 if on_gpu else 4096),
            waiting_tokens=limits.waiting_tokens,
            stall_seconds=limits.stall,
            on_batch=lambda batch, seconds: self.metrics.computed(batch, seconds),
        )
        self.metrics = Metrics(self.queue.waiting)
        self._encoding = ThreadPoolExecutor(2, "fastbert-encoding")
        self._counting = threading.Lock()
        self._characters = 0  # that wait to be tokenized, or are being tokenized

    def model(self, name: str | None, task: str | None = None) -> ServedModel:
        """That of the name; without one, the first whose task it is, or that does it too, or the first of all.

        Raises Problem, 404, for an unknown name."""
        if name is not None:
            if name not in self.models:
                known = ", ".join(self.models)
                raise Problem(404, "Validation", f"there is no model {name!r}; expected {known}", field="model")
            return self.models[name]
        return max(self.models.values(), key=lambda model: (model.task == task, task in model.predictors))

    def check(self, name: str, inputs: Sequence[Any]) -> None:
        """Raises Problem for no input, an empty text, and too many of them."""
        if not inputs:
            raise invalid(name, "is empty; expected at least one")
        if len(inputs) > self.limits.inputs:
            raise invalid(name, f"has {len(inputs)} entries; expected at most {self.limits.inputs}", 413)
        for index, text in enumerate(inputs):
            if not all(text if isinstance(text, tuple) else (text,)):
                raise invalid(f"{name}[{index}]", "is empty; expected text")

    async def run(
        self,
        request: Request,
        model: ServedModel,
        task: str,
        inputs: Sequence[Any],
        lane: Lane,
        *,
        truncate: bool = True,
    ) -> Found:
        """The results of texts, pairs, or tokens, in their order.

        Raises Problem as `in_thread`, the model's `rows` and the queue do, for what goes wrong in the model (424);
        Gone if the client has left.
        """
        began = time.monotonic()
        call = functools.partial(model.rows, task, inputs, truncate=truncate)
        rows, lengths = await self.in_thread(request, _characters(inputs), call)
        return await self.compute(request, lane, rows, lengths, time.monotonic() - began)

    async def in_thread(self, request: Request, characters: int, call: Callable[[], T]) -> T:
        """What a call that tokenizes so many characters gives. Before it, as much may wait as in the queue.

        Raises Problem for more than a body may have (413: a query counts with each of its documents), if more would
        wait (429), for what takes longer than the limit (503), and what the call raises; Gone if the client has left.
        """
        if characters > self.limits.body:
            message = (
                f"{characters} characters to tokenize, a query with each text; expected at most {self.limits.body}"
            )
            raise Problem(413, "Validation", message)
        waiting = self._characters // CHARACTERS_PER_TOKEN
        what = f"texts of some {waiting} tokens wait to be tokenized"
        self.queue.check_room(waiting, characters // CHARACTERS_PER_TOKEN, what)
        future = self._encoding.submit(call)
        self._wait_to_tokenize(characters)
        future.add_done_callback(lambda _: self._wait_to_tokenize(-characters))  # once it has ended, whoever has left
        return await self._answer(request, future, self.limits.timeout)

    def _wait_to_tokenize(self, characters: int) -> None:
        with self._counting:
            self._characters += characters

    async def compute(
        self, request: Request, lane: Lane, rows: Sequence[Any], lengths: Sequence[int], encoding: float = 0.0
    ) -> Found:
        """The results of rows that are encoded. encoding: seconds that it took. Raises as `run`."""
        future = self.queue.submit(lane, rows, lengths)
        done = await self._answer(request, future, self.limits.timeout - encoding)
        self.metrics.done(lengths, encoding, done)
        return Found(done.results, sum(lengths))

    async def _answer(self, request: Request, future: Future, timeout: float) -> Any:
        answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError, LookupError) as error:
            raise Problem(424, "Backend", f"the model failed: {str(error).partition(chr(10))[0]}") from error
        finally:
            answer.cancel()
            gone.cancel()
        if gone.done() and not gone.cancelled():
            raise Gone
        waiting = self.queue.waiting()[1]
        message = f"no answer within {self.limits.timeout:g} s; try again later"
        raise Problem(503, "Overloaded", message, retry_after=self.queue.seconds_of(waiting))

    def close(self) -> None:
        self.queue.close(self.limits.timeout)
        self._encoding.shutdown(cancel_futures=True)


def _characters(inputs: Sequence[Any]) -> int:
    """Of texts and pairs; token ids cost nothing."""
    texts = (text for one in inputs for text in (one if isinstance(one, tuple) else (one,)))
    return sum(len(text) for text in texts if isinstance(text, str))


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
