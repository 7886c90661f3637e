"""The application on Ray Serve: two replicas answer what one process answers, also when one of them is killed."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch.nn.functional as F
from serving.served import TEXTS, save_models

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.slow

from fastbert.inference import SentenceEncoder  # noqa: E402
from fastbert.serving.ray import create_deployment  # noqa: E402

ADDRESS = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(directory):
    import ray
    from ray import serve

    import fastbert

    paths = [os.path.dirname(os.path.dirname(fastbert.__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    serve.start(http_options={"port": 8765})
    models = {name: directory / name for name in ("sentences", "tags")}
    serve.run(create_deployment(models, deployment={"num_replicas": 2}))
    yield
    serve.shutdown()
    ray.shutdown()


def embed(texts):
    return httpx.post(f"{ADDRESS}/embed", json={"inputs": texts}, timeout=60)


def test_it_answers_as_one_process_does(served, directory):
    expected = F.normalize(SentenceEncoder.from_pretrained(directory / "sentences").encode(TEXTS), dim=-1)
    np.testing.assert_allclose(embed(TEXTS).json(), expected, rtol=0, atol=2e-6)
    assert embed([]).status_code == 422
    assert httpx.get(f"{ADDRESS}/info", timeout=60).json()["models"].keys() == {"sentences", "tags"}


def test_a_replica_that_is_killed_is_replaced(served):
    replicas = [int(line) for line in os.popen("pgrep -f '[r]ay::ServeReplica'").read().split()]
    assert len(replicas) == 2
    found, ends = [], time.monotonic() + 15

    def ask():
        while time.monotonic() < ends:
            found.append(embed(TEXTS).status_code)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    time.sleep(2)
    os.kill(replicas[0], signal.SIGKILL)
    for client in clients:
        client.join()
    assert found.count(200) > 0.9 * len(found) and found[-1] == 200
