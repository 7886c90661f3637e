import itertools

import pytest
import torch
import torch.nn.functional as F
from op_suite import (  # noqa: F401
    VALUE_ERROR,
    OpSuite,
    assert_same_bits_for_any_number_of_threads,
    device_for,
    normal,
    pytest_generate_tests,
)
from test_relative_attention import SLOTS, of_distances

import fastbert
from fastbert import backends, ops, random, testing
from fastbert.ops.encoder_layer import Settings
from fastbert.ops.op import PRIMITIVES

ONE = "qkv_weight qkv_bias"
THREE = "q_weight q_bias k_weight k_bias v_weight v_bias"
PLAIN = (None,) * 4  # no positions
REST = "out_weight out_bias norm_weight norm_bias up_weight up_bias down_weight down_bias last_weight last_bias"


class TestEncoderLayer(OpSuite):
    """Compared with the layer in plain PyTorch, in each dtype, by the accuracy rule for whole models."""

    op = "encoder_layer"
    factor = 3.0
    multiplies = True
    projections = ONE
    shapes = [
        pytest.param(((70, 0, 31), 24, 3, 40), id="more-than-a-tile-of-queries"),
        pytest.param(((1, 2), 10, 2, 7), id="odd"),
        pytest.param(((90, 40), 64, 4, 256), id="products-by-onednn"),
    ]
    p = 0.0
    approximate = "none"

    def names(self):
        return tuple(f"{self.projections} {REST}".split())

    @property
    def parameters(self):
        return self.names()

    def inputs(self, shape, dtype, device):
        lengths, width, self.heads, inner = shape
        sizes = {"qkv": (3 * width, width), "up": (inner, width), "down": (width, inner)}
        inputs = {"hidden": normal(sum(lengths), width, dtype=dtype, device=device)}
        for name in self.names():
            part, kind = name.split("_")
            rows, columns = sizes.get(part, (width, width))
            norm = part in ("norm", "last")
            size = (width,) if norm else (rows,) if kind == "bias" else (rows, columns)
            scale = 0.3 if norm or kind == "bias" else 2 * columns**-0.5
            inputs[name] = normal(*size, dtype=dtype, device=device, scale=scale) + (norm and kind == "weight")
        ends = [0, *itertools.accumulate(lengths)]
        return inputs | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device), "longest": max(lengths)}

    def parameters_of(self, inputs):
        """The layer's parameters, in its order."""
        return [inputs[name] for name in self.names()]

    def empty(self, dtype, device):
        return self.inputs(((0, 0), 8, 2, 12), dtype, device)

    def positions(self, inputs):
        return None

    def _call(self, op, hidden, cu_seqlens, longest, **parameters):
        dropping = {"attention_dropout_p": self.p, "dropout_p": self.p, "rng": self.rng(hidden), "site": 4}
        options = dropping | {"approximate": self.approximate, "eps": 1e-5, "positions": self.positions(parameters)}
        return op(hidden, self.parameters_of(parameters), self.heads, cu_seqlens, longest, **options)

    def rng(self, hidden):
        return torch.tensor([7], device=hidden.device) if self.p else None

    def ours(self, **inputs):
        return self._call(ops.encoder_layer, **inputs)

    def truth(self, **inputs):
        return self._call(plain_layer, **inputs)

    def contenders(self):
        def library(linear):
            return lambda **inputs: self._call(lambda *a, **k: plain_layer(*a, **k, linear=linear), **inputs)

        return [library(F.linear), library(testing.onednn_linear)]

    def primitive_calls(self, inputs):
        parameters = self.parameters_of(inputs)
        hidden, cu_seqlens, heads = inputs["hidden"], inputs["cu_seqlens"], self.heads
        dropout = (self.p,) * 3
        settings = Settings(inputs["longest"], heads, 0.5, *dropout, 4, self.approximate, hidden.dtype, 1e-5, 1e-5)
        positions = self.positions(inputs)
        tables = PLAIN if positions is None else positions.beside(hidden.dtype)
        given = (cu_seqlens, *tables, self.rng(hidden), *settings)
        yield from layer_calls(hidden, None, parameters, given)

    def test_second_derivative_is_refused(self, backend):
        if backend.name != "reference":  # plain PyTorch, which has any number of derivatives
            return super().test_second_derivative_is_refused(backend)
        self.ours(**self.inputs(self.shapes[1].values[0], torch.float64, backend.device))


def layer_calls(hidden, context, parameters, given):
    """Calls of the primitives. The backward gets what the chosen backend's forward saves."""
    yield "encoder_layer_fwd", (hidden, context, parameters, *given, False, 1)
    if context is None:
        yield "encoder_layer_fwd", (hidden, context, parameters * 2, *given, False, 2)
    if backend := backends.find("encoder_layer", hidden.device.type, hidden.dtype, backward=True):
        yield "encoder_layer_fwd", (hidden, context, parameters, *given, True, 1)
        y, saved = PRIMITIVES["encoder_layer_fwd"](backend, hidden, context, parameters, *given, True, 1)
        everything, of_tables = [1, int(context is not None)] + [1] * len(parameters), int(given[1] is not None)
        for needed in ([*everything, of_tables], [1, 0] + [0] * len(parameters) + [0]):
            yield "encoder_layer_bwd", (y, hidden, context, parameters, saved, *given, needed)


class TestThreeProjections(TestEncoderLayer):
    projections = "q_weight k_weight v_weight qkv_bias"
    approximate = "tanh"

    def parameters_of(self, inputs):
        """The biases are parts of one tensor, as in a packed projection. Softmax cancels the keys' bias: its gradient
        is only rounding noise, in our result and in PyTorch's, and by itself could not be compared."""
        *weights, bias = super().parameters_of(inputs)[:4]
        pairs = zip(weights, bias.chunk(3), strict=True)
        return [*itertools.chain.from_iterable(pairs), *super().parameters_of(inputs)[4:]]


class TestDropout(TestEncoderLayer):
    p = 0.25

    @pytest.mark.slow  # it only adds the random numbers, which every op's test covers
    def test_compiles_to_one_graph(self, backend):
        super().test_compiles_to_one_graph(backend)


class TestDistances(TestEncoderLayer):
    """Scores that also depend on the distance of query and key, with dropout."""

    p = 0.25
    tables = ("keys", "queries", "bias")
    shapes = [
        pytest.param(((70, 0, 31), 24, 3, 40), id="more-than-a-tile-of-queries"),
        pytest.param(((1, 2), 10, 2, 7), id="odd"),
    ]

    @property
    def parameters(self):
        return (*self.names(), *self.tables)

    def inputs(self, shape, dtype, device):
        inputs, slots = super().inputs(shape, dtype, device), SLOTS["log"]
        heads, size = self.heads, shape[1] // self.heads
        shapes = {"keys": (16, heads, size), "queries": (16, heads, size), "bias": (heads, 16)}
        tables = {name: normal(*shapes[name], dtype=dtype, device=device) for name in self.tables}
        return inputs | {"slots": slots.to(device)} | tables

    def positions(self, inputs):
        return ops.RelativePositions(inputs["slots"], *[inputs.get(name) for name in ("keys", "queries", "bias")])


class TestBiasOfDistances(TestDistances):
    p = 0.0
    tables = ("bias",)


class TestAfterAttention(TestEncoderLayer):
    """The part of the layer that follows attention, for a random context of another width than the layer."""

    projections = ""
    shapes = [pytest.param((9, 10, 6, 7), id="odd"), pytest.param((130, 64, 96, 256), id="products-by-onednn")]

    def inputs(self, shape, dtype, device):
        tokens, width, inner, wide = shape
        inputs = super().inputs(((tokens,), width, 1, wide), dtype, device)
        inputs["out_weight"] = normal(width, inner, dtype=dtype, device=device, scale=2 * inner**-0.5)
        inputs["context"] = normal(tokens, inner, dtype=dtype, device=device)
        return {name: inputs[name] for name in ("hidden", "context", *self.parameters)}

    def empty(self, dtype, device):
        return self.inputs((0, 8, 8, 12), dtype, device)

    def _call(self, op, hidden, context, **parameters):
        dropping = {"dropout_p": self.p, "rng": self.rng(hidden), "site": 4}
        options = dropping | {"approximate": self.approximate, "eps": 1e-5}
        return op(context, hidden, self.parameters_of(parameters), **options)

    def ours(self, **inputs):
        return self._call(ops.after_attention, **inputs)

    def truth(self, **inputs):
        return self._call(plain_rest, **inputs)

    def contenders(self):
        def library(linear):
            return lambda **inputs: self._call(lambda *a, **k: plain_rest(*a, **k, linear=linear), **inputs)

        return [library(F.linear), library(testing.onednn_linear)]

    def primitive_calls(self, inputs):
        hidden, parameters = inputs["hidden"], self.parameters_of(inputs)
        settings = Settings(0, 1, 1.0, 0.0, self.p, self.p, 4, self.approximate, hidden.dtype, 1e-5, 1e-5)
        yield from layer_calls(hidden, inputs["context"], parameters, (None, *PLAIN, self.rng(hidden), *settings))


class TestAfterAttentionWithDropout(TestAfterAttention):
    p = 0.25
    approximate = "tanh"

    @pytest.mark.slow  # it only adds the random numbers, which every op's test covers
    def test_compiles_to_one_graph(self, backend):
        super().test_compiles_to_one_graph(backend)


def plain_layer(
    hidden,
    parameters,
    heads,
    cu_seqlens,
    longest,
    *,
    eps,
    approximate,
    attention_dropout_p,
    dropout_p,
    rng,
    site,
    positions=None,
    linear=F.linear,
):
    """The layer in plain PyTorch, one sequence at a time, in hidden's dtype."""
    pairs = [(w.to(hidden.dtype), b.to(hidden.dtype)) for w, b in zip(parameters[::2], parameters[1::2], strict=True)]
    projections = pairs[:-5]
    qkv = torch.cat([linear(hidden, *pair) for pair in projections], -1).unflatten(-1, (3, heads, -1))
    contexts = [qkv.new_empty(0, hidden.shape[1])]
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = (scores if positions is None else scores + of_distances(q, k, *positions)).softmax(-1)
        if attention_dropout_p:
            kept = random.attention_keep(rng, site, i + 1, heads, end - start, attention_dropout_p)[-1]
            weights = torch.where(kept, weights * random.keep_scale(attention_dropout_p, 8), 0)
        contexts.append((weights @ v).transpose(0, 1).flatten(1))
    rest = {"eps": eps, "approximate": approximate, "dropout_p": dropout_p, "rng": rng, "site": site, "linear": linear}
    return plain_rest(torch.cat(contexts), hidden, parameters[-10:], **rest)


def plain_rest(context, hidden, parameters, *, eps, approximate, dropout_p, rng, site, linear=F.linear):
    """The part that follows attention, in plain PyTorch, in hidden's dtype."""
    pairs = [(w.to(hidden.dtype), b.to(hidden.dtype)) for w, b in zip(parameters[::2], parameters[1::2], strict=True)]
    out, norm, up, down, last = pairs

    def add(x, residual, norm, place):
        if dropout_p:
            kept = random.row_keep(rng, site + place, *x.shape, dropout_p)
            x = torch.where(kept, x * random.keep_scale(dropout_p, 16), 0)
        return F.layer_norm(x + residual, x.shape[-1:], *norm, eps)

    middle = add(linear(context, *out), hidden, norm, 1)
    wide = F.gelu(linear(middle, *up), approximate=approximate)
    return add(linear(wide, *down), middle, last, 2)


# ---- in a model


def model(dtype=torch.float32, **changes):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    config = fastbert.BertConfig(vocab_size=50, **sizes, **changes)
    return fastbert.BertModel(config).to(dtype)


def outcome(model, ids, mask, autocast, seed=3):
    """The hidden state and the parameters' gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model(ids, mask).last_hidden_state
    if hidden.requires_grad:
        hidden.float().square().sum().backward()
    return [hidden, *[p.grad for p in model.parameters()]]


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


CASES = ("float32", "bfloat16", "float64", "autocast", "accelerated", "frozen", "evaluation", "long", "empty")


@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_single_ops(case, monkeypatch):
    """In eager mode, where every op runs on the CPU kernels, one call for a layer gives the bits of its single ops."""
    if backends.find("encoder_layer", "cpu", torch.float32, backward=True) is None:
        pytest.skip(str(backends.why_not("cpu", "encoder_layer", "cpu", torch.float32)))
    torch.manual_seed(1)
    ours = model(getattr(torch, case, torch.float32) if case in ("bfloat16", "float64") else torch.float32)
    ours.train(case != "evaluation")
    if case == "frozen":
        ours.encoder.layer[0].requires_grad_(False)
        ours.encoder.layer[1].attention.qkv.weight.requires_grad_(False)
        ours.embeddings.requires_grad_(False)
    if case == "accelerated":
        transformers = pytest.importorskip("transformers")
        ours = transformers.BertModel(transformers.BertConfig(**model().config.to_dict()))
        fastbert.accelerate(ours)
    sequences, seqlen = (6, 120) if case == "long" else (3, 9)
    ids = torch.randint(1, 50, (sequences, seqlen))
    mask = torch.arange(seqlen) < torch.randint(1, seqlen + 1, (sequences, 1)) * (case != "empty")
    autocast = case in ("autocast", "empty")
    before = backends.calls().get(("encoder_layer_fwd", "cpu"), 0)
    whole = outcome(ours, ids, mask, autocast)
    assert backends.calls()["encoder_layer_fwd", "cpu"] == before + 2
    monkeypatch.setattr(backends, "find", lambda *args, **kwargs: None)
    assert same(whole, outcome(ours, ids, mask, autocast))
    assert backends.calls()["encoder_layer_fwd", "cpu"] == before + 2


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "suite",
    [TestThreeProjections(), TestDropout(), TestDistances()],
    ids=["three projections", "dropout", "distances"],
)
def test_several_layers_in_one_call(suite, backend):
    """Each layer has its own parameters and its own three dropout sites."""
    if reason := backends.why_not(backend, "encoder_layer", "cpu", torch.float32):
        pytest.skip(reason)
    torch.manual_seed(0)
    inputs = [suite.inputs(((5, 0, 3), 8, 2, 12), torch.float32, "cpu") for _ in range(3)]
    parameters = [suite.parameters_of(each) for each in inputs]
    hidden, ends, key = inputs[0]["hidden"], inputs[0]["cu_seqlens"], suite.rng(inputs[0]["hidden"])
    tables = suite.positions(inputs[0]) or PLAIN
    settings = Settings(5, 2, 0.5, suite.p, suite.p, suite.p, 4, "none", torch.float32, 1e-5, 1e-5)
    run, at_once, key = PRIMITIVES["encoder_layer_fwd"], sum(parameters, []), (*tables, key)
    whole, saved = run(backend, hidden, None, at_once, ends, *key, *settings, False, 3)
    for turn, each in enumerate(parameters):
        one = settings._replace(site=4 + 3 * turn)
        hidden, _ = run(backend, hidden, None, each, ends, *key, *one, False, 1)
    assert torch.equal(whole, hidden) and not saved
    if backend == "reference":
        return
    for context, save, layers, words in (
        (None, False, 0, "0 layers; expected one, or several"),
        (None, True, 3, "3 layers; expected one, or several without a context and a backward"),
        (hidden, False, 3, "3 layers; expected one, or several without a context and a backward"),
        (None, False, 5, "tensors of 5 layers; expected as many of each"),
    ):
        with pytest.raises(VALUE_ERROR, match=words):
            run(backend, hidden, context, at_once, ends, *key, *settings, save, layers)


@pytest.mark.parametrize("suite", [TestThreeProjections(), TestDistances()], ids=["three projections", "distances"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_have_the_same_bits_for_any_number_of_threads(suite, dtype):
    """Where our own loops compute all products, the threads stand by for the whole layer."""
    torch.manual_seed(0)
    inputs = suite.inputs(((5, 0, 9), 64, 4, 256), dtype, "cpu")
    forwards = [args for name, args in suite.primitive_calls(inputs) if name == "encoder_layer_fwd"]

    def everything():
        outcomes = [PRIMITIVES["encoder_layer_fwd"]("cpu", *args) for args in forwards]
        return [tensor for y, saved in outcomes for tensor in (y, *saved)]

    assert len(everything()) == 2 + 1 + 11
    assert_same_bits_for_any_number_of_threads(everything)


@pytest.mark.parametrize("suite", [TestEncoderLayer(), TestDistances()], ids=["plain", "distances"])
def test_gradients_that_nobody_asked_for_are_not_computed(suite):
    """The operator returns empty tensors for them. Nothing is computed below the lowest tensor that needs one."""
    torch.manual_seed(0)
    inputs = suite.inputs(((5, 3), 8, 2, 12), torch.float32, "cpu")
    calls = [args for name, args in suite.primitive_calls(inputs) if name == "encoder_layer_bwd"]
    if not calls:
        pytest.skip("there are no CPU kernels")
    *given, needed = calls[0]
    run, tables = PRIMITIVES["encoder_layer_bwd"], needed[-1]
    *_, everything, of_tables = run("cpu", *given, needed)
    for i in range(12 + tables):
        dhidden, _, grads, dtables = run("cpu", *given, [0, 0] + [int(i == j) for j in range(13)])
        assert dhidden.numel() == 0 and [g.numel() > 0 for g in grads] == [i == j for j in range(12)]
        assert [g.numel() > 0 for g in dtables] == [i == 12] * 3 * tables
        found, expected = ([grads[i]], [everything[i]]) if i < 12 else (dtables, of_tables)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(8)}, ValueError, "hidden has shape"),
        ({"hidden": torch.zeros(8, 8, dtype=torch.int32)}, TypeError, "hidden is torch.int32"),
        ({"up_weight": torch.zeros(12, 7)}, ValueError, r"parameters\[6\] has shape \(12, 7\)"),
        ({"last_bias": torch.zeros(7)}, ValueError, r"parameters\[11\] has shape \(7,\)"),
        ({"out_weight": torch.tensor(1.0)}, ValueError, r"parameters\[2\] has shape \(\)"),
        ({"down_weight": torch.tensor(1.0)}, ValueError, r"parameters\[8\] has shape \(\)"),
        ({"qkv_bias": torch.zeros(24).half()}, TypeError, r"parameters\[1\] is torch.float16"),
        ({"cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32)}, ValueError, "cu_seqlens ends at 7"),
        ({"longest": 4}, ValueError, "max_seqlen is 4"),
    ],
)
def test_bad_arguments(change, error, words):
    suite = TestEncoderLayer()
    inputs = suite.inputs(((5, 3), 8, 2, 12), torch.float32, "cpu")
    with pytest.raises(error, match=words):
        suite.ours(**inputs | change)


def test_other_bad_arguments():
    suite = TestEncoderLayer()
    inputs = suite.inputs(((5, 3), 8, 2, 12), torch.float32, "cpu")
    parameters = suite.parameters_of(inputs)
    given = (inputs["cu_seqlens"], 5)
    for heads, few, options, words in (
        (3, parameters, {}, "num_heads is 3"),
        (2, parameters[:-2], {}, "10 parameters"),
        (2, parameters, {"approximate": "fast"}, "approximate is 'fast'"),
        (2, parameters, {"eps": -1.0}, "eps is -1.0"),
        (2, parameters, {"dropout_p": 0.1}, "rng is None"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.encoder_layer(inputs["hidden"], few, heads, *given, **options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"context": torch.zeros(7, 6)}, ValueError, r"context has shape \(7, 6\); expected \(T, D\) = \(8, 6\)"),
        ({"context": torch.zeros(8, 6).double()}, TypeError, "context is torch.float64 beside hidden of torch.float32"),
        ({"context": torch.zeros(8, 6, device="meta")}, ValueError, "context on meta"),
        ({"up_bias": torch.zeros(7)}, ValueError, r"parameters\[5\] has shape \(7,\)"),
    ],
)
def test_bad_arguments_after_attention(change, error, words):
    suite = TestAfterAttention()
    inputs = suite.inputs((8, 8, 6, 12), torch.float32, "cpu")
    with pytest.raises(error, match=words):
        suite.ours(**inputs | change)
    parameters = suite.parameters_of(inputs)
    with pytest.raises(ValueError, match="12 parameters; expected 10"):
        ops.after_attention(inputs["context"], inputs["hidden"], parameters[:2] + parameters)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_operator_refuses_a_norm_of_another_kind(dtype):
    suite = TestEncoderLayer()
    inputs = suite.inputs(((5, 3), 8, 2, 12), torch.float32, "cpu")
    inputs["last_bias"] = inputs["last_bias"].to(dtype)
    _, args = next(iter(suite.primitive_calls(inputs)))
    if reason := backends.why_not("cpu", "encoder_layer", "cpu", torch.float32):
        pytest.skip(reason)
    with pytest.raises(VALUE_ERROR, match="a LayerNorm's parameter is (Long|Double)"):
        PRIMITIVES["encoder_layer_fwd"]("cpu", *args)


@pytest.mark.parametrize("training", [True, False])
def test_attention_on_another_backend(training, monkeypatch):
    """On a GPU attention may run in Triton. The layer then makes two calls around it, and gives the same bits."""
    if backends.find("encoder_layer", "cpu", torch.float32, backward=True) is None:
        pytest.skip(str(backends.why_not("cpu", "encoder_layer", "cpu", torch.float32)))
    torch.manual_seed(1)
    ours = model().train(training)
    ids, mask = torch.randint(1, 50, (3, 9)), torch.arange(9) < torch.tensor([[9], [4], [1]])
    whole = outcome(ours, ids, mask, False)
    monkeypatch.setattr(fastbert.layer, "attends_elsewhere", lambda *args: True)
    before = backends.calls()
    assert same(whole, outcome(ours, ids, mask, False))
    ran = {op: n - before.get((op, name), 0) for (op, name), n in backends.calls().items() if name == "cpu"}
    names = ("linear_fwd", "attention_fwd", "encoder_layer_fwd", "add_layer_norm_fwd", "dense_gelu_fwd")
    assert [ran.get(name, 0) for name in names] == [2, 2, 2, 0, 0]


def small_layer(name):
    """A backend's device, and bfloat16 parameters of a layer of width 2 that lets hidden pass."""
    device = device_for(name, "encoder_layer", torch.bfloat16, backward=True)
    square, zero, one = torch.zeros(2, 2), torch.zeros(2), torch.ones(2)
    attention = torch.zeros(6, 2), torch.zeros(6), square, zero, one, zero
    parameters = [*attention, torch.zeros(1, 2), torch.zeros(1), torch.zeros(2, 1), zero, one, zero]
    return device, [x.to(device, torch.bfloat16, copy=True) for x in parameters]


@pytest.mark.parametrize("name", ["cpu", "cuda", "reference"])
def test_the_bias_of_the_mlp_is_added_before_its_product_is_rounded(name):
    """The product is 257, which bfloat16 does not have, the bias -256: GELU(1), of which nothing may be lost."""
    device, parameters = small_layer(name)
    for parameter, value in zip(parameters[6:9], ([[128, -129]], [-256], [[-4], [0]]), strict=True):
        parameter.copy_(torch.tensor(value))
    hidden = torch.tensor([[1.0, -1.0]], device=device, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with fastbert.backend(name):
        assert ops.encoder_layer(hidden, parameters, 1, cu_seqlens, 1).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("name", ["cpu", "cuda", "reference"])
def test_a_float32_bias_beside_a_16_bit_weight_gets_a_float32_gradient(name):
    device, parameters = small_layer(name)
    parameters[-1] = parameters[-1].float().requires_grad_()
    hidden = normal(257, 2, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor([0, 257], dtype=torch.int32, device=device)
    with fastbert.backend(name):
        y = ops.encoder_layer(hidden, parameters, 1, cu_seqlens, 257)
        y.backward(torch.ones_like(y))
    assert parameters[-1].grad.tolist() == [257.0] * 2  # bfloat16 has 256 and 258


def test_a_parameter_elsewhere_is_refused():
    """A model that is half loaded has parameters on the meta device, for which torch would only compute shapes."""
    ours, ids = model().eval(), torch.randint(1, 50, (2, 5))
    ours.encoder.layer[1].output.dense.bias = torch.nn.Parameter(torch.zeros(48, device="meta"))
    for block in (torch.no_grad(), torch.enable_grad()):
        with block, pytest.raises(ValueError, match="is on meta; expected cpu"):
            ours(ids)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_weight_of_another_kind_is_refused(dtype):
    ours = model().eval().requires_grad_(False)
    dense = ours.encoder.layer[0].output.dense
    dense.weight = torch.nn.Parameter(dense.weight.to(dtype), requires_grad=False)
    with pytest.raises((VALUE_ERROR, TypeError), match="Double|Long|float64|int64"):
        ours(torch.randint(1, 50, (2, 5)))
