"""A fingerprint that tells encoders apart."""

import json
from hashlib import blake2b
from typing import Any

import torch

_OF_FILES = ("architectures", "dtype", "torch_dtype", "transformers_version")  # say only how a config.json was written


def fingerprint(model: Any) -> str:
    """A hash of the weights, tokenizer and all settings of a SentenceEncoder or CrossEncoder, 16 hexadecimal digits. A
    saved encoder and the one loaded from its files have the same."""
    simple = (str, int, float, tuple, dict, torch.nn.Module, type(None))
    settings = {name: repr(value) for name, value in vars(model).items() if isinstance(value, simple)}
    facts = {name: value for name, value in model.model.config.to_dict().items() if name not in _OF_FILES}
    config = json.dumps(facts, sort_keys=True, default=str)
    found = blake2b(f"{sorted(settings.items())}{config}{model.tokenizer.to_str()}".encode(), digest_size=8)
    for part in (model.model, getattr(model, "dense", None)):
        for name, tensor in (part.state_dict() if part is not None else {}).items():
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
