"""Training of sentence encoders on pairs and tuples of texts, with negatives from all processes and large batches."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from fastbert.maxsim import runs
from fastbert.ops.checks import sequences
from fastbert.pooling import check_mode, pool
from fastbert.training.contrastive_losses import WHOLE
from fastbert.training.losses import Batch


class ContrastiveOutput(NamedTuple):
    """loss: a scalar. embeddings: (columns, B, C) in float32 or better, this process's own, not normalised."""

    loss: Tensor
    embeddings: Tensor


class ContrastiveModel(nn.Module):
    """An encoder and a loss on the embeddings of a batch of tuples of texts, for AMPTrainer.

    encoder: `BertModel(config, add_pooling_layer=False)`, or a module that takes the same packed input and returns
    last_hidden_state; with pooling=None, a module that returns a vector for each text, (B, C), as
    BertForSparseEmbedding does. loss: one of this package, or a callable that takes embeddings (columns, B, C) and
    scores (or None) and returns the mean over the B tuples. If its attribute `in_batch` is true, it also takes a slice,
    the rows to average over; if its `skip_equal` is true, it takes the keys of the texts, (columns, B) int64, after the
    slice. For inference: `SentenceEncoder(model.encoder, tokenizer)`, with the same pooling, or `SparseEncoder`.
    """

    def __init__(
        self,
        encoder: nn.Module,
        loss: Callable[..., Tensor],
        *,
        pooling: str | None = "mean",
        max_tokens: int | None = None,
        all_processes: bool = True,
    ) -> None:
        """pooling: a mode of `fastbert.pooling.pool`, "mean", "cls", ..., or None for an encoder that pools itself.
        max_tokens: computes the embeddings by GradCache, which needs memory for this many tokens whatever the batch
        size; None computes them at once.

        all_processes: in training, a loss with in-batch negatives gets the texts of all processes, so that the step
        equals that of one process with the whole batch. Evaluation always uses this process's texts alone.
        Raises ValueError for an encoder with a pooler, which would not be trained, and for invalid values; TypeError
        for an encoder that is no module, such as a SentenceEncoder, whose `model` is one.
        """
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise TypeError(f"ContrastiveModel: encoder is a {type(encoder).__name__}; expected a module: its `model`")
        if getattr(encoder, "pooler", None) is not None:
            raise ValueError("ContrastiveModel: the encoder has a pooler, which no loss reaches; expected none")
        self.encoder, self.loss = encoder, loss
        self.pooling = pooling if pooling is None else check_mode(pooling)
        self.embed = self._at_once if max_tokens is None else GradCache(self._at_once, max_tokens)
        self.max_tokens, self.all_processes = max_tokens, all_processes

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        columns: int = 2,
        labels: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> ContrastiveOutput:
        """Takes a batch of ContrastiveCollator: packed texts, all anchors, then all positives, and so on.

        labels: the scores. Raises ValueError if the texts do not form tuples of `columns`, and as the loss does.
        """
        if columns < 2 or (len(cu_seqlens) - 1) % columns:
            raise ValueError(
                f"ContrastiveModel: there are {len(cu_seqlens) - 1} texts in {columns} columns; expected at least two "
                "columns of equally many texts"
            )
        if self.max_tokens is not None and any(isinstance(part, FSDPModule) for part in self.modules()):
            raise ValueError("ContrastiveModel: max_tokens goes with DDP; FSDP2 needs as many forwards in each process")
        embeddings = torch.stack(self.embed(input_ids, cu_seqlens, max_seqlen).chunk(columns))  # FSDP2 warns of views
        with torch.autocast(embeddings.device.type, enabled=False):
            keys = keys if getattr(self.loss, "skip_equal", False) else None
            return ContrastiveOutput(self._loss_of(embeddings, labels, keys), embeddings)

    def _at_once(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        found = self.encoder(input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        return found if self.pooling is None else pool(found.last_hidden_state, cu_seqlens, self.pooling)

    def _loss_of(self, embeddings: Tensor, scores: Tensor | None, keys: Tensor | None) -> Tensor:
        in_batch, own = getattr(self.loss, "in_batch", False), WHOLE
        together = in_batch and self.training and self.all_processes
        if together and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            counts = _counts(embeddings)
            before = sum(counts[: dist.get_rank()])
            own = slice(before, before + embeddings.shape[1])
            embeddings = _Gather.apply(embeddings.transpose(0, 1), counts).transpose(0, 1)
            scores = None if scores is None else _Gather.apply(scores, counts)
            keys = None if keys is None else _Gather.apply(keys.T, counts).T
        more = (own, keys) if keys is not None else (own,) if in_batch else ()
        return self.loss(embeddings, scores, *more)

    @staticmethod
    def label_counts(batch: Batch) -> Tensor:
        """(1,) float64: the number of tuples in the batch. Raises ValueError for a batch of another collator."""
        if not {"cu_seqlens", "columns"} <= batch.keys():
            raise ValueError(f"the batch has {', '.join(sorted(batch))}; expected one of ContrastiveCollator")
        return torch.tensor([(len(batch["cu_seqlens"]) - 1) // batch["columns"]], dtype=torch.float64)


class GradCache:
    """Embeds packed texts chunk by chunk, keeping the activations of one chunk at a time, with exact gradients.

    The forward does not keep the activations of a chunk; the backward computes the chunk again, with the same random
    numbers, and accumulates its gradients. This doubles the forwards, and allows batches of any size, because the texts
    of a batch interact only in the loss (Gao et al., "Scaling deep contrastive learning batch size under memory limited
    setup", 2021). Equivalent to torch.cat([embed(*chunk) for chunk in chunks]).
    """

    def __init__(self, embed: Callable[..., Tensor], max_tokens: int) -> None:
        """embed(input_ids, cu_seqlens, max_seqlen): returns (B, C) for packed texts. max_tokens: the limit of a chunk,
        which holds whole texts, and at least one. Raises ValueError unless max_tokens is a positive int."""
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"GradCache: max_tokens is {max_tokens!r}; expected a positive int")
        self.embed, self.max_tokens = embed, max_tokens

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None) -> Tensor:
        """input_ids (T,), cu_seqlens (B + 1,) int32 -> (B, C). On a GPU, reading cu_seqlens is a host synchronisation.

        max_seqlen: at least the longest text, as for a model; each chunk gets that of its own texts. Raises ValueError
        for cu_seqlens that do not fit input_ids.
        """
        tokens, on_host = len(input_ids), cu_seqlens.cpu()
        sequences("GradCache", on_host, tokens if max_seqlen is None else max_seqlen, tokens)
        ends = on_host.tolist()
        chunks = list(runs([end - begin for begin, end in pairwise(ends)], self.max_tokens, padded=False))
        if len(chunks) < 2 or not torch.is_grad_enabled():
            return torch.cat([self.embed(*self._part(input_ids, cu_seqlens, ends, *chunk)) for chunk in chunks])
        parts = (self._part(input_ids, cu_seqlens, ends, *chunk) for chunk in chunks)
        return torch.cat([checkpoint(self.embed, *part, use_reentrant=False) for part in parts])

    @staticmethod
    def _part(ids: Tensor, cu_seqlens: Tensor, ends: list[int], first: int, last: int) -> tuple[Tensor, Tensor, int]:
        start = ends[first]
        longest = max(end - begin for begin, end in pairwise(ends[first : last + 1]))
        return ids[start : ends[last]], cu_seqlens[first : last + 1] - start, longest


# ---- several processes


def _counts(embeddings: Tensor) -> list[int]:
    """How many tuples each process has. Raises ValueError, in all processes, if their numbers of columns differ."""
    own = torch.tensor(embeddings.shape[:2], device=embeddings.device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    columns, counts = zip(*(shape.tolist() for shape in found), strict=True)
    if len(set(columns)) > 1:
        raise ValueError(f"ContrastiveModel: the processes' batches have {columns} columns; expected equal numbers")
    return list(counts)


class _Gather(torch.autograd.Function):
    """Gathers the rows of all processes, in the order of ranks. A row's gradient is the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.split(ctx.counts)[dist.get_rank()], None
