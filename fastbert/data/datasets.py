"""Data sets of tokenised examples for each task. Texts are tokenised once, in the constructor.

Examples made of two texts have token types, as the tokenizer assigns them: 0 and 1 for BERT, 0 for RoBERTa.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from fastbert.data.encode import COLUMNS, NO_WORD, TokenizedDataset, empty_side, encode, encodings, joined
from fastbert.data.tokenizer import copy_of, strings
from fastbert.labels import IGNORED, POSITIONS
from fastbert.warn import warn

PAIR = ("input_ids", "token_type_ids")


def check_truncation(owner: str, truncation: bool | str, *known: bool | str) -> None:
    if truncation not in known:
        raise ValueError(f"{owner}: truncation is {truncation!r}; expected {' or '.join(map(repr, known))}")


def check_counts(owner: str, **columns: Sequence[Any] | None) -> None:
    """Raises ValueError unless all columns that are given have as many entries, TypeError for an iterator."""
    for name, column in columns.items():
        if column is not None and not hasattr(column, "__len__"):
            raise TypeError(f"{owner}: {name} is a {type(column).__name__}; expected a list of them")
    counts = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(counts.values())) > 1:
        given = " and ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"{owner}: there are {given}; expected equal numbers")


# ---- pre-training


class MLMDataset(TokenizedDataset):
    """Texts for a masked LM, to be masked by PackingCollator. Examples: input_ids, and word_ids with whole_words."""

    def __init__(
        self,
        texts: Iterable[str],
        tokenizer: Any,
        *,
        max_length: int = 512,
        truncation: bool | str = "split",
        whole_words: bool = False,
    ) -> None:
        """tokenizer: from `tokenizers`, or one from `transformers` that is based on it.

        truncation: "split" makes several examples of a long text, True cuts it at max_length and warns once with the
        count, False raises ValueError. whole_words: keeps word_ids, for PackingCollator(whole_words=True). Texts
        without tokens (empty lines) are skipped, and one warning counts them.
        Raises ValueError for invalid values or if no text has tokens, and TypeError for texts that are not strings.
        """
        check_truncation("MLMDataset", truncation, "split", True, False)
        columns, lengths = encode(
            "MLMDataset",
            strings("MLMDataset", "texts", texts),
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            where=lambda index, side: f"texts[{index}]",
            columns=("input_ids", "word_ids") if whole_words else ("input_ids",),
            skip_empty=True,
        )
        super().__init__(columns, lengths, tokenizer)


class NSPDataset(TokenizedDataset):
    """Pairs of texts for next-sentence prediction (Devlin et al., "BERT", 2018, 3.1).

    Any two consecutive texts of a document make an example: with probability 1/2 these two, with label 0; otherwise the
    first one and a text drawn uniformly from the other documents, with label 1. Pairs are drawn once, in the
    constructor. Examples: input_ids, token_type_ids and the label.
    """

    def __init__(
        self,
        documents: Iterable[Iterable[str]],
        tokenizer: Any,
        *,
        max_length: int = 512,
        truncation: bool = True,
        label_name: str = "labels",
        seed: int = 0,
    ) -> None:
        """documents: lists of texts (sentences, paragraphs). label_name: "labels" for BertForNextSentencePrediction,
        "next_sentence_label" for BertForPreTraining, whose `labels` are masked tokens.

        truncation: True cuts a pair at max_length, the longer text first, and warns once with the count; False raises
        ValueError. Raises ValueError for a text without tokens, and unless there are two documents and two consecutive
        texts; TypeError for texts that are not strings.
        """
        check_truncation("NSPDataset", truncation, True, False)
        if label_name not in ("labels", "next_sentence_label"):
            raise ValueError(f"NSPDataset: label_name is {label_name!r}; expected 'labels' or 'next_sentence_label'")
        documents = [list(strings("NSPDataset", f"documents[{i}]", texts)) for i, texts in enumerate(documents)]
        counts = np.array([len(document) for document in documents], np.int64)
        texts, names = list(chain.from_iterable(documents)), _names(counts)
        _check_texts("NSPDataset", texts, names, tokenizer)
        first, second, labels = _next_or_random(counts, seed)
        columns, lengths = encode(
            "NSPDataset",
            [(texts[i], texts[j]) for i, j in zip(first, second, strict=True)],
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            where=lambda index, side: names(first[index]),
            columns=PAIR,
            pairs=True,
        )
        super().__init__(columns, lengths, tokenizer, {label_name: labels})


def _names(counts: np.ndarray) -> Callable[[int], str]:
    """Returns a function from a text's number, counted through all documents, to its name in error messages."""
    starts = counts.cumsum() - counts

    def name(text: int) -> str:
        document = int(np.searchsorted(starts, text, side="right")) - 1
        return f"documents[{document}][{text - starts[document]}]"

    return name


def _check_texts(owner: str, texts: list[str], names: Callable[[int], str], tokenizer: Any) -> None:
    """Raises ValueError for a text without tokens, even if no pair uses it."""
    for index, encoding in enumerate(encodings(copy_of(tokenizer), texts, special=False)):
        if not len(encoding):
            raise ValueError(f"{owner}: {names(index)} has no token; expected text")


def _next_or_random(counts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first text, second text and label of each pair, texts numbered through all documents.

    counts: the number of texts in each document.
    """
    document = np.repeat(np.arange(len(counts)), counts)
    first = np.flatnonzero(document[:-1] == document[1:])
    count = counts[document[first]]  # texts in the same document, which must not be drawn
    if not len(first) or (others := counts.sum() - count).min() == 0:
        raise ValueError("NSPDataset: expected at least two documents with text, and one of them with two texts")
    generator = torch.Generator().manual_seed(seed)
    random, place = torch.rand(2, len(first), generator=generator, dtype=torch.float64).numpy()
    other = (place * others).astype(np.int64)
    other += np.where(other >= (counts.cumsum() - counts)[document[first]], count, 0)
    labels = (random < 0.5).astype(np.int64)
    return first, np.where(labels == 1, other, first + 1), labels


# ---- classification of texts


class ClassificationDataset(TokenizedDataset):
    """Texts or pairs of texts with labels. Examples: input_ids, token_type_ids for pairs, labels."""

    def __init__(
        self,
        texts: Iterable[str],
        labels: Sequence[Any] | None,
        tokenizer: Any,
        *,
        pairs: Iterable[str] | None = None,
        max_length: int = 512,
        truncation: bool = True,
        num_labels: int | None = None,
    ) -> None:
        """labels: for each text a class (an int; -100 means no label), a float (regression), or a number for each class
        (a text may have several classes; -100 is refused); None for prediction. pairs: the second text of each example.

        num_labels: if given, classes must be below it; 1 means regression. truncation: True cuts at max_length, the
        longer text of a pair first, and warns once with the count; False raises ValueError.
        Raises ValueError, also for a text without tokens, and TypeError.
        """
        owner = "ClassificationDataset"
        check_truncation(owner, truncation, True, False)
        texts = list(strings(owner, "texts", texts))
        pairs = None if pairs is None else list(strings(owner, "pairs", pairs))
        check_counts(owner, texts=texts, pairs=pairs, labels=labels)
        labels = {} if labels is None else {"labels": _label_array(owner, labels, num_labels)}
        columns, lengths = encode(
            owner,
            texts if pairs is None else list(zip(texts, pairs, strict=True)),
            tokenizer,
            max_length=max_length,
            truncation=truncation,
            where=lambda index, side: f"{'pairs' if side else 'texts'}[{index}]",
            columns=("input_ids",) if pairs is None else PAIR,
            pairs=pairs is not None,
        )
        super().__init__(columns, lengths, tokenizer, labels)


def _label_array(owner: str, labels: Sequence[Any], num_labels: int | None) -> np.ndarray:
    """(N,) int64 classes, or float32 (N,) or (N, classes)."""
    try:
        array = np.asarray(labels)
    except ValueError:  # rows of different length
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "iubf" or array.ndim not in (1, 2):
        raise TypeError(f"{owner}: labels are {_shown(labels)}; expected an int, a float or a list of floats each")
    if array.ndim == 2 and num_labels not in (None, array.shape[1]):
        raise ValueError(f"{owner}: labels have {array.shape[1]} numbers each; expected num_labels, {num_labels}")
    if array.ndim == 1 and array.dtype.kind != "f" and num_labels != 1:
        return _classes(owner, array, num_labels, lambda index: f"labels[{index}]")
    if array.ndim == 1 and num_labels not in (None, 1):
        raise TypeError(f"{owner}: labels are floats; expected ints, for num_labels {num_labels}")
    if not np.isfinite(array).all():
        raise ValueError(f"{owner}: labels[{np.argwhere(~np.isfinite(array))[0][0]}] is not finite")
    if array.ndim == 2 and (array == IGNORED).any():  # other numbers may be several regressions
        row, column = np.argwhere(array == IGNORED)[0]
        raise ValueError(f"{owner}: labels[{row}][{column}] is {IGNORED}; expected a number for each class")
    return array.astype(np.float32)


def _shown(labels: Sequence[Any]) -> str:
    return f"{', '.join(repr(label) for label in list(labels)[:3])}{', ...' if len(labels) > 3 else ''}"


def _classes(owner: str, labels: np.ndarray, num_labels: int | None, where) -> np.ndarray:
    """int64, each a class or -100."""
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= (np.inf if num_labels is None else num_labels)))
    if wrong.any():
        index = int(wrong.argmax())
        most = "0 or more" if num_labels is None else f"0 to {num_labels - 1} (num_labels - 1)"
        raise ValueError(f"{owner}: {where(index)} is {labels[index]}; expected {most}, or {IGNORED} for none")
    return labels.astype(np.int64)


# ---- classification of words


def align_labels(word_ids: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """From labels of words to labels of tokens: a word's label on its first token, -100 on all other tokens.

    word_ids: the word of each token (`encoding.word_ids`), None or -1 at special tokens. labels: one for each word.
    Raises ValueError for a word without a label.
    """
    words = [NO_WORD if word is None else word for word in word_ids]
    if max(words, default=NO_WORD) >= len(labels):
        raise ValueError(
            f"align_labels: there is a word {max(words)}; expected words below {len(labels)}, as labels has"
        )
    before = [NO_WORD, *words]
    first = (word not in (NO_WORD, previous) for word, previous in zip(words, before, strict=False))
    return [int(labels[word]) if new else IGNORED for word, new in zip(words, first, strict=True)]


class TokenClassificationDataset(TokenizedDataset):
    """Lists of words with a label for each word. Examples: input_ids, word_ids, labels (of tokens: `align_labels`).

    Predictions at the tokens whose label is not -100 are the predictions for the words, in order.
    """

    def __init__(
        self,
        words: Iterable[Sequence[str]],
        labels: Sequence[Sequence[int]] | None,
        tokenizer: Any,
        *,
        max_length: int = 512,
        truncation: bool = True,
        num_labels: int | None = None,
    ) -> None:
        """labels: a class for each word (-100 means no label); None for prediction. num_labels: if given, classes must
        be below it. A byte-level BPE sees a space before each word (add_prefix_space), as `transformers` requires.

        truncation: True cuts at max_length and warns once with the count, False raises ValueError. Labels of words
        without tokens, or cut off, are dropped; one warning counts them.
        Raises ValueError, also for an example without tokens, and TypeError.
        """
        owner = "TokenClassificationDataset"
        check_truncation(owner, truncation, True, False)
        words = [list(strings(owner, f"words[{i}]", row)) for i, row in enumerate(words)]
        check_counts(owner, words=words, labels=labels)
        labels = None if labels is None else _word_labels(owner, words, labels, num_labels)
        columns, lengths = encode(
            owner,
            words,
            spaced(tokenizer),
            max_length=max_length,
            truncation=truncation,
            where=lambda index, side: f"words[{index}]",
            columns=("input_ids", "word_ids"),
            words=True,
        )
        super().__init__(columns, lengths, tokenizer)
        if labels is not None:
            rows = (align_labels(self.rows("word_ids", i).tolist(), row) for i, row in enumerate(labels))
            self._tokens["labels"] = np.fromiter(chain.from_iterable(rows), np.int32, count=len(columns["word_ids"]))
        self._warn_of_lost_words(owner, sum(map(len, words)), labels is not None)

    def _warn_of_lost_words(self, owner: str, count: int, labelled: bool) -> None:
        found = sum(len(set(self.rows("word_ids", i)) - {NO_WORD}) for i in range(len(self)))
        if found < count:
            outcome = ": their labels are left out" if labelled else ""
            warn(f"{owner}: {count - found} of {count} words have no token, or were cut off{outcome}")


def _word_labels(
    owner: str, words: list[list[str]], labels: Sequence[Sequence[int]], num_labels: int | None
) -> list[list[int]]:
    for index, (row, given) in enumerate(zip(words, labels, strict=True)):
        if len(row) != len(given):
            raise ValueError(f"{owner}: words[{index}] has {len(row)} words and {len(given)} labels; expected one each")
        array = np.asarray(given)
        if array.size and (array.dtype.kind not in "iub" or array.ndim != 1):
            raise TypeError(f"{owner}: labels[{index}] is {_shown(given)}; expected an int for each word")
        _classes(owner, array, num_labels, lambda word, index=index: f"labels[{index}][{word}]")
    return [list(row) for row in labels]


def spaced(tokenizer: Any) -> Any:
    """A copy of the tokenizer; if it is a byte-level BPE, the copy sees a space before each word."""
    from tokenizers import pre_tokenizers

    tokenizer = copy_of(tokenizer)
    step = tokenizer.pre_tokenizer
    for part in step if isinstance(step, pre_tokenizers.Sequence) else [step]:
        if isinstance(part, pre_tokenizers.ByteLevel):
            part.add_prefix_space = True
    return tokenizer


# ---- question answering


class QADataset(TokenizedDataset):
    """Questions about contexts; long contexts are split into overlapping windows.

    Examples: input_ids, token_type_ids, start_positions and end_positions. A window holds the question and part of the
    context, at most max_length tokens; consecutive windows share `stride` tokens of context. Positions are those of the
    answer's first and last token, or 0, the place of [CLS], if the window does not hold the whole answer (as in
    `transformers`' run_qa.py).

    example_index: (N,) int64, the question of each window. rows("offsets", i): (T, 2), the characters of the context
    where each token of window i begins and ends; -1 for tokens outside the context.
    """

    def __init__(
        self,
        questions: Iterable[str],
        contexts: Iterable[str],
        answers: Sequence[Mapping[str, Any] | None] | None,
        tokenizer: Any,
        *,
        max_length: int = 384,
        stride: int = 128,
    ) -> None:
        """answers: in SQuAD's form, {"text": [...], "answer_start": [...]}, of which the first answer is used; empty
        lists or None for an unanswerable question. answers=None: for prediction, without positions.

        Raises ValueError for a text without tokens, an answer that is not in its context at answer_start, and a
        question that leaves no room for more than `stride` tokens of context; TypeError for texts that are not strings.
        """
        questions = [question.lstrip() for question in strings("QADataset", "questions", questions)]
        self.contexts = list(strings("QADataset", "contexts", contexts))
        check_counts("QADataset", questions=questions, contexts=self.contexts, answers=answers)
        spans = None if answers is None else list(map(_span, range(len(answers)), answers, self.contexts))
        tokenizer = copy_of(tokenizer)
        _check_room(questions, tokenizer, max_length, stride)
        tokenizer.enable_truncation(max_length, stride=stride, strategy="only_second")
        columns, lengths, self.example_index = _windows(questions, self.contexts, tokenizer)
        super().__init__(columns, lengths, tokenizer)
        if spans is not None:
            found = [self._places(i, *spans[example]) for i, example in enumerate(self.example_index)]
            self._of_examples = dict(zip(POSITIONS, np.array(found, np.int64).reshape(-1, 2).T, strict=True))

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = super().__getitem__(index)
        del example["offsets"]
        return example

    def _places(self, index: int, start: int, end: int) -> tuple[int, int]:
        """The first and last token of window `index` for characters start to end; 0, 0 if they are not all in it."""
        offsets = self.rows("offsets", index)
        context = np.flatnonzero(offsets[:, 0] >= 0)
        begins, ends = offsets[context].T
        if start < 0 or start < begins[0] or end > ends[-1]:
            return 0, 0
        # A character may have several tokens, or none if the tokenizer drops it.
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(begins, end, side="left") - 1
        return (int(context[first]), int(context[last])) if first <= last else (0, 0)

    def answer(self, index: int, start: int, end: int) -> str:
        """The context from token `start` through token `end` of window `index`; "" if these are not in the context."""
        offsets = self.rows("offsets", index)
        if not 0 <= start <= end < len(offsets) or min(offsets[start, 0], offsets[end, 0]) < 0:
            return ""
        return self.contexts[self.example_index[index]][offsets[start, 0] : offsets[end, 1]]


def _span(index: int, answer: Mapping[str, Any] | None, context: str) -> tuple[int, int]:
    """Where the first answer begins and ends in the context's characters; (-1, -1) if there is no answer.

    Raises ValueError if the context does not have the answer there.
    """
    if answer is None:
        return -1, -1
    parts = [answer.get(name) for name in ("text", "answer_start")] if isinstance(answer, Mapping) else [None]
    if not all(hasattr(part, "__len__") and not isinstance(part, str) for part in parts) or len({*map(len, parts)}) > 1:
        raise TypeError(
            f"QADataset: answers[{index}] is {answer!r}; expected {{'text': [...], 'answer_start': [...]}}, or None"
        )
    if not len(answer["answer_start"]):
        return -1, -1
    start, text = int(answer["answer_start"][0]), answer["text"][0]
    there = context[max(start, 0) : max(start, 0) + len(text)]
    if there != text or start < 0 or not text.strip():
        raise ValueError(
            f"QADataset: answers[{index}] is {text!r}; expected what contexts[{index}] has at answer_start, {start}: "
            f"{there!r}"
        )
    start += len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _check_room(questions: list[str], tokenizer: Any, max_length: int, stride: int) -> None:
    """Raises ValueError unless each question leaves more than `stride` tokens for the context: windows must advance."""
    if stride < 0:
        raise ValueError(f"QADataset: stride is {stride}; expected 0 or more")
    special = tokenizer.num_special_tokens_to_add(True)
    for index, question in enumerate(encodings(tokenizer, questions, special=False)):
        room = max_length - special - len(question)
        if room <= stride:
            raise ValueError(
                f"QADataset: questions[{index}] has {len(question)} tokens, which leaves {max(room, 0)} of max_length, "
                f"{max_length}, for the context; expected more than stride, {stride}"
            )


def _windows(
    questions: list[str], contexts: list[str], tokenizer: Any
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Columns of tokens, lengths, and the question of each window."""
    rows, examples = {name: [] for name in (*PAIR, "offsets")}, []
    for index, encoding in enumerate(encodings(tokenizer, zip(questions, contexts, strict=True))):
        if (side := empty_side(encoding, pairs=True)) is not None:
            raise ValueError(f"QADataset: {('questions', 'contexts')[side]}[{index}] has no token; expected text")
        for window in (encoding, *encoding.overflowing):
            of_context = np.array([sequence == 1 for sequence in window.sequence_ids])
            rows["offsets"].append(np.where(of_context[:, None], np.array(window.offsets, np.int32), -1))
            for name in PAIR:
                rows[name].append(COLUMNS[name](window))
            examples.append(index)
    return *joined("QADataset", rows), np.array(examples)
