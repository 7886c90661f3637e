"""Warnings that name the user's line, however many lines of libraries are between."""

import os
import sys
import warnings

_LIBRARIES = ("fastbert", "torch", "transformers")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Equivalent to `warnings.warn(message, category, stacklevel)` with the level of the nearest line outside of
    _LIBRARIES."""
    found = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = tuple(os.path.join(os.path.dirname(module.__file__), "") for module in found)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
