"""Models and encoders, classifiers and masked-LM steps, against everybody under benchmarks/contenders.

Forward; forward and backward, with and without dropout, without the optimizer, which is everybody's; and a masked-LM
model's whole step with fused AdamW, 15 % of the real tokens labelled. Weights and inputs are random and new in every
run; what is timed with dropout is verified without, outputs and every gradient. Bound and floor of a masked-LM head
count the labelled rows, which is all that has to be computed.
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
KINDS = {MODEL: "Model", CLASSIFIER: "ForSequenceClassification", MASKED_LM: "ForMaskedLM"}  # of classes


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
    """Packed; of a masked LM also labels, and the rows that have one."""
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
    """Forward, backward, and a step of fused AdamW so small that weights stay what they are for."""
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


@functools.lru_cache(2)  # of a size, with dropout and without
def _made(part: str, values: str, dtype: torch.dtype, device: str):
    """None of the weights is zero."""
    import transformers

    config, kind = BertConfig.from_dict(json.loads(values)), KINDS[part]
    options = {"add_pooling_layer": False} if part == MODEL and config.family.pooler_dense else {}
    given = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    if config.family.relative is None:
        given |= {"attn_implementation": "sdpa"}  # those of relative positions have their own, and no other
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
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of transformers have another name for it
        if wide.supports_gradient_checkpointing:  # all float64 scores would not fit a GPU
            wide.gradient_checkpointing_enable({"use_reentrant": False})
    return theirs, ours.to(dtype), wide


# ---- work and its bounds


def work(spec: Spec, batch: Batch, labelled: int = 0, parameters: int = 0) -> Work:
    """labelled: tokens through a masked-LM head. parameters: of the optimizer's step; 0 without one."""
    config = spec.size.config
    return floor.of_model(
        config.num_hidden_layers,
        config.hidden_size,
        batch.lengths,
        floor.ceilings(batch.device, spec.kind),
        step=spec.backward,
        element=spec.kind.itemsize,
        vocab=config.vocab_size,
        labelled=labelled,
        parameters=parameters,
    )


def products(spec: Spec, batch: Batch, labelled: int = 0) -> dict[str, harness.Call]:
    """As bounds: a model's products on packed tokens and, of a masked-LM head, on labelled rows, and nothing else."""
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
