"""reference.py, with which everything else is compared, agrees with transformers in float64."""

import pytest
import torch
from small_models import DEVICE, TINY, assert_gradients, batch, hugging_face, minilm
from transformers import BertModel

from fastbert import BertConfig, random, reference


def assert_agrees(theirs, inputs):
    ours = reference.BertModel(BertConfig.from_dict(theirs.config.to_dict())).to(DEVICE).double().eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        states, pooled = ours(**inputs)
        truth = theirs(**inputs, output_hidden_states=True)
    visible = inputs["attention_mask"].bool()
    for state, expected in zip(states, truth.hidden_states, strict=True):
        assert (state - expected)[visible].abs().max() <= 1e-12 * expected.abs().max()
    assert (pooled - truth.pooler_output)[visible[:, 0]].abs().max() <= 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_agrees_with_transformers(side, activation):
    assert_agrees(hugging_face(hidden_act=activation).double(), batch([7, 1, 12], 12, side=side))


def test_agrees_with_transformers_on_minilm():
    theirs = BertModel.from_pretrained(minilm(), attn_implementation="eager").to(DEVICE).double()
    assert_agrees(theirs, batch([40, 9], 40, 30522))


def test_gradients_agree_with_transformers():
    theirs = hugging_face().double()
    ours = reference.BertModel(TINY).to(DEVICE).double().eval()
    ours.load_state_dict(theirs.state_dict())
    inputs = batch([7, 12], 12)
    cotangent = torch.randn(2, 12, 48, dtype=torch.float64, device=DEVICE) * inputs["attention_mask"][..., None]
    ((ours(**inputs)[0][-1] * cotangent).sum() + ours(**inputs)[1].sum()).backward()
    result = theirs(**inputs)
    ((result.last_hidden_state * cotangent).sum() + result.pooler_output.sum()).backward()
    assert_gradients(ours, theirs)


def test_masks_replace_dropout():
    """Masks of ones mean no dropout; masks of zeros at a layer's two outputs leave only its LayerNorms."""
    model = reference.BertModel(TINY).to(DEVICE).double().train()
    inputs = batch([5, 5], 5)
    ones = {site: torch.ones((), device=DEVICE) for site in range(3 * TINY.num_hidden_layers + 1)}
    with torch.no_grad():
        trained, _ = model(**inputs, masks=ones)
        evaluated, _ = model.eval()(**inputs)
        assert torch.equal(trained[-1], evaluated[-1])
        _, attention_output, layer_output = random.layer_sites(0)
        zeros = ones | {attention_output: torch.zeros((), device=DEVICE), layer_output: torch.zeros((), device=DEVICE)}
        states, _ = model(**inputs, masks=zeros)
        layer = model.encoder.layer[0]
        assert torch.equal(states[1], layer.output.LayerNorm(layer.attention.output.LayerNorm(states[0])))
