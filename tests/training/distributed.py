"""torchrun --nproc-per-node 2 tests/training/distributed.py ddp|fsdp: gradients of two processes equal those of one.

Runs on GPUs with NCCL if there is one for each process, else on the CPU with gloo. Each process prints "equal".
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastbert import BertConfig, BertModel

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIG = BertConfig(vocab_size=99, max_position_embeddings=32, **SIZES, **NO_DROPOUT)
LENGTHS = [7, 1, 12, 5]  # two sequences for each process


def packed(lengths: list[int], ids: torch.Tensor, device: torch.device) -> dict[str, object]:
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return {"input_ids": ids.to(device), "cu_seqlens": ends, "max_seqlen": max(lengths)}


def loss_of(model: torch.nn.Module, inputs: dict[str, object], sequences: int) -> torch.Tensor:
    out = model(**inputs)
    return (out.last_hidden_state.sin().sum() + out.pooler_output.sin().sum()) / sequences


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main(kind: str) -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    dtype = torch.float32 if on_gpus else torch.float64
    model, alone = (BertModel(CONFIG).to(device, dtype) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    ids = torch.randint(1, 99, (sum(LENGTHS),))
    loss_of(alone, packed(LENGTHS, ids, device), len(LENGTHS)).backward()

    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    each = len(LENGTHS) // count
    mine, before = LENGTHS[rank * each :][:each], sum(LENGTHS[: rank * each])
    for _ in range(2):  # the second step runs on what the first left behind
        model.zero_grad()
        loss_of(model, packed(mine, ids[before : before + sum(mine)], device), each).backward()

    inner = model.module if kind == "ddp" else model
    for (name, ours), expected in zip(inner.named_parameters(), alone.parameters(), strict=True):
        error, size = (whole(ours.grad) - expected.grad).abs().max(), expected.grad.abs().max()
        assert error <= (1e-4 if on_gpus else 1e-12) * (size + 1), f"{name}: {error} of {size}"
    print("equal")
    leave()


def leave() -> None:
    """Ends this process without running destructors, once all processes are done.

    PyTorch's gloo group joins its thread while it holds the GIL, and that thread may need the GIL to release an object:
    now and then a process would never end.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
