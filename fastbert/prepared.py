"""PreparedLinear: a dense layer whose weight was packed once for this processor. `fastbert.prepare` puts it in models."""

from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.ops.packed_linear import quantize_weight, with_sums

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}  # -> of everything else
_SCALE = "weight_scale"  # in state dicts
_NO_SCALE = torch.empty(0)


class PreparedLinear(nn.Module):
    """nn.Linear for inference. precision: "fp32", "bf16" or "int8".

    Its state dict has the plain weight and bias, and for int8 weight_scale (out_features,): packed weights are this
    machine's. It is frozen once it is filled: training, another dtype or device and load_state_dict raise RuntimeError.
    """

    def __init__(self, in_features: int, out_features: int, precision: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.precision = in_features, out_features, precision
        self.weight: Tensor | None = None  # packed; no buffers, because nothing may convert them
        self.scale = _NO_SCALE
        self.bias: Tensor | None = None  # float32
        self.training = False

    @classmethod
    def of(cls, linear: nn.Linear, precision: str) -> "PreparedLinear":
        made = cls(linear.in_features, linear.out_features, precision)
        if precision == "int8":
            weight, factor = quantize_weight(linear.weight)
        else:
            weight, factor = linear.weight.detach().to(PRECISIONS[precision]), None
        made.fill(weight, factor, linear.bias)
        return made

    def fill(self, weight: Tensor, factor: Tensor | None, bias: Tensor | None) -> None:
        """weight: (out_features, in_features), of int8 with a factor (out_features,). bias: zeros when None."""
        self.weight = ops.pack_weight(weight)
        self.scale = _NO_SCALE if factor is None else with_sums(factor.float(), weight)
        self.bias = weight.new_zeros(self.out_features, dtype=torch.float32) if bias is None else bias.detach().float()

    @property
    def dtype(self) -> torch.dtype:
        """Of the plain weight."""
        return torch.int8 if self.precision == "int8" else PRECISIONS[self.precision]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), float32 or bfloat16 as the precision says; beside int8 weights in
        x's dtype."""
        if self.precision != "int8":
            x = x.to(self.dtype)
        return ops.packed_linear(x, self.weight, self.packed_scale, self.bias, self.out_features)

    @property
    def packed_scale(self) -> Tensor | None:
        return self.scale if self.precision == "int8" else None

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.scale, self.bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, precision={self.precision}"

    # ---- state dicts, copies and files: the plain tensors

    def _plain(self) -> dict[str, Tensor]:
        """On the meta device until it is filled."""
        kind, size = PRECISIONS[self.precision], self.out_features
        if self.weight is None:
            meta = {"device": "meta"}
            plain = {
                "weight": torch.empty(size, self.in_features, dtype=self.dtype, **meta),
                "bias": torch.empty(size, dtype=kind, **meta),
            }
            return plain | ({_SCALE: torch.empty(size, **meta)} if self.precision == "int8" else {})
        weight = ops.unpack_weight(self.weight, size, self.in_features)
        plain = {"weight": weight, "bias": self.bias.to(kind)}
        return plain | ({_SCALE: self.scale[0].clone()} if self.precision == "int8" else {})

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._plain().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.weight is not None:
            raise _frozen("load_state_dict")
        given = {name: state_dict.get(prefix + name) for name in self._plain()}
        _, _, missing, _, errors = args
        missing += [prefix + name for name, tensor in given.items() if tensor is None]
        wrong = [name for name in ("weight",) if given[name] is not None and given[name].dtype != self.dtype]
        errors += [f"{prefix}{name} is {given[name].dtype}; expected {self.dtype}" for name in wrong]
        if not wrong and None not in given.values():
            self.fill(given["weight"], given.get(_SCALE), given["bias"])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"weight": None, "scale": _NO_SCALE, "bias": None}
        return state if self.weight is None else state | {"plain": self._plain()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = state.pop("plain", None)
        super().__setstate__(state)
        if plain is not None:
            self.fill(plain["weight"], plain.get(_SCALE), plain["bias"])

    # ---- frozen

    def train(self, mode: bool = True) -> "PreparedLinear":
        if mode:
            raise _frozen("training mode")
        return super().train(False)

    def _apply(self, convert: Any, recurse: bool = True) -> "PreparedLinear":
        check_conversion(convert, PRECISIONS[self.precision])
        return self


def check_conversion(convert: Any, dtype: torch.dtype) -> None:
    """Raises RuntimeError if what nn.Module.to and its like are to do with tensors changes their dtype or device."""
    probe = torch.empty(1, dtype=dtype)
    after = convert(probe)
    if after.dtype != dtype or after.device != probe.device:
        raise _frozen(f"{after.dtype} on {after.device}")


def _frozen(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: weights that fastbert.prepare has packed cannot change; prepare the original model again instead"
    )


class Frozen:
    """What stands for a method of a prepared model: it refuses before any part of the model changes. An object in its
    module's `__dict__`, so that it is copied and pickled with it."""

    def __init__(self, module: nn.Module, method: str, dtype: torch.dtype) -> None:
        self.module, self.method, self.dtype = module, method, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "_apply":
            check_conversion(args[0], self.dtype)
        elif self.method != "train" or (args or tuple(kwargs.values()) or (True,))[0]:
            raise _frozen("training mode" if self.method == "train" else self.method)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)


def freeze(model: nn.Module, precision: str, *more: str) -> None:
    """more: names of further methods that are refused."""
    model.requires_grad_(False)
    for method in ("train", "_apply", "load_state_dict", *more):
        setattr(model, method, Frozen(model, method, PRECISIONS[precision]))
