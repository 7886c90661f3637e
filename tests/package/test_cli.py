"""The command: its output as text and as JSON, and errors that a user can correct, in one line and with status 2."""

import argparse
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import TINY, minilm

import fastbert
from fastbert import cli
from fastbert.cli.common import device_of, lines, model_options, write_json
from fastbert.cli.progress import progress
from fastbert.config import PRESETS
from fastbert.data import TokenFile, get_tokenizer, read_texts, save_tokenizer
from fastbert.files import write_text
from fastbert.inference import CrossEncoder, EntityTagger, MaskFiller, QuestionAnswerer, SentenceEncoder, TextClassifier

HEADS = ["BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"]
SMALL = TINY.changed(vocab_size=30522, max_position_embeddings=64, num_hidden_layers=2)
NAMES = {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}, "num_labels": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small checkpoints of the bare model, each head and a reranker, with all-MiniLM-L6-v2's tokenizer."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("models"), get_tokenizer(minilm())
    changes = {"BertForTokenClassification": NAMES, "BertReranker": {"num_labels": 1}}
    for name in ("BertModel", *HEADS, "BertReranker"):
        kind = getattr(fastbert, "BertForSequenceClassification" if name == "BertReranker" else name)
        model = kind(SMALL.changed(**changes.get(name, {})))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name)
    return folder


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    return status, capsys.readouterr()


def json_of(capsys, *arguments):
    status, output = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(output.out)


# ---- predictions


def test_fill_mask(models, capsys):
    directory, text = models / "BertForMaskedLM", "The [MASK] sat on the [MASK]."
    expected = MaskFiller.from_pretrained(directory)([text], top_k=2)[0]
    (found,) = json_of(capsys, "fill-mask", text, "--model", directory, "--top", 2)
    assert found["text"] == text
    assert found["masks"] == [[vars(fill) for fill in fills] for fills in expected]
    status, output = run(capsys, "fill-mask", text, "--model", directory, "--top", 2)
    assert status == 0 and output.out.startswith(text) and not output.err
    assert all(fill.text in output.out and f"{fill.score:.4f}" in output.out for fills in expected for fill in fills)


def test_classify(models, capsys, tmp_path):
    directory = models / "BertForSequenceClassification"
    (tmp_path / "texts.csv").write_text("id,review\n1,one\n2,\n3,another\n")
    expected = TextClassifier.from_pretrained(directory)(["one", "another"])
    found = json_of(capsys, "classify", "--text", tmp_path / "texts.csv", "--column", "review", "--model", directory)
    assert [entry["text"] for entry in found] == ["one", "", "another"]
    expected.insert(1, [])
    assert [entry["labels"] for entry in found] == [[vars(label) for label in labels] for labels in expected]
    status, output = run(capsys, "classify", "one", "--model", directory, "--top", 1)
    assert output.out == f"one\n  {expected[0][0].score:.4f}  {expected[0][0].label}\n"


def test_tag(models, capsys):
    directory, text = models / "BertForTokenClassification", "Ada Lovelace and Charles Babbage met in London."
    expected = EntityTagger.from_pretrained(directory)([text])[0]
    (found,) = json_of(capsys, "tag", text, "--model", directory)
    assert expected and found == {"text": text, "entities": [vars(entity) for entity in expected]}
    status, output = run(capsys, "tag", text, "--model", directory)
    assert output.out.count("\n") == 1 + len(expected) and f"PER      {expected[0].text}" in output.out


def test_answer(models, capsys, tmp_path):
    directory, context = models / "BertForQuestionAnswering", "The cat sat on the mat.\nIt rained all day. " * 30
    (tmp_path / "context").write_text(context)
    arguments = ["answer", "where?", "--context", tmp_path / "context", "--model", directory, "--top", 3]
    found = json_of(capsys, *arguments, "--max-answer-length", 4)
    expected = QuestionAnswerer.from_pretrained(directory)(["where?"], [context], top_k=3, max_answer_length=4)[0]
    assert found["answers"] == [vars(answer) for answer in expected.best] and found["no_answer"] == expected.no_answer
    status, output = run(capsys, *arguments)
    assert status == 0 and output.out.endswith("(no answer)\n")


def test_rerank(models, capsys, tmp_path):
    directory, documents = models / "BertReranker", ["The cat sat.", "It rained all day.", "A cat is outside."]
    (tmp_path / "documents").write_text("\n".join(documents[:1] + [""] + documents[1:]) + "\n")
    expected = CrossEncoder.from_pretrained(directory).rank("the cat?", documents, return_documents=True)
    arguments = ["rerank", "the cat?", "--text", tmp_path / "documents", "--model", directory]
    assert json_of(capsys, *arguments) == {"query": "the cat?", "documents": expected}
    status, output = run(capsys, "rerank", "the cat?", *documents, "--model", directory, "--top", 2)
    assert status == 0 and not output.err
    assert output.out.splitlines() == [f"{one['score']:.4f}  {one['text']}" for one in expected[:2]]


def test_similarity(capsys):
    texts = ["The cat sits outside", "A cat is in the garden", "He drove to the stadium."]
    found = json_of(capsys, "similarity", *texts, "--model", minilm())["similarity"]
    vectors = SentenceEncoder.from_pretrained(minilm()).encode(texts)
    assert (torch.tensor(found) - vectors @ vectors.T).abs().max() < 1e-6
    status, output = run(capsys, "similarity", *texts, "--model", minilm())
    assert status == 0 and output.out.splitlines()[1].split()[0] == f"{found[1][0]:.4f}" and texts[2] in output.out


def test_half_precision(models, capsys):
    directory = models / "BertForSequenceClassification"
    scores = [json_of(capsys, "classify", "one", "--model", directory, "--dtype", dtype)[0]["labels"][0]["score"]
              for dtype in ("float32", "bfloat16")]  # fmt: skip
    assert 0 < abs(scores[0] - scores[1]) < 0.02


def test_a_directory_of_a_prepared_model(models, capsys, tmp_path):
    """It runs in the dtype that it was prepared in, without an option for that."""
    directory = models / "BertForSequenceClassification"
    shutil.copytree(directory, tmp_path / "bf16")
    model = fastbert.BertForSequenceClassification.from_pretrained(directory, dtype="float32")
    fastbert.prepare(model, "bf16").save_pretrained(tmp_path / "bf16")
    scores = [json_of(capsys, "classify", "one", "--model", at)[0]["labels"][0]["score"]
              for at in (directory, tmp_path / "bf16")]  # fmt: skip
    assert 0 < abs(scores[0] - scores[1]) < 0.02


def test_search_as_json(models, capsys, tmp_path):
    (tmp_path / "texts").write_text("the cat sat on the mat\n\nthe dog too\nthe sun\n")
    options = "--text", tmp_path / "texts", "--model", models / "BertModel", "--top", 2
    found = json_of(capsys, "search", "a dog", "the sun", *options)
    assert [one["question"] for one in found] == ["a dog", "the sun"]
    best = found[1]["passages"]
    assert best[0]["text"] == "the sun" and best[0]["source"] == "texts:4" and len(best) == 2
    assert best[0]["score"] == pytest.approx(1) and best[0]["score"] > best[1]["score"]


def test_precision(models, capsys, tmp_path):
    """With --precision, every command that has a model runs prepared layers, and gives what `precision=` gives."""
    (tmp_path / "texts").write_text("the cat sat on the mat\nthe dog too\n")
    text = ("--text", tmp_path / "texts")

    def ran():
        return sum(count for (op, _), count in fastbert.backends.calls().items() if op == "packed_layer_fwd")

    for command, *arguments in (
        ("embed", *text, "--output", tmp_path / "vectors.npy", "--model", models / "BertModel"),
        ("similarity", *text, "--model", models / "BertModel"),
        ("search", "the dog", *text, "--model", models / "BertModel"),
        ("fill-mask", "a [MASK]", "--model", models / "BertForMaskedLM"),
        ("tag", *text, "--model", models / "BertForTokenClassification"),
        ("answer", "a?", "--context", tmp_path / "texts", "--model", models / "BertForQuestionAnswering"),
        ("rerank", "the dog", *text, "--model", models / "BertReranker"),
    ):
        before = ran()
        assert run(capsys, command, *arguments, "--precision", "int8")[0] == 0 and ran() > before, command
    plain = SentenceEncoder.from_pretrained(models / "BertModel")
    expected = SentenceEncoder(fastbert.prepare(plain.model, "int8"), plain.tokenizer, max_length=plain.max_length)
    texts, found = ["the cat sat on the mat", "the dog too"], torch.from_numpy(np.load(tmp_path / "vectors.npy"))
    assert torch.equal(found, expected.encode(texts))
    assert 0.99 < (found * plain.encode(texts)).sum(-1).min() < 0.99999
    directory = models / "BertForSequenceClassification"
    scores = {}
    for precision in ("fp32", "bf16", "int8"):
        (labels,) = TextClassifier.from_pretrained(directory, precision=precision)(["one"])
        scores[precision] = labels[0].score
        (entry,) = json_of(capsys, "classify", "one", "--model", directory, "--precision", precision)
        assert entry["labels"] == [vars(label) for label in labels]
    assert len(set(scores.values())) == 3 and max(scores.values()) - min(scores.values()) < 0.02


def test_a_prepared_model_is_on_the_processor_by_default(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = argparse.Namespace(device=None)
    assert device_of(args, "int8") == "cpu" and device_of(args, None) == "cuda"
    for precision, device in (("int8", "cpu"), ("bf16", "cpu"), (None, "cuda")):  # a model saved after prepare
        config = fastbert.BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48)
        model = fastbert.BertModel(config.changed(vocab_size=50)).eval()
        (fastbert.prepare(model, precision) if precision else model).save_pretrained(tmp_path / str(precision))
        given = {"batch_tokens": 9, "max_length": None, "threads": None, "dtype": None, "precision": None}
        options = model_options(argparse.Namespace(device=None, model=str(tmp_path / str(precision)), **given))
        assert options["device"] == device and (options["dtype"] is None) == (precision is not None)


def test_batches_lengths_and_threads(models, capsys, tmp_path, monkeypatch):
    """The options apply to every command with a model. The numbers of tokens are read where they reach the model."""
    (tmp_path / "texts").write_text("the cat sat on the mat\nthe dog too\n")
    seen, forward, threads = [], fastbert.BertModel.forward, torch.get_num_threads()

    def noted(self, input_ids, *arguments, **more):
        seen.append(input_ids.numel())
        return forward(self, input_ids, *arguments, **more)

    monkeypatch.setattr(fastbert.BertModel, "forward", noted)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.append(f"{count} threads"))
    text, masks = ("--text", tmp_path / "texts"), ("[MASK] is a mat too", "a [MASK]")
    for command, *arguments in (
        ("embed", *text, "--output", tmp_path / "vectors.npy", "--model", minilm()),
        ("similarity", *text, "--model", minilm()),
        ("fill-mask", *masks, "--model", models / "BertForMaskedLM"),
        ("classify", *text, "--model", models / "BertForSequenceClassification"),
        ("tag", *text, "--model", models / "BertForTokenClassification"),
        ("answer", "a?", "--context", tmp_path / "texts", "--model", models / "BertForQuestionAnswering"),
        ("rerank", "a", *text, "--model", models / "BertReranker"),
    ):
        seen.clear()
        most = 12 if command == "answer" else 7  # a window has room for a question
        numbers = ("--batch-tokens", most, "--max-length", most, "--threads", 3)
        status, _ = run(capsys, command, *arguments, *numbers)
        first, *tokens = seen
        assert status == 0 and first == "3 threads" and len(tokens) > 1 and max(tokens) <= most, (command, seen)
    assert torch.get_num_threads() == threads
    seen.clear()
    run(capsys, "search", "the dog", *text, "--model", minilm(), "--batch-tokens", 7, "--max-length", 7)
    assert len(seen) == 3 and max(seen) <= 7


def test_progress_is_lines_where_there_is_no_terminal(capsys, monkeypatch):
    """There is at most one line in ten seconds, by a clock that the test sets."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for total, expected in (
        (10_000, ["encoding: 500 of 10000 texts, 50/s, 3:10 left", "encoding: 1000 of 10000 texts, 45/s, 3:18 left"]),
        (None, ["encoding: 500 texts, 50/s", "encoding: 1000 texts, 45/s"]),
    ):
        with progress("encoding", total) as advance:
            for count, seconds in ((250, 5), (250, 5), (250, 6), (250, 6), (0, 1), (9000, 200)):
                now += seconds
                advance(count) if total or count < 9000 else None
        assert capsys.readouterr().err.splitlines() == expected
    with progress("encoding", 9) as advance:
        now += 30
        advance(0)
    assert not capsys.readouterr().err


# ---- tools


def test_plot_attention(models, capsys, tmp_path):
    path = tmp_path / "attention.png"
    status, output = run(capsys, "plot-attention", "the cat", "--model", models / "BertForMaskedLM", "--output", path)
    assert status == 0 and output.out == f"{path}\n" and path.read_bytes().startswith(b"\x89PNG")
    arguments = ("plot-attention", "the cat", "--model", minilm(), "--output", path, "--layer", 1, "--head", 2)
    whole = path.read_bytes()
    assert run(capsys, *arguments)[0] == 0 and path.read_bytes() != whole


@pytest.mark.slow  # fastbert.export itself is in the fast suite
def test_export(models, capsys, tmp_path):
    path = tmp_path / "model.pt2"
    directory = models / "BertForSequenceClassification"
    status, output = run(capsys, "export", "--model", directory, "--format", "torch-export", "--output", path)
    assert status == 0 and output.out.endswith("input_ids, attention_mask, token_type_ids -> logits, float32\n")
    ids = torch.tensor([[101, 5, 102]])
    model = fastbert.BertForSequenceClassification.from_pretrained(directory)
    found = torch.export.load(path).module()(input_ids=ids, attention_mask=ids * 0 + 1, token_type_ids=ids * 0)
    assert (found["logits"] - model(ids).logits).abs().max() < 1e-5


# The numbers of parameters in the Hub's files, without heads.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-base-uncased (110M)", 109_482_240),
        ("bert-large-uncased", 335_141_888),
        ("roberta-base", 124_645_632),
        ("distilbert-base-uncased", 66_362_880),
        ("albert-base-v2", 11_683_584),
    ],
)
def test_info_about_a_name(capsys, name, parameters):
    found = json_of(capsys, "info", "--model", name)
    assert found["parameters"] == parameters and found["class"] == "BertModel"
    assert found["vocab_size"] == fastbert.BertConfig.preset(name).vocab_size


def test_info_about_a_directory(models, capsys):
    status, output = run(capsys, "info", "--model", models / "BertForTokenClassification")
    model = fastbert.BertForTokenClassification.from_pretrained(models / "BertForTokenClassification")
    lines = dict(line.split(":", 1) for line in output.out.splitlines())
    assert lines["parameters"].strip() == f"{sum(p.numel() for p in model.parameters()):,}"
    assert lines["class"].strip() == "BertForTokenClassification" and lines["hidden_size"].strip() == "48"
    assert lines["id2label"].strip() == "0 O, 1 B-PER, 2 I-PER"


def test_info_for_machines(capsys):
    found = json_of(capsys, "info")
    assert found["versions"]["torch"] == torch.__version__ and "driver" in found


def test_the_module_runs():
    answer = subprocess.run([sys.executable, "-m", "fastbert.cli", "--version"], capture_output=True, text=True)
    assert answer.stdout == f"fastbert {fastbert.__version__}\n"


# ---- errors that a user can correct


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "--model", "bert-huge"], "unknown model 'bert-huge'; known, with or without the number: bert-base"),
        (["info", "--model", "EMPTY"], "No such file"),
        (["fill-mask", "a [MASK]", "--model", "nowhere"], "there is no directory nowhere"),
        (["fill-mask", "no mask", "--model", "BertForMaskedLM"], "texts[0] has no [MASK]; expected one to fill"),
        (["fill-mask", "[MASK]", "--model", "BertForMaskedLM", "--top", "0"], "top_k is 0"),
        (["tag", "a", "--model", "BertForTokenClassification", "--threads", "0"], "threads is 0; expected at least 1"),
        (["tag", "a", "--model", "BertForTokenClassification", "--batch-tokens", "0"], "--batch-tokens is 0"),
        (["tag", "a", "--model", "BertForTokenClassification", "--max-length", "65"], "and at most 64"),
        (["classify", "TEXT", "--model", "BertForSequenceClassification"], "expected a text, or --text TEXT"),
        (["answer", "TEXT", "--context", "TEXT", "--model", "BertForQuestionAnswering"], "or --context TEXT"),
        (["plot-attention", "a", "--model", "BertModel", "--output", "a.xyz"], "'xyz' is not supported"),
        (["fill-mask", "--model", "BertForMaskedLM"], "expected texts, or --text FILE"),
        (["fill-mask", "a", "--text", "b", "--model", "BertForMaskedLM"], "expected texts, or --text FILE"),
        (["fill-mask", "[MASK]", "--model", "BertModel"], "architectures is BertModel; expected BertForMaskedLM"),
        (["classify", "a", "--model", "BertForTokenClassification"], "expected BertForSequenceClassification"),
        (["tag", "--text", "nowhere", "--model", "BertForTokenClassification"], "No such file"),
        (["answer", "why?", "--context", "BLANK", "--model", "BertForQuestionAnswering"], "holds no text"),
        (["answer", "", "--context", "TEXT", "--model", "BertForQuestionAnswering"], "has no token"),
        (["rerank", "TEXT", "a", "--model", "BertReranker"], "TEXT is a file; expected a text"),
        (["plot-attention", "TEXT", "--model", "BertModel", "--output", "x.png"], "TEXT is a file; expected a text"),
        (["classify", "a", "--model", ""], "there is no directory ''"),
        (["rerank", "a?", "--model", "BertReranker"], "expected texts, or --text FILE"),
        (["rerank", "a?", "b", "--model", "BertReranker", "--top", "0"], "top_k is 0"),
        (["rerank", "a?", "b", "--model", "BertForSequenceClassification"], "with 2 labels; expected one label"),
        (["rerank", "a?", "b", "--model", "BertModel"], "architectures is BertModel; expected BertForSequenceClass"),
        (["embed", "a", "--output", "x.npy", "--column", "b"], "--column is 'b'; expected --text FILE with it"),
        (["check", "--model", "BertModel", "--column", "b"], "--column is 'b'; expected --text FILE with it"),
        (
            ["tag", "--text", "-", "--column", "b", "--model", "BertForTokenClassification"],
            "stdin has texts, one a line",
        ),
        (["tag", "--text", "TEXT", "--column", "b", "--model", "BertForTokenClassification"], "read as lines of text"),
        (["embed", "a", "--output", "x.npy", "--shard-rows", "2"], "--shard-rows is for files"),
        (["embed", "a", "--output", "x.npy", "--no-texts"], "--no-texts is for files"),
        (["embed", "TEXT", "--text", "TEXT", "--output", "vectors"], "--text TEXT is beside files; expected"),
        (["embed", "a", "--output", "x.npy", "--prompt-name", "nobody", "--model", "BertModel"], "'nobody'"),
        (
            ["embed", "--text", "TEXT", "--output", "vectors"],
            "or `fastbert embed TEXT --output vectors` for a directory",
        ),
        (["embed", "--text", "-"], "expected --output PATH.npy for texts of stdin"),
        (["search", "a", " "], "a question is empty"),
        (["search", "a", "--index"], "--index is of a corpus; expected --corpus DIR with it"),
        (["search", "a", "--corpus", "EMPTY", "--text", "TEXT"], "--text and --corpus are both given"),
        (["similarity", "one"], "expected at least two texts"),
        (["similarity", "one", " "], "none that is empty"),
        (["similarity", "one", "\udcff"], "texts[1] is not text at character 0"),
        (["classify", "\udcff", "--model", "BertForSequenceClassification"], "texts[0] is not text at character 0"),
        (["plot-attention", "a", "--model", "BertModel", "--output", "x.png", "--layer", "2"], "layer is 2"),
        (["plot-attention", "", "--model", "BertModel", "--output", "x.png"], "expected some text"),
        (["plot-attention", "a", "--model", "BertModel", "--output", "nowhere/x.png"], "No such file"),
        (["export", "--model", "BertModel", "--output", "model.bin"], "expected a name that ends in .onnx"),
        (["export", "--model", "bert-base-uncased", "--output", "model.onnx"], "`hf download bert-base-uncased`"),
        (["classify", "a", "--model", "BertForSequenceClassification", "--device", "nonsense"], "nonsense"),
        (["classify", "a", "--model", HEADS[1], "--precision", "bf16", "--device", "cuda:1"], "is cuda:1 beside"),
        (["similarity", "a", "b", "--precision", "int8", "--dtype", "bfloat16"], "dtype is bfloat16 beside precision"),
        (["embed", "--text", "nowhere"], "No such file"),
        (["embed", "--text", "BLANK"], "holds no text"),
        (["embed", "--text", "LATIN"], "is not UTF-8"),
        (["embed", "--text", "TEXT", "--model", "nowhere"], "there is no directory nowhere"),
        (["embed", "--text", "TEXT", "--device", "nonsense"], "nonsense"),
        (["embed", "--text", "TEXT", "--output", "nowhere/out.npy"], "No such file"),
        (["embed", "--text", "TEXT", "--output", "a.xyz"], "--output is a.xyz; expected a name that ends in .npy"),
        (["embed", "a text"], "expected --output PATH.npy for texts of the command line"),
        (["embed", "a text", "--output", "a.npy", "--max-length", "513"], "is 513; expected at most the model"),
        (["embed", "TEXT"], "TEXT is a file; expected a text, or --text TEXT"),
        (["similarity", "a text", "TEXT"], "TEXT is a file; expected a text, or --text TEXT"),
        (["search", "TEXT"], "TEXT is a file; expected a text, or --text TEXT"),
        (["search", "x", "--top", "0"], "--top is 0"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_it_is_one_line(models, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BLANK").write_text("\n")
    (tmp_path / "TEXT").write_text("text\n")
    (tmp_path / "LATIN").write_bytes(b"caf\xe9\n")
    before = sorted(tmp_path.iterdir())
    arguments = [str(models / argument) if argument.startswith("Bert") else argument for argument in arguments]
    if arguments[0] == "similarity":
        arguments += ["--model", str(minilm())]
    status, output = run(capsys, *arguments)
    assert status == 2 and output.err.startswith("fastbert: ") and words in output.err
    assert output.err.count("\n") == 1 and not output.out and sorted(tmp_path.iterdir()) == before


def test_every_known_name_is_listed(capsys):
    _, output = run(capsys, "info", "--model", "nix")
    assert all(f"{name} ({size})" in output.err for name, (size, _) in PRESETS.items())


def test_an_earlier_output_outlives_an_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "texts").write_text("one\ntwo\n")
    arguments = ("embed", "--text", tmp_path / "texts", "--model", minilm())
    status, output = run(capsys, *arguments)
    path = tmp_path / "texts.npy"
    whole = path.read_bytes()
    assert status == 0 and output.out.strip() == f"{path}: (2, 384) float32" and np.load(path).shape == (2, 384)

    def fail(*_, **more):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SentenceEncoder, "encode", fail)
    status, output = run(capsys, *arguments)
    assert status == 2 and output.err == "fastbert: out of memory\n" and path.read_bytes() == whole
    assert sorted(tmp_path.iterdir()) == [tmp_path / "texts", path]


def test_an_output_that_is_a_pipe_is_written_to_and_a_link_to_a_file_is_replaced(tmp_path):
    pipe, to_pipe, target, link = (tmp_path / name for name in ("a pipe", "a link to it", "target", "to target"))
    os.mkfifo(pipe)
    target.write_text("of others")
    to_pipe.symlink_to(pipe), link.symlink_to(target)
    reader = os.open(pipe, os.O_RDWR)  # else opening it for writing waits
    for path in (pipe, to_pipe, link):
        write_text(path, "text")
    assert pipe.is_fifo() and to_pipe.is_symlink() and os.read(reader, 9) == b"texttext"
    os.close(reader)
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("text", "of others")
    assert sorted(tmp_path.iterdir()) == sorted([pipe, to_pipe, target, link])


def test_lines_are_those_of_read_texts(models, capsys, tmp_path):
    data, directory = b"a\rb\r\nanother\n", models / HEADS[1]
    (tmp_path / "texts").write_bytes(data)
    (tmp_path / "texts.gz").write_bytes(gzip.compress(data))
    for name in ("texts", "texts.gz"):
        found = json_of(capsys, "classify", "--text", tmp_path / name, "--model", directory)
        assert [entry["text"] for entry in found] == list(read_texts(tmp_path / name)) == ["a\rb", "another"]


def test_the_ending_of_a_file_says_where_its_texts_are(models, capsys, tmp_path, monkeypatch):
    """For `prepare`, too, which makes a corpus of them."""
    directory, found, tokens = models / HEADS[1], [], []
    for name, content in (("x.jsonl", '{"text": "a mat"}\n{"text": "a cat"}\n'), ("x", "a mat\na cat\n")):
        (tmp_path / name).write_text(content)
        found.append(json_of(capsys, "classify", "--text", tmp_path / name, "--model", directory))
        output = tmp_path / f"tokens of {name}"
        assert run(capsys, "prepare", "--text", tmp_path / name, "--tokenizer", directory, "--output", output)[0] == 0
        tokens.append([example["input_ids"].tolist() for example in TokenFile(output, 24)])
    assert found[0] == found[1] and tokens[0] == tokens[1] and len(tokens[0]) == len(found[0]) == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a mat\na cat\n")))
    output = tmp_path / "tokens of stdin"
    assert run(capsys, "prepare", "--text", "-", "--tokenizer", directory, "--output", output)[0] == 0
    assert [example["input_ids"].tolist() for example in TokenFile(output, 24)] == tokens[0]
    others = "--tokenizer", directory, "--output", tmp_path / "no"
    for stdin, files, words in ((sys.stdin, "--", "--text has - twice"), (None, "-", "stdin is closed")):
        monkeypatch.setattr("sys.stdin", stdin)
        status, printed = run(capsys, "prepare", "--text", *files, *others)
        assert status == 2 and words in printed.err


def test_passages_of_a_file_rank_by_the_encoder_s_own_measure(models, capsys, tmp_path):
    (tmp_path / "texts").write_text("the cat\n")
    encoder = SentenceEncoder.from_pretrained(models / "BertModel")
    dot = SentenceEncoder(encoder.model, encoder.tokenizer, normalize=False, similarity="dot")
    dot.save_pretrained(tmp_path / "dot")
    _, output = run(capsys, "search", "a dog", "--text", tmp_path / "texts", "--model", tmp_path / "dot")
    expected = dot.similarity(dot.encode_query(["a dog"]), dot.encode_document(["the cat"])).item()
    assert abs(expected) > 1 and f"{expected:.3f}" in output.out


def test_a_byte_order_mark_is_no_text(models, capsys, tmp_path):
    (tmp_path / "texts").write_text("one\nanother\n", encoding="utf-8-sig")
    found = json_of(capsys, "classify", "--text", tmp_path / "texts", "--model", models / HEADS[1])
    assert [entry["text"] for entry in found] == ["one", "another"]


@pytest.mark.filterwarnings("default")
def test_a_text_that_is_cut_is_said(models, capsys):
    long = "word " * 100
    status, output = run(capsys, "classify", "a", long, "--model", models / "BertForSequenceClassification", "--json")
    assert status == 0 and output.err == "fastbert: 1 of 2 texts are longer than 64 tokens: cut there\n"
    assert len(json.loads(output.out)) == 2


def test_ids_out_of_range_are_one_line(models, tmp_path, capsys, monkeypatch):
    """A tokenizer with ids that the model does not have is refused; without that check, the model refuses the ids."""
    directory = models / "BertForSequenceClassification"
    monkeypatch.setattr("fastbert.inference.predict.check_tokenizer", lambda tokenizer, config: None)
    small = fastbert.BertForSequenceClassification(SMALL.changed(vocab_size=500))
    small.save_pretrained(tmp_path)
    save_tokenizer(get_tokenizer(directory), tmp_path)
    status, output = run(capsys, "classify", "hello", "--model", tmp_path)
    assert status == 2 and output.err == "fastbert: embedding: input_ids[1] is 7592; expected 0 <= input_ids < 500\n"
    monkeypatch.undo()
    status, output = run(capsys, "classify", "hello", "--model", tmp_path)
    assert status == 2 and "expected ids below the vocab_size of the model, 500" in output.err


# ---- what ends a command


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastbert.cli.tools._info", interrupted)
    assert run(capsys, "info", "--model", "bert-base-uncased") == (130, ("", "fastbert: interrupted\n"))


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m fastbert.cli info --model bert-base-uncased | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_errors_may_have_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTBERT_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(["info", "--model", str(tmp_path)])


def test_texts_may_come_through_a_pipe(models, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one text\nanother\n")))
    piped = json_of(capsys, "classify", "--text", "-", "--model", models / "BertForSequenceClassification")
    assert piped == json_of(
        capsys, "classify", "one text", "another", "--model", models / "BertForSequenceClassification"
    )


def test_a_pipe_is_read_as_a_file_is(models, capsys, monkeypatch, tmp_path):
    """Line separators of Unicode do not end a line, nor does a carriage return alone; a byte-order mark is left out."""
    content = "\ufeffone\u2028text\nan\rother\x0cone\r\n\nlast".encode()
    (tmp_path / "texts.txt").write_bytes(content)
    expected = lines(tmp_path / "texts.txt")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert lines(Path("-")) == expected == ["one\u2028text", "an\rother\x0cone", "", "last"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    status, output = run(capsys, "classify", "--text", "-", "--model", models / "BertForSequenceClassification")
    assert status == 2 and "stdin is not UTF-8 at byte 3" in output.err


def test_json_for_an_output_in_ascii(capsys, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    write_json({"text": "é"})
    output.flush()
    assert json.loads(output.buffer.getvalue()) == {"text": "é"}


def test_a_check_whose_reader_leaves_has_its_status(models):
    command = f"{sys.executable} -m fastbert.cli check --model {models / 'BertForSequenceClassification'} --batch 1 "
    command += "--backends reference --dtypes float32 | true; exit ${PIPESTATUS[0]}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_package_is_named_with_its_installation(models, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    status, output = run(capsys, "classify", "hello", "--model", models / "BertForSequenceClassification")
    assert status == 2 and output.err.endswith("; to install it: pip install tokenizers\n")
