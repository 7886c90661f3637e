"""Compares metrics with numbers worked out by hand, scikit-learn, torchmetrics and pytrec_eval; errors; plots."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import DEVICE, TINY

from fastbert import BertConfig, BertForSequenceClassification, BertForTokenClassification, metrics
from fastbert.data import PackingCollator

# Class 0 is found in two of three cases, class 1 always, class 2 never. 0 is predicted three times, 1 twice.
LABELS, PREDICTIONS = [0, 0, 0, 1, 2], [0, 0, 1, 1, 0]
MATRIX = [[2, 1, 0], [0, 1, 0], [1, 0, 0]]


# ---- classes


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)[None]])
def test_precision_recall_f1_of_a_hand_made_case(form):
    macro = metrics.compute_precision_recall_f1(form(PREDICTIONS), form(LABELS))
    assert macro == pytest.approx(((2 / 3 + 1 / 2 + 0) / 3, (2 / 3 + 1 + 0) / 3, (2 / 3 + 2 / 3 + 0) / 3))
    micro = metrics.compute_precision_recall_f1(form(PREDICTIONS), form(LABELS), average="micro")
    assert micro == pytest.approx((3 / 5,) * 3)
    weighted = metrics.compute_precision_recall_f1(form(PREDICTIONS), form(LABELS), average="weighted")
    assert weighted == pytest.approx(((3 * 2 / 3 + 1 / 2) / 5, 3 / 5, (3 * 2 / 3 + 2 / 3) / 5))
    each = metrics.compute_precision_recall_f1(form(PREDICTIONS), form(LABELS), average=None, num_classes=4)
    assert each.f1.tolist() == pytest.approx([2 / 3, 2 / 3, 0, 0])
    assert metrics.compute_confusion_matrix(form(PREDICTIONS), form(LABELS), 3).tolist() == MATRIX


def test_classes_that_do_not_occur_count_where_num_classes_says_so():
    assert metrics.compute_precision_recall_f1([0, 1], [0, 1]).f1 == 1.0
    assert metrics.compute_precision_recall_f1([0, 1], [0, 1], num_classes=4).f1 == 0.5


def test_binary_is_of_class_1():
    scores = metrics.compute_precision_recall_f1([1, 1, 0, 0, 1], [1, 0, 0, 1, 1], average="binary", num_classes=2)
    assert scores == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    with pytest.raises(ValueError, match="labels has 2; expected classes from 0 to 1"):
        metrics.compute_precision_recall_f1([1, 1], [1, 2], average="binary")


def test_a_label_of_minus_100_is_left_out_whatever_was_predicted():
    scores = metrics.compute_precision_recall_f1([*PREDICTIONS, 1, -7], [*LABELS, -100, -100], num_classes=3)
    assert scores == metrics.compute_precision_recall_f1(PREDICTIONS, LABELS)


@pytest.mark.parametrize(
    "predictions, labels, error, message",
    [
        ([0, 1], [0], ValueError, r"predictions has shape \(2,\), labels \(1,\)"),
        ([], [], ValueError, "none of 0 labels"),
        ([0, 1], [-100, -100], ValueError, "none of 2 labels"),
        ([0, 3], [0, 1], ValueError, "predictions has 3; expected classes from 0 to 2"),
        ([0, 1], [0, -1], ValueError, "labels has -1; expected classes from 0 to 2"),
        ([[0.2, 0.8]], [1], TypeError, "predictions is of float64; expected integers"),
        (torch.ones(1, dtype=torch.bfloat16), [1], TypeError, "predictions is of float64; expected integers"),
    ],
)
def test_what_makes_no_sense_is_refused(predictions, labels, error, message):
    for call in (metrics.compute_precision_recall_f1, metrics.compute_confusion_matrix):
        with pytest.raises(error, match=f"{call.__name__}: {message}"):
            call(predictions, labels, num_classes=3)


def test_an_unknown_average_is_refused():
    with pytest.raises(ValueError, match="average is 'mean'; expected one of"):
        metrics.compute_precision_recall_f1([0], [0], average="mean")


# ---- models over loaders


def config(**changes):
    return BertConfig.from_dict({**TINY.to_dict(), "num_labels": 3, **changes})


def examples(of_tokens):
    """Seven examples of 2 to 14 tokens; some labels are -100."""
    found = []
    for i, length in enumerate([3, 9, 2, 14, 5, 7, 4]):
        labels = torch.randint(3, (length,))
        labels[:: i + 1] = -100
        label = labels.tolist() if of_tokens else [0, 1, 2, 2, -100, 0, 1][i]
        found.append({"input_ids": torch.randint(1, 99, (length,)).tolist(), "labels": label})
    return found


def padded(rows):
    """A padded batch, where padding has the label 1, which must not count."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": 1, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    columns = {name: [row[name] for row in rows] for name in fill}
    return {
        name: torch.tensor([x + [fill[name]] * (width - len(x)) if isinstance(x, list) else x for x in column])
        for name, column in columns.items()
    }


@pytest.mark.parametrize("collate", [PackingCollator(), padded], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_a_classifier_over_a_loader(kind, collate):
    """Equals scikit-learn on logits computed row by row. Modules return to the modes that they were in."""
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    of_tokens = kind is BertForTokenClassification
    model, rows = kind(config(initializer_range=0.5)).double().to(DEVICE).train(), examples(of_tokens)
    model.bert.embeddings.eval()
    loader = [collate(rows[:1]), collate(rows[1:5]), collate(rows[5:])]
    result = metrics.evaluate_classification_metrics(model, loader, DEVICE, 3)
    assert model.training and model.classifier.training and not model.bert.embeddings.training

    model.eval()
    logits = [model(torch.tensor([row["input_ids"]], device=DEVICE)).logits.detach().cpu() for row in rows]
    logits = torch.cat([x.flatten(0, -2) for x in logits])
    labels = torch.cat([torch.tensor(row["labels"]).flatten() for row in rows])
    kept = labels != -100
    truth, found = labels[kept].numpy(), logits[kept].argmax(-1).numpy()
    assert len(set(found)) > 1 or not of_tokens
    assert result["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-12)
    assert result["accuracy"] == pytest.approx(accuracy_score(truth, found))
    expected = precision_recall_fscore_support(truth, found, average="macro", labels=[0, 1, 2], zero_division=0)[:3]
    assert [result[name] for name in ("precision", "recall", "f1")] == pytest.approx(expected)
    assert (result["confusion_matrix"] == confusion_matrix(truth, found, labels=[0, 1, 2])).all()


def test_a_batch_without_labels_counts_for_nothing():
    """This holds although transformers' models return NaN as its loss."""
    model = transformers.BertForTokenClassification(transformers.BertConfig(**config().to_dict())).to(DEVICE)
    first, *others = (PackingCollator(packed=False, pad_token_id=0)([row]) for row in examples(True)[1:4])
    nothing = first | {"labels": torch.full_like(first["labels"], -100)}
    expected = metrics.evaluate_classification_metrics(model, others, DEVICE, 3)
    result = metrics.evaluate_classification_metrics(model, [nothing, *others], DEVICE, 3)
    assert result["loss"] == expected["loss"] > 0 and result["f1"] == expected["f1"]


def test_an_evaluation_that_cannot_be_is_refused():
    model = BertForSequenceClassification(config())
    batch = PackingCollator()(examples(of_tokens=False))
    call = metrics.evaluate_classification_metrics
    with pytest.raises(ValueError, match="4 classes were given; the model has 3"):
        call(model, [batch], "cpu", 4)
    with pytest.raises(ValueError, match="no batch"):
        call(model, [], "cpu", 3)
    with pytest.raises(ValueError, match="expected labels"):
        call(model, [{name: x for name, x in batch.items() if name != "labels"}], "cpu", 3)
    regression = BertForSequenceClassification(config(num_labels=1))
    with pytest.raises(ValueError, match="torch.float32, for logits of shape .* expected a class, an integer"):
        call(regression, [batch | {"labels": torch.rand(7)}], "cpu", 1)
    nothing = batch | {"labels": torch.full((7,), -100)}
    with pytest.raises(ValueError, match="none of 7 labels is a class"):
        call(model, [nothing], "cpu", 3)


# ---- entities

TRUTH = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG"]]
#          right                 right        one end is wrong
FOUND = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "O"]]


def test_entities_count_whole():
    scores = metrics.compute_entity_metrics(FOUND, TRUTH, "BIO")
    assert scores == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3})
    assert metrics.compute_entity_metrics(TRUTH, TRUTH) == {"precision": 1.0, "recall": 1.0, "f1": 1.0}
    assert metrics.compute_entity_metrics([["O", "O"]], [["B-X", "I-X"]])["f1"] == 0.0
    assert metrics.compute_entity_metrics([["O", "O"]], [["O", "O"]])["f1"] == 0.0


def test_schemes_differ_in_what_begins_an_entity():
    """conlleval lets I-PER begin an entity; strict BIO does not."""
    truth, found = [["B-PER", "I-PER"]], [["I-PER", "I-PER"]]
    assert metrics.compute_entity_metrics(found, truth)["f1"] == 1.0
    assert metrics.compute_entity_metrics(found, truth, "BIO")["f1"] == 0.0


def test_bioes():
    truth = [["B-PER", "I-PER", "E-PER", "O", "S-LOC"]]
    assert metrics.compute_entity_metrics(truth, truth, "BIOES")["f1"] == 1.0
    found = [["B-PER", "I-PER", "I-PER", "O", "S-LOC"]]  # without an E- tag, the first is no entity
    scores = metrics.compute_entity_metrics(found, truth, "BIOES")
    assert scores == pytest.approx({"precision": 1.0, "recall": 1 / 2, "f1": 2 / 3})


@pytest.mark.parametrize(
    "found, truth, scheme, message",
    [
        ([["O"]], [["O", "O"]], None, "predictions has 1 sentences of 1 tags, labels 1 of 2"),
        ([["O"], ["O", "O"]], [["O", "O"], ["O"]], None, "equal lengths"),
        ([], [], None, "at least one tag"),
        ([["PER"]], [["O"]], None, "predictions has the tag 'PER'"),
        ([["O"]], [["S-PER"]], "BIO", r"labels has the tag 'S-PER'; expected O|\[BI\]-.\+"),
        ([["O"]], [["O"]], "IOB", "scheme is 'IOB'; expected None, 'BIO' or 'BIOES'"),
    ],
)
def test_tags_that_make_no_sense_are_refused(found, truth, scheme, message):
    with pytest.raises(ValueError, match=message):
        metrics.compute_entity_metrics(found, truth, scheme)


def test_a_text_is_no_list_of_tags_and_a_number_no_tag():
    with pytest.raises(TypeError, match="predictions has 'O' for a sentence; expected a list of tags"):
        metrics.compute_entity_metrics(["O"], [["O"]])
    with pytest.raises(TypeError, match="labels has 0; expected the names of tags"):
        metrics.compute_entity_metrics([["O"]], [[0]])


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_entities_of_a_model(form):
    """Sentences are kept apart, and later pieces of a word and padding are ignored, over two batches."""
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    sentences = [([1, 2, 2, 0], [1, 2, -100, 0]), ([2, 3], [2, 3]), ([1], [3])]
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in sentences]
    collate = PackingCollator() if form == "packed" else padded

    class Tagger(torch.nn.Module):
        def forward(self, input_ids, **_):
            return type("Output", (), {"logits": F.one_hot(input_ids, 4).double()})

    loader = [collate(rows[:2]), collate(rows[2:])]
    scores = metrics.evaluate_entity_metrics(Tagger(), loader, "cpu", names)
    # Four entities are found: PER in the first two sentences, LOC in the second, and PER instead of LOC in the third.
    assert scores == pytest.approx({"precision": 3 / 4, "recall": 3 / 4, "f1": 3 / 4})
    strict = metrics.evaluate_entity_metrics(Tagger(), loader, "cpu", dict(enumerate(names)), "BIO")
    assert strict == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3})
    with pytest.raises(ValueError, match=r"id2label has \[1, 2\]; expected every class, from 0"):
        metrics.evaluate_entity_metrics(Tagger(), loader, "cpu", {1: "O", 2: "B-PER"})
    of_texts = lambda **_: type("Output", (), {"logits": torch.zeros(2, 4)})  # noqa: E731
    Tagger.forward = lambda self, **batch: of_texts(**batch)
    with pytest.raises(ValueError, match=r"logits have shape \(2, 4\); expected some for each token"):
        metrics.evaluate_entity_metrics(Tagger(), loader, "cpu", names)


# ---- answers


@pytest.mark.parametrize(
    "prediction, answers, exact, f1",
    [
        ("The  Eiffel-Tower!", ["eiffeltower"], 100, 100),  # case, articles, punctuation, white space
        ("the cat sat", ["a dog", "cat on a mat"], 0, 100 * 2 * 1 / (2 + 3)),  # the better of the two answers counts
        ("to be or not to be", ["be be be"], 0, 100 * 2 * 2 / (6 + 3)),  # a word counts as often as it is in both
        ("theory", ["ory"], 0, 0),  # only whole words are articles
        ("", [], 100, 100),  # rightly no answer
        ("something", [], 0, 0),
        ("", ["something"], 0, 0),
        ("", ["the", "cat"], 0, 0),  # if others have an answer, one of articles alone does not count
        ("the", ["a", "..."], 100, 100),  # nothing but articles and punctuation is no answer
        ("cat", {"text": ["a cat"], "answer_start": [4]}, 100, 100),  # as data sets have them
    ],
)
def test_answers_of_squad(prediction, answers, exact, f1):
    scores = metrics.compute_squad_metrics([prediction], [answers])
    assert scores == pytest.approx({"exact_match": exact, "f1": f1})


def test_answers_are_as_torchmetrics_counts_them():
    squad = pytest.importorskip("torchmetrics.text").SQuAD()
    words = ["the", "red", "red", "house", "a", "river", "1,000", "U.S."]
    generator = np.random.default_rng(0)
    text = lambda: " ".join(generator.choice(words, generator.integers(1, 6)))  # noqa: E731
    found = {f"q{i}": text() for i in range(200)}
    right = {name: [f"{text()} river", f"{text()} red"] for name in found}
    expected = squad(
        [{"prediction_text": answer, "id": name} for name, answer in found.items()],
        [{"answers": {"answer_start": [0, 0], "text": texts}, "id": name} for name, texts in right.items()],
    )
    scores = metrics.compute_squad_metrics(found, dict(reversed(right.items())))
    assert scores == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert 0 < scores["exact_match"] < scores["f1"] < 100


@pytest.mark.parametrize(
    "found, right, message",
    [
        ([], [], "0 predictions for 0 questions"),
        (["a", "b"], [["a"]], "2 predictions for 1 questions; only one of them has 1"),
        ({"q1": "x"}, {"q2": ["x"]}, "1 predictions for 1 questions; only one of them has 'q"),
        (["x"], ["x"], "the answers to a question are 'x'; expected a list"),
    ],
)
def test_answers_that_do_not_match_questions_are_refused(found, right, message):
    with pytest.raises(ValueError, match=message):
        metrics.compute_squad_metrics(found, right)


@pytest.mark.parametrize(("found", "right", "given"), [([None], [["x"]], "NoneType"), (["x"], [["x", 3]], "int")])
def test_answers_are_texts(found, right, given):
    with pytest.raises(TypeError, match=f"an answer is a {given}; expected a text"):
        metrics.compute_squad_metrics(found, right)


# ---- rankings


@pytest.mark.parametrize("k", [1, 3, 50])
def test_rankings_by_plain_formulas(k):
    from sklearn.metrics import ndcg_score

    generator = np.random.default_rng(k)
    scores = generator.permuted(np.linspace(-3, 3, 12 * 9).reshape(12, 9), axis=1)
    relevance = generator.integers(0, 4, (12, 9)) * (generator.random((12, 9)) < 0.4)
    relevance[0] = 0
    assert metrics.ndcg_at_k(scores, relevance, k) == pytest.approx(ndcg_score(relevance, scores, k=k))
    reciprocal = recall = 0
    for row, truth in zip(scores.tolist(), relevance.tolist(), strict=True):
        best = [truth[i] for i in sorted(range(9), key=lambda i: -row[i])][:k]
        reciprocal += next((1 / rank for rank, found in enumerate(best, 1) if found), 0)
        recall += sum(map(bool, best)) / max(sum(map(bool, truth)), 1)
    assert metrics.mrr_at_k(torch.tensor(scores), torch.tensor(relevance), k) == pytest.approx(reciprocal / 12)
    assert metrics.recall_at_k(scores.tolist(), relevance.tolist(), k) == pytest.approx(recall / 12)


def test_rankings_are_those_of_trec_eval_with_ties():
    """trec_eval sorts equal scores by descending document name, so descending names keep the given order."""
    trec = pytest.importorskip("pytrec_eval")
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 4, (40, 25)) / 4
    relevance = generator.integers(0, 4, (40, 25)) * (generator.random((40, 25)) < 0.3)
    relevance[:, -1] = 1  # trec_eval has no value for queries without relevant documents
    name = lambda i: f"{99 - i:02}"  # noqa: E731
    of_query = lambda table, number: {  # noqa: E731
        str(q): {name(i): number(x) for i, x in enumerate(row)} for q, row in enumerate(table.tolist())
    }
    measures = {"ndcg_cut.1,7,50", "recall.1,7,50", "recip_rank"}
    results = trec.RelevanceEvaluator(of_query(relevance, int), measures).evaluate(of_query(scores, float)).values()
    mean = lambda measure: np.mean([result[measure] for result in results])  # noqa: E731
    for k in (1, 7, 50):
        assert metrics.ndcg_at_k(scores, relevance, k) == pytest.approx(mean(f"ndcg_cut_{k}"))
        assert metrics.recall_at_k(scores, relevance, k) == pytest.approx(mean(f"recall_{k}"))
    assert metrics.mrr_at_k(scores, relevance, 25) == pytest.approx(mean("recip_rank"))


def test_rankings_of_hand_made_cases():
    """Queries have different numbers of documents, equal scores, and a document without a judgement."""
    scores, relevance = [[0.9, 0.8, 0.7], [1.0, 1.0], [3.0, 2.0, 1.0]], [[0, 3, 1], [0, 1], [-100, 0, 1]]
    first = (3 / np.log2(3) + 1 / 2) / (3 + 1 / np.log2(3))
    assert metrics.ndcg_at_k(scores, relevance) == pytest.approx((first + 2 / np.log2(3)) / 3)
    assert metrics.mrr_at_k(scores, relevance) == 0.5 and metrics.mrr_at_k(scores, relevance, 1) == 0
    assert metrics.recall_at_k(scores, relevance, 2) == pytest.approx((1 / 2 + 1 + 1) / 3)


@pytest.mark.parametrize("metric", [metrics.ndcg_at_k, metrics.mrr_at_k, metrics.recall_at_k])
@pytest.mark.parametrize(
    ("scores", "relevance", "k", "words"),
    [
        ([[1.0]], [[1]], 0, "k is 0; expected a whole number, at least 1"),
        ([[1.0]], [[1]], 1.5, "k is 1.5; expected a whole number"),
        ([], [], 1, "scores of 0 queries, relevance of 0; expected equal numbers above 0"),
        ([[1.0]], [[1], [1]], 1, "scores of 1 queries, relevance of 2"),
        ([1.0], [1], 1, r"scores\[0\] has shape \(\), relevance\[0\] \(\); expected one number"),
        ([[1.0, 2.0]], [[1]], 1, r"scores\[0\] has shape \(2,\), relevance\[0\] \(1,\)"),
        ([[1.0], [2.0]], [[1], [-100]], 1, "query 1 has 0 documents with a relevance"),
        ([[float("nan"), 1.0]], [[1, 0]], 1, "no score that is NaN"),
        ([[1.0]], [[-1]], 1, "no relevance below 0 but -100"),
    ],
)
def test_rankings_that_make_no_sense_are_refused(metric, scores, relevance, k, words):
    with pytest.raises(ValueError, match=f"{metric.__name__}: .*{words}"):
        metric(scores, relevance, k)


# ---- plots and packages


def test_a_confusion_matrix_is_drawn(tmp_path):
    metrics.plot_confusion_matrix(np.array(MATRIX), tmp_path / "matrix.png", ["cat", "dog", "cow"])
    metrics.plot_confusion_matrix(np.eye(2) / 2, tmp_path / "shares.png")
    for name in ("matrix", "shares"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"matrix has shape \(3,\); expected \(C, C\)"):
        metrics.plot_confusion_matrix([1, 2, 3], tmp_path / "no.png")
    with pytest.raises(ValueError, match="2 names; expected 3"):
        metrics.plot_confusion_matrix(MATRIX, tmp_path / "no.png", ["cat", "dog"])


def test_losses_are_drawn(tmp_path):
    (tmp_path / "train.csv").write_text("step,loss\n1,3.5\n2,3.0\n")
    (tmp_path / "evaluation.csv").write_text("step,accuracy\n2,0.5\n")  # a metric without a loss
    path = metrics.plot_losses(tmp_path)
    assert path == tmp_path / "losses.png" and path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError):
        metrics.plot_losses(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "missing, command, call",
    [
        ("sklearn", "scikit-learn", lambda: metrics.compute_confusion_matrix([0], [0], 1)),
        ("seqeval", "seqeval", lambda: metrics.compute_entity_metrics([["O"]], [["O"]])),
        ("matplotlib", "matplotlib", lambda: metrics.plot_losses(".")),
    ],
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, missing, command, call):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {command}"):
        call()
