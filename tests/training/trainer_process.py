"""Runs of AMPTrainer in separate processes, for the tests of it.

    python trainer_process.py DIR STEPS [--die step|save|terminated]
    torchrun --nproc-per-node 2 trainer_process.py DIR

The first command trains up to STEPS, from the newest checkpoint in DIR if there is one, and prints a digest of the last
checkpoint. With --die it kills itself (SIGKILL) in the fourth step's forward, or while it writes the fourth step's
checkpoint, or sends itself SIGTERM in that forward. The second command does two things with DDP and with FSDP2: it
trains without dropout into DIR/KIND/exact, which the test compares with one process; and it checks that a resumed run
ends where an uninterrupted one does, bit for bit: each process then prints "resumed". It also checks, with DDP, that
all processes end together if one of them is told to, or cannot write: each prints "ended"; and what FSDP2 can shard:
each prints "sharded".
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from distributed import leave
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from fastbert import BertConfig, BertForMaskedLM, BertForPreTraining
from fastbert.data import PackingCollator
from fastbert.training import AMPTrainer, Best, compute_mlm_loader_loss, distribute, linear_schedule, parameter_groups
from fastbert.training.losses import unwrapped

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONFIG = BertConfig(vocab_size=99, max_position_embeddings=32, **SIZES)
EXACT = BertConfig.from_dict({**CONFIG.to_dict(), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
ACCUMULATION = 4  # batches in a step, over all processes together


def examples(count: int = 24) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(5, 99, (n,), generator=generator).tolist()} for n in lengths]


def labelled_batches() -> list[dict]:
    """Twelve batches of two examples each, with 0 to 11 labelled tokens and one or two labelled pairs."""
    batches = []
    for i in range(12):
        pair = [{**example, "next_sentence_label": i % 2} for example in examples()[2 * i : 2 * i + 2]]
        batch = PackingCollator()(pair)
        labels = batch["input_ids"].clone()
        labels[i:] = -100
        batch["next_sentence_label"][: i % 2] = -100
        batches.append(batch | {"labels": labels})
    return batches


def masking_loader(rank: int = 0, processes: int = 1) -> DataLoader:
    """A loader shuffled and masked by torch's global generator: the hardest kind to resume."""
    collator = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0])
    return DataLoader(examples()[rank::processes], 2, shuffle=True, collate_fn=collator)


def shuffled(workers: int = 0) -> DataLoader:
    """Draws order and masks from torch's global generator; with workers, the masks from the workers' generators."""
    loader = masking_loader()
    return DataLoader(loader.dataset, 2, shuffle=True, collate_fn=loader.collate_fn, num_workers=workers)


def trainer_of(model: torch.nn.Module, directory: Path, steps: int, layer_decay: float = 0.8, **options) -> AMPTrainer:
    groups = parameter_groups(model, lr=1e-2, layer_decay=layer_decay)
    # With AdamW's usual eps, rounding errors of gradients near 0 would be divided by numbers as small as they are.
    optimizer = torch.optim.AdamW(groups, eps=1e-3, fused=True)
    schedule = linear_schedule(optimizer, 2, steps + 1)
    return AMPTrainer(model, optimizer, schedule, output_dir=directory, progress=False, **options)


def exact_run(directory: Path, kind: str = "ddp", rank: int = 0, processes: int = 1) -> AMPTrainer:
    """Trains two and a half epochs of labelled_batches, in float64, with the batches divided among the processes."""
    seed()
    model = distribute(BertForPreTraining(EXACT).double(), kind)
    trainer = trainer_of(model, directory, 8, gradient_accumulation_steps=ACCUMULATION // processes, max_grad_norm=0.1)
    trainer.train(labelled_batches()[rank::processes], max_steps=8)
    return trainer


def digest(checkpoint: Path) -> str:
    """A hash of all that a checkpoint holds: weights, moments, rates, scale, random states, position."""
    parts, found = [torch.load(checkpoint, weights_only=True)], hashlib.sha256()
    while parts:
        part = parts.pop()
        if isinstance(part, (dict, list, tuple)):
            parts.extend(part.values() if isinstance(part, dict) else part)
        else:
            found.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return found.hexdigest()


def seed() -> None:
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(0)


def alone(directory: Path, steps: int, die: str | None = None) -> str:
    seed()
    model = BertForMaskedLM(CONFIG)
    trainer = trainer_of(model, directory, 8, gradient_accumulation_steps=3, mixed_precision="fp16")
    trainer.resume()

    def kill(*_) -> None:
        if trainer.step == (4 if die == "save" else 3):
            os.kill(os.getpid(), signal.SIGTERM if die == "terminated" else signal.SIGKILL)
            hook.remove()  # a second SIGTERM would end the run at once

    if die in ("step", "terminated"):
        hook = model.register_forward_hook(kill)
    elif die == "save":
        os.fsync = kill  # by then the temporary file is written, but not yet renamed
    trainer.train(masking_loader(), max_steps=steps, save_steps=1)
    return digest(trainer.checkpoints()[-1])


def resumed(directory: Path, kind: str, rank: int, processes: int) -> None:
    def run(name: str, start: Path | None = None) -> AMPTrainer:
        seed()
        model = BertForMaskedLM(CONFIG)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        model = distribute(model, kind)
        if kind == "fsdp":
            average.module = distribute(average.module, kind)
        update = lambda trainer, event, values: event == "train" and average.update_parameters(unwrapped(model))  # noqa: E731
        options = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16", "states": {"average": average}}
        trainer = trainer_of(model, directory / name, 6, callbacks=[update], **options)
        if start is not None:
            trainer.load(start)
        held_out = labelled_batches()[:3]  # the same in every process
        trainer.train(
            masking_loader(rank, processes),
            max_steps=6,
            eval_loader=held_out,
            metric=compute_mlm_loader_loss,
            eval_steps=3,
            save_steps=4,
        )
        return trainer

    try:
        trainer_of(BertForMaskedLM(CONFIG), directory / "refused", 6)
    except ValueError as error:
        assert "2 processes, each with its own model" in str(error)
    else:
        raise AssertionError("models that come apart were accepted")
    one = run("uninterrupted")
    two = run("resumed", one.checkpoints()[0])
    assert [trainer.step for trainer in (one, two)] == [6, 6] and one.checkpoints()[0].stem.endswith("4")
    assert digest(one.checkpoints()[-1]) == digest(two.checkpoints()[-1])
    print("resumed")


class Terminated(Exception):
    pass


def ended(directory: Path, rank: int, processes: int) -> None:
    """One process gets a signal, one's callback stops, and evaluations differ; yet all processes do the same."""

    def terminated(*_) -> None:
        raise Terminated

    def run(name: str, steps: int = 9, **options) -> AMPTrainer:
        trainer = trainer_of(distribute(BertForMaskedLM(CONFIG)), directory / name, 9, **options)
        metric = {"eval_loader": [], "metric": lambda *_: trainer.step * (1 - 2 * rank), "eval_steps": 1}
        try:
            trainer.train(masking_loader(rank, processes), max_steps=steps, **metric)
        except Terminated:
            assert name == "signal"
        return trainer

    def signalled(trainer: AMPTrainer, event: str, values: dict) -> None:
        if rank == 1 and event == "train" and trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def stopped(trainer: AMPTrainer, event: str, values: dict) -> None:
        if rank == 1 and trainer.step == 2:
            trainer.stop()

    signal.signal(signal.SIGTERM, terminated)
    assert run("signal", callbacks=[signalled]).step == 3
    assert signal.getsignal(signal.SIGTERM) is terminated
    assert run("stop", callbacks=[stopped]).step == 2
    # The larger of 1 and -1, 2 and -2, ... counts, and grows: the first is the best, and patience waits for two more.
    best = run("best", best=Best(patience=2), seed=0).best
    assert (best.step, best.value, best.waited) == (1, 1.0, 2)
    assert torch.initial_seed() == rank

    def full_disk(*_) -> None:
        raise OSError("No space left on device")

    trainer = trainer_of(distribute(BertForMaskedLM(CONFIG)), directory / "full", 9)
    trainer._write = full_disk  # which only the first process calls
    try:
        trainer.train(masking_loader(rank, processes), max_steps=1)
    except OSError as error:
        print("ended", error)


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        once, twice = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.groups = torch.nn.ModuleList([torch.nn.ModuleList([once, twice]), torch.nn.ModuleList([twice])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            for layer in group:
                x = layer(x)
        return x


def sharded(directory: Path) -> None:
    """Lists of layers within lists, a layer that is listed twice, and a compiled model, which is also evaluated."""
    seed()
    nested, rows = Nested(), torch.randn(3, 4)
    expected = nested(rows)
    assert torch.equal(distribute(nested, "fsdp")(rows), expected)
    seed()  # `distribute` gave each process another one
    model = BertForMaskedLM(EXACT)
    expected = compute_mlm_loader_loss(model, labelled_batches()[1:], "cpu")
    compiled = distribute(torch.compile(model, backend="eager"), "fsdp")
    found = trainer_of(compiled, directory / "compiled", 9).evaluate(labelled_batches()[1:], compute_mlm_loader_loss)
    assert abs(found["loss"] - expected) < 1e-5, (found, expected)
    print("sharded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int, nargs="?")
    parser.add_argument("--die", choices=("step", "save", "terminated"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        print(alone(args.directory, args.steps, args.die))
        return
    for kind in ("ddp", "fsdp"):
        process = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        exact_run(args.directory / kind / "exact", kind, *process)
        resumed(args.directory / kind, kind, *process)
    ended(args.directory, *process)
    sharded(args.directory)
    leave()


def launch(*arguments: object, torchrun: bool = False) -> subprocess.CompletedProcess:
    """Runs this file with these arguments."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    return subprocess.run(
        [sys.executable, *command, __file__, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


if __name__ == "__main__":
    main()
