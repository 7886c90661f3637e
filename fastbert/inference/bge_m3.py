"""BGE-M3: one encoder that embeds a text in three ways: as one vector, as weights of its tokens, as a vector per token.

Chen et al., "M3-Embedding", 2024, section 3.2. The files' format and how scores are added up follow FlagEmbedding.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert import hub
from fastbert.checkpoint import read_pickled
from fastbert.data.tokenizer import check_ids, copy_of, get_tokenizer, save_tokenizer, special_token_id, strings
from fastbert.files import replacing
from fastbert.inference import sentence_files
from fastbert.inference.loading import load
from fastbert.inference.multi_vector import late_scores
from fastbert.inference.rerank import pairs_of
from fastbert.inference.sparse import products
from fastbert.inference.texts import batches, packed, token_ids
from fastbert.maxsim import maxsim, maxsim_pairs
from fastbert.model import BertModel
from fastbert.ops.numbers import wide
from fastbert.padding import packed_positions
from fastbert.pooling import pool

UNUSED = ("cls_token", "sep_token", "pad_token", "unk_token")  # get no sparse weight; sep is XLM-RoBERTa's eos
KINDS = ("dense", "sparse", "multi_vector")
FILES = {"sparse": "sparse_linear.pt", "multi_vector": "colbert_linear.pt"}


class M3Embeddings(NamedTuple):
    """The embeddings of N texts, in float32 or better; None for a kind that was not requested.

    dense: (N, C), of length 1. sparse: (N, vocabulary), a sparse COO tensor of positive weights, coalesced.
    multi_vector: for each text (tokens - 1, D), vectors of length 1, of all tokens but the first.
    """

    dense: Tensor | None
    sparse: Tensor | None
    multi_vector: list[Tensor] | None


class M3Scores(NamedTuple):
    """Scores, all of one shape; larger is more similar. dense, sparse: dot products. multi_vector: MaxSim, the mean
    over the query's vectors. sparse_dense, total: the weighted means of sparse and dense, and of all three."""

    dense: Tensor
    sparse: Tensor
    multi_vector: Tensor
    sparse_dense: Tensor
    total: Tensor


class M3Encoder:
    """Embeds texts as FlagEmbedding's BGEM3FlagModel does with the same directory, and scores them.

    Two differences: vectors are on the model's device, and texts are not padded. In FlagEmbedding, padding counts as a
    token of a document, whose product with each token of a query is 0.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: Any,
        sparse: nn.Linear,
        multi_vector: nn.Linear,
        max_length: int | None = None,
    ) -> None:
        """tokenizer: a `tokenizers.Tokenizer`, which is copied. sparse: C -> 1, multi_vector: C -> D, linear layers for
        each token. max_length: in tokens; longer texts are cut. Model and layers are set to evaluation mode.

        Raises ValueError for a model that is not an XLM-RoBERTa, layers of other sizes, a tokenizer with ids that the
        model lacks or without XLM-RoBERTa's special tokens, and a max_length below 3 or above the model's.
        """
        config, longest = model.config, model.config.max_sequence_length
        if config.model_type != "xlm-roberta":
            raise ValueError(f"M3Encoder: the model is a {config.model_type}; expected an xlm-roberta")
        for name, layer, rows in (("sparse", sparse, 1), ("multi_vector", multi_vector, multi_vector.out_features)):
            if (layer.in_features, layer.out_features) != (config.hidden_size, rows):
                given = f"{layer.in_features} to {layer.out_features}"
                raise ValueError(f"M3Encoder: {name} is {given}; expected {config.hidden_size} to {rows}")
        check_ids(tokenizer, config)
        if max_length is not None and not 2 < max_length <= longest:
            raise ValueError(f"M3Encoder: max_length is {max_length}; expected 3 to {longest}, the model's")
        self.tokenizer, self.max_length = copy_of(tokenizer), max_length or longest
        unused = [special_token_id(self.tokenizer, role) for role in UNUSED]
        if None in unused:
            raise ValueError(f"M3Encoder: the tokenizer has no {UNUSED[unused.index(None)]}")
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.model = model.eval()
        self.sparse, self.multi_vector = (x.to(model.device, dtype).eval() for x in (sparse, multi_vector))
        self._unused = torch.tensor(unused, device=model.device)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        max_length: int | None = None,
    ) -> "M3Encoder":
        """Loads a directory with XLM-RoBERTa, its tokenizer, sparse_linear.pt and colbert_linear.pt.

        Arguments and errors as for `SentenceEncoder.from_pretrained`; also FileNotFoundError if one of the two .pt
        files is missing, and ValueError if it holds anything but one linear layer.
        """
        directory = hub.directory_of(source)
        read = functools.partial(BertModel.from_pretrained, directory, add_pooling_layer=False)
        layers = {name: _linear(directory / file) for name, file in FILES.items()}
        given = sentence_files.max_length_of(directory, directory) if max_length is None else max_length
        model = load(read, dtype, device, precision)
        longest = model.config.max_sequence_length
        given = min(given or longest, longest) if max_length is None else given
        return cls(model, get_tokenizer(directory), **layers, max_length=given)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that `from_pretrained` and FlagEmbedding read. SentenceEncoder and sentence-transformers
        compute the same dense vectors from it. Each file is replaced whole; modules.json is written last."""
        directory = Path(directory)
        sentence_files.begin(directory, "1_Pooling")
        self.model.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory, self.max_length)
        for name, file in FILES.items():
            with replacing(directory / file) as opened:
                torch.save({n: t.detach().cpu().clone() for n, t in getattr(self, name).state_dict().items()}, opened)
        recipe = sentence_files.Recipe(directory, ("cls",), max_length=self.max_length)
        sentence_files.write(recipe, self.model.config.hidden_size)

    def encode(
        self,
        texts: list[str],
        *,
        dense: bool = True,
        sparse: bool = True,
        multi_vector: bool = True,
        tokens_per_batch: int = 2048,
        progress: Callable[[int], object] | None = None,
    ) -> M3Embeddings:
        """The embeddings of the requested kinds. tokens_per_batch, progress: as in `SentenceEncoder.encode`.

        dense: the first token, normalised. sparse: relu(linear) of each token, without special and unknown tokens, the
        largest if a token is repeated. multi_vector: a linear layer of each token but the first, normalised.
        Raises TypeError for anything but a list of strings, ValueError for half a surrogate pair, and if no kind is
        requested.
        """
        wanted = dict(zip(KINDS, (dense, sparse, multi_vector), strict=True))
        if not any(wanted.values()):
            raise ValueError(f"M3Encoder: no kind of embeddings is asked for; expected some of {', '.join(KINDS)}")
        ids = token_ids(self.tokenizer, strings("M3Encoder", "texts", texts), self.max_length)
        made: dict[str, list[Tensor]] = {kind: [torch.empty(0)] * len(ids) for kind in KINDS}
        for batch in batches([len(i) for i in ids], tokens_per_batch):
            for kind, rows in self._embed([ids[i] for i in batch], wanted).items():
                for index, row in zip(batch, rows, strict=True):
                    made[kind][index] = row
            if progress:
                progress(len(batch))
        joined = {"dense": self._dense_rows, "sparse": self._sparse_rows, "multi_vector": list}
        return M3Embeddings(*(joined[kind](made[kind]) if wanted[kind] else None for kind in KINDS))

    def _dense_rows(self, rows: list[Tensor]) -> Tensor:
        return torch.cat([self.sparse.weight.detach()[:0], *(row.unsqueeze(0) for row in rows)])

    @torch.inference_mode()
    def _embed(self, ids: list[list[int]], wanted: dict[str, bool]) -> dict[str, list[Tensor]]:
        """The embeddings of tokenized texts by kind, in one forward; sparse ones as two rows, ids and weights."""
        input_ids, ends, longest = packed(ids, self.model.device)
        hidden = self.model(input_ids, cu_seqlens=ends, max_seqlen=longest).last_hidden_state
        hidden, lengths, made = wide(hidden), [len(text) for text in ids], {}
        if wanted["dense"]:
            made["dense"] = list(F.normalize(pool(hidden, ends, "cls"), dim=-1))
        if wanted["sparse"]:
            weights = self.sparse(hidden).squeeze(-1).relu()
            made["sparse"] = list(map(self._largest, input_ids.split(lengths), weights.split(lengths)))
        if wanted["multi_vector"]:
            rest = packed_positions(ends, len(hidden)) > 0
            vectors = F.normalize(self.multi_vector(hidden[rest]), dim=-1)
            made["multi_vector"] = [part.clone() for part in vectors.split([length - 1 for length in lengths])]
        return made

    def _largest(self, ids: Tensor, weights: Tensor) -> Tensor:
        """(2, tokens) float64: the distinct ids of a text that have a weight, ascending, and their largest weights."""
        kept = (weights > 0) & ~torch.isin(ids, self._unused)
        found, places = ids[kept].unique(return_inverse=True)
        largest = weights.new_zeros(len(found)).scatter_reduce_(0, places, weights[kept], "amax")
        return torch.stack([found.double(), largest.double()])

    def _sparse_rows(self, rows: list[Tensor]) -> Tensor:
        device, dtype = self.model.device, self.sparse.weight.dtype
        both = torch.cat([torch.empty(2, 0, dtype=torch.float64, device=device), *rows], 1)
        lengths = torch.tensor([row.shape[1] for row in rows], dtype=torch.int64, device=device)
        place = torch.arange(len(rows), device=device).repeat_interleave(lengths)
        shape = (len(rows), self.model.config.vocab_size)
        indices = torch.stack([place, both[0].long()])
        return torch.sparse_coo_tensor(indices, both[1].to(dtype), shape, is_coalesced=True, check_invariants=False)

    def lexical_weights(self, sparse: Tensor) -> list[dict[str, float]]:
        """For each text of `encode`'s sparse embeddings, or of some of their rows, its tokens, as the vocabulary has
        them, and their weights. Raises ValueError for anything but rows, (N, V)."""
        if sparse.dim() != 2:
            raise ValueError(f"lexical_weights: sparse has shape {tuple(sparse.shape)}; expected (N, V), as sparse[:1]")
        sparse = sparse.to_sparse_coo().coalesce()
        result: list[dict[str, float]] = [{} for _ in range(sparse.shape[0])]
        for (text, token), weight in zip(sparse.indices().T.tolist(), sparse.values().tolist(), strict=True):
            result[text][self.tokenizer.id_to_token(token)] = weight
        return result

    def scores(
        self, queries: M3Embeddings, documents: M3Embeddings, weights: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> M3Scores:
        """The scores of all queries with all documents, (N, M) each. weights: of dense, sparse, multi_vector in means.

        Raises ValueError for embeddings without all three kinds, and for invalid weights.
        """
        self._check(queries, documents, weights)
        dense = queries.dense @ documents.dense.T
        sparse = products(queries.sparse, documents.sparse)
        return _combined(dense, sparse, self._late(maxsim, queries, documents), weights)

    def compute_score(
        self,
        pairs: Iterable[Sequence[str]],
        weights: Sequence[float] = (1.0, 1.0, 1.0),
        **options: Any,
    ) -> M3Scores:
        """The scores of pairs of texts (query, document), (N,) each, as FlagEmbedding's compute_score, which calls the
        means "sparse+dense" and "colbert+sparse+dense". options: of `encode`, tokens_per_batch and progress.

        Raises TypeError for anything but pairs of strings, ValueError as `scores` does.
        """
        pairs = pairs_of("M3Encoder", pairs)
        queries, documents = (self.encode([pair[side] for pair in pairs], **options) for side in (0, 1))
        self._check(queries, documents, weights)
        dense = (queries.dense * documents.dense).sum(-1)
        products = queries.sparse * documents.sparse
        sparse = torch.sparse.sum(products, 1).to_dense() if len(pairs) else dense
        return _combined(dense, sparse, self._late(maxsim_pairs, queries, documents), weights)

    @staticmethod
    def _check(queries: M3Embeddings, documents: M3Embeddings, weights: Sequence[float]) -> None:
        missing = [kind for kind in KINDS if getattr(queries, kind) is None or getattr(documents, kind) is None]
        if missing:
            raise ValueError(f"M3Encoder: there are no {', '.join(missing)} embeddings; expected all three kinds")
        if len(weights) != 3 or min(weights) < 0 or not 0 < weights[0] + weights[1] <= sum(weights) < math.inf:
            given = f"M3Encoder: weights are {tuple(weights)}"
            raise ValueError(f"{given}; expected three, finite, none negative, dense and sparse not both 0")

    def _late(self, measure: Callable[..., Tensor], queries: M3Embeddings, documents: M3Embeddings) -> Tensor:
        no_vector = self.multi_vector.weight.new_empty(0, self.multi_vector.out_features)
        return late_scores(measure, queries.multi_vector, documents.multi_vector, no_vector, mean=True)


def _combined(dense: Tensor, sparse: Tensor, multi_vector: Tensor, weights: Sequence[float]) -> M3Scores:
    of_dense, of_sparse, of_late = weights
    two = dense * of_dense + sparse * of_sparse
    both, total = two / (of_dense + of_sparse), (two + multi_vector * of_late) / sum(weights)
    return M3Scores(dense, sparse, multi_vector, both, total)


def _linear(path: Path) -> nn.Linear:
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; expected one, as BGE-M3 has it")
    state = read_pickled(path)
    weight, bias = state.get("weight"), state.get("bias")
    if state.keys() != {"weight", "bias"} or weight.dim() != 2 or bias.shape != weight.shape[:1]:
        given = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in state.items())
        raise ValueError(f"{path} holds {given}; expected the weight and the bias of one linear layer")
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict(state)
    return layer
