"""What the packed path cannot do runs the original, bit for bit, and the report says why."""

import copy
import functools
import warnings

import pytest
import torch
import transformers
from hf.pairs import (
    CONFIGS,
    SIZES,
    accelerated,
    assert_fell_back,
    assert_packed,
    batch,
    build,
    decoder,
    equal,
    pair,
    visible,
)
from small_models import DEVICE
from torch import nn
from torch.nn.utils import prune
from transformers.integrations import neftune

import fastbert

FALLBACKS = {
    "a decoder": (decoder(), {}, "decoder"),
    "an encoder that looks back only": ({"is_causal": True}, {}, "decoder"),
    "another activation": ({"hidden_act": "relu"}, {}, "activation"),
    "relative positions": ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type"),
    "a per-query mask": ({}, {"attention_mask": torch.ones(12, 12, dtype=torch.bool).tril()}, "no key-padding mask"),
    "too long": ({"max_position_embeddings": 8}, {}, "longer than the position"),
    "an argument it does not know": ({}, {"is_causal": False}, "is_causal is given"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_fallbacks_are_the_original_bit_for_bit(case):
    changes, arguments, words = FALLBACKS[case]
    original, model, report, inputs = pair(**changes)
    inputs |= {
        name: x.expand(3, 1, 12, 12).to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }
    results = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for each in (model, original):
            try:
                results.append(each(**inputs).last_hidden_state)
            except Exception as error:  # if the original raises, the accelerated model raises the same message
                results.append(str(error))
    same = torch.equal if isinstance(results[0], torch.Tensor) else str.__eq__
    assert same(*results)
    assert sum(words in str(each.message) for each in said) == 1
    assert_fell_back(report, words)


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_a_dropout_of_almost_1_runs_the_original_in_training_alone(name):
    original, model, report, inputs = pair(**{name: 1 - 1e-6})
    model(**inputs)
    assert_packed(report)
    found = []
    with pytest.warns(RuntimeWarning, match="dropout of 0.999999 is not"):
        for each in (model, original):
            torch.manual_seed(3)
            found.append(each.train()(**inputs)[0])
    assert torch.equal(*found) and report.packed == report.fallbacks.total() == 1


def test_arguments_given_twice_are_refused_as_transformers_does():
    for head in ("base", "tokens"):
        _, model, report, inputs = pair("bert", head)
        ids, mask = inputs.values()
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            model(ids, mask, input_ids=ids)
        with pytest.raises(TypeError):
            model(ids, mask, *[None] * 20)
        assert report.packed == report.fallbacks.total() == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_arguments_that_transformers_ignores_do_not_unpack(family):
    """sentence-transformers passes its whole dictionary of features on; DistilBERT's tokenizers make token types."""
    original, model, report, inputs = pair(family)
    ignored = {"token_embeddings": torch.randn(3, 12, 48), "sentence": ["a", "b", "c"]}
    if family == "distilbert":
        ignored["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    equal(visible(model(**inputs, **ignored), inputs), visible(original(**inputs, **ignored), inputs))
    assert_packed(report)


def double(module, name="forward", around=functools.wraps):
    """Puts a method on the object that gives twice as much. around: marks it as one around the method before it."""
    method = getattr(module, name)

    def twice(*args, **kwargs):
        result = method(*args, **kwargs)
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    setattr(module, name, around(method)(twice))


REASONS = {
    "a BertIntermediate has a forward of its own": lambda model: double(model.encoder.layer[0].intermediate),
    "a BertSelfOutput has a forward of its own": lambda model: double(
        model.encoder.layer[1].attention.output, around=lambda method: lambda function: function
    ),
    "a BertSelfAttention has a forward of its own": lambda model: double(model.encoder.layer[0].attention.self),
    "a torch.ao.nn.quantized.dynamic.modules.linear.Linear is in place of a Linear": lambda model: (
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    ),
    "a Linear has hooks": lambda model: prune.l1_unstructured(model.encoder.layer[0].output.dense, "weight", 0.5),
    "a LayerNorm has no bias": lambda model: model.encoder.layer[0].output.LayerNorm.register_parameter("bias", None),
    "a BertLayer has other parts than usual": lambda model: setattr(
        model.encoder.layer[0],
        "intermediate",
        nn.Upsample(scale_factor=2),  # 48 to 96
    ),
    "a Dropout has a forward of its own": lambda model: setattr(
        model.encoder.layer[0].output.dropout, "forward", lambda x: x
    ),
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("reason", REASONS)
def test_reasons_say_what_was_met(reason):
    original, model, report, inputs = pair(dtype=torch.float32)
    for each in (original, model):
        REASONS[reason](each)
    with pytest.warns(RuntimeWarning, match=reason) as said:
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert [warning.filename for warning in said] == [__file__]
    assert_fell_back(report, reason)


@pytest.mark.parametrize(
    ("family", "place", "name"),
    [
        ("mpnet", "encoder", "compute_position_bias"),
        ("deberta-v2", "encoder", "get_rel_embedding"),
        ("deberta-v2", "encoder.layer.0.attention.self", "disentangled_attention_bias"),
        ("bert", "encoder.layer.1", "feed_forward_chunk"),
        ("distilbert", "transformer.layer.1.ffn", "ff_chunk"),
        ("roberta", "embeddings", "create_position_ids_from_input_ids"),
        ("bert", "", "_create_attention_masks"),
    ],
)
def test_methods_that_somebody_wrapped_are_called(family, place, name):
    original, model, report, inputs = pair(family, attention="eager")
    if not hasattr(original.get_submodule(place), name):
        pytest.skip("this release of transformers has no such method")
    for each in (original, model):
        double(each.get_submodule(place), name)
    with pytest.warns(RuntimeWarning, match=f"has a {name} of its own"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, name)


def test_a_method_of_another_layer_is_called():
    original, model, report, inputs = pair("bert")
    for each in (original, model):
        layers = each.encoder.layer
        layers[1].feed_forward_chunk = layers[0].feed_forward_chunk
    with pytest.warns(RuntimeWarning, match="has a feed_forward_chunk of its own"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "of its own")


@pytest.mark.parametrize("later", [False, True])
def test_methods_of_a_subclass_are_called(later):
    class Layer(transformers.models.bert.modeling_bert.BertLayer):
        def feed_forward_chunk(self, attention_output):
            return 2 * super().feed_forward_chunk(attention_output)

    original = build()
    model = copy.deepcopy(original)
    report = fastbert.accelerate(model) if later else None
    for each in (original, model):
        each.encoder.layer[1].__class__ = Layer
    report, inputs = report or fastbert.accelerate(model), batch(model)
    with pytest.warns(RuntimeWarning, match="a Layer has a feed_forward_chunk of its own"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "of its own")


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_cache_under_its_earlier_name_is_not_ignored(family):
    """transformers renames the keyword in a decorator; peft's prefix tuning passes it, with a mask that covers it."""
    original, model, report, inputs = pair(family)
    states = torch.randn(2, 3, 4, 5, 12, dtype=torch.float64, device=DEVICE)  # of keys and values for 5 tokens
    inputs["attention_mask"] = nn.functional.pad(inputs["attention_mask"], (5, 0), value=1)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (model, original):
            cache = transformers.DynamicCache([tuple(states)] * 3)
            found.append(each(**inputs, past_key_values=cache)[0])
    assert torch.equal(*found) and not torch.allclose(found[0], original(inputs["input_ids"])[0])
    assert_fell_back(report, "past_key_values is given")


@pytest.mark.parametrize("form", ["function", "partial", "wrapper"])
def test_another_function_under_a_known_name_is_called(monkeypatch, form):
    original, model, report, inputs = pair()
    known = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def double_values(module, query, key, value, *more, **options):
        return known(module, query, key, 2 * value, *more, **options)

    forms = {"function": lambda x: x, "partial": functools.partial, "wrapper": functools.wraps(known)}
    function = forms[form](double_values)
    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", function)
    with pytest.warns(RuntimeWarning, match="the attention implementation 'sdpa' is another function"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "'sdpa' is")


def test_cross_attention_runs_the_original():
    original, model, report, inputs = pair(**decoder(add_cross_attention=True))
    inputs["encoder_hidden_states"] = torch.randn(3, 5, 48, dtype=torch.float64, device=DEVICE)
    with pytest.warns(RuntimeWarning):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "decoder")


def test_a_reason_is_said_once_and_counted_every_time():
    _, model, report, inputs = pair(hidden_act="relu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(**inputs)
    assert len(said) == 1 and report.fallbacks.total() == 3 and report.packed == 0
    assert "activation" in str(report) and "fallen back: 3" in str(report)


def test_planted_fault_a_fallback_is_not_taken_for_packed():
    """`assert_packed`, on which these tests rely, fails if a forward fell back."""
    model, report = accelerated(build(hidden_act="relu"))
    with pytest.warns(RuntimeWarning):
        model(**batch(model))
    with pytest.raises(AssertionError):
        assert_packed(report)


@pytest.mark.parametrize("name", ["layer", "attention"])
def test_modules_put_in_later_are_noticed(name):
    original, model, report, inputs = pair()
    fresh = copy.deepcopy(original.encoder.layer[1])
    if name == "layer":
        model.encoder.layer[1] = fresh
    else:
        model.encoder.layer[1].attention.self = fresh.attention.self
    with pytest.warns(RuntimeWarning, match="put into the model after"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "put into")


@pytest.mark.parametrize("name", ["embeddings", "layer"])
def test_a_shallow_copy_of_a_module_is_noticed(name):
    """The copy has the replaced forward of the module that it was copied from."""
    original, model, report, inputs = pair()
    if name == "layer":
        model.encoder.layer[1] = copy.copy(model.encoder.layer[1])
    else:
        model.embeddings = copy.copy(model.embeddings)
    with pytest.warns(RuntimeWarning, match="has the forward of another"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "of another")


def test_weights_of_another_kind_run_the_original():
    class Quantised(torch.Tensor):
        pass

    original, model, report, inputs = pair()
    for each in (original, model):
        linear = each.encoder.layer[1].output.dense
        linear.weight = nn.Parameter(linear.weight.data.as_subclass(Quantised))
    with pytest.warns(RuntimeWarning, match="is a Quantised"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "Quantised")


def test_parametrized_weights_are_read():
    original = build()
    nn.utils.parametrizations.weight_norm(original.encoder.layer[0].output.dense)
    model, report = accelerated(original)
    inputs = batch(model)
    equal(visible(model(**inputs), inputs), visible(original(**inputs), inputs))
    assert_packed(report)


def test_layers_can_be_taken_out_and_doubled():
    original, model, report, inputs = pair()
    for each in (model, original):
        del each.encoder.layer[0]
        each.encoder.layer.append(copy.deepcopy(each.encoder.layer[0]))
    equal(visible(model(**inputs), inputs), visible(original(**inputs), inputs))
    assert_packed(report)


def test_parts_called_alone_are_the_original():
    original, model, _, inputs = pair()
    ids = inputs["input_ids"]
    hidden = original.embeddings(ids)
    assert torch.equal(model.embeddings(ids), hidden)
    assert torch.equal(model.encoder(hidden)[0], original.encoder(hidden)[0])
    assert torch.equal(model.encoder.layer[0](hidden), original.encoder.layer[0](hidden))


def tagger(**changes):
    config = transformers.BertConfig(**SIZES, num_labels=3, **changes)
    return transformers.BertForTokenClassification(config).eval()


def test_the_caller_s_labels_stay_as_they_are():
    model, labels = tagger(), torch.ones(2, 5, dtype=torch.int64)
    fastbert.accelerate(model)
    model(labels, torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), labels=labels)
    assert (labels == 1).all()


@pytest.mark.parametrize("what", ["an attention of its own", "a bool mask for eager attention"])
def test_what_only_the_original_computes_it_does(what):
    ids, mask = torch.randint(1, 99, (2, 5)), None
    if what == "an attention of its own":
        transformers.AttentionInterface.register("zero", lambda module, query, *_, **__: (0 * query.mT, None))
        model, reason = tagger(), "attention implementation is 'zero'"
        model.set_attn_implementation("zero")
    else:
        model, mask = tagger(attn_implementation="eager"), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
        mask, reason = mask.bool()[:, None, None], "4-D torch.bool"
    other = copy.deepcopy(model)
    fastbert.accelerate(other)
    with pytest.warns(RuntimeWarning, match=reason):
        assert torch.equal(other(ids, mask).logits, model(ids, mask).logits)


def test_noise_on_embeddings_runs_the_original():
    """NEFTune's hook is transformers' own, but reads the number of tokens from the shape, (B, S, C)."""
    model, ids = tagger().train(), torch.randint(1, 99, (2, 5))
    table = model.get_input_embeddings()
    table.neftune_noise_alpha = 5.0
    other = copy.deepcopy(model)
    for each in (model, other):
        each.get_input_embeddings().register_forward_hook(neftune.neftune_post_forward_hook)
    fastbert.accelerate(other)
    with pytest.warns(RuntimeWarning, match="Embedding"):
        results = [(torch.manual_seed(0), each(ids).logits)[1] for each in (model, other)]
    assert torch.equal(*results)


def test_a_causal_module_runs_the_original():
    """transformers reads it from each attention module, not from the configuration."""
    original, model, report, inputs = pair("bert")
    for each in (original, model):
        each.encoder.layer[1].attention.self.is_causal = True
    inputs.pop("attention_mask")
    with pytest.warns(RuntimeWarning, match="BertSelfAttention is causal"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "causal")


def test_vmap_and_trace_run_the_original():
    model = tagger()
    other, ids = copy.deepcopy(model), torch.randint(1, 99, (3, 1, 5))
    fastbert.accelerate(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [torch.func.vmap(lambda x, m=m: m(x).logits)(ids) for m in (model, other)]
        torch.jit.trace(other, (ids[0],), strict=False)
    assert torch.equal(*found)


def test_what_deberta_reads_as_true_or_false_runs_the_original():
    """A 4-D mask of numbers, which is added to the scores in the other families."""
    original, model, report, inputs = pair("deberta-v2", conv_kernel_size=0)  # its convolution takes no such mask
    visible_is_0 = torch.zeros(inputs["attention_mask"].shape, dtype=torch.float64, device=DEVICE)[:, None, None]
    inputs["attention_mask"] = visible_is_0.masked_fill(inputs["attention_mask"][:, None, None] == 0, -1e9)
    with pytest.warns(RuntimeWarning, match="DeBERTa reads its numbers as true or false"):
        found = model(**inputs)[0]
    assert torch.equal(found.nan_to_num(), original(**inputs)[0].nan_to_num())
    assert_fell_back(report, "4-D")


@pytest.mark.parametrize("value", [2, 0.5])
def test_other_numbers_than_0_and_1_run_deberta_s_original(value):
    original, model, report, inputs = pair("deberta-v2")
    inputs["attention_mask"] = inputs["attention_mask"] * value
    with pytest.warns(RuntimeWarning, match="by which DeBERTa multiplies its embeddings"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "other numbers than 0 and 1")


def test_sequences_of_length_0_run_the_original():
    model, report = accelerated(build())
    with pytest.warns(RuntimeWarning, match="sequences are of length 0"), pytest.raises((RuntimeError, IndexError)):
        model(torch.zeros(2, 0, dtype=torch.int64, device=DEVICE))
    assert_fell_back(report, "length 0")
