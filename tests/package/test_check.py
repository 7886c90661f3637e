"""`fastbert check` on small checkpoints of every head, on planted faults, and on mistakes that a user can correct."""

import argparse
import json

import pytest
import torch
import transformers
from small_models import CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import fastbert
from fastbert import cli
from fastbert.auto import trained_model
from fastbert.cli import check, check_prepared
from fastbert.cli.check import DEFAULT
from fastbert.families import BY_MODEL_TYPE

WORDS = "the cat sat on a mat while it rained and nobody came to see what had become of him".split()
TEXTS = ["the cat sat", "nobody came to see what had become of the cat", "it rained", "a mat and a cat on him"]
CLASSES = [  # all heads of BERT, and the masked LM of the other families; the rest is slow
    pytest.param(
        family.model_type,
        family.class_name(kind),
        marks=[pytest.mark.slow] * (family.model_type != "bert" and kind != "ForMaskedLM"),
    )
    for family in BY_MODEL_TYPE.values()
    for kind in ("Model", *family.heads)
]


def tokenizer():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    result = Tokenizer(models.WordPiece({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    result.add_special_tokens(special)
    return result


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes a checkpoint of a transformers class, with its tokenizer and a file of texts."""

    def write(name="BertModel", model_type="bert", times=1, **changes):
        changes = {"pad_token_id": 1 if model_type == "mpnet" else 0} | changes
        config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type] | changes)
        model = getattr(transformers, name)(config)
        for parameter in model.parameters():  # so that biases and LayerNorms are not trivial
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path)
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
        (tmp_path / "texts").write_text("\n".join(TEXTS * times) + "\n")
        return tmp_path

    return write


def command(directory, *arguments):
    out = directory / "report.json"
    arguments = ["--model", directory, "--text", directory / "texts", "--json", out, *arguments]
    status = cli.main(["check", *map(str, arguments)])
    return status, json.loads(out.read_text()) if out.exists() else None


def lines(report, backend=DEFAULT):
    return {line["name"]: line for found in report["checks"] if found["backend"] == backend for line in found["lines"]}


@pytest.mark.parametrize(("model_type", "name"), CLASSES)
def test_every_head_obeys(model_type, name, checkpoint):
    of_two = name.endswith("QuestionAnswering") or (model_type, name) == ("albert", "AlbertForPreTraining")
    changes = {} if of_two else {"num_labels": 3}
    if name.endswith("MultipleChoice"):
        changes["times"] = 4  # with few texts, its last bias's gradient is mere rounding
    status, report = command(checkpoint(name, model_type, **changes), "--dtypes", "float32", "--backends", DEFAULT)
    assert status == 0 and report["ok"] and report["architecture"] == name
    found, headless = lines(report), name.endswith("Model")
    assert {"hidden state 0", "hidden state 2"} <= found.keys() and ("loss" in found) != headless
    assert any(key.endswith("logits") for key in found) != headless
    assert bool(lines(report, check.TRUTH)) == (model_type == "bert")
    assert all(line["error"] <= line["bound"] for line in found.values())
    assert sum("gradients obey" in line["note"] for line in found.values()) == 1


@pytest.mark.parametrize("labels, problem", [(1, None), (3, "multi_label_classification"), (3, "regression")], ids=str)
def test_other_losses_of_a_classifier(checkpoint, labels, problem):
    directory = checkpoint("BertForSequenceClassification", num_labels=labels, problem_type=problem)
    assert command(directory, "--dtypes", "float32", "--backends", DEFAULT)[0] == 0


def test_every_dtype_and_backend_is_there_or_said_not_to_be(checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # names are printed in full even on a narrow terminal
    status, report = command(checkpoint(), "--max-length", "6", "--batch", "2")
    assert status == 0 and report["versions"]["torch"] == torch.__version__ and report["machine"]["system"]
    there = {(found["dtype"], found["backend"]) for found in report["checks"]}
    missing = {(found["dtype"], found["backend"]) for found in report["omissions"]}
    wanted = {(dtype, backend) for dtype in check.DTYPES for backend in check.BACKENDS}
    assert there | missing >= wanted and not there & missing
    assert {(dtype, "reference") for dtype in check.DTYPES} <= there
    assert ("float64", "triton") in missing
    assert "reference.py" in str(lines(report, check.TRUTH))
    output = " ".join(capsys.readouterr().out.split())
    assert "not checked: float64, triton: " in output and "rows obey" in output
    assert all(line["name"] in output for check in report["checks"] for line in check["lines"])


def test_a_check_of_nothing_fails(checkpoint, capsys):
    """No GPU kernel computes in float64."""
    status, report = command(checkpoint(), "--backends", "triton", "--dtypes", "float64")
    assert status == 1 and not report["ok"] and "no backend was checked" in capsys.readouterr().out
    assert {found["backend"] for found in report["checks"]} <= {check.TRUTH}


def test_a_weight_that_is_read_wrongly_is_found(checkpoint, monkeypatch, capsys):
    read = fastbert.checkpoint.read

    def wrong(directory):
        state = read(directory)
        state["encoder.layer.1.output.dense.bias"][3] += 1e-4
        return state

    monkeypatch.setattr(fastbert.checkpoint, "read", wrong)
    status, report = command(checkpoint(), "--dtypes", "float32", "--backends", DEFAULT)
    found = lines(report)
    assert status == 1 and not report["ok"]
    assert found["hidden state 1"]["ok"] and not found["hidden state 2"]["ok"]
    assert "break the accuracy rule" in capsys.readouterr().out


def test_a_gradient_that_is_wrong_is_found_and_named(checkpoint, monkeypatch):
    right = fastbert.layer.encoder_layer

    def wrong(parts, hidden, packing, rng, turn, *rest):
        y, weights = right(parts, hidden, packing, rng, turn, *rest)
        return (y if turn else y.detach() + 0.99 * (y - y.detach())), weights

    monkeypatch.setattr(fastbert.layer, "encoder_layer", wrong)
    status, report = command(checkpoint(), "--dtypes", "float32", "--backends", DEFAULT)
    broken = [line for line in lines(report).values() if not line["ok"]]
    assert status == 1 and len(broken) == 1 and broken[0]["name"].endswith((".weight", ".bias"))
    obeying, of = (int(word) for word in broken[0]["note"].split() if word.isdigit())
    assert 0 < obeying < of == 39


def test_nan_is_no_number_that_obeys(checkpoint, monkeypatch):
    right = fastbert.ops.layer_norm
    monkeypatch.setattr(fastbert.ops, "layer_norm", lambda *arguments: right(*arguments) * torch.nan)
    status, report = command(checkpoint("BertForMaskedLM"), "--dtypes", "float32", "--backends", DEFAULT)
    assert status == 1 and lines(report)["loss"]["error"] == "nan"


def test_overflow_in_transformers_itself_is_said_and_not_judged(checkpoint):
    directory = checkpoint("BertForMaskedLM")
    model = transformers.BertForMaskedLM.from_pretrained(directory)
    model.cls.predictions.transform.LayerNorm.weight.data.fill_(6e4)
    model.bert.embeddings.word_embeddings.weight.data.mul_(1e3)
    model.save_pretrained(directory)
    status, report = command(directory, "--dtypes", "float16", "--backends", DEFAULT)
    assert status == 1 and not report["checks"]
    assert "is not finite" in report["omissions"][0]["reason"]


def test_a_bare_model_without_a_pooler(checkpoint):
    directory = checkpoint()
    transformers.BertModel.from_pretrained(directory, add_pooling_layer=False).save_pretrained(directory)
    status, report = command(directory, "--dtypes", "float64", "--backends", DEFAULT)
    assert status == 0 and "pooled output" not in lines(report)


# ---- --prepare


@pytest.mark.parametrize(
    ("model_type", "name", "layers", "counts"),  # counts: texts, or tokens; for a masked LM, tokens with labels
    [
        ("bert", "BertForSequenceClassification", 8, {"logits": 4}),
        ("bert", "BertForMultipleChoice", 8, {"logits": 2}),
        ("bert", "BertForQuestionAnswering", 8, {"start_logits": 4, "end_logits": 4}),
        ("albert", "AlbertForMaskedLM", 5, {"logits": 7}),
        ("electra", "ElectraForPreTraining", 9, {"logits": 30}),
    ],
)
def test_what_preparing_costs_every_head(model_type, name, layers, counts, checkpoint, capsys):
    changes = {} if name.endswith("QuestionAnswering") else {"num_labels": 3}
    directory = checkpoint(name, model_type, **changes)
    status, report = command(directory, "--prepare", "int8")
    assert status == 0 and report["architecture"] == name and report["threads"] == torch.get_num_threads()
    assert len(report["cosines"]) == 4 and 0.98 < report["worst_cosine"] < report["mean_cosine"] < 1
    assert {change["name"]: change["count"] for change in report["changes"]} == counts
    assert all(0 < change["difference"] < 0.5 and 0 <= change["same"] <= 1 for change in report["changes"])
    model = trained_model(directory, dtype=torch.float32)
    packed = fastbert.prepare(model, "int8").state_dict()
    dense = [key.removesuffix(".weight_scale") for key in packed if key.endswith(".weight_scale")]
    assert {layer["name"] for layer in report["layers"]} == set(dense) and len(dense) == layers
    plain = sum(p.nbytes for key in dense for p in model.get_submodule(key).parameters())
    assert report["dense"]["before"] * 1e6 == plain and 0 < report["dense"]["after"] < report["dense"]["before"] / 2
    saved = report["dense"]["before"] - report["dense"]["after"]
    assert report["whole"]["before"] - report["whole"]["after"] == pytest.approx(saved)
    assert min(report["milliseconds"].values()) > 0 and report["layers"][0]["name"] in capsys.readouterr().out


def test_the_layer_that_int8_spoils_is_named_and_skipping_it_helps(checkpoint):
    """An input that is always 0 has huge weights. They share a scale with the other weights, which round to 0."""
    directory, name = checkpoint(), "encoder.layer.1.intermediate.dense"
    model = transformers.BertModel.from_pretrained(directory)
    before = model.encoder.layer[1].attention.output.LayerNorm
    before.weight.data[5] = before.bias.data[5] = 0
    model.encoder.layer[1].intermediate.dense.weight.data[:, 5] = 100
    model.save_pretrained(directory)
    _, spoiled = command(directory, "--prepare", "int8")
    worst, second = spoiled["layers"][:2]
    assert worst["name"] == name and worst["sqnr"] < 10 < 30 < second["sqnr"]
    status, better = command(directory, "--prepare", "int8", "--skip", name)
    assert status == 0 and better["skip"] == [name] and name not in {layer["name"] for layer in better["layers"]}
    assert better["mean_cosine"] > 0.999 and 1 - better["worst_cosine"] < (1 - spoiled["mean_cosine"]) / 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rule_holds_for_what_keeps_it(precision, checkpoint, monkeypatch):
    status, report = command(checkpoint("BertForMaskedLM"), "--prepare", precision)
    found = {line["name"]: line for line in report["lines"]}
    assert status == 0 and {"hidden state 0", "hidden state 2", "logits"} <= found.keys() and "loss" not in found
    right = check_prepared.prepare

    def wrong(*arguments, **more):
        model = right(*arguments, **more)
        model.bert.encoder.layer[1].output.LayerNorm.bias.data[3] += 0.2
        model.cls.predictions.bias.data.neg_()
        return model

    monkeypatch.setattr(check_prepared, "prepare", wrong)
    status, report = command(checkpoint("BertForMaskedLM"), "--prepare", precision)
    found = {line["name"]: line["ok"] for line in report["lines"]}
    assert status == 1 and not report["ok"] and found["hidden state 1"] and not found["hidden state 2"]
    assert not found["logits"] and report["worst_cosine"] < 0.9999


def test_labels_that_change_are_counted(checkpoint, monkeypatch):
    directory = checkpoint("BertForSequenceClassification", num_labels=3)
    model = transformers.BertForSequenceClassification.from_pretrained(directory)
    model.classifier.bias.data = torch.tensor([0.0, 9.0, 0.0])  # label 1 is the likeliest for every text
    model.save_pretrained(directory)
    _, report = command(directory, "--prepare", "int8")
    assert report["changes"][0]["same"] == 1
    right = check_prepared.prepare

    def wrong(*arguments, **more):
        model = right(*arguments, **more)
        model.classifier.bias.data[2] += 18
        return model

    monkeypatch.setattr(check_prepared, "prepare", wrong)
    status, report = command(directory, "--prepare", "int8")
    assert status == 0 and report["changes"][0]["same"] == 0 and 17.5 < report["changes"][0]["difference"] < 18.5


@pytest.mark.parametrize(
    ("labels", "problem", "same"),
    [
        (1, None, None),
        (2, "regression", None),
        (2, "multi_label_classification", 2 / 3),  # a text has the same labels if it has both or lacks both
        (2, None, 1 / 3),
    ],
    ids=str,
)
def test_what_counts_as_the_same_label(labels, problem, same):
    before = torch.tensor([[1.0, -1.0], [1.0, 2.0], [-3.0, -2.0]])[:, :labels]
    after = torch.tensor([[2.0, 1.0], [3.0, 2.0], [-1.0, -2.0]])[:, :labels]
    config = fastbert.BertConfig(num_labels=labels, problem_type=problem)
    subject = argparse.Namespace(kind="ForSequenceClassification", config=config)
    runs = [check.Run({}, {"logits": logits}, {}, {}) for logits in (before, after)]
    sample = check.Sample({}, {}, torch.ones(3, 1, dtype=torch.bool), False)
    assert check_prepared.change(subject, sample, "logits", *runs).same == (same and pytest.approx(same))


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (None, ["--prepare", "int8", "--dtypes", "float32"], "--dtypes is given beside --prepare"),
        (None, ["--prepare", "int8", "--device", "cuda"], "--device is cuda beside --prepare int8; expected cpu"),
        (None, ["--prepare", "int8", "--skip", "encoder.layer.7"], "skip has 'encoder.layer.7'"),
        (None, ["--skip", "encoder.layer.1"], "--skip is given without --prepare"),
        (None, ["--model", "nowhere"], "there is no directory nowhere"),
        (None, ["--text", "nowhere"], "No such file"),
        (None, ["--batch", "0"], "--batch is 0"),
        (None, ["--max-length", "2"], "max_length is 2"),
        (None, ["--device", "nonsense"], "nonsense"),
        ("tokenizer.json", [], "has no tokenizer: expected one of tokenizer.json"),
        ("model.safetensors", [], "holds no model.safetensors and no"),
        ("config.json", [], "No such file"),
    ],
)
def test_what_a_user_can_mend_is_one_line(checkpoint, capsys, spoil, arguments, words):
    directory = checkpoint()
    if spoil:
        (directory / spoil).unlink()
    capsys.readouterr()
    status, report = command(directory, *arguments)
    error = capsys.readouterr().err
    assert status == 2 and report is None and error.startswith("fastbert: ") and words in error
    assert error.count("\n") == 1


def test_sentencepiece_s_file_is_a_tokenizer(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda directory, **_: read.append(directory))
    (tmp_path / "spm.model").touch()
    check._tokenizer(tmp_path)
    assert read == [tmp_path]


def test_files_that_do_not_fit_are_refused(checkpoint, capsys):
    directory = checkpoint("BertModel", vocab_size=12)
    assert command(directory)[0] == 2 and "the model embeds 12 tokens" in capsys.readouterr().err
    directory = checkpoint("BertModel")
    config = json.loads((directory / "config.json").read_text())
    for change, words in (({"model_type": "gpt2"}, "gpt2"), ({"architectures": ["BertForMaskedLM"]}, "lacks cls.pred")):
        (directory / "config.json").write_text(json.dumps(config | change))
        assert command(directory)[0] == 2 and words in capsys.readouterr().err
    (directory / "tokenizer.json").write_text("{")
    assert command(directory)[0] == 2 and "cannot be read" in capsys.readouterr().err
