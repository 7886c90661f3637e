"""Plots of attention weights: which tokens each token attends to, computed exactly and without dropout."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastbert.data.tokenizer import copy_of
from fastbert.figures import new_figure, save_figure
from fastbert.model import Saveable, require_ours
from fastbert.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELLED = 64  # axes are labelled with up to this many tokens


def attention_of(model: Saveable, tokenizer: Any, text: str) -> tuple[list[str], Tensor]:
    """The tokens of a text, and their attention weights (layers, heads, T, T) float32.

    model: BertModel or one with a head. Row q of a head is the softmax over the tokens that token q attends to. Raises
    ValueError for a text without tokens or longer than the model's positions, TypeError for another model or text.
    """
    require_ours("attention_of", model)
    if not isinstance(text, str):
        raise TypeError(f"attention_of: text is a {type(text).__name__}; expected a string")
    encoding, longest = copy_of(tokenizer).encode(text), model.config.max_sequence_length
    if len(encoding.ids) <= sum(encoding.special_tokens_mask) or len(encoding.ids) > longest:
        raise ValueError(
            f"attention_of: text has {len(encoding.ids)} tokens; expected some text, and at most {longest}"
        )
    return encoding.tokens, attention_weights(model, encoding.ids)


def attention_weights(model: Saveable, ids: Sequence[int]) -> Tensor:
    """The attention weights of T token ids: (layers, heads, T, T) float32 on the CPU."""
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    with evaluating(model):
        return torch.cat(model(batch, output_attentions=True).attentions).float().cpu()


def attention_figure(
    weights: Tensor | np.ndarray, tokens: Sequence[str], *, layer: int | None = None, head: int | None = None
) -> "Figure":
    """Draws attention maps in a grid of layers (rows) and heads (columns), or for one layer or head if given.

    weights: (layers, heads, T, T), any dtype and device. tokens: T names, shown if there is a single map. layer, head:
    from 0. Each map is scaled from 0 to its largest weight. Raises ValueError for other shapes and numbers.
    """
    if isinstance(weights, Tensor):
        weights = weights.detach().float().cpu()  # numpy has no bfloat16
    weights = np.asarray(weights)
    sizes = weights.shape
    if weights.ndim != 4 or sizes[2:] != (len(tokens), len(tokens)) or not weights.size:
        expected = f"(layers, heads, T, T) with T = {len(tokens)}, as tokens has"
        raise ValueError(f"attention_figure: weights has shape {sizes}; expected {expected}")
    for name, index, size in (("layer", layer, sizes[0]), ("head", head, sizes[1])):
        if index is not None and not 0 <= index < size:
            raise ValueError(f"attention_figure: {name} is {index}; expected 0 to {size - 1}")
    layers, heads = (range(size) if one is None else [one] for one, size in zip((layer, head), sizes[:2], strict=True))
    if len(layers) == len(heads) == 1:
        return _one_head(weights[layers[0], heads[0]], tokens, f"layer {layers[0]}, head {heads[0]}")
    return _grid(weights, layers, heads)


def _one_head(weights: np.ndarray, tokens: Sequence[str], title: str) -> "Figure":
    side = 2.5 + 0.22 * min(len(tokens), _LABELLED)
    figure = new_figure(side + 1, side)
    axes = figure.subplots()
    image = axes.imshow(weights, vmin=0, cmap="Blues")
    figure.colorbar(image, shrink=0.8)
    axes.set(title=title, xlabel="reads", ylabel="token")
    if len(tokens) <= _LABELLED:
        plain = [token.replace("$", r"\$") for token in tokens]  # matplotlib reads $ as the start of TeX
        axes.set_xticks(range(len(tokens)), plain, rotation=90, fontsize=8)
        axes.set_yticks(range(len(tokens)), plain, fontsize=8)
    return figure


def _grid(weights: np.ndarray, layers: Sequence[int], heads: Sequence[int]) -> "Figure":
    figure = new_figure(1 + 1.2 * len(heads), 0.8 + 1.2 * len(layers))
    for row, layer in zip(figure.subplots(len(layers), len(heads), squeeze=False), layers, strict=True):
        for axes, head in zip(row, heads, strict=True):
            axes.imshow(weights[layer, head], vmin=0, cmap="Blues")
            axes.set(xticks=[], yticks=[])
            if layer == layers[0]:
                axes.set_title(f"head {head}", fontsize=8)
        row[0].set_ylabel(f"layer {layer}", fontsize=8)
    return figure


def plot_attention(
    model: Saveable, tokenizer: Any, text: str, path: str | Path, *, layer: int | None = None, head: int | None = None
) -> Path:
    """Draws the attention of a text to a file (see `save_figure`), as `attention_of` and `attention_figure` do."""
    tokens, weights = attention_of(model, tokenizer, text)
    return save_figure(attention_figure(weights, tokens, layer=layer, head=head), path)
