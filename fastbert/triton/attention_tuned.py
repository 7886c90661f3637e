"""Tiles of attention's kernels that were the fastest on a GPU, in place of those that attention.py has.

`python -m benchmarks.gpu.sweep` writes this file.
"""

from fastbert.triton.common import Config

# (kernel, architecture, padded head size, bits of an element, whether the tiles are few)
TUNED: dict[tuple[str, int, int, int, bool], Config | int] = {}
