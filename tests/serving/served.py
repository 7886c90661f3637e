"""Small models of every task, a comparison of their results, and helpers for threads."""

import threading
import time

import numpy as np
import torch
from small_models import TINY

from fastbert import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification, BertModel
from fastbert.data import save_tokenizer, train_tokenizer
from fastbert.inference import SentenceEncoder

TEXTS = ["The cat sits outside.", "It rains.", "größer als Zürich, 東京 🙂", "Dogs bark at the cat that sits there."]
LABELS = {0: "O", 1: "B-X", 2: "I-X"}
ROUNDING = 2 * np.finfo(np.float32).eps


def same(found, expected):
    """Asserts equality up to the last rounding to float32; models in float64 are as exact as that in any batch."""
    found, expected = (np.asarray(numbers, np.float64) for numbers in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


def save_models(directory):
    """Saves one model of each task, under its name, in float64, so that only the last rounding depends on the batch.

    max_length is 32.
    """
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, "wordpiece", vocab_size=200)

    def config(**more):
        values = {"vocab_size": tokenizer.get_vocab_size(), "initializer_range": 0.2, "id2label": None} | more
        return BertConfig.from_dict(TINY.to_dict() | values)

    body = BertModel(config(), add_pooling_layer=False).double()
    encoder = SentenceEncoder(body, tokenizer, normalize=False, prompts={"query": "it rains: "})
    encoder.save_pretrained(directory / "sentences")
    heads = {
        "reranker": BertForSequenceClassification(config(num_labels=1)),
        "classes": BertForSequenceClassification(config(num_labels=2, id2label={0: "good", 1: "bad"})),
        "tags": BertForTokenClassification(config(num_labels=3, id2label=LABELS)),
        "masks": BertForMaskedLM(config()),
    }
    for name, model in heads.items():
        model.double().save_pretrained(directory / name)
        save_tokenizer(tokenizer, directory / name, 32)
    return directory


def in_threads(work, count, seconds):
    """Runs work(0), work(1), ... in threads at the same time, and asserts that each ends within `seconds`."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
