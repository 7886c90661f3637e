"""The application on Ray Serve: two replicas answer what one process answers, even if one of them is killed."""

import contextlib
import os
import signal
import time
import types

import pytest
import torch.nn.functional as F
from local_ray import cluster, processes
from serving.over_http import httpx
from serving.served import TEXTS, in_threads, same

pytest.importorskip("ray.serve")

import fastbert.serving.ray  # noqa: E402
from fastbert.inference import SentenceEncoder  # noqa: E402
from fastbert.serving.ray import create_deployment  # noqa: E402

pytestmark = pytest.mark.slow
ADDRESS = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def served(directory):
    from ray import serve

    models = {name: directory / name for name in ("sentences", "tags")}
    with cluster():
        serve.start(http_options={"port": 8765})
        serve.run(create_deployment(models, deployment={"num_replicas": 2}))
        yield
        serve.shutdown()


def embed(texts):
    return httpx.post(f"{ADDRESS}/embed", json={"inputs": texts}, timeout=60)


def test_it_answers_as_one_process_does(served, directory):
    expected = F.normalize(SentenceEncoder.from_pretrained(directory / "sentences").encode(TEXTS), dim=-1)
    same(embed(TEXTS).json(), expected)
    assert embed([]).status_code == 422
    assert httpx.get(f"{ADDRESS}/info", timeout=60).json()["models"].keys() == {"sentences", "tags"}


def test_a_replica_whose_inference_hangs_says_so(monkeypatch):
    for reason in (None, "a batch has been computed for 90 s"):
        service = types.SimpleNamespace(queue=types.SimpleNamespace(stalled=reason))
        monkeypatch.setattr(fastbert.serving.ray, "_SERVICES", [service])
        with pytest.raises(RuntimeError, match="for 90 s") if reason else contextlib.nullcontext():
            fastbert.serving.ray._Replica().check_health()


def test_a_replica_that_is_killed_is_replaced(served):
    replicas = processes("ServeReplica")
    assert len(replicas) == 2
    found, start = [], time.monotonic()

    def work(number):
        if number == 0:
            time.sleep(2)
            os.kill(replicas[0], signal.SIGKILL)
            return
        while time.monotonic() < start + 15:
            found.append(embed(TEXTS).status_code)

    in_threads(work, 5, 75)
    assert found.count(200) > 0.9 * len(found) and found[-1] == 200
