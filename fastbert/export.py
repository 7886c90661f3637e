"""`fastbert.inference.export` by its shorter name."""

from fastbert.inference.export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
