"""Multi-vector encoders: MaxSim against its formula, encodings and directories against sentence-transformers."""

import copy
import itertools
import json
import string
import warnings

import pytest
import torch
from safetensors.torch import save_file
from small_models import CONFIGS, TINY, assert_gradients, assert_like, edit, gradients, reference_masks, small_tokenizer
from small_models import multi_vector_encoder as small
from transformers import AutoConfig, AutoModel

from fastbert import BertConfig, BertModel, hub, maxsim, random, reference
from fastbert.inference import Dense, MultiVectorEncoder, QueryExpansion, maxsim_pairs
from fastbert.inference.sentences import SentenceEncoder
from fastbert.maxsim import EMPTY
from fastbert.ops.padding import cu_seqlens_of
from fastbert.token_vectors import Expansion, TokenVectors

# ---- MaxSim


def ends(*lengths):
    return cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64))


def by_formula(queries, documents):
    """MaxSim by plain loops."""
    rows = [[sum(max(float(a @ b) for b in d) for a in q) if len(d) else EMPTY for d in documents] for q in queries]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 40, 1 << 24])
def test_maxsim_by_its_formula(block):
    """Whole numbers make equality exact. Some documents and queries have no token; blocks may have any size."""
    of_queries, of_documents = [3, 0, 5, 1], [4, 7, 0, 1, 2]
    queries, documents = (torch.randint(-9, 9, (n, 6)).double() for n in (9, 14))
    truth = by_formula(queries.split(of_queries), documents.split(of_documents))
    found = maxsim.maxsim(queries, ends(*of_queries), documents, ends(*of_documents), block=block)
    assert torch.equal(found, truth)
    pairs = maxsim_pairs(queries, ends(*of_queries), documents[:12], ends(*of_documents[:4]), block=block)
    assert torch.equal(pairs, truth[:, :4].diagonal())
    half = maxsim.maxsim(queries.bfloat16(), ends(*of_queries), documents.bfloat16(), ends(*of_documents), block=block)
    assert half.dtype == torch.float32 and torch.equal(half, truth.float())


@pytest.mark.parametrize("block", [1, 30, 1 << 24])
def test_gradients_of_maxsim(block):
    """Gradients agree with finite differences; if products are equal, only the first token gets the gradient."""
    one, two = ends(2, 0, 3), ends(4, 0, 5)
    queries, documents = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 9))
    for measure in (maxsim.maxsim, maxsim_pairs):
        torch.autograd.gradcheck(lambda q, d, f=measure: f(q, one, d, two, block=block), (queries, documents))
    ones = torch.ones(9, 3, dtype=torch.float64, requires_grad=True)
    for measure in (maxsim.maxsim, maxsim_pairs):
        (grad,) = torch.autograd.grad(measure(queries, one, ones, two, block=block).sum(), ones)
        assert grad.abs().sum(-1).nonzero().flatten().tolist() == [0, 4]


def test_maxsim_holds_a_block_of_products(monkeypatch):
    sizes, largest = [], maxsim._largest

    def watched(grid, real, queries):
        products = grid.shape[0] * grid.shape[1] * queries.shape[-2]
        sizes.append((products, len(grid)))
        return largest(grid, real, queries)

    monkeypatch.setattr(maxsim, "_largest", watched)
    queries, documents = torch.randn(40, 4), torch.randn(200, 4)
    one = maxsim.maxsim(queries, ends(*[8] * 5), documents, ends(*[2] * 60, *[4] * 20), block=500)
    many = len(sizes)
    assert all(products <= 500 for products, _ in sizes) and many < 80
    assert torch.equal(one, maxsim.maxsim(queries, ends(*[8] * 5), documents, ends(*[2] * 60, *[4] * 20)))
    maxsim_pairs(queries, ends(*[8] * 5), documents, ends(*[40] * 5), block=500)
    assert len(sizes) > many + 1 and all(count == 1 for _, count in sizes[many + 1 :])


def test_what_maxsim_refuses():
    q, d = torch.randn(3, 4), torch.randn(5, 4)
    for arguments, error, words in (
        ((q, ends(3), d[:, :3], ends(5)), ValueError, r"documents has shape \(5, 3\); expected \(Td, D\) = \(\*, 4\)"),
        ((q[0], ends(3), d, ends(5)), ValueError, r"queries has shape \(4,\)"),
        ((q, ends(4), d, ends(5)), ValueError, "cu_seqlens ends at 4; expected the number of tokens, 3"),
        ((q, ends(3), d, ends(5).long()), TypeError, "cu_seqlens is torch.int64; expected a torch.int32 tensor"),
        ((q.long(), ends(3), d, ends(5)), TypeError, "queries is torch.int64"),
    ):
        with pytest.raises(error, match=words):
            maxsim.maxsim(*arguments)
    with pytest.raises(ValueError, match="there are 1 queries and 2 documents"):
        maxsim_pairs(q, ends(3), d, ends(2, 3))
    assert maxsim.maxsim(q[:0], ends(), d, ends(5)).shape == (0, 1)
    assert maxsim.maxsim(q, ends(3), d[:0], ends()).shape == (1, 0)


# ---- tokens that nothing attends to


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deberta-v2"])
def test_expanded_queries_are_those_of_transformers(name, attend):
    """transformers' mask hides tokens after a query as keys, but computes them all the same; positions count them."""
    theirs = AutoModel.from_config(AutoConfig.for_model(name, **CONFIGS[name])).double().eval()
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = BertConfig.from_dict(theirs.config.to_dict())
    model = BertModel(config, add_pooling_layer=False).double().eval()
    state = {n: t for n, t in theirs.state_dict().items() if not n.startswith("pooler.")}
    model.load_state_dict(state)
    vectors = TokenVectors(model, normalize=False, expansion=Expansion(7, 6, attend, False), skip_ids=[9])
    lengths = [3, 9, 7]
    texts = [torch.randint(10, 99, (n,)) for n in lengths]
    texts[0][1] = 9  # a skipped id, which only documents leave out
    found, found_ends = vectors(torch.cat(texts), ends(*lengths), query=True)
    assert found_ends.tolist() == [0, 7, 16, 23]
    ids = torch.full((3, 9), 6)
    shown, real = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)], real[row, : max(len(text), 7)] = text, True
        shown[row, : max(len(text), 7) if attend else len(text)] = 1
    with torch.no_grad():
        truth = theirs(ids, attention_mask=shown).last_hidden_state[real]
    assert (found - truth).abs().max() <= 1e-12 * truth.abs().max()
    kept, kept_ends = vectors(torch.cat(texts), ends(*lengths), query=False)
    assert kept_ends.tolist() == [0, 2, 11, 18] and len(kept) == 18


def test_training_with_expansion_drops_by_the_contract(monkeypatch):
    """Values and gradients are those of plain PyTorch with the same dropout masks, including attention's."""
    torch.manual_seed(0)
    model = BertModel(TINY, add_pooling_layer=False).double().train()
    twin = reference.BertModel(TINY).double()
    state = model.to_hugging_face(model.state_dict())
    twin.load_state_dict(state, strict=False)
    key = torch.tensor(77)
    monkeypatch.setattr(random, "new_key", lambda device: key)
    vectors = TokenVectors(model, normalize=False, expansion=Expansion(8, 4, False, True))
    lengths, texts = [3, 8, 1], torch.randint(5, 99, (12,))
    found, _ = vectors(texts, ends(*lengths), query=True)
    ids, shown = torch.full((3, 8), 4), torch.arange(8) < torch.tensor(lengths)[:, None]
    ids[shown] = texts
    masks = reference_masks(model, key, [8, 8, 8], 8)
    truth = twin(ids, shown, masks=masks)[0][-1].flatten(0, 1)
    assert (found - truth).abs().max() <= 1e-12 * truth.abs().max()
    weights = torch.randn_like(truth)
    (found * weights).sum().backward()
    (truth * weights).sum().backward()
    assert_gradients(model.to_hugging_face(gradients(model)), twin)


def test_a_sequence_that_sees_nothing_is_zeros():
    from fastbert.ops.attention import attention_to_seen

    qkv = torch.randn(5, 3, 2, 4, requires_grad=True)
    unseen = torch.tensor([False, True, True, True, True])
    out = attention_to_seen(qkv, ends(2, 3), 3, unseen, scale=0.5)
    assert torch.equal(out[2:], torch.zeros(3, 2, 4)) and torch.equal(out[1], qkv[0, 2])
    out.sum().backward()
    assert qkv.grad.isfinite().all() and (qkv.grad[2:] == 0).all()


# ---- directories, both ways; sentence-transformers reads and computes


QUERIES = ["", "what is it?", "a query of some more words, which is cut, and cut again " * 2]
DOCUMENTS = ["", "A document: of words (and signs).", "!?.", "Something else, longer than the others are. " * 6]
MARKED = {"query": "[unused0] ", "document": "[unused1] "}


def theirs(directory):
    """sentence-transformers' model of a directory, in float32 and in float64."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(directory), device="cpu")
    return model, copy.deepcopy(model).double()


def assert_same(directory, models=None):
    """Our encoder and sentence-transformers' of a directory compute the same vectors, in float64. Returns ours."""
    models = models or theirs(directory)
    exact = MultiVectorEncoder.from_pretrained(directory, dtype=torch.float64)
    plain = MultiVectorEncoder.from_pretrained(directory)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # texts are cut
        for texts, method in ((QUERIES, "encode_query"), (DOCUMENTS, "encode_document")):
            ours, float32 = (getattr(encoder, method)(texts) for encoder in (exact, plain))
            contender, truth = (getattr(model, method)(texts) for model in models)
            assert [x.shape for x in ours] == [x.shape for x in truth]
            assert (torch.cat(ours) - torch.cat(truth)).abs().max() <= 1e-12 * max(1, torch.cat(truth).abs().max())
            assert_like(torch.cat(float32), torch.cat(truth), torch.cat(contender))
            found.append(float32)
    q, d = ([x for x in vectors if len(x)] for vectors in found)
    truth = by_formula([x.double() for x in q], [x.double() for x in d])
    if plain.similarity_name == "meanmaxsim":
        truth = truth / torch.tensor([[len(x)] for x in q])
    assert_like(plain.similarity(q, d), truth, models[0].similarity(q, d))
    pairs = (model.similarity_pairwise(q[:2], d[:2]) for model in (plain, models[0]))
    assert_like(next(pairs), truth.diagonal()[:2], next(pairs))
    return exact


KINDS = {
    "colbert": {"expansion": QueryExpansion(12), "skip_words": string.punctuation, "document_length": 20},
    "attended": {"expansion": QueryExpansion(12, attend=True), "skip_words": [".", "nothinglikethis"]},
    "at least": {"expansion": QueryExpansion(10, False, "min", "[SEP]"), "query_length": 14, "max_length": 30},
    "at least, uncut": {"expansion": QueryExpansion(10, True, "min")},
    "plain": {"query_length": 9, "prompts": {}, "normalize": False, "dense": []},
    "both sides": {"skip_words": ["?", "."], "skip_tasks": ("query", "document"), "similarity": "meanmaxsim"},
    "deep": {
        "dense": [Dense(48, 24, activation="Tanh", residual=True), Dense(24, 24, False, "Identity", residual=True)],
        "expansion": QueryExpansion(12),
        "normalize": False,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_read_what_either_saves(tmp_path, kind):
    made = small(**{"prompts": {"query": "find: ", "document": "text: "}} | KINDS[kind])
    made.save_pretrained(tmp_path / "ours")
    models = theirs(tmp_path / "ours")
    models[0].save_pretrained(str(tmp_path / "theirs"))
    found = [assert_same(tmp_path / "ours", models), assert_same(tmp_path / "theirs", models)]
    for encoder in found:
        assert encoder.similarity_name == made.similarity_name and encoder.expansion == made.expansion
        assert encoder.skip_words == made.skip_words and encoder.width == made.width
    kept = MultiVectorEncoder.from_pretrained(tmp_path / "ours").encode_document(["One text."])
    assert torch.equal(kept[0], made.encode_document(["One text."])[0])


def pylate(directory, encoder, **settings):
    """Writes a directory as PyLate does: "[Q] " and "[D] ", with the space, are tokens added to the vocabulary."""
    encoder.save_pretrained(directory)
    tokenizer = encoder.tokenizer
    tokenizer.add_tokens(["[Q] ", "[D] "])
    encoder.model.resize_token_embeddings(tokenizer.get_vocab_size())
    encoder.save_pretrained(directory)
    modules = json.loads((directory / "modules.json").read_text())[:2]
    modules[0]["type"], modules[1]["type"] = "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"
    (directory / "modules.json").write_text(json.dumps(modules))
    path = directory / "1_Dense" / "config.json"
    kept = {n: v for n, v in json.loads(path.read_text()).items() if not n.startswith("module_")}
    path.write_text(json.dumps(kept))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 19, "do_lower_case": False}))
    config = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim", "model_type": "ColBERT"}
    config |= {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 11, "document_length": 20}
    config |= {"attend_to_expansion_tokens": False, "skiplist_words": list("!?"), "do_query_expansion": True}
    config = {name: value for name, value in (config | settings).items() if value != "left out"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attend_to_expansion_tokens": True, "skiplist_words": None, "prompts": {"query": "ask: ", "x": "y"}},
        {"do_query_expansion": False, "document_prefix": "", "query_prefix": "query: "},
        {"model_type": "left out", "query_length": None, "skiplist_words": "left out"},
        {"query_expansion": {"strategy": "min", "length": 7}, "query_length": 9},
        {name: "left out" for name in ("query_prefix", "document_prefix", "query_length", "document_length")}
        | {name: "left out" for name in ("attend_to_expansion_tokens", "skiplist_words", "do_query_expansion")},
    ],
)
def test_directories_of_pylate(tmp_path, settings):
    pylate(tmp_path, small(), **settings)
    assert_same(tmp_path)


def colbert(directory, metadata=None, pickled=False):
    """Writes a directory as ColBERT's own code does; metadata None leaves artifact.metadata out."""
    encoder = small()
    encoder.save_pretrained(directory)
    for path in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (directory / path).unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    state = encoder.model.to_hugging_face(encoder.model.state_dict())
    state = {f"bert.{name}": tensor for name, tensor in state.items()}
    state["linear.weight"] = encoder.vectors.dense[0].linear.weight.detach()
    (directory / "model.safetensors").unlink()
    if pickled:
        torch.save(state, directory / "pytorch_model.bin")
    else:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if metadata is not None:
        (directory / "artifact.metadata").write_text(json.dumps(metadata))
    return encoder


METADATA = {
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_maxlen": 14,
    "doc_maxlen": 24,
    "dim": 16,
    "mask_punctuation": True,
    "attend_to_mask_tokens": False,
    "similarity": "cosine",
    "interaction": "colbert",
}


@pytest.mark.parametrize(
    ("metadata", "pickled"),
    [
        (METADATA, False),
        (METADATA | {"mask_punctuation": False, "attend_to_mask_tokens": True}, True),
        ({"query_token_id": "[unused7]"}, False),
        (None, False),
    ],
)
def test_directories_of_colbert(tmp_path, metadata, pickled):
    colbert(tmp_path, metadata, pickled)
    with pytest.raises(ValueError, match="has a vector for each token, as ColBERT; expected one for each text"):
        SentenceEncoder.from_pretrained(tmp_path)
    assert_same(tmp_path)


def test_tokens_of_colbert_are_those_of_its_code(tmp_path):
    """ColBERT's code puts ". " before a text and replaces its token by the marker; there, padding becomes [MASK]."""
    colbert(tmp_path, METADATA)
    encoder, raw = MultiVectorEncoder.from_pretrained(tmp_path), small_tokenizer()
    for task, texts, marker in (("query", QUERIES[:2], "[unused0]"), ("document", DOCUMENTS[:3], "[unused1]")):
        truth = [raw.encode(". " + text).ids for text in texts]
        for ids in truth:
            ids[1] = raw.token_to_id(marker)
        assert encoder.tokenize(texts, task) == truth


@pytest.mark.parametrize("attend", [False, True])
def test_what_is_saved_for_colbert(tmp_path, attend):
    """sentence-transformers and fastbert read the same encoder from it, and transformers finds all of BERT in it."""
    colbert(tmp_path / "first", METADATA | {"attend_to_mask_tokens": attend})
    made = MultiVectorEncoder.from_pretrained(tmp_path / "first")
    made.save_pretrained(tmp_path / "second", format="colbert")
    written = json.loads((tmp_path / "second" / "artifact.metadata").read_text())
    expected = METADATA | {"attend_to_mask_tokens": attend}
    assert {name: value for name, value in expected.items() if name != "interaction"}.items() <= written.items()
    assert_same(tmp_path / "second")
    again = MultiVectorEncoder.from_pretrained(tmp_path / "second")
    for one, other in zip(again.encode_query(["a query"]), made.encode_query(["a query"]), strict=True):
        assert torch.equal(one, other)
    _, report = AutoModel.from_pretrained(tmp_path / "second", add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and set(report["unexpected_keys"]) <= {"linear.weight"}


def test_what_colbert_has_no_word_for(tmp_path):
    good = {"expansion": QueryExpansion(12), "skip_words": string.punctuation, "prompts": MARKED}
    for change, words in (
        ({"normalize": False}, "normalised vectors"),
        ({"expansion": QueryExpansion(12, strategy="min")}, "an expansion of a fixed length"),
        ({"expansion": None}, "an expansion of a fixed length"),
        ({"prompts": {"query": "find this: ", "document": "[unused1] "}}, "a single marker"),
        ({"skip_words": [","]}, "documents skipping punctuation or nothing"),
        ({"similarity": "meanmaxsim"}, "the similarity maxsim"),
        ({"dense": [Dense(48, 16)]}, "one Dense without bias"),
    ):
        with pytest.raises(ValueError, match=f"has no word for this encoder; expected {words}"):
            small(**good | change).save_pretrained(tmp_path / "no", format="colbert")
        assert not (tmp_path / "no").exists()
    unknown = good | {"prompts": {"query": "query: ", "document": "passage: "}}  # ColBERT would read [UNK]
    with pytest.raises(ValueError, match=r"expected a word of the vocabulary, such as \"\[unused0\]\""):
        small(**unknown).save_pretrained(tmp_path / "no", format="colbert")
    with pytest.raises(ValueError, match="format is 'onnx'; expected sentence-transformers, colbert"):
        small(**good).save_pretrained(tmp_path, format="onnx")


def test_texts_are_put_into_lower_case_if_the_settings_say_so(tmp_path):
    made = small()
    made.tokenizer.normalizer.lowercase = False
    made.save_pretrained(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    found = MultiVectorEncoder.from_pretrained(tmp_path)
    upper, lower = (["Something ELSE"], ["something else"])
    assert found.tokenize(upper, "query") == made.tokenize(lower, "query") != made.tokenize(upper, "query")


def test_directories_that_are_refused(tmp_path):
    small(expansion=QueryExpansion(12)).save_pretrained(tmp_path / "good")
    listed = json.loads((tmp_path / "good" / "modules.json").read_text())
    other = {"idx": 4, "name": "4", "path": "", "type": "sentence_transformers.x.HierarchicalTokenPooling"}
    for changes, words in (
        ([*listed, other], "HierarchicalTokenPooling; expected Transformer"),
        ([listed[0], listed[2], listed[1], listed[3]], "has the modules"),
        ([*listed[:3], listed[3] | {"type": "mine.Normalize"}], "mine.Normalize; expected Transformer"),
    ):
        (tmp_path / "good" / "modules.json").write_text(json.dumps(changes))
        with pytest.raises(ValueError, match=words):
            MultiVectorEncoder.from_pretrained(tmp_path / "good")
    (tmp_path / "good" / "modules.json").write_text(json.dumps(listed))
    for path, changes, words in (
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [5]}, "keep_only_token_ids is given"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "a Normalize of sentence_embedding"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "a Dense of sentence_embedding"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed"}}, "expected strategy and length"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "x", "length": 9}}, "strategy is 'x'"),
        ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "is of a SentenceTransformer"),
    ):
        before = (tmp_path / "good" / path).read_text()
        edit(tmp_path / "good" / path, **changes)
        with pytest.raises(ValueError, match=words):
            MultiVectorEncoder.from_pretrained(tmp_path / "good")
        (tmp_path / "good" / path).write_text(before)
    for name, changes, words in (
        ("l2", {"similarity": "l2"}, "similarity is 'l2'; expected 'cosine'"),
        ("flipr", {"interaction": "flipr"}, "interaction is 'flipr'"),
    ):
        colbert(tmp_path / name, METADATA | changes)
        with pytest.raises(ValueError, match=words):
            MultiVectorEncoder.from_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match="has no modules.json, and its architecture is not HF_ColBERT"):
        BertModel(TINY).save_pretrained(tmp_path / "bare")
        MultiVectorEncoder.from_pretrained(tmp_path / "bare")


def test_values_that_are_refused():
    for options, words in (
        ({"dense": [Dense(5, 4)]}, f"dense\\[0\\] takes 5 numbers; expected {TINY.hidden_size}"),
        ({"similarity": "cosine"}, "similarity is 'cosine'; expected maxsim"),
        ({"skip_tasks": ("passage",)}, "skip_tasks is"),
        ({"query_length": 2}, "query_length is 2; expected a number above the 2 special tokens"),
        ({"expansion": QueryExpansion(12), "query_length": 10}, "expansion's length is 12; expected 3 to 10"),
        ({"expansion": QueryExpansion(65)}, "expansion's length is 65; expected 3 to 64"),
        ({"expansion": QueryExpansion(12, token="[nothing]")}, r"the tokenizer has no \[nothing\]"),
    ):
        with pytest.raises(ValueError, match=words):
            small(**options)
    for options in ({"length": 0}, {"length": True}, {"strategy": "longest"}, {"attend": 1}):
        with pytest.raises(ValueError, match="QueryExpansion"):
            QueryExpansion(**options)
    made = small()
    with pytest.raises(ValueError, match="there is no prompt 'x'; this encoder has none"):
        made.encode_query(["a"], prompt_name="x")
    with pytest.raises(TypeError, match="texts is a str; expected several strings"):
        made.encode_document("a")
    with pytest.raises(ValueError, match="top_k is 0"):
        made.rank("a", ["b"], top_k=0)
    vectors = made.encode_document(["a", "b"])
    for wrong, error, words in (
        ([vectors[0].numpy()], TypeError, "given a ndarray; expected a Tensor"),
        ([vectors[0], vectors[1][:, 1:]], ValueError, "text 1 has vectors of shape"),
    ):
        with pytest.raises(error, match=f"similarity: {words}"):
            made.similarity(vectors, wrong)
    assert torch.equal(made.similarity(iter(vectors), iter(vectors)), made.similarity(vectors, vectors))
    for options, words in (
        ({"prompts": {"query": 3}}, r"prompts\['query'\] is a int"),
        ({"skip_words": [3]}, "skip_words"),
    ):
        with pytest.raises(TypeError, match=words):
            small(**options)
    with torch.no_grad():
        made.model.embeddings.word_embeddings.weight[made.tokenizer.encode("b").ids[1]] = torch.nan
    with pytest.raises(ValueError, match=r"the score of documents\[1\] is NaN"):
        made.rank("a", ["a", "b"])
    with pytest.raises(ValueError, match="task is 'passage'"):
        made.tokenize(["a"], "passage")
    with pytest.raises(ValueError, match="the encoder has a pooler"):
        TokenVectors(BertModel(TINY))
    config = BertConfig.from_dict({"model_type": "deberta-v2", **CONFIGS["deberta-v2"]})
    with pytest.raises(ValueError, match="attend is False; expected True, as DeBERTa-v2's convolution"):
        TokenVectors(BertModel(config, False), expansion=Expansion(8, 4, False, True))
    vectors = TokenVectors(BertModel(TINY, False), expansion=Expansion(4, 4, False, True))
    with pytest.raises(ValueError, match="a query has 5 tokens; expected at most 4"):
        vectors(torch.randint(5, 99, (5,)), ends(5), query=True)


def test_batches_prompts_and_rank():
    made = small(expansion=QueryExpansion(12), prompts=MARKED | {"other": "look: "})
    one, many = (made.encode_query(QUERIES[:2] * 5, tokens_per_batch=n) for n in (10**6, 12))
    done = []
    made.encode_document(DOCUMENTS, tokens_per_batch=1, progress=done.append)
    assert done == [1, 1, 1, 1] and all((a - b).abs().max() < 1e-5 for a, b in zip(one, many, strict=True))
    by_name, by_text = made.encode_document(["x"], prompt_name="other"), made.encode_document(["x"], prompt="look: ")
    assert torch.equal(by_name[0], by_text[0]) and made.encode_query([]) == []
    assert made.similarity([], []).shape == (0, 0)
    ranked = made.rank("what is it?", DOCUMENTS, return_documents=True)
    scores = made.similarity(made.encode_query(["what is it?"]), made.encode_document(DOCUMENTS))[0]
    assert [r["corpus_id"] for r in ranked] == scores.argsort(descending=True, stable=True).tolist()
    assert [r["text"] for r in ranked] == [DOCUMENTS[r["corpus_id"]] for r in ranked]
    assert made.rank("what is it?", DOCUMENTS, top_k=1)[0]["score"] == float(scores.max())


def test_the_mean_of_a_query_without_vectors_is_zero():
    made = small(similarity="meanmaxsim")
    queries = [torch.zeros(0, made.width), torch.randn(2, made.width)]
    found = made.similarity(queries, [torch.randn(3, made.width)])
    assert found[0].item() == 0 and found[1].isfinite()


def test_prepared(tmp_path):
    """Encoders with packed weights on a CPU obey the accuracy rule."""
    made = small(expansion=QueryExpansion(12), prompts=MARKED)
    made.save_pretrained(tmp_path)
    prepared = MultiVectorEncoder.from_pretrained(tmp_path, precision="fp32")
    exact = MultiVectorEncoder.from_pretrained(tmp_path, dtype=torch.float64)
    for method in ("encode_query", "encode_document"):
        found, contender, truth = (getattr(e, method)(["one text"])[0] for e in (prepared, made, exact))
        assert_like(found, truth, contender)


def test_what_is_wanted_from_the_hub(monkeypatch, tmp_path):
    """Every file that is read from directories of ours, ColBERT's or BGE-M3's; of two forms of weights the safe one."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    named = [
        "config.json",
        "modules.json",
        "spm.model",
        "1_Dense/config.json",
        "artifact.metadata",
        "2_MultiVectorMask/config.json",
    ]
    safe = ["model.safetensors", "1_Dense/model.safetensors", "sparse_linear.pt", "colbert_linear.pt"]
    pickled = ["pytorch_model.bin", "1_Dense/pytorch_model.bin"]
    (tmp_path / "model.safetensors").touch()
    wanted = []

    def snapshot(name, revision, allow_patterns):
        wanted.append(list(filter_repo_objects([*named, *safe, *pickled, "x.onnx"], allow_patterns=allow_patterns)))
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    hub.directory_of("someone/colbert")
    hub.directory_of("someone/colbert", weights=False)
    dense = tmp_path / "1_Dense"
    dense.mkdir()
    hub.directory_of("someone/colbert")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    hub.directory_of("someone/colbert")
    (dense / "model.safetensors").touch()
    hub.directory_of("someone/colbert")
    downloads = [
        [named + safe],
        [named],
        [named + safe, pickled[1:]],
        [named + safe, pickled],
        [named + safe, pickled[:1]],
    ]
    assert wanted == [*itertools.chain(*downloads)]


def test_a_marker_that_is_several_tokens_has_no_place_in_colbert_s_files(tmp_path):
    """It is one token once it is read from them, so the encoder would be another."""
    colbert(tmp_path / "first", METADATA)
    made = MultiVectorEncoder.from_pretrained(tmp_path / "first")
    content = json.loads(made.tokenizer.to_str())
    markers = {prompt.strip() for prompt in made.prompts.values()}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in markers]
    tokenizer = type(made.tokenizer).from_str(json.dumps(content))
    options = {"dense": made.vectors.dense, "prompts": made.prompts, "expansion": made.expansion}
    options |= {"skip_words": made.skip_words, "document_length": made.document_length}
    other = MultiVectorEncoder(made.model, tokenizer, **options)
    with pytest.raises(ValueError, match="the format 'colbert' makes query's marker one token, here it is"):
        other.save_pretrained(tmp_path / "second", format="colbert")
    assert not (tmp_path / "second").exists()
