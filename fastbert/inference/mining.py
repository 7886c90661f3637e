"""Hard negatives: texts that an encoder finds similar to an anchor, and that are not among its positives."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.data.tokenizer import strings
from fastbert.inference.rerank import CrossEncoder
from fastbert.inference.sentences import SentenceEncoder
from fastbert.inference.vectors import nearest
from fastbert.model import require_class
from fastbert.warn import warn


class HardNegatives(NamedTuple):
    """columns: anchors, positives and negatives, as ContrastiveDataset takes them. scores: for each row the positive's,
    then the negatives', as MarginMSE takes a teacher's."""

    columns: dict[str, list[str]]
    scores: list[list[float]]


def mine_hard_negatives(
    encoder: SentenceEncoder,
    pairs: Mapping[str, Sequence[str]],
    corpus: Sequence[str] = (),
    *,
    num_negatives: int = 3,
    range_min: int = 0,
    range_max: int | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    sampling: str = "top",
    seed: int = 0,
    triplets: bool = False,
    cross_encoder: CrossEncoder | None = None,
    query_prompt: str | None = None,
    corpus_prompt: str | None = None,
    **options: Any,
) -> HardNegatives:
    """Finds, for each anchor, the texts that are most similar to it and are none of its positives.

    pairs: two columns, the anchors first; an anchor may come with several positives. corpus: candidates in addition to
    all positives. With p the score of the anchor's worst positive, a candidate is left out if its score is above
    max_score, below min_score, above p - absolute_margin or above p - relative_margin * |p|. Of the others, the best
    range_max are used, without the first range_min. range_max None: range_min, plus the largest number of positives,
    plus num_negatives, which counts 10 times if a bound (without a cross_encoder: one other than min_score) is given.
    sampling: "top" takes the best, "random" draws by seed.

    Scores are the encoder's similarities of normalised vectors. cross_encoder: after the search, scores positives and
    candidates anew, and only its scores count from there on. query_prompt, corpus_prompt: texts; None as `encode_query`
    and `encode_document`. options: for `encode`.

    A row has the columns "negative_1" to "negative_<num_negatives>"; rows with fewer negatives are dropped, with a
    warning. triplets: one row for each negative, in a column "negative". An anchor that is in the corpus is a candidate
    for itself; max_score can exclude it. Equivalent to `sentence_transformers.util.mine_hard_negatives`, except that
    the latter does not rescore if there are no bounds. Raises ValueError for invalid columns, numbers and sampling, for
    a cross_encoder of several labels and for scores that are NaN; TypeError for anything but text.
    """
    require_class("mine_hard_negatives", "encoder", encoder, SentenceEncoder)
    names, anchors, positives = _columns(pairs)
    bounds = _Bounds(max_score, min_score, absolute_margin, relative_margin)
    limited = any(bound is not None for bound in bounds[:1] + bounds[1 if cross_encoder else 2 :])
    most = max(Counter(anchors).values())
    if range_max is None:
        range_max = range_min + most + num_negatives * (10 if limited else 1)
    _check(num_negatives, range_min, range_max, sampling, cross_encoder)
    if prompts := {"prompt", "prompt_name"} & options.keys():
        given = f"mine_hard_negatives: {', '.join(sorted(prompts))} is given"
        raise TypeError(f"{given}; expected query_prompt and corpus_prompt, texts")
    names += _negative_names(names, num_negatives, triplets)
    corpus = list(dict.fromkeys([*strings("mine_hard_negatives", "corpus", corpus), *positives]))
    own = _places(anchors, positives, corpus)

    vectors = F.normalize(encoder.encode_document(corpus, prompt=corpus_prompt, **options), dim=-1)
    asked = F.normalize(encoder.encode_query(list(own), prompt=query_prompt, **options), dim=-1)
    scores, indices = nearest(asked, vectors, range_max + most, encoder.similarity)
    right = _of_positives(encoder, asked, vectors, own)
    if cross_encoder is not None:
        scores, right = _rescored(cross_encoder, corpus, own, indices)
    choose = partial(_top, count=num_negatives)
    if sampling == "random":
        choose = partial(_random, count=num_negatives, generator=random.Random(seed))
    rows = []
    for values, found, (anchor, places), of_own in zip(scores.cpu(), indices.cpu(), own.items(), right, strict=True):
        left = bounds.keep(values, of_own.min()) & ~torch.isin(found, torch.tensor(places))
        order = values[left].sort(descending=True, stable=True)
        ranked = list(zip(found[left][order.indices].tolist(), order.values.tolist(), strict=True))
        negatives = [(corpus[i], score) for i, score in choose(ranked[range_min:range_max])]
        rows += [(anchor, corpus[i], score, negatives) for i, score in zip(places, of_own.tolist(), strict=True)]
    least = 1 if triplets else num_negatives
    if few := sum(len(negatives) < least for *_, negatives in rows):
        warn(f"mine_hard_negatives: {few} of {len(rows)} pairs have fewer than {least} negatives: left out")
    return _result(names, rows, triplets)


class _Bounds(NamedTuple):
    largest: float | None
    least: float | None
    absolute: float | None
    relative: float | None

    def keep(self, scores: Tensor, positive: Tensor) -> Tensor:
        kept = torch.ones_like(scores, dtype=torch.bool)
        if self.absolute is not None:
            kept &= scores + self.absolute <= positive
        if self.relative is not None:
            kept &= scores <= positive - positive.abs() * self.relative
        if self.largest is not None:
            kept &= scores <= self.largest
        if self.least is not None:
            kept &= scores >= self.least
        return kept


Ranked = list[tuple[int, float]]


def _top(ranked: Ranked, count: int) -> Ranked:
    return ranked[:count]


def _random(ranked: Ranked, count: int, generator: random.Random) -> Ranked:
    """Draws from at least `count` places, as sentence-transformers does, so that a seed gives the same negatives."""
    drawn = generator.sample(range(max(len(ranked), count)), count)
    return [ranked[i] for i in sorted(drawn) if i < len(ranked)]


def _columns(pairs: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str], list[str]]:
    """The names, the anchors and the positives."""
    if not isinstance(pairs, Mapping) or len(pairs) != 2:
        given = list(pairs) if isinstance(pairs, Mapping) else type(pairs).__name__
        raise ValueError(f"mine_hard_negatives: pairs is {given!r:.80}; expected two columns of texts by their names")
    anchors, positives = (list(strings("mine_hard_negatives", name, texts)) for name, texts in pairs.items())
    if len(anchors) != len(positives) or not anchors:
        counts = f"{len(anchors)} anchors and {len(positives)} positives"
        raise ValueError(f"mine_hard_negatives: there are {counts}; expected equal numbers above 0")
    return list(pairs), anchors, positives


def _negative_names(names: list[str], count: int, triplets: bool) -> list[str]:
    """The columns of negatives beside those of the pairs."""
    negatives = ["negative"] if triplets else [f"negative_{number + 1}" for number in range(count)]
    if taken := [name for name in names if name in negatives]:
        raise ValueError(f"mine_hard_negatives: pairs has a column {taken[0]!r}, as the negatives have in the result")
    return negatives


def _check(count: int, first: int, last: int, sampling: str, cross_encoder: CrossEncoder | None) -> None:
    if not all(isinstance(n, Integral) for n in (count, first, last)) or count < 1 or first < 0 or last - first < count:
        raise ValueError(
            f"mine_hard_negatives: num_negatives is {count}, range_min {first}, range_max {last}; expected whole "
            "numbers, at least 1, at least 0, and room for num_negatives between them"
        )
    if sampling not in ("top", "random"):
        raise ValueError(f"mine_hard_negatives: sampling is {sampling!r}; expected 'top' or 'random'")
    if cross_encoder is not None and cross_encoder.config.num_labels != 1:
        labels = cross_encoder.config.num_labels
        raise ValueError(f"mine_hard_negatives: the cross_encoder's model has {labels} labels; expected one")


def _places(anchors: Iterable[str], positives: Iterable[str], corpus: list[str]) -> dict[str, list[int]]:
    """For each anchor the places of its positives in the corpus, each once."""
    place = {text: index for index, text in enumerate(corpus)}
    found: dict[str, dict[int, None]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        found.setdefault(anchor, {})[place[positive]] = None
    return {anchor: list(places) for anchor, places in found.items()}


def _of_positives(encoder: SentenceEncoder, asked: Tensor, vectors: Tensor, own: Mapping) -> Sequence[Tensor]:
    """The scores of each anchor's positives, on the CPU."""
    counts = [len(places) for places in own.values()]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    places = [place for of_anchor in own.values() for place in of_anchor]
    return encoder.similarity_pairwise(asked[rows], vectors[places]).cpu().split(counts)


def _rescored(
    cross_encoder: CrossEncoder, corpus: list[str], own: Mapping[str, list[int]], indices: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """The cross encoder's scores of the candidates, and of the positives."""

    def score(anchor: str, places: Sequence[int]) -> Tensor:
        return cross_encoder.predict([(anchor, corpus[place]) for place in places]).cpu()

    found = [score(anchor, places) for anchor, places in zip(own, indices.tolist(), strict=True)]
    return torch.stack(found), [score(anchor, places) for anchor, places in own.items()]


def _result(names: list[str], rows: list[tuple[str, str, float, list]], triplets: bool) -> HardNegatives:
    """names: of all columns of the result. Without triplets, rows that have not a negative for each are dropped."""
    if triplets:
        rows = [(*row, [negative]) for *row, negatives in rows for negative in negatives]
    else:
        rows = [row for row in rows if len(row[3]) == len(names) - 2]
    columns = {names[0]: [row[0] for row in rows], names[1]: [row[1] for row in rows]}
    for number, name in enumerate(names[2:]):
        columns[name] = [row[3][number][0] for row in rows]
    return HardNegatives(columns, [[row[2], *(score for _, score in row[3])] for row in rows])
