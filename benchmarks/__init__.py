"""Benchmarks of fastbert: `python -m benchmarks.run`, or one case at a time with `pytest benchmarks`."""
