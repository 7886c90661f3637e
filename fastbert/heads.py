"""BERT and its family with a head: masked LM, next sentence, replaced tokens, sequence and token classification,
question answering, multiple choice.

One class a head for all families; how a family's head differs from BERT's is in `fastbert/families.py`. Arguments,
losses and checkpoints are those of `transformers`; the work is that of packed tokens. What all heads share:

- Padded input (B, S) with a mask, or packed input (T,) with `cu_seqlens` and `max_seqlen`; labels and logits of tokens
  have the same form. Logits of padding are zeros, and a label there counts as -100.
- A loss is a mean over what is labelled, in float32 or better, and 0 (not NaN) where nothing is.
- Dropout before a classifier is `nn.Dropout`, as in `transformers`: it follows `torch.manual_seed`, and is drawn for
  packed tokens, so padding does not change it.
- Every forward raises ValueError, TypeError and, for ids and labels out of range, IndexError (on a CPU, or under
  FASTBERT_CHECK=1).
"""

import copy
import warnings
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
from fastbert.model import BertModel, ModelInputs, ModelOptions, Saveable, initialize, output_item
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy_of_rows, labelled_rows
from fastbert.ops.numbers import wide
from fastbert.padding import Packing

IGNORED = -100  # the label of what has none
SPARSE_ACTIVATIONS = ("relu", "log1p_relu")


# ---- outputs


class BertHeadOutput(NamedTuple):
    """As BertModelOutput. loss: a scalar, None without labels. Fields that were not asked for are None."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item


class BertForPreTrainingOutput(NamedTuple):
    """As BertHeadOutput, with the logits of both heads."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item


class BertForQuestionAnsweringOutput(NamedTuple):
    """As BertHeadOutput, with logits for the first and for the last token of the answer."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    __getitem__ = output_item


# ---- what heads share


class Body(NamedTuple):
    """What a head computes on, packed, and where its tokens are."""

    op: str  # whose errors are reported
    hidden: Tensor  # (T, C)
    pooled: Tensor | None  # (B, C)
    packing: Packing
    records: tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]  # hidden_states, attentions: as asked for

    def token_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Labels in the caller's form -> (T,), checked."""
        return _token_labels(self.op, self.packing, labels, self.hidden.device, classes)

    def sequence_labels(self, name: str, labels: Tensor, classes: int) -> Tensor:
        """A class for each sequence, (B,) or (B, 1) -> (B,), checked."""
        return _sequence_labels(self.op, name, labels, self.hidden.device, self.packing.batch, classes)


def _token_labels(op: str, packing: Packing, labels: Tensor, device: torch.device, classes: int) -> Tensor:
    """Labels in the caller's form -> (T,), checked."""
    padded = packing.seqlen is not None
    shape, meaning = ((packing.batch, packing.seqlen), "(B, S)") if padded else ((packing.tokens,), "(T,)")
    _check_labels(op, "labels", labels, device, shape, meaning, classes)
    return packing.pack(labels, fill=IGNORED)


def _check_labels(
    op: str, name: str, labels: Tensor, device: torch.device, shape: tuple[int, ...], meaning: str, classes: int | None
) -> None:
    """Integers of that shape, and where classes are given, below them or -100."""
    checks.integers(op, **{name: labels})
    checks.shape(op, name, labels, shape, meaning)
    checks.same_device(op, {name: labels, "the model": torch.empty(0, device=device)})
    if classes is not None:
        checks.index_range(op, name, labels, classes, also=IGNORED)


def _sequence_labels(
    op: str, name: str, labels: Tensor, device: torch.device, batch: int, classes: int | None
) -> Tensor:
    """(B,) or (B, 1) -> (B,), checked."""
    _check_tensor(op, name, labels)
    labels = labels.flatten()
    _check_labels(op, name, labels, device, (batch,), "(B,)", classes)
    return labels


def _check_tensor(op: str, name: str, labels: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: {name} is a {type(labels).__name__}; expected a tensor")


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over labelled rows; 0 where there is none."""
    total = F.cross_entropy(wide(logits), labels.long(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


class _BertWithHead(Saveable):
    """A BertModel named `bert`, and a head beside it.

    pooling: the head reads the pooler's output, or that of a layer in its place.
    """

    pooling = True
    loss_options: Mapping[str, Any] = {}  # for a forward of which nothing but the loss is wanted
    accepts_loss_kwargs = False  # else transformers.Trainer takes **options for num_items_in_batch

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self._check_head(config)
        self.config = config
        self.bert = BertModel(config, add_pooling_layer=self.pooling and self._facts.dense is None)

    @property
    def _facts(self) -> Head:
        """What the family's head is made of."""
        return self.config.head(self.kind)

    @property
    def _names(self) -> checkpoint.Names:
        return checkpoint.Names(self.config.family, self._facts)

    def to_ours(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint.to_ours_with_head(state, self._names)

    def _check_head(self, config: BertConfig) -> None:
        family, op = config.family, type(self).__name__
        if self.kind not in family.heads:
            known = ", ".join(f"Bert{kind}" for kind in family.heads)
            raise ValueError(f"{op}: {family.name} has no such head; expected one of {known}")
        for name, expected in config.head(self.kind).requires.items():
            value = getattr(config, name, config.extra.get(name, expected))
            if value != expected and (name, value) != ("embedding_size", config.hidden_size):  # which means the same
                raise ValueError(f"{op}: {name} is {value!r}; expected {expected!r}, for {family.name}")

    def _encode(
        self,
        inputs: tuple,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        packing: Packing | None = None,
        **records: bool,
    ) -> Body:
        """The body on packed tokens.

        inputs: input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds; with packing, as it packed them.
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
        """The body is called, not taken apart, so hooks on it run."""
        if unknown := records.keys() - {"output_hidden_states", "output_attentions"}:
            raise TypeError(f"{type(self).__name__}: got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        hidden, pooled, states, attentions = self.bert(**packed._asdict(), **records, packing=packing)
        states = states and tuple(packing.unpack(state) for state in states)
        return Body(type(self).__name__, hidden, pooled, packing, (states, attentions))

    @classmethod
    def from_pretrained(
        cls, source: str | Path | checkpoint.Checkpoint, *, dtype: torch.dtype | str | None = None, **config: Any
    ) -> Self:
        """From a directory or by a name on the hub, as BertModel; in evaluation mode.

        The checkpoint may be a bare BertModel's or another head's. What it lacks of this head, and of the pooler, is
        initialised, with a UserWarning that names it; heads that this model does not have are left out. config: fields
        of the configuration to change, as in `num_labels=3`.
        Raises FileNotFoundError, ValueError (a corrupt file, a configuration that makes no sense) and RuntimeError (a
        parameter of the encoder that is missing or unexpected, or of any part that has another shape).
        """
        return checkpoint.load(source).make(lambda found: cls(found.changed(**config)), dtype)

    def select(self, state: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
        """The state of a checkpoint without other heads, and with new parameters for what it lacks of this one."""
        expected, body = self.state_dict(), ("bert.embeddings.", "bert.encoder.")
        state = {name: tensor for name, tensor in state.items() if name in expected or name.startswith(body)}
        new = sorted(name for name in expected.keys() - state.keys() if not name.startswith(body))
        if new:
            dtype = next(iter(state.values())).dtype if state else None
            state |= {name: self._new_parameter(name, expected[name].shape, dtype) for name in new}
            names = ", ".join(checkpoint.to_hugging_face_names(new, self._names))
            warnings.warn(f"{directory} lacks {names}: initialised anew, to be trained", stacklevel=4)
        return state

    def _new_dropout(self) -> nn.Dropout | None:
        """The head's own; None where it has none."""
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
    """Scores of the vocabulary. The decoder is the word embeddings, passed in: nothing tied can come apart."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.extra.get("tie_word_embeddings") is False:
            raise ValueError("BertConfig: tie_word_embeddings is False; expected True, for a masked-LM head")
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """(T, C) to logits (T, V)."""
        return ops.linear(self.transform(hidden), words, self.bias)

    def largest(self, hidden: Tensor, words: Tensor, cu_seqlens: Tensor) -> Tensor:
        """(T, C) to the largest logits of each sequence, (B, V)."""
        return ops.linear_max(self.transform(hidden), words, self.bias, cu_seqlens)

    def loss(self, hidden: Tensor, words: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
        """The mean cross-entropy of labelled rows, from them alone. rows: which they are; None computes all."""
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


class _MaskedLM(_BertWithHead):
    loss_options = {"skip_logits": True}

    def resize_token_embeddings(self, vocab_size: int) -> nn.Embedding:
        """As BertModel's; the biases of new tokens are 0."""
        words, head = super().resize_token_embeddings(vocab_size), self.cls.predictions
        kept, bias = min(vocab_size, len(head.bias)), head.bias
        head.bias = nn.Parameter(bias.new_zeros(vocab_size), bias.requires_grad)
        head.bias.data[:kept] = bias.data[:kept]
        return words

    def _predict(
        self,
        inputs: tuple,
        labels: Tensor | None,
        rows: Tensor | None,
        skip_logits: bool | None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        packing: Packing | None = None,
        **records: bool,
    ) -> tuple[Body, Tensor | None, Tensor | None]:
        """The body, and loss and logits of the masked-LM head; None without labels, and where they are skipped.

        Labelled rows are looked for before the body runs: the host then waits for a GPU that has little to do yet.
        """
        packed, packing = self._pack(inputs, cu_seqlens, max_seqlen, packing)
        words, op = self.bert.embeddings.word_embeddings.weight, type(self).__name__
        if rows is not None and (labels is None or packing.seqlen is not None):
            raise ValueError(f"{op}: labelled_rows goes with packed labels, (T,) with cu_seqlens")
        if labels is not None:
            labels = _token_labels(op, packing, labels, words.device, self.config.vocab_size)
            rows = labelled_rows(labels) if rows is None else rows
        body, head = self._run(packed, packing, **records), self.cls.predictions
        loss = None if labels is None else head.loss(body.hidden, words, labels, rows)
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
        labelled_rows: Tensor | None = None,
        skip_logits: bool | None = None,
        **options: Unpack[ModelOptions],
    ) -> BertHeadOutput:
        """Input as in BertModel. labels: (B, S) or packed (T,) integers, a token or -100. logits: (B, S, V) or (T, V).

        The head runs on labelled tokens alone. Logits, which are of all tokens, are None in training with labels;
        skip_logits=False makes them, True leaves them out in evaluation too. labelled_rows: (L,) the distinct rows of
        packed labels that have one, where the caller knows them (`fastbert.data.PackingCollator` does); found when
        None, with one host synchronisation on a GPU, before the encoder starts.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, loss, logits = self._predict(inputs, labels, labelled_rows, skip_logits, **options)
        return BertHeadOutput(loss, logits, *body.records)


class BertForSparseEmbedding(_MaskedLM):
    """BERT with the masked-LM head as SPLADE uses it: a vector of the vocabulary's size for each sequence.

    The weight of a word is max over tokens of log(1 + relu(logit)) (Formal et al., "SPLADE v2", 2021).
    activation: "relu" is that; "log1p_relu" takes the logarithm log(1 + x) of it once more (Shen et al., "Exploring l0
    sparsification for inference-free sparse retrievers", 2025). Checkpoints are those of BertForMaskedLM, which do not
    hold the activation. Raises ValueError for another one.
    """

    kind = "ForMaskedLM"
    pooling = False

    def __init__(self, config: BertConfig, activation: str = "relu") -> None:
        super().__init__(config)
        if activation not in SPARSE_ACTIVATIONS:
            expected = " or ".join(map(repr, SPARSE_ACTIVATIONS))
            raise ValueError(f"BertForSparseEmbedding: activation is {activation!r}; expected {expected}")
        self.cls, self.activation = BertPreTrainingHeads(config, seq_relationship=False), activation

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

        Logits, one a token and word, are never in memory as a whole (`fastbert.ops.linear_max`). Equivalent to
        `torch.stack([text.relu().log1p().max(0).values for text in logits])`, of BertForMaskedLM's logits without
        padding.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, words = self._encode(inputs, cu_seqlens, max_seqlen), self.get_input_embeddings().weight
        vectors = wide(self.cls.predictions.largest(body.hidden, words, body.packing.cu_seqlens)).relu().log1p()
        return vectors.log1p() if self.activation == "log1p_relu" else vectors


class BertForPreTraining(_MaskedLM):
    """BERT or ALBERT with both heads of its pre-training; Hugging Face's BertForPreTraining on packed tokens."""

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
        labelled_rows: Tensor | None = None,
        skip_logits: bool | None = None,
        **options: Unpack[ModelOptions],
    ) -> BertForPreTrainingOutput:
        """Arguments as in BertForMaskedLM, and a label of the pair, (B,): in BERT next_sentence_label, 0 for the next
        sentence, 1 for a random one; in ALBERT sentence_order_label, 0 for the order of the text, 1 for the other.

        loss: the sum of the two losses, or the one whose labels are given (transformers gives none then).
        prediction_logits: (B, S, V) or (T, V), made or left out as BertForMaskedLM's. seq_relationship_logits: (B, 2).
        """
        name, label = self._pair_label(next_sentence_label, sentence_order_label)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body, loss, prediction_logits = self._predict(inputs, labels, labelled_rows, skip_logits, **options)
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
    """A head that turns what the body gave, and labels, into a loss and logits in the caller's form."""

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
        """(B, classes), from the pooler's output or, where the head has a dense layer of its own, the first token."""
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

    config.problem_type decides the loss. Where it is None the first labels decide, by num_labels and their dtype, and
    set it in the model's own copy of the configuration, so that what is saved says how to read the logits:
    "regression" (one label; mean squared error; labels (B,), or (B, num_labels) for several),
    "single_label_classification" (integers; cross-entropy; labels (B,), a class or -100),
    "multi_label_classification" (floats; binary cross-entropy; labels (B, num_labels)).
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
        scores, filled = wide(logits), body.packing.filled
        loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        if filled is None:
            return loss(scores, labels.to(scores.dtype), reduction="sum") / max(labels.numel(), 1)
        losses = loss(scores, labels.to(scores.dtype), reduction="none")
        of_caller = torch.arange(losses.shape[0], device=losses.device) < filled
        return losses.where(of_caller.unsqueeze(1), 0).sum() / (filled * losses.shape[1]).clamp(min=1)

    def problem_of(self, labels: Tensor) -> str:
        """config.problem_type, or what it becomes with these labels."""
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
    """BERT that scores N choices by their pooled outputs. labels: (B,), the right choice or -100. logits: (B, N)."""

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
        """Padded input (B, N, S), or packed (T,) with cu_seqlens (B * N + 1,) and num_choices N.

        hidden_states and attentions are those of the B * N sequences.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        cu_seqlens = options.get("cu_seqlens")
        if cu_seqlens is None:
            num_choices = self._choices(input_ids, inputs_embeds)
            inputs = tuple(None if x is None else x.flatten(0, 1) for x in inputs)
        elif not num_choices or (cu_seqlens.shape[0] - 1) % num_choices:
            raise ValueError(
                f"BertForMultipleChoice: num_choices is {num_choices}; expected, for packed input, a number that "
                f"divides that of the sequences, {cu_seqlens.shape[0] - 1}"
            )
        _, logits, *records = super().forward(*inputs, **options)
        logits = logits.view(-1, num_choices)
        return BertHeadOutput(None if labels is None else self._loss(logits, labels), logits, *records)

    @staticmethod
    def _choices(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> int | None:
        given, sizes = (input_ids, "(B, N, S)") if inputs_embeds is None else (inputs_embeds, "(B, N, S, C)")
        if given is not None and given.dim() != sizes.count(",") + 1:
            raise ValueError(
                f"BertForMultipleChoice: the input has shape {tuple(given.shape)}; expected {sizes}, or packed tokens "
                "with cu_seqlens"
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
    """ELECTRA's discriminator: which tokens were replaced; Hugging Face's ElectraForPreTraining on packed tokens.

    labels: (B, S) or packed (T,), 0 for a token of the text, 1 for a replaced one, or -100. logits: (B, S) or (T,), of
    being replaced. loss: the mean binary cross-entropy of labelled tokens.
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
        total = F.binary_cross_entropy_with_logits(scores, target, weight, reduction="sum")
        return total / labelled.sum().clamp(min=1)


# ---- question answering


class BertForQuestionAnswering(_BertWithHead):
    """BERT that finds an answer in the text: a score for each token to be its first, and one to be its last."""

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
        packed input the place in the sequence; both or no loss.

        start_logits, end_logits: (B, S), the lowest number at padding, so that no answer begins there; or (T,). loss:
        the mean of both cross-entropies over the tokens of each sequence. Padding takes no part (in transformers it
        does: losses are equal without padding). A position before the text counts as 0, as in transformers; one
        beyond it, or at padding, is left out.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        body = self._encode(inputs, **options)
        logits = self.qa_outputs(body.hidden if self.dropout is None else self.dropout(body.hidden))  # (T, 2)
        grid, visible = _on_grid(body, logits)  # (B, S, 2), (B, S)
        loss = None
        if start_positions is not None and end_positions is not None:
            positions = {"start_positions": start_positions, "end_positions": end_positions}
            targets = [_answer_labels(name, given, visible) for name, given in positions.items()]
            loss = sum(_cross_entropy(grid[..., i], target) for i, target in enumerate(targets)) / 2
        shown = logits if body.packing.seqlen is None else grid
        return BertForQuestionAnsweringOutput(loss, *shown.unbind(-1), *body.records)


def _on_grid(body: Body, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(T, 2) to (B, S, 2), the lowest number where there is no token, and where there is one."""
    grid = body.packing.grid()
    visible = grid.visible()
    return grid.unpack(logits).masked_fill(~visible.unsqueeze(-1), torch.finfo(logits.dtype).min), visible


def _answer_labels(name: str, positions: Tensor, visible: Tensor) -> Tensor:
    """Positions (B,) or (B, 1) as labels of the grid's columns, those without a token left out."""
    batch, seqlen = visible.shape
    positions = _sequence_labels("BertForQuestionAnswering", name, positions, visible.device, batch, None)
    column = positions.long().clamp(0, seqlen)
    answerable = F.pad(visible, (0, 1)).gather(1, column.unsqueeze(1)).squeeze(1)  # column `seqlen`: beyond the text
    return column.masked_fill(~answerable, IGNORED)


HEADS = (  # which of them a family has: fastbert/families.py
    BertForPreTraining,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForReplacedTokenDetection,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertForQuestionAnswering,
    BertForMultipleChoice,
)
