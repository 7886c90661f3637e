"""Multi-vector encoders (ColBERT, late interaction): one vector per token, computed on packed tokens."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbert import hub
from fastbert.data.contrastive import ContrastiveDataset
from fastbert.data.tokenizer import check_ids, copy_of, save_tokenizer, special_token_id, strings, text_of
from fastbert.inference import multi_vector_files, sentence_files
from fastbert.inference.loading import load
from fastbert.inference.multi_vector_files import FORMATS, SIMILARITIES, TASKS, QueryExpansion, Recipe
from fastbert.inference.rerank import ranked
from fastbert.inference.sentence_files import Dense
from fastbert.inference.texts import batches, checked_prompts, packed, require_prompt, token_ids
from fastbert.inference.vectors import require_tensor
from fastbert.maxsim import maxsim, maxsim_pairs
from fastbert.model import BertModel
from fastbert.ops.padding import cu_seqlens_of
from fastbert.token_vectors import Expansion, TokenVectors


class MultiVectorEncoder:
    """Embeds queries and documents as one vector per token, and scores them by MaxSim.

    Computes what sentence-transformers' MultiVectorEncoder computes with the same directory, or refuses the directory.
    vectors: the part with weights, a TokenVectors, for training.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: Any,
        *,
        dense: Sequence[Dense] = (),
        normalize: bool = True,
        prompts: Mapping[str, str] | None = None,
        query_length: int | None = None,
        document_length: int | None = None,
        expansion: QueryExpansion | None = None,
        skip_words: Iterable[str] = (),
        skip_tasks: Sequence[str] = ("document",),
        similarity: str = "maxsim",
        max_length: int | None = None,
    ) -> None:
        """tokenizer: a `tokenizers.Tokenizer`, which is copied. The model has no pooler; it is set to evaluation mode.

        dense: layers applied to each token; ColBERT has `Dense(768, 128, bias=False, activation="Identity")`.
        normalize: vectors to length 1. prompts: what goes before a text, by name; the default is the one named "query"
        or "document". query_length, document_length, max_length: in tokens, with prompts and special tokens; longer
        texts are cut. None for one of the first two means max_length, and for that the model's maximum. expansion: of
        queries; a fixed one determines their length instead of query_length.
        skip_words: tokens that give no vector in documents (or as skip_tasks says: "query", "document" or both); in
        ColBERT `string.punctuation`. Words that are not one token of the tokenizer are ignored, as in
        sentence-transformers. similarity: "maxsim", or "meanmaxsim", the mean over the query's vectors.
        Raises ValueError for a tokenizer with ids that the model lacks, for dense layers that do not fit, and for
        invalid values.
        """
        config, special = model.config, tokenizer.num_special_tokens_to_add(False)
        check_ids(tokenizer, config)
        given = {"max_length": max_length, "query_length": query_length, "document_length": document_length}
        for name, length in given.items():
            if length is not None and (not isinstance(length, int) or length <= special):
                raise ValueError(f"{name} is {length!r}; expected a number above the {special} special tokens")
        if similarity not in SIMILARITIES:
            raise ValueError(f"similarity is {similarity!r}; expected {', '.join(SIMILARITIES)}")
        if not set(skip_tasks) <= set(TASKS):
            raise ValueError(f"skip_tasks is {tuple(skip_tasks)}; expected some of {', '.join(TASKS)}")
        self.tokenizer, self.prompts = copy_of(tokenizer), checked_prompts("MultiVectorEncoder", prompts)
        self.similarity_name = similarity
        self.query_length, self.document_length, self.expansion = query_length, document_length, expansion
        self.max_length = min(max_length or config.max_sequence_length, config.max_sequence_length)
        self.skip_words = tuple(strings("MultiVectorEncoder", "skip_words", list(skip_words)))
        self.skip_tasks = tuple(skip_tasks)
        most = min(query_length or config.max_sequence_length, config.max_sequence_length)
        if expansion is not None and not special < expansion.length <= most:
            raise ValueError(f"the expansion's length is {expansion.length}; expected {special + 1} to {most}")
        sentence_files.width_after(config.hidden_size, dense)
        self.vectors = TokenVectors(
            model,
            dense,
            normalize=normalize,
            expansion=self._added(),
            skip_ids=[found for word in self.skip_words if (found := self.tokenizer.token_to_id(word)) is not None],
            skip_in=tuple(task in self.skip_tasks for task in TASKS),
        )
        self.vectors.to(model.device).eval()
        if model.dtype == torch.float64:
            self.vectors.dense.double()

    def _added(self) -> Expansion | None:
        given = self.expansion
        if given is None:
            return None
        name = given.token
        token_id = special_token_id(self.tokenizer, "mask_token") if name is None else self.tokenizer.token_to_id(name)
        if token_id is None:
            raise ValueError(f"the tokenizer has no {name or 'mask token'}; expected one for the expansion of queries")
        return Expansion(given.length, token_id, given.attend, given.strategy == "fixed")

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
    ) -> "MultiVectorEncoder":
        """Loads a directory of sentence-transformers, PyLate or ColBERT's own code, or a model by its name on the hub.

        precision: "fp32", "bf16", "int8" or "fp8" prepares the model with `fastbert.prepare`. Raises
        FileNotFoundError, ValueError and RuntimeError as `BertModel.from_pretrained`, and ValueError for a directory of
        another kind of model, and for modules and settings that are not supported.
        """
        recipe = multi_vector_files.read(hub.directory_of(source))
        read = functools.partial(BertModel.from_pretrained, recipe.folder, add_pooling_layer=False)
        options, tokenizer = recipe._asdict(), sentence_files.read_tokenizer(recipe.folder)
        _add_markers(tokenizer, options.pop("markers"))
        options.pop("folder")
        return cls(load(read, dtype, device, precision), tokenizer, **options)

    def save_pretrained(self, directory: str | Path, format: str = "sentence-transformers") -> None:
        """Writes a directory that `from_pretrained` and sentence-transformers' MultiVectorEncoder read.

        format: "colbert" writes it as ColBERT's own code does, which sentence-transformers and PyLate read too. Each
        file is replaced whole; modules.json is written last. Raises ValueError for another format, and for an encoder
        that the format "colbert" cannot describe.
        """
        if format not in FORMATS:
            raise ValueError(f"MultiVectorEncoder: format is {format!r}; expected {', '.join(FORMATS)}")
        directory = Path(directory)
        recipe = Recipe(
            directory, tuple(self.vectors.dense), self.vectors.normalize, self.prompts, self.query_length,
            self.document_length, self.expansion, self.skip_words, self.skip_tasks, self.similarity_name,
            self.max_length,
        )  # fmt: skip
        if format == "colbert":  # refused before anything is written
            multi_vector_files.colbert_settings(recipe)
            _require_markers(self.tokenizer, self.prompts)
        sentence_files.begin(directory)
        if format == "colbert":
            multi_vector_files.write_colbert(recipe, self.model)
        else:
            self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory, self.max_length)
        if format != "colbert":
            multi_vector_files.write(recipe)

    def encode_query(self, texts: list[str], **options: Any) -> list[Tensor]:
        """The vectors of each query, (tokens, D) in float32 or better, on the model's device.

        options: prompt, what goes before each text, or prompt_name, the name of one in `prompts`; by default the prompt
        named "query", if there is one. tokens_per_batch (2048): the most tokens in one forward, but always at least one
        text. progress: called after each forward with its number of texts. Raises TypeError for anything but a list of
        strings, ValueError for half a surrogate pair and an unknown prompt_name.
        """
        return self._encode(texts, "query", **options)

    def encode_document(self, texts: list[str], **options: Any) -> list[Tensor]:
        """The vectors of each document. As `encode_query`, with the prompt named "document"."""
        return self._encode(texts, "document", **options)

    def _encode(
        self,
        texts: list[str],
        task: str,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        tokens_per_batch: int = 2048,
        progress: Callable[[int], object] | None = None,
    ) -> list[Tensor]:
        ids = self.tokenize(texts, task, prompt=prompt, prompt_name=prompt_name)
        added = self.expansion.length if task == "query" and self.expansion else 0
        result: list[Tensor] = [torch.empty(0)] * len(ids)
        for batch in batches([max(len(i), added) for i in ids], tokens_per_batch):
            for index, vectors in zip(batch, self.embed([ids[i] for i in batch], task), strict=True):
                result[index] = vectors
            if progress:
                progress(len(batch))
        return result

    def tokenize(
        self, texts: list[str], task: str, *, prompt: str | None = None, prompt_name: str | None = None
    ) -> list[list[int]]:
        """The token ids of each text with prompt and special tokens, but without the expansion, cut at the task's
        length with a warning. task: "query" or "document". Raises as `encode_query` does."""
        if prompt is None and prompt_name is not None:
            require_prompt(prompt_name, self.prompts)
        prompt = self.prompts.get(prompt_name or task, "") if prompt is None else prompt
        text_of("MultiVectorEncoder", "prompt", prompt)
        texts = [prompt + text for text in strings("MultiVectorEncoder", "texts", texts)]
        return token_ids(self.tokenizer, texts, self.length_of(task))

    def length_of(self, task: str) -> int:
        """The length in tokens at which texts of a task, "query" or "document", are cut."""
        if task not in TASKS:
            raise ValueError(f"MultiVectorEncoder: task is {task!r}; expected {' or '.join(TASKS)}")
        if task == "query" and self.expansion and self.expansion.strategy == "fixed":
            return self.expansion.length
        given = self.query_length if task == "query" else self.document_length
        return min(given or self.max_length, self.model.config.max_sequence_length)

    @torch.inference_mode()
    def embed(self, ids: list[list[int]], task: str) -> list[Tensor]:
        """The vectors of tokenized texts, in one forward."""
        vectors, ends = self.vectors(*packed(ids, self.device), query=task == "query")
        return [part.clone() for part in vectors.split(ends.diff().tolist())]

    def dataset(self, columns: Mapping[str, Iterable[str]], **options: Any) -> ContrastiveDataset:
        """The texts of columns, queries first, then documents, with this encoder's prompts and lengths, for training.

        options: for ContrastiveDataset, such as scores. Raises as ContrastiveDataset does.
        """
        tasks = {name: "document" if place else "query" for place, name in enumerate(columns)}
        prompts = {name: self.prompts[task] for name, task in tasks.items() if self.prompts.get(task)}
        lengths = {name: self.length_of(task) for name, task in tasks.items()}
        return ContrastiveDataset(columns, self.tokenizer, prompts=prompts, max_length=lengths, **options)

    def similarity(self, queries: list[Tensor], documents: list[Tensor]) -> Tensor:
        """(queries, documents) scores, float32 or better; larger is more similar. As `maxsim`, or its mean."""
        return self._measured(maxsim, queries, documents)

    def similarity_pairwise(self, queries: list[Tensor], documents: list[Tensor]) -> Tensor:
        """(N,): the score of each query with the document at the same index. As `maxsim_pairs`, or its mean."""
        return self._measured(maxsim_pairs, queries, documents)

    def _measured(self, measure: Callable[..., Tensor], queries: list[Tensor], documents: list[Tensor]) -> Tensor:
        no_vector, mean = torch.empty(0, self.width, device=self.device), self.similarity_name == "meanmaxsim"
        return late_scores(measure, queries, documents, no_vector, mean=mean)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[dict[str, Any]]:
        """The documents, or the top_k best, best first: {"corpus_id": its index, "score": a float}, as
        `CrossEncoder.rank`. Raises ValueError for a top_k below 1 and a score that is NaN, TypeError for anything
        but strings."""

        def score(documents: list[str]) -> Tensor:
            found = self.encode_document(documents, progress=progress)
            return self.similarity(self.encode_query([query]), found)[0]

        return ranked("MultiVectorEncoder", score, query, documents, top_k, return_documents)

    @property
    def model(self) -> BertModel:
        return self.vectors.encoder

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        dense = self.vectors.dense
        return dense[-1].linear.out_features if len(dense) else self.model.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self.model.embeddings.word_embeddings.weight.device


def late_scores(
    measure: Callable[..., Tensor], queries: list[Tensor], documents: list[Tensor], no_vector: Tensor, *, mean: bool
) -> Tensor:
    """The scores of texts by their vectors, (tokens, D) each. measure: `maxsim` or `maxsim_pairs`. no_vector: (0, D),
    for an empty list. mean: divides a score by the number of the query's vectors."""
    packed = []
    for texts in map(list, (queries, documents)):
        for index, text in enumerate(texts):
            require_tensor("similarity", text)
            if text.dim() != 2 or text.shape[1] != no_vector.shape[1]:
                shape = f"text {index} has vectors of shape {tuple(text.shape)}"
                raise ValueError(f"similarity: {shape}; expected (tokens, {no_vector.shape[1]})")
        vectors = torch.cat(texts or [no_vector])
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64, device=vectors.device)
        packed += [vectors, cu_seqlens_of(lengths)]
    scores = measure(*packed)
    if not mean:
        return scores
    counts = packed[1].diff().clamp(min=1).to(scores)
    return scores / counts.view(-1, *[1] * (scores.dim() - 1))


def _require_markers(tokenizer: Any, prompts: Mapping[str, str]) -> None:
    """Raises ValueError for a marker that is not one token, as it would be once it is read from ColBERT's files."""
    for name, prompt in prompts.items():
        marker = prompt.removesuffix(" ")
        tokens = tokenizer.encode(marker, add_special_tokens=False).tokens
        if marker and tokens != [marker]:
            expected = f"one: tokenizer.add_special_tokens([{marker!r}]) before the encoder is made"
            if tokenizer.token_to_id(marker) is None:
                expected = 'a word of the vocabulary, such as "[unused0]", made a special token'
            raise ValueError(
                f"the format 'colbert' makes {name}'s marker one token, here it is {tokens}; expected {expected}"
            )


def _add_markers(tokenizer: Any, markers: Iterable[str]) -> None:
    """Makes a marker that is in the vocabulary, such as "[unused0]" or "[Q] ", one token where it begins a text.

    A marker that the vocabulary lacks is tokenised as text, as in sentence-transformers.
    """
    from tokenizers import AddedToken

    for marker in markers:
        known = [word for word in (marker, *marker.split(None, 1)[:1]) if tokenizer.token_to_id(word) is not None]
        if known and marker.strip() and tokenizer.encode(known[0], add_special_tokens=False).tokens != [known[0]]:
            tokenizer.add_special_tokens([AddedToken(known[0], normalized=False, special=True)])
