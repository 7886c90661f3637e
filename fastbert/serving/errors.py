"""What goes wrong with a request, as a status and words for its client."""

import math


class Problem(Exception):
    """status: of HTTP. kind: the error_type of text-embeddings-inference: "Validation", "Tokenizer", "Backend",
    "Overloaded" or "Unhealthy". field: of the request that is wrong. retry_after: seconds."""

    def __init__(
        self, status: int, kind: str, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.field = status, kind, message, field
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}


def invalid(field: str, message: str, status: int = 422) -> Problem:
    return Problem(status, "Validation", f"{field}: {message}", field=field)
