"""Hugging Face in and out."""

from torch import Tensor

from fastbert import checkpoint
from fastbert.model import BertEncoder, BertModel


def state_dict(model: BertModel | BertEncoder) -> dict[str, Tensor]:
    """The parameters of one of our modules under Hugging Face's names, bit for bit."""
    return checkpoint.to_hugging_face(model.state_dict())
