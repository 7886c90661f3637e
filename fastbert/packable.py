"""What of a live model can be computed without being called, from its parameters, and what cannot.

A `check` raises CannotPack with the reason: hooks would not run, a replacement or a rule of its own would be ignored.
They run at every forward, because people hook, wrap and replace modules between forwards.
"""

from torch import Tensor, nn

GELU_FORMS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}

# What these hook to a module works with packed tensors as well: FSDP2 gathers weights, transformers records outputs.
FRAMEWORKS = ("transformers.", "torch.distributed.")


class CannotPack(Exception):
    """Why a forward runs the original computation."""


def hooks(module: nn.Module, but_of: tuple[str, ...] = ()) -> bool:
    """Whether the module has hooks, those of the named libraries apart."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not any(kinds):
        return False
    owners = ((getattr(hook, "__module__", None) or "") for kind in kinds for hook in kind.values())
    return not but_of or not all(owner.startswith(but_of) for owner in owners)


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what `kind` does from its parameters, so that an op may read those instead."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def ordinary(weight: Tensor) -> bool:
    """No quantised tensor or the like, which an op could not read. FSDP2's are ordinary once their layer runs."""
    return type(weight) in (nn.Parameter, Tensor) or type(weight).__module__.startswith("torch.distributed.")


def lora(module: nn.Module) -> bool:
    """LoRA around a plain Linear: computes every token by itself, so it is called on packed ones."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return False
    base = getattr(module, "base_layer", None)
    return isinstance(base, nn.Linear) and plain(base, nn.Linear) and not any(map(hooks, module.modules()))


def check_linear(module: nn.Module) -> None:
    if hooks(module) or not (plain(module, nn.Linear) or lora(module)):
        raise CannotPack(f"a {type(module).__name__} in place of a Linear has hooks or a computation of its own")
    weight = module._parameters.get("weight")  # None: LoRA's, or computed by a parametrization when it is read
    if weight is not None and not ordinary(weight):
        raise CannotPack(f"the weight of a Linear is a {type(weight).__name__}")


def check_norm(module: nn.Module) -> None:
    if hooks(module) or not plain(module, nn.LayerNorm) or module.bias is None or module.weight.dim() != 1:
        raise CannotPack(f"a {type(module).__name__} in place of a LayerNorm has hooks or a computation of its own")


def check_activation(module: nn.Module) -> None:
    known = type(module) is nn.GELU or type(module).__name__ in GELU_FORMS
    if not known or hooks(module) or "forward" in vars(module):
        raise CannotPack(f"the activation is {type(module).__name__}, not GELU, or has hooks")


def check_dropout(module: nn.Module | None, bits: int) -> None:
    if module is None:
        return
    if type(module) is not nn.Dropout or hooks(module) or "forward" in vars(module):
        raise CannotPack(f"a {type(module).__name__} in place of a Dropout has hooks or a computation of its own")
    if module.p and not 0 < round(module.p * 2**bits) < 2**bits:
        raise CannotPack(f"dropout of {module.p} is not a multiple of 2**-{bits}, nor near one between 0 and 1")


def check_own(module: nn.Module, but_of: tuple[str, ...] = ()) -> None:
    """The module is transformers' own, unchanged."""
    if not type(module).forward.__module__.startswith("transformers.models."):
        raise CannotPack(f"a {type(module).__name__} computes something of its own")
    if hooks(module, but_of):
        raise CannotPack(f"a hook sits on a {type(module).__name__}, which would see packed tensors")
