"""A fingerprint that tells encoders apart."""

import json
from hashlib import blake2b
from typing import Any

import torch

# Entries that a config.json has because it was written: they say how, or repeat a CrossEncoder's activation.
_OF_FILES = ("architectures", "dtype", "torch_dtype", "transformers_version")
_OF_FILES += ("sentence_transformers", "sbert_ce_default_activation_function")
_OF_CALLERS = ("prompts", "default_prompt_name", "similarity_name")
_SIMPLE = (str, int, float, tuple, dict, type(None))


def fingerprint(model: Any, *, of_use: bool = False) -> str:
    """A hash of all that decides the vectors of a SentenceEncoder, or the scores of a CrossEncoder, for a given text:
    weights, tokenizer, settings. of_use: also of prompts and of how vectors are compared. 16 hexadecimal digits. A
    saved encoder and the one loaded from its files have the same."""
    known = {name: value for name, value in vars(model).items() if name not in _OF_CALLERS}
    settings = {name: repr(value) for name, value in known.items() if isinstance(value, _SIMPLE)}
    if of_use:
        of_callers = {name: vars(model)[name] for name in _OF_CALLERS if name in vars(model)}
        settings["use"] = json.dumps(of_callers, sort_keys=True)
    settings |= {name: type(x).__name__ for name, x in known.items() if isinstance(x, torch.nn.Module)}
    settings["layers"] = repr([(type(x.activation).__name__, x.adds) for x in getattr(model, "dense", ())])
    values = model.model.config.to_dict()
    facts = {name: value for name, value in values.items() if name not in _OF_FILES and value is not None}
    config = json.dumps(facts, sort_keys=True, default=str)
    found = blake2b(f"{sorted(settings.items())}{config}{model.tokenizer.to_str()}".encode(), digest_size=8)
    for part in (model.model, getattr(model, "dense", None)):
        for name, tensor in (part.state_dict() if part is not None else {}).items():
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()
