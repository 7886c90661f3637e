"""BGE-M3 compared with its formulas, computed on transformers' XLM-RoBERTa in float64."""

import json

import pytest
import torch
from small_models import CONFIGS, TINY, assert_like
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import XLMRobertaConfig, XLMRobertaModel

from fastbert import BertModel
from fastbert.data.tokenizer import save_tokenizer
from fastbert.inference import M3Encoder, SentenceEncoder

TEXTS = ["ab ba ab", "", "c! cab ab", "ba ca ab ca ba bc a b c bb" * 2, "a"]
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def tokenizer():
    """A tokenizer in the form of XLM-RoBERTa's: a unigram model, with <s> and </s> around a text."""
    pieces = [(token, 0.0) for token in SPECIAL] + [("▁", -3.0)]
    pieces += [(piece, -2.0 - len(piece) / 9) for piece in ("a", "b", "c", "▁a", "▁ab", "▁ba", "ca", "b!")]
    made = Tokenizer(models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ends = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A directory as FlagEmbedding writes it, and the model and the two linear layers in it, in float64."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("m3")
    config = XLMRobertaConfig(**CONFIGS["xlm-roberta"] | {"max_position_embeddings": 80})
    model = XLMRobertaModel(config, add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("LayerNorm.weight") else 0.0, std=0.3)
    model.save_pretrained(directory)
    save_tokenizer(tokenizer(), directory, 60)
    layers = {"sparse_linear.pt": nn.Linear(48, 1), "colbert_linear.pt": nn.Linear(48, 24)}
    for name, layer in layers.items():
        torch.save(layer.state_dict(), directory / name)
    return directory, model.double(), *(layer.double() for layer in layers.values())


def by_formula(original, texts):
    """For each text alone: the dense vector, the weights by token, and the vectors of the tokens."""
    _, model, sparse, colbert = original
    found = []
    for text in texts:
        ids = tokenizer().encode(text).ids
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            weights, vectors = sparse(hidden).relu().squeeze(-1).tolist(), colbert(hidden[1:])
        best = {}
        for token, weight in zip(ids, weights, strict=True):
            if token not in (0, 1, 2, 3) and weight > 0:
                best[token] = max(weight, best.get(token, 0))
        found.append((hidden[0] / hidden[0].norm(), best, vectors / vectors.norm(dim=-1, keepdim=True)))
    return found


def scored(query, document):
    weights = sum(weight * document[1].get(token, 0) for token, weight in query[1].items())
    late = sum(max(float(a @ b) for b in document[2]) for a in query[2]) / len(query[2])
    return [float(query[0] @ document[0]), weights, late]


@pytest.mark.parametrize("tokens_per_batch", [1, 30, 2048])
def test_the_three_embeddings(original, tokens_per_batch):
    encoder = M3Encoder.from_pretrained(original[0], dtype=torch.float64)
    found, truth = encoder.encode(TEXTS, tokens_per_batch=tokens_per_batch), by_formula(original, TEXTS)
    weights = found.sparse.to_dense()
    assert found.sparse.is_coalesced() and found.sparse.shape == (5, 99)
    assert any(len(best) > 1 for _, best, _ in truth) and any(3 in tokenizer().encode(text).ids for text in TEXTS)
    for i, (dense, best, vectors) in enumerate(truth):
        expected = torch.zeros(99, dtype=torch.float64)
        for token, weight in best.items():
            expected[token] = weight
        for one, other in ((found.dense[i], dense), (weights[i], expected), (found.multi_vector[i], vectors)):
            assert one.shape == other.shape and (one - other).abs().max() <= 1e-12 * max(1, other.abs().max())
    assert found.sparse._nnz() == sum(len(best) for _, best, _ in truth)
    names = [{tokenizer().id_to_token(t): pytest.approx(w, rel=1e-12) for t, w in best.items()} for _, best, _ in truth]
    assert encoder.lexical_weights(found.sparse) == names


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.4, 0.2, 0.6), (1.0, 0.0, 0.0)])
def test_scores(original, weights):
    encoder, queries = M3Encoder.from_pretrained(original[0], dtype=torch.float64), ["ab ca", "ba a", "cab ab ba"]
    of_queries, of_texts = by_formula(original, queries), by_formula(original, TEXTS)
    single = torch.tensor([[scored(q, d) for d in of_texts] for q in of_queries], dtype=torch.float64)
    dense, sparse, late = single.unbind(-1)
    both = (weights[0] * dense + weights[1] * sparse) / (weights[0] + weights[1])
    total = (weights[0] * dense + weights[1] * sparse + weights[2] * late) / sum(weights)
    found = encoder.scores(encoder.encode(queries), encoder.encode(TEXTS), weights)
    pairs = encoder.compute_score(list(zip(queries, TEXTS[:3], strict=True)), weights, tokens_per_batch=20)
    for name, truth in zip(found._fields, (dense, sparse, late, both, total), strict=True):
        largest = max(1.0, float(truth.abs().max()))
        assert (getattr(found, name) - truth).abs().max() <= 1e-12 * largest, name
        assert (getattr(pairs, name) - truth[:, :3].diagonal()).abs().max() <= 1e-12 * largest, name
    assert float(sparse.abs().max()) > 0


def test_float32_and_saving(original, tmp_path):
    """A saved encoder gives the same bits; sentence-transformers and SentenceEncoder read its dense part."""
    from sentence_transformers import SentenceTransformer

    made, exact = (M3Encoder.from_pretrained(original[0], dtype=dtype) for dtype in (None, torch.float64))
    made.save_pretrained(tmp_path)
    again = M3Encoder.from_pretrained(tmp_path)
    found, truth, saved = (encoder.encode(TEXTS) for encoder in (made, exact, again))
    assert found.dense.dtype == found.sparse.dtype == torch.float32
    assert torch.equal(found.dense, saved.dense) and torch.equal(found.sparse.to_dense(), saved.sparse.to_dense())
    assert all(torch.equal(a, b) for a, b in zip(found.multi_vector, saved.multi_vector, strict=True))
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_like(found.dense, truth.dense, theirs)
    assert_like(SentenceEncoder.from_pretrained(tmp_path).encode(TEXTS), truth.dense, theirs)
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        one, other = (torch.load(d / name, weights_only=True) for d in (tmp_path, original[0]))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_kinds_lengths_and_no_text(original):
    encoder = M3Encoder.from_pretrained(original[0])
    assert encoder.max_length == 60
    alone = encoder.encode(TEXTS[:2], sparse=False, multi_vector=False)
    assert alone.sparse is alone.multi_vector is None and alone.dense.shape == (2, 48)
    weights = encoder.encode(TEXTS[:2], dense=False, multi_vector=False)
    assert weights.dense is None and weights.sparse.shape == (2, 99)
    assert encoder.lexical_weights(weights.sparse.index_select(0, torch.tensor([1, 0]))) == [
        *reversed(encoder.lexical_weights(weights.sparse))
    ]
    none = encoder.encode([])
    assert none.dense.shape == (0, 48) and none.sparse.shape == (0, 99) and none.multi_vector == []
    assert encoder.compute_score([]).total.shape == (0,)
    short, done = M3Encoder.from_pretrained(original[0], max_length=4), []
    with pytest.warns(UserWarning, match="longer than 4 tokens"):
        cut = short.encode(TEXTS, progress=done.append)
    assert max(map(len, cut.multi_vector)) == 3 and sum(done) == 5


def test_what_is_refused(original, tmp_path):
    encoder, bert = M3Encoder.from_pretrained(original[0]), BertModel(TINY, add_pooling_layer=False)
    linear = encoder.sparse, encoder.multi_vector
    for arguments, words in (
        ((bert, tokenizer(), *linear), "the model is a bert; expected an xlm-roberta"),
        ((encoder.model, tokenizer(), linear[1], linear[1]), "sparse is 48 to 24; expected 48 to 1"),
        ((encoder.model, tokenizer(), linear[0], nn.Linear(9, 5)), "multi_vector is 9 to 5; expected 48 to 5"),
        ((encoder.model, tokenizer(), *linear, 79), "max_length is 79; expected 3 to 78"),
        ((encoder.model, Tokenizer(models.Unigram([("a", 0.0)], 0)), *linear), "the tokenizer has no cls_token"),
    ):
        with pytest.raises(ValueError, match=words):
            M3Encoder(*arguments)
    with pytest.raises(ValueError, match="no kind of embeddings is asked for"):
        encoder.encode(TEXTS, dense=False, sparse=False, multi_vector=False)
    with pytest.raises(TypeError, match="texts is a str"):
        encoder.encode("one")
    with pytest.raises(TypeError, match=r"M3Encoder: pairs\[0\] is 'ab'; expected two texts"):
        encoder.compute_score(["ab"])
    both = encoder.encode(TEXTS), encoder.encode(TEXTS, sparse=False)
    with pytest.raises(ValueError, match="there are no sparse embeddings"):
        encoder.scores(*both)
    with pytest.raises(ValueError, match="lexical_weights: sparse has shape"):
        encoder.lexical_weights(both[0].sparse[0])
    for weights in ((1, 1), (1, -1, 1), (0, 0, 1), (float("inf"), 1, 1), (1, 1, float("nan"))):
        with pytest.raises(ValueError, match="weights are"):
            encoder.scores(both[0], both[0], weights)
    encoder.save_pretrained(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(FileNotFoundError, match="has no sparse_linear.pt; expected one, as BGE-M3 has it"):
        M3Encoder.from_pretrained(tmp_path)
    torch.save({"weight": torch.zeros(1, 48)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ValueError, match=r"holds weight \(1, 48\); expected the weight and the bias"):
        M3Encoder.from_pretrained(tmp_path)
    torch.save(nn.Linear(48, 1), tmp_path / "sparse_linear.pt")
    with pytest.raises(ValueError, match="holds more than tensors, perhaps code, which is never run"):
        M3Encoder.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "modules.json").read_text())[1]["path"] == "1_Pooling"
