"""CUDA graphs of a model: a forward, or a training step, is one launch instead of hundreds.

A graph runs the same kernels on the same addresses each time. So before a replay the input is copied to a fixed buffer,
as a packed batch with room to spare, called a bucket (`buckets.py`). `capture.py` records a function, `graphed.py` has
what both uses share, `forward.py` replays a model in inference and `step.py` its loss and gradients in training.
docs/graph.md describes costs, limits and checks.
"""

from collections.abc import Iterable
from typing import Literal, overload

from torch import nn

from fastbert.graphs.forward import GraphedModel
from fastbert.graphs.graphed import Report
from fastbert.graphs.step import GraphedStep


@overload
def graph(
    model: nn.Module,
    max_tokens: Iterable[int] = ...,
    max_sequences: int = ...,
    max_seqlen: int | None = ...,
    *,
    training: Literal[False] = False,
) -> GraphedModel: ...
@overload
def graph(
    model: nn.Module,
    max_tokens: Iterable[int] = ...,
    max_sequences: int = ...,
    max_seqlen: int | None = ...,
    *,
    training: Literal[True],
    max_labels: int | None = ...,
) -> GraphedStep: ...
def graph(
    model: nn.Module,
    max_tokens: Iterable[int] = (64, 128, 256, 512),
    max_sequences: int = 8,
    max_seqlen: int | None = None,
    *,
    training: bool = False,
    max_labels: int | None = None,
) -> GraphedModel | GraphedStep:
    """Captures a model as CUDA graphs: for inference with low latency, called like the model, or as a training step.

    model: a BertModel or BertFor... (not BertForSparseEmbedding) of any family on one GPU, in evaluation mode.
    max_tokens: the sizes of the buckets. A call replays the smallest bucket for its tokens, not counting padding,
    if it has at most max_sequences sequences of at most max_seqlen tokens (default: the model's maximum); other
    calls run the model itself. All buckets are captured here, which runs the model a few times each; capture before
    other threads use the GPU (docs/graph.md).

    training: returns a GraphedStep instead, `step(**batch)` for `loss = model(**batch).loss; loss.backward()`, of a
    BertFor... (not BertForMultipleChoice) in either mode. A bucket is captured when a batch first needs it. max_labels:
    for a masked LM, the most labelled tokens in a batch; None means a quarter of the bucket's tokens.

    The model must keep its modules and tensors; values may change in place, as by optimizers and load_state_dict.
    A replay does not check this; FASTBERT_CHECK=1 does.
    Raises TypeError for an unsupported model, ValueError for invalid sizes and a model that is not on one GPU,
    RuntimeError for a model with hooks, and as GraphedModel and GraphedStep say.
    """
    if training:
        return GraphedStep(model, max_tokens, max_sequences, max_seqlen, max_labels=max_labels)
    if max_labels is not None:
        raise TypeError("fastbert.graph: max_labels goes with training=True")
    return GraphedModel(model, max_tokens, max_sequences, max_seqlen)


__all__ = ["GraphedModel", "GraphedStep", "Report", "graph"]
