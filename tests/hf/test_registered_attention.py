"""`register`: attention alone, in a transformers model that is otherwise as it was."""

import copy

import pytest
import torch
import transformers
from hf.pairs import CONFIGS, RELATIVE, SEQLEN, batch, build, decoder, equal, visible
from small_models import DEVICE, randomised
from transformers.integrations import sdpa_attention

import fastbert
from fastbert import backends


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in RELATIVE])
def test_registered_attention(family):
    original = build(family, attention="eager")
    model = copy.deepcopy(original)
    model.set_attn_implementation(fastbert.hf.register())
    for side in ("right", "left"):
        inputs = batch(model, side=side)
        before = sum(n for (name, _), n in backends.calls().items() if name == "attention_fwd")
        one, two = (each(**inputs, output_attentions=True) for each in (model, original))
        calls = sum(n for (name, _), n in backends.calls().items() if name == "attention_fwd") - before
        assert calls == len(two.attentions) > 0
        seen = inputs["attention_mask"].bool()
        assert (one[0] - two[0])[seen].abs().max() <= 1e-12 * two[0].abs().max()
        both = (seen[:, None, :, None] & seen[:, None, None, :]).double()
        for a, b in zip(one.attentions, two.attentions, strict=True):
            assert (a - b * both).abs().max() <= 1e-12


def test_registered_attention_ignores_no_keyword():
    """A bias of scores, as T5 has, is SDPA's, if it knows it; what changes results and SDPA ignores is refused."""
    original = build()
    model = copy.deepcopy(original)
    model.set_attn_implementation(fastbert.hf.register())
    inputs, bias = batch(model), torch.randn(1, 4, SEQLEN, SEQLEN, dtype=torch.float64, device=DEVICE)
    refused = {"s_aux": 2.0, "softcap": 2.0, "sinks": 2.0}
    if hasattr(sdpa_attention, "create_position_bias_mask"):
        given = {"position_bias": bias, "position_ids": None}
        equal(*(visible(each(**inputs, **given), inputs) for each in (model, original)))
    else:
        refused["position_bias"] = bias
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"passes {name} to its attention"):
            model(**inputs, **{name: value})


def test_registered_attention_leaves_dropout_that_is_too_small_to_sdpa():
    """With 8 random bits, a dropout of 0.001 rounds to 0, so SDPA runs. The compiled model gives the same result, with
    a packing that says which of its tokens are real."""
    model = build(dropout=0.001)
    model.set_attn_implementation(fastbert.hf.register())
    for layer in model.encoder.layer:
        layer.attention.self.train()
    inputs, found = batch(model), []
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        torch.manual_seed(0)
        found.append(visible(run(**inputs), inputs))
    equal(*found)
    still = visible(model.eval()(**inputs), inputs)["last_hidden_state 0"]
    assert not torch.equal(found[0]["last_hidden_state 0"], still)


def test_registered_attention_is_causal_where_the_model_is():
    original = build(**decoder())
    model = copy.deepcopy(original)
    model.set_attn_implementation(fastbert.hf.register())
    inputs = batch(model)
    for case in (inputs, {"input_ids": inputs["input_ids"]}):
        one, two = (visible(each(**case), inputs) for each in (model, original))
        equal(one, two)


@pytest.mark.parametrize("name", ["bart", "bert"])
def test_registered_attention_leaves_cross_attention_to_sdpa(name):
    """Also where there are as many queries as keys, so that only the model says what it is."""
    sizes = {"d_model": 16, "vocab_size": 99, "decoder_layers": 1, "encoder_layers": 1}
    heads = {"decoder_attention_heads": 2, "encoder_attention_heads": 2, "decoder_ffn_dim": 16, "encoder_ffn_dim": 16}
    if name == "bart":
        original = randomised(transformers.BartModel(transformers.BartConfig(**sizes, **heads))).double()
    else:
        original = build(**decoder(add_cross_attention=True))
    model = copy.deepcopy(original)
    model.set_attn_implementation(fastbert.hf.register())
    inputs = batch(original, [6, 3], seqlen=6)
    if name == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    else:
        states = torch.randn(2, 6, 48, dtype=torch.float64, device=DEVICE)
        inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": inputs.pop("attention_mask")}
    one, two = (each(**inputs).last_hidden_state for each in (model, original))
    assert (one - two).abs().max() <= 1e-12 * two.abs().max()


def test_registered_attention_drops_in_training():
    model = build(dropout=0.5)
    model.set_attn_implementation(fastbert.hf.register())
    inputs = batch(model)
    still = model(**inputs)[0]
    for layer in model.encoder.layer:
        layer.attention.self.train()
    torch.manual_seed(0)
    one = model(**inputs)[0]
    torch.manual_seed(0)
    assert torch.equal(one, model(**inputs)[0]) and not torch.equal(one, still)
