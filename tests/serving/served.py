"""Small models of every task, and a service on a real socket."""

import contextlib
import socket
import threading
import time

import torch
from small_models import TINY

from fastbert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)
from fastbert.data import save_tokenizer, train_tokenizer
from fastbert.inference import SentenceEncoder

TEXTS = ["The cat sits outside.", "It rains.", "größer als Zürich, 東京 🙂", "Dogs bark at the cat that sits there."]
LABELS = {0: "O", 1: "B-X", 2: "I-X"}


def save_models(directory):
    """Of each task one, under its name; max_length is 32."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, "wordpiece", vocab_size=200)

    def config(**more):
        values = {"vocab_size": tokenizer.get_vocab_size(), "initializer_range": 0.2, "id2label": None} | more
        return BertConfig.from_dict(TINY.to_dict() | values)

    encoder = SentenceEncoder(
        BertModel(config(), add_pooling_layer=False), tokenizer, normalize=False, prompts={"query": "it rains: "}
    )
    encoder.save_pretrained(directory / "sentences")
    heads = {
        "reranker": BertForSequenceClassification(config(num_labels=1)),
        "classes": BertForSequenceClassification(config(num_labels=2, id2label={0: "good", 1: "bad"})),
        "tags": BertForTokenClassification(config(num_labels=3, id2label=LABELS)),
        "masks": BertForMaskedLM(config()),
    }
    for name, model in heads.items():
        model.save_pretrained(directory / name)
        save_tokenizer(tokenizer, directory / name, 32)
    return directory


@contextlib.contextmanager
def listening(app):
    """Its address, while it is served."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
