"""Benchmarks of each op of fastbert.ops against the PyTorch calls that it replaces, and others.

Timed are the forward, forward + backward, and the backward alone.
Inputs are random and new in every run. The truth of a case is PyTorch's own calls in float64.
`pytest benchmarks/bench_ops.py` runs one contender at a time; `python -m benchmarks.run --groups ops` interleaves them.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import cases, comparison, contenders, floor
from benchmarks.batch import Batch, make_batch
from benchmarks.cases import Spec
from benchmarks.comparison import Setup
from benchmarks.contenders.interface import OPS, Runnable, Subject
from benchmarks.harness import Work

# op -> input -> its dimensions: T tokens, C channels, F channels in the middle of the feed-forward, Q channels of q, k
# and v together, H heads of D channels, V words, P positions; "" for integer inputs, which `integers` makes.
INPUTS: dict[str, dict[str, str]] = {
    "attention": {"qkv": "T3HD"},
    "qkv_attention": {"hidden": "TC", "weight": "QC", "bias": "Q"},
    "add_layer_norm": {"x": "TC", "residual": "TC", "weight": "C", "bias": "C", "x_bias": "C"},
    "dense_gelu": {"x": "TC", "weight": "FC", "bias": "F"},
    "linear": {"x": "TC", "weight": "QC", "bias": "Q"},
    "bias_gelu": {"x": "TF", "bias": "F"},
    "layer_norm": {"x": "TC", "weight": "C", "bias": "C"},
    "embedding": {"input_ids": "", "position_ids": "", "token_type_ids": ""}
    | {"word": "VC", "position": "PC", "token_type": "2C", "weight": "C", "bias": "C"},
    "cross_entropy": {"hidden": "TC", "weight": "VC", "bias": "V", "labels": ""},
    "linear_max": {"x": "TC", "weight": "VC", "bias": "V"},
    "pack": {"x": "TC"},
    "unpack": {"x": "TC"},
}
# The matrix product of an op: rows, inner dimension, columns. M: rows with a label.
PRODUCT = {"qkv_attention": "TCQ", "dense_gelu": "TCF", "linear": "TCQ", "cross_entropy": "MCV", "linear_max": "TCV"}
# The least number of elements that an op reads and writes: in the forward, and in forward and backward together.
# G: positions of the padded grid, B: sequences.
MOVED = {
    "attention": lambda n: (4 * n.T * n.C, 12 * n.T * n.C),
    "qkv_attention": lambda n: (8 * n.T * n.C + n.Q * n.C, 24 * n.T * n.C + 3 * n.Q * n.C),
    "add_layer_norm": lambda n: (3 * n.T * n.C, 7 * n.T * n.C),
    "dense_gelu": lambda n: _of_product(n.T, n.C, n.F),
    "linear": lambda n: _of_product(n.T, n.C, n.Q),
    "bias_gelu": lambda n: (2 * n.T * n.F, 5 * n.T * n.F),
    "layer_norm": lambda n: (2 * n.T * n.C, 5 * n.T * n.C),
    "embedding": lambda n: (2 * n.T * n.C, (4 * n.T + n.V + n.P) * n.C),
    "cross_entropy": lambda n: _of_product(n.M, n.C, n.V),
    "linear_max": lambda n: _of_maxima(n.T * n.C + n.V * n.C, n.B * n.V),
    "pack": lambda n: (2 * n.T * n.C, (3 * n.T + n.G) * n.C),
    "unpack": lambda n: ((n.T + n.G) * n.C, (3 * n.T + n.G) * n.C),
}


def _of_product(rows: int, inner: int, columns: int) -> tuple[int, int]:
    moved = rows * (inner + columns) + inner * columns
    return moved, 3 * moved


def _of_maxima(read: int, written: int) -> tuple[int, int]:
    return read + written, 3 * (read + written)


def setup(spec: Spec, device: str) -> Setup:
    batch, op = make_batch(spec.size, spec.lengths, device), spec.part
    n = dimensions(spec, batch)
    inputs = inputs_of(op, batch, n, spec.kind)
    n.M = int((inputs["labels"] != -100).sum()) if op == "cross_entropy" else 0
    product = tuple(getattr(n, letter) for letter in PRODUCT.get(op, ""))
    backward = spec.backward and op != "linear_max"  # a maximum's gradient is few rows, and no product of matrices
    is_bound = product and (spec.forward or backward)
    bounds = floor.products_alone([product], spec.kind, device, backward, spec.forward) if is_bound else {}
    subject = Subject(op, spec.size.config, batch, spec.kind, spec.backward, inputs)
    start = Runnable.timed if spec.forward else Runnable.timed_backward
    to_do = functools.partial(work, spec, batch, n, product)
    return Setup(subject, comparison.in_double(subject), to_do, bounds, start=start)


def dimensions(spec: Spec, batch: Batch) -> SimpleNamespace:
    config = spec.size.config
    return SimpleNamespace(
        T=batch.tokens,
        G=batch.mask.numel(),
        B=len(batch.lengths),
        C=config.hidden_size,
        F=config.intermediate_size,
        Q=3 * config.hidden_size,
        H=config.num_attention_heads,
        D=config.head_dim,
        V=config.vocab_size,
        P=config.max_position_embeddings,
    )


def inputs_of(op: str, batch: Batch, n: SimpleNamespace, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for name, dims in INPUTS[op].items():
        shape = [int(letter) if letter.isdigit() else getattr(n, letter) for letter in dims]
        is_projection = op in PRODUCT and name == "weight"
        scale = n.C**-0.5 if is_projection else 1.0
        found[name] = scale * torch.randn(shape, dtype=dtype, device=batch.device) if dims else integers(name, batch, n)
    return {"x": batch.pad(found["x"])} if op == "pack" else found


def integers(name: str, batch: Batch, n: SimpleNamespace) -> Tensor:
    if name == "position_ids":
        return torch.cat([torch.arange(length, device=batch.device) for length in batch.lengths])
    least, end = {"input_ids": (1, n.V), "token_type_ids": (0, 2), "labels": (0, n.V)}[name]
    found = torch.randint(least, end, (n.T,), device=batch.device)
    if name == "labels":  # 15 % of the tokens keep theirs, the first one always
        found[1:][torch.rand(n.T - 1, device=batch.device) > 0.15] = -100
    return found


def work(spec: Spec, batch: Batch, n: SimpleNamespace, product: tuple[int, ...]) -> Work:
    ceilings, (forward, both) = floor.ceilings(batch.device, spec.kind), MOVED[spec.part](n)
    moved = ((both if spec.backward else forward) - (0 if spec.forward else forward)) * spec.kind.itemsize
    scores = floor.attention_flops(n.C, batch.lengths) if "attention" in spec.part else 0
    flops = 2 * product[0] * product[1] * product[2] if product else 0
    sparse = 4 * n.B * n.V * n.C if spec.part == "linear_max" else None  # to both factors, a row for each maximum
    return floor.of_op(n.T, flops, scores, moved, spec.forward, spec.backward, ceilings, sparse)


# ---- pytest-benchmark


@pytest.mark.parametrize(("op", "who"), [(op, c.name) for op in OPS for c in contenders.of(op, slow=True)])
@pytest.mark.parametrize("direction", cases.DIRECTIONS["ops"])
def test_op(alone, op, direction, who):
    alone(setup, op, cases.LENGTHS[op][0], direction, who)
