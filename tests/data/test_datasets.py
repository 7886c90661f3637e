"""Compares data sets with tokenizers and transformers on the same texts, and checks properties that hold exactly."""

import itertools
import math
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
import transformers
from small_models import TINY, minilm
from torch.utils.data import DataLoader

import fastbert
from fastbert.cli.demo import python_documentation
from fastbert.data import (
    ClassificationDataset,
    MLMDataset,
    NSPDataset,
    PackingCollator,
    QADataset,
    TokenClassificationDataset,
    align_labels,
    get_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

PASSAGES = [text for _, text in python_documentation(600)][:120]
WORDPIECE = get_tokenizer(minilm())
BPE = train_tokenizer(PASSAGES, "byte-level-bpe", vocab_size=1000)
both = pytest.mark.parametrize("tokenizer", [WORDPIECE, BPE], ids=["wordpiece", "bpe"])


def ids(dataset):
    return [example["input_ids"].tolist() for example in dataset]


def quiet(make, *arguments, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make(*arguments, **more)


# ---- masked LM


@both
def test_short_texts_are_the_tokenizer_s_own(tokenizer):
    texts = [text[:80] for text in PASSAGES]
    dataset = quiet(MLMDataset, iter(texts), tokenizer, max_length=128)
    assert ids(dataset) == [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert dataset.lengths.tolist() == [len(row) for row in ids(dataset)]
    assert dataset[-1].keys() == {"input_ids"} and dataset[-1]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[len(texts)]


@both
def test_long_texts_are_split_and_nothing_is_lost(tokenizer):
    dataset = quiet(MLMDataset, PASSAGES, tokenizer, max_length=32, whole_words=True)
    first, *_, last = tokenizer.encode("a").ids
    rows, expected = iter(dataset), [tokenizer.encode(text, add_special_tokens=False) for text in PASSAGES]
    for encoding in expected:
        parts = list(itertools.islice(rows, math.ceil(len(encoding) / 30)))
        assert all(len(part["input_ids"]) == 32 for part in parts[:-1])
        assert all((part["input_ids"][0], part["input_ids"][-1]) == (first, last) for part in parts)
        assert [i for part in parts for i in part["input_ids"][1:-1].tolist()] == encoding.ids
        assert [i for part in parts for i in part["word_ids"][1:-1].tolist()] == encoding.word_ids
        assert all(part["word_ids"][[0, -1]].tolist() == [-1, -1] for part in parts)
    assert next(rows, None) is None


@both
def test_long_texts_are_cut_and_said(tokenizer):
    long = sum(len(tokenizer.encode(text)) > 100 for text in PASSAGES)
    assert 0 < long < len(PASSAGES)
    with pytest.warns(UserWarning) as said:
        dataset = MLMDataset(PASSAGES, tokenizer, max_length=100, truncation=True)
    expected = f"MLMDataset: {long} of {len(PASSAGES)} texts have more than max_length, 100, tokens: cut there"
    assert [str(warning.message) for warning in said] == [expected] and said[0].filename == __file__
    tokenizer.enable_truncation(100)
    try:
        assert ids(dataset) == [encoding.ids for encoding in tokenizer.encode_batch(PASSAGES)]
    finally:
        tokenizer.no_truncation()
    index = next(i for i, text in enumerate(PASSAGES) if len(tokenizer.encode(text)) > 100)
    with pytest.raises(ValueError, match=rf"texts\[{index}\] has \d+ tokens; expected at most max_length, 100"):
        MLMDataset(PASSAGES, tokenizer, max_length=100, truncation=False)


def test_a_tokenizer_s_own_truncation_and_padding_do_not_count():
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    theirs.backend_tokenizer.enable_truncation(8)
    theirs.backend_tokenizer.enable_padding(length=64)
    dataset = quiet(MLMDataset, ["one two three four five six seven eight nine ten"], theirs)
    assert dataset.lengths.tolist() == [12]
    assert theirs.backend_tokenizer.truncation["max_length"] == 8  # the data set uses a copy


def test_empty_lines_of_a_corpus_are_skipped_and_counted():
    with pytest.warns(UserWarning, match="MLMDataset: 3 of 5 texts have no token: skipped"):
        dataset = MLMDataset(["a cat", "", " \n", "\u200b", "two dogs"], WORDPIECE)
    assert ids(dataset) == [WORDPIECE.encode("a cat").ids, WORDPIECE.encode("two dogs").ids]
    with warnings.catch_warnings(), pytest.raises(ValueError, match="MLMDataset: there is no text"):
        warnings.simplefilter("ignore")
        MLMDataset(["", " "], WORDPIECE)


@pytest.mark.parametrize(
    ("texts", "more", "error", "words"),
    [
        ([], {}, ValueError, "there is no text; expected at least one"),
        ("a text", {}, TypeError, "MLMDataset: texts is a str; expected several strings"),
        (["a", None], {}, TypeError, r"texts\[1\] is a NoneType; expected a string"),
        (["a", "b\ud83d"], {}, ValueError, r"texts\[1\] is not text at character 1: surrogates not allowed"),
        (["a"], {"max_length": 2}, ValueError, "max_length is 2; expected at least 3, with the 2 special tokens"),
        (["a"], {"max_length": 64.0}, TypeError, "max_length is 64.0; expected a whole number"),
        (["a"], {"truncation": "longest"}, ValueError, "truncation is 'longest'; expected 'split' or True or False"),
    ],
)
def test_texts_that_make_no_sense_are_refused(texts, more, error, words):
    with pytest.raises(error, match=words):
        MLMDataset(texts, WORDPIECE, **more)
    with pytest.raises(TypeError, match="tokenizer is a str; expected one of tokenizers, or based on it"):
        MLMDataset(["a"], "bert-base-uncased")


# ---- next sentence

DOCUMENTS = [[f"document {d} sentence {s}" for s in range(size)] for d, size in enumerate([7, 1, 30, 0, 2, 60] * 20)]


def texts_of_pairs(dataset):
    """Yields (first, second, label); first and second are (document number, sentence number)."""
    for example in dataset:
        sides = (example["input_ids"][example["token_type_ids"] == side].tolist() for side in (0, 1))
        first, second = (tuple(int(w) for w in WORDPIECE.decode(side).split() if w.isdigit()) for side in sides)
        yield first, second, example["labels"]


def test_pairs_are_adjacent_or_of_two_documents():
    dataset = quiet(NSPDataset, DOCUMENTS, WORDPIECE)
    pairs = list(texts_of_pairs(dataset))
    starts = [(d, s) for d, document in enumerate(DOCUMENTS) for s in range(len(document) - 1)]
    assert [first for first, _, _ in pairs] == starts  # each text that has a next one, once
    for (document, sentence), second, label in pairs:
        assert second == (document, sentence + 1) if label == 0 else second[0] != document
    random = [second for _, second, label in pairs if label]
    assert abs(len(random) - len(pairs) / 2) <= 5 * math.sqrt(len(pairs) / 4)


def test_random_texts_are_drawn_from_all_other_documents_alike():
    documents = [[f"document {d} sentence {s}" for s in range(size)] for d, size in enumerate([3, 5, 2000])]
    drawn = [
        second for first, second, label in texts_of_pairs(NSPDataset(documents, WORDPIECE)) if label and first[0] == 2
    ]
    counts = [sum(second == (d, s) for second in drawn) for d, size in ((0, 3), (1, 5)) for s in range(size)]
    expected = len(drawn) / 8
    assert sum(counts) == len(drawn) and all(abs(c - expected) <= 5 * math.sqrt(expected) for c in counts)


def test_a_seed_decides_the_pairs():
    one, same, other = (NSPDataset(DOCUMENTS, WORDPIECE, seed=seed) for seed in (0, 0, 1))
    assert ids(one) == ids(same) != ids(other)


@pytest.mark.parametrize("first, second", [(40, 4), (4, 40), (40, 41), (41, 40), (40, 40), (9, 9), (10, 9), (9, 10)])
@pytest.mark.parametrize("max_length", [21, pytest.param(20, marks=pytest.mark.slow)])
def test_the_longer_text_of_a_pair_is_cut(first, second, max_length):
    """It is cut as tokenizers does it. Lengths are on both sides of half the room; the room is even or odd."""
    documents = [["cat " * first, "dog " * second], ["a fish"]]
    made = (_cut_pairs(documents, max_length, seed) for seed in itertools.count())
    dataset = next(pairs for pairs in made if not pairs[0]["labels"])
    WORDPIECE.enable_truncation(max_length)
    try:
        expected = WORDPIECE.encode(*documents[0])
    finally:
        WORDPIECE.no_truncation()
    assert dataset[0]["input_ids"].tolist() == expected.ids
    assert dataset[0]["token_type_ids"].tolist() == expected.type_ids


def _cut_pairs(documents, max_length, seed):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dataset = NSPDataset(documents, WORDPIECE, max_length=max_length, seed=seed)
    assert len(said) <= 1
    return dataset


def test_very_long_pairs_take_no_more_than_their_length():
    """tokenizers' own truncation would make 500 x 500 parts of such a pair."""
    with pytest.warns(UserWarning, match="1 of 1 pairs have more than max_length, 128"):
        texts, others = ["a b c d e " * 10000], ["1 2 3 4 5 " * 10000]
        dataset = ClassificationDataset(texts, [0], WORDPIECE, pairs=others, max_length=128)
    assert dataset.lengths.tolist() == [128]


def test_label_names_suit_both_models():
    config = TINY.changed(vocab_size=30522, num_hidden_layers=1)
    rows = list(NSPDataset(DOCUMENTS[:6], WORDPIECE))[:8]
    loss = fastbert.BertForNextSentencePrediction(config)(**PackingCollator()(rows)).loss
    rows = list(NSPDataset(DOCUMENTS[:6], WORDPIECE, label_name="next_sentence_label"))[:8]
    batch = PackingCollator(WORDPIECE, mlm_probability=0.5, seed=0)(rows)
    assert batch["next_sentence_label"].shape == (8,) and batch["labels"].shape == batch["input_ids"].shape
    assert loss.isfinite() and fastbert.BertForPreTraining(config)(**batch).loss.isfinite()


@pytest.mark.parametrize(
    ("documents", "more", "error", "words"),
    [
        ([["a", "b"]], {}, ValueError, "at least two documents with text, and one of them with two"),
        ([["a", "b"], []], {}, ValueError, "at least two documents with text"),
        ([["a"], ["b"]], {}, ValueError, "one of them with two texts"),
        ([], {}, ValueError, "at least two documents"),
        ([["a", "b"], ["c", "d", " "]], {}, ValueError, r"documents\[1\]\[2\] has no token; expected text"),
        (["a text", "another"], {}, TypeError, r"documents\[0\] is a str; expected several strings"),
        ([["a", "b"], ["c", 4]], {}, TypeError, r"documents\[1\]\[1\] is a int; expected a string"),
        ([["a", "b"], ["c"]], {"label_name": "label"}, ValueError, "label_name is 'label'; expected"),
        ([["a", "b"], ["c"]], {"truncation": "split"}, ValueError, "truncation is 'split'; expected True or False"),
        ([["a " * 9, "b"], ["c"]], {"truncation": False, "max_length": 9}, ValueError, r"\[0\]\[0\] has \d+ tok"),
        ([["a", "b"], ["c"]], {"max_length": 4}, ValueError, "is 4; expected at least 5, with the 3 special"),
    ],
)
def test_documents_that_make_no_sense_are_refused(documents, more, error, words):
    with pytest.raises(error, match=words):
        NSPDataset(documents, WORDPIECE, **more)


# ---- classification of texts


@pytest.mark.parametrize(
    ("labels", "more", "expected"),
    [
        ([0, 2, -100], {"num_labels": 3}, [0, 2, -100]),
        ([True, False, True], {}, [1, 0, 1]),
        (np.array([7, 0, 1], np.uint8), {}, [7, 0, 1]),
        (torch.tensor([1, 0, 1]), {"num_labels": 2}, [1, 0, 1]),
        ([0.5, -1, 3], {}, [0.5, -1.0, 3.0]),
        ([5, -1, 3], {"num_labels": 1}, [5.0, -1.0, 3.0]),  # num_labels 1 is a regression
        ([[1, 0], [0, 0], [1, 1]], {"num_labels": 2}, [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
    ],
)
def test_labels_of_texts(labels, more, expected):
    dataset = quiet(ClassificationDataset, ["a", "b c", "d"], labels, WORDPIECE, **more)
    found = [example["labels"] for example in dataset]
    assert found == expected and {type(label) for label in found} == {type(label) for label in expected}
    batch = PackingCollator()(list(dataset))
    assert batch["labels"].tolist() == expected and batch["labels"].dtype in (torch.int64, torch.float32)


@both
def test_pairs_are_the_tokenizer_s_own(tokenizer):
    texts, others = [text[:60] for text in PASSAGES[:50]], [text[:90] for text in PASSAGES[50:100]]
    dataset = quiet(ClassificationDataset, texts, None, tokenizer, pairs=others)
    for example, text, other in zip(dataset, texts, others, strict=True):
        expected = tokenizer.encode(text, other)
        assert example.keys() == {"input_ids", "token_type_ids"}
        assert example["input_ids"].tolist() == expected.ids and example["token_type_ids"].tolist() == expected.type_ids


@pytest.mark.parametrize(
    ("labels", "more", "error", "words"),
    [
        ([0, 3], {"num_labels": 3}, ValueError, r"labels\[1\] is 3; expected 0 to 2 \(num_labels - 1\), or -100"),
        ([0, -1], {}, ValueError, r"labels\[1\] is -1; expected 0 or more, or -100"),
        ([0], {}, ValueError, "there are 2 texts and 1 labels; expected equal numbers"),
        ([0, 1], {"pairs": ["c"]}, ValueError, "there are 2 texts and 1 pairs and 2 labels"),
        (["good", "bad"], {}, TypeError, "labels are 'good', 'bad'; expected an int, a float"),
        ([0, None], {}, TypeError, "labels are 0, None; expected"),
        ([[0, 1], [1]], {}, TypeError, r"labels are \[0, 1\], \[1\]; expected"),
        ([[0, 1], [1, -100]], {}, ValueError, r"labels\[1\]\[1\] is -100; expected a number for each class"),
        ([[0, 1], [1, 1]], {"num_labels": 3}, ValueError, "labels have 2 numbers each; expected num_labels, 3"),
        ([0.5, 1.0], {"num_labels": 3}, TypeError, "labels are floats; expected ints, for num_labels 3"),
        ([0.5, math.nan], {}, ValueError, r"labels\[1\] is not finite"),
        ([0, 1], {"pairs": ["c", "\u200b"]}, ValueError, r"pairs\[1\] has no token; expected text"),
        ([0, 1], {"truncation": "split"}, ValueError, "truncation is 'split'; expected True or False"),
        ([0, 1], {"truncation": False, "max_length": 4}, ValueError, r"texts\[1\] has 5 tokens; expected at most"),
    ],
)
def test_labels_and_texts_that_do_not_fit_are_refused(labels, more, error, words):
    with pytest.raises(error, match=words):
        ClassificationDataset(["a", "b c d"], labels, WORDPIECE, **more)


def test_a_text_without_a_token_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"ClassificationDataset: texts\[2\] has no token; expected text"):
        ClassificationDataset(["a", "b", " ", ""], [0, 1, 0, 1], WORDPIECE)


# ---- classification of words

SENTENCES = [
    ["Extraordinarily", "unbelievable", "New", "York", "'s", "2,000-year-old", "towers"],
    ["a"],
    ["EU", "rejects", "German", "call", "to", "boycott", "British", "lamb", "."],
]
TAGS = [[0, 1, 2, 3, 0, 4, 1], [2], [3, 0, 1, 0, 0, 0, -100, 0, 0]]


def test_labels_are_on_first_tokens_alone():
    assert align_labels([None, 0, 0, 1, 2, 2, 2, None], [5, 6, 7]) == [-100, 5, -100, 6, 7, -100, -100, -100]
    assert align_labels([-1, 1, 1, -1], [5, 6]) == [-100, 6, -100, -100]  # the first word has no token
    assert align_labels([], []) == []
    with pytest.raises(ValueError, match="there is a word 2; expected words below 2"):
        align_labels([None, 0, 1, 2, None], [5, 6])


def run_ner(tokenizer, words, labels):
    """tokenize_and_align_labels of transformers' run_ner.py, label_all_tokens=False."""
    inputs = tokenizer(words, truncation=True, max_length=64, is_split_into_words=True)
    inputs["labels"] = []
    for i, label in enumerate(labels):
        previous, label_ids = None, []
        for word in inputs.word_ids(batch_index=i):
            label_ids.append(-100 if word is None or word == previous else label[word])
            previous = word
        inputs["labels"].append(label_ids)
    return inputs


@both
def test_words_and_labels_are_run_ner_s(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if tokenizer is BPE:  # transformers demands this of RoBERTa's tokenizer for text in words
        theirs.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    expected = run_ner(theirs, SENTENCES, TAGS)
    dataset = quiet(TokenClassificationDataset, SENTENCES, TAGS, tokenizer, max_length=64, num_labels=5)
    assert ids(dataset) == expected["input_ids"]
    assert [example["labels"].tolist() for example in dataset] == expected["labels"]
    packed, padded = (PackingCollator(tokenizer, packed=packed)(list(dataset)) for packed in (True, False))
    theirs.pad_token = tokenizer.id_to_token(padded["input_ids"][1, -1].item())
    collator = transformers.DataCollatorForTokenClassification(theirs)
    other = collator([{k: example[k].tolist() for k in ("input_ids", "labels")} for example in dataset])
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(padded[name], other[name]), name
    assert torch.equal(packed["labels"], other["labels"][other["attention_mask"].bool()])
    for example, words, tags in zip(dataset, SENTENCES, TAGS, strict=True):  # and back: from labels to tags
        first = example["word_ids"] != torch.cat([torch.tensor([-1]), example["word_ids"][:-1]])
        first &= example["word_ids"] >= 0
        assert example["labels"][first].tolist() == tags and len(tags) == len(words)
        assert (example["labels"][~first] == -100).all()


def test_words_that_are_lost_are_counted():
    with pytest.warns(UserWarning) as said:
        words = [["a", "\u200b", "b"], ["c", "d", "e", "f"]]
        dataset = TokenClassificationDataset(words, [[1, 2, 3], [1, 1, 1, 1]], WORDPIECE, max_length=5)
    assert [str(warning.message).partition(": ")[2] for warning in said] == [
        "1 of 2 texts have more than max_length, 5, tokens: cut there",
        "2 of 7 words have no token, or were cut off: their labels are left out",
    ]
    assert dataset[0]["labels"].tolist() == [-100, 1, 3, -100]
    assert "labels" not in TokenClassificationDataset([["a"]], None, WORDPIECE)[0]
    with pytest.warns(UserWarning, match="1 of 2 words have no token, or were cut off$"):
        TokenClassificationDataset([["a", "\u200b"]], None, WORDPIECE)


@pytest.mark.parametrize(
    ("words", "labels", "more", "error", "message"),
    [
        ([["a", "b"]], [[0]], {}, ValueError, r"words\[0\] has 2 words and 1 labels; expected one each"),
        ([["a", "b"]], [[0, 1], [0]], {}, ValueError, "there are 1 words and 2 labels; expected equal numbers"),
        ([["a"], ["b", "c"]], [[0], [1, 4]], {"num_labels": 4}, ValueError, r"labels\[1\]\[1\] is 4; expected 0 to 3"),
        ([["a"]], [[-1]], {}, ValueError, r"labels\[0\]\[0\] is -1; expected 0 or more"),
        ([["a"]], [["B-PER"]], {}, TypeError, r"labels\[0\] is 'B-PER'; expected an int for each word"),
        ([["a"]], [[0.5]], {}, TypeError, r"labels\[0\] is 0.5; expected an int for each word"),
        (["a sentence"], [[0]], {}, TypeError, r"words\[0\] is a str; expected several strings"),
        ([["a"], []], [[0], []], {}, ValueError, r"words\[1\] has no token; expected text"),
        ([["a"], [" "]], [[0], [0]], {}, ValueError, r"words\[1\] has no token; expected text"),
    ],
)
def test_words_and_labels_that_do_not_fit_are_refused(words, labels, more, error, message):
    with pytest.raises(error, match=message):
        TokenClassificationDataset(words, labels, WORDPIECE, **more)


# ---- question answering


def questions():
    """Yields question, context and answer: up to four words at either end or in the middle of the context, or none."""
    generator = torch.Generator().manual_seed(0)
    for number, context in enumerate([*PASSAGES[:40], "Zoë's naïve café — 日本語 in Ōsaka; 😀 costs 5€. " * 9]):
        words = [match.span() for match in re.finditer(r"\w+", context)]
        first = [0, len(words) - 1, int(torch.randint(len(words), (), generator=generator))][number % 3]
        last = min(first + int(torch.randint(4, (), generator=generator)), len(words) - 1)
        start, end = words[first][0], words[last][1]
        answer = {"text": [context[start:end], "another"], "answer_start": [start, 0]}
        question = f"  where is part {number} of the text?" + " please" * (number % 5)
        yield question, context, [answer, answer, answer, {"text": [], "answer_start": []}, None][number % 5]


def run_qa(tokenizer, questions, contexts, answers, max_length, stride):
    """prepare_train_features of transformers' run_qa.py, for padding on the right."""
    examples = tokenizer(
        [question.lstrip() for question in questions],
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    starts, ends = [], []
    for i, offsets in enumerate(examples["offset_mapping"]):
        input_ids, sequence_ids = examples["input_ids"][i], examples.sequence_ids(i)
        cls_index = input_ids.index(tokenizer.cls_token_id)
        answer = answers[examples["overflow_to_sample_mapping"][i]]
        if answer is None or len(answer["answer_start"]) == 0:
            starts.append(cls_index)
            ends.append(cls_index)
            continue
        start_char = answer["answer_start"][0]
        end_char = start_char + len(answer["text"][0])
        token_start_index = 0
        while sequence_ids[token_start_index] != 1:
            token_start_index += 1
        token_end_index = len(input_ids) - 1
        while sequence_ids[token_end_index] != 1:
            token_end_index -= 1
        if not (offsets[token_start_index][0] <= start_char and offsets[token_end_index][1] >= end_char):
            starts.append(cls_index)
            ends.append(cls_index)
        else:
            # If an answer begins with a window's last token, run_qa.py runs on to [SEP], whose offset is (0, 0).
            after = token_end_index + 1
            while token_start_index < after and offsets[token_start_index][0] <= start_char:
                token_start_index += 1
            starts.append(token_start_index - 1)
            while offsets[token_end_index][1] >= end_char:
                token_end_index -= 1
            ends.append(token_end_index + 1)
    return examples, starts, ends


@both
def test_windows_and_positions_are_run_qa_s(tokenizer, tmp_path):
    asked, contexts, answers = zip(*questions(), strict=True)
    save_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected, starts, ends = run_qa(theirs, asked, list(contexts), answers, 64, 16)
    dataset = quiet(QADataset, asked, contexts, answers, tokenizer, max_length=64, stride=16)
    assert ids(dataset) == expected["input_ids"]
    assert [example["token_type_ids"].tolist() for example in dataset] == expected["token_type_ids"]
    assert dataset.example_index.tolist() == expected["overflow_to_sample_mapping"]
    assert [(e["start_positions"], e["end_positions"]) for e in dataset] == list(zip(starts, ends, strict=True))
    assert 0 < sum(start == 0 for start in starts) < len(starts)


@both
def test_windows_cover_the_context_and_overlap(tokenizer):
    asked, contexts, _ = zip(*questions(), strict=True)
    dataset = quiet(QADataset, asked, contexts, None, tokenizer, max_length=48, stride=10)
    assert dataset[0].keys() == {"input_ids", "token_type_ids"} and dataset.lengths.max() == 48
    for example, context in enumerate(contexts):
        windows = np.flatnonzero(dataset.example_index == example)
        expected = tokenizer.encode(context, add_special_tokens=False)
        parts = [dataset.rows("offsets", i)[dataset.rows("offsets", i)[:, 0] >= 0].tolist() for i in windows]
        whole = parts[0] + [offset for part in parts[1:] for offset in part[10:]]
        assert [tuple(offset) for offset in whole] == expected.offsets
        assert all(before[-10:] == after[:10] for before, after in itertools.pairwise(parts))


@both
def test_answers_are_found_again_in_the_text(tokenizer):
    asked, contexts, answers = zip(*questions(), strict=True)
    dataset = quiet(QADataset, asked, contexts, answers, tokenizer, max_length=64, stride=24)
    found = {}
    for index, example in enumerate(dataset):
        start, end = example["start_positions"], example["end_positions"]
        if start:
            found.setdefault(int(dataset.example_index[index]), set()).add(dataset.answer(index, start, end))
        assert bool(start) == bool(end) and dataset.answer(index, 0, 0) == ""
    assert found.keys() == {i for i, answer in enumerate(answers) if answer is not None and answer["text"]}
    for index, texts in found.items():
        answer = answers[index]["text"][0]  # whole words; a BPE token may hold more, as in `(__init__`
        assert texts == {answer} if tokenizer is WORDPIECE else all(answer in text for text in texts)


def test_a_character_of_several_tokens_is_covered_by_all_of_them():
    """BPE may split a character's bytes into several tokens. The answer is all tokens whose offsets overlap it."""
    context = "the sign 😀 and 北京 x."
    asked = ["😀", "北京", "北", "京 x"]
    answers = [{"text": [text], "answer_start": [context.index(text)]} for text in asked]
    dataset = QADataset(["what?"] * 4, [context] * 4, answers, BPE, max_length=64, stride=8)
    for index, text in enumerate(asked):
        begin, end = context.index(text), context.index(text) + len(text)
        offsets = dataset.rows("offsets", index).tolist()
        touched = [i for i, (first, last) in enumerate(offsets) if first < end and last > begin and first >= 0]
        found = dataset[index]["start_positions"], dataset[index]["end_positions"]
        assert found == (touched[0], touched[-1]) and dataset.answer(index, *found).strip() == text
    assert len(touched) > 3


def test_white_space_around_an_answer_does_not_count():
    context = "so    a b"
    answers = [{"text": [text], "answer_start": [context.index(text)]} for text in ("    a b", "a b")]
    dataset = QADataset(["what?"] * 2, [context] * 2, answers, WORDPIECE)
    one, two = ((row["start_positions"], row["end_positions"]) for row in dataset)
    assert one == two and dataset.answer(0, *one) == "a b"


def test_an_answer_without_a_token_is_none():
    """WordPiece drops U+200B, as it drops control characters."""
    context = "a \u200b b"
    dataset = QADataset(["what?"], [context], [{"text": ["\u200b"], "answer_start": [2]}], WORDPIECE)
    assert (dataset[0]["start_positions"], dataset[0]["end_positions"]) == (0, 0)


def test_the_head_s_loss_is_transformers_s():
    asked, contexts, answers = zip(*questions(), strict=True)
    dataset = QADataset(asked, contexts, answers, WORDPIECE, max_length=64, stride=16)
    rows = [example for example in dataset if len(example["input_ids"]) == 64][:6]  # no padding: it changes their loss
    config = TINY.changed(vocab_size=30522, max_position_embeddings=64)
    theirs = transformers.BertForQuestionAnswering(transformers.BertConfig(**config.to_dict())).double().eval()
    ours = fastbert.BertForQuestionAnswering(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    expected = theirs(**PackingCollator(WORDPIECE, packed=False)(rows)).loss
    for packed in (True, False):
        loss = ours(**PackingCollator(WORDPIECE, packed=packed)(rows)).loss
        assert (loss - expected).abs() <= 1e-12 * expected.abs()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"answers": [{"text": ["dog"], "answer_start": [2]}]}, ValueError, r"answers\[0\] is 'dog'; .* 2: 'cat'"),
        ({"answers": [{"text": ["cat"], "answer_start": [-4]}]}, ValueError, r"answers\[0\] is 'cat'; .* -4"),
        ({"answers": [{"text": ["cat"], "answer_start": [99]}]}, ValueError, r"answer_start, 99: ''"),
        ({"answers": [{"text": [" "], "answer_start": [1]}]}, ValueError, r"answers\[0\] is ' '"),
        ({"answers": ["cat"]}, TypeError, r"answers\[0\] is 'cat'; expected {'text': \[...\], 'answer_start'"),
        ({"answers": [{"text": ["cat"]}]}, TypeError, r"answers\[0\] is {'text': \['cat'\]}; expected"),
        ({"answers": [{"text": "cat", "answer_start": [2]}]}, TypeError, r"answers\[0\] is {'text': 'cat'"),
        ({"answers": [{"text": ["cat"], "answer_start": 2}]}, TypeError, r"answers\[0\] is {'text': \['cat'\], 'ans"),
        ({"answers": [{"text": [], "answer_start": [2]}]}, TypeError, r"answers\[0\] is {'text': \[\], 'answer_start'"),
        ({"answers": [None, None]}, ValueError, "there are 1 questions and 1 contexts and 2 answers"),
        ({"contexts": ["\u200b"], "answers": None}, ValueError, r"contexts\[0\] has no token; expected text"),
        ({"questions": [" "]}, ValueError, r"questions\[0\] has no token; expected text"),
        ({"questions": ["why " * 20]}, ValueError, r"questions\[0\] has 20 tokens, which leaves 1 of max_length, 24"),
        ({"questions": ["why " * 99]}, ValueError, r"questions\[0\] has 99 tokens, which leaves 0 of max_length, 24"),
        ({"stride": 20}, ValueError, r"questions\[0\] has 1 tokens, which leaves 20 .*; expected more than stride, 20"),
        ({"stride": -1}, ValueError, "stride is -1; expected 0 or more"),
        ({"questions": "why"}, TypeError, "questions is a str; expected several strings"),
    ],
)
def test_questions_that_make_no_sense_are_refused(change, error, words):
    given = {"questions": ["why"], "contexts": ["a cat sat on a mat"], "answers": None, "stride": 4} | change
    with pytest.raises(error, match=words):
        QADataset(tokenizer=WORDPIECE, max_length=24, **given)


# ---- with transformers' collators and workers


def test_transformers_collators_take_the_examples():
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    dataset = ClassificationDataset(["a", "b c d"], [1, 0], WORDPIECE, pairs=["e f", "g"])
    loader = DataLoader(dataset, batch_size=2, collate_fn=transformers.DataCollatorWithPadding(theirs))
    expected = PackingCollator(WORDPIECE, packed=False)(list(dataset))
    batch = next(iter(loader))
    assert batch.keys() == expected.keys() and all(torch.equal(batch[name], expected[name]) for name in expected)


def test_examples_go_to_workers_as_arrays():
    dataset = MLMDataset(PASSAGES, WORDPIECE, whole_words=True)
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 9 * int(dataset.lengths.sum()) + 30 * len(dataset) + 10_000
    for one, other in zip(dataset, copy, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
