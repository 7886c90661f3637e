"""BertConfig: a model's sizes and settings with Hugging Face's names and defaults, and published sizes by name."""

import dataclasses
import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbert import hub
from fastbert.families import BY_MODEL_TYPE, REFUSED, Family, Head

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
MOST_LAYERS = 10_000  # a damaged or malicious file with more would take minutes to build

# hidden_act of config.json -> the `approximate` of the GELU ops
GELU_FORMS = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATIONS = ("tanh", "relu", *GELU_FORMS)  # for a pooler or a convolution
# Fields that any family's config.json may have, and the only value that fastbert computes.
EXPECTED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "inner_group_num": 1,
}
LABEL_NAMES = ("id2label", "label2id")
DTYPES = ("dtype", "torch_dtype")  # in a config.json, where they follow from the weights


@dataclass(init=False)
class BertConfig:
    """A model's configuration, with the fields of `transformers.BertConfig` that a model reads as keyword arguments.

    model_type: "bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "deberta-v2" (v3 too)
    or "mpnet". The other fields have the defaults of transformers' configuration of that type; those below are BERT's.
    embedding_size: channels of the embedding tables in families that project them (ALBERT, ELECTRA, DeBERTa-v2); None
    means hidden_size. Fields have BERT's names in every family; `from_dict` and `to_dict` translate them from and to
    the family's names. id2label and label2id name the classes, as in transformers, and give num_labels.

    Other fields of a config.json are kept in `extra`, and `to_dict` writes them back. Fields of a single family
    (ALBERT's num_hidden_groups, DistilBERT's qa_dropout, ...) are kept there too, and are also keyword arguments. A
    model reads its configuration when it is constructed; later changes (transformers.Trainer sets `use_cache`) do not
    affect it.
    Raises ValueError for an invalid configuration or one that fastbert does not support, TypeError for an unknown
    keyword.
    """

    model_type: str = "bert"
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    embedding_size: int | None = None
    num_labels: int = 2
    problem_type: str | None = None
    classifier_dropout: float | None = None
    extra: dict = field(default_factory=dict)

    def __init__(self, *, model_type: str = "bert", extra: dict | None = None, **fields: Any) -> None:
        if model_type in list(REFUSED):
            raise ValueError(f"BertConfig: model_type is {model_type!r}: {REFUSED[model_type]}")
        _require("model_type", model_type, f"one of {', '.join(BY_MODEL_TYPE)}", lambda v: v in list(BY_MODEL_TYPE))
        self.model_type = model_type
        self.extra = {**self.family.own, **deepcopy(extra or {})}
        fields = _with_id2label(fields)
        self.extra |= {name: fields.pop(name) for name in (*self.family.own, *LABEL_NAMES) if name in fields}
        if self.extra.get("id2label") and "num_labels" not in fields:
            fields["num_labels"] = len(self.extra["id2label"])
        for name, default in _defaults().items():
            setattr(self, name, fields.pop(name, self.family.defaults.get(name, default)))
        if fields:
            raise TypeError(f"BertConfig: {', '.join(fields)}: no field of a {model_type} configuration")
        self._check()

    def _check(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "num_labels",
        ):
            self._require(name, "a positive integer", lambda v: _is_int(v) and v > 0)
        least = self.family.defaults.get("type_vocab_size", 1)  # 0 is allowed in DeBERTa-v2
        self._require("type_vocab_size", f"an integer >= {least}", lambda v: _is_int(v) and v >= least)
        self._require("num_hidden_layers", f"at most {MOST_LAYERS}", lambda v: v <= MOST_LAYERS)
        own = [name for name in self.family.own if name.endswith("_dropout")]
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", *own):
            self._require(name, "a number in [0, 1)", _is_share)
        falls_back = self.family.defaults.get("classifier_dropout") is None  # to hidden_dropout_prob
        self._require("classifier_dropout", "a number in [0, 1)", lambda v: _is_share(v) or (v is None and falls_back))
        for name in ("initializer_range", "layer_norm_eps"):
            self._require(name, "a number >= 0", lambda v: _is_number(v) and v >= 0)
        self._require("hidden_act", f"one of {', '.join(GELU_FORMS)}", lambda v: v in list(GELU_FORMS))
        names = f"a dictionary of names by numbers below num_labels ({self.num_labels})"
        _require("id2label", self.extra.get("id2label"), names, lambda v: not v or _are_label_names(v, self.num_labels))
        known = (None, *PROBLEM_TYPES)
        self._require("problem_type", f"one of {known}", lambda v: v in known)
        if self.num_labels == 1:
            expected = "another for num_labels 1: of a single class there is nothing to learn"
            self._require("problem_type", expected, lambda v: v != "single_label_classification")
        self._check_ids()
        if self.hidden_size % self.num_attention_heads:
            heads, hidden = (self.family.config_names.get(n, n) for n in ("num_attention_heads", "hidden_size"))
            raise ValueError(
                f"BertConfig: {heads} is {self.num_attention_heads}, which does not divide {hidden} "
                f"({self.hidden_size})"
            )
        self._check_family()

    def _check_ids(self) -> None:
        self._require(
            "pad_token_id",
            f"None or an id below vocab_size ({self.vocab_size})",
            lambda v: v is None or (_is_int(v) and 0 <= v < self.vocab_size),
        )
        if self.family.padding_positions:
            limit = self.max_position_embeddings - 1
            self._require(
                "pad_token_id",
                f"an id below {limit}: in {self.family.name} positions begin after it, and there are {limit + 1} "
                "(max_position_embeddings)",
                lambda v: v is not None and v < limit,
            )

    def _check_family(self) -> None:
        """Raises ValueError for what fastbert does not compute, or the family does not have."""
        for name, expected in {"model_type": self.model_type, **EXPECTED}.items():
            _require(name, self.extra.get(name), repr(expected), lambda v, e=expected: v is None or v == e)
        for name, only in self.family.fixed.items():
            if name != "embedding_size":
                self._require(name, f"{only!r}, which is all that {self.family.name} has", lambda v, o=only: v == o)
        if "embedding_size" in self.family.fixed:
            expected = f"None or hidden_size ({self.hidden_size}): {self.family.name} does not project its embeddings"
            self._require("embedding_size", expected, lambda v: v in (None, self.hidden_size))
        self._require("embedding_size", "None or a positive integer", lambda v: v is None or (_is_int(v) and v > 0))
        if "num_hidden_groups" in self.family.own:
            expected = f"a positive integer, at most num_hidden_layers ({self.num_hidden_layers})"
            self._require("num_hidden_groups", expected, lambda v: _is_int(v) and 0 < v <= self.num_hidden_layers)
        if self.family.relative == "bias":
            self._require("relative_attention_num_buckets", "32, which transformers computes", lambda v: v == 32)
            self._require("pad_token_id", "1: MPNet counts positions after it", lambda v: v == 1)
        if self.family.relative == "disentangled":
            self._check_disentangled()

    def _check_disentangled(self) -> None:
        """Checks DeBERTa-v2's own fields."""
        for name in ("relative_attention", "share_att_key", "position_biased_input", "legacy"):
            self._require(name, "True or False", lambda v: isinstance(v, bool))
        kinds = "None, or some of c2p and p2c, as a list or with | between them"
        known = {"c2p", "p2c", "none", ""}
        self._require("pos_att_type", kinds, lambda v: v is None or set(_words(v)) <= known)
        self._require("norm_rel_ebd", "'layer_norm' or 'none'", lambda v: v in ("layer_norm", "none"))
        self._require("max_relative_positions", "an integer", _is_int)
        self._require("position_buckets", "an integer", _is_int)
        buckets = self.extra["position_buckets"]
        if self.extra["relative_attention"] and buckets > 0:
            expected = f"-1, or even, at least 4 and below 2 * {self.farthest - 1} (of max_relative_positions)"
            self._require("position_buckets", expected, lambda v: v >= 4 and v % 2 == 0 and v // 2 < self.farthest - 1)
        self._require("conv_kernel_size", "0 or an odd number", lambda v: _is_int(v) and (v == 0 or (v > 0 and v % 2)))
        groups = f"a divisor of hidden_size ({self.hidden_size})"
        self._require("conv_groups", groups, lambda v: _is_int(v) and v > 0 and self.hidden_size % v == 0)
        for name in ("conv_act", "pooler_hidden_act"):
            self._require(name, f"one of {', '.join(ACTIVATIONS)}", lambda v: v in ACTIVATIONS)
        for name, only in (("pooler_hidden_size", self.hidden_size), ("attention_head_size", self.head_dim)):
            _require(name, self.extra.get(name), f"None or {only}", lambda v, o=only: v in (None, o))

    def _require(self, name: str, expected: str, holds) -> None:
        """Checks a field; an error names it as the family does."""
        _require(self.family.config_names.get(name, name), self._value(name), expected, holds)

    def _value(self, name: str) -> Any:
        return self.extra[name] if name in self.family.own else getattr(self, name)

    @property
    def family(self) -> Family:
        return BY_MODEL_TYPE[self.model_type]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """Channels of the embedding tables, before any projection."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def max_sequence_length(self) -> int:
        """The longest possible sequence, in tokens. In RoBERTa it is shorter, as positions start after pad_token_id."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.family.padding_positions else 0)

    @property
    def position_kinds(self) -> tuple[str, ...]:
        """The position products that DeBERTa-v2 adds to its scores: "c2p", "p2c", both or none."""
        given = _words(self.extra.get("pos_att_type"))
        return tuple(kind for kind in ("c2p", "p2c") if kind in given)

    @property
    def farthest(self) -> int:
        """The largest distance that DeBERTa-v2 distinguishes; all farther ones count as this one."""
        given = self.extra["max_relative_positions"]
        return given if given > 0 else self.max_position_embeddings

    @property
    def layer_groups(self) -> int | None:
        """The number of different layers behind ALBERT's num_hidden_layers; None where layers are not shared."""
        return self.extra.get("num_hidden_groups") if self.family.grouped else None

    @property
    def head_dropout(self) -> float:
        """Dropout probability before a classifier."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    def head(self, kind: str) -> Head:
        """The facts about the family's head of that kind, with this configuration. Raises KeyError if it has none."""
        head = self.family.heads[kind]
        field, others = head.other or (None, {})
        return others.get(self._value(field), head) if field else head

    def dropout_of(self, name: str) -> float:
        """The dropout probability in the field of this name (see `fastbert.families.Head`)."""
        return self.head_dropout if name == "classifier_dropout" else self._value(name)

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the classes: LABEL_0, LABEL_1, ... where none are given."""
        names = {int(number): name for number, name in (self.extra.get("id2label") or {}).items()}
        return {number: names.get(number, f"LABEL_{number}") for number in range(self.num_labels)}

    @property
    def label2id(self) -> dict[str, int]:
        """The numbers of the classes by their names."""
        return {name: number for number, name in self.id2label.items()}

    @property
    def gelu(self) -> str:
        """The GELU form of `hidden_act`, as the ops' `approximate`."""
        return GELU_FORMS[self.hidden_act]

    @classmethod
    def preset(cls, name: str) -> "BertConfig":
        """The configuration of a published model: "bert-base-uncased" or, with its size, "bert-base-uncased (110M)".

        Names are those of the Hugging Face Hub; the owner before the slash may be omitted (and given, where the hub
        has an older name without: "google-bert/bert-base-uncased"). Raises ValueError for an
        unknown name, and lists the known ones.
        """
        for known, (size, fields) in PRESETS.items():
            given = name.removesuffix(f" ({size})")
            if given in (known, known.rpartition("/")[2]) or ("/" not in known and given in _with_owners(known)):
                return cls(**fields)
        names = ", ".join(f"{known} ({size})" for known, (size, _) in PRESETS.items())
        raise ValueError(f"unknown model {name!r}; known, with or without the number: {names}")

    @classmethod
    def from_dict(cls, values: dict) -> "BertConfig":
        """Makes a configuration from the fields of a config.json, under the family's names or BERT's.

        Without model_type, the family is that of `architectures`, or BERT if there are none. Raises ValueError as the
        constructor does, and for architectures of no known family.
        """
        model_type = values.get("model_type") or _model_type_of(values.get("architectures") or ())
        if family := BY_MODEL_TYPE.get(str(model_type)):  # __init__ refuses others
            values = _in_our_names(values, family)
        numbers = values.get("label2id")  # a file's alone counts if it makes sense; transformers does not read it
        if _are_label_numbers(numbers) and len(numbers) == values.get("num_labels", 2):
            values = _with_id2label(values)
        known = {f.name for f in dataclasses.fields(cls)} - {"extra", "model_type"}
        return cls(
            model_type=model_type,
            **{name: value for name, value in values.items() if name in known},
            extra={name: value for name, value in values.items() if name not in known and name != "model_type"},
        )

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "BertConfig":
        """Reads config.json in a directory, or of a model by its name on the hub (`fastbert.hub`).

        If a save was interrupted after the weights, the configuration is theirs, with a UserWarning. Raises
        FileNotFoundError, and ValueError if it does not belong to a known family.
        """
        from fastbert.checkpoint import load  # which imports this module

        return load(hub.directory_of(source, weights=False)).config

    @classmethod
    def read(cls, directory: Path, text: str | None = None) -> "BertConfig":
        """Reads config.json in a directory, or `text` in its place. Raises as from_pretrained does."""
        path = directory / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8") if text is None else text)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}; expected an object")
        return cls.from_dict(values)

    def changed(self, **fields) -> "BertConfig":
        """A copy with these fields changed. Label names are dropped if the number of labels changes.

        Fields beyond those of the family may be changed if config.json has them, or if they are label names, which also
        give the number of labels. Raises TypeError for any other keyword, ValueError as the constructor does and for
        more or fewer label names than num_labels.
        """
        self._check_names(fields)
        for name in LABEL_NAMES:
            if fields.get(name) and fields.setdefault("num_labels", len(fields[name])) != len(fields[name]):
                raise ValueError(
                    f"BertConfig: {name} has {len(fields[name])} labels; expected num_labels, {fields['num_labels']}"
                )
        fields = _with_id2label(fields)
        named = [name for name in LABEL_NAMES if fields.get(name)]
        values = {**self.extra, **self._fields(), **_in_our_names(fields, self.family)}
        if named or len(values.get("id2label") or ()) != values["num_labels"]:
            values = {name: value for name, value in values.items() if name not in LABEL_NAMES or name in named}
        return self.from_dict(values)

    def _check_names(self, fields: dict[str, Any]) -> None:
        families = self.family, BY_MODEL_TYPE.get(str(fields.get("model_type")), self.family)
        known = {*self._fields(), *self.extra, *EXPECTED, *LABEL_NAMES, "tie_word_embeddings"}
        known.update(*(family.own for family in families), *(family.config_names.values() for family in families))
        if unknown := [name for name in fields if name not in known or name in DTYPES]:
            raise TypeError(f"BertConfig: {', '.join(unknown)}: no field of a {self.model_type} configuration")

    def to_dict(self) -> dict:
        """The fields of a config.json for `transformers`, under the family's names."""
        values, names = self._fields() | {"embedding_size": self.embedding_width}, self.family.config_names
        values = {names.get(n, n): v for n, v in values.items() if n not in self.family.fixed}
        return self.extra | ({} if self._labels_agree() else {"label2id": self.label2id}) | values

    def _labels_agree(self) -> bool:
        """Whether the label2id that was given has the numbers of id2label; transformers writes both, and reads one."""
        given = self.extra.get("label2id")
        if not self.extra.get("id2label"):
            return True
        return isinstance(given, dict) and all([given.get(name) == n for n, name in self.id2label.items()])

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}


def create_model_config(name: str) -> BertConfig:
    """`BertConfig.preset(name)`."""
    return BertConfig.preset(name)


def _with_owners(name: str) -> list[str]:
    """The names under which the hub has a model that once had no owner there."""
    return [f"{owner}/{name}" for owner in ("google-bert", "FacebookAI", "distilbert", "albert", "almanach")]


def _defaults() -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(BertConfig) if f.name not in ("model_type", "extra")}


def _in_our_names(values: dict, family: Family) -> dict:
    """Renames the family's fields to BERT's names. Raises ValueError if both names are given with different values."""
    values = dict(values)
    for ours, theirs in family.config_names.items():
        if theirs not in values:
            continue
        given, other = values.pop(theirs), values.get(ours)
        if other is not None and other != given:
            raise ValueError(f"BertConfig: {theirs} is {given!r} and {ours}, which means the same, is {other!r}")
        values[ours] = given
    return values


def _model_type_of(architectures: Iterable[str]) -> str:
    """The model_type of the first of these classes of transformers; "bert" if there are none."""
    for name in architectures:
        name = name.removeprefix("TF").removeprefix("Flax")
        if found := [family for family in BY_MODEL_TYPE.values() if name.startswith(family.classes)]:
            return max(found, key=lambda family: len(family.classes)).model_type
        raise ValueError(f"BertConfig: there is no model_type, and the architecture is {name}; expected a known one")
    return "bert"


def _with_id2label(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with id2label from label2id if that is given alone. Raises ValueError if it makes no sense."""
    numbers = fields.get("label2id")
    if not numbers or fields.get("id2label"):
        return fields
    _require("label2id", numbers, "a dictionary of numbers, from 0 on, by the names of labels", _are_label_numbers)
    names = sorted(numbers, key=numbers.__getitem__)
    return {**fields, "id2label": dict(enumerate(names))}


def _are_label_numbers(numbers: object) -> bool:
    if not isinstance(numbers, dict) or not all(map(_is_int, numbers.values())):
        return False
    return sorted(numbers.values()) == list(range(len(numbers)))


def _are_label_names(names: object, count: int) -> bool:
    """Whether these are names by the number of a label, as far as there are numbers."""
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return False
    return all(str(number).isdecimal() and int(number) < count for number in names)


def _require(name: str, value: object, expected: str, holds) -> None:
    if not holds(value):
        raise ValueError(f"BertConfig: {name} is {value!r}; expected {expected}")


def _words(value: object) -> list[str]:
    """The words of a list, or of a string with | between them, as transformers reads it."""
    parts = value.lower().split("|") if isinstance(value, str) else value or ()
    return [str(part).strip() for part in parts]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value < 1


def _size(layers: int, hidden: int, **others: Any) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        **others,
    }


def _roberta(vocab_size: int, layers: int = 12, hidden: int = 768, model_type: str = "roberta") -> dict:
    sizes = _size(layers, hidden, vocab_size=vocab_size, max_position_embeddings=514)
    return {"model_type": model_type, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **sizes}


def _albert(layers: int, hidden: int, heads: int) -> dict:
    return {"model_type": "albert", **_size(layers, hidden, num_attention_heads=heads)}


def _electra(layers: int, hidden: int, embedding: int) -> dict:
    return {"model_type": "electra", **_size(layers, hidden, embedding_size=embedding)}


def _deberta(layers: int, hidden: int, vocab_size: int = 128100, **others: Any) -> dict:
    """DeBERTa-v3's fields; version 2 also has a convolution."""
    relative = {
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }
    return {"model_type": "deberta-v2", **_size(layers, hidden, vocab_size=vocab_size, **relative, **others)}


_MPNET = {"model_type": "mpnet", "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}


def _minilm(layers: int) -> dict:
    return _size(layers, 384, num_attention_heads=12)


# name -> (parameters of the encoder with embeddings and pooler, as published; fields that differ from the defaults)
PRESETS: dict[str, tuple[str, dict]] = {
    "bert-base-uncased": ("110M", {}),
    "bert-base-cased": ("110M", {"vocab_size": 28996}),
    "bert-base-multilingual-uncased": ("167M", {"vocab_size": 105879}),
    "bert-base-multilingual-cased": ("178M", {"vocab_size": 119547}),
    "bert-base-chinese": ("102M", {"vocab_size": 21128}),
    "bert-large-uncased": ("340M", _size(24, 1024)),
    "bert-large-cased": ("340M", _size(24, 1024, vocab_size=28996)),
    "bert-medium": ("41.7M", _size(8, 512)),
    "bert-small": ("29.1M", _size(4, 512)),
    "bert-mini": ("11.3M", _size(4, 256)),
    "bert-tiny": ("4.4M", _size(2, 128)),
    "sentence-transformers/all-MiniLM-L6-v2": ("22.7M", _minilm(6)),
    "sentence-transformers/all-MiniLM-L12-v2": ("33.4M", _minilm(12)),
    "roberta-base": ("125M", _roberta(50265)),
    "roberta-large": ("355M", _roberta(50265, 24, 1024)),
    "distilroberta-base": ("82M", _roberta(50265, 6)),
    "xlm-roberta-base": ("278M", _roberta(250002, model_type="xlm-roberta")),
    "xlm-roberta-large": ("560M", _roberta(250002, 24, 1024, "xlm-roberta")),
    "camembert-base": ("110M", _roberta(32005, model_type="camembert")),
    "distilbert-base-uncased": ("66M", {"model_type": "distilbert"}),
    "distilbert-base-cased": ("65M", {"model_type": "distilbert", "vocab_size": 28996}),
    "distilbert-base-multilingual-cased": ("134M", {"model_type": "distilbert", "vocab_size": 119547}),
    "albert-base-v2": ("11.7M", _albert(12, 768, 12)),
    "albert-large-v2": ("17.7M", _albert(24, 1024, 16)),
    "albert-xlarge-v2": ("58.7M", _albert(24, 2048, 16)),
    "albert-xxlarge-v2": ("223M", _albert(12, 4096, 64)),
    "google/electra-small-discriminator": ("13.5M", _electra(12, 256, 128)),
    "google/electra-base-discriminator": ("109M", _electra(12, 768, 768)),
    "google/electra-large-discriminator": ("334M", _electra(24, 1024, 1024)),
    "google/electra-small-generator": ("13.5M", _electra(12, 256, 128)),
    "google/electra-base-generator": ("33.5M", _electra(12, 256, 768)),
    "google/electra-large-generator": ("51M", _electra(24, 256, 1024)),
    "microsoft/deberta-v3-xsmall": ("70.7M", _deberta(12, 384)),
    "microsoft/deberta-v3-small": ("141M", _deberta(6, 768)),
    "microsoft/deberta-v3-base": ("184M", _deberta(12, 768)),
    "microsoft/deberta-v3-large": ("434M", _deberta(24, 1024)),
    "microsoft/mdeberta-v3-base": ("278M", _deberta(12, 768, 251000)),
    "microsoft/deberta-v2-xlarge": ("885M", _deberta(24, 1536, **_CONVOLUTION)),
    "microsoft/deberta-v2-xxlarge": ("1566M", _deberta(48, 1536, **_CONVOLUTION)),
    "microsoft/mpnet-base": ("109M", _MPNET),
    "sentence-transformers/all-mpnet-base-v2": ("109M", _MPNET),
}
