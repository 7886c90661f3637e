"""Models for mteb, the benchmark of text embeddings (https://github.com/embeddings-benchmark/mteb); needs its package.

    import mteb
    from fastbert.inference.mteb import MTEBEncoder

    mteb.evaluate(MTEBEncoder("path/to/encoder"), mteb.get_tasks(["STSBenchmark"]))

The classes implement the protocols of mteb 2 that they are named after: what mteb calls, and nothing else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert.inference.fingerprint import fingerprint
from fastbert.inference.rerank import CrossEncoder
from fastbert.inference.sentences import SentenceEncoder
from fastbert.inference.vectors import quantize
from fastbert.require import require

Batches = Iterable[Mapping[str, Any]]


class MTEBEncoder:
    """A SentenceEncoder as mteb's EncoderProtocol: for retrieval, similarity, classification, clustering and the like.

    Scores are those that mteb gets with sentence-transformers' own model of the same directory.
    """

    model: SentenceEncoder
    mteb_model_meta: Any

    def __init__(
        self,
        model_name: str | Path | SentenceEncoder,
        revision: str | None = None,
        *,
        device: str | torch.device | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """model_name: an encoder, or what `SentenceEncoder.from_pretrained` takes, with device and options (dtype,
        precision, max_length). revision: of a model on the hub. name: the name under which mteb keeps results,
        "organization/model"; None takes model_name.

        Without a revision, a hash of weights, tokenizer and settings is used, so that mteb's cache never returns the
        results of another model. Raises ValueError for an encoder without a name or with a device or options, and as
        from_pretrained; ModuleNotFoundError without mteb.
        """
        _open(self, SentenceEncoder, model_name, revision, device, name, options)

    def _facts(self) -> dict[str, Any]:
        measure = require("mteb.models.model_meta", "mteb").ScoringFunction(self.model.similarity_name)
        return {"embed_dim": self.model.width, "similarity_fn_name": measure}

    def encode(
        self,
        inputs: Batches,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int = 32,
        show_progress_bar: bool = True,
        precision: str = "float32",
    ) -> Tensor:
        """(N, C) embeddings of the texts of all batches, on the CPU, float32 or in another precision of `quantize`.

        The prompt is the first that exists under these names: the task's name with "query" or "document"
        ("STSBenchmark-query"), its name, its type with "query" or "document", its type; else it is that of
        `encode_query`, `encode_document` or, if prompt_type is None, `encode`. batch_size: how many texts of max_length
        fit into a forward. hf_split, hf_subset: ignored. Raises ValueError for batches without text.
        """
        texts = [text for batch in inputs for text in _texts("MTEBEncoder", batch)]
        find = require("mteb.models.abs_encoder", "mteb").get_prompt_name
        options = {"prompt_name": find(self.model.prompts, task_metadata, prompt_type)}
        options["tokens_per_batch"] = batch_size * self.model.max_length
        methods = {"query": self.model.encode_query, "document": self.model.encode_document}
        encode = methods[prompt_type.value] if prompt_type else self.model.encode
        with require("tqdm.auto", "tqdm").tqdm(total=len(texts), disable=not show_progress_bar) as bar:
            return quantize(encode(texts, progress=bar.update, **options).cpu(), precision)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(N, M) similarities of (N, C) and (M, C), tensors or arrays, by the encoder's measure; (C,) is one row."""
        return self.model.similarity(_rows(embeddings1), _rows(embeddings2))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """(N,) similarities of the rows of (N, C) with those of another (N, C), as `similarity`."""
        return self.model.similarity_pairwise(_rows(embeddings1), _rows(embeddings2))


class MTEBCrossEncoder:
    """A CrossEncoder as mteb's CrossEncoderProtocol: for reranking."""

    model: CrossEncoder
    mteb_model_meta: Any

    def __init__(
        self,
        model_name: str | Path | CrossEncoder,
        revision: str | None = None,
        device: str | torch.device | None = None,
        *,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """As for MTEBEncoder, with a CrossEncoder."""
        _open(self, CrossEncoder, model_name, revision, device, name, options)

    def _facts(self) -> dict[str, Any]:
        return {"model_type": ["cross-encoder"]}

    def predict(
        self,
        inputs1: Batches,
        inputs2: Batches,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int = 32,
        show_progress_bar: bool = True,
    ) -> np.ndarray:
        """(N,) float32 scores of the pairs of both inputs' texts, batch by batch; (N, num_labels) with several labels.

        batch_size, task_metadata, hf_split, hf_subset and prompt_type are ignored; the batches are those of the inputs.
        Raises ValueError for batches without text or of unequal numbers.
        """
        bar = require("tqdm.auto", "tqdm").tqdm
        scores = []
        for pair in bar(zip(inputs1, inputs2, strict=True), disable=not show_progress_bar):
            texts = (_texts("MTEBCrossEncoder", batch) for batch in pair)
            scores.append(self.model.predict(list(zip(*texts, strict=True))).cpu().numpy())
        return np.concatenate(scores) if scores else np.empty(0, np.float32)


def _texts(owner: str, batch: Mapping[str, Any]) -> list[str]:
    if "text" not in batch:
        raise ValueError(f"{owner}: a batch has {', '.join(batch)}; expected text")
    return batch["text"]


def _rows(vectors: Any) -> Tensor:
    return torch.atleast_2d(torch.as_tensor(vectors)).float()


def _open(
    owner: Any, kind: type, model: Any, revision: str | None, device: Any, name: str | None, options: dict
) -> None:
    """Sets the owner's model, which is loaded unless it is a model already, and its metadata for mteb."""
    owner_name = type(owner).__name__
    require("mteb", "mteb")
    if not isinstance(model, kind):
        name = name or str(model)
        source = f"{model}@{revision}" if revision and not Path(model).is_dir() else model
        model = kind.from_pretrained(source, device=device, **options)
    elif name is None or device is not None or options:
        given = ", ".join([f"name {name!r}", f"device {device!r}", *options])
        raise ValueError(f"{owner_name}: a {kind.__name__} with {given}; expected a name, 'organization/model', alone")
    owner.model = model
    owner.mteb_model_meta = require("mteb.models", "mteb").ModelMeta.create_empty(
        overwrites={
            "name": name if "/" in name else f"local/{name}",
            "revision": revision or fingerprint(model, of_use=True),
            "loader": type(owner),
            "framework": ["PyTorch"],
            "n_parameters": model.model.num_parameters(),
            "max_tokens": model.max_length,
            **owner._facts(),
        }
    )
