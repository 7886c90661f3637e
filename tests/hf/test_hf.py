"""Compares `accelerate`, `restore` and `register` with the unmodified transformers model, in all its usual uses."""

import copy
import functools
import inspect
import pickle
import sys
import threading
import typing
import warnings

import pytest
import small_models
import torch
import transformers
from small_models import DEVICE, assert_gradients, assert_like, copies, minilm, randomised, reference_masks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

import fastbert
from fastbert import backends, random, reference, testing
from fastbert.families import FAMILIES
from fastbert.testing import Result

LENGTHS, SEQLEN = [7, 1, 12], 12
SIZES = small_models.SIZES | {"num_hidden_layers": 3, "intermediate_size": 96}
DISTILBERT = {"vocab_size": 99, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 32}
CONFIGS = {
    "bert": SIZES,
    "roberta": SIZES | {"pad_token_id": 1},
    "xlm-roberta": SIZES | {"pad_token_id": 1},
    "camembert": SIZES | {"pad_token_id": 1},
    "electra": SIZES | {"embedding_size": 32},  # the widths differ, so a projection follows the embeddings
    "distilbert": DISTILBERT,
    "albert": SIZES | {"embedding_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    "deberta-v2": small_models.CONFIGS["deberta-v2"] | SIZES,
    "mpnet": SIZES,
}
RELATIVE = ("deberta-v2", "mpnet")  # for these, transformers' attention is eager
HEADS = {
    "base": transformers.AutoModel,
    "sequence": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
    "mlm": transformers.AutoModelForMaskedLM,
    "pretraining": transformers.AutoModelForPreTraining,
    "choice": transformers.AutoModelForMultipleChoice,
}
DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    *("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
)


def build(family="bert", head="base", dtype=torch.float64, attention="sdpa", dropout=None, **changes):
    """A tiny transformers model with random weights, including nontrivial biases and LayerNorm parameters."""
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family] | changes)
    for name in DROPOUTS if dropout is not None else ():
        if hasattr(config, name):
            setattr(config, name, dropout)
    config._attn_implementation = "eager" if family in RELATIVE else attention
    return randomised(HEADS[head].from_config(config)).to(dtype)


def batch(model, lengths=LENGTHS, side="right", seqlen=SEQLEN):
    """Random ids and their attention mask; padding holds the family's padding token."""
    mask = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(2, 99, mask.shape)
    padding = model.config.pad_token_id or 0
    return {"input_ids": torch.where(mask.bool(), ids, padding).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def labels(model, head, inputs):
    """Labels for heads of tokens, -100 at padding, and of sequences; none for other heads."""
    mask = inputs["attention_mask"]
    if head in ("mlm", "tokens"):
        return {"labels": torch.randint(2, mask.shape, device=DEVICE).masked_fill(mask == 0, -100)}
    return {"labels": torch.tensor([1, 0, 1], device=DEVICE)} if head == "sequence" else {}


def accelerated(model):
    """An accelerated copy of the model, and the copy's report."""
    copied = copy.deepcopy(model)
    return copied, fastbert.accelerate(copied)


def pair(*args, train=False, side="right", **options):
    """A model, an accelerated copy, the copy's report, and a batch."""
    original = build(*args, **options).train(train)
    return original, *accelerated(original), batch(original, side=side)


def visible(output, inputs):
    """The tensors of an output by name. Tensors with a row for each token keep only the rows of visible tokens."""
    mask = inputs["attention_mask"].bool()
    result = {}
    for name, value in output.items():
        for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            token = tensor.dim() > 1 and tensor.shape[:2] == mask.shape
            result[f"{name} {i}"] = tensor[mask] if token else tensor
    return result


def assert_packed(report, times=1):
    """Asserts that exactly `times` forwards ran packed, and that none fell back."""
    assert (report.packed, report.fallbacks.total()) == (times, 0), report


def assert_fell_back(report, words):
    assert report.packed == 0 and report.fallbacks.total() == 1, report
    assert words in next(iter(report.fallbacks)), report


def equal(one, two, bound=1e-12):
    """Asserts that two sets of tensors are equal by the accuracy rule for float64."""
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.shape == two[name].shape, name
        assert (tensor - two[name]).detach().abs().max() <= bound * two[name].detach().abs().max(), name


# ---- the same numbers


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


# ---- an accelerated model can still do whatever a transformers model can


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


def test_a_layer_that_another_thread_recomputes_runs_on_the_forced_backend():
    _, model, report, inputs = pair(train=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with fastbert.backend("reference"):
        loss = model(**inputs).last_hidden_state.sum()
    before = backends.calls()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    ran = {key for key, n in backends.calls().items() if n > before.get(key, 0)}
    assert ("attention_fwd", "reference") in ran and {name for _, name in ran} == {"reference"}
    assert model.encoder.layer[0].output.dense.weight.grad is not None


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


# ---- what the packed path cannot do


def decoder(**changes):
    return {"is_decoder": True, "use_cache": False, **changes}


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


REASONS = {
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
    with pytest.warns(RuntimeWarning, match=reason):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, reason)


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


# ---- restoring, misuse


@pytest.mark.parametrize("family", CONFIGS)
def test_restore_puts_everything_back(family):
    original, model, report, inputs = pair(family, "tokens")
    model(**inputs)
    fastbert.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert report.packed == 1 and not report.active
    with pytest.raises(ValueError, match="is not accelerated"):
        fastbert.restore(model)
    again = fastbert.accelerate(model)
    model(**inputs)
    assert again is not report
    assert_packed(again)


def test_restore_under_a_wrapper_of_someone_else():
    """A wrapper put around forward later, as Hugging Face's accelerate does, stays, and then calls the original."""
    original, model, report, inputs = pair()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert fastbert.accelerate(model) is report
    model(**inputs)
    assert_packed(report)
    fastbert.restore(model)
    assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_packed(report)


def test_restore_brings_back_a_forward_that_was_there_before():
    original = build()
    inner = original.forward
    wrapper = lambda *args, **kwargs: inner(*args, **kwargs)  # noqa: E731
    original.forward = wrapper
    fastbert.accelerate(original)
    assert original.forward is not wrapper
    fastbert.restore(original)
    assert vars(original)["forward"] is wrapper


@pytest.mark.parametrize("head", ["base", "tokens"])
def test_a_replacement_looks_like_the_function_it_stands_for(head):
    original = build("bert", head)
    model, report = accelerated(original)
    for name, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        ours, theirs = module.forward, original.get_submodule(name).forward
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__code__", "__defaults__"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), (name, attribute)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.getsource(ours) == inspect.getsource(theirs)
        assert typing.get_type_hints(ours) == typing.get_type_hints(theirs)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model.forward.nonsense
    assert not hasattr(pickle.loads(pickle.dumps(model.forward)), "nonsense")


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("deberta-v2", "albert"))) for name in CONFIGS]
)
def test_torch_export_sees_the_original(family, strict):
    if strict and family == "deberta-v2":
        pytest.skip("torch.export loses tensors that the original makes behind a replaced forward")
    original, model, report, inputs = pair(family, "tokens")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [torch.export.export(each, (), inputs, strict=strict) for each in (model, original)]
    one, two = (program.module()(**inputs).logits for program in programs)
    assert torch.equal(one, two) and torch.equal(one, original(**inputs).logits)
    assert report.packed == 0


def test_accelerator_wraps_and_unwraps(accelerate):
    """Accelerator.unwrap_model binds the forward that it finds to the model a second time, which must not matter."""
    original, model, report, inputs = pair("bert", "tokens", dtype=torch.float32)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    inputs = {name: x.cpu() for name, x in inputs.items()}
    model, original = accelerator.prepare(model), original.cpu()
    assert model(**inputs).logits.dtype == torch.float32
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    full = original(**inputs).logits[inputs["attention_mask"].bool()]
    for output in (model(**inputs), model(inputs["input_ids"], inputs["attention_mask"])):
        assert (output.logits[inputs["attention_mask"].bool()] - full).abs().max() < 1e-4
    assert_packed(report, 3)
    fastbert.restore(model)
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert torch.equal(model(inputs["input_ids"], inputs["attention_mask"]).logits, original(**inputs).logits)
    assert_packed(report, 3)


def test_a_model_that_was_wrapped_and_restored_may_be_accelerated_again():
    """The first replacement stays inside the wrapper, unused."""
    model, _ = accelerated(build())
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    fastbert.restore(model)
    report = fastbert.accelerate(model)
    model(**batch(model))
    assert_packed(report)


def test_accelerating_twice_gives_the_same_report():
    model, report = accelerated(build("bert", "tokens"))
    assert fastbert.accelerate(model) is report and fastbert.accelerate(model.bert) is report
    model(**batch(model))
    assert_packed(report)
    assert list(report.replaced) == ["bert"] and report.not_replaced == {}


def test_one_of_two_models_may_be_restored():
    both = nn.ModuleDict({"one": build(), "two": build()})
    report = fastbert.accelerate(both)
    fastbert.restore(both["one"])
    for each in both.values():
        each(**batch(each))
    assert_packed(report)
    assert report.active and fastbert.accelerate(both["two"]) is report
    fastbert.restore(both)
    assert not report.active and not any("forward" in vars(module) for module in both.modules())


def test_models_may_share_embeddings():
    both = nn.ModuleDict({"one": build(), "two": build()})
    both["two"].embeddings = both["one"].embeddings
    report = fastbert.accelerate(both)
    for each in both.values():
        each(**batch(each))
    assert_packed(report, 2)
    fastbert.restore(both)
    assert not report.active and not any("forward" in vars(module) for module in both.modules())


def test_a_layer_without_attention_runs_the_original():
    class Skip(nn.Module):
        def forward(self, hidden, *_, **__):
            return hidden

    original = build()
    original.encoder.layer[1] = Skip()
    model, report = accelerated(original)
    inputs = batch(model)
    with pytest.warns(RuntimeWarning, match="a Skip computes something of its own"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "Skip")
    fastbert.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_be_read_is_unchanged():
    both = nn.ModuleDict({"one": build(), "two": build()})
    del both["two"].encoder.layer
    with pytest.raises(AttributeError):
        fastbert.accelerate(both)
    assert not any("forward" in vars(module) for module in both.modules())


def gpt2():
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))


def test_what_is_refused():
    with pytest.raises(ValueError, match="GPT2Model .*'gpt2'.*expected one of BERT, RoBERTa"):
        fastbert.accelerate(gpt2())
    with pytest.raises(TypeError, match="holds no transformers model"):
        fastbert.accelerate(nn.Linear(2, 2))
    for function in (fastbert.accelerate, fastbert.restore):
        with pytest.raises(TypeError, match="given a str"):
            function("bert-base-uncased")
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pytest.raises(ValueError, match="embeddings.word_embeddings.weight is on the meta device"):
        fastbert.accelerate(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_old_transformers_are_refused(monkeypatch):
    model = build()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    for call in (lambda: fastbert.accelerate(model), fastbert.hf.register):
        with pytest.raises(RuntimeError, match="4.57.1; expected 5.0 or newer"):
            call()
    assert "forward" not in vars(model)


def test_a_subclass_with_its_own_forward_is_not_taken_for_bert():
    class Mine(transformers.BertModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match="Mine .*'bert'.* has a forward of its own in place of BertModel's"):
        fastbert.accelerate(Mine(transformers.BertConfig(**SIZES)))


def test_other_models_inside_are_reported():
    both = nn.ModuleDict({"one": build("bert", "tokens"), "two": gpt2()})
    report = fastbert.accelerate(both)
    assert list(report.replaced) == ["one.bert"] and list(report.not_replaced) == ["two"]
    assert "gpt2" in report.not_replaced["two"]


def test_models_within_a_replaced_one_are_parts_of_it():
    model = build("bert", "tokens")
    model.bert.embeddings.other = gpt2()
    report = fastbert.accelerate(model)
    assert list(report.replaced) == ["bert"] and not report.not_replaced


def test_bad_input_is_said_and_changes_nothing():
    _, model, report, inputs = pair("bert", "tokens")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 9\); expected .* \(3, 12\)"):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, :9])
    with pytest.raises(IndexError, match="out of"):
        model(**inputs, labels=torch.full((3, SEQLEN), 7, device=DEVICE))
    with pytest.raises(IndexError, match=r"input_ids.* is 99; expected 0 <= input_ids < 99"):
        model(torch.full((3, SEQLEN), 99, device=DEVICE), attention_mask=inputs["attention_mask"])
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="exactly one of input_ids"):
        model()
    model(**inputs)
    assert report.packed == 2  # the call with wrong labels, and the last one


def test_every_family_of_the_table_is_tested():
    assert len(FAMILIES) == len(CONFIGS)


# ---- together with other libraries


def test_compiled_model_is_right():
    """Forward and backward equal the original's while lengths change, with at most four compilations."""
    original = build("bert", "tokens", dropout=0.0, num_hidden_layers=1).train()
    model, report = accelerated(original)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for lengths, seqlen in ((LENGTHS, 12), ([3, 12, 2], 12), ([4, 2, 8], 10), ([4, 2, 9], 11), ([1, 1, 2], 9)):
        inputs = batch(model, lengths, seqlen=seqlen)
        targets = labels(model, "tokens", inputs)
        results = [each(**inputs, **targets) for each in (compiled, original)]
        equal(*(visible(result, inputs) for result in results))
        for result in results:
            result.loss.backward()
    for one, two in zip(model.parameters(), original.parameters(), strict=True):
        assert (one.grad - two.grad).abs().max() <= 1e-11
    assert 1 <= counter.frame_count <= 4 and report.fallbacks == {}


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Hugging Face's accelerate")
    _, model, report, inputs = pair("bert", "sequence", dtype=torch.float32)
    rows = [{name: tensor[i] for name, tensor in inputs.items()} | {"labels": i % 2} for i in range(3)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=3, report_to=[], use_cpu=DEVICE == "cpu", bf16=True
    )
    before = model.bert.encoder.layer[0].attention.self.query.weight.clone()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    assert_packed(report, 4)
    assert not torch.equal(before.cpu(), model.bert.encoder.layer[0].attention.self.query.weight.cpu())


@pytest.mark.parametrize("order", ["accelerate, peft", "peft, accelerate"])
def test_lora(order):
    """Adapters run on packed tokens, in either order of acceleration and LoRA, with the original's gradients."""
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    targets = ["query", "value", "dense", "word_embeddings"]
    config = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0, init_lora_weights=False)
    original = build("bert", "sequence", dropout=0.0).train()
    model = copy.deepcopy(original)
    torch.manual_seed(0)
    truth = peft.get_peft_model(original, config)
    torch.manual_seed(0)
    if order == "accelerate, peft":
        report = fastbert.accelerate(model)
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, config)
        report = fastbert.accelerate(model)
    inputs = batch(original)
    for each in (model, truth):
        each(**inputs, labels=torch.tensor([1, 0, 1], device=DEVICE)).loss.backward()
    assert_gradients(model, truth)
    assert_packed(report)


def test_sentence_transformers_on_minilm():
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(minilm()), device=DEVICE)
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.", "", "A " * 90]
    before = model.encode(texts, convert_to_tensor=True)
    report = fastbert.accelerate(model)
    after = model.encode(texts, convert_to_tensor=True)
    assert (before - after).abs().max() < 1e-5
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]  # sentence-transformers' README
    assert (model.similarity(after[:3], after[:3]).cpu() - torch.tensor(published)).abs().max() < 5e-4
    assert report.packed >= 1 and report.fallbacks.total() == 0


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoders_of_sentence_transformers(labels, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    sizes = {"vocab_size": 30522, "max_position_embeddings": 64, "num_labels": labels}
    build("bert", "sequence", torch.float32, **sizes).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path)
    model = library.CrossEncoder(str(tmp_path), device=DEVICE)
    pairs = [("a query", "short"), ("another", "and its longer document"), ("", ""), ("one", "is cut, " * 90)]
    before, exact = model.predict(pairs, convert_to_tensor=True), copy.deepcopy(model)
    exact.model.double()
    report = fastbert.accelerate(model)
    after = model.predict(pairs, convert_to_tensor=True)
    assert_like(after, exact.predict(pairs, convert_to_tensor=True), before)
    assert before.std(0).min() > 1e-3
    assert report.packed == 1 and report.fallbacks.total() == 0


@pytest.mark.parametrize("loss", ["CachedMultipleNegativesRankingLoss", "CoSENTLoss"])
def test_sentence_transformers_losses(loss, tmp_path):
    """Each loss, inside MatryoshkaLoss, has the same value and gradients with an accelerated model as before."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer import losses, modules

    build("bert", "base", dropout=0.0, vocab_size=30522, max_position_embeddings=64).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path)
    body = modules.Transformer(str(tmp_path), model_kwargs={"dtype": torch.float64})
    original = library.SentenceTransformer(modules=[body, modules.Pooling(48)], device=DEVICE).train()
    model = copy.deepcopy(original)
    report = fastbert.accelerate(model)
    columns = ["a short text", "another", "the third is longer than they are"], ["its pair", "is", "here, as it is"]
    scores = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    options, values = {"mini_batch_size": 2} if loss.startswith("Cached") else {}, []
    for each in (original, model):
        features = [library.util.batch_to_device(each.tokenize(column), DEVICE) for column in columns]
        around = losses.MatryoshkaLoss(each, getattr(losses, loss)(each, **options), [48, 16])
        values.append(around(features, scores))
        values[-1].backward()
    assert abs(values[1] - values[0]) <= 1e-12 * values[0]
    assert_gradients(model, original)
    assert report.packed >= 2 and report.fallbacks.total() == 0


@pytest.fixture
def one_process(tmp_path):
    from torch import distributed

    if not distributed.is_available():
        pytest.skip("torch.distributed is not built")
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo" if DEVICE == "cpu" else "nccl", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("when", "lengths"), [("before", LENGTHS), ("after", LENGTHS), ("after", [SEQLEN] * 2)])
def test_fsdp2(one_process, when, lengths):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    original = build(dtype=torch.float32)
    model, mesh = copy.deepcopy(original), init_device_mesh(DEVICE, (1,))
    report = fastbert.accelerate(model) if when == "before" else None
    for module in (model.embeddings, *model.encoder.layer, model.encoder, model):
        fully_shard(module, mesh=mesh)
    report = report or fastbert.accelerate(model)
    inputs = batch(model, lengths)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*returned a view tensor")
        one = model(**inputs)
    equal(visible(one, inputs), visible(original(**inputs), inputs), bound=1e-5)
    one.last_hidden_state.sum().backward()
    assert_packed(report)


def test_ddp(one_process):
    _, model, report, inputs = pair("bert", "sequence", dtype=torch.float32, train=True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(**inputs, labels=torch.tensor([1, 0, 1], device=DEVICE)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert_packed(report)


# ---- attention alone


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
    """A bias of scores, as T5 has, is SDPA's; what changes results and SDPA ignores, such as sinks, is refused."""
    original = build()
    model = copy.deepcopy(original)
    model.set_attn_implementation(fastbert.hf.register())
    inputs, bias = batch(model), torch.randn(1, 4, SEQLEN, SEQLEN, dtype=torch.float64, device=DEVICE)
    one, two = (visible(each(**inputs, position_bias=bias, position_ids=None), inputs) for each in (model, original))
    equal(one, two)
    for name in ("s_aux", "softcap", "sinks"):
        with pytest.raises(ValueError, match=name):
            model(**inputs, **{name: 2.0})


def test_registered_attention_leaves_dropout_that_is_too_small_to_sdpa():
    """With 8 random bits, a dropout of 0.001 rounds to 0, so SDPA runs. The compiled model gives the same result, with
    a packing that says which of its tokens are real."""
    model = build(dropout=0.001)
    model.set_attn_implementation(fastbert.hf.register())
    for layer in model.encoder.layer:
        layer.attention.self.train()
    inputs, found = batch(model), []
    for run in (model, torch.compile(model, backend="eager")):
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


def test_vmap_and_trace_run_the_original():
    model = tagger()
    other, ids = copy.deepcopy(model), torch.randint(1, 99, (3, 1, 5))
    fastbert.accelerate(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [torch.func.vmap(lambda x, m=m: m(x).logits)(ids) for m in (model, other)]
        torch.jit.trace(other, (ids[0],), strict=False)
    assert torch.equal(*found)
