"""Contrastive training: losses equal sentence-transformers', GradCache and processes equal one plain batch; data."""

import copy
import gzip
import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from contrastive_process import batch_of, tuples
from small_models import DEVICE, TINY, assert_gradients, assert_like, gradients, hugging_face, minilm, ours
from test_trainer import sgd
from torch import nn

from fastbert import BertModel, checkpoint
from fastbert.data import (
    ContrastiveCollator,
    ContrastiveDataset,
    create_dataloader,
    get_tokenizer,
    read_columns,
    read_texts,
)
from fastbert.inference import SentenceEncoder
from fastbert.pooling import pool
from fastbert.training import (
    AMPTrainer,
    ContrastiveModel,
    CoSENT,
    CosineMSE,
    GradCache,
    InBatchNegatives,
    MarginMSE,
    Matryoshka,
    Triplet,
    compute_loader_loss,
    contrastive,
    contrastive_loss,
    to_device,
)

HERE = Path(__file__).resolve().parent


def encoder(**changes):
    return BertModel(TINY.changed(**changes), add_pooling_layer=False).double().to(DEVICE)


def without_dropout():
    return encoder(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def batch(seed=0, count=6, columns=2, scores=0):
    return to_device(batch_of(*tuples(seed, count, columns, scores)), DEVICE)


# ---- losses, against sentence-transformers


class Given(nn.Module):
    """Takes the place of a sentence-transformers model, and returns the given embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["embeddings"]}

    def get_embedding_dimension(self):
        return 12


def in_batch(losses, model, **options):
    return losses.MultipleNegativesRankingLoss(model, **options)


def both_ways(losses, model):
    return in_batch(losses, model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")


def dot_products(losses, model):
    return in_batch(losses, model, scale=1.0, similarity_fct=lambda a, b: a @ b.T)


def dims_of_margins(losses, model):
    return losses.MatryoshkaLoss(model, losses.MarginMSELoss(model), [12, 4])


def in_one_type(found, scores):
    """Theirs are in float32, which PyTorch 2.11 does not take beside float64."""
    return F.mse_loss(found, scores.to(found))


TWINS = {  # our loss, sentence-transformers', number of columns, shape of an example's scores (None for no scores)
    "pairs": (InBatchNegatives(), in_batch, 2, None),
    "hard negatives": (InBatchNegatives(scale=5.0), lambda x, m: in_batch(x, m, scale=5.0), 4, None),
    "dot products": (InBatchNegatives(1.0, similarity="dot"), dot_products, 3, None),
    "symmetric": (InBatchNegatives(symmetric=True), both_ways, 2, None),
    "symmetric, hard": (InBatchNegatives(symmetric=True), both_ways, 3, None),
    "triplets": (Triplet(), lambda x, m: x.TripletLoss(m), 3, None),
    "cosine triplets": (
        Triplet(0.5, "cosine"),
        lambda x, m: x.TripletLoss(m, distance_metric=x.TripletDistanceMetric.COSINE, triplet_margin=0.5),
        3,
        None,
    ),
    "cosines": (CosineMSE(), lambda x, m: x.CosineSimilarityLoss(m, in_one_type), 2, ()),
    "order": (CoSENT(), lambda x, m: x.CoSENTLoss(m), 2, ()),
    "margins": (MarginMSE(), lambda x, m: x.MarginMSELoss(m), 3, ()),
    "several margins": (MarginMSE(), lambda x, m: x.MarginMSELoss(m), 4, (2,)),
    "teacher's scores": (MarginMSE(), lambda x, m: x.MarginMSELoss(m), 4, (3,)),
    "dims": (
        Matryoshka(InBatchNegatives(), [12, 8, 3], [1, 0.5, 2]),
        lambda x, m: x.MatryoshkaLoss(m, in_batch(x, m), [12, 8, 3], [1, 0.5, 2]),
        3,
        None,
    ),
    "dims of order": (Matryoshka(CoSENT(), [12, 4]), lambda x, m: x.MatryoshkaLoss(m, x.CoSENTLoss(m), [12, 4]), 2, ()),
    "dims of margins": (Matryoshka(MarginMSE(), [12, 4]), dims_of_margins, 3, ()),
}


def assert_twins(ours, theirs, embeddings, scores):
    """Asserts that the losses are equal, and their gradients with respect to the embeddings."""
    found = []
    for loss_of in (ours, theirs):
        leaf = embeddings.clone().requires_grad_()
        loss = loss_of(leaf, scores)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    (loss, grad), (expected, expected_grad) = found
    assert expected > 0 and abs(loss - expected) <= 1e-12 * expected
    assert (grad - expected_grad).abs().max() <= 1e-12 * expected_grad.abs().max()


@pytest.mark.parametrize("name", TWINS)
def test_losses_are_those_of_sentence_transformers(name):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer import losses

    ours, theirs, columns, scores = TWINS[name]
    embeddings = torch.randn(columns, 7, 12, dtype=torch.float64)
    embeddings[1] += embeddings[0]  # so that most positives are the nearest
    scores = None if scores is None else torch.randint(0, 5, (7, *scores)).double() / 4  # some equal, exact in float32
    twin = theirs(losses, Given())
    assert_twins(ours, lambda columns, scores: twin([{"embeddings": x} for x in columns], scores), embeddings, scores)


def test_contrastive_loss_by_its_formula():
    anchors, candidates = torch.randn(3, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    targets, expected = torch.tensor([4, 0, 5]), 0.0
    for anchor, own in zip(anchors, targets, strict=True):
        cosines = [float(anchor @ c / anchor.norm() / c.norm()) for c in candidates]
        expected += math.log(sum(math.exp(7 * x) for x in cosines)) - 7 * cosines[own]
    found = float(contrastive_loss(anchors, candidates, targets, scale=7.0))
    assert found == pytest.approx(expected / 3, rel=1e-13)
    first = contrastive_loss(anchors, candidates, scale=7.0)
    assert torch.equal(first, contrastive_loss(anchors, candidates, torch.arange(3), scale=7.0)) and first != found


@pytest.mark.parametrize("symmetric", [False, True])
def test_equal_texts_are_no_negatives(symmetric):
    """The truth is the formula, anchor by anchor. Pairs 0 and 3 share an answer, pairs 1 and 4 a question, pairs 4 and
    5 an answer; hard negatives are the answers of pair 2 (its own), of pairs 0 and 3, and of pairs 4 and 5."""
    keys = torch.tensor([[0, 1, 2, 3, 1, 5], [10, 11, 12, 10, 14, 14], [14, 21, 12, 23, 24, 10]])
    embeddings = torch.randn(3, 6, 5, dtype=torch.float64)
    unit = F.normalize(embeddings, dim=-1).tolist()

    def loss_of(query, own, negatives):
        cosines = [20 * sum(a * b for a, b in zip(query, x, strict=True)) for x in (own, *negatives)]
        return math.log(sum(map(math.exp, cosines))) - cosines[0]

    right = {0: {3, 11}, 1: {4, 5, 6}, 2: {8}, 3: {0, 11}, 4: {1, 5, 6}, 5: {4, 6}}  # 6 to 11 are hard negatives
    right_anchors = {0: {3}, 1: {4}, 2: set(), 3: {0}, 4: {1, 5}, 5: {1, 4}}
    candidates, expected = [*unit[1], *unit[2]], 0.0
    for i, others in right.items():
        expected += loss_of(unit[0][i], unit[1][i], [c for n, c in enumerate(candidates) if n not in {i, *others}])
    if symmetric:
        for i, others in right_anchors.items():
            wrong = [x for n, x in enumerate(unit[0]) if n not in {i, *others}]
            expected = expected + loss_of(unit[1][i], unit[0][i], wrong)
        expected /= 2
    loss = InBatchNegatives(symmetric=symmetric, skip_equal=True)
    assert float(loss(embeddings, keys=keys)) == pytest.approx(expected / 6, rel=1e-12)
    parts = [float(loss(embeddings, None, part, keys)) * n for part, n in ((slice(0, 2), 2), (slice(2, 6), 4))]
    assert sum(parts) == pytest.approx(expected, rel=1e-12)
    different = torch.arange(18).view(3, 6)
    assert torch.equal(loss(embeddings, keys=different), InBatchNegatives(symmetric=symmetric)(embeddings))


def test_a_triplet_of_one_text_has_finite_gradients():
    embeddings = torch.ones(3, 2, 4, requires_grad=True)
    Triplet()(embeddings).backward()
    assert embeddings.grad.isfinite().all()


# ---- the model


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_model_is_transformers_and_plain_pytorch(pooling):
    """The truth is a padded forward of transformers, pooled with the mask, and the formula with hard negatives."""
    theirs = hugging_face(**NO_DROPOUT).double()
    mine = ours(theirs)
    mine.pooler = theirs.pooler = None
    model, inputs = ContrastiveModel(mine, InBatchNegatives(), pooling=pooling, max_tokens=30), batch(columns=3)
    out = model(**inputs)

    texts = inputs["input_ids"].split(inputs["cu_seqlens"].diff().tolist())
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    hidden = theirs(nn.utils.rnn.pad_sequence(texts, batch_first=True), mask).last_hidden_state
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors = hidden[:, 0] if pooling == "cls" else means
    assert (out.embeddings.flatten(0, 1) - vectors).abs().max() <= 1e-12 * vectors.abs().max()
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    expected = -(20 * unit[:6] @ unit[6:].T).log_softmax(-1).diagonal().mean()
    assert abs(out.loss - expected) <= 1e-12 * abs(expected)

    out.loss.backward()
    expected.backward()
    assert_gradients(checkpoint.to_hugging_face(gradients(mine)), theirs)


def test_a_trained_encoder_gives_its_embeddings():
    """SentenceEncoder gives the embeddings that training compared."""
    tokenizer = get_tokenizer(minilm())
    model = ContrastiveModel(BertModel(TINY.changed(vocab_size=30522), add_pooling_layer=False), CosineMSE()).eval()
    texts = {"first": ["One text.", "Another."], "second": ["A third, which is longer.", "4"]}
    inputs = ContrastiveCollator()(list(ContrastiveDataset(texts, tokenizer, scores=[0, 1])))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        vectors, truth = (F.normalize(m(**inputs).embeddings, dim=-1).flatten(0, 1) for m in (model, exact))
    encoder = SentenceEncoder(model.encoder, tokenizer)
    assert_like(encoder.encode([*texts["first"], *texts["second"]]), truth, vectors)


def test_under_autocast_the_loss_is_float32():
    """Both float32 computations of PyTorch contend: with the scale applied before the product, and after it."""
    model, inputs = ContrastiveModel(encoder().float(), InBatchNegatives()).eval(), batch()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = model(**inputs)
    assert out.loss.dtype == out.embeddings.dtype == torch.float32
    unit, rounded = F.normalize(out.embeddings.double(), dim=-1), F.normalize(out.embeddings, dim=-1)
    targets = torch.arange(6, device=DEVICE)
    before, after = lambda x: 20 * x[0] @ x[1].T, lambda x: 20 * (x[0] @ x[1].T)
    truth, *contenders = (
        F.cross_entropy(f(x), targets) for f, x in ((before, unit), (before, rounded), (after, rounded))
    )
    assert_like(out.loss, truth, *contenders)


# ---- GradCache


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10_000])
def test_cached_gradients_are_those_of_all_activations(max_tokens):
    """With dropout, which must be drawn as for one chunk after the other."""
    model, inputs = encoder().train(), batch(columns=3)
    ids, ends = inputs["input_ids"], inputs["cu_seqlens"].tolist()

    def embed(ids, cu_seqlens, max_seqlen):
        assert len(ids) <= max_tokens or len(cu_seqlens) == 2
        sizes.append(len(ids))
        return pool(model(ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).last_hidden_state, cu_seqlens, "mean")

    def plain():
        """The chunks, written out independently: each has as many whole texts as fit, or one text."""
        parts, first = [], 0
        while first < len(ends) - 1:
            last = max([i for i in range(first, len(ends)) if ends[i] - ends[first] <= max_tokens] + [first + 1])
            own = torch.tensor(ends[first : last + 1], dtype=torch.int32, device=DEVICE) - ends[first]
            parts.append(embed(ids[ends[first] : ends[last]], own, int(own.diff().max())))
            first = last
        return torch.cat(parts)

    found = []
    for embeddings in (plain, lambda: GradCache(embed, max_tokens)(ids, inputs["cu_seqlens"])):
        model.zero_grad()
        torch.manual_seed(3)
        sizes = []
        loss = InBatchNegatives()(embeddings().unflatten(0, (3, 6)))
        loss.backward()
        found.append((loss.detach(), sizes, gradients(model), torch.rand(3)))
    (expected, chunks, truth, drawn), (loss, cached, grads, drawn_after) = found
    assert torch.equal(loss, expected) and torch.equal(drawn, drawn_after)
    assert cached[: len(chunks)] == chunks and len(cached) == len(chunks) * (2 if len(chunks) > 1 else 1)
    assert (len(chunks) > 1) == (max_tokens < 10_000)
    assert_gradients(grads, truth)


def test_the_cache_keeps_no_activations():
    """Of a chunk, only the embeddings are kept until the backward recomputes it."""
    kept = []

    def keep(x):
        kept.append(x.numel())
        return x

    for max_tokens in (None, 20):
        model, inputs = ContrastiveModel(encoder().train(), InBatchNegatives(), max_tokens=max_tokens), batch(count=20)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**inputs)
        if max_tokens is None:
            whole, kept = sum(kept), []
    tokens, size = len(inputs["input_ids"]), TINY.hidden_size
    assert whole > 3 * 5 * tokens * size  # several (T, C) tensors in each layer
    assert sum(kept) <= 12 * 40 * size  # some (B, C) tensors in the loss


# ---- in AMPTrainer


def test_accumulated_unequal_batches_are_one_big_batch(tmp_path):
    """For a loss that is a mean over pairs. The loss over a loader equals that of one big batch too."""
    texts, scores = tuples(0, 7, 2, 1)
    model = ContrastiveModel(without_dropout(), CosineMSE(), max_tokens=15)
    whole = copy.deepcopy(model)
    loss = whole(**to_device(batch_of(texts, scores), DEVICE)).loss
    loss.backward()
    parts = [batch_of(texts[part], scores[part]) for part in (slice(0, 1), slice(1, 5), slice(5, 7))]
    assert compute_loader_loss(model, parts, DEVICE) == pytest.approx(loss.item(), rel=1e-12)
    sgd(model, tmp_path, gradient_accumulation_steps=len(parts)).train(parts, max_steps=1)
    new = dict(model.named_parameters())
    assert_gradients({n: (p - new[n]).detach() for n, p in whole.named_parameters()}, gradients(whole))


def test_training_learns_to_pair(tmp_path):
    """Pairs have the same words in another order. From random weights, with dropout, in chunks, in bfloat16."""
    tokenizer, words = get_tokenizer(minilm()), "red blue green sun moon star tree leaf root sand sea sky fox".split()
    anchors = [f"{a} {b}" for i, a in enumerate(words) for b in words[:i]]
    columns = {"query": anchors, "answer": [" ".join(reversed(text.split())) for text in anchors]}
    dataset = ContrastiveDataset(columns, tokenizer, prompts={"query": "find: "})
    loader = create_dataloader(dataset, ContrastiveCollator(), 33, drop_last=True)
    assert [len(batch["cu_seqlens"]) - 1 for batch in loader] == [66, 66]  # of 78 pairs 12 are left out
    model = ContrastiveModel(
        BertModel(TINY.changed(vocab_size=30522), add_pooling_layer=False).to(DEVICE),
        Matryoshka(InBatchNegatives(symmetric=True), (48, 16)),
        max_tokens=100,
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
    options = {"mixed_precision": "bf16", "callbacks": [lambda _, event, row: losses.append(row.get("loss"))]}
    AMPTrainer(model, optimizer, output_dir=tmp_path, progress=False, **options).train(loader, max_steps=5)
    first, *_, last = filter(None, losses)
    assert last < 0.6 * first, losses


# ---- several processes


class Ranks:
    """Takes the place of torch.distributed: ranks are threads, which wait for each other to exchange tensors."""

    def __init__(self, count):
        self.here, self.barrier, self.slots = threading.local(), threading.Barrier(count, timeout=30), [None] * count

    def is_available(self):
        return True

    is_initialized = is_available

    def get_world_size(self):
        return len(self.slots)

    def get_rank(self):
        return self.here.rank

    def exchange(self, x):
        self.slots[self.here.rank] = x.detach().clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def all_gather(self, parts, x):
        for part, found in zip(parts, self.exchange(x), strict=True):
            part.copy_(found)

    def all_reduce(self, x):
        x.copy_(sum(self.exchange(x)))


def assert_ranks_add_up(monkeypatch, whole, texts, of_texts, completed=lambda batch: batch):
    """Asserts that three ranks with unequal shares of seven tuples have, in sum, the loss and gradients of the whole.

    Returns the ranks' models and losses. completed: adds to a batch what else the loss reads.
    """
    expected = whole(**completed(batch_of(texts, of_texts))).loss
    expected.backward()
    ranks, shares = Ranks(3), [slice(0, 1), slice(1, 5), slice(5, 7)]
    models = [copy.deepcopy(whole) for _ in shares]
    monkeypatch.setattr(contrastive, "dist", ranks)

    def loss_of(rank):
        ranks.here.rank, share, model = rank, shares[rank], models[rank]
        inputs = completed(batch_of(texts[share], of_texts if of_texts is None else of_texts[share]))
        model.zero_grad()
        loss = model(**inputs).loss
        (loss * model.label_counts(inputs).item() / 7).backward()
        return loss

    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(loss_of, range(3)))
    assert (losses[0] + 4 * losses[1] + 2 * losses[2]).item() / 7 == pytest.approx(expected.item(), rel=1e-12)
    assert_gradients({name: sum(gradients(model)[name] for model in models) for name in gradients(whole)}, whole)
    return models, losses


def with_keys(batch):
    """Adds keys to a batch as ContrastiveCollator does, here made of each text's first eight tokens."""
    texts = batch["input_ids"].split(batch["cu_seqlens"].diff().tolist())
    keys = torch.tensor([sum(token * 99**place for place, token in enumerate(text.tolist()[:8])) for text in texts])
    return batch | {"keys": keys.view(batch["columns"], -1)}


@pytest.mark.parametrize(
    ("loss", "columns", "scores"),
    [
        (InBatchNegatives(), 3, 0),
        (Matryoshka(InBatchNegatives(skip_equal=True, symmetric=True), [48, 7]), 3, 0),
        (Matryoshka(CoSENT(), [48, 5]), 2, 1),
    ],
)
def test_negatives_of_all_ranks(monkeypatch, loss, columns, scores):
    texts, of_texts = tuples(0, 7, columns, scores)
    texts[6][1] = texts[0][1]  # two ranks share an answer
    whole = ContrastiveModel(without_dropout().cpu(), loss).train()
    models, losses = assert_ranks_add_up(monkeypatch, whole, texts, of_texts, with_keys)
    of_own_anchors = not isinstance(getattr(loss, "loss", loss), CoSENT)
    assert (len({round(loss.item(), 9) for loss in losses}) == 3) == of_own_anchors
    models[0].eval()  # evaluation does not wait for other ranks
    with torch.no_grad():
        assert models[0](**with_keys(batch_of(texts[:3], of_texts if of_texts is None else of_texts[:3]))).loss > 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_train_as_one(tmp_path, processes):
    """With gloo, AMPTrainer, DDP and FSDP2, the step equals that of one process with the whole batch, to 1e-12."""
    command = [sys.executable, str(HERE / "contrastive_process.py"), str(tmp_path)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [subprocess.Popen([*command, str(rank), str(processes)], **options) for rank in range(processes)]
    for process in started:
        answer, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and answer.count("equal") == 8 and answer.count("refused") == 2, answer[-3000:]


# ---- data


def test_columns_become_packed_texts(tmp_path):
    """Each text is encoded with its prompt; all anchors come first, then all positives, then all negatives."""
    lines = [
        {"anchor": "how warm?", "positive": "Thirty degrees, and rising.", "negative": "no", "score": 1},
        {"anchor": "é", "positive": "The letter e with an acute accent", "negative": "a b c", "score": 0.5},
        {"anchor": "what is it", "positive": "it", "negative": "this text is cut because it is long", "score": 0.25},
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    columns = read_columns(file)
    scores = columns.pop("score")
    tokenizer = get_tokenizer(minilm())
    prompts = {"anchor": "query: ", "negative": "passage: "}
    with pytest.warns(UserWarning, match="1 of 3 texts have more than max_length, 9, tokens"):
        dataset = ContrastiveDataset(columns, tokenizer, scores=scores, prompts=prompts, max_length=9)
    found = ContrastiveCollator()([dataset[i] for i in (2, 0)])
    rows = [lines[2], lines[0]]
    whole = [
        tokenizer.encode(prompts.get(n, "") + row[n]).ids for n in ("anchor", "positive", "negative") for row in rows
    ]
    expected = [ids if len(ids) <= 9 else [*ids[:8], ids[-1]] for ids in whole]
    texts = found["input_ids"].split(found["cu_seqlens"].diff().tolist())
    assert [text.tolist() for text in texts] == expected
    assert (found["columns"], found["max_seqlen"]) == (3, 9) and found["labels"].tolist() == [0.25, 1.0]
    assert found["labels"].dtype == torch.float32
    assert dataset.lengths[2] == sum(map(len, expected[::2]))
    assert found["keys"].shape == (3, 2) and len(set(found["keys"].flatten().tolist())) == 6
    again = ContrastiveCollator()([dataset[i] for i in (0, 1, 0)])["keys"]
    assert torch.equal(again[:, [0, 2]], found["keys"][:, [1, 1]]) and again.dtype == torch.int64
    with pytest.raises(ValueError, match="drop_last goes with batch_size"):
        create_dataloader(dataset, ContrastiveCollator(), max_tokens=40, drop_last=True)
    batches = list(create_dataloader(dataset, ContrastiveCollator(), max_tokens=40, shuffle=False))
    assert all(b["input_ids"].numel() <= 40 for b in batches) and sum(len(b["labels"]) for b in batches) == 3


def test_columns_from_text_files(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).write_text(f"{name} one\n{name} two\n", encoding="utf-8")
    columns = {name: read_texts(tmp_path / name) for name in ("first", "second")}
    dataset = ContrastiveDataset(columns, get_tokenizer(minilm()), scores=[[1, 2], [3, 4]])
    found = ContrastiveCollator()(list(dataset))
    assert found["labels"].tolist() == [[1, 2], [3, 4]] and len(found["cu_seqlens"]) == 5


def test_columns_of_several_files(tmp_path):
    """JSON lines, compressed JSON lines and Parquet give the same columns, of strings and of lists of numbers."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"anchor": ["a", "é"], "positive": ["b", "c\nd"], "scores": [[1.0, 0.5], [0.25, 2.0]]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "x.jsonl").write_text(lines)
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    parquet.write_table(arrow.table(columns), tmp_path / "x.parquet", row_group_size=1)
    files = [tmp_path / name for name in ("x.jsonl", "x.jsonl.gz", "x.parquet")]
    assert [read_columns(file) for file in files] == [columns] * 3
    assert read_columns(map(str, files)) == {name: values * 3 for name, values in columns.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-9], "x.parquet is no Parquet, or is damaged: "),
        (lambda data: data[:8] + b"\xff" * 30 + data[38:], "x.parquet is no Parquet, or is damaged: "),
        (lambda data: b"", "x.parquet is no Parquet, or is damaged: "),
        (lambda data: data, "row 2 of .*x.parquet has null for positive; expected a value"),
    ],
)
def test_refused_parquet(tmp_path, change, message):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"anchor": ["a", "b"], "positive": ["c", None]}), tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(change((tmp_path / "x.parquet").read_bytes()))
    with pytest.raises(ValueError, match=f"{message}"):
        read_columns(tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        read_columns(tmp_path / "none.parquet")


def test_files_that_differ_are_refused_by_name(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "x.jsonl").write_text('{"anchor": "a", "positive": "b"}\n')
    parquet.write_table(arrow.table({"anchor": ["a"], "negative": ["c"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="row 1 of .*x.parquet has anchor, negative; expected anchor, positive"):
        read_columns([tmp_path / "x.jsonl", tmp_path / "x.parquet"])


WHOLE_GZIP = gzip.compress(b"text " * 9, mtime=0)


@pytest.mark.parametrize("data", [b"text", WHOLE_GZIP[:-4], WHOLE_GZIP[:9] + b"\xff" * 9])
def test_damaged_gzip_is_refused(tmp_path, data):
    (tmp_path / "x.gz").write_bytes(data)
    with pytest.raises(ValueError, match="x.gz is damaged: "):
        list(read_texts(tmp_path / "x.gz"))


# ---- what is refused

PAIR, SCORES = torch.ones(2, 3, 4), torch.ones(3)
REFUSED = {
    "none; expected \\(2, 3\\), as ContrastiveCollator makes them": lambda: InBatchNegatives(skip_equal=True)(PAIR),
    "keys are of shape \\(3,\\); expected \\(2, 3\\)": lambda: InBatchNegatives(skip_equal=True)(PAIR, keys=SCORES),
    "keys are of shape \\(3,\\); expected none without skip_equal": lambda: InBatchNegatives()(PAIR, keys=SCORES),
    "there is 1 candidate; expected at least 2": lambda: InBatchNegatives()(PAIR[:, :1]),
    "has scores, which this loss does not read": lambda: InBatchNegatives()(PAIR, SCORES),
    "embeddings have shape \\(1, 3, 4\\); expected \\(at least 2 columns": lambda: InBatchNegatives()(PAIR[:1]),
    "scale is -1": lambda: InBatchNegatives(scale=-1),
    "scale is nan": lambda: CoSENT(scale=math.nan),
    "similarity is 'l2'; expected 'cosine' or 'dot'": lambda: MarginMSE("l2"),
    "distance is 'l1'": lambda: Triplet(distance="l1"),
    "Triplet: embeddings have shape \\(2, 3, 4\\); expected \\(3 columns, B, C\\)": lambda: Triplet()(PAIR),
    "CosineMSE: embeddings have shape \\(3,": lambda: CosineMSE()(torch.ones(3, 3, 4), SCORES),
    "CosineMSE: the batch has no scores; expected \\(3,\\)": lambda: CosineMSE()(PAIR),
    "scores have shape \\(3, 1\\); expected \\(3,\\)": lambda: CosineMSE()(PAIR, SCORES[:, None]),
    "CosineMSE: scores\\[1\\] is 5.0; expected -1 to 1": lambda: CosineMSE()(PAIR, torch.tensor([1.0, 5, 0])),
    "the batch has cu_seqlens, input_ids, max_seqlen; expected one of ContrastiveCollator": lambda: (
        ContrastiveModel.label_counts({"input_ids": 1, "cu_seqlens": 2, "max_seqlen": 3})
    ),
    "CoSENT: scores have shape \\(2,\\)": lambda: CoSENT()(PAIR, SCORES[:2]),
    "CoSENT: scores have NaN or infinity": lambda: CoSENT()(PAIR, torch.tensor([1, math.nan, 2])),
    "CoSENT: the batch has one pair": lambda: CoSENT()(PAIR[:, :1], SCORES[:1]),
    "expected \\(3, 3\\) or \\(3, 2\\)": lambda: MarginMSE()(torch.ones(4, 3, 4), SCORES),
    "expected \\(3, 2\\) or \\(3, 1\\) or \\(3,\\)": lambda: MarginMSE()(torch.ones(3, 3, 4), SCORES[:2]),
    "MarginMSE: embeddings have shape \\(2, 3, 4\\); expected \\(3 columns": lambda: MarginMSE()(PAIR, SCORES),
    "dims are \\(5, 2\\); expected at most the embeddings' size, 4": lambda: Matryoshka(CosineMSE(), [5, 2])(
        PAIR, SCORES
    ),
    "dims are \\(0,\\)": lambda: Matryoshka(CosineMSE(), [0]),
    "dims are \\(\\)": lambda: Matryoshka(CosineMSE(), []),
    "2 weights and 1 dims": lambda: Matryoshka(CosineMSE(), [4], [1, 2]),
    "max_tokens is 0; expected a positive int": lambda: ContrastiveModel(encoder(), CosineMSE(), max_tokens=0),
    "GradCache: cu_seqlens ends at 3; expected the number of tokens, 4": lambda: GradCache(print, 2)(
        torch.ones(4), torch.tensor([0, 2, 3], dtype=torch.int32)
    ),
    "pooling is 'median'": lambda: ContrastiveModel(encoder(), CosineMSE(), pooling="median"),
    "the encoder has a pooler": lambda: ContrastiveModel(BertModel(TINY), CosineMSE()),
    "12 texts in 5 columns": lambda: ContrastiveModel(encoder(), Triplet())(**batch() | {"columns": 5}),
    "12 texts in 1 columns": lambda: ContrastiveModel(encoder(), Triplet())(**batch() | {"columns": 1}),
}


def test_a_loss_of_one_s_own_with_in_batch_gets_its_rows():
    class Own:
        in_batch = True

        def __call__(self, embeddings, scores, own):
            return InBatchNegatives()(embeddings, scores, own)

    made = without_dropout()
    found, expected = (ContrastiveModel(made, loss)(**batch()).loss for loss in (Own(), InBatchNegatives()))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


REFUSED_DATA = {
    "there are 2 anchor and 1 positive; expected equal numbers": {"columns": {"anchor": ["a", "b"], "positive": ["c"]}},
    "2 anchor and 2 positive and 1 scores": {"scores": [1]},
    "positive\\[1\\] has no token; expected text": {"columns": {"anchor": ["a", "b"], "positive": ["c", " "]}},
    "anchor\\[0\\] has no token": {"columns": {"anchor": ["\t"], "positive": ["b"]}, "prompts": {"anchor": "query: "}},
    "columns \\['anchor'\\] and prompts": {"columns": {"anchor": ["a"]}},
    "prompts for \\['query'\\]": {"prompts": {"query": "q"}},
    "scores\\[1\\] is not finite": {"scores": [0, math.nan]},
    "scores begin \\[\\[1\\], \\[1, 2\\]\\]; expected": {"scores": [[1], [1, 2]]},
    "scores begin \\['a', 'b'\\]": {"scores": ["a", "b"]},
    "anchor\\[0\\] has 5 tokens; expected at most max_length, 4": {"truncation": False, "max_length": 4},
}


@pytest.mark.parametrize("message", REFUSED_DATA)
def test_refused_data(message):
    options = {"columns": {"anchor": ["a b c", "d"], "positive": ["e", "f"]}} | REFUSED_DATA[message]
    with pytest.raises(ValueError, match=message):
        ContrastiveDataset(options.pop("columns"), get_tokenizer(minilm()), **options)


def test_refused_types():
    tokenizer = get_tokenizer(minilm())
    with pytest.raises(TypeError, match="columns is a list; expected a mapping from names to texts"):
        ContrastiveDataset([("a", "b")], tokenizer)
    with pytest.raises(TypeError, match=r"positive\[0\] is a int; expected a string"):
        ContrastiveDataset({"anchor": ["a"], "positive": [1]}, tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": 2, "b": 3}', "line 2 of .* has a, b; expected a"),
        ('{"a": 1}\n\n{"a": ', "line 3 of .* is no JSON"),
        ('{"a": 1}\n{"a": null}', "line 2 of .*x.jsonl has null for a; expected a value"),
        ("[1, 2]", r"line 1 of .* has \[1, 2\]; expected an object"),
    ],
)
def test_refused_lines(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_columns(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "a,b,a\n1,2,3\n", "x.csv has 'a' twice; expected each name once"),
        ("x.jsonl", '{"a": 1}\n{"a": 2, "a": 3}\n', "line 2 of .*x.jsonl has 'a' twice"),
        ("x.csv", "a,b\n", "x.csv has no row; expected at least one"),
        ("x.jsonl", "", "x.jsonl has no row"),
        ("x.tsv", 'a\tb\n"hello\t1\nhe said bye"\t2\n', "row 1 of .*x.tsv has a tab and a line end in one"),
    ],
)
def test_columns_that_would_be_lost_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_columns(tmp_path / name)


def test_refused_tuples():
    pair, triple = ({"input_ids": [1] * n, "column_lengths": [1] * n} for n in (2, 3))
    for examples in ([pair, triple], [{"input_ids": [1]}]):
        with pytest.raises(ValueError, match="ContrastiveCollator: tuples have .* texts; expected one number"):
            ContrastiveCollator()(examples)
    with pytest.raises(ValueError, match="example 1 of the batch has no labels; others have"):
        ContrastiveCollator()([pair | {"labels": 1.0}, pair])
