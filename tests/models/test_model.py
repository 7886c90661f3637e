"""The packed model compared with transformers and the reference, for every kind of input."""

import copy

import pytest
import torch
from small_models import (
    CONFIGS,
    DEVICE,
    TINY,
    assert_gradients,
    assert_like,
    batch,
    gradients,
    hugging_face,
    minilm,
    ours,
    reference_masks,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import BertModel as HuggingFaceModel

import fastbert
from fastbert import BertConfig, BertEncoder, BertForMaskedLM, BertModel, backends, padding, random, reference, testing
from fastbert.checkpoint import to_hugging_face
from fastbert.testing import Result

LENGTHS, SEQLEN = [7, 1, 12], 12


def outputs(model, inputs, visible):
    """Hidden states and pooled output of either library's model, at visible tokens."""
    result = model(**inputs, output_hidden_states=True)
    states = {f"state {i}": state[visible] for i, state in enumerate(result.hidden_states)}
    first = visible[:, 0]
    return Result({**states, "pooled": result.pooler_output[first]}, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])  # test_family's are so
def test_forward_is_as_accurate_as_pytorch(dtype, side):
    """Errors are at most 3 e, where e is the worse of transformers' eager and SDPA models in the same dtype."""
    models = [hugging_face()]
    models.append(hugging_face(attention="sdpa"))
    models[1].load_state_dict(models[0].state_dict())
    inputs = batch(LENGTHS, SEQLEN, side=side)
    visible = inputs["attention_mask"].bool()
    rounded = [copy.deepcopy(model).to(dtype) for model in models]
    with torch.no_grad():
        truth = outputs(copy.deepcopy(rounded[0]).double(), inputs, visible)
        contenders = [outputs(model, inputs, visible) for model in rounded]
        rows = testing.compare(outputs(ours(rounded[0]), inputs, visible), truth, contenders, factor=3.0)
    testing.assert_rows(rows)


@pytest.mark.parametrize("backend", [None, *backends.BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_as_accurate_as_pytorch(dtype, backend):
    elsewhere = {"linear": None} if backend == "cuda" else {}  # it has no products of its own
    for op in {"attention", "add_layer_norm", "dense_gelu", "embedding", "linear", "padding"} - {*elsewhere}:
        if backend and (reason := backends.why_not(backend, op, DEVICE, dtype, backward=True)):
            pytest.skip(f"{backend}: {reason}")
    theirs = hugging_face().to(dtype)
    inputs = batch(LENGTHS, SEQLEN)
    cotangent = torch.randn(3, SEQLEN, 48).to(DEVICE).bfloat16() * inputs["attention_mask"][..., None]

    def run(model):
        result = model(**inputs)
        loss = (result.last_hidden_state * cotangent.to(result.last_hidden_state.dtype)).sum()
        (loss + result.pooler_output.sum()).backward()
        state = fastbert.hf.state_dict(model) if isinstance(model, BertModel) else model.state_dict()
        found = to_hugging_face(gradients(model)) if isinstance(model, BertModel) else gradients(model)
        assert found.keys() == state.keys()
        visible = inputs["attention_mask"].bool()
        return Result({"last": result.last_hidden_state[visible].detach()}, found)

    truth = run(copy.deepcopy(theirs).double())
    contender = run(copy.deepcopy(theirs))
    with fastbert.backend(backend, **elsewhere):
        mine = run(ours(theirs))
    testing.assert_rows(testing.compare(mine, truth, [contender], factor=3.0))


def test_training_with_dropout_is_exact(monkeypatch):
    """The same masks in the reference give the same hidden states and gradients, to float64's rounding."""
    model = ours(hugging_face().double()).train()
    truth = reference.BertModel(model.config).to(DEVICE).double().train()
    truth.load_state_dict(fastbert.hf.state_dict(model))
    inputs = batch(LENGTHS, SEQLEN)
    key = random.new_key(DEVICE)
    monkeypatch.setattr(random, "new_key", lambda device: key)
    result = model(**inputs, output_hidden_states=True)
    states, pooled = truth(**inputs, masks=reference_masks(model, key, LENGTHS, SEQLEN))
    visible = inputs["attention_mask"].bool()
    for state, expected in zip(result.hidden_states, states, strict=True):
        assert (state - expected)[visible].abs().max() <= 1e-12 * expected.abs().max()
    (result.last_hidden_state[visible].sin().sum() + result.pooler_output.sum()).backward()
    (states[-1][visible].sin().sum() + pooled.sum()).backward()
    assert_gradients(to_hugging_face(gradients(model)), truth)
    assert not torch.equal(result.last_hidden_state, model.eval()(**inputs).last_hidden_state)


@pytest.mark.parametrize("poison", [98, 0])
def test_padding_leaks_into_nothing(poison):
    model = ours(hugging_face())
    inputs = batch(LENGTHS, SEQLEN)
    other = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], poison)
    one, two = (model(**inputs | {"input_ids": ids}) for ids in (inputs["input_ids"], other))
    assert torch.equal(one.last_hidden_state, two.last_hidden_state)
    assert torch.equal(one.last_hidden_state, one.last_hidden_state * inputs["attention_mask"][..., None])  # zeros


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_ugly_values_in_padding_leak_into_nothing(value):
    """They change no bit of the output or of any parameter's gradient."""
    model = ours(hugging_face())
    mask = batch(LENGTHS, SEQLEN)["attention_mask"]
    clean = torch.randn(3, SEQLEN, 48, device=DEVICE)
    results = []
    for hidden in (clean, torch.where(mask.bool()[..., None], clean, value)):
        model.zero_grad()
        out = model.encoder(hidden, mask).last_hidden_state
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.encoder.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_attentions_are_transformers_own(side):
    theirs = hugging_face().double()
    inputs = batch(LENGTHS, SEQLEN, side=side)
    one = ours(theirs)(**inputs, output_attentions=True)
    two = theirs(**inputs, output_attentions=True)
    both = inputs["attention_mask"].bool()
    rows = (both[:, None, :, None] & both[:, None, None, :]).double()
    assert len(one.attentions) == TINY.num_hidden_layers
    for a, b in zip(one.attentions, two.attentions, strict=True):
        assert a.shape == b.shape and (a - b * rows).abs().max() <= 1e-12
    assert ours(theirs)(**inputs).attentions is None


def test_attentions_with_padding_inside():
    model = ours(hugging_face())
    inputs = batch([4, 4], 4)
    inputs["attention_mask"] = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]], device=DEVICE)
    weights = model(**inputs, output_attentions=True).attentions[0]
    assert weights.shape == (2, 4, 4, 4) and weights[1].abs().sum() == 0
    assert weights[0, :, 1].abs().sum() == 0 and weights[0, :, :, 1].abs().sum() == 0
    assert (weights[0, :, [0, 2, 3]].sum(-1) - 1).abs().max() < 1e-6


def test_inputs_embeds_replace_ids():
    model = ours(hugging_face())
    inputs = batch(LENGTHS, SEQLEN)
    embeds = model.embeddings.word_embeddings(inputs["input_ids"]).detach().requires_grad_()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    result = model(inputs_embeds=embeds, **rest)
    assert torch.equal(result.last_hidden_state, model(**inputs).last_hidden_state)
    result.last_hidden_state.square().sum().backward()
    visible = inputs["attention_mask"].bool()
    assert embeds.grad[visible].abs().sum() > 0 and embeds.grad[~visible].abs().sum() == 0


def test_position_ids_and_their_default():
    model = ours(hugging_face())
    inputs = batch([5], 5)
    default, places = model(**inputs).last_hidden_state, torch.arange(5, device=DEVICE)[None]
    assert torch.equal(model(**inputs, position_ids=places).last_hidden_state, default)
    assert not torch.equal(model(**inputs, position_ids=places + 1).last_hidden_state, default)


def test_an_all_zero_mask_gives_zeros():
    model = ours(hugging_face())
    inputs = batch([3, 3], 3)
    inputs["attention_mask"] = torch.tensor([[0, 0, 0], [1, 1, 1]], device=DEVICE)
    result = model(**inputs)
    assert result.last_hidden_state[0].abs().sum() == 0 and result.last_hidden_state[1].abs().sum() > 0
    assert torch.equal(result.pooler_output[0], torch.tanh(model.pooler.dense.bias))


def test_a_new_model_has_bert_s_initial_parameters():
    model = BertModel(TINY.changed(pad_token_id=3, initializer_range=0.1))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1 if name.endswith("LayerNorm.weight") else 0)).all(), name
        elif parameter.numel() > 1000:
            assert 0.09 < parameter.std() < 0.11, name
    words = model.embeddings.word_embeddings.weight
    assert not words[3].any() and words[2].any()


def test_encoder_alone_equals_transformers():
    theirs = hugging_face().double()
    encoder = BertEncoder(TINY).to(DEVICE).double().eval()
    encoder.load_state_dict(theirs.encoder.state_dict())
    hidden = torch.randn(3, SEQLEN, 48, dtype=torch.float64, device=DEVICE)
    mask = batch(LENGTHS, SEQLEN)["attention_mask"]
    additive = (1.0 - mask.double())[:, None, None, :] * torch.finfo(torch.float64).min
    truth = theirs.encoder(hidden, attention_mask=additive)[0]
    for form in (mask, additive):
        result = encoder(hidden, form)
        assert (result[0] - truth)[mask.bool()].abs().max() <= 1e-12 * truth.abs().max()
        assert result.last_hidden_state is result[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("training", [True, False])
def test_compiles_to_one_graph(kind, training):
    """Forward and backward are those of eager code, and changing lengths cause few compilations."""
    config = BertConfig.from_dict({**TINY.to_dict(), "num_hidden_layers": 1})
    model = BertModel(config).to(DEVICE).train(training)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for lengths in ([5, 9], [4, 12], [3, 3, 20], [7, 8], [1, 30, 2], [2, 3, 4, 5]):
        inputs = batch(lengths, max(lengths))
        if kind == "packed":
            visible = inputs["attention_mask"].bool()
            ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE)
            inputs = {"input_ids": inputs["input_ids"][visible], "cu_seqlens": ends, "max_seqlen": max(lengths)}
        results = []
        for run in (model, compiled):
            torch.manual_seed(3)
            model.zero_grad()
            last, pooled, *_ = run(**inputs)
            (last.sin().sum() + pooled.sum()).backward()
            results.append([last.detach(), pooled.detach(), *(p.grad.clone() for p in model.parameters())])
        largest = max(float(t.abs().max()) for t in results[0])
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 1e-6 * largest  # padded graphs keep padding rows: other sums
    assert counter.frame_count <= 4


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_layers_that_are_compiled_one_by_one_share_graphs(family):
    """Ten layers, more than torch._dynamo's recompile_limit, whose dropout sites differ."""
    changes = {"num_hidden_layers": 10, "hidden_dropout_prob": 0.1}
    config = BertConfig.from_dict({**TINY.to_dict(), "model_type": family, **CONFIGS.get(family, {}), **changes})
    model = BertModel(config).to(DEVICE).double()
    compiled, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for layer in compiled.encoder.layer:
        layer.compile(backend=counter)
    for length in (16, 20, 24):
        ids, found = torch.randint(5, 99, (2, length), device=DEVICE), []
        for each in (model, compiled):
            torch.manual_seed(3)
            each.zero_grad()
            each(ids).last_hidden_state.sin().sum().backward()
            found.append([parameter.grad for parameter in each.encoder.parameters()])
        largest = max(float(grad.abs().max()) for grad in found[0])
        assert all((one - two).abs().max() <= 1e-12 * largest for one, two in zip(*found, strict=True))
    assert counter.frame_count <= 4


def test_a_layer_that_runs_several_times_compiles_with_every_size_symbolic():
    config = BertConfig.from_dict({"model_type": "albert", "vocab_size": 99, **CONFIGS["albert"]})
    model, ids = BertModel(config).to(DEVICE).double().train(), torch.randint(5, 99, (2, 7), device=DEVICE)
    torch._dynamo.reset()
    found = []
    for run in (model, torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        model.zero_grad()
        run(ids).last_hidden_state.sin().sum().backward()
        found.append(model.encoder.layer[0].intermediate.dense.weight.grad.clone())
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[0].abs().max()


def test_parts_in_training_mode_draw_a_key_and_parts_without_dropout_leave_the_generator_alone():
    model = ours(hugging_face())
    inputs = batch(LENGTHS, SEQLEN)
    evaluated = model(**inputs).last_hidden_state
    model.encoder.layer[1].train()
    assert not torch.equal(model(**inputs).last_hidden_state, evaluated)
    plain = ours(hugging_face(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    state = torch.cuda.get_rng_state if DEVICE == "cuda" else torch.get_rng_state
    before = state()
    plain(**inputs)
    assert torch.equal(state(), before)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_drops_the_same(reentrant):
    model = ours(hugging_face()).train()
    hidden = torch.randn(8, 48, device=DEVICE, requires_grad=True)
    ends, key = torch.tensor([0, 5, 8], dtype=torch.int32, device=DEVICE), random.new_key(DEVICE)
    packing = padding.plan_or_packed("test", (8,), hidden.device, None, ends, 5)
    grads = []
    for run in (lambda layer, *a: layer(*a), lambda layer, *a: checkpoint(layer, *a, use_reentrant=reentrant)):
        hidden.grad = None
        run(model.encoder.layer[0], hidden, packing, key)[0].sin().sum().backward(create_graph=not reentrant)
        grads.append(hidden.grad.detach().clone())
    assert torch.equal(*grads)


LEAVES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.LayerNorm",
    "embeddings.dropout",
    "encoder.layer.0.attention.qkv",
    "encoder.layer.0.attention.output.dense",
    "encoder.layer.0.attention.output.dropout",
    "encoder.layer.0.attention.output.LayerNorm",
    "encoder.layer.0.intermediate.dense",
    "encoder.layer.0.output.dense",
    "encoder.layer.0.output.LayerNorm",
)
CONTAINERS = ("attention", "attention.output", "intermediate", "output")


@pytest.mark.parametrize("name", [*LEAVES, "encoder.layer.0", *(f"encoder.layer.0.{name}" for name in CONTAINERS)])
def test_hooks_on_parts_see_packed_tensors_and_count(name):
    """A part with a hook is called as a module, with the same numbers; what the hook returns replaces the output.

    An nn.Dropout that is called as a module draws its own masks, so dropouts are compared in evaluation mode.
    """
    model, inputs, seen = ours(hugging_face().double()), batch(LENGTHS, SEQLEN), []
    model.train(not name.endswith("dropout"))

    def run():
        torch.manual_seed(3)
        return model(**inputs).last_hidden_state

    expected = run()
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out))
    assert (run() - expected).abs().max() <= 1e-12 * expected.abs().max()
    out = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert out.shape[0] == sum(LENGTHS) and len(seen) == 1
    handle.remove()
    doubled = model.get_submodule(name).register_forward_hook(
        lambda module, args, out: (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2
    )
    assert (run() - expected).abs().max() > 1e-6
    doubled.remove()
    assert torch.equal(run(), expected)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_compiled_graph_may_take_the_padding_out():
    """So it does not know the number of tokens."""
    model, ids = ours(hugging_face()), torch.randint(1, 9, (2, 8))
    visible = torch.arange(8) < torch.tensor([[5], [8]])
    ends = torch.tensor([0, 5, 13], dtype=torch.int32)
    run = lambda: model(ids[visible], cu_seqlens=ends, max_seqlen=8)  # noqa: E731
    torch._dynamo.reset()
    found, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(), run()
    assert_like(found.last_hidden_state, expected.last_hidden_state.double(), expected.last_hidden_state)
    assert_like(found.pooler_output, expected.pooler_output.double(), expected.pooler_output)


@pytest.mark.parametrize("place", ["fake", "meta"])
def test_shapes_and_memory_can_be_asked_for_without_values(place):
    """A padded batch with labels, forward and backward."""
    with FakeTensorMode() if place == "fake" else torch.device("meta"):
        model = BertForMaskedLM(TINY.changed(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        ids = torch.ones(2, 8, dtype=torch.long)
        out = model(ids, torch.ones(2, 8), labels=ids)
        out.loss.backward()
    assert out.loss.shape == () and model.bert.embeddings.word_embeddings.weight.grad.shape[1] == TINY.hidden_size


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_runs_over_batches_and_over_models():
    models, ids = [ours(hugging_face()).eval() for _ in range(2)], torch.randint(1, 9, (2, 3, 8))
    hidden = lambda model, some: model(some).last_hidden_state  # noqa: E731
    with torch.no_grad():
        found = torch.vmap(lambda some: hidden(models[0], some))(ids)
        assert torch.equal(found, torch.stack([hidden(models[0], some) for some in ids]))
        state = torch.func.stack_module_state(models)
        call = lambda state: torch.func.functional_call(models[0], state, (ids[0],)).last_hidden_state  # noqa: E731
        assert torch.equal(torch.vmap(call)(state), torch.stack([hidden(model, ids[0]) for model in models]))
        mask = torch.arange(8) < torch.tensor([[8], [3], [1]])
        masked = lambda model: lambda some, mask: model(some[None], mask[None]).last_hidden_state[0]  # noqa: E731
        expected = models[0](ids[0], mask).last_hidden_state
        found = torch.vmap(masked(models[0]))(ids[0], mask)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() and not found[~mask].any()
        relative = BertModel(
            BertConfig(model_type="mpnet", hidden_size=48, num_attention_heads=4, num_hidden_layers=1)
        ).eval()
        with pytest.raises(RuntimeError, match="expected one mask for all its rows"):
            torch.vmap(masked(relative))(ids[0], mask)
        with pytest.raises(RuntimeError, match="expected bool or integers"):
            torch.vmap(masked(models[0]))(ids[0], mask.float())


@pytest.mark.parametrize(
    ("table", "option", "value"),
    [
        ("word_embeddings", "max_norm", 0.1),
        ("word_embeddings", "scale_grad_by_freq", True),
        ("position_embeddings", "sparse", True),
        ("token_type_embeddings", "padding_idx", 0),
    ],
)
def test_options_of_an_embedding_count(table, option, value):
    theirs, inputs, gradients = hugging_face().double(), batch([9, 9], 9), []  # transformers counts padding too
    for each in (ours(theirs), theirs):
        setattr(getattr(each.embeddings, table), option, value)
        each(**inputs).last_hidden_state.sin().sum().backward()
        gradients.append(getattr(each.embeddings, table).weight.grad)
    assert gradients[0].layout == gradients[1].layout
    one, two = (gradient.to_dense() for gradient in gradients)
    assert (one - two).abs().max() <= 1e-12 * two.abs().max()


def test_hooks_on_attentions_dropout_are_refused():
    """Attention drops inside the kernel, where a hook cannot be called. In evaluation nothing is dropped."""
    model, inputs = ours(hugging_face()), batch(LENGTHS, SEQLEN)
    expected = model(**inputs).last_hidden_state
    model.encoder.layer[0].attention.dropout.register_forward_hook(lambda *a: None)
    assert torch.equal(model(**inputs).last_hidden_state, expected)
    with pytest.raises(TypeError, match="expected an nn.Dropout without hooks, given a Dropout"):
        model.train()(**inputs)
    model.encoder.layer[0].attention.dropout = torch.nn.Identity()
    model(**inputs)


def test_attention_dropout_that_rounds_to_nothing_is_refused():
    model = ours(hugging_face(), attention_probs_dropout_prob=0.001).train()
    with pytest.raises(ValueError, match="8 random bits an element round to 0 / 256"):
        model(**batch(LENGTHS, SEQLEN))


@pytest.mark.parametrize(
    "name", ["embeddings", "encoder", "encoder.layer.1", *(f"encoder.layer.0.{c}" for c in CONTAINERS)]
)
def test_parts_may_be_wrapped(name):
    """The wrapper may hide the attributes of a part, as DistributedDataParallel does.

    Parts of a layer that are called separately may run on several backends of a GPU, which round in other places.
    """

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model, inputs = ours(hugging_face()).train(), batch(LENGTHS, SEQLEN)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(model(**inputs).last_hidden_state)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Wrapper(model.get_submodule(name)))
    if DEVICE == "cpu":
        assert torch.equal(*results)
    else:
        torch.testing.assert_close(*results)  # relative 1.3e-6, absolute 1e-5


def test_a_packing_that_is_handed_down_is_the_only_one():
    model, inputs = ours(hugging_face()), batch(LENGTHS, SEQLEN)
    ids, packing = model.pack(inputs["input_ids"], inputs["attention_mask"], *[None] * 5)
    assert model(**ids._asdict(), packing=packing).last_hidden_state.shape == (sum(LENGTHS), 48)
    with pytest.raises(ValueError, match="packing comes in place of attention_mask"):
        model(**ids._asdict(), attention_mask=inputs["attention_mask"], packing=packing)
    with pytest.raises(ValueError, match="a packing of 20 tokens"):
        model(**inputs | {"attention_mask": None}, packing=packing)


@pytest.mark.parametrize("name", [name for name in LEAVES if name.endswith(("dense", "qkv"))])
def test_replaced_leaves_are_called(name):
    class Twice(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) * 2

    model, inputs = ours(hugging_face().double()), batch(LENGTHS, SEQLEN)
    twin = copy.deepcopy(model)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Twice(model.get_submodule(name)))
    for parameter in twin.get_submodule(name).parameters():
        parameter.data *= 2
    result, expected = model(**inputs).last_hidden_state, twin(**inputs).last_hidden_state
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_lora():
    """With adapters on our own modules, only the adapters get gradients, and merging them changes only rounding."""
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    config = peft.LoraConfig(target_modules=["qkv", "dense"], r=4, lora_dropout=0.0, init_lora_weights=False)
    original = fastbert.BertForSequenceClassification(TINY.changed(num_labels=3)).double().to(DEVICE).train()
    model, inputs = peft.get_peft_model(copy.deepcopy(original), config), batch(LENGTHS, SEQLEN)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len([name for name in adapters if "lora_A" in name]) == 4 * TINY.num_hidden_layers + 1  # 1: the pooler's

    def run(each):
        torch.manual_seed(5)
        return each(**inputs, labels=torch.tensor([1, 0, 2], device=DEVICE))

    trained = run(model)
    assert not torch.equal(trained.logits, run(original).logits)
    trained.loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == adapters
    merged = run(model.merge_and_unload()).logits
    assert (merged - trained.logits).abs().max() <= 1e-12 * merged.abs().max()


@pytest.mark.parametrize(
    "frozen",
    [
        ("embeddings.word_embeddings", "encoder.layer.1.attention.qkv", "encoder.layer.2.output.LayerNorm"),
        ("embeddings", "encoder.layer.0", "encoder.layer.1"),
    ],
)
def test_frozen_parts_get_no_gradient(frozen):
    model = ours(hugging_face()).train()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    model(**batch(LENGTHS, SEQLEN)).last_hidden_state.sin().sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None and not name.startswith("pooler")}
    assert without == {name for name, p in model.named_parameters() if name.startswith(frozen)}


def test_a_dropout_can_be_switched_on_alone():
    """This is Monte Carlo dropout: the mode of each nn.Dropout decides, as in transformers."""
    model, inputs = ours(hugging_face()), batch(LENGTHS, SEQLEN)
    expected = model(**inputs).last_hidden_state
    model.encoder.layer[1].output.dropout.train()
    assert not torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.filterwarnings("ignore")
def test_tracing_is_refused():
    model, inputs = ours(hugging_face()), batch(LENGTHS, SEQLEN)
    with pytest.raises(RuntimeError, match="torch.jit.trace would fix the mask"):
        torch.jit.trace(lambda i, m: model(i, m).last_hidden_state, (inputs["input_ids"], inputs["attention_mask"]))


IDS = torch.ones(2, 5, dtype=torch.int64)
ENDS = torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(2, 5, 48)}, ValueError, "exactly one of"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids is a list; expected a tensor"),
        ({"input_ids": IDS, "token_type_ids": [[1, 2]]}, TypeError, "token_type_ids is a list; expected a tensor"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS.to("meta")}, ValueError, "cu_seqlens on meta"),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids has shape \(5,\); expected \(B, S\)"),
        ({"input_ids": IDS, "cu_seqlens": ENDS}, ValueError, r"input_ids has shape \(2, 5\); expected \(T,\)"),
        ({"input_ids": IDS * 99}, IndexError, r"input_ids\[0\] is 99; expected 0 <= input_ids < 99"),
        ({"input_ids": IDS * -1}, IndexError, r"input_ids\[0\] is -1"),
        ({"input_ids": IDS.float()}, TypeError, "input_ids is torch.float32"),
        ({"input_ids": IDS, "token_type_ids": IDS * 2}, IndexError, r"token_type_ids\[0\] is 2"),
        ({"input_ids": IDS, "token_type_ids": IDS[:1]}, ValueError, r"token_type_ids has shape \(1, 5\)"),
        ({"input_ids": IDS, "position_ids": IDS * 32}, IndexError, r"position_ids\[0\] is 32"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 6)}, ValueError, r"attention_mask has shape \(2, 6\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(5, 5).tril().expand(2, 1, 5, 5)}, ValueError, "key-padding"),
        ({"input_ids": IDS.to("meta")}, ValueError, "on meta"),
        ({"input_ids": torch.ones(1, 33).long()}, ValueError, "sequences are 33 tokens long; the model has 32"),
        ({"input_ids": torch.ones(33).long(), "cu_seqlens": ENDS[[0, 2]] // 10 * 33}, ValueError, "sequences are 33"),
        ({"input_ids": IDS, "max_seqlen": 5}, ValueError, "max_seqlen goes with cu_seqlens"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS, "attention_mask": IDS}, ValueError, "not both"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS.long()}, TypeError, "cu_seqlens is torch.int64"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS - 1}, ValueError, "start at 0"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS[:2]}, ValueError, "ends at 4; expected the number of tokens"),
        ({"input_ids": IDS.flatten(), "cu_seqlens": ENDS, "max_seqlen": 5}, ValueError, "longest sequence, 6"),
        ({"inputs_embeds": torch.ones(2, 5, 47)}, ValueError, r"inputs_embeds has shape \(2, 5, 47\)"),
    ],
)
def test_bad_input_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        BertModel(TINY)(**arguments)


def test_no_packed_sequence_at_all_beside_a_bound_beyond_the_positions():
    none = torch.zeros(0, dtype=torch.int64)
    assert BertModel(TINY)(none, cu_seqlens=ENDS[:1], max_seqlen=99).last_hidden_state.shape == (0, TINY.hidden_size)


def test_encoder_refuses_bad_input():
    encoder = BertEncoder(TINY)
    with pytest.raises(ValueError, match=r"hidden_states has shape \(2, 5, 47\); expected \(B, S, 48\)"):
        encoder(torch.zeros(2, 5, 47))
    with pytest.raises(ValueError, match=r"expected \(T, 48\) with cu_seqlens"):
        encoder(torch.zeros(2, 5, 48), cu_seqlens=ENDS)


def test_minilm_against_transformers():
    """On a real checkpoint, float32 is as close to float64 as transformers is, by the accuracy rule."""
    theirs = HuggingFaceModel.from_pretrained(minilm(), attn_implementation="sdpa").float().eval().to(DEVICE)
    model = BertModel.from_pretrained(minilm()).to(DEVICE)
    inputs = batch([60, 17, 3], 60, 30522)
    visible = inputs["attention_mask"].bool()
    with torch.no_grad():
        truth = outputs(copy.deepcopy(theirs).double(), inputs, visible)
        rows = testing.compare(outputs(model, inputs, visible), truth, [outputs(theirs, inputs, visible)], factor=3.0)
    testing.assert_rows(rows)


def test_a_subclass_with_a_dropout_of_its_own_gets_the_key():
    """Inherited code does not know what a subclass computes, so all modules of the subclass are examined."""

    class Mine(fastbert.model.BertOutput):
        def forward(self, x, residual, rng, site):
            return self.LayerNorm(fastbert.layer.drop(self.dense(x), self.extra, rng, site) + residual)

    model = BertModel(TINY.changed(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).to(DEVICE).train()
    output = model.encoder.layer[0].output
    output.__class__, output.extra = Mine, torch.nn.Dropout(0.5)
    ids = torch.randint(1, 50, (2, 5), device=DEVICE)
    one, other = (model(ids).last_hidden_state for _ in range(2))
    assert not torch.equal(one, other)
