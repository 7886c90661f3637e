"""Worker processes that embed texts for a SentenceEncoder."""

import copy
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing

from fastbert import backends
from fastbert.prepared import held_tensors

_SECONDS = 600  # in which all workers have to start


class EncoderWorkers:
    """Processes that share the batches of `encoder.encode(..., workers=this)`; `SentenceEncoder.workers` makes them.

    They last until `close`, the end of a `with` block, or the end of this process. Weights on the CPU are shared with
    the encoder, not copied. A batch is computed as the encoder itself computes it; if the encoder has changed since, or
    if a worker fails or dies, an error is raised here.
    """

    def __init__(self, encoder: Any, devices: Sequence[str | torch.device]) -> None:
        """devices: one for each process. Raises the error of a process that cannot start, and that of an encoder that
        cannot be sent."""
        context = multiprocessing.get_context("spawn")
        self.encoder, count = encoder, len(devices)
        start = (_on_host(encoder), max(1, torch.get_num_threads() // count), backends.forced())
        sent = [_sent(str(device), *start) for device in devices]
        self._executor = ProcessPoolExecutor(count, context, _meet, (context.Barrier(count, timeout=_SECONDS),))
        try:
            list(self._results([self._submit(_begin, each) for each in sent]))
        except BaseException:
            self.close()
            raise
        self._state = _state(encoder)

    def embed(self, batches: Iterable[list[list[int]]], skip: int = 0) -> Iterator[Tensor]:
        """The embeddings of each batch of tokenized texts, in order, on the CPU, as `SentenceEncoder.embed` gives them.

        Raises what a worker raises, and RuntimeError if a worker has ended, or the encoder has other weights or another
        pooling than when they started.
        """
        if _state(self.encoder) != self._state:
            raise RuntimeError("EncoderWorkers: the encoder has changed since they started; start new ones")
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


def _sent(*arguments: Any) -> bytes:
    """The arguments of a worker's start, pickled here and not in the executor's thread, which cannot raise errors."""
    try:
        return bytes(ForkingPickler.dumps(arguments))
    except RuntimeError as error:
        if "shared memory" not in str(error) and "No space left" not in str(error):
            raise
        hint = "in a container, give it more (docker run --shm-size)"
        raise RuntimeError(f"EncoderWorkers: shared memory is too small for the weights; {hint}: {error}") from error


def _state(encoder: Any) -> tuple[Any, ...]:
    """What workers have of the encoder beside values in shared memory: changes in place reach them on CPUs alone."""
    held = *held_tensors(encoder.model), *held_tensors(encoder.dense)
    tensors = [tensor for tensor in held if tensor is not None]
    version = 0 if encoder.device.type == "cpu" else sum(tensor._version for tensor in tensors)
    places = tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors)
    return places, version, encoder._modes, encoder.normalize


# ---- in a worker


def _meet(barrier: Any) -> None:
    global _barrier
    _barrier = barrier
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    """Ends this process when the one that started it has ended, even if that was killed."""
    parent.join()
    os._exit(1)


def _begin(sent: bytes) -> None:
    """Sets up a worker. The encoder is sent with a task, not as a start argument: those are written to a pipe, and the
    write never returns if the process ends before it reads. A barrier makes every process run exactly one such task."""
    global _encoder, _block
    try:
        device, encoder, threads, forced = pickle.loads(sent)
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
