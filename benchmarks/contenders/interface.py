"""What a contender is given, and what it gives back."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.sizes import Batch
from fastbert import BertConfig, checkpoint, testing

MODEL, ENCODER, CLASSIFIER, MASKED_LM = "model", "encoder", "classifier", "masked LM"
MODULES = (MODEL, ENCODER, CLASSIFIER, MASKED_LM)
PER_TOKEN = (MODEL, ENCODER)  # their output is one row a token
OUTPUT = {MODEL: "last_hidden_state", ENCODER: "last_hidden_state", CLASSIFIER: "logits", MASKED_LM: "loss"}
OPS = (
    "attention",
    "qkv_attention",
    "add_layer_norm",
    "dense_gelu",
    "linear",
    "bias_gelu",
    "layer_norm",
    "embedding",
    "cross_entropy",
    "pack",
    "unpack",
)
EPS = 1e-12


@dataclass(frozen=True)
class Subject:
    """What is to be computed.

    part: one of MODULES or OPS. inputs: packed, (T, ...), by the names of transformers' or the op's arguments (the
    input of `pack` is padded). theirs: transformers' module, with the weights that everybody computes with; ours:
    fastbert's with the same. Both None for an op.
    """

    part: str
    config: BertConfig
    inputs: dict[str, Tensor]
    theirs: nn.Module | None = None
    ours: nn.Module | None = None

    def output(self, outputs: object) -> Tensor:
        """The one that counts, of what a module of this part returns, transformers' or ours."""
        return getattr(outputs, OUTPUT[self.part])


@dataclass(frozen=True)
class Way:
    """How a contender computes it: collect(run(**prepare(**inputs))), of which `run` is what is timed.

    prepare: packed inputs into what run takes; collect: what it gives, packed again. module: has the parameters whose
    gradients are wanted. hidden: hidden states of the real tokens from prepared inputs; they are verified beside
    outputs that are few numbers.
    """

    run: Callable[..., Tensor]
    prepare: Callable[..., dict[str, object]] = dict
    collect: Callable[[Tensor], Tensor] = lambda result: result
    module: nn.Module | None = None
    hidden: Callable[..., Tensor] | None = None


Make = Callable[[Subject, Batch, torch.dtype, str, bool], "Way | str | None"]


@dataclass(frozen=True)
class Contender:
    """Somebody who can compute some parts.

    make(subject, batch, dtype, device, backward): its best honest set-up for one case as a Way, or in words why it
    cannot; None where it would only repeat another contender. needs: names to import. install: the command that brings
    them. devices, dtypes: all that it runs. inference: has no backward. yardstick: is PyTorch's own, so that its error
    is part of the accuracy rule. slow_to_make: takes minutes, and joins when it is asked for.
    """

    name: str
    parts: tuple[str, ...]
    make: Make
    needs: tuple[str, ...] = ()
    install: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    inference: bool = False
    yardstick: bool = False
    slow_to_make: bool = False

    def why_not(self, dtype: torch.dtype, device: str, backward: bool) -> str | None:
        """What keeps it from any such case, whatever is computed; None if nothing does."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if any(importlib.util.find_spec(name) is None for name in self.needs):
            return f"not installed: {self.install}"
        if dtype not in self.dtypes:
            return f"{' and '.join(str(d).removeprefix('torch.') for d in self.dtypes)} only"
        return "no backward" if backward and self.inference else None


def result(way: Way, inputs: dict[str, Tensor], backward: bool) -> testing.Result:
    """What a way gives for packed inputs: its output, and the gradients of inputs and parameters for a fixed random
    gradient of the output, under transformers' names."""
    leaves = {name: harness.leaf(value) for name, value in inputs.items()} if backward else inputs
    with torch.set_grad_enabled(backward):
        arguments = way.prepare(**leaves)
        output = way.collect(way.run(**arguments))
    outputs = {"output": output.detach()}
    if way.hidden:
        with torch.no_grad():
            outputs["hidden states"] = way.hidden(**arguments)
    if not backward:
        return testing.Result(outputs, {})
    wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
    wanted |= dict(way.module.named_parameters()) if way.module else {}
    gradients = dict(zip(wanted, torch.autograd.grad(output, list(wanted.values()), cotangent(output)), strict=True))
    return testing.Result(outputs, checkpoint.to_hugging_face(gradients))


def cotangent(output: Tensor) -> Tensor:
    """Normal numbers that every dtype holds exactly, the same ones each time."""
    numbers = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return numbers.bfloat16().half().to(output.device, output.dtype)


def timed(way: Way, inputs: dict[str, Tensor], backward: bool) -> harness.Call:
    with torch.no_grad():
        arguments = way.prepare(**inputs)
    if not backward:
        return harness.forward(way.run, arguments)
    return harness.forward_backward(way.run, arguments, way.module.parameters() if way.module else ())
