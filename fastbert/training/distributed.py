"""One model in several processes."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def distribute(model: nn.Module, kind: str = "ddp", **options: Any) -> nn.Module:
    """Moves the model to this process's GPU, if each process has one, and distributes it over `torchrun`'s processes.

    kind: "ddp" for DistributedDataParallel, "fsdp" to shard layers by FSDP2; without `torchrun` neither is used. All
    processes get the first process's weights, and different random seeds. options: DistributedDataParallel's or
    fully_shard's, such as find_unused_parameters=True for a model that does not use all of its parameters in each step.
    Raises ValueError for another kind.
    """
    if kind not in ("ddp", "fsdp"):
        raise ValueError(f"distribute: kind is {kind!r}; expected 'ddp' or 'fsdp'")
    local, neighbours = (int(os.environ.get(name, only)) for name, only in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    on_gpus = torch.cuda.device_count() >= neighbours
    if on_gpus:
        torch.cuda.set_device(local)
        model.cuda()
    if "LOCAL_RANK" not in os.environ:
        return model
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpus else "gloo")
    torch.manual_seed(torch.initial_seed() + dist.get_rank())
    if kind == "ddp":
        return DistributedDataParallel(model, **options)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    listed = (x for part in model.modules() if isinstance(part, nn.ModuleList) for x in part)
    layers = dict.fromkeys(x for x in listed if not isinstance(x, nn.ModuleList))  # each once
    for layer in reversed(layers):  # layers within layers first
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(state: Any) -> Any:
    """Gathers sharded tensors (FSDP2) in the first process, on the host; the others get None. All must call it."""
    if isinstance(state, Mapping):
        return {name: whole(value) for name, value in state.items()}
    if not isinstance(state, DTensor):
        return state
    gathered = state.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else None


def sharded(value: Any, like: Any) -> Any:
    """This process's shard of a tensor if `like` is sharded, also within mappings; anything else unchanged."""
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return {name: sharded(x, like.get(name)) for name, x in value.items()}
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
