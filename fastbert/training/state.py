"""Random states and files that a run needs to continue exactly."""

import csv
import io
import pickle
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.files import write_text


def random_state(device: torch.device, generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of Python, NumPy, torch and generators, in types that `torch.load(weights_only=True)` accepts."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    state["loader"] = [generator.get_state() for generator in generators]
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(
    state: dict[str, Any], device: torch.device, generators: Sequence[torch.Generator] | None = None
) -> None:
    """Restores what `random_state` returned. generators: None leaves those of a loader as they are."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if generators is not None:
        for generator, own in zip(generators, state["loader"], strict=True):
            generator.set_state(own)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint on the host, with checksums verified. Raises FileNotFoundError; ValueError for a damaged file."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except (zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a checkpoint, or was cut off: {error}") from error
    if not isinstance(state, dict) or "processes" not in state:
        raise ValueError(f"{path} is {f'damaged, in {damaged}' if damaged else 'no checkpoint of AMPTrainer'}")
    return state


def append_row(path: Path, row: dict[str, float]) -> None:
    """Appends a row to a CSV table. New names become its last columns, empty in earlier rows."""
    with path.open("a+", newline="") as file:
        file.seek(0)
        rows = csv.DictReader(file)
        names = list(rows.fieldnames or ())
        new = [name for name in row if name not in names]
        if not new:
            csv.DictWriter(file, names, lineterminator="\n").writerow(row)
            return
        rows = [*rows, row]
    text = io.StringIO()
    writer = csv.DictWriter(text, names + new, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def keep_rows(path: Path, step: int) -> None:
    """Drops rows of later steps, and a truncated last row."""
    if path.exists():
        header, *rows = path.read_text().splitlines(keepends=True) or [""]
        kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= step]
        write_text(path, "".join([header, *kept] if kept else []))
