"""A short run of each example: it trains, draws its curves, and fails on the faults that it exists to notice."""

import copy
import importlib
import json
import math
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_models import TINY, minilm

import fastbert
from fastbert.cli.demo import documentation_passages, python_documentation
from fastbert.data import PackingCollator, create_mlm_dataloader, get_tokenizer
from fastbert.inference import SentenceEncoder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch):
    """Makes the examples importable, with the settings that people run them with."""
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.use_deterministic_algorithms(False)  # as people run it: memory is not filled
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small mostly wait for the other thread
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(examples, monkeypatch, capsys):
    """Runs an example with arguments, on one passage in `every`: its status, and what it prints."""

    def run(name, *arguments, every=1):
        example = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(example, "python_documentation", lambda size: python_documentation(size)[::every])
        status = example.main()
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def example(run, tmp_path):
    """Runs one that draws two curves for so many steps."""

    def steps(name, steps):
        alone = ["--alone", "0"] if name == "pretrain_mlm" else []
        result = run(name, "--steps", steps, "--output", tmp_path, *alone)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return result

    return steps


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    """Apart from common.py."""
    assert path.stem == "common" or len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("name", ["pretrain_mlm", pytest.param("finetune_classifier", marks=pytest.mark.slow)])
def test_twenty_steps_coincide(example, name):
    if name == "finetune_classifier":
        minilm()
    status, output = example(name, 20)
    assert status == 0 and "the curves coincide" in output and "held-out" in output


def test_other_masks_are_noticed(example, monkeypatch):
    """The plain run draws another key: same statistics, other elements."""
    common = importlib.import_module("common")
    right = common.dropout_masks
    monkeypatch.setattr(common, "dropout_masks", lambda config, key, visible: right(config, key + 1, visible))
    status, output = example("pretrain_mlm", 2)
    assert status == 1 and "DO NOT COINCIDE" in output


def test_a_gradient_that_is_wrong_is_noticed(example, monkeypatch):
    """One percent off in half of each layer, and nothing wrong in any forward."""
    right = fastbert.ops.dense_gelu

    def wrong(*arguments):
        y = right(*arguments)
        return y.detach() + 0.99 * (y - y.detach())

    monkeypatch.setattr(fastbert.ops, "dense_gelu", wrong)
    status, output = example("pretrain_mlm", 5)
    assert status == 1 and "DO NOT COINCIDE" in output


# ---- distill


def test_distillation_in_a_few_steps(run, tmp_path):
    steps = ["--layers", 1, "--steps", 2, "--teacher-steps", 2]
    status, output = run("distill", *steps, "--output", tmp_path, every=10)
    student = fastbert.BertForMaskedLM.from_pretrained(tmp_path / "distilled")
    assert student.config.num_hidden_layers == 1
    assert get_tokenizer(tmp_path / "distilled").get_vocab_size() == student.config.vocab_size
    assert all(name in output for name in ("teacher", "distilled", "the same start", "from scratch"))
    assert status == (0 if "the best student: distilled" in output else 1)


def test_the_student_begins_as_every_other_layer(examples):
    distill = importlib.import_module("distill")
    teacher = fastbert.BertForMaskedLM(TINY.changed(num_hidden_layers=4))
    theirs, ours = fastbert.hf.state_dict(teacher), fastbert.hf.state_dict(distill.half_of(teacher))
    assert "bert.encoder.layer.1.output.dense.weight" in ours and not any("layer.2." in name for name in ours)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name.replace("layer.1.", "layer.2.")])


def test_a_perfect_student_has_the_masked_lm_loss_alone(examples):
    """Nothing is left of the other two; and no gradient reaches the teacher."""
    distill = importlib.import_module("distill")
    teacher = fastbert.BertForMaskedLM(TINY)
    distillation = distill.Distillation(copy.deepcopy(teacher), teacher).train()
    assert distillation.student.training and not teacher.training
    batch = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[], seed=0)(
        [{"input_ids": list(range(5, 25))}, {"input_ids": list(range(40, 47))}]
    )
    distillation.eval()
    loss = distillation(**batch).loss
    loss.backward()
    assert (loss - distill.HARD * teacher(**batch).loss).abs() < 1e-5
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in distillation.student.parameters())


# ---- pretrain_bert


def test_pretraining_in_a_few_steps(run, tmp_path):
    """Too few to beat the frequencies: it says so."""
    status, output = run("pretrain_bert", "--steps", 2, "--output", tmp_path, every=10)
    assert status == 1 and "NOT the" in output and "next sentences" in output
    fastbert.BertForPreTraining.from_pretrained(tmp_path / "pretrained_bert")


def test_loss_by_frequency(examples):
    """The same sum, token by token."""
    pretrain = importlib.import_module("pretrain_bert")
    training, held_out = ([text for _, text in python_documentation()[part]] for part in (slice(9), slice(9, 12)))
    tokenizer = get_tokenizer(minilm())
    batches = list(create_mlm_dataloader(held_out, tokenizer, max_tokens=512))
    counts = Counter(i for text in training for i in tokenizer.encode(text, add_special_tokens=False).ids)
    total = counts.total() + tokenizer.get_vocab_size()
    labels = [label for batch in batches for label in batch["labels"].tolist() if label != -100]
    expected = -sum(math.log((counts[label] + 1) / total) for label in labels) / len(labels)
    assert abs(pretrain.loss_by_frequency(training, tokenizer, batches) - expected) < 1e-5


def test_held_out_paragraphs_are_in_no_training_document(examples):
    training, held_out = importlib.import_module("pretrain_bert").documents()
    everything = [text for _, text in python_documentation(120)]
    assert sorted(text for part in (*training, *held_out) for text in part) == sorted(everything)


# ---- compare_training


def test_comparison_in_one_step(run, tmp_path):
    minilm()
    status, output = run("compare_training", "--steps", 1, "--seeds", 2, "--json", tmp_path / "found.json", every=12)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [result["seed"] for result in found["seeds"]] == [0, 1]
    assert status == (0 if found["apart"] <= found["spread"] else 1) and ("they agree" in output) == (status == 0)
    for result in found["seeds"]:
        # One step from the same weights on the same batch: the losses differ by dropout alone.
        assert abs(result["fastbert"]["last_loss"] - result["transformers"]["last_loss"]) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "pretrain_bert", "compare_training"])
def test_full_size(run, tmp_path, name):
    """It proves what it claims: its exit status says so."""
    if name == "compare_training":
        minilm()
    status, output = run(name, *(() if name == "compare_training" else ("--output", tmp_path)))
    assert status == 0, output


# ---- search_python_docs


@pytest.fixture
def search(examples, monkeypatch, capsys):
    """Runs the demo on a few of its passages: its status, and what it prints."""
    minilm()
    demo = importlib.import_module("search_python_docs")
    monkeypatch.setattr(sys, "argv", ["search_python_docs", "what does a function return without a return statement?"])
    monkeypatch.setattr(demo, "documentation_passages", lambda: documentation_passages()[::40])
    monkeypatch.setattr(demo, "BATCH", 4)
    monkeypatch.setattr(demo, "EVERY", 2)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the demo replaces
    return lambda: (demo.main(), capsys.readouterr().out)


def test_the_demo_shows_texts_as_they_arrive_and_sorted(search):
    status, output = search()
    found = re.findall(r"(as they arrive|sorted by length)\W+(\d+)%\W+\d+\W+\d+\W+\d+\.\d+ x as fast", output)
    (first, arriving), (second, by_length) = found
    assert (first, second) == ("as they arrive", "sorted by length")
    assert int(by_length) < int(arriving)
    assert status == 0 and "attention_fwd: " in output and "without a return statement?" in output


def test_the_demo_fails_where_embeddings_differ(search, monkeypatch):
    right = SentenceEncoder.embed
    monkeypatch.setattr(SentenceEncoder, "embed", lambda self, ids: right(self, ids) * 1.01)
    assert search()[0] == 1


def test_padding_of_batches(examples):
    """Lengths 4 and 2, then 3: of 8 + 3 places 9 are tokens."""
    padding = importlib.import_module("search_python_docs").padding
    assert padding([[0, 1], [2]], ["aaaa", "bb", "ccc"]) == pytest.approx(2 / 11)


def test_passages_are_there_once():
    texts = [text for _, text in documentation_passages()]
    assert len(set(texts)) == len(texts) and set(texts) == {text for _, text in python_documentation(300)}
