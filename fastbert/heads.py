"""BERT and its family with a head: masked LM, next sentence, replaced tokens, sequence and token classification,
question answering, multiple choice.

One class per head serves all families; `fastbert/families.py` says how a family's head differs from BERT's. Arguments,
losses and checkpoints are those of `transformers`; the computation runs on packed tokens. All heads have in common:

- Padded input (B, S) with a mask, or packed input (T,) with `cu_seqlens` and `max_seqlen`; labels and logits of tokens
  have the same form. Logits of padding are zeros, and a label there counts as -100.
- The loss is a mean over the labelled rows, in float32 or better; without any labelled row it is 0, not NaN.
- Dropout before a classifier is `nn.Dropout`, as in `transformers`: it follows `torch.manual_seed`. Its mask is drawn
  for packed tokens, so padding does not change it.
- Every forward raises ValueError, TypeError and, for ids and labels out of range, IndexError (on a CPU, or under
  FASTBERT_CHECK=1).
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fastbert import checkpoint, layer, ops
from fastbert.config import BertConfig
from fastbert.families import Head
from fastbert.labels import IGNORED
from fastbert.model import (
    BertModel,
    ModelInputs,
    ModelOptions,
    Saveable,
    exportable,
    has_item,
    initialize,
    output_item,
    require_class,
)
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy_of_rows, find_labelled_rows
from fastbert.ops.numbers import wide
from fastbert.padding import Packing, packed_positions
from fastbert.prepared import TiedLinear
from fastbert.warn import warn

SPARSE_ACTIVATIONS = ("relu", "log1p_relu")


# ---- outputs


@exportable
class BertHeadOutput(NamedTuple):
    """Output of a model with a head; items as in BertModelOutput.

    loss: a scalar, None without labels. Fields that were not asked for are None.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item
    __contains__ = has_item


@exportable
class BertForPreTrainingOutput(NamedTuple):
    """BertHeadOutput with the logits of both pre-training heads."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item
    __contains__ = has_item


@exportable
class BertForQuestionAnsweringOutput(NamedTuple):
    """BertHeadOutput with logits for the first and for the last token of the answer."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item
    __contains__ = has_item


# ---- what heads share


class Body(NamedTuple):
    """The encoder's output, which a head computes on: packed, with the place of its tokens."""

    op: str  # the model's class, for error messages
    hidden: Tensor  # (T, C)
    pooled: Tensor | None  # (B, C)
    packing: Packing
    records: tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]  # hidden_states and attentions, if requested

    def token_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Checks labels in the caller's form and packs them to (T,)."""
        return _token_labels(self.op, self.packing, labels, self.hidden.device, classes)

    def sequence_labels(self, name: str, labels: Tensor, classes: int) -> Tensor:
        """Checks labels with a class for each sequence, (B,) or (B, 1), and gives them as (B,)."""
        return _sequence_labels(self.op, name, labels, self.hidden.device, self.packing.batch, classes)


def _token_labels(op: str, packing: Packing, labels: Tensor, device: torch.device, classes: int) -> Tensor:
    """Checks labels in the caller's form and packs them to (T,)."""
    padded = packing.seqlen is not None
    shape, meaning = ((packing.batch, packing.seqlen), "(B, S)") if padded else ((packing.tokens,), "(T,)")
    _check_labels(op, "labels", labels, device, shape, meaning, classes)
    return packing.pack(labels, fill=IGNORED)


def _check_labels(
    op: str, name: str, labels: Tensor, device: torch.device, shape: tuple[int, ...], meaning: str, classes: int | None
) -> None:
    """Checks that labels are integers of that shape and, with `classes`, in [0, classes) or -100."""
    checks.integers(op, **{name: labels})
    checks.shape(op, name, labels, shape, meaning)
    checks.same_device(op, {name: labels, "the model": torch.empty(0, device=device)})
    if classes is not None:
        checks.index_range(op, name, labels, classes, also=IGNORED)


def _sequence_labels(
    op: str, name: str, labels: Tensor, device: torch.device, batch: int, classes: int | None
) -> Tensor:
    """Checks labels (B,) or (B, 1), and gives them as (B,)."""
    _check_tensor(op, name, labels)
    labels = labels.flatten()
    _check_labels(op, name, labels, device, (batch,), "(B,)", classes)
    return labels


def _check_tensor(op: str, name: str, labels: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: {name} is a {type(labels).__name__}; expected a tensor")


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of labelled rows; 0 if no row is labelled."""
    total = F.cross_entropy(wide(logits), labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


class _BertWithHead(Saveable):
    """A BertModel named `bert`, and a head beside it.

    pooling: the head reads the pooler's output, or the output of a dense layer in its place.
    """

    pooling = True
    loss_options: Mapping[str, Any] = {}  # arguments for a forward whose loss alone is needed
    accepts_loss_kwargs = False  # else transformers.Trainer sees **options and passes num_items_in_batch

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self._check_head(config)
        self.config = config
        self.bert = BertModel(config, add_pooling_layer=self.pooling and self._facts.dense is None)

    @property
    def _facts(self) -> Head:
        """The facts about the family's head."""
        return self.config.head(self.kind)

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family, self._facts)

    def to_ours(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        predicts = hasattr(getattr(self, "cls", None), "predictions")
        return checkpoint.to_ours_with_head(state, self._names, predicts=predicts)

    def _check_head(self, config: BertConfig) -> None:
        op = type(self).__name__
        require_class(op, "config", config, BertConfig)
        family = config.family
        if self.kind not in family.heads:
            known = ", ".join(f"Bert{kind}" for kind in family.heads)
            raise ValueError(f"{op}: {family.name} has no such head; expected one of {known}")
        for name, expected in config.head(self.kind).requires.items():
            value = getattr(config, name, config.extra.get(name, expected))
            if value != expected and (name, value) != ("embedding_size", config.hidden_size):  # same as None
                raise ValueError(f"{op}: {name} is {value!r}; expected {expected!r}, for {family.name}")

    def _encode(
        self,
        inputs: tuple,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        packing: Packing | None = None,
        **records: bool,
    ) -> Body:
        """Runs the encoder on packed tokens.

        inputs: input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds; already packed if packing is
        given.
        """
        return self._run(*self._pack(inputs, cu_seqlens, max_seqlen, packing), **records)

    def _pack(
        self, inputs: tuple, cu_seqlens: Tensor | None, max_seqlen: int | None, packing: Packing | None
    ) -> tuple[ModelInputs, Packing]:
        if packing is None:
            return self.bert.pack(*inputs, cu_seqlens, max_seqlen)
        input_ids, mask, *others = inputs
        packing.check(type(self).__name__, others[1], mask, cu_seqlens, max_seqlen)
        return ModelInputs(input_ids, *others), packing

    def _run(self, packed: ModelInputs, packing: Packing, **records: bool) -> Body:
        """Runs the encoder. `self.bert` is called as a module, so hooks on it run."""
        if unknown := records.keys() - {"output_hidden_states", "output_attentions"}:
            raise TypeError(f"{type(self).__name__}: got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        hidden, pooled, states, attentions = self.bert(**packed._asdict(), **records, packing=packing)
        return Body(type(self).__name__, hidden, pooled, packing, (states, attentions))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | checkpoint.Checkpoint,
        *,
        dtype: torch.dtype | str | None = None,
        ignore_mismatched_sizes: bool = False,
        **config: Any,
    ) -> Self:
        """Loads a model from a directory or by its name on the hub, as BertModel does; in evaluation mode.

        The checkpoint may be a bare BertModel's or another head's. Parameters of this head and of the pooler that it
        lacks are initialised, with a UserWarning that names them; heads that this model does not have are left out.
        ignore_mismatched_sizes: parameters of this head that have another shape are initialised too, as for
        another number of labels. config: fields of the configuration to change, as in `num_labels=3`.
        Raises FileNotFoundError, TypeError (an unknown keyword), ValueError (a corrupt file, a configuration that makes
        no sense) and RuntimeError (a parameter of the encoder that is missing or unexpected, or of any part that has
        another shape).
        """
        build = lambda found: cls(found.changed(**config))  # noqa: E731
        return checkpoint.load(source).make(build, dtype, ignore_mismatched_sizes=ignore_mismatched_sizes)

    def select(self, state: dict[str, Tensor], directory: Path, ignore_mismatched_sizes: bool) -> dict[str, Tensor]:
        """A checkpoint's state without other heads, and with new parameters where it lacks some of this model."""
        expected, body = self.state_dict(), ("bert.embeddings.", "bert.encoder.")
        state = {name: tensor for name, tensor in state.items() if name in expected or name.startswith(body)}
        unfit = {name for name, x in state.items() if not name.startswith(body) and x.shape != expected[name].shape}
        if unfit and not ignore_mismatched_sizes:
            of_head = {name: tensor for name, tensor in expected.items() if not name.startswith(body)}
            raise RuntimeError(self._misfit(expected, of_head | state, unfit))
        state = {name: tensor for name, tensor in state.items() if name not in unfit}
        new = sorted(name for name in expected.keys() - state.keys() if not name.startswith(body))
        if new:
            dtype = next(iter(state.values())).dtype if state else None
            state |= {name: self._new_parameter(name, expected[name].shape, dtype) for name in new}
            names = ", ".join(checkpoint.to_hugging_face_names(new, self._names))
            lacks = "has no fitting" if ignore_mismatched_sizes else "lacks"
            warn(f"{directory} {lacks} {names}: initialised anew, to be trained")
        return state

    def _misfit(self, expected: dict[str, Tensor], given: dict[str, Tensor], unfit: set[str]) -> str:
        """What does not fit, and what to do if it is the head's parameters `unfit` alone."""
        rest = [{name: x for name, x in each.items() if name not in unfit} for each in (expected, given)]
        hint = "; ignore_mismatched_sizes=True initialises parameters of the head anew"
        hint = "" if checkpoint.misfit(*rest, self._names) else hint
        return checkpoint.misfit(expected, given, self._names) + hint

    def _new_dropout(self) -> nn.Dropout | None:
        """The head's dropout; None for a head without."""
        return nn.Dropout(self.config.dropout_of(self._facts.dropout)) if self._facts.dropout else None

    def _new_parameter(self, name: str, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        if name.endswith("LayerNorm.weight"):
            return torch.ones(shape, dtype=dtype)
        values = torch.zeros(shape, dtype=dtype)
        return values if name.endswith("bias") else values.normal_(0, self.config.initializer_range)


# ---- the heads of pre-training


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.LayerNorm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.approximate = "none" if config.head("ForMaskedLM").exact_gelu else config.gelu

    def forward(self, hidden: Tensor) -> Tensor:
        return layer.norm(layer.up_gelu(hidden, self.dense, self.approximate), self.LayerNorm)


class BertLMPredictionHead(nn.Module):
    """Logits over the vocabulary. The decoder's weight is the word embeddings, passed in, so the two are always
    tied."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.extra.get("tie_word_embeddings") is False:
            raise ValueError("BertConfig: tie_word_embeddings is False; expected True, for a masked-LM head")
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """(T, C) to logits (T, V)."""
        return ops.linear(self.transform(hidden), words, self.bias)

    def largest(self, hidden: Tensor, words: Tensor | TiedLinear, cu_seqlens: Tensor) -> Tensor:
        """(T, C) to the largest logits of each sequence, (B, V)."""
        hidden = self.transform(hidden)
        if isinstance(words, TiedLinear):
            return words.largest(hidden, cu_seqlens)
        return ops.linear_max(hidden, words, self.bias, cu_seqlens)

    def loss(self, hidden: Tensor, words: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
        """The mean cross-entropy of labelled rows. rows: their indices, so that only they are computed; None computes
        all rows."""
        if rows is not None:
            hidden, labels = ops.pack(hidden.unsqueeze(0), rows), labels.index_select(0, rows)
        return cross_entropy_of_rows(self.transform(hidden), words, self.bias, labels)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig, predictions: bool = True, seq_relationship: bool = True) -> None:
        super().__init__()
        if predictions:
            self.predictions = BertLMPredictionHead(config)
        if seq_relationship:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)
        initialize(self, config.initializer_range)


class MaskedLMOptions(ModelOptions, total=False):
    """Keyword arguments of models with a masked-LM head; BertForMaskedLM explains them. labelled_rows is not named in
    signatures, because transformers' Trainer takes every argument there with "label" in its name for labels, and gives
    no loss for batches that lack one of them."""

    labelled_rows: Tensor | None


class _MaskedLM(_BertWithHead):
    loss_options = {"skip_logits": True}

    def resize_token_embeddings(self, vocab_size: int) -> nn.Embedding:
        """Resizes the vocabulary as BertModel's method does; the head's biases of new tokens are 0."""
        words, head = super().resize_token_embeddings(vocab_size), self.cls.predictions
        kept, bias = min(vocab_size, len(head.bias)), head.bias
        head.bias = nn.Parameter(bias.new_zeros(vocab_size), bias.requires_grad)
        head.bias.data[:kept] = bias.data[:kept]
        return words

    def _predict(
        self,
        inputs: tuple,
        labels: Tensor | None,
        skip_logits: bool | None,
        labelled_rows: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        packing: Packing | None = None,
        **records: bool,
    ) -> tuple[Body, Tensor | None, Tensor | None]:
        """The encoder's output, and the masked-LM head's loss (None without labels) and logits (None if skipped).

        Labelled rows are found before the encoder runs: the host synchronisation is short while the GPU has little
        queued.
        """
        packed, packing = self._pack(inputs, cu_seqlens, max_seqlen, packing)
        op, device = type(self).__name__, packing.cu_seqlens.device
        if labelled_rows is not None and (labels is None or packing.seqlen is not None):
            raise ValueError(f"{op}: labelled_rows goes with packed labels, (T,) with cu_seqlens")
        if labels is not None:
            labels = _token_labels(op, packing, labels, device, self.config.vocab_size)
            labelled_rows = find_labelled_rows(labels) if labelled_rows is None else labelled_rows
        body, head = self._run(packed, packing, **records), self.cls.predictions
        words = self.bert.embeddings.word_embeddings.weight  # torch's pruning makes it in the forward
        loss = None if labels is None else head.loss(body.hidden, words, labels, labelled_rows)
        if skip_logits is None:
            skip_logits = self.training and labels is not None
        return body, loss, None if skip_logits else packing.unpack(head(body.hidden, words))


class BertForMaskedLM(_MaskedLM):
    """BERT with the masked-LM head; Hugging Face's BertForMaskedLM on packed tokens."""

    kind = "ForMaskedLM"
    pooling = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertPreTrainingHeads(config, seq_relationship=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        skip_logits: bool | None = None,
        **options: Unpack[MaskedLMOptions],
    ) -> BertHeadOutput:
        """Input as in BertModel. labels: (B, S) or packed (T,) integers, a token or -100. logits: (B, S, V) or (T, V).

        For the loss the head runs on labelled tokens alone. Logits, which need all tokens, are None in training with
        labels; skip_logits=False computes them, True leaves them out in evaluation too. labelled_rows: (L,) the indices
        of packed tokens that have a label, each once, if the caller knows them (`fastbert.data.PackingCollator` does);
        when None they are found before the encoder starts, with one host synchronisation on a GPU.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, loss, logits = self._predict(inputs, labels, skip_logits, **options)
        return BertHeadOutput(loss, logits, *body.records)


class BertForSparseEmbedding(_MaskedLM):
    """BERT with the masked-LM head as SPLADE uses it: one vector of the vocabulary's size for each sequence.

    The weight of a word is the maximum over tokens of log(1 + relu(logit)) (Formal et al., "SPLADE v2", 2021): this is
    the activation "relu". "log1p_relu" applies log(1 + x) to it once more (Shen et al., "Exploring l0 sparsification
    for inference-free sparse retrievers", 2025). Checkpoints are those of BertForMaskedLM, which do not hold the
    activation. Raises ValueError for another activation.
    """

    kind = "ForMaskedLM"
    pooling = False

    def __init__(self, config: BertConfig, activation: str = "relu") -> None:
        super().__init__(config)
        if activation not in SPARSE_ACTIVATIONS:
            expected = " or ".join(map(repr, SPARSE_ACTIVATIONS))
            raise ValueError(f"BertForSparseEmbedding: activation is {activation!r}; expected {expected}")
        self.cls, self.activation = BertPreTrainingHeads(config, seq_relationship=False), activation
        self.vocabulary: TiedLinear | None = None  # in a prepared model

    def pack_vocabulary(self, precision: str) -> None:
        """Packs the word embeddings once more, as the weight of the product with the vocabulary; for `prepare`."""
        self.vocabulary = TiedLinear.to_weight(self.get_input_embeddings().weight, self.cls.predictions.bias, precision)

    def resize_token_embeddings(self, vocab_size: int) -> nn.Embedding:
        words = super().resize_token_embeddings(vocab_size)
        if self.vocabulary is not None:
            self.pack_vocabulary(self.vocabulary.precision)
        return words

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Input as in BertModel. Returns (B, V) in float32 or better; zeros for a sequence without a token.

        The logits of all tokens and words are never in memory at once (`fastbert.ops.linear_max`). Equivalent to
        `torch.stack([text.relu().log1p().max(0).values for text in logits])`, where `logits` are BertForMaskedLM's
        without padding.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, words = self._encode(inputs, cu_seqlens, max_seqlen), self.vocabulary
        if words is None:
            words = self.get_input_embeddings().weight
        vectors = wide(self.cls.predictions.largest(body.hidden, words, body.packing.cu_seqlens)).relu().log1p()
        return vectors.log1p() if self.activation == "log1p_relu" else vectors


class BertForPreTraining(_MaskedLM):
    """BERT or ALBERT with both of its pre-training heads; Hugging Face's BertForPreTraining on packed tokens."""

    kind = "ForPreTraining"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.dropout = self._new_dropout()
        self.cls = BertPreTrainingHeads(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        sentence_order_label: Tensor | None = None,
        skip_logits: bool | None = None,
        **options: Unpack[MaskedLMOptions],
    ) -> BertForPreTrainingOutput:
        """Arguments as in BertForMaskedLM, and a label (B,) of the sentence pair: in BERT next_sentence_label, 0 for
        the next sentence, 1 for a random one; in ALBERT sentence_order_label, 0 for the order of the text, 1 for the
        reverse.

        loss: the sum of the two losses, or only the one whose labels are given (transformers gives none then).
        prediction_logits: (B, S, V) or (T, V), computed or left out as in BertForMaskedLM. seq_relationship_logits:
        (B, 2).
        """
        name, label = self._pair_label(next_sentence_label, sentence_order_label)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, loss, prediction_logits = self._predict(inputs, labels, skip_logits, **options)
        logits = self.cls.seq_relationship(body.pooled if self.dropout is None else self.dropout(body.pooled))
        if label is not None:
            labels = body.sequence_labels(name, label, 2)
            loss = _cross_entropy(logits, labels) + (0 if loss is None else loss)
        return BertForPreTrainingOutput(loss, prediction_logits, logits, *body.records)

    def _pair_label(self, next_sentence: Tensor | None, order: Tensor | None) -> tuple[str, Tensor | None]:
        labels, name = {"next_sentence_label": next_sentence, "sentence_order_label": order}, self._facts.pair_label
        label = labels.pop(name)
        for other, given in labels.items():
            if given is not None:
                raise ValueError(f"BertForPreTraining: {other} is given; {self.config.family.name} has {name}")
        return name, label


# ---- classifiers


class _Classifier(_BertWithHead):
    """A head that computes a loss and logits, in the caller's form, from the encoder's output and labels."""

    def _classify(self, body: Body, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        raise NotImplementedError

    def _add_classifier(self, classes: int) -> None:
        width = self.config.hidden_size
        self.dropout = self._new_dropout()
        self.classifier = nn.Linear(width, classes)
        initialize(self.classifier, self.config.initializer_range)
        if self.pooling and self._facts.dense:
            self.pre_classifier = nn.Linear(width, width)
            initialize(self.pre_classifier, self.config.initializer_range)
            if name := self._facts.first_dropout:
                self.first_dropout = nn.Dropout(self.config.dropout_of(name))

    def _score(self, body: Body) -> Tensor:
        """Logits (B, classes), from the pooler's output or, for heads with their own dense layer, the first token."""
        facts, x = self._facts, body.pooled
        if facts.dense:
            x = body.packing.first(body.hidden)
            before = self.first_dropout if facts.first_dropout else self.dropout
            x = self.pre_classifier(before(x) if facts.drops_first else x)
            x = layer.ACTIVATIONS[self.config.extra.get(facts.dense, facts.dense)](x)
        return self.classifier(self.dropout(x))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Unpack[ModelOptions],
    ) -> BertHeadOutput:
        """Input as in BertModel; labels and logits as the class says."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body = self._encode(inputs, **options)
        return BertHeadOutput(*self._classify(body, labels), *body.records)


class BertForNextSentencePrediction(_Classifier):
    """BERT with the next-sentence head. labels: (B,), 0 for the next sentence, 1 for a random one. logits: (B, 2)."""

    kind = "ForNextSentencePrediction"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertPreTrainingHeads(config, predictions=False)

    def _classify(self, body: Body, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        logits = self.cls.seq_relationship(body.pooled)
        if labels is None:
            return None, logits
        return _cross_entropy(logits, body.sequence_labels("labels", labels, 2)), logits


class BertForSequenceClassification(_Classifier):
    """BERT with a classifier or a regression on the pooled output. logits: (B, num_labels).

    config.problem_type decides the loss. If it is None, num_labels and the dtype of the first labels decide, and it is
    set in the model's own copy of the configuration, so that a saved model says how to read its logits:
    "regression" (one label; mean squared error; labels (B,), or (B, num_labels) for several),
    "single_label_classification" (integers; cross-entropy; labels (B,), a class or -100),
    "multi_label_classification" (floats from 0 to 1; binary cross-entropy; labels (B, num_labels)).
    """

    kind = "ForSequenceClassification"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(copy.copy(config))
        self._add_classifier(config.num_labels)

    def _classify(self, body: Body, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        logits = self._score(body)
        if labels is None:
            return None, logits
        _check_tensor(body.op, "labels", labels)
        problem = self.problem_of(labels)
        loss = self._loss(body, logits, labels, problem)
        self.config.problem_type = problem
        return loss, logits

    def _loss(self, body: Body, logits: Tensor, labels: Tensor, problem: str) -> Tensor:
        classes = self.config.num_labels
        if problem == "single_label_classification":
            return _cross_entropy(logits, body.sequence_labels("labels", labels, classes))
        labels = labels.reshape(-1, 1) if classes == 1 else labels
        checks.shape(body.op, "labels", labels, tuple(logits.shape), "(B, num_labels)", f"for {problem}")
        checks.same_device(body.op, {"labels": labels, "the model": logits})
        scores, filled, loss = wide(logits), body.packing.filled, F.mse_loss
        if problem != "regression":
            loss = F.binary_cross_entropy_with_logits
            checks.between(body.op, "labels", labels, 0, 1, f"as targets for {problem}")
        if filled is None:
            return loss(scores, labels.to(scores.dtype), reduction="sum") / max(labels.numel(), 1)
        losses = loss(scores, labels.to(scores.dtype), reduction="none")
        of_caller = torch.arange(losses.shape[0], device=losses.device) < filled
        return losses.where(of_caller.unsqueeze(1), 0).sum() / (filled * losses.shape[1]).clamp(min=1)

    def problem_of(self, labels: Tensor) -> str:
        """config.problem_type, or if that is None the type that these labels imply."""
        if self.config.problem_type:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        if labels.is_floating_point() and self._facts.soft_labels:
            raise ValueError(
                "BertForSequenceClassification: labels are floats and problem_type is None; expected a problem_type, "
                f"without which transformers takes them for probabilities of classes in {self.config.family.name}"
            )
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


class BertForTokenClassification(_Classifier):
    """BERT with a classifier on every token. labels: (B, S) or packed (T,), a class or -100.

    logits: (B, S, num_labels) or (T, num_labels).
    """

    kind = "ForTokenClassification"
    pooling = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self._add_classifier(config.num_labels)

    def _classify(self, body: Body, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        logits = self.classifier(self.dropout(body.hidden))
        if labels is None:
            return None, body.packing.unpack(logits)
        labels = body.token_labels(labels, self.config.num_labels)
        return _cross_entropy(logits, labels), body.packing.unpack(logits)


class BertForMultipleChoice(_Classifier):
    """BERT that scores N choices by their pooled outputs. labels: (B,), the correct choice or -100. logits: (B, N)."""

    kind = "ForMultipleChoice"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self._add_classifier(1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        num_choices: int | None = None,
        **options: Unpack[ModelOptions],
    ) -> BertHeadOutput:
        """Padded input (B, N, S), or packed (T,) with cu_seqlens (B * N + 1,) or a packing, and num_choices N.

        hidden_states and attentions cover the B * N sequences.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        cu_seqlens, packing = options.get("cu_seqlens"), options.get("packing")
        if cu_seqlens is None and packing is None:
            num_choices = self._choices(input_ids, inputs_embeds, num_choices)
            inputs = tuple(None if x is None else x.flatten(0, 1) for x in inputs)
        else:
            sequences = cu_seqlens.shape[0] - 1 if packing is None else packing.batch
            if not num_choices or sequences % num_choices:
                raise ValueError(
                    f"BertForMultipleChoice: num_choices is {num_choices}; expected, for packed input, a number that "
                    f"divides that of the sequences, {sequences}"
                )
        _, logits, *records = super().forward(*inputs, **options)
        logits = logits.view(-1, num_choices)
        return BertHeadOutput(None if labels is None else self._loss(logits, labels), logits, *records)

    @staticmethod
    def _choices(input_ids: Tensor | None, inputs_embeds: Tensor | None, num_choices: int | None) -> int | None:
        given, sizes = (input_ids, "(B, N, S)") if inputs_embeds is None else (inputs_embeds, "(B, N, S, C)")
        if given is not None and given.dim() != sizes.count(",") + 1:
            raise ValueError(
                f"BertForMultipleChoice: the input has shape {tuple(given.shape)}; expected {sizes}, or packed tokens "
                "with cu_seqlens"
            )
        if given is not None and num_choices not in (None, given.shape[1]):
            raise ValueError(
                f"BertForMultipleChoice: num_choices is {num_choices}; expected that of the input, {given.shape[1]}"
            )
        return None if given is None else given.shape[1]

    def _classify(self, body: Body, labels: None) -> tuple[None, Tensor]:
        return None, self._score(body)

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor) -> Tensor:
        batch, choices = logits.shape
        labels = _sequence_labels("BertForMultipleChoice", "labels", labels, logits.device, batch, choices)
        return _cross_entropy(logits, labels)


# ---- replaced tokens


class BertDiscriminatorPredictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)
        self.approximate = config.gelu
        initialize(self, config.initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        """(T, C) to logits (T,)."""
        return self.dense_prediction(layer.up_gelu(hidden, self.dense, self.approximate)).squeeze(-1)


class BertForReplacedTokenDetection(_Classifier):
    """ELECTRA's discriminator, which finds replaced tokens; Hugging Face's ElectraForPreTraining on packed tokens.

    labels: (B, S) or packed (T,), 0 for an original token, 1 for a replaced one, or -100. logits: (B, S) or (T,), that
    the token was replaced. loss: the mean binary cross-entropy of labelled tokens.
    """

    kind = "ForReplacedTokenDetection"
    pooling = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.discriminator_predictions = BertDiscriminatorPredictions(config)

    def _classify(self, body: Body, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        logits = self.discriminator_predictions(body.hidden)
        return None if labels is None else self._loss(logits, body.token_labels(labels, 2)), body.packing.unpack(logits)

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor) -> Tensor:
        scores, labelled = wide(logits), labels != IGNORED
        target, weight = (t.to(scores.dtype) for t in (labels.masked_fill(~labelled, 0), labelled))
        if not checks.values_visible(labels):  # else they are known to be 0 and 1
            target = target.masked_fill((target != 0) & (target != 1), torch.nan)
        total = F.binary_cross_entropy_with_logits(scores, target, weight, reduction="sum")
        return total / labelled.sum().clamp(min=1)


# ---- question answering


class BertForQuestionAnswering(_BertWithHead):
    """BERT that finds an answer in the text: for each token a score as its first token, and one as its last."""

    kind = "ForQuestionAnswering"
    pooling = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.dropout = self._new_dropout()
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        initialize(self.qa_outputs, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Unpack[ModelOptions],
    ) -> BertForQuestionAnsweringOutput:
        """Input as in BertModel. start_positions, end_positions: (B,) integers, the column of the padded batch, or for
        packed input the position in the sequence; the loss needs both.

        start_logits, end_logits: (T,), or (B, S) with the dtype's lowest number at padding, so that no answer begins or
        ends there. loss: the mean of both cross-entropies over the tokens of each sequence, without padding
        (transformers includes padding: the losses are equal if there is none). A negative position counts as 0, as in
        transformers; a position beyond the text, or at padding, is ignored.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body = self._encode(inputs, **options)
        logits = self.qa_outputs(body.hidden if self.dropout is None else self.dropout(body.hidden))  # (T, 2)
        loss = None
        if start_positions is not None and end_positions is not None:
            compact = body.packing.compact()  # as for packed input, so that the bits are the same
            scores = _on_grid(compact, logits)
            answers = {"start_positions": start_positions, "end_positions": end_positions}
            targets = _answer_labels(body.packing, compact, answers)
            loss = sum(_cross_entropy(scores[..., i], target) for i, target in enumerate(targets)) / 2
        shown = logits if body.packing.seqlen is None else _on_grid(body.packing, logits)
        return BertForQuestionAnsweringOutput(loss, *shown.unbind(-1), *body.records)


def _on_grid(grid: Packing, logits: Tensor) -> Tensor:
    """(T, 2) to (B, S, 2) with the dtype's lowest number at padding."""
    return grid.unpack(logits).masked_fill(~grid.visible().unsqueeze(-1), torch.finfo(logits.dtype).min)


def _answer_labels(packing: Packing, compact: Packing, answers: Mapping[str, Tensor]) -> list[Tensor]:
    """Positions (B,) or (B, 1), in the caller's form, as labels of the compact grid's columns; -100 where there is no
    token."""
    device, grid = packing.cu_seqlens.device, compact if packing.seqlen is None else packing
    visible, place = F.pad(grid.visible(), (0, 1)), None  # column S: beyond the text
    if grid is not compact:
        place = F.pad(grid.unpack(packed_positions(packing.cu_seqlens, packing.tokens)), (0, 1))
    labels = []
    for name, given in answers.items():
        given = _sequence_labels("BertForQuestionAnswering", name, given, device, grid.batch, None)
        column = given.long().clamp(0, grid.seqlen).unsqueeze(1)
        label = column if place is None else place.gather(1, column)
        labels.append(label.masked_fill(~visible.gather(1, column), IGNORED).squeeze(1))
    return labels


HEADS = (  # fastbert/families.py says which of them a family has
    BertForPreTraining,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertForQuestionAnswering,
    BertForMultipleChoice,
)
