"""The pairs of compare_retrieval.py, from texts that ship with Python, and the measure of how well they are found.

titles: a headline has to find the text under it, in docstrings and in the language documentation.
functions: the description of a function has to find its code, from which the docstring has been removed.
Every fourth file is held out.
"""

import ast
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fastbert.cli.demo import python_documentation
from fastbert.metrics import ndcg_at_k

HELD_OUT = 400  # pairs of each kind, at most
KINDS = "titles", "functions"
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}  # not documented, or not code
HEADING = re.compile(r"^(\S.*)\n(?:\*{4,}|={4,}|-{4,})$", re.MULTILINE)
Pairs = list[tuple[str, str]]


def parts(every: int = 1) -> tuple[Pairs, dict[str, Pairs]]:
    """The pairs for training, and the held-out ones by kind; no text is in both, and none twice in a kind.

    every: uses one file in so many.
    """
    sources = [*(sections()[i::40] for i in range(40)), *standard_library()][::every]
    files = [documented(source) if isinstance(source, Path) else (source, []) for source in sources]
    training, held_out, is_held = [], {}, {}
    for kind, pairs in zip(KINDS, zip(*files, strict=True), strict=True):
        seen, found = set(), []
        for number, pair in ((number, pair) for number, of_file in enumerate(pairs) for pair in of_file):
            held = number % 4 == 0
            if seen.isdisjoint(pair) and all(is_held.setdefault(text, held) == held for text in pair):
                (found if held else training).append(pair)
            seen.update(pair)
        held_out[kind] = found[:: -(-len(found) // HELD_OUT)]
    return training, held_out


def standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return (file for file in sorted(root.rglob("*.py")) if not LEFT_OUT & set(file.relative_to(root).parts))


def sections() -> Pairs:
    """(heading, what is below it) of Python's language documentation."""
    _, *found = HEADING.split("\n\n".join(text for _, text in python_documentation()))
    return [(heading, text.strip()) for heading, text in zip(found[::2], found[1::2], strict=True) if text.strip()]


def documented(file: Path) -> tuple[Pairs, Pairs]:
    """(headline, text) of its docstrings, and (first paragraph of the docstring, code) of its functions."""
    titles, functions, source = [], [], file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        docstring = ast.get_docstring(node) if is_function or isinstance(node, ast.ClassDef | ast.Module) else None
        headline, _, text = (docstring or "").partition("\n\n")
        if len(headline) > 15 and len(text) > 100:
            titles.append((headline, text))
        if is_function and len(headline) > 30 and len(node.body) > 1:
            functions.append((headline, code_of(node, source.splitlines())))
    return titles, functions


def code_of(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    docstring = function.body[0]
    above, below = slice(function.lineno - 1, docstring.lineno - 1), slice(docstring.end_lineno, function.end_lineno)
    return "\n".join(lines[above] + lines[below])


# ---- how well they are found


def by_vectors(encode: Callable, held_out: dict[str, Pairs]) -> dict[str, float]:
    """nDCG@10 of each kind. encode: from texts to vectors of length 1, as arrays or tensors."""
    columns = {kind: zip(*pairs, strict=True) for kind, pairs in held_out.items()}
    vectors = {kind: [np.asarray(encode(list(texts))) for texts in both] for kind, both in columns.items()}
    return {kind: of_first(questions @ texts.T) for kind, (questions, texts) in vectors.items()}


def by_words(held_out: dict[str, Pairs]) -> dict[str, float]:
    """nDCG@10 of each kind by BM25, for which names are split into words: `read_text`, `readText`."""
    return {kind: of_first(bm25(*zip(*pairs, strict=True))) for kind, pairs in held_out.items()}


def bm25(questions: list[str], texts: list[str]) -> np.ndarray:
    """BM25 scores of shape (questions, texts)."""
    import bm25s

    words = lambda found: [re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", text) for text in found]  # noqa: E731
    questions, texts = (bm25s.tokenize(words(x), return_ids=False, show_progress=False) for x in (questions, texts))
    index = bm25s.BM25()
    index.index(texts, show_progress=False)
    return np.stack([index.get_scores(question) for question in questions])


def of_first(scores: np.ndarray) -> float:
    """nDCG@10 if the i-th text is the right one for the i-th question."""
    return ndcg_at_k(scores, np.eye(len(scores)))
