"""`fastbert.prepare`: a model for inference, its weights packed once for this processor or quantised for a GPU."""

import copy
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from fastbert import backends, hf
from fastbert.families import follow, key_of
from fastbert.model import class_name
from fastbert.ops.scaled_linear import MULTIPLE, problem_on
from fastbert.parts import is_plain
from fastbert.prepared import (
    PRECISIONS,
    PreparedLinear,
    config_entries,
    freeze,
    holds_prepared,
    is_skipped,
    linears,
    replace,
    tied,
)

M = TypeVar("M", bound=nn.Module)


def prepare(model: M, precision: str, *, skip: Iterable[str] = ()) -> M:
    """Makes a frozen copy of a model for inference on this machine's processor or on a GPU. The model is not changed.

    model: one of fastbert's or transformers' (the copy is accelerated if the model is not), or a module that contains
    some, as in sentence-transformers; in evaluation mode, and on the CPU or, for "fp8", on a GPU. precision: "fp32", as
    exact as before; "bf16", to which the whole copy is converted; "int8": dense layers have int8 weights with a factor
    for each output channel, and their inputs are quantised to int8 for each token; all else is float32, except for
    bfloat16 between the products of a layer; "fp8": the same in float8_e4m3fn, for GPUs of sm_90 and newer, and all
    else is bfloat16. skip: names of submodules that are not prepared (only converted to the dtype of "all else"), such
    as "encoder.layer.11" or "encoder.layer.0.output.dense".

    Encoders' dense layers and projections of embeddings are prepared, and a sparse encoder's product with the
    vocabulary ("vocabulary"), as a copy of the word embeddings; heads and poolers, which read few tokens, are not. A
    prepared weight takes 4, 2 or 1 bytes per number, depending on the precision. The copy cannot be trained:
    training mode, a change of dtype or device and load_state_dict raise RuntimeError. `save_pretrained` of fastbert's
    models writes plain tensors, which any machine packs when it loads them.
    Raises TypeError for a module without such a model, ValueError for an unknown precision or name, for a model that is
    in training mode, prepared already or on a device that the precision is not for, and for a dense layer, which it
    names, that is not finite, is not a plain nn.Linear or has sizes that "fp8" products do not take.
    """
    skip = check_names(model, precision, skip)
    prepared = copy.deepcopy(model).to(PRECISIONS[precision]).eval()
    if any(key_of(module) for module in prepared.modules()):
        hf.accelerate(prepared)
    replace(prepared, skip, lambda name, part: _packed(name, part, precision))
    for config in {id(c): c for m in prepared.modules() if (c := getattr(m, "config", None))}.values():
        if hasattr(config, "extra"):
            config.extra |= config_entries(precision, skip)
    return freeze(prepared, precision, skip)


def _packed(name: str, linear: nn.Linear, precision: str) -> PreparedLinear:
    if not all([parameter.isfinite().all() for parameter in linear.parameters()]):
        raise ValueError(f"fastbert.prepare: {name} has numbers that are not finite in {precision}")
    return PreparedLinear.of(linear, precision)


def _trains(module: nn.Module) -> bool:
    """Whether its training mode matters. sentence-transformers' containers say that they train until they encode, while
    the model in them is in evaluation mode."""
    return isinstance(module, nn.Dropout) or next(module.parameters(recurse=False), None) is not None


def check_names(model: nn.Module, precision: str, skip: Iterable[str]) -> tuple[str, ...]:
    """Checks the arguments of `prepare` and raises its errors. Returns skip as a tuple."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fastbert.prepare: given a {type(model).__name__}; expected a model")
    if precision not in PRECISIONS:
        raise ValueError(f"fastbert.prepare: precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if any(module.training for module in model.modules() if _trains(module)):
        raise ValueError("fastbert.prepare: the model is in training mode; call model.eval() first")
    _check_device(model, precision)
    if holds_prepared(model):
        raise ValueError("fastbert.prepare: the model is prepared already; expected the original")
    names, skip = [*linears(model), *tied(model)], (skip,) if isinstance(skip, str) else tuple(skip)
    if not names:
        raise TypeError(f"fastbert.prepare: a {type(model).__name__} holds no encoder of fastbert or transformers")
    for each in skip:
        if not any(is_skipped(name, (each,)) for name in names):
            raise ValueError(f"fastbert.prepare: skip has {each!r}, which holds none of {names[0]}, {names[1]}, ...")
    left = [name for name in linears(model) if not is_skipped(name, skip)]
    if not left:
        raise ValueError(f"fastbert.prepare: skip is {skip}; expected that a dense layer is left to prepare")
    for name in left:
        part = _find(model, name)
        if part is None or not is_plain(part, nn.Linear):
            given = "missing" if part is None else f"a {class_name(part)}, or has hooks"
            raise ValueError(f"fastbert.prepare: {name} is {given}; expected a plain torch.nn.Linear (LoRA: merge it)")
        if precision == "fp8":
            _check_sizes(name, part.in_features, part.out_features)
    return skip


def _check_sizes(name: str, inner: int, channels: int) -> None:
    most = backends.KERNELS["scaled_linear"]["cuda"].largest
    if inner % MULTIPLE or channels % MULTIPLE or inner > most:
        expected = f"fp8 takes multiples of {MULTIPLE}, and at most {most} in"
        raise ValueError(f"fastbert.prepare: {name} has {inner} features in and {channels} out; {expected}")


def _check_device(model: nn.Module, precision: str) -> None:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if precision == "fp8":
        if len(devices) > 1:
            places = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"fastbert.prepare: the model is on {places}; expected one GPU")
        for device in devices:
            if reason := problem_on(device):
                raise ValueError(f"fastbert.prepare: fp8 on {device}, where the model is: {reason}")
    elif others := {str(device) for device in devices} - {"cpu"}:
        raise ValueError(
            f"fastbert.prepare: the model is on {min(others)}; {precision} is for CPUs, call model.cpu() first"
        )


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return follow(model, name)
    except AttributeError:
        return None
