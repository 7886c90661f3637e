"""Evaluation mode for a block of code."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs the block in evaluation mode and without gradients; restores the mode of every submodule afterwards."""
    with keeping_modes(model), torch.no_grad():
        model.eval()
        yield


@contextlib.contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every submodule is in training or in evaluation mode as before, whatever the block has done to it."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
