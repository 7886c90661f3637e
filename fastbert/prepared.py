"""The modules that `fastbert.prepare` makes: dense layers whose weights were packed once for this processor, or
quantised for a GPU, and models that hold them."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastbert import huge_pages, ops
from fastbert.families import FAMILIES, follow, key_of
from fastbert.ops.packed_linear import panels_of, quantize_weight, with_sums
from fastbert.ops.scaled_layer import Dense, joined
from fastbert.ops.scaled_linear import problem_on

if TYPE_CHECKING:
    from fastbert.config import BertConfig

# precision -> the dtype of everything but the dense layers
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32, "fp8": torch.bfloat16}
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # -> the dtype of weights with one factor per channel
SCALE = "weight_scale"  # the name of these factors in state dicts
CONFIG_ENTRY = "fastbert_prepare"  # the field in config.json
LOADING = "_load_from_state_dict"  # what a module's load_state_dict calls in every module below it


class PreparedLinear(nn.Module):
    """nn.Linear for inference on a CPU. precision: "fp32", "bf16" or "int8".

    Its state dict has the plain weight, the bias if the layer has one, and for int8 weight_scale (out_features,),
    because the packed layout depends on the processor. Once it is filled it is frozen: training, a change of dtype or
    device and load_state_dict raise RuntimeError.
    """

    def __init__(self, in_features: int, out_features: int, precision: str, biased: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.precision, self.biased = in_features, out_features, precision, biased
        # The arguments of `ops.packed_linear`. They are not buffers, because nothing may convert them.
        self.weight: Tensor | None = None
        self.scale: Tensor | None = None
        self.bias: Tensor | None = None
        self.kept: tuple[list[tuple[Tensor, int]], dict[str, Tensor]] | None = None
        self.training = False

    @staticmethod
    def empty(linear: nn.Linear, precision: str) -> "PreparedLinear":
        """A module to replace `linear`, without weights yet."""
        kind = ScaledLinear if precision == "fp8" else PreparedLinear
        return kind(linear.in_features, linear.out_features, precision, linear.bias is not None)

    @classmethod
    def of(cls, linear: nn.Linear, precision: str) -> "PreparedLinear":
        """`linear`, which has been converted to the precision's dtype and is finite."""
        made = cls.empty(linear, precision)
        made._fill_from(linear.weight, linear.bias)
        return made

    def _fill_from(self, weight: Tensor, bias: Tensor | None) -> None:
        """Fills the module from plain tensors that are not quantised yet."""
        if self.precision in QUANTIZED:
            self.fill(*quantize_weight(weight, QUANTIZED[self.precision]), bias)
        else:
            self.fill(weight.detach().to(PRECISIONS[self.precision]), None, bias)

    def fill(self, weight: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
        """Packs a plain weight (out_features, in_features), an int8 one with its factor (out_features,). bias: zeros
        when None."""
        panels = panels_of(weight)
        self.weight = huge_pages.empty(panels.shape, panels.dtype).copy_(panels)
        self.scale = None if factor is None else with_sums(factor.float(), weight)
        self.bias = weight.new_zeros(self.out_features, dtype=torch.float32) if bias is None else bias.detach().float()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the plain weight."""
        return QUANTIZED.get(self.precision, PRECISIONS[self.precision])

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), float32 for "fp32", bfloat16 for "bf16", x's dtype for "int8"."""
        if self.precision != "int8":
            x = x.to(self.dtype)
        return ops.packed_linear(x, self.weight, self.scale, self.bias, self.out_features)

    def keep(self, sources: Sequence[Tensor], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """make(), which depends on these tensors only, cached until one of them is replaced or changed in place."""
        versions = [(each, 0 if each.is_inference() else each._version) for each in sources]
        known = self.kept
        if known is None or any([a is not b or m != n for (a, m), (b, n) in zip(known[0], versions, strict=True)]):
            with torch.inference_mode(False), torch.no_grad():  # valid for later calls in any mode
                known = self.kept = versions, make()
        return known[1]

    def numbers(self) -> int:
        """How many numbers the plain weight and bias have."""
        return self.out_features * (self.in_features + self.biased)

    def bytes(self) -> int:
        """The memory of its tensors, in bytes."""
        tensors = self.weight, self.scale, self.bias, *(self.kept[1].values() if self.kept else ())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, precision={self.precision}"

    # ---- state dicts, copies and files: the plain tensors

    def _plain(self) -> dict[str, Tensor]:
        """The plain tensors by their names in state dicts; on the meta device until the module is filled."""
        size = self.out_features
        if self.weight is None:
            weight = torch.empty(size, self.in_features, dtype=self.dtype, device="meta")
            bias = factor = torch.empty(size, device="meta")
        else:
            weight, factor = self._unpacked()
            bias = self.bias
        plain = {"weight": weight} | ({"bias": bias.to(PRECISIONS[self.precision])} if self.biased else {})
        return plain | ({SCALE: factor} if self.precision in QUANTIZED else {})

    def _unpacked(self) -> tuple[Tensor, Tensor | None]:
        """The plain weight, and for int8 its factors."""
        weight = ops.unpack_weight(self.weight, self.out_features, self.in_features)
        return weight, None if self.scale is None else self.scale[0].clone()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._plain().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.weight is not None:
            raise _frozen("load_state_dict")
        plain = self._plain()
        given = {name: state_dict.get(prefix + name) for name in plain}
        _, _, missing, _, errors = args
        missing += [prefix + name for name, tensor in given.items() if tensor is None]
        if any(tensor is None for tensor in given.values()):
            return
        wrong = [
            f"{prefix}{name} has shape {tuple(given[name].shape)}; expected {tuple(tensor.shape)}"
            for name, tensor in plain.items()
            if given[name].shape != tensor.shape
        ]
        if given["weight"].dtype != self.dtype:
            wrong.append(f"{prefix}weight is {given['weight'].dtype}; expected {self.dtype}")
        if not wrong:
            self.fill(given["weight"], given.get(SCALE), given.get("bias"))
        errors += wrong

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"weight": None, "scale": None, "bias": None, "kept": None}
        return state if self.weight is None else state | {"plain": self._sent()}

    def _sent(self) -> Any:
        """What a pickle has in place of the packed tensors. While a process is spawned, it is bytes: tensors would be
        shared by file descriptors, which are closed when these are freed, before the process has them."""
        plain = self._plain()
        return plain if get_spawning_popen() is None else pickle.dumps(plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = state.pop("plain", None)
        super().__setstate__(state)
        plain = pickle.loads(plain) if isinstance(plain, bytes) else plain
        if plain is not None:
            self.fill(plain["weight"], plain.get(SCALE), plain.get("bias"))

    # ---- frozen

    def train(self, mode: bool = True) -> "PreparedLinear":
        if mode:
            raise _frozen("training mode")
        return super().train(False)

    def _apply(self, convert: Any, recurse: bool = True) -> "PreparedLinear":
        check_conversion(convert, PRECISIONS[self.precision], "cpu", "cpu")
        return self


class TiedLinear(PreparedLinear):
    """A prepared dense layer whose plain weight and bias are another module's, and stay its. It is made anew from them
    when a file is loaded or a copy is made, so it has no entries in state dicts and no numbers that count."""

    tied: tuple[Tensor, Tensor]

    @classmethod
    def to_weight(cls, weight: Tensor, bias: Tensor, precision: str) -> "TiedLinear":
        made = cls(weight.shape[1], weight.shape[0], precision)
        made.tied = weight, bias
        made._pack()
        return made

    def _pack(self) -> None:
        weight, bias = self.tied
        self._fill_from(weight, bias.detach().clone())

    def largest(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """(T, in_features) to the largest results over the tokens of each sequence, (B, out_features)."""
        x = x if self.precision == "int8" else x.to(self.dtype)
        return ops.packed_linear_max(x, self.weight, self.scale, self.bias, self.out_features, cu_seqlens)

    def numbers(self) -> int:
        return 0

    def _save_to_state_dict(self, *args: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        raise _frozen("load_state_dict")

    def _sent(self) -> None:
        """Nothing: the tensors are sent with their module."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


class ScaledLinear(PreparedLinear):
    """nn.Linear for inference that multiplies in fp8 (`ops.scaled_linear`), on a GPU. precision: "fp8".

    Its state dict has the weight in float8_e4m3fn, the bias in bfloat16 and weight_scale. It can move to another GPU.
    """

    def fill(self, weight: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
        bias = weight.new_zeros(self.out_features, dtype=torch.bfloat16) if bias is None else bias
        self.weight, self.scale, self.bias = weight.contiguous(), factor.float(), bias.detach().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) bfloat16."""
        return ops.scaled_linear(x.bfloat16(), self.weight, self.scale, self.bias)

    def dense(self) -> Dense:
        return Dense(self.weight, self.scale, self.bias)

    def _unpacked(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.scale

    def _apply(self, convert: Any, recurse: bool = True) -> "ScaledLinear":
        here = torch.device("cpu") if self.weight is None else self.weight.device
        device = check_conversion(convert, PRECISIONS[self.precision], here)
        if device != here:
            self.weight, self.scale, self.bias = (x.to(device) for x in self.dense())
            self.kept = None
        return self

    def _sent(self) -> Any:
        """The layer's own tensors, the weight as uint8: pickle cannot read float8 tensors."""
        plain = self._plain()
        return plain | {"weight": plain["weight"].view(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "plain" in state:
            state["plain"]["weight"] = state["plain"]["weight"].view(QUANTIZED["fp8"])
        super().__setstate__(state)


def join(model: nn.Module) -> None:
    """Makes the tensors of transformers' separate q, k and v projections parts of one tensor, so that they take one
    matrix product."""
    for module in model.modules():
        if (key := key_of(module)) is None:
            continue
        family = FAMILIES[key]
        for each in dict.fromkeys(family.layers_in_order(module)):
            parts = [each.get_submodule(path) for path in family.layer.projections]
            if all(type(part) is ScaledLinear for part in parts):
                sizes = [part.out_features for part in parts]
                for part, *own in zip(parts, *(x.split(sizes) for x in joined_dense(parts)), strict=True):
                    part.weight, part.scale, part.bias = own


def joined_dense(parts: Sequence[ScaledLinear]) -> Dense:
    """Dense layers with the same input as one. Copies tensors that are not parts of one already, as in pickled
    models."""
    if len(parts) == 1:
        return parts[0].dense()
    each = [part.dense() for part in parts]
    if torch.compiler.is_compiling():
        return joined(each)
    found = [_following(tensors) for tensors in zip(*each, strict=True)]
    return joined(each) if any([whole is None for whole in found]) else Dense(*found)  # `in` would compare tensors


def _following(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over the rows of all, if each begins in memory where the one before ends; else None."""
    first, end, rows = tensors[0], tensors[0].storage_offset(), 0
    storage = first.untyped_storage()._cdata
    for tensor in tensors:
        if tensor.storage_offset() != end or tensor.untyped_storage()._cdata != storage:
            return None
        end, rows = end + tensor.numel(), rows + tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def check_conversion(
    convert: Any, dtype: torch.dtype, device: torch.device | str, others: str = "cuda"
) -> torch.device:
    """The device to which `convert`, the function that nn.Module.to and its like apply to tensors, moves them. Raises
    RuntimeError if it changes their dtype, moves them to a device type other than their own and `others`, or replaces
    them on their own device, as `to_empty` does."""
    probe = torch.empty(1, dtype=dtype, device=device)
    after = convert(probe)
    if after.dtype != dtype or after.device.type not in (probe.device.type, others):
        raise _frozen(f"{after.dtype} on {after.device}")
    if after is not probe and after.device == probe.device:
        raise _frozen("new tensors")
    return after.device


def _frozen(what: str) -> RuntimeError:
    return RuntimeError(f"{what}: a model that fastbert.prepare has made is frozen; use the original, and prepare that")


class Frozen:
    """Replaces a method of a module that holds prepared layers, and raises before any part of it changes. It is an
    object in the module's `__dict__`, so that it is copied and pickled with the module."""

    def __init__(self, module: nn.Module, method: str, dtype: torch.dtype) -> None:
        self.module, self.method, self.dtype = module, method, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "_apply":
            device = next(chain(self.module.parameters(), (layer.weight for layer in _layers(self.module)))).device
            check_conversion(args[0], self.dtype, device, device.type)
        elif self.method != "train" or (args or tuple(kwargs.values()) or (True,))[0]:
            raise _frozen({"train": "training mode", LOADING: "load_state_dict"}.get(self.method, self.method))
        done = getattr(type(self.module), self.method)(self.module, *args, **kwargs)
        if self.method == "_apply" and key_of(self.module):
            join(self.module)
        return done


def freeze(model: nn.Module, precision: str, skip: tuple[str, ...]) -> nn.Module:
    """The model without gradients and without dropout. Methods that would change its weights, or write files that
    transformers cannot read, now raise. Raises ValueError for a vocabulary that cannot be quantised."""
    model.requires_grad_(False)
    join(model)
    for name, module in tied(model).items():
        if precision != "fp8" and not is_skipped(name, skip):
            if precision in QUANTIZED and not module.get_input_embeddings().weight.isfinite().all():
                raise ValueError(f"fastbert.prepare: {name} has numbers that are not finite in {precision}")
            module.pack_vocabulary(precision)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the mode of a single part can still be changed
        if not isinstance(module, PreparedLinear) and holds_prepared(module):
            for method in ("train", "_apply", "load_state_dict", LOADING):
                setattr(module, method, Frozen(module, method, PRECISIONS[precision]))
        if type(module).__module__.startswith(("transformers.", "sentence_transformers.")):
            for method in ("save_pretrained", "save"):
                if hasattr(module, method):
                    setattr(module, method, Frozen(module, method, PRECISIONS[precision]))
    return model


def held_tensors(model: nn.Module) -> list[Tensor | None]:
    """Parameters, buffers and, of prepared layers, the tensors that are neither."""
    found: list[Tensor | None] = []
    for module in model.modules():
        found += *module._parameters.values(), *module._buffers.values()
        found += (module.weight, module.scale, module.bias) if isinstance(module, PreparedLinear) else ()
    return found


def _layers(model: nn.Module) -> Iterator[PreparedLinear]:
    return (module for module in model.modules() if isinstance(module, PreparedLinear))


def holds_prepared(model: nn.Module) -> bool:
    """Whether any dense layer is one that `fastbert.prepare` made."""
    return next(_layers(model), None) is not None


def home(precision: str) -> torch.device:
    """The device that models of this precision run on. Raises ValueError if this machine cannot run them."""
    device = torch.device("cuda" if precision == "fp8" and torch.cuda.is_available() else "cpu")
    if precision == "fp8" and (reason := problem_on(device)):
        raise ValueError(f"fp8 on {device}: {reason}")
    return device


# ---- which parts of a model


def linears(model: nn.Module) -> Iterator[str]:
    """The names of the dense layers that `prepare` replaces."""
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        prefix = f"{name}." if name else ""
        if hasattr(module, "dense_layers"):  # ours
            yield from (prefix + part for part in module.dense_layers())
        elif key := key_of(module):
            family = FAMILIES[key]
            for each in dict.fromkeys(family.layers_in_order(module)):
                yield from (f"{names[each]}.{part}" for part in family.layer.dense_in(each))
            if family.projected(module) is not None:
                yield f"{prefix}{family.projection}"


def tied(model: nn.Module) -> dict[str, nn.Module]:
    """The tied layers that `freeze` makes, by name, with the module that makes them."""
    owners = {name: module for name, module in model.named_modules() if hasattr(type(module), "pack_vocabulary")}
    return {f"{name}.vocabulary" if name else "vocabulary": module for name, module in owners.items()}


def is_skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether `skip` has this part or a module that contains it. Names without the base model's prefix count too."""
    bare = name.removeprefix("bert.")
    return any(part == each or part.startswith(f"{each}.") for part in (name, bare) for each in skip)


def replace(model: nn.Module, skip: tuple[str, ...], make: Callable[[str, nn.Linear], PreparedLinear]) -> None:
    """Replaces each layer of `linears` by make(name, layer), except those in `skip`."""
    for name in linears(model):
        if not is_skipped(name, skip):
            owner, _, last = name.rpartition(".")
            part = follow(model, name)
            if not isinstance(part, PreparedLinear):  # else two layers share it, and it has been replaced
                setattr(follow(model, owner) if owner else model, last, make(name, part))


# ---- checkpoints


def config_entries(precision: str, skip: tuple[str, ...]) -> dict[str, Any]:
    """Fields for config.json: what `outline` reads and, with quantised weights, an entry that makes transformers refuse
    the directory, because it would read the weights as floats. (transformers ignores an unknown quant_method with a
    warning; an entry without one is an error.)"""
    entries = {CONFIG_ENTRY: {"precision": precision, "skip": [name.removeprefix("bert.") for name in skip]}}
    return entries | ({"quantization_config": {"library": "fastbert"}} if precision in QUANTIZED else {})


def without_entries(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields without those of `config_entries`."""
    if CONFIG_ENTRY not in config:
        return config
    return {name: value for name, value in config.items() if name not in (CONFIG_ENTRY, "quantization_config")}


def outline(model: nn.Module, config: "BertConfig") -> tuple[str, tuple[str, ...]] | None:
    """If the configuration is that of a prepared model, puts modules without weights in place of its dense layers, to
    be filled from a state dict. Returns the precision and the names that were skipped, or None. Raises ValueError for
    an entry that makes no sense."""
    entry = config.extra.get(CONFIG_ENTRY)
    if entry is None:
        return None
    precision, skip = (entry.get(name) for name in ("precision", "skip")) if isinstance(entry, dict) else (None, None)
    if precision not in PRECISIONS or not isinstance(skip, list) or not all(isinstance(name, str) for name in skip):
        expected = f"a precision of {', '.join(PRECISIONS)} and a list `skip` of names"
        raise ValueError(f"config.json: {CONFIG_ENTRY} is {entry!r}; expected {expected}")
    replace(model, tuple(skip), lambda _, part: PreparedLinear.empty(part, precision))
    return precision, tuple(skip)
