"""How long attention's blocks keep a GPU busy, in the order of the batch and with the longest sequences first.

    python -m benchmarks.gpu.makespan [--processors 132] [--seqlen 512] [--heads 12]

A model, not a measurement: blocks start in the order of the grid, each in the first place that becomes free. A block's
time is proportional to its scores, those of 32 more keys included, for its beginning and end. Lengths are uniform
between a tenth and nine tenths of seqlen. Prints the time until the last block ends over the time that the same work
takes if it is evenly spread; the mean of 50 batches.
"""

import argparse
import heapq
import random
from collections.abc import Iterable
from statistics import mean

OVERHEAD = 32  # keys
# name: (blocks at once on a multiprocessor, rows of a block; None where one block does all of a head)
KERNELS = {"64 rows a block": (4, 64), "128 rows a block": (2, 128), "a head a block": (1, None)}


def makespan(blocks: Iterable[float], places: int) -> float:
    ends = [0.0] * places
    for time in blocks:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def blocks(lengths: Iterable[int], heads: int, rows: int | None) -> list[float]:
    """The times of all blocks, in the order of the grid."""
    of_head = lambda length: [(rows or length) * (length + OVERHEAD)] * -(-length // (rows or length))  # noqa: E731
    return [time for length in lengths for time in of_head(length) * heads]


def ratios(places: int, rows: int | None, heads: int, lengths: list[int]) -> tuple[float, float]:
    """The ratios for both orders: of the batch, and the longest sequences first."""
    even = sum(blocks(lengths, heads, rows)) / places
    orders = lengths, sorted(lengths, reverse=True)
    return tuple(makespan(blocks(order, heads, rows), places) / even for order in orders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("processors", 132), ("seqlen", 512), ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print("| kernel | B | as they come | longest first |\n| --- | ---: | ---: | ---: |")
    for name, (at_once, rows) in KERNELS.items():
        for batch in (16, 32, 64, 128, 256, 512):
            draws = random.Random(0)
            of_length = lambda draws=draws: max(1, round(draws.uniform(0.1, 0.9) * args.seqlen))  # noqa: E731
            found = [
                ratios(args.processors * at_once, rows, args.heads, [of_length() for _ in range(batch)])
                for _ in range(50)
            ]
            means = [mean(of_order) for of_order in zip(*found, strict=True)]
            print(f"| {name} | {batch} | {' | '.join(f'{ratio:.2f}' for ratio in means)} |")


if __name__ == "__main__":
    main()
