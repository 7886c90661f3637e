"""Short runs of the examples: each trains, draws its curves, and fails on the faults that it is there to notice."""

import copy
import importlib
import json
import math
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import TINY, minilm

import fastbert.cli
from fastbert.cli.demo import python_documentation
from fastbert.data import PackingCollator, QADataset, create_mlm_dataloader, get_tokenizer
from fastbert.inference import SentenceEncoder

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = {"classes": "classify", "tags": "tag", "answers": "answer"}  # compare_training's tasks: the command for each


@pytest.fixture
def examples(monkeypatch):
    """Makes the examples importable, with the settings that users run them with."""
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.use_deterministic_algorithms(False)  # as users run it: memory is not filled
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small mostly wait for the other thread
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(examples, monkeypatch, capsys):
    """Runs an example with arguments, on every `every`-th passage; returns its status and what it prints."""

    def run(name, *arguments, every=1):
        example = importlib.import_module(name)
        tasks = name in ("compare_training", "tag_with_deberta")
        reads = importlib.import_module("compare_tasks") if tasks else example
        reads = importlib.import_module("retrieval_pairs") if name == "compare_retrieval" else reads
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(reads, "python_documentation", lambda size: python_documentation(size)[::every])
        status = example.main()
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def example(run, tmp_path):
    """Runs an example that draws two curves for a number of steps."""

    def steps(name, steps):
        alone = ["--alone", "0"] if name == "pretrain_mlm" else []
        result = run(name, "--steps", steps, "--output", tmp_path, *alone)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return result

    return steps


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    """Each has fewer than 120 lines, except common.py."""
    assert path.stem == "common" or len(path.read_text().splitlines()) < 120


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("pretrain_mlm", 20), ("finetune_classifier", 40)])
def test_steps_coincide(example, name, steps):
    """After 20 steps a classifier may still know no more than the commonest class."""
    if name == "finetune_classifier":
        minilm()
    status, output = example(name, steps)
    assert status == 0 and "the curves coincide" in output and "held-out" in output


@pytest.mark.slow
def test_other_masks_are_noticed(example, monkeypatch):
    """The plain run uses another dropout key: the statistics are the same, the dropped elements are not."""
    common = importlib.import_module("common")
    right = common.dropout_masks
    monkeypatch.setattr(common, "dropout_masks", lambda config, key, visible: right(config, key + 1, visible))
    status, output = example("pretrain_mlm", 2)
    assert status == 1 and "DO NOT COINCIDE" in output


@pytest.mark.slow
def test_a_gradient_that_is_wrong_is_noticed(example, monkeypatch):
    """The gradient is one percent off in half of each layer; every forward is right."""
    right = fastbert.ops.dense_gelu

    def wrong(*arguments):
        y = right(*arguments)
        return y.detach() + 0.99 * (y - y.detach())

    monkeypatch.setattr(fastbert.ops, "dense_gelu", wrong)
    status, output = example("pretrain_mlm", 5)
    assert status == 1 and "DO NOT COINCIDE" in output


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_tagging_with_a_deberta(run, tmp_path, monkeypatch, wrong):
    """A few steps, as it stands and with the scores of positions 1 % off in every layer."""
    right = fastbert.distances.disentangled_scaling
    if wrong:
        monkeypatch.setattr(fastbert.distances, "disentangled_scaling", lambda *arguments: 1.01 * right(*arguments))
    status, output = run("tag_with_deberta", "--steps", 4, "--output", tmp_path, every=20)
    assert status == int(wrong) and ("DO NOT COINCIDE" in output) == wrong
    loaded = fastbert.BertForTokenClassification.from_pretrained(tmp_path)
    assert get_tokenizer(tmp_path).get_vocab_size() == loaded.config.vocab_size
    assert loaded.config.model_type == "deberta-v2" and (tmp_path / "loss.png").exists()


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
    """A student equal to its teacher has zero for the other two losses. No gradient reaches the teacher."""
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


def test_pretraining_in_a_few_steps(run, tmp_path, capsys):
    """Two steps are too few to beat token frequencies, and it says so. `fill-mask` can use the saved model."""
    status, output = run("pretrain_bert", "--steps", 2, "--output", tmp_path, every=10)
    assert status == 1 and "NOT the" in output and "next sentences" in output
    text = "the list is [MASK]."
    assert fastbert.cli.main(["fill-mask", text, "--model", str(tmp_path / "pretrained_bert"), "--top", "3"]) == 0
    first, *answers = capsys.readouterr().out.strip().splitlines()
    assert first == text and len(answers) == 3
    for answer in answers:
        assert re.fullmatch(r" *0\.\d{4} +\S+ +the list is.*\.", answer) and float(answer.split()[0]) > 0, answer


def test_loss_by_frequency(examples):
    """It equals the same sum computed token by token."""
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


@pytest.mark.slow
def test_comparison_in_one_step(run, tmp_path, capsys):
    """One step of every task and seed; the commands can use the models that it saves."""
    minilm()
    kept = ["--output", tmp_path, "--json", tmp_path / "found.json"]
    status, output = run("compare_training", "--steps", 1, "--seeds", 2, *kept, every=24)
    tasks = {name: found for name, found in json.loads((tmp_path / "found.json").read_text()).items() if name in TASKS}
    assert list(tasks) == list(TASKS)
    agree, learned = (all(found[what] for found in tasks.values()) for what in ("agree", "learned"))
    assert status == 1 and not learned and "NOT LEARNED" in output and ("TOO FAR" in output) == (not agree)
    for found in tasks.values():
        assert [result["seed"] for result in found["seeds"]] in ([0, 1], [0, 1, 2], [0, 1, 2, 3])
        for result in found["seeds"]:
            # After one step from the same weights on the same batch, losses differ by dropout, and for answers also by
            # padding, which is part of the softmax in transformers.
            apart = abs(result["fastbert"]["last_loss"] - result["transformers"]["last_loss"])
            assert apart < (0.3 if found is not tasks["answers"] else 1)
    text = "If len() is called without an argument, TypeError is raised."
    (tmp_path / "text").write_text(text)
    for task, command in TASKS.items():
        asked = ["Which exception does it name?", "--context", str(tmp_path / "text")] if task == "answers" else [text]
        assert fastbert.cli.main([command, *asked, "--model", str(tmp_path / task)]) == 0
        assert text in capsys.readouterr().out or task == "answers"


def test_what_agrees(examples, tmp_path):
    """The results that are kept do. What is worse in every seed, or too noisy to tell, does not."""
    common, training, retrieval = map(importlib.import_module, ("common", "compare_training", "compare_retrieval"))
    results = EXAMPLES / "results"
    found = json.loads((results / "compare_training.json").read_text())
    kept = {task: training.verdict(task, found[task]["seeds"]) for task in TASKS}
    assert all(one["agree"] and one["learned"] for one in kept.values())
    for result in found["tags"]["seeds"]:  # as after one step
        result["fastbert"]["scores"] = result["transformers"]["scores"] = {"f1": 0.02}
    unlearned = training.verdict("tags", found["tags"]["seeds"])
    assert unlearned["agree"] and not unlearned["learned"]
    found = json.loads((results / "compare_retrieval.json").read_text())
    before = {kind: found[kind]["before"] for kind in retrieval.KINDS}
    assert retrieval.verdict(before, dict.fromkeys(before, 0.0), found["seeds"])["proved"]
    theirs = [0.9, 0.5, 0.7]
    for ours in ([score - 0.19 for score in theirs], [0.8, 0.7, 0.6]):
        assert not common.agreement("score", {"ours": ours, "theirs": theirs}, 0.05)["agree"]
    assert common.writable(str(tmp_path / "new" / "found.json")).parent.is_dir()


def test_more_seeds_where_they_are_noisy(examples):
    common, taken = importlib.import_module("common"), []

    def results(differences):
        def run(seed):
            taken.append(seed)
            return {name: {"scores": {"f1": score}} for name, score in (("a", 0.5 + differences[seed]), ("b", 0.5))}

        return common.enough_seeds(run, ("a", "b"), 2, 0.1)

    for differences, seeds in (([0.02, 0.03], 2), ([0, 0.3, 0.1, 0.1], 4), ([-0.06, 0.06, 0, 0], 3)):
        taken.clear()
        assert len(results(differences)) == seeds and taken == list(range(seeds))


def test_marks_become_tags(examples):
    tasks = importlib.import_module("compare_tasks")
    words, tags = tasks.tagged('"a.find()" raises "ValueError" if "sub" is not "None".')
    found = {word: tasks.TAGS[tag] for word, tag in zip(words, tags, strict=True) if tag}
    function = {"a": "B-FUNCTION", ".": "I-FUNCTION", "find": "I-FUNCTION"}
    assert found == function | {"ValueError": "B-EXCEPTION", "None": "B-KEYWORD"}
    assert " ".join(words) == "a . find raises ValueError if sub is not None ."


@pytest.mark.parametrize("packed", [True, False])
def test_answers_are_read_from_scores(examples, packed):
    """A model that knows the answers, although its likeliest end is before the start, which is not an answer."""
    minilm()
    tasks = importlib.import_module("compare_tasks")
    tokenizer = get_tokenizer(minilm())
    answers = [{"text": ["three"], "answer_start": [8]}, {"text": ["five six"], "answer_start": [5]}]
    windows = QADataset(["what?"] * 2, ["one two three", "four five six seven"], answers, tokenizer)

    class Knows(torch.nn.Module):
        def forward(self, start_positions, end_positions, **batch):
            shape = (len(start_positions), int(windows.lengths.max()))
            starts, ends = (torch.zeros(shape).scatter_(1, at[:, None], 1) for at in (start_positions, end_positions))
            ends[:, 1] = 1.5
            real = torch.arange(shape[1]) < windows.lengths[:, None]
            starts, ends = (x[real] if packed else x for x in (starts, ends))
            return SimpleNamespace(start_logits=starts, end_logits=ends)

    batch = PackingCollator(tokenizer, packed=packed)([windows[0], windows[1]])
    right = [answer["text"] for answer in answers]
    assert tasks.evaluate_answers(Knows(), [batch], "cpu", windows, right) == {"exact_match": 1, "f1": 1}
    assert tasks.evaluate_answers(Knows(), [batch], "cpu", windows, right[::-1])["exact_match"] == 0


# ---- compare_retrieval

MODULE = '''"""What the module is for.

A long text below it, of more than a hundred characters, without which its headline would not be a title at all.
"""

class Reader:
    """Reads."""

    @property
    async def text(self):
        """The text of the file, without what is around it.

        More.
        """
        # a comment
        return self._text

    def nothing(self):
        """Nothing but this line, of which there is enough."""
'''


def test_pairs_of_a_file(examples, tmp_path):
    pairs = importlib.import_module("retrieval_pairs")
    (tmp_path / "module.py").write_text(MODULE)
    titles, functions = pairs.documented(tmp_path / "module.py")
    assert [(title, text[:26]) for title, text in titles] == [("What the module is for.", "A long text below it, of m")]
    code = "    async def text(self):\n        # a comment\n        return self._text"
    assert functions == [("The text of the file, without what is around it.", code)]


@pytest.mark.slow  # it parses Python's own library
def test_no_text_held_out_is_trained_on(examples):
    pairs = importlib.import_module("retrieval_pairs")
    training, held_out = pairs.parts(every=12)
    assert len(training) > 100 and all(10 < len(held) <= 100 for held in held_out.values())
    texts = [{text for pair in pairs for text in pair} for pairs in (training, *held_out.values())]
    assert texts[0].isdisjoint(texts[1] | texts[2])
    assert [len(found) for found in texts[1:]] == [2 * len(held) for held in held_out.values()]


def test_bm25_splits_names(examples):
    pytest.importorskip("bm25s")
    pairs = importlib.import_module("retrieval_pairs")
    scores = pairs.bm25(["read a text", "an iterator"], ["def readText(): pass", "def make_iterator(): pass", "None"])
    assert scores.shape == (2, 3) and scores.argmax(1).tolist() == [0, 1] and scores[0, 2] == 0
    assert pairs.of_first(scores[:, :2]) == 1 and pairs.of_first(scores[:, 1::-1]) == pytest.approx(1 / math.log2(3))


@pytest.mark.slow
def test_comparison_of_retrieval_in_one_step(examples, monkeypatch, tmp_path, capsys):
    minilm()
    example = importlib.import_module("compare_retrieval")
    few = example.parts(every=12)
    monkeypatch.setattr(example, "parts", lambda: few)
    arguments = ["--steps", "1", "--seeds", "2", "--output", str(tmp_path), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["compare_retrieval", *arguments])
    status, found = example.main(), json.loads((tmp_path / "found.json").read_text())
    assert status == (0 if found["proved"] else 1) and found["pairs"] == len(few[0])
    for result in found["seeds"]:
        ours, theirs = (result[name]["scores"] for name in example.NAMES)
        assert all(abs(ours[kind] - theirs[kind]) < 0.05 for kind in example.KINDS)  # one step from the same weights
    assert "expected" in capsys.readouterr().out
    assert SentenceEncoder.from_pretrained(tmp_path).max_length == example.LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "pretrain_bert", "compare_training"])
def test_full_size(run, tmp_path, name):
    """The exit status says that the example proves its claim. compare_retrieval takes three quarters of an hour on one
    core: examples/results has its results, and the test above runs one step of it."""
    if name.startswith("compare"):
        minilm()
    status, output = run(name, "--output", tmp_path)
    assert status == 0, output


# ---- search_python_docs


@pytest.fixture
def search(examples, monkeypatch, capsys):
    """Runs the demo on a few of its passages; returns its status and what it prints."""
    minilm()
    demo = importlib.import_module("search_python_docs")
    monkeypatch.setattr(sys, "argv", ["search_python_docs", "what does a function return without a return statement?"])
    monkeypatch.setattr(demo, "python_documentation", lambda size: python_documentation(size)[::40])
    monkeypatch.setattr(demo, "BATCH", 4)
    monkeypatch.setattr(demo, "EVERY", 2)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the demo replaces it
    return lambda: (demo.main(), capsys.readouterr().out)


@pytest.mark.slow
def test_the_demo_shows_texts_as_they_arrive_and_sorted(search):
    status, output = search()
    found = re.findall(r"(as they arrive|sorted by length)\W+(\d+)%\W+\d+\W+\d+\W+\d+\.\d+ x as fast", output)
    (first, arriving), (second, by_length) = found
    assert (first, second) == ("as they arrive", "sorted by length")
    assert int(by_length) < int(arriving)
    assert (
        status == 0
        and re.search(r"(attention|encoder_layer)_fwd: ", output)
        and "without a return statement?" in output
    )


@pytest.mark.slow
def test_the_demo_fails_where_embeddings_differ(search, monkeypatch):
    right = SentenceEncoder.embed
    monkeypatch.setattr(SentenceEncoder, "embed", lambda self, *given: right(self, *given) * 1.01)
    assert search()[0] == 1


def test_padding_of_batches(examples):
    """Batches with lengths 4 and 2, and 3: of 8 + 3 places, 9 are tokens."""
    padding = importlib.import_module("search_python_docs").padding
    assert padding([[0, 1], [2]], ["aaaa", "bb", "ccc"]) == pytest.approx(2 / 11)


@pytest.mark.parametrize("size", [1, 100, 600])
def test_no_paragraph_of_the_documentation_is_there_twice(size):
    """The pages and examples divide passages into those for training and those held out."""
    passages = [text for _, text in python_documentation(size)]
    paragraphs = [" ".join(paragraph.split()) for text in passages for paragraph in text.split("\n\n")]
    assert len(paragraphs) > 1500 and len(set(paragraphs)) == len(paragraphs)


# ---- the notebook


def cells(kind):
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_short_and_without_outputs():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    assert all(len(code.splitlines()) <= 10 for code in cells("code"))


@pytest.mark.slow
def test_cells_of_the_notebook(examples, tmp_path, monkeypatch, capsys):
    """Runs the cells one after another, with few training steps; the next test runs the notebook as it stands."""
    pytest.importorskip("IPython")
    minilm()
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in cells("code"):
        exec(code.replace("folder = 20", "folder = 3"), namespace)
    printed = capsys.readouterr().out
    assert "times as fast" in printed and namespace["steps"] == 3 and namespace["apart"] < 1e-4
    assert namespace["theirs"].forward.__self__ is namespace["theirs"]  # restored


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbclient, nbformat, _ = (pytest.importorskip(package) for package in ("nbclient", "nbformat", "ipykernel"))
    minilm()
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)  # the plot of attention
    assert not any(output.output_type == "error" for output in outputs)
