"""Optional packages."""

import importlib
from types import ModuleType


def require(module: str, package: str) -> ModuleType:
    """Imports a module. Raises ModuleNotFoundError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; to install it: pip install {package}", name=error.name) from None
