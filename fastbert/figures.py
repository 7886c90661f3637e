"""Figures by matplotlib, which is an optional package."""

from pathlib import Path
from typing import TYPE_CHECKING

from fastbert.files import replacing
from fastbert.require import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches, without a window and without pyplot's global state."""
    return require("matplotlib.figure", "matplotlib").Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Writes a figure in the format that the path's suffix names, as PNG without a suffix. Returns the path."""
    path = Path(path)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=120)
    return path
