"""Packages that only parts of fastbert need."""

import importlib
from types import ModuleType


def require(module: str, package: str) -> ModuleType:
    """The module; ModuleNotFoundError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; to install it: pip install {package}", name=error.name) from None
