"""mteb runs our encoders: on small tasks made here the scores are those of sentence-transformers' own models."""

import copy

import numpy as np
import pytest
import torch
from small_models import TINY, minilm, sentence_encoder

from fastbert import BertForSequenceClassification
from fastbert.data import get_tokenizer
from fastbert.inference import CrossEncoder, Dense, SentenceEncoder, quantize
from fastbert.inference.mteb import MTEBCrossEncoder, MTEBEncoder

mteb = pytest.importorskip("mteb", reason="mteb is not installed: `make suites` gets it")

datasets = pytest.importorskip("datasets")
from mteb.abstasks.classification import AbsTaskClassification  # noqa: E402
from mteb.abstasks.retrieval import AbsTaskRetrieval  # noqa: E402
from mteb.abstasks.sts import AbsTaskSTS  # noqa: E402
from mteb.abstasks.task_metadata import TaskMetadata  # noqa: E402
from mteb.models.models_protocols import CrossEncoderProtocol, EncoderProtocol  # noqa: E402
from mteb.types import PromptType  # noqa: E402
from sentence_transformers import CrossEncoder as TheirCrossEncoder  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

WORDS = "red blue green sun moon star tree leaf root sand sea sky stone cloud river".split()
PROMPTS = {"query": "find: ", "document": "text: ", "Retrieval-query": "look for: ", "STS": "how alike: ", "none": ""}
WHERE = {"hf_split": "test", "hf_subset": "default"}


def texts_of(seed, count, words=4):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, words)) for _ in range(count)]


def about(kind, score):
    return TaskMetadata(
        name=f"Small{kind}",
        type=kind,
        main_score=score,
        description="made for a test",
        dataset={"path": "none", "revision": "none"},
        category="t2t",
        eval_langs=["eng-Latn"],
        date=("2020-01-01", "2020-01-01"),
        domains=[],
        task_subtypes=[],
        dialect=[],
        license="mit",
        annotations_creators="derived",
        sample_creation="created",
        bibtex_citation="",
        reference=None,
        modalities=["text"],
        eval_splits=["test"],
    )


class Retrieval(AbsTaskRetrieval):
    metadata = about("Retrieval", "ndcg_at_10")
    ranked = None

    def load_data(self, **options):
        chosen = np.random.default_rng(0)
        corpus = [{"id": f"d{i}", "title": t, "text": x} for i, (t, x) in enumerate(zip(*self.texts(), strict=True))]
        relevant = {f"q{i}": {f"d{j}": 1 for j in chosen.choice(30, 3, replace=False)} for i in range(6)}
        queries = [{"id": f"q{i}", "text": text} for i, text in enumerate(texts_of(1, 6, 3))]
        split = {"queries": datasets.Dataset.from_list(queries), "corpus": datasets.Dataset.from_list(corpus)}
        ranked = {
            query: [*of_query, *(f"d{i}" for i in range(8) if f"d{i}" not in of_query)]
            for query, of_query in relevant.items()
        }
        split |= {"relevant_docs": relevant, "top_ranked": ranked if self.ranked else None}
        self.dataset, self.data_loaded = {"default": {"test": split}}, True

    def texts(self):
        return texts_of(2, 30, 1), texts_of(3, 30)


class Reranking(Retrieval):
    metadata = about("Reranking", "map_at_1000")
    ranked = True


class STS(AbsTaskSTS):
    metadata = about("STS", "cosine_spearman")
    min_score, max_score = 0, 5

    def load_data(self, **options):
        scores = np.random.default_rng(4).integers(0, 6, 25).astype(float).tolist()
        columns = {"sentence1": texts_of(5, 25), "sentence2": texts_of(6, 25), "score": scores}
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(columns)})
        self.data_loaded = True


class Classification(AbsTaskClassification):
    metadata = about("Classification", "accuracy")
    samples_per_label, n_experiments = 6, 2

    def load_data(self, **options):
        parts = {name: texts_of(seed, 30) for name, seed in (("train", 7), ("test", 8))}
        self.dataset = datasets.DatasetDict(
            {
                name: datasets.Dataset.from_dict({"text": texts, "label": ["sea" in x or "sky" in x for x in texts]})
                for name, texts in parts.items()
            }
        ).cast_column("label", datasets.Value("int64"))
        self.data_loaded = True


def scores_of(model, task):
    result = mteb.evaluate(model, task(), cache=None, co2_tracker=False, show_progress_bar=False)
    (scores,) = result.task_results[0].scores["test"]
    return {name: value for name, value in scores.items() if isinstance(value, (int, float))}


def assert_equal(found, expected):
    """Ranks are equal, so only correlations of float32 similarities may differ, by rounding."""
    assert found == pytest.approx(expected, rel=1e-5, abs=2e-6, nan_ok=True) and len(set(found.values())) > 3


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(minilm())


@pytest.fixture(scope="module")
def small():
    return sentence_encoder()


def with_options(encoder, **options):
    return SentenceEncoder(copy.deepcopy(encoder.model), encoder.tokenizer, **options)


@pytest.mark.parametrize("task", [Retrieval, Reranking, STS, Classification])
@pytest.mark.parametrize(
    "options",
    [
        {"similarity": "dot", "normalize": False, "prompts": PROMPTS, "default_prompt_name": "document"},
        {"dense": [Dense(48, 20)], "pooling": "cls"},
    ],
)
def test_scores_are_those_of_sentence_transformers(tmp_path, small, task, options):
    encoder = with_options(small, **options)
    encoder.save_pretrained(tmp_path)
    found = scores_of(MTEBEncoder(tmp_path, name="fastbert/small"), task)
    assert_equal(found, scores_of(SentenceTransformer(str(tmp_path), device="cpu"), task))


def test_reranking_by_a_cross_encoder_is_that_of_sentence_transformers(tmp_path, tokenizer):
    torch.manual_seed(1)
    config = TINY.changed(vocab_size=30522, initializer_range=0.3, num_labels=1)
    CrossEncoder(BertForSequenceClassification(config), tokenizer).save_pretrained(tmp_path)
    found = scores_of(MTEBCrossEncoder(str(tmp_path)), Reranking)
    assert_equal(found, scores_of(TheirCrossEncoder(str(tmp_path), device="cpu"), Reranking))
    assert 0 < found["ndcg_at_3"] < 1


# ---- what mteb asks of a model


class Named:
    def __init__(self, name, kind):
        self.name, self.type = name, kind


@pytest.mark.parametrize(
    ("prompts", "kind", "expected"),
    [
        ({"Mine-query": "1", "Mine": "2", "Retrieval-query": "3", "Retrieval": "4", "query": "5"}, "query", "1"),
        ({"Mine": "2", "Retrieval-query": "3", "Retrieval": "4", "query": "5"}, "query", "2"),
        ({"Retrieval-query": "3", "Retrieval": "4", "query": "5"}, "query", "3"),
        ({"Retrieval": "4", "query": "5"}, "query", "4"),
        ({"query": "5", "document": "6", "default": "7"}, "query", "5"),
        ({"query": "5", "document": "6", "default": "7"}, "document", "6"),
        ({"query": "5", "document": "6", "default": "7"}, None, "7"),
        ({"passage": "8", "default": "7"}, "document", ""),
        ({"Retrieval-document": "3", "default": "7"}, "query", ""),
    ],
)
def test_which_prompt(small, prompts, kind, expected):
    prompts = {name: f"{prompt} " for name, prompt in prompts.items()}
    encoder = with_options(small, prompts=prompts, default_prompt_name="default" if "default" in prompts else None)
    batches = [{"text": ["red", "blue sea"]}, {"text": ["star"]}]
    found = MTEBEncoder(encoder, name="a/b").encode(
        batches, task_metadata=Named("Mine", "Retrieval"), prompt_type=kind and PromptType(kind), **WHERE
    )
    texts = ["red", "blue sea", "star"]
    assert torch.equal(found, encoder.encode(texts, prompt=f"{expected} " if expected else ""))


def test_an_encoder_keeps_the_protocol(small, capsys):
    model, seen = MTEBEncoder(small, name="fastbert/small"), []
    assert isinstance(model, EncoderProtocol) and not isinstance(model, CrossEncoderProtocol)
    whole, embed = small.encode(texts := texts_of(0, 40)), small.embed
    small.embed = lambda ids, skip=0: (seen.append(sum(map(len, ids))), embed(ids, skip))[1]
    try:
        task = Named("Mine", "STS")
        options = {"task_metadata": task, "batch_size": 2, "precision": "binary", **WHERE}
        found = model.encode([{"text": texts}], show_progress_bar=False, **options)
        assert not capsys.readouterr().err
        model.encode([{"text": texts[:3]}], task_metadata=task, **WHERE)
    finally:
        del small.embed
    assert max(seen[:-1]) <= 2 * 32 and len(seen) > 4 and "3/3" in capsys.readouterr().err
    assert torch.equal(found, quantize(whole, "binary")) and found.device.type == "cpu"
    rows = whole[:4].numpy()
    assert torch.equal(model.similarity(rows[0], rows), small.similarity(whole[:1], whole[:4]))
    assert torch.equal(model.similarity_pairwise(rows, whole[4:8]), small.similarity_pairwise(whole[:4], whole[4:8]))
    assert model.similarity(rows.astype(np.float16), rows).dtype == torch.float32


def test_what_mteb_is_told(tmp_path, small):
    small.save_pretrained(tmp_path / "mine")
    given, read = MTEBEncoder(small, name="a/b").mteb_model_meta, MTEBEncoder(tmp_path / "mine").mteb_model_meta
    assert given.name == "a/b" and read.name == str(tmp_path / "mine") and given.revision == read.revision
    assert (given.embed_dim, given.max_tokens, given.similarity_fn_name.value) == (48, 32, "cosine")
    assert given.n_parameters == sum(parameter.numel() for parameter in small.model.parameters())
    orders = [with_options(small, prompts=dict(x)) for x in ((("a", "1"), ("b", "2")), (("b", "2"), ("a", "1")))]
    assert len({MTEBEncoder(each, name="a/b").mteb_model_meta.revision for each in orders}) == 1
    other = with_options(small, dense=[Dense(48, 5)])
    assert MTEBEncoder(other, name="a/b").mteb_model_meta.revision != given.revision
    for options in (
        {"pooling": "cls"},
        {"normalize": False},
        {"prompts": {"query": "q"}},
        {"max_length": 9},
        {"similarity": "dot"},
    ):
        assert MTEBEncoder(with_options(small, **options), name="a/b").mteb_model_meta.revision != given.revision
    with torch.no_grad():
        (other := with_options(small)).model.encoder.layer[2].output.dense.bias[0] += 1e-6
    changed = MTEBEncoder(other, name="b", revision=None).mteb_model_meta
    assert changed.revision != given.revision and changed.name == "local/b"
    assert MTEBEncoder(small, "v1", name="a/b").mteb_model_meta.revision == "v1"
    assert MTEBEncoder(tmp_path / "mine", dtype="float64", max_length=9).model.max_length == 9


def test_what_does_not_fit_is_refused(tmp_path, small):
    for options in ({}, {"name": "a/b", "device": "cpu"}, {"name": "a/b", "dtype": "float32"}):
        with pytest.raises(ValueError, match="MTEBEncoder: a SentenceEncoder with .*; expected a name, 'organization"):
            MTEBEncoder(small, **options)
    with pytest.raises(ValueError, match="MTEBEncoder: a batch has image; expected text"):
        MTEBEncoder(small, name="a/b").encode([{"image": []}], task_metadata=Named("Mine", "STS"), **WHERE)
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        MTEBEncoder(tmp_path / "nowhere")
