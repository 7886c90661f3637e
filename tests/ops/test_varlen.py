"""Backend "varlen": PyTorch's varlen_attn, which runs only if a user asks for it by name.

On a CPU, `varlen_on_cpu` stands in for FlashAttention's operators; their caller, torch.nn.attention.varlen, is real.
"""

import contextlib
import importlib.util
import inspect

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
import varlen_on_cpu
from small_models import TINY
from test_attention import ends
from test_backends import machine_with
from torch.nn.attention import varlen

import fastbert
from fastbert import backends, ops, random, testing
from fastbert.ops.op import PRIMITIVES

LENGTHS = [
    pytest.param((5, 0, 3), id="an-empty-sequence"),
    pytest.param((1, 130, 64, 17), id="one-token-and-more-than-a-tile"),
    pytest.param((40,), id="one-sequence"),
    pytest.param((0, 0, 7, 0), id="empty-ones-around"),
]
FWD, BWD = PRIMITIVES["attention_fwd"], PRIMITIVES["attention_bwd"]
NEAR = 2**-20  # of the largest value, for float32 sums of at most 130 terms


@pytest.fixture
def on_cpu():
    torch.use_deterministic_algorithms(False)  # with gradients the backend refuses them
    with varlen_on_cpu.installed():
        yield


@pytest.fixture
def repeatable_or_not():
    torch.use_deterministic_algorithms(False)


def attend(qkv, cu_seqlens, **options):
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    with fastbert.backend(attention="varlen"):
        return ops.attention(qkv, cu_seqlens, longest, **options)


def by_sequence(kind, scale=None):
    def call(qkv, cu_seqlens):
        rows = []
        for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            q, k, v = qkv[start:end].permute(1, 2, 0, 3)
            rows.append(kind(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale).transpose(0, 1))
        return torch.cat(rows)

    return call


def explicit(q, k, v, scale):
    return (q @ k.mT * scale).softmax(-1) @ v


def fused(q, k, v, scale):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]


def counted(name):
    return backends.calls().get((name, "varlen"), 0)


# ---- where it is chosen


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_it_is_never_chosen_by_default(monkeypatch, capability):
    machine_with(monkeypatch, [capability])
    for op in backends.OPS:
        for device_type in ("cpu", "cuda", "xpu"):
            assert "varlen" not in backends.order.__wrapped__(device_type, op)


def test_it_is_for_attention_alone():
    with pytest.raises(ValueError, match="unknown backend 'varlen'; expected one of .*, or attention='varlen'"):
        with fastbert.backend("varlen"):
            pass
    with pytest.raises(ValueError, match="or attention='varlen'"):
        backends._from_environment("varlen")
    assert "varlen" not in backends.BACKENDS
    assert [op for op in backends.OPS if "varlen" in backends.KERNELS[op]] == ["attention"]


def choose(dtype=torch.bfloat16, backward=False, device="cuda", **options):
    with fastbert.backend(attention="varlen"):
        return backends.choose("attention", device, dtype, backward=backward, **{"size": 64} | options)


REFUSED = [
    ({"drops": True}, "its attention kernel has not our dropout.*expected dropout_p = 0"),
    ({"dtype": torch.float32}, "its attention kernel does not take torch.float32"),
    ({"dtype": torch.float64}, "its attention kernel does not take torch.float64"),
    ({"device": "cpu"}, "it does not serve cpu tensors"),
    ({"size": 12}, "its attention kernel takes head sizes of at most 256, multiples of 8"),
    ({"size": 264}, "its attention kernel takes head sizes of at most 256, multiples of 8"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(monkeypatch, call, words):
    monkeypatch.setitem(backends._PROBLEMS, "varlen", lambda: None)
    backends.why_not.cache_clear()
    assert choose() == choose(size=256) == choose(dtype=torch.float16) == "varlen"
    with pytest.raises(RuntimeError, match=f"backend 'varlen' cannot run attention: {words}"):
        choose(**call)
    monkeypatch.undo()
    backends.why_not.cache_clear()


def test_gradients_where_all_has_to_be_repeatable_are_refused(monkeypatch, repeatable_or_not):
    monkeypatch.setitem(backends._PROBLEMS, "varlen", lambda: None)
    backends.why_not.cache_clear()
    assert choose(backward=True) == "varlen"
    torch.use_deterministic_algorithms(True, warn_only=True)  # then PyTorch warns by itself
    assert choose(backward=True) == "varlen"
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="algorithms are asked for, and its attention kernel's backward"):
        choose(backward=True)
    assert choose() == "varlen"
    monkeypatch.undo()
    backends.why_not.cache_clear()


@pytest.mark.parametrize(
    ("gpus", "built", "call", "problem"),
    [
        ([(8, 0)], True, varlen.varlen_attn, None),
        ([(9, 0), (8, 6)], True, varlen.varlen_attn, None),
        ([], True, varlen.varlen_attn, "PyTorch sees no GPU"),
        ([(7, 5)], True, varlen.varlen_attn, "FlashAttention is for GPUs from sm_80 on, this GPU is sm_75"),
        ([(9, 0)], False, varlen.varlen_attn, "this PyTorch was built without FlashAttention"),
        ([(9, 0)], True, lambda q, is_causal=False: q, "this PyTorch's varlen_attn takes no scale"),
        ([(9, 0)], True, None, "this PyTorch has no torch.nn.attention.varlen"),
    ],
)
def test_which_machines_have_it(monkeypatch, gpus, built, call, problem):
    machine_with(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(varlen, "varlen_attn", call)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: call)
    assert backends._varlen_problem.__wrapped__() == problem


def test_the_installed_pytorch_has_what_is_called():
    arguments = torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments
    assert [a.name for a in arguments][10:13] == ["is_causal", "rng_state", "scale"]
    assert {"return_aux", "scale"} <= inspect.signature(varlen.varlen_attn).parameters.keys()


def test_explain_says_that_it_is_there_by_name(capsys, on_cpu):
    with cuda_on_cpu.uninstalled():  # else the CUDA kernels would be built
        fastbert.explain()
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("  attention") and "varlen" in line)
    assert "by name only" in line and "*varlen" not in line and "unusable" not in line
    assert "usable: FlashAttention 2; attention alone, by name" in text


# ---- in a model


def model_of(**changes):
    return fastbert.BertModel(TINY.changed(num_attention_heads=3, **changes)).requires_grad_(False)


def ran_for(model, **block):
    ids, before = torch.randint(1, 50, (3, 9)), backends.calls()
    with fastbert.backend(**block):
        out = model(ids, torch.arange(9) < torch.tensor([[9], [4], [1]])).last_hidden_state
    return out, {key: n - before.get(key, 0) for key, n in backends.calls().items() if n > before.get(key, 0)}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no-gradients", "gradients"])
def test_a_models_attention_alone_runs_elsewhere(training, gradients):
    """A forced attention runs, although the op for a layer, and the one for all layers, have their own."""
    model = model_of().train(training).requires_grad_(gradients)
    out, ran = ran_for(model, attention="reference")
    layers = TINY.num_hidden_layers
    assert ran["attention_fwd", "reference"] == layers
    assert {name for op, name in ran if op != "attention_fwd"} == {
        backends.choose("linear", "cpu", torch.float32, backward=gradients)
    }
    assert not training or out.isfinite().all()
    torch.manual_seed(0)


@pytest.mark.parametrize("op", ["linear", "dense_gelu", "add_layer_norm"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no-gradients", "gradients"])
def test_any_part_of_a_models_layers_runs_elsewhere(op, gradients):
    _, ran = ran_for(model_of().eval().requires_grad_(gradients), **{op: "reference"})
    assert ran[f"{op}_fwd", "reference"] >= TINY.num_hidden_layers
    assert ran["attention_fwd", backends.choose("attention", "cpu", torch.float32, backward=gradients, size=8)]


def test_the_layer_alone_is_forced_as_a_whole():
    if backends.EXTENSION is None:
        pytest.skip(backends.EXTENSION_PROBLEM)
    _, ran = ran_for(model_of().eval(), encoder_layer="cpu")
    assert ran["encoder_layer_fwd", "cpu"] == 1 and ("linear_fwd", "cpu") not in ran


def test_the_layers_op_does_not_take_what_it_cannot_run():
    """On a CPU "varlen" is refused, not ignored, whatever path a model takes."""
    prepared = fastbert.prepare(model_of().eval(), "fp32") if backends.EXTENSION else model_of().eval()
    for model in (model_of().eval(), model_of().train(), prepared):
        with pytest.raises(RuntimeError, match="backend 'varlen' cannot run attention: it does not serve cpu tensors"):
            ran_for(model, attention="varlen")


def test_a_model_with_it_computes_what_it_computed(on_cpu):
    model = model_of(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).requires_grad_(True)
    results = []
    for block in ({"attention": "varlen"}, {"attention": "reference"}):
        torch.manual_seed(3)
        out, ran = ran_for(model, **block)
        model.zero_grad()
        out.square().mean().backward()
        results.append([out.detach(), *[p.grad for p in model.parameters() if p.grad is not None]])
        assert ran["attention_fwd", block["attention"]] == TINY.num_hidden_layers
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-7


def test_a_model_that_drops_in_attention_is_refused(on_cpu):
    with pytest.raises(RuntimeError, match="has not our dropout"):
        ran_for(model_of(attention_probs_dropout_prob=0.1).train(), attention="varlen")
    _, ran = ran_for(model_of(attention_probs_dropout_prob=0.1).eval(), attention="varlen")
    assert ran["attention_fwd", "varlen"] == TINY.num_hidden_layers


# ---- the call


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_follow_the_accuracy_rule(on_cpu, dtype, lengths):
    inputs = {"qkv": torch.randn(sum(lengths), 3, 2, 16).to(dtype), "cu_seqlens": ends(lengths)}
    before = counted("attention_fwd"), counted("attention_bwd")
    testing.assert_accurate(attend, by_sequence(explicit), [by_sequence(explicit), by_sequence(fused)], inputs)
    assert (counted("attention_fwd"), counted("attention_bwd")) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_the_scale_is_passed_on(on_cpu, scale):
    inputs = {"qkv": torch.randn(9, 3, 2, 16), "cu_seqlens": ends((6, 3))}
    plain = by_sequence(explicit, scale)
    testing.assert_accurate(lambda **given: attend(**given, scale=scale), plain, [plain], inputs)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_turns_the_order_round_is_refused(on_cpu, scale):
    with pytest.raises(RuntimeError, match="'varlen' cannot run attention: its scale is .*; expected scale > 0"):
        attend(torch.randn(4, 3, 1, 8), ends((4,)), scale=scale)


@pytest.mark.parametrize("max_seqlen", [70, 1], ids=["the longest", "too small"])
def test_rows_outside_every_sequence_are_zeros(on_cpu, max_seqlen):
    """The stand-in leaves NaN there, or writes whole tiles beyond max_seqlen. lse is (H, T), as our kernels save it."""
    qkv, cu_seqlens, rest = torch.randn(90, 3, 2, 8), ends((70, 5)), (max_seqlen, 0.3, 0.0, None, 0)
    out, lse = FWD("varlen", qkv, cu_seqlens, *rest)
    dqkv = BWD("varlen", torch.ones_like(out), qkv, out, lse, cu_seqlens, *rest)
    inside = torch.arange(90) < 75
    if max_seqlen == 1:
        inside = (torch.arange(90) == 0) | (torch.arange(90) == 70)
    assert lse.shape == (2, 90) and lse.dtype == torch.float32
    for x in (out, lse.T, dqkv):
        assert torch.equal(x[~inside], torch.zeros_like(x[~inside]))
        assert not x.isnan().any() and (x[inside] != 0).any()


def test_no_token_no_sequence_and_ends_outside_the_tensor(on_cpu):
    rest = (5, 0.3, 0.0, None, 0)
    for tokens, cu_seqlens in ((0, ends((0, 0))), (4, torch.zeros(1, dtype=torch.int32))):
        qkv = torch.randn(tokens, 3, 2, 8)
        out, lse = FWD("varlen", qkv, cu_seqlens, *rest)
        dqkv = BWD("varlen", out, qkv, out, lse, cu_seqlens, *rest)
        assert out.shape == (tokens, 2, 8) and lse.shape == (2, tokens) and dqkv.shape == qkv.shape
        assert not out.any() and not lse.any() and not dqkv.any()
    qkv = torch.randn(4, 3, 2, 8)
    out, lse = FWD("varlen", qkv, torch.tensor([-3, 4, 90], dtype=torch.int32), *rest)
    assert torch.equal(out, FWD("varlen", qkv, ends((4, 0)), *rest)[0])


def test_forward_and_backward_of_different_backends_fit(on_cpu):
    """The saved lse means the same on both, so the backward may run on another backend than the forward."""
    qkv, cu_seqlens, rest = torch.randn(12, 3, 2, 8), ends((7, 5)), (7, 0.3, 0.0, None, 0)
    grads, dout = {}, torch.randn(12, 2, 8)
    for first in ("varlen", "reference"):
        saved = FWD(first, qkv, cu_seqlens, *rest)
        for second in ("varlen", "reference"):
            grads[first, second] = BWD(second, dout, qkv, *saved, cu_seqlens, *rest)
    for grad in grads.values():
        assert (grad - grads["reference", "reference"]).abs().max() <= NEAR * grad.abs().max()


def test_strides_and_addresses_of_any_kind(on_cpu):
    """FlashAttention reads 16 bytes at once; the stand-in refuses tensors that are not aligned, or not dense."""
    whole = torch.randn(9 * 3 * 2 * 8 + 1)
    qkv, cu_seqlens = whole[1:].view(9, 3, 2, 8), ends((6, 3))
    expected = attend(qkv.clone(), cu_seqlens)
    assert qkv.data_ptr() % 16 and torch.equal(attend(qkv, cu_seqlens), expected)
    strided = testing.strided(qkv)
    assert not strided.is_contiguous() and torch.equal(attend(strided, cu_seqlens), expected)
    leaf = qkv.clone().requires_grad_()
    dout = torch.randn(9, 2, 8)
    given = [torch.autograd.grad(attend(leaf, cu_seqlens), leaf, g)[0] for g in (dout, testing.strided(dout))]
    assert torch.equal(*given) and given[0].is_contiguous()


def test_autocast_and_second_derivatives_are_as_on_the_others(on_cpu):
    qkv = torch.randn(9, 3, 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(qkv, ends((6, 3)))
    assert out.dtype == torch.bfloat16
    (first,) = torch.autograd.grad(attend(qkv, ends((9,))).square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), qkv)


def test_its_operators_and_their_fakes(on_cpu):
    qkv, cu_seqlens = torch.randn(8, 3, 2, 8), ends((5, 0, 3))
    rest = (5, 0.3, 0.0, None, 0)
    operators = torch.ops.fastbert_varlen
    out, lse = operators.attention_fwd(qkv, cu_seqlens, *rest)
    assert not hasattr(operators, "layer_norm_fwd")
    for operator, args in (
        (operators.attention_fwd.default, (qkv, cu_seqlens, *rest)),
        (operators.attention_bwd.default, (out, qkv, out, lse, cu_seqlens, *rest)),
    ):
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_compiles_to_one_graph_and_follows_the_block(on_cpu):
    inputs = {"qkv": torch.randn(8, 3, 2, 8), "cu_seqlens": ends((5, 3))}
    torch._dynamo.reset()
    plain = lambda qkv, cu_seqlens: ops.attention(qkv, cu_seqlens, 5)  # noqa: E731
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")

    def forced(**given):
        with fastbert.backend(attention="varlen"):
            return compiled(**given)

    testing.assert_accurate(forced, by_sequence(explicit), [by_sequence(explicit)], inputs)
    graphs = []
    noted = lambda graph, _: (graphs.append(graph.code), graph.forward)[1]  # noqa: E731
    spy = torch.compile(plain, fullgraph=True, backend=noted)
    for block in (fastbert.backend(attention="varlen"), contextlib.nullcontext()):
        with block:
            spy(**inputs)
    assert ["fastbert_varlen" in code for code in graphs] == [True, False]
    dropping = lambda qkv, ends, rng: ops.attention(qkv, ends, 5, dropout_p=0.1, rng=rng)  # noqa: E731
    drops = torch.compile(dropping, fullgraph=True, backend="eager")
    with fastbert.backend(attention="varlen"), pytest.raises(Exception, match="has not our dropout"):
        drops(*inputs.values(), random.new_key(torch.device("cpu")))
    torch._dynamo.reset()


# ---- the real kernels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("implementation", [None, "FA3", "FA4"])
@pytest.mark.parametrize("dtype", varlen_on_cpu.HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_on_a_gpu(repeatable_or_not, implementation, dtype, head_dim):
    if reason := backends.why_not("varlen", "attention", "cuda", dtype, True):
        pytest.skip(reason)
    lengths = (512, 0, 1, 300, 65)
    inputs = {"qkv": torch.randn(sum(lengths), 3, 4, head_dim).to("cuda", dtype), "cu_seqlens": ends(lengths, "cuda")}
    before = counted("attention_fwd"), counted("attention_bwd")
    with activated(implementation):
        testing.assert_accurate(attend, by_sequence(explicit), [by_sequence(explicit), by_sequence(fused)], inputs)
        covers_less = ends((512, 300), "cuda")
        out, lse = FWD("varlen", inputs["qkv"], covers_less, 512, 0.125, 0.0, None, 0)
        theirs = FWD("reference", inputs["qkv"], covers_less, 512, 0.125, 0.0, None, 0)[1]
        assert not out[812:].any() and not lse[:, 812:].any() and (lse - theirs).abs().max() < 1e-2
    assert counted("attention_fwd") == before[0] + 2 and counted("attention_bwd") == before[1] + 1


@contextlib.contextmanager
def activated(implementation):
    """Activates it within the block; skips the test if it is not installed, or not for this GPU."""
    if implementation is None:
        yield
        return
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    module = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}[implementation]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{implementation}: {module} is not installed")
    if torch.cuda.get_device_capability()[0] not in {"FA3": (9,), "FA4": (9, 10)}[implementation]:
        pytest.skip(f"{implementation} is not for this GPU")
    activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        restore_flash_attention_impl()
