"""Sparse encoders: vectors, directories and refusals, with sentence-transformers' own classes as the truth."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from small_models import CONFIGS, DEVICE, TINY, assert_like
from torch import nn

import fastbert
from fastbert import BertConfig, BertForMaskedLM, BertForSparseEmbedding, backends
from fastbert.data.tokenizer import save_tokenizer, train_tokenizer
from fastbert.inference import SparseEncoder, sentence_files

TEXTS = ["", "word", "a text of some more words", "what, again? " * 9]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a text of some more words, what, again? and again: a word"] * 5, vocab_size=90)


def model_of(config=TINY, **options):
    """A model with random weights, large enough for every part to matter; about half of all logits are negative."""
    torch.manual_seed(0)
    model = BertForSparseEmbedding(config.changed(initializer_range=0.3), **options).eval()
    nn.init.normal_(model.cls.predictions.bias)
    return model


@pytest.fixture
def encoder(tokenizer):
    return SparseEncoder(model_of(), tokenizer)


def theirs(directory):
    """sentence-transformers' model of a directory, in float32 and in float64."""
    from sentence_transformers import SparseEncoder as Theirs

    model = Theirs(str(directory), device="cpu")
    return model, copy.deepcopy(model).double()


def close(found, truth):
    """Equal to 1e-12, with zeros in the same places."""
    found, truth = found.to_dense().cpu(), truth.to_dense().cpu()
    assert found.dtype == truth.dtype == torch.float64 and torch.equal(found == 0, truth == 0)
    assert (found - truth).abs().max() <= 1e-12 * truth.abs().max()
    return True


# ---- the model


@pytest.mark.parametrize("activation", ("relu", "log1p_relu"))
def test_vectors_are_those_of_the_logits(activation):
    model = model_of(activation=activation).double().to(DEVICE)
    logits_of = BertForMaskedLM(model.config).double().to(DEVICE).eval()
    logits_of.load_state_dict(model.state_dict())
    ids, mask = (
        torch.randint(5, 99, (4, 12), device=DEVICE),
        torch.arange(12, device=DEVICE) < torch.tensor([[12], [5], [0], [1]], device=DEVICE),
    )
    vectors = model(ids, mask)
    logits = logits_of(ids, mask).logits.relu().log1p()
    logits = logits.log1p() if activation == "log1p_relu" else logits
    expected = logits.masked_fill(~mask[..., None], 0).max(1).values  # [PAD]'s logits are all equal: amax would differ
    assert (vectors - expected).abs().max() <= 1e-12 * expected.max()
    assert (vectors[2] == 0).all() and 0.2 < (vectors[0] == 0).float().mean() < 0.8
    ends = torch.tensor([0, 12, 17, 17, 18], dtype=torch.int32, device=DEVICE)
    assert torch.equal(model(ids[mask], cu_seqlens=ends), vectors)
    found, truth = (torch.autograd.grad((y * y.detach().cos()).sum(), m.parameters()) for y, m in (
        (vectors, model), (expected, logits_of)))  # fmt: skip
    largest = max(grad.abs().max() for grad in truth)
    assert all((a - b).abs().max() <= 1e-12 * largest for a, b in zip(found, truth, strict=True))


def test_the_fused_op_runs_and_padding_changes_no_bit():
    model = model_of().to(DEVICE)
    ids = torch.randint(5, 99, (2, 9), device=DEVICE)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5], device=DEVICE)
    count = lambda: sum(n for (name, _), n in backends.calls().items() if name == "linear_max_fwd")  # noqa: E731
    before = count()
    first = model(ids, mask)
    assert count() == before + 1
    ids[1, 4:] = 7
    assert torch.equal(model(ids, mask), first) and first.dtype == torch.float32
    assert model.bfloat16()(ids, mask).dtype == torch.float32


@pytest.mark.parametrize("family", ("roberta", "distilbert", "electra", "deberta-v2"))
def test_families(family, tmp_path):
    """Masked-LM models of transformers are read, with the names and heads of their families."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    logits_of = transformers.AutoModelForMaskedLM.from_config(config).double().eval()
    for parameter in logits_of.parameters():
        nn.init.normal_(parameter, std=0.2)
    logits_of.save_pretrained(tmp_path)
    ids = torch.randint(5, 99, (3, 7))
    with torch.no_grad():
        expected = logits_of(ids).logits.relu().log1p().amax(1)
        assert close(BertForSparseEmbedding.from_pretrained(tmp_path)(ids), expected)


@pytest.mark.slow
def test_compiled_with_padding():
    model = model_of().double()
    ids, mask = torch.randint(5, 99, (2, 6)), torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, mask)
        assert close(found, model(ids, mask))


# ---- directories of sentence-transformers, both ways


@pytest.mark.parametrize("activation", ("relu", "log1p_relu"))
def test_sentence_transformers_reads_what_is_saved(tmp_path, tokenizer, activation):
    prompts = {"query": "what, again? ", "document": ""}
    made = SparseEncoder(model_of(activation=activation), tokenizer, max_length=20, prompts=prompts, max_active_dims=30)
    made.save_pretrained(tmp_path)
    contender, truth = theirs(tmp_path)
    double = SparseEncoder.from_pretrained(tmp_path, dtype=torch.float64)
    for options in ({}, {"prompt_name": "query"}, {"prompt": "some more"}, {"max_active_dims": 7}):
        expected = truth.encode(TEXTS, **options)
        assert expected.is_sparse and close(double.encode(TEXTS, **options), expected)
        contends = contender.encode(TEXTS, **options).to_dense()
        assert_like(made.encode(TEXTS, **options).to_dense(), expected.to_dense(), contends)
    again = SparseEncoder.from_pretrained(tmp_path)
    assert (again.prompts, again.max_length, again.max_active_dims) == (prompts, 20, 30)
    assert again.model.activation == activation and again.similarity_name == "dot"
    assert torch.equal(again.encode(TEXTS).to_dense(), made.encode(TEXTS).to_dense())


def test_what_sentence_transformers_saves_is_read(tmp_path, encoder):
    """A directory as release 6 writes it, and one without modules.json, as the first SPLADE models have it."""
    from sentence_transformers import SparseEncoder as Theirs
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    plain = tmp_path / "plain"
    encoder.model.save_pretrained(plain)
    save_tokenizer(encoder.tokenizer, plain)
    modules = [Transformer(str(plain), transformer_task="fill-mask"), SpladePooling(activation_function="log1p_relu")]
    model = Theirs(modules=modules, prompts={"q": "again "}, default_prompt_name="q", similarity_fn_name="cosine",
                   max_active_dims=12, device="cpu")  # fmt: skip
    model.save_pretrained(str(tmp_path / "saved"))
    for directory in (tmp_path / "saved", plain):
        found, (_, truth) = SparseEncoder.from_pretrained(directory, dtype=torch.float64), theirs(directory)
        assert close(found.encode(TEXTS), truth.encode(TEXTS))
        vectors = found.encode(TEXTS)
        assert (found.similarity(vectors) - truth.similarity(vectors, vectors)).abs().max() < 1e-5  # theirs is float32
    assert found.similarity_name == "dot" and found.prompts == {} and found.max_active_dims is None


def test_encode_gives_one_coalesced_row_a_text(encoder):
    texts, seen = TEXTS * 3, []
    vectors = encoder.encode(texts, tokens_per_batch=16, progress=seen.append)
    assert vectors.layout == torch.sparse_coo and vectors.is_coalesced() and vectors.shape == (12, 99)
    assert sum(seen) == 12 and len(seen) > 2
    double = SparseEncoder(copy.deepcopy(encoder.model).double(), encoder.tokenizer)
    exact = double.encode(texts, tokens_per_batch=16)
    for i, text in enumerate(texts):
        assert close(exact[i], double.encode([text])[0])
    assert_like(vectors.to_dense(), exact.to_dense(), torch.cat([encoder.encode([text]) for text in texts]).to_dense())
    assert (vectors.values() > 0).all() and vectors.values().dtype == torch.float32
    assert encoder.encode([]).shape == (0, 99) and not encoder.model.training
    most, together = encoder.encode(texts, max_active_dims=4).to_dense(), encoder.encode(texts).to_dense()
    assert (most != 0).sum(1).max() == 4
    assert torch.equal(most, together * (most > 0)) and torch.equal(most.amax(1), together.amax(1))
    assert torch.equal(encoder.encode(texts, max_active_dims=1000).to_dense(), together)


def test_words_by_weight(tmp_path, encoder):
    encoder.save_pretrained(tmp_path)
    vectors = encoder.encode(TEXTS)
    model = theirs(tmp_path)[0]
    for top_k in (None, 3):
        found = encoder.decode(vectors, top_k)
        assert found == encoder.decode(vectors.to_dense(), top_k) == encoder.decode(vectors.to_sparse_csr(), top_k)
        known = [[(None if word.isdigit() else word, weight) for word, weight in row] for row in found]
        assert known == [[tuple(pair) for pair in row] for row in model.decode(vectors, top_k)]
        assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in found)
    vector = torch.zeros(2, 99)
    vector[1, [7, 5, 98]] = torch.tensor([2.0, 2.0, 3.0])
    names = [encoder.tokenizer.id_to_token(i) for i in (5, 7)]
    assert encoder.decode(vector) == [[], [("98", 3.0), (names[0], 2.0), (names[1], 2.0)]]
    assert encoder.decode(vector, 1) == [[], [("98", 3.0)]] and encoder.decode(vector[:0]) == []


@pytest.mark.parametrize("measure", ("dot", "cosine", "euclidean", "manhattan"))
def test_similarities(encoder, measure):
    encoder.similarity_name = measure
    a, b = encoder.encode(TEXTS), encoder.encode(TEXTS[1:] + ["more words"])
    a = torch.cat([a, torch.zeros(1, 99).to_sparse()]).double()  # and a vector of zeros
    b = b.double()
    x, y = a.to_dense(), b.to_dense()
    if measure == "cosine":
        x, y = (z / z.norm(dim=1, keepdim=True).clamp(min=1e-12) for z in (x, y))
    p = {"euclidean": 2, "manhattan": 1}.get(measure)
    expected = x @ y.T if p is None else -(x[:, None] - y).norm(p, dim=-1)
    for one, other in ((a, b), (a.to_dense(), b), (a.to_sparse_csr(), b.to_dense()), (a.to_dense(), b.to_dense())):
        found = encoder.similarity(one, other)
        assert found.layout == torch.strided and (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    for one in (b, b.to_sparse_csr(), b.to_dense()):
        pairs = encoder.similarity_pairwise(one, a.to_dense()[-4:].to_sparse())
        assert (pairs - expected[-4:].T.diagonal()).abs().max() <= 1e-12 * expected.abs().max()
    assert encoder.similarity(b).shape == (4, 4)
    many = torch.rand(40, 99)
    assert p is None or torch.equal(encoder.similarity(many).diagonal(), torch.zeros(40))
    with pytest.raises(TypeError, match="expected one floating-point type"):
        encoder.similarity(a, b.float())


def test_accelerated_sentence_transformers(tmp_path, encoder):
    """Their own class goes on working when accelerated; it still computes all logits."""
    encoder.save_pretrained(tmp_path)
    model, truth = theirs(tmp_path)
    contender = model.encode(TEXTS).to_dense()
    report = fastbert.accelerate(model)
    assert_like(model.encode(TEXTS).to_dense(), truth.encode(TEXTS).to_dense(), contender)
    assert report.packed > 0 and not report.fallbacks
    fastbert.restore(model)
    assert torch.equal(model.encode(TEXTS).to_dense(), contender)


needs_packed = pytest.mark.skipif(backends._cpu_problem() is not None, reason=str(backends._cpu_problem()))


@needs_packed
def test_prepared(tmp_path, encoder):
    encoder.save_pretrained(tmp_path)
    found = SparseEncoder.from_pretrained(tmp_path, precision="fp32")
    found.save_pretrained(tmp_path / "again")
    again = SparseEncoder.from_pretrained(tmp_path / "again")
    truth = SparseEncoder.from_pretrained(tmp_path, dtype=torch.float64).encode(TEXTS).to_dense()
    with fastbert.backend("reference"):
        plain = encoder.encode(TEXTS).to_dense()
    for one in (found, again):
        assert_like(one.encode(TEXTS).to_dense(), truth, plain)


@needs_packed
def test_the_product_with_the_vocabulary_is_prepared_in_int8(tmp_path, encoder):
    model, runs = encoder.model, lambda: backends.calls().get(("packed_linear_max_fwd", "cpu"), 0)
    prepared, kept = fastbert.prepare(model, "int8"), fastbert.prepare(model, "int8", skip="vocabulary")
    plain, before = encoder.encode(TEXTS).to_dense(), runs()
    vectors = SparseEncoder(prepared, encoder.tokenizer).encode(TEXTS).to_dense()
    assert runs() > before and kept.vocabulary is None
    assert (torch.cosine_similarity(vectors, plain) > 0.99).all()
    assert prepared.num_parameters() == model.num_parameters()
    assert not any("vocabulary" in name for name in prepared.state_dict())
    prepared.save_pretrained(tmp_path / "int8")
    kept.save_pretrained(tmp_path / "kept")
    again = BertForSparseEmbedding.from_pretrained(tmp_path / "int8")
    for copied in (again, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(SparseEncoder(copied, encoder.tokenizer).encode(TEXTS).to_dense(), vectors)
    assert BertForSparseEmbedding.from_pretrained(tmp_path / "kept").vocabulary is None
    assert fastbert.BertForMaskedLM.from_pretrained(tmp_path / "int8").cls.predictions.bias.dtype == torch.float32


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_packed), "reference"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_prepared_product_with_the_vocabulary_compiles(encoder, backend, precision):
    prepared, ids = fastbert.prepare(encoder.model, precision), torch.randint(5, 90, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [4], [0]])
    with torch.no_grad(), fastbert.backend(backend):
        eager = prepared(ids, mask)
        found = [
            torch.compile(prepared, backend="aot_eager")(ids, mask),
            torch.vmap(lambda ids, mask: prepared(ids[None], mask[None])[0])(ids, mask),
            torch.export.export(prepared, (ids, mask)).module()(ids, mask),
        ]
    for vectors in found:
        assert not vectors[2].any() and (torch.cosine_similarity(vectors, eager)[:2] > 0.99).all()
        if precision == "fp32":
            torch.testing.assert_close(vectors, eager)


@needs_packed
def test_a_prepared_vocabulary_follows_its_words(tmp_path, encoder):
    prepared, ids = fastbert.prepare(encoder.model, "int8"), torch.randint(5, 90, (2, 9))
    prepared.resize_token_embeddings(70)
    prepared.save_pretrained(tmp_path)
    again = BertForSparseEmbedding.from_pretrained(tmp_path)
    assert torch.equal(prepared(ids % 70), again(ids % 70)) and prepared(ids % 70).shape == (2, 70)
    plain = len(pickle.dumps(fastbert.prepare(encoder.model, "int8", skip="vocabulary")))
    assert len(pickle.dumps(fastbert.prepare(encoder.model, "int8"))) < plain + 4000  # the words are sent once
    with pytest.raises(RuntimeError, match="frozen"):
        prepared.vocabulary.load_state_dict({})
    wrapped = fastbert.prepare(torch.compile(encoder.model), "int8", skip="_orig_mod.vocabulary")
    assert wrapped._orig_mod.vocabulary is None
    broken = copy.deepcopy(encoder.model)
    broken.get_input_embeddings().weight.data[7, 0] = torch.inf
    with pytest.raises(ValueError, match="fastbert.prepare: vocabulary has numbers that are not finite in int8"):
        fastbert.prepare(broken, "int8")


# ---- refused


def described(directory, kinds, pooling=None, task=None):
    paths = ["", *(f"{i}_{kind.rsplit('.', 1)[-1]}" for i, kind in enumerate(kinds) if i)]
    named = enumerate(zip(paths, kinds, strict=True))
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in named]
    (directory / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
        (directory / path / "config.json").write_text(json.dumps(pooling or {}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": task} if task else {}))


MLM, POOLING = (
    "sentence_transformers.sparse_encoder.models.MLMTransformer",
    "sentence_transformers.sparse_encoder.models.SpladePooling",
)


@pytest.mark.parametrize(
    ("kinds", "pooling", "task", "words"),
    [
        ([MLM, POOLING], {"pooling_strategy": "sum"}, None, "pooling_strategy is 'sum'; expected 'max'"),
        ([MLM, POOLING], {"activation_function": "gelu"}, None, "activation_function is 'gelu'; expected 'relu' or"),
        (
            ["sentence_transformers.models.Router", POOLING],
            {},
            None,
            "has the modules Router, SpladePooling; expected MLMTransformer",
        ),
        ([MLM, "sentence_transformers.models.Pooling"], {}, None, "has the modules MLMTransformer, Pooling"),
        (
            [MLM, POOLING, "sentence_transformers.models.SparseAutoEncoder"],
            {},
            None,
            "has the modules MLMTransformer, SpladePooling, SparseAuto",
        ),
        (["sentence_transformers.models.SparseStaticEmbedding"], {}, None, "has the modules SparseStaticEmbedding"),
        (
            ["sentence_transformers.models.Transformer", POOLING],
            {},
            None,
            "transformer_task is None; expected 'fill-mask'",
        ),
        (
            ["sentence_transformers.models.Transformer", POOLING],
            {},
            "feature-extraction",
            "transformer_task is 'feature-extraction'",
        ),
        ([MLM, POOLING], {}, None, None),
        (
            ["sentence_transformers.models.Transformer", POOLING],
            {"activation_function": "log1p_relu"},
            "fill-mask",
            None,
        ),
    ],
)
def test_modules_are_honoured_or_refused(tmp_path, encoder, kinds, pooling, task, words):
    encoder.model.save_pretrained(tmp_path)
    save_tokenizer(encoder.tokenizer, tmp_path)
    described(tmp_path, kinds, pooling, task)
    if words:
        with pytest.raises(ValueError, match=words):
            SparseEncoder.from_pretrained(tmp_path)
    else:
        found = SparseEncoder.from_pretrained(tmp_path)
        assert found.model.activation == pooling.get("activation_function", "relu")


def test_settings_of_the_texts_are_honoured_or_refused(tmp_path, encoder):
    encoder.tokenizer.normalizer.lowercase = False
    encoder.save_pretrained(tmp_path)
    settings = tmp_path / "sentence_bert_config.json"
    settings.write_text(json.dumps({"do_lower_case": True}))
    found = SparseEncoder.from_pretrained(tmp_path)
    assert found.tokenize(["Some Words"]) == encoder.tokenize(["some words"]) != encoder.tokenize(["Some Words"])
    settings.write_text(json.dumps({"document_length": 9}))
    with pytest.raises(ValueError, match="document_length is 9; expected max_seq_length alone"):
        SparseEncoder.from_pretrained(tmp_path)


def test_a_saving_that_was_cut_off_is_refused(tmp_path, encoder, monkeypatch):
    for _ in range(2):  # a first save, and one over it
        with monkeypatch.context() as patch:
            patch.setattr(sentence_files, "_write_shared", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                encoder.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="saving was interrupted; save it again"):
            SparseEncoder.from_pretrained(tmp_path)
        encoder.save_pretrained(tmp_path)


def test_a_model_without_a_masked_lm_head_is_refused(tmp_path, encoder):
    save_tokenizer(encoder.tokenizer, tmp_path)
    fastbert.BertForSequenceClassification(TINY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="architectures is BertForSequenceClassification"):
        SparseEncoder.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shutil.copy(tmp_path / "config.json", tmp_path / "kept.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ValueError, match="lacks cls.predictions"):
        SparseEncoder.from_pretrained(tmp_path)


REFUSED = {
    "activation is 'gelu'; expected 'relu' or 'log1p_relu'": lambda e: BertForSparseEmbedding(TINY, "gelu"),
    "is a BertModel; expected a BertForSparseEmbedding": lambda e: SparseEncoder(fastbert.BertModel(TINY), e.tokenizer),
    "max_active_dims is 0; expected a positive int": lambda e: SparseEncoder(e.model, e.tokenizer, max_active_dims=0),
    "max_active_dims is 2.5; expected a positive int": lambda e: e.encode(["a"], max_active_dims=2.5),
    "there is no prompt 'q'; this encoder has none": lambda e: e.encode(["a"], prompt_name="q"),
    "similarity is 'jaccard'": lambda e: SparseEncoder(e.model, e.tokenizer, similarity="jaccard"),
    "max_length is 2; expected a number above the 2": lambda e: SparseEncoder(e.model, e.tokenizer, max_length=2),
    r"vectors has shape \(2, 98\); expected \(N, 99\)": lambda e: e.decode(torch.zeros(2, 98)),
    "top_k is 0; expected at least 1": lambda e: e.decode(torch.zeros(2, 99), 0),
    r"similarity: vectors has shape \(2, 99\), others \(99,\)": lambda e: e.similarity(
        torch.zeros(2, 99), torch.zeros(99)
    ),
    "texts is a str; expected several strings": lambda e: e.encode("one text"),
    "expected ids below the vocab_size of the model, 9": lambda e: SparseEncoder(
        BertForSparseEmbedding(TINY.changed(vocab_size=9)), e.tokenizer
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(encoder, words):
    with pytest.raises((ValueError, TypeError), match=words):
        REFUSED[words](encoder)


def test_a_length_beyond_the_models(tmp_path, encoder):
    encoder.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="SparseEncoder: max_length is 33; expected at most the model's, 32"):
        SparseEncoder.from_pretrained(tmp_path, max_length=33)
    assert SparseEncoder.from_pretrained(tmp_path, max_length=9).max_length == 9
    assert isinstance(BertConfig.from_pretrained(tmp_path), BertConfig)
