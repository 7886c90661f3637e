"""AMPTrainer and what it uses: weighted losses, parameter groups, precision, evaluation, logs, processes."""

import copy
import csv
import functools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import trainer_process as process
import transformers
from torch import nn

from fastbert import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
    hf,
    metrics,
)
from fastbert.data import PackingCollator, create_dataloader
from fastbert.training import (
    AMPTrainer,
    ElectraPretraining,
    compute_classification_loss,
    compute_loader_loss,
    compute_mlm_loader_loss,
    compute_mlm_loss,
    distribute,
    evaluating,
    freeze,
    label_counts,
    linear_schedule,
    loss_terms,
    parameter_groups,
)

HERE = Path(__file__).resolve().parent
EXACT, CONFIG = process.EXACT, process.CONFIG


def sgd(model, tmp_path, **options):
    """A trainer of plain SGD with lr 1 and without clipping: the change of the weights is minus the gradient."""
    options = {"max_grad_norm": None, "progress": False, **options}
    return AMPTrainer(model, torch.optim.SGD(model.parameters(), lr=1.0), output_dir=tmp_path, **options)


def rows(path):
    with path.open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def assert_stepped(before, after, length=1.0):
    """Asserts that `after` is `before` less `length` times the gradients of `before`."""
    largest = max(float(p.grad.abs().max()) for p in before.parameters())
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert ((old - new) - length * old.grad).abs().max() <= 1e-12 * largest, name


class Loss:
    """A model's output that has a loss and nothing else."""

    def __init__(self, loss):
        self.loss = loss


# ---- unequal batches have the loss of one big batch


def examples():
    """Six examples of unequal lengths, with labels for every head; some labels are -100, and one example has none."""
    found = []
    for i, length in enumerate([3, 12, 5, 9, 2, 7]):
        ids = torch.randint(5, 99, (length,))
        of_tokens = torch.where(torch.rand(length) < (0.3, 0.6, 0.0)[i % 3], ids, -100)
        found.append(
            {
                "input_ids": ids.tolist(),
                "of_tokens": of_tokens.tolist(),
                "tag": torch.where(of_tokens == -100, -100, ids % 3).tolist(),
                "of_sequence": [0, 2, -100, 1, -100, 2][i],
                "score": float(i) / 3,
                "next_sentence_label": [0, 1, -100, 0, 1, 1][i],
                "start_positions": min(i, length - 1),
                "end_positions": length + 4 if i == 3 else length - 1,
            }
        )
        found[-1]["start_positions"] = found[-1]["start_positions"] if i != 3 else length + 2  # beyond the text
    return found


def collate(part, labels, *others):
    """A packed batch with the entry `labels` as its labels, and the entries `others`."""
    kept = [{"input_ids": e["input_ids"]} | {name: e[name] for name in others} for e in part]
    pairs = zip(kept, part, strict=True)
    return PackingCollator()([{**row, "labels": e[labels]} if labels else row for row, e in pairs])


def padded(part, labels, *others):
    """The same batch padded; padding has the label 0, which must not count."""
    batch = collate(part, labels, *others)
    lengths = batch.pop("cu_seqlens").diff()
    visible = torch.arange(batch.pop("max_seqlen")) < lengths[:, None]
    tokens = {name for name, x in batch.items() if len(x) == visible.sum() and name in ("input_ids", "labels")}
    filled = {
        name: torch.zeros(visible.shape, dtype=torch.int64).masked_scatter(visible, batch[name]) for name in tokens
    }
    return batch | filled | {"attention_mask": visible.long()}


ANSWERS, PAIRS = ("start_positions", "end_positions"), "next_sentence_label"
HEADS = {
    "mlm": (BertForMaskedLM, {}, ("of_tokens",)),
    "mlm and next sentence": (BertForPreTraining, {}, ("of_tokens", "next_sentence_label")),
    "sequences": (BertForSequenceClassification, {"num_labels": 3}, ("of_sequence",)),
    "regression": (BertForSequenceClassification, {"num_labels": 1}, ("score",)),
    "tokens": (BertForTokenClassification, {"num_labels": 3}, ("tag",)),
    "answers": (BertForQuestionAnswering, {}, (None, *ANSWERS)),
}


@pytest.mark.parametrize("form", [collate, padded], ids=["packed", "padded"])
@pytest.mark.parametrize("head", HEADS)
def test_an_accumulated_step_is_that_of_one_big_batch(tmp_path, head, form):
    """In float64, with micro-batches of one, two and three examples. The truth is autograd on one batch of all six."""
    kind, changes, labels = HEADS[head]
    model = kind(BertConfig.from_dict({**EXACT.to_dict(), **changes})).double()
    before, all_six = copy.deepcopy(model), examples()
    loss = before(**collate(all_six, *labels)).loss
    loss.backward()

    parts = [form(part, *labels) for part in (all_six[:1], all_six[1:3], all_six[3:])]
    sgd(model, tmp_path, gradient_accumulation_steps=3).train(parts, max_steps=1)
    assert float(rows(tmp_path / "train.csv")[0]["loss"]) == pytest.approx(loss.item(), rel=1e-12)
    assert_stepped(before, model)
    with pytest.raises(AssertionError), evaluating(before):  # the mean of the batches' means differs
        assert sum(before(**part).loss for part in parts) / 3 == pytest.approx(loss.item(), rel=1e-9)


def test_a_batch_without_labels_counts_for_nothing(tmp_path):
    """This holds even if the model's mean over no labels is NaN, as in transformers."""
    config = transformers.BertConfig(**EXACT.changed(num_labels=3).to_dict())
    model, all_six = transformers.BertForTokenClassification(config).double(), examples()
    parts = [padded(part, "tag") for part in (all_six[:2], all_six[2:3], all_six[3:])]
    for part in parts:
        part["labels"][part["attention_mask"] == 0] = -100
    before, whole = copy.deepcopy(model), padded(all_six, "tag")
    whole["labels"][whole["attention_mask"] == 0] = -100
    assert before(**parts[1]).loss.isnan()
    loss = before(**whole).loss
    loss.backward()
    assert compute_loader_loss(model, parts, "cpu") == pytest.approx(loss.item(), rel=1e-12)
    sgd(model, tmp_path, gradient_accumulation_steps=3).train(parts, max_steps=1)
    assert float(rows(tmp_path / "train.csv")[0]["loss"]) == pytest.approx(loss.item(), rel=1e-12)
    assert_stepped(before, model)


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_a_loader_is_that_of_one_big_batch(head):
    kind, changes, labels = HEADS[head]
    model, all_six = kind(BertConfig.from_dict({**EXACT.to_dict(), **changes})).double(), examples()
    parts = [padded(all_six[:1], *labels), collate(all_six[1:3], *labels), collate(all_six[3:], *labels)]
    expected = model(**collate(all_six, *labels)).loss.item()
    assert compute_loader_loss(model, parts, "cpu") == pytest.approx(expected, rel=1e-12)
    assert model.training


def test_mlm_losses_are_those_of_transformers():
    """In float64, on a padded batch with -100 at padding. A loader and next-sentence labels do not change the loss."""
    model, all_six = BertForPreTraining(EXACT).double(), examples()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**EXACT.to_dict())).double().eval()
    state = {name: x for name, x in hf.state_dict(model).items() if "pooler" not in name and "seq_rel" not in name}
    theirs.load_state_dict(state)
    batch = padded(all_six, "of_tokens", "next_sentence_label")
    labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = theirs(batch["input_ids"], batch["attention_mask"], labels=labels).loss.item()
    assert compute_mlm_loss(model, batch).item() == pytest.approx(expected, rel=1e-12)
    parts = [collate(all_six[at : at + 2], "of_tokens", "next_sentence_label") for at in (0, 2, 4)]
    assert compute_mlm_loader_loss(model, parts, "cpu") == pytest.approx(expected, rel=1e-12)


def test_a_classification_loss_is_that_of_its_logits():
    model = BertForSequenceClassification(EXACT.changed(num_labels=3)).double()
    batch = collate(examples(), "of_sequence")
    expected = F.cross_entropy(model(**batch).logits, batch["labels"])
    in_a_dict = lambda **batch: model(**batch)._asdict()  # noqa: E731
    for each in (model, in_a_dict):
        assert compute_classification_loss(each, batch).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_integers_of_every_class_of_a_text_are_counted(problem):
    """They have the shape of the mask where texts have as many tokens as there are classes; in a regression, a -100 is
    a number."""
    model = BertForSequenceClassification(EXACT.changed(num_labels=4, problem_type=problem)).double()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    short = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": mask}
    short["labels"] = torch.tensor([[1, 0, 1, 1], [0, 1, -100 if problem == "regression" else 1, 0]])
    long = {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": torch.tensor([[1, 1, 0, 0]])}
    losses = [model(**batch).loss.item() for batch in (short, long)]
    assert compute_loader_loss(model, [short, long], "cpu") == pytest.approx((2 * losses[0] + losses[1]) / 3, rel=1e-12)


def test_labels_are_counted():
    """Counted by hand: -100, padding, and answers beyond the text or at padding do not count; all float labels do."""
    model = nn.Module()

    def counts(**batch):
        return label_counts(model, {name: torch.tensor(x) for name, x in batch.items()}).tolist()

    assert counts(labels=[3, -100, 0, -100], cu_seqlens=[0, 4]) == [2]
    mask = [[1, 1, 1], [1, 0, 0]]
    assert counts(labels=[[3, -100, 0], [7, 7, -100]], attention_mask=mask) == [3]
    assert counts(labels=[0, -100], next_sentence_label=[1, 0], attention_mask=mask) == [1, 2]
    assert counts(labels=[0, 1], sentence_order_label=[[1], [-100]]) == [2, 1]
    assert counts(labels=[[0.0, 1.0], [1.0, -100.0]], attention_mask=[[1, 0], [1, 1]]) == [4]
    assert counts(start_positions=[0, 0], end_positions=[2, 1], attention_mask=mask) == [1.5]
    assert counts(start_positions=[-1, 1], end_positions=[3, 7], cu_seqlens=[0, 3, 4]) == [0.5]
    with pytest.raises(ValueError, match="the batch has input_ids; expected labels"):
        counts(input_ids=[1])


@pytest.mark.parametrize("call", [compute_mlm_loss, compute_classification_loss])
def test_a_batch_without_labels_is_refused(call):
    batch = PackingCollator()([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match=f"{call.__name__}: the batch has .*expected labels as well"):
        call(BertForMaskedLM(EXACT), batch)


def test_shares_of_labels_count(tmp_path):
    """Two counts of 0.125: the sum is divided by their total, 0.25, not by 1."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.tensor([3.0]))

        def forward(self, labels):
            return Loss(self.x.sum())

        def label_counts(self, batch):
            return torch.tensor([0.125], dtype=torch.float64)

    loader, model = [{"labels": torch.tensor([1])}] * 2, Shares()
    assert compute_loader_loss(model, loader, "cpu") == 3.0
    sgd(model, tmp_path, gradient_accumulation_steps=2).train(loader, max_steps=1)
    assert rows(tmp_path / "train.csv")[0]["loss"] == "3.0" and model.x.item() == 2.0


def test_albert_of_transformers_calls_its_pairs_otherwise():
    config = transformers.AlbertConfig(vocab_size=99, embedding_size=16, **process.SIZES)
    model, batch = transformers.AlbertForPreTraining(config).eval(), padded(examples(), "of_tokens", PAIRS)
    batch["sentence_order_label"] = batch.pop(PAIRS)
    batch["labels"][batch["attention_mask"] == 0] = -100
    out = model(**batch)
    sentences = F.cross_entropy(out.sop_logits, batch["sentence_order_label"])
    terms = loss_terms(out, batch)
    assert torch.equal(terms, torch.stack([out.loss - sentences, sentences]))


def test_a_model_without_a_loss_is_refused(tmp_path):
    """transformers' BertForPreTraining gives no loss if only one of its two labels is given."""
    model = transformers.BertForPreTraining(transformers.BertConfig(**EXACT.to_dict()))
    batch = padded(examples(), "tag")
    message = "the batch has attention_mask, input_ids, labels, and the model gave no loss"
    for call in (compute_mlm_loss, compute_classification_loss):
        with pytest.raises(ValueError, match=message):
            call(model, batch)
    with pytest.raises(ValueError, match=message):
        sgd(model, tmp_path).train([batch], max_steps=1)


def test_a_loader_without_labels_is_refused():
    model, batch = BertForMaskedLM(EXACT), PackingCollator()([{"input_ids": [1, 2], "labels": [-100, -100]}])
    for loader in ([], [batch]):
        with pytest.raises(ValueError, match="the loader has no label"):
            compute_mlm_loader_loss(model, loader, "cpu")


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (["a text"], "the loader gave a str; expected batches"),
        ([{"input_ids": [1, 2], "labels": 1}], "labels are a int; expected a tensor: a data set gives examples"),
    ],
)
def test_what_is_no_batch_is_refused(tmp_path, loader, words):
    with pytest.raises(TypeError, match=words):
        sgd(BertForMaskedLM(EXACT), tmp_path).train(loader, max_steps=1)


def test_training_of_nothing_is_refused(tmp_path):
    model = BertForMaskedLM(EXACT)
    trainer = sgd(model, tmp_path)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="the loss depends on frozen parameters alone"):
        trainer.train([collate(examples(), "of_tokens")], max_steps=1)


def test_training_without_a_label_is_refused(tmp_path):
    """It would have a loss of 0. One step without labels is no fault, and has no loss in the table."""
    model, without = BertForMaskedLM(EXACT), PackingCollator()([{"input_ids": [1, 2], "labels": [-100, -100]}])
    for name, steps in (("an epoch", 5), ("all steps", 1)):
        with pytest.raises(ValueError, match="train: the loader has no label in any step so far"):
            sgd(model, tmp_path / name).train([without] * 2, max_steps=steps)
    loader, path = [without, collate(examples(), "of_tokens")], tmp_path / "train.csv"
    sgd(model, tmp_path).train(loader, max_steps=2)
    assert [row["loss"] != "" for row in rows(path)] == [False, True]


def test_clipping_is_of_the_whole_step(tmp_path):
    model = BertForMaskedLM(EXACT).double()
    before, all_six = copy.deepcopy(model), examples()
    before(**collate(all_six, "of_tokens")).loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in before.parameters()))
    trainer = sgd(model, tmp_path, gradient_accumulation_steps=2, max_grad_norm=norm / 10)
    trainer.train([collate(all_six[:2], "of_tokens"), collate(all_six[2:], "of_tokens")], max_steps=1)
    assert float(rows(tmp_path / "train.csv")[0]["gradient_norm"]) == pytest.approx(norm, rel=1e-12)
    assert_stepped(before, model, norm / 10 / (norm + 1e-6))  # PyTorch adds 1e-6 to the norm


# ---- parameters


def test_rates_fall_layer_by_layer():
    """The rates for three layers and a decay of 0.5 a layer, computed by hand."""
    model = BertForSequenceClassification(EXACT.changed(num_hidden_layers=3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[p]: group["lr"] for group in parameter_groups(model, 1.0, layer_decay=0.5) for p in group["params"]}
    assert len(rates) == len(names)
    expected = {"embeddings": 0.0625, "layer.0.": 0.125, "layer.1.": 0.25, "layer.2.": 0.5}
    expected |= {"pooler": 1.0, "classifier": 1.0}
    for part, rate in expected.items():
        assert {rates[name] for name in rates if part in name} == {rate}, part


@pytest.mark.parametrize("model_type", ["deberta-v2", "mpnet"])
def test_what_all_layers_share_has_the_rate_of_the_embeddings(model_type):
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type, **SHARING[model_type]))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 1.0, layer_decay=0.5, weight_decay=0.3)
    rates = {names[p]: group["lr"] for group in groups for p in group["params"]}
    shared = {rate for name, rate in rates.items() if name.startswith("encoder.") and "layer." not in name}
    assert shared == {rates["embeddings.word_embeddings.weight"]} == {0.125}
    assert rates["encoder.layer.1.output.dense.weight"] == 0.5
    decayed = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
    assert "encoder.relative_attention_bias.weight" not in decayed


SHARING = {
    "deberta-v2": {
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
        **{"vocab_size": 30, "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
        **{"pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3, "share_att_key": True},
    },
    "mpnet": {
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
        **{"vocab_size": 30},
    },
}


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_decay_spares_what_the_trainer_of_transformers_spares(kind, tmp_path):
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**EXACT.to_dict()))
    model = theirs if kind == "theirs" else BertForPreTraining(EXACT)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    expected = transformers.Trainer(model, arguments).get_decay_parameter_names(model)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.3)
    decayed = {p for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {p for name, p in model.named_parameters(remove_duplicate=False) if name in expected}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def electra_of():
    discriminator = BertForReplacedTokenDetection(EXACT.changed(model_type="electra"))
    return ElectraPretraining(BertForMaskedLM(EXACT), discriminator)


def test_a_decay_over_several_stacks_is_refused():
    model = electra_of()
    with pytest.raises(ValueError, match="layer_decay needs one stack of layers; the model has 2"):
        parameter_groups(model, 1.0, layer_decay=0.9)
    for name, value in (("lr", -1.0), ("layer_decay", 2.0), ("weight_decay", -0.1)):
        with pytest.raises(ValueError, match=f"{name} is {value}; expected a number"):
            parameter_groups(model, **{"lr": 1.0, name: value})
    assert sum(len(group["params"]) for group in parameter_groups(model, 1.0)) == len(list(model.parameters()))


def test_frozen_parts_do_not_train(tmp_path):
    model = BertForTokenClassification(EXACT.changed(num_hidden_layers=3, num_labels=3))
    freeze(model, layers=2)
    groups = parameter_groups(model, 0.1)
    trained = {name for name, p in model.named_parameters() if any(p is q for g in groups for q in g["params"])}
    assert trained == {n for n, _ in model.named_parameters() if "layer.2." in n or n.startswith("classifier")}
    before = copy.deepcopy(model.state_dict())
    trainer = AMPTrainer(model, torch.optim.AdamW(groups), output_dir=tmp_path, progress=False)
    trainer.train([collate(examples(), "tag")], max_steps=1)
    assert {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])} == trained


def test_freeze_takes_indices_and_refuses_layers_that_do_not_exist():
    model = BertForMaskedLM(EXACT)
    freeze(model, layers=[1], embeddings=False)
    assert {name.split(".")[3] for name, p in model.named_parameters() if not p.requires_grad} == {"1"}
    for layers in (3, [0, 2]):
        with pytest.raises(ValueError, match=r"layers has \[2\]; the model has 2 layers"):
            freeze(BertForMaskedLM(EXACT), layers=layers)
    with pytest.raises(ValueError, match="layers is -1"):
        freeze(BertForMaskedLM(EXACT), layers=-1)


# ---- precision


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_every_precision_learns(tmp_path, precision):
    torch.manual_seed(0)
    model = BertForTokenClassification(CONFIG.changed(num_labels=3))
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2), fused=True)
    schedule = linear_schedule(optimizer, 2, 40)
    options = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
    trainer = AMPTrainer(model, optimizer, schedule, output_dir=tmp_path, **options)
    all_six = examples()
    loader = [collate(all_six[:2], "tag"), collate(all_six[2:], "tag")]
    found = trainer.train(loader, max_steps=40, eval_loader=loader, eval_steps=20)
    assert found["loss"] < 0.3 < 0.9 < float(rows(tmp_path / "train.csv")[0]["loss"])
    assert [row["step"] for row in rows(tmp_path / "evaluation.csv")] == ["20", "40"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_clipping_in_fp16_is_that_of_fp32(tmp_path):
    """With small integers, exact in fp16: the norm and the clipped step are those of the unscaled gradients."""

    class Product(nn.Linear):
        def forward(self, x, labels):
            return Loss((super().forward(x).float() * labels).sum())

    batch, found = {"x": torch.tensor([[3.0, 4.0]]), "labels": torch.tensor([[2.0]])}, []
    for precision in (None, "fp16"):
        model = Product(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        trainer = sgd(model, tmp_path / str(precision), mixed_precision=precision, max_grad_norm=1.0)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision == "fp16")
        trainer.train([batch], max_steps=1)
        (row,) = rows(tmp_path / str(precision) / "train.csv")
        found.append((row["gradient_norm"], model.weight.tolist()))
    assert found[0] == found[1] == ("10.0", [pytest.approx([-0.6, -0.8], rel=1e-6)])


def test_an_overflow_is_skipped_counted_and_not_an_error(tmp_path):
    """With this scale the first steps overflow and later ones do not."""
    model = BertForMaskedLM(CONFIG)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = linear_schedule(optimizer, 0, 10)
    trainer = AMPTrainer(model, optimizer, schedule, output_dir=tmp_path, mixed_precision="fp16", progress=False)
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**40, "growth_interval": 1000})
    loader = [collate(examples(), "of_tokens")]
    trainer.train(loader, max_steps=1)
    assert trainer.skipped_steps == trainer.step == 1
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    trainer.train(loader, max_steps=30)
    logged = rows(tmp_path / "train.csv")
    skipped = int(logged[-1]["skipped_steps"])
    assert 1 < skipped < 30 and schedule.last_epoch == 30 - skipped
    assert [int(row["skipped_steps"]) for row in logged][: skipped + 1] == [*range(1, skipped + 1), skipped]
    assert not all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_loss_that_is_not_finite_stops_before_its_step(tmp_path, precision):
    model = BertForTokenClassification(CONFIG.changed(num_labels=3))
    trainer = sgd(model, tmp_path, mixed_precision=precision, gradient_accumulation_steps=2)
    loader = [collate(examples(), "tag")] * 4
    trainer.train(loader, max_steps=3)
    before = copy.deepcopy(model.state_dict())
    scale = trainer.scaler.get_scale()
    with model.classifier.register_forward_hook(lambda *call: call[2] * float("nan")):
        with pytest.raises(FloatingPointError, match="step 4: the loss is nan.* weights are those of step 3"):
            trainer.train(loader, max_steps=9)
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == ["1", "2", "3"]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert trainer.scaler.get_scale() == scale
    trainer.train(loader, max_steps=4)  # once the cause is mended
    assert trainer.step == 4


def test_gradients_that_are_not_finite_stop_too(tmp_path):
    class Root(nn.Module):
        """A model whose loss is 0 and whose gradient is infinite."""

        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.zeros(1))

        def forward(self, labels):
            return Loss(self.x.sqrt().sum())

    with pytest.raises(FloatingPointError, match="step 1: the loss is 0.0, the norm of its gradients inf"):
        sgd(Root(), tmp_path).train([{"labels": torch.tensor([1])}], max_steps=1)


# ---- evaluation


def test_evaluation_changes_nothing_in_training(tmp_path):
    """Training is the same bit for bit, although the evaluated loader draws random numbers."""

    def run(name, **options):
        process.seed()
        trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path / name, 6)
        result = trainer.train(process.masking_loader(), max_steps=6, **options)
        return process.digest(trainer.checkpoints()[-1]), result

    plain, nothing = run("plain")
    evaluated, found = run("evaluated", eval_loader=process.masking_loader(), eval_steps=1)
    assert plain == evaluated and nothing == {}
    logged = [float(row["loss"]) for row in rows(tmp_path / "evaluated" / "evaluation.csv")]
    assert len(logged) == 6 and logged[-1] == found["loss"] > 0


@pytest.mark.parametrize("who", ["metric", "callback"])
def test_what_evaluates_the_model_leaves_its_modes(tmp_path, who):
    """A metric usually calls model.eval(); so do predictors that are built around the model."""
    model, seen = BertForMaskedLM(CONFIG), []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    callbacks = [lambda trainer, *_: trainer.model.eval()] if who == "callback" else []
    trainer = sgd(model, tmp_path, callbacks=callbacks)
    more = {"eval_loader": [], "eval_steps": 1, "metric": lambda model, *_: float(not model.eval())}
    trainer.train(list(process.masking_loader())[:3], max_steps=3, **more if who == "metric" else {})
    assert seen == [True] * 3


def test_an_evaluation_that_fails_changes_nothing_in_training(tmp_path):
    trainer, before = sgd(BertForMaskedLM(CONFIG), tmp_path), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate([], lambda *_: torch.rand(1) and 1 // 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_metric_may_be_any_function(tmp_path):
    model = BertForSequenceClassification(CONFIG.changed(num_labels=3))
    loader = [collate(examples(), "of_sequence")]
    metric = functools.partial(metrics.evaluate_classification_metrics, num_classes=3)
    found = sgd(model, tmp_path).train(loader, max_steps=1, eval_loader=loader, metric=metric)
    assert found.keys() == {"loss", "accuracy", "precision", "recall", "f1"}  # only numbers are kept
    assert found["loss"] == pytest.approx(compute_loader_loss(model, loader, "cpu"))


def test_a_finished_run_is_evaluated_again(tmp_path):
    loader = [collate(examples(), "of_tokens")]
    first = sgd(BertForMaskedLM(CONFIG), tmp_path)
    found = first.train(loader, max_steps=2, eval_loader=loader)
    again = sgd(BertForMaskedLM(CONFIG), tmp_path)
    again.resume()
    assert again.train(loader, max_steps=2, eval_loader=loader) == found and again.model.training
    assert len(rows(tmp_path / "evaluation.csv")) == 1


# ---- logs


def test_another_metric_adds_its_columns(tmp_path):
    loader = [collate(examples(), "of_tokens")]
    sgd(BertForMaskedLM(CONFIG), tmp_path).train(loader, max_steps=1, eval_loader=loader)
    again = sgd(BertForMaskedLM(CONFIG), tmp_path)
    again.resume()
    again.train(loader, max_steps=2, eval_loader=loader, metric=lambda *_: {"hits, first": 3})
    again.train(loader, max_steps=3, eval_loader=loader)
    (first, second, third), name = rows(tmp_path / "evaluation.csv"), "hits, first"
    assert float(first["loss"]) > 0 and float(third["loss"]) > 0 and first[name] == third[name] == ""
    assert second == {"step": "2", "loss": "", name: "3.0"}
    assert again.checkpoints()[-1].stem.endswith("3") and metrics.plot_losses(tmp_path).exists()


def test_tensorboard_has_every_number_once(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model, loader = BertForTokenClassification(CONFIG.changed(num_labels=3)), [collate(examples(), "tag")]
    sgd(model, tmp_path, tensorboard=True).train(loader, max_steps=3, eval_loader=loader)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train/loss")]
    expected = [(int(row["step"]), float(row["loss"])) for row in rows(tmp_path / "train.csv")]
    assert logged == [pytest.approx(point, rel=1e-6) for point in expected] and len(logged) == 3
    assert [event.step for event in events.Scalars("evaluation/loss")] == [3]


@pytest.mark.parametrize("package, option", [("tensorboard", {"tensorboard": True}), ("rich", {"progress": True})])
def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, package, option):
    for name in [name for name in sys.modules if package in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    trainer = sgd(BertForTokenClassification(CONFIG), tmp_path, **option)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        trainer.train([collate(examples(), "tag")], max_steps=1)
    assert trainer.step == 0


# ---- invalid arguments


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mixed_precision": "half"}, "mixed_precision is 'half'; expected None, 'bf16' or 'fp16'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0; expected a whole number, at least 1"),
        ({"save_total_limit": 0}, "save_total_limit is 0; expected a whole number, at least 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; expected a positive number, or None"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"AMPTrainer: {message}"):
        sgd(BertForMaskedLM(CONFIG), tmp_path, **options)


def test_a_loader_or_a_period_that_makes_no_sense_is_refused(tmp_path):
    trainer = sgd(BertForMaskedLM(CONFIG), tmp_path)
    with pytest.raises(ValueError, match="the loader has no batch"):
        trainer.train([], max_steps=1)
    with pytest.raises(ValueError, match="batches in epoch 0 and none in epoch 1; expected one that can be iterated"):
        sgd(BertForMaskedLM(CONFIG), tmp_path / "once").train(iter([collate(examples(), "of_tokens")]), max_steps=2)
    with pytest.raises(ValueError, match="expected labels"):
        trainer.train([PackingCollator()(process.examples(2))], max_steps=1)
    half = create_dataloader(process.examples(), PackingCollator(), 4, rank=0, world_size=2)
    with pytest.raises(ValueError, match="divided among 2 processes, and there are 1; expected a loader .* after"):
        trainer.train(half, max_steps=1)
    for name in ("eval_steps", "save_steps"):
        with pytest.raises(ValueError, match=f"{name} is 0; expected a whole number, at least 1"):
            trainer.train(process.shuffled(), **{"max_steps": 1, name: 0})
    with pytest.raises(ValueError, match="kind is 'dp'; expected 'ddp' or 'fsdp'"):
        distribute(nn.Linear(1, 1), "dp")


# ---- several processes, and other libraries' loops


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was saved with gradient_accumulation_steps 2:UserWarning")
def test_two_processes_train_as_one(tmp_path):
    """In float64, up to rounding, with unequal numbers of labels, in DDP and FSDP2. One process can load the checkpoint
    of two."""
    answer = process.launch(tmp_path, torchrun=True)
    assert answer.returncode == 0 and answer.stdout.count("resumed") == 4, answer.stderr[-3000:]
    assert answer.stdout.count("ended") == answer.stdout.count("sharded") == 2
    assert "ended No space left on device" in answer.stdout and "ended the first process cannot write" in answer.stdout
    for name, last in (("signal", 3), ("stop", 2), ("best", 3)):
        assert (tmp_path / name / f"checkpoint-{last:08}.pt").exists()
    one = process.exact_run(tmp_path / "alone")
    expected = [float(x) for row in rows(tmp_path / "alone" / "train.csv") for x in row.values()]
    for kind in ("ddp", "fsdp"):
        logged = [float(x) for row in rows(tmp_path / kind / "exact" / "train.csv") for x in row.values()]
        assert logged == pytest.approx(expected, rel=1e-12)
        two = process.trainer_of(BertForPreTraining(EXACT).double(), tmp_path / kind / "exact", 8, max_grad_norm=0.1)
        with pytest.warns(UserWarning, match="written by 2 processes and is read by 1: the epoch starts again"):
            assert two.resume()
        assert (two.step, two.epoch, two.position) == (8, 2, 0)
        for (name, mine), theirs in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
            assert (mine - theirs).abs().max() <= 1e-12, (kind, name)
            for moment in ("exp_avg", "exp_avg_sq"):
                a, b = (trainer.optimizer.state[p][moment] for trainer, p in ((one, mine), (two, theirs)))
                assert (a - b).abs().max() <= 1e-12 * (1 + a.abs().max()), (kind, name, moment)


def test_accelerate_trains_the_same_model(accelerate):
    """A loop with accelerate and fastbert's head and parameter groups gives the weights of a plain loop."""
    accelerator, weights = accelerate.Accelerator(cpu=True), []
    for accelerated in (True, False):
        process.seed()
        model = BertForMaskedLM(CONFIG)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2), fused=True)
        loader = [collate(examples()[:3], "of_tokens")] * 3
        if accelerated:
            model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(1)
        for batch in loader:
            optimizer.zero_grad()
            loss = compute_mlm_loss(model, batch)
            accelerator.backward(loss) if accelerated else loss.backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
