"""Sentence embeddings on packed tokens."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import hub
from fastbert.data.collator import PackingCollator
from fastbert.data.encode import COLUMNS, cut_encodings
from fastbert.data.tokenizer import copy_of, get_tokenizer, strings
from fastbert.inference.loading import load
from fastbert.model import BertModel
from fastbert.pooling import check_mode, pool


class SentenceEncoder:
    """Embeds texts: tokenizer, model, pooling and normalisation.

    Computes what sentence-transformers computes with the same directory, or refuses the directory.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        max_length: int | None = None,
    ) -> None:
        """tokenizer: a `tokenizers.Tokenizer`, which is copied. The model is set to evaluation mode.

        pooling: "mean" over the tokens, or "cls", the first token. normalize: to vectors of length 1. max_length: in
        tokens; longer texts are cut. Raises ValueError for a tokenizer with ids that the model lacks, and for other
        values.
        """
        config, special = model.config, tokenizer.num_special_tokens_to_add(False)
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model embeds {config.vocab_size}"
            )
        if max_length is not None and (not isinstance(max_length, int) or max_length <= special):
            raise ValueError(f"max_length is {max_length!r}; expected a number above the {special} special tokens")
        self.model, self.pooling, self.normalize = model.eval(), check_mode(pooling), normalize
        self.max_length = min(max_length or config.max_sequence_length, config.max_sequence_length)
        self.tokenizer = copy_of(tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        max_length: int | None = None,
    ) -> "SentenceEncoder":
        """From a directory with a model and its tokenizer, following sentence-transformers' files if it has them.

        source: may also be a model's name on the hub. Without modules.json: mean pooling, normalised. precision:
        "fp32", "bf16" or "int8" for a model that `fastbert.prepare` has prepared, on the CPU. max_length: in tokens;
        None follows those files. Raises FileNotFoundError, ValueError and RuntimeError as `BertModel.from_pretrained`,
        and ValueError for modules or a pooling that are not supported, a max_length above the model's, and a precision
        that is unknown or beside another dtype than float32 or a GPU.
        """
        directory = hub.directory_of(source)
        folder, pooling, normalize = _sentence_modules(directory)
        settings = _read_json(folder / "sentence_bert_config.json") or _read_json(
            directory / "sentence_bert_config.json"
        )

        def read(dtype: torch.dtype | str | None) -> BertModel:
            return BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=dtype)

        model = load(read, dtype, device, precision)
        longest = model.config.max_sequence_length
        if max_length is not None and max_length > longest:
            raise ValueError(f"SentenceEncoder: max_length is {max_length}; expected at most the model's, {longest}")
        return cls(
            model,
            get_tokenizer(folder),
            pooling=pooling,
            normalize=normalize,
            max_length=settings.get("max_seq_length") if max_length is None else max_length,
        )

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text with special tokens, cut at max_length with a warning.

        Raises TypeError for anything but a list of strings, ValueError for half a surrogate pair.
        """
        texts = strings("SentenceEncoder", "texts", texts)
        found = cut_encodings(self.tokenizer, texts, self.max_length)
        return [COLUMNS["input_ids"](encoding)[left].tolist() for encoding, left in found]

    def encode(
        self, texts: list[str], *, tokens_per_batch: int = 2048, progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """(len(texts), C) float32 embeddings, on the model's device.

        tokens_per_batch: the most tokens in one forward, but always at least one text. progress: called after each
        forward with its number of texts. Raises as `tokenize` does.
        """
        ids = self.tokenize(texts)
        result = torch.empty(len(ids), self.model.config.hidden_size, device=self.device, dtype=torch.float32)
        for batch in batches([len(i) for i in ids], tokens_per_batch):
            result[batch] = self.embed([ids[i] for i in batch])
            if progress:
                progress(len(batch))
        return result

    @torch.inference_mode()
    def embed(self, ids: list[list[int]]) -> Tensor:
        """(len(ids), C) float32 embeddings of tokenized texts, in one forward."""
        packed = PackingCollator()([{"input_ids": text} for text in ids])
        input_ids, cu_seqlens = (packed[name].to(self.device) for name in ("input_ids", "cu_seqlens"))
        hidden = self.model(input_ids, cu_seqlens=cu_seqlens, max_seqlen=packed["max_seqlen"]).last_hidden_state.float()
        vectors = pool(hidden, cu_seqlens, self.pooling)
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    @property
    def device(self) -> torch.device:
        return self.model.embeddings.word_embeddings.weight.device


def batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices sorted by length, longest first, in batches of at most `budget` tokens (or of one text)."""
    batch, tokens = [], 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and tokens + lengths[index] > budget:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def _sentence_modules(directory: Path) -> tuple[Path, str, bool]:
    """The model's folder, the pooling, and whether to normalise, from sentence-transformers' modules.json."""
    modules = _read_json(directory / "modules.json")
    if not modules:
        return directory, "mean", True
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(f"{directory} has the modules {', '.join(kinds)}; expected Transformer, Pooling[, Normalize]")
    settings = _read_json(directory / modules[1]["path"] / "config.json")
    legacy = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    pooling = settings.get("pooling_mode") or "+".join(names.get(name, name) for name in legacy)
    if pooling not in ("mean", "cls"):
        raise ValueError(f"{directory} pools by {pooling!r}; expected mean or cls")
    return directory / modules[0]["path"], pooling, len(kinds) == 3


def _read_json(path: Path):
    """The file's content; {} if there is no file. Raises ValueError for invalid JSON."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
