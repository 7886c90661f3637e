"""The rerank routes of Cohere (v1 and v2), Jina and vLLM: /v1/rerank, /v2/rerank, and /rerank with `documents`."""

import uuid
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from fastbert.serving.answers import List, best_first, json_response, scores, sigmoid
from fastbert.serving.errors import Problem, invalid
from fastbert.serving.models import RERANK
from fastbert.serving.service import Service

DOCUMENTS = 1000  # in a request; Cohere advises against more


class Document(BaseModel):
    text: str


class RerankBody(BaseModel):
    """Longer documents are cut where the model ends; Cohere's max_tokens_per_doc may not ask for shorter ones."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    query: str
    documents: List[str | Document]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = False
    max_tokens_per_doc: int | None = None


def error(problem: Problem) -> dict[str, Any]:
    return {"message": problem.message, "detail": problem.message, "id": str(uuid.uuid4())}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["rerank"])

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(body: RerankBody, request: Request) -> Response:
        return await answer(service, request, body)

    return router


async def answer(service: Service, request: Request, body: RerankBody) -> Response:
    """The top_n best documents, best first. relevance_score: the sigmoid of the model's logit."""
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    service.check("documents", texts, DOCUMENTS)
    service.check("query", [body.query])
    model = service.model(body.model, RERANK)
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < model.max_length:
        what = f"is {body.max_tokens_per_doc}; expected at least the model's length, {model.max_length}, or none"
        raise invalid("max_tokens_per_doc", what)
    found, tokens = await scores(service, request, model, body.query, texts, truncate=True, field="documents")
    order, found = best_first(found)[: body.top_n], sigmoid(found)  # sorted by logits: sigmoids of large ones are equal
    results = [
        {"index": i, "relevance_score": found[i]} | ({"document": {"text": texts[i]}} if body.return_documents else {})
        for i in order
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response(
        {"id": str(uuid.uuid4()), "model": model.name, "results": results, "usage": usage, "meta": meta}
    )
