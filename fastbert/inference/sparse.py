"""Sparse embeddings on packed tokens: SPLADE, whose vectors hold weights of words of the vocabulary."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import hub
from fastbert.auto import trained_model
from fastbert.data.tokenizer import save_tokenizer
from fastbert.heads import BertForSparseEmbedding
from fastbert.inference import sentence_files
from fastbert.inference.loading import load
from fastbert.inference.sentence_files import SparseRecipe
from fastbert.inference.texts import TextEncoder, batches, check_length, packed
from fastbert.inference.vectors import check_pairs, check_vectors, distances, pairwise

ROWS = 256  # how many sparse vectors are made dense at a time


class SparseEncoder(TextEncoder):
    """Embeds texts as weights of words: tokenizer, masked-LM model, maximum over tokens, prompts.

    Computes what sentence-transformers' SparseEncoder computes with the same directory, or refuses the directory.
    Special tokens count like other tokens, padding never does.
    """

    model: BertForSparseEmbedding

    def __init__(
        self,
        model: BertForSparseEmbedding,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        max_active_dims: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity: str = "dot",
    ) -> None:
        """tokenizer: a `tokenizers.Tokenizer`, which is copied. The model is set to evaluation mode.

        max_length: in tokens, prompts included; longer texts are cut. max_active_dims: how many weights of a text are
        kept, the largest; None keeps all. prompts: what goes before a text, by name; default_prompt_name: the one that
        `encode` uses if it is given none. similarity: "dot", "cosine", "euclidean" or "manhattan", for the method
        `similarity`. Raises TypeError for another model, ValueError for a tokenizer with ids that the model lacks and
        for invalid values.
        """
        if not isinstance(model, BertForSparseEmbedding):
            expected = "a BertForSparseEmbedding"
            raise TypeError(f"SparseEncoder: model is a {type(model).__name__}; expected {expected}")
        super().__init__(
            model, tokenizer, max_length=max_length, prompts=prompts, default_prompt_name=default_prompt_name,
            similarity=similarity,
        )  # fmt: skip
        self.max_active_dims = _check_active(max_active_dims)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        max_length: int | None = None,
    ) -> "SparseEncoder":
        """Loads a directory with a masked-LM model and its tokenizer, following sentence-transformers' files if it has
        them.

        source: may also be a model's name on the hub. Without modules.json the activation is "relu", as for the first
        SPLADE models. precision: "fp32", "bf16", "int8" or "fp8" prepares the model with `fastbert.prepare`.
        max_length: in tokens; None follows those files. Raises FileNotFoundError, ValueError and RuntimeError as
        `BertModel.from_pretrained`, and ValueError for another head or no head, for modules, a pooling strategy or an
        activation that are not supported, a max_length above the model's, and a precision that is unknown, or given
        with a dtype other than float32 or a device that it is not for.
        """
        options = sentence_files.read_sparse(hub.directory_of(source))._asdict()
        folder, activation = options.pop("folder"), options.pop("activation")

        def read(*, dtype: torch.dtype | str | None) -> BertForSparseEmbedding:
            model = trained_model(folder, (BertForSparseEmbedding,), dtype=dtype)
            model.activation = activation
            return model

        model = load(read, dtype, device, precision)
        check_length("SparseEncoder", max_length, model)
        options |= {} if max_length is None else {"max_length": max_length}
        return cls(model, sentence_files.read_tokenizer(folder), **options)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that `from_pretrained` and sentence-transformers' SparseEncoder read.

        Each file is replaced whole. modules.json is deleted first and written last, so that a directory is refused if
        its save was interrupted. A prepared model is written as `fastbert.prepare` says; only `from_pretrained` reads
        int8.
        """
        directory = Path(directory)
        sentence_files.begin(directory, "1_SpladePooling")
        self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)
        recipe = SparseRecipe(
            directory, self.model.activation, self.prompts, self.default_prompt_name, self.similarity_name,
            self.max_length, self.max_active_dims,
        )  # fmt: skip
        sentence_files.write_sparse(recipe, self.model.config.vocab_size)

    def encode(
        self,
        texts: list[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        tokens_per_batch: int = 2048,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """(len(texts), V) sparse COO tensor, coalesced, of float32 (float64 of a float64 model), on the model's device.

        prompt: goes before each text; prompt_name: the one of that name in `prompts`; neither: the default one, if
        there is one. max_active_dims: how many weights of a text are kept, None for the encoder's number.
        tokens_per_batch: the most tokens in one forward, but always at least one text. progress: called after each
        forward with its number of texts. `.to_sparse_csr()` gives rows for search engines, `.to_dense()` a matrix.
        Raises as `tokenize` does, and ValueError for an unknown prompt_name and a max_active_dims below 1.
        """
        most = self.max_active_dims if max_active_dims is None else _check_active(max_active_dims)
        ids = self._prompted(texts, self._prompt(prompt, prompt_name))
        parts = []
        for batch in batches([len(i) for i in ids], tokens_per_batch):
            vectors = _largest(self.embed([ids[i] for i in batch]), most)
            row, word = vectors.nonzero(as_tuple=True)
            parts.append((torch.tensor(batch, device=row.device)[row], word, vectors[row, word]))
            if progress:
                progress(len(batch))
        shape, (rows, words, weights) = (len(ids), self.model.config.vocab_size), self._joined(parts)
        return torch.sparse_coo_tensor(torch.stack([rows, words]), weights, shape, check_invariants=False).coalesce()

    def _joined(self, parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        return tuple(map(torch.cat, zip((none, none, none.to(dtype)), *parts, strict=True)))

    @torch.inference_mode()
    def embed(self, ids: list[list[int]]) -> Tensor:
        """(len(ids), V) dense embeddings of tokenized texts, in one forward, with all weights."""
        input_ids, cu_seqlens, longest = packed(ids, self.device)
        return self.model(input_ids, cu_seqlens=cu_seqlens, max_seqlen=longest)

    def decode(self, vectors: Tensor, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """The words of each vector with their weights, the heaviest first, or the top_k heaviest.

        vectors: (N, V), sparse or dense. Words of equal weight are in the order of their ids. An id that the tokenizer
        does not have is written as a number. Raises ValueError for another shape and a top_k below 1.
        """
        if vectors.dim() != 2 or vectors.shape[1] != self.model.config.vocab_size:
            expected = f"(N, {self.model.config.vocab_size})"
            raise ValueError(f"SparseEncoder: vectors has shape {tuple(vectors.shape)}; expected {expected}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"SparseEncoder: top_k is {top_k}; expected at least 1")
        vectors = vectors.to_sparse_coo().coalesce()
        (rows, words), weights = vectors.indices().cpu(), vectors.values().cpu()
        counts, found = rows.bincount(minlength=len(vectors)).tolist(), []
        for word, weight in zip(words.split(counts), weights.split(counts), strict=True):
            order = weight.sort(descending=True, stable=True).indices[:top_k]
            names = [self.tokenizer.id_to_token(i) or str(i) for i in word[order].tolist()]
            found.append(list(zip(names, weight[order].tolist(), strict=True)))
        return found

    def similarity(self, vectors: Tensor, others: Tensor | None = None) -> Tensor:
        """(N, M), dense: how similar vectors (N, V) are to others (M, V), or to each other; larger is more similar.

        Each may be sparse or dense. By the encoder's measure: dot products, cosines, or negative distances, for which
        vectors are made dense. Raises ValueError for other shapes, TypeError unless both have one floating-point type.
        """
        others = check_vectors(vectors, others)
        if self.similarity_name == "cosine":
            vectors, others = _normalized(vectors), _normalized(others)
        if self.similarity_name in ("cosine", "dot"):
            return products(vectors, others)
        p = 1 if self.similarity_name == "manhattan" else 2
        return -distances(vectors.to_dense(), others.to_dense(), p)

    def similarity_pairwise(self, vectors: Tensor, others: Tensor) -> Tensor:
        """(N,), dense: how similar each row of vectors (N, V) is to the same row of others, as `similarity`. ROWS rows
        are dense at a time."""
        check_pairs(vectors, others)
        vectors, others = (x if x.layout == torch.strided else x.to_sparse_coo() for x in (vectors, others))
        found = [torch.empty(0, dtype=vectors.dtype, device=vectors.device)]
        for rows in torch.arange(len(vectors), device=vectors.device).split(ROWS):
            dense = (x.index_select(0, rows).to_dense() for x in (vectors, others))
            found.append(pairwise(*dense, self.similarity_name))
        return torch.cat(found)


def _check_active(count: int | None) -> int | None:
    if count is not None and (not isinstance(count, int) or count is True or count < 1):
        raise ValueError(f"SparseEncoder: max_active_dims is {count!r}; expected a positive int, or None")
    return count


def _largest(vectors: Tensor, count: int | None) -> Tensor:
    """The `count` largest numbers of each row, zeros elsewhere."""
    if count is None or count >= vectors.shape[1]:
        return vectors
    top = vectors.topk(count)
    return torch.zeros_like(vectors).scatter(1, top.indices, top.values)


def _normalized(vectors: Tensor) -> Tensor:
    if vectors.layout == torch.strided:
        return F.normalize(vectors, dim=-1)
    vectors = vectors.to_sparse_coo().coalesce()
    rows, values = vectors.indices()[0], vectors.values()
    squares = torch.segment_reduce(values.square(), "sum", lengths=rows.bincount(minlength=len(vectors)))
    values = values / squares.sqrt().clamp(min=1e-12)[rows]
    return torch.sparse_coo_tensor(vectors.indices(), values, vectors.shape, is_coalesced=True, check_invariants=False)


def products(vectors: Tensor, others: Tensor) -> Tensor:
    """(N, M): (N, V) times the transpose of (M, V). If both are sparse, ROWS rows of (N, V) are dense at a time."""
    if others.layout == torch.strided:
        return (vectors if vectors.layout == torch.strided else vectors.to_sparse_coo()) @ others.T
    others = others.to_sparse_coo()
    if vectors.layout == torch.strided:
        return (others @ vectors.T.contiguous()).T
    vectors, rows = vectors.to_sparse_coo(), torch.arange(len(vectors), device=vectors.device)
    parts = [others @ vectors.index_select(0, part).to_dense().T.contiguous() for part in rows.split(ROWS)]
    return torch.cat(parts, 1).T
