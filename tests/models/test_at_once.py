"""All layers of an encoder in one call, where no gradient is needed, give the same bits as layer by layer. Layers are
called one by one where something, such as a hook, runs or reads between them, or where they differ."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
import transformers
from small_models import CONFIGS, DEVICE, batch
from torch import nn

import fastbert
from fastbert import backends, layer, parts

LENGTHS, SEQLEN = [7, 1, 12], 12
FAMILIES = [name for name in CONFIGS if name != "deberta-v2"]  # whose layers each project the distances

pytestmark = pytest.mark.skipif(
    backends.find("encoder_layer", DEVICE, torch.float32, backward=False) is None or DEVICE != "cpu",
    reason="no kernel for a whole layer and its attention",
)


def their(family="bert", **changes):
    torch.manual_seed(2)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family] | changes)
    return transformers.AutoModel.from_config(config).eval()


def model_of(kind, family="bert", **changes):
    """A model of fastbert ("own"), one of transformers ("accelerated"), or one prepared in the precision `kind`."""
    theirs = their(family, **changes)
    if kind == "accelerated":
        fastbert.accelerate(theirs)
        return theirs
    model = fastbert.BertModel(fastbert.BertConfig.from_dict(theirs.config.to_dict())).eval()
    return model if kind == "own" else fastbert.prepare(theirs if kind == "int8" else model, kind)


def inputs_of(model):
    torch.manual_seed(4)
    given = batch(LENGTHS, SEQLEN)
    return {name: given[name].cpu() for name in ("input_ids", "attention_mask")}


def run(model, grad=False, **options):
    """The last hidden state, and the number of calls of ops that compute whole layers."""
    before = calls()
    torch.manual_seed(3)
    with torch.set_grad_enabled(grad):
        hidden = model(**inputs_of(model), **options).last_hidden_state
    return hidden, calls() - before


def calls():
    return sum(n for (name, _), n in backends.calls().items() if name in ("encoder_layer_fwd", "packed_layer_fwd"))


def by_layers(model, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(layer, "encoder_layers", lambda *_: None)
        return run(model, **options)


def count(model):
    config = model.config
    return config.num_hidden_layers * getattr(config, "inner_group_num", 1)


@pytest.mark.parametrize("kind", ["own", "accelerated", "fp32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_layer_by_layer(family, kind, monkeypatch):
    model = model_of(kind, family)
    (whole, once), (expected, singly) = run(model), by_layers(model, monkeypatch)
    assert torch.equal(whole, expected) and (once, singly) == (1, count(model))


@pytest.mark.parametrize("kind", ["own", "accelerated"])
@pytest.mark.parametrize("mode", ["dropout", "autocast", "bfloat16", "inference", "frozen", "one sequence"])
def test_modes(kind, mode, monkeypatch):
    """With dropout, each layer drops elements of its own. For a frozen model, autograd needs nothing either."""
    grad, dropout = False, {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model = model_of(kind, "albert", **dropout).train() if mode == "dropout" else model_of(kind)
    if mode == "bfloat16":
        model.to(torch.bfloat16)
    if mode == "frozen":
        grad = True
        model.requires_grad_(False)
    with torch.autocast("cpu", enabled=mode == "autocast"), torch.inference_mode(mode == "inference"):
        (whole, once), (expected, singly) = run(model, grad), by_layers(model, monkeypatch, grad=grad)
    assert torch.equal(whole, expected) and (once, singly) == (1, count(model))
    assert mode != "dropout" or not torch.equal(whole, run(model.eval())[0])


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@pytest.mark.parametrize("kind", ["own", "accelerated"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients(kind, frozen, family, monkeypatch):
    """Each layer is one call, even if a frozen first layer needs no gradient; the layers' modules are not called."""
    dropout = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model, called = model_of(kind, family, **dropout).train(), []
    if frozen:
        model.embeddings.requires_grad_(False)
        layers_of(model)[0].requires_grad_(False)
    single = layer.encoder_layer
    monkeypatch.setattr(layer, "encoder_layer", lambda *args: called.append(1) or single(*args))
    results = []
    for step in (run, lambda *args, **options: by_layers(model, monkeypatch, **options)):
        model.zero_grad(set_to_none=True)
        hidden, times = step(model, grad=True)
        hidden.sin().sum().backward()
        assert times == count(model)
        results.append([hidden, *[p.grad for p in model.parameters() if p.grad is not None]])
        assert len(called) == (len(results) - 1) * count(model)
    assert len(results[0]) > 12 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["own", "accelerated"])
def test_a_table_of_distances_that_alone_is_trained(kind, monkeypatch):
    model, gradients = model_of(kind, "mpnet").requires_grad_(False), []
    table = model.encoder.relative_attention_bias.weight.requires_grad_(True)
    for step in (run, lambda *args, **options: by_layers(model, monkeypatch, **options)):
        table.grad = None
        hidden, times = step(model, grad=True)
        hidden.sin().sum().backward()
        gradients.append(table.grad)
        assert times == count(model)
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


def layers_of(model):
    return list(model.encoder.layer)


def hook(model, seen):
    layers_of(model)[1].register_forward_hook(lambda *_: seen.append(1))


def hook_before(model, seen):
    layers_of(model)[0].register_forward_pre_hook(lambda *_: seen.append(1))


def hook_inside(model, seen):
    layers_of(model)[1].output.dense.register_forward_hook(lambda *_: seen.append(1))


def hook_everywhere(model, seen):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    seen.append(handle)  # removed by the test


def wrap(model, seen):
    each = layers_of(model)[1]
    forward = each.forward

    def wrapped(*args, **kwargs):
        seen.append(1)
        return forward(*args, **kwargs)

    each.forward = wrapped


def compile_one(model, seen):
    layers_of(model)[1].compile(backend=lambda graph, _: seen.append(1) or graph.forward)


def replace_dense(model, seen):
    class Counting(nn.Linear):
        def forward(self, x):
            seen.append(1)
            return super().forward(x)

    output = layers_of(model)[1].output
    made = Counting(output.dense.in_features, output.dense.out_features)
    made.load_state_dict(output.dense.state_dict())
    output.dense = made


@pytest.mark.parametrize("kind", ["own", "accelerated"])
@pytest.mark.parametrize(
    "somebody", [hook, hook_before, hook_inside, hook_everywhere, wrap, compile_one, replace_dense]
)
@pytest.mark.filterwarnings("ignore:fastbert. forwards run transformers:RuntimeWarning")  # every such hook causes it
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_somebody_between_the_layers_is_called(somebody, kind, family):
    model, seen = model_of(kind, family), []
    expected, _ = run(model)
    somebody(model, seen)
    handles = [each for each in seen if not isinstance(each, int)]
    try:
        found, _ = run(model)
    finally:
        for handle in handles:
            handle.remove()
    visible = inputs_of(model)["attention_mask"].bool()  # transformers computes something at padding
    assert len(seen) > len(handles) and (found - expected)[visible].abs().max() < 1e-5


def halve(model, groups=None):
    """Wraps each of ALBERT's groups of layers, so that it gives half of what it gave."""
    for each in groups or model.encoder.albert_layer_groups:
        forward = each.forward
        each.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs) * 0.5


def test_a_group_of_shared_layers_that_is_wrapped(monkeypatch):
    model = model_of("accelerated", "albert")
    halve(model)
    (found, times), (expected, singly) = run(model), by_layers(model, monkeypatch)
    assert torch.equal(found, expected) and times == singly == count(model) > 1


def backward_hook(model):
    layers_of(model)[1].register_full_backward_hook(lambda *_: None)


def forward_hook(model):
    layers_of(model)[1].register_forward_hook(lambda *_: None)


def framework_hook(model):
    hook = lambda *_: None  # noqa: E731
    hook.__module__ = "torch.distributed.fsdp"
    layers_of(model)[1].register_forward_pre_hook(hook)


class Twice(fastbert.model.BertLayer):
    def __call__(self, hidden, *args, **kwargs):
        return super().__call__(2 * hidden, *args, **kwargs)


def subclass(model):
    layers_of(model)[1].__class__ = Twice


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("own", subclass),
        *[(kind, hook) for kind in ("own", "accelerated") for hook in (forward_hook, backward_hook, framework_hook)],
    ],
)
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_layers_that_have_to_be_called(kind, change, family, monkeypatch):
    if (kind, change, family) == ("accelerated", backward_hook, "mpnet"):
        pytest.skip("runs the original, whose layers have another input with a gradient")
    model = model_of(kind, family)
    change(model)
    (found, times), (expected, singly) = run(model), by_layers(model, monkeypatch)
    assert torch.equal(found, expected) and times == singly == count(model)


def test_what_was_recorded_once_costs_nothing_later():
    """transformers' recorders stay attached after a forward that records; later forwards need one call nonetheless."""
    model = model_of("accelerated")
    for asked in ({}, {"output_hidden_states": True}, {"output_attentions": True}, {}):
        _, times = run(model, **asked)
        assert times == (count(model) if "output_hidden_states" in asked else 1) or "output_attentions" in asked


@pytest.mark.parametrize(("kind", "family"), [("own", "bert"), ("accelerated", "bert"), ("own", "mpnet")])
def test_layers_that_are_computed_again(kind, family, monkeypatch):
    """Gradient checkpointing recomputes every layer separately."""
    model = model_of(kind, family).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hidden, times = run(model, grad=True)
    before = calls()
    hidden.sum().backward()
    assert times == calls() - before == count(model)


@pytest.mark.parametrize(("kind", "reentrant"), [("own", False), ("own", True), ("accelerated", False)])
def test_a_layer_that_another_thread_recomputes_runs_on_the_forced_backend(kind, reentrant):
    model = model_of(kind).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with fastbert.backend("reference"):
        hidden, _ = run(model, grad=True)
    before = backends.calls()
    thread = threading.Thread(target=hidden.sum().backward)
    thread.start()
    thread.join()
    ran = {key for key, n in backends.calls().items() if n > before.get(key, 0)}
    assert ("attention_fwd", "reference") in ran and {name for _, name in ran} == {"reference"}
    assert layers_of(model)[0].output.dense.weight.grad is not None


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@pytest.mark.parametrize("kind", ["own", "accelerated", "fp32"])
def test_hidden_states_and_attentions(kind, family, monkeypatch):
    model = model_of(kind, family)
    for asked in ({"output_hidden_states": True}, {"output_attentions": True}):
        found, expected = run(model, **asked), by_layers(model, monkeypatch, **asked)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    with torch.no_grad():
        states = model(**inputs_of(model), output_hidden_states=True).hidden_states
    assert len(states) == 1 + count(model) and not torch.equal(states[1], states[2])


def other_eps(model):
    layers_of(model)[1].output.LayerNorm.eps = 0.5


def other_scaling(model):
    attention = layers_of(model)[1].attention
    (attention.self if hasattr(attention, "self") else attention).scaling = 1.5


def a_trainable_bias(model):
    model.requires_grad_(False)
    layers_of(model)[1].output.dense.bias.requires_grad_(True)


@pytest.mark.parametrize("kind", ["own", "accelerated", "fp32", "int8"])
@pytest.mark.parametrize("change", [other_eps, other_scaling, a_trainable_bias])
def test_layers_that_differ(kind, change, monkeypatch):
    model = model_of(kind)
    if change is a_trainable_bias and kind in ("fp32", "int8"):
        pytest.skip("prepared layers are not trained")
    change(model)
    grad = change is a_trainable_bias
    (found, times), (expected, singly) = run(model, grad), by_layers(model, monkeypatch, grad=grad)
    assert torch.equal(found, expected) and times == singly == count(model)
    assert found.requires_grad == grad


def norm_of(model):
    return layers_of(model)[1].output.LayerNorm


def other_values(model):
    norm_of(model).weight.data.mul_(2)


def other_parameter(model):
    norm_of(model).bias = nn.Parameter(norm_of(model).bias + 1)


def other_norm(model):
    layers_of(model)[1].output.LayerNorm = nn.LayerNorm(norm_of(model).normalized_shape, eps=0.1)


def other_embeddings(model):
    model.embeddings.LayerNorm.eps = 0.1


def other_positions(model):
    model.embeddings.position_embeddings = nn.Embedding(*model.embeddings.position_embeddings.weight.shape)


def words_of_a_greatest_norm(model):
    model.embeddings.word_embeddings.max_norm = 0.1


def a_dropout_that_trains(model):
    dropout = layers_of(model)[1].output.dropout
    dropout.p = 0.25
    dropout.train()


def a_forward_of_its_own(model):
    dense = layers_of(model)[1].output.dense
    dense.forward = lambda x: 2 * type(dense).forward(dense, x)


class Own(nn.LayerNorm):
    forward = nn.LayerNorm.forward


def a_forward_for_a_class(model):
    norm_of(model).__class__ = Own
    run(model)
    Own.forward = lambda self, x: 2 * nn.LayerNorm.forward(self, x)


def other_hooks(model):
    dense = layers_of(model)[1].output.dense
    dense._forward_hooks = OrderedDict()  # a common way to remove all hooks
    dense.register_forward_hook(lambda *args: 2 * args[-1])


def other_table(model):
    dense = layers_of(model)[1].output
    dense._modules = dict(dense._modules)
    dense.LayerNorm = nn.LayerNorm(dense.LayerNorm.normalized_shape, eps=0.1)


def other_parts(model):
    model.embeddings._modules = dict(model.embeddings._modules)
    model.embeddings.LayerNorm = nn.LayerNorm(model.embeddings.LayerNorm.normalized_shape, eps=0.1)


BETWEEN_FORWARDS = [
    other_values, other_parameter, other_norm, other_eps, other_scaling, other_embeddings, other_positions,
    words_of_a_greatest_norm, a_dropout_that_trains, a_forward_of_its_own, a_forward_for_a_class, other_hooks,
    other_table, other_parts,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["own", "accelerated", "fp32", "int8", "own, looked at in Python"])
@pytest.mark.parametrize("change", BETWEEN_FORWARDS)
@pytest.mark.filterwarnings("ignore:fastbert. forwards run transformers:RuntimeWarning")
def test_what_changes_between_forwards(kind, change, monkeypatch):
    """A model that has run caches what it has read from its modules, and notices changes; a copy has cached nothing."""
    kind, _, in_python = kind.partition(", ")
    if in_python:  # the version used where there are no kernels
        monkeypatch.setattr(parts, "_as_before", parts.as_before)
    model = model_of(kind)
    before, again = run(model)[0], run(model)[0]
    monkeypatch.setattr(Own, "forward", Own.forward)  # so that monkeypatch restores it
    change(model)
    found, expected = run(model)[0], run(copy.deepcopy(model))[0]
    assert torch.equal(before, again) and torch.equal(found, expected) and not torch.equal(found, before)


def test_the_look_in_cpp_is_that_in_python():
    given = {"tables": ({"a": 1}, {}), "sizes": (1, 0), "typed": (1, "a"), "types": (int, str)}
    given |= {"owners": ({"a": 1.5}, {}), "names": ("a", "b")}
    given["values"] = given["owners"][0]["a"], None
    in_cpp = backends.EXTENSION.as_before
    assert in_cpp(*given.values()) is parts.as_before(**given) is True
    for change in (
        {"sizes": (1, 1)},
        {"types": (int, int)},
        {"owners": ({}, {})},
        {"owners": (*given["owners"][:1], {"b": 1})},
        {"values": (*given["values"][:1], 1)},
    ):
        assert in_cpp(*(given | change).values()) is parts.as_before(**given | change) is False
    for wrong, error in ((given["values"][:1], ValueError), (list(given["values"]), TypeError)):
        with pytest.raises(error):
            in_cpp(*(given | {"values": wrong}).values())


@pytest.mark.parametrize("kind", ["own", "accelerated", "fp32"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_weights(kind, copied):
    model = model_of(kind)
    before = run(model)[0]
    made = copied(model)
    other_values(made)
    assert torch.equal(run(model)[0], before) and not torch.equal(run(made)[0], before)


def test_a_shallow_copy_of_a_layer_with_another_part():
    """torch's DataParallel makes such copies."""
    model = model_of("own")
    before = run(model)[0]
    replica = copy.copy(model.encoder.layer[1])
    replica._modules = dict(replica._modules)
    replica.output = copy.deepcopy(replica.output)
    model.encoder.layer[1] = replica
    other_values(model)
    assert not torch.equal(run(model)[0], before)


@pytest.mark.parametrize("name", ["embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight"])
def test_what_was_read_goes_with_the_model(name):
    model = model_of("own")
    run(model), run(model)
    weight = weakref.ref(model.get_parameter(name))
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_parts_that_nobody_reads_may_be_scripted():
    class Scripted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.inner = torch.jit.script(linear)

        def forward(self, x):
            return self.inner(x)

    model = model_of("own")
    expected, output = run(model)[0], layers_of(model)[1].output
    output.dense = Scripted(output.dense)
    assert (run(model)[0] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", [torch.Tensor.detach, nn.Parameter])
def test_tensors_of_one_call_are_not_kept(kind):
    model = model_of("own")
    run(model), run(model)
    other = {name: kind(tensor.detach() * 1.5) for name, tensor in model.named_parameters()}
    kept = [weakref.ref(tensor) for tensor in other.values()]
    with torch.no_grad():
        found = torch.func.functional_call(model, other, kwargs=inputs_of(model)).last_hidden_state
    other.clear()
    assert not any(tensor() is not None for tensor in kept)
    assert not torch.equal(found, run(model)[0])


@pytest.mark.parametrize("kind", ["own", "accelerated"])
@pytest.mark.filterwarnings("ignore:fastbert. forwards run transformers:RuntimeWarning")
def test_replaced_weights_are_let_go_where_layers_are_called(kind):
    model = model_of(kind)
    run(model), run(model)
    weight = weakref.ref(layers_of(model)[0].output.dense.weight)
    layers_of(model)[0].register_forward_hook(lambda *_: None)
    for each in layers_of(model):
        each.output.dense = nn.Linear(*reversed(each.output.dense.weight.shape))
    run(model)
    gc.collect()
    assert weight() is None


def test_a_wrapped_encoder_that_swaps_weights_for_its_call():
    model = model_of("accelerated")
    before, dense = run(model), layers_of(model)[1].output.dense
    run(model)
    forward, weight = model.encoder.forward, dense.weight

    @functools.wraps(forward)
    def swapped(*args, **kwargs):
        dense.weight = nn.Parameter(2 * weight)
        try:
            return forward(*args, **kwargs)
        finally:
            dense.weight = weight

    model.encoder.forward = swapped
    assert not torch.equal(run(model)[0], before[0])
    model.encoder.forward = forward
    assert torch.equal(run(model)[0], before[0])


@pytest.mark.parametrize("kind", ["own", "accelerated"])
def test_what_was_read_is_not_read_again(kind, monkeypatch):
    """This holds with transformers' recorders too, which stay attached after the first forward that records."""
    model, reads, of = model_of(kind), [], parts.LayerParts.of
    run(model, output_attentions=True), run(model), run(model)
    monkeypatch.setattr(parts.LayerParts, "of", lambda *args: reads.append(1) or of(*args))
    run(model)
    assert not reads


def test_a_prepared_model_with_a_plain_layer(monkeypatch):
    model = fastbert.prepare(model_of("own"), "int8", skip=("encoder.layer.1",))
    (found, times), (expected, singly) = run(model), by_layers(model, monkeypatch)
    assert torch.equal(found, expected) and times == singly == count(model)


def test_copies_and_compiled_models(monkeypatch):
    model = model_of("accelerated")
    whole, once = run(copy.deepcopy(model))
    assert torch.equal(whole, by_layers(model, monkeypatch)[0]) and once == 1
    with torch.no_grad():
        compiled = torch.compile(model_of("own"), backend="eager", fullgraph=True)(**inputs_of(model))
    assert (compiled.last_hidden_state - run(model_of("own"))[0]).abs().max() < 1e-6
