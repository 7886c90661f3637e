"""Trained models at work: text in, predictions or embeddings out, attention drawn, export.

    classify = TextClassifier.from_pretrained("path/to/model")
    classify(["a text", ("a text", "and its pair")])  # [[Label(label="good", score=0.98), ...], [...]]

`fastbert.inference.export` writes ONNX and torch.export files; `fastbert.graph` replays a model as CUDA graphs.
"""

from fastbert.auto import model_class_of, trained_model
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
from fastbert.inference.vectors import quantize, similarity

__all__ = [
    "Answer",
    "Answers",
    "CrossEncoder",
    "Dense",
    "Entity",
    "EntityTagger",
    "Fill",
    "Label",
    "MaskFiller",
    "QuestionAnswerer",
    "SentenceEncoder",
    "SparseEncoder",
    "TextClassifier",
    "attention_figure",
    "attention_of",
    "label_names",
    "model_class_of",
    "plot_attention",
    "quantize",
    "similarity",
    "trained_model",
]
