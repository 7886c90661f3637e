"""Inference with trained models: predictions and embeddings of texts, plots of attention, export.

    classify = TextClassifier.from_pretrained("path/to/model")
    classify(["a text", ("a text", "and its pair")])  # [[Label(label="good", score=0.98), ...], [...]]

`fastbert.inference.export` writes ONNX and torch.export files; `fastbert.graph` replays a model as CUDA graphs.
"""

from fastbert.auto import model_class_of, trained_model
from fastbert.inference.bge_m3 import M3Embeddings, M3Encoder, M3Scores
from fastbert.inference.corpus import EmbeddedCorpus, embed_corpus
from fastbert.inference.mining import HardNegatives, mine_hard_negatives
from fastbert.inference.multi_vector import MultiVectorEncoder
from fastbert.inference.multi_vector_files import QueryExpansion
from fastbert.inference.plots import attention_figure, attention_of, plot_attention
from fastbert.inference.predict import (
    Answer,
    Answers,
    Entity,
    EntityTagger,
    Fill,
    Label,
    MaskFiller,
    QuestionAnswerer,
    TextClassifier,
    label_names,
)
from fastbert.inference.rerank import CrossEncoder
from fastbert.inference.sentence_files import Dense
from fastbert.inference.sentences import SentenceEncoder
from fastbert.inference.sparse import SparseEncoder
from fastbert.inference.vectors import nearest, quantize, similarity
from fastbert.inference.workers import EncoderWorkers
from fastbert.maxsim import maxsim, maxsim_pairs
from fastbert.token_vectors import TokenVectors

__all__ = [
    "Answer",
    "Answers",
    "CrossEncoder",
    "Dense",
    "EmbeddedCorpus",
    "EncoderWorkers",
    "Entity",
    "EntityTagger",
    "Fill",
    "HardNegatives",
    "Label",
    "M3Embeddings",
    "M3Encoder",
    "M3Scores",
    "MaskFiller",
    "MultiVectorEncoder",
    "QueryExpansion",
    "QuestionAnswerer",
    "SentenceEncoder",
    "SparseEncoder",
    "TextClassifier",
    "TokenVectors",
    "attention_figure",
    "attention_of",
    "embed_corpus",
    "label_names",
    "mine_hard_negatives",
    "maxsim",
    "maxsim_pairs",
    "model_class_of",
    "nearest",
    "plot_attention",
    "quantize",
    "similarity",
    "trained_model",
]
