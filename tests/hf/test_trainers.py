"""sentence-transformers' own trainers give accelerated models the same losses at each step, and the same weights."""

import copy

import pytest
import torch
import transformers
from small_models import DEVICE, TINY, assert_like, minilm

import fastbert

WORDS = "red blue green sun moon star tree leaf root sand sea sky stone cloud river".split()
ANCHORS = [f"{a} {b}" for i, a in enumerate(WORDS) for b in WORDS[:i]][:24]
ANSWERS = [f"{text} and {' '.join(reversed(text.split()))} {'again ' * (i % 5)}" for i, text in enumerate(ANCHORS)]
STEPS = 5


@pytest.fixture
def directory(tmp_path):
    """A small BERT of transformers, without dropout, because no two implementations draw the same dropout masks."""
    torch.manual_seed(0)
    values = TINY.to_dict() | {"vocab_size": 30522, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**values | {"num_labels": 1, "initializer_range": 0.1})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path)
    return tmp_path


def sentence_transformer(library, directory):
    from sentence_transformers.sentence_transformer import losses, modules

    body = modules.Transformer(str(directory))
    model = library.SentenceTransformer(modules=[body, modules.Pooling(TINY.hidden_size)], device=DEVICE)
    columns = {"anchor": ANCHORS, "positive": ANSWERS}
    return model, losses.MultipleNegativesRankingLoss, columns


def cross_encoder(library, directory):
    from sentence_transformers.cross_encoder import losses

    def loss_of(model):
        """Casts labels to the dtype of the logits: float32 labels would give a float32 loss in a float64 model."""
        loss = losses.BinaryCrossEntropyLoss(model)
        loss.bce_with_logits_loss.register_forward_pre_hook(lambda module, x: (x[0], x[1].to(x[0].dtype)))
        return loss

    columns = {"query": ANCHORS, "answer": ANSWERS[::2] + ANSWERS[12:], "label": [float(i % 2) for i in range(24)]}
    return library.CrossEncoder(str(directory), device=DEVICE), loss_of, columns


def trained(library, kind, model, loss_of, columns, path):
    """Trains the model; returns the loss of each step, and the change of all weights, concatenated."""
    datasets = pytest.importorskip("datasets")
    trainer_of, arguments_of = (getattr(library, f"{kind}{name}") for name in ("Trainer", "TrainingArguments"))
    options = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 0.02, "report_to": "none"}
    options |= {"save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant"}
    loss, found, before = loss_of(model), [], flat(model)
    loss.register_forward_hook(lambda module, inputs, value: found.append(value.detach()))
    arguments = arguments_of(output_dir=str(path), optim="sgd", seed=3, use_cpu=DEVICE == "cpu", **options)
    trainer_of(model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(columns), loss=loss).train()
    assert len(found) == STEPS
    return torch.stack(found), flat(model) - before


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SentenceTransformer", "CrossEncoder"])
def test_losses_and_weights_are_those_without_acceleration(accelerate, directory, tmp_path, kind):
    pytest.importorskip("datasets", reason="sentence-transformers' trainers need datasets: `make suites` gets it")
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    make = sentence_transformer if kind == "SentenceTransformer" else cross_encoder
    plain, *rest = make(library, directory)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    (exact.model if kind == "CrossEncoder" else exact).double()
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float64}
    report = fastbert.accelerate(fast)
    runs = [trained(library, kind, model, *rest, tmp_path / "run") for model in (fast, exact, plain)]
    for name, found, truth, contender in zip(("losses", "changes"), *runs, strict=True):
        assert truth.dtype == torch.float64 and truth.abs().max() > 1e-3, name
        assert_like(found, truth, contender)
    assert report.packed >= STEPS and report.fallbacks.total() == 0
