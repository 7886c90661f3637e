"""Filters of a corpus: functions that say whether to keep a text. At most, they remember hashes of texts."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from fastbert.data.tokenizer import text_of
from fastbert.require import require

Filter = Callable[[str], bool]
_SHINGLE, _PERMUTATIONS = 7, 128  # characters in a shingle; values in a MinHash signature


class Filtered:
    """The texts that pass all filters, read lazily. They can be iterated over once.

    read: the number of texts read so far. left_out: the number that each filter left out, by its `__name__`. `str()`
    gives both in a line. A filter sees only texts that passed the filters before it, so put the quick ones first.
    """

    def __init__(self, texts: Iterable[str], *filters: Filter) -> None:
        """Raises TypeError for a single string, and for a filter that cannot be called."""
        if isinstance(texts, str):
            raise TypeError("Filtered: texts is a str; expected several strings")
        if wrong := [each for each in filters if not callable(each)]:
            raise TypeError(f"Filtered: a filter is {wrong[0]!r}; expected a function from a text to True or False")
        self.texts, self.read, self._begun = texts, 0, False
        self.filters = [(getattr(each, "__name__", type(each).__name__), each) for each in filters]
        self.left_out = Counter({name: 0 for name, _ in self.filters})

    def __iter__(self) -> Iterator[str]:
        """Raises ValueError the second time, because filters remember the texts of the first iteration."""
        if self._begun:
            raise ValueError("Filtered: its texts were read before; expected new filters for each reading")
        self._begun = True
        for text in self.texts:
            text_of("Filtered", f"texts[{self.read}]", text)
            self.read += 1
            refusing = next((name for name, keeps in self.filters if not keeps(text)), None)
            if refusing is None:
                yield text
            else:
                self.left_out[refusing] += 1

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.left_out.items()) or "none"
        return f"{self.read - self.left_out.total()} of {self.read} texts kept; left out: {counts}"


def by_length(least: int = 1, most: float = math.inf) -> Filter:
    """Keeps texts of least to most characters, not counting white space around them.

    Raises ValueError unless 0 <= least <= most.
    """
    if not 0 <= least <= most:
        raise ValueError(f"by_length: least is {least}, most is {most}; expected 0 <= least <= most")
    return _named("by_length", lambda text: least <= len(text.strip()) <= most)


def by_letters(least: float = 0.5) -> Filter:
    """Keeps texts in which at least this share of the characters, not counting white space, are letters or marks on
    letters.

    Tables, code and rows of numbers have few letters. Raises ValueError unless 0 <= least <= 1.
    """
    if not 0 <= least <= 1:
        raise ValueError(f"by_letters: least is {least}; expected a share, 0 to 1")

    def keeps(text: str) -> bool:
        written = "".join(text.split())
        return sum(unicodedata.category(c)[0] in "LM" for c in written) >= least * len(written)

    return _named("by_letters", keeps)


def no_duplicates() -> Filter:
    """Keeps the first of equal texts. It remembers a 64-bit hash of each, about 80 bytes a text in a set.

    The probability that any two different texts of 10⁹ are taken for equal is 3 %.
    """
    seen: set[int] = set()
    return _named("no_duplicates", lambda text: _add(seen, [_hash(text.encode())]))


def no_near_duplicates(threshold: float = 0.8) -> Filter:
    """Keeps the first of texts that are nearly equal, by MinHash (Broder, 1997), with the package `datasketch`.

    Similarity is the Jaccard index of the texts' sets of 7-character substrings, ignoring case and spacing. Near the
    threshold chance decides: with a threshold of 0.8, it leaves out 1 % of the texts whose similarity to a kept text is
    0.6, 40 % at a similarity of 0.8, 93 % at 0.9. The filter remembers hashes of parts of each signature, about 1 kB a
    text. Raises ValueError unless 0 < threshold <= 0.98, ModuleNotFoundError without `datasketch`.
    """
    if not 0 < threshold <= 0.98:
        raise ValueError(f"no_near_duplicates: threshold is {threshold}; expected a number above 0, at most 0.98")
    datasketch = require("datasketch", "datasketch")
    bands = datasketch.MinHashLSH(threshold, _PERMUTATIONS).hashranges
    empty, seen = datasketch.MinHash(_PERMUTATIONS), set()

    def keeps(text: str) -> bool:
        signature, text = empty.copy(), " ".join(text.lower().split())
        starts = range(max(len(text) - _SHINGLE + 1, 1))
        signature.update_batch(list({text[i : i + _SHINGLE].encode() for i in starts}))
        values = signature.hashvalues
        return _add(seen, [_hash(values[slice(*band)].tobytes() + bytes([i])) for i, band in enumerate(bands)])

    return _named("no_near_duplicates", keeps)


def _add(seen: set[int], hashes: list[int]) -> bool:
    """Adds the hashes if all are new. Returns whether they were."""
    new = seen.isdisjoint(hashes)
    seen.update(hashes if new else ())
    return new


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _named(name: str, keeps: Filter) -> Filter:
    keeps.__name__ = name
    return keeps
