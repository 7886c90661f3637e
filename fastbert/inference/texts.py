"""The base of encoders of texts: a tokenizer, prompts, batches of texts of similar length."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastbert.data.collator import PackingCollator
from fastbert.data.encode import COLUMNS, cut_encodings
from fastbert.data.tokenizer import check_ids, copy_of, strings, text_of
from fastbert.inference.sentence_files import SIMILARITIES
from fastbert.model import Saveable, require_ours


class TextEncoder:
    """A model in evaluation mode with a tokenizer and prompts."""

    def __init__(
        self,
        model: Saveable,
        tokenizer: Any,
        *,
        max_length: int | None,
        prompts: Mapping[str, str] | None,
        default_prompt_name: str | None,
        similarity: str,
    ) -> None:
        """Raises ValueError for a tokenizer with ids that the model lacks, and for invalid values; TypeError for
        another library's model."""
        require_ours(type(self).__name__, model)
        config, special = model.config, tokenizer.num_special_tokens_to_add(False)
        check_ids(tokenizer, config)
        if max_length is not None and (not isinstance(max_length, int) or max_length <= special):
            raise ValueError(f"max_length is {max_length!r}; expected a number above the {special} special tokens")
        if similarity not in SIMILARITIES:
            raise ValueError(f"similarity is {similarity!r}; expected {', '.join(SIMILARITIES)}")
        self.model, self.tokenizer, self.similarity_name = model.eval(), copy_of(tokenizer), similarity
        self.max_length = min(max_length or config.max_sequence_length, config.max_sequence_length)
        self.prompts = checked_prompts(type(self).__name__, prompts)
        self.default_prompt_name = default_prompt_name
        self._prompt(None, default_prompt_name)

    def tokenize(self, texts: list[str], truncation: bool = True) -> list[list[int]]:
        """The token ids of each text with special tokens, cut at max_length with a warning.

        truncation: False raises ValueError for a longer text. Raises TypeError for anything but a list of strings,
        ValueError for half a surrogate pair.
        """
        return token_ids(self.tokenizer, strings(type(self).__name__, "texts", texts), self.max_length, truncation)

    def encode(self, texts: list[str], *, prompt: str | None = None, prompt_name: str | None = None) -> Tensor:
        """The vectors of texts, (len(texts), C); each encoder has further options."""
        raise NotImplementedError

    def encode_query(self, texts: list[str], **options: Any) -> Tensor:
        """`encode` with the prompt named "query", if there is one; options may choose another by prompt or prompt_name.

        Equivalent to sentence-transformers' `encode_query` of a saved model, which never takes the default prompt.
        """
        return self.encode(texts, **self._with_prompt_of(options, "query"))

    def encode_document(self, texts: list[str], **options: Any) -> Tensor:
        """`encode` with the prompt named "document", if there is one; options may choose another as in `encode_query`.

        Equivalent to sentence-transformers' `encode_document` of a saved model, which always has a prompt of that name,
        even if it is empty. A prompt named "passage" has to be chosen.
        """
        return self.encode(texts, **self._with_prompt_of(options, "document"))

    def _with_prompt_of(self, options: dict[str, Any], task: str) -> dict[str, Any]:
        chosen = options.get("prompt") is not None or options.get("prompt_name") is not None
        return options if chosen else {**options, "prompt": self.prompts.get(task, "")}

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        if prompt is not None:
            return text_of(type(self).__name__, "prompt", prompt)
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        require_prompt(name, self.prompts)
        return self.prompts[name]

    def _prompted(self, texts: list[str], prompt: str) -> list[list[int]]:
        """The token ids of each text with the prompt before it."""
        if prompt:
            texts = [prompt + text for text in strings(type(self).__name__, "texts", texts)]
        return self.tokenize(texts)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device


def batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices sorted by length, longest first, in batches of at most `budget` tokens (or of one text). Raises
    ValueError for a budget below 1."""
    if budget < 1:
        raise ValueError(f"tokens_per_batch is {budget}; expected at least 1")
    batch, tokens = [], 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and tokens + lengths[index] > budget:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def check_length(owner: str, max_length: int | None, model: Saveable) -> None:
    """Raises ValueError for a max_length above the model's."""
    longest = model.config.max_sequence_length
    if max_length is not None and max_length > longest:
        raise ValueError(f"{owner}: max_length is {max_length}; expected at most the model's, {longest}")


def token_ids(tokenizer: Any, texts: list[str], max_length: int, truncation: bool = True) -> list[list[int]]:
    """The token ids of each text with special tokens, cut at max_length as `cut_encodings` does."""
    found = cut_encodings(tokenizer, texts, max_length, truncation)
    return [COLUMNS["input_ids"](encoding)[left].tolist() for encoding, left in found]


def packed(ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """input_ids, cu_seqlens and max_seqlen of tokenized texts."""
    batch = PackingCollator()([{"input_ids": text} for text in ids])
    return batch["input_ids"].to(device), batch["cu_seqlens"].to(device), batch["max_seqlen"]


def checked_prompts(owner: str, prompts: Mapping[str, str | None] | None) -> dict[str, str]:
    """The prompts, "" for None, as in sentence-transformers. Raises as `text_of` does."""
    given = {name: "" if prompt is None else prompt for name, prompt in (prompts or {}).items()}
    return {name: text_of(owner, f"prompts[{name!r}]", prompt) for name, prompt in given.items()}


def require_prompt(name: str, prompts: Mapping[str, str]) -> None:
    """Raises ValueError unless there is a prompt of that name."""
    if name not in prompts:
        raise ValueError(f"there is no prompt {name!r}; this encoder has {', '.join(map(repr, prompts)) or 'none'}")
