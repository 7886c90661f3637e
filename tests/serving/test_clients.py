"""Clients of other projects over a real socket: each gets what fastbert's predictors compute."""

import json
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from serving.over_http import NAMES, listening
from serving.served import TEXTS, same

from fastbert.inference import CrossEncoder, SentenceEncoder, TextClassifier
from fastbert.serving import Service, create_app, load

KEY = "a key"


@pytest.fixture(scope="module")
def served(directory):
    """The address of the service."""
    with listening(create_app(Service([load(directory / name) for name in NAMES]), [KEY])) as address:
        yield address


@pytest.fixture(scope="module")
def vectors(directory):
    return SentenceEncoder.from_pretrained(directory / "sentences").encode(TEXTS)


def test_openai(served, vectors):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served}/v1", api_key=KEY) as client:
        found = client.embeddings.create(model="sentences", input=TEXTS)  # this client asks for base64
        same([one.embedding for one in found.data], vectors)
        found = client.embeddings.create(model="sentences", input=TEXTS[0], encoding_format="float", dimensions=4)
        same(found.data[0].embedding, vectors[0, :4])
        assert [model.id for model in client.models.list()][0] == "sentences"
        known = next(one for one in client.models.list() if one.id == "tags")
        assert client.models.retrieve("tags").created == known.created > 0
        with pytest.raises(openai.NotFoundError, match="there is no model 'ada'"):
            client.embeddings.create(model="ada", input="a")
        with pytest.raises(openai.UnprocessableEntityError, match="input: is empty"):
            client.embeddings.create(model="sentences", input=[])
    with openai.OpenAI(base_url=f"{served}/v1", api_key="another") as client:
        with pytest.raises(openai.AuthenticationError, match="with a valid key"):
            client.embeddings.create(model="sentences", input="a")


@pytest.fixture
def hub_client(monkeypatch):
    """Makes an InferenceClient for an address. Its requests obey the offline mode of the tests, so that is lifted."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    return lambda address: hub.InferenceClient(address, token=KEY)


def test_huggingface_hub(served, directory, hub_client, vectors):
    client = hub_client(served)
    same(client.feature_extraction(TEXTS[0]), F.normalize(vectors[:1], dim=-1))
    same(client.feature_extraction(TEXTS[0], normalize=False), vectors[:1])
    cosines = F.normalize(vectors, dim=-1) @ F.normalize(vectors[0], dim=-1)
    for address in (served, f"{served}/similarity"):
        same(hub_client(address).sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:]), cosines[1:])


def test_huggingface_hub_with_classes(directory, hub_client):
    expected = TextClassifier.from_pretrained(directory / "classes")([TEXTS[0]])[0]
    with listening(create_app(Service([load(directory / "classes")]))) as address:
        client = hub_client(address)
        found = client.text_classification(TEXTS[0])
        assert [one.label for one in found] == [one.label for one in expected]
        same([one.score for one in found], [one.score for one in expected])
        assert [one.label for one in client.text_classification(TEXTS[0], top_k=1)] == [expected[0].label]
        raw = client.text_classification(TEXTS[0], function_to_apply="none")
        same(torch.tensor([one.score for one in raw]).softmax(0), [one.score for one in expected])
        with pytest.raises(Exception, match="422"):
            client.text_classification(TEXTS[0], function_to_apply="sigmoid")


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_cohere(served, directory, version):
    cohere = pytest.importorskip("cohere")
    client = getattr(cohere, version)(api_key=KEY, base_url=served)
    found = client.rerank(model="reranker", query="rain?", documents=TEXTS, top_n=3)
    reranker = CrossEncoder.from_pretrained(directory / "reranker", activation="Sigmoid")
    scores = reranker.predict([("rain?", text) for text in TEXTS])
    assert [one.index for one in found.results] == scores.argsort(descending=True)[:3].tolist()
    same([one.relevance_score for one in found.results], scores.sort(descending=True).values[:3])


def test_langchain(served, hub_client, vectors):
    module = pytest.importorskip("langchain_huggingface")
    embeddings = module.HuggingFaceEndpointEmbeddings(model="any/name", huggingfacehub_api_token=KEY)
    embeddings.client = hub_client(served)  # model may not be an address
    same(embeddings.embed_documents(TEXTS), F.normalize(vectors, dim=-1))
    same(embeddings.embed_query(TEXTS[1]), F.normalize(vectors[1], dim=-1))


def test_llama_index(served, vectors):
    module = pytest.importorskip("llama_index.embeddings.text_embeddings_inference")
    where = {"base_url": served, "auth_token": KEY}
    embeddings = module.TextEmbeddingsInference(model_name="sentences", embed_batch_size=3, **where)
    same(embeddings.get_text_embedding_batch(TEXTS), F.normalize(vectors, dim=-1))


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_curl(served, vectors):
    command = ["curl", "-sS", f"{served}/embed", "-H", f"Authorization: Bearer {KEY}"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps({"inputs": TEXTS})]
    same(json.loads(subprocess.run(command, check=True, capture_output=True).stdout), F.normalize(vectors, dim=-1))
