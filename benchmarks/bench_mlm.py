"""A masked-LM training step, 15 % of the real tokens labelled, against transformers' BertForMaskedLM with SDPA.

Forward and backward of the loss, and the whole step with fused AdamW, both with dropout; what is timed is verified
without dropout first, the loss and every gradient. Weights and ids are random and new in every run. Truth is
transformers' model in float64. "matrix products alone" leaves out the head's, which contenders run on different rows.
`pytest benchmarks/bench_mlm.py` runs one contender at a time; `python -m benchmarks.run --groups mlm` interleaves them.
"""

import copy
import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fastbert
from benchmarks import floor, harness, sizes
from benchmarks.bench_encoder import BASELINE, DROPOUT, TRUTH, Way, products, timed, with_dropout
from benchmarks.bench_ops import DTYPES
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size
from fastbert import checkpoint, testing

STEP = "step with AdamW, dropout 0.1"
DIRECTIONS = (DROPOUT, STEP)
SHARE = 0.15  # of the real tokens
SKIPPING = "fastbert.accelerate, skip_logits"
WHO = (BASELINE, "fastbert.accelerate", SKIPPING, "fastbert", "fastbert, packed input")


def models(size: Size, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """transformers' BertForMaskedLM as it is, accelerated (twice) and in float64, and ours; the same random weights."""
    return _models(tuple(size.config.to_dict().items()), dtype, device)


@functools.lru_cache(1)
def _models(values: tuple[tuple[str, object], ...], dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    import transformers

    config = fastbert.BertConfig.from_dict(dict(values))
    with torch.device(device):
        theirs = transformers.BertForMaskedLM(
            transformers.BertConfig(**config.to_dict(), attn_implementation="sdpa", use_cache=False)
        )
        ours = fastbert.BertForMaskedLM(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.04)
    theirs.to(dtype)
    ours.load_state_dict(theirs.state_dict())
    found = {BASELINE: theirs, "fastbert.accelerate": copy.deepcopy(theirs), SKIPPING: copy.deepcopy(theirs)}
    found |= {"fastbert": ours.to(dtype), TRUTH: copy.deepcopy(theirs).double()}
    fastbert.accelerate(found["fastbert.accelerate"])
    fastbert.accelerate(found[SKIPPING], skip_logits=True)
    found[TRUTH].gradient_checkpointing_enable()  # all float64 scores would not fit a GPU
    for model in found.values():
        model.train()
    return found


def masked(size: Size, batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and labels (T,) of a packed batch, and the rows that have a label."""
    ids = torch.randint(1, size.config.vocab_size, (batch.tokens,), device=device)
    rows = torch.randperm(batch.tokens, device=device)[: max(1, round(SHARE * batch.tokens))].sort().values
    labels = torch.full_like(ids, -100)
    labels[rows] = torch.randint(1, size.config.vocab_size, rows.shape, device=device)
    return ids, labels, rows


def ways(found: dict[str, nn.Module], batch: Batch, ids: Tensor, labels: Tensor, rows: Tensor) -> dict[str, Way]:
    grid = batch.pad(labels + 100) - 100  # pad fills with 0
    padded = {"input_ids": batch.pad(ids), "attention_mask": batch.mask.long(), "labels": grid}
    packed = {"input_ids": ids, "labels": labels, "labelled_rows": rows}
    packed |= {"cu_seqlens": batch.packing.cu_seqlens, "max_seqlen": batch.packing.max_seqlen}
    result = {name: Way(model, padded, padded=True) for name, model in found.items()}
    return result | {"fastbert, packed input": Way(found["fastbert"], packed, padded=False)}


def result(way: Way) -> testing.Result:
    """The loss, and its gradients under Hugging Face's names."""
    loss, parameters = way.run(**way.arguments), dict(way.module.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    return testing.Result({"loss": loss.detach()}, checkpoint.to_hugging_face(gradients))


def verifier(found: dict[str, Way]) -> harness.Verify:
    return harness.by_the_rule(lambda name: result(found[name]), lambda: result(found[TRUTH]), [BASELINE])


def whole_step(way: Way) -> harness.Call:
    """Forward, backward, and a step of fused AdamW so small that weights stay what they are for."""
    optimizer = torch.optim.AdamW(way.module.parameters(), lr=1e-6, fused=True)

    def call() -> None:
        optimizer.zero_grad()
        way.run(**way.arguments).backward()
        optimizer.step()

    return call


def work(size: Size, batch: Batch, labelled: int, dtype: torch.dtype, device: str, parameters: int) -> Work:
    """parameters: of the optimizer's step; 0 without one."""
    config, ceilings = size.config, floor.ceilings(device, dtype)
    bert = (config.num_hidden_layers, config.hidden_size)
    flops = floor.step_flops(*bert, batch.lengths, config.vocab_size, labelled)
    seconds = floor.step_seconds(*bert, batch.lengths, ceilings, dtype.itemsize)
    seconds += 3 * floor.head_flops(config.hidden_size, config.vocab_size, labelled) / ceilings.product
    moved = floor.adamw_bytes(parameters)
    total = floor.step_bytes(*bert, batch.tokens, dtype.itemsize) + moved
    return Work(batch.tokens, flops, total, seconds + moved / ceilings.bandwidth)


def case(size: Size, distribution: str, dtype: str, direction: str, device: str, p: float):
    """The calls to verify and the calls to time, the batch and how many tokens have a label."""
    batch, kind = sizes.make_batch(size, distribution, device), DTYPES[dtype]
    ids, labels, rows = masked(size, batch, device)
    exact = ways(models(size, kind, device), batch, ids, labels, rows)
    dropping = ways(models(with_dropout(size, p), kind, device), batch, ids, labels, rows) if p else exact
    start = whole_step if direction == STEP else functools.partial(timed, backward=True)
    return exact, {name: start(way) for name, way in dropping.items() if name != TRUTH}, batch, len(rows)


def report(
    size: Size, distribution: str, dtype: str, direction: str, device: str, *, rounds: int, limit: float
) -> harness.Report:
    exact, calls, batch, labelled = case(size, distribution, dtype, direction, device, 0.1 if rounds else 0.0)
    kind, config = DTYPES[dtype], size.config
    parameters = sum(p.numel() for p in exact[BASELINE].module.parameters()) if direction == STEP else 0
    facts = {"part": "masked LM", "direction": direction, "dtype": dtype, "lengths": distribution}
    facts |= {"labelled": labelled, "batch": size.batch, "seqlen": size.seqlen}
    facts |= {"hidden": config.hidden_size, "layers": config.num_hidden_layers}
    return harness.measure(
        calls,
        verify=verifier(exact),
        baseline=BASELINE,
        work=work(size, batch, labelled, kind, device, parameters) if rounds else Work(batch.tokens),
        case=facts,
        bounds={"matrix products alone": products(size, batch.tokens, kind, device, backward=True)},
        device=device,
        rounds=rounds,
        limit=limit,
    )


def reports(found: list[Size], dtypes: list[str], device: str, **how) -> Iterator[harness.Report]:
    for size, dtype, distribution, direction in itertools.product(found, dtypes, ("half", "full"), DIRECTIONS):
        yield report(size, distribution, dtype, direction, device, **how)


# ---- pytest-benchmark


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_masked_lm(benchmark, request, device, distribution, direction, who):
    option = request.config.getoption
    size = sizes.for_encoders(option("--size"), device, option("--layers"))[0]
    dtype = "bfloat16" if device == "cuda" else "float32"
    exact, calls, *_ = case(size, distribution, dtype, direction, device, 0.1)
    testing.assert_rows(verifier(exact)(who))
    benchmark.group = f"masked LM {direction} {distribution}"
    benchmark(harness.synchronised(calls[who], device))
