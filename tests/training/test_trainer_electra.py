"""ElectraPretraining: the discriminator sees what the generator drew; training, accumulation, resuming."""

import copy

import pytest
import torch
import torch.nn.functional as F
import trainer_process as process
from test_trainer import CONFIG, EXACT, Loss, assert_stepped, collate, electra_of, examples, rows, sgd
from torch import nn

from fastbert import BertForMaskedLM, BertForReplacedTokenDetection, BertModel
from fastbert.data import PackingCollator
from fastbert.training import ElectraPretraining, electra, label_counts, loss_terms
from fastbert.training.electra import sample


class StandIn(nn.Module):
    """A discriminator that records its inputs."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(99, 2)

    def forward(self, input_ids, labels, cu_seqlens, max_seqlen):
        self.given = input_ids, labels
        return Loss(F.cross_entropy(self.scores(input_ids), labels))


def electra_batch():
    torch.manual_seed(3)
    collator = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0])
    originals = process.examples(6)
    return collator(originals), torch.tensor([i for example in originals for i in example["input_ids"]])


def test_the_discriminator_sees_what_the_generator_drew(monkeypatch):
    """The generator draws from its logits at masked tokens. A draw that equals the original is no replacement."""
    model = ElectraPretraining(BertForMaskedLM(EXACT).double(), StandIn().double(), weight=7.0)
    (batch, original), drawn = electra_batch(), []

    def rigged(logits):
        drawn.append(logits.detach())
        found = sample(logits)
        found[::2] = original[batch["labelled_rows"]][::2]
        return found

    monkeypatch.setattr(electra, "sample", rigged)
    out, at_masks = model(**batch), batch["labelled_rows"]
    ids, labels = model.discriminator.given
    assert torch.equal(labels, (ids != original).long()) and 0 < labels.sum() < len(at_masks)
    assert not labels[at_masks][::2].any()
    others = torch.ones(len(ids), dtype=torch.bool)
    others[at_masks] = False
    assert torch.equal(ids[others], original[others])
    logits = model.generator(**batch, skip_logits=False).logits[at_masks]
    assert (drawn[0] - logits).abs().max() <= 1e-12 * logits.abs().max()

    expected = model.generator(**batch).loss + 7.0 * F.cross_entropy(model.discriminator.scores(ids), labels)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert out.loss.item() == pytest.approx(loss_terms(out, batch).sum().item(), rel=1e-12)
    assert label_counts(model, batch).tolist() == [len(at_masks), len(ids)]
    assert label_counts(model, {name: x.to("meta") for name, x in batch.items() if torch.is_tensor(x)}).is_meta
    without_rows = {name: x for name, x in batch.items() if name != "labelled_rows"}
    assert torch.equal(model(**without_rows).losses[0], out.losses[0])


def test_samples_have_the_distribution_of_the_logits():
    """A chi-square test over four tokens with 40 000 draws: 16.3 is exceeded once in a thousand."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    drawn = sample(logits.expand(40_000, 4)).bincount(minlength=4)
    expected = 40_000 * logits.softmax(-1)
    assert ((drawn - expected).square() / expected).sum() < 16.3


def test_an_accumulated_step_of_electra_is_that_of_one_big_batch(tmp_path, monkeypatch):
    """The likeliest token replaces the random draw, which would depend on the order of draws."""
    monkeypatch.setattr(electra, "sample", lambda logits: logits.argmax(-1))
    model = electra_of().double()
    before, all_six = copy.deepcopy(model), examples()
    loss = before(**collate(all_six, "of_tokens")).loss
    loss.backward()
    parts = [collate(part, "of_tokens") for part in (all_six[:1], all_six[1:3], all_six[3:])]
    sgd(model, tmp_path, gradient_accumulation_steps=3).train(parts, max_steps=1)
    assert float(rows(tmp_path / "train.csv")[0]["loss"]) == pytest.approx(loss.item(), rel=1e-12)
    assert_stepped(before, model)


def test_electra_learns_with_shared_embeddings_and_resumes(tmp_path):
    """The generator is narrower, and both models share the embedding tables."""

    def new(directory):
        process.seed()
        wide = CONFIG.changed(model_type="electra", embedding_size=32)
        generator, discriminator = BertForMaskedLM(wide.changed(hidden_size=16)), BertForReplacedTokenDetection(wide)
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            setattr(discriminator.bert.embeddings, table, getattr(generator.bert.embeddings, table))
        return process.trainer_of(ElectraPretraining(generator, discriminator), directory, 30, layer_decay=1.0)

    def loss(trainer):
        process.seed()
        return trainer.evaluate(process.masking_loader())["loss"]

    one, two = new(tmp_path / "one"), new(tmp_path / "two")
    one.train(process.masking_loader(), max_steps=30, save_steps=20)
    assert loss(one) < 0.9 * loss(two)
    two.load(one.checkpoints()[0])
    two.train(process.masking_loader(), max_steps=30)
    assert process.digest(one.checkpoints()[-1]) == process.digest(two.checkpoints()[-1])
    tables = {model.bert.embeddings.word_embeddings for model in (two.model.generator, two.model.discriminator)}
    assert len(tables) == 1


@pytest.mark.parametrize(
    ("generator", "discriminator", "weight", "error", "words"),
    [
        (BertModel, BertForReplacedTokenDetection, 1.0, TypeError, "generator is a fastbert.BertModel; expected"),
        (BertForMaskedLM, BertModel, 1.0, TypeError, "discriminator is a fastbert.BertModel; expected"),
        (BertForMaskedLM, BertForReplacedTokenDetection, -1.0, ValueError, "weight is -1.0"),
        (BertForMaskedLM, BertForReplacedTokenDetection, float("nan"), ValueError, "weight is nan"),
    ],
)
def test_electra_of_other_models_is_refused(generator, discriminator, weight, error, words):
    config = EXACT.changed(model_type="electra")
    with pytest.raises(error, match=words):
        ElectraPretraining(generator(EXACT), discriminator(config), weight)
    with pytest.raises(ValueError, match="the models have 99 and 98 tokens; expected one vocabulary"):
        ElectraPretraining(BertForMaskedLM(EXACT), BertForReplacedTokenDetection(config.changed(vocab_size=98)))


def test_electra_refuses_padded_input():
    model = ElectraPretraining(BertForMaskedLM(EXACT), StandIn())
    with pytest.raises(ValueError, match="ElectraPretraining: expected packed input"):
        model(torch.tensor([[1, 2]]), torch.tensor([[1, -100]]))
