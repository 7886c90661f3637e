"""What a contender is given, and what it gives back."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.batch import Batch
from fastbert import BertConfig, checkpoint, testing

MODEL, ENCODER, CLASSIFIER, MASKED_LM = "model", "encoder", "classifier", "masked LM"
MODULES = (MODEL, ENCODER, CLASSIFIER, MASKED_LM)
PER_TOKEN = (MODEL, ENCODER)  # their output has one row per token
OUTPUT = {MODEL: "last_hidden_state", ENCODER: "last_hidden_state", CLASSIFIER: "logits", MASKED_LM: "loss"}
OPS = (
    *("attention", "qkv_attention", "add_layer_norm", "dense_gelu", "linear", "bias_gelu", "layer_norm", "embedding"),
    *("cross_entropy", "linear_max", "pack", "unpack"),
)
HALF = (torch.bfloat16, torch.float16)
EPS = 1e-12
_FILL = {"labels": -100}
_PACKED_ONLY = ("labelled_rows",)


@dataclass(frozen=True)
class Subject:
    """What is to be computed: one part, on one batch.

    part: one of MODULES or OPS. inputs: packed, (T, ...), by the names of transformers' or the op's arguments (the
    input of `pack` is padded). theirs: transformers' module, with the weights that all contenders use; ours:
    fastbert's module with the same weights. Both None for an op.
    """

    part: str
    config: BertConfig
    batch: Batch
    dtype: torch.dtype
    backward: bool
    inputs: dict[str, Tensor]
    theirs: nn.Module | None = None
    ours: nn.Module | None = None

    def output(self, outputs: object) -> Tensor:
        """The tensor that is verified, from the outputs of a module of this part, transformers' or ours."""
        return getattr(outputs, OUTPUT[self.part])

    def mask(self) -> Tensor | None:
        """The attention mask, (B, S) int64; None if nothing is masked, which lets each implementation run fastest."""
        return None if self.batch.is_full else self.batch.mask.long()

    def padded(self, mask: Tensor | None, name: str = "attention_mask") -> Callable[..., dict[str, Tensor]]:
        """The `prepare` of a Runnable that takes padded inputs, and the mask, unless it is None, as argument `name`."""

        def prepare(**packed: Tensor) -> dict[str, Tensor]:
            wanted = {key: x for key, x in packed.items() if key not in _PACKED_ONLY}
            grid = {key: self.batch.pad(x, _FILL.get(key, 0)) for key, x in wanted.items()}
            return grid if mask is None else grid | {name: mask}

        return prepare

    @property
    def packed(self) -> Callable[[Tensor], Tensor]:
        """The `collect` of a Runnable that returns padded outputs."""
        return self.batch.take if self.part in PER_TOKEN else lambda result: result


@dataclass(frozen=True)
class Runnable:
    """How a contender computes a subject: collect(run(**prepare(**inputs))), of which only `run` is timed.

    prepare: turns packed inputs into the arguments of `run`; collect: packs its result again. module: has the
    parameters whose gradients are wanted. hidden: computes the hidden states of the real tokens from prepared inputs;
    they are verified as well, for outputs of only few numbers.
    """

    run: Callable[..., Tensor]
    prepare: Callable[..., dict[str, object]] = dict
    collect: Callable[[Tensor], Tensor] = lambda result: result
    module: nn.Module | None = None
    hidden: Callable[..., Tensor] | None = None

    def result(self, inputs: dict[str, Tensor], backward: bool) -> testing.Result:
        """Returns the output for packed inputs, and the gradients of inputs and parameters for a fixed random gradient
        of the output, under transformers' names."""
        leaves = {name: _leaf(value) for name, value in inputs.items()} if backward else inputs
        with torch.set_grad_enabled(backward):
            arguments = self.prepare(**leaves)
            output = self.collect(self.run(**arguments))
        outputs = {"output": output.detach()}
        if self.hidden:
            with torch.no_grad():
                outputs["hidden states"] = self.hidden(**arguments)
        if not backward:
            return testing.Result(outputs, {})
        wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
        wanted |= dict(self.module.named_parameters()) if self.module else {}
        found = torch.autograd.grad(output, list(wanted.values()), _cotangent(output))
        gradients = dict(zip(wanted, found, strict=True))
        theirs = getattr(self.module, "to_hugging_face", checkpoint.to_hugging_face)
        return testing.Result(outputs, theirs(gradients))

    def timed(self, inputs: dict[str, Tensor], backward: bool) -> harness.Call:
        """The call to time: `run` without autograd or, with a backward, `run` and the gradients of its floating-point
        arguments and of the parameters."""
        leaves, wanted = self._leaves(inputs, backward)
        cotangent = None

        def forward() -> Tensor:
            with torch.no_grad():
                return self.run(**leaves)

        def forward_backward() -> tuple[Tensor, ...]:
            nonlocal cotangent
            result = self.run(**leaves)
            cotangent = torch.randn_like(result) if cotangent is None else cotangent
            return torch.autograd.grad(result, wanted, cotangent)

        return forward_backward if backward else forward

    def timed_backward(self, inputs: dict[str, Tensor], backward: bool = True) -> harness.Call:
        """The call to time: the backward alone, always of the same forward's result."""
        leaves, wanted = self._leaves(inputs, backward)
        result = self.run(**leaves)
        cotangent = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, wanted, cotangent, retain_graph=True)

    def _leaves(self, inputs: dict[str, Tensor], backward: bool) -> tuple[dict[str, object], list[Tensor]]:
        """The arguments of `run`, and the tensors whose gradients are wanted."""
        with torch.no_grad():
            arguments = self.prepare(**inputs)
        leaves = {name: _leaf(value) for name, value in arguments.items()} if backward else arguments
        wanted = [value for value in leaves.values() if isinstance(value, Tensor) and value.requires_grad]
        return leaves, [*wanted, *(self.module.parameters() if self.module else ())]


def _leaf(value: object) -> object:
    """A leaf tensor for gradients that shares value's memory; returns other than floating-point tensors unchanged."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _cotangent(output: Tensor) -> Tensor:
    """A gradient of the output: normal numbers that every dtype holds exactly, the same ones each time."""
    numbers = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return numbers.bfloat16().half().to(output.device, output.dtype)


Make = Callable[[Subject], "Runnable | str | None"]


@dataclass(frozen=True)
class Contender:
    """An implementation under test.

    make: returns its best honest set-up for one case as a Runnable, or the reason why it cannot run, or None if it
    would only repeat another contender. needs: modules to import. install: the command that installs them, if it is not
    `pip install` and those names. devices, dtypes: all that it supports. inference: has no backward. yardstick: is
    PyTorch's own, so that its error is part of the accuracy rule. slow_to_make: takes minutes to set up, and runs only
    on request. quantized: has int8 or fp8 products, and is judged by the cosine.
    """

    name: str
    parts: tuple[str, ...]
    make: Make
    needs: tuple[str, ...] = ()
    install: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    inference: bool = False
    yardstick: bool = False
    slow_to_make: bool = False
    quantized: bool = False

    def why_not(self, dtype: torch.dtype, device: str, backward: bool) -> str | None:
        """Why it cannot run on the device, in the dtype or backward, whatever the part; None if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if any(importlib.util.find_spec(name) is None for name in self.needs):
            return f"not installed: {self.install or 'pip install ' + ' '.join(self.needs)}"
        if dtype not in self.dtypes:
            return f"{' and '.join(str(d).removeprefix('torch.') for d in self.dtypes)} only"
        return "no backward" if backward and self.inference else None
