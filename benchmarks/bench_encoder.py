"""BertModel and BertEncoder, forward and training step, against transformers' own with SDPA attention.

A step is forward and backward without the optimizer, which is everybody's; with and without dropout. Weights and inputs
are random and new in every run. Truth is transformers' model in float64. "matrix products alone" is the time of the
products of the real tokens: an encoder cannot beat it.
`pytest benchmarks/bench_encoder.py` runs one contender at a time; `python -m benchmarks.run` interleaves them.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

import fastbert
from benchmarks import floor, harness, peers, sizes
from benchmarks.bench_ops import DIRECTIONS, DTYPES, normal
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size
from fastbert import checkpoint, testing

PARTS = ("model", "encoder")
DROPOUT = "forward+backward, dropout 0.1"
BASELINE, TRUTH = "transformers sdpa", "truth"
INPUT = "hidden_states"


@dataclass(frozen=True)
class Way:
    """One implementation on one batch. padded: its inputs and outputs are (B, S, ...), not packed tokens."""

    module: Callable[..., tuple]
    arguments: dict[str, object]
    padded: bool

    def run(self, **arguments) -> Tensor:
        return self.module(**arguments)[0]


def models(config: fastbert.BertConfig, dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """transformers' BertModel, ours, and transformers' in float64, with the same random weights, none of them zero."""
    return _models(tuple(config.to_dict().items()), dtype, device)


@functools.lru_cache(1)
def _models(
    values: tuple[tuple[str, object], ...], dtype: torch.dtype, device: str
) -> tuple[nn.Module, nn.Module, nn.Module]:
    import transformers

    config = fastbert.BertConfig.from_dict(dict(values))
    with torch.device(device):
        theirs = transformers.BertModel(
            transformers.BertConfig(**config.to_dict(), attn_implementation="sdpa"), add_pooling_layer=False
        )
        ours = fastbert.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.04)
    theirs.to(dtype)
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    for layer in wide.encoder.layer:  # the float64 scores of all layers would not fit a GPU
        layer.forward = functools.partial(checkpointing.checkpoint, layer.forward, use_reentrant=False)
    return theirs, ours.to(dtype), wide


def ways(
    part: str, size: Size, batch: Batch, dtype: torch.dtype, device: str, backward: bool, compiled: bool
) -> dict[str, Way]:
    """The contenders, and as TRUTH the baseline in float64."""
    theirs, ours, wide = models(size.config, dtype, device)
    if part == "model":
        ids = torch.randint(1, size.config.vocab_size, (batch.tokens,), device=device)
        name, tokens, their_mask = "input_ids", ids, batch.mask.long()
    else:
        theirs, ours, wide = theirs.encoder, ours.encoder, wide.encoder
        name, tokens = INPUT, normal(batch.tokens, size.config.hidden_size, dtype=dtype, device=device)
        their_mask = batch.keys
    theirs.train(backward), ours.train(backward)
    grid, ends = batch.pad(tokens), {"cu_seqlens": batch.packing.cu_seqlens, "max_seqlen": batch.packing.max_seqlen}
    found = {
        BASELINE: Way(theirs, {name: grid, "attention_mask": their_mask}, padded=True),
        "fastbert": Way(ours, {name: grid, "attention_mask": batch.mask}, padded=True),
        "fastbert, packed input": Way(ours, {name: tokens, **ends}, padded=False),
        TRUTH: Way(wide, {name: _wide(grid), "attention_mask": their_mask}, padded=True),
    }
    if part == "model" and device == "cpu" and not backward:
        found |= engines(theirs, found[BASELINE].arguments, dtype)
    if compiled:
        found["transformers, torch.compile"] = Way(torch.compile(theirs), found[BASELINE].arguments, padded=True)
    return found


def engines(theirs: nn.Module, arguments: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Way]:
    """Inference engines that are installed, on transformers' own weights and input."""
    found = {}
    if peers.installed("openvino") and dtype != torch.float16:
        found["OpenVINO"] = Way(peers.OpenVino(copy.deepcopy(theirs), **arguments, dtype=dtype), arguments, padded=True)
    if peers.installed("ctranslate2") and dtype == torch.float32:
        found["CTranslate2"] = Way(peers.CTranslate2(theirs, **arguments), arguments, padded=True)
    return found


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def result(way: Way, batch: Batch, backward: bool) -> testing.Result:
    """The hidden states of the real tokens, and all gradients under Hugging Face's names."""
    leaves = {name: harness.leaf(value) for name, value in way.arguments.items()}
    collect = batch.take if way.padded else lambda x: x
    with torch.set_grad_enabled(backward):
        hidden = collect(way.run(**leaves))
    if not backward:
        return testing.Result({"hidden states": hidden}, {})
    cotangent = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(hidden)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in way.module.named_parameters()}
    wanted = parameters | ({INPUT: leaves[INPUT]} if INPUT in leaves else {})
    gradients = dict(zip(wanted, torch.autograd.grad(hidden, list(wanted.values()), cotangent), strict=True))
    if INPUT in gradients:
        gradients[INPUT] = collect(gradients[INPUT])
    return testing.Result({"hidden states": hidden.detach()}, checkpoint.to_hugging_face(gradients))


def verifier(found: dict[str, Way], batch: Batch, backward: bool) -> harness.Verify:
    return harness.by_the_rule(
        lambda name: result(found[name], batch, backward),
        lambda: result(found[TRUTH], batch, backward),
        [BASELINE],
        factor=3.0,  # hidden states of whole models
    )


def timed(way: Way, backward: bool) -> harness.Call:
    if not backward:
        return harness.forward(way.run, way.arguments)
    return harness.forward_backward(way.run, way.arguments, way.module.parameters())


def products(size: Size, tokens: int, dtype: torch.dtype, device: str, backward: bool) -> harness.Call:
    """The matrix products of the layers on packed tokens, and nothing else."""
    C, wide = size.config.hidden_size, size.config.intermediate_size
    one = []
    for rows, columns in ((3 * C, C), (C, C), (wide, C), (C, wide)):
        shapes = ((tokens, columns), (rows, columns), (tokens, rows))
        one.append([normal(*shape, dtype=dtype, device=device) for shape in shapes])

    def call():
        for x, weight, dy in one * size.config.num_hidden_layers:
            F.linear(x, weight)
            if backward:
                dy @ weight, dy.T @ x

    return call


def work(size: Size, lengths: list[int], dtype: torch.dtype, device: str, backward: bool) -> Work:
    bert, element = (size.config.num_hidden_layers, size.config.hidden_size), dtype.itemsize
    flops, moved, seconds = (
        (floor.step_flops, floor.step_bytes, floor.step_seconds)
        if backward
        else (floor.forward_flops, floor.forward_bytes, floor.forward_seconds)
    )
    fastest = seconds(*bert, lengths, floor.ceilings(device, dtype), element)
    return Work(sum(lengths), flops(*bert, lengths), moved(*bert, sum(lengths), element), fastest)


def with_dropout(size: Size, p: float) -> Size:
    config = dataclasses.replace(size.config, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return dataclasses.replace(size, config=config)


def report(
    part: str, size: Size, distribution: str, dtype: str, direction: str, device: str, *, rounds, limit, compiled
) -> harness.Report:
    """One case, measured (rounds > 0) or verified. What is timed with dropout is verified without."""
    kind, backward, batch = DTYPES[dtype], direction != "forward", sizes.make_batch(size, distribution, device)
    found = ways(part, size, batch, kind, device, backward, compiled)
    to_time = found
    if direction == DROPOUT and rounds:
        to_time = ways(part, with_dropout(size, 0.1), batch, kind, device, backward, compiled)
    facts = {"part": part, "direction": direction, "dtype": dtype, "lengths": distribution, "batch": size.batch}
    facts |= {"seqlen": size.seqlen, "hidden": size.config.hidden_size, "layers": size.config.num_hidden_layers}
    return harness.measure(
        {name: timed(way, backward) for name, way in to_time.items() if name != TRUTH},
        verify=verifier(found, batch, backward),
        baseline=BASELINE,
        work=work(size, batch.lengths, kind, device, backward) if rounds else Work(batch.tokens),
        case=facts,
        bounds={"matrix products alone": products(size, batch.tokens, kind, device, backward)},
        device=device,
        rounds=rounds,
        limit=limit,
    )


def reports(found: list[Size], dtypes: list[str], device: str, **how) -> Iterator[harness.Report]:
    """Every part, size, dtype, distribution of lengths and direction in turn."""
    for part, size, dtype in itertools.product(PARTS, found, dtypes):
        for distribution, direction in itertools.product(("half", "full"), (*DIRECTIONS, DROPOUT)):
            yield report(part, size, distribution, dtype, direction, device, **how)


# ---- pytest-benchmark


@pytest.mark.parametrize("who", (BASELINE, "fastbert", "fastbert, packed input"))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("distribution", ("full", "half"))
@pytest.mark.parametrize("part", PARTS)
def test_encoder(benchmark, request, device, part, distribution, direction, who):
    option, backward = request.config.getoption, direction != "forward"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = sizes.for_encoders(option("--size"), device, option("--layers"))[0]
    batch = sizes.make_batch(size, distribution, device)
    found = ways(part, size, batch, dtype, device, backward, compiled=False)
    testing.assert_rows(verifier(found, batch, backward)(who))
    benchmark.group = f"{part} {direction} {distribution}"
    benchmark(harness.synchronised(timed(found[who], backward), device))
