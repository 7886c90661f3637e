"""fastbert: BERT-family encoders on fused kernels, without computation on padding."""

import importlib
from types import ModuleType

from fastbert import hf, ops
from fastbert.auto import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from fastbert.backends import backend, explain
from fastbert.config import BertConfig, create_model_config
from fastbert.graphs import graph
from fastbert.heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForPreTrainingOutput,
    BertForQuestionAnswering,
    BertForQuestionAnsweringOutput,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForSparseEmbedding,
    BertForTokenClassification,
    BertHeadOutput,
)
from fastbert.hf import accelerate, restore
from fastbert.model import BertEncoder, BertEncoderOutput, BertModel, BertModelOutput, count_parameters
from fastbert.preparation import prepare

__version__ = "0.1.0"

_LAZY = ("cli", "data", "inference", "metrics", "training")  # imported on first access, e.g. `fastbert.data`


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"fastbert.{name}")
    raise AttributeError(f"module 'fastbert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "BertConfig",
    "BertEncoder",
    "BertEncoderOutput",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForPreTrainingOutput",
    "BertForQuestionAnswering",
    "BertForQuestionAnsweringOutput",
    "BertForReplacedTokenDetection",
    "BertForSequenceClassification",
    "BertForSparseEmbedding",
    "BertForTokenClassification",
    "BertHeadOutput",
    "BertModel",
    "BertModelOutput",
    "__version__",
    "accelerate",
    "backend",
    "count_parameters",
    "create_model_config",
    "explain",
    "graph",
    "hf",
    "ops",
    "prepare",
    "restore",
]
