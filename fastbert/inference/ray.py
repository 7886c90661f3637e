"""Embeddings on several machines with Ray (https://www.ray.io), which starts workers, restarts them and feeds them.

embed_corpus(encoder, files, directory, engine=RayEngine("path/to/encoder", workers=8))
ray.data.read_parquet(...).map_batches(BatchEmbedder, fn_constructor_args=["path/to/encoder"], ...)
"""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.inference.corpus import Part, Progress, Recipe, write_part
from fastbert.inference.fingerprint import fingerprint
from fastbert.inference.sentences import SentenceEncoder
from fastbert.require import require
from fastbert.warn import warn

AHEAD = 2  # parts given to a worker: one is computed, the next one waits
PATIENCE = 60  # seconds without a worker until a warning says so
RETRIES = 5  # how often a part is tried again after its worker died


class RayEngine:
    """Runs `embed_corpus` on workers of a Ray cluster. Each loads the encoder and writes whole parts itself.

    A worker that dies is started again, and its parts are computed again: nothing is lost, and as a part is replaced
    whole, nothing is duplicated. If a worker dies on a part every time, the job ends with an error that names the part.
    Parts are given to workers that have started; others join as soon as Ray finds room for them. All machines have to
    see the encoder's directory and the corpus's under the same path.
    """

    def __init__(
        self, source: str | Path, workers: int = 1, *, num_cpus: float = 1, num_gpus: float = 0, **options: Any
    ) -> None:
        """source, options: for `SentenceEncoder.from_pretrained`, in each worker. num_cpus, num_gpus: what Ray reserves
        for each worker; num_cpus is also its number of threads, and with num_gpus its device is "cuda", unless options
        say otherwise. Raises ValueError for fewer workers than one."""
        if workers < 1:
            raise ValueError(f"RayEngine: workers is {workers}; expected at least 1")
        on_gpu = {"device": "cuda"} if num_gpus and "precision" not in options else {}
        self.source, self.workers, self.options = str(source), workers, on_gpu | options
        self.resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}

    def __call__(self, recipe: Recipe, parts: Iterator[Part], progress: Progress = None) -> None:
        """Computes and writes parts. progress: called with the number of texts of each part once it is written, in any
        order. Raises what a worker raises."""
        ray = require("ray", "ray")
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        kind = ray.remote(max_restarts=-1, max_task_retries=RETRIES, **self.resources)(_Worker)
        threads = max(1, int(self.resources["num_cpus"]))
        workers = [kind.remote(self.source, recipe, threads, self.options) for _ in range(self.workers)]
        starting = {worker.started.remote(): worker for worker in workers}
        free, running = deque(), {}

        def wait_for_one() -> None:
            """Waits until a worker has started, or has written a part."""
            done, _ = ray.wait([*running, *starting], num_returns=1, timeout=None if running else PATIENCE)
            if not done:
                return warn(
                    f"RayEngine: in {PATIENCE} s none of {self.workers} workers has started; Ray reserves "
                    f"{self.resources} for each"
                )
            if worker := starting.pop(done[0], None):
                ray.get(done)  # its error, if it could not load the encoder
                return free.extend([worker] * AHEAD)
            worker, part = running.pop(done[0])
            try:
                messages = ray.get(done[0])
            except ray.exceptions.RayActorError as error:
                if getattr(error, "actor_init_failed", False):
                    raise
                its = [part, *(other for with_, other in running.values() if with_ is worker)]
                names = " or ".join(sorted(one.path.name for one in its))
                raise RuntimeError(f"RayEngine: a worker died {RETRIES + 1} times, of {names}: {error}") from error
            for message in messages:
                warn(message)
            free.append(worker)
            if progress:
                progress(len(part.texts))

        try:
            for part in parts:
                while not free:
                    wait_for_one()
                worker = free.popleft()
                running[worker.write.remote(part)] = worker, part
            while running:
                wait_for_one()
        finally:
            for worker in workers:
                ray.kill(worker)


class _Worker:
    def __init__(self, source: str, recipe: Recipe, threads: int, options: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(threads)
        self.encoder, self.recipe = SentenceEncoder.from_pretrained(source, **options), recipe
        if fingerprint(self.encoder) != recipe.encoder:
            raise ValueError(f"RayEngine: {source} is another encoder than embed_corpus has; expected the same")

    def started(self) -> None:
        """Returns once Ray has found room for the worker, and it has loaded the encoder."""

    def write(self, part: Part) -> list[str]:
        """Writes a part. Returns its warnings for the driver to repeat, such as that texts were cut."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UserWarning)
            write_part(self.encoder, self.recipe, part)
        return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


class BatchEmbedder:
    """For `Dataset.map_batches` of Ray Data: adds a column of embeddings, float32 (rows, C), to each batch.

    With `compute=ray.data.ActorPoolStrategy(size=n)` each of n workers loads the encoder once. Other columns are kept.
    """

    def __init__(
        self,
        source: str | Path,
        column: str = "text",
        output: str = "embedding",
        prompt_name: str | None = None,
        **options: Any,
    ) -> None:
        """source, options: for `SentenceEncoder.from_pretrained`. prompt_name: None as `encode_document`."""
        self.encoder = SentenceEncoder.from_pretrained(source, **options)
        self.column, self.output = column, output
        self.prompt = {} if prompt_name is None else {"prompt_name": prompt_name}

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        texts = list(batch[self.column])
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"BatchEmbedder: {self.column} has {wrong[0]!r:.80}; expected texts")
        return {**batch, self.output: self.encoder.encode_document(texts, **self.prompt).cpu().numpy()}
