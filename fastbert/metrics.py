"""Metrics of predictions (by scikit-learn and seqeval), metrics of models over loaders, and plots.

Predictions and labels are tensors, arrays or lists. Labels of -100 are ignored, as in losses. A mean over nothing, such
as the precision of a class that is never predicted, is 0.
"""

import csv
import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.figures import new_figure, save_figure
from fastbert.inference.vectors import best_of, nearest
from fastbert.labels import IGNORED
from fastbert.modes import evaluating
from fastbert.require import require
from fastbert.training import label_counts, to_device
from fastbert.training.losses import Batch, loss_of

# ---- classes


class PrecisionRecallF1(NamedTuple):
    """Precision, recall and F1: floats in [0, 1], or with average=None arrays with an entry for each class."""

    precision: Any
    recall: Any
    f1: Any


def compute_precision_recall_f1(
    predictions: Any, labels: Any, average: str | None = "macro", num_classes: int | None = None
) -> PrecisionRecallF1:
    """Precision, recall and F1 of predicted classes. predictions and labels: integers of the same shape.

    average: "macro", "micro", "weighted", "binary" (of class 1), or None for each class. num_classes: average over the
    classes below it; None: over those that occur. Raises ValueError if nothing is labelled, for different shapes and
    for classes out of range; TypeError for other dtypes.
    Equivalent to `sklearn.metrics.precision_recall_fscore_support(..., zero_division=0)`.
    """
    averages = ("macro", "micro", "weighted", "binary", None)
    if average not in averages:
        raise ValueError(f"compute_precision_recall_f1: average is {average!r}; expected one of {averages}")
    predictions, labels = _classes("compute_precision_recall_f1", predictions, labels, num_classes)
    if average == "binary":
        _check_range("compute_precision_recall_f1", predictions, labels, 2)
    sklearn = require("sklearn.metrics", "scikit-learn")
    classes = None if num_classes is None or average == "binary" else range(num_classes)
    scores = sklearn.precision_recall_fscore_support(
        labels, predictions, average=average, labels=classes, zero_division=0
    )
    return PrecisionRecallF1(*(score if average is None else float(score) for score in scores[:3]))


def compute_confusion_matrix(predictions: Any, labels: Any, num_classes: int) -> np.ndarray:
    """(num_classes, num_classes) int64: how often a label (row) was predicted as each class (column).

    Raises what compute_precision_recall_f1 raises. Equivalent to `sklearn.metrics.confusion_matrix`.
    """
    predictions, labels = _classes("compute_confusion_matrix", predictions, labels, num_classes)
    return require("sklearn.metrics", "scikit-learn").confusion_matrix(labels, predictions, labels=range(num_classes))


def _classes(caller: str, predictions: Any, labels: Any, num_classes: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Checks predictions and labels, and returns those with a label, (N,) int64."""
    predictions, labels = _integers(caller, "predictions", predictions), _integers(caller, "labels", labels)
    if predictions.shape != labels.shape:
        raise ValueError(
            f"{caller}: predictions has shape {predictions.shape}, labels {labels.shape}; expected equal ones"
        )
    labelled = labels != IGNORED
    if not labelled.any():
        raise ValueError(
            f"{caller}: none of {labels.size} labels is a class; expected at least one that is not {IGNORED}"
        )
    predictions, labels = predictions[labelled], labels[labelled]
    _check_range(caller, predictions, labels, num_classes)
    return predictions, labels


def _integers(caller: str, name: str, given: Any) -> np.ndarray:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = (given.double() if given.is_floating_point() else given).numpy()  # numpy has no bfloat16
    array = np.asarray(given)
    if array.size and not (np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        raise TypeError(f"{caller}: {name} is of {array.dtype}; expected integers, one class each")
    return array.astype(np.int64)


def _check_range(caller: str, predictions: np.ndarray, labels: np.ndarray, num_classes: int | None) -> None:
    for name, values in (("predictions", predictions), ("labels", labels)):
        wrong = values[(values < 0) | (values >= num_classes)] if num_classes is not None else values[values < 0]
        if wrong.size:
            below = "" if num_classes is None else f" to {num_classes - 1}"
            raise ValueError(f"{caller}: {name} has {wrong[0]}; expected classes from 0{below}")


def evaluate_classification_metrics(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device | str,
    num_classes: int,
    average: str | None = "macro",
) -> dict[str, Any]:
    """loss, accuracy, precision, recall, f1 and confusion_matrix of a sequence or token classifier.

    loader: packed or padded batches with labels; -100 and padding are ignored (the loss of a transformers model that is
    not accelerated counts classes at padding). The prediction is the class with the highest logit, and the loss is the
    mean as if all batches were one. Raises ValueError for a batch without labels and for logits with another number of
    classes, and what compute_precision_recall_f1 raises.
    """
    total, count, predictions, labels = 0.0, 0.0, [], []
    with evaluating(model):
        for batch in loader:
            labelled = label_counts(model, batch).sum().to(device)
            batch = to_device(batch, device)
            out = model(**batch)
            found, truth = _predicted("evaluate_classification_metrics", out.logits, batch, num_classes)
            # transformers returns NaN for a batch without labels.
            total, count = total + loss_of(out, batch).where(labelled > 0, 0) * labelled, count + labelled
            predictions.append(found)
            labels.append(truth)
    if not predictions:
        raise ValueError("evaluate_classification_metrics: the loader has no batch; expected at least one")
    predictions, labels = torch.cat(predictions), torch.cat(labels)
    matrix = compute_confusion_matrix(predictions, labels, num_classes)
    scores = compute_precision_recall_f1(predictions, labels, average, num_classes)
    accuracy = float(matrix.trace() / matrix.sum())
    return {"loss": float(total / count), "accuracy": accuracy, **scores._asdict(), "confusion_matrix": matrix}


def _predicted(caller: str, logits: Tensor, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
    """Predicted classes (N,), and labels (N,) with -100 at padding."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point() or labels.numel() != logits.numel() // logits.shape[-1]:
        raise ValueError(
            f"{caller}: labels has {_shape(labels)}, for logits of {_shape(logits)}; expected a class, an integer, for "
            "each row of logits"
        )
    if logits.shape[-1] != num_classes:
        raise ValueError(f"{caller}: {num_classes} classes were given; the model has {logits.shape[-1]}")
    mask = batch.get("attention_mask")
    if mask is not None and logits.dim() == 3:
        labels = labels.masked_fill(mask == 0, IGNORED)
    return logits.argmax(-1).flatten(), labels.flatten()


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}"


# ---- entities


def compute_entity_metrics(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]], scheme: str | None = None
) -> dict[str, float]:
    """precision, recall and f1 of entities in [0, 1]; an entity is correct if its type and both ends are.

    predictions, labels: a list of tags for each sentence, such as ["B-PER", "I-PER", "O"]. scheme: None reads tags as
    conlleval does, the script for CoNLL's data sets, which accepts entities that begin with I-; "BIO" and "BIOES" are
    strict. Raises ValueError for empty input, different lengths, and tags outside the scheme; TypeError for a text
    in place of a list of tags.
    Equivalent to `seqeval.metrics`, micro-averaged, in its default or its strict mode.
    """
    prefixes = {None: "BIES", "BIO": "BI", "BIOES": "BIES"}
    if scheme not in prefixes:
        raise ValueError(f"compute_entity_metrics: scheme is {scheme!r}; expected None, 'BIO' or 'BIOES'")
    lengths = [[len(tags) for tags in sentences] for sentences in (predictions, labels)]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise ValueError(
            f"compute_entity_metrics: predictions has {len(lengths[0])} sentences of {sum(lengths[0])} tags, labels "
            f"{len(lengths[1])} of {sum(lengths[1])}; expected equal lengths, and at least one tag"
        )
    tag = re.compile(rf"O|[{prefixes[scheme]}]-.+")
    for name, sentences in (("predictions", predictions), ("labels", labels)):
        if text := next((tags for tags in sentences if isinstance(tags, str)), None):
            raise TypeError(f"compute_entity_metrics: {name} has {text!r} for a sentence; expected a list of tags")
        number = next((found for tags in sentences for found in tags if not isinstance(found, str)), None)
        if number is not None:
            raise TypeError(f"compute_entity_metrics: {name} has {number!r}; expected the names of tags")
        wrong = next((found for tags in sentences for found in tags if not tag.fullmatch(found)), None)
        if wrong is not None:
            raise ValueError(f"compute_entity_metrics: {name} has the tag {wrong!r}; expected {tag.pattern}")
    seqeval = require("seqeval.metrics", "seqeval")
    options = {"average": "micro", "zero_division": 0}
    if scheme is not None:
        schemes = require("seqeval.scheme", "seqeval")
        options |= {"mode": "strict", "scheme": schemes.IOB2 if scheme == "BIO" else schemes.IOBES}
    scores = {name: getattr(seqeval, f"{name}_score") for name in ("precision", "recall", "f1")}
    truth, found = ([list(tags) for tags in sentences] for sentences in (labels, predictions))
    return {name: float(score(truth, found, **options)) for name, score in scores.items()}


def evaluate_entity_metrics(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device | str,
    id2label: Mapping[int, str] | Sequence[str],
    scheme: str | None = None,
) -> dict[str, float]:
    """compute_entity_metrics of a token classifier; tokens with label -100 (later pieces of a word) are ignored.

    loader: packed or padded batches with labels. id2label: the tag of each class. Raises ValueError as
    compute_entity_metrics and evaluate_classification_metrics do.
    """
    if isinstance(id2label, Mapping) and id2label.keys() != set(range(len(id2label))):
        raise ValueError(f"evaluate_entity_metrics: id2label has {sorted(id2label)}; expected every class, from 0")
    predictions, labels = [], []
    with evaluating(model):
        for batch in loader:
            batch = to_device(batch, device)
            logits = model(**batch).logits
            packed = "cu_seqlens" in batch
            if logits.dim() != (2 if packed else 3) or (packed and len(logits) != int(batch["cu_seqlens"][-1])):
                shape = tuple(logits.shape)
                raise ValueError(f"evaluate_entity_metrics: logits have shape {shape}; expected some for each token")
            pair = _predicted("evaluate_entity_metrics", logits, batch, len(id2label))
            lengths = batch["cu_seqlens"].diff().tolist() if packed else [logits.shape[1]] * len(logits)
            sentences = zip(*(x.split(lengths) for x in torch.stack(pair).cpu()), strict=True)
            for found, truth in sentences:
                kept = truth != IGNORED
                predictions.append([id2label[i] for i in found[kept].tolist()])
                labels.append([id2label[i] for i in truth[kept].tolist()])
    return compute_entity_metrics(predictions, labels, scheme)


# ---- answers


def compute_squad_metrics(
    predictions: Mapping[str, str] | Sequence[str], answers: Mapping[str, Sequence[str]] | Sequence[Sequence[str]]
) -> dict[str, float]:
    """exact_match and f1 of answers in percent; each question counts with the best score over its correct answers.

    predictions: a text for each question, by id or in order; "" for no answer. answers: for each question a list of
    correct answers, empty if it is unanswerable, or {"text": the list, ...} as in the data set. Raises ValueError for
    empty input and for questions that do not match, TypeError for an answer that is no text.
    Equivalent to SQuAD's evaluate-v2.0.py (Rajpurkar et al., 2018) and, if all answers have words, evaluate-v1.1.py.
    """
    by_id = [given if isinstance(given, Mapping) else dict(enumerate(given)) for given in (predictions, answers)]
    if not by_id[1] or by_id[0].keys() != by_id[1].keys():
        first = next(iter(by_id[0].keys() ^ by_id[1].keys()), None)
        raise ValueError(
            f"compute_squad_metrics: {len(by_id[0])} predictions for {len(by_id[1])} questions"
            f"{'' if first is None else f'; only one of them has {first!r}'}; expected one for each, and at least one"
        )
    scores = [_answer_scores(by_id[0][question], right) for question, right in by_id[1].items()]
    exact, f1 = np.mean(scores, axis=0) * 100
    return {"exact_match": float(exact), "f1": float(f1)}


def _answer_scores(prediction: str, right: Sequence[str] | Mapping[str, Any]) -> tuple[float, float]:
    right = right.get("text") if isinstance(right, Mapping) else right
    if right is None or isinstance(right, str):
        raise ValueError(f"compute_squad_metrics: the answers to a question are {right!r}; expected a list of texts")
    for text in (prediction, *right):
        if not isinstance(text, str):
            raise TypeError(f"compute_squad_metrics: an answer is a {type(text).__name__}; expected a text")
    found = _words(prediction)
    answers = [words for answer in right if (words := _words(answer))] or [[]]  # one without words counts as none
    return float(found in answers), max(_overlap(found, answer) for answer in answers)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _overlap(found: list[str], answer: list[str]) -> float:
    """F1 of two lists of words, repetitions included."""
    if not found or not answer:
        return float(found == answer)
    return 2 * (Counter(found) & Counter(answer)).total() / (len(found) + len(answer))


# ---- rankings


def ndcg_at_k(scores: Any, relevance: Any, k: int = 10) -> float:
    """Normalised discounted cumulative gain of the k best documents, in [0, 1], averaged over queries.

    scores: of each query's documents, (Q, N) or lists of different lengths, as `CrossEncoder.predict` gives them.
    relevance: of the same documents, 0 for irrelevant ones; documents with -100 are left out. The gain is the relevance
    itself, divided by log2(1 + rank) (Järvelin and Kekäläinen, 2002). Documents with equal scores keep their order, and
    a query without a relevant document counts as 0. Raises ValueError for k below 1, other shapes, negative relevance,
    scores that are NaN, and a query without documents. Equivalent to `sklearn.metrics.ndcg_score` if no scores are
    equal.
    """
    ranked = _ranked("ndcg_at_k", scores, relevance, k)
    return float(np.mean([_gain(found[:k]) / (_gain(-np.sort(-found)[:k]) or 1.0) for found in ranked]))


def mrr_at_k(scores: Any, relevance: Any, k: int = 10) -> float:
    """1 / the rank of the first relevant document, 0 if none is among the k best, averaged over queries.

    scores, relevance, errors: as for ndcg_at_k; any relevance above 0 counts the same.
    """
    hits = [np.flatnonzero(found[:k] > 0)[:1] for found in _ranked("mrr_at_k", scores, relevance, k)]
    return float(np.mean([(1 / (1 + first)).sum() for first in hits]))


def recall_at_k(scores: Any, relevance: Any, k: int = 10) -> float:
    """The share of a query's relevant documents that are among the k best, in [0, 1], averaged over queries.

    scores, relevance, errors: as for ndcg_at_k; any relevance above 0 counts the same.
    """
    relevant = [found > 0 for found in _ranked("recall_at_k", scores, relevance, k)]
    return float(np.mean([found[:k].sum() / max(found.sum(), 1) for found in relevant]))


def _gain(relevance: np.ndarray) -> float:
    return float((relevance / np.log2(np.arange(len(relevance)) + 2)).sum())


def _ranked(caller: str, scores: Any, relevance: Any, k: int) -> list[np.ndarray]:
    """Checks the arguments. Returns each query's relevance, in the order of its documents' scores, the best first."""
    _check_k(caller, k)
    if len(scores) != len(relevance) or not len(scores):
        raise ValueError(
            f"{caller}: scores of {len(scores)} queries, relevance of {len(relevance)}; expected equal numbers above 0"
        )
    return [_by_score(caller, query, *pair) for query, pair in enumerate(zip(scores, relevance, strict=True))]


def _check_k(caller: str, k: int) -> None:
    if not isinstance(k, Integral) or k < 1:
        raise ValueError(f"{caller}: k is {k}; expected a whole number, at least 1")


def _several(caller: str, k: int | Sequence[int]) -> list[int]:
    """k as a list, checked."""
    ks = list(k) if isinstance(k, Iterable) else [k]
    for one in ks or [k]:
        _check_k(caller, one)
    return ks


def _floats(given: Any) -> np.ndarray:
    return given.detach().cpu().double().numpy() if isinstance(given, Tensor) else np.asarray(given, np.float64)


def _by_score(caller: str, query: int, scores: Any, relevance: Any) -> np.ndarray:
    scores, relevance = _floats(scores), _floats(relevance)
    if scores.ndim != 1 or scores.shape != relevance.shape:
        raise ValueError(
            f"{caller}: scores[{query}] has shape {scores.shape}, relevance[{query}] {relevance.shape}; expected one "
            "number for each document"
        )
    judged = relevance != IGNORED
    scores, relevance = scores[judged], relevance[judged]
    if not len(scores) or np.isnan(scores).any() or not (relevance >= 0).all():
        raise ValueError(
            f"{caller}: query {query} has {len(scores)} documents with a relevance; expected at least one, no score "
            f"that is NaN, and no relevance below 0 but {IGNORED}"
        )
    return relevance[np.argsort(-scores, kind="stable")]


# ---- encoders of texts


def evaluate_retrieval_metrics(
    encoder: Any,
    queries: Mapping[Any, str] | Sequence[str],
    corpus: Mapping[Any, str] | Sequence[str],
    relevant: Mapping[Any, Any] | Sequence[Any],
    k: int | Sequence[int] = 10,
    *,
    query_prompt: str | None = None,
    corpus_prompt: str | None = None,
    **options: Any,
) -> dict[str, float]:
    """ndcg_at_k, mrr_at_k and recall_at_k, for each k, of an exact search for each query in the whole corpus.

    encoder: a `SentenceEncoder`, `SparseEncoder` or `MultiVectorEncoder`, whose prompts and similarity are used.
    queries, corpus: texts by id, or in order. relevant: for each query, the ids (or indices) of its relevant documents,
    or a mapping from these to their relevance. query_prompt, corpus_prompt: texts; None uses the prompts of
    `encode_query` and `encode_document`. options: for `encode`. The vectors of all texts are in memory; of a
    SentenceEncoder, scores only in blocks. Documents with equal scores keep their order, and a query without a relevant
    document counts as 0. Raises TypeError for a single text and for relevant documents that are no ids, ValueError for
    one that is not in the corpus and for queries that do not match, and what ndcg_at_k raises.
    """
    caller = "evaluate_retrieval_metrics"
    queries, corpus, relevant = (
        _by_id(caller, name, given)
        for name, given in (("queries", queries), ("corpus", corpus), ("relevant", relevant))
    )
    grades = _grades(caller, queries, corpus, relevant)
    ks = _several(caller, k)
    asked = encoder.encode_query(list(queries.values()), prompt=query_prompt, **options)
    vectors = encoder.encode_document(list(corpus.values()), prompt=corpus_prompt, **options)
    places = {document: place for place, document in enumerate(corpus)}
    scores, relevance = [], []
    best = (x.tolist() for x in _nearest(encoder, asked, vectors, max(ks)))
    for values, found, of_query in zip(*best, grades, strict=True):
        wanted = {places[document]: grade for document, grade in of_query.items()}
        missed = wanted.keys() - set(found)
        relevance.append([wanted.get(place, 0) for place in found] + [wanted[place] for place in missed])
        scores.append(values + [-math.inf] * len(missed))
    return _ranking_scores(scores, relevance, ks)


def _nearest(encoder: Any, asked: Any, vectors: Any, k: int) -> tuple[Tensor, Tensor]:
    """(scores, indices), each (N, min(k, M)), the best first. vectors: of the kind that the encoder gives."""
    if isinstance(vectors, Tensor) and vectors.layout == torch.strided:
        return nearest(asked, vectors, k, encoder.similarity)
    scores = encoder.similarity(asked, vectors)  # sparse, or several for each text
    if scores.isnan().any():
        raise ValueError("evaluate_retrieval_metrics: a score is NaN; expected numbers")
    return best_of(scores, torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1), k)


def _by_id(caller: str, name: str, given: Any) -> dict[Any, Any]:
    if isinstance(given, (str, bytes)):
        raise TypeError(f"{caller}: {name} is a {type(given).__name__}; expected several")
    return dict(given) if isinstance(given, Mapping) else dict(enumerate(given))


def _grades(caller: str, queries: Mapping, corpus: Mapping, relevant: Mapping) -> list[dict[Any, float]]:
    """For each query, in order, a mapping from the ids of its relevant documents to their relevance."""
    if not queries or queries.keys() != relevant.keys():
        first = next(iter(queries.keys() ^ relevant.keys()), None)
        raise ValueError(
            f"{caller}: {len(queries)} queries, relevant documents for {len(relevant)}"
            f"{'' if first is None else f'; only one of them has {first!r}'}; expected the same, and at least one"
        )
    found = []
    for query in queries:
        of_query = relevant[query]
        if isinstance(of_query, (str, bytes)) or not isinstance(of_query, Iterable):
            raise TypeError(f"{caller}: the relevant documents of {query!r} are {of_query!r}; expected a list of ids")
        found.append(dict(of_query) if isinstance(of_query, Mapping) else dict.fromkeys(of_query, 1))
        if flags := [document for document in found[-1] if isinstance(document, (bool, float, np.bool_))]:
            raise TypeError(f"{caller}: a relevant document of {query!r} is {flags[0]!r}; expected an id or an index")
        if unknown := found[-1].keys() - corpus.keys():
            raise ValueError(f"{caller}: query {query!r} has the document {unknown.pop()!r}, which corpus lacks")
    return found


def _ranking_scores(scores: list[list[float]], relevance: Sequence[Any], ks: list[int]) -> dict[str, float]:
    metrics = {"ndcg": ndcg_at_k, "mrr": mrr_at_k, "recall": recall_at_k}
    return {f"{name}_at_{k}": metric(scores, relevance, k) for k in ks for name, metric in metrics.items()}


def evaluate_reranking_metrics(
    ranker: Any,
    queries: Sequence[str],
    documents: Sequence[Sequence[str]],
    relevance: Sequence[Sequence[float]],
    k: int | Sequence[int] = 10,
    **options: Any,
) -> dict[str, float]:
    """ndcg_at_k, mrr_at_k and recall_at_k, for each k, of the order in which each query's own documents are ranked.

    ranker: a `CrossEncoder`, or one of the other encoders, which rank by similarity. documents: of each query, in any
    order (documents with equal scores keep it). relevance: of the same documents, as for ndcg_at_k. options: for
    `predict` or `encode`. Raises ValueError for unequal numbers, and what ndcg_at_k raises.
    """
    ks = _several("evaluate_reranking_metrics", k)
    counts = [len(of_query) for of_query in documents]
    if not len(queries) == len(documents) == len(relevance) or counts != [len(of_query) for of_query in relevance]:
        raise ValueError(
            f"evaluate_reranking_metrics: {len(queries)} queries have {sum(counts)} documents, "
            f"{len(relevance)} have {sum(map(len, relevance))} relevances; expected one for each"
        )
    texts = [text for of_query in documents for text in of_query]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    if hasattr(ranker, "predict"):
        scores = ranker.predict([(queries[place], text) for place, text in zip(owners, texts, strict=True)], **options)
    else:
        asked = ranker.encode_query(list(queries), **options)
        if isinstance(asked, Tensor):
            asked = asked.index_select(0, torch.tensor(owners, dtype=torch.int64, device=asked.device))
        else:  # several vectors for each text
            asked = [asked[place] for place in owners]
        scores = ranker.similarity_pairwise(asked, ranker.encode_document(texts, **options))
    return _ranking_scores([part.tolist() for part in scores.split(counts)], relevance, ks)


def evaluate_sts_metrics(
    encoder: Any, texts: Sequence[str], others: Sequence[str], scores: Sequence[float], **options: Any
) -> dict[str, float]:
    """spearman and pearson, in [-1, 1]: the correlation between similarities of text pairs and the scores people gave.

    encoder: a `SentenceEncoder` or `SparseEncoder`, whose similarity is used. options: for `encode`. Equal values share
    their mean rank; if all similarities are equal, both correlations are 0. Equivalent to `scipy.stats.spearmanr` and
    `pearsonr`. Raises ValueError for unequal numbers, and for scores that are not finite or all equal; TypeError for an
    encoder that encodes queries and documents differently and has no `encode`.
    """
    if not hasattr(encoder, "encode"):
        found = type(encoder).__name__
        raise TypeError(f"evaluate_sts_metrics: encoder is a {found}; expected a SentenceEncoder or SparseEncoder")
    given = np.asarray(scores, np.float64)
    if not len(texts) == len(others) == len(given) or not np.isfinite(given).all() or len(set(given.tolist())) < 2:
        raise ValueError(
            f"evaluate_sts_metrics: there are {len(texts)} and {len(others)} texts, and {len(given)} scores; expected "
            "a finite score for each pair, and two different ones at least"
        )
    pairs = (encoder.encode(list(column), **options) for column in (texts, others))
    found = encoder.similarity_pairwise(*pairs).double().cpu().numpy()
    stats = require("scipy.stats", "scipy")
    if np.ptp(found) == 0:
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(stats.spearmanr(found, given).statistic),
        "pearson": float(stats.pearsonr(found, given).statistic),
    }


# ---- plots


def plot_confusion_matrix(matrix: Any, path: str | Path, names: Sequence[str] | None = None) -> None:
    """Draws a confusion matrix (C, C), whose rows are labels, to a file. The file's suffix decides its format.

    names: of the classes; numbers when None. Raises ValueError for another shape or number of names.
    """
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"plot_confusion_matrix: matrix has shape {matrix.shape}; expected (C, C)")
    if names is not None and len(names) != len(matrix):
        raise ValueError(f"plot_confusion_matrix: {len(names)} names; expected {len(matrix)}, one for each class")
    classes, display = len(matrix), require("sklearn.metrics", "scikit-learn").ConfusionMatrixDisplay
    side = 2.5 + 0.5 * classes
    figure = new_figure(side, side)
    shown = display(matrix, display_labels=range(classes) if names is None else names)
    shown.plot(
        ax=figure.subplots(),
        cmap="Blues",
        colorbar=False,
        xticks_rotation="vertical",
        values_format="d" if np.issubdtype(matrix.dtype, np.integer) else ".2f",
    )
    save_figure(figure, path)


def plot_losses(output_dir: str | Path, path: str | Path | None = None) -> Path:
    """Draws the losses that AMPTrainer logged in output_dir to `path`, by default output_dir/losses.png. Returns the
    path.

    Raises FileNotFoundError without train.csv.
    """
    figure = new_figure(7, 4)
    axes, directory = figure.subplots(), Path(output_dir)
    for table, style in (("train", "-"), ("evaluation", "o-")):
        if table == "train" or (directory / f"{table}.csv").exists():
            with (directory / f"{table}.csv").open(newline="") as file:
                points = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row.get("loss")]
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=table)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    return save_figure(figure, directory / "losses.png" if path is None else path)
