"""Packing on the host: exact batches, masks with the right statistics, reproducible in every process."""

import functools
import math

import pytest
import tokenizers
import torch
import transformers
from models import DEVICE, TINY, minilm
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import fastbert
from fastbert.data import PackingCollator, TokenBudgetSampler

CLS, SEP, MASK, WORDS = 1, 2, 3, 99
CONFIG = TINY.changed(num_hidden_layers=1, num_labels=3)
masking = functools.partial(
    PackingCollator, mlm_probability=0.15, mask_token_id=MASK, vocab_size=WORDS, special_ids=[0, CLS, SEP]
)


def examples(lengths, seed=0, **more):
    """[CLS] words [SEP], as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, WORDS, (length,), generator=generator) for length in lengths]
    for row in rows:
        row[0], row[-1] = CLS, SEP
    return [
        {"input_ids": row.tolist(), "token_type_ids": (row % 2).tolist(), "attention_mask": [1] * len(row)} | labels
        for row, labels in zip(rows, more.get("labels", [{}] * len(rows)), strict=True)
    ]


def padded(batch, name):
    """A packed entry of a batch as transformers would have it, (B, S)."""
    ends = batch["cu_seqlens"].tolist()
    rows = [batch[name][start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def share(hits, total, probability):
    """Whether a count is within five standard deviations of its binomial expectation."""
    return abs(hits - total * probability) <= 5 * math.sqrt(total * probability * (1 - probability))


# ---- packing


def test_a_packed_batch():
    batch = PackingCollator()(
        [{"input_ids": [1, 5, 2], "token_type_ids": [0, 0, 1]}, {"input_ids": [1, 2], "token_type_ids": [0, 1]}]
    )
    expected = {
        "input_ids": torch.tensor([1, 5, 2, 1, 2]),
        "token_type_ids": torch.tensor([0, 0, 1, 0, 1]),
        "position_ids": torch.tensor([0, 1, 2, 0, 1]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    assert batch.pop("max_seqlen") == 3 and batch.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor) and batch[name].dtype == tensor.dtype, name
    assert "position_ids" not in PackingCollator(return_position_ids=False)([{"input_ids": [1, 2]}])


def test_a_packed_batch_computes_what_a_padded_one_computes():
    model = fastbert.BertForTokenClassification(CONFIG).eval()
    batch = PackingCollator()(examples([7, 2, 12], labels=[{"labels": [i % 3] * n} for i, n in enumerate([7, 2, 12])]))
    mask = padded(batch | {"mask": torch.ones_like(batch["input_ids"])}, "mask")
    out = model(**batch)
    other = model(padded(batch, "input_ids"), mask, padded(batch, "token_type_ids"), labels=padded(batch, "labels"))
    assert torch.equal(out.logits, other.logits[mask.bool()]) and torch.equal(out.loss, other.loss)


def test_padding_in_examples_is_left_out():
    one = examples([7, 2], labels=[{"labels": [1] * 7}, {"labels": [2, 0]}])
    two = [{key: value + [0] * (9 - len(value)) for key, value in example.items()} for example in one]
    batches = [PackingCollator()(rows) for rows in (one, two)]
    assert batches[0].keys() == batches[1].keys()
    assert all(
        torch.equal(torch.as_tensor(batches[1][key]), torch.as_tensor(value)) for key, value in batches[0].items()
    )
    with pytest.raises(ValueError, match="example 1 of the batch has padding before tokens; expected it after"):
        PackingCollator()([one[0], {key: [0, *value] for key, value in one[1].items()}])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([{"labels": 2}, {"labels": 0}], torch.tensor([2, 0])),
        ([{"label": torch.tensor(2)}, {"label": torch.tensor(0)}], torch.tensor([2, 0])),
        ([{"label_ids": True}, {"label_ids": False}], torch.tensor([1, 0])),
        ([{"labels": 1}, {"labels": 0.5}], torch.tensor([1.0, 0.5])),
        ([{"labels": [1.0, 0.0]}, {"labels": [0.0, 0.0]}], torch.tensor([[1.0, 0.0], [0.0, 0.0]])),
        ([{"labels": [1, 0, -100]}, {"labels": [0, 2]}], torch.tensor([1, 0, -100, 0, 2])),
    ],
)
def test_labels_of_examples_and_of_tokens(labels, expected):
    batch = PackingCollator()(examples([3, 2], labels=labels))
    assert torch.equal(batch["labels"], expected) and batch["labels"].dtype == expected.dtype


def test_other_labels_pass_and_other_entries_do_not():
    more = [{"start_positions": i, "end_positions": i + 1, "next_sentence_label": 1, "text": "x"} for i in range(2)]
    batch = PackingCollator()(examples([3, 4], labels=more))
    assert batch["start_positions"].tolist() == [0, 1] and batch["end_positions"].tolist() == [1, 2]
    assert batch["next_sentence_label"].tolist() == [1, 1] and "text" not in batch and "labels" not in batch


@pytest.mark.parametrize(
    ("arguments", "rows", "words"),
    [
        ({}, [], "expected at least one example"),
        (
            {"max_tokens": 10},
            examples([3, 11]),
            "example 1 of the batch has 11 tokens; expected at most max_tokens, 10",
        ),
        ({"max_tokens": 10}, examples([6, 5]), "the batch has 11 tokens; expected at most max_tokens, 10"),
        ({"max_length": 5}, examples([3, 6]), "example 1 of the batch has 6 tokens; expected at most max_length, 5"),
        ({}, examples([3, 2], labels=[{"labels": 1}, {}]), "example 1 of the batch has no labels; others have"),
        ({}, examples([3], labels=[{"labels": [1, 2]}]), r"labels of example 0 of the batch has shape \(2,\)"),
        (
            {},
            [{"input_ids": [1, 2], "token_type_ids": [0]}],
            r"token_type_ids of example 0 of the batch has shape \(1,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, rows, words):
    with pytest.raises(ValueError, match=words):
        PackingCollator(**arguments)(rows)


# ---- masking


def test_masking_has_the_right_statistics():
    rows = examples([250] * 400)
    batch = masking(seed=1)(rows)
    before = torch.tensor([token for row in rows for token in row["input_ids"]])
    after, labels = batch["input_ids"], batch["labels"]
    chosen, special = labels != -100, (before == CLS) | (before == SEP)
    assert not (chosen & special).any() and torch.equal(after[~chosen], before[~chosen])
    assert torch.equal(labels[chosen], before[chosen])
    assert torch.equal(batch["labelled_rows"], chosen.nonzero().squeeze(-1))
    total, ordinary = int(chosen.sum()), int((~special).sum())
    assert share(total, ordinary, 0.15)
    masked, kept = (after == MASK) & chosen, (after == before) & chosen
    assert share(int(masked.sum()), total, 0.8 + 0.1 / WORDS) and share(int(kept.sum()), total, 0.1 + 0.1 / WORDS)
    words = after[chosen & ~masked & ~kept]
    counts = torch.bincount(words, minlength=WORDS)
    assert counts.shape[0] == WORDS and (counts[[i for i in range(WORDS) if i != MASK]] > 0).all()  # from all of them
    assert (counts.double() - counts.double().mean()).abs().max() <= 6 * counts.double().mean().sqrt()


def test_special_tokens_mask_of_examples_counts():
    rows = examples([50] * 20)
    for row in rows:
        row["special_tokens_mask"] = [1] * 25 + [0] * 25
    labels = masking(mlm_probability=1.0)(rows)["labels"].view(20, 50)
    assert (labels[:, :25] == -100).all() and (labels[:, 25:49] != -100).all() and (labels[:, 49] == -100).all()


def test_torch_s_seed_or_an_own_one_decides_masks():
    rows, collators = examples([30] * 9), {None: masking(), 7: masking(seed=7)}
    drawn = {}
    for seed, collator in collators.items():
        for manual in (1, 1, 2):
            torch.manual_seed(manual)
            drawn.setdefault(seed, []).append(collator(rows)["labels"])
    assert torch.equal(drawn[None][0], drawn[None][1]) and not torch.equal(drawn[None][0], drawn[None][2])
    assert torch.equal(drawn[7][0], drawn[7][2]) and not torch.equal(drawn[7][0], masking(seed=8)(rows)["labels"])
    collators[7].set_epoch(1)
    assert not torch.equal(collators[7](rows)["labels"], drawn[7][0])


def test_examples_labels_give_way_to_the_masked_lm_s():
    assert (masking()(examples([9, 9], labels=[{"labels": 1}] * 2))["labels"]).shape == (18,)


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
def test_tokenizers_say_what_is_special(kind):
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    if kind == "tokenizers":
        rows = [
            {"input_ids": e.ids, "token_type_ids": e.type_ids} for e in tokenizer.encode_batch(["a cat", "two dogs"])
        ]
    else:
        names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", **names)
        rows = [tokenizer("a cat"), tokenizer("two dogs")]
    collator = PackingCollator(tokenizer, mlm_probability=1.0)
    assert collator.vocab_size == 30522 and collator.mask_token_id == 103
    assert collator(rows)["labels"].tolist() == [-100, 1037, 4937, -100, -100, 2048, 6077, -100]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mlm_probability": 0.0}, "mlm_probability is 0.0"),
        ({"mlm_probability": 0.15}, "masking needs mask_token_id, or a tokenizer"),
        ({"mlm_probability": 0.15, "mask_token_id": 3}, "masking needs vocab_size, or a tokenizer"),
        ({"mlm_probability": 0.15, "mask_token_id": 9, "vocab_size": 9}, "mask_token_id is 9; expected an id below 9"),
    ],
)
def test_masking_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        PackingCollator(**arguments)


# ---- batches by a budget of tokens

LENGTHS = torch.randint(2, 31, (500,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_budget_is_kept_and_filled(shuffle):
    sampler = TokenBudgetSampler(LENGTHS, 128, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(500)) and len(batches) == len(sampler)
    sums = [sum(LENGTHS[i] for i in batch) for batch in batches]
    assert max(sums) <= 128
    for batch, after, total in zip(batches, batches[1:], sums, strict=False):
        assert total + LENGTHS[after[0]] > 128, batch  # no batch ends before it has to
    assert shuffle or [i for batch in batches for i in batch] == list(range(500))


def test_order_depends_on_seed_and_epoch_alone():
    def batches(epoch, seed=0):
        sampler = TokenBudgetSampler(LENGTHS, 128, seed=seed)
        sampler.set_epoch(epoch)
        torch.randn(3)
        return list(sampler)

    assert batches(0) == batches(0) == list(TokenBudgetSampler(torch.tensor(LENGTHS), 128))
    assert batches(0) != batches(1) != batches(1, seed=5)


def test_samplers_of_nothing_and_of_too_much():
    assert list(TokenBudgetSampler([], 10)) == [] and len(TokenBudgetSampler([], 10)) == 0
    assert list(TokenBudgetSampler([10, 10, 0, 0], 10, shuffle=False)) == [[0], [1, 2, 3]]
    with pytest.raises(ValueError, match="example 2 has 11 tokens; expected at most max_tokens, 10"):
        TokenBudgetSampler([3, 4, 11], 10)


# ---- with the rest of the world


def loaded(workers, seed=None, epochs=1, persistent=False):
    """Labels of every batch that a DataLoader gives, epoch after epoch."""
    rows, collator = examples(LENGTHS[:60]), masking(seed=seed, max_tokens=128)
    sampler = TokenBudgetSampler(LENGTHS[:60], 128, shuffle=False)
    torch.manual_seed(11)
    loader = DataLoader(
        rows, batch_sampler=sampler, collate_fn=collator, num_workers=workers, persistent_workers=persistent
    )
    labels = []
    for epoch in range(epochs):
        collator.set_epoch(epoch)
        labels.append([batch["labels"] for batch in loader])
    return labels


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_two_workers():
    """torch's generator: reproducible with the same number of workers, other masks in each epoch."""
    first, again = loaded(2, epochs=2), loaded(2, epochs=2)
    assert same(first[0], again[0]) and same(first[1], again[1]) and not same(first[0], first[1])


def test_a_seed_gives_the_same_masks_with_any_number_of_workers():
    none, two, alive = (
        loaded(workers, 3, 2, persistent) for workers, persistent in ((0, False), (2, False), (2, True))
    )
    for epoch in (0, 1):
        assert same(none[epoch], two[epoch]) and same(none[epoch], alive[epoch])
    assert not same(none[0], none[1])


def test_trains_in_a_plain_loop():
    model = fastbert.BertForMaskedLM(CONFIG).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = masking(seed=0)(examples(LENGTHS[:20]))
    batch = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    losses = []
    for _ in range(15):
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def arguments(directory, **more):
    settings = {"per_device_train_batch_size": 5, "per_device_eval_batch_size": 5, "logging_steps": 1, "seed": 4}
    rest = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": DEVICE == "cpu"}
    return transformers.TrainingArguments(str(directory), **settings | rest | more)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path):
    """A masked LM in transformers.Trainer: reproducible, evaluated, saved and loaded."""
    pytest.importorskip("accelerate")
    runs = []
    for name in "ab":
        torch.manual_seed(0)
        model = fastbert.BertForMaskedLM(CONFIG)
        trainer = transformers.Trainer(
            model, arguments(tmp_path / name, max_steps=6), masking(), examples(LENGTHS[:40]), examples(LENGTHS[40:50])
        )
        trainer.train()
        runs.append(losses_of(trainer))
    assert len(runs[0]) == 6 and runs[0] == runs[1]
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    trainer.save_model()
    fastbert.BertForMaskedLM(CONFIG).load_state_dict(load_file(tmp_path / "b" / "model.safetensors"))


class PackedTrainer:
    """The recipe of docs/heads.md, to be mixed into transformers.Trainer."""

    def loader(self, dataset, shuffle):
        lengths = [len(example["input_ids"]) for example in dataset]
        sampler = TokenBudgetSampler(lengths, max_tokens=128, shuffle=shuffle, seed=self.args.seed)
        return self.accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=self.data_collator))

    def get_train_dataloader(self):
        return self.loader(self.train_dataset, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.loader(self.eval_dataset if eval_dataset is None else eval_dataset, shuffle=False)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_trainer_with_a_budget_of_tokens(tmp_path, head, monkeypatch):
    """Every token is trained on and evaluated; the Trainer tells the sampler the epoch."""
    pytest.importorskip("accelerate")
    seen, epochs, set_epoch = [], [], TokenBudgetSampler.set_epoch
    monkeypatch.setattr(TokenBudgetSampler, "set_epoch", lambda self, e: epochs.append(e) or set_epoch(self, e))
    lengths = LENGTHS[:40]
    of_tokens = head == "TokenClassification"
    labels = [{"labels": [i % 3] * length if of_tokens else i % 3} for i, length in enumerate(lengths)]
    rows = examples(lengths, labels=labels)
    trainer = type("Trainer", (PackedTrainer, transformers.Trainer), {})(
        getattr(fastbert, f"BertFor{head}")(CONFIG),
        arguments(tmp_path, num_train_epochs=2),
        PackingCollator(max_tokens=128),
        rows,
        rows,
        compute_metrics=lambda p: {
            "rows": len(p.predictions),
            "classes": p.predictions.shape[-1],
            "labels": p.label_ids,
        },
    )
    trainer.model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"]), with_kwargs=True)
    trainer.train()
    assert max(map(len, seen)) <= 128 and sum(map(len, seen)) == 2 * sum(lengths) and 1 in epochs
    assert len(losses_of(trainer)) == len(seen)
    metrics, expected = trainer.evaluate(), sum(lengths) if of_tokens else len(lengths)
    assert (metrics["eval_rows"], metrics["eval_classes"]) == (expected, 3)
    flat = [label for row in rows for label in (row["labels"] if of_tokens else [row["labels"]])]
    assert metrics["eval_labels"].tolist() == flat
