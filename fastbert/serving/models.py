"""Served models: each is loaded from a directory, and does the tasks that its head is for."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fastbert import checkpoint, hub
from fastbert.auto import model_class_of
from fastbert.data.encode import TooLong
from fastbert.heads import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.inference import CrossEncoder, EntityTagger, MaskFiller, SentenceEncoder, TextClassifier
from fastbert.model import BertModel
from fastbert.serving.errors import Problem

EMBED, CLASSIFY, RERANK, TAG, FILL = TASKS = (
    "embeddings",
    "classification",
    "rerank",
    "token classification",
    "fill-mask",
)


_TEXT = re.compile(r"(?:\w+: )?texts(?P<index>\[\d+\]) (?P<what>.*)", re.DOTALL)  # in errors of the predictors


@dataclass(frozen=True)
class Lane:
    """A predictor with fixed options, for the queue, which computes the rows of equal lanes together."""

    predictor: Any
    method: str = "compute"
    options: tuple[tuple[str, Any], ...] = ()

    def compute(self, rows: Sequence[Any]) -> Sequence[Any]:
        found = getattr(self.predictor, self.method)(rows, **dict(self.options))
        return found.cpu() if isinstance(found, Tensor) else found


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model with its name, and its predictors by task."""

    name: str
    directory: Path
    predictors: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The model's first task."""
        return next(iter(self.predictors))

    @property
    def any(self) -> Any:
        """One of the predictors; all share the same model and tokenizer."""
        return self.predictors[self.task]

    @property
    def max_length(self) -> int:
        """The most tokens in a text, special ones included."""
        return self.any.max_length

    def at(self, task: str) -> Any:
        """The predictor for a task. Raises Problem for a task that the model has no head for."""
        if task not in self.predictors:
            has = ", ".join(self.predictors)
            raise Problem(424, "Backend", f"the model {self.name!r} does {has}; this request is for {task}")
        return self.predictors[task]

    def rows(
        self, task: str, inputs: Sequence[Any], *, truncate: bool, field: str = "inputs"
    ) -> tuple[list[Any], list[int]]:
        """Encodes texts or pairs; returns the rows and their lengths in tokens. Embeddings take token ids as well.

        field: the name of the inputs in the request. Raises Problem for inputs that are too long (413) unless
        `truncate` is set, and for invalid text or ids (422).
        """
        predictor = self.at(task)
        try:
            if task == EMBED:
                rows = self._tokens(predictor, inputs, truncate)
                return rows, list(map(len, rows))
            rows = predictor.encode(inputs, truncation=truncate)
            return rows, [len(row["input_ids"]) for row in rows]
        except TooLong as error:
            raise _of_field(error, field, 413, "Validation") from None
        except (ValueError, TypeError) as error:
            raise _of_field(error, field, 422, "Tokenizer") from None

    def _tokens(self, encoder: SentenceEncoder, inputs: Sequence[Any], truncate: bool) -> list[list[int]]:
        """Token ids of texts, or the checked ids that the request has in place of texts."""
        if all(isinstance(text, str) for text in inputs):
            return encoder.tokenize(list(inputs), truncation=truncate)
        vocabulary = encoder.model.config.vocab_size
        for index, ids in enumerate(inputs):
            if not truncate and len(ids) > self.max_length:
                raise TooLong(f"texts[{index}] has {len(ids)} tokens; expected at most {self.max_length}")
            if not all(0 <= token < vocabulary for token in ids):
                raise ValueError(f"texts[{index}] has a token outside the vocabulary, 0 to {vocabulary - 1}")
        return [ids[: self.max_length] for ids in inputs]


def _of_field(error: Exception, field: str, status: int, kind: str) -> Problem:
    """The Problem of an error about "texts[i]", with the name that the request has for it."""
    found = _TEXT.match(str(error))
    if found is None:
        return Problem(status, kind, str(error))
    place = f"{field}{found['index']}"
    return Problem(status, kind, f"{place}: {found['what']}", field=place)


def load(source: str | Path, name: str | None = None, **options: Any) -> ServedModel:
    """Loads a model from a directory or by its name on the hub. name: for clients; None for the directory's name, or
    the one on the hub.

    options: dtype, device, precision and max_length of `SentenceEncoder.from_pretrained`. Raises the same errors as
    that method, and ValueError for a head that is not served.
    """
    directory = Path(hub.directory_of(source))
    found = model_class_of(checkpoint.load(directory).config, owner=str(source))
    if (directory / "modules.json").exists() and found is not BertForSequenceClassification:
        found = BertModel  # a sentence encoder's body may have been saved with a head
    known: dict[type, Callable[..., dict[str, Any]]] = {
        BertModel: lambda: {EMBED: SentenceEncoder.from_pretrained(directory, **options)},
        BertForSequenceClassification: lambda: _classifiers(directory, options),
        BertForTokenClassification: lambda: {TAG: EntityTagger.from_pretrained(directory, **options)},
        BertForMaskedLM: lambda: {FILL: MaskFiller.from_pretrained(directory, **options)},
        BertForPreTraining: lambda: {FILL: MaskFiller.from_pretrained(directory, **options)},
    }
    if found not in known:
        raise ValueError(f"{source} is a {found.__name__}; expected a model for {', '.join(TASKS)}")
    # Loading in a thread that then ends also ends its OpenMP threads. If they stayed, the OpenMP threads of inference
    # would sleep after each loop.
    with ThreadPoolExecutor(1) as loader:
        predictors = loader.submit(known[found]).result()
    name = name or (Path(source).resolve().name if Path(source).is_dir() else str(source).partition("@")[0])
    return ServedModel(name, directory, predictors)


def _classifiers(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A sequence classifier's predictors. A reranker returns logits; each request chooses what to make of them."""
    encoder = CrossEncoder.from_pretrained(directory, activation="Identity", **options)
    classifier = TextClassifier(encoder.model, encoder.tokenizer, max_length=encoder.max_length)
    single = encoder.config.num_labels == 1
    return {RERANK: encoder, CLASSIFY: classifier} if single else {CLASSIFY: classifier}
