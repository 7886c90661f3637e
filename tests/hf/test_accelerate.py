"""`accelerate` gives the unmodified transformers model's outputs, losses and gradients, for every family and head."""

import copy
import warnings

import pytest
import torch
from hf.pairs import (
    CONFIGS,
    HEADS,
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
from small_models import DEVICE, assert_gradients, reference_masks
from torch import nn

import fastbert
from fastbert import random, reference, testing
from fastbert.families import FAMILIES
from fastbert.testing import Result

# ---- the same numbers


def test_every_family_of_the_table_is_tested():
    assert len(FAMILIES) == len(CONFIGS)


@pytest.mark.parametrize("head", [name for name in HEADS if name not in ("choice", "pretraining")])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_and_head(family, head):
    """Outputs, loss and gradients equal the original's, in float64, in training mode without dropout."""
    original, model, report, inputs = pair(family, head, dropout=0.0, train=True)
    targets = labels(model, head, inputs)
    results = [each(**inputs, **targets) for each in (model, original)]
    assert type(results[0]) is type(results[1]) and list(results[0]) == list(results[1])
    equal(*(visible(result, inputs) for result in results))
    for result in results:
        (result.loss if targets else sum(x.sin().sum() for x in visible(result, inputs).values())).backward()
    assert_packed(report)
    assert_gradients(model, original)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_question_answering_loss_over_padding_runs_the_original(family):
    """The softmax of this loss includes the logits of padding, which the packed forward does not compute."""
    original, model, report, inputs = pair(family, "question")
    places = torch.tensor([1, 0, 3], device=DEVICE)
    targets = {"start_positions": places, "end_positions": places}
    with pytest.warns(RuntimeWarning, match="counts padding"):
        assert torch.equal(model(**inputs, **targets).loss, original(**inputs, **targets).loss)
    assert_fell_back(report, "question")
    for mask in (None, torch.ones_like(inputs["attention_mask"])):
        one, two = (each(inputs["input_ids"], mask, **targets).loss for each in (model, original))
        assert (one - two).abs() <= 1e-12 * two
    assert report.packed == 2


@pytest.mark.parametrize("head", ["tokens", "mlm"])
def test_labels_of_masked_tokens_count_as_ignored(head):
    original, model, report, inputs = pair("bert", head)
    targets = torch.randint(2, (3, SEQLEN), device=DEVICE)
    ignored = targets.masked_fill(inputs["attention_mask"] == 0, -100)
    two, wide = original(**inputs, labels=ignored).loss, inputs["attention_mask"][:, None, None].bool()
    for mask in (inputs["attention_mask"], wide, wide.double().log()):
        one = model(inputs["input_ids"], mask, labels=targets).loss
        assert (one - two).abs() <= 1e-12 * two
    causal = wide & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=DEVICE).tril()
    with pytest.warns(RuntimeWarning, match="no key-padding mask"):  # the original runs, with all labels
        one, two = (each(inputs["input_ids"], causal, labels=targets).loss for each in (model, original))
    assert torch.equal(one, two) and report.packed == 3


@pytest.mark.parametrize(
    ("family", "head"), [*((name, "mlm") for name in CONFIGS), ("bert", "pretraining"), ("albert", "pretraining")]
)
@pytest.mark.parametrize("side", ["right", "left"])  # left: pretraining's pooler makes the original run
def test_skipped_logits(family, head, side):
    """Loss and gradients equal the original's; logits are computed for labelled rows only, and not returned."""
    original = build(family, head, dropout=0.0).train()
    model = copy.deepcopy(original)
    report = fastbert.accelerate(model, skip_logits=True)
    inputs = batch(model, [7, 3, 12], side)
    chosen = torch.rand(3, SEQLEN, device=DEVICE) < 0.3
    chosen[0, SEQLEN // 2] = True  # visible with padding on either side
    targets = torch.randint(2, 99, (3, SEQLEN), device=DEVICE).masked_fill(~chosen, -100)
    ignored = targets.masked_fill(inputs["attention_mask"] == 0, -100)
    more = {} if head == "mlm" else {"bert": "next_sentence_label", "albert": "sentence_order_label"}
    more = {more[family]: torch.tensor([1, 0, 1], device=DEVICE)} if more else {}
    rows = []
    logits_of = model.get_output_embeddings()
    logits_of.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        one = model(**inputs, labels=targets, **more)
    two = original(**inputs, labels=ignored, **more)
    assert (one.loss - two.loss).abs() <= 1e-12 * two.loss and rows == [(ignored != -100).sum()]
    assert set(two) - set(one) == {"logits" if head == "mlm" else "prediction_logits"}
    for result in (one, two):
        result.loss.backward()
    assert_gradients(model, original)
    short = model(**inputs, labels=targets, **more, return_dict=False)
    assert len(short) == len(original(**inputs, labels=targets, **more, return_dict=False)) - 1
    assert report.packed == (0 if side == "left" and head == "pretraining" else 2)
    assert fastbert.accelerate(model).skip_logits and not fastbert.accelerate(model, skip_logits=False).skip_logits
    fastbert.accelerate(model, skip_logits=True)
    for output in (model(**inputs), model.eval()(**inputs, labels=targets, **more)):
        assert (output["logits" if head == "mlm" else "prediction_logits"]).shape == (3, SEQLEN, 99)


def test_logits_are_skipped_only_where_there_is_a_masked_lm_head():
    model = build("bert", "tokens")
    with pytest.raises(ValueError, match="skip_logits is for masked-LM heads; BertForTokenClassification has none"):
        fastbert.accelerate(model, skip_logits=True)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", CONFIGS)
def test_multiple_choice(family):
    original, model, report, inputs = pair(family, "choice")
    wide = {name: tensor.reshape(1, 3, SEQLEN) for name, tensor in inputs.items()}
    if getattr(model.base_model, "pooler", model) is None:
        pytest.skip("transformers 5.0 reads a pooler that its model does not have")
    one, two = model(**wide, labels=torch.tensor([2], device=DEVICE)), original(**wide)
    assert (one.logits - two.logits).abs().max() <= 1e-12 * two.logits.abs().max() and one.loss is not None
    assert_packed(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_as_accurate_as_pytorch(family, dtype):
    originals = [build(family, dtype=dtype)]
    originals.append(build(family, dtype=dtype, attention="eager"))
    originals[1].load_state_dict(originals[0].state_dict())
    model, report = accelerated(originals[0])
    inputs = batch(model)

    def run(each):
        with torch.no_grad():
            states = each(**inputs, output_hidden_states=True).hidden_states
        return Result({f"state {i}": state[inputs["attention_mask"].bool()] for i, state in enumerate(states)}, {})

    truth = run(copy.deepcopy(originals[0]).double())
    testing.assert_rows(testing.compare(run(model), truth, map(run, originals), factor=3.0))
    assert_packed(report)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python"])
def test_forms_of_gelu(activation):
    original, model, report, inputs = pair(hidden_act=activation)
    equal(visible(model(**inputs), inputs), visible(original(**inputs), inputs))
    assert_packed(report)


def test_training_with_dropout_is_exact(monkeypatch):
    """Hidden states and gradients equal the reference's with fastbert.random's masks; a forward draws one key."""
    model = build().train()
    truth = reference.BertModel(fastbert.BertConfig.from_dict(model.config.to_dict())).to(DEVICE).double().train()
    truth.load_state_dict(model.state_dict())
    report = fastbert.accelerate(model)
    inputs = batch(model)
    keys = [random.new_key(DEVICE)]
    monkeypatch.setattr(random, "new_key", lambda device: keys.append(keys[0]) or keys[0])
    last = model(**inputs).last_hidden_state
    result = model(**inputs, output_hidden_states=True)
    assert torch.equal(last, result.last_hidden_state)  # however layers pass tensors on to each other
    states, pooled = truth(**inputs, masks=reference_masks(model, keys[0], LENGTHS, SEQLEN))
    seen = inputs["attention_mask"].bool()
    for state, expected in zip(result.hidden_states, states, strict=True):
        assert (state - expected)[seen].abs().max() <= 1e-12 * expected.abs().max()
    (result.last_hidden_state[seen].sin().sum() + result.pooler_output.sum()).backward()
    (states[-1][seen].sin().sum() + pooled.sum()).backward()
    assert_gradients(model, truth)
    assert len(keys) == 3
    assert_packed(report, 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_seed_decides_dropout(family):
    _, model, report, inputs = pair(family, dropout=0.3, train=True)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model(**inputs).last_hidden_state)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(model.eval()(**inputs)[0], model(**inputs)[0])
    assert_packed(report, 5)


@pytest.mark.parametrize("module", ["attention", "hidden"])
def test_dropout_follows_its_own_module(module):
    """Monte Carlo dropout: in eval(), single modules may be in training mode, by the flags that transformers reads."""
    _, model, report, inputs = pair(dropout=0.3)
    still = model(**inputs)[0]
    layer = model.encoder.layer[0]
    layer.attention.self.dropout.train()  # transformers does not read this module's mode
    assert torch.equal(model(**inputs)[0], still)
    (layer.attention.self if module == "attention" else layer.output.dropout).train()
    assert not torch.equal(model(**inputs)[0], still)
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout) or part is layer.attention.self:
            part.eval()
    layer.attention.self.train(False)
    for other in model.encoder.layer:
        other.attention.self.eval()
    assert torch.equal(model(**inputs)[0], still)
    assert_packed(report, 4)


# ---- padding


@pytest.mark.parametrize("head", ["tokens", "question", "mlm"])
@pytest.mark.parametrize("family", CONFIGS)
def test_left_padding_runs_packed_under_token_heads(family, head):
    if family == "albert" and head == "mlm":
        pytest.skip("AlbertForMaskedLM has a pooler")
    original, model, report, inputs = pair(family, head, side="left")
    equal(visible(model(**inputs), inputs), visible(original(**inputs), inputs))
    assert_packed(report)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "albert"])
def test_a_masked_first_token_that_is_read_runs_the_original(family):
    original, model, report, inputs = pair(family, "sequence", side="left")
    with pytest.warns(RuntimeWarning, match="position 0 is masked"):
        assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert_fell_back(report, "position 0")


def test_a_row_without_tokens_gives_zeros():
    _, model, report, inputs = pair("distilbert")
    inputs["attention_mask"][1] = 0
    out = model(**inputs).last_hidden_state
    assert out[1].abs().sum() == 0 and out[0, :7].abs().sum() > 0 and not out.isnan().any()
    inputs["attention_mask"][:] = 0
    assert model(**inputs).last_hidden_state.abs().sum() == 0
    assert_packed(report, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_ugly_values_in_padding_leak_into_nothing(value):
    """Neither the output nor any gradient changes by a single bit, and padding rows of the output are zeros."""
    model, report = accelerated(build(dtype=torch.float32))
    mask = batch(model)["attention_mask"]
    clean = torch.randn(3, SEQLEN, 48, device=DEVICE)
    results = []
    for embeds in (clean, torch.where(mask.bool()[..., None], clean, value)):
        model.zero_grad()
        out = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0][mask == 0].abs().sum() == 0
    assert_packed(report, 2)


def test_forms_of_masks():
    original, model, report, inputs = pair()
    mask, truth = inputs["attention_mask"], original(**inputs)
    additive = (1.0 - mask.double())[:, None, None] * torch.finfo(torch.float64).min
    for form in (mask, mask.bool(), mask.float(), mask.bool()[:, None, None], additive):
        equal(visible(model(**inputs | {"attention_mask": form}), inputs), visible(truth, inputs))
    full = model(inputs["input_ids"]).last_hidden_state
    assert (full - original(inputs["input_ids"]).last_hidden_state).abs().max() <= 1e-12 * full.abs().max()
    assert_packed(report, 6)


def test_visible_padding_tokens_get_roberta_s_gradients():
    """Without a mask, RoBERTa's padding tokens are visible at position padding_idx, whose embedding has no gradient."""
    original, model, report, inputs = pair("roberta", dropout=0.0, train=True)
    for each in (model, original):
        each(inputs["input_ids"]).last_hidden_state.sin().sum().backward()
    for name in ("word_embeddings", "position_embeddings"):
        one, two = (getattr(each.embeddings, name).weight.grad for each in (model, original))
        assert two[1].abs().sum() == 0 and (one - two).abs().max() <= 1e-12 * two.abs().max()
    assert_packed(report)
