"""Evaluation of encoders by exact search, retrieval, reranking and similarity, as sentence-transformers does it."""

import numpy as np
import pytest
import torch
from small_models import TINY, assert_like, minilm

from fastbert import BertForSequenceClassification, BertForSparseEmbedding, BertModel
from fastbert.data import ContrastiveCollator, ContrastiveDataset, create_dataloader, get_tokenizer
from fastbert.inference import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceEncoder,
    SparseEncoder,
    mine_hard_negatives,
    nearest,
    similarity,
)
from fastbert.metrics import evaluate_reranking_metrics, evaluate_retrieval_metrics, evaluate_sts_metrics, ndcg_at_k
from fastbert.training import AMPTrainer, Best, ContrastiveModel, InBatchNegatives, evaluating

WORDS = "red blue green sun moon star tree leaf root sand sea sky stone cloud river".split()
PROMPTS = {"query": "find: ", "document": "text about "}


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(minilm())


def small(tokenizer, cls=BertModel, **changes):
    """A model with random weights, large enough for every part to matter."""
    torch.manual_seed(0)
    config = TINY.changed(vocab_size=30522, hidden_dropout_prob=0.0, initializer_range=0.3, **changes)
    return cls(config, add_pooling_layer=False) if cls is BertModel else cls(config)


def texts_of(seed, count, words=4):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, words)) for _ in range(count)]


def theirs(directory):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu")


# ---- search


@pytest.mark.parametrize("k", [1, 4, 50])
@pytest.mark.parametrize("block", [(256, 16384), (3, 5), (1, 1)])
def test_nearest_is_a_sort(k, block):
    """Vectors of small integers give many equal scores, which keep their order."""
    vectors, others = torch.randint(-1, 2, (7, 4)).double(), torch.randint(-1, 2, (31, 4)).double()
    dot = lambda a, b: a @ b.T  # noqa: E731
    expected = dot(vectors, others).sort(descending=True, stable=True)
    scores, indices = nearest(vectors, others, k, dot, block=block)
    assert torch.equal(scores, expected.values[:, :k]) and torch.equal(indices, expected.indices[:, :k])
    assert len(scores.unique()) < scores.numel() and scores.shape == (7, min(k, 31))
    assert torch.equal(nearest(vectors, others, k)[0], similarity(vectors, others).topk(min(k, 31)).values)


def test_nearest_never_has_all_scores():
    shapes = []

    def measure(a, b):
        shapes.append((len(a), len(b)))
        return a @ b.T

    nearest(torch.randn(10, 3), torch.randn(100, 3), 5, measure, block=(4, 30))
    assert {rows for rows, _ in shapes} == {4, 2} and {columns for _, columns in shapes} == {0, 30, 10}
    wrong = [({"k": k}, f"k is {k}; expected an int") for k in (0, 1.5, True)]
    for given, words in (*wrong, ({"k": 1, "block": (0, 1)}, r"block is \(0, 1\)")):
        with pytest.raises(ValueError, match=f"nearest: .*{words}"):
            nearest(torch.randn(2, 3), torch.randn(2, 3), **given)
    others = torch.randn(9, 3)
    others[[4, 6]] = torch.nan
    with pytest.raises(ValueError, match=r"score of vectors\[0\] and others\[4\] is NaN"):
        nearest(torch.randn(2, 3), others, 3, block=(1, 2))
    with pytest.raises(ValueError, match=r"others \(2, 4\); expected \(N, C\)"):
        nearest(torch.randn(2, 3), torch.randn(2, 4), 1)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_pairwise_similarity_is_sentence_transformers(tokenizer, measure):
    from sentence_transformers.util import SimilarityFunction

    encoder = SentenceEncoder(small(tokenizer), tokenizer, normalize=False, similarity=measure)
    a, b = encoder.encode(texts_of(0, 9)), encoder.encode(texts_of(1, 9))
    pairwise = SimilarityFunction.to_similarity_pairwise_fn(measure)
    assert_like(encoder.similarity_pairwise(a, b), pairwise(a.double(), b.double()), pairwise(a, b))
    with pytest.raises(ValueError, match=r"vectors has shape \(9, 48\), others \(8, 48\); expected equal ones"):
        encoder.similarity_pairwise(a, b[:8])


@pytest.mark.parametrize("prompts", [{}, PROMPTS, {"passage": "p "}])
def test_queries_and_documents_have_their_prompts(tmp_path, tokenizer, prompts):
    """Prompts are those of sentence-transformers, never the default one, unless one is given by name or text."""
    options = {"prompts": prompts | {"other": "o "}, "default_prompt_name": "other"}
    encoder, texts = SentenceEncoder(small(tokenizer), tokenizer, **options), texts_of(0, 3)
    encoder.save_pretrained(tmp_path)
    model = theirs(tmp_path)
    for method in ("encode_query", "encode_document"):
        for chosen in ({}, {"prompt_name": "other"}, {"prompt": "mine "}, {"prompt": ""}):
            found, expected = (getattr(m, method)(texts, **chosen) for m in (encoder, model))
            assert np.abs(found.numpy() - expected).max() < 1e-6, (method, chosen)


# ---- evaluators


def test_retrieval_is_as_sentence_transformers_evaluates_it(tmp_path, tokenizer):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    encoder = SentenceEncoder(small(tokenizer), tokenizer, prompts=PROMPTS, similarity="dot", normalize=False)
    encoder.save_pretrained(tmp_path)
    corpus = {f"d{i}": text for i, text in enumerate(dict.fromkeys(texts_of(0, 60)))}
    queries = {f"q{i}": text for i, text in enumerate(texts_of(1, 9, words=2))}
    chosen = np.random.default_rng(2)
    relevant = {query: set(chosen.choice(list(corpus), 1 + i % 4).tolist()) for i, query in enumerate(queries)}
    ks = [1, 3, 20]
    evaluator = InformationRetrievalEvaluator(
        queries, corpus, relevant, mrr_at_k=ks, ndcg_at_k=ks, precision_recall_at_k=ks, corpus_chunk_size=7
    )
    expected = evaluator(theirs(tmp_path))
    found = evaluate_retrieval_metrics(encoder, queries, corpus, relevant, k=ks)
    names = [(name, k) for name in ("ndcg", "mrr", "recall") for k in ks]
    assert found == pytest.approx({f"{name}_at_{k}": expected[f"dot_{name}@{k}"] for name, k in names})
    assert 0 < found["recall_at_1"] < found["recall_at_20"] < 1

    place = {document: i for i, document in enumerate(corpus)}
    by_place = [[place[document] for document in relevant[query]] for query in queries]
    lists = evaluate_retrieval_metrics(encoder, list(queries.values()), list(corpus.values()), by_place, ks)
    assert lists == pytest.approx(found)
    assert evaluate_retrieval_metrics(encoder, queries, corpus, relevant, 3) == {
        n: x for n, x in found.items() if n.endswith("_3")
    }
    encoder.prompts.clear()
    plain = evaluate_retrieval_metrics(encoder, queries, corpus, relevant, ks)
    prompts = {"query_prompt": PROMPTS["query"], "corpus_prompt": PROMPTS["document"]}
    assert evaluate_retrieval_metrics(encoder, queries, corpus, relevant, ks, **prompts) == pytest.approx(found)
    assert plain != pytest.approx(found)


def test_graded_documents_count_by_their_grade(tokenizer):
    """Relevant documents that were not found lower nDCG and recall; the best possible order gives 1."""
    encoder = SentenceEncoder(small(tokenizer), tokenizer)
    corpus = list(dict.fromkeys(texts_of(0, 30)))
    cosines = similarity(encoder.encode(corpus[:2]), encoder.encode(corpus)).argsort(descending=True).tolist()
    assert [row[0] for row in cosines] == [0, 1]
    first, second = cosines
    relevant = [{first[0]: 1, first[1]: 2, first[9]: 3, first[3]: 0}, {second[0]: 2, second[1]: 1}]
    found = evaluate_retrieval_metrics(encoder, corpus[:2], corpus, relevant, k=[2, 30])
    gained, best = 1 + 2 / np.log2(3), 3 + 2 / np.log2(3)
    assert found["ndcg_at_2"] == pytest.approx((gained / best + 1) / 2)
    assert found["recall_at_2"] == pytest.approx((2 / 3 + 1) / 2) and found["recall_at_30"] == found["mrr_at_2"] == 1
    none = evaluate_retrieval_metrics(encoder, corpus[:2], corpus, [[], [1]], k=2)
    assert none == {"ndcg_at_2": 0.5, "mrr_at_2": 0.5, "recall_at_2": 0.5}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (("a text", ["a"], [[0]]), TypeError, "queries is a str; expected several"),
        ((["a"], "a text", [[0]]), TypeError, "corpus is a str"),
        ((["a"], ["a"], [[1]]), ValueError, "query 0 has the document 1, which corpus lacks"),
        (({"q": "a"}, {"d": "a"}, {"q": {"e": 1}}), ValueError, "query 'q' has the document 'e'"),
        ((["a", "b"], ["a"], [[0]]), ValueError, "2 queries, relevant documents for 1; only one of them has 1;"),
        (([], ["a"], []), ValueError, "0 queries, .*; expected the same, and at least one"),
        (({"q": "a"}, {"1": "a"}, {"q": "1"}), TypeError, "the relevant documents of 'q' are '1'; expected a list"),
        ((["a"], ["a", "b"], [[True, False]]), TypeError, "a relevant document of 0 is True; expected an id"),
        ((["a"], ["a", "b"], [[1.0]]), TypeError, "a relevant document of 0 is 1.0"),
        (({"q": "a"}, ["a"], {"q": 0}), TypeError, "the relevant documents of 'q' are 0; expected a list"),
        ((["a"], ["a"], [[0]], 0), ValueError, "k is 0; expected a whole number, at least 1"),
        ((["a"], ["a"], [[0]], []), ValueError, r"k is \[\]; expected a whole number, at least 1"),
        ((["a"], ["a"], [{0: -1}]), ValueError, "no relevance below 0"),
    ],
)
def test_a_retrieval_that_makes_no_sense_is_refused(tokenizer, given, error, words):
    with pytest.raises(error, match=words):
        evaluate_retrieval_metrics(SentenceEncoder(small(tokenizer), tokenizer), *given)


@pytest.mark.parametrize("kind", ["sparse", "several vectors"])
def test_other_encoders_are_evaluated_by_their_own_similarity(tokenizer, kind):
    if kind == "sparse":
        encoder = SparseEncoder(small(tokenizer, BertForSparseEmbedding), tokenizer)
    else:
        encoder = MultiVectorEncoder(small(tokenizer), tokenizer)
    queries, corpus = texts_of(0, 5, words=2), list(dict.fromkeys(texts_of(1, 30)))
    relevance = (torch.rand(5, len(corpus), generator=torch.Generator().manual_seed(0)) < 0.2).long().tolist()
    asked, vectors = encoder.encode_query(queries), encoder.encode_document(corpus)
    expected = ndcg_at_k(encoder.similarity(asked, vectors).tolist(), relevance, 3)
    found = evaluate_retrieval_metrics(encoder, queries, corpus, [np.flatnonzero(row).tolist() for row in relevance], 3)
    again = evaluate_reranking_metrics(encoder, queries, [corpus] * 5, relevance, 3)
    assert 0 < expected < 1 and found["ndcg_at_3"] == pytest.approx(expected) == again["ndcg_at_3"]
    with pytest.raises(TypeError, match=f"encoder is a fastbert.{type(encoder).__name__}; expected a fastbert.Sent"):
        mine_hard_negatives(encoder, {"anchor": queries, "positive": queries})


@pytest.mark.parametrize("kind", [SentenceEncoder, CrossEncoder])
def test_reranking_is_as_sentence_transformers_evaluates_it(tmp_path, tokenizer, kind):
    from sentence_transformers import CrossEncoder as TheirCrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    from sentence_transformers.sentence_transformer.evaluation import RerankingEvaluator

    queries, relevance = texts_of(0, 6, words=2), [[1, 1], [0, 1, 0], [1, 0, 0, 0, 1], [0, 0, 1], [0, 1], [1, 0, 0, 1]]
    documents = [texts_of(10 + i, len(row)) for i, row in enumerate(relevance)]
    if kind is SentenceEncoder:
        ranker = SentenceEncoder(small(tokenizer), tokenizer)
    else:
        ranker = CrossEncoder(small(tokenizer, BertForSequenceClassification, num_labels=1), tokenizer)
    ranker.save_pretrained(tmp_path)
    samples = [
        {"query": query}
        | {
            name: [t for t, r in zip(texts, row, strict=True) if r == i]
            for i, name in enumerate(("negative", "positive"))
        }
        for query, texts, row in zip(queries, documents, relevance, strict=True)
    ]
    del samples[0]  # sentence-transformers leaves out a query without negatives
    for k in (1, 3):
        found = evaluate_reranking_metrics(ranker, queries[1:], documents[1:], relevance[1:], k)
        if kind is SentenceEncoder:
            expected = RerankingEvaluator(samples, at_k=k)(theirs(tmp_path))
        else:
            pairs = [{name: sample[name] for name in ("query", "positive", "negative")} for sample in samples]
            expected = CrossEncoderRerankingEvaluator(pairs, at_k=k)(TheirCrossEncoder(str(tmp_path), device="cpu"))
        names = {f"ndcg_at_{k}": f"ndcg@{k}", f"mrr_at_{k}": f"mrr@{k}"}
        assert {name: found[name] for name in names} == pytest.approx({n: expected[of] for n, of in names.items()})
        assert 0 < found[f"ndcg_at_{k}"] < 1
    assert evaluate_reranking_metrics(ranker, queries[:1], documents[:1], relevance[:1], 1)["recall_at_1"] == 0.5
    with pytest.raises(ValueError, match="6 queries have 19 documents, 5 have 17 relevances; expected one for each"):
        evaluate_reranking_metrics(ranker, queries, documents, relevance[1:])
    with pytest.raises(ValueError, match="2 queries have 5 documents, 2 have 5 relevances"):
        evaluate_reranking_metrics(ranker, queries[:2], documents[:2], relevance[1::-1])


def test_sts_is_as_sentence_transformers_evaluates_it(tmp_path, tokenizer):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    encoder = SentenceEncoder(small(tokenizer), tokenizer, similarity="manhattan", normalize=False, prompts=PROMPTS)
    encoder.save_pretrained(tmp_path)
    texts, others = texts_of(0, 20), texts_of(1, 20)
    texts[3], others[3] = texts[5], others[5]  # ties of similarities, as there are of scores
    scores = (np.random.default_rng(0).integers(0, 6, 20) / 5).tolist()
    expected = EmbeddingSimilarityEvaluator(texts, others, scores, similarity_fn_names=["manhattan"])(theirs(tmp_path))
    found = evaluate_sts_metrics(encoder, texts, others, scores)
    assert found == pytest.approx({name: expected[f"{name}_manhattan"] for name in ("spearman", "pearson")}, rel=1e-5)
    assert 0 < abs(found["spearman"]) < 1 and found["spearman"] != found["pearson"]
    assert evaluate_sts_metrics(encoder, ["a", "a"], ["b", "b"], [0, 1]) == {"spearman": 0, "pearson": 0}
    for given in (([1, 2], [3]), ([1, 1], [3, 4]), ([1, float("nan")], [3, 4])):
        with pytest.raises(ValueError, match="evaluate_sts_metrics: there are 2 and .*; expected a finite score"):
            evaluate_sts_metrics(encoder, texts[:2], list(map(str, given[1])), given[0])
    with pytest.raises(TypeError, match="encoder is a MultiVectorEncoder; expected a SentenceEncoder or SparseEncoder"):
        evaluate_sts_metrics(MultiVectorEncoder(small(tokenizer), tokenizer), texts, others, scores)


def test_training_keeps_the_checkpoint_that_finds_most(tmp_path, tokenizer):
    """evaluate_retrieval_metrics serves as AMPTrainer's metric; afterwards the model is in training mode again."""
    anchors = texts_of(0, 12, words=3)
    columns = {"anchor": anchors, "positive": [" ".join(reversed(text.split())) for text in anchors]}
    dataset = ContrastiveDataset(columns, tokenizer)
    loader = create_dataloader(dataset, ContrastiveCollator(), 6, drop_last=True)
    model = ContrastiveModel(small(tokenizer), InBatchNegatives())
    found = []

    def metric(model, loader, device):
        with evaluating(model):
            encoder = SentenceEncoder(model.encoder, tokenizer)
            found.append(evaluate_retrieval_metrics(encoder, anchors, columns["positive"], [[i] for i in range(12)], 1))
        assert model.training and model.encoder.training
        return found[-1]

    trainer = AMPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        output_dir=tmp_path,
        best=Best("ndcg_at_1", larger_is_better=True),
        progress=False,
    )
    last = trainer.train(loader, max_steps=4, eval_loader=loader, metric=metric, eval_steps=1)
    scores = [values["ndcg_at_1"] for values in found]
    assert len(scores) == 4 and last == found[-1] and trainer.best.value == max(scores)
    assert trainer.best.step == 1 + scores.index(max(scores)) and len(set(scores)) > 1
