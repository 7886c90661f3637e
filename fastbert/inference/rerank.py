"""Cross encoders: classifiers that read two texts together, score how well they match, and so rank documents."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbert.config import BertConfig
from fastbert.data.tokenizer import save_tokenizer, strings, text_of
from fastbert.heads import BertForSequenceClassification
from fastbert.inference import sentence_files
from fastbert.inference.predict import Predictor, Row
from fastbert.inference.sentence_files import activation_name, activation_path, new_activation
from fastbert.inference.vectors import check_count
from fastbert.model import Saveable
from fastbert.ops.numbers import wide


class CrossEncoder(Predictor):
    """Scores pairs of texts, and ranks documents for a query.

    Computes what sentence-transformers' CrossEncoder computes with the same directory, or refuses the directory. That
    includes its activation and its maximum length, to which the longer text of a pair is cut first.
    """

    classes = (BertForSequenceClassification,)

    def __init__(self, model: Saveable, tokenizer: Any, *, activation: str | None = None, **arguments: Any) -> None:
        """activation: applied to the logits; a class of torch.nn by name, one of "Identity", "Sigmoid", "Tanh", ...;
        None takes what the model's configuration names, else "Sigmoid" for one label and "Identity" for several.
        max_length: in tokens, of both texts with special tokens. tokens_per_batch: as for the other predictors.
        Raises ValueError for another activation.
        """
        super().__init__(model, tokenizer, **arguments)
        default = "Sigmoid" if self.config.num_labels == 1 else "Identity"
        self.activation = new_activation("CrossEncoder", activation or _configured(self.config) or default)

    @classmethod
    def _tokenizer(cls, directory: Path) -> Any:
        with_modules = (directory / "modules.json").exists()  # else sentence-transformers does not read its other files
        return sentence_files.read_tokenizer(directory) if with_modules else super()._tokenizer(directory)

    @classmethod
    def _options(cls, directory: Path, config: BertConfig) -> dict[str, Any]:
        found, longest = sentence_files.read_cross_encoder(directory), config.max_sequence_length
        return found | {"max_length": min(found["max_length"] or longest, longest)}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that `from_pretrained` and sentence-transformers' CrossEncoder read.

        The activation is written to config.json, max_length to tokenizer_config.json.
        """
        sentence_files.begin(Path(directory))  # removes modules.json, beside which there may be another activation
        path, entry = activation_path(self.activation), self.config.extra.get("sentence_transformers") or {}
        self.config.extra["sentence_transformers"] = {**entry, "activation_fn": path}
        self.config.extra["sbert_ce_default_activation_function"] = path  # for releases before 4
        self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory, self.max_length, "token_type_ids" in self.columns)

    def predict(self, pairs: Iterable[Sequence[str]], *, progress: Callable[[int], object] | None = None) -> Tensor:
        """(N,) float32 scores of pairs of texts; (N, num_labels) of a model with several labels.

        progress: called with the number of pairs of each batch. Raises TypeError for anything but pairs of strings,
        ValueError for a score that is NaN.
        """
        scores = self.compute(self.encode(pairs), progress)
        if len(wrong := scores.isnan().any(-1).nonzero()):
            raise ValueError(f"CrossEncoder: the score of pairs[{int(wrong[0])}] is NaN; expected a number")
        return scores.squeeze(-1) if self.config.num_labels == 1 else scores

    def encode(self, pairs: Iterable[Sequence[str]], truncation: bool = True) -> list[Row]:
        return self._encode(pairs_of("CrossEncoder", pairs), truncation=truncation)

    def compute(self, rows: Sequence[Row], progress: Callable[[int], object] | None = None) -> Tensor:
        """The scores of encoded pairs, (N, num_labels) float32."""
        scores = torch.empty(len(rows), self.config.num_labels, device=self.device, dtype=torch.float32)
        for batch in self._batches(rows):
            scores[batch.texts] = self._scores(batch.inputs)
            if progress:
                progress(len(batch.texts))
        return scores

    @torch.inference_mode()
    def _scores(self, inputs: dict[str, Any]) -> Tensor:
        return self.activation(wide(self.model(**inputs).logits)).float()

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[dict[str, Any]]:
        """The documents, or the top_k best, best first: {"corpus_id": its index, "score": a float}.

        return_documents: adds "text", the document. Documents of equal scores keep their order. progress: as in
        `predict`. Equivalent to `sentence_transformers.CrossEncoder.rank`. Raises ValueError for a model of several
        labels, a top_k below 1 and a score that is NaN, TypeError for anything but strings.
        """
        if self.config.num_labels != 1:
            raise ValueError(f"CrossEncoder: rank of a model with {self.config.num_labels} labels; expected one label")

        def score(documents: list[str]) -> Tensor:
            return self.predict([(query, document) for document in documents], progress=progress)

        return ranked("CrossEncoder", score, query, documents, top_k, return_documents)


def ranked(
    owner: str,
    score: Callable[[list[str]], Tensor],
    query: str,
    documents: Iterable[str],
    top_k: int | None,
    return_documents: bool,
) -> list[dict[str, Any]]:
    """What `CrossEncoder.rank` returns, and its errors. score: gives each of the documents its score, (N,)."""
    if top_k is not None:
        check_count(owner, top_k, "top_k")
    text_of(owner, "query", query)
    documents = list(strings(owner, "documents", documents))
    scores = score(documents).tolist()
    if wrong := [i for i, each in enumerate(scores) if math.isnan(each)]:
        raise ValueError(f"{owner}: the score of documents[{wrong[0]}] is NaN; expected a number")
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
    return [{"corpus_id": i, "score": scores[i]} | ({"text": documents[i]} if return_documents else {}) for i in best]


def _configured(config: BertConfig) -> str | None:
    """The activation in sentence-transformers' entries of a config.json, as release 4 or an earlier one writes them."""
    entry, name = config.extra.get("sentence_transformers") or {}, "activation_fn"
    if name not in entry:
        entry, name = config.extra, "sbert_ce_default_activation_function"
    return entry.get(name) and activation_name("the model's configuration", name, entry[name])


def pairs_of(owner: str, pairs: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """The pairs of texts. Raises TypeError for anything but pairs of strings, ValueError as text_of does."""
    found = []
    for index, pair in enumerate([pairs] if isinstance(pairs, str) else pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{owner}: pairs[{index}] is {repr(pair):.60}; expected two texts, (text, text)")
        found.append(tuple(text_of(owner, f"pairs[{index}][{i}]", part) for i, part in enumerate(pair)))
    return found
