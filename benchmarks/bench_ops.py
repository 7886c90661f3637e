"""Each op of fastbert.ops, forward and forward + backward, against the PyTorch calls that it replaces.

`pytest benchmarks/bench_ops.py` runs one contender at a time under pytest-benchmark; ratios come from
`python -m benchmarks.run`, where contenders are interleaved. Both verify first. The truth of a case is PyTorch's own
calls (the first contender) in float64.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastbert
from benchmarks import floor, harness, sizes
from benchmarks.harness import Work
from benchmarks.sizes import Batch, Size
from fastbert import backends, ops, testing

EPS = 1e-12
PYTORCH = "PyTorch"


@dataclass(frozen=True)
class Contender:
    """One way to compute a case: collect(run(**prepare(**inputs))), of which `run` is what is timed."""

    run: Callable[..., Tensor]
    prepare: Callable[..., dict] = dict
    collect: Callable[[Tensor], Tensor] = lambda result: result

    def __call__(self, **inputs):
        return self.collect(self.run(**self.prepare(**inputs)))


@dataclass(frozen=True)
class Case:
    """One op on one batch.

    op: its name in fastbert.backends. pytorch: PyTorch's own ways; the first is the baseline and, in float64, the
    truth. others: peers whose error is no yardstick. bytes: moved at least, (forward, forward + backward). products,
    scores: forward operations in matrix products and in attention. also: other ops that it goes through.
    """

    op: str
    inputs: dict[str, object]
    ours: Callable[..., Tensor]
    pytorch: dict[str, Contender]
    bytes: tuple[float, float]
    products: float = 0
    scores: float = 0
    also: tuple[str, ...] = ()
    others: dict[str, Contender] = field(default_factory=dict)

    def work(self, tokens: int, backward: bool, ceilings: floor.Ceilings) -> Work:
        products = self.products * (3 if backward else 1)
        seconds = products / ceilings.product + self.scores / ceilings.attention_forward
        if backward:
            seconds += 2.5 * self.scores / ceilings.attention_backward
        flops, moved = products + self.scores * (3.5 if backward else 1), self.bytes[backward]
        return Work(tokens, flops, moved, max(seconds, moved / ceilings.bandwidth))


def normal(*shape: int, scale: float = 1.0, **kind) -> Tensor:
    return torch.randn(*shape, **kind) * scale


# ---- the cases: (size, batch, kind) -> Case; kind is dtype and device, T tokens, C channels, e bytes an element


def layer_norm(size: Size, batch: Batch, kind: dict) -> Case:
    C = size.config.hidden_size
    inputs = {"x": normal(batch.tokens, C, **kind), "weight": normal(C, **kind), "bias": normal(C, **kind)}
    row = inputs["x"].nbytes
    return Case(
        "layer_norm",
        inputs,
        lambda x, weight, bias: ops.layer_norm(x, weight, bias, EPS),
        {PYTORCH: Contender(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS))},
        bytes=(2 * row, 5 * row),
    )


def add_layer_norm(size: Size, batch: Batch, kind: dict) -> Case:
    C = size.config.hidden_size
    inputs = {name: normal(batch.tokens, C, **kind) for name in ("x", "residual")}
    inputs |= {name: normal(C, **kind) for name in ("weight", "bias", "x_bias")}
    row = inputs["x"].nbytes

    def plain(x, residual, weight, bias, x_bias):
        return F.layer_norm(x + x_bias + residual, weight.shape, weight, bias, EPS)

    def ours(x, residual, weight, bias, x_bias):
        return ops.add_layer_norm(x, residual, weight, bias, EPS, x_bias=x_bias)

    return Case("add_layer_norm", inputs, ours, {PYTORCH: Contender(plain)}, bytes=(3 * row, 7 * row))


def bias_gelu(size: Size, batch: Batch, kind: dict) -> Case:
    wide = size.config.intermediate_size
    inputs = {"x": normal(batch.tokens, wide, **kind), "bias": normal(wide, **kind)}
    row = inputs["x"].nbytes
    plain = Contender(lambda x, bias: F.gelu(x + bias))
    return Case("bias_gelu", inputs, ops.bias_gelu, {PYTORCH: plain}, bytes=(2 * row, 5 * row))


def dense_gelu(size: Size, batch: Batch, kind: dict) -> Case:
    C, wide = size.config.hidden_size, size.config.intermediate_size
    inputs = {
        "x": normal(batch.tokens, C, **kind),
        "weight": normal(wide, C, scale=C**-0.5, **kind),
        "bias": normal(wide, **kind),
    }
    moved = (batch.tokens * (C + wide) + C * wide) * inputs["x"].element_size()
    plain = Contender(lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)))
    onednn = Contender(lambda x, weight, bias: F.gelu(testing.onednn_linear(x, weight, bias)))
    ways, products = {PYTORCH: plain, **_on_cpu(kind, onednn)}, 2 * batch.tokens * C * wide
    return Case("dense_gelu", inputs, ops.dense_gelu, ways, bytes=(moved, 3 * moved), products=products)


def linear(size: Size, batch: Batch, kind: dict) -> Case:
    C = size.config.hidden_size
    inputs = {
        "x": normal(batch.tokens, C, **kind),
        "weight": normal(3 * C, C, scale=C**-0.5, **kind),
        "bias": normal(3 * C, **kind),
    }
    moved = (4 * batch.tokens * C + 3 * C**2) * inputs["x"].element_size()
    ways = {PYTORCH: Contender(F.linear), **_on_cpu(kind, Contender(testing.onednn_linear))}
    products = 6 * batch.tokens * C**2
    return Case("linear", inputs, ops.linear, ways, bytes=(moved, 3 * moved), products=products)


def _on_cpu(kind: dict, onednn: Contender) -> dict[str, Contender]:
    """PyTorch's other product: what its compiler uses on a CPU."""
    return {"PyTorch, oneDNN": onednn} if kind["device"] == "cpu" and kind["dtype"] == torch.float32 else {}


def embedding(size: Size, batch: Batch, kind: dict) -> Case:
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

    def plain(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias):
        z = F.embedding(input_ids, word, 0) + F.embedding(token_type_ids, token_type)
        return F.layer_norm(z + F.embedding(position_ids, position), weight.shape, weight, bias, EPS)

    row = T * C * inputs["word"].element_size()
    return Case(
        "embedding",
        inputs,
        lambda **tensors: ops.embedding(**tensors, eps=EPS, padding_idx=0),
        {PYTORCH: Contender(plain)},
        bytes=(2 * row, 4 * row + inputs["word"].nbytes + inputs["position"].nbytes),
    )


def cross_entropy(size: Size, batch: Batch, kind: dict) -> Case:
    """15 % of the tokens are labelled; Hugging Face's head computes the logits of all."""
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

    def plain(hidden, weight, bias, labels):
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)

    def selected(hidden, weight, bias, labels):
        rows = labels != -100
        return plain(hidden[rows], weight, bias, labels[rows])

    M = int((labels != -100).sum())
    moved = (M * (C + V) + V * C) * inputs["hidden"].element_size()
    pytorch = {PYTORCH: Contender(plain), "PyTorch, labelled rows": Contender(selected)}
    return Case("cross_entropy", inputs, ops.cross_entropy, pytorch, bytes=(moved, 3 * moved), products=2 * M * C * V)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """(B, S, H, D) each, as a padded model has them, to (B, S, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=batch.keys).transpose(1, 2)


def _varlen(batch: Batch, kind: dict) -> dict[str, Contender]:
    """PyTorch's packed attention: half precision on CUDA only."""
    if kind["device"] != "cuda" or kind["dtype"] == torch.float32:
        return {}
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = batch.packing.cu_seqlens, batch.packing.max_seqlen
    return {"PyTorch varlen_attn": Contender(lambda qkv: varlen_attn(*qkv.unbind(1), ends, ends, longest, longest))}


def attention(size: Size, batch: Batch, kind: dict) -> Case:
    heads, width = size.config.num_attention_heads, size.config.hidden_size
    inputs = {"qkv": normal(batch.tokens, 3, heads, size.config.head_dim, **kind)}
    padded = Contender(lambda qkv: _sdpa(*qkv.unbind(2), batch), lambda qkv: {"qkv": batch.pad(qkv)}, batch.take)
    row = inputs["qkv"].nbytes / 3
    return Case(
        "attention",
        inputs,
        lambda qkv: ops.attention(qkv, batch.packing.cu_seqlens, batch.packing.max_seqlen),
        {PYTORCH: padded},
        bytes=(4 * row, 12 * row),
        scores=floor.attention_flops(1, width, batch.lengths),
        others=_varlen(batch, kind),
    )


def qkv_attention(size: Size, batch: Batch, kind: dict) -> Case:
    heads, C = size.config.num_attention_heads, size.config.hidden_size
    inputs = {
        "hidden": normal(batch.tokens, C, **kind),
        "weight": normal(3 * C, C, scale=C**-0.5, **kind),
        "bias": normal(3 * C, **kind),
    }

    def separate(hidden, weight, bias):
        parts = zip(weight.chunk(3), bias.chunk(3), strict=True)
        q, k, v = (F.linear(hidden, w, b).unflatten(-1, (heads, -1)) for w, b in parts)
        return _sdpa(q, k, v, batch).flatten(2)

    def ours(hidden, weight, bias):
        return ops.qkv_attention(hidden, weight, bias, heads, batch.packing.cu_seqlens, batch.packing.max_seqlen)

    padded = Contender(separate, lambda hidden, **rest: {"hidden": batch.pad(hidden), **rest}, batch.take)
    row, weights = inputs["hidden"].nbytes, inputs["weight"].nbytes
    return Case(
        "attention",
        inputs,
        ours,
        {PYTORCH: padded},
        bytes=(8 * row + weights, 24 * row + 3 * weights),
        products=6 * batch.tokens * C**2,
        scores=floor.attention_flops(1, C, batch.lengths),
        also=("linear",),
    )


def pack(size: Size, batch: Batch, kind: dict) -> Case:
    inputs = {"x": batch.pad(normal(batch.tokens, size.config.hidden_size, **kind))}
    indices, grid = batch.indices, inputs["x"].nbytes
    row = grid * batch.tokens // batch.mask.numel()
    plain = Contender(lambda x: x.flatten(0, 1)[indices])
    return Case("padding", inputs, lambda x: ops.pack(x, indices), {PYTORCH: plain}, bytes=(2 * row, 3 * row + grid))


def unpack(size: Size, batch: Batch, kind: dict) -> Case:
    inputs = {"x": normal(batch.tokens, size.config.hidden_size, **kind)}
    indices, shape = batch.indices, tuple(batch.mask.shape)

    def plain(x):
        return x.new_zeros(shape[0] * shape[1], x.shape[1]).index_put((indices,), x).unflatten(0, shape)

    def ours(x):
        return ops.unpack(x, indices, *shape)

    row = inputs["x"].nbytes
    grid = row * batch.mask.numel() // batch.tokens
    return Case("padding", inputs, ours, {PYTORCH: Contender(plain)}, bytes=(row + grid, 3 * row + grid))


# name -> (case, distributions of lengths that make a difference to it)
CASES: dict[str, tuple[Callable[[Size, Batch, dict], Case], tuple[str, ...]]] = {
    "attention": (attention, ("full", "half")),
    "qkv_attention": (qkv_attention, ("full", "half")),
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
DIRECTIONS = ("forward", "forward+backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- running them


def contenders(case: Case, dtype: torch.dtype, device: str, backward: bool, compiled: bool) -> dict[str, Contender]:
    """PyTorch's ways; fastbert as it chooses by itself; and every other backend that can run this, forced."""
    found = {**case.pytorch, **case.others, "fastbert": Contender(case.ours)}
    if compiled:
        first = case.pytorch[PYTORCH]
        found["PyTorch, torch.compile"] = Contender(torch.compile(first.run), first.prepare, first.collect)
    chosen = backends.choose(case.op, device, dtype, backward=backward)
    for name in backends.BACKENDS:
        reasons = (backends.why_not(name, op, device, dtype, backward) for op in (case.op, *case.also))
        if name != chosen and not any(reasons):
            found[f"fastbert, {name}"] = Contender(_forced(name, case.ours))
    return found


def _forced(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forced(**inputs):
        with fastbert.backend(name):
            return run(**inputs)

    return forced


def verifier(case: Case, ways: dict[str, Contender], backward: bool) -> Callable[[str], list[testing.Row]]:
    return harness.by_the_rule(
        lambda name: testing.evaluate(ways[name], case.inputs, gradients=backward),
        lambda: testing.evaluate(case.pytorch[PYTORCH], case.inputs, dtype=torch.float64, gradients=backward),
        case.pytorch,
    )


def timed(way: Contender, inputs: dict, backward: bool) -> harness.Call:
    with torch.no_grad():
        arguments = way.prepare(**inputs)
    return (harness.forward_backward if backward else harness.forward)(way.run, arguments)


def report(
    name: str, size: Size, distribution: str, dtype: str, direction: str, device: str, *, rounds, limit, compiled
) -> harness.Report:
    """One case, measured (rounds > 0) or verified."""
    backward, batch = direction != "forward", sizes.make_batch(size, distribution, device)
    case = CASES[name][0](size, batch, {"dtype": DTYPES[dtype], "device": device})
    ways = contenders(case, DTYPES[dtype], device, backward, compiled)
    ceilings = floor.ceilings(device, DTYPES[dtype]) if rounds else None
    facts = {"op": name, "direction": direction, "dtype": dtype, "lengths": distribution}
    return harness.measure(
        {name: timed(way, case.inputs, backward) for name, way in ways.items()},
        verify=verifier(case, ways, backward),
        baseline=PYTORCH,
        work=case.work(batch.tokens, backward, ceilings) if ceilings else Work(batch.tokens),
        case={**facts, "batch": size.batch, "seqlen": size.seqlen, "hidden": size.config.hidden_size},
        device=device,
        rounds=rounds,
        limit=limit,
    )


def reports(size: Size, dtypes: list[str], device: str, **how) -> Iterator[harness.Report]:
    """Every op, distribution of lengths, dtype and direction in turn."""
    for name, (_, distributions) in CASES.items():
        for distribution, dtype, direction in itertools.product(distributions, dtypes, DIRECTIONS):
            yield report(name, size, distribution, dtype, direction, device, **how)


# ---- pytest-benchmark


@pytest.mark.parametrize("who", (PYTORCH, "fastbert"))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", CASES)
def test_op(benchmark, request, device, name, dtype, direction, who):
    size, backward = sizes.for_ops(request.config.getoption("--size"), device), direction != "forward"
    make, distributions = CASES[name]
    case = make(size, sizes.make_batch(size, distributions[-1], device), {"dtype": DTYPES[dtype], "device": device})
    ways = contenders(case, DTYPES[dtype], device, backward, compiled=False)
    testing.assert_rows(verifier(case, ways, backward)(who))
    benchmark.group = f"{name} {direction} {dtype} {distributions[-1]}"
    benchmark(harness.synchronised(timed(ways[who], case.inputs, backward), device))
