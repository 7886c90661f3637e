"""The families that fastbert knows: where `transformers` keeps the parts of each, and how it differs from BERT.

This file holds facts only, as data. `fastbert/parts.py` finds the parts of a layer by them, our own modules
(`fastbert/model.py`, `fastbert/heads.py`) read how a family differs from BERT, and `fastbert/checkpoint.py` reads
names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LayerFacts:
    """Attribute paths from a layer module to its parts. None: the family has no such part."""

    attention: str  # the module whose attention weights transformers records
    heads: str
    projections: tuple[str, ...]  # to queries, keys and values; or a single one that gives all three
    attention_dropout: str  # active while `attention` is in training mode; with `own_mode`, while this nn.Dropout is
    out: str
    out_dropout: str | None
    out_norm: str
    up: str
    activation: str
    down: str
    down_dropout: str | None
    down_norm: str
    own_mode: bool = False  # whether the training mode of attention's nn.Dropout decides, not that of `attention`
    of_positions: tuple[str, ...] = ()  # Linears to position keys and queries, which a configuration may leave out

    after_attention: tuple[str | None, ...] = field(init=False)  # the paths from `out` on
    dense: tuple[str, ...] = field(init=False)  # the paths of dense layers, without `of_positions`
    with_parameters: tuple[str, ...] = field(init=False)
    # `find` lists the layer and every object on the paths; these refer to them by index in that list.
    steps: tuple[tuple[int, str], ...] = field(init=False)  # each further object: its owner and its name there
    places: tuple[int | None, ...] = field(init=False)  # the ends of the paths, in the order of the fields
    leaves: tuple[int, ...] = field(init=False)  # the ends of `with_parameters`
    containers: tuple[int, ...] = field(init=False)  # the modules between a layer and its parts: they are not called

    def __post_init__(self) -> None:
        second_half = (self.up, self.activation, self.down, self.down_dropout, self.down_norm)
        leaves = (*self.projections, self.out, self.out_norm, self.up, self.down, self.down_norm)
        inside = {leaf[: dot.start()] for leaf in leaves for dot in re.finditer(r"\.", leaf)}
        object.__setattr__(self, "after_attention", (self.out, self.out_dropout, self.out_norm, *second_half))
        object.__setattr__(self, "dense", (*self.projections, self.out, self.up, self.down))
        object.__setattr__(self, "with_parameters", leaves)
        paths = (self.attention, self.heads, *self.projections, self.attention_dropout, *self.after_attention)
        place, steps = {"": 0}, []  # path -> index of the object there
        for path in filter(None, paths):
            for dot in re.finditer(r"\.|$", path):
                if path[: dot.start()] not in place:
                    owner, _, name = path[: dot.start()].rpartition(".")
                    steps.append((place[owner], name))
                    place[path[: dot.start()]] = len(steps)
        object.__setattr__(self, "steps", tuple(steps))
        object.__setattr__(self, "places", tuple(None if path is None else place[path] for path in paths))
        object.__setattr__(self, "leaves", tuple(place[path] for path in leaves))
        object.__setattr__(self, "containers", tuple(place[path] for path in sorted(inside - {self.attention})))

    def dense_in(self, layer: nn.Module) -> list[str]:
        """`dense`, and those of `of_positions` that the layer has."""
        there = dict(layer.named_modules())
        return [*self.dense, *[path for path in self.of_positions if path in there]]

    def find(self, layer: nn.Module) -> list[Any]:
        """The layer and every object on the paths, in the order of `steps`. Raises AttributeError if one is missing."""
        found: list[Any] = [layer]
        for owner, name in self.steps:
            children = found[owner]._modules
            found.append(children[name] if name in children else getattr(found[owner], name))
        return found


def follow(module: Any, path: str) -> Any:
    """operator.attrgetter(path)(module), which torch.compile does not trace."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


@dataclass(frozen=True)
class Head:
    """A head of transformers: its parts and their names.

    names: our module path -> transformers', where they differ. dropout: the configuration's field with its dropout
    probability, None for a head without dropout. dense: for a head with its own dense layer on the first token in place
    of the pooler, the activation of that layer, or the configuration's field that names it; drops_first: there is
    dropout before this layer too; first_dropout: the field with a separate probability for that dropout. exact_gelu: a
    masked LM that computes erf GELU whatever hidden_act is. requires: fields of the configuration, and the only value
    of each that fastbert supports. pair_label: the argument with the label of a sentence pair. called: what follows the
    family's name in the name of transformers' class, if it is not our name for the head. decoder: a masked LM whose
    tied decoder has parameter names too. soft_labels: float labels may be class probabilities, which only problem_type
    can tell from multi-label targets. other: a field, and for its values the heads that replace this one.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    dropout: str | None = None
    dense: str | None = None
    drops_first: bool = False
    exact_gelu: bool = False
    requires: Mapping[str, Any] = field(default_factory=dict)
    pair_label: str | None = None
    called: str | None = None
    first_dropout: str | None = None
    decoder: bool = True
    soft_labels: bool = False
    other: tuple[str, Mapping[Any, "Head"]] | None = None


@dataclass(frozen=True)
class Family:
    """One family: a base model class of transformers (the encoder under the heads).

    classes: the beginning of its classes' names. prefix: the base model's attribute in a model with a head. heads: by
    our names for them. stack: path to its layers, or if `grouped` to groups that share layers. projection: path to a
    Linear between embeddings and layers, which exists if their widths differ, or with always_projects always;
    projects_sum: this Linear has no bias, and comes before LayerNorm. relative: what scores get by the distance between
    query and key, "disentangled" products (DeBERTa) or a "bias" (MPNet). pooler_dense: path to the pooler's Linear,
    None for a family without a pooler. padding_positions: position ids count the tokens that are not padding_idx, as in
    RoBERTa.

    The rest describes the configuration, with our names for its fields. config_names: the family's names, where they
    differ. defaults: transformers' defaults that are not BERT's. fixed: fields that the family does not have, and the
    only value of each that it computes. own: fields that only this family has, and their defaults.
    """

    name: str
    layer: LayerFacts
    model_type: str
    classes: str
    prefix: str
    heads: Mapping[str, Head]
    encoder: str = "encoder"
    stack: str = "encoder.layer"
    grouped: bool = False
    projection: str | None = None
    always_projects: bool = False
    projects_sum: bool = False
    relative: str | None = None
    pooler_dense: str | None = "pooler.dense"
    token_types: bool = True
    padding_positions: bool = False
    config_names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_class(self) -> str:
        """The qualified name of transformers' base class."""
        module = self.model_type.replace("-", "_")
        return f"transformers.models.{module}.modeling_{module}.{self.classes}Model"

    def class_name(self, kind: str) -> str:
        """The name of a class in transformers. kind: "Model" or one of `heads`."""
        head = self.heads.get(kind)
        return self.classes + (head.called if head and head.called else kind)

    def layers_in_order(self, base: nn.Module) -> list[nn.Module]:
        """The layers in the order in which a forward runs them; shared layers come several times."""
        stack = follow(base, self.stack)
        if not self.grouped:
            return list(stack)
        groups = [stack[index] for index in groups_of(base.config.num_hidden_layers, base.config.num_hidden_groups)]
        return [layer for group in groups for layer in group.albert_layers]

    def containers(self, base: nn.Module) -> list[nn.Module]:
        """The modules, apart from the layers, that transformers' code calls with packed tensors."""
        groups = follow(base, self.stack) if self.grouped else ()
        return [base.embeddings, getattr(base, self.encoder), *groups]

    def projected(self, base: nn.Module) -> nn.Module | None:
        """The Linear between embeddings and layers, or None (ELECTRA has it only if their widths differ)."""
        if not self.projection:
            return None
        module: Any = base
        for name in self.projection.split("."):
            module = getattr(module, name, None)
        return module


def groups_of(layers: int, groups: int) -> list[int]:
    """The group of shared parameters that each layer of a forward uses, as AlbertTransformer computes it."""
    return [int(index / (layers / groups)) for index in range(layers)]


# ---- layers

OURS = LayerFacts(  # fastbert's own layers, for every family
    attention="attention",
    heads="attention.num_attention_heads",
    projections=("attention.qkv",),
    attention_dropout="attention.dropout",
    out="attention.output.dense",
    out_dropout="attention.output.dropout",
    out_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    activation="intermediate.approximate",
    down="output.dense",
    down_dropout="output.dropout",
    down_norm="output.LayerNorm",
    of_positions=("attention.pos_key_proj", "attention.pos_query_proj"),
)
_BERT = LayerFacts(
    attention="attention.self",
    heads="attention.self.num_attention_heads",
    projections=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_dropout="attention.self.dropout",
    out="attention.output.dense",
    out_dropout="attention.output.dropout",
    out_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    down_dropout="output.dropout",
    down_norm="output.LayerNorm",
)
_DISTILBERT = LayerFacts(
    attention="attention",
    heads="attention.n_heads",
    projections=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_dropout="attention.dropout",
    out="attention.out_lin",
    out_dropout=None,
    out_norm="sa_layer_norm",
    up="ffn.lin1",
    activation="ffn.activation",
    down="ffn.lin2",
    down_dropout="ffn.dropout",
    down_norm="output_layer_norm",
)
_ALBERT = LayerFacts(
    attention="attention",
    heads="attention.num_attention_heads",
    projections=("attention.query", "attention.key", "attention.value"),
    attention_dropout="attention.attention_dropout",
    out="attention.dense",
    out_dropout="attention.output_dropout",
    out_norm="attention.LayerNorm",
    up="ffn",
    activation="activation",
    down="ffn_output",
    down_dropout=None,  # AlbertLayer creates one but does not use it
    down_norm="full_layer_layer_norm",
)

_DEBERTA = replace(
    _BERT,
    projections=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    own_mode=True,
    of_positions=("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
)
_MPNET = replace(
    _BERT,
    attention="attention.attn",
    heads="attention.attn.num_attention_heads",
    projections=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_dropout="attention.attn.dropout",
    out="attention.attn.o",
    out_dropout="attention.dropout",
    out_norm="attention.LayerNorm",
    own_mode=True,
)

# ---- heads

_PLAIN = Head()
_DROPS = Head(dropout="classifier_dropout")


def _masked_lm(dense: str, norm: str, decoder: str, bias: str | None = None, **facts: Any) -> Head:
    """A masked-LM head. decoder: path to the tied Linear. bias: path to a module that holds its bias too, if any."""
    parts = {"transform.dense": dense, "transform.LayerNorm": norm, "decoder": decoder}
    names = {f"cls.predictions.{ours}": theirs for ours, theirs in parts.items()}
    return Head({"cls.predictions": bias or decoder} | names, **facts)


def _own_dense(dense: str, classifier: str, activation: str, **facts: Any) -> Head:
    return Head({"pre_classifier": dense, "classifier": classifier}, dense=activation, **facts)


_BERT_HEADS = {
    "ForPreTraining": Head(pair_label="next_sentence_label"),
    "ForMaskedLM": _PLAIN,
    "ForNextSentencePrediction": _PLAIN,
    "ForSequenceClassification": _DROPS,
    "ForTokenClassification": _DROPS,
    "ForQuestionAnswering": _PLAIN,
    "ForMultipleChoice": _DROPS,
}
_ROBERTA_HEADS = {
    "ForMaskedLM": _masked_lm(
        "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", bias="lm_head", exact_gelu=True
    ),
    "ForSequenceClassification": _own_dense(
        "classifier.dense", "classifier.out_proj", "tanh", drops_first=True, dropout="classifier_dropout"
    ),
    "ForTokenClassification": _DROPS,
    "ForQuestionAnswering": _PLAIN,
    "ForMultipleChoice": Head(dropout="hidden_dropout_prob"),
}
_ELECTRA_HEADS = {
    "ForMaskedLM": _masked_lm(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", exact_gelu=True
    ),
    "ForReplacedTokenDetection": Head(called="ForPreTraining"),
    "ForSequenceClassification": _own_dense(
        "classifier.dense", "classifier.out_proj", "gelu", drops_first=True, dropout="classifier_dropout"
    ),
    "ForTokenClassification": _DROPS,
    "ForQuestionAnswering": _PLAIN,
    "ForMultipleChoice": _own_dense(
        "sequence_summary.summary",
        "classifier",
        "gelu",
        dropout="summary_last_dropout",
        requires={
            "summary_type": "first",
            "summary_use_proj": True,
            "summary_activation": "gelu",
            "summary_proj_to_labels": False,
            "summary_first_dropout": 0.0,
        },
    ),
}
_DISTILBERT_HEADS = {
    "ForMaskedLM": _masked_lm("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    "ForSequenceClassification": _own_dense("pre_classifier", "classifier", "relu", dropout="classifier_dropout"),
    "ForTokenClassification": Head(dropout="hidden_dropout_prob"),
    "ForQuestionAnswering": Head(dropout="qa_dropout", requires={"num_labels": 2}),
    "ForMultipleChoice": _own_dense("pre_classifier", "classifier", "relu", dropout="classifier_dropout"),
}
_ALBERT_MASKED_LM = _masked_lm("predictions.dense", "predictions.LayerNorm", "predictions.decoder", bias="predictions")
_ALBERT_HEADS = {
    "ForPreTraining": Head(
        {**_ALBERT_MASKED_LM.names, "cls.seq_relationship": "sop_classifier.classifier"},
        dropout="classifier_dropout",
        requires={"num_labels": 2},
        pair_label="sentence_order_label",
    ),
    "ForMaskedLM": _ALBERT_MASKED_LM,
    "ForSequenceClassification": _DROPS,
    "ForTokenClassification": _DROPS,
    "ForQuestionAnswering": _PLAIN,
    "ForMultipleChoice": _DROPS,
}
_DEBERTA_POOLED = _own_dense(
    "pooler.dense",
    "classifier",
    "pooler_hidden_act",
    drops_first=True,
    first_dropout="pooler_dropout",
    dropout="classifier_dropout",
    soft_labels=True,
)
_DEBERTA_HEADS = {
    "ForMaskedLM": Head(
        other=(
            "legacy",
            {
                False: Head(
                    {
                        "cls.predictions": "lm_predictions.lm_head",
                        "cls.predictions.transform.dense": "lm_predictions.lm_head.dense",
                        "cls.predictions.transform.LayerNorm": "lm_predictions.lm_head.LayerNorm",
                    },
                    decoder=False,
                    requires={"embedding_size": None},
                )
            },
        )
    ),
    "ForSequenceClassification": _DEBERTA_POOLED,
    "ForTokenClassification": Head(dropout="hidden_dropout_prob"),
    "ForQuestionAnswering": Head(requires={"num_labels": 2}),
    "ForMultipleChoice": _DEBERTA_POOLED,
}
_MPNET_HEADS = {
    "ForMaskedLM": _ROBERTA_HEADS["ForMaskedLM"],
    "ForSequenceClassification": _own_dense(
        "classifier.dense", "classifier.out_proj", "tanh", drops_first=True, dropout="hidden_dropout_prob"
    ),
    "ForTokenClassification": Head(dropout="hidden_dropout_prob"),
    "ForQuestionAnswering": Head(requires={"num_labels": 2}),
    "ForMultipleChoice": Head(dropout="hidden_dropout_prob"),
}

# ---- families


def _roberta(name: str, model_type: str, classes: str, vocab_size: int) -> Family:
    return Family(
        name,
        _BERT,
        model_type,
        classes,
        "roberta",
        _ROBERTA_HEADS,
        padding_positions=True,
        defaults={"vocab_size": vocab_size, "pad_token_id": 1},
        fixed={"embedding_size": None},
    )


_KNOWN = (
    Family("BERT", _BERT, "bert", "Bert", "bert", _BERT_HEADS, fixed={"embedding_size": None}),
    _roberta("RoBERTa", "roberta", "Roberta", 50265),
    _roberta("XLM-RoBERTa", "xlm-roberta", "XLMRoberta", 30522),
    _roberta("CamemBERT", "camembert", "Camembert", 30522),
    Family(
        "ELECTRA",
        _BERT,
        "electra",
        "Electra",
        "electra",
        _ELECTRA_HEADS,
        projection="embeddings_project",
        pooler_dense=None,
        defaults={"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        own={
            "summary_type": "first",
            "summary_use_proj": True,
            "summary_activation": "gelu",
            "summary_last_dropout": 0.1,
        },
    ),
    Family(
        "DistilBERT",
        _DISTILBERT,
        "distilbert",
        "DistilBert",
        "distilbert",
        _DISTILBERT_HEADS,
        encoder="transformer",
        stack="transformer.layer",
        pooler_dense=None,
        token_types=False,
        config_names={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "classifier_dropout": "seq_classif_dropout",
        },
        defaults={"num_hidden_layers": 6, "classifier_dropout": 0.2},
        fixed={"embedding_size": None, "layer_norm_eps": 1e-12, "type_vocab_size": 2},
        own={"qa_dropout": 0.1, "sinusoidal_pos_embds": False},
    ),
    Family(
        "ALBERT",
        _ALBERT,
        "albert",
        "Albert",
        "albert",
        _ALBERT_HEADS,
        stack="encoder.albert_layer_groups",
        grouped=True,
        projection="encoder.embedding_hidden_mapping_in",
        always_projects=True,
        pooler_dense="pooler",
        config_names={"classifier_dropout": "classifier_dropout_prob"},
        defaults={
            "vocab_size": 30000,
            "embedding_size": 128,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": 0.1,
        },
        own={"num_hidden_groups": 1, "inner_group_num": 1},
    ),
    Family(
        "DeBERTa-v2",
        _DEBERTA,
        "deberta-v2",
        "DebertaV2",
        "deberta",
        _DEBERTA_HEADS,
        projection="embeddings.embed_proj",
        projects_sum=True,
        relative="disentangled",
        pooler_dense=None,
        config_names={"classifier_dropout": "cls_dropout"},
        defaults={
            "vocab_size": 128100,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
        },
        own={
            "relative_attention": False,
            "max_relative_positions": -1,
            "position_buckets": -1,
            "pos_att_type": None,
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "position_biased_input": True,
            "conv_kernel_size": 0,
            "conv_groups": 1,
            "conv_act": "tanh",
            "pooler_dropout": 0.0,
            "pooler_hidden_act": "gelu",
            "legacy": True,
        },
    ),
    Family(
        "MPNet",
        _MPNET,
        "mpnet",
        "MPNet",
        "mpnet",
        _MPNET_HEADS,
        token_types=False,
        padding_positions=True,
        relative="bias",
        defaults={"vocab_size": 30527, "pad_token_id": 1},
        fixed={"embedding_size": None, "type_vocab_size": 2, "classifier_dropout": None},
        own={"relative_attention_num_buckets": 32},
    ),
)
# model_type -> why it is not one of these families, though it may look like one
REFUSED = {"deberta": "DeBERTa's first version, with one interleaved in_proj and no buckets, is not DeBERTa-v2 (or v3)"}

BY_MODEL_TYPE: dict[str, Family] = {family.model_type: family for family in _KNOWN}

# Qualified name of the base model's class -> family. Names, so that transformers need not be imported.
FAMILIES: dict[str, Family] = {family.base_class: family for family in _KNOWN}


def key_of(base: nn.Module) -> str | None:
    """The key in FAMILIES of a base model; None for any other module.

    Subclasses count too (FSDP2 creates them), as long as their forward is the family's own.
    """
    for cls in type(base).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in FAMILIES:
            return key if type(base).forward is cls.forward else None
    return None
