"""Training: losses over batches of unequal size, parameter groups, ELECTRA, and a trainer that resumes bit for bit.

The same script runs under `python` and, on several GPUs, under `torchrun`::

    model = distribute(BertForMaskedLM(config))
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=5e-4), fused=True)
    scheduler = linear_schedule(optimizer, warmup_steps=1000, max_steps=20_000)
    trainer = AMPTrainer(model, optimizer, scheduler, mixed_precision="bf16", output_dir="runs/mlm")
    trainer.resume()  # from the newest checkpoint, if there is one
    trainer.train(loader, max_steps=20_000, eval_loader=held_out, eval_steps=500, save_steps=500)

A step's loss is that of one big batch, however its labels fall on micro-batches and processes: the mean over all that
is labelled in the step, not the mean of means. docs/training.md has the rest.
"""

import contextlib
import csv
import importlib
import itertools
import math
import os
import pickle
import random
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fastbert.heads import IGNORED, BertForMaskedLM, BertForPreTraining
from fastbert.ops.bias_gelu import wide

Batch = Mapping[str, Any]
_OF_PAIRS = ("next_sentence_label", "sentence_order_label")  # BERT's and ALBERT's


def require(module: str, package: str) -> ModuleType:
    """The module; ModuleNotFoundError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; to install it: pip install {package}", name=error.name) from None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while (inner := getattr(model, "_orig_mod", None)) or isinstance(model, DistributedDataParallel):
        model = inner or model.module
    return model


def to_device(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    return {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in batch.items()}


# ---- losses, and how many labels they are means over


def label_counts(model: nn.Module, batch: Batch) -> Tensor:
    """(K,) float64: the loss of the batch is a sum of K means, over so many labels each.

    A model with a loss of its own has a method `label_counts(batch)`, and the means as `losses` in its output.
    Raises ValueError for a batch without labels.
    """
    if hasattr(unwrapped(model), "label_counts"):
        return unwrapped(model).label_counts(batch)
    batch = {name: x for name, x in batch.items() if x is not None}
    counts = [_labelled(batch[name], batch) for name in ("labels", *_OF_PAIRS) if name in batch]
    if "start_positions" in batch and "end_positions" in batch:
        counts.append(sum(_answerable(batch[name], batch) for name in ("start_positions", "end_positions")) / 2)
    if not counts:
        given = ", ".join(sorted(batch))
        raise ValueError(
            f"the batch has {given}; expected labels, {' or '.join(_OF_PAIRS)}, or start_positions and end_positions"
        )
    return torch.stack(counts).double()


def _labelled(labels: Tensor, batch: Batch) -> Tensor:
    """Integers that are neither -100 nor at padding; all floats, which are of a regression or of several classes."""
    if labels.is_floating_point():
        return torch.tensor(labels.numel())
    labelled, mask = labels != IGNORED, batch.get("attention_mask")
    of_padded_tokens = mask is not None and labels.dim() == 2 and mask.shape == labels.shape
    return (labelled & (mask != 0) if of_padded_tokens else labelled).sum()


def _answerable(positions: Tensor, batch: Batch) -> Tensor:
    """How many answers are at a token: the question-answering head leaves out the others."""
    positions = positions.flatten().clamp(min=0)
    if "cu_seqlens" in batch:
        return (positions < batch["cu_seqlens"].diff()).sum()
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    column = positions.clamp(max=mask.shape[1]).unsqueeze(1)
    return F.pad(mask != 0, (0, 1)).gather(1, column).sum()


def loss_terms(out: Any, batch: Batch) -> Tensor:
    """(K,) the means whose sum is `out.loss`, in the order of `label_counts`."""
    if hasattr(out, "losses"):
        return torch.stack(out.losses)
    pairs = next((batch[name] for name in _OF_PAIRS if batch.get(name) is not None), None)
    if batch.get("labels") is None or pairs is None:
        return out.loss.reshape(1)
    logits, labels = wide(out.seq_relationship_logits), pairs.flatten().long()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    sentences = total / (labels != IGNORED).sum().clamp(min=1)
    return torch.stack([out.loss - sentences, sentences])


def compute_mlm_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The masked-LM loss of a batch, the mean over its labelled tokens: a scalar, in float32 or better.

    A loss of pairs of sentences is left out. Raises ValueError for a batch without labels.
    """
    return _forward(model, _without_pairs(_require_labels("compute_mlm_loss", batch))).loss


def compute_classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a classifier of sequences or of tokens, the mean over what is labelled: a scalar.

    Raises ValueError for a batch without labels.
    """
    return model(**_require_labels("compute_classification_loss", batch)).loss


def compute_mlm_loader_loss(model: nn.Module, loader: Iterable[Batch], device: torch.device | str) -> float:
    """The masked-LM loss of a loader, the mean over its labelled tokens. Raises ValueError where there is none."""
    labelled = (_require_labels("compute_mlm_loader_loss", batch) for batch in loader)
    return compute_loader_loss(model, map(_without_pairs, labelled), device)


def compute_loader_loss(model: nn.Module, loader: Iterable[Batch], device: torch.device | str) -> float:
    """The loss of all batches of a loader as if they were one. Raises ValueError where nothing is labelled."""
    terms, counts = [], []
    with evaluating(model):
        for batch in loader:
            counts.append(label_counts(model, batch).cpu())
            batch = to_device(batch, device)
            terms.append(loss_terms(_forward(model, batch), batch).double())
    if not counts or not torch.stack(counts).any():
        raise ValueError("the loader has no label; expected at least one")
    terms, counts = torch.stack(terms).cpu(), torch.stack(counts)
    return float(((terms.where(counts > 0, 0) * counts).sum(0) / counts.sum(0).clamp(min=1)).sum())


def _forward(model: nn.Module, batch: Batch) -> Any:
    """`model(**batch)`, without the logits of a masked-LM head, which no loss needs."""
    masked_lm = isinstance(unwrapped(model), (BertForMaskedLM, BertForPreTraining))
    return model(**batch, **({"skip_logits": True} if masked_lm else {}))


def _require_labels(caller: str, batch: Batch) -> Batch:
    if batch.get("labels") is None:
        raise ValueError(f"{caller}: the batch has {', '.join(sorted(batch))}; expected labels as well")
    return batch


def _without_pairs(batch: Batch) -> Batch:
    return {name: x for name, x in batch.items() if name not in _OF_PAIRS}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every part is in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


# ---- parameters

_LAYER = re.compile(r"(.*\blayer)\.(\d+)\b")
_EMBEDDINGS = re.compile(r".*\bembeddings(_project)?\b")


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.01, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer, of trainable parameters: no decay of biases and LayerNorms, lower rates further down.

    Heads and pooler have the rate lr, the last layer lr * layer_decay, and so on down to the embeddings (0.8 in
    ELECTRA-Base; Clark et al., 2020). Raises ValueError for a layer_decay where there is not one stack of layers.
    """
    layers = [match for name, _ in model.named_parameters() if (match := _LAYER.match(name))]
    if layer_decay != 1 and len({match[1] for match in layers}) != 1:
        stacks = len({match[1] for match in layers})
        raise ValueError(f"parameter_groups: layer_decay needs one stack of layers; the model has {stacks}")
    top = max((int(match[2]) for match in layers), default=-1) + 2
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((_depth(name, top), parameter.dim() > 1), []).append(parameter)
    rates = {depth: lr * layer_decay ** (top - depth) for depth, _ in groups}
    return [
        {"params": parameters, "lr": rates[depth], "weight_decay": weight_decay if decays else 0.0}
        for (depth, decays), parameters in groups.items()
    ]


def _depth(name: str, top: int) -> int:
    """0 for the embeddings, 1 for the first layer, `top` for what is above the last."""
    if match := _LAYER.match(name):
        return int(match[2]) + 1
    return 0 if _EMBEDDINGS.match(name) else top


def freeze(model: nn.Module, layers: int | Iterable[int] = 0, embeddings: bool = True) -> None:
    """Ends the training of the embeddings and of the lowest `layers` layers, or of those with the given indices.

    Call it before `distribute` and `parameter_groups`. Dropout in frozen layers stays. The decoder of a masked-LM head
    is the word embeddings, and is frozen with them. Raises ValueError for a layer that does not exist.
    """
    if isinstance(layers, int) and layers < 0:
        raise ValueError(f"freeze: layers is {layers}; expected at least 0")
    parts = dict(model.named_modules())
    indices = {name: int(match[2]) for name in parts if (match := _LAYER.fullmatch(name))}
    chosen = set(range(layers) if isinstance(layers, int) else layers)
    if missing := sorted(chosen - set(indices.values())):
        count = len(set(indices.values()))
        raise ValueError(f"freeze: layers has {missing}; the model has {count} layers, counted from 0")
    for name, part in parts.items():
        if indices.get(name) in chosen or (embeddings and _EMBEDDINGS.fullmatch(name)):
            part.requires_grad_(False)


def linear_schedule(optimizer: Optimizer, warmup_steps: int, max_steps: int) -> LambdaLR:
    """Rates rise from 0 in warmup_steps, then fall to 0 at max_steps.

    Equivalent to `transformers.get_linear_schedule_with_warmup`. Raises ValueError unless
    0 <= warmup_steps < max_steps.
    """
    if not 0 <= warmup_steps < max_steps:
        raise ValueError(
            f"linear_schedule: warmup_steps is {warmup_steps}; expected 0 to max_steps - 1, {max_steps - 1}"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return max(max_steps - step, 0) / (max_steps - warmup_steps)

    return LambdaLR(optimizer, factor)


# ---- several processes


def distribute(model: nn.Module, kind: str = "ddp") -> nn.Module:
    """The model on this process's GPU, if there is one for each, and shared by the processes that `torchrun` started.

    kind: "ddp" for DistributedDataParallel, "fsdp" to shard layers by FSDP2; without `torchrun` neither. All processes
    get the weights of the first, and random numbers of their own. Raises ValueError for another kind.
    """
    if kind not in ("ddp", "fsdp"):
        raise ValueError(f"distribute: kind is {kind!r}; expected 'ddp' or 'fsdp'")
    local, neighbours = (int(os.environ.get(name, only)) for name, only in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    on_gpus = torch.cuda.device_count() >= neighbours
    if on_gpus:
        torch.cuda.set_device(local)
        model.cuda()
    if "LOCAL_RANK" not in os.environ:
        return model
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(torch.initial_seed() + dist.get_rank())
    if kind == "ddp":
        return DistributedDataParallel(model)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    for layer in [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]:
        fully_shard(layer)
    return fully_shard(model)


def _whole(state: Any) -> Any:
    """What FSDP2 has sharded, gathered on the host of the first process; all have to call it."""
    if isinstance(state, Mapping):
        return {name: _whole(value) for name, value in state.items()}
    if not isinstance(state, DTensor):
        return state
    whole = state.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else None


def _sharded(value: Any, like: Any) -> Any:
    """This process's part of a whole tensor, where `like` is sharded; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# ---- ELECTRA


class ElectraPretrainingOutput(NamedTuple):
    """loss: the sum of `losses`, the generator's and the weighted one of the discriminator."""

    loss: Tensor
    losses: tuple[Tensor, Tensor]


class ElectraPretraining(nn.Module):
    """A generator that fills masks, and a discriminator that tells its tokens from real ones, trained together.

    loss = masked-LM loss + weight * replaced-token loss (Clark et al., "ELECTRA", 2020, section 2). generator: a
    BertForMaskedLM. discriminator: a BertForReplacedTokenDetection, or what takes the batch with labels (T,), 1 where a
    token was replaced, and gives the mean over all tokens as `loss`. They may share tables of one width, as in
    `discriminator.bert.embeddings.word_embeddings = generator.bert.embeddings.word_embeddings`.
    """

    def __init__(self, generator: BertForMaskedLM, discriminator: nn.Module, weight: float = 50.0) -> None:
        super().__init__()
        self.generator, self.discriminator, self.weight = generator, discriminator, weight

    def forward(
        self, input_ids: Tensor, labels: Tensor, labelled_rows: Tensor | None = None, **packed: Any
    ) -> ElectraPretrainingOutput:
        """A batch of PackingCollator: input_ids (T,) with masks, labels (T,) what is behind them, else -100.

        packed: cu_seqlens, max_seqlen, and what else both models take. Raises ValueError for padded input.
        """
        if packed.get("cu_seqlens") is None:
            raise ValueError("ElectraPretraining: expected packed input, (T,) with cu_seqlens and max_seqlen")
        rows = (labels != IGNORED).nonzero().squeeze(-1) if labelled_rows is None else labelled_rows
        body, masked = self.generator.bert, labels.index_select(0, rows)
        hidden = body(input_ids, **packed).last_hidden_state.index_select(0, rows)
        logits = wide(self.generator.cls.predictions(hidden, body.embeddings.word_embeddings.weight))
        generator_loss = F.cross_entropy(logits, masked, reduction="sum") / max(len(rows), 1)
        drawn = sample(logits)
        filled = input_ids.index_copy(0, rows, drawn)
        replaced = torch.zeros_like(labels).index_copy(0, rows, (drawn != masked).to(labels.dtype))
        discriminator_loss = self.discriminator(input_ids=filled, labels=replaced, **packed).loss
        losses = (generator_loss, self.weight * discriminator_loss)
        return ElectraPretrainingOutput(losses[0] + losses[1], losses)

    @staticmethod
    def label_counts(batch: Batch) -> Tensor:
        """Masks for the generator, all tokens for the discriminator."""
        return torch.stack([(batch["labels"] != IGNORED).sum(), torch.tensor(batch["input_ids"].numel())]).double()


@torch.no_grad()
def sample(logits: Tensor) -> Tensor:
    """(L, V) to (L,): a draw from softmax(logits) in each row, by the Gumbel-max trick."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


# ---- the trainer

_COUNTERS = ("step", "skipped_steps", "epoch", "position")


class AMPTrainer:
    """Trains whatever gives a loss as `model(**batch).loss`, in mixed precision, and resumes bit for bit.

    It writes train.csv, evaluation.csv and checkpoint-<step>.pt to output_dir. One loop without plug-ins: who wants
    more uses `transformers.Trainer` or `accelerate`, which take the same models and batches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        output_dir: str | Path,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = 1.0,
        save_total_limit: int = 2,
        tensorboard: bool = False,
        progress: bool = True,
    ) -> None:
        """mixed_precision: None computes in the dtype of the parameters; "bf16" and "fp16" under autocast, the latter
        with a GradScaler. scheduler: None for constant rates. save_total_limit: how many checkpoints are kept.

        Raises ValueError for values that make no sense, and for several processes that do not share the model.
        """
        dtypes = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
        if mixed_precision not in dtypes:
            raise ValueError(f"AMPTrainer: mixed_precision is {mixed_precision!r}; expected None, 'bf16' or 'fp16'")
        _at_least_one(gradient_accumulation_steps=gradient_accumulation_steps, save_total_limit=save_total_limit)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AMPTrainer: max_grad_norm is {max_grad_norm}; expected a positive number, or None")
        self.processes, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if self.processes > 1 and not isinstance(model, (DistributedDataParallel, FSDPModule)):
            raise ValueError(f"AMPTrainer: {self.processes} processes, each with its own model; expected `distribute`")
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.device, self.dtype = next(model.parameters()).device, dtypes[mixed_precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=mixed_precision == "fp16")
        self.accumulation, self.max_grad_norm = gradient_accumulation_steps, max_grad_norm
        self.output_dir, self.save_total_limit = Path(output_dir), save_total_limit
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.progress, self.tensorboard = progress, tensorboard
        self.step = self.skipped_steps = 0  # steps taken, and how many of them the scaler made void
        self.epoch = self.position = 0  # position: batches of this epoch that this process has had
        self.epoch_random = self.loader_state = None  # random numbers at its start; the state of a loader that has one

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
        """Trains to max_steps, counted from the first, in as many epochs as that takes. Returns the last evaluation.

        loader: of this process's share of the batches; an epoch ends with the shortest share. metric(model,
        eval_loader, device): the loss, or a dictionary whose numbers are kept; every eval_steps and at the end, in
        every process. Checkpoints are written every save_steps and at the end.
        Raises FloatingPointError for a loss that is not finite, before its step is taken; FileExistsError where
        output_dir has checkpoints of later steps; ValueError for a loader without batches or labels.
        """
        _at_least_one(max_steps=max_steps, eval_steps=eval_steps, save_steps=save_steps)
        self._clear_up()
        self.model.train()
        result: dict[str, float] = {}
        with self._logging(max_steps) as log:
            while self.step < max_steps:
                for batches in self._steps_of_the_epoch(loader):
                    log("train", self._step(batches))
                    last = self.step == max_steps
                    if eval_loader is not None and (last or _due(self.step, eval_steps)):
                        result = self.evaluate(eval_loader, metric)
                        log("evaluation", {"step": self.step, **result})
                    if last or _due(self.step, save_steps):
                        self.loader_state = loader.state_dict() if hasattr(loader, "state_dict") else None
                        self.save()
                    if last:
                        break
                else:
                    self._end_epoch()
        return result

    def evaluate(self, loader: Iterable[Batch], metric: Callable[..., Any] = compute_loader_loss) -> dict[str, float]:
        """metric(model, loader, device), in the precision of training, whose random numbers it leaves alone."""
        before = _random_state(self.device)
        with self._autocast():
            found = metric(unwrapped(self.model), loader, self.device)
        _set_random_state(before, self.device)
        values = found if isinstance(found, Mapping) else {"loss": found}
        numbers = {name: x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for name, x in values.items()}
        return {name: float(x) for name, x in numbers.items() if isinstance(x, Real)}

    # -- one step

    def _step(self, batches: list[Batch]) -> dict[str, float]:
        """One step of the optimizer on one big batch, in parts; what there is to log."""
        start = time.perf_counter()
        counts = [label_counts(self.model, batch).to(self.device) for batch in batches]
        total = self._over_processes(torch.stack(counts).sum(0)).clamp(min=1)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimizer.zero_grad()
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            batch = to_device(batch, self.device)
            with self._exchanging(i + 1 == len(batches)):
                with self._autocast():
                    terms = loss_terms(self.model(**batch), batch)
                part = (terms.where(count > 0, 0) * (count / total)).sum()  # of no label, transformers' mean is NaN
                # DDP and FSDP2 average gradients over processes, where their sum is wanted.
                self.scaler.scale(part * self.processes).backward()
            loss += part.detach()
        norm = self._clip()
        loss, norm = torch.stack([self._over_processes(loss), norm]).tolist()  # the host waits for the GPU here
        self._require_finite(loss, norm)
        rate = self.optimizer.param_groups[-1]["lr"]
        self._update()
        row = {"step": self.step, "epoch": self.epoch, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
        return row | {"skipped_steps": self.skipped_steps, "seconds": time.perf_counter() - start}

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)

    def _clip(self) -> Tensor:
        """The norm of the gradients before they are clipped."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self._parameters(), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _require_finite(self, loss: float, norm: float) -> None:
        """Gradients that are not finite are the scaler's business, where there is one."""
        if not math.isfinite(loss) or not (self.scaler.is_enabled() or math.isfinite(norm)):
            raise FloatingPointError(
                f"step {self.step + 1}: the loss is {loss}, the norm of its gradients {norm}; expected finite numbers. "
                f"The step was not taken: the weights are those of step {self.step}"
            )

    def _update(self) -> None:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.scaler.get_scale() < scale:
            self.skipped_steps += 1
        elif self.scheduler is not None:
            self.scheduler.step()

    # -- several processes

    def _over_processes(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.processes > 1:
            dist.all_reduce(x, operation)
        return x

    def _exchanging(self, now: bool) -> contextlib.AbstractContextManager:
        """DDP exchanges gradients once a step; FSDP2 after every batch, or it would hold whole gradients."""
        wait = not now and isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if wait else contextlib.nullcontext()

    # -- the place in the data

    def _steps_of_the_epoch(self, loader: Iterable[Batch]) -> Iterator[list[Batch]]:
        """The batches of one step after the other, from where the epoch was left."""
        iterator = self._open(loader)
        while True:
            batches = list(itertools.islice(iterator, self.accumulation))
            shortest = torch.tensor(len(batches), device=self.device)
            batches = batches[: int(self._over_processes(shortest, dist.ReduceOp.MIN))]
            if not batches:
                return
            self.position += len(batches)
            yield batches

    def _open(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """What is left of the epoch. A loader that cannot go on by itself runs again from the start of the epoch, with
        the random numbers of that time."""
        now = _random_state(self.device)
        self._begin_epoch(loader, now)
        goes_on = self.position > 0 and self.loader_state is not None
        if goes_on:
            loader.load_state_dict(self.loader_state)
        iterator = iter(loader)
        skipped = self.position if goes_on else sum(1 for _ in itertools.islice(iterator, self.position))
        if skipped < self.position:
            raise ValueError(f"the run is at batch {self.position} of its epoch; the loader has {skipped} batches")
        if self.position:
            _set_random_state(now, self.device)
        return iterator

    def _begin_epoch(self, loader: Iterable[Batch], now: dict[str, Any]) -> None:
        """Random numbers as they were when the epoch began, and its number to whatever in the loader wants it."""
        names = ("sampler", "batch_sampler", "dataset", "collate_fn")
        parts = [loader, *(getattr(loader, name, None) for name in names)]
        generators = [part.generator for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
        if self.position == 0:
            self.epoch_random = {**now, "loader": [generator.get_state() for generator in generators]}
        _set_random_state(self.epoch_random, self.device)
        for generator, state in zip(generators, self.epoch_random["loader"], strict=True):
            generator.set_state(state)
        for part in parts[:1] if hasattr(loader, "set_epoch") else parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)

    def _end_epoch(self) -> None:
        if self.position == 0:
            raise ValueError("train: the loader has no batch, for one of the processes; expected at least one")
        self.epoch, self.position, self.loader_state = self.epoch + 1, 0, None

    # -- checkpoints

    def checkpoints(self) -> list[Path]:
        """Those in output_dir, oldest first."""
        found = [path for path in self.output_dir.glob("checkpoint-*.pt") if path.stem[len("checkpoint-") :].isdigit()]
        return sorted(found, key=_step_of)

    def save(self) -> Path:
        """Writes a checkpoint, whole or not at all, then removes the oldest; all processes have to call it.

        Raises OSError for a full disk; the checkpoints before it are whole.
        """
        own = {"random": _random_state(self.device), "epoch_random": self.epoch_random, "loader": self.loader_state}
        everyone = [own]
        if self.processes > 1:
            everyone = [None] * self.processes
            dist.all_gather_object(everyone, own)
        state = {name: _whole(part.state_dict()) for name, part in self._parts().items()}
        state |= {name: getattr(self, name) for name in _COUNTERS}
        path = self.output_dir / f"checkpoint-{self.step:08}.pt"
        if self.rank == 0:
            _write(path, lambda file: torch.save({**state, "processes": everyone}, file))
            for old in self.checkpoints()[: -self.save_total_limit]:
                old.unlink()
        if self.processes > 1:
            dist.barrier()
        return path

    def resume(self) -> bool:
        """Goes on from the newest checkpoint in output_dir; False where there is none."""
        found = self.checkpoints()
        if found:
            self.load(found[-1])
        return bool(found)

    def load(self, path: str | Path) -> None:
        """Goes on from a checkpoint: by as many processes as wrote it, to the bits of a run without the interruption.

        Another number of processes starts the epoch again, with new random numbers and a UserWarning.
        Raises FileNotFoundError; ValueError for a corrupt file, before anything changes; RuntimeError and ValueError
        for one of another model or optimizer.
        """
        state = _read(Path(path))
        expected, parameters = unwrapped(self.model).state_dict(), dict(enumerate(self._parameters()))
        state["model"] = {name: _sharded(x, expected.get(name)) for name, x in state["model"].items()}
        for i, moments in state["optimizer"]["state"].items():
            state["optimizer"]["state"][i] = {name: _sharded(x, parameters.get(i)) for name, x in moments.items()}
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        for name in _COUNTERS:
            setattr(self, name, state[name])
        everyone = state["processes"]
        if len(everyone) == self.processes:
            own = everyone[self.rank]
            self.epoch_random, self.loader_state = own["epoch_random"], own["loader"]
            _set_random_state(own["random"], self.device)
        else:
            self.position = 0
            warnings.warn(
                f"{path} was written by {len(everyone)} processes and is read by {self.processes}: the epoch starts "
                "again, with new random numbers",
                stacklevel=2,
            )

    def _parts(self) -> dict[str, Any]:
        parts = {"model": unwrapped(self.model), "optimizer": self.optimizer, "scaler": self.scaler}
        return parts if self.scheduler is None else {**parts, "scheduler": self.scheduler}

    # -- what is logged

    @contextlib.contextmanager
    def _logging(self, max_steps: int) -> Iterator[Callable[[str, dict[str, float]], None]]:
        """log(table, row): to <table>.csv, a progress bar and TensorBoard; from the first process alone."""
        with contextlib.ExitStack() as stack:
            bar = board = None
            if self.progress and self.rank == 0:
                progress = require("rich.progress", "rich").Progress
                bar = stack.enter_context(progress(*progress.get_default_columns(), "{task.fields[shown]}"))
                task = bar.add_task("training", total=max_steps, completed=self.step, shown="")
            if self.tensorboard and self.rank == 0:
                writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
                board = stack.enter_context(writer(self.output_dir, purge_step=self.step + 1))

            def log(table: str, row: dict[str, float]) -> None:
                if self.rank == 0:
                    _append(self.output_dir / f"{table}.csv", row)
                if bar is not None and table == "train":
                    skipped = f", {self.skipped_steps} steps skipped" if self.skipped_steps else ""
                    bar.update(task, completed=self.step, shown=f"loss {row['loss']:.4f}{skipped}")
                for name, value in row.items() if board is not None else ():
                    board.add_scalar(f"{table}/{name}", value, self.step)

            yield log

    def _clear_up(self) -> None:
        """Removes what an interrupted run left: a file half written, rows after the checkpoint that this one has."""
        if later := [path.name for path in self.checkpoints() if _step_of(path) > self.step]:
            raise FileExistsError(
                f"{self.output_dir} has {later[-1]}, and this run is at step {self.step}; call resume() before "
                "train(), or choose another output_dir"
            )
        if self.rank == 0:
            for unfinished in self.output_dir.glob("checkpoint-*.pt.part"):
                unfinished.unlink()
            for table in ("train", "evaluation"):
                _keep_rows(self.output_dir / f"{table}.csv", self.step)


def _at_least_one(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"AMPTrainer: {name} is {number}; expected at least 1")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _step_of(path: Path) -> int:
    return int(path.stem[len("checkpoint-") :])


# ---- random numbers and files


def _random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, NumPy and torch, in types that `torch.load(weights_only=True)` takes."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _write(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Whole or not at all: after an error, a full disk or a kill, what was there is there still."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides a full disk in one
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    if hasattr(os, "O_DIRECTORY"):  # not on Windows; the new name, too, is to outlive a loss of power
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint, on the host, its checksums verified. Raises FileNotFoundError, ValueError for a damaged file."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except (zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint, or was cut off: {error}") from error
    if not isinstance(state, dict) or "processes" not in state:
        raise ValueError(f"{path} is {f'damaged, in {damaged}' if damaged else 'no checkpoint of AMPTrainer'}")
    return state


def _append(path: Path, row: dict[str, float]) -> None:
    with path.open("a+", newline="") as file:
        file.seek(0)
        names = next(csv.reader(file), None)
        writer = csv.DictWriter(file, names or list(row), lineterminator="\n")
        if names is None:
            writer.writeheader()
        writer.writerow(row)


def _keep_rows(path: Path, step: int) -> None:
    """Drops the rows of later steps, and a last one that was cut off."""
    if path.exists():
        header, *rows = path.read_text().splitlines(keepends=True) or [""]
        kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= step]
        _write(path, lambda file: file.write("".join([header, *kept] if kept else []).encode()))
