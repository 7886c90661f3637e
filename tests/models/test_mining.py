"""Hard negatives compared with plain loops over all scores and with those that sentence-transformers mines."""

import random
import warnings

import numpy as np
import pytest
import torch
from small_models import TINY, minilm, sentence_encoder

from fastbert import BertForSequenceClassification
from fastbert.data import ContrastiveCollator, ContrastiveDataset, get_tokenizer
from fastbert.inference import CrossEncoder, mine_hard_negatives, similarity

WORDS = "red blue green sun moon star tree leaf root sand sea sky stone cloud river".split()


def texts_of(seed, count, words=3):
    generator = np.random.default_rng(seed)
    return list(dict.fromkeys(" ".join(generator.choice(WORDS, words)) for _ in range(count)))


ANCHORS, ANSWERS = texts_of(0, 12, 2), texts_of(1, 30)
PAIRS = {  # three anchors have several answers, one of them has one twice; some anchors share one
    "question": [*ANCHORS[:10], ANCHORS[0], ANCHORS[3], ANCHORS[5], ANCHORS[0], ANCHORS[0]],
    "answer": [*ANSWERS[:9], ANSWERS[2], ANSWERS[10], ANSWERS[0], ANSWERS[11], ANSWERS[10], ANSWERS[2]],
}
CORPUS = [*ANSWERS[5:], *texts_of(2, 20), ANCHORS[1]]
OPTIONS = {
    "plain": {},
    "ranks": {"range_min": 2, "range_max": 9, "num_negatives": 2},
    "max": {"max_score": 0.9},
    "min": {"min_score": 0.8, "num_negatives": 2},
    "absolute": {"absolute_margin": 0.02, "range_min": 1},
    "relative": {"relative_margin": 0.05, "num_negatives": 4},
    "random": {"sampling": "random", "range_max": 20, "num_negatives": 4, "max_score": 0.93},
    "few": {"sampling": "random", "min_score": 0.88, "range_max": 30, "num_negatives": 5},
    "whole corpus": {"range_max": 500, "num_negatives": 9, "range_min": 40},
    "all": {"range_min": 1, "range_max": 25, "max_score": 0.95, "min_score": 0.6, "absolute_margin": 0.0}
    | {"relative_margin": 0.01, "sampling": "random", "num_negatives": 3},
}


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(minilm())


@pytest.fixture(scope="module")
def encoder():
    """Its vectors are not normalised. Mining normalises them, after which "dot" equals the cosine of `scores_of`."""
    return sentence_encoder(prompts={"query": "find: "}, normalize=False, similarity="dot")


@pytest.fixture(scope="module")
def reranker(tokenizer):
    torch.manual_seed(1)
    config = TINY.changed(vocab_size=30522, initializer_range=0.3, num_labels=1)
    return CrossEncoder(BertForSequenceClassification(config), tokenizer)


def scores_of(encoder, reranker, anchor, texts):
    if reranker is not None:
        return reranker.predict([(anchor, text) for text in texts]).tolist()
    return similarity(encoder.encode([anchor], prompt="find: "), encoder.encode(texts))[0].tolist()


def by_loops(encoder, reranker, corpus, num_negatives=3, range_min=0, range_max=None, **given):
    """Computes every score of every anchor, then applies the rules one by one."""
    own = {}
    for anchor, answer in zip(*PAIRS.values(), strict=True):
        own.setdefault(anchor, []).append(answer)
    most = max(map(len, own.values()))
    limited = {"max_score", "absolute_margin", "relative_margin"} | ({"min_score"} if reranker else set())
    if range_max is None:
        range_max = range_min + most + num_negatives * (10 if limited & given.keys() else 1)
    corpus, generator, rows = list(dict.fromkeys([*corpus, *PAIRS["answer"]])), random.Random(7), []
    for anchor, answers in own.items():
        answers = list(dict.fromkeys(answers))
        near = dict(zip(corpus, scores_of(encoder, None, anchor, corpus), strict=True))
        texts = sorted(corpus, key=lambda text: -near[text])[: range_max + most]
        scores = dict(zip([*texts, *answers], scores_of(encoder, reranker, anchor, [*texts, *answers]), strict=True))
        worst = min(scores[answer] for answer in answers)
        kept = [
            text
            for text in sorted(texts, key=lambda text: -scores[text])
            if text not in answers
            and scores[text] <= given.get("max_score", 9)
            and scores[text] >= given.get("min_score", -9)
            and scores[text] <= worst - given.get("absolute_margin", -9)
            and ("relative_margin" not in given or scores[text] <= worst - abs(worst) * given["relative_margin"])
        ][range_min:range_max]
        if given.get("sampling") == "random":
            drawn = generator.sample(range(max(len(kept), num_negatives)), num_negatives)
            kept = [kept[i] for i in sorted(drawn) if i < len(kept)]
        rows += [(anchor, answer, kept[:num_negatives], scores) for answer in answers]
    return rows


@pytest.mark.parametrize("rescored", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_negatives_by_plain_loops(encoder, reranker, name, rescored):
    options, reranker = OPTIONS[name], reranker if rescored else None
    count = options.get("num_negatives", 3)
    rows = by_loops(encoder, reranker, CORPUS, **options)
    found = mine_hard_negatives(encoder, PAIRS, CORPUS, **options, seed=7, cross_encoder=reranker)
    whole = [row for row in rows if len(row[2]) == count]
    names = ["question", "answer", *(f"negative_{i + 1}" for i in range(count))]
    assert list(found.columns) == names
    assert list(zip(*found.columns.values(), strict=True)) == [(*row[:2], *row[2]) for row in whole]
    expected = [[row[3][text] for text in (row[1], *row[2])] for row in whole]
    assert np.allclose(np.array(found.scores or [[]]), np.array(expected or [[]]), atol=1e-5)

    triplets = mine_hard_negatives(
        encoder, PAIRS, CORPUS, **options, seed=7, cross_encoder=reranker, triplets=True, tokens_per_batch=64
    )
    expected = [(anchor, answer, text) for anchor, answer, texts, _ in rows for text in texts]
    assert list(zip(*triplets.columns.values(), strict=True)) == expected
    assert list(triplets.columns) == ["question", "answer", "negative"]
    assert [len(row) for row in triplets.scores] == [2] * len(expected)
    if not rescored:  # the options have an effect, or none, as intended
        assert expected and (len(whole) < len(rows)) == (name not in ("plain", "ranks", "max", "random"))


@pytest.mark.parametrize("rescored", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_negatives_of_sentence_transformers(tmp_path, encoder, reranker, name, rescored):
    datasets = pytest.importorskip("datasets", reason="sentence-transformers mines with the package datasets")
    from sentence_transformers import CrossEncoder as TheirCrossEncoder
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives as theirs

    options = OPTIONS[name]
    if rescored and not {"max_score", "min_score", "absolute_margin", "relative_margin"} & options.keys():
        pytest.skip("without bounds sentence-transformers does not rescore")
    encoder.save_pretrained(tmp_path / "encoder")
    reranker.save_pretrained(tmp_path / "reranker")
    model = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    cross = TheirCrossEncoder(str(tmp_path / "reranker"), device="cpu") if rescored else None
    own = {"cross_encoder": reranker if rescored else None, "seed": 7}
    renamed = options | {"sampling_strategy": options.get("sampling", "top")}
    renamed.pop("sampling", None)
    for triplets in (False, True):
        random.seed(7)
        form = {"output_format": "triplet" if triplets else "n-tuple", "output_scores": True, "verbose": False}
        rows = datasets.Dataset.from_dict(PAIRS)
        expected = theirs(rows, model, corpus=CORPUS, cross_encoder=cross, **renamed, **form)
        expected = expected.to_dict()
        found = mine_hard_negatives(encoder, PAIRS, CORPUS, **options, **own, triplets=triplets)
        scores = expected.pop("scores")
        assert found.columns == expected
        assert np.allclose(np.array(found.scores or [[]]), np.array(scores or [[]]), atol=1e-5)


def test_without_a_corpus_the_positives_are_it(encoder):
    found = mine_hard_negatives(encoder, PAIRS)
    assert set(found.columns["negative_1"]) <= set(PAIRS["answer"]) and len(found.scores) == 14  # 15 rows, 1 repeated
    own = {anchor: {b for a, b in zip(*PAIRS.values(), strict=True) if a == anchor} for anchor in PAIRS["question"]}
    for anchor, *_, negative in zip(*found.columns.values(), strict=True):
        assert negative not in own[anchor]


def test_mined_columns_train(encoder, tokenizer):
    found = mine_hard_negatives(encoder, PAIRS, num_negatives=2)
    batch = ContrastiveCollator()(list(ContrastiveDataset(found.columns, tokenizer, scores=found.scores)))
    assert batch["columns"] == 4 and batch["labels"].shape == (14, 3)


def test_prompts_are_put_before_texts(encoder):
    plain = mine_hard_negatives(encoder, PAIRS, query_prompt="", corpus_prompt="a b c ")
    with_prompts = {"question": PAIRS["question"], "answer": ["a b c " + text for text in PAIRS["answer"]]}
    again = mine_hard_negatives(encoder, with_prompts, query_prompt="")
    assert [["a b c " + text for text in plain.columns["negative_1"]]] == [again.columns["negative_1"]]
    assert plain.columns != mine_hard_negatives(encoder, PAIRS).columns


@pytest.mark.parametrize(
    ("pairs", "options", "error", "words"),
    [
        ([("a", "b")], {}, ValueError, "pairs is 'list'; expected two columns"),
        ({"a": ["b"]}, {}, ValueError, r"pairs is \['a'\]; expected two columns"),
        ({"a": ["b"], "c": ["d", "e"]}, {}, ValueError, "1 anchors and 2 positives; expected equal numbers above 0"),
        ({"a": [], "c": []}, {}, ValueError, "0 anchors and 0 positives"),
        ({"a": "b", "c": ["d"]}, {}, TypeError, "a is a str; expected several strings"),
        ({"a": ["b"], "c": [None]}, {}, TypeError, r"c\[0\] is a NoneType"),
        (
            PAIRS,
            {"num_negatives": 0},
            ValueError,
            "num_negatives is 0, range_min 0, range_max 4; expected whole numbers, at least 1",
        ),
        (PAIRS, {"range_min": -1}, ValueError, "range_min -1"),
        (PAIRS, {"range_min": 3, "range_max": 5}, ValueError, "range_min 3, range_max 5; .*room for num_negatives"),
        (PAIRS, {"num_negatives": 1.5}, ValueError, "num_negatives is 1.5.*; expected whole numbers"),
        ({"a": ["b"], "negative_2": ["c"]}, {}, ValueError, "pairs has a column 'negative_2', as the negatives have"),
        ({"a": ["b"], "negative": ["c"]}, {"triplets": True}, ValueError, "pairs has a column 'negative', as"),
        (PAIRS, {"sampling": "best"}, ValueError, "sampling is 'best'; expected 'top' or 'random'"),
        (PAIRS, {"prompt": "find: "}, TypeError, "prompt is given; expected query_prompt and corpus_prompt"),
        (PAIRS, {"corpus": "a text"}, TypeError, "corpus is a str; expected several strings"),
    ],
)
def test_what_cannot_be_mined_is_refused(encoder, pairs, options, error, words):
    with pytest.raises(error, match=words):
        mine_hard_negatives(encoder, pairs, **options)


def test_pairs_that_are_left_out_are_counted(encoder):
    pairs = {"anchor": ["cat", "dog"], "positive": ["a cat sits", "a dog barks"]}
    with pytest.warns(UserWarning, match="2 of 2 pairs have fewer than 9 negatives: left out"):
        assert not mine_hard_negatives(encoder, pairs, num_negatives=9).columns["anchor"]


def test_scores_that_are_no_numbers_are_an_error(encoder, monkeypatch):
    monkeypatch.setattr(encoder, "similarity", lambda a, b: torch.full((len(a), len(b)), torch.nan))
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"score of vectors\[0\] and others\[\d\] is NaN"):
        mine_hard_negatives(encoder, PAIRS)
