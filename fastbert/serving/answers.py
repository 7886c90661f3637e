"""Helpers that the routes of all protocols share: JSON responses, embeddings, scores, and checks of values."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
import orjson
import torch
import torch.nn.functional as F
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from fastbert.data.tokenizer import text_of
from fastbert.serving.errors import Problem, invalid
from fastbert.serving.models import EMBED, RERANK, Lane, ServedModel
from fastbert.serving.service import Found, Service

T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # reports the first wrong entry, not each of thousands
Tokens = Annotated[List[int], Field(min_length=1)]  # the token ids of one text


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; NumPy arrays become lists."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, media_type="application/json")


async def embeddings(
    service: Service,
    request: Request,
    model: ServedModel,
    inputs: Sequence[Any],
    *,
    truncate: bool,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    field: str = "inputs",
) -> tuple[np.ndarray, int]:
    """Returns the (N, C) float32 embeddings of texts or of lists of token ids, and the total number of tokens.

    normalize: None for the model's own setting. dimensions: keeps only the first ones, before normalising.
    """
    encoder, are_texts = model.at(EMBED), isinstance(inputs[0], str)
    width, normalize = encoder.width, encoder.normalize if normalize is None else normalize
    if dimensions is not None and not 0 < dimensions <= width:
        raise invalid("dimensions", f"is {dimensions}; expected 1 to {width}")
    if prompt_name is not None and not are_texts:
        raise invalid("prompt_name", "is for texts; token ids are embedded as they are")
    texts, skip = prompted(model, inputs, prompt_name) if are_texts else (inputs, 0)
    lane = Lane(encoder, "embed", (("normalize", False), ("skip", skip)))
    found = await service.run(request, model, EMBED, texts, lane, truncate=truncate, field=field)
    vectors = torch.stack(found.results)[:, :dimensions]
    vectors = F.normalize(vectors, dim=-1) if normalize else vectors
    return checked(vectors), found.tokens


def prompted(model: ServedModel, texts: Sequence[str], name: str | None) -> tuple[Sequence[str], int]:
    """Returns the texts with the named (or default) prompt before each text, and how many tokens the pooling skips."""
    try:
        prompt, skip = model.at(EMBED).prompt_of(name)
    except ValueError as error:
        raise invalid("prompt_name", str(error)) from None
    return [prompt + text for text in texts] if prompt else texts, skip


async def scores(
    service: Service,
    request: Request,
    model: ServedModel,
    query: str,
    texts: Sequence[str],
    *,
    truncate: bool,
    field: str = "texts",
) -> tuple[np.ndarray, int]:
    """Returns the (N,) float32 logits of a reranker, and the total number of tokens."""
    pairs = [(query, text) for text in texts]
    lane = Lane(model.at(RERANK))
    found: Found = await service.run(request, model, RERANK, pairs, lane, truncate=truncate, field=field)
    return checked(torch.stack(found.results).squeeze(-1)), found.tokens


def checked(values: torch.Tensor) -> np.ndarray:
    """Returns the values as a NumPy array. Raises Problem for NaN and infinity, which JSON cannot represent."""
    if not values.isfinite().all():
        wrong = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
        raise Problem(424, "Backend", f"the model's result for input {wrong} is not finite")
    return np.ascontiguousarray(values.numpy())


def check_text(field: str, texts: Sequence[str]) -> None:
    """Raises Problem (422) for a text that contains half a surrogate pair."""
    for index, text in enumerate(texts):
        try:
            text_of("", field, text)
        except ValueError:
            raise invalid(f"{field}[{index}]", "has half a surrogate pair; expected text in Unicode") from None


def several(inputs: str | list) -> list:
    """Wraps a single text, or the token ids of a single text, in a list; returns a list of inputs unchanged."""
    return [inputs] if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)) else inputs


def finite(results: Sequence[Sequence[Any]]) -> None:
    """Raises Problem for labels, entities or fills with NaN or infinite scores, which JSON cannot represent."""
    for index, found in enumerate(results):
        flat = (one for part in found for one in (part if isinstance(part, list) else [part]))
        if not all(math.isfinite(one.score) for one in flat):
            raise Problem(424, "Backend", f"the model's result for input {index} is not finite")


def best_first(found: np.ndarray) -> list[int]:
    """The indices by descending score; equal scores keep their order."""
    return np.argsort(-found, kind="stable").tolist()


def sigmoid(found: np.ndarray) -> np.ndarray:
    return torch.from_numpy(found).sigmoid().numpy()
