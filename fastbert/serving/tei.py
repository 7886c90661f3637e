"""The routes of text-embeddings-inference, with its fields, defaults and errors; `/` does the model's own task.

Clients send one text or several, and accordingly get one result or several.
"""

import functools
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

import fastbert
from fastbert.prepared import CONFIG_ENTRY
from fastbert.serving import rerank as documents
from fastbert.serving.answers import (
    List,
    Tokens,
    best_first,
    check_text,
    embeddings,
    finite,
    json_response,
    prompted,
    scores,
    several,
    sigmoid,
)
from fastbert.serving.errors import Problem, invalid
from fastbert.serving.models import CLASSIFY, EMBED, FILL, RERANK, Lane, ServedModel
from fastbert.serving.service import CHARACTERS_PER_TOKEN, INPUTS, Service

MOST_TOKENS = 1 << 16  # in an answer of /tokenize, where each takes a hundred bytes


class Body(BaseModel):
    """Common fields. Types are strict: a number is not text. Unknown fields are ignored, as by the original."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"


class EmbedBody(Body):
    inputs: str | List[str] | Tokens | List[Tokens]
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = None


class PredictBody(Body):
    inputs: str | List[str] | List[Annotated[List[str], Field(min_length=1, max_length=2)]]
    raw_scores: bool = False


class RerankBody(Body):
    query: str
    texts: List[str]
    raw_scores: bool = False
    return_text: bool = False


class Similar(BaseModel):
    source_sentence: str
    sentences: List[str]


class SimilarOptions(BaseModel):
    truncate: bool | None = None
    prompt_name: str | None = None


class SimilarityBody(BaseModel):
    inputs: Similar
    parameters: SimilarOptions | None = None
    model: str | None = None


class TokenizeBody(Body):
    inputs: str | List[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeBody(Body):
    ids: Tokens | List[Tokens]
    skip_special_tokens: bool = True


def error(problem: Problem) -> dict[str, str]:
    return {"error": problem.message, "error_type": problem.kind}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["text-embeddings-inference"])

    @router.post("/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        inputs = several(body.inputs)
        service.check("inputs", inputs)
        model = service.model(body.model, EMBED)
        options = {"normalize": body.normalize, "dimensions": body.dimensions, "prompt_name": body.prompt_name}
        vectors, _ = await embeddings(
            service, request, model, inputs, truncate=service.truncates(body.truncate), **options
        )
        return json_response(vectors)

    @router.post("/predict")
    async def predict(body: PredictBody, request: Request) -> Response:
        results, single = await classes(service, request, body, body.raw_scores)
        return json_response(results[0] if single else results)

    @router.post("/rerank")
    async def rerank(body: dict[str, Any], request: Request) -> Response:
        """This, or with `documents` in place of `texts` the route of vLLM, Jina and Cohere."""
        if "documents" in body and "texts" not in body:
            return await documents.answer(service, request, documents.RerankBody.model_validate(body))
        return await ranked(service, request, RerankBody.model_validate(body))

    @router.post("/similarity")
    async def similarity(body: SimilarityBody, request: Request) -> Response:
        inputs, options = body.inputs, body.parameters or SimilarOptions()
        texts = [inputs.source_sentence, *inputs.sentences]
        service.check("inputs.sentences", inputs.sentences)
        service.check("inputs.source_sentence", texts[:1])
        model = service.model(body.model, EMBED)
        found, _ = await embeddings(
            service, request, model, texts, truncate=service.truncates(options.truncate), normalize=True,
            prompt_name=options.prompt_name, field="texts",
        )  # fmt: skip
        return json_response(found[1:] @ found[0])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        inputs = several(body.inputs)
        service.check("inputs", inputs)
        model = service.model(body.model)
        texts = prompted(model, inputs, body.prompt_name)[0] if EMBED in model.predictors else inputs
        check_text("inputs", texts)
        call = functools.partial(tokenized, model.any.tokenizer, texts, body.add_special_tokens)
        return await service.tokenized(request, sum(map(len, texts)), call)

    @router.post("/decode")
    async def decode(body: DecodeBody, request: Request) -> Response:
        ids = several(body.ids)
        service.check("ids", ids)
        served = service.model(body.model).any
        vocabulary = served.model.config.vocab_size
        if wrong := [token for row in ids for token in row if not 0 <= token < vocabulary]:
            raise invalid("ids", f"has {wrong[0]}; expected 0 to {vocabulary - 1}")
        decode = functools.partial(served.tokenizer.decode_batch, ids, skip_special_tokens=body.skip_special_tokens)
        return json_response(await service.tokenized(request, CHARACTERS_PER_TOKEN * sum(map(len, ids)), decode))

    @router.post("/")
    async def root(body: dict[str, Any], request: Request) -> Response:
        """What the model does: as `/embed`, `/similarity`, `/predict` or `/rerank`, else Hugging Face's task of the
        model; its task too, with `parameters`, of classes."""
        model = service.model(Body.model_validate(body).model)
        if model.task == EMBED and isinstance(body.get("inputs"), dict):
            return await similarity(SimilarityBody.model_validate(body), request)
        if model.task == CLASSIFY and body.get("parameters") is not None:
            asked = ClassesBody.model_validate(body)
            raw = asked.raw_scores or asked.parameters.function_to_apply == "none"
            return json_response((await classes(service, request, asked, raw, asked.parameters.top_k))[0])
        if model.task == EMBED:
            return await embed(EmbedBody.model_validate(body), request)
        if model.task == CLASSIFY:
            return await predict(PredictBody.model_validate(body), request)
        if model.task == RERANK:
            return await rerank(body, request)
        return await task(service, request, model, TaskBody.model_validate(body))

    reports(router, service)
    return router


def reports(router: APIRouter, service: Service) -> None:
    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    @router.api_route("/ping", methods=["GET", "HEAD"], include_in_schema=False)
    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        if why := service.queue.stalled:
            raise Problem(503, "Unhealthy", why)
        return Response(status_code=200)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/info")
    async def info(model: str | None = None) -> Response:
        return json_response(info_of(service, service.model(model)))


async def ranked(service: Service, request: Request, body: RerankBody) -> Response:
    service.check("texts", body.texts)
    service.check("query", [body.query])
    model = service.model(body.model, RERANK)
    found, _ = await scores(service, request, model, body.query, body.texts, truncate=service.truncates(body.truncate))
    order, found = best_first(found), found if body.raw_scores else sigmoid(found)
    text_of = lambda i: {"text": body.texts[i]} if body.return_text else {}  # noqa: E731
    return json_response([{"index": i, "score": found[i], **text_of(i)} for i in order])


async def classes(
    service: Service, request: Request, body: PredictBody, raw: bool, top_k: int | None = None
) -> tuple[list[list[dict[str, Any]]], bool]:
    """Returns the classes of each text or pair, best first, and whether the request had a single input, not a list."""
    inputs, single = sequences(body.inputs)
    service.check("inputs", inputs)
    model = service.model(body.model, CLASSIFY)
    lane = Lane(model.at(CLASSIFY), options=(("raw", raw), ("top_k", top_k)))
    found = await service.run(request, model, CLASSIFY, inputs, lane, truncate=service.truncates(body.truncate))
    finite(found.results)
    return [[{"score": one.score, "label": one.label} for one in labels] for labels in found.results], single


def sequences(inputs: str | list) -> tuple[list[str | tuple[str, str]], bool]:
    """Returns the texts and pairs, and whether the input was a single one: "text", or ["text", "its pair"]."""
    if isinstance(inputs, str):
        return [inputs], True
    if inputs and isinstance(inputs[0], str):
        if len(inputs) > 2:
            raise invalid("inputs", f"a text or a pair has {len(inputs)} parts; expected [[text], [text, pair], ...]")
        return [inputs[0] if len(inputs) == 1 else tuple(inputs)], True
    return [one[0] if len(one) == 1 else tuple(one) for one in inputs], False


def tokenized(tokenizer: Any, texts: list[str], special: bool) -> Response:
    """The response of /tokenize. Raises Problem (413) for more tokens than an answer may have."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=special)
    if (count := sum(map(len, encodings))) > MOST_TOKENS:
        raise Problem(413, "Validation", f"inputs have {count} tokens; expected at most {MOST_TOKENS}")
    return json_response([tokens_of(text, encoding) for text, encoding in zip(texts, encodings, strict=True)])


def tokens_of(text: str, encoding: Any) -> list[dict[str, Any]]:
    """The tokens of a text. start and stop: in characters; None for special tokens."""
    columns = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    return [
        {"id": token, "text": name if special else text[start:stop], "special": bool(special)}
        | {"start": None if special else start, "stop": None if special else stop}
        for token, name, special, (start, stop) in columns
    ]


def info_of(service: Service, model: ServedModel) -> dict[str, Any]:
    config, limits = model.any.model.config, service.limits
    parameter, precision = next(model.any.model.parameters()), config.extra.get(CONFIG_ENTRY, {}).get("precision")
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": precision or str(parameter.dtype).removeprefix("torch."),
        "model_type": kind_of(model, config),
        "models": {name: list(served.predictors) for name, served in service.models.items()},
        "max_concurrent_requests": limits.requests,
        "max_waiting_tokens": limits.waiting_tokens,
        "max_input_length": model.max_length,
        "max_batch_tokens": service.queue.batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.inputs or INPUTS,
        "auto_truncate": service.auto_truncate,
        "version": fastbert.__version__,
    }


def kind_of(model: ServedModel, config: Any) -> dict[str, Any]:
    if model.task == EMBED:
        return {"embedding": {"pooling": model.any.pooling}}
    labels = {str(i): name for i, name in enumerate(fastbert.inference.label_names(config))}
    if kind := {RERANK: "reranker", CLASSIFY: "classifier"}.get(model.task):
        return {kind: {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}}
    return {model.task: {}}


# ---- tasks that text-embeddings-inference lacks, with Hugging Face's fields


FILLS, MOST_FILLS = 5, 100  # for each mask: the default of top_k, and its maximum
MOST_CHARACTERS = 10_000_000  # in an answer, where each fill repeats the whole text


class TaskParameters(BaseModel):
    top_k: Annotated[int, Field(ge=1)] | None = None


class ClassParameters(TaskParameters):
    """function_to_apply: None for the model's own function, or "none" for raw scores."""

    model_config = ConfigDict(extra="forbid")
    function_to_apply: Literal["none"] | None = None


class ClassesBody(PredictBody):
    parameters: ClassParameters


class TaskBody(Body):
    inputs: str | List[str]
    parameters: TaskParameters | None = None
    truncate: bool | None = None


async def task(service: Service, request: Request, model: ServedModel, body: TaskBody) -> Response:
    """Fills masks ({score, token, token_str, sequence}) or finds entities ({entity_group, score, word, start, end}).

    One text gives a list, several texts give a list of lists; a text with several masks gives a list for each mask.
    """
    inputs = several(body.inputs)
    service.check("inputs", inputs)
    count = (body.parameters and body.parameters.top_k) or FILLS
    if model.task == FILL:
        if count > (most := min(MOST_FILLS, model.any.config.vocab_size)):
            raise invalid("parameters.top_k", f"is {count}; expected 1 to {most}")
        check_fills(model, "inputs", inputs, count)
    lane = Lane(model.any, options=(("top_k", count),) if model.task == FILL else ())
    found = await service.run(request, model, model.task, inputs, lane, truncate=service.truncates(body.truncate))
    finite(found.results)
    results = [filled(masks) for masks in found.results] if model.task == FILL else list(map(tagged, found.results))
    return json_response(results[0] if isinstance(body.inputs, str) else results)


def check_fills(model: ServedModel, field: str, texts: list[str], count: int = FILLS) -> None:
    """Raises Problem (413) if `count` fills for each mask would make the answer too large."""
    mask = model.any.tokenizer.id_to_token(model.any.mask_id)
    if (found := sum(count * text.count(mask) * len(text) for text in texts)) > MOST_CHARACTERS:
        what = f"has masks whose fills, each with the whole text, have {found} characters"
        raise invalid(field, f"{what}; expected at most {MOST_CHARACTERS}", 413)


def filled(masks: list[list[Any]]) -> list:
    found = [
        [{"score": x.score, "token": x.token_id, "token_str": x.token, "sequence": x.text} for x in fills]
        for fills in masks
    ]
    return found[0] if len(found) == 1 else found


def tagged(entities: list[Any]) -> list[dict[str, Any]]:
    return [
        {"entity_group": e.label, "score": e.score, "word": e.text, "start": e.start, "end": e.end} for e in entities
    ]
