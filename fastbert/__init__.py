"""fastbert: BERT-family encoders without work on padding, on fused kernels."""

from fastbert import hf, ops
from fastbert.backends import backend, explain
from fastbert.config import BertConfig
from fastbert.heads import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForPreTrainingOutput,
    BertForQuestionAnswering,
    BertForQuestionAnsweringOutput,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHeadOutput,
)
from fastbert.hf import accelerate, restore
from fastbert.model import BertEncoder, BertEncoderOutput, BertModel, BertModelOutput

__version__ = "0.1.0"

__all__ = [
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
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertHeadOutput",
    "BertModel",
    "BertModelOutput",
    "__version__",
    "accelerate",
    "backend",
    "explain",
    "hf",
    "ops",
    "restore",
]
