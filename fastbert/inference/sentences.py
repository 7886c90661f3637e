"""Sentence embeddings on packed tokens."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import hub
from fastbert.data.tokenizer import save_tokenizer
from fastbert.inference import sentence_files
from fastbert.inference.loading import load
from fastbert.inference.sentence_files import Dense, Recipe
from fastbert.inference.texts import TextEncoder, batches, check_length, packed
from fastbert.inference.vectors import check_pairs, check_vectors, distances, pairwise, similarity
from fastbert.inference.workers import EncoderWorkers
from fastbert.model import BertModel, class_name
from fastbert.pooling import check_mode, pool


class SentenceEncoder(TextEncoder):
    """Embeds texts: tokenizer, prompts, model, pooling, dense layers, normalisation.

    Computes what sentence-transformers computes with the same directory, or refuses the directory.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer,
        *,
        pooling: str | Sequence[str] = "mean",
        normalize: bool = True,
        max_length: int | None = None,
        dense: Sequence[Dense] = (),
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        include_prompt: bool = True,
        similarity: str = "cosine",
    ) -> None:
        """tokenizer: a `tokenizers.Tokenizer`, which is copied. The model is set to evaluation mode.

        pooling: a mode of `fastbert.pooling.pool`, or several, whose vectors are concatenated. dense: layers after the
        pooling. normalize: to vectors of length 1, at the end. max_length: in tokens, prompts included; longer texts
        are cut. prompts: what goes before a text, by name; default_prompt_name: the one that `encode` uses if it is
        given none. include_prompt: False leaves the prompt's tokens out of the pooling. similarity: "cosine", "dot",
        "euclidean" or "manhattan", for the method `similarity`. Raises ValueError for a tokenizer with ids that the
        model lacks, for dense layers that do not fit, and for invalid values, TypeError for another model.
        """
        if hasattr(model, "bert"):
            raise TypeError(f"SentenceEncoder: model is a {class_name(model)}; expected a fastbert.BertModel")
        super().__init__(
            model, tokenizer, max_length=max_length, prompts=prompts, default_prompt_name=default_prompt_name,
            similarity=similarity,
        )  # fmt: skip
        self._modes = tuple(map(check_mode, [pooling] if isinstance(pooling, str) else pooling))
        if not self._modes:
            raise ValueError("pooling is empty; expected one mode or more")
        self.pooling = self._modes[0] if len(self._modes) == 1 else self._modes
        self.normalize, self.include_prompt = normalize, include_prompt
        self.dense = nn.Sequential(*dense).to(self.device).eval()
        self.width  # noqa: B018

    @property
    def width(self) -> int:
        """How many numbers an embedding has."""
        return sentence_files.width_after(len(self._modes) * self.model.config.hidden_size, self.dense)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        max_length: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        prompts: Mapping[str, str] | None = None,
        similarity: str | None = None,
    ) -> "SentenceEncoder":
        """Loads a directory with a model and its tokenizer, following sentence-transformers' files if it has them.

        source: may also be a model's name on the hub. Without modules.json: mean pooling, normalised. precision:
        "fp32", "bf16", "int8" or "fp8" prepares the model with `fastbert.prepare`. max_length: in tokens. It and the
        others are the constructor's, and None follows those files. Raises FileNotFoundError, ValueError and
        RuntimeError as `BertModel.from_pretrained`, and ValueError for modules, a pooling or an activation that are not
        supported, a max_length above the model's, and a precision that is unknown, or given with a dtype other than
        float32 or a device that it is not for.
        """
        recipe = sentence_files.read(hub.directory_of(source))
        read = functools.partial(BertModel.from_pretrained, recipe.folder, add_pooling_layer=False)
        model = load(read, dtype, device, precision)
        check_length("SentenceEncoder", max_length, model)
        given = {"max_length": max_length, "pooling": pooling, "normalize": normalize, "prompts": prompts}
        given |= {"similarity": similarity}
        options = recipe._asdict() | {name: value for name, value in given.items() if value is not None}
        return cls(model, sentence_files.read_tokenizer(options.pop("folder")), **options)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that `from_pretrained` and sentence-transformers' SentenceTransformer read.

        Each file is replaced whole. modules.json is deleted first and written last, so that a directory is refused if
        its save was interrupted. A prepared model is written as `fastbert.prepare` says; only `from_pretrained` reads
        int8.
        """
        directory = Path(directory)
        sentence_files.begin(directory, "1_Pooling")
        self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)
        recipe = Recipe(
            directory, self._modes, tuple(self.dense), self.normalize, self.include_prompt, self.prompts,
            self.default_prompt_name, self.similarity_name, self.max_length,
        )  # fmt: skip
        sentence_files.write(recipe, self.model.config.hidden_size)

    def encode(
        self,
        texts: list[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        tokens_per_batch: int = 2048,
        progress: Callable[[int], None] | None = None,
        workers: EncoderWorkers | None = None,
    ) -> Tensor:
        """(len(texts), C) float32 embeddings, on the model's device.

        prompt: goes before each text; prompt_name: the one of that name in `prompts`; neither: the default one, if
        there is one. truncate_dim: keeps the first truncate_dim numbers of each embedding, unchanged (`quantize` makes
        numbers smaller). tokens_per_batch: the most tokens in one forward, but always at least one text. progress:
        called after each forward with its number of texts. workers: processes that compute the forwards. The forwards
        are the same without them, so on a CPU the vectors are bitwise equal if the library's matrix products are.
        Raises as `tokenize` does, ValueError for an unknown prompt_name, a truncate_dim below 1 or above C and workers
        of another encoder, and the errors of workers.
        """
        width, prompt = self.width, self._prompt(prompt, prompt_name)
        if truncate_dim is not None and not 0 < truncate_dim <= width:
            raise ValueError(f"truncate_dim is {truncate_dim}; expected 1 to {width}")
        ids, skip = self._prompted(texts, prompt), self._skipped(prompt)
        result = torch.empty(len(ids), truncate_dim or width, device=self.device, dtype=torch.float32)
        cut = list(batches([len(i) for i in ids], tokens_per_batch))
        if workers is not None and workers.encoder is not self:
            raise ValueError("SentenceEncoder: workers are those of another encoder; expected this one's")
        texts_of = ([ids[i] for i in batch] for batch in cut)
        found = workers.embed(texts_of, skip) if workers else (self.embed(batch, skip) for batch in texts_of)
        for batch, vectors in zip(cut, found, strict=True):
            result[batch] = vectors[:, :truncate_dim].to(self.device)
            if progress:
                progress(len(batch))
        return result

    def workers(self, devices: int | Sequence[str | torch.device]) -> EncoderWorkers:
        """Starts processes for `encode(..., workers=...)`. Close them, best by `with encoder.workers(2) as workers:`.

        devices: how many processes on the encoder's device, or the device of each, as ["cuda:0", "cuda:1"]. On CPUs
        they share the number of threads that torch has here. Each process imports the main script, which therefore
        needs its code below `if __name__ == "__main__":`. Equivalent to SentenceTransformer.start_multi_process_pool.
        Raises ValueError for no process, and the error of a process that cannot start.
        """
        devices = [self.device] * devices if isinstance(devices, int) else list(devices)
        if not devices:
            raise ValueError("SentenceEncoder: workers of no process; expected at least 1, or a device for each")
        return EncoderWorkers(self, devices)

    def prompt_of(self, name: str | None) -> tuple[str, int]:
        """The prompt of that name, or the default one, "" if there is none; and how many tokens `embed` has to skip.

        Raises ValueError for an unknown name.
        """
        prompt = self._prompt(None, name)
        return prompt, self._skipped(prompt)

    def _skipped(self, prompt: str) -> int:
        """How many tokens at the beginning of a text the pooling leaves out: those of the prompt with the special token
        before it, but not the one after it."""
        if self.include_prompt or not prompt:
            return 0
        encoding = self.tokenizer.encode(prompt)
        skipped = len(encoding.ids) - (encoding.special_tokens_mask[-1:] == [1])
        if skipped + 2 > self.max_length:
            raise ValueError(
                f"SentenceEncoder: the prompt has {skipped} tokens, which the pooling leaves out; expected fewer than "
                f"max_length, {self.max_length}, so that tokens of the text are left"
            )
        return skipped

    @torch.inference_mode()
    def embed(self, ids: list[list[int]], skip: int = 0, normalize: bool | None = None) -> Tensor:
        """(len(ids), C) float32 embeddings of tokenized texts, in one forward. skip: how many tokens at the beginning
        of each the pooling leaves out. normalize: overrides the encoder's setting unless None."""
        input_ids, cu_seqlens, longest = packed(ids, self.device)
        hidden = self.model(input_ids, cu_seqlens=cu_seqlens, max_seqlen=longest).last_hidden_state.float()
        vectors = self.dense(torch.cat([pool(hidden, cu_seqlens, mode, skip) for mode in self._modes], -1))
        return F.normalize(vectors, dim=-1) if (self.normalize if normalize is None else normalize) else vectors

    def similarity(self, vectors: Tensor, others: Tensor | None = None) -> Tensor:
        """(N, M): how similar vectors (N, C) are to others (M, C), or to each other; larger is more similar.

        By the encoder's measure: cosines, dot products, or negative distances, which are in float32 or better. Raises
        ValueError for other shapes, TypeError unless both have one floating-point type.
        """
        if self.similarity_name == "cosine":
            return similarity(vectors, others)
        others = check_vectors(vectors, others)
        if self.similarity_name == "dot":
            return vectors @ others.T
        return -distances(vectors, others, 1 if self.similarity_name == "manhattan" else 2)

    def similarity_pairwise(self, vectors: Tensor, others: Tensor) -> Tensor:
        """(N,): how similar each row of vectors (N, C) is to the same row of others (N, C), by the encoder's measure.

        Equivalent to `similarity(vectors, others).diagonal()`, and raises as it does.
        """
        check_pairs(vectors, others)
        return pairwise(vectors, others, self.similarity_name)
