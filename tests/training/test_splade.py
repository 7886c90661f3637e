"""Training SPLADE models: losses equal sentence-transformers', GradCache and ranks change nothing; sparser vectors."""

import copy
import math

import pytest
import torch
from contrastive_process import batch_of, tuples
from small_models import DEVICE, TINY, assert_gradients
from test_contrastive import Given, assert_ranks_add_up, assert_twins

from fastbert import BertForSparseEmbedding
from fastbert.data import ContrastiveCollator, ContrastiveDataset, create_dataloader
from fastbert.data.tokenizer import train_tokenizer
from fastbert.inference import SparseEncoder
from fastbert.training import (
    AMPTrainer,
    ContrastiveModel,
    Flops,
    InBatchNegatives,
    MarginMSE,
    Splade,
    SpladeWarmup,
    linear_schedule,
    to_device,
)

RANKING = InBatchNegatives(1.0, similarity="dot")


def model_of(loss, **options):
    torch.manual_seed(0)
    config = TINY.changed(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    encoder = BertForSparseEmbedding(config, options.pop("activation", "relu")).double().to(DEVICE)
    return ContrastiveModel(encoder, loss, pooling=None, **options)


# ---- losses, against sentence-transformers


def ranking(losses, model):
    return losses.SparseMultipleNegativesRankingLoss(model)


def margins(losses, model):
    return losses.SparseMarginMSELoss(model)


TWINS = {  # our loss; sentence-transformers' inner loss and options; number of columns; shape of an example's scores
    "pairs": (Splade(RANKING, 0.3, 0.7), ranking, {"query_regularizer_weight": 0.7}, 2, None),
    "documents alone": (Splade(RANKING, 0.3), ranking, {}, 2, None),
    "hard negatives": (Splade(RANKING, 0.3, 0.7), ranking, {"query_regularizer_weight": 0.7}, 4, None),
    "symmetric": (Splade(RANKING, 0.3, symmetric=True), ranking, {"use_document_regularizer_only": True}, 2, None),
    "margins": (Splade(MarginMSE(), 0.3, 0.7), margins, {"query_regularizer_weight": 0.7}, 3, ()),
    "several margins": (Splade(MarginMSE(), 0.3, 0.7), margins, {"query_regularizer_weight": 0.7}, 4, (2,)),
    "thresholds": (
        Splade(RANKING, 0.3, 0.7, document_regularizer=Flops(6), query_regularizer=Flops(5)),
        ranking,
        {"query_regularizer_weight": 0.7, "document_regularizer_threshold": 6, "query_regularizer_threshold": 5},
        3,
        None,
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_losses_are_those_of_sentence_transformers(name):
    from sentence_transformers.sparse_encoder import losses

    ours, inner, options, columns, scores = TWINS[name]
    embeddings = torch.randn(columns, 7, 12, dtype=torch.float64).relu()
    scores = None if scores is None else torch.randint(0, 5, (7, *scores)).double() / 4  # exact in float32
    model = Given()
    twin = losses.SpladeLoss(model, inner(losses, model), document_regularizer_weight=0.3, **options)
    theirs = lambda given, scores: sum(twin([{"embeddings": column} for column in given], scores).values())  # noqa: E731
    assert_twins(ours, theirs, embeddings, scores)


def test_flops_by_its_formula():
    vectors = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    assert Flops()(vectors) == 2**2 + 1**2
    assert Flops(1)(vectors) == 0.5**2 + 1**2 and Flops(2)(vectors) == 0
    with pytest.raises(ValueError, match="threshold is -1; expected at least 0"):
        Flops(-1)


# ---- the model


@pytest.mark.parametrize("activation", ("relu", "log1p_relu"))
def test_the_model_is_the_encoder_and_the_loss(activation):
    loss = Splade(RANKING, 0.3, 0.7)
    model, batch = model_of(loss, activation=activation), to_device(batch_of(*tuples(0, 6, 3, 0)), DEVICE)
    twin = copy.deepcopy(model)
    output = model(**batch)
    vectors = twin.encoder(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], max_seqlen=batch["max_seqlen"])
    assert output.embeddings.shape == (3, 6, 99) and torch.equal(output.embeddings.flatten(0, 1), vectors)
    expected = loss(vectors.unflatten(0, (3, 6)))
    assert torch.equal(output.loss, expected)
    output.loss.backward(), expected.backward()
    assert_gradients(model, twin)


@pytest.mark.parametrize("max_tokens", (1, 25, 10**6))
def test_cached_gradients_are_those_of_all_activations(max_tokens):
    batch = to_device(batch_of(*tuples(0, 6, 3, 0)), DEVICE)
    whole, cached = model_of(Splade(RANKING, 0.3, 0.7)), model_of(Splade(RANKING, 0.3, 0.7), max_tokens=max_tokens)
    for model in (whole, cached):
        model(**batch).loss.backward()
    assert_gradients(cached, whole)


@pytest.mark.parametrize(("loss", "columns", "scores"), [(RANKING, 3, 0), (MarginMSE(), 3, 1)])
def test_regularisers_see_all_ranks(monkeypatch, loss, columns, scores):
    assert_ranks_add_up(monkeypatch, model_of(Splade(loss, 0.3, 0.7)).cpu().train(), *tuples(0, 7, columns, scores))


def test_under_autocast_vectors_and_loss_are_float32():
    model, batch = model_of(Splade(RANKING, 0.3)).float(), to_device(batch_of(*tuples(0, 6, 2, 0)), DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        output = model(**batch)
    assert output.loss.dtype == output.embeddings.dtype == torch.float32
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- in AMPTrainer


def test_strength_grows_and_a_run_that_is_resumed_goes_on(tmp_path):
    batches = [batch_of(*tuples(seed, 4, 2, 0)) for seed in range(6)]

    def trainer(name):
        model = model_of(Splade(RANKING, 0.3, 0.7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warmup = SpladeWarmup(model.loss, 4, linear_schedule(optimizer, 2, 8))
        assert model.loss.strength == 0
        return AMPTrainer(model, optimizer, warmup, output_dir=tmp_path / name, progress=False)

    alone = trainer("none")
    strengths, warmup = [], alone.scheduler
    for _ in range(6):
        alone.optimizer.step()
        warmup.step()
        strengths.append(warmup.loss.strength)
    assert strengths == [1 / 16, 1 / 4, 9 / 16, 1, 1, 1] and warmup.scheduler.last_epoch == 6
    whole, first, second = trainer("whole"), trainer("parts"), trainer("parts")
    whole.train(batches, max_steps=5)
    first.train(batches, max_steps=3)
    second.resume()
    assert second.model.loss.strength == 9 / 16 and second.scheduler.scheduler.last_epoch == 3
    second.train(batches, max_steps=5)
    for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_warmup_of_the_weights_alone():
    loss = Splade(RANKING, 1.0)
    warmup = SpladeWarmup(loss, 2, power=1.0)
    warmup.step()
    assert loss.strength == 0.5 and warmup.state_dict() == {"taken": 1, "scheduler": None}
    embeddings = torch.rand(2, 3, 4, dtype=torch.float64)
    expected = RANKING(embeddings) + 0.5 * Flops()(embeddings[1])
    assert abs(loss(embeddings) - expected) <= 1e-12


def test_training_makes_vectors_sparser_while_the_loss_falls(tmp_path):
    """Pairs have the same words in another order, and in the end find each other with fewer active words."""
    words = "red blue green sun moon star tree leaf root sand sea sky".split()
    tokenizer = train_tokenizer([" ".join(words)] * 3, vocab_size=99)
    anchors = [f"{a} {b}" for i, a in enumerate(words) for b in words[:i]]
    columns = {"query": anchors, "answer": [" ".join(reversed(text.split())) for text in anchors]}
    loader = create_dataloader(ContrastiveDataset(columns, tokenizer), ContrastiveCollator(), 33, drop_last=True)
    model = model_of(Splade(RANKING, 0.1, 0.1)).float()

    def measured():
        """The active words per text, and the contrastive loss."""
        vectors = [SparseEncoder(model.encoder, tokenizer).encode(texts) for texts in columns.values()]
        active = sum(len(each.values()) for each in vectors) / 2 / len(anchors)
        return active, float(RANKING(torch.stack([each.to_dense() for each in vectors])))

    before = measured()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    trainer = AMPTrainer(model, optimizer, SpladeWarmup(model.loss, 10), output_dir=tmp_path, progress=False)
    trainer.train(loader, max_steps=30)
    for was, found in zip(before, measured(), strict=True):
        assert found < 0.7 * was, (before, measured())


# ---- refused


REFUSED = {
    "document_weight is -1": lambda: Splade(RANKING, -1),
    "query_weight is nan": lambda: Splade(RANKING, 1, math.nan),
    "query_weight is 0.5 with symmetric": lambda: Splade(RANKING, 1, 0.5, symmetric=True),
    "loss is a InBatchNegatives; expected a Splade": lambda: SpladeWarmup(RANKING, 5),
    "steps is 0 and power 2.0": lambda: SpladeWarmup(Splade(RANKING, 1), 0),
    "steps is 5 and power 0": lambda: SpladeWarmup(Splade(RANKING, 1), 5, power=0),
    "the state has one of a scheduler, this has none": lambda: SpladeWarmup(Splade(RANKING, 1), 5).load_state_dict(
        {"taken": 1, "scheduler": {}}
    ),
    "expected at least 2, of which one is wrong": lambda: Splade(RANKING, 1)(torch.rand(2, 1, 5)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises((ValueError, TypeError), match=words):
        REFUSED[words]()
