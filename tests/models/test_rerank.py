"""Cross encoders give the scores of sentence-transformers', and each library reads what the other writes."""

import copy
import json
import warnings

import pytest
import torch
from small_models import TINY, assert_like, edit
from torch import nn

from fastbert import BertConfig, BertForSequenceClassification
from fastbert.data import train_tokenizer
from fastbert.inference import CrossEncoder
from fastbert.inference.fingerprint import fingerprint

PAIRS = [
    ("where is the cat?", "The cat sits outside."),
    ("", "a text without a query"),
    ("a query without a text", ""),
    ("", ""),
    ("größer als Zürich, 東京 🙂", "naïve café — ½"),
    ("the query " * 2, "a long document that is cut, " * 20),
    ("a long query that is cut, " * 20, "short"),
    ("both are long, " * 20, "and both are cut, " * 21),
]
QUERY, DOCUMENTS = "where is the cat?", ["It rains.", "The cat sits outside.", "", "Dogs bark.", "It rains."]
PATHS = {name: f"torch.nn.modules.activation.{name}" for name in ("Sigmoid", "Tanh", "GELU")}
PATHS["Identity"] = "torch.nn.modules.linear.Identity"
OLD = "sbert_ce_default_activation_function"


@pytest.fixture(scope="module")
def tokenizers():
    texts = [text for pair in PAIRS for text in pair]
    kinds = {"bert": "wordpiece", "roberta": "byte-level-bpe"}
    return {family: train_tokenizer(texts, kind, vocab_size=300) for family, kind in kinds.items()}


@pytest.fixture
def small(tokenizers):
    """Makes models with random weights, large enough for every part to matter."""

    def make(labels=1, family="bert", config=None, **options):
        torch.manual_seed(labels)
        sizes = {"vocab_size": tokenizers[family].get_vocab_size(), "num_labels": labels, "initializer_range": 0.2}
        own = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 34} if family == "roberta" else {}
        values = TINY.to_dict() | sizes | own | {"model_type": family, "id2label": None} | (config or {})
        return CrossEncoder(BertForSequenceClassification(BertConfig.from_dict(values)), tokenizers[family], **options)

    return make


def theirs(directory):
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(directory), device="cpu")


def exact(model):
    """A copy of sentence-transformers' model in float64."""
    model = copy.deepcopy(model)
    model.model.double()
    return model


def scores_of(encoder, pairs=PAIRS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some texts are cut
        return encoder.predict(pairs)


@pytest.mark.parametrize(
    ("family", "labels", "activation", "max_length"),
    [
        ("bert", 1, None, None),
        ("bert", 1, "Identity", 20),
        ("bert", 3, None, 20),
        ("bert", 3, "Tanh", None),
        ("bert", 1, "GELU", 9),
        ("roberta", 1, None, None),
        ("roberta", 3, "Sigmoid", 20),
    ],
)
def test_scores_are_those_of_sentence_transformers(tmp_path, small, family, labels, activation, max_length):
    made = small(labels, family, activation=activation, max_length=max_length)
    before = fingerprint(made)
    made.save_pretrained(tmp_path / "ours")
    other = theirs(tmp_path / "ours")
    other.save_pretrained(str(tmp_path / "theirs"))
    expected, truth = (torch.from_numpy(model.predict(PAIRS)) for model in (other, exact(other)))
    assert expected.shape == ((len(PAIRS),) if labels == 1 else (len(PAIRS), labels)) and expected.std(0).min() > 1e-3
    for encoder in (made, CrossEncoder.from_pretrained(tmp_path / "ours")):
        found = scores_of(encoder)
        assert found.dtype == torch.float32 and not found.is_inference() and not found.requires_grad
        assert_like(found, truth, expected)
        assert fingerprint(encoder) == before
    again = CrossEncoder.from_pretrained(tmp_path / "theirs")
    assert again.max_length == made.max_length and type(again.activation) is type(other.activation_fn)
    assert torch.equal(scores_of(again), found)


def test_token_types_are_left_out_where_the_tokenizer_has_none(tmp_path, small):
    made = small(1, "bert")
    made.save_pretrained(tmp_path)
    edit(tmp_path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    found, other = CrossEncoder.from_pretrained(tmp_path), theirs(tmp_path)
    expected = torch.from_numpy(other.predict(PAIRS))
    assert_like(scores_of(found), torch.from_numpy(exact(other).predict(PAIRS)), expected)
    assert (scores_of(found) - scores_of(made)).abs().max() > 1e-3
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(scores_of(CrossEncoder.from_pretrained(tmp_path / "again")), scores_of(found))


@pytest.mark.parametrize(
    ("labels", "entries"),
    [
        (1, {}),
        (2, {}),
        (2, {OLD: PATHS["Tanh"]}),
        (1, {"sentence_transformers": {"activation_fn": PATHS["Identity"], "version": "5.1.0"}}),
        (2, {"sentence_transformers": {"activation_fn": PATHS["GELU"]}} | {OLD: PATHS["Tanh"]}),
        (2, {"sentence_transformers": {"version": "4.0.0"}, OLD: PATHS["GELU"]}),
        (2, {"sentence_transformers": {"activation_fn": None}, OLD: PATHS["GELU"]}),
    ],
    ids=["one label", "several", "old", "new", "both", "version alone", "null"],
)
def test_the_activation_is_the_one_that_config_json_names(tmp_path, small, labels, entries):
    """config.json is as releases of sentence-transformers before 6 wrote it."""
    small(labels).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("sentence_transformers") and config.pop(OLD)
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    assert type(CrossEncoder.from_pretrained(tmp_path).activation) is type(theirs(tmp_path).activation_fn)


def test_what_is_saved_last_counts(tmp_path, small):
    """sentence-transformers 6 names the activation beside modules.json; that takes precedence over config.json."""
    small().save_pretrained(tmp_path)
    theirs(tmp_path).save_pretrained(str(tmp_path))
    edit(tmp_path / "config_sentence_transformers.json", activation_fn=PATHS["GELU"])
    assert type(CrossEncoder.from_pretrained(tmp_path).activation) is type(theirs(tmp_path).activation_fn) is nn.GELU
    small(activation="Tanh", max_length=12).save_pretrained(tmp_path)
    again = CrossEncoder.from_pretrained(tmp_path)
    assert type(again.activation) is type(theirs(tmp_path).activation_fn) is nn.Tanh and again.max_length == 12
    given = CrossEncoder.from_pretrained(tmp_path, activation="Identity", max_length=11)
    assert type(given.activation) is nn.Identity and given.max_length == 11
    for length, expected in ((512, 32), (10**30, 32), (20, 20)):  # 10**30 is transformers' "unknown"
        edit(tmp_path / "tokenizer_config.json", model_max_length=length)
        assert CrossEncoder.from_pretrained(tmp_path).max_length == theirs(tmp_path).max_seq_length == expected


def test_rank(tmp_path, small):
    made = small(activation="Identity")
    made.save_pretrained(tmp_path)
    other = theirs(tmp_path)
    for top_k, documents in ((None, False), (2, True), (99, True)):
        options = {"top_k": top_k, "return_documents": documents}
        found, *ranked = (model.rank(QUERY, DOCUMENTS, **options) for model in (made, exact(other), other))
        scores = ([one.pop("score") for one in ranking] for ranking in (found, *ranked))
        ours, truth, contender = map(torch.tensor, scores)
        assert_like(ours, truth, contender)
        assert found == ranked[0] == ranked[1]
    order = [one["corpus_id"] for one in found]
    assert order.index(0) + 1 == order.index(4)  # equal scores keep their order
    assert made.rank(QUERY, []) == other.rank(QUERY, []) == []
    assert made.predict([]).shape == (0,) and small(3).predict([]).shape == (0, 3)


def test_one_batch_or_many(small):
    seen, done = [], []
    one, many = small(tokens_per_batch=10**6), small(tokens_per_batch=1)
    noted = lambda model, inputs, options: seen.append(len(options["input_ids"]))  # noqa: E731
    many.model.register_forward_pre_hook(noted, with_kwargs=True)
    with pytest.warns(UserWarning, match="3 of 8 texts are longer than 32 tokens: cut there"):
        found = many.predict(PAIRS, progress=done.append)
    double = small()
    double.model.double()
    assert_like(found, scores_of(double), scores_of(one))
    assert done == [1] * len(PAIRS) and max(seen) == 32 and min(seen) == 3  # no padding


def test_dtypes_and_precisions(tmp_path, small):
    made = small()
    made.save_pretrained(tmp_path)
    truth = scores_of(CrossEncoder.from_pretrained(tmp_path, dtype="float64"))
    assert truth.dtype == torch.float32
    assert_like(scores_of(made), truth, torch.from_numpy(theirs(tmp_path).predict(PAIRS)))
    for options in ({"dtype": "bfloat16"}, {"precision": "bf16"}, {"precision": "int8"}):
        found = scores_of(CrossEncoder.from_pretrained(tmp_path, **options))
        assert found.dtype == torch.float32 and 1e-6 < (found - truth).abs().max() < 0.1, options


@pytest.mark.parametrize(
    ("pairs", "error", "words"),
    [
        (("a", "b"), TypeError, r"pairs\[0\] is 'a'; expected two texts"),
        ("ab", TypeError, r"pairs\[0\] is 'ab'; expected two texts"),
        ([("a", "b"), ("a", "b", "c")], TypeError, r"pairs\[1\] is \('a', 'b', 'c'\); expected two texts"),
        ([("a", None)], TypeError, r"pairs\[0\]\[1\] is a NoneType; expected a string"),
        ([("\ud800", "a")], ValueError, r"pairs\[0\]\[0\] is not text"),
    ],
)
def test_what_are_no_pairs_is_refused(small, pairs, error, words):
    with pytest.raises(error, match=words):
        small().predict(pairs)


def test_what_cannot_be_ranked_is_refused(small):
    made = small()
    for arguments, error, words in (
        ((QUERY, DOCUMENTS, 0), ValueError, "top_k is 0; expected an int of at least 1"),
        ((QUERY, DOCUMENTS, 1.5), ValueError, "top_k is 1.5; expected an int"),
        ((QUERY, "one text"), TypeError, "documents is a str; expected several strings"),
        ((QUERY, [None]), TypeError, r"documents\[0\] is a NoneType"),
        ((None, []), TypeError, "query is a NoneType; expected a string"),
    ):
        with pytest.raises(error, match=words):
            made.rank(*arguments)
    with pytest.raises(ValueError, match="rank of a model with 3 labels; expected one label"):
        small(3).rank(QUERY, DOCUMENTS)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_score_that_is_not_a_number_is_an_error(small, labels):
    made = small(labels=labels)
    word = made.tokenizer.encode("outside").ids[1]
    with torch.no_grad():
        made.model.bert.embeddings.word_embeddings.weight[word] = torch.nan
    assert made.predict([("a", "b")]).isfinite().all()
    with pytest.raises(ValueError, match=r"the score of pairs\[1\] is NaN; expected a number"):
        made.predict([("a", "b"), ("a", "outside"), ("it is a long one", "b")])


def test_texts_are_put_into_lower_case_if_a_file_beside_modules_json_says_so(tmp_path, small):
    made, modules = small(), [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    made.tokenizer.normalizer.lowercase = False
    made.save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))

    def ids(encoder, *pair):
        return encoder.encode([pair])[0]["input_ids"].tolist()

    upper, lower = ids(made, "The Cat", "It Sits"), ids(made, "the cat", "it sits")
    assert ids(CrossEncoder.from_pretrained(tmp_path), "The Cat", "It Sits") == upper != lower
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert ids(CrossEncoder.from_pretrained(tmp_path), "The Cat", "It Sits") == lower


def test_directories_that_are_not_supported_are_refused(tmp_path, small):
    with pytest.raises(ValueError, match="activation is 'Linear'; expected Identity, Tanh"):
        small(activation="Linear")
    for path, words in (
        ("mine.Own", "activation_fn is 'mine.Own'; expected one of torch.nn's"),
        ("torch.nn.modules.linear.Linear", "activation is 'Linear'; expected Identity, Tanh"),
    ):
        small(3).save_pretrained(tmp_path)
        edit(tmp_path / "config.json", sentence_transformers={"activation_fn": path})
        with pytest.raises(ValueError, match=words):
            CrossEncoder.from_pretrained(tmp_path)
    small(3).save_pretrained(tmp_path)
    theirs(tmp_path).save_pretrained(str(tmp_path))
    for name, value, words in (
        ("config_sentence_transformers", {"activation_fn": "mine.Own"}, "activation_fn is 'mine.Own'; expected one"),
        (
            "config_sentence_transformers",
            {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
            "has the default prompt 'q: '; expected none",
        ),
        (
            "modules",
            [
                {"type": "sentence_transformers.models.Transformer", "path": ""},
                {"type": "sentence_transformers.models.Dense", "path": ""},
            ],
            "has the modules Transformer, Dense; expected",
        ),
    ):
        path = tmp_path / f"{name}.json"
        before = path.read_text()
        path.write_text(json.dumps(value if name == "modules" else json.loads(before) | value))
        with pytest.raises(ValueError, match=words):
            CrossEncoder.from_pretrained(tmp_path)
        path.write_text(before)
    assert scores_of(CrossEncoder.from_pretrained(tmp_path)).shape == (len(PAIRS), 3)
