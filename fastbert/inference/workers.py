"""Worker processes that embed texts for a SentenceEncoder."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing

from fastbert import backends


class EncoderWorkers:
    """Processes that share the batches of `encoder.encode(..., workers=this)`; `SentenceEncoder.workers` makes them.

    They last until `close`, or the end of a `with` block. Weights on the CPU are shared with the encoder, not copied. A
    batch is computed as the encoder itself computes it. If a worker fails or dies, an error is raised here.
    """

    def __init__(self, encoder: Any, devices: Sequence[str | torch.device]) -> None:
        """devices: one for each process. Raises the error of a process that cannot start."""
        context = multiprocessing.get_context("spawn")
        self.encoder, count = encoder, len(devices)
        self._executor = ProcessPoolExecutor(count, context, _meet, (context.Barrier(count),))
        start = (_on_host(encoder), max(1, torch.get_num_threads() // count), backends.forced())
        try:
            list(self._results([self._submit(_begin, str(device), *start) for device in devices]))
        except BaseException:
            self.close()
            raise

    def embed(self, batches: Iterable[list[list[int]]], skip: int = 0) -> Iterator[Tensor]:
        """The embeddings of each batch of tokenized texts, in order, on the CPU, as `SentenceEncoder.embed` gives them.

        Raises what a worker raises, and RuntimeError if a worker has ended.
        """
        return map(torch.from_numpy, self._results([self._submit(_embed, batch, skip) for batch in batches]))

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        try:
            return self._executor.submit(work, *arguments)
        except BrokenProcessPool:
            raise _ended() from None

    @staticmethod
    def _results(futures: list[Future]) -> Iterator[Any]:
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool:
            raise _ended() from None
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Ends the processes once they have finished their current batches."""
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> "EncoderWorkers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _ended() -> RuntimeError:
    return RuntimeError(
        "EncoderWorkers: a process has ended before its work was done: killed, out of memory, or started from a script "
        'that does not keep what it runs below `if __name__ == "__main__":`'
    )


def _on_host(encoder: Any) -> Any:
    """The encoder, or its copy on the CPU if it is on a GPU. Sending a tensor moves its storage to shared memory."""
    if encoder.device.type == "cpu":
        return encoder
    sent = copy.copy(encoder)
    sent.model, sent.dense = (copy.deepcopy(part).cpu() for part in (encoder.model, encoder.dense))
    return sent


# ---- in a worker


def _meet(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _begin(device: str, encoder: Any, threads: int, forced: tuple[tuple[str, str], ...]) -> None:
    """Sets up a worker. The encoder is sent with a task, not as a start argument: those are written to a pipe, and the
    write never returns if the process ends before it reads. A barrier makes every process run exactly one such task."""
    global _encoder, _block
    try:
        torch.set_num_threads(threads)
        if torch.device(device).type != "cpu":
            encoder.model, encoder.dense = encoder.model.to(device), encoder.dense.to(device)
        _encoder, _block = encoder, backends.backend(None, **dict(forced))
        _block.__enter__()  # never exited
    finally:
        _barrier.wait()


def _embed(batch: list[list[int]], skip: int) -> np.ndarray:
    """Returns an array, which is sent by value; a tensor would be sent as a file that is open in both processes."""
    return _encoder.embed(batch, skip).cpu().numpy()
