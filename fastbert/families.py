"""The families that fastbert knows: where `transformers` keeps the parts of each, and how it differs from BERT.

Facts only, as data. `fastbert/layer.py` finds the parts of a layer by them; our own modules read here how they differ
from BERT (`fastbert/model.py`, `fastbert/heads.py`), and `fastbert/checkpoint.py` the names.
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
    projections: tuple[str, ...]  # to queries, keys and values, or one to all three
    attention_dropout: str  # drops while `attention` (not the nn.Dropout, but for `own_mode`) is in training
    out: str
    out_dropout: str | None
    out_norm: str
    up: str
    activation: str
    down: str
    down_dropout: str | None
    down_norm: str
    own_mode: bool = False  # whether the nn.Dropout of attention decides itself when it drops
    of_positions: tuple[str, ...] = ()  # Linears to keys and queries of positions, which a configuration may leave out

    after_attention: tuple[str | None, ...] = field(init=False)  # from `out` on
    dense: tuple[str, ...] = field(init=False)
    with_parameters: tuple[str, ...] = field(init=False)
    steps: tuple[tuple[int, str], ...] = field(init=False)  # to what is on the paths: from which of it, and the name
    places: tuple[int | None, ...] = field(init=False)  # what the paths end at, in the order of the fields
    leaves: tuple[int, ...] = field(init=False)  # `with_parameters`
    containers: tuple[int, ...] = field(init=False)  # the modules between a layer and its parts: they are not called

    def __post_init__(self) -> None:
        second_half = (self.up, self.activation, self.down, self.down_dropout, self.down_norm)
        leaves = (*self.projections, self.out, self.out_norm, self.up, self.down, self.down_norm)
        inside = {leaf[: dot.start()] for leaf in leaves for dot in re.finditer(r"\.", leaf)}
        object.__setattr__(self, "after_attention", (self.out, self.out_dropout, self.out_norm, *second_half))
        object.__setattr__(self, "dense", (*self.projections, self.out, self.up, self.down))
        object.__setattr__(self, "with_parameters", leaves)
        paths = (self.attention, self.heads, *self.projections, self.attention_dropout, *self.after_attention)
        place, steps = {"": 0}, []  # of the layer, and of each further module on the way
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
        """`dense`, and those of positions that the layer has."""
        there = dict(layer.named_modules())
        return [*self.dense, *[path for path in self.of_positions if path in there]]

    def find(self, layer: nn.Module) -> list[Any]:
        """What the paths lead through and to, as the fields after `steps` count it. Raises AttributeError."""
        found: list[Any] = [layer]
        for owner, name in self.steps:
            children = found[owner]._modules
            found.append(children[name] if name in children else getattr(found[owner], name))
        return found


def follow(module: Any, path: str) -> Any:
    """As operator.attrgetter, which torch.compile does not trace."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


@dataclass(frozen=True)
class Head:
    """A head of transformers: what it is made of, and what it calls that.

    names: our module path -> theirs, where they differ. dropout: the field of the configuration that it drops with,
    None where it does not. dense: the activation of a dense layer of its own, which reads the first token, in place of
    the pooler, or the field that names it; drops_first: there is dropout before it too; first_dropout: the field of a
    probability of its own for that. exact_gelu: a masked LM that computes erf whatever hidden_act is. requires: fields
    of the configuration, and the only value of each that fastbert computes. pair_label: the argument with the label of
    a pair of sentences. called: what follows the family's name in that of the class, where it is not our name for the
    head. decoder: a masked LM stores its tied decoder under a name too. soft_labels: floats are probabilities of
    classes, which only problem_type can tell from several labels. other: a field, and by its value the head that it
    makes of this one.
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
    """One base model class (the encoder under the heads).

    classes: what its classes' names begin with. prefix: what it is called in a model with a head. stack: path to its
    layers, or to groups that share them. projection: path to a Linear between embeddings and layers, there for unequal
    widths, or always; projects_sum: it has no bias, and comes before LayerNorm. padding_positions: position ids count
    the tokens that are not padding_idx, as RoBERTa does. relative: what scores get by the distance of query and key,
    "disentangled" products (DeBERTa) or a "bias" (MPNet). heads: by our name for them. pooler_dense: path to the Linear
    of the pooler, None where there is no pooler.

    Of the configuration, by our names for its fields: config_names: what the family calls them, where that differs.
    defaults: those of transformers that are not BERT's. fixed: fields that it does not have, and the only value of each
    that it computes. own: fields that only it has, and their defaults.
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
        """Module and name of transformers' class."""
        module = self.model_type.replace("-", "_")
        return f"transformers.models.{module}.modeling_{module}.{self.classes}Model"

    def class_name(self, kind: str) -> str:
        """transformers' name of a class: kind is "Model" or one of `heads`."""
        head = self.heads.get(kind)
        return self.classes + (head.called if head and head.called else kind)

    def layers_in_order(self, base: nn.Module) -> list[nn.Module]:
        """The layers in the order in which a forward runs them; shared ones come several times."""
        stack = follow(base, self.stack)
        if not self.grouped:
            return list(stack)
        groups = [stack[index] for index in groups_of(base.config.num_hidden_layers, base.config.num_hidden_groups)]
        return [layer for group in groups for layer in group.albert_layers]

    def containers(self, base: nn.Module) -> list[nn.Module]:
        """The modules, layers apart, that transformers' code calls with packed tensors."""
        groups = follow(base, self.stack) if self.grouped else ()
        return [base.embeddings, getattr(base, self.encoder), *groups]

    def projected(self, base: nn.Module) -> nn.Module | None:
        """The Linear between embeddings and layers, where there is one (ELECTRA has it for unequal widths only)."""
        module: Any = base
        for name in self.projection.split(".") if self.projection else ("",):
            module = getattr(module, name, None)
        return module


def groups_of(layers: int, groups: int) -> list[int]:
    """Which group of shared parameters each layer of a forward uses, as AlbertTransformer computes it."""
    return [int(index / (layers / groups)) for index in range(layers)]


# ---- layers

OURS = LayerFacts(  # fastbert's own, of every family
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
    down_dropout=None,  # AlbertLayer makes one and does not use it
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
    """decoder: the tied Linear. bias: the module that holds its bias as well, where one does."""
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
# model_type -> why it is none of them, though it may look so
REFUSED = {"deberta": "DeBERTa's first version, with one interleaved in_proj and no buckets, is not DeBERTa-v2 (or v3)"}

BY_MODEL_TYPE: dict[str, Family] = {family.model_type: family for family in _KNOWN}

# Module and class name of the base model -> family. By name, so that transformers need not be imported.
FAMILIES: dict[str, Family] = {family.base_class: family for family in _KNOWN}


def key_of(base: nn.Module) -> str | None:
    """The key in FAMILIES of a base model, None for any other module.

    A subclass counts (FSDP2 makes them) as long as it computes its family's own forward.
    """
    for cls in type(base).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in FAMILIES:
            return key if type(base).forward is cls.forward else None
    return None
