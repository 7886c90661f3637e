"""The right class for a directory or a configuration: `trained_model`, and AutoModel... as in `transformers`.

One class per head serves all families, so config.json decides: its model_type and, for `trained_model`, its
`architectures`.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fastbert import checkpoint
from fastbert.checkpoint import Checkpoint
from fastbert.config import BertConfig
from fastbert.families import Family
from fastbert.heads import (
    HEADS,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.model import BertModel, Saveable, require_class

# ---- by architecture


def trained_model(
    source: str | Path, classes: Sequence[type[Saveable]] | None = None, *, dtype: torch.dtype | str | None = None
) -> Saveable:
    """The model in a directory or by its name on the hub, in evaluation mode. Its config.json's `architectures` decide
    the class.

    classes: the accepted classes, all when None. If the configuration names no architecture, the first of them is used
    (BertModel if classes is None). dtype: as stored when None. Raises ValueError for a checkpoint of another head or
    with parameters missing, FileNotFoundError and RuntimeError as from_pretrained does.
    """
    found = checkpoint.load(source)
    model_class = model_class_of(found.config, classes, str(source))
    pooling = {"add_pooling_layer": False} if model_class is BertModel and not found.has_pooler else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* initialised anew", UserWarning)
        try:
            return model_class.from_pretrained(found, dtype=dtype, **pooling)
        except UserWarning as lack:
            raise ValueError(f"{lack}; expected a trained model") from None


def model_class_of(
    config: BertConfig, classes: Sequence[type[Saveable]] | None = None, owner: str = "the configuration"
) -> type[Saveable]:
    """The class that a configuration's `architectures` name. Raises ValueError if it is not one of `classes`."""
    names, known = config.extra.get("architectures") or (), classes_of(config.family, classes)
    if names and not known.keys() & set(names):
        expected = " or ".join(known) or f"a head that {config.family.name} has"
        raise ValueError(f"{owner}: architectures is {', '.join(names)}; expected {expected}")
    return next((known[name] for name in names if name in known), (classes or (BertModel,))[0])


def classes_of(family: Family, classes: Sequence[type[Saveable]] | None = None) -> dict[str, type[Saveable]]:
    """The classes (of all when None) that the family has, by `transformers`' names for them."""
    classes = (BertModel, *HEADS) if classes is None else classes
    return {family.class_name(c.kind): c for c in classes if c is BertModel or c.kind in family.heads}


# ---- by task


M = TypeVar("M", bound=Saveable)


class _Auto(Generic[M]):
    """`from_pretrained` and `from_config` return a model of the first of `classes` that the family has."""

    classes: tuple[type[M], ...] = ()

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by from_pretrained(source) or from_config(config)")

    @classmethod
    def from_pretrained(cls, source: str | Path | Checkpoint, **arguments: Any) -> M:
        """Calls the class's from_pretrained (`BertModel`, `BertForMaskedLM`, ...), with its arguments and errors.

        Raises ValueError for an unknown model_type or a head that the family lacks, and lists those that exist.
        """
        found = checkpoint.load(source)
        return cls._class(found.config).from_pretrained(found, **arguments)

    @classmethod
    def from_config(cls, config: BertConfig) -> M:
        """A new model. Raises ValueError as from_pretrained does, and TypeError for another library's configuration."""
        require_class(cls.__name__, "config", config, BertConfig)
        return cls._class(config)(config)

    @classmethod
    def _class(cls, config: BertConfig) -> type[M]:
        return next((known for known in cls.classes if known.kind in config.family.heads), cls.classes[0])


class AutoModel(_Auto[BertModel]):
    classes = (BertModel,)


class AutoModelForPreTraining(_Auto[BertForPreTraining | BertForReplacedTokenDetection | BertForMaskedLM]):
    """Models with the family's pre-training heads: both for BERT and ALBERT, ELECTRA's discriminator, else a masked
    LM."""

    classes = (BertForPreTraining, BertForReplacedTokenDetection, BertForMaskedLM)


class AutoModelForMaskedLM(_Auto[BertForMaskedLM]):
    classes = (BertForMaskedLM,)


class AutoModelForSequenceClassification(_Auto[BertForSequenceClassification]):
    classes = (BertForSequenceClassification,)


class AutoModelForTokenClassification(_Auto[BertForTokenClassification]):
    classes = (BertForTokenClassification,)


class AutoModelForQuestionAnswering(_Auto[BertForQuestionAnswering]):
    classes = (BertForQuestionAnswering,)


class AutoModelForMultipleChoice(_Auto[BertForMultipleChoice]):
    classes = (BertForMultipleChoice,)
