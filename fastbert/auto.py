"""AutoModel, AutoModelForMaskedLM, ...: by the names of `transformers`, from a directory or a configuration.

There is one class a head for all families, so there is little to choose: config.json says which family it is.
"""

from pathlib import Path
from typing import Any

from fastbert.config import BertConfig
from fastbert.heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from fastbert.model import BertModel, Saveable


class _Auto:
    """Not made: `from_pretrained` and `from_config` give a model of one of `classes`, the first that the family has."""

    classes: tuple[type[Saveable], ...] = ()

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by from_pretrained(directory) or from_config(config)")

    @classmethod
    def from_pretrained(cls, directory: str | Path, **arguments: Any) -> Saveable:
        """As from_pretrained of the class (`BertModel`, `BertForMaskedLM`, ...), with its arguments and errors.

        Raises ValueError that lists what is known for a model_type that is not, or a head that the family has not.
        """
        return cls._class(BertConfig.from_pretrained(directory)).from_pretrained(directory, **arguments)

    @classmethod
    def from_config(cls, config: BertConfig) -> Saveable:
        """A new model. Raises ValueError as from_pretrained does."""
        return cls._class(config)(config)

    @classmethod
    def _class(cls, config: BertConfig) -> type[Saveable]:
        return next((known for known in cls.classes if known.kind in config.family.heads), cls.classes[0])


class AutoModel(_Auto):
    classes = (BertModel,)


class AutoModelForPreTraining(_Auto):
    """With the heads of its own pre-training: both of BERT and ALBERT, ELECTRA's discriminator, else a masked LM."""

    classes = (BertForPreTraining, BertForReplacedTokenDetection, BertForMaskedLM)


class AutoModelForMaskedLM(_Auto):
    classes = (BertForMaskedLM,)


class AutoModelForSequenceClassification(_Auto):
    classes = (BertForSequenceClassification,)


class AutoModelForTokenClassification(_Auto):
    classes = (BertForTokenClassification,)


class AutoModelForQuestionAnswering(_Auto):
    classes = (BertForQuestionAnswering,)


class AutoModelForMultipleChoice(_Auto):
    classes = (BertForMultipleChoice,)
