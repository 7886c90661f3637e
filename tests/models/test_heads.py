"""The heads compared with transformers: logits, losses, gradients and checkpoints; padded and packed."""

import copy
import math
from types import SimpleNamespace

import pytest
import test_family
import torch
import torch.nn.functional as F
import transformers
from small_models import (
    DEVICE,
    LOGITS,
    SIZES,
    TINY,
    assert_gradients,
    batch,
    gradients,
    hugging_face,
    integers,
    packed,
)
from test_family import CLASSES, LENGTHS, SEQLEN, run
from torch.nn.utils import prune

import fastbert
from fastbert import heads, testing
from fastbert.checkpoint import TIED

CONFIG = fastbert.BertConfig(**SIZES, num_labels=CLASSES)

HEADS = (
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
)
MASKED_LM = HEADS[:2]


def their(name, **changes):
    return test_family.their("bert", name.removeprefix("Bert"), **changes)


def our(theirs):
    return test_family.our(theirs, type(theirs).__name__.removeprefix("Bert"))


def example(name):
    return test_family.example(SimpleNamespace(config=CONFIG), name.removeprefix("Bert"))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_as_accurate_as_transformers(name, dtype):
    """Logits, loss and gradients. Our loss is float32 or float64; it is rounded to the dtype of transformers' loss."""
    theirs = their(name).to(dtype)
    eager = copy.deepcopy(theirs)
    eager.set_attn_implementation("eager")
    inputs, labels = example(name)
    truth = run(copy.deepcopy(theirs).double(), inputs, labels)
    models = [copy.deepcopy(theirs), eager, testing.on_onednn(copy.deepcopy(theirs))]
    contenders = [run(model, inputs, labels) for model in models]
    mine = run(our(theirs), inputs, labels)
    assert mine.outputs["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    mine.outputs["loss"] = mine.outputs["loss"].to(dtype)
    testing.assert_rows(testing.compare(mine, truth, contenders))


def test_classifier_dropout_and_its_default():
    for p, expected in ((None, 0.1), (0.0, 0.0), (0.3, 0.3)):
        assert fastbert.BertForTokenClassification(CONFIG.changed(classifier_dropout=p)).dropout.p == expected
    with pytest.raises(ValueError, match="classifier_dropout is 1.5"):
        CONFIG.changed(classifier_dropout=1.5)


@pytest.mark.parametrize("name", HEADS)
def test_without_labels(name):
    model, (inputs, _) = our(their(name)).train(), example(name)
    out = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert out.loss is None and all(getattr(out, field) is not None for field in LOGITS if field in out._fields)
    sequences = inputs["input_ids"].flatten(0, -2).shape
    assert [state.shape for state in out.hidden_states] == [(*sequences, 48)] * 3
    assert [weights.shape for weights in out.attentions] == [(len(LENGTHS), 4, SEQLEN, SEQLEN)] * 2
    assert model(**inputs).hidden_states is None


@pytest.mark.parametrize("name", HEADS)
def test_records_are_those_of_the_body(name):
    model, (inputs, _) = our(their(name)), example(name)
    flat = {key: value.flatten(0, -2) for key, value in inputs.items()}
    for arguments, body in ((inputs, flat), (packed(inputs, {}), packed(inputs, {}))):
        records = {"output_hidden_states": True, "output_attentions": True}
        expected = model.bert(**{key: value for key, value in body.items() if key != "num_choices"}, **records)
        out = model(**arguments, **records)
        for field in ("hidden_states", "attentions"):
            assert all(map(torch.equal, getattr(out, field), getattr(expected, field)))


@pytest.mark.parametrize(
    ("name", "labels", "named"),
    [
        ("BertForMaskedLM", {"labels": [5, -100, 7]}, None),
        ("BertForPreTraining", {"labels": [5, -100, 7], "next_sentence_label": 1}, ["labels", "next_sentence_label"]),
    ],
)
def test_transformers_trainer_evaluates_padded_batches(name, labels, named, tmp_path):
    """By default (None) it takes every argument with "label" in its name for labels, and needs all for a loss."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Hugging Face's accelerate")
    model, rows = getattr(fastbert, name)(TINY).to(DEVICE), [{"input_ids": [5, 6, 7]} | labels] * 3
    options = {"report_to": [], "use_cpu": DEVICE == "cpu", "disable_tqdm": True, "label_names": named}
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **options), eval_dataset=rows)
    inputs = {name: x.to(DEVICE) for name, x in transformers.default_data_collator(rows).items()}
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(model.eval()(**inputs).loss.item(), rel=1e-5)


def test_outputs_are_tuples_whose_slices_hold_what_was_computed():
    """transformers.Trainer evaluates output[1:], which must not contain None."""
    model, (inputs, labels) = our(their("BertForTokenClassification")), example("BertForTokenClassification")
    out = model(**inputs, **labels)
    assert isinstance(out, tuple) and out[0] is out.loss and out[1] is out.logits and out[2] is None
    assert [t is out.logits for t in out[1:]] == [True]


# ---- masked LM: labelled tokens only


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", MASKED_LM)
def test_labelled_tokens_alone_give_the_whole_loss(name, form):
    """The head runs on labelled tokens only, and loss and gradients are those computed from all logits."""
    model = our(their(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double()).train()
    inputs, labels = example(name)
    arguments = inputs | labels if form == "padded" else packed(inputs, labels)
    arguments.pop("next_sentence_label", None)
    seen = []
    model.cls.predictions.transform.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    out = model(**arguments)
    out.loss.backward()
    assert out[1] is None
    assert seen == [(int((arguments["labels"] != -100).sum()), 48)]
    skipping = gradients(model)
    model.zero_grad()
    full = model(**arguments, skip_logits=False)
    logits = full.logits if name == "BertForMaskedLM" else full.prediction_logits
    expected = F.cross_entropy(logits.flatten(0, -2), arguments["labels"].flatten())
    expected.backward()
    assert (out.loss - expected).abs() <= 1e-12 * expected.abs() and torch.equal(full.loss, out.loss)
    assert_gradients(skipping, model)


def test_when_logits_are_made():
    model, (inputs, labels) = our(their("BertForMaskedLM")), example("BertForMaskedLM")
    made = {}
    for training in (True, False):
        for skip in (None, True, False):
            made[training, skip] = model.train(training)(**inputs, **labels, skip_logits=skip).logits is not None
    assert made == {
        (True, None): False, (True, True): False, (True, False): True,
        (False, None): True, (False, True): False, (False, False): True,
    }  # fmt: skip
    assert model.train()(**inputs).logits.shape == (4, SEQLEN, 99)


def test_the_caller_may_say_which_rows_have_labels():
    model, (inputs, labels) = our(their("BertForMaskedLM")), example("BertForMaskedLM")
    arguments = packed(inputs, labels)
    rows = (arguments["labels"] != -100).nonzero().squeeze(-1)
    assert torch.equal(model(**arguments, labelled_rows=rows).loss, model(**arguments).loss)
    with pytest.raises(ValueError, match="labelled_rows goes with packed labels"):
        model(**inputs, **labels, labelled_rows=rows)


@pytest.mark.parametrize("name", MASKED_LM)
def test_labels_of_padding_are_left_out(name):
    model, (inputs, labels) = our(their(name)).train(), example(name)
    padding = inputs["attention_mask"] == 0
    torch.manual_seed(1)
    expected = model(**inputs, **labels).loss
    torch.manual_seed(1)
    assert torch.equal(model(**inputs, **labels | {"labels": labels["labels"].masked_fill(padding, 7)}).loss, expected)


def test_frozen_parameters_cost_no_gradient(monkeypatch):
    """With a frozen body, its parameters get no gradient, and the gradient of the tied weight is not even computed."""
    model, (inputs, labels) = our(their("BertForMaskedLM")), example("BertForMaskedLM")
    model.train()(**inputs, **labels).loss.backward()
    expected = model.cls.predictions.bias.grad.clone()
    needed = []
    op = fastbert.ops.cross_entropy.__globals__
    backward = op["BWD"]
    monkeypatch.setitem(op, "BWD", lambda *a: needed.append(a[-2:]) or backward(*a))
    model.zero_grad()
    model.eval().bert.requires_grad_(False)
    model(**inputs, **labels).loss.backward()
    assert needed == [(True, False)] and all(p.grad is None for p in model.bert.parameters())
    assert all(p.grad is not None for p in model.cls.parameters())
    assert model.cls.predictions.bias.grad.shape == expected.shape
    model.bert.embeddings.word_embeddings.weight.requires_grad_()
    bias = model.cls.predictions.bias.grad.clone()
    model.zero_grad()
    model(**inputs, **labels).loss.backward()
    assert torch.equal(model.cls.predictions.bias.grad, bias)


def test_word_embeddings_that_a_hook_makes_are_those_of_the_head():
    """torch's pruning makes the weight anew before each call of the embeddings."""
    model, (inputs, labels) = our(their("BertForMaskedLM")).eval(), example("BertForMaskedLM")
    embeddings = model.bert.embeddings.word_embeddings
    prune.l1_unstructured(embeddings, "weight", amount=0.5)
    model(**inputs)
    with torch.no_grad():
        embeddings.weight_orig.mul_(3)
    first = model(**inputs).logits
    assert torch.equal(first, model(**inputs).logits)
    for _ in range(2):
        model(**inputs, **labels).loss.backward()


def test_pre_training_adds_up_the_losses_whose_labels_are_given():
    model, (inputs, labels) = our(their("BertForPreTraining").double()), example("BertForPreTraining")
    both, *each = (model(**inputs, **given).loss for given in (labels, *({k: v} for k, v in labels.items())))
    assert (both - sum(each)).abs() <= 1e-12 * both


# ---- losses


@pytest.mark.parametrize(
    ("problem", "classes", "labels"),
    [
        (None, 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (None, 1, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
        ("regression", 1, torch.tensor([1.0, 0.0, 2.0, 3.0])),
        ("regression", 3, torch.randn(4, 3, generator=torch.Generator().manual_seed(0))),
        (None, 3, torch.tensor([0, 2, 1, -100])),
        (None, 3, torch.tensor([[0], [2], [1], [1]])),
        (None, 3, torch.tensor([0, 2, 1, 1], dtype=torch.int32)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
        (None, 3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])),
        ("multi_label_classification", 3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])),
    ],
)
def test_problem_types(problem, classes, labels):
    theirs = their("BertForSequenceClassification", num_labels=classes, problem_type=problem).double()
    inputs, _ = example("BertForSequenceClassification")
    labels = labels.to(DEVICE)
    their_labels = labels.double() if labels.is_floating_point() else labels.long()
    expected, out = theirs(**inputs, labels=their_labels), our(theirs)(**inputs, labels=labels)
    assert (out.loss - expected.loss).abs() <= 1e-12 * expected.loss.abs()


@pytest.mark.parametrize("value", [5.0, -0.5, math.nan])
def test_targets_of_several_labels_are_from_0_to_1(value):
    """Others have a loss that falls without end."""
    config = TINY.changed(num_labels=2, problem_type="multi_label_classification")
    model = fastbert.BertForSequenceClassification(config)
    labels = torch.tensor([[0.0, 1.0], [value, 0.5]])
    with pytest.raises(ValueError, match=rf"labels\[1, 0\] is {value}; expected 0 to 1, as targets for multi_label"):
        model(torch.ones(2, 4, dtype=torch.int64), labels=labels)
    rounded = torch.tensor([[0.0, 1.0], [1.0 + 1e-6, 1.0]])
    assert model(torch.ones(2, 4, dtype=torch.int64), labels=rounded).loss.isfinite()


@pytest.mark.parametrize(
    ("problem", "classes", "labels"),
    [
        ("regression", 1, torch.rand(len(LENGTHS))),
        ("single_label_classification", 3, torch.ones(len(LENGTHS), dtype=torch.int64)),
        ("multi_label_classification", 3, torch.ones(len(LENGTHS), 3)),
    ],
)
def test_what_the_labels_were_is_saved(tmp_path, problem, classes, labels):
    """problem_type is noted, as transformers does; a configuration shared by several models is not changed."""
    config = CONFIG.changed(num_labels=classes, num_hidden_layers=1)
    model, other = (fastbert.BertForSequenceClassification(config).to(DEVICE) for _ in range(2))
    inputs, _ = example("BertForSequenceClassification")
    with pytest.raises(ValueError, match="labels"):
        model(**inputs, labels=torch.ones(9, 9, device=DEVICE))
    assert model.config.problem_type is None
    model(**inputs, labels=labels.to(DEVICE)).loss.backward()
    model.save_pretrained(tmp_path)
    assert fastbert.BertConfig.from_pretrained(tmp_path).problem_type == model.config.problem_type == problem
    assert config.problem_type is None and other.config.problem_type is None


@pytest.mark.slow
def test_a_compiled_model_notes_what_the_labels_were():
    model = fastbert.BertForSequenceClassification(CONFIG.changed(num_labels=1, num_hidden_layers=1)).to(DEVICE).eval()
    inputs, _ = example("BertForSequenceClassification")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        losses = [call(**inputs, labels=torch.ones(4, device=DEVICE)).loss for call in (compiled, compiled, model)]
    assert model.config.problem_type == "regression" and (losses[0] - losses[2]).abs() <= 1e-6
    assert torch.equal(losses[0], losses[1])


def test_without_reading_its_labels_the_loss_of_replaced_tokens_is_nan_beyond_0_and_1(monkeypatch):
    """In compiled code and on GPUs; elsewhere they are checked first."""
    loss = fastbert.BertForReplacedTokenDetection._loss
    monkeypatch.setattr(heads.checks, "values_visible", lambda labels: False)
    logits = torch.randn(4, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 1])
    assert loss(logits, labels) == F.binary_cross_entropy_with_logits(logits[[0, 1, 3]], labels[[0, 1, 3]].float())
    (gradient,) = torch.autograd.grad(loss(logits, torch.tensor([0, 7, -100, 1])), logits)
    assert gradient.isnan().tolist() == [False, True, False, False]


def test_integers_as_regression_targets():
    model = our(their("BertForSequenceClassification", num_labels=1))
    inputs, _ = example("BertForSequenceClassification")
    ratings = torch.tensor([1, 0, 5, 2], device=DEVICE)
    assert torch.equal(model(**inputs, labels=ratings).loss, model(**inputs, labels=ratings.float()).loss)


def test_answers_are_scored_within_their_sequence():
    """Padding on either side takes no part in the loss, which is the mean of the losses of the sequences alone."""
    theirs = their("BertForQuestionAnswering").double()
    model = our(theirs)
    for side in ("right", "left"):
        inputs = batch(LENGTHS, SEQLEN, side=side)
        visible = inputs["attention_mask"].bool()
        first = visible.int().argmax(1)
        starts, ends = torch.tensor([2, 0, 11, 3], device=DEVICE), torch.tensor([6, 0, 11, 3], device=DEVICE)
        losses = []
        for i in range(len(LENGTHS)):
            alone = {key: value[i : i + 1, visible[i]] for key, value in inputs.items()}
            columns = torch.arange(SEQLEN, device=DEVICE)[visible[i]][None]
            answer = {"start_positions": starts[i : i + 1], "end_positions": ends[i : i + 1]}
            losses.append(theirs(**alone, position_ids=columns, **answer).loss)
        out = model(**inputs, start_positions=starts + first, end_positions=ends + first)
        assert (out.loss - torch.stack(losses).mean()).abs() <= 1e-12 * out.loss
        lowest = torch.finfo(torch.float64).min
        assert ((out.start_logits == lowest) == ~visible).all() and ((out.end_logits == lowest) == ~visible).all()


@pytest.mark.parametrize("side", ["right", "left", "between"])
def test_the_loss_of_answers_has_the_same_bits_packed_and_padded(side):
    model = our(their("BertForQuestionAnswering").double())
    for seed in range(20):
        torch.manual_seed(seed)
        mask = (torch.rand(4, 15, device=DEVICE) < 0.6).int()
        mask[:, 3] = 1
        mask = (mask if side == "between" else mask.sort(1, descending=side == "right").values).bool()
        ids, last = integers(5, 99, 4, 15), mask.sum(1) - 1
        column = (last.unsqueeze(1) == mask.cumsum(1) - 1).int().argmax(1)  # of each text's last token
        ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        padded = {"input_ids": ids, "attention_mask": mask, "start_positions": column, "end_positions": column}
        positions = torch.arange(15, device=DEVICE).expand(4, -1)[mask]
        alone = {
            "input_ids": ids[mask],
            "position_ids": positions,
            "cu_seqlens": ends,
            "max_seqlen": int(last.max()) + 1,
        }
        losses = [model(**padded).loss, model(**alone, start_positions=last, end_positions=last).loss]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        assert torch.equal(*losses) and all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_answers_outside_the_text_are_left_out():
    """The first sequence has seven tokens: if its answer lies outside them, only the second sequence is scored."""
    model = our(their("BertForQuestionAnswering"))
    inputs = batch([7, 12], SEQLEN)
    for arguments in (inputs, packed(inputs, {})):

        def loss(start, arguments=arguments):
            starts, ends = (torch.tensor([start, 3], device=DEVICE), torch.tensor([99, 4], device=DEVICE))
            return model(**arguments, start_positions=starts, end_positions=ends).loss

        alone = {key: value[1:] for key, value in inputs.items()}
        place = {"start_positions": torch.tensor([3], device=DEVICE), "end_positions": torch.tensor([4], device=DEVICE)}
        second = model(**alone, **place).loss
        assert loss(7) == loss(100) and (loss(7) - second).abs() <= 1e-5 * second
        assert loss(-5) == loss(0) != loss(7)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_labelled_gives_zero_and_zero_gradients(name):
    """transformers gives NaN here."""
    model, (inputs, labels) = our(their(name)).train(), example(name)
    nothing = {key: torch.full_like(value, 99 if "positions" in key else -100) for key, value in labels.items()}
    out = model(**inputs, **nothing)
    out.loss.backward()
    assert out.loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MASKED_LM)
def test_labelled_tokens_are_looked_for_before_the_body_runs(name, monkeypatch):
    """On a GPU the host waits for their number; after the body was launched, it would wait for the body too."""
    model, (inputs, labels), seen = our(their(name)).train(), example(name), []
    find = heads.find_labelled_rows
    monkeypatch.setattr(heads, "find_labelled_rows", lambda labels: seen.append("rows") or find(labels))
    model.bert.register_forward_pre_hook(lambda *given: seen.append("body"))
    model(**inputs, **labels)
    assert seen == ["rows", "body"]


@pytest.mark.parametrize("name", HEADS)
def test_an_empty_batch(name):
    model = our(their(name))
    ids = torch.zeros(0, *((2,) if name == "BertForMultipleChoice" else ()), 5, dtype=torch.int64, device=DEVICE)
    out = model(ids)
    assert out.loss is None
    assert [len(x) for x in out[1:] if isinstance(x, torch.Tensor)] in ([0], [0, 0])


# ---- bad input

IDS = torch.ones(2, 5, dtype=torch.int64)
TOKENS, ONE, HALF = torch.full((2, 5), 2), torch.ones(2, dtype=torch.int64), torch.full((2,), 0.5)
ONE_TOO_LARGE = TOKENS.index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(99))


def case(name, words, error=ValueError, **arguments):
    return pytest.param(f"BertFor{name}", {"input_ids": IDS} | arguments, error, words, id=f"{name}: {words}")


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        case("MaskedLM", r"labels\[1, 3\] is 99; expected 0 <= labels < 99", IndexError, labels=ONE_TOO_LARGE),
        case("MaskedLM", r"BertForMaskedLM: labels has shape \(2, 4\); expected \(B, S\) = ", labels=TOKENS[:, :4]),
        case("MaskedLM", "labels is torch.float32", TypeError, labels=TOKENS.float()),
        case("MaskedLM", "labels on meta", labels=TOKENS.to("meta")),
        case("MaskedLM", r"attention_mask has shape \(2, 6\)", attention_mask=torch.ones(2, 6)),
        case("PreTraining", r"next_sentence_label\[1\] is 2", IndexError, next_sentence_label=torch.tensor([0, 2])),
        case("PreTraining", r"next_sentence_label has shape \(1,\)", next_sentence_label=torch.tensor([0])),
        case("NextSentencePrediction", r"labels\[1\] is -1; expected 0", IndexError, labels=torch.tensor([0, -1])),
        case("SequenceClassification", r"labels\[0\] is 3", IndexError, labels=torch.tensor([3, 0])),
        case("SequenceClassification", r"expected \(B, num_labels\) = \(2, 3\), for multi", labels=torch.ones(2)),
        case("TokenClassification", r"labels\[0, 0\] is 3", IndexError, labels=TOKENS + 1),
        case("TokenClassification", r"labels has shape \(5,\); expected \(B, S\)", labels=TOKENS[0]),
        case("QuestionAnswering", "start_positions is torch.fl", TypeError, start_positions=HALF, end_positions=ONE),
        case("QuestionAnswering", r"end_positions has shape \(5,\)", start_positions=IDS[:, 0], end_positions=IDS[0]),
        case("MultipleChoice", r"the input has shape \(2, 5\); expected \(B, N, S\)"),
        case("MultipleChoice", r"labels\[0\] is 2", IndexError, input_ids=IDS[None], labels=torch.tensor([2])),
    ],
)
def test_bad_input_is_refused(name, arguments, error, words):
    with pytest.raises(error, match=words):
        getattr(fastbert, name)(CONFIG)(**arguments)


def test_packed_choices_need_their_number():
    model, ends = fastbert.BertForMultipleChoice(CONFIG), torch.tensor([0, 4, 10], dtype=torch.int32)
    for choices in (None, 3):
        with pytest.raises(ValueError, match=f"num_choices is {choices}; expected, for packed input, a number that"):
            model(IDS.flatten(), cu_seqlens=ends, num_choices=choices)


def test_the_number_of_padded_choices_is_checked():
    model, ids = fastbert.BertForMultipleChoice(CONFIG).eval(), IDS[None]
    assert torch.equal(model(ids, num_choices=len(IDS)).logits, model(ids).logits)
    with pytest.raises(ValueError, match=f"num_choices is 8; expected that of the input, {len(IDS)}"):
        model(ids, num_choices=8)


def test_packed_choices_may_come_with_their_packing():
    model, inputs = fastbert.BertForMultipleChoice(CONFIG).eval().to(DEVICE), batch([4, 6, 2, 5], 6)
    ids, packing = model.bert.pack(inputs["input_ids"], inputs["attention_mask"], *[None] * 5)
    expected = model(*(inputs[name].view(2, 2, 6) for name in ("input_ids", "attention_mask"))).logits
    assert torch.equal(model(**ids._asdict(), packing=packing, num_choices=2).logits, expected)
    with pytest.raises(ValueError, match="num_choices is 3; expected, .* the sequences, 4"):
        model(**ids._asdict(), packing=packing, num_choices=3)


def test_packed_labels_have_the_packed_shape():
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 5\); expected \(T,\) = \(10,\)"):
        fastbert.BertForMaskedLM(CONFIG)(IDS.flatten(), cu_seqlens=ends, labels=TOKENS)


def test_a_packing_that_is_handed_down():
    """It replaces the mask, for inputs that it packed; labels and outputs stay packed."""
    model, inputs = fastbert.BertForTokenClassification(CONFIG).eval().to(DEVICE), batch([4, 6], 6)
    ids, packing = model.bert.pack(inputs["input_ids"], inputs["attention_mask"], *[None] * 5)
    packing, visible = packing._replace(seqlen=None, indices=None), inputs["attention_mask"].bool()
    labels = torch.arange(10, device=DEVICE) % CLASSES
    out = model(**ids._asdict(), packing=packing, labels=labels)
    assert torch.equal(out.logits, model(inputs["input_ids"], inputs["attention_mask"]).logits[visible])
    assert out.loss > 0
    with pytest.raises(ValueError, match="BertForTokenClassification: packing comes in place of attention_mask"):
        model(**ids._asdict(), attention_mask=inputs["attention_mask"], packing=packing)
    with pytest.raises(ValueError, match=r"given \(2, 6\) and a packing of 10 tokens"):
        model(inputs["input_ids"], position_ids=inputs["input_ids"], packing=packing)


# ---- checkpoints


@pytest.mark.parametrize(
    ("name", "source"), [(name, s) for name in HEADS for s in ("BertModel", "BertForMaskedLM") if name != s]
)
def test_what_a_checkpoint_lacks_is_new_and_named(name, source, tmp_path):
    theirs = (hugging_face(CONFIG) if source == "BertModel" else their(source)).to("cpu")
    theirs.save_pretrained(tmp_path)
    cls = getattr(fastbert, name)
    with pytest.warns(UserWarning, match="initialised anew, to be trained") as caught:
        model = cls.from_pretrained(tmp_path)
    expected = {key.removeprefix("bert."): t for key, t in theirs.state_dict().items() if not key.startswith("cls")}
    state = {key.removeprefix("bert."): t for key, t in fastbert.hf.state_dict(model).items()}
    for key in expected.keys() & state.keys():
        assert torch.equal(expected[key], state[key]), key
    new = state.keys() - expected.keys() - {key.removeprefix("bert.") for key in TIED}
    if source == "BertModel":
        assert all(key in str(caught[0].message) for key in new)
    assert ("bert.pooler.dense.weight" in str(caught[0].message)) == (source == "BertForMaskedLM" and cls.pooling)
    assert len(caught) == 1 and all(torch.isfinite(t).all() for t in state.values())
    assert not any(state[key].any() for key in new if key.endswith("bias") and key in str(caught[0].message))
    model(**{k: v.to("cpu") for k, v in example(name)[0].items()})


def test_another_number_of_labels(tmp_path):
    their("BertForTokenClassification").save_pretrained(tmp_path)
    words = r"wrong shape: classifier.bias: \(3,\), expected \(5,\).*; ignore_mismatched_sizes=True initialises"
    with pytest.raises(RuntimeError, match=words):
        fastbert.BertForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    replaced = {"num_labels": 5, "ignore_mismatched_sizes": True}
    with pytest.warns(UserWarning, match="has no fitting classifier.bias, classifier.weight: initialised anew"):
        model = fastbert.AutoModelForTokenClassification.from_pretrained(tmp_path, **replaced)
    assert model.classifier.weight.shape == (5, 48) and model.bert.embeddings.word_embeddings.weight.any()
    with (
        pytest.warns(UserWarning, match="has no fitting"),
        pytest.raises(RuntimeError, match="wrong shape: bert.embeddings.word_embeddings.weight"),
    ):
        fastbert.BertForTokenClassification.from_pretrained(tmp_path, vocab_size=5, **replaced)
    with pytest.raises(RuntimeError, match="wrong shape: .*word_embeddings.weight.*, expected .*") as caught:
        fastbert.BertForTokenClassification.from_pretrained(tmp_path, vocab_size=5, num_labels=5)
    assert "classifier.bias" in str(caught.value) and "ignore_mismatched_sizes" not in str(caught.value)
    hugging_face(CONFIG).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="lacks classifier.bias, classifier.weight:"):
        model = fastbert.BertForTokenClassification.from_pretrained(tmp_path, num_labels=5, dtype=torch.bfloat16)
    assert model.classifier.weight.shape == (5, 48) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "five")
    assert transformers.BertConfig.from_pretrained(tmp_path / "five").num_labels == 5
    assert fastbert.BertConfig.from_pretrained(tmp_path / "five").num_labels == 5


def test_unknown_keywords_are_refused(tmp_path):
    their("BertForTokenClassification").save_pretrained(tmp_path)
    for given in ({"num_lables": 3}, {"torch_dtype": torch.bfloat16}, {"device_map": "cpu"}):
        for kind in (fastbert.BertForTokenClassification, fastbert.AutoModelForTokenClassification):
            with pytest.raises(TypeError, match=f"{next(iter(given))}: no field of a bert configuration"):
                kind.from_pretrained(tmp_path, **given)


def test_names_of_labels_survive(tmp_path):
    names = {0: "a", 1: "b", 2: "c"}
    transformers.BertConfig(id2label=names, label2id={v: k for k, v in names.items()}).save_pretrained(tmp_path)
    config = fastbert.BertConfig.from_pretrained(tmp_path)
    assert config.num_labels == 3 and config.to_dict()["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert "id2label" not in config.changed(num_labels=4).to_dict()
    assert config.changed(problem_type="regression").to_dict()["id2label"] == {"0": "a", "1": "b", "2": "c"}
    with pytest.raises(ValueError, match="problem_type is 'ranking'; expected one of"):
        config.changed(problem_type="ranking")


def test_an_untied_decoder_is_refused(tmp_path):
    theirs = their("BertForMaskedLM", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tie_word_embeddings is False; expected True"):
        fastbert.BertForMaskedLM.from_pretrained(tmp_path)


def test_a_state_that_does_not_fit_changes_nothing():
    theirs, model = their("BertForPreTraining"), fastbert.BertForPreTraining(CONFIG)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = dict(theirs.state_dict())
    del state["cls.seq_relationship.bias"]
    with pytest.raises(RuntimeError, match="missing: cls.seq_relationship.bias"):
        model.load_state_dict(state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    torch.nn.ModuleDict({"model": model}).load_state_dict({f"model.{k}": t for k, t in theirs.state_dict().items()})
    assert torch.equal(model.cls.predictions.bias, theirs.cls.predictions.bias.cpu())


# ---- the rest of PyTorch


def test_hooks_on_the_body_are_called():
    model, called = our(their("BertForMaskedLM")), []
    model.bert.register_forward_hook(lambda *a: called.append(1))
    model(**example("BertForMaskedLM")[0])
    assert called == [1]


def test_autocast():
    theirs, (inputs, labels) = their("BertForMaskedLM"), example("BertForMaskedLM")
    with torch.autocast(DEVICE, torch.bfloat16):
        out, expected = our(theirs)(**inputs, **labels), theirs(**inputs, **labels)
    assert out.loss.dtype == torch.float32 and (out.loss - expected.loss).abs() < 0.02 * expected.loss


@pytest.mark.skipif(DEVICE == "cpu", reason="PyTorch sees no GPU")
@pytest.mark.parametrize("name", HEADS)
def test_packed_training_does_not_synchronise(name):
    model, (inputs, labels) = our(their(name)).train(), example(name)
    arguments = packed(inputs, labels)
    if name in MASKED_LM:
        arguments["labelled_rows"] = (arguments["labels"] != -100).nonzero().squeeze(-1)
    model(**arguments).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**arguments).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_new_head_is_initialised_as_transformers_does_in_the_body_s_dtype(tmp_path):
    hugging_face().bfloat16().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="initialised anew"):
        model = fastbert.BertForMaskedLM.from_pretrained(tmp_path)
    transform = model.cls.predictions.transform
    assert (transform.LayerNorm.weight == 1).all() and not transform.dense.bias.any()
    assert 0.01 < transform.dense.weight.float().std() < 0.03
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_resized_vocabulary_stays_frozen():
    model = fastbert.BertForMaskedLM(TINY).requires_grad_(False)
    model.resize_token_embeddings(120)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_batch_of_one_label():
    model = fastbert.BertForSequenceClassification(TINY).eval()
    out = model(torch.randint(1, 99, (1, 5)), labels=torch.tensor([1]))
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, torch.tensor([1])))
