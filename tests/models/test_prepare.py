"""`fastbert.prepare`: results are as exact as the precision; models are frozen, saved and loaded; what is refused."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from small_models import CONFIGS, TINY, batch, hugging_face, minilm, ours
from torch import nn

import fastbert
from fastbert import BertConfig, backends, testing
from fastbert.graphs.capture import ModelSnapshot
from fastbert.ops.packed_linear import layout
from fastbert.ops.scaled_linear import problem_on
from fastbert.prepared import PRECISIONS, QUANTIZED, PreparedLinear, joined_dense
from fastbert.testing import Result

LENGTHS, SEQLEN = [7, 1, 12], 12
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
quantized = pytest.mark.parametrize("precision", QUANTIZED)


@pytest.fixture
def theirs():
    return hugging_face().cpu()


@pytest.fixture
def model(theirs):
    return ours(theirs)


@pytest.fixture
def inputs():
    return {name: tensor.cpu() for name, tensor in batch(LENGTHS, SEQLEN).items()}


def prepare(model, precision, **options):
    """Prepares a copy: in fp8 on a GPU or, where there is none, on the CPU, where the tests run the CUDA kernels."""
    device = torch.device("cuda" if precision == "fp8" and torch.cuda.is_available() else "cpu")
    if precision == "fp8" and (reason := problem_on(device)):
        pytest.skip(reason)
    return fastbert.prepare(copy.deepcopy(model).to(device), precision, **options)


def on_device_of(model, inputs):
    return {name: tensor.to(next(model.parameters()).device) for name, tensor in inputs.items()}


@torch.no_grad()
def states(model, inputs):
    """All hidden states, at visible tokens."""
    visible = inputs["attention_mask"].bool()
    found = model(**on_device_of(model, inputs), output_hidden_states=True).hidden_states
    return Result({f"state {i}": state.cpu()[visible] for i, state in enumerate(found)}, {})


def hidden(model, inputs):
    with torch.no_grad():
        return model(**on_device_of(model, inputs)).last_hidden_state.cpu()


def runs(primitive):
    return sum(count for (name, _), count in backends.calls().items() if name == primitive)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_floats_are_as_accurate_as_pytorch(theirs, model, inputs, precision):
    """Errors of hidden states are at most 3 e. The truth has weights rounded to the precision, in float64."""
    rounded = copy.deepcopy(theirs).to(PRECISIONS[precision])
    truth = states(copy.deepcopy(rounded).double(), inputs)
    found = states(fastbert.prepare(model, precision), inputs)
    rows = testing.compare(found, truth, [states(rounded, inputs)], factor=3.0)
    testing.assert_rows(rows)


@quantized
def test_quantized_models_are_near(theirs, model, inputs, precision):
    truth = states(copy.deepcopy(theirs).double(), inputs)
    found = states(prepare(model, precision), inputs)
    for name, expected in truth.outputs.items():
        assert F.cosine_similarity(found.outputs[name].double(), expected, dim=-1).mean() > 0.995, name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_layers_are_one_call(model, inputs, precision):
    prepared, before = fastbert.prepare(model, precision), (runs("packed_layer_fwd"), runs("packed_linear_fwd"))
    hidden(prepared, inputs)
    calls = 0 if backends.why_not("cpu", "packed_layer", "cpu", torch.float32) else 1
    assert runs("packed_layer_fwd") - before[0] == calls
    hidden(prepared, inputs)
    assert calls == 0 or runs("packed_linear_fwd") == before[1]


def test_layers_in_fp8_hand_on_their_rows(theirs, inputs):
    """Ops hand scaled rows on to the next. The tensors of three projections are parts of one, in copies too."""
    prepared, names = prepare(theirs, "fp8"), ("scaled_rows_fwd", "scaled_layer_norm_fwd")
    before, layers = [runs(name) for name in names], len(prepared.encoder.layer)
    hidden(prepared, inputs)
    assert [runs(name) - n for name, n in zip(names, before, strict=True)] == [1 + 2 * layers, 2 * layers]
    for each in (prepared, copy.deepcopy(prepared)):
        own = each.encoder.layer[0].attention.self
        whole, _, bias = joined_dense([own.query, own.key, own.value])
        assert whole.data_ptr() == own.query.weight.data_ptr() and torch.equal(bias[48:96], own.key.bias)
        assert (
            whole[48:].data_ptr() == own.key.weight.data_ptr() and whole[96:].data_ptr() == own.value.weight.data_ptr()
        )
    own.key = copy.deepcopy(own.query)
    assert torch.equal(hidden(each, inputs), hidden(pickle.loads(pickle.dumps(each)), inputs))
    assert not torch.equal(hidden(each, inputs), hidden(prepared, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_fp8_as_it_is(theirs, inputs, dtype):
    prepared = prepare(theirs, "fp8")
    with torch.autocast(next(prepared.parameters()).device.type, dtype):
        found = hidden(prepared, inputs)
    visible = inputs["attention_mask"].bool()
    assert F.cosine_similarity(found.float(), hidden(theirs, inputs), dim=-1)[visible].min() > 0.99


def test_a_graph_refuses_other_weights_in_fp8(model):
    prepared = prepare(model, "fp8")
    snapshot, part = ModelSnapshot(prepared), prepared.encoder.layer[0].output.dense
    snapshot.refuse_a_change()
    part.weight = part.weight.clone()
    with pytest.raises(RuntimeError, match="was replaced"):
        snapshot.refuse_a_change()


@every_precision
def test_single_dense_layers_give_the_same(model, inputs, precision):
    """If attention weights are asked for, every dense layer is called separately."""
    prepared = prepare(model, precision)
    with torch.no_grad():
        singly = prepared(**on_device_of(prepared, inputs), output_attentions=True).last_hidden_state.cpu()
    near = {"fp32": 1e-5, "bf16": 0.1, "int8": 0.3, "fp8": 0.3}[precision]  # other roundings between the layer's parts
    assert (singly - hidden(prepared, inputs)).abs().max() <= near


def test_the_model_stays_as_it_is(model, inputs):
    before, state = hidden(model, inputs), copy.deepcopy(model.state_dict())
    fastbert.prepare(model, "int8")
    assert torch.equal(hidden(model, inputs), before) and model.state_dict().keys() == state.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "fastbert_prepare" not in model.config.extra and model.train().training


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_as_transformers_has_it(family, inputs):
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    theirs = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    visible, expected = inputs["attention_mask"].bool(), hidden(theirs, inputs)
    for precision, cosine in (("fp32", 1 - 1e-6), ("int8", 0.995)):
        prepared = fastbert.prepare(theirs, precision)
        found = hidden(prepared, inputs)
        assert type(prepared) is type(theirs) and not any(isinstance(m, PreparedLinear) for m in theirs.modules())
        assert sum(isinstance(m, PreparedLinear) for m in prepared.modules()) >= 6
        assert F.cosine_similarity(found[visible], expected[visible], dim=-1).mean() >= cosine


@pytest.mark.parametrize("autocast", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_autocast_has_no_say(family, inputs, autocast):
    """Autocast affects only what is not prepared: skipped parts, and DeBERTa's convolution."""
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    theirs = transformers.AutoModel.from_config(config).eval()
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    visible, convolves = inputs["attention_mask"].bool(), bool(getattr(config, "conv_kernel_size", 0))
    for precision in ("fp32", "bf16", "int8"):
        if convolves and (precision, autocast) == ("bf16", torch.float16):
            continue  # PyTorch does not mix bfloat16 and float16
        prepared = fastbert.prepare(theirs, precision)
        for skip in [(), *parts_to_skip(prepared)]:
            model = fastbert.prepare(theirs, precision, skip=skip)
            expected = hidden(model, inputs)[visible]
            with torch.autocast("cpu", autocast):
                found = hidden(model, inputs)[visible]
            assert found.dtype == expected.dtype and (found - expected).abs().max() < 0.2
            assert skip or convolves or torch.equal(found, expected)


def parts_to_skip(prepared):
    """Two lists of parts: all attention; what is outside the layers or, where that is nothing, the first layer."""
    names = [name for name, module in prepared.named_modules() if isinstance(module, PreparedLinear)]
    layers = [name[: name.index(".0.") + 2] for name in names if ".0." in name]
    attention = {name.rpartition(".")[0] for name in names if name.endswith(("q_lin", "query_proj", ".q", "query"))}
    return attention, [name for name in names if not name.startswith(layers[0][:-2])] or layers[:1]


def test_a_container_may_say_that_it_trains(theirs, inputs):
    """As a SentenceTransformer does until it encodes, around a model in evaluation mode."""
    container = torch.nn.ModuleDict({"model": theirs, "pooling": torch.nn.Identity()}).train()
    theirs.eval()
    prepared = fastbert.prepare(container, "fp32")
    assert container.training and not any(module.training for module in prepared.modules())
    visible = inputs["attention_mask"].bool()
    assert (hidden(prepared["model"], inputs) - hidden(theirs, inputs))[visible].abs().max() < 1e-4


def test_a_prepared_model_is_not_restored(theirs, inputs):
    prepared = fastbert.prepare(theirs, "int8")
    expected = hidden(prepared, inputs)
    with pytest.raises(ValueError, match="the model is prepared; expected the original"):
        fastbert.restore(prepared)
    assert torch.equal(hidden(prepared, inputs), expected)


def test_autocast_has_no_say_where_a_part_has_a_hook(model, inputs):
    """Values beyond float16's range stay finite, so the part with the hook does not compute in float16."""
    with torch.no_grad():
        model.encoder.layer[0].attention.qkv.weight[-48:] *= 1e6
    prepared = fastbert.prepare(model, "fp32")
    prepared.encoder.layer[0].attention.qkv.register_forward_hook(lambda *_: None)
    expected = hidden(prepared, inputs)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(hidden(prepared, inputs), expected) and expected.isfinite().all()


def test_accelerated_models_fall_back_to_their_own_computation(theirs, inputs):
    """With left padding and a pooler, transformers' own code runs and calls the prepared layers."""
    left = inputs | {"attention_mask": inputs["attention_mask"].flip(1)}
    visible, prepared = left["attention_mask"].bool(), fastbert.prepare(theirs, "fp32")
    with pytest.warns(RuntimeWarning, match="run transformers' own computation"):
        found = hidden(prepared, left)
    assert (found - hidden(theirs, left))[visible].abs().max() < 1e-4


@every_precision
def test_copies_and_pickles_compute_the_same(model, inputs, precision):
    prepared = prepare(model, precision)
    expected = hidden(prepared, inputs)
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(hidden(other, inputs), expected)
        with pytest.raises(RuntimeError, match="frozen"):
            other.train()


@pytest.mark.parametrize("precision", ["int8", "fp8"])  # the first makes tensors for it, the second has them
def test_a_spawned_process_gets_the_model(model, inputs, tmp_path, precision):
    prepared = prepare(model, precision)
    process = torch.multiprocessing.get_context("spawn").Process(target=torch.save, args=(prepared, tmp_path / "model"))
    process.start()
    process.join()
    found = torch.load(tmp_path / "model", weights_only=False)
    assert torch.equal(hidden(found, inputs), hidden(prepared, inputs))


@every_precision
@pytest.mark.parametrize("skip", [(), ("encoder.layer.0", "encoder.layer.2.output")])
def test_saved_and_loaded_it_is_the_same(model, inputs, tmp_path, precision, skip):
    prepared = prepare(model, precision, skip=skip)
    prepared.save_pretrained(tmp_path)
    loaded = fastbert.BertModel.from_pretrained(tmp_path)
    assert torch.equal(hidden(loaded, inputs), hidden(prepared, inputs))
    kinds = [[type(m) for m in each.modules()] for each in (loaded, prepared)]
    assert kinds[0] == kinds[1] and not any(p.requires_grad for p in loaded.parameters())
    with pytest.raises(RuntimeError, match="frozen"):
        loaded.half()
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.attention.self.key"
    assert tensors[f"{name}.weight"].shape == (48, 48)
    assert tensors[f"{name}.weight"].dtype == QUANTIZED.get(precision, PRECISIONS[precision])
    assert (f"{name}.weight_scale" in tensors) == (precision in QUANTIZED)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_made_from_its_configuration_is_an_ordinary_one(model, tmp_path, precision):
    fastbert.BertModel(fastbert.prepare(model, precision).config).save_pretrained(tmp_path)
    loaded = fastbert.BertModel.from_pretrained(tmp_path).train()
    assert not any(isinstance(module, PreparedLinear) for module in loaded.modules())
    assert "fastbert_prepare" not in (tmp_path / "config.json").read_text()


def test_what_transformers_makes_of_it_is_an_ordinary_model(model, tmp_path):
    """It reads a directory of "fp32" or "bf16", keeps the entry in config.json, and replaces the weights."""
    fastbert.prepare(model, "fp32").save_pretrained(tmp_path / "prepared")
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "prepared")
    theirs.save_pretrained(tmp_path / "tuned")
    loaded = fastbert.BertModel.from_pretrained(tmp_path / "tuned").train()
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert "fastbert_prepare" not in loaded.config.extra


def test_another_class_loads_its_part(inputs, tmp_path):
    """The name of a skipped part also refers to that part in the base model, without its prefix."""
    head = fastbert.BertForSequenceClassification(ours(hugging_face()).config).cpu().eval()
    prepared = fastbert.prepare(head, "int8", skip="bert.encoder.layer.1")
    prepared.save_pretrained(tmp_path)
    assert torch.equal(hidden(fastbert.BertModel.from_pretrained(tmp_path), inputs), hidden(prepared.bert, inputs))


@quantized
def test_transformers_reads_prepared_floats_and_refuses_the_rest(model, inputs, tmp_path, precision):
    fastbert.prepare(model, "fp32").save_pretrained(tmp_path)
    theirs = transformers.BertModel.from_pretrained(tmp_path)
    visible = inputs["attention_mask"].bool()
    assert (hidden(theirs, inputs) - hidden(model, inputs))[visible].abs().max() < 1e-4
    prepare(model, precision).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantization config"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_skipped_layers_are_exact(model):
    prepared = fastbert.prepare(model, "int8", skip=["encoder.layer.1.output.dense"])
    kept = prepared.encoder.layer[1].output.dense
    assert type(kept) is nn.Linear and torch.equal(kept.weight, model.encoder.layer[1].output.dense.weight)
    assert sum(isinstance(module, PreparedLinear) for module in prepared.modules()) == 3 * 4 - 1


def test_weights_take_the_room_of_their_precision(model):
    width, _ = layout(torch.float32)  # the width of a panel; inputs fill whole groups
    dense = [part for part in model.encoder.modules() if isinstance(part, nn.Linear)]
    numbers = sum(-(-part.out_features // width) * width * part.in_features for part in dense)
    for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        parts = [m for m in fastbert.prepare(model, precision).modules() if isinstance(m, PreparedLinear)]
        assert sum(part.weight.nbytes for part in parts) == numbers * size


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_state_dict_of_other_sizes_is_refused_before_anything_is_packed(precision):
    narrow = nn.Linear(7, 5, dtype=torch.bfloat16 if precision == "bf16" else None)
    layer, empty = PreparedLinear.of(narrow, precision), PreparedLinear.empty(nn.Linear(8, 5), precision)
    with pytest.raises(RuntimeError, match=r"weight has shape \(5, 7\); expected \(5, 8\)"):
        empty.load_state_dict(layer.state_dict())
    assert empty.weight is None


def load_zeros(module):
    module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.train(),
        lambda head: head.bert.train(),
        lambda head: head.bert.encoder.train(),
        lambda head: nn.Sequential(head).train(),
        lambda head: head.half(),
        lambda head: head.bert.half(),
        lambda head: nn.Sequential(head).half(),
        lambda head: head.to(torch.float64),
        lambda head: head.to("meta"),
        lambda head: head.bert.to("meta"),
        lambda head: head.bert.encoder.to("meta"),
        lambda head: head.bert.encoder.layer[0].to_empty(device="meta"),
        lambda head: head.to_empty(device="cpu"),
        lambda head: nn.Sequential(head).to_empty(device="cpu"),
        lambda head: head.bert.encoder.layer[0].half(),
        lambda head: load_zeros(head),
        lambda head: load_zeros(head.bert),
        lambda head: load_zeros(head.bert.encoder),
        lambda head: load_zeros(nn.Sequential(head)),
    ],
)
@quantized
def test_nothing_changes_it(model, inputs, change, precision):
    head = fastbert.BertForSequenceClassification(model.config).eval()
    head.bert = model
    prepared = prepare(head, precision)
    expected = hidden(prepared.bert, inputs)
    with pytest.raises(RuntimeError, match="frozen; use the original"):
        change(prepared)
    assert torch.equal(hidden(prepared.bert, inputs), expected)


@quantized
def test_layers_that_share_modules_are_prepared_once(model, inputs, precision):
    model.encoder.layer[1] = model.encoder.layer[0]
    found = hidden(prepare(model, precision), inputs)
    assert (
        F.cosine_similarity(found.float(), hidden(model, inputs), dim=-1)[inputs["attention_mask"].bool()].min() > 0.99
    )


def test_a_layer_without_a_bias_gets_none(inputs, tmp_path):
    config = BertConfig.from_dict({**CONFIGS["deberta-v2"], "model_type": "deberta-v2", "embedding_size": 32})
    model, inputs = fastbert.BertModel(config).eval(), {name: inputs[name] for name in ("input_ids", "attention_mask")}
    prepared = fastbert.prepare(model, "fp32")
    prepared.save_pretrained(tmp_path)
    loaded = fastbert.BertModel.from_pretrained(tmp_path)
    assert model.state_dict().keys() == prepared.state_dict().keys() == loaded.state_dict().keys()
    assert torch.equal(hidden(loaded, inputs), hidden(pickle.loads(pickle.dumps(prepared)), inputs))


@every_precision
def test_gradients_are_refused(model, precision):
    prepared = prepare(model, precision)
    embeds = {"inputs_embeds": torch.randn(1, 3, 48, dtype=PRECISIONS[precision], requires_grad=True)}
    with pytest.raises(RuntimeError, match="prepared weights are for inference"):
        prepared(**on_device_of(prepared, embeds))


def test_transformers_models_are_not_saved(theirs, tmp_path):
    with pytest.raises(RuntimeError, match="save_pretrained: .* use the original"):
        fastbert.prepare(theirs, "int8").save_pretrained(tmp_path)


NOT_FINITE = r"encoder\.layer\.0\.output\.dense has numbers that are not finite"


def without_finite_weights(model):
    model.encoder.layer[0].output.dense.weight.data[0, 0] = torch.nan
    return model


def with_a_bias_beyond_bfloat16(model):
    model.encoder.layer[0].output.dense.bias.data[0] = torch.finfo(torch.float32).max
    return model


def with_a_hook(model):
    model.encoder.layer[1].intermediate.dense.register_forward_hook(lambda *args: None)
    return model


@pytest.mark.parametrize(
    ("given", "arguments", "error", "message"),
    [
        (lambda m: "bert", {}, TypeError, "given a str; expected a model"),
        (lambda m: nn.Linear(2, 2).eval(), {}, TypeError, "a Linear holds no encoder"),
        (lambda m: m, {"precision": "int4"}, ValueError, "precision is 'int4'; expected one of fp32, bf16, int8, fp8"),
        (lambda m: m.train(), {}, ValueError, "in training mode"),
        (lambda m: m.to("meta"), {}, ValueError, "on meta; int8 is for CPUs"),
        (lambda m: fastbert.prepare(m, "fp32"), {}, ValueError, "prepared already"),
        (lambda m: m, {"skip": "encoder.layer.7"}, ValueError, "skip has 'encoder.layer.7', which holds none of"),
        (lambda m: m, {"skip": ["encoder"]}, ValueError, "a dense layer is left"),
        (without_finite_weights, {}, ValueError, NOT_FINITE),
        (without_finite_weights, {"precision": "fp32"}, ValueError, NOT_FINITE),
        (with_a_bias_beyond_bfloat16, {"precision": "bf16"}, ValueError, NOT_FINITE),
        (
            with_a_hook,
            {},
            ValueError,
            "encoder.layer.1.intermediate.dense is a torch.Linear, or has hooks; expected a plain",
        ),
    ],
)
def test_what_is_refused(model, given, arguments, error, message):
    with pytest.raises(error, match=message):
        fastbert.prepare(given(model), **{"precision": "int8"} | arguments)


@pytest.mark.parametrize("width", [8208, 40])
def test_sizes_that_fp8_does_not_take_are_refused(width):
    model = fastbert.BertModel(BertConfig(hidden_size=48, num_attention_heads=4, intermediate_size=width)).eval()
    with pytest.raises(ValueError, match=f"{width} .*fp8 takes multiples of 16, and at most 8192 in"):
        prepare(model, "fp8")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"precision": "int3", "skip": []}, "fastbert_prepare is .*int3"),
        ("int8", "fastbert_prepare is 'int8'"),
        ({"precision": "fp32", "skip": []}, "unexpected: .*weight_scale"),
        (
            {"precision": "int8", "skip": ["encoder.layer.0"]},
            "unexpected: encoder.layer.0.attention.output.dense.weight_scale",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(model, tmp_path, entry, message):
    fastbert.prepare(model, "int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"fastbert_prepare": entry}))
    with pytest.raises((ValueError, RuntimeError), match=message):
        fastbert.BertModel.from_pretrained(tmp_path)


def test_a_file_without_a_scale_is_refused(model, tmp_path):
    fastbert.prepare(model, "int8").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="missing: encoder.layer.1.output.dense.weight_scale"):
        fastbert.BertModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the model was prepared as int8"):
        fastbert.BertModel.from_pretrained(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize(("precision", "cosine"), [("int8", 0.995), pytest.param("fp8", 0.995, marks=pytest.mark.slow)])
def test_minilm_s_embeddings_stay_near(precision, cosine):
    from fastbert.cli.demo import python_documentation
    from fastbert.inference import SentenceEncoder

    encoder = SentenceEncoder.from_pretrained(minilm(), device="cpu")
    texts = [passage for _, passage in python_documentation(300)[::40]]
    expected = encoder.encode(texts)
    encoder.model = prepare(encoder.model, precision)
    assert F.cosine_similarity(encoder.encode(texts).float().cpu(), expected).mean() >= cosine


def test_sentence_transformers_models_are_prepared():
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model, texts = library.SentenceTransformer(str(minilm()), device="cpu"), ["A text.", "Another one, and longer."]
    expected = model.encode(texts)
    prepared = fastbert.prepare(model.eval(), "int8")
    found, before = prepared.encode(texts), runs("packed_layer_fwd")
    assert F.cosine_similarity(torch.tensor(found), torch.tensor(expected)).min() > 0.99
    prepared.encode(texts)
    assert runs("packed_layer_fwd") == before + 1
    with pytest.raises(RuntimeError, match="use the original"):
        prepared.save("anywhere")


def test_a_single_part_in_training_mode_drops_nothing():
    model = fastbert.BertModel(TINY.changed(hidden_dropout_prob=0.5)).eval()
    made, ids = fastbert.prepare(model, "fp32"), torch.randint(1, TINY.vocab_size, (2, 7))
    expected = made(ids).last_hidden_state
    for part in made.modules():
        if isinstance(part, torch.nn.Dropout):
            part.train()
    made.embeddings.train()
    assert torch.equal(made(ids).last_hidden_state, expected) and model.embeddings.dropout.p == 0.5
