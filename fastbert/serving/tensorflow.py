"""TensorFlow Serving's REST routes: status, metadata, and predict in rows (`instances`) or in columns (`inputs`).

A row is a text, or {"text": ..., "pair": ...}; columns are {"text": [...], "pair": [...]}, or the texts alone.
"""

from typing import Any

import torch
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from fastbert.serving import openai
from fastbert.serving.answers import checked, embeddings, finite, json_response, sigmoid
from fastbert.serving.errors import Problem, invalid
from fastbert.serving.models import CLASSIFY, EMBED, FILL, RERANK, Lane, ServedModel
from fastbert.serving.service import Service
from fastbert.serving.tei import check_fills, filled, tagged


class PredictBody(BaseModel):
    signature_name: str | None = None
    instances: list[Any] | None = None
    inputs: Any = None


def error(problem: Problem) -> dict[str, str]:
    return {"error": problem.message}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["TensorFlow Serving"])

    # The decorator next to a function registers first, so the longer path is tried first: a name may have slashes, and
    # in the shorter path it would include what follows it.
    @router.post("/v1/models/{name:path}:predict")
    @router.post("/v1/models/{name:path}/versions/{version}:predict")
    async def predict(name: str, body: PredictBody, request: Request, version: str = "1") -> Response:
        model = versioned(service, name, version)
        inputs, field = rows_of(body)
        service.check(field, inputs)
        results = await predictions(service, request, model, inputs, field)
        return json_response({"predictions" if field == "instances" else "outputs": results})

    @router.get("/v1/models/{name:path}/metadata")
    @router.get("/v1/models/{name:path}/versions/{version}/metadata")
    def metadata(name: str, version: str = "1") -> Response:
        model = versioned(service, name, version)
        text = {"dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": "-1"}], "unknown_rank": False}, "name": "text"}
        signature = {"inputs": {"text": text}, "outputs": {}, "method_name": f"fastbert/{model.task}"}
        spec = {"name": model.name, "signature_name": "", "version": "1"}
        found = {"signature_def": {"signature_def": {"serving_default": signature}}}
        return json_response({"model_spec": spec, "metadata": found})

    @router.get("/v1/models/{name:path}")
    @router.get("/v1/models/{name:path}/versions/{version}")
    def status(name: str, version: str = "1") -> Response:
        """And what OpenAI's clients ask for by the first of these paths: each ignores the other's fields."""
        versioned(service, name, version)
        state = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        return json_response({"model_version_status": [state], **openai.model_of(name)})

    return router


def versioned(service: Service, name: str, version: str) -> ServedModel:
    """The model of that name. Raises Problem for a version other than 1, the only one."""
    model = service.model(name)
    if version != "1":
        raise Problem(404, "Validation", f"{name} has no version {version}; expected 1")
    return model


def rows_of(body: PredictBody) -> tuple[list[str | tuple[str, str]], str]:
    """Returns the texts and pairs, and the name of the field that they came in."""
    if (body.instances is None) == (body.inputs is None):
        raise invalid("instances", "or inputs is expected, one of the two")
    if body.signature_name not in (None, "", "serving_default"):
        raise invalid("signature_name", f"is {body.signature_name!r}; expected 'serving_default'")
    field = "inputs" if body.instances is None else "instances"
    rows = body.instances if body.instances is not None else of_columns(body.inputs)
    return [text_of(row, f"{field}[{i}]") for i, row in enumerate(rows)], field


def of_columns(inputs: Any) -> list[Any]:
    columns = inputs if isinstance(inputs, dict) else {"text": inputs}
    columns = {name: column if isinstance(column, list) else [column] for name, column in columns.items()}
    if len(set(map(len, columns.values()))) > 1:
        raise invalid("inputs", f"has columns of {[len(column) for column in columns.values()]} rows; expected as many")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def text_of(row: Any, field: str) -> str | tuple[str, str]:
    row = {"text": row} if isinstance(row, str) else row
    if not isinstance(row, dict) or row.keys() not in ({"text"}, {"text", "pair"}):
        raise invalid(field, 'expected a text, {"text": ...} or {"text": ..., "pair": ...}')
    for name, value in row.items():
        if not isinstance(value, str):
            raise invalid(f"{field}.{name}", f"is a {type(value).__name__}; expected text")
    return (row["text"], row["pair"]) if "pair" in row else row["text"]


async def predictions(service: Service, request: Request, model: ServedModel, inputs: list, field: str) -> Any:
    """Returns for each row an embedding, class probabilities by label, a pair's score, entities, or fills."""
    pairs = [isinstance(one, tuple) for one in inputs]
    if model.task == RERANK and not all(pairs):
        raise invalid(f"{field}[{pairs.index(False)}]", 'is one text; a reranker takes {"text": ..., "pair": ...}')
    if model.task not in (RERANK, CLASSIFY) and any(pairs):
        raise invalid(f"{field}[{pairs.index(True)}]", f"is a pair; {model.task} is of one text")
    if model.task == EMBED:
        return (await embeddings(service, request, model, inputs, truncate=service.truncates(None), field=field))[0]
    if model.task == FILL:
        check_fills(model, field, inputs)
    options = {"truncate": service.truncates(None), "field": field}
    found = await service.run(request, model, model.task, inputs, Lane(model.any), **options)
    if model.task == RERANK:
        return sigmoid(checked(torch.stack(found.results).squeeze(-1)))
    finite(found.results)
    if model.task == CLASSIFY:
        return [{label.label: label.score for label in labels} for labels in found.results]
    return [filled(masks) for masks in found.results] if model.task == FILL else list(map(tagged, found.results))
