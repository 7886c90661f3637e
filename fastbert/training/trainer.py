"""The loop: steps, evaluations, checkpoints."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from fastbert.data.loader import BatchLoader
from fastbert.data.sampler import BatchSizeSampler, TokenBudgetSampler
from fastbert.files import alone_in, replacing
from fastbert.modes import keeping_modes
from fastbert.training.best import Best
from fastbert.training.distributed import sharded, whole
from fastbert.training.logs import TABLES, Log, keep_rows, opened_logs
from fastbert.training.losses import Batch, compute_loader_loss, label_counts, loss_terms, to_device, unwrapped
from fastbert.training.signals import Signalled, signals_put_off
from fastbert.training.state import (
    DamagedCheckpoint,
    drawing_apart,
    keeping_random_state,
    random_state,
    read_checkpoint,
    set_random_state,
    set_seed,
)
from fastbert.warn import warn

Callback = Callable[["AMPTrainer", str, dict[str, float]], Any]
Tell = Callable[[str, dict[str, float]], None]  # tells loggers and callbacks of an event
_COUNTERS = ("step", "skipped_steps", "epoch", "position")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # settings of optimizers that change no result
_STATE = "states/"  # the beginning of names of `states` in checkpoints
_SMALLEST_SCALE = 2.0**-24  # float16's smallest number: below it, scaled losses of one are 0


class Scheduler(Protocol):
    """What advances with each step: an LRScheduler of torch, a SpladeWarmup, or another object with these methods."""

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class AMPTrainer:
    """Trains a model that gives its loss as `model(**batch).loss`, in mixed precision, and resumes bit for bit.

    Writes train.csv, evaluation.csv and checkpoint-<step>.pt to output_dir. It is one loop; for more than callbacks can
    do, use `transformers.Trainer` or `accelerate`, which take the same models and batches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        output_dir: str | Path,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = 1.0,
        save_total_limit: int | None = 2,
        best: Best | None = None,
        states: Mapping[str, Any] | None = None,
        seed: int | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Log] = (),
        tensorboard: bool = False,
        progress: bool = True,
    ) -> None:
        """mixed_precision: None computes in the parameters' dtype, "bf16" and "fp16" under autocast, "fp16" with a
        GradScaler. scheduler: advances with each step; None for constant learning rates. save_total_limit: how many
        checkpoints to keep, besides the best one; None keeps all. best: which evaluation's checkpoint to keep, and when
        to stop early. states: more objects with `state_dict` and `load_state_dict` that checkpoints contain, by name,
        such as a moving average of the weights (torch.optim.swa_utils.AveragedModel).

        seed: seeds Python, NumPy and torch from here on, differently in each process; the model's weights were drawn
        before. callbacks: called as callback(trainer, event, values) in every process. Events: "begin"; "train" after
        each step and "evaluation" after each evaluation, with their numbers; "save" after a checkpoint; "end". loggers:
        called as log(values, step) in the first process, with names such as "train/loss" and "evaluation/f1".

        Raises ValueError for invalid values, for an optimizer that has none of the model's parameters, and if there are
        several processes but `distribute` was not called;
        TypeError for callbacks and loggers that cannot be called, a `best` that is no Best, a ReduceLROnPlateau, and
        `states` without these methods.
        """
        dtypes = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
        if mixed_precision not in dtypes:
            raise ValueError(f"AMPTrainer: mixed_precision is {mixed_precision!r}; expected None, 'bf16' or 'fp16'")
        _at_least_one(gradient_accumulation_steps=gradient_accumulation_steps, save_total_limit=save_total_limit)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AMPTrainer: max_grad_norm is {max_grad_norm}; expected a positive number, or None")
        if best is not None and not isinstance(best, Best):
            raise TypeError(f"AMPTrainer: best is {best!r}; expected a Best, or None")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("AMPTrainer: scheduler is a ReduceLROnPlateau, which does not advance with each step")
        self.states = _with_states(states or {})
        self.callbacks, self.loggers = _callables("callbacks", callbacks), _callables("loggers", loggers)
        self.processes, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if self.processes > 1 and not isinstance(model, (DistributedDataParallel, FSDPModule)):
            raise ValueError(f"AMPTrainer: {self.processes} processes, each with its own model; expected `distribute`")
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        if {*map(id, self._parameters())}.isdisjoint(map(id, model.parameters())):
            raise ValueError("AMPTrainer: the optimizer has no parameter of the model; expected one made from them")
        self.device, self.dtype = next(model.parameters()).device, dtypes[mixed_precision]
        self.mixed_precision = mixed_precision
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=mixed_precision == "fp16")
        self.accumulation, self.max_grad_norm = gradient_accumulation_steps, max_grad_norm
        self.output_dir, self.save_total_limit = Path(output_dir), save_total_limit
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.progress, self.tensorboard = progress, tensorboard
        self.best, self.stopping = best, False
        self.best_directory = self.output_dir  # where the checkpoint of the best evaluation is
        self.step = self.skipped_steps = 0  # steps taken, and how many of these the scaler skipped
        self.epoch = self.position = 0  # position: batches that this process has used in this epoch
        self.epoch_random = self.loader_state = None  # random state at the epoch's start; the loader's state
        self.labelled = False  # whether a step of this call of `train` had a label
        self.owes_evaluation = False  # whether the last step's evaluation is still to come
        self.loader: Iterable[Batch] | None = None  # the one that the position is in; None after `load`
        self.place: dict[str, Any] | None = None  # the counters and states after the last whole step, for checkpoints
        if seed is not None:
            set_seed(seed + self.rank)

    def train(
        self,
        loader: Iterable[Batch],
        max_steps: int,
        *,
        eval_loader: Iterable[Batch] | None = None,
        metric: Callable[..., Any] = compute_loader_loss,
        eval_steps: int | None = None,
        save_steps: int | None = None,
    ) -> dict[str, float]:
        """Trains until step max_steps, in as many epochs as that takes. Returns the last evaluation.

        loader: this process's share of the batches; an epoch ends with the shortest share. Another loader than in the
        call before starts a new epoch, except after `load`. metric(model, eval_loader, device): returns the loss, or a
        dictionary whose numbers are kept. It runs in every process, on the whole eval_loader, every eval_steps and at
        max_steps, and once if training had already ended before this call. Checkpoints are written every save_steps,
        for the best evaluation, and at the end.
        Training also ends if `stop` is called, if `best` has waited long enough, and, in all processes, if one of them
        gets SIGINT or SIGTERM: the step is finished and saved, then the signal takes its usual course
        (KeyboardInterrupt, or the end of the process). An evaluation that is due then is left to the run that goes on.
        A second signal takes its usual course at once.
        Raises FloatingPointError for a loss that is not finite, before its step is taken; FileExistsError if output_dir
        has checkpoints of later steps; RuntimeError if another run trains there; ValueError for a loader without
        batches or labels or that can be iterated only once, for a loader of fastbert.data that is shared by another
        number of processes, or an eval_loader that is shared at all, for a loader with persistent workers that is also
        eval_loader, for `best` without evaluations, and for processes that have loaded different checkpoints.
        """
        _at_least_one(max_steps=max_steps, eval_steps=eval_steps, save_steps=save_steps)
        if eval_loader is loader and getattr(loader, "persistent_workers", False):  # it would silently end the epoch
            raise ValueError("train: eval_loader is loader, whose persistent workers serve one iteration at a time")
        if eval_loader is None and (eval_steps is not None or metric is not compute_loader_loss):
            raise ValueError("train: eval_steps and metric are for evaluations; expected an eval_loader")
        if self.best is not None and (eval_loader is None or eval_steps is None):
            raise ValueError("train: best needs evaluations to choose from; expected eval_loader and eval_steps")
        self._require_a_share(loader)
        self._require_one_step()
        self._require_whole(eval_loader)
        self.model.train()
        self.stopping = False
        ended = self._ends(max_steps)
        if self.step == max_steps and self.loader is None:  # after `load`; the next call may have another loader
            self.loader = loader
        self.labelled = ended or self.position > 0  # what was in earlier steps of this epoch is not known
        owes = self.owes_evaluation and eval_loader is not None and self.step <= max_steps
        result: dict[str, float] = {}
        with self._alone(), signals_put_off() as signalled, self._telling(max_steps) as tell:
            if ended and eval_loader is not None and not owes:
                result = self.evaluate(eval_loader, metric)
            tell("begin", {})
            if owes:
                result, _ = self._evaluated(eval_loader, metric, tell)
                self._save_and(tell)
            ended = ended or self._ends(max_steps, signalled)  # a callback may have called `stop`
            for batches in () if ended else self._steps(loader, max_steps, signalled):
                row = self._step(batches)
                self._record_position(loader, len(batches))
                due = self.step == max_steps or _due(self.step, eval_steps)
                self.owes_evaluation = due and eval_loader is not None
                if self.step == max_steps:
                    self._require_labels()
                tell("train", row)
                improved = False
                if self.owes_evaluation and not self._any(signalled.number):
                    result, improved = self._evaluated(eval_loader, metric, tell)
                ended = self._ends(max_steps, signalled)
                if ended or improved or _due(self.step, save_steps):
                    self._save_and(tell)
                    ended = ended or self._ends(max_steps, signalled)
                if ended:
                    break
            else:
                if not ended:  # by a signal that killed the loader's workers
                    self._save_and(tell)
            tell("end", result)
        return result

    def stop(self) -> None:
        """Ends the training after this step, in all processes, with a checkpoint; for callbacks."""
        self.stopping = True

    def evaluate(self, loader: Iterable[Batch], metric: Callable[..., Any] = compute_loader_loss) -> dict[str, float]:
        """Runs metric(model, loader, device) in the training precision, then restores training's random states, and
        the modes (training or evaluation) of the model's parts. Raises TypeError for a metric that returns no number,
        and ValueError for a loader of fastbert.data that is shared by several processes."""
        self._require_whole(loader)
        generators = _generators(loader)  # it may be training's loader
        with keeping_modes(self.model), keeping_random_state(self.device, generators), self._autocast():
            model = self.model if isinstance(self.model, FSDPModule) else unwrapped(self.model)
            found = metric(model, loader, self.device)
        if isinstance(loader, BatchLoader):
            loader.set_epoch(loader.batch_sampler.epoch)  # it may be evaluated again
        values = found if isinstance(found, Mapping) else {"loss": found}
        numbers = {n: x.item() if isinstance(x, (Tensor, np.ndarray)) and x.ndim == 0 else x for n, x in values.items()}
        if not isinstance(found, Mapping) and not isinstance(numbers["loss"], Real):
            raise TypeError(f"evaluate: metric returned {found!r}; expected a number, or numbers by name")
        if "step" in numbers:
            raise ValueError("evaluate: metric returned a number named 'step', which is a column of its own in tables")
        return {name: float(x) for name, x in numbers.items() if isinstance(x, Real)}

    def _evaluated(
        self, loader: Iterable[Batch], metric: Callable[..., Any], tell: Tell
    ) -> tuple[dict[str, float], bool]:
        """The evaluation that the last step owes, and whether it is the best so far."""
        result = self.evaluate(loader, metric)
        improved, self.owes_evaluation = self._improves(result), False
        tell("evaluation", result)
        return result, improved

    def _improves(self, evaluation: dict[str, float]) -> bool:
        improved = self.best is not None and self.best.record(*self._largest(self.best.of(evaluation)), self.step)
        if improved:
            self.best_directory = self.output_dir
        return improved

    def _save_and(self, tell: Tell) -> None:
        self.save()
        tell("save", {})

    def _ends(self, max_steps: int, signalled: Signalled | None = None) -> bool:
        """Whether training ends here. If one process was told to stop or got a signal, it ends in all of them."""
        number = signalled.number if signalled else 0
        stopping, number = self._largest(self.stopping, number)
        if signalled:
            signalled.number = int(number)
        waited = self.best is not None and self.best.waited_long_enough
        return self.step >= max_steps or bool(stopping or number) or waited

    def _require_labels(self) -> None:
        if not self.labelled:
            raise ValueError("train: the loader has no label in any step so far; expected at least one")

    # -- one step

    def _step(self, batches: list[Batch]) -> dict[str, float]:
        """One optimizer step over several micro-batches; returns what to log."""
        start = time.perf_counter()
        counts = [label_counts(self.model, batch).to(self.device) for batch in batches]
        labels = self._over_processes(torch.stack(counts).sum(0))
        total = labels.where(labels > 0, 1)  # counts may be fractions
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimizer.zero_grad()
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            batch = to_device(batch, self.device)
            with self._exchanging(i + 1 == len(batches)):
                with self._autocast():
                    terms = loss_terms(self.model(**batch), batch)
                part = (terms.where(count > 0, 0) * (count / total)).sum()  # transformers returns NaN without labels
                if not part.requires_grad:
                    raise ValueError("train: the loss depends on frozen parameters alone; expected some to train")
                # DDP and FSDP2 average gradients over processes; the factor makes the average a sum.
                self.scaler.scale(part * self.processes).backward()
            loss += part.detach()
        norm = self._clip()
        # The host waits for the GPU here.
        loss, norm, labelled = torch.stack([self._over_processes(loss), norm, labels.sum()]).tolist()
        self._require_finite(loss, norm)
        rate = self.optimizer.param_groups[-1]["lr"]
        self._update()
        self.labelled |= labelled > 0
        row = {"epoch": self.epoch, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
        if not labelled:
            del row["loss"]  # 0 would look perfect; the cell in train.csv stays empty
        return row | {"skipped_steps": self.skipped_steps, "seconds": time.perf_counter() - start}

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)

    def _clip(self) -> Tensor:
        """Clips the gradients, and returns their norm before that."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self._parameters(), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _require_finite(self, loss: float, norm: float) -> None:
        """Raises FloatingPointError. Infinite gradients are left to the scaler, if there is one."""
        if not math.isfinite(loss) or not (self.scaler.is_enabled() or math.isfinite(norm)):
            state = self.scaler.state_dict()  # in a new scaler, as this one cannot unscale again without a step
            self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaler.is_enabled())
            self.scaler.load_state_dict(state)
            raise FloatingPointError(
                f"step {self.step + 1}: the loss is {loss}, the norm of its gradients {norm}; expected finite numbers. "
                f"The step was not taken: the weights are those of step {self.step}"
            )

    def _update(self) -> None:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.scaler.is_enabled() and self.scaler.get_scale() < _SMALLEST_SCALE:
            raise FloatingPointError(
                f"step {self.step}: gradients overflow whatever the scale of the loss, which is {scale} now; "
                f"{self.skipped_steps + 1} steps were skipped"
            )
        if self.scaler.get_scale() < scale:
            self.skipped_steps += 1
        elif self.scheduler is not None:
            self.scheduler.step()

    # -- several processes

    def _over_processes(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.processes > 1:
            dist.all_reduce(x, operation)
        return x

    def _largest(self, *numbers: float) -> list[float]:
        """For each of the numbers, the largest over all processes."""
        if self.processes == 1:
            return [*numbers]
        together = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self._over_processes(together, dist.ReduceOp.MAX).tolist()

    def _any(self, here: object) -> bool:
        """Whether something is true in one of the processes."""
        return bool(self._largest(bool(here))[0])

    def _exchanging(self, now: bool) -> contextlib.AbstractContextManager:
        """DDP exchanges gradients once a step; FSDP2 after every micro-batch, or it would hold whole gradients."""
        wait = not now and isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if wait else contextlib.nullcontext()

    def _require_a_share(self, loader: Iterable[Batch]) -> None:
        """Raises ValueError for a loader whose batches are divided among another number of processes."""
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, (BatchSizeSampler, TokenBudgetSampler)) and sampler.world_size != self.processes:
            raise ValueError(
                f"train: the loader's batches are divided among {sampler.world_size} processes, and there are "
                f"{self.processes}; expected a loader that was made after `distribute`"
            )

    def _require_whole(self, loader: Iterable[Batch] | None) -> None:
        """Raises ValueError for a loader of fastbert.data of which each process has a share."""
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, (BatchSizeSampler, TokenBudgetSampler)) and sampler.world_size != 1:
            raise ValueError(
                f"evaluate: the loader's batches are divided among {sampler.world_size} processes, each of which would "
                "evaluate its share alone; expected all batches in each: rank=0, world_size=1"
            )

    def _require_one_step(self) -> None:
        """Raises ValueError if processes are at different steps."""
        last, first = self._largest(self.step, -self.step)
        if last != -first:
            raise ValueError(
                f"train: processes are at steps {int(-first)} to {int(last)}; expected one output_dir for all of them"
            )

    # -- the place in the data

    def _steps(self, loader: Iterable[Batch], max_steps: int, signalled: Signalled) -> Iterator[list[Batch]]:
        """Yields the batches of each step, epoch after epoch, until a signal kills the loader's workers."""
        while True:
            yield from self._steps_of_the_epoch(loader, signalled)
            if self._ends(max_steps, signalled):
                return
            self._end_epoch()
            self._require_labels()

    def _steps_of_the_epoch(self, loader: Iterable[Batch], signalled: Signalled) -> Iterator[list[Batch]]:
        """Yields the batches of each step, from the current position in the epoch."""
        iterator = self._open(loader)
        while True:
            try:
                batches = list(itertools.islice(iterator, self.accumulation))
            except RuntimeError:
                if not signalled.number:  # else the signal killed the loader's workers
                    raise
                batches = []
            shortest = torch.tensor(len(batches), device=self.device)
            batches = batches[: int(self._over_processes(shortest, dist.ReduceOp.MIN))]
            if not batches:
                return
            yield batches

    def _open(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterates over the rest of the epoch."""
        now = random_state(self.device)
        if self.position > 0 and self.loader is not None and self.loader is not loader:
            self._end_epoch()
        self.loader = loader
        self._begin_epoch(loader)
        has_state = self.position > 0 and self.loader_state is not None
        iterator = self._continued(loader) if has_state else self._replayed(loader)
        if self.position:
            set_random_state(now, self.device)
        return iterator

    def _continued(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        if not hasattr(loader, "load_state_dict"):
            raise ValueError("train: the run is in an epoch of a loader with a state; expected a loader of that kind")
        loader.load_state_dict(self.loader_state)
        _draw_as_new_workers_do(loader)
        return iter(loader)

    def _replayed(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterates from the epoch's start, without the batches that were used before. A loader without a state draws
        apart from the model, and so gives the same batches."""
        if hasattr(loader, "state_dict"):
            _draw_as_new_workers_do(loader)
            iterator = iter(loader)
        else:
            iterator = drawing_apart(loader, lambda: _draw_as_new_workers_do(loader), self.device)
        skipped = sum(1 for _ in itertools.islice(iterator, self.position))
        if skipped < self.position:
            raise ValueError(f"the run is at batch {self.position} of its epoch; the loader has {skipped} batches")
        return iterator

    def _begin_epoch(self, loader: Iterable[Batch]) -> None:
        """Restores the random state of the epoch's start, and tells the loader's parts which epoch it is."""
        parts, generators = _parts_of(loader), _generators(loader)
        if self.position == 0:
            self.epoch_random = random_state(self.device, generators)
        set_random_state(self.epoch_random, self.device, generators)
        told = [loader] if hasattr(loader, "set_epoch") else parts
        for part in told:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)

    def _record_position(self, loader: Iterable[Batch], batches: int) -> None:
        """Records the position after a whole step, so that `save` can be called at any time."""
        self.position += batches
        self.loader_state = loader.state_dict() if hasattr(loader, "state_dict") else None
        self.place = self._place()

    def _place(self) -> dict[str, Any]:
        own = {"random": random_state(self.device), "epoch_random": self.epoch_random, "loader": self.loader_state}
        return {name: getattr(self, name) for name in _COUNTERS} | {"own": own}

    def _end_epoch(self) -> None:
        if self.position == 0 and self.epoch == 0:
            raise ValueError("train: the loader has no batch, for one of the processes; expected at least one")
        if self.position == 0:
            raise ValueError(
                f"train: the loader gave batches in epoch {self.epoch - 1} and none in epoch {self.epoch}; expected "
                "one that can be iterated again, as a generator cannot"
            )
        self.epoch, self.position, self.loader_state = self.epoch + 1, 0, None

    # -- checkpoints

    def checkpoints(self) -> list[Path]:
        """The checkpoints in output_dir, oldest first."""
        found = [path for path in self.output_dir.glob("checkpoint-*.pt") if path.stem[len("checkpoint-") :].isdigit()]
        return sorted(found, key=_step_of)

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, for `load`; None before the first, and without `best`."""
        return _checkpoint(self.best_directory, self.best.step) if self.best and self.best.step else None

    def save(self) -> Path:
        """Writes a checkpoint atomically, then removes the oldest, but never the best. All processes must call it.

        It may be called at any time: position and random state are those after the last whole step. Raises OSError if
        the disk is full; earlier checkpoints stay intact.
        """
        place = dict(self.place or self._place())
        everyone = [own := place.pop("own")]
        if self.processes > 1:
            everyone = [None] * self.processes
            dist.all_gather_object(everyone, own)
        state = {name: whole(part.state_dict()) for name, part in self._parts().items()}
        path = _checkpoint(self.output_dir, place["step"])
        facts = {"optimizer_class": type(self.optimizer).__name__, "owes_evaluation": self.owes_evaluation}
        facts |= {"best_directory": self._elsewhere(), **self._facts()}
        failed: OSError | None = None
        if self.rank == 0:
            try:
                self._write(path, {**state, **place, **facts, "processes": everyone})
            except OSError as error:
                failed = error
        if self._any(failed):  # all processes end, rather than wait for the first
            raise failed or OSError(f"the first process cannot write {path}")
        return path

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        with replacing(path) as file:
            torch.save(state, file)
        older = self.checkpoints()[: -self.save_total_limit] if self.save_total_limit else []
        for old in older:
            if old != self.best_checkpoint():
                old.unlink()

    def _facts(self) -> dict[str, Any]:
        """What steps depend on besides the parts. (The number of processes is in the checkpoint too.)"""
        return {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.accumulation,
            "max_grad_norm": self.max_grad_norm,
        }

    def _elsewhere(self) -> str | None:
        """The directory of the best evaluation's checkpoint, if it is not output_dir."""
        here = self.best_checkpoint() is None or self.best_directory == self.output_dir
        return None if here else str(self.best_directory.resolve())

    def resume(self) -> bool:
        """Loads the newest checkpoint in output_dir. Returns False if there is none. Raises as `load`; if the file is
        corrupt, the error names the checkpoint before it."""
        found = self.checkpoints()
        try:
            if found:
                self.load(found[-1])
        except DamagedCheckpoint as error:
            before = f"{found[-2]} is the checkpoint before it" if found[:-1] else "there is no checkpoint before it"
            raise DamagedCheckpoint(f"{error}; {before}") from error
        return bool(found)

    def load(self, path: str | Path, *, new_epoch: bool = False) -> None:
        """Continues from a checkpoint, bit for bit if there are as many processes as wrote it: with DDP, at most two
        (of more, DDP adds up gradients in another order in its first step than later).

        new_epoch: starts a new epoch, for other data than the checkpoint's. With another number of processes the epoch
        starts over with new random numbers, and a UserWarning says so. Learning rates, their schedule and the other
        settings of the optimizer are the checkpoint's; a LambdaLR with another function goes on with that one. A
        UserWarning says so where the trainer was given others, and where its precision, its accumulation or its
        max_grad_norm is not that of the checkpoint's run.
        Raises FileNotFoundError; ValueError, before anything changes, for a corrupt file, for another class of
        optimizer or other parameter groups, if only one of checkpoint and trainer has a scheduler, a scaler or one of
        `states`, or if `best` had another metric; RuntimeError for another model.
        """
        state = read_checkpoint(Path(path))
        self._require_the_same_parts(path, state)
        state["model"] = sharded(state["model"], unwrapped(self.model).state_dict())
        parameters = dict(enumerate(self._parameters()))
        for i, moments in state["optimizer"]["state"].items():
            state["optimizer"]["state"][i] = {name: sharded(x, parameters.get(i)) for name, x in moments.items()}
        for name, part in self.states.items() if isinstance(self.model, FSDPModule) else ():
            state[_STATE + name] = sharded(state[_STATE + name], part.state_dict())
        given = _settings(self.optimizer)
        for name, part in self._parts().items():
            if name in state:  # `best` may be missing, if the earlier trainer had none
                part.load_state_dict(state[name])
        for name, values in _settings(self.optimizer).items():
            if values != given.get(name, values):
                warn(f"{path}: {name} are the checkpoint's, {values}, instead of {given[name]}")
        for name, value in self._facts().items():
            if value != (before := state.get(name, value)):
                warn(f"{path} was saved with {name} {before!r}, and this trainer has {value!r}: it trains otherwise")
        scheduler = getattr(self.scheduler, "scheduler", self.scheduler)  # SpladeWarmup holds one
        if isinstance(scheduler, LambdaLR):
            _follow_functions(scheduler)
        there = Path(state.get("best_directory") or Path(path).parent)
        self.best_directory = self.output_dir if there.resolve() == self.output_dir.resolve() else there
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.owes_evaluation = state.get("owes_evaluation", False)
        self.loader = None
        everyone = state["processes"]
        if len(everyone) == self.processes:
            own = everyone[self.rank]
            self.epoch_random, self.loader_state = own["epoch_random"], own["loader"]
            set_random_state(own["random"], self.device)
        else:
            self.position = 0
            warn(
                f"{path} was written by {len(everyone)} processes and is read by {self.processes}: the epoch starts "
                "again, with new random numbers"
            )
        if new_epoch and self.position:
            self._end_epoch()
        self.place = self._place()

    def _require_the_same_parts(self, path: str | Path, state: dict[str, Any]) -> None:
        here = {"a scheduler": self.scheduler is not None, 'mixed_precision="fp16"': self.scaler.is_enabled()}
        there = {"a scheduler": "scheduler" in state, 'mixed_precision="fp16"': bool(state["scaler"])}
        for name in {*self.states, *(key.removeprefix(_STATE) for key in state if key.startswith(_STATE))}:
            here[f"states[{name!r}]"], there[f"states[{name!r}]"] = name in self.states, _STATE + name in state
        made_by, ours = state.get("optimizer_class"), type(self.optimizer).__name__
        if made_by not in (None, ours):
            raise ValueError(f"{path} was saved with {made_by} as its optimizer, and this trainer has {ours}")
        for name, saved in there.items():
            if saved != here[name]:
                was, has = ("with", "without") if saved else ("without", "with")
                raise ValueError(f"{path} was saved {was} {name}, and this trainer is {has}; expected the same")
        saved, ours = (
            [len(group["params"]) for group in groups]
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if saved != ours:
            raise ValueError(
                f"{path} was saved with groups of {saved} parameters in its optimizer, and this trainer has groups of "
                f"{ours}; expected the same, with the same parameters frozen"
            )

    def _parts(self) -> dict[str, Any]:
        optional = {"best": self.best, "scheduler": self.scheduler}
        optional |= {_STATE + name: part for name, part in self.states.items()}
        parts = {"model": unwrapped(self.model), "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part for name, part in optional.items() if part is not None} | parts

    # -- loggers and callbacks

    @contextlib.contextmanager
    def _telling(self, max_steps: int) -> Iterator[Tell]:
        """Yields tell(event, values), which calls the loggers in the first process and the callbacks in all."""
        with contextlib.ExitStack() as stack:
            logs = list(self.loggers) if self.rank == 0 else []
            if self.rank == 0:
                opened = opened_logs(self.output_dir, self.step, max_steps, self.progress, self.tensorboard)
                logs = [*stack.enter_context(opened), *logs]

            def tell(event: str, values: dict[str, float]) -> None:
                for log in logs if event in TABLES else ():
                    log({f"{event}/{name}": x for name, x in values.items()}, self.step)
                if self.callbacks:
                    with keeping_modes(self.model), keeping_random_state(self.device):
                        for callback in self.callbacks:
                            callback(self, event, values)

            yield tell

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other runs from output_dir, and clears it up."""
        with contextlib.ExitStack() as stack:
            refused: Exception | None = None
            try:
                if self.rank == 0:
                    stack.enter_context(alone_in(self.output_dir, "trains in"))
            except (RuntimeError, OSError) as error:
                refused = error
            if self._any(refused):
                raise refused or RuntimeError(f"the first process cannot train in {self.output_dir}")
            self._clear_up()
            yield

    def _clear_up(self) -> None:
        """Removes what an interrupted run left behind: unfinished files, and rows of later steps."""
        if later := [path.name for path in self.checkpoints() if _step_of(path) > self.step]:
            raise FileExistsError(
                f"{self.output_dir} has {later[-1]}, and this run is at step {self.step}; call resume() before "
                "train(), or choose another output_dir"
            )
        if self.rank == 0:
            for unfinished in self.output_dir.glob("checkpoint-*.part"):
                unfinished.unlink()
            for table in TABLES:
                last = self.step - (table == "evaluation" and self.owes_evaluation)
                keep_rows(self.output_dir / f"{table}.csv", last)


def _parts_of(loader: Iterable[Batch]) -> list[Any]:
    """The loader and its parts, which may have a `set_epoch` or a generator. Samplers may hold another, which comes
    last."""
    parts = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset", "collate_fn"))]
    samplers = parts[1:3]
    for sampler in samplers:  # which grows; some are their own
        inner = getattr(sampler, "sampler", None)
        if inner is not None and all(inner is not other for other in samplers):
            samplers.append(inner)
    return parts + samplers[2:]


def _generators(loader: Iterable[Batch]) -> list[torch.Generator]:
    found = (getattr(part, "generator", None) for part in _parts_of(loader))
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _draw_as_new_workers_do(loader: Iterable[Batch]) -> None:
    """Draws the seed that new workers would draw, if the loader has workers that go on from one epoch to the next. A
    resumed run starts its workers anew, and would otherwise draw one number more."""
    if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _settings(optimizer: Optimizer) -> dict[str, list[Any]]:
    """The settings of each group by name: the learning rates that a schedule begins with, or the present ones without a
    schedule; and the others that decide a step, unless a schedule changes them."""
    groups = optimizer.param_groups
    rates = [group.get("initial_lr", group["lr"]) for group in groups]  # None: the optimizer finds its own
    found = {"learning rates": [rate if rate is None else float(rate) for rate in rates]}
    cycled = {"betas", "momentum"} if any("base_momentum" in group for group in groups) else set()
    names = optimizer.defaults.keys() - {"lr", *_IMPLEMENTATION} - cycled
    return found | {name: [group.get(name) for group in groups] for name in sorted(names)}


def _follow_functions(scheduler: LambdaLR) -> None:
    """Sets the rates of the next step, if the scheduler's functions are not those that its loaded state was of."""
    rates = [
        base * function(scheduler.last_epoch)
        for base, function in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    if rates != scheduler.get_last_lr():
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def _with_states(states: Mapping[str, Any]) -> dict[str, Any]:
    for name, each in states.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(f"AMPTrainer: states[{name!r}] is {each!r}; expected state_dict and load_state_dict")
    return dict(states)


def _callables(name: str, given: Iterable[Any]) -> list[Any]:
    given = list(given)
    for each in given:
        if not callable(each):
            raise TypeError(f"AMPTrainer: {name} has {each!r}; expected what can be called")
    return given


def _at_least_one(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, Integral) or number < 1):
            raise ValueError(f"AMPTrainer: {name} is {number!r}; expected a whole number, at least 1")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _checkpoint(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step:08}.pt"


def _step_of(path: Path) -> int:
    return int(path.stem[len("checkpoint-") :])
