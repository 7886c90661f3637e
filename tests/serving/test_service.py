"""The service over a real socket: its answers equal the predictors' results, and it refuses bad requests."""

import base64
import http.client
import json
import logging
import math
import re
import socket
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from serving.over_http import NAMES, fastapi, httpx, listening
from serving.served import ROUNDING, TEXTS, in_threads, same, wait_for

from fastbert.inference import (
    CrossEncoder,
    Entity,
    EntityTagger,
    Fill,
    Label,
    MaskFiller,
    SentenceEncoder,
    TextClassifier,
)
from fastbert.serving import Limits, Service, create_app, load, openai, tei
from fastbert.serving.models import ServedModel

LIMITS = Limits(inputs=8, body=20_000, timeout=20.0)


@pytest.fixture(scope="module")
def service(directory):
    return Service([load(directory / name) for name in NAMES], LIMITS)


@pytest.fixture(scope="module")
def client(service):
    with listening(create_app(service)) as address, httpx.Client(base_url=address, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def post(client):
    def send(path, status=200, **body):
        response = client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    return send


@pytest.fixture(scope="module")
def encoder(directory):
    return SentenceEncoder.from_pretrained(directory / "sentences")


# ---- text-embeddings-inference


def test_no_thread_that_loaded_a_model_stays(directory, monkeypatch):
    """Its OpenMP threads would stay too, and would make those of the inference sleep after each loop."""
    loaders, read = [], SentenceEncoder.from_pretrained

    def noted(*args, **options):
        loaders.append(threading.current_thread())
        return read(*args, **options)

    monkeypatch.setattr(SentenceEncoder, "from_pretrained", noted)
    load(directory / "sentences")
    assert loaders and not any(thread.is_alive() for thread in loaders)


def test_embed(post, encoder):
    raw = encoder.encode(TEXTS)
    same(post("/embed", inputs=TEXTS), F.normalize(raw, dim=-1))
    same(post("/embed", inputs=TEXTS, normalize=False), raw)
    same(post("/embed", inputs=TEXTS, dimensions=5), F.normalize(raw[:, :5], dim=-1))
    same(post("/embed", inputs=TEXTS, normalize=False, dimensions=5), raw[:, :5])
    same(post("/embed", inputs=TEXTS[0]), F.normalize(raw[:1], dim=-1))
    same(post("/embed", inputs=TEXTS, normalize=False, prompt_name="query"), encoder.encode(TEXTS, prompt_name="query"))
    same(post("/", inputs=TEXTS, normalize=False), raw)


def test_embed_token_ids(post, encoder):
    ids = encoder.tokenize(TEXTS[:2])
    same(post("/embed", inputs=ids, normalize=False), encoder.encode(TEXTS[:2]))
    same(post("/embed", inputs=ids[1], normalize=False), encoder.encode(TEXTS[1:2]))


def test_a_prompt_that_the_pooling_leaves_out(directory, encoder):
    options = {"prompts": encoder.prompts, "default_prompt_name": "query", "include_prompt": False}
    without = SentenceEncoder(encoder.model, encoder.tokenizer, **options)
    without.save_pretrained(directory / "without")
    ids = without.tokenize(TEXTS)
    app = create_app(Service([load(directory / "without")], LIMITS))
    with listening(app) as address:
        found = httpx.post(f"{address}/embed", json={"inputs": TEXTS, "prompt_name": "query"}).json()
        plain = httpx.post(f"{address}/embed", json={"inputs": TEXTS}).json()
        tokens = httpx.post(f"{address}/embed", json={"inputs": ids}).json()
    same(tokens, without.embed(ids))
    same(found, without.encode(TEXTS, prompt_name="query"))
    same(plain, without.encode(TEXTS))


def test_similarity(post, encoder):
    body = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    vectors = F.normalize(encoder.encode(TEXTS), dim=-1)
    same(post("/similarity", inputs=body), vectors[1:] @ vectors[0])
    vectors = F.normalize(encoder.encode(TEXTS, prompt_name="query"), dim=-1)
    same(post("/similarity", inputs=body, parameters={"prompt_name": "query"}), vectors[1:] @ vectors[0])


def test_rerank(post, directory):
    truth = CrossEncoder.from_pretrained(directory / "reranker", activation="Identity")
    logits = truth.predict([("rain?", text) for text in TEXTS])
    order = logits.argsort(descending=True).tolist()
    found = post("/rerank", query="rain?", texts=TEXTS, raw_scores=True, return_text=True)
    assert [one["index"] for one in found] == order and [one["text"] for one in found] == [TEXTS[i] for i in order]
    same([one["score"] for one in found], logits[order])
    found = post("/rerank", query="rain?", texts=TEXTS)
    same([one["score"] for one in found], logits[order].sigmoid())
    assert all(one.keys() == {"index", "score"} for one in found)


def test_predict(post, directory):
    truth = TextClassifier.from_pretrained(directory / "classes")
    pair = (TEXTS[0], TEXTS[1])

    def shown(labels):
        return [label.label for label in labels], [label.score for label in labels]

    def check(found, labels):
        names, scores = shown(labels)
        assert [one["label"] for one in found] == names
        same([one["score"] for one in found], scores)

    check(post("/predict", inputs=TEXTS[0]), truth([TEXTS[0]])[0])
    check(post("/predict", inputs=[TEXTS[0]]), truth([TEXTS[0]])[0])
    check(post("/predict", inputs=list(pair)), truth([pair])[0])
    for found, labels in zip(post("/predict", inputs=[[TEXTS[2]], list(pair)]), truth([TEXTS[2], pair]), strict=True):
        check(found, labels)
    raw = {one["label"]: one["score"] for one in post("/predict", inputs=TEXTS[0], raw_scores=True)}
    scores = torch.tensor([raw["good"], raw["bad"]]).softmax(0)
    expected = {label.label: label.score for label in truth([TEXTS[0]])[0]}
    same(scores, [expected["good"], expected["bad"]])


def test_masks_and_entities(post, directory):
    text = f"The [MASK] sits. {TEXTS[1]}"
    truth = MaskFiller.from_pretrained(directory / "masks")([text], top_k=3)[0][0]
    found = post("/", model="masks", inputs=text, parameters={"top_k": 3})
    assert [(one["token"], one["token_str"], one["sequence"]) for one in found] == [
        (fill.token_id, fill.token, fill.text) for fill in truth
    ]
    same([one["score"] for one in found], [fill.score for fill in truth])
    two = post("/", model="masks", inputs=["[MASK] and [MASK]", text])
    assert [len(two[0]), len(two[0][0]), len(two[1])] == [2, 5, 5]

    entities = EntityTagger.from_pretrained(directory / "tags")(TEXTS)
    found = post("/", model="tags", inputs=TEXTS)
    assert any(entities)
    for ours, theirs in zip(found, entities, strict=True):
        assert [(e["entity_group"], e["word"], e["start"], e["end"]) for e in ours] == [
            (e.label, e.text, e.start, e.end) for e in theirs
        ]


def test_tokens(post, encoder):
    (found,) = post("/tokenize", inputs=TEXTS[2])
    assert [one["id"] for one in found] == encoder.tokenize([TEXTS[2]])[0]
    assert found[0] == {"id": found[0]["id"], "text": "[CLS]", "special": True, "start": None, "stop": None}
    inner = [one for one in found if not one["special"]]
    assert all(one["text"] == TEXTS[2][one["start"] : one["stop"]] for one in inner) and inner
    assert [one["id"] for one in post("/tokenize", inputs=TEXTS[2], add_special_tokens=False)[0]] == [
        one["id"] for one in inner
    ]
    ids = [one["id"] for one in found]
    assert post("/decode", ids=ids) == [encoder.tokenizer.decode(ids)]
    whole = post("/decode", ids=ids, skip_special_tokens=False)
    assert whole == [encoder.tokenizer.decode(ids, skip_special_tokens=False)] and whole[0].startswith("[CLS]")
    (prompted,) = post("/tokenize", inputs=TEXTS[1], prompt_name="query")
    assert [one["id"] for one in prompted] == encoder.tokenize([encoder.prompts["query"] + TEXTS[1]])[0]


def test_reports(client, service):
    assert client.get("/health").status_code == client.get("/ping").status_code == 200
    info = client.get("/info").json()
    assert info["model_id"] == "sentences" and info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"], info["model_dtype"]) == (32, 8, "float64")
    assert info["max_waiting_tokens"] == LIMITS.waiting_tokens
    assert info["max_batch_tokens"] == (16384 if service.models["sentences"].any.device.type == "cuda" else 4096)
    assert client.get("/info", params={"model": "classes"}).json()["model_type"] == {
        "classifier": {"id2label": {"0": "good", "1": "bad"}, "label2id": {"good": 0, "bad": 1}}
    }
    before = metrics(client)
    client.post("/embed", json={"inputs": TEXTS}).raise_for_status()
    assert client.post("/embed", json={"inputs": 7}).status_code == 422
    after = metrics(client)
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert grown['te_request_count{method="batch"}'] == 2 and grown['te_request_success{method="batch"}'] == 1
    assert grown['te_request_failure{err="422"}'] == 1 and grown["te_request_inference_duration_count"] == 1
    assert grown["te_request_input_length_count"] == 4 == grown["te_batch_next_size_sum"]
    tokens = sum(map(len, service.models["sentences"].any.tokenize(TEXTS)))
    assert grown["te_batch_next_tokens_sum"] == tokens == grown["te_request_input_length_sum"]


def metrics(client):
    lines = (line for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


# ---- OpenAI, Cohere and similar APIs, TensorFlow Serving


def test_openai(post, client, encoder):
    raw = encoder.encode(TEXTS)
    found = post("/v1/embeddings", input=TEXTS, model="sentences")
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3] and found["model"] == "sentences"
    same([one["embedding"] for one in found["data"]], raw)
    tokens = sum(map(len, encoder.tokenize(TEXTS)))
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    packed = post("/v1/embeddings", input=TEXTS, encoding_format="base64", dimensions=3)["data"]
    same([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed], raw[:, :3])
    same(post("/v1/embeddings", input=encoder.tokenize(TEXTS)[1])["data"][0]["embedding"], raw[1])
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == list(NAMES)
    wrong = post("/v1/embeddings", 404, input="a", model="ada")["error"]
    assert (wrong["code"], wrong["param"], wrong["type"]) == ("model_not_found", "model", "not_found_error")
    assert "sentences" in wrong["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_of_others(post, path):
    logits = {one["index"]: one["score"] for one in post("/rerank", query="rain?", texts=TEXTS)}
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    found = post(path, query="rain?", documents=documents, top_n=3, return_documents=True, model="reranker")
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert list(scores) == sorted(logits, key=lambda i: -logits[i])[:3]
    same(list(scores.values()), [logits[i] for i in scores])
    assert all(one["document"]["text"] == TEXTS[one["index"]] for one in found["results"])
    assert found["meta"]["tokens"]["input_tokens"] == found["usage"]["prompt_tokens"] > len(TEXTS)
    bare = post(path, query="rain?", documents=documents, model="reranker")["results"]
    assert all(one.keys() == {"index", "relevance_score"} for one in bare)
    assert "message" in post("/v2/rerank", 422, query="", documents=["a"])


def test_tensorflow(post, client, encoder, directory):
    raw = encoder.encode(TEXTS[:2])
    path = "/v1/models/sentences:predict"
    same(post(path, instances=[TEXTS[0], {"text": TEXTS[1]}])["predictions"], raw)
    same(post(path.replace(":", "/versions/1:"), inputs={"text": TEXTS[:2]})["outputs"], raw)
    same(post(path, inputs=TEXTS[:2])["outputs"], raw)
    pairs = [{"text": "rain?", "pair": text} for text in TEXTS]
    reranker = CrossEncoder.from_pretrained(directory / "reranker", activation="Sigmoid")
    scores = reranker.predict([tuple(pair.values()) for pair in pairs])
    same(post("/v1/models/reranker:predict", instances=pairs)["predictions"], scores)
    same(post("/v1/models/reranker:predict", inputs={"text": ["rain?"] * 4, "pair": TEXTS})["outputs"], scores)
    labels = post("/v1/models/classes:predict", instances=TEXTS)["predictions"]
    assert all(one.keys() == {"good", "bad"} and abs(sum(one.values()) - 1) < 1e-6 for one in labels)
    state = client.get("/v1/models/tags").json()["model_version_status"][0]
    assert (
        state["state"] == "AVAILABLE" and client.get("/v1/models/tags/metadata").json()["model_spec"]["name"] == "tags"
    )
    assert "expected 1" in post(path.replace(":", "/versions/2:"), 404, instances=["a"])["error"]
    assert client.get("/v1/models/nobody").status_code == 404
    assert isinstance(client.post("/v1/models").json()["error"], dict)  # OpenAI's form; TensorFlow's is a string
    assert isinstance(client.get("/v1/models/nobody").json()["error"], str)


# ---- what is refused


LONG = "the cat sits outside " * 20


def fills_of(count):
    return {"model": "masks", "parameters": {"top_k": count}}


BAD = {  # path, status, body, and what the answer says
    "no text": ("/embed", 422, {"inputs": []}, "inputs: is empty"),
    "an empty text": ("/embed", 422, {"inputs": ["a", ""]}, r"inputs\[1\]: is empty"),
    "a number": ("/embed", 422, {"inputs": ["a", 7]}, r"inputs\[1\]: "),
    "nothing": ("/embed", 422, {}, "inputs: Field required"),
    "too many": ("/embed", 413, {"inputs": ["a"] * 9}, "has 9 entries; expected at most 8"),
    "too long": (
        "/embed",
        413,
        {"inputs": ["a", LONG]},
        r"inputs\[1\]: has (more than )?\d+ tokens; expected at most 32",
    ),
    "ids too long": ("/embed", 413, {"inputs": [[5] * 33]}, "has 33 tokens; expected at most 32"),
    "ids out of range": ("/embed", 422, {"inputs": [[5, 999]]}, r"inputs\[0\]: has a token outside the vocabulary"),
    "negative ids": ("/embed", 422, {"inputs": [[-1]]}, "outside the vocabulary"),
    "half a surrogate pair": ("/embed", 422, {"inputs": "\ud800"}, "surrogate"),
    "half a pair to tokenize": ("/tokenize", 422, {"inputs": ["a", "\ud800"]}, r"inputs\[1\]: has half a surrogate"),
    "half a pair to draw": ("/ui/attention", 422, {"inputs": "\ud800"}, "half a surrogate"),
    "ids of no token": ("/decode", 422, {"ids": [[5, -1]]}, "ids: has -1; expected 0 to"),
    "ids beyond all numbers": ("/decode", 422, {"ids": [10**30]}, "ids: "),
    "too many fills": ("/", 422, {"inputs": "[MASK]", **fills_of(101)}, "is 101; expected 1 to "),
    "an answer of fills": (
        "/",
        413,
        {"inputs": "x" * 5100 + "[MASK]" * 40, **fills_of(50)},
        "inputs: has masks whose fills, each with the whole text, have 10680000 characters; expected at most 10000000",
    ),
    "fills in rows": ("/v1/models/masks:predict", 413, {"instances": ["[MASK]" * 1000]}, "instances: has masks whose"),
    "a query for each": ("/rerank", 413, {"query": "a" * 9000, "texts": ["b"] * 3}, "27003 characters to tokenize"),
    "a prompt for ids": ("/embed", 422, {"inputs": [5], "prompt_name": "query"}, "prompt_name: is for texts"),
    "cut documents": (
        "/v2/rerank",
        422,
        {"query": "a", "documents": ["b"], "max_tokens_per_doc": 31},
        "max_tokens_per_doc: is 31; expected at least the model's length, 32, or none",
    ),
    "no such prompt": ("/embed", 422, {"inputs": "a", "prompt_name": "x"}, "no prompt 'x'"),
    "no dimension": ("/embed", 422, {"inputs": "a", "dimensions": 0}, "dimensions: is 0; expected 1 to 48"),
    "too many dimensions": ("/v1/embeddings", 422, {"input": "a", "dimensions": 49}, "is 49; expected 1 to 48"),
    "a format": ("/v1/embeddings", 422, {"input": "a", "encoding_format": "hex"}, "'float' or 'base64'"),
    "no such model": ("/embed", 404, {"inputs": "a", "model": "x"}, "no model 'x'"),
    "another model's task": ("/embed", 424, {"inputs": "a", "model": "tags"}, "'tags' does token classification"),
    "three texts for a pair": ("/predict", 422, {"inputs": ["a", "b", "c"]}, "has 3 parts"),
    "no query": ("/rerank", 422, {"query": "", "texts": ["a"]}, r"query\[0\]: is empty"),
    "no documents": ("/v2/rerank", 422, {"query": "a", "documents": []}, "documents: is empty"),
    "none of the best": ("/v2/rerank", 422, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n: "),
    "no mask": ("/", 422, {"inputs": "a", "model": "masks"}, r"has no \[MASK\]"),
    "rows and columns": ("/v1/models/tags:predict", 422, {"instances": ["a"], "inputs": ["a"]}, "one of the two"),
    "a row of something": ("/v1/models/tags:predict", 422, {"instances": ["a", {"b": 1}]}, r"instances\[1\]: expected"),
    "unequal columns": ("/v1/models/classes:predict", 422, {"inputs": {"text": ["a"], "pair": ["b", "c"]}}, "1, 2"),
    "one text for a pair": ("/v1/models/reranker:predict", 422, {"instances": ["a"]}, "a reranker takes"),
    "a pair for one text": ("/v1/models/tags:predict", 422, {"instances": [{"text": "a", "pair": "b"}]}, "is a pair"),
    "a pair in a column": ("/v1/models/tags:predict", 422, {"inputs": {"text": ["a"], "pair": ["b"]}}, r"inputs\[0\]"),
    "a signature": ("/v1/models/tags:predict", 422, {"instances": ["a"], "signature_name": "x"}, "'serving_default'"),
    "an unknown route": ("/embeddings", 404, {"inputs": "a"}, "no such route"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(client, case):
    path, status, body, says = BAD[case]
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    found = response.json()
    message = found.get("message") or found["error"]
    message = message["message"] if isinstance(message, dict) else message
    assert re.search(says, message), message


@pytest.mark.parametrize(
    "body, field, wrong",
    [(tei.EmbedBody, "inputs", [1.5]), (tei.PredictBody, "inputs", [[3]]), (openai.EmbeddingsBody, "input", ["a", 2])],
)
def test_of_many_wrong_entries_few_are_looked_at(body, field, wrong):
    with pytest.raises(ValueError) as raised:
        body.model_validate({field: wrong * 10_000})
    assert raised.value.error_count() < 6


def test_texts_are_cut_where_that_is_asked(post, encoder):
    with pytest.warns(UserWarning, match="cut there"):
        expected = encoder.encode([LONG])
    same(post("/embed", inputs=LONG, truncate=True, normalize=False), expected)
    ids = encoder.tokenizer.encode(LONG).ids
    same(post("/embed", inputs=ids, truncate=True, normalize=False), encoder.embed([ids[:32]]))


PAIR = {"source_sentence": LONG, "sentences": [LONG]}


@pytest.mark.parametrize(
    ("path", "body", "truncate"),
    [
        ("/similarity", {"inputs": PAIR}, {"parameters": {"truncate": True}}),
        ("/predict", {"inputs": LONG}, {"truncate": True}),
        ("/rerank", {"query": "rain?", "texts": [LONG]}, {"truncate": True}),
        ("/", {"inputs": LONG, "model": "tags"}, {"truncate": True}),
        ("/", {"inputs": "[MASK] " + LONG, "model": "masks"}, {"truncate": True}),
    ],
)
def test_long_texts_are_refused_unless_they_may_be_cut(post, path, body, truncate):
    assert "expected at most 32" in post(path, 413, **body)["error"]
    assert post(path, **body, **truncate)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{bad", "application/json", 400),
        (b'{"inputs": "\xff\xfe"}', "application/json", 400),
        (b"", "application/json", 422),
        (b"[1]", "application/json", 422),
        (b'{"inputs": "a"}', "text/plain", 415),
        (b'{"inputs": "' + b"a" * 30_000 + b'"}', "application/json", 413),
    ],
)
def test_bad_bodies(client, content, kind, status):
    response = client.post("/embed", content=content, headers={"content-type": kind})
    assert response.status_code == status and response.json()["error"]

    def chunks():  # without a length
        yield from (content[i : i + 1000] for i in range(0, len(content), 1000))

    if content:
        response = client.post("/embed", content=chunks(), headers={"content-type": kind})
        assert response.status_code == status and response.json()["error"]


def test_a_form_is_json_where_tensorflow_s_own_examples_say_so(client, encoder):
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
        found = client.post("/v1/models/sentences:predict", content=json.dumps({"instances": TEXTS}), headers=headers)
        same(found.json()["predictions"], encoder.encode(TEXTS))
    assert client.post("/embed", content=b'{"inputs": "a"}', headers=headers).status_code == 415


def test_a_body_that_is_cut_off_stops_nothing(client):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as cut:
        cut.sendall(
            b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
    client.post("/embed", json={"inputs": "a"}).raise_for_status()


# ---- keys


def test_keys(directory, caplog):
    app = create_app(Service([load(directory / "sentences")], LIMITS), ["first", "sécond"])
    with listening(app) as address, caplog.at_level(logging.INFO, "fastbert.serving"):

        def status(header, path="/embed"):
            headers = {"content-type": "application/json"} | ({} if header is None else {"authorization": header})
            return httpx.post(f"{address}{path}", content=b'{"inputs": "a"}', headers=headers).status_code

        accepted = ("Bearer first", "bearer first", "Bearer s\u00e9cond".encode())
        assert [status(header) for header in accepted] == [200] * 3
        wrong = [None, "", "first", "Bearer", "Bearer firs", "Bearer first1", "Basic first", "Bearer wrong"]
        assert [status(header) for header in wrong] == [401] * len(wrong)
        assert httpx.post(f"{address}/v1/embeddings", json={}).json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{address}/health").status_code == 200 and httpx.get(f"{address}/metrics").status_code == 401
        wait_for(lambda: sum('"status": 401' in line for line in caplog.messages) >= len(wrong) + 1)
    assert not any("wrong" in line for line in caplog.messages)


def test_probes_need_no_key_and_names_may_have_slashes(directory):
    app = create_app(Service([load(directory / "sentences", "org/name")], LIMITS), ["key"])
    with listening(app) as address, httpx.Client(base_url=address) as client:
        for path in ("/", "/health", "/ping"):
            assert client.get(path).status_code == client.head(path).status_code == 200
        assert client.post("/", json={"inputs": "a"}).status_code == 401
        client.headers["authorization"] = "Bearer key"
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"
        assert client.get("/v1/models/org/name/versions/1/metadata").json()["model_spec"]["name"] == "org/name"
        for path in ("/v1/models/org/name:predict", "/v1/models/org%2Fname/versions/1:predict"):
            assert len(client.post(path, json={"instances": ["a"]}).json()["predictions"]) == 1
        assert client.get("/v1/models/org/name/versions/2").status_code == 404


def test_below_a_path_of_another_application(service):
    """Routes that need no key still need none, and errors have the form of their protocol."""
    outer = fastapi.FastAPI()
    outer.mount("/below", create_app(service, ["key"]))
    key = {"authorization": "Bearer key"}
    with listening(outer) as address, httpx.Client(base_url=f"{address}/below", timeout=20) as client:
        assert client.get("/health").status_code == 200 and client.get("/info").status_code == 401
        refused = client.post("/v1/embeddings", headers=key, json={"model": "sentences", "input": []})
        assert refused.status_code == 422 and refused.json()["error"]["type"] == "invalid_request_error"
        form = {"content-type": "application/x-www-form-urlencoded"} | key
        body = b'{"instances": ["It rains."]}'
        assert client.post("/v1/models/sentences:predict", headers=form, content=body).status_code == 200
        assert client.post("/embed", headers=form, content=b'{"inputs": "a"}').status_code == 415


# ---- time


class Held:
    """Makes the computation of a model wait until `gate` is set."""

    def __init__(self, service, monkeypatch):
        self.encoder, self.calls, self.gate = service.models["sentences"].any, [], threading.Event()
        embed = self.encoder.embed

        def held(ids, **options):
            self.calls.append(len(ids))
            assert self.gate.wait(20)
            return embed(ids, **options)

        monkeypatch.setattr(self.encoder, "embed", held)


@contextmanager
def holding(directory, monkeypatch, **limits):
    """A new service whose only model waits; yields the service, the Held of the model, and the address."""
    service = Service([load(directory / "sentences")], Limits(**limits))
    held = Held(service, monkeypatch)
    with listening(create_app(service)) as address:
        yield service, held, address
        held.gate.set()


@pytest.fixture
def slow(directory, monkeypatch):
    with holding(directory, monkeypatch, inputs=8, timeout=1.0, stall=0.3, waiting_tokens=100) as service:
        yield service


def in_background(address, results, **body):
    def send():
        response = httpx.post(f"{address}/embed", json=body, timeout=20)
        results.append(response)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_stall_a_deadline_and_too_much(slow):
    service, held, address = slow
    results, start = [], time.monotonic()
    threads = [in_background(address, results, inputs="a")]
    wait_for(lambda: held.calls)
    threads.append(in_background(address, results, inputs=["the cat sits outside"] * 8))
    wait_for(lambda: service.queue.waiting()[0] == 1)
    refused = httpx.post(f"{address}/embed", json={"inputs": ["the cat sits outside"] * 8})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error_type"] == "Overloaded"
    wait_for(lambda: httpx.get(f"{address}/health").status_code == 503)
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - start < 10
    assert [response.status_code for response in results] == [503, 503]
    assert all("no answer within 1 s" in response.json()["error"] for response in results)
    held.gate.set()
    wait_for(lambda: httpx.get(f"{address}/health").status_code == 200)
    assert httpx.post(f"{address}/embed", json={"inputs": "a"}).status_code == 200
    assert held.calls == [1, 1]  # the one that waited was given up before it was computed


@pytest.mark.parametrize("few", [True, False])
def test_few_characters_are_tokenized_at_once_and_others_in_a_thread(slow, monkeypatch, few):
    service, held, address = slow
    held.gate.set()
    threads, rows = [], ServedModel.rows

    def noting(*arguments, **options):
        threads.append(threading.current_thread().name)
        return rows(*arguments, **options)

    monkeypatch.setattr("fastbert.serving.service.FEW", 100 if few else 0)
    monkeypatch.setattr(ServedModel, "rows", noting)
    assert httpx.post(f"{address}/embed", json={"inputs": "the cat"}).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("fastbert-encoding") == (not few)
    monkeypatch.setattr(ServedModel, "rows", lambda *_, **__: [][0])
    failed = httpx.post(f"{address}/embed", json={"inputs": "the cat"})
    assert failed.status_code == 424 and "the model failed: list index out of range" in failed.json()["error"]


def test_too_much_that_waits_to_be_tokenized(slow, monkeypatch):
    service, held, address = slow
    held.gate.set()
    monkeypatch.setattr("fastbert.serving.service.FEW", 0)
    gate, begun, rows = threading.Event(), [], ServedModel.rows

    def waiting(model, task, inputs, **options):
        begun.append(inputs)
        assert gate.wait(20)
        return rows(model, task, inputs, **options)

    monkeypatch.setattr(ServedModel, "rows", waiting)
    results, text = [], "the cat sits outside " * 6  # 126 characters
    threads = [in_background(address, results, inputs=text) for _ in range(3)]
    wait_for(lambda: service._characters == 3 * len(text))
    refused = httpx.post(f"{address}/embed", json={"inputs": text})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert "texts of some 94 tokens wait to be tokenized" in refused.json()["error"]
    for thread in threads:
        thread.join(20)
    assert [response.status_code for response in results] == [503] * 3
    assert service._characters == 2 * len(text)  # two threads go on, though the requests have ended
    gate.set()
    wait_for(lambda: service._characters == 0)
    assert httpx.post(f"{address}/embed", json={"inputs": "a"}).status_code == 200
    assert len(begun) == 3  # two threads; the request that waited for them was given up


def test_a_body_that_does_not_arrive(slow):
    host, port = slow[2].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        answer = connection.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 408") and "the body did not arrive within 1 s" in answer


def test_more_tokens_than_an_answer_may_have(post, monkeypatch):
    count = sum(map(len, post("/tokenize", inputs=TEXTS)))
    monkeypatch.setattr(tei, "MOST_TOKENS", count - 1)
    assert f"inputs have {count} tokens; expected at most {count - 1}" in post("/tokenize", 413, inputs=TEXTS)["error"]
    post("/tokenize", inputs=TEXTS[1:])


def test_a_client_that_goes_away_is_not_computed(directory, monkeypatch):
    with holding(directory, monkeypatch, timeout=60.0) as (service, held, address):
        first = in_background(address, [], inputs="a")
        wait_for(lambda: held.calls)
        with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)) as leaving:
            leaving.request("POST", "/embed", json.dumps({"inputs": ["b", "c"]}))
            wait_for(lambda: service.queue.waiting()[0] == 1)
        wait_for(lambda: service.queue.waiting() == (0, 0))
        held.gate.set()
        first.join(20)
        assert httpx.post(f"{address}/embed", json={"inputs": "d"}, timeout=20).status_code == 200
        assert held.calls == [1, 1]


def test_what_waits_is_answered_before_the_end(directory, monkeypatch):
    service = Service([load(directory / "sentences")], Limits(timeout=20.0))
    held, results = Held(service, monkeypatch), []
    with listening(create_app(service)) as address:
        threads = [in_background(address, results, inputs="a")]
        wait_for(lambda: held.calls)
        threads.append(in_background(address, results, inputs="b"))
        wait_for(lambda: service.queue.waiting()[0] == 1)
        threading.Timer(0.3, held.gate.set).start()
    for thread in threads:
        thread.join(20)
    assert [response.status_code for response in results] == [200, 200]
    assert not any(thread.is_alive() for thread in service.queue._threads)


def test_scores_that_the_sigmoid_makes_equal_keep_their_order(post, service, monkeypatch):
    found = torch.tensor([18.0, 19.0, 20.0, -1.0]).unsqueeze(1)
    monkeypatch.setattr(service.models["reranker"].predictors["rerank"], "compute", lambda rows: found[: len(rows)])
    assert [one["index"] for one in post("/rerank", query="a", texts=TEXTS)] == [2, 1, 0, 3]
    assert [one["index"] for one in post("/v2/rerank", query="a", documents=TEXTS, top_n=2)["results"]] == [2, 1]


@pytest.mark.parametrize(
    "name, task, path, body, results",
    [
        ("classes", "classification", "/predict", {"inputs": [["a"]]}, [[Label("good", math.nan)]]),
        ("classes", "classification", "/v1/models/classes:predict", {"instances": ["a"]}, [[Label("good", math.inf)]]),
        ("tags", "token classification", "/", {"inputs": "a"}, [[Entity("X", math.nan, 0, 1, "a")]]),
        ("masks", "fill-mask", "/", {"inputs": "[MASK]"}, [[[Fill("a", 5, math.nan, "a")]]]),
        ("reranker", "rerank", "/rerank", {"query": "a", "texts": TEXTS}, torch.tensor([[1], [2], [math.nan], [3]])),
    ],
)
def test_results_that_are_no_numbers_are_said(post, service, monkeypatch, name, task, path, body, results):
    monkeypatch.setattr(service.models[name].predictors[task], "compute", lambda rows, *given, **options: results)
    place = 2 if task == "rerank" else 0
    assert f"input {place} is not finite" in post(path, 424, model=name, **body)["error"]


def test_a_model_that_fails_is_said_and_survived(directory, monkeypatch):
    service = Service([load(directory / "sentences")], LIMITS)
    encoder = service.models["sentences"].any
    embed, wrong = encoder.embed, [MemoryError("no memory left\nin detail"), torch.full((1, 48), torch.nan)]

    def broken(ids, **options):
        found = wrong.pop(0) if wrong else embed(ids, **options)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(encoder, "embed", broken)
    with listening(create_app(service)) as address:
        answers = [httpx.post(f"{address}/embed", json={"inputs": "a"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [424, 424, 200]
    assert answers[0].json() == {"error": "the model failed: no memory left", "error_type": "Backend"}
    assert "input 0 is not finite" in answers[1].json()["error"]


def test_a_batch_of_the_queue_is_one_forward(directory):
    model = load(directory / "reranker")
    service = Service([model], Limits(batch_tokens=50))
    try:
        assert [each.tokens_per_batch for each in model.predictors.values()] == [50, 50]
    finally:
        service.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_many_clients_at_once_get_their_own_answers(directory, encoder, workers):
    """Batches are small, so that all workers take part."""
    app = create_app(Service([load(directory / "sentences")], Limits(workers=workers, batch_tokens=50)))
    texts = [f"{text} {number}" for number in range(10) for text in TEXTS]
    expected, wrong = encoder.encode(texts).numpy(), []

    def ask(number):
        with httpx.Client(base_url=address, timeout=30) as own:
            for turn in range(5):
                chosen = [(number * 7 + turn * 3 + i) % len(texts) for i in range(1 + turn)]
                body = {"inputs": [texts[i] for i in chosen], "normalize": False}
                if not np.allclose(own.post("/embed", json=body).json(), expected[chosen], ROUNDING, ROUNDING):
                    wrong.append(chosen)

    with listening(app) as address:
        in_threads(ask, 12, 60)
    assert not wrong


# ---- before it is served


def test_what_cannot_be_served(directory, tmp_path):
    with pytest.raises(ValueError, match="models are none; expected at least one"):
        Service([])
    twice = load(directory / "tags")
    on_gpu = ServedModel("far", directory, {"embeddings": SimpleNamespace(device=torch.device("cuda"))})
    with pytest.raises(ValueError, match="workers is 2; expected 1: a GPU computes one batch after another"):
        Service([on_gpu], Limits(workers=2))
    with pytest.raises(ValueError, match="models are tags, tags; expected at least one, each with a name of its own"):
        Service([twice, twice])
    with pytest.raises(ValueError, match="timeout is 0; expected a number above 0"):
        Limits(timeout=0)
    from fastbert import BertConfig, BertForQuestionAnswering

    BertForQuestionAnswering(BertConfig.preset("bert-tiny")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a BertForQuestionAnswering; expected a model for embeddings, "):
        load(tmp_path)


# ---- limits, and the end


def test_texts_are_cut_where_the_service_says_so(directory):
    """And how many may come at once on each route, where it does not say so."""
    service = Service([load(directory / name) for name in NAMES], Limits(timeout=20.0), auto_truncate=True)
    with listening(create_app(service)) as address, httpx.Client(base_url=address, timeout=20) as client:
        bodies = {"/v1/embeddings": {"input": LONG}, "/embed": {"inputs": LONG}, "/predict": {"inputs": LONG}}
        bodies["/v1/models/tags:predict"] = {"instances": [LONG]}
        for path, body in bodies.items():
            assert client.post(path, json=body).status_code == 200, path
        assert client.post("/embed", json={"inputs": LONG, "truncate": False}).status_code == 413
        info = client.get("/info").json()
        assert info["auto_truncate"] is True and info["max_client_batch_size"] == 32
        for path, most, body in (
            ("/embed", 32, lambda texts: {"inputs": texts}),
            ("/v1/embeddings", 2048, lambda texts: {"input": texts}),
            ("/v2/rerank", 1000, lambda texts: {"documents": texts, "query": "a"}),
        ):
            assert [client.post(path, json=body(["a"] * n)).status_code for n in (most, most + 1)] == [200, 413], path


def test_errors_name_the_request_s_field(post):
    for path, field, body in (
        ("/v1/embeddings", "input[1]", {"input": ["a", LONG]}),
        ("/v1/models/classes:predict", "instances[0]", {"instances": [LONG]}),
        ("/", "inputs[1]", {"model": "masks", "inputs": ["[MASK]", "no mask"]}),
    ):
        error = post(path, 413 if LONG in str(body) else 422, **body)
        error = error.get("error", error.get("message"))
        assert (error["param"] if isinstance(error, dict) else error.partition(": ")[0]) == field, error


def test_a_model_has_the_name_by_which_it_was_asked_for(directory, monkeypatch):
    monkeypatch.chdir(directory / "tags")
    assert load(".").name == "tags"
    monkeypatch.setattr("fastbert.hub.directory_of", lambda source: directory / "tags")
    assert load("somebody/model@main").name == "somebody/model"


def test_more_requests_than_may_be_at_once(directory):
    """Those count whose bodies have not arrived; reports are given all the same."""
    service = Service([load(directory / "tags")], Limits(requests=2, timeout=20.0))
    with listening(create_app(service)) as address, httpx.Client(base_url=address, timeout=20) as client:
        host, port = address.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(2)]
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        for each in slow:
            each.sendall(head)
        wait_for(lambda: client.post("/", json={"inputs": "a"}).status_code == 429)
        refused = client.post("/", json={"inputs": "a"})
        assert refused.headers["retry-after"] == "1" and "2 requests are being answered" in refused.text
        assert client.get("/health").status_code == client.get("/info").status_code == 200
        for each in slow:
            each.close()
        wait_for(lambda: client.post("/", json={"inputs": "a"}).status_code == 200)


def test_a_closed_service_says_so(directory):
    service = Service([load(directory / name) for name in ("tags", "sentences")], LIMITS)
    with listening(create_app(service)) as address, httpx.Client(base_url=address, timeout=20) as client:
        service.close()
        service.close()
        for path, body in {"/embed": {"inputs": "a"}, "/tokenize": {"inputs": "a"}}.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 503 and "shutting down" in answer.json()["error"]


def test_the_pages_of_the_protocol_are_open(directory):
    """A browser cannot send a key with them; they ask for it, and send it with requests."""
    service = Service([load(directory / "tags")], LIMITS)
    with listening(create_app(service, ["secret"])) as address, httpx.Client(base_url=address, timeout=20) as client:
        assert client.get("/docs").status_code == 200
        schema = client.get("/openapi.json").json()
        assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
        refused = client.post("/", json={"inputs": "a"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        known = {"Authorization": "Bearer secret"}
        assert client.post("/", json={"inputs": "a"}, headers=known).status_code == 200
        assert client.get("/embed", headers=known).headers["allow"] == "POST"


def test_masks_are_computed_some_at_a_time(directory, monkeypatch):
    filler = MaskFiller.from_pretrained(directory / "masks")
    texts = ["the [MASK] sits [MASK]", "[MASK]", "[MASK] " * 9]
    expected = filler(texts)
    monkeypatch.setattr("fastbert.inference.predict._LOGITS", 2 * filler.config.vocab_size)
    for one, other in zip(filler(texts), expected, strict=True):
        for fills, others in zip(one, other, strict=True):
            assert [fill.token_id for fill in fills] == [fill.token_id for fill in others]
            same([fill.score for fill in fills], [fill.score for fill in others])
