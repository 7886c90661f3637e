"""A page at /ui to try the models with (one file, which loads nothing else from the network), and its own routes."""

import base64
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

import fastbert
from fastbert.inference.plots import attention_weights
from fastbert.serving.answers import check_text, json_response
from fastbert.serving.errors import invalid
from fastbert.serving.models import FILL, ServedModel
from fastbert.serving.service import INPUTS, Service

PAGE = Path(__file__).with_name("page.html")
MOST_TOKENS = 64  # in a text whose attention is drawn
# The page's script and style are inline; it connects only to this service, and must not be framed.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
POLICY += "; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class AttentionBody(BaseModel):
    model_config = ConfigDict(strict=True)
    inputs: str
    model: str | None = None


@dataclass(frozen=True)
class AttentionLane:
    """A lane of the queue that computes attention weights from the token ids of each text."""

    predictor: Any

    def compute(self, rows: Sequence[list[int]]) -> list[Tensor]:
        return [attention_weights(self.predictor.model, ids) for ids in rows]


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["page"])

    @router.get("/ui", include_in_schema=False)
    def page() -> Response:
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return Response(PAGE.read_bytes(), headers=headers, media_type="text/html; charset=utf-8")

    @router.get("/ui/models")
    def models() -> Response:
        served = service.models.values()
        return json_response(
            {
                "version": fastbert.__version__,
                "models": {model.name: list(model.predictors) for model in served},
                "tokens": {model.name: tokens_of(model) for model in served},
                "max_client_batch_size": service.limits.inputs or INPUTS,
            }
        )

    @router.post("/ui/attention")
    async def attention(body: AttentionBody, request: Request) -> Response:
        """tokens, and weights in base64, float32 of shape (layers, heads, T, T)."""
        service.check("inputs", [body.inputs])
        predictor = service.model(body.model).any
        check_text("inputs", [body.inputs])
        encode = functools.partial(predictor.tokenizer.encode, body.inputs)
        encoding = await service.tokenized(request, len(body.inputs), encode)
        length, most = len(encoding.ids), min(MOST_TOKENS, predictor.max_length)
        if length <= sum(encoding.special_tokens_mask):
            raise invalid("inputs", "has no words; expected text")
        if length > most:
            raise invalid("inputs", f"has {length} tokens; expected at most {most}", 413)
        found = await service.compute(request, AttentionLane(predictor), [encoding.ids], [length])
        weights = found.results[0]
        data = base64.b64encode(weights.numpy().astype("<f4").tobytes()).decode()
        return json_response({"tokens": encoding.tokens, "shape": list(weights.shape[:3]), "weights": data})

    return router


def tokens_of(model: ServedModel) -> dict[str, str]:
    if FILL not in model.predictors:
        return {}
    filler = model.at(FILL)
    return {"mask": filler.tokenizer.id_to_token(filler.mask_id)}
