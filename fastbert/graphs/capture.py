"""Records a function as a CUDA graph, and tracks what the graph of a model depends on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastbert.graphs.buckets import NAME
from fastbert.parts import unchanged
from fastbert.prepared import PreparedLinear, held_tensors


class Recorder(Protocol):
    """Records a function that works on fixed memory, so that it can be replayed."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Runs the function. Returns a replay, which runs it again, and its outputs, which a replay overwrites."""

    def in_order(self) -> AbstractContextManager[None]:
        """A context for captures, replays and use of their memory; the device runs such contexts one after another."""


class CudaGraphs:
    """Records CUDA graphs on one GPU. They share a memory pool, so only one may run at a time."""

    WARM_UPS = 3  # runs before a capture; the first compiles and loads kernels and initialises libraries
    alone = threading.Lock()  # PyTorch allows one capture at a time in a process

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"{NAME}: the model is on {device}; CUDA graphs need a GPU")
        with torch.cuda.device(device):
            self.device, self.pool = device, torch.cuda.graph_pool_handle()
            self.stream, self.used = torch.cuda.Stream(), torch.cuda.Event()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        caller, captured = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with self.alone, torch.cuda.stream(self.stream):
            self.stream.wait_stream(caller)
            for _ in range(self.WARM_UPS):
                function()
            with _fresh_workspaces():
                # This mode restricts only this thread. Others should not use the GPU either: see _fresh_workspaces.
                with torch.cuda.graph(captured, self.pool, self.stream, capture_error_mode="thread_local"):
                    outputs = function()
        return captured.replay, outputs

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{NAME}: called while a graph is being captured; capture the model itself")
            stream = torch.cuda.current_stream()
            stream.wait_event(self.used)
            try:
                yield
            finally:
                self.used.record(stream)


@contextmanager
def _fresh_workspaces() -> Iterator[None]:
    """Makes matrix products in the block allocate new cuBLAS workspaces, from the capture's memory pool, which lives as
    long as its graphs.

    PyTorch keeps one workspace for each stream, and frees it when any graph captured on that stream is freed
    (pytorch/pytorch#193402). Clearing affects all streams: matrix products queued by another thread lose their
    workspace. Hence "capture before other threads use the GPU".
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _replays(module: nn.Module) -> bool:
    """Whether a module is fastbert's own or a plain PyTorch one, which does the same work in every forward."""
    leaves = (nn.Linear, nn.Conv1d, nn.Embedding, nn.LayerNorm, nn.Dropout)
    own = type(module).__module__.startswith("fastbert.") or isinstance(module, nn.ModuleList)
    return own or any(unchanged(module, kind) for kind in leaves)


class ModelSnapshot:
    """What a capture depends on: a model's modules and their modes, and its tensors, whose memory it keeps alive."""

    def __init__(self, model: nn.Module, gradients: bool = False) -> None:
        """gradients: whether a capture has a backward, which depends on what is frozen."""
        self.model, self.modules, self.training = model, list(model.modules()), model.training
        self.gradients = gradients
        self.tensors = [tensor for tensor in self._entries() if tensor is not None]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.memory = [tensor.detach() for tensor in self.tensors]  # replays read it even if the model no longer does
        self.made: dict[PreparedLinear, Any] = {}  # what prepared layers have made of their weights, once captured
        self.then = self._state()

    def _entries(self) -> list[Tensor | None]:
        return held_tensors(self.model)

    def _state(self) -> tuple[list[Any], list[Any]]:
        tensors = [
            None if t is None else (id(t), t.data_ptr(), t.dtype, self.gradients and t.requires_grad)
            for t in self._entries()
        ]
        return [(id(module), module.training) for module in self.model.modules()], tensors

    def refuse_a_change(self) -> None:
        """Raises RuntimeError if a module or tensor was replaced, moved or, if it matters, frozen. Values may change in
        place, except those of which prepared layers have made others."""
        if self._state() != self.then or any([module.kept is not made for module, made in self.made.items()]):
            raise RuntimeError(
                f"{NAME}: a module or tensor of the model was replaced, moved or frozen, or changed its mode; make a "
                "new graph"
            )

    def hold_what_was_made(self) -> None:
        """To be called after a capture, which reads what prepared layers keep (position keys, for one) or has made it
        anew. Raises RuntimeError as `refuse_a_change`."""
        self.refuse_a_change()
        self.made |= {m: m.kept for m in self.modules if isinstance(m, PreparedLinear) and m.kept is not None}

    def device(self) -> torch.device:
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) != 1:
            given = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(f"{NAME}: the model is on {given}; expected one GPU")
        return devices.pop()

    def refuse_python(self) -> None:
        """Raises RuntimeError if the model has hooks or foreign modules, whose Python code a replay would not run."""
        if torch.nn.modules.module._has_any_global_hook():
            raise RuntimeError(
                f"{NAME}: hooks are registered for all modules; a replay runs no Python, so they would not run"
            )
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.modules):
            raise RuntimeError(f"{NAME}: the model has forward hooks; a replay runs no Python, so they would not run")
        if others := sorted({type(module).__name__ for module in self.modules[1:] if not _replays(module)}):
            raise RuntimeError(
                f"{NAME}: the model has a {others[0]}, whose Python a replay does not run; expected fastbert's own "
                "modules: merge adapters first (merge_and_unload)"
            )
