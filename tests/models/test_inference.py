"""Predictions compared with transformers' pipelines on the same small checkpoints, and with loops over all spans."""

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
import tokenizers as tokenizers_library
import torch
import torch.nn.functional as F
import transformers
from small_models import SIZES, TINY, assert_like, edit
from tokenizers.pre_tokenizers import ByteLevel

from fastbert import AutoModel, BertForMaskedLM, BertForSequenceClassification
from fastbert.cli.demo import python_documentation
from fastbert.data import TokenClassificationDataset, create_classification_dataloader, get_tokenizer, save_tokenizer
from fastbert.data.tokenizer import copy_of
from fastbert.inference import (
    EntityTagger,
    Fill,
    MaskFiller,
    QuestionAnswerer,
    SentenceEncoder,
    TextClassifier,
    attention_figure,
    attention_of,
    plot_attention,
    similarity,
    trained_model,
)
from fastbert.inference.predict import _grouped, _tags, _Word

CLOSE = 1e-6  # probabilities in float32, computed in two ways
TEXTS = [text for _, text in python_documentation(150)[::97]]
NER = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC", 5: "MISC"}
FAMILIES = {
    "bert": ("wordpiece", transformers.BertConfig, {}),
    "distilbert": ("wordpiece", transformers.DistilBertConfig, {}),
    "roberta": ("byte-level-bpe", transformers.RobertaConfig, {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("sentencepiece", transformers.XLMRobertaConfig, {"type_vocab_size": 1, "pad_token_id": 1}),
}


MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "o n", "Ġ s", "l e", "p le", "a t"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """WordPiece, byte-level BPE and SentencePiece, written out: training would give another vocabulary each time."""
    wordpiece, bpe = (tmp_path_factory.mktemp(kind) for kind in ("wordpiece", "bpe"))
    words = Counter(re.findall("[a-z]+|[^a-z ]", " ".join(TEXTS).lower()))
    characters = sorted({character for word in words for character in word if not character.isspace()})
    common = sorted(word for word, count in words.items() if count > 3 and len(word) > 1)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *characters, *(f"##{character}" for character in characters), *common]
    (wordpiece / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    (bpe / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (bpe / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]), encoding="utf-8")
    found = {"wordpiece": get_tokenizer(wordpiece), "byte-level-bpe": get_tokenizer(bpe)}
    return found | {"sentencepiece": sentencepiece(characters, common)}


def sentencepiece(characters, words):
    """A tokenizer like XLM-RoBERTa's, in which a space is part of the word after it."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    scores = {token: 0.0 for token in special} | {token: -9.0 for token in ["▁", *characters]}
    scores |= {f"▁{word}": -2.0 for word in words} | {"▁at": -2.0, "ing": -3.0}
    tokenizer = tokenizers_library.Tokenizer(tokenizers_library.models.Unigram(list(scores.items()), unk_id=3))
    tokenizer.pre_tokenizer = tokenizers_library.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers_library.decoders.Metaspace()
    tokenizer.add_special_tokens([*special, tokenizers_library.AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = tokenizers_library.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


@pytest.fixture
def checkpoint(tmp_path, tokenizers):
    """A function that writes a small checkpoint of transformers with its tokenizer."""

    def write(head, family="bert", **changes):
        kind, config, own = FAMILIES[family]
        names = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
        if family != "distilbert":
            names = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
        sizes = {"vocab_size": tokenizers[kind].get_vocab_size(), "max_position_embeddings": 130}
        model = getattr(transformers, head)(config(**sizes | names | own | changes))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path)
        save_tokenizer(tokenizers[kind], tmp_path)
        if family == "distilbert":  # transformers' pipelines would hand it token types
            edit(tmp_path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
        return tmp_path

    return write


def pipeline(task, directory, **arguments):
    return transformers.pipeline(task, model=str(directory), tokenizer=str(directory), device="cpu", **arguments)


# ---- masks


@pytest.mark.parametrize(("head", "family"), [("BertForMaskedLM", "bert"), ("RobertaForMaskedLM", "roberta")])
def test_masks_as_transformers_fills_them(checkpoint, head, family):
    directory = checkpoint(head, family)
    mask = "[MASK]" if family == "bert" else "<mask>"
    texts = [f"The {mask} statement is executed.", f"a {mask} and {mask}, of which {mask}", f"{mask}"]
    found = MaskFiller.from_pretrained(directory)(texts, top_k=7)
    theirs = pipeline("fill-mask", directory)(texts, top_k=7)
    theirs[0], theirs[2] = [theirs[0]], [theirs[2]]
    assert [len(masks) for masks in found] == [1, 3, 1]
    for mine, other in zip(itertools.chain(*found), itertools.chain(*theirs), strict=True):
        assert [(fill.token_id, fill.token) for fill in mine] == [(fill["token"], fill["token_str"]) for fill in other]
        assert max(abs(a.score - b["score"]) for a, b in zip(mine, other, strict=True)) < CLOSE


def test_the_text_has_the_token_in_the_mask_s_place(checkpoint):
    fill = MaskFiller.from_pretrained(checkpoint("BertForMaskedLM"))
    vocabulary = fill.tokenizer.get_vocab()
    whole, piece = (
        next(iter(vocabulary.keys() & {"the"})),
        next(token for token in vocabulary if token.startswith("##")),
    )
    assert fill._fill("É [MASK] b", (2, 8), 0.5, vocabulary[whole]) == Fill("the", vocabulary["the"], 0.5, "É the b")
    assert fill._fill("go [MASK]!", (3, 9), 0.5, vocabulary[piece]).text == f"go{piece[2:]}!"
    assert fill(["two [MASK] and [MASK]"], top_k=1)[0][1][0].text.startswith("two [MASK] and")


def test_a_mask_of_bytes_takes_its_space_along(checkpoint):
    directory = checkpoint("RobertaForMaskedLM", "roberta")
    fill, text = MaskFiller.from_pretrained(directory), "go  <mask>, at once"
    every = fill.tokenizer.get_vocab_size()
    found = {fill.text for fill in fill([text], top_k=every)[0][0]}
    assert {"go the, at once", "gohe, at once"} <= found
    theirs = {fill["sequence"] for fill in pipeline("fill-mask", directory)(text, top_k=every)}
    whole = {text for text in found if text.isascii() and not re.search("<.+>", text)}
    theirs = {text for text in theirs if text.isascii()} - {"go, at once"}  # transformers drops special tokens
    assert whole == theirs


def test_a_mask_of_sentencepiece_takes_its_space_along(checkpoint, tokenizers):
    directory, text = checkpoint("XLMRobertaForMaskedLM", "xlm-roberta"), "walk  <mask> at once"
    every = tokenizers["sentencepiece"].get_vocab_size()
    fills = MaskFiller.from_pretrained(directory)([text, "<mask> at"], top_k=every)
    found = {fill.token_id: fill.text for fill in fills[0][0]}
    assert {"walk the at once", "walking at once"} <= set(found.values())
    assert "the at" in {fill.text for fill in fills[1][0]}  # no text before the mask
    of_pipeline = pipeline("fill-mask", directory)(text, top_k=every)
    assert {fill.token_id: fill.token for fill in fills[0][0]} == {f["token"]: f["token_str"] for f in of_pipeline}
    theirs = {fill["token"]: fill["sequence"] for fill in of_pipeline}
    special = {0, 1, 2, 3, get_tokenizer(directory).token_to_id("<mask>")}  # transformers drops those
    assert found.keys() == theirs.keys() and len(found) == every
    assert all(found[token] == theirs[token] for token in found.keys() - special)


def test_a_token_that_the_tokenizer_does_not_have_fills_in_nothing(checkpoint, tokenizers):
    """The model's vocabulary is often padded to a round size, so it may have ids that the tokenizer lacks."""
    known = tokenizers["sentencepiece"].get_vocab_size()
    directory = checkpoint("XLMRobertaForMaskedLM", "xlm-roberta", vocab_size=known + 3)
    fills = MaskFiller.from_pretrained(directory)(["walk <mask> at once"], top_k=known + 3)[0][0]
    assert {fill.text for fill in fills if fill.token_id >= known} == {"walk at once"}


def test_the_head_runs_on_masks_alone(checkpoint):
    fill = MaskFiller.from_pretrained(checkpoint("BertForMaskedLM"))
    rows = []
    fill.model.cls.predictions.register_forward_hook(lambda head, inputs, logits: rows.append(len(logits)))
    fill(["[MASK] a long text with many tokens", "[MASK] [MASK]"])
    assert sum(rows) == 3


# ---- texts


@pytest.mark.parametrize(
    ("head", "family", "changes"),
    [
        ("BertForSequenceClassification", "bert", {"num_labels": 3}),
        ("BertForSequenceClassification", "bert", {"id2label": {0: "bad", 1: "ok"}, "label2id": {"bad": 0, "ok": 1}}),
        ("BertForSequenceClassification", "bert", {"num_labels": 3, "problem_type": "multi_label_classification"}),
        ("BertForSequenceClassification", "bert", {"num_labels": 1}),
        ("BertForSequenceClassification", "bert", {"num_labels": 2, "problem_type": "regression"}),
        ("DistilBertForSequenceClassification", "distilbert", {"num_labels": 3}),
        ("RobertaForSequenceClassification", "roberta", {"num_labels": 3}),
    ],
    ids=["softmax", "names", "sigmoid", "one label", "regression", "distilbert", "roberta"],
)
def test_labels_as_transformers_gives_them(checkpoint, head, family, changes):
    directory = checkpoint(head, family, **changes)
    texts = ["one text", *(text[:100] for text in TEXTS[:5])]
    pairs = [("a premise of some words", "and what follows"), ("x", "y")]
    classify, theirs = TextClassifier.from_pretrained(directory), pipeline("text-classification", directory)
    given = [{"text": first, "text_pair": second} for first, second in pairs]
    expected = [*theirs(texts, top_k=None), *(theirs(pair, top_k=None) for pair in given)]
    for mine, other in zip(classify([*texts, *pairs]), expected, strict=True):
        if changes.get("problem_type") == "regression":
            other.sort(key=lambda label: label["label"])
        assert [label.label for label in mine] == [label["label"] for label in other]
        assert max(abs(a.score - b["score"]) for a, b in zip(mine, other, strict=True)) < 4 * CLOSE
    assert [len(labels) for labels in classify(texts, top_k=1)] == [1] * len(texts)


@pytest.mark.parametrize(
    ("labels", "changes", "score"),
    [
        ([[1, 0, 1], [0, 1, 1]], {"num_labels": 3}, torch.sigmoid),
        ([3.5, -2.0], {"num_labels": 1}, lambda logits: logits),
    ],
    ids=["several at once", "regression"],
)
def test_scores_are_of_what_the_model_was_trained_for(tmp_path, tokenizers, labels, changes, score):
    tokenizer, texts = tokenizers["wordpiece"], ["one text", "another"]
    loader = create_classification_dataloader(texts, labels, tokenizer, batch_size=2, shuffle=False, **changes)
    model = BertForSequenceClassification(TINY.changed(vocab_size=tokenizer.get_vocab_size(), **changes))
    (batch,) = loader
    model(**batch).loss.backward()
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    with torch.no_grad():
        expected = score(model.eval()(**batch).logits)
    for found, row in zip(TextClassifier.from_pretrained(tmp_path)(texts), expected, strict=True):
        assert sorted(label.score for label in found) == pytest.approx(sorted(row.tolist()), abs=CLOSE)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level-bpe"])
def test_texts_are_cut_as_tokenizers_cuts_them(checkpoint, tokenizers, kind):
    """For the last pair, tokenizers' own truncation would make all pairs of all parts: 150 million tokens."""
    family, names = {"wordpiece": ("bert", "Bert"), "byte-level-bpe": ("roberta", "Roberta")}[kind]
    classify = TextClassifier.from_pretrained(checkpoint(f"{names}ForSequenceClassification", family), max_length=16)
    texts = ["a b", "a " * 40, ("a " * 40, "b"), ("a", "b " * 40), ("a " * 40, "b " * 41), ("a b", "c d")]
    tokenizer = tokenizers_library.Tokenizer.from_str(tokenizers[kind].to_str())
    tokenizer.enable_truncation(16)
    with pytest.warns(UserWarning, match="5 of 7 texts are longer than 16 tokens"):
        rows = classify._encode([*texts, ("a b c d e " * 4000, "1 2 3 4 5 " * 4000)])
    for row, encoding in zip(rows, tokenizer.encode_batch(texts), strict=False):
        assert row["input_ids"].tolist() == encoding.ids and row["token_type_ids"].tolist() == encoding.type_ids
    assert len(rows[-1]["input_ids"]) == 16


def test_one_batch_or_many(checkpoint):
    directory = checkpoint("BertForSequenceClassification")
    one, many = (TextClassifier.from_pretrained(directory, tokens_per_batch=budget) for budget in (10**6, 1))
    texts = [text[:80] for text in TEXTS]
    for a, b in zip(one(texts), many(texts), strict=True):
        assert all(abs(x.score - y.score) < CLOSE and x.label == y.label for x, y in zip(a, b, strict=True))
    assert one([]) == []


# ---- entities


def test_entities_as_transformers_finds_them(checkpoint):
    texts = [text[:120] for text in TEXTS[:12]]
    for seed in range(20):  # until a model predicts several labels
        torch.manual_seed(seed)
        directory = checkpoint("BertForTokenClassification", id2label=NER, label2id={n: i for i, n in NER.items()})
        found = EntityTagger.from_pretrained(directory)(texts)
        if sum(map(len, found)) > 30 and len({entity.label for entities in found for entity in entities}) == 3:
            break
    else:
        pytest.fail("no seed gives a model that says several labels")
    theirs = pipeline("token-classification", directory, aggregation_strategy="first")(texts)
    for text, mine, other in zip(texts, found, theirs, strict=True):
        keys = ("entity_group", "start", "end")
        assert [(e.label, e.start, e.end) for e in mine] == [tuple(e[key] for key in keys) for e in other]
        assert all(abs(a.score - b["score"]) < CLOSE for a, b in zip(mine, other, strict=True))
        assert all(e.text == text[e.start : e.end] for e in mine)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),  # B- begins another entity
        ("I-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),  # I- without B-, and another type
        ("MISC MISC O MISC", [("MISC", 0, 2), ("MISC", 3, 4)]),  # a scheme without prefixes
        ("O O", []),
        ("B-A-B I-A-B", [("A-B", 0, 2)]),  # a type with a hyphen
        ("B-PER I-PER E-PER S-PER I-PER", [("PER", 0, 3), ("PER", 3, 4), ("PER", 4, 5)]),  # BIOES
        ("B-PER L-PER U-PER", [("PER", 0, 2), ("PER", 2, 3)]),  # BILOU
        ("S-BAHN S-BAHN", [("S-BAHN", 0, 2)]),
    ],
)
def test_labels_of_words_become_entities(labels, expected):
    labels = labels.split()
    words = [_Word(tag, 1.0, place, place + 1) for place, tag in enumerate(_tags(labels))]
    found = [(group[0].tag.kind, group[0].start, group[-1].end) for group in _grouped(words)]
    assert [entity for entity in found if entity[0] != "O"] == expected


def test_words_of_a_byte_level_tokenizer(checkpoint):
    """Offsets leave out the space that belongs to a token; a word of several tokens has one label."""
    tag = EntityTagger.from_pretrained(checkpoint("RobertaForTokenClassification", "roberta", num_labels=1))
    tag.config.extra["id2label"] = {"0": "B-X"}
    text = "Zürich, unbelievable places"
    assert [entity.text for entity in tag([text])[0]] == ["Zürich", ",", "unbelievable", "places"]


@pytest.mark.parametrize(("family", "head"), [("bert", "Bert"), ("roberta", "Roberta")])
def test_lists_of_words_are_tagged_as_the_data_set_reads_them(checkpoint, family, head):
    labels = {label: f"B-{label}" for label in range(9)}  # each word is an entity
    tag = EntityTagger.from_pretrained(checkpoint(f"{head}ForTokenClassification", family, id2label=labels))
    words = [["Jean-Luc", "met", "x\u200by", "in", "St.", "Paris"], ["don't", "stop"]]
    rows = TokenClassificationDataset(words, None, tag.tokenizer)
    for row, found, given in zip(rows, tag(words), words, strict=True):
        with torch.no_grad():
            best = tag.model(row["input_ids"][None]).logits[0].argmax(-1).tolist()
        firsts = [row["word_ids"].tolist().index(word) for word in range(len(given))]
        assert [(entity.label, entity.text) for entity in found] == [
            (str(best[first]), word) for first, word in zip(firsts, given, strict=True)
        ]
        assert all(" ".join(given)[entity.start : entity.end] == entity.text for entity in found)
    assert tag([["a"], []])[1] == []
    with pytest.raises(TypeError, match=r"texts\[0\] is a str; expected several strings"):
        tag(["a", ["b"]])


def test_entities_of_a_text_of_any_length(checkpoint):
    """Each token has the label of the window that reads most around it: by loops over the tokenizer's windows."""
    directory, text = checkpoint("BertForTokenClassification", num_labels=5), " ".join(TEXTS[:6])
    tag = EntityTagger.from_pretrained(directory, max_length=21, stride=7)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(directory), tag.model
    cut = {"truncation": True, "max_length": 21, "stride": 7, "return_overflowing_tokens": True}
    windows, read = tokenizer(text, return_offsets_mapping=True, **cut), {}
    for ids, offsets in zip(windows["input_ids"], windows["offset_mapping"], strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].softmax(-1)
        for place, (span, score) in enumerate(zip(offsets, scores, strict=True)):
            around = min(place, len(ids) - 1 - place)
            if span != (0, 0) and around > read.get(span, (-1,))[0]:
                read[span] = around, int(score.argmax()), float(score.max())
    assert len(windows["input_ids"]) > 20 and len({label for _, label, _ in read.values()}) > 1
    (row,) = tag.encode([text], "split")
    (found,) = tag._labels([row])
    found = [one for one, span in zip(found.tolist(), row["offsets"].tolist(), strict=True) if span != [0, 0]]
    for (_, label, score), span in zip(found, sorted(read), strict=True):
        assert label == read[span][1] and abs(score - read[span][2]) < CLOSE
    entities = tag([text, "short"])[0]
    assert entities[-1].end > len(text) - 20 and all(text[e.start : e.end] == e.text for e in entities)
    assert tag([text.split()])[0][-1].end > len(" ".join(text.split())) - 20
    with pytest.raises(ValueError, match="stride is 19; expected 0 to 18 of the 19 of a window"):
        EntityTagger(tag.model, tag.tokenizer, max_length=21, stride=19)


# ---- answers


def all_spans(model, tokenizer, question, context, max_length, stride, longest):
    """By loops over transformers' windows: probabilities of spans, best first, and of no answer; number of windows."""
    cut = {"truncation": "only_second", "max_length": max_length, "stride": stride}
    windows = tokenizer(question, context, **cut, return_overflowing_tokens=True)
    names = [name for name in ("input_ids", "token_type_ids") if name in windows]
    whole = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    scores, nothing, place = {}, float("inf"), -1
    for window in range(len(windows["input_ids"])):
        with torch.no_grad():
            output = model(**{name: torch.tensor([windows[name][window]]) for name in names})
        starts, ends = output.start_logits[0].double(), output.end_logits[0].double()
        nothing = min(nothing, float(starts[0] + ends[0]))
        tokens = [token for token, part in enumerate(windows.sequence_ids(window)) if part == 1]
        ids = [windows["input_ids"][window][token] for token in tokens]
        place = next(p for p in range(place + 1, len(whole.input_ids)) if whole.input_ids[p : p + len(ids)] == ids)
        for first, last in itertools.combinations_with_replacement(range(len(ids)), 2):
            if last < first + longest:
                span, score = (place + first, place + last), float(starts[tokens[first]] + ends[tokens[last]])
                scores[span] = max(scores.get(span, -float("inf")), score)
    total, spans = sum(map(np.exp, scores.values())) + np.exp(nothing), {}
    for (first, last), score in sorted(scores.items(), key=lambda item: -item[1]):
        start, end = whole["offset_mapping"][first][0], whole["offset_mapping"][last][1]
        if context[start:end].strip():  # some tokens of a byte-level tokenizer are spaces
            spans.setdefault((end - len(context[start:end].lstrip()), end), np.exp(score) / total)
    return spans, np.exp(nothing) / total, len(windows["input_ids"])


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("size", [60, 700], ids=["one window", "many"])
def test_answers_are_the_best_of_all_spans(checkpoint, family, size):
    head = f"{family.title()}ForQuestionAnswering"
    directory = checkpoint(head, family)
    question, context = "Which statement is it?", "   ".join(TEXTS[:6])[:size]
    model = getattr(transformers, head).from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    spans, nothing, windows = all_spans(model, tokenizer, question, context, 48, 12, 9)
    assert (windows > 4) == (size == 700)
    answer = QuestionAnswerer.from_pretrained(directory, max_length=48, stride=12)
    (other, found) = answer(["what?", question], ["a b c", context], top_k=len(spans) + 1, max_answer_length=9)
    assert {(a.start, a.end) for a in found.best} == set(spans) and len(other.best) > 1
    assert [(a.start, a.end) for a in found.best[:20]] == list(spans)[:20]
    assert all(abs(a.score - spans[a.start, a.end]) < CLOSE for a in found.best)
    assert all(a.text == context[a.start : a.end] for a in found.best)
    assert found.no_answer == pytest.approx(nothing, abs=CLOSE)


def test_probabilities_of_all_answers_are_one(checkpoint):
    answer = QuestionAnswerer.from_pretrained(checkpoint("BertForQuestionAnswering"))
    (found,) = answer(["what?"], ["the cat sat on the mat"], top_k=10**6, max_answer_length=10**6)
    assert sum(a.score for a in found.best) + found.no_answer == pytest.approx(1)
    assert answer([], []) == []


# ---- what is refused


@pytest.mark.parametrize(
    ("head", "predictor", "words"),
    [
        ("BertModel", MaskFiller, "architectures is BertModel; expected BertForMaskedLM or BertForPreTraining"),
        ("BertForTokenClassification", TextClassifier, "expected BertForSequenceClassification"),  # equal names
        ("BertForSequenceClassification", EntityTagger, "expected BertForTokenClassification"),
        ("BertForMaskedLM", QuestionAnswerer, "expected BertForQuestionAnswering"),
    ],
)
def test_a_model_without_the_head_is_refused(checkpoint, head, predictor, words):
    with pytest.raises(ValueError, match=words):
        predictor.from_pretrained(checkpoint(head))


def test_parameters_that_are_not_there_are_not_made_up(checkpoint):
    directory = checkpoint("BertModel")
    config = json.loads((directory / "config.json").read_text())
    for architectures in (["BertForQuestionAnswering"], None):
        (directory / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        with pytest.raises(ValueError, match="lacks qa_outputs.bias, qa_outputs.weight.* expected a trained model"):
            QuestionAnswerer.from_pretrained(directory)
    assert type(trained_model(directory)).__name__ == "BertModel"  # no architecture is named, and no head has weights


def test_what_does_not_fit_is_refused(checkpoint, tokenizers):
    tokenizer = tokenizers["wordpiece"]
    directory = checkpoint("BertForMaskedLM")
    fill, model = MaskFiller.from_pretrained(directory), trained_model(directory)
    with pytest.raises(ValueError, match="expected ids below the vocab_size of the model, 99"):
        MaskFiller(BertForMaskedLM(TINY), tokenizer)
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    for other, name in ((model, "fastbert.BertForMaskedLM"), (theirs, "transformers.BertForSequenceClassification")):
        with pytest.raises(TypeError, match=f"model is a {name}; expected a fastbert.BertForSequenceClassification"):
            TextClassifier(other, tokenizer)
    with pytest.raises(TypeError, match="attention_of: model is a transformers.Bert"):
        attention_of(theirs, tokenizer, "a")
    with pytest.raises(ValueError, match="max_length is 131; expected more than 4 and at most 130"):
        MaskFiller(model, tokenizer, max_length=131)
    with pytest.raises(ValueError, match="tokens_per_batch is 0"):
        MaskFiller(model, tokenizer, tokens_per_batch=0)
    with pytest.raises(ValueError, match=r"texts\[1\] has no \[MASK\]; expected one to fill"):
        fill(["a [MASK]", "a mask"])
    with (
        pytest.raises(ValueError, match=r"texts\[0\] has no \[MASK\] in its first 130 tokens"),
        pytest.warns(match="cut"),
    ):
        fill(["word " * 200 + "[MASK]"])
    with pytest.raises(ValueError, match="top_k is 0"):
        fill(["[MASK]"], top_k=0)
    for texts in ("[MASK]", [None], [("a", "b")]):
        with pytest.raises(TypeError, match="expected"):
            fill(texts)


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_nan_is_no_prediction(checkpoint, head):
    kinds = {kind.classes[0].kind: kind for kind in (MaskFiller, TextClassifier, EntityTagger, QuestionAnswerer)}
    predict = kinds[f"For{head}"].from_pretrained(checkpoint(f"BertFor{head}"))
    list(predict.model.parameters())[-1].data.fill_(torch.nan)
    texts = [["a [MASK]"], ["a [MASK]"]]
    with pytest.raises(ValueError, match=rf"{type(predict).__name__}: the model's output has NaN"):
        predict(*texts[: 1 + (head == "QuestionAnswering")])


def test_texts_that_cannot_be_used(checkpoint):
    directory = checkpoint("BertForSequenceClassification")
    classify = TextClassifier.from_pretrained(directory)
    (empty,) = pipeline("text-classification", directory)([""], top_k=None)
    assert [(label.label, pytest.approx(label.score, abs=CLOSE)) for label in classify([""])[0]] == [
        (label["label"], label["score"]) for label in empty
    ]
    bare = copy_of(classify.tokenizer)
    bare.post_processor = tokenizers_library.processors.Sequence([])  # no special tokens
    with pytest.raises(ValueError, match=r"texts\[1\] has no token; expected text"):
        TextClassifier(classify.model, bare)(["a", ""])
    for text in ("\ud800", ("a", "\ud800")):
        with pytest.raises(ValueError, match=r"TextClassifier: texts\[1\] is not text at character 0"):
            classify(["a", text])
    for texts in ("text", [("a", "b", "c")], [b"text"]):
        with pytest.raises(TypeError, match="expected a list of strings, or of pairs of strings"):
            classify(texts)
    with pytest.raises(TypeError, match="texts is a mapping; expected a list"):
        classify({"text": ["a"]})
    assert classify(text for text in ("a", "b")) == classify(["a", "b"])
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than 130 tokens: cut there") as said:
        labels = classify(["short", "word " * 200])
    assert len(labels) == 2 and [warning.filename for warning in said] == [__file__]
    with pytest.raises(ValueError, match="top_k is 0"):
        classify(["a"], top_k=0)


def test_questions_that_cannot_be_asked(checkpoint):
    answer = QuestionAnswerer.from_pretrained(checkpoint("BertForQuestionAnswering"))
    assert (answer.max_length, answer.stride) == (130, 65)
    with pytest.raises(ValueError, match=r"questions\[0\] has \d+ tokens, which leaves 0 of max_length, 130"):
        answer(["why " * 140], ["because"])
    with pytest.raises(ValueError, match="has no token"):
        answer(["why?"], [" "])
    assert answer(iter(["why?"]), iter(["because"])) == answer(["why?"], ["because"])
    with pytest.raises(ValueError, match="contexts"):
        answer(["why?"], ["a", "b"])
    with pytest.raises(ValueError, match="max_answer_length is 0"):
        answer(["why?"], ["a"], max_answer_length=0)


# ---- embeddings


def test_similarity_is_the_cosine(checkpoint):
    vectors, others = torch.randn(3, 5), torch.randn(2, 5)
    others[1] = 0
    expected = F.cosine_similarity(vectors[:, None], others[None], dim=-1)
    assert (similarity(vectors, others) - expected).abs().max() < CLOSE
    assert (similarity(vectors).diagonal() - 1).abs().max() < CLOSE
    with pytest.raises(ValueError, match=r"vectors has shape \(3, 5\), others \(5,\)"):
        similarity(vectors, others[0])


def test_sentences_of_another_family(checkpoint):
    """RoBERTa's positions begin after pad_token_id, so of 130 positions 128 remain for tokens."""
    directory = checkpoint("RobertaModel", "roberta")
    encoder = SentenceEncoder.from_pretrained(directory)
    assert encoder.max_length == 128
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than 128 tokens"):
        found = encoder.encode(["a text", "word " * 200])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    theirs = transformers.RobertaModel.from_pretrained(directory).eval()

    @torch.no_grad()
    def vector_of(text: str) -> torch.Tensor:
        hidden = theirs(**tokenizer(text, truncation=True, max_length=128, return_tensors="pt"))[0][0]
        return F.normalize(hidden.mean(0), dim=0)

    texts = ["a text", "word " * 200]
    contender = torch.stack([vector_of(text) for text in texts])
    theirs.double()
    assert_like(found, torch.stack([vector_of(text) for text in texts]), contender)


# ---- attention


def test_attention_is_transformers_own(checkpoint):
    directory = checkpoint("BertModel", attn_implementation="eager")
    theirs = transformers.BertModel.from_pretrained(directory, attn_implementation="eager").eval()
    tokenizer, model = get_tokenizer(directory), AutoModel.from_pretrained(directory).train()
    tokens, weights = attention_of(model, tokenizer, "the cat sat on the mat")
    ids = torch.tensor([tokenizer.encode("the cat sat on the mat").ids])
    with torch.no_grad():
        contender = torch.cat(theirs(ids, output_attentions=True).attentions)
        truth = torch.cat(theirs.double()(ids, output_attentions=True).attentions)
    assert_like(weights, truth, contender)
    assert model.training  # restored; computed without dropout
    assert tokens[0] == "[CLS]" and weights.shape == (2, 4, len(tokens), len(tokens))


def test_pictures(tmp_path):
    tokens = ["[CLS]", "$x$", "Ġa"]
    weights = torch.rand(2, 4, 3, 3)
    grids = {(None, None): 8, (1, None): 4, (None, 2): 2}
    for (layer, head), count in grids.items():
        figure = attention_figure(weights, tokens, layer=layer, head=head)
        assert len(figure.axes) == count
    shown = figure.axes[1].images[0].get_array()  # layer 1, head 2
    assert np.array_equal(shown, weights[1, 2].numpy())
    one = attention_figure(weights, tokens, layer=1, head=2)
    one.savefig(tmp_path / "one.png")
    assert [label.get_text() for label in one.axes[0].get_yticklabels()] == ["[CLS]", r"\$x\$", "Ġa"]
    assert np.array_equal(one.axes[0].images[0].get_array(), weights[1, 2].numpy())
    for other in (weights.bfloat16(), weights.double().requires_grad_()):  # numpy takes neither
        shown = attention_figure(other, tokens, layer=1, head=2).axes[0].images[0].get_array()
        assert np.array_equal(shown, other[1, 2].detach().float().numpy())
    for changes, words in (({"layer": 2}, "layer is 2; expected 0 to 1"), ({"head": -1}, "is -1; expected 0 to 3")):
        with pytest.raises(ValueError, match=words):
            attention_figure(weights, tokens, **changes)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 4, 3, 3\); expected .* T = 2"):
        attention_figure(weights, tokens[:2])


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, checkpoint):
    directory = checkpoint("BertModel")
    model, tokenizer = AutoModel.from_pretrained(directory), get_tokenizer(directory)
    path = plot_attention(model, tokenizer, "the cat", tmp_path / "picture")
    assert path.read_bytes().startswith(b"\x89PNG")
    before = sorted(tmp_path.iterdir())
    for text, layer, words in (("", None, "2 tokens"), ("word " * 200, None, "at most 130"), ("a", 9, "layer is 9")):
        with pytest.raises(ValueError, match=words):
            plot_attention(model, tokenizer, text, tmp_path / "other.png", layer=layer)
    assert sorted(tmp_path.iterdir()) == before
