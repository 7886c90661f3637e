"""Requests that nobody would send on purpose, made from the service's own OpenAPI description."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving.over_http import NAMES, httpx, listening
from serving.served import TEXTS

from fastbert.serving import Limits, Service, create_app, load


@pytest.fixture(scope="module")
def client(directory):
    service = Service([load(directory / name) for name in NAMES], Limits(inputs=8, body=20_000, timeout=20.0))
    with listening(create_app(service)) as address, httpx.Client(base_url=address, timeout=20) as client:
        yield client


def fields_of(schema, definitions):
    """The names of all fields of a schema, nested ones included."""
    if "$ref" in schema:
        return fields_of(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    parts = [*schema.get("properties", {}).values(), *schema.get("anyOf", []), *([schema.get("items")] or [])]
    names = set(schema.get("properties", {}))
    return names.union(*(fields_of(part, definitions) for part in parts if isinstance(part, dict)))


def requests(description):
    """Yields a strategy of (path, body) for each route, with values of any kind in its fields, some of them right."""
    definitions = description["components"]["schemas"]
    near = st.sampled_from([*TEXTS, *NAMES, "The [MASK].", "", "\x00", "\ud800", "query", "float", "base64"])
    leaf = near | st.none() | st.booleans() | st.integers() | st.integers(-2, 60) | st.floats() | st.text(max_size=30)
    routes = [(path, given["post"]) for path, given in description["paths"].items() if "post" in given]
    for path, route in routes:
        schema = route["requestBody"]["content"]["application/json"]["schema"]
        names = sorted(fields_of(schema, definitions) | {"inputs", "texts", "documents", "query", "model"})

        def grown(inner, names=names):
            return st.lists(inner, max_size=10) | st.dictionaries(st.sampled_from(names), inner, max_size=4)

        value = st.recursive(leaf, grown, max_leaves=12)
        texts = near | st.lists(near, min_size=1, max_size=9)
        needed = definitions[schema["$ref"].rsplit("/", 1)[-1]].get("required", []) if "$ref" in schema else ["inputs"]
        nearly = st.fixed_dictionaries({name: texts for name in needed}, optional={"model": near, "truncate": leaf})
        bodies = nearly | st.dictionaries(st.sampled_from(names), value | texts, max_size=5) | value
        given_path = path.replace("{version}", "1")
        yield st.tuples(st.sampled_from(NAMES).map(lambda name, path=given_path: path.replace("{name}", name)), bodies)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_they_are_refused_and_harm_nobody(client, count):
    alone = client.post("/embed", json={"inputs": TEXTS}).json()
    statuses = set()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @example(("/embed", {"inputs": "a"}), True, 1)
    @given(st.one_of(*requests(client.get("/openapi.json").json())), st.booleans(), st.integers(0, 40))
    def send(request, is_cut, cut):
        path, body = request
        content = json.dumps(body).encode()
        content = content[: -cut or None] if is_cut else content
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        statuses.add(response.status_code)
        assert response.status_code < 500, (path, content, response.text)
        assert response.status_code == 200 or response.json(), (path, content)
        assert client.get("/health").status_code == 200

    send()
    assert {200, 400, 422} <= statuses
    assert client.post("/embed", json={"inputs": TEXTS}).json() == alone


@pytest.mark.parametrize(
    "content", [b"[" * 9999, b'{"inputs": ' + b"9" * 9999 + b"}", b'{"inputs": 1e999}', b"\xff\xfe"]
)
def test_json_beyond_what_parsers_take(client, content):
    response = client.post("/embed", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422), response.text
