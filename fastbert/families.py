"""The `transformers` families that `fastbert.accelerate` knows: where each keeps what a BERT layer is made of.

Facts only, as data. One set of forwards (`fastbert/stand_ins.py`) computes all families from them.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LayerFacts:
    """Attribute paths from a layer module to its parts. None: the family has no such part."""

    attention: str  # the module whose attention weights transformers records
    heads: str
    query: str
    key: str
    value: str
    attention_dropout: str  # drops while `attention` (not the nn.Dropout) is in training
    out: str
    out_dropout: str | None
    out_norm: str
    up: str
    activation: str
    down: str
    down_dropout: str | None
    down_norm: str

    def __post_init__(self) -> None:
        found = [getattr(self, field.name) for field in fields(self)]
        paths = [None if path is None else path.split(".") for path in found]
        inner = {".".join(path[:end]) for path in paths if path for end in range(1, len(path))} - {self.attention}
        object.__setattr__(self, "_paths", paths)
        object.__setattr__(self, "_inner_paths", [path.split(".") for path in sorted(inner)])

    def parts(self, layer: nn.Module) -> "LayerParts":
        return LayerParts(*[None if path is None else _follow(layer, path) for path in self._paths])

    def inner(self, layer: nn.Module) -> list[nn.Module]:
        """The modules between the layer and its parts: computed without being called."""
        return [_follow(layer, path) for path in self._inner_paths]


def _follow(module: Any, path: list[str]) -> Any:
    """As operator.attrgetter, which torch.compile does not trace. Children without Module.__getattr__: it is slow."""
    for name in path:
        children = module._modules
        module = children[name] if name in children else getattr(module, name)
    return module


@dataclass(slots=True)
class LayerParts:
    """What LayerFacts finds in one layer, field by field."""

    attention: nn.Module
    heads: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_dropout: nn.Module
    out: nn.Module
    out_dropout: nn.Module | None
    out_norm: nn.Module
    up: nn.Module
    activation: nn.Module
    down: nn.Module
    down_dropout: nn.Module | None
    down_norm: nn.Module


@dataclass(frozen=True)
class Family:
    """One base model class (the encoder under the heads).

    stack: path to its layers, or to groups that share them. projection: path to a Linear between embeddings and
    layers. padding_positions: position ids count the tokens that are not padding_idx, as RoBERTa does.
    """

    name: str
    layer: LayerFacts
    encoder: str = "encoder"
    stack: str = "encoder.layer"
    grouped: bool = False
    projection: str | None = None
    token_types: bool = True
    padding_positions: bool = False

    def applications(self, base: nn.Module) -> list[nn.Module]:
        """The layers in the order in which a forward runs them; shared ones come several times."""
        stack = _follow(base, self.stack.split("."))
        if not self.grouped:
            return list(stack)
        count = base.config.num_hidden_layers
        groups = [stack[int(index / (count / base.config.num_hidden_groups))] for index in range(count)]
        return [layer for group in groups for layer in group.albert_layers]

    def passages(self, base: nn.Module) -> list[nn.Module]:
        """The modules, layers apart, that transformers' code calls with packed tensors."""
        groups = _follow(base, self.stack.split(".")) if self.grouped else ()
        return [base.embeddings, getattr(base, self.encoder), *groups]

    def projected(self, base: nn.Module) -> nn.Module | None:
        """The Linear between embeddings and layers, where there is one (ELECTRA has it for unequal widths only)."""
        module: Any = base
        for name in self.projection.split(".") if self.projection else ("",):
            module = getattr(module, name, None)
        return module


_BERT = LayerFacts(
    attention="attention.self",
    heads="attention.self.num_attention_heads",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
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
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
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
    query="attention.query",
    key="attention.key",
    value="attention.value",
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

# Module and class name of the base model -> family. By name, so that transformers need not be imported.
FAMILIES: dict[str, Family] = {
    "transformers.models.bert.modeling_bert.BertModel": Family("BERT", _BERT),
    "transformers.models.roberta.modeling_roberta.RobertaModel": Family("RoBERTa", _BERT, padding_positions=True),
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaModel": Family(
        "XLM-RoBERTa", _BERT, padding_positions=True
    ),
    "transformers.models.camembert.modeling_camembert.CamembertModel": Family(
        "CamemBERT", _BERT, padding_positions=True
    ),
    "transformers.models.electra.modeling_electra.ElectraModel": Family(
        "ELECTRA", _BERT, projection="embeddings_project"
    ),
    "transformers.models.distilbert.modeling_distilbert.DistilBertModel": Family(
        "DistilBERT", _DISTILBERT, encoder="transformer", stack="transformer.layer", token_types=False
    ),
    "transformers.models.albert.modeling_albert.AlbertModel": Family(
        "ALBERT",
        _ALBERT,
        stack="encoder.albert_layer_groups",
        grouped=True,
        projection="encoder.embedding_hidden_mapping_in",
    ),
}


def key_of(base: nn.Module) -> str | None:
    """The key in FAMILIES of a base model, None for any other module.

    A subclass counts (FSDP2 makes them) as long as it computes its family's own forward.
    """
    for cls in type(base).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in FAMILIES:
            return key if type(base).forward is cls.forward else None
    return None
