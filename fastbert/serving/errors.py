"""Errors of requests, each with an HTTP status and a message for the client."""

import math


class Problem(Exception):
    """An error for the client. status: the HTTP status. kind: text-embeddings-inference's error_type: "Validation",
    "Tokenizer", "Backend", "Overloaded" or "Unhealthy". field: the request's wrong field. retry_after: seconds."""

    def __init__(
        self, status: int, kind: str, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.field = status, kind, message, field
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}


def invalid(field: str, message: str, status: int = 422) -> Problem:
    return Problem(status, "Validation", f"{field}: {message}", field=field)


def shutting_down() -> Problem:
    return Problem(503, "Unhealthy", "the service is shutting down")
