"""The ASGI application: routes, API keys, limits on bodies, errors in each protocol's format, a log line a request."""

import asyncio
import hmac
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import fastbert
from fastbert.require import require
from fastbert.serving import openai, page, rerank, tei, tensorflow
from fastbert.serving.answers import json_response
from fastbert.serving.errors import Problem
from fastbert.serving.service import Gone, Service

LOG = logging.getLogger("fastbert.serving")
TYPE = re.compile(r"str$|int$|(list|constrained|function-\w+)\b|[A-Z]\w*$")  # type names in pydantic's locations
# Without a key: for load balancers, and pages, which ask their user for a key.
OPEN = ("/health", "/ping", "/ui", "/docs", "/openapi.json")
FORMS = {  # error formats by path prefix; the first that fits counts
    "/v1/embeddings": openai.error,
    "/v1/models/": tensorflow.error,
    "/v1/models": openai.error,
    "/v1/rerank": rerank.error,
    "/v2/rerank": rerank.error,
}
Receive, Send = Callable[[], Awaitable[MutableMapping]], Callable[[MutableMapping], Awaitable[None]]


def create_app(service: Service, api_keys: Iterable[str] = ()) -> FastAPI:
    """Returns the ASGI application of a service, which it closes at shutdown. api_keys: if empty, no key is needed."""

    if isinstance(api_keys, str):
        raise TypeError("create_app: api_keys is a string; expected several of them")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    keys = tuple(api_keys)
    asks_for_key = [Security(HTTPBearer(auto_error=False))] if keys else []  # for /docs; Guard checks it
    app = FastAPI(
        title="fastbert", version=fastbert.__version__, lifespan=lifespan, dependencies=asks_for_key, **_telemetry()
    )
    for protocol in (tei, openai, rerank, tensorflow, page):
        app.include_router(protocol.routes(service))
    app.add_exception_handler(Problem, lambda request, problem: problem_response(request, problem))
    for kind in (RequestValidationError, ValidationError):
        app.add_exception_handler(kind, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(Gone, lambda request, error: Response(status_code=499))  # the client has gone
    app.add_middleware(Guard, service=service, api_keys=keys)
    return app


def is_open(method: str, path: str) -> bool:
    return path in OPEN or (path == "/" and method != "POST")


def path_of(scope: MutableMapping) -> str:
    """The path within this application, without the prefix under which the application is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


def _telemetry() -> dict[str, Any]:
    """Options for FastAPI's OpenTelemetry (spans and metrics, no texts); {} unless the environment has an endpoint."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP") and name.endswith("ENDPOINT") for name in os.environ):
        return {}
    require("fastapi.telemetry", "'fastapi>=0.165'")
    require("opentelemetry.sdk", "opentelemetry-sdk")
    require("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")
    return {"telemetry": {"auto_configure": True, "logs": False, "exclude": lambda scope: path_of(scope) in OPEN}}


class Facts(dict):
    """Facts about a request, as the message of a log record: JSON as a string; a formatter can use the dictionary."""

    def __str__(self) -> str:
        return json.dumps(self)


# ---- errors


def problem_response(request: Request, problem: Problem) -> Response:
    """The response to a problem, in the error format of the protocol that the path belongs to."""
    path = path_of(request.scope)
    form = next((form for start, form in FORMS.items() if path.startswith(start)), tei.error)
    return json_response(form(problem), problem.status, problem.headers)


def _invalid(request: Request, error: RequestValidationError | ValidationError) -> Response:
    """Says what is wrong and where; for a field of several types, by the alternative that fitted the deepest."""
    found = max(error.errors(), key=lambda one: sum(isinstance(part, int) for part in one["loc"]))
    if found["type"] == "json_invalid":
        problem = Problem(400, "Validation", f"the body is no JSON: {found['ctx']['error']}")
    else:
        skipped = 1 if isinstance(error, RequestValidationError) else 0  # FastAPI puts "body" first
        where = _place(found["loc"][skipped:])
        problem = Problem(422, "Validation", f"{where or 'the body'}: {found['msg']}", field=where)
    return problem_response(request, problem)


def _place(loc: tuple[str | int, ...]) -> str:
    """Formats a location as in "inputs[1].text", without the type names that pydantic puts between."""
    names = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if not TYPE.match(str(part)))
    return "".join(names).lstrip(".")


def _http(request: Request, error: HTTPException) -> Response:
    words = {404: "there is no such route", 400: "the body is no JSON in UTF-8"}
    message = error.detail if error.status_code not in words else words[error.status_code]
    problem = Problem(error.status_code, "Validation", str(message))
    problem.headers |= error.headers or {}  # the methods that a route allows
    return problem_response(request, problem)


def _unexpected(request: Request, error: Exception) -> Response:
    """Answers a fault of this service with 500, and logs its traceback."""
    facts = Facts(path=path_of(request.scope), error=f"{type(error).__name__}: {error}")
    LOG.error(facts, exc_info=error)
    return problem_response(request, Problem(500, "Backend", "the service failed; its log says how"))


# ---- middleware around every route


def _with_kind(scope: MutableMapping) -> MutableMapping:
    """Declares a body JSON if it has no content type, or goes to TensorFlow Serving's routes (`curl -d` says form)."""
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
    if len(kept) < len(scope["headers"]) and not path_of(scope).startswith("/v1/models/"):
        return scope
    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}


class Guard:
    """Checks API keys and the size and type of bodies, counts and logs. Plain ASGI, so that routes see disconnects."""

    def __init__(self, app: Any, service: Service, api_keys: tuple[str, ...]) -> None:
        self.app, self.service, self.keys = app, service, tuple(key.encode() for key in api_keys)
        self._running = 0  # requests with a body

    async def __call__(self, scope: MutableMapping, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, path, more = time.monotonic(), 500, path_of(scope), scope["method"] == "POST"
        scope = _with_kind(scope)
        headers = {name.lower(): value for name, value in scope["headers"]}

        async def sending(message: MutableMapping) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._running += more
        try:
            refused = self._refused(scope, headers)
            if refused:
                await problem_response(Request(scope), refused)(scope, receive, sending)
            else:
                await self.app(scope, self._limited(receive), sending)
        finally:
            self._running -= more
            self._count(scope["method"], path, status, time.monotonic() - start)

    def _refused(self, scope: MutableMapping, headers: dict[bytes, bytes]) -> Problem | None:
        key = headers.get(b"authorization", b"")
        if self.keys and not is_open(scope["method"], path_of(scope)) and not self._knows(key):
            problem = Problem(401, "Validation", "expected the header Authorization: Bearer KEY, with a valid key")
            problem.headers["www-authenticate"] = "Bearer"
            return problem
        if self._running > self.service.limits.requests:
            message = f"{self.service.limits.requests} requests are being answered; try again later"
            return Problem(429, "Overloaded", message, retry_after=1)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.service.limits.body:
            return self._too_large()
        kind = headers[b"content-type"].partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json" and not kind.endswith(b"+json"):
            given = kind.decode("latin-1")
            return Problem(415, "Validation", f"Content-Type is {given!r}; expected 'application/json'")
        return None

    def _knows(self, given: bytes) -> bool:
        """Whether the key is known; compares with every key in constant time, even after a match."""
        kind, _, key = given.partition(b" ")
        fits = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return kind.lower() == b"bearer" and any(fits)

    def _too_large(self) -> Problem:
        return Problem(413, "Validation", f"the body is larger than {self.service.limits.body} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """Limits the size of bodies whose length was not declared, and the time in which a body arrives."""
        limits = self.service.limits
        read, until, there = 0, time.monotonic() + limits.timeout, False

        async def limited() -> MutableMapping:
            nonlocal read, there
            try:  # after the body, only a disconnect follows, at any time
                message = await asyncio.wait_for(receive(), None if there else until - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {limits.timeout:g} s") from None
            read, there = read + len(message.get("body", b"")), not message.get("more_body", False)
            if read > limits.body:
                problem = self._too_large()
                raise HTTPException(problem.status, problem.message)
            return message

        return limited

    def _count(self, method: str, path: str, status: int, seconds: float) -> None:
        metrics, kind = self.service.metrics, "batch" if method == "POST" else "read"
        if method == "POST":
            metrics.requests.labels(kind).inc()
            metrics.duration.observe(seconds)
            metrics.successes.labels(kind).inc() if status < 400 else metrics.failures.labels(str(status)).inc()
        is_probe = status < 400 and (is_open(method, path) or path == "/metrics")
        level = logging.DEBUG if is_probe else logging.WARNING if status >= 500 else logging.INFO
        LOG.log(level, Facts(method=method, path=path, status=status, ms=round(seconds * 1e3, 1)))
