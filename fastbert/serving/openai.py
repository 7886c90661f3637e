"""OpenAI's /v1/embeddings and /v1/models."""

import base64
import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from fastbert.serving.answers import List, Tokens, embeddings, json_response, several
from fastbert.serving.errors import Problem
from fastbert.serving.models import EMBED
from fastbert.serving.service import Service

INPUTS = 2048  # of OpenAI's own service
BEGAN = int(time.time())
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


class EmbeddingsBody(BaseModel):
    """Token ids are the model's own, special ones included: they are embedded as they are."""

    model_config = ConfigDict(strict=True)
    input: str | List[str] | Tokens | List[Tokens]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    user: str | None = None


def error(problem: Problem) -> dict[str, Any]:
    kind = TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(problem.status)
    return {"error": {"message": problem.message, "type": kind, "param": problem.field, "code": code}}


def model_of(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": BEGAN, "owned_by": "fastbert"}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/embeddings")
    async def embed(body: EmbeddingsBody, request: Request) -> Response:
        inputs = several(body.input)
        service.check("input", inputs, INPUTS)
        model = service.model(body.model, EMBED)
        vectors, tokens = await embeddings(
            service, request, model, inputs, truncate=service.truncates(None), dimensions=body.dimensions, field="input"
        )
        if body.encoding_format == "base64":  # of little-endian float32
            vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})

    @router.get("/v1/models")
    def models() -> Response:
        return json_response({"object": "list", "data": list(map(model_of, service.models))})

    return router
