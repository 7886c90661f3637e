"""What embedding a corpus costs: measured on this machine, and what that says about more machines.

    python -m benchmarks.corpora [--texts 4000] [--rounds 3] [--output FILE]

Passages of Python's documentation, all-MiniLM-L6-v2 in float32: by one process with all threads, and by Ray's workers
of one thread each, in turn. Beside it what only the process that gives out the work does: hashing the files, reading
them, and handing the parts over. docs/tasks/corpora.md has the model of cost; the last table is its projection, which
nobody has measured.
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import provenance
from benchmarks.options import output, positive
from fastbert.cli.demo import minilm, python_documentation
from fastbert.inference import SentenceEncoder, embed_corpus
from fastbert.inference.corpus import SHARD_ROWS, Engine, Part, Progress, Recipe, count_texts
from fastbert.inference.ray import RayEngine
from fastbert.require import require

NODES, CORPUS_GB = (1, 10, 100), 100.0


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=positive, default=4000, help="(default: 4000)")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: 3)")
    parser.add_argument("--output", type=output, metavar="FILE", help="JSON lines")
    options = parser.parse_args(words)
    head, encoder = provenance.head(), SentenceEncoder.from_pretrained(minilm())
    require("ray", "ray").init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "corpus.txt", options.texts)
        tokens = sum(map(len, encoder.tokenize(file.read_text().splitlines())))
        facts = {"texts": options.texts, "bytes": file.stat().st_size, "tokens": tokens, "workers": os.cpu_count()}
        facts |= computing(encoder, file, options.rounds) | handing(encoder, file, options.rounds)
    print(json.dumps(facts, indent=1))
    rows = [projected(facts, nodes) for nodes in NODES]
    for row in rows:
        print(json.dumps(row))
    if options.output:
        options.output.write_text("".join(json.dumps(line) + "\n" for line in (head, facts, *rows)))


def write(path: Path, count: int) -> Path:
    passages = [" ".join(text.split()) for _, text in python_documentation(200)]
    path.write_text("".join(f"{passages[i % len(passages)]}\n" for i in range(count)), encoding="utf-8")
    return path


def computing(encoder: SentenceEncoder, file: Path, rounds: int) -> dict[str, float]:
    """Seconds of the job in this process, and with as many workers as there are cores; and of workers with almost
    nothing to do, which only start and load the encoder."""
    few = write(file.with_name("few.txt"), 1)
    workers, rows = os.cpu_count(), -(-count_texts(file) // (8 * os.cpu_count()))
    jobs = {
        "seconds": lambda: embed(encoder, file, rows),
        "ray_seconds": lambda: embed(encoder, file, rows, RayEngine(minilm(), workers)),
        "ray_start_seconds": lambda: embed(encoder, few, rows, RayEngine(minilm(), workers)),
    }
    for job in jobs.values():
        job()
    return in_turn(jobs, rounds)


def handing(encoder: SentenceEncoder, file: Path, rounds: int) -> dict[str, float]:
    """Seconds of the work that one process does for all workers: hashing, reading, and pickling as Ray does."""
    large = write(file.with_name("large.txt"), 100_000)

    def hands_over(recipe: Recipe, parts: Iterator[Part], progress: Progress) -> None:
        for part in parts:
            pickle.dumps(part, protocol=5)

    jobs = {"handing_seconds": lambda: embed(encoder, large, SHARD_ROWS, hands_over)}
    return in_turn(jobs, rounds) | {"handing_bytes": large.stat().st_size}


def embed(encoder: SentenceEncoder, file: Path, rows: int, engine: Engine | None = None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        embed_corpus(encoder, file, directory, shard_rows=rows, engine=engine)


def in_turn(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Runs the jobs in turn; returns the median seconds of each."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            found[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(seconds), 3) for name, seconds in found.items()}


def projected(facts: dict[str, float], nodes: int) -> dict[str, float]:
    """Projects a corpus of CORPUS_GB onto machines like this one, without network, disk and failures."""
    part_bytes = SHARD_ROWS * facts["bytes"] / facts["texts"]
    computing = facts["ray_seconds"] - facts["ray_start_seconds"]  # seconds, all workers of a machine together
    part = part_bytes / facts["bytes"] * computing * facts["workers"]  # seconds of one worker
    parts = CORPUS_GB * 1e9 / part_bytes
    compute = parts * part / (nodes * facts["workers"]) + part / 2  # half a part: the last ones end at different times
    handing = CORPUS_GB * 1e9 / facts["handing_bytes"] * facts["handing_seconds"]
    hours = (facts["ray_start_seconds"] + max(compute, handing)) / 3600
    hours = {"hours": hours, "computing": compute / 3600, "handing": handing / 3600}
    return {"nodes": nodes} | {name: round(value, 2) for name, value in hours.items()}


if __name__ == "__main__":
    main()
