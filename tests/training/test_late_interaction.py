"""Training multi-vector encoders: losses and steps equal sentence-transformers', with scores in float64."""

import copy
import warnings

import pytest
import torch
from contrastive_process import batch_of, tuples
from small_models import DEVICE, TINY, assert_gradients, assert_like, gradients
from small_models import multi_vector_encoder as small
from torch import nn

from fastbert import BertModel
from fastbert.data import ContrastiveCollator, ContrastiveDataset
from fastbert.inference import QueryExpansion
from fastbert.ops.padding import cu_seqlens_of
from fastbert.token_vectors import Expansion, TokenVectors
from fastbert.training import (
    AMPTrainer,
    MaxSimDistillation,
    MaxSimMargins,
    MaxSimNegatives,
    MultiVectorModel,
    Texts,
    to_device,
)


def pairwise(queries, documents, queries_mask, documents_mask, mean=False):
    """MaxSim of padded texts in the dtype of their vectors; sentence-transformers' own function casts to float32."""
    products = (queries @ documents.mT).masked_fill(~documents_mask[:, None], -torch.inf)
    scores = (products.amax(-1) * queries_mask).sum(-1)
    return scores / queries_mask.sum(-1) if mean else scores


def of_columns(queries, documents, queries_mask, documents_mask, mean=False):
    """(B, N, L, D) -> (B, N): the scores of each query with its own documents."""
    columns = range(documents.shape[1])
    scored = [pairwise(queries, documents[:, j], queries_mask, documents_mask[:, j], mean) for j in columns]
    return torch.stack(scored, 1)


def of_all(queries, documents, queries_mask, documents_mask, mean=False):
    """(B, N, L, D) -> (B, B * N): the scores of each query with all documents."""
    documents, documents_mask = documents.flatten(0, 1), documents_mask.flatten(0, 1)
    scored = [
        pairwise(queries, d.expand(len(queries), -1, -1), queries_mask, m.expand(len(queries), -1), mean)
        for d, m in zip(documents, documents_mask, strict=True)
    ]
    return torch.stack(scored, 1)


def mean_of(scorer):
    return lambda *texts, **masks: scorer(*texts, **masks, mean=True)


RANKING = "MultipleNegativesRankingLoss"
TWINS = {  # our loss, sentence-transformers', number of columns, shape of an example's scores (None for no scores)
    "pairs": (MaxSimNegatives(), (RANKING, {"similarity_fct": of_all}), 2, None),
    "hard negatives": (MaxSimNegatives(3.0), (RANKING, {"similarity_fct": of_all, "scale": 3.0}), 4, None),
    "means": (MaxSimNegatives(20.0, mean=True), (RANKING, {"similarity_fct": mean_of(of_all), "scale": 20.0}), 3, None),
    "margins": (MaxSimMargins(), ("MarginMSELoss", {"similarity_fct": pairwise}), 3, ()),
    "several margins": (MaxSimMargins(), ("MarginMSELoss", {"similarity_fct": pairwise}), 4, (2,)),
    "teacher's scores": (MaxSimMargins(mean=True), ("MarginMSELoss", {"similarity_fct": mean_of(pairwise)}), 4, (3,)),
    "distributions": (MaxSimDistillation(), ("DistillKLDivLoss", {"similarity_fct": of_columns}), 3, (2,)),
    "temperatures": (
        MaxSimDistillation(0.5, 2.0, mean=True),
        (
            "DistillKLDivLoss",
            {"similarity_fct": mean_of(of_columns), "student_temperature": 0.5, "teacher_temperature": 2.0},
        ),
        4,
        (3,),
    ),
}


class Given(nn.Module):
    """Takes the place of a sentence-transformers model, and returns the given vectors."""

    def forward(self, features, task=None):
        return {"token_embeddings": features["vectors"], "attention_mask": features["attention_mask"]}

    def preprocess(self, *given, **options):
        raise AssertionError


@pytest.mark.parametrize("name", TWINS)
def test_losses_are_those_of_sentence_transformers(name):
    from sentence_transformers.multi_vector_encoder import losses

    ours, (kind, options), columns, scores = TWINS[name]
    count, lengths = 5, torch.randint(1, 7, (columns, 5))
    leaf = torch.randn(columns, count, 6, 8, dtype=torch.float64, requires_grad=True)
    masks = torch.arange(6) < lengths[..., None]
    scores = None if scores is None else torch.randint(0, 5, (count, *scores)).double() / 4
    texts = [Texts(leaf[part][masks[part]], cu_seqlens_of(lengths[part].flatten())) for part in (0, slice(1, None))]
    twin = getattr(losses, f"MultiVector{kind}")(Given(), **options)
    features = [{"vectors": x, "attention_mask": m, "input_ids": m.long()} for x, m in zip(leaf, masks, strict=True)]
    loss, expected = ours(*texts, scores), twin(features, scores)
    assert expected > 0 and abs(loss - expected) <= 1e-12 * expected
    grad, truth = (torch.autograd.grad(x, leaf)[0] for x in (loss, expected))
    assert (grad - truth).abs().max() <= 1e-12 * truth.abs().max() and truth.abs().max() > 0


def test_negatives_with_the_scores_of_sentence_transformers():
    """Here sentence-transformers' own MaxSim, which is float32, contends under the accuracy rule."""
    from sentence_transformers.multi_vector_encoder import losses

    leaf, masks = torch.randn(3, 5, 6, 8), torch.arange(6) < torch.randint(1, 7, (3, 5, 1))
    ends = [cu_seqlens_of(m.sum(-1).flatten()) for m in (masks[0], masks[1:])]

    def ours(x):
        return MaxSimNegatives()(Texts(x[0][masks[0]], ends[0]), Texts(x[1:][masks[1:]], ends[1]))

    features = [{"vectors": x, "attention_mask": m, "input_ids": m.long()} for x, m in zip(leaf, masks, strict=True)]
    assert_like(ours(leaf), ours(leaf.double()), losses.MultiVectorMultipleNegativesRankingLoss(Given())(features))


# ---- the whole model

COLUMNS = {
    "question": ["what is it?", "more words, or others", "a query"],
    "answer": ["Text of words.", "More, and more: (and more) of it!", "What others cut."],
    "wrong": ["A document.", "others", "Something quite else, and much too long for this"],
}
OPTIONS = {
    "classic": {"expansion": QueryExpansion(12), "skip_words": [".", ",", "!"], "document_length": 16},
    "attended": {"expansion": QueryExpansion(12, True, "min"), "query_length": 13, "normalize": False},
}


def ours_and_theirs(directory, **options):
    from sentence_transformers import MultiVectorEncoder

    made = small(prompts={"query": "[unused0] ", "document": "text: "}, **options)
    made.save_pretrained(directory)
    made.vectors.double()
    return made, MultiVectorEncoder(str(directory), device="cpu").double()


@pytest.mark.parametrize("max_tokens", [None, 25])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_step_is_that_of_sentence_transformers(tmp_path, kind, max_tokens):
    """From texts (prompts, truncation, expansion, punctuation) to all parameters' gradients; with GradCache or not."""
    from sentence_transformers.multi_vector_encoder import losses

    made, twin = ours_and_theirs(tmp_path, **OPTIONS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # texts are cut
        dataset = made.dataset(COLUMNS)
    model = MultiVectorModel(made.vectors, MaxSimNegatives(), max_tokens=max_tokens)
    loss = model(**ContrastiveCollator()(list(dataset))).loss
    tasks = ["query", "document", "document"]
    prompts = [twin.prompts[task] for task in tasks]
    features = [
        twin.preprocess(texts, prompt=prompt, task=task) | {"task": task}
        for texts, prompt, task in zip(COLUMNS.values(), prompts, tasks, strict=True)
    ]
    expected = losses.MultiVectorMultipleNegativesRankingLoss(twin, similarity_fct=of_all)(features)
    assert abs(loss - expected) <= 1e-12 * abs(expected)
    loss.backward()
    expected.backward()
    truth = gradients(twin[0].model) | {"dense": twin[1].linear.weight.grad}
    found = made.model.to_hugging_face(gradients(made.model)) | {"dense": made.vectors.dense[0].linear.weight.grad}
    assert_gradients(found, truth)


def model_of(loss, **options):
    encoder = BertModel(TINY, add_pooling_layer=False).to(DEVICE)
    vectors = TokenVectors(encoder, [nn.Linear(48, 8, bias=False).to(DEVICE)], expansion=Expansion(13, 4, False, True))
    return MultiVectorModel(vectors, loss, **options)


def test_the_output_and_autocast():
    model, inputs = model_of(MaxSimNegatives()).eval(), to_device(batch_of(*tuples(0, 4, 3, 0)), DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = model(**inputs)
    assert out.loss.dtype == out.queries.vectors.dtype == torch.float32
    assert out.queries.cu_seqlens.tolist() == [0, 13, 26, 39, 52] and len(out.documents.cu_seqlens) == 9
    assert (
        out.documents.cu_seqlens[-1] == len(out.documents.vectors) == inputs["cu_seqlens"][-1] - inputs["cu_seqlens"][4]
    )
    assert (out.documents.vectors.norm(dim=-1) - 1).abs().max() < 1e-6
    assert model.label_counts(inputs) == 4


def test_training_learns(tmp_path):
    """AMPTrainer takes 30 steps on the same batch."""
    torch.manual_seed(0)
    model, inputs = model_of(MaxSimNegatives(), max_tokens=40), batch_of(*tuples(1, 6, 2, 0))
    before = model.eval()(**to_device(inputs, DEVICE)).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    AMPTrainer(model, optimizer, output_dir=tmp_path, progress=False).train([inputs] * 30, max_steps=30)
    assert model.eval()(**to_device(inputs, DEVICE)).loss.item() < before / 4


def test_what_is_refused():
    one = Texts(torch.randn(3, 4), cu_seqlens_of(torch.tensor([3])))
    several = Texts(torch.randn(5, 4), cu_seqlens_of(torch.tensor([2, 3])))
    none, scores = Texts(torch.randn(0, 4), cu_seqlens_of(torch.tensor([], dtype=torch.int64))), torch.rand(1, 2)
    for loss, arguments, words in (
        (MaxSimNegatives(), (one, several, scores), "the batch has scores, which this loss does not read"),
        (MaxSimNegatives(), (one, one), "there is one document"),
        (MaxSimNegatives(), (none, several), "there is no query"),
        (MaxSimDistillation(), (none, none, torch.rand(0, 2)), "there is no query"),
        (MaxSimMargins(), (one, one, scores), "a query has 1 document; expected at least 2"),
        (MaxSimMargins(), (one, several), r"the batch has no scores; expected \(1, 2\) or \(1, 1\) or \(1,\)"),
        (MaxSimDistillation(), (one, several, torch.rand(1)), r"scores have shape \(1,\); expected \(1, 2\)"),
        (MaxSimDistillation(), (one, several, scores / 0), "scores have NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=words):
            loss(*arguments)
    for made in (lambda: MaxSimNegatives(0), lambda: MaxSimDistillation(-1.0), lambda: MaxSimDistillation(1, 0)):
        with pytest.raises(ValueError, match="expected a positive number"):
            made()
    with pytest.raises(ValueError, match="max_tokens is 0"):
        model_of(MaxSimNegatives(), max_tokens=0)
    with pytest.raises(ValueError, match="there are 4 texts in 3 columns"):
        model_of(MaxSimNegatives())(**batch_of(*tuples(0, 2, 2, 0)) | {"columns": 3})


def test_lengths_by_column():
    made = small()
    with pytest.warns(UserWarning, match="more than max_length, 5, tokens"):
        dataset = ContrastiveDataset(COLUMNS, made.tokenizer, max_length={"question": 5, "answer": 40, "wrong": 60})
    rows = [example["column_lengths"] for example in dataset]
    assert max(row[0] for row in rows) == 5 < max(row[1] for row in rows)
    with pytest.raises(ValueError, match=r"max_length is of \['question'\]; expected one of each"):
        ContrastiveDataset(COLUMNS, made.tokenizer, max_length={"question": 5})


def test_cached_vectors_are_those_computed_at_once():
    """Without dropout, in float64, with a teacher's scores."""
    inputs = to_device(batch_of(*tuples(2, 5, 3, 2)), DEVICE)
    plain = model_of(MaxSimDistillation()).double().eval()
    cached = MultiVectorModel(copy.deepcopy(plain.vectors), MaxSimDistillation(), max_tokens=15)
    losses = [model(**inputs).loss for model in (plain, cached)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0])
    assert_gradients(cached, plain)
