"""The modules that are measured: transformers', ours, and transformers' in float64, with the same random weights."""

import copy
import dataclasses
import functools
import warnings

import torch
from torch import Tensor, nn

import fastbert
from benchmarks import cases, floor, harness
from benchmarks.cases import STEP, P, Setup, Spec
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, Subject
from benchmarks.harness import Work
from benchmarks.sizes import Batch
from fastbert import BertConfig

_CLASSES = {
    MODEL: ("BertModel", {"add_pooling_layer": False}),
    CLASSIFIER: ("BertForSequenceClassification", {}),
    MASKED_LM: ("BertForMaskedLM", {}),
}


def setup(spec: Spec, batch: Batch, inputs: dict[str, Tensor], device: str, labelled: int = 0, **more) -> Setup:
    """A case of modules on packed inputs. labelled: tokens through a masked-LM head. more: fields of the Setup."""
    theirs, ours, truth = _modules(spec.part, spec.size.config, spec.kind, device)
    exact = Subject(spec.part, spec.size.config, inputs, theirs, ours)

    def with_dropout() -> Subject:
        changes = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
        theirs, ours, _ = _modules(spec.part, dataclasses.replace(exact.config, **changes), spec.kind, device)
        return dataclasses.replace(exact, theirs=theirs, ours=ours)

    parameters = sum(p.numel() for p in theirs.parameters()) if spec.direction == STEP else 0
    return Setup(
        batch,
        exact,
        cases.wide(exact, theirs=truth),
        functools.partial(work, spec, batch, device, labelled, parameters),
        products(spec, batch.tokens, device, labelled),
        with_dropout if spec.has_dropout else None,
        **more,
    )


def _modules(part: str, config: BertConfig, dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    whole = MODEL if part == ENCODER else part
    found = _made(whole, tuple(config.to_dict().items()), dtype, device)
    return tuple(model.encoder for model in found) if part == ENCODER else found


@functools.lru_cache(2)  # of a size, with dropout and without
def _made(part: str, values: tuple[tuple[str, object], ...], dtype: torch.dtype, device: str):
    """None of the weights is zero."""
    import transformers

    config, (name, options) = BertConfig.from_dict(dict(values)), _CLASSES[part]
    with torch.device(device):
        settings = transformers.BertConfig(**config.to_dict(), attn_implementation="sdpa", use_cache=False)
        theirs = getattr(transformers, name)(settings, **options)
        ours = getattr(fastbert, name)(config, **options)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if parameter_name.endswith("LayerNorm.weight") else 0.0, 0.04)
    theirs.to(dtype)
    ours.load_state_dict(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of transformers have another name for it
        wide.gradient_checkpointing_enable({"use_reentrant": False})  # all float64 scores would not fit a GPU
    return theirs, ours.to(dtype), wide


# ---- work and its bounds


def work(spec: Spec, batch: Batch, device: str, labelled: int = 0, parameters: int = 0) -> Work:
    """labelled: tokens through a masked-LM head. parameters: of the optimizer's step; 0 without one."""
    config, ceilings, element = spec.size.config, floor.ceilings(device, spec.kind), spec.kind.itemsize
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    known = (ceilings, element)
    if spec.backward:
        flops = floor.step_flops(layers, hidden, batch.lengths, vocab, labelled)
        moved = floor.step_bytes(layers, hidden, batch.tokens, element)
        products = floor.step_products_seconds(layers, hidden, batch.tokens, *known)
        rest = floor.step_rest_seconds(layers, hidden, batch.lengths, *known)
    else:
        flops = floor.forward_flops(layers, hidden, batch.lengths, vocab, labelled)
        moved = floor.forward_bytes(layers, hidden, batch.tokens, element)
        products = floor.forward_products_seconds(layers, hidden, batch.tokens, *known)
        rest = floor.forward_rest_seconds(layers, hidden, batch.lengths, *known)
    products += (3 if spec.backward else 1) * floor.head_flops(hidden, vocab, labelled) / ceilings.product
    optimizer = floor.adamw_bytes(parameters, element)
    rest += optimizer / ceilings.bandwidth
    return Work(batch.tokens, flops, moved + optimizer, products + rest, rest)


def products(spec: Spec, tokens: int, device: str, labelled: int = 0) -> dict[str, harness.Call]:
    """As bounds: a model's products on packed tokens and, of a masked-LM head, on labelled rows, and nothing else."""
    config = spec.size.config
    C, wide, V = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes = [(tokens, C, 3 * C), (tokens, C, C), (tokens, C, wide), (tokens, wide, C)] * config.num_hidden_layers
    shapes += [(labelled, C, C), (labelled, C, V)] if labelled else []
    return floor.products_alone(shapes, spec.kind, device, spec.backward)
