"""Hugging Face in and out: state dicts, and live `transformers` models on our kernels."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from fastbert import families
from fastbert.families import FAMILIES, Family, follow
from fastbert.hf import attention, forwards, supported
from fastbert.hf.forwards import Acceleration, Replacement, Report
from fastbert.model import BertEncoder, BertModel, require_ours
from fastbert.prepared import holds_prepared

OLDEST = (5, 0)  # transformers


def state_dict(model: BertModel | BertEncoder) -> dict[str, Tensor]:
    """The parameters of one of our modules under Hugging Face's names, bit for bit. Raises TypeError for another."""
    require_ours("state_dict", model)
    return model.to_hugging_face(model.state_dict())


def accelerate(model: nn.Module, *, skip_logits: bool | None = None) -> Report:
    """Makes a live `transformers` model run on fastbert's kernels, with padding removed once for the whole stack.

    model: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, ALBERT, DeBERTa-v2 (v3 too) or MPNet, with any
    head, or a module that contains such models (from peft, sentence-transformers or your own code). It keeps its class,
    configuration, parameters and outputs; `docs/accelerate.md` says what differs. Forwards that cannot be packed run
    the original computation, with one warning for each reason. Returns a live report; for a model that is accelerated
    already, its existing report.

    skip_logits: masked-LM heads in training with labels run on the labelled tokens alone, and their outputs have a loss
    and no logits. False, as at first: outputs have all fields of the original's. None leaves it as it was.

    Raises TypeError for an object that is no nn.Module or contains no transformers model, RuntimeError for transformers
    below 5.0, and ValueError for a model without a supported family or on the meta device, and for skip_logits without
    a masked-LM head. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fastbert.accelerate: given a {type(model).__name__}; expected a transformers model")
    _check_version()
    bases = _bases(model)
    _check_supported(model, bases)
    if skip_logits and not any(type(_around(model, name)).__name__.endswith(forwards.MASKED_LM) for name in bases):
        raise ValueError(f"fastbert.accelerate: skip_logits is for masked-LM heads; {type(model).__name__} has none")
    known = {name: _acceleration(base) for name, base in bases.items()}
    report = next((each.report for each in known.values() if each), None) or Report()
    new = {name: _replacements(model, name, base, report) for name, base in bases.items() if known[name] is None}
    report.not_replaced |= _left_out(model, bases)
    report.skip_logits = report.skip_logits if skip_logits is None else skip_logits
    for name, replacements in new.items():
        for replacement in replacements:
            if _active(replacement.module) is None:  # else two base models share it
                replacement.install()
        report.accelerations.append(replacements[0].shared)
        report.replaced[name] = _description(bases[name])
    return report


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`: puts every original `forward` back. Models that were accelerated with this one stay so.

    Raises ValueError if the model is not accelerated, or prepared.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fastbert.restore: given a {type(model).__name__}; expected a transformers model")
    if holds_prepared(model):
        raise ValueError("fastbert.restore: the model is prepared; expected the original that it was made from")
    found = [replacement for module in model.modules() if (replacement := _active(module))]
    if not found:
        raise ValueError(f"fastbert.restore: this {type(model).__name__} is not accelerated")
    accelerations = [each for base in _bases(model).values() if (each := _acceleration(base))]
    for replacement in found:
        replacement.remove()
    for each in accelerations:
        each.active = False


def register() -> str:
    """Registers our attention, and the mask that it needs, with transformers; returns its name, "fastbert".

    `model.set_attn_implementation("fastbert")` then computes attention without padding in any encoder that goes
    through transformers' attention interface. Everything else still computes padding: `accelerate` is faster.
    """
    _check_version()
    return attention.register()


# ---- which modules


def _check_version() -> None:
    if supported.version() < OLDEST:
        import transformers

        raise RuntimeError(f"fastbert: transformers is {transformers.__version__}; expected 5.0 or newer")


def _check_supported(model: nn.Module, bases: dict[str, nn.Module]) -> None:
    from transformers import PreTrainedModel

    supported = ", ".join(family.name for family in FAMILIES.values())
    if not bases:
        theirs = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if theirs is None:
            raise TypeError(f"fastbert.accelerate: a {type(model).__name__} holds no transformers model")
        raise ValueError(f"fastbert.accelerate: {_unsupported(theirs)}; expected one of {supported}")
    for name, base in bases.items():
        empty = next((key for key, parameter in base.named_parameters() if parameter.is_meta), None)
        if empty is not None:
            where = f"{name}.{empty}" if name else empty
            raise ValueError(f"fastbert.accelerate: {where} is on the meta device; expected a model with its weights")


def _unsupported(model: nn.Module) -> str:
    name, of = type(model).__name__, f"(model_type {model.config.model_type!r})"
    for cls in type(model).__mro__:
        if f"{cls.__module__}.{cls.__qualname__}" in FAMILIES:
            return f"{name} {of} has a forward of its own in place of {cls.__name__}'s"
    reason = families.REFUSED.get(model.config.model_type)
    return f"{name} {of} is not supported" + (f": {reason}" if reason else "")


def _left_out(model: nn.Module, bases: dict[str, nn.Module]) -> dict[str, str]:
    """Models of other families in the model, with the reason: those that neither hold nor belong to a base model."""
    from transformers import PreTrainedModel

    return {
        name: _unsupported(module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and not any(_within(name, base) or _within(base, name) for base in bases)
    }


def _within(inner: str, outer: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def _bases(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if families.key_of(module)}


def _active(module: nn.Module) -> Replacement | None:
    """The module's replacement; None if it has none that runs."""
    replacement = forwards.of(module)
    return replacement if replacement is not None and replacement.active else None


def _acceleration(base: nn.Module) -> Acceleration | None:
    """A base model's; None if it has none that runs. Where somebody has wrapped its forward, its encoder tells."""
    found = _active(base)
    if found is None and "forward" in vars(base):
        found = _active(getattr(base, FAMILIES[families.key_of(base)].encoder))
    return found and found.shared


def _replacements(model: nn.Module, name: str, base: nn.Module, report: Report) -> list[Replacement]:
    """Those of a base model and of its parts. Nothing is installed yet."""
    shared = Acceleration(families.key_of(base), report)
    family, layers = FAMILIES[shared.key], _layers(base)
    head = _around(model, name)
    # Any head that is not known to read all tokens alike may read the first token.
    first_token = head is not None and not type(head).__name__.endswith(forwards.TOKEN_HEADS)
    encoder = forwards.EncoderForward if family.relative is None else forwards.RelativeEncoderForward
    found = [
        forwards.ModelForward(base, shared, first_token),
        forwards.EmbeddingsForward(base.embeddings, shared),
        encoder(getattr(base, family.encoder), shared),
        *(forwards.LayerForward(layer, shared) for layer in layers),
        *(forwards.AttentionForward(module, shared) for module in _attentions(layers, family)),
    ]
    if type(head).__name__.endswith(forwards.ALL_POSITIONS):
        found.append(forwards.HeadForward(head, shared))
    return found


def _layers(base: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys(FAMILIES[families.key_of(base)].layers_in_order(base)))


def _description(base: nn.Module) -> str:
    return f"{type(base).__name__} ({FAMILIES[families.key_of(base)].name}), {len(_layers(base))} layers"


def _attentions(layers: list[nn.Module], family: Family) -> Iterator[nn.Module]:
    """The attention module of each layer. A layer of someone else may have none; forwards then run the original."""
    for layer in layers:
        with contextlib.suppress(AttributeError):
            yield follow(layer, family.layer.attention)


def _around(model: nn.Module, name: str) -> nn.Module | None:
    """The module that holds a base model; None if the base model is the model itself."""
    return model.get_submodule(name.rpartition(".")[0]) if name else None
