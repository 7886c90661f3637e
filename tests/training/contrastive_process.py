"""python contrastive_process.py DIR RANK PROCESSES, once for each rank: compares a step of all with a step of one.

In float64, with different numbers of tuples and of chunks in the processes, which find each other through a file in
DIR. Prints "equal" for each case, and "refused" for each of the two errors that are expected.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import CONFIG as LARGER
from distributed import leave, packed, whole

from fastbert import BertModel
from fastbert.token_vectors import Expansion, TokenVectors
from fastbert.training import (
    AMPTrainer,
    ContrastiveModel,
    CoSENT,
    CosineMSE,
    InBatchNegatives,
    MarginMSE,
    Matryoshka,
    MaxSimNegatives,
    MultiVectorModel,
    distribute,
)

CONFIG = LARGER.changed(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
SHARES = {2: [4, 2], 3: [1, 3, 2]}  # tuples of each process in the first of two batches; reversed in the second
CASES = {  # loss, texts in a tuple, scores of a tuple, kind, max_tokens
    "negatives": (InBatchNegatives(), 3, 0, "ddp", 20),
    "symmetric": (InBatchNegatives(symmetric=True), 2, 0, "ddp", None),
    "order": (CoSENT(), 2, 1, "ddp", 15),
    "dims": (Matryoshka(InBatchNegatives(), (24, 8), (1.0, 0.5)), 2, 0, "fsdp", None),
    "alone": (Matryoshka(CosineMSE(), (16,)), 2, 1, "ddp", None),
    "margins": (MarginMSE(), 4, 3, "ddp", 30),
    "late interaction": (MaxSimNegatives(), 3, 0, "ddp", 20),
    "late interaction, sharded": (MaxSimNegatives(2.0), 2, 0, "fsdp", None),
}


def model_of(loss, encoder: BertModel, **options) -> torch.nn.Module:
    if not isinstance(loss, MaxSimNegatives):
        return ContrastiveModel(encoder, loss, **options)
    vectors = TokenVectors(encoder, expansion=Expansion(14, 3, False, False), skip_ids=range(40, 60))
    return MultiVectorModel(vectors, loss, **options)


def tuples(seed: int, count: int, columns: int, scores: int) -> tuple[list[list[torch.Tensor]], torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count, columns), generator=generator).tolist()
    texts = [[torch.randint(1, 99, (n,), generator=generator) for n in row] for row in lengths]
    return texts, torch.rand(count, scores, generator=generator).squeeze(-1) if scores else None


def batch_of(texts: list[list[torch.Tensor]], scores: torch.Tensor | None) -> dict[str, object]:
    columns = [text for column in zip(*texts, strict=True) for text in column]
    batch = packed([len(text) for text in columns], torch.cat(columns), torch.device("cpu"))
    return batch | {"columns": len(texts[0])} | ({} if scores is None else {"labels": scores})


def check(directory: Path, name: str, rank: int, processes: int) -> None:
    loss, columns, scores, kind, max_tokens = CASES[name]
    torch.manual_seed(0)
    encoder = BertModel(CONFIG, add_pooling_layer=False).double()
    model = model_of(loss, copy.deepcopy(encoder), max_tokens=max_tokens)
    alone = model_of(loss, encoder, all_processes=False).train()
    shares = SHARES[processes]
    batches = []
    for step, split in enumerate((shares, shares[::-1])):
        texts, of_texts = tuples(step, sum(shares), columns, scores)
        (alone(**batch_of(texts, of_texts)).loss / 2).backward()
        own = slice(sum(split[:rank]), sum(split[: rank + 1]))
        batches.append(batch_of(texts[own], None if of_texts is None else of_texts[own]))
    model = distribute(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"max_grad_norm": None, "progress": False, "gradient_accumulation_steps": 2}
    AMPTrainer(model, optimizer, output_dir=directory / name, **options).train(batches, max_steps=1)
    largest = max(float(p.grad.abs().max()) for p in alone.parameters())
    inner = model.module if kind == "ddp" else model
    for (parameter, old), new in zip(alone.named_parameters(), inner.parameters(), strict=True):
        error = (old - old.grad - whole(new.detach())).abs().max()
        assert error <= 1e-12 * max(largest, 1), f"{name}: {parameter} differs by {error} of {largest}"
    print("equal", name)


def refused(rank: int, processes: int) -> None:
    """All processes raise if the first one's tuples have another size, and for max_tokens with FSDP2."""
    model = ContrastiveModel(BertModel(CONFIG, add_pooling_layer=False).double(), InBatchNegatives())
    try:
        model(**batch_of(*tuples(0, 6, 3 if rank else 2, 0)))
    except ValueError as error:
        assert "the processes' batches have (2, 3" in str(error)
        print("refused")
    model = ContrastiveModel(BertModel(CONFIG, add_pooling_layer=False).double(), InBatchNegatives(), max_tokens=20)
    try:
        distribute(model, "fsdp")(**batch_of(*tuples(0, 6, 2, 0)))
    except ValueError as error:
        assert "max_tokens goes with DDP" in str(error)
        print("refused")


def main(directory: Path, rank: int, processes: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    for name in CASES:
        check(directory, name, rank, processes)
    refused(rank, processes)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
