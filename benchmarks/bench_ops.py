"""Each op of fastbert.ops, forward and forward + backward, against the PyTorch calls that it replaces, and others.

Inputs are random and new in every run. The truth of a case is PyTorch's own calls in float64.
`pytest benchmarks/bench_ops.py` runs one contender at a time; `python -m benchmarks.run --groups ops` interleaves them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks import cases, contenders, floor, harness
from benchmarks.cases import Setup, Spec
from benchmarks.contenders.interface import OPS, Subject
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size, make_batch

PARTS = OPS
DIRECTIONS = (cases.FORWARD, cases.BACKWARD)


@dataclass(frozen=True)
class Op:
    """One op on one batch.

    bytes: moved at least, (forward, forward + backward). product: (rows, inner, columns) of its matrix product, if it
    has one. scores: forward operations in attention.
    """

    inputs: dict[str, Tensor]
    bytes: tuple[float, float]
    product: tuple[int, int, int] | None = None
    scores: float = 0

    def work(self, spec: Spec, tokens: int, device: str) -> Work:
        ceilings = floor.ceilings(device, spec.kind)
        rows, inner, columns = self.product or (0, 0, 0)
        products = 2 * rows * inner * columns * (3 if spec.backward else 1)
        rest = self.scores / ceilings.attention_forward
        if spec.backward:
            rest += 2.5 * self.scores / ceilings.attention_backward
        flops, moved = products + self.scores * (3.5 if spec.backward else 1), self.bytes[spec.backward]
        seconds = max(products / ceilings.product + rest, moved / ceilings.bandwidth)
        return Work(tokens, flops, moved, seconds, rest if self.product else None)

    def bounds(self, spec: Spec, device: str) -> dict[str, harness.Call]:
        return floor.products_alone([self.product], spec.kind, device, spec.backward) if self.product else {}


def setup(spec: Spec, device: str) -> Setup:
    return of_batch(spec, make_batch(spec.size, spec.lengths, device), device)


def of_batch(spec: Spec, batch: Batch, device: str) -> Setup:
    op = CASES[spec.part][0](spec.size, batch, {"dtype": spec.kind, "device": device})
    subject = Subject(spec.part, spec.size.config, op.inputs)
    work = functools.partial(op.work, spec, batch.tokens, device)
    return Setup(batch, subject, cases.wide(subject), work, op.bounds(spec, device))


def report(spec: Spec, how: cases.How):
    return cases.report(spec, setup(spec, how.device), how)


# ---- the ops: (size, batch, kind) -> Op; kind is dtype and device, T tokens, C channels


def normal(*shape: int, scale: float = 1.0, **kind) -> Tensor:
    return torch.randn(*shape, **kind) * scale


def layer_norm(size: Size, batch: Batch, kind: dict) -> Op:
    C = size.config.hidden_size
    inputs = {"x": normal(batch.tokens, C, **kind), "weight": normal(C, **kind), "bias": normal(C, **kind)}
    row = inputs["x"].nbytes
    return Op(inputs, (2 * row, 5 * row))


def add_layer_norm(size: Size, batch: Batch, kind: dict) -> Op:
    C = size.config.hidden_size
    inputs = {name: normal(batch.tokens, C, **kind) for name in ("x", "residual")}
    inputs |= {name: normal(C, **kind) for name in ("weight", "bias", "x_bias")}
    row = inputs["x"].nbytes
    return Op(inputs, (3 * row, 7 * row))


def bias_gelu(size: Size, batch: Batch, kind: dict) -> Op:
    wide = size.config.intermediate_size
    inputs = {"x": normal(batch.tokens, wide, **kind), "bias": normal(wide, **kind)}
    row = inputs["x"].nbytes
    return Op(inputs, (2 * row, 5 * row))


def dense_gelu(size: Size, batch: Batch, kind: dict) -> Op:
    return _projection("x", size.config.hidden_size, size.config.intermediate_size, batch, kind)


def linear(size: Size, batch: Batch, kind: dict) -> Op:
    return _projection("x", size.config.hidden_size, 3 * size.config.hidden_size, batch, kind)


def _projection(name: str, inner: int, columns: int, batch: Batch, kind: dict) -> Op:
    inputs = {
        name: normal(batch.tokens, inner, **kind),
        "weight": normal(columns, inner, scale=inner**-0.5, **kind),
        "bias": normal(columns, **kind),
    }
    moved = (batch.tokens * (inner + columns) + inner * columns) * kind["dtype"].itemsize
    return Op(inputs, (moved, 3 * moved), (batch.tokens, inner, columns))


def embedding(size: Size, batch: Batch, kind: dict) -> Op:
    config, T, device = size.config, batch.tokens, kind["device"]
    C = config.hidden_size
    inputs = {
        "input_ids": torch.randint(1, config.vocab_size, (T,), device=device),
        "position_ids": batch.packing.positions(),
        "token_type_ids": torch.randint(2, (T,), device=device),
        "word": normal(config.vocab_size, C, **kind),
        "position": normal(config.max_position_embeddings, C, **kind),
        "token_type": normal(2, C, **kind),
        "weight": normal(C, **kind),
        "bias": normal(C, **kind),
    }
    row = T * C * kind["dtype"].itemsize
    return Op(inputs, (2 * row, 4 * row + inputs["word"].nbytes + inputs["position"].nbytes))


def cross_entropy(size: Size, batch: Batch, kind: dict) -> Op:
    """15 % of the tokens are labelled."""
    T, C, V = batch.tokens, size.config.hidden_size, size.config.vocab_size
    labels = torch.randint(V, (T,), device=kind["device"])
    labels[torch.rand(T, device=kind["device"]) > 0.15] = -100
    labels[0] = 1  # never none
    inputs = {
        "hidden": normal(T, C, **kind),
        "weight": normal(V, C, scale=C**-0.5, **kind),
        "bias": normal(V, **kind),
        "labels": labels,
    }
    M = int((labels != -100).sum())
    moved = (M * (C + V) + V * C) * kind["dtype"].itemsize
    return Op(inputs, (moved, 3 * moved), (M, C, V))


def attention(size: Size, batch: Batch, kind: dict) -> Op:
    inputs = {"qkv": normal(batch.tokens, 3, size.config.num_attention_heads, size.config.head_dim, **kind)}
    row = inputs["qkv"].nbytes / 3
    return Op(inputs, (4 * row, 12 * row), scores=floor.attention_flops(1, size.config.hidden_size, batch.lengths))


def qkv_attention(size: Size, batch: Batch, kind: dict) -> Op:
    C = size.config.hidden_size
    projection = _projection("hidden", C, 3 * C, batch, kind)
    row, weights = projection.inputs["hidden"].nbytes, projection.inputs["weight"].nbytes
    scores = floor.attention_flops(1, C, batch.lengths)
    return Op(projection.inputs, (8 * row + weights, 24 * row + 3 * weights), projection.product, scores)


def pack(size: Size, batch: Batch, kind: dict) -> Op:
    x = batch.pad(normal(batch.tokens, size.config.hidden_size, **kind))
    row = x.nbytes * batch.tokens // batch.mask.numel()
    return Op({"x": x}, (2 * row, 3 * row + x.nbytes))


def unpack(size: Size, batch: Batch, kind: dict) -> Op:
    x = normal(batch.tokens, size.config.hidden_size, **kind)
    grid = x.nbytes * batch.mask.numel() // batch.tokens
    return Op({"x": x}, (x.nbytes + grid, 3 * x.nbytes + grid))


# name -> (op, distributions of lengths that make a difference to it), the most important first
CASES: dict[str, tuple[Callable[[Size, Batch, dict], Op], tuple[str, ...]]] = {
    "attention": (attention, ("half", "full", "text")),
    "qkv_attention": (qkv_attention, ("half", "full")),
    "add_layer_norm": (add_layer_norm, ("full",)),
    "dense_gelu": (dense_gelu, ("full",)),
    "linear": (linear, ("full", "half")),
    "bias_gelu": (bias_gelu, ("full",)),
    "layer_norm": (layer_norm, ("full",)),
    "embedding": (embedding, ("full",)),
    "cross_entropy": (cross_entropy, ("full",)),
    "pack": (pack, ("half",)),
    "unpack": (unpack, ("half",)),
}


# ---- pytest-benchmark


@pytest.mark.parametrize(("name", "who"), [(name, c.name) for name in OPS for c in contenders.of(name, slow=True)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_op(alone, name, direction, who):
    alone(setup, name, CASES[name][1][0], direction, who)
