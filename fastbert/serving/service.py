"""The layer between the routes and the models: limits, encoding, the queue, and clients that disconnect."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from fastbert.serving.errors import Problem, invalid, shutting_down
from fastbert.serving.metrics import Metrics
from fastbert.serving.models import ServedModel
from fastbert.serving.queue import Lane, TokenQueue

CHARACTERS_PER_TOKEN = 4  # in English text; estimates the tokens of texts that are not tokenized yet
FEW = 500  # characters, which take 0.2 ms to tokenize in English, and 1 ms in Chinese
INPUTS = 32  # in a request, where its route has no other number
MOST = 10**9  # every limit is below it
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a service. inputs: texts or pairs in a request; None means 32, on OpenAI's route 2048 and on Cohere's
    1000. body: bytes. requests: at once, from the arrival of their headers on. batch_tokens, waiting_tokens, stall,
    workers: those of TokenQueue; batch_tokens None means 16384 if a model is on a GPU, else 4096, which suits a CPU's
    caches. Each worker computes with `torch.get_num_threads()` threads; divide the cores between the workers.

    timeout: seconds for a body to arrive, and again for the answer to it. Raises ValueError for numbers that are not
    above 0, or not below 10^9.
    """

    inputs: int | None = None
    body: int = 2_000_000
    batch_tokens: int | None = None
    waiting_tokens: int = 1 << 20
    timeout: float = 60.0
    stall: float = 60.0
    workers: int = 1
    requests: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < MOST:
                raise ValueError(f"{name} is {value}; expected a number above 0, and below {MOST}")


class Found(NamedTuple):
    """results: one for each row. tokens: in all rows."""

    results: list[Any]
    tokens: int


class Gone(Exception):
    """The client has disconnected, so nobody reads the answer."""


class Service:
    """Models by name, and the one queue in which all their requests wait."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits = Limits(),  # noqa: B008
        *,
        auto_truncate: bool = False,
    ) -> None:
        """auto_truncate: cuts texts at the model's length where a request does not say whether to. Raises ValueError
        for no model, for two of the same name, and for several workers if a model is on a GPU."""
        self.models, self.limits = {model.name: model for model in models}, limits
        self.auto_truncate = auto_truncate
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
            longest_wait=limits.timeout,
            on_batch=lambda batch, seconds: self.metrics.computed(batch, seconds),
        )
        for predictor in (each for model in models for each in model.predictors.values()):
            if hasattr(predictor, "tokens_per_batch"):  # a SentenceEncoder embeds a whole batch anyway
                predictor.tokens_per_batch = self.queue.batch_tokens
        self.metrics = Metrics(self.queue.waiting)
        self._encoding = ThreadPoolExecutor(2, "fastbert-encoding")
        self._counting = threading.Lock()
        self._characters = 0  # waiting to be tokenized, or being tokenized
        self._closed = False

    def model(self, name: str | None, task: str | None = None) -> ServedModel:
        """The model of that name; without a name, the first whose own task it is, else the first that can do it, else
        the first. Raises Problem (404) for an unknown name."""
        if name:
            if name not in self.models:
                known = ", ".join(self.models)
                raise Problem(404, "Validation", f"there is no model {name!r}; expected {known}", field="model")
            return self.models[name]
        its_own = [model for model in self.models.values() if model.task == task]
        able = [model for model in self.models.values() if task in model.predictors]
        return [*its_own, *able, *self.models.values()][0]

    def check(self, name: str, inputs: Sequence[Any], most: int = INPUTS) -> None:
        """Raises Problem for no input, for an empty text, and for too many inputs: more than the limit of the service
        or, without one, than `most`."""
        if not inputs:
            raise invalid(name, "is empty; expected at least one")
        if len(inputs) > (most := self.limits.inputs or most):
            raise invalid(name, f"has {len(inputs)} entries; expected at most {most}", 413)
        for index, text in enumerate(inputs):
            if not all(text if isinstance(text, tuple) else (text,)):
                raise invalid(f"{name}[{index}]", "is empty; expected text")

    def truncates(self, asked: bool | None) -> bool:
        """Whether to cut texts. asked: what the request says, if anything."""
        return self.auto_truncate if asked is None else asked

    async def run(
        self,
        request: Request,
        model: ServedModel,
        task: str,
        inputs: Sequence[Any],
        lane: Lane,
        *,
        truncate: bool = True,
        field: str = "inputs",
    ) -> Found:
        """Returns the results of texts, pairs, or token ids, in the order of the inputs. field: their name in the body.

        Raises Problem as `tokenized`, the model's `rows` and the queue do, and for errors in the model (424); Gone if
        the client has disconnected.
        """
        began = time.monotonic()
        call = functools.partial(model.rows, task, inputs, truncate=truncate, field=field)
        rows, lengths = await self.tokenized(request, _characters(inputs), call)
        return await self.compute(request, lane, rows, lengths, time.monotonic() - began)

    async def tokenized(self, request: Request, characters: int, call: Callable[[], T]) -> T:
        """Runs a call that tokenizes so many characters: a few of them here, which takes less time than to change
        threads twice, more in another thread. As many tokens may wait as in the queue.

        Raises Problem for more characters than a body may have (413; a query counts with each of its documents), if
        more would wait (429), after the timeout (503), and for the call's ValueError and the like (424); the call's
        other errors; Gone if the client has disconnected.
        """
        if self._closed:
            raise shutting_down()
        if characters > self.limits.body:
            message = (
                f"{characters} characters to tokenize, a query with each text; expected at most {self.limits.body}"
            )
            raise Problem(413, "Validation", message)
        if characters <= FEW:
            with _failing_with_424():
                return call()
        waiting = self._characters // CHARACTERS_PER_TOKEN
        what = f"texts of some {waiting} tokens wait to be tokenized"
        self.queue.check_room(waiting, characters // CHARACTERS_PER_TOKEN, what)
        future = self._encoding.submit(call)
        self._wait_to_tokenize(characters)
        future.add_done_callback(lambda _: self._wait_to_tokenize(-characters))  # at its end, even if the client left
        return await self._answer(request, future, self.limits.timeout)

    def _wait_to_tokenize(self, characters: int) -> None:
        with self._counting:
            self._characters += characters

    async def compute(
        self, request: Request, lane: Lane, rows: Sequence[Any], lengths: Sequence[int], encoding: float = 0.0
    ) -> Found:
        """Returns the results of encoded rows. encoding: the seconds that encoding took. Raises as `run` does."""
        future = self.queue.submit(lane, rows, lengths)
        done = await self._answer(request, future, self.limits.timeout - encoding)
        self.metrics.done(lengths, encoding, done)
        return Found(done.results, sum(lengths))

    async def _answer(self, request: Request, future: Future, timeout: float) -> Any:
        answer, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.cancelled():
                raise shutting_down()
            if answer.done():
                with _failing_with_424():
                    return answer.result()
        finally:
            answer.cancel()
            gone.cancel()
        if gone.done() and not gone.cancelled():
            raise Gone
        waiting = self.queue.waiting()[1]
        message = f"no answer within {self.limits.timeout:g} s; try again later"
        raise Problem(503, "Overloaded", message, retry_after=self.queue.seconds_of(waiting))

    def close(self) -> None:
        """Computes what waits in the queue, and answers everything else, from now on, with a Problem (503)."""
        self._closed = True
        self.queue.close(self.limits.timeout)
        self._encoding.shutdown(cancel_futures=True)


@contextmanager
def _failing_with_424() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError, LookupError) as error:
        raise Problem(424, "Backend", f"the model failed: {str(error).partition(chr(10))[0]}") from error


def _characters(inputs: Sequence[Any]) -> int:
    """The number of characters in texts and pairs; a token id counts as one."""
    return sum(len(text) for one in inputs for text in (one if isinstance(one, tuple) else (one,)))


async def _disconnect(request: Request) -> None:
    """Returns when the client has disconnected; expects that the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
