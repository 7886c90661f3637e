"""`fastbert.inference.sentences` by its shorter name."""

from fastbert.inference.sentences import SentenceEncoder, batches

__all__ = ["SentenceEncoder", "batches"]
