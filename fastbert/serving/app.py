"""The application: routes, keys, limits on bodies, errors in each protocol's form, one line of log a request."""

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

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
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
TYPE = re.compile(r"str$|int$|(list|constrained|function-\w+)\b|[A-Z]\w*$")  # in pydantic's places
OPEN = ("/health", "/ping", "/ui")  # to all: load balancers, and the page, which asks people for a key
FORMS = {  # of errors, by the beginning of the path
    "/v1/embeddings": openai.error,
    "/v1/models": tensorflow.error,
    "/v1/rerank": rerank.error,
    "/v2/rerank": rerank.error,
}
Receive, Send = Callable[[], Awaitable[MutableMapping]], Callable[[MutableMapping], Awaitable[None]]


def create_app(service: Service, api_keys: Iterable[str] = ()) -> FastAPI:
    """The ASGI application of a service, which it closes when it ends. api_keys: without any, everybody is served."""

    if isinstance(api_keys, str):
        raise TypeError("create_app: api_keys is a string; expected several of them")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="fastbert", version=fastbert.__version__, lifespan=lifespan, **_telemetry())
    for protocol in (tei, openai, rerank, tensorflow, page):
        app.include_router(protocol.routes(service))
    app.add_exception_handler(Problem, lambda request, problem: problem_response(request, problem))
    for kind in (RequestValidationError, ValidationError):
        app.add_exception_handler(kind, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    app.add_exception_handler(Gone, lambda request, error: Response(status_code=499))  # nobody reads it
    app.add_middleware(Guard, service=service, api_keys=tuple(api_keys))
    return app


def is_open(method: str, path: str) -> bool:
    return path in OPEN or (path == "/" and method != "POST")


def path_of(scope: MutableMapping) -> str:
    """Within this application, wherever it is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


def _telemetry() -> dict[str, Any]:
    """FastAPI's own OpenTelemetry, where the environment says where to send it: spans and metrics, no texts."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP") and name.endswith("ENDPOINT") for name in os.environ):
        return {}
    require("fastapi.telemetry", "'fastapi>=0.165'")
    require("opentelemetry.sdk", "opentelemetry-sdk")
    require("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")
    return {"telemetry": {"auto_configure": True, "logs": False, "exclude": lambda scope: path_of(scope) in OPEN}}


class Facts(dict):
    """Of a request, as the message of a record of the log: JSON, or for formatters of other forms the dictionary."""

    def __str__(self) -> str:
        return json.dumps(self)


# ---- errors


def problem_response(request: Request, problem: Problem) -> Response:
    """In the form of the protocol that the path belongs to."""
    path = path_of(request.scope)
    form = next((form for start, form in FORMS.items() if path.startswith(start)), tei.error)
    return json_response(form(problem), problem.status, problem.headers)


def _invalid(request: Request, error: RequestValidationError | ValidationError) -> Response:
    """What is wrong, and where: of a field that may be several things, the furthest that it was understood."""
    found = max(error.errors(), key=lambda one: sum(isinstance(part, int) for part in one["loc"]))
    if found["type"] == "json_invalid":
        problem = Problem(400, "Validation", f"the body is no JSON: {found['ctx']['error']}")
    else:
        where = _place(found["loc"][isinstance(error, RequestValidationError) :])
        problem = Problem(422, "Validation", f"{where or 'the body'}: {found['msg']}", field=where)
    return problem_response(request, problem)


def _place(loc: tuple[str | int, ...]) -> str:
    """As in "inputs[1].text", without the names of types that pydantic puts between."""
    names = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if not TYPE.match(str(part)))
    return "".join(names).lstrip(".")


def _http(request: Request, error: HTTPException) -> Response:
    words = {404: "there is no such route", 400: "the body is no JSON in UTF-8"}
    message = error.detail if error.status_code not in words else words[error.status_code]
    return problem_response(request, Problem(error.status_code, "Validation", str(message)))


def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of this service; the log has it in full."""
    facts = Facts(path=path_of(request.scope), error=f"{type(error).__name__}: {error}")
    LOG.error(facts, exc_info=error)
    return problem_response(request, Problem(500, "Backend", "the service failed; its log says how"))


# ---- before and behind every route


def _with_kind(scope: MutableMapping) -> MutableMapping:
    """A body of no kind is JSON, and so is what `curl -d` sends to TensorFlow Serving's routes as a form."""
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
    if len(kept) < len(scope["headers"]) and not path_of(scope).startswith("/v1/models/"):
        return scope
    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}


class Guard:
    """Keys, the size and the kind of bodies, counts, and the log. In ASGI itself, so that disconnects come through."""

    def __init__(self, app: Any, service: Service, api_keys: tuple[str, ...]) -> None:
        self.app, self.service, self.keys = app, service, tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: MutableMapping, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, path = time.monotonic(), 500, path_of(scope)
        scope = _with_kind(scope)
        headers = {name.lower(): value for name, value in scope["headers"]}

        async def sending(message: MutableMapping) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            refused = self._refused(scope, headers)
            if refused:
                await problem_response(Request(scope), refused)(scope, receive, sending)
            else:
                await self.app(scope, self._limited(receive), sending)
        finally:
            self._count(scope["method"], path, status, time.monotonic() - start)

    def _refused(self, scope: MutableMapping, headers: dict[bytes, bytes]) -> Problem | None:
        key = headers.get(b"authorization", b"")
        if self.keys and not is_open(scope["method"], path_of(scope)) and not self._knows(key):
            return Problem(401, "Validation", "expected the header Authorization: Bearer KEY, with a valid key")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.service.limits.body:
            return self._too_large()
        kind = headers[b"content-type"].partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json" and not kind.endswith(b"+json"):
            given = kind.decode("latin-1")
            return Problem(415, "Validation", f"Content-Type is {given!r}; expected 'application/json'")
        return None

    def _knows(self, given: bytes) -> bool:
        """Compares with every key, whichever fits, in constant time."""
        kind, _, key = given.partition(b" ")
        fits = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return kind.lower() == b"bearer" and any(fits)

    def _too_large(self) -> Problem:
        return Problem(413, "Validation", f"the body is larger than {self.service.limits.body} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """Of bodies whose length was not said before, or that do not come."""
        limits = self.service.limits
        read, until, there = 0, time.monotonic() + limits.timeout, False

        async def limited() -> MutableMapping:
            nonlocal read, there
            try:  # what follows a body is that its client leaves, at any time
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
