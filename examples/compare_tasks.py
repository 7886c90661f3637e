"""The three tasks of compare_training.py, made of text that ships with Python; every fourth example is held out.

classes: from which area of Python's documentation is a passage? As in finetune_classifier.py.
tags: which words are functions, keywords, exceptions? The documentation has them in quotes: "len()", "except",
"TypeError". The quotes and parentheses are removed, and what they indicated becomes the tags.
answers: what does it return, which exception does it name? Asked about paragraphs of the documentation.
"""

import itertools
import keyword
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import transformers
from finetune_classifier import AREAS

from fastbert import metrics
from fastbert.cli.demo import minilm, python_documentation
from fastbert.data import ClassificationDataset, QADataset, TokenClassificationDataset, get_tokenizer
from fastbert.training import evaluating, to_device

TAGS = ("O", *(f"{at}-{kind}" for kind in ("FUNCTION", "KEYWORD", "EXCEPTION") for at in "BI"))
MARKED = re.compile(rf'"([\w.]+\(\)|{"|".join(keyword.kwlist)}|\w*(?:Error|Exception|Iteration|Warning))"')
WORD = re.compile(r'[^\W_]+|[^\w\s"]|_')  # as BERT's tokenizer splits
QUESTIONS = {  # each with a pattern of what is before, in and after the answer
    "What does it return?": r"\b[Rr]eturns? (\w[^.,;:(]+?)(?=[.,;:]| if | when )",
    "What must it be?": r"\bmust be (\w[^.,;:(]+?)(?=[.,;:]| if | when )",
    "When is it called?": r"\b[Cc]alled ((?:when|to) [^.,;:]+)",
    "In which version was it new?": r"\bversion (\d\.\d+)",
    "Which exception does it name?": r"\b(\w+(?:Error|Exception|Exit|Iteration))\b",
    "Which function does it name?": r"(\b[\w.]+\(\))",
}


class Task(NamedTuple):
    head: str  # the class, in both libraries
    labels: Sequence[str]
    parts: Sequence  # data sets: for training, held out
    evaluate: Callable  # (model, held-out batches, device) -> f1, and for answers exact_match
    padding: type = transformers.DataCollatorWithPadding  # transformers' own collator
    steps: int = 60


def parted(found: Sequence) -> tuple[list, list]:
    return [one for i, one in enumerate(found) if i % 4], list(found[::4])


def data_sets(kind: Callable, parts: Sequence[list], **options: int) -> list:
    """A data set of each part's examples, which it takes as columns."""
    return [kind(*zip(*part, strict=True), get_tokenizer(minilm()), **options) for part in parts]


def classes() -> Task:
    found = [(text, AREAS.index(topic)) for topic, text in python_documentation(100) if topic in AREAS]
    parts = data_sets(ClassificationDataset, parted(found), max_length=48)
    evaluate = partial(metrics.evaluate_classification_metrics, num_classes=len(AREAS))  # f1: macro
    return Task("BertForSequenceClassification", AREAS, parts, evaluate)


def tag_examples() -> tuple[list, list]:
    """(words, tags), for training and held out."""
    return parted(
        [tagged(text) for text in sorted({x for _, x in python_documentation(1) if len(MARKED.findall(x)) > 1})]
    )


def tags() -> Task:
    parts = data_sets(TokenClassificationDataset, tag_examples(), max_length=64)
    evaluate = partial(metrics.evaluate_entity_metrics, id2label=TAGS)
    padding = transformers.DataCollatorForTokenClassification
    return Task("BertForTokenClassification", TAGS, parts, evaluate, padding, steps=80)


def tagged(text: str) -> tuple[list[str], list[int]]:
    """Words without their quotes and parentheses, and the index of each word's tag."""
    words, tags = [], []
    for i, part in enumerate(MARKED.split(text)):  # every other part is marked
        found = WORD.findall(part.removesuffix("()") if i % 2 else part)
        tags += [TAGS.index(f"{'I' if j else 'B'}-{kind_of(part)}") if i % 2 else 0 for j in range(len(found))]
        words += found
    return words, tags


def kind_of(name: str) -> str:
    return "KEYWORD" if name in keyword.kwlist else "FUNCTION" if name.endswith("()") else "EXCEPTION"


def answers() -> Task:
    texts = sorted({" ".join(re.sub('["*]', "", text).split()) for _, text in python_documentation(1)})
    asked = [asked_about([text for text in part if len(text) < 300]) for part in parted(texts)]
    parts = data_sets(QADataset, asked)
    right = [answer["text"] for _, _, answer in asked[1]]
    return Task("BertForQuestionAnswering", (), parts, partial(evaluate_answers, windows=parts[1], right=right))


def asked_about(texts: list[str]) -> list[tuple[str, str, dict]]:
    """(question, text, answer in SQuAD's form); the answer is the first one in the text."""
    pairs = itertools.product(texts, QUESTIONS.items())
    found = ((question, text, re.search(pattern, text)) for text, (question, pattern) in pairs)
    return [(question, text, {"text": [at[1]], "answer_start": [at.start(1)]}) for question, text, at in found if at]


def evaluate_answers(model, batches: list[dict], device, windows: QADataset, right: list) -> dict[str, float]:
    """exact_match and f1 of the likeliest spans, in [0, 1]."""
    found = []
    with evaluating(model):
        for batch in batches:
            out = model(**to_device(batch, device))
            lengths = windows.lengths[len(found) :][: len(batch["start_positions"])].tolist()
            rows = [x.split(lengths) if x.dim() == 1 else x for x in (out.start_logits, out.end_logits)]
            for length, starts, ends in zip(lengths, *rows, strict=True):
                pairs = (starts[:length, None] + ends[:length]).cpu()
                pairs[torch.ones(length, length).tril(-1) > 0] = -torch.inf  # would end before they start
                found.append(windows.answer(len(found), *divmod(int(pairs.argmax()), length)))
    return {name: percent / 100 for name, percent in metrics.compute_squad_metrics(found, right).items()}
