"""An accelerated model can still do whatever a transformers model can."""

import inspect
import warnings

import pytest
import torch
from hf.pairs import (
    CONFIGS,
    LENGTHS,
    SEQLEN,
    accelerated,
    assert_fell_back,
    assert_packed,
    batch,
    build,
    equal,
    labels,
    pair,
    visible,
)
from small_models import DEVICE, copies
from torch import nn

import fastbert
from fastbert import backends


def test_it_keeps_class_parameters_names_and_state():
    original = build("bert", "mlm")
    model, _ = accelerated(original)
    before = {name: id(p) for name, p in model.named_parameters()}
    fastbert.accelerate(model)
    assert type(model) is type(original) and {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(original.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in original.named_modules()]
    assert inspect.signature(model.bert.forward) == inspect.signature(original.bert.forward)
    assert repr(model) == repr(original)


def test_checkpoints(tmp_path):
    original = build("bert", "mlm")
    model, _ = accelerated(original)
    model.save_pretrained(tmp_path)
    loaded = type(original).from_pretrained(tmp_path)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name].to(tensor))
    model.load_state_dict(build("bert", "mlm").state_dict())


def test_hidden_states_and_attentions():
    original, model, report, inputs = pair(attention="eager")
    model.set_attn_implementation("sdpa")  # with which transformers itself returns no attentions
    with torch.no_grad():
        one = model(**inputs, output_hidden_states=True, output_attentions=True)
    two = original(**inputs, output_hidden_states=True, output_attentions=True)
    equal(visible({"states": one.hidden_states}, inputs), visible({"states": two.hidden_states}, inputs))
    assert torch.equal(one.hidden_states[-1], one.last_hidden_state)
    seen = inputs["attention_mask"].bool()
    both = (seen[:, None, :, None] & seen[:, None, None, :]).double()
    assert len(one.attentions) == 3
    for a, b in zip(one.attentions, two.attentions, strict=True):
        assert a.shape == b.shape and (a - b * both).abs().max() <= 1e-12
    plain = model(**inputs)
    assert plain.hidden_states is None and plain.attentions is None
    assert torch.equal(plain.last_hidden_state, one.last_hidden_state)
    with torch.no_grad():
        only = model(**inputs, output_attentions=True)
    assert all(map(torch.equal, only.attentions, one.attentions)) and only.hidden_states is None
    assert_packed(report, 3)


@pytest.mark.parametrize("lengths", [LENGTHS, [12, 12, 12]])
@pytest.mark.parametrize("family", CONFIGS)
def test_attention_weights_are_in_the_graph_of_the_output(family, lengths):
    """The output has gradients with respect to its attention weights, by which people explain it.

    A projection that the loss does not use gets no gradient.
    """
    original = build(family, attention="eager").train()
    for module in original.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model, report = accelerated(original)
    inputs = batch(model, lengths)
    seen = inputs["attention_mask"].bool()
    results = {}
    for each in (model, original):
        output = each(**inputs, output_attentions=True)
        loss = output.last_hidden_state[seen].square().sum()
        gradients = torch.autograd.grad(loss, output.attentions, retain_graph=True)
        both = seen[:, None, :, None] & seen[:, None, None, :]  # transformers also gives gradients at padding
        results[each] = {f"attention {i}": gradient * both for i, gradient in enumerate(gradients)}
        (output.attentions[-1] * both).square().sum().backward()
        parameters = torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        results[each]["parameters"] = parameters  # concatenated: key biases' gradients alone are mere rounding
    equal(results[model], results[original], 1e-11)
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in original.parameters()]
    assert_packed(report)


@pytest.mark.parametrize("family", CONFIGS)
def test_outputs_asked_for_in_the_configuration(family):
    original = build(family, "tokens", attention="eager")
    original.config.output_hidden_states = original.config.output_attentions = True
    model, report = accelerated(original)
    inputs = batch(model)
    one, two = model(**inputs), original(**inputs)
    assert list(one) == list(two)
    assert len(one.hidden_states) == len(two.hidden_states) and len(one.attentions) == len(two.attentions) > 0
    equal(visible({"states": one.hidden_states}, inputs), visible({"states": two.hidden_states}, inputs))
    assert_packed(report)


def test_return_dict():
    _, model, report, inputs = pair("bert", "sequence")
    (logits,) = model(**inputs, return_dict=False)
    assert torch.equal(logits, model(**inputs).logits)
    assert isinstance(model.bert(inputs["input_ids"], inputs["attention_mask"], return_dict=False), tuple)
    assert_packed(report, 3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in ("albert", "mpnet")])  # they lack it
def test_gradient_checkpointing_drops_the_same_elements(family, reentrant):
    if reentrant and family == "deberta-v2":
        pytest.skip("transformers cannot: every layer's backward goes through the relative embeddings' LayerNorm")
    _, model, report, inputs = pair(family, dropout=0.3, train=True)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        model.zero_grad()
        runs = backends.calls().get(("encoder_layer_fwd", "cpu"), 0)
        model(**inputs).last_hidden_state.sin().sum().backward()
        runs = backends.calls().get(("encoder_layer_fwd", "cpu"), 0) - runs
        assert DEVICE != "cpu" or runs in (0, 6 if checkpointing else 3)  # 0: another backend ran the layers
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_packed(report, 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_embeddings_positions_and_types_of_ones_own(family):
    original, model, report, inputs = pair(family)
    mask, shape = inputs["attention_mask"], inputs["attention_mask"].shape
    positions = torch.randint(2, 30, shape, device=DEVICE)
    width = original.get_input_embeddings().weight.shape[1]
    embeds = torch.randn(*shape, width, dtype=torch.float64, device=DEVICE)
    cases = [
        {**inputs, "position_ids": positions},
        {**inputs, "position_ids": positions[:1]},
        {"inputs_embeds": embeds, "attention_mask": mask},
    ]
    if original.config.to_dict().get("type_vocab_size"):
        cases.append({**inputs, "token_type_ids": torch.randint(original.config.type_vocab_size, shape).to(DEVICE)})
    for case in cases:
        equal(visible(model(**case), inputs), visible(original(**case), inputs))
    assert_packed(report, len(cases))


def test_one_row_of_types_or_positions_serves_every_sequence():
    original, model, report, inputs = pair(type_vocab_size=2)
    for name in ("token_type_ids", "position_ids"):
        row = torch.randint(2, (1, SEQLEN), device=DEVICE)
        equal(*(visible(each(**inputs, **{name: row}), inputs) for each in (model, original)))
    assert_packed(report, 2)


def test_inputs_embeds_get_gradients():
    original, model, _, inputs = pair()
    grads = []
    embeds = torch.randn(3, SEQLEN, 48, dtype=torch.float64, device=DEVICE)
    seen = inputs["attention_mask"].bool()
    for each in (model, original):
        leaf = embeds.clone().requires_grad_()
        each(inputs_embeds=leaf, attention_mask=inputs["attention_mask"])[0][seen].sin().sum().backward()
        grads.append(leaf.grad)
    assert (grads[0] - grads[1]).abs().max() <= 1e-12 * grads[1].abs().max()


def test_weights_that_change_are_seen():
    """Weights changed through .data or in place, replaced Linears and a resized vocabulary take effect: nothing is
    cached between calls."""
    original, model, report, inputs = pair()

    def check():
        equal(visible(model(**inputs), inputs), visible(original(**inputs), inputs))

    check()
    for each in (model, original):
        each.encoder.layer[1].attention.self.key.weight.data.mul_(1.5)
    check()
    for each in (model, original):
        with torch.no_grad():
            each.encoder.layer[0].attention.self.query = nn.Linear(48, 48, device=DEVICE, dtype=torch.float64)
            each.encoder.layer[0].attention.self.query.weight.fill_(0.01)
            each.encoder.layer[0].attention.self.query.bias.zero_()
    check()
    for each in (model, original):
        each.resize_token_embeddings(120, mean_resizing=False)
    original.load_state_dict(model.state_dict())
    inputs["input_ids"][0, 0] = 110
    check()
    assert_packed(report, 4)


def test_planted_fault_a_cached_weight_is_noticed(monkeypatch):
    """If the projection cached its concatenated weights, the test above would fail."""
    kept = {}

    def stale(hidden, projections, heads):
        put_together = [torch.cat([getattr(x, name).detach() for x in projections]) for name in ("weight", "bias")]
        weight, bias = kept.setdefault(id(projections[0]), put_together)
        return nn.functional.linear(hidden, weight, bias).view(hidden.shape[0], 3, heads, -1)

    monkeypatch.setattr("fastbert.layer.project_qkv", stale)
    monkeypatch.setattr(backends, "find", lambda *args, **kwargs: None)  # so that the single ops run
    with pytest.raises(AssertionError, match="last_hidden_state"):
        test_weights_that_change_are_seen()


def test_copies_compute_with_their_own_weights():
    _, model, report, inputs = pair("bert", "sequence")
    expected = model(**inputs).logits
    for other in copies(model):
        assert torch.equal(other(**inputs).logits, expected)
        own = fastbert.accelerate(other)
        assert own is not report and own.packed == report.packed + 1
        for parameter in other.parameters():
            parameter.data.zero_()
        assert other(**inputs).logits.abs().sum() == 0 and torch.equal(model(**inputs).logits, expected)
        fastbert.restore(other)
    assert report.active and report.packed == 4


def test_half_precision_and_autocast():
    _, model, report, inputs = pair("bert", "tokens", dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert model(**inputs).logits.dtype == torch.bfloat16
        model.train()(**inputs, **labels(model, "tokens", inputs)).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    assert model.eval().bfloat16()(**inputs).logits.dtype == torch.bfloat16
    assert_packed(report, 3)


@pytest.mark.filterwarnings("ignore:fastbert. forwards run transformers' own .* a backward hook:RuntimeWarning")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "mpnet"])
def test_hooks_on_layers_get_and_give_what_they_do_in_the_original(family, kind, weights):
    original, model, report, inputs = pair(family, attention="eager")
    seen, found = {}, {}
    inputs["output_attentions"] = weights

    def double(module, *given):
        changed = given[-1] if kind == "forward" else given[0]
        seen.setdefault(name, []).append([_form(x) for x in given])
        twice = tuple(2 * x if _is_float(x) else x for x in (changed if isinstance(changed, tuple) else (changed,))[:1])
        return (*twice, *changed[1:]) if isinstance(changed, tuple) else twice[0]

    for name, each in (("original", original), ("accelerated", model)):
        for layer in each.encoder.layer:
            getattr(layer, f"register_{kind}_hook")(double)
        output = each(**inputs)
        shown = output.last_hidden_state[inputs["attention_mask"].bool()]
        (shown * torch.linspace(-1, 1, 48, dtype=torch.float64)).sum().backward()
        found[name] = {"output": shown, "grad": each.get_input_embeddings().weight.grad}
    assert seen["original"] == seen["accelerated"]
    equal(found["accelerated"], found["original"])
    fell_back = family == "mpnet" and kind == "full_backward"  # position_bias has a gradient there
    assert report.packed == (not fell_back)


def _is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _form(x):
    """How many values there are, and the shapes of those that change from token to token."""
    if isinstance(x, tuple):
        return [len(x), _form(x[0])]
    return tuple(x.shape) if _is_float(x) else None


def test_hooks_on_layers_see_padded_tensors():
    original, model, report, inputs = pair()
    seen = []

    def of_a_framework(module, args):
        """A hook as FSDP has them. If there were only such hooks, layers would get packed tensors."""

    of_a_framework.__module__ = "torch.distributed.fsdp"
    model.encoder.layer[1].register_forward_pre_hook(of_a_framework)
    handle = model.encoder.layer[1].register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    states = original(**inputs, output_hidden_states=True).hidden_states
    out = model(**inputs)
    equal(visible({"in, out": seen[0]}, inputs), visible({"in, out": states[1:3]}, inputs))
    handle.remove()
    assert torch.equal(model(**inputs).last_hidden_state, out.last_hidden_state)
    model.encoder.layer[1].register_forward_hook(lambda _, args, out: out * 0)  # a hook's return value is used
    assert not torch.equal(model(**inputs).last_hidden_state, out.last_hidden_state)
    assert_packed(report, 3)


HOOKED = ["encoder.layer.1.attention.self", "encoder.layer.0.output.dense", "embeddings.word_embeddings", "encoder"]


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_what_is_not_called_run_the_original(name):
    original, model, report, inputs = pair()
    calls = []
    model.get_submodule(name).register_forward_hook(lambda module, args, out: calls.append(args))
    with pytest.warns(RuntimeWarning, match="hook"):
        assert torch.equal(model(**inputs).last_hidden_state, original(**inputs).last_hidden_state)
    assert len(calls) == 1
    assert_fell_back(report, "hook")


def test_hooks_for_all_modules_run_the_original():
    original, model, report, inputs = pair()
    calls = [[], []]
    for each, seen in zip((model, original), calls, strict=True):
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_, seen=seen: seen.append(type(module)))
        with handle, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            each(**inputs)
    assert calls[0] == calls[1]
    assert_fell_back(report, "hooks are registered for all modules")


def test_hooks_on_the_model_and_the_pooler_change_nothing():
    model, report = accelerated(build())
    calls = []
    for module in (model, model.pooler):
        module.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    model(**batch(model))
    assert len(calls) == 2
    assert_packed(report)


def test_a_fallback_within_a_packed_forward_is_its_own():
    """A hook runs a second accelerated model, which falls back and must not see the first model's packing."""
    outer, outer_report = accelerated(build())
    original = build(hidden_act="relu")
    inner, inner_report = accelerated(original)
    inputs, others, seen = batch(outer), batch(inner, [3, 9], seqlen=9), []
    outer.pooler.register_forward_hook(lambda *_: seen.append(inner(**others).last_hidden_state))
    with pytest.warns(RuntimeWarning, match="activation"):
        outer(**inputs)
    assert torch.equal(seen[0], original(**others).last_hidden_state)
    assert_packed(outer_report)
    assert_fell_back(inner_report, "activation")
