"""Parameter groups and frozen layers."""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_LAYER = re.compile(r"(.*\blayer)\.(\d+)\b")
# relative positions of DeBERTa and MPNet, and DeBERTa's convolution beside the first layer
_SHARED = re.compile(r"(.*\.)?encoder\.(rel_embeddings|LayerNorm|conv|relative_attention_bias)\b")
_EMBEDDINGS = re.compile(r".*\bembeddings(_project)?\b")


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.01, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Trainable parameters as groups for an optimizer: no weight decay for biases and LayerNorms, layer-wise rates.

    Heads and pooler get the rate lr, the last layer lr * layer_decay, the one before it lr * layer_decay², and so on to
    the embeddings (0.8 in ELECTRA-Base; Clark et al., 2020). Raises ValueError for a layer_decay above 1 or not above
    0, for one other than 1 unless the model has exactly one stack of layers, and for a negative rate or decay.
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"parameter_groups: {name} is {value}; expected a number that is not negative")
    if not 0 < layer_decay <= 1:
        raise ValueError(f"parameter_groups: layer_decay is {layer_decay}; expected a number above 0, at most 1")
    layers = [match for name, _ in model.named_parameters() if (match := _LAYER.match(name))]
    if layer_decay != 1 and len({match[1] for match in layers}) != 1:
        stacks = len({match[1] for match in layers})
        raise ValueError(f"parameter_groups: layer_decay needs one stack of layers; the model has {stacks}")
    top = max((int(match[2]) for match in layers), default=-1) + 2
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() > 1 and "relative_attention_bias" not in name
            groups.setdefault((_depth(name, top), decays), []).append(parameter)
    rates = {depth: lr * layer_decay ** (top - depth) for depth, _ in groups}
    return [
        {"params": parameters, "lr": rates[depth], "weight_decay": weight_decay if decays else 0.0}
        for (depth, decays), parameters in groups.items()
    ]


def _depth(name: str, top: int) -> int:
    """0 for embeddings and what all layers share, 1 for the first layer, `top` for the pooler and heads."""
    if match := _LAYER.match(name):
        return int(match[2]) + 1
    return 0 if _EMBEDDINGS.match(name) or _SHARED.match(name) else top


def freeze(model: nn.Module, layers: int | Iterable[int] = 0, embeddings: bool = True) -> None:
    """Freezes the embeddings and the lowest `layers` layers, or the layers with the given indices.

    Call it before `distribute` and `parameter_groups`. Frozen layers keep their dropout. A masked-LM decoder is frozen
    with the word embeddings, which it shares. Raises ValueError for a layer that does not exist.
    """
    if isinstance(layers, int) and layers < 0:
        raise ValueError(f"freeze: layers is {layers}; expected at least 0")
    parts = dict(model.named_modules())
    indices = {name: int(match[2]) for name in parts if (match := _LAYER.fullmatch(name))}
    chosen = set(range(layers) if isinstance(layers, int) else layers)
    if missing := sorted(chosen - set(indices.values())):
        count = len(set(indices.values()))
        raise ValueError(f"freeze: layers has {missing}; the model has {count} layers, counted from 0")
    for name, part in parts.items():
        if indices.get(name) in chosen or (embeddings and _EMBEDDINGS.fullmatch(name)):
            part.requires_grad_(False)
