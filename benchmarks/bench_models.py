"""Benchmarks of models, encoders, classifiers and masked-LM steps, against all of benchmarks/contenders.

Timed are the forward; forward and backward, with and without dropout, but without the optimizer, which is the same for
all; and a masked-LM model's whole step with fused AdamW, with 15 % of the real tokens labelled. Weights and inputs are
random and new in every run. Cases with dropout are verified without it, outputs and every gradient. For a masked-LM
head, bound and floor count only the labelled rows, because no others have to be computed.
`pytest benchmarks/bench_models.py` runs one contender at a time; `python -m benchmarks.run` interleaves them.
"""

import copy
import dataclasses
import functools
import json
import warnings

import pytest
import torch
from torch import Tensor, nn

import fastbert
from benchmarks import cases, comparison, contenders, floor, harness
from benchmarks.batch import Batch, make_batch
from benchmarks.cases import STEP, P, Spec
from benchmarks.comparison import Setup
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, MODULES, Runnable, Subject
from benchmarks.harness import Work
from fastbert import BertConfig

SHARE = 0.15  # of the real tokens that are labelled
KINDS = {MODEL: "Model", CLASSIFIER: "ForSequenceClassification", MASKED_LM: "ForMaskedLM"}  # suffixes of class names


def setup(spec: Spec, device: str) -> Setup:
    batch = make_batch(spec.size, spec.lengths, device)
    inputs = inputs_of(spec, batch)
    labelled = len(inputs.get("labelled_rows", ()))
    theirs, ours, truth = modules(spec.part, spec.size.config, spec.kind, device)
    exact = Subject(spec.part, spec.size.config, batch, spec.kind, spec.backward, inputs, theirs, ours)

    def with_dropout() -> Subject:
        changes = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
        theirs, ours, _ = modules(spec.part, dataclasses.replace(exact.config, **changes), spec.kind, device)
        return dataclasses.replace(exact, theirs=theirs, ours=ours)

    parameters = sum(p.numel() for p in theirs.parameters()) if spec.direction == STEP else 0
    return Setup(
        exact,
        comparison.in_double(exact, theirs=truth),
        functools.partial(work, spec, batch, labelled, parameters),
        products(spec, batch, labelled),
        with_dropout if spec.has_dropout else None,
        whole_step if spec.direction == STEP else Runnable.timed,
        {"labelled": labelled} if labelled else {},
    )


def inputs_of(spec: Spec, batch: Batch) -> dict[str, Tensor]:
    """Packed inputs; for a masked LM also labels, and the indices of the labelled rows."""
    tokens, config, device = batch.tokens, spec.size.config, batch.device
    if spec.part == ENCODER:
        return {"hidden_states": torch.randn(tokens, config.hidden_size, dtype=spec.kind, device=device)}
    ids = torch.randint(1, config.vocab_size, (tokens,), device=device)
    if spec.part != MASKED_LM:
        return {"input_ids": ids}
    rows = torch.randperm(tokens, device=device)[: max(1, round(SHARE * tokens))].sort().values
    labels = torch.full_like(ids, -100)
    labels[rows] = torch.randint(1, config.vocab_size, rows.shape, device=device)
    return {"input_ids": ids, "labels": labels, "labelled_rows": rows}


def whole_step(runnable: Runnable, inputs: dict[str, Tensor], backward: bool) -> harness.Call:
    """Forward, backward, and a step of fused AdamW, which is so small that the weights stay useful."""
    arguments = runnable.prepare(**inputs)
    optimizer = torch.optim.AdamW(runnable.module.parameters(), lr=1e-6, fused=True)

    def call() -> None:
        optimizer.zero_grad()
        runnable.run(**arguments).backward()
        optimizer.step()

    return call


# ---- modules: transformers', ours, and transformers' in float64, with the same random weights


def modules(part: str, config: BertConfig, dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    found = _made(MODEL if part == ENCODER else part, json.dumps(config.to_dict()), dtype, device)
    return tuple(model.encoder for model in found) if part == ENCODER else found


@functools.lru_cache(2)  # for one size, with dropout and without
def _made(part: str, values: str, dtype: torch.dtype, device: str):
    """Makes the three modules. All weights are random: none stays zero."""
    import transformers

    config, kind = BertConfig.from_dict(json.loads(values)), KINDS[part]
    options = {"add_pooling_layer": False} if part == MODEL and config.family.pooler_dense else {}
    given = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    if config.family.relative is None:
        given |= {"attn_implementation": "sdpa"}  # families with relative positions have only their own
    with torch.device(device):
        settings = transformers.AutoConfig.for_model(config.model_type, **given, use_cache=False)
        theirs = getattr(transformers, config.family.class_name(kind))(settings, **options)
        ours = getattr(fastbert, f"Bert{kind}")(config, **options)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if parameter_name.endswith("LayerNorm.weight") else 0.0, 0.04)
    theirs.to(dtype)
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of transformers renamed it
        if wide.supports_gradient_checkpointing:  # the float64 scores of all layers do not fit a GPU
            wide.gradient_checkpointing_enable({"use_reentrant": False})
    return theirs, ours.to(dtype), wide


# ---- work and its bounds


def work(spec: Spec, batch: Batch, labelled: int = 0, parameters: int = 0) -> Work:
    """The work of a case. labelled: tokens through a masked-LM head. parameters: that the optimizer updates, or 0."""
    config = spec.size.config
    return floor.of_model(
        config.num_hidden_layers,
        config.hidden_size,
        batch.lengths,
        floor.ceilings(batch.device, spec.kind),
        intermediate=config.intermediate_size,
        step=spec.backward,
        element=spec.kind.itemsize,
        vocab=config.vocab_size,
        labelled=labelled,
        parameters=parameters,
    )


def products(spec: Spec, batch: Batch, labelled: int = 0) -> dict[str, harness.Call]:
    """Bounds: a model's matrix products alone, on packed tokens and, for a masked-LM head, on labelled rows."""
    config, tokens = spec.size.config, batch.tokens
    C, wide, V = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes = [(tokens, C, 3 * C), (tokens, C, C), (tokens, C, wide), (tokens, wide, C)] * config.num_hidden_layers
    shapes += [(labelled, C, C), (labelled, C, V)] if labelled else []
    return floor.products_alone(shapes, spec.kind, batch.device, spec.backward)


# ---- pytest-benchmark


@pytest.mark.parametrize(
    ("part", "direction", "who"),
    [
        (part, direction, contender.name)
        for part in MODULES
        for direction in ((cases.DROPOUT, STEP) if part == MASKED_LM else (cases.FORWARD, cases.BACKWARD))
        for contender in contenders.of(part, slow=True)
    ],
)
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_model(alone, part, distribution, direction, who):
    alone(setup, part, distribution, direction, who)
