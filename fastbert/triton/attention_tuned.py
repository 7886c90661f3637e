"""The tiles of attention's kernels that were fastest on a GPU. They take precedence over those in attention.py.

`python -m benchmarks.gpu.sweep` writes this file.
"""

from fastbert.triton.common import Config

# (kernel, architecture, padded head size, bits of an element, whether the tiles are few)
TUNED: dict[tuple[str, int, int, int, bool], Config | int] = {}
