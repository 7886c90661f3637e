"""Packing on the host: exact batches, masks with the right statistics, reproducible in every process."""

import functools
import math

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from small_models import DEVICE, TINY, minilm
from torch.utils.data import DataLoader

import fastbert
from fastbert.data import BatchSizeSampler, PackingCollator, TokenBudgetSampler

CLS, SEP, MASK, WORDS = 1, 2, 3, 99
CONFIG = TINY.changed(num_hidden_layers=1, num_labels=3)
masking = functools.partial(
    PackingCollator, mlm_probability=0.15, mask_token_id=MASK, vocab_size=WORDS, special_ids=[0, CLS, SEP]
)


def examples(lengths, seed=0, **more):
    """Examples of [CLS] words [SEP], as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, WORDS, (length,), generator=generator) for length in lengths]
    for row in rows:
        row[0], row[-1] = CLS, SEP
    return [
        {"input_ids": row.tolist(), "token_type_ids": (row % 2).tolist(), "attention_mask": [1] * len(row)} | labels
        for row, labels in zip(rows, more.get("labels", [{}] * len(rows)), strict=True)
    ]


def padded(batch, name):
    """A packed entry of a batch in padded form, (B, S)."""
    ends = batch["cu_seqlens"].tolist()
    rows = [batch[name][start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def share(hits, total, probability):
    """Whether a count is within five standard deviations of its binomial expectation."""
    return abs(hits - total * probability) <= 5 * math.sqrt(total * probability * (1 - probability))


# ---- packing


def test_a_packed_batch():
    batch = PackingCollator(return_position_ids=True)(
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
    assert "position_ids" not in PackingCollator()([{"input_ids": [1, 2]}])  # RoBERTa counts from another number


def test_a_packed_batch_of_roberta_has_the_right_positions():
    model = fastbert.BertModel(CONFIG.changed(model_type="roberta", pad_token_id=0)).eval()
    batch = PackingCollator()(examples([7, 2, 12]))
    ids = padded(batch, "input_ids")
    mask = ids != 0
    assert torch.equal(model(**batch)[0], model(ids, mask, padded(batch, "token_type_ids"))[0][mask])


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
    first, second = ({key: torch.as_tensor(value) for key, value in batch.items()} for batch in batches)
    assert all(torch.equal(second[key], value) for key, value in first.items())
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
        ({"max_tokens": 10}, examples([3, 11]), "example 1 .* has 11 tokens; expected at most max_tokens, 10"),
        ({"max_tokens": 10}, examples([6, 5]), "the batch has 11 tokens; expected at most max_tokens, 10"),
        ({"max_length": 5}, examples([3, 6]), "example 1 of the batch has 6 tokens; expected at most max_length, 5"),
        ({}, examples([3, 2], labels=[{"labels": 1}, {}]), "example 1 of the batch has no labels; others have"),
        ({}, examples([3], labels=[{"labels": [1, 2]}]), r"labels of example 0 of the batch has shape \(2,\)"),
        ({}, [{"input_ids": [1, 2], "token_type_ids": [0]}], r"token_type_ids of example 0 .* has shape \(1,\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, rows, words):
    with pytest.raises(ValueError, match=words):
        PackingCollator(**arguments)(rows)


# ---- padded


def test_a_padded_batch_is_transformers_s():
    rows = examples([7, 2, 12], labels=[{"labels": [i % 3] * n} for i, n in enumerate([7, 2, 12])])
    batch = PackingCollator(packed=False, pad_token_id=5)(rows)
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[unused4]", **names)
    assert theirs.pad_token_id == 5
    expected = transformers.DataCollatorForTokenClassification(theirs)(rows)
    assert batch.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor) and batch[name].dtype == tensor.dtype, name


def test_padded_and_packed_batches_have_the_same_masks_and_losses():
    rows = examples([7, 2, 12, 30], labels=[{"next_sentence_label": i % 2} for i in range(4)])
    packed, other = (masking(seed=3, packed=form, pad_token_id=0)(rows) for form in (True, False))
    visible = other["attention_mask"].bool()
    for name in ("input_ids", "token_type_ids", "labels"):
        assert torch.equal(other[name][visible], packed[name])
    assert (other["input_ids"][~visible] == 0).all() and (other["labels"][~visible] == -100).all()
    assert not {"cu_seqlens", "max_seqlen", "position_ids", "labelled_rows"} & other.keys()
    assert packed["labels"].max() > 0
    model = fastbert.BertForPreTraining(CONFIG).eval()
    assert torch.equal(model(**packed).loss, model(**other).loss)


def test_padding_comes_from_the_tokenizer():
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    assert PackingCollator(tokenizer, packed=False).pad_token_id == tokenizer.token_to_id("[PAD]")
    with pytest.raises(ValueError, match="packed=False needs pad_token_id, or a tokenizer that has it"):
        PackingCollator(packed=False)


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
    assert counts.shape[0] == WORDS and (counts[[i for i in range(WORDS) if i != MASK]] > 0).all()  # all occur
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


# ---- whole words


def runs(words):
    """(start, end) of each run of equal numbers other than -1."""
    edges = [0, *((words[1:] != words[:-1]).nonzero().flatten() + 1).tolist(), len(words)]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if words[a] != -1]


def of_words(count, seed=0):
    """Examples of words with 1 to 6 tokens. Some words could be mistaken for one that goes on in the next example."""
    generator = torch.Generator().manual_seed(seed)
    rows = examples(torch.randint(8, 60, (count,), generator=generator).tolist(), seed)
    for row in rows:
        inner = len(row["input_ids"]) - 2
        sizes = torch.randint(1, 7, (inner,), generator=generator)
        row["word_ids"] = [-1, *torch.arange(inner).repeat_interleave(sizes)[:inner].tolist(), -1]
    rows[0]["word_ids"][0] = rows[0]["word_ids"][-1] = None  # tokenizers give None there
    rows[0]["word_ids"] = tuple(rows[0]["word_ids"])
    return rows


def test_whole_words_have_the_right_statistics():
    rows = of_words(3000)
    batch = masking(seed=1, whole_words=True)(rows)
    before = torch.tensor([token for row in rows for token in row["input_ids"]])
    words = torch.tensor([-1 if word is None else word for row in rows for word in row["word_ids"]])
    after, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    assert torch.equal(labels[chosen], before[chosen]) and torch.equal(after[~chosen], before[~chosen])
    assert not (chosen & (words == -1)).any() and torch.equal(batch["labelled_rows"], chosen.nonzero().squeeze(-1))
    spans = runs(words)
    whole = [bool(chosen[a]) for a, b in spans]
    assert all(bool((chosen[a:b] == chosen[a]).all()) for a, b in spans)  # words are chosen as a whole or not at all
    assert share(sum(whole), len(spans), 0.15)
    by_size = [[hit for hit, (a, b) in zip(whole, spans, strict=True) if b - a == size] for size in range(1, 7)]
    assert all(share(sum(hits), len(hits), 0.15) for hits in by_size)  # long words no more often than short ones
    total, masked, kept = int(chosen.sum()), (after == MASK) & chosen, (after == before) & chosen
    assert share(int(masked.sum()), total, 0.8 + 0.1 / WORDS) and share(int(kept.sum()), total, 0.1 + 0.1 / WORDS)
    # Each token is masked, replaced or kept independently of the others in its word.
    pairs = torch.tensor([i for hit, (a, b) in zip(whole, spans, strict=True) if hit for i in range(a, b - 1)])
    assert share(int((masked[pairs] & masked[pairs + 1]).sum()), len(pairs), (0.8 + 0.1 / WORDS) ** 2)


def test_a_word_ends_with_its_example():
    """This holds even without a special token between two words that have the same number."""
    rows = [{"input_ids": [7, 8], "word_ids": [0, 0]}] * 50
    first, second = (masking(seed=1, whole_words=True)(rows)["labels"] != -100).view(50, 2).T
    assert torch.equal(first, second) and 0 < first.sum() < 50


def test_words_of_a_wordpiece_are_the_tokenizer_s():
    """`##` alone gives the same words as word_ids, even if an example begins in the middle of a word."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(24)
    texts = ["unbelievable embeddings, tokenisation's don't-cares [SEP] [MASK] ##ing antidisestablishmentarianism " * 3]
    first = tokenizer.encode(texts[0])
    parts = [first, *first.overflowing]
    assert any(part.tokens[1].startswith("##") for part in parts)
    rows = [{"input_ids": part.ids} for part in parts]
    numbered = [row | {"word_ids": part.word_ids} for row, part in zip(rows, parts, strict=True)]
    for seed in range(8):  # with one seed, [CLS] and the `##` after it may be drawn alike
        collator = PackingCollator(tokenizer, mlm_probability=0.5, whole_words=True, seed=seed)
        assert torch.equal(collator(numbered)["labels"], collator(rows)["labels"])
    all_of_them = PackingCollator(tokenizer, mlm_probability=1.0, whole_words=True)(rows)
    special = torch.isin(torch.tensor([i for row in rows for i in row["input_ids"]]), collator.special_ids)
    assert torch.equal(all_of_them["labels"] == -100, special)  # special tokens in the text too


def test_words_are_those_of_transformers_collator():
    """transformers' words are what spaces separate, so the text here has no punctuation next to a word."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    text = "unbelievable embeddings and tokenisation of antidisestablishmentarianism"
    encoding = tokenizer.encode(text)
    offsets, special = torch.tensor([encoding.offsets]), torch.tensor([encoding.special_tokens_mask])
    theirs = transformers.DataCollatorForLanguageModeling
    words, not_first = theirs._calc_word_ids_and_prob_mask(offsets.numpy(), special.numpy())
    collator = PackingCollator(tokenizer, mlm_probability=0.5, whole_words=True, seed=0)
    row = torch.tensor(encoding.ids)
    first = collator._first_of_word(row, special[0].bool(), None, torch.tensor([len(row)]))
    for _ in range(20):
        chosen = (torch.rand(1, len(row)) < 0.5) & ~torch.from_numpy(not_first)
        expected = torch.from_numpy(theirs._whole_word_mask(words, chosen))[0]
        assert torch.equal(expected, chosen[0][first] & (special[0] == 0))


def test_whole_words_follow_seed_and_epoch():
    rows, one, same = of_words(9), masking(seed=7, whole_words=True), masking(seed=7, whole_words=True)
    assert torch.equal(one(rows)["input_ids"], same(rows)["input_ids"])
    same.set_epoch(1)
    assert not torch.equal(one(rows)["labels"], same(rows)["labels"])


def test_words_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="whole_words goes with mlm_probability"):
        PackingCollator(whole_words=True)
    with pytest.raises(ValueError, match="whole_words needs word_ids in the examples, or a WordPiece tokenizer"):
        masking(whole_words=True)(examples([5]))
    with pytest.raises(ValueError, match=r"word_ids of example 0 of the batch has shape \(2,\)"):
        masking(whole_words=True)([{"input_ids": [1, 2, 3], "word_ids": [0, 0]}])


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
        assert total + LENGTHS[after[0]] > 128, batch  # a batch ends only when the next example does not fit
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("sampler", ["tokens", "examples"])
def test_ranks_share_examples_without_overlap_or_loss(sampler, world_size):
    for epoch in (0, 1):
        ranks = []
        for rank in range(world_size):
            more = {"rank": rank, "world_size": world_size}
            made = TokenBudgetSampler(LENGTHS, 128, **more) if sampler == "tokens" else BatchSizeSampler(500, 8, **more)
            made.set_epoch(epoch)
            ranks.append(list(made))
            assert len(ranks[-1]) == len(made)
        assert len(set(map(len, ranks))) == 1  # equally many steps: no rank waits for another
        batches = [batch for rank in ranks for batch in rank]
        assert sorted(i for batch in batches for i in batch) == list(range(500)) and all(batches)
        assert max(sum(LENGTHS[i] for i in batch) for batch in batches) <= 128 or sampler == "examples"
        assert max(map(len, batches)) <= 8 or sampler == "tokens"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_is_counted_in_batches_of_the_rank(rank):
    """As when two ranks resume: each rank leaves out its own first two batches."""
    ranks = {"rank": rank, "world_size": 2}
    for sampler in (TokenBudgetSampler(LENGTHS, 128, **ranks), BatchSizeSampler(500, 8, **ranks)):
        whole = list(sampler)
        sampler.start = 2
        assert list(sampler) == whole[2:] and len(whole) > 9


def test_batches_of_a_number_of_examples():
    assert list(BatchSizeSampler(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(BatchSizeSampler(n, 3, shuffle=False, drop_last=True)) for n in (2, 4)] == [[], [[0, 1, 2]]]
    assert list(BatchSizeSampler(6, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5]] and list(BatchSizeSampler(0, 3)) == []
    one, other = BatchSizeSampler(50, 7), BatchSizeSampler(50, 7, seed=1)
    assert sorted(i for batch in one for i in batch) == list(range(50)) and list(one) == list(one) != list(other)
    two = BatchSizeSampler(9, 4, shuffle=False, rank=1, world_size=2)  # of [0, 4), [4, 8), [8, 9), the second is halved
    assert list(two) == [[4, 5], [8]]
    shares = [BatchSizeSampler(14, 4, drop_last=True, shuffle=False, rank=r, world_size=2) for r in (0, 1)]
    assert [list(share) for share in shares] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]  # none is halved, one is left out


def test_a_last_batch_takes_examples_of_the_one_before():
    def sizes(sampler):
        return [len(batch) for batch in sampler]

    assert sizes(BatchSizeSampler(9, 4, min_examples=2)) == [4, 3, 2]
    assert sizes(BatchSizeSampler(9, 4, min_examples=4)) == [4, 4, 1]  # the one before would have too few
    assert sizes(BatchSizeSampler(3, 2, min_examples=2)) == [2, 1] and sizes(
        BatchSizeSampler(1, 4, min_examples=2)
    ) == [1]
    for count in range(1, 23):  # accelerate leaves out small batches before the last of a sampler with a batch_size
        shard = pytest.importorskip("accelerate").data_loader.BatchSamplerShard
        shards = [shard(BatchSizeSampler(count, 4, min_examples=2, shuffle=False), 2, rank) for rank in (0, 1)]
        assert {i for shard in shards for batch in shard for i in batch} == set(range(count))
    budget = functools.partial(TokenBudgetSampler, shuffle=False, min_examples=2)
    assert list(budget([2, 2, 2, 2, 2], 8)) == [[0, 1, 2], [3, 4]]
    assert list(budget([2, 2, 4, 5], 8)) == [[0, 1, 2], [3]]  # 4 and 5 are more than 8
    lengths = torch.randint(5, 60, (197,))
    for epoch in range(40):
        sampler = TokenBudgetSampler(lengths, 180, min_examples=2)  # three of the longest fit
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert min(map(len, batches)) >= 2 and sorted(sum(batches, [])) == list(range(197))
        assert max(int(lengths[batch].sum()) for batch in batches) <= 180
    plain, topped = (BatchSizeSampler(9, 4, min_examples=n).identity() for n in (1, 2))
    assert plain != topped and BatchSizeSampler(8, 4, min_examples=2).identity() == BatchSizeSampler(8, 4).identity()
    with pytest.raises(ValueError, match="min_examples is 0; expected a whole number, at least 1"):
        BatchSizeSampler(9, 4, min_examples=0)


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ((5, 0), {}, "batch_size is 0; expected a whole number, at least 1"),
        ((5, 2), {"rank": 2, "world_size": 2}, r"rank is 2; expected 0 to 1 \(world_size - 1\)"),
        ((5, 2), {"rank": 0, "world_size": 0}, "rank is 0; expected 0 to -1"),
        ((5, 4), {"world_size": 2, "drop_last": True}, "1 whole batches for 2 ranks; expected one for each"),
        ((5, 1), {"rank": 0, "world_size": 2}, "5 batches of one example each cannot be shared evenly by 2 ranks"),
        ((3, 8), {"rank": 0, "world_size": 4}, "3 batches of one example each cannot be shared evenly by 4 ranks"),
    ],
)
def test_samplers_that_make_no_sense_are_refused(arguments, more, words):
    with pytest.raises(ValueError, match=words):
        BatchSizeSampler(*arguments, **more)


# ---- with DataLoader and transformers' Trainer


def loaded(workers, seed=None, epochs=1, persistent=False):
    """The labels of all batches of a DataLoader, by epoch."""
    rows, collator = examples(LENGTHS[:60]), masking(seed=seed, max_tokens=128)
    sampler = TokenBudgetSampler(LENGTHS[:60], 128, shuffle=False)
    torch.manual_seed(11)
    of_workers = {"num_workers": workers, "persistent_workers": persistent}
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collator, **of_workers)
    labels = []
    for epoch in range(epochs):
        collator.set_epoch(epoch)
        labels.append([batch["labels"] for batch in loader])
    return labels


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_two_workers():
    """With torch's generator, masks are reproducible for a given number of workers, and differ from epoch to epoch."""
    first, again = loaded(2, epochs=2), loaded(2, epochs=2)
    assert same(first[0], again[0]) and same(first[1], again[1]) and not same(first[0], first[1])


def test_a_seed_gives_the_same_masks_with_any_number_of_workers():
    none, two, alive = (
        loaded(workers, 3, 2, persistent) for workers, persistent in ((0, False), (2, False), (2, True))
    )
    for epoch in (0, 1):
        assert same(none[epoch], two[epoch]) and same(none[epoch], alive[epoch])
    assert not same(none[0], none[1])


def arguments(directory, **more):
    settings = {"per_device_train_batch_size": 5, "per_device_eval_batch_size": 5, "logging_steps": 1, "seed": 4}
    rest = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": DEVICE == "cpu"}
    return transformers.TrainingArguments(str(directory), **settings | rest | more)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path):
    """transformers.Trainer trains a masked LM reproducibly, evaluates and saves it, and its weights can be loaded."""
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
    """The recipe of docs/heads.md, as a mixin for transformers.Trainer."""

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


def test_masks_change_from_epoch_to_epoch():
    rows = [{"input_ids": list(range(5, 25))} for _ in range(4)]
    collator = PackingCollator(mlm_probability=0.5, mask_token_id=MASK, vocab_size=99, special_ids=[], seed=1)
    loader = fastbert.data.create_dataloader(rows, collator, 4, shuffle=False)
    first = next(iter(loader))["labels"]
    loader.set_epoch(1)
    assert not torch.equal(next(iter(loader))["labels"], first)
