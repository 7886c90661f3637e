"""Predictions for texts: fill masks, classify, tag, answer. Batches are packed, with texts of similar length together.

Each class takes a trained checkpoint and refuses one that lacks its head, as new parameters would predict nonsense::

    classify = TextClassifier.from_pretrained("path/to/model")
    classify(["a text", ("a text", "and its pair")])  # [[Label(label="good", score=0.98), ...], [...]]

`SentenceEncoder` embeds texts, `similarity` compares embeddings, and `CrossEncoder` scores pairs. docs/inference.md
lists the differences from `transformers`' pipelines for these tasks.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbert import hub
from fastbert.auto import trained_model
from fastbert.config import BertConfig
from fastbert.data.collator import PackingCollator
from fastbert.data.datasets import QADataset, spaced
from fastbert.data.encode import COLUMNS, NO_WORD, cut_encodings, encodings, pieces
from fastbert.data.tokenizer import (
    check_tokenizer,
    continuation_prefix,
    copy_of,
    get_tokenizer,
    special_token_id,
    strings,
    takes_token_types,
    text_of,
)
from fastbert.heads import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.inference.loading import load
from fastbert.inference.texts import batches
from fastbert.model import Saveable, require_class
from fastbert.ops.numbers import wide

if TYPE_CHECKING:
    from typing_extensions import Self


# ---- results


@dataclass(frozen=True)
class Fill:
    """A token for a mask. text: the input with the mask replaced by it."""

    token: str
    token_id: int
    score: float
    text: str


@dataclass(frozen=True)
class Label:
    """score: a probability, or the value of a regression."""

    label: str
    score: float


@dataclass(frozen=True)
class Entity:
    """text: the input from character start to end. score: the mean probability of its words' labels."""

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Answer:
    """text: the context from character start to end. score: a probability."""

    text: str
    score: float
    start: int
    end: int


class Answers(NamedTuple):
    """The best spans of a context, best first, and the probability that it holds no answer."""

    best: list[Answer]
    no_answer: float


# ---- the base class

Row = dict[str, Any]  # a text's input_ids and token_type_ids, and what else is needed to make its result


class _Tokens(NamedTuple):
    """A packed batch: which texts it holds, their lengths in tokens, and the model's arguments."""

    texts: list[int]
    lengths: list[int]
    inputs: dict[str, Any]

    def split(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Splits (T, ...) by text: pairs of a text's index and its rows."""
        return zip(self.texts, x.split(self.lengths), strict=True)


class Predictor:
    """A model in evaluation mode and its tokenizer. classes: the model classes that are accepted, the default first.

    A call runs `compute(encode(texts))`. A service encodes each request separately, and computes several together.
    encode(texts, truncation=False) raises ValueError for a text beyond max_length, compute for NaN in the output.
    """

    classes: tuple[type[Saveable], ...]

    def __init__(
        self, model: Saveable, tokenizer: Any, *, max_length: int | None = None, tokens_per_batch: int = 2048
    ) -> None:
        """tokenizer: of `tokenizers`, or one of `transformers` that is based on it; a copy is used.

        max_length: in tokens, with special tokens; the model's maximum when None. Longer texts are cut, with a warning.
        tokens_per_batch: the most tokens in one forward, but always at least one text.
        Raises TypeError for a model of another class, ValueError for a tokenizer with ids that the model lacks and for
        invalid values.
        """
        name = type(self).__name__
        require_class(name, "model", model, *self.classes)
        self.model, self.config, self.tokenizer = model.eval(), model.config, copy_of(tokenizer)
        check_tokenizer(self.tokenizer, self.config)
        longest, special = self.config.max_sequence_length, self.tokenizer.num_special_tokens_to_add(True)
        self.max_length, self.tokens_per_batch = self._longest() if max_length is None else max_length, tokens_per_batch
        if not special + 1 < self.max_length <= longest:
            raise ValueError(
                f"{name}: max_length is {max_length}; expected more than {special + 1} and at most {longest}"
            )
        if tokens_per_batch < 1:
            raise ValueError(f"{name}: tokens_per_batch is {tokens_per_batch}; expected at least 1")
        token_types = self.config.family.token_types and self.config.type_vocab_size > 1
        self.columns = ("input_ids", "token_type_ids") if token_types else ("input_ids",)

    def _longest(self) -> int:
        return self.config.max_sequence_length

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        **arguments: Any,
    ) -> "Self":
        """Loads a trained model and its tokenizer from a directory, or by a name on the hub.

        precision: "fp32", "bf16", "int8" or "fp8" prepares the model with `fastbert.prepare`. arguments: for the
        constructor.
        Raises ValueError for a checkpoint of another head or with parameters missing, and for a precision that is
        unknown, or given with a dtype other than float32 or a device that it is not for; FileNotFoundError and
        RuntimeError as the model's from_pretrained.
        """
        directory = hub.directory_of(source)
        model = load(functools.partial(trained_model, directory, cls.classes), dtype, device, precision)
        given = {name: value for name, value in arguments.items() if value is not None}
        made = cls(model, cls._tokenizer(directory), **cls._options(directory, model.config) | given)
        if not takes_token_types(directory):
            made.columns = ("input_ids",)
        return made

    @classmethod
    def _tokenizer(cls, directory: Path) -> Any:
        return get_tokenizer(directory)

    @classmethod
    def _options(cls, directory: Path, config: BertConfig) -> dict[str, Any]:
        """Arguments for the constructor that are set in the directory."""
        return {}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _numbers(self, logits: Tensor) -> Tensor:
        """The logits in float32 or wider. Raises ValueError for NaN, beside which nothing is likely or unlikely."""
        if logits.isnan().any():
            raise ValueError(f"{type(self).__name__}: the model's output has NaN; expected numbers")
        return wide(logits)

    def _encode(self, texts: Sequence[Any], *more: str, truncation: bool = True) -> list[Row]:
        """input_ids, token_type_ids and `more` columns of each text or pair of texts, cut at max_length."""
        names = ("input_ids", "token_type_ids", *more)
        found = cut_encodings(self.tokenizer, texts, self.max_length, truncation)
        rows = [{name: COLUMNS[name](encoding)[left] for name in names} for encoding, left in found]
        for index, row in enumerate(rows):
            if not len(row["input_ids"]):  # the tokenizer adds no special ones
                raise ValueError(f"{type(self).__name__}: texts[{index}] has no token; expected text")
        return rows

    def _batches(self, rows: Sequence[Row]) -> Iterator[_Tokens]:
        """Packed batches of texts of similar length. rows: input_ids and token_type_ids of each text."""
        for texts in batches([len(row["input_ids"]) for row in rows], self.tokens_per_batch):
            packed = PackingCollator()([{name: rows[text][name] for name in self.columns} for text in texts])
            lengths = packed["cu_seqlens"].diff().tolist()
            yield _Tokens(texts, lengths, {n: x.to(self.device) if n != "max_seqlen" else x for n, x in packed.items()})


# ---- masks
_LOGITS = 1 << 24  # of masks, in memory at once


class MaskFiller(Predictor):
    """Fills masks with the tokens that a masked language model finds likeliest."""

    classes = (BertForMaskedLM, BertForPreTraining)

    def __init__(self, model: Saveable, tokenizer: Any, **arguments: Any) -> None:
        super().__init__(model, tokenizer, **arguments)
        self.mask_id = special_token_id(self.tokenizer, "mask_token")
        if self.mask_id is None:
            raise ValueError("MaskFiller: the tokenizer has no mask token ([MASK] or <mask>)")
        self.prefix, added = continuation_prefix(self.tokenizer), self.tokenizer.get_added_tokens_decoder()
        self.takes_space = self.mask_id in added and added[self.mask_id].lstrip

    def __call__(self, texts: Sequence[str], *, top_k: int = 5) -> list[list[list[Fill]]]:
        """For each text and each of its masks, the top_k likeliest tokens, best first.

        Each mask of a text is filled while the others stay. The head runs on masks only. Raises ValueError for a text
        without a mask in its first max_length tokens, TypeError for texts that are not strings.
        """
        if not 1 <= top_k <= self.config.vocab_size:
            raise ValueError(f"MaskFiller: top_k is {top_k}; expected 1 to {self.config.vocab_size}")
        return self.compute(self.encode(texts), top_k)

    def encode(self, texts: Sequence[str], truncation: bool = True) -> list[Row]:
        texts = list(strings("MaskFiller", "texts", texts))
        rows = self._encode(texts, "offsets", truncation=truncation)
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            row |= {"text": text, "spans": row["offsets"][row["input_ids"] == self.mask_id].tolist()}
            if not row["spans"]:
                mask, long = self.tokenizer.id_to_token(self.mask_id), len(row["input_ids"]) == self.max_length
                where = f" in its first {self.max_length} tokens" if long else ""
                raise ValueError(f"MaskFiller: texts[{index}] has no {mask}{where}; expected one to fill")
        return rows

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row], top_k: int = 5) -> list[list[list[Fill]]]:
        results: list[list[list[Fill]]] = [[] for _ in rows]
        for batch in self._batches(rows):
            fills = self._best(batch.inputs, top_k)
            for row in batch.texts:
                for span in rows[row]["spans"]:
                    best_of_mask = zip(*next(fills), strict=True)
                    results[row].append([self._fill(rows[row]["text"], span, *fill) for fill in best_of_mask])
        return results

    def _best(self, inputs: dict[str, Any], top_k: int) -> Iterator[tuple[list[float], list[int]]]:
        """Yields the probabilities and ids of the likeliest tokens for each mask of the batch. Logits are computed for
        some masks at a time, because those of a batch of nothing else would take gigabytes."""
        body, head = self.model.bert, self.model.cls.predictions
        hidden = body(**inputs).last_hidden_state[inputs["input_ids"] == self.mask_id]
        for some in hidden.split(max(1, _LOGITS // self.config.vocab_size)):
            logits = self._numbers(head(some, body.embeddings.word_embeddings.weight))
            best = logits.softmax(-1).topk(top_k)
            yield from zip(best.values.tolist(), best.indices.tolist(), strict=True)

    def _fill(self, text: str, span: Sequence[int], score: float, token: int) -> Fill:
        word, (start, end) = self.tokenizer.decode([token], skip_special_tokens=False), span
        before, after, filled = text[:start], text[end:], word
        if self.takes_space:  # RoBERTa's mask includes the space before it, which offsets may omit
            before = before.rstrip()
            if before and (self.tokenizer.id_to_token(token) or "").startswith("\u2581"):
                filled = " " + word.removeprefix(" ")  # SentencePiece decoders drop the first token's space
        if self.prefix and word.startswith(self.prefix):  # it continues the word before
            return Fill(word, token, score, before.rstrip() + word.removeprefix(self.prefix) + after)
        return Fill(word, token, score, before + filled + after)


# ---- whole texts


class TextClassifier(Predictor):
    """Classifies texts or pairs of texts."""

    classes = (BertForSequenceClassification,)

    def __call__(self, texts: Sequence[str | tuple[str, str]], *, top_k: int | None = None) -> list[list[Label]]:
        """For each text its labels (all, or the top_k best), best first, named by the configuration's id2label.

        Scores are probabilities: a softmax over the classes, or a sigmoid of each if config.problem_type is
        "multi_label_classification" or there is one label. With "regression" they are the model's outputs, in its
        order. Raises TypeError for anything but a list of texts or pairs.
        """
        if top_k is not None and top_k < 1:
            raise ValueError(f"TextClassifier: top_k is {top_k}; expected at least 1")
        return self.compute(self.encode(texts), top_k)

    def encode(self, texts: Sequence[str | tuple[str, str]], truncation: bool = True) -> list[Row]:
        return self._encode(_texts_or_pairs(texts), truncation=truncation)

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row], top_k: int | None = None, raw: bool = False) -> list[list[Label]]:
        """The labels of encoded texts. raw: the scores are the logits."""
        names = label_names(self.config)
        results: list[list[Label]] = [[] for _ in rows]
        for batch in self._batches(rows):
            logits = self._numbers(self.model(**batch.inputs).logits)
            scores = (logits if raw else self._scores(logits)).tolist()
            for text, row in zip(batch.texts, scores, strict=True):
                labels = [Label(name, score) for name, score in zip(names, row, strict=True)]
                if self.config.problem_type != "regression":
                    labels.sort(key=lambda label: -label.score)
                results[text] = labels[:top_k]
        return results

    def _scores(self, logits: Tensor) -> Tensor:
        if self.config.problem_type == "regression":
            return logits
        single = self.config.num_labels == 1 or self.config.problem_type == "multi_label_classification"
        return logits.sigmoid() if single else logits.softmax(-1)


def _texts_or_pairs(texts: Sequence[str | tuple[str, str]]) -> list[str | tuple[str, str]]:
    """The checked list. Raises TypeError for anything but a list of texts or pairs, and ValueError as text_of does."""
    if isinstance(texts, Mapping):
        raise TypeError("TextClassifier: texts is a mapping; expected a list of strings, or of pairs of strings")
    texts = texts if isinstance(texts, str) else list(texts)
    for index, text in enumerate([texts] if isinstance(texts, str) else texts):
        parts = text if isinstance(text, (tuple, list)) and len(text) == 2 else [text]
        if isinstance(texts, str) or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"TextClassifier: texts holds {text!r}; expected a list of strings, or of pairs of strings")
        for part in parts:
            text_of("TextClassifier", f"texts[{index}]", part)
    return [text if isinstance(text, str) else tuple(text) for text in texts]


def label_names(config: BertConfig) -> list[str]:
    """Label names in order of their numbers; LABEL_0, ... if the configuration names none."""
    return list(config.id2label.values())


# ---- words


class EntityTagger(Predictor):
    """Finds entities, runs of words with labels of one type, in texts of any length."""

    classes = (BertForTokenClassification,)

    def __init__(self, model: Saveable, tokenizer: Any, *, stride: int | None = None, **arguments: Any) -> None:
        """max_length: tokens in a window; a longer text is read in several. stride: how many tokens consecutive windows
        share; None means 128, or half of max_length if that is less. Raises ValueError if they share too many."""
        super().__init__(model, tokenizer, **arguments)
        self.stride = min(128, self.max_length // 2) if stride is None else stride
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(False)
        if not isinstance(self.stride, Integral) or not 0 <= self.stride < room:
            raise ValueError(f"EntityTagger: stride is {stride!r}; expected 0 to {room - 1} of the {room} of a window")

    def __call__(self, texts: Sequence[str | list[str]]) -> list[list[Entity]]:
        """For each text its entities, in order. A word has the label of its first token; O means no entity.

        Words are the tokenizer's. A list of words in place of a text is tagged by those, as training reads them; start,
        end and text then refer to the words with a space between any two.

        A word continues the entity before it if it has the same type (the label without B- or I-) and its label does
        not begin with B-. Labels that begin with E- (L-) and S- (U-) end an entity and are one by themselves, if the
        model has labels B- or I- of that type (BIOES, BILOU). Equivalent, for models without such labels, to
        transformers' pipeline with aggregation_strategy="first", whose words are not always the tokenizer's
        (docs/inference.md). A token that two windows share has the label of the one that reads more around it.
        Raises TypeError for anything but strings, or lists of strings, but not both.
        """
        texts = texts if isinstance(texts, (str, bytes, Mapping)) else list(texts)
        return self.compute(self._of_words(texts) if _are_words(texts) else self.encode(texts, "split"))

    def encode(self, texts: Sequence[str], truncation: bool | str = True) -> list[Row]:
        """truncation: "split" makes windows of a longer text; True cuts it, and False raises ValueError."""
        texts = list(strings("EntityTagger", "texts", texts))
        if truncation == "split":
            return self._windows(texts, encodings(self.tokenizer, texts))
        rows = self._encode(texts, "word_ids", "offsets", truncation=truncation)
        return [row | {"text": text, "windows": [slice(None)]} for row, text in zip(rows, texts, strict=True)]

    def _of_words(self, texts: Sequence[list[str]]) -> list[Row]:
        texts = [list(strings("EntityTagger", f"texts[{i}]", words)) for i, words in enumerate(texts)]
        rows = self._windows(map(" ".join, texts), encodings(spaced(self.tokenizer), texts, words=True))
        for row, words in zip(rows, texts, strict=True):
            starts = accumulate((len(word) + 1 for word in words), initial=0)
            spans = [(start, start + len(word)) for start, word in zip(starts, [*words, ""], strict=True)]
            row["offsets"] = np.array(spans)[row["word_ids"]]  # special tokens, of no word, get the last
        return rows

    def _windows(self, texts: Iterable[str], found: Iterable[Any]) -> list[Row]:
        return [
            {name: COLUMNS[name](encoding) for name in (*self.columns, "word_ids", "offsets")}
            | {"text": text, "windows": pieces(encoding, self.max_length, True, self.stride)}
            for text, encoding in zip(texts, found, strict=True)
        ]

    def compute(self, rows: Sequence[Row]) -> list[list[Entity]]:
        tags, results = _tags(label_names(self.config)), []
        for row, (_, labels, scores) in zip(rows, (best.T for best in self._labels(rows)), strict=True):
            found = _words(row["word_ids"].tolist(), row["offsets"].tolist())
            words = [_Word(tags[int(labels[first])], float(scores[first]), *span) for first, *span in found]
            results.append(list(_entities(row["text"], words)))
        return results

    @torch.inference_mode()
    def _labels(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """(T, 3) float64 for each row: how many tokens the window has around each, and its label and probability."""
        windows = [(i, window) for i, row in enumerate(rows) for window in row["windows"]]
        inputs = [{name: rows[i][name][window] for name in self.columns} for i, window in windows]
        best = [np.full((len(row["input_ids"]), 3), -1.0) for row in rows]
        for batch in self._batches(inputs):
            found = self._numbers(self.model(**batch.inputs).logits).softmax(-1).max(-1)
            for of_window, both in batch.split(torch.stack([found.indices.to(found.values), found.values], -1)):
                i, window = windows[of_window]
                place = np.arange(len(both))
                read = np.column_stack([np.minimum(place, place[::-1]), both.cpu().numpy()])
                known = best[i][window]
                best[i][window] = np.where(read[:, :1] > known[:, :1], read, known)
        return best


def _are_words(texts: Sequence[Any]) -> bool:
    return isinstance(texts, list) and any(isinstance(text, list) for text in texts)


class _Tag(NamedTuple):
    """What a label means: the type of the entity, and whether it begins and ends one."""

    kind: str
    begins: bool = False
    ends: bool = False


class _Word(NamedTuple):
    tag: _Tag
    score: float
    start: int
    end: int


def _words(word_ids: list[int], offsets: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """The first token of each word, and the characters where the word begins and ends."""
    for word, tokens in groupby(range(len(word_ids)), key=word_ids.__getitem__):
        tokens = list(tokens)
        if word != NO_WORD:
            yield tokens[0], offsets[tokens[0]][0], offsets[tokens[-1]][1]


def _entities(text: str, words: list[_Word]) -> Iterator[Entity]:
    for group in _grouped(words):
        (start, end), kind = _trimmed(text, group[0].start, group[-1].end), group[0].tag.kind
        if kind != "O":
            score = sum(word.score for word in group) / len(group)
            yield Entity(kind, score, start, end, text[start:end])


def _grouped(words: list[_Word]) -> Iterator[list[_Word]]:
    """The words of each entity, and of each run of words outside of entities."""
    group: list[_Word] = []
    for word in words:
        if group and (word.tag.begins or group[-1].tag.ends or word.tag.kind != group[0].tag.kind):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _tags(labels: list[str]) -> list[_Tag]:
    kinds = {label[2:] for label in labels if label.startswith(("B-", "I-"))}
    tags = []
    for label in labels:
        prefix, kind = label[:2], label[2:]
        ends = prefix in ("E-", "L-", "S-", "U-") and kind in kinds
        prefixed = ends or prefix in ("B-", "I-")
        tags.append(_Tag(kind, prefix in ("B-", "S-", "U-"), ends) if prefixed else _Tag(label))
    return tags


# ---- answers


class QuestionAnswerer(Predictor):
    """Answers questions by spans of a context of any length, which is read in overlapping windows."""

    classes = (BertForQuestionAnswering,)

    def __init__(self, model: Saveable, tokenizer: Any, *, stride: int | None = None, **arguments: Any) -> None:
        """max_length: tokens in a window, with the question; None means 384, or the model's maximum if that is less.
        stride: how many tokens consecutive windows share; None means 128, or half of max_length if that is less.
        """
        super().__init__(model, tokenizer, **arguments)
        self.stride = min(128, self.max_length // 2) if stride is None else stride

    def _longest(self) -> int:
        return min(384, self.config.max_sequence_length)

    @torch.inference_mode()
    def __call__(
        self, questions: Sequence[str], contexts: Sequence[str], *, top_k: int = 1, max_answer_length: int = 30
    ) -> list[Answers]:
        """For each question the top_k best spans of its context, of at most max_answer_length tokens.

        A span's score is the start logit of its first token plus the end logit of its last, in the window where that is
        largest; the score of "no answer" is that of [CLS], in the window where it is smallest (Devlin et al., "BERT",
        2018, 4.2 and 4.3). Probabilities are the softmax over all spans and "no answer", which means nothing for a
        model trained without unanswerable questions.
        Raises ValueError for an empty text, unequal numbers of questions and contexts, and a question that leaves no
        room for more than `stride` tokens of context; TypeError for anything but lists of strings.
        """
        for name, value in (("top_k", top_k), ("max_answer_length", max_answer_length)):
            if value < 1:
                raise ValueError(f"QuestionAnswerer: {name} is {value}; expected at least 1")
        questions, contexts = (texts if isinstance(texts, str) else list(texts) for texts in (questions, contexts))
        if not len(questions):
            return []
        windows = QADataset(questions, contexts, None, self.tokenizer, max_length=self.max_length, stride=self.stride)
        scores = self._scores(windows)
        of_questions = [np.flatnonzero(windows.example_index == question) for question in range(len(windows.contexts))]
        return [
            _Spans.of(windows, found, scores, self.stride, max_answer_length).best(windows.contexts[question], top_k)
            for question, found in enumerate(of_questions)
        ]

    def _scores(self, windows: QADataset) -> list[np.ndarray]:
        """(T, 2) float64 for each window: start and end logits."""
        rows = [{name: windows.rows(name, i) for name in self.columns} for i in range(len(windows))]
        scores = [np.empty((0, 2))] * len(windows)
        for batch in self._batches(rows):
            output = self.model(**batch.inputs)
            both = self._numbers(torch.stack([output.start_logits, output.end_logits], -1))
            for window, logits in batch.split(both):
                scores[window] = logits.double().cpu().numpy()
        return scores


class _Spans(NamedTuple):
    """All spans of a context of T tokens: scores[t, n] is the score of the n + 1 tokens from t on."""

    scores: np.ndarray  # (T, max_answer_length), -inf if no window holds the span
    no_answer: float
    offsets: np.ndarray  # (T, 2)

    @classmethod
    def of(
        cls, windows: QADataset, indices: np.ndarray, logits: list[np.ndarray], stride: int, longest: int
    ) -> "_Spans":
        offsets = [windows.rows("offsets", window) for window in indices]
        contexts = [np.flatnonzero(rows[:, 0] >= 0) for rows in offsets]
        step = len(contexts[0]) - stride  # between the starts of consecutive windows
        tokens = step * (len(contexts) - 1) + len(contexts[-1])
        scores, places, no_answer = np.full((tokens, min(longest, tokens)), -np.inf), np.empty((tokens, 2), int), np.inf
        for turn, (window, context) in enumerate(zip(indices, contexts, strict=True)):
            first, (starts, ends) = turn * step, logits[window].T
            no_answer = min(no_answer, starts[0] + ends[0])
            places[first : first + len(context)] = offsets[turn][context]
            for more in range(min(len(context), scores.shape[1])):
                known = scores[first : first + len(context) - more, more]
                np.maximum(known, starts[context[: len(context) - more]] + ends[context[more:]], out=known)
        return cls(scores, no_answer, places)

    def best(self, context: str, top_k: int) -> Answers:
        largest = max(self.scores.max(), self.no_answer)
        weights, nothing = np.exp(self.scores - largest), np.exp(self.no_answer - largest)
        total, found = weights.sum() + nothing, {}
        for place in np.argsort(-self.scores, axis=None, kind="stable"):
            token, more = np.unravel_index(place, self.scores.shape)
            span = _trimmed(context, self.offsets[token, 0], self.offsets[min(token + more, len(self.offsets) - 1), 1])
            if len(found) == top_k or not weights[token, more]:
                break
            if span[0] < span[1]:  # some tokens are only a space
                found.setdefault(span, weights[token, more] / total)  # tokens of one character give equal spans
        best = [Answer(context[start:end], float(score), start, end) for (start, end), score in found.items()]
        return Answers(best, float(nothing / total))


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without leading spaces, which some tokenizers include in a word."""
    return int(end) - len(text[start:end].lstrip()), int(end)
