"""BertConfig: what a BERT is made of, in Hugging Face's field names and defaults, and the well-known sizes by name."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# hidden_act of config.json -> the `approximate` of the GELU ops
GELU_FORMS = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass
class BertConfig:
    """The shape of a BERT encoder; fields and defaults are those of `transformers.BertConfig`.

    Fields of a config.json that are not listed here are kept in `extra` and written back by `to_dict`. A model reads it
    when it is made; what is assigned later (transformers.Trainer sets `use_cache`) changes no model.
    Raises ValueError for a configuration that makes no sense or that fastbert does not compute.
    """

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
    num_labels: int = 2
    problem_type: str | None = None
    classifier_dropout: float | None = None
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "num_labels",
        ):
            self._require(name, getattr(self, name), "a positive integer", lambda v: _is_int(v) and v > 0)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            value = self.head_dropout if name == "classifier_dropout" else getattr(self, name)
            self._require(name, value, "a number in [0, 1)", lambda v: _is_number(v) and 0 <= v < 1)
        for name in ("initializer_range", "layer_norm_eps"):
            self._require(name, getattr(self, name), "a number >= 0", lambda v: _is_number(v) and v >= 0)
        self._require("hidden_act", self.hidden_act, f"one of {', '.join(GELU_FORMS)}", lambda v: v in list(GELU_FORMS))
        known = (None, *PROBLEM_TYPES)
        self._require("problem_type", self.problem_type, f"one of {known}", lambda v: v in known)
        self._require(
            "pad_token_id",
            self.pad_token_id,
            f"None or an id below vocab_size ({self.vocab_size})",
            lambda v: v is None or (_is_int(v) and 0 <= v < self.vocab_size),
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"BertConfig: num_attention_heads is {self.num_attention_heads}, "
                f"which does not divide hidden_size ({self.hidden_size})"
            )
        for name, expected in (
            ("model_type", "bert"),
            ("position_embedding_type", "absolute"),
            ("is_decoder", False),
            ("add_cross_attention", False),
        ):
            self._require(name, self.extra.get(name), repr(expected), lambda v, e=expected: v is None or v == e)

    @staticmethod
    def _require(name: str, value: object, expected: str, holds) -> None:
        if not holds(value):
            raise ValueError(f"BertConfig: {name} is {value!r}; expected {expected}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def head_dropout(self) -> float:
        """The dropout before a classifier."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    @property
    def gelu(self) -> str:
        """The GELU form of `hidden_act`, as the ops' `approximate`."""
        return GELU_FORMS[self.hidden_act]

    @classmethod
    def preset(cls, name: str) -> "BertConfig":
        """A published size by name: "bert-base-uncased", or with its parameters, "bert-base-uncased (110M)".

        Raises ValueError that lists the known names.
        """
        for known, (size, fields) in PRESETS.items():
            if name in (known, f"{known} ({size})"):
                return cls(**fields)
        names = ", ".join(f"{known} ({size})" for known, (size, _) in PRESETS.items())
        raise ValueError(f"unknown model {name!r}; known, with or without the number: {names}")

    @classmethod
    def from_dict(cls, values: dict) -> "BertConfig":
        """From the fields of a config.json."""
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        if values.get("id2label") and "num_labels" not in values:
            values = {**values, "num_labels": len(values["id2label"])}
        return cls(
            **{name: value for name, value in values.items() if name in known},
            extra={name: value for name, value in values.items() if name not in known},
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "BertConfig":
        """From `directory`/config.json. Raises FileNotFoundError, or ValueError for what is no BERT's configuration."""
        path = Path(directory) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds a {type(values).__name__}; expected an object")
        return cls.from_dict(values)

    def changed(self, **fields) -> "BertConfig":
        """With other values of these fields. The names of the labels go where there is another number of labels."""
        values = {**self.to_dict(), **fields}
        if len(values.get("id2label") or ()) != values["num_labels"] and not {"id2label", "label2id"} & fields.keys():
            values = {name: value for name, value in values.items() if name not in ("id2label", "label2id")}
        return self.from_dict(values)

    def to_dict(self) -> dict:
        """The fields of a config.json that `transformers` reads."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return {"model_type": "bert", **self.extra, **values}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _size(layers: int, hidden: int, **others: int) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        **others,
    }


# name -> (parameters of the encoder with embeddings and pooler, as published; fields that differ from the defaults)
PRESETS: dict[str, tuple[str, dict]] = {
    "bert-base-uncased": ("110M", {}),
    "bert-base-cased": ("110M", {"vocab_size": 28996}),
    "bert-large-uncased": ("340M", _size(24, 1024)),
    "bert-large-cased": ("340M", _size(24, 1024, vocab_size=28996)),
    "bert-medium": ("41.7M", _size(8, 512)),
    "bert-small": ("29.1M", _size(4, 512)),
    "bert-mini": ("11.3M", _size(4, 256)),
    "bert-tiny": ("4.4M", _size(2, 128)),
}
