"""Losses of batches of unequal size, and the number of labels behind each."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastbert.labels import IGNORED, PAIRS, POSITIONS
from fastbert.modes import evaluating
from fastbert.ops.numbers import wide

Batch = Mapping[str, Any]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while (inner := getattr(model, "_orig_mod", None)) or isinstance(model, DistributedDataParallel):
        model = inner or model.module
    return model


def to_device(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    return {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in batch.items()}


def label_counts(model: nn.Module, batch: Batch) -> Tensor:
    """(K,) float64: the number of labels behind each of the K means whose sum is the batch's loss.

    A model with another loss defines a method `label_counts(batch)` and returns the means as `losses` in its output.
    Raises ValueError for a batch without labels, TypeError for anything but a batch.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"the loader gave a {type(batch).__name__}; expected batches, the model's arguments by name")
    if hasattr(unwrapped(model), "label_counts"):
        return unwrapped(model).label_counts(batch)
    batch = {name: x for name, x in batch.items() if x is not None}
    every = _every_number_counts(model)
    counts = [_labelled(batch[name], batch, every) for name in ("labels", *PAIRS) if name in batch]
    if all(name in batch for name in POSITIONS):
        counts.append(sum(_answerable(batch[name], batch) for name in POSITIONS) / 2)
    if not counts:
        given = ", ".join(sorted(batch))
        raise ValueError(f"the batch has {given}; expected labels, {' or '.join(PAIRS)}, or {' and '.join(POSITIONS)}")
    return torch.stack(counts).double()


def _every_number_counts(model: nn.Module) -> bool:
    """Whether labels, integers too, are the targets of a regression or of one yes or no for each class."""
    model = unwrapped(model)
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    of_sequences = type(model).__name__.endswith("ForSequenceClassification")  # peft's, ours and transformers'
    return of_sequences and problem in ("regression", "multi_label_classification")


def _labelled(labels: Tensor, batch: Batch, every: bool) -> Tensor:
    """Counts integer labels that are neither -100 nor at padding; all of them if `every`, and all float labels."""
    if not isinstance(labels, Tensor):
        given = f"labels are a {type(labels).__name__}"
        raise TypeError(f"{given}; expected a tensor: a data set gives examples, a loader makes batches of them")
    if every or labels.is_floating_point():
        return torch.tensor(labels.numel())
    labelled, mask = labels != IGNORED, batch.get("attention_mask")
    of_padded_tokens = mask is not None and labels.dim() == 2 and mask.shape == labels.shape
    return (labelled & (mask != 0) if of_padded_tokens else labelled).sum()


def _answerable(positions: Tensor, batch: Batch) -> Tensor:
    """How many of the positions are at a token; the question-answering head ignores the others."""
    positions = positions.flatten().clamp(min=0)
    if "cu_seqlens" in batch:
        return (positions < batch["cu_seqlens"].diff()).sum()
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    column = positions.clamp(max=mask.shape[1]).unsqueeze(1)
    return F.pad(mask != 0, (0, 1)).gather(1, column).sum()


def loss_terms(out: Any, batch: Batch) -> Tensor:
    """(K,): the means whose sum is `out.loss`, in the order of `label_counts`."""
    if hasattr(out, "losses"):
        return torch.stack(out.losses)
    pairs = next((batch[name] for name in PAIRS if batch.get(name) is not None), None)
    loss = loss_of(out, batch)
    if batch.get("labels") is None or pairs is None:
        return loss.reshape(1)
    logits = out.sop_logits if hasattr(out, "sop_logits") else out.seq_relationship_logits  # ALBERT of transformers
    labels = pairs.flatten().long()
    total = F.cross_entropy(wide(logits), labels, ignore_index=IGNORED, reduction="sum")
    sentences = total / (labels != IGNORED).sum().clamp(min=1)
    return torch.stack([loss - sentences, sentences])


def loss_of(out: Any, batch: Batch) -> Tensor:
    """`out.loss`, or `out["loss"]` of a dict. Raises ValueError if there is none, because the head needs labels that
    the batch does not have."""
    loss = out.get("loss") if type(out) is dict else out.loss
    if loss is None:
        raise ValueError(f"the batch has {', '.join(sorted(batch))}, and the model gave no loss; expected its labels")
    return loss


def compute_mlm_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The masked-LM loss of a batch: a scalar in float32 or better, the mean over labelled tokens.

    Sentence-pair losses are not included. Raises ValueError for a batch without labels or a model without a loss.
    """
    batch = _without_pairs(_require_labels("compute_mlm_loss", batch))
    return loss_of(_forward(model, batch), batch)


def compute_classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a sequence or token classifier: a scalar, the mean over labels.

    Raises ValueError for a batch without labels.
    """
    return loss_of(model(**_require_labels("compute_classification_loss", batch)), batch)


def compute_mlm_loader_loss(model: nn.Module, loader: Iterable[Batch], device: torch.device | str) -> float:
    """The masked-LM loss over a loader: the mean over labelled tokens. Raises ValueError if there are none."""
    labelled = (_require_labels("compute_mlm_loader_loss", batch) for batch in loader)
    return compute_loader_loss(model, map(_without_pairs, labelled), device)


def compute_loader_loss(model: nn.Module, loader: Iterable[Batch], device: torch.device | str) -> float:
    """The loss over a loader, as if all its batches were one. Raises ValueError if nothing is labelled."""
    terms, counts = [], []
    with evaluating(model):
        for batch in loader:
            counts.append(label_counts(model, batch).cpu())
            batch = to_device(batch, device)
            terms.append(loss_terms(_forward(model, batch), batch).double())
    if not counts or not torch.stack(counts).any():
        raise ValueError("the loader has no label; expected at least one")
    terms, counts = torch.stack(terms).cpu(), torch.stack(counts)
    total = counts.sum(0)
    return float(((terms.where(counts > 0, 0) * counts).sum(0) / total.where(total > 0, 1)).sum())


def _forward(model: nn.Module, batch: Batch) -> Any:
    """`model(**batch)`, without the masked-LM logits, which the loss does not need."""
    return model(**batch, **getattr(unwrapped(model), "loss_options", {}))


def _require_labels(caller: str, batch: Batch) -> Batch:
    if batch.get("labels") is None:
        raise ValueError(f"{caller}: the batch has {', '.join(sorted(batch))}; expected labels as well")
    return batch


def _without_pairs(batch: Batch) -> Batch:
    return {name: x for name, x in batch.items() if name not in PAIRS}
