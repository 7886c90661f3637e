"""Random states and checkpoint files, which a run needs to resume exactly."""

import pickle
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch. Raises ValueError unless seed is an integer from 0 to 2³² - 1."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 32:
        raise ValueError(f"set_seed: seed is {seed!r}; expected an integer from 0 to 2**32 - 1")
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


def random_state(device: torch.device, generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of Python, NumPy, torch and the generators, in types that `torch.load(weights_only=True)` accepts."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    state["loader"] = [generator.get_state() for generator in generators]
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(
    state: dict[str, Any], device: torch.device, generators: Sequence[torch.Generator] | None = None
) -> None:
    """Restores what `random_state` returned. generators: None leaves a loader's generators unchanged."""
    if generators is not None and len(generators) != len(state["loader"]):
        raise ValueError(
            f"the state is of a loader with {len(state['loader'])} random generators, this one has {len(generators)}; "
            "expected a loader of the same kind, or load(path, new_epoch=True)"
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if generators is not None:
        for generator, own in zip(generators, state["loader"], strict=True):
            generator.set_state(own)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def keeping_random_state(device: torch.device, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restores the random state when the block ends: numbers drawn within it change nothing after it."""
    before = random_state(device, generators)
    try:
        yield
    finally:
        set_random_state(before, device, generators)


def drawing_apart(loader: Iterable[T], start: Callable[[], Any], device: torch.device) -> Iterator[T]:
    """Iterates over the loader, after start(), with random states of its own: neither what a model draws between its
    items nor what it draws changes the other. One number of torch's generator decides them."""
    host = torch.device("cpu")
    seed = int(torch.empty((), dtype=torch.int64).random_(1 << 32))
    with keeping_random_state(device):
        set_seed(seed)
        start()
        iterator, own = iter(loader), random_state(host)
    while True:
        with keeping_random_state(host):
            set_random_state(own, host)
            try:
                item = next(iterator)
            except StopIteration:
                return
            own = random_state(host)
        yield item


class DamagedCheckpoint(ValueError):
    """A file that is no checkpoint, or is damaged."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint to the host, checksums verified. Raises FileNotFoundError and DamagedCheckpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except (zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedCheckpoint(f"{path} is not a checkpoint, or was cut off: {error}") from error
    if not isinstance(state, dict) or "processes" not in state:
        raise DamagedCheckpoint(f"{path} is {f'damaged, in {damaged}' if damaged else 'no checkpoint of AMPTrainer'}")
    return state
