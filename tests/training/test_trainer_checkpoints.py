"""AMPTrainer's checkpoints: interrupted and killed runs end where others do, bit for bit; damaged ones are refused."""

import copy
import functools
import multiprocessing
import random
import re
import resource
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
import trainer_process as process
from test_trainer import Loss, collate, examples, rows, sgd
from test_trainer_electra import electra_batch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from fastbert import BertForMaskedLM
from fastbert.data import PackingCollator, TokenBudgetSampler, create_dataloader
from fastbert.training import AMPTrainer, compute_loader_loss, freeze, linear_schedule, parameter_groups

CONFIG = process.CONFIG


def by_python_and_numpy():
    """A loader that is not a DataLoader, and draws from Python's and NumPy's generators."""

    class Batches:
        def __iter__(self):
            for start in range(0, 24, 3):
                batch = PackingCollator()(process.examples()[start : start + 3])
                ids = batch["input_ids"]
                ids[0], ids[1] = random.randint(5, 98), int(np.random.randint(5, 99))
                yield batch | {"labels": ids.clone()}

    return Batches()


def with_a_generator():
    loader = process.masking_loader()
    generator = torch.Generator().manual_seed(5)
    return DataLoader(loader.dataset, 2, shuffle=True, collate_fn=loader.collate_fn, generator=generator)


class Wrapper(Sampler):
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


def with_a_generator_within():
    data, generator = process.examples(), torch.Generator().manual_seed(5)
    sampler = Wrapper(RandomSampler(data, generator=generator))
    return DataLoader(data, 2, sampler=sampler, collate_fn=process.masking_loader().collate_fn)


def seeded():
    """Batches by a budget of tokens; set_epoch determines the order and the masks of each epoch."""
    data = process.examples()
    sampler = TokenBudgetSampler([len(example["input_ids"]) for example in data], 40)
    collator = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0], seed=7)
    return DataLoader(data, batch_sampler=sampler, collate_fn=collator)


def resumable():
    """A loader that saves its position, so that no batch is read twice."""
    collator = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0], seed=7)
    return create_dataloader(process.examples(), collator, batch_size=2, seed=3)


def with_a_worker_that_stays():
    """The worker's seed is drawn when it starts: once in an uninterrupted run, and again when a run resumes."""
    return DataLoader(seeded().dataset, 2, True, collate_fn=seeded().collate_fn, num_workers=1, persistent_workers=True)


LOADERS = {
    "shuffled by torch": process.shuffled,
    "two workers": functools.partial(process.shuffled, 2),
    "a worker that stays": with_a_worker_that_stays,
    "python and numpy": by_python_and_numpy,
    "a generator of its own": with_a_generator,
    "a generator of a sampler's sampler": with_a_generator_within,
    "seeded": seeded,
    "resumable": resumable,
}


@pytest.mark.parametrize(
    "loader", [pytest.param(name, marks=[pytest.mark.slow] * ("worker" in name)) for name in LOADERS]
)
def test_an_interrupted_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path, loader):
    """Resumes from a checkpoint at the end of an epoch and from one within, with dropout, scaler, schedule, evaluation.

    The logs are the same as well: rows that were logged after the checkpoint are logged again.
    """

    def run(name, stop=None):
        process.seed()
        model = BertForMaskedLM(CONFIG)
        options = {"gradient_accumulation_steps": 3, "mixed_precision": "fp16", "save_total_limit": 9}
        trainer = process.trainer_of(model, tmp_path / name, 12, **options)

        def interrupt(*_):
            if trainer.step == stop:
                raise KeyboardInterrupt

        hook = model.register_forward_hook(interrupt)
        trainer.resume()
        try:
            trainer.train(LOADERS[loader](), max_steps=10, eval_loader=[held_out], eval_steps=3, save_steps=2)
        except KeyboardInterrupt:
            assert stop is not None
        hook.remove()  # else a cycle, and torch waits 5 s for each worker of a loader that the garbage collector frees
        return trainer

    held_out = electra_batch()[0]
    one = run("one")
    assert one.epoch >= 2
    for stop in (5, 7):
        assert run("two", stop).step == stop
    two = run("two")
    assert [process.digest(path) for path in one.checkpoints()] == [process.digest(path) for path in two.checkpoints()]
    for table in ("train.csv", "evaluation.csv"):
        assert rows(tmp_path / "one" / table) == rows(tmp_path / "two" / table) != []


def test_epochs_are_told_to_the_loader_or_to_its_parts_before_their_first_batch(tmp_path):
    """A loader with set_epoch is expected to tell its parts itself. Resuming within an epoch tells its number again."""
    told = []

    class Telling:
        def __init__(self, name, **parts):
            self.__dict__ |= {"name": name, **parts}

        def set_epoch(self, epoch):
            told.append(f"{self.name} {epoch}")

    class Batches:
        def __init__(self, **parts):
            self.__dict__ |= parts

        def __iter__(self):
            told.append("batches")
            return iter([collate(examples(), "of_tokens")] * 2)

    class Loader(Telling, Batches):
        pass

    parts = {"batch_sampler": Telling("sampler", sampler=Telling("inner")), "collate_fn": Telling("collator")}
    for loader, names in (
        (Batches(**parts), ["sampler", "collator", "inner"]),
        (Loader("loader", **parts), ["loader"]),
    ):
        told.clear()
        directory = tmp_path / names[0]
        sgd(BertForMaskedLM(CONFIG), directory).train(loader, max_steps=3)
        again = sgd(BertForMaskedLM(CONFIG), directory)
        again.resume()
        again.train(loader, max_steps=5)
        assert told == [x for epoch in (0, 1, 1, 2) for x in [*(f"{name} {epoch}" for name in names), "batches"]]


def test_training_may_go_on_in_the_same_process(tmp_path):
    def run(name, *ends):
        process.seed()
        trainer, loader = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path / name, 12), process.shuffled()
        for end in ends:
            trainer.train(loader, max_steps=end)
        return process.digest(trainer.checkpoints()[-1])

    assert run("one", 15) == run("two", 7, 12, 15)


def test_another_loader_is_used_from_its_first_batch(tmp_path):
    first, second = ([{"labels": torch.tensor([number + i])} for i in range(4)] for number in (1, 11))
    seen = []

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.zeros(1))

        def forward(self, labels):
            seen.append(int(labels))
            return Loss(self.x.sum())

    trainer = sgd(Noted(), tmp_path)
    trainer.train(first, max_steps=3)
    trainer.train(second, max_steps=5)
    trainer.train(second, max_steps=6)
    assert seen == [1, 2, 3, 11, 12, 13] and (trainer.epoch, trainer.position) == (1, 3)
    trainer.load(trainer.checkpoints()[-1])
    trainer.train(list(second), max_steps=7)
    assert seen[6:] == [14] and trainer.epoch == 1


def trained(directory, loader, start=None, hook=None, **options):
    """A trainer after 15 steps, where an epoch has at most 12. start: a checkpoint to start from."""
    process.seed()
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), directory, 16, save_total_limit=99)
    if start is not None:
        trainer.load(start)
    if hook is not None:
        trainer.model.register_forward_hook(functools.partial(hook, trainer))
    try:
        trainer.train(loader, max_steps=15, **options)
    except KeyboardInterrupt:
        trainer.save()
    return trainer


@pytest.mark.parametrize("kind", ["a generator of its own", pytest.param("resumable", marks=pytest.mark.slow)])
def test_the_loader_of_training_may_be_evaluated(tmp_path, kind):
    """Evaluation happens in the middle of an epoch, which then continues where it was."""

    def run(name, start=None):
        loader = LOADERS[kind]()
        return trained(tmp_path / name, loader, start, eval_loader=loader, eval_steps=2, save_steps=5)

    one = run("one")
    assert [trainer_state(path)["position"] for path in one.checkpoints()] == [5, 10, 3]
    for start in one.checkpoints()[:2]:
        two = run(start.stem, start)
        assert process.digest(one.checkpoints()[-1]) == process.digest(two.checkpoints()[-1])


def trainer_state(path):
    return torch.load(path, weights_only=True)


def test_workers_that_stay_serve_one_iteration_at_a_time(tmp_path):
    loader = with_a_worker_that_stays()
    with pytest.raises(ValueError, match="eval_loader is loader, whose persistent workers serve one iteration"):
        sgd(BertForMaskedLM(CONFIG), tmp_path).train(loader, max_steps=1, eval_loader=loader)


@pytest.mark.parametrize("loader", ["shuffled by torch", "a generator of its own", "resumable"])
@pytest.mark.parametrize("stop", [5, 12], ids=["within an epoch", "in the first step of one"])
def test_a_run_that_is_interrupted_by_hand_can_be_saved(tmp_path, loader, stop):
    """In the middle of a step, whose batch and dropout have been drawn, and are drawn again after resuming."""

    def interrupt(trainer, *_):
        if trainer.step == stop:
            raise KeyboardInterrupt

    one = trained(tmp_path / "one", LOADERS[loader]())
    two = trained(tmp_path / "two", LOADERS[loader](), hook=interrupt)
    (saved,) = two.checkpoints()
    assert trainer_state(saved)["step"] == stop
    three = trained(tmp_path / "three", LOADERS[loader](), saved)
    assert process.digest(one.checkpoints()[-1]) == process.digest(three.checkpoints()[-1])


@pytest.mark.parametrize("loader", [pytest.param("shuffled by torch", marks=pytest.mark.slow), "resumable"])
def test_a_metric_may_save_the_best_model(tmp_path, loader):
    """The checkpoint is saved within the metric, after that has drawn random numbers."""

    def metric(model, batches, device):
        loss = compute_loader_loss(model, batches, device)
        if trainers[-1].step in (6, 12):
            trainers[-1].save()
        return loss

    def run(name, start=None):
        process.seed()
        trainers.append(process.trainer_of(BertForMaskedLM(CONFIG), tmp_path / name, 16, save_total_limit=99))
        if start is not None:
            trainers[-1].load(start)
        held_out = process.masking_loader()
        trainers[-1].train(LOADERS[loader](), max_steps=15, eval_loader=held_out, metric=metric, eval_steps=3)
        return trainers[-1].checkpoints()

    trainers = []
    at_six, at_twelve, end = run("one")
    for start in (at_six, at_twelve):
        assert process.digest(run(start.stem, start)[-1]) == process.digest(end)


@pytest.mark.parametrize("part", ["a scheduler", 'mixed_precision="fp16"'])
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_with_other_parts_is_refused_before_anything_changes(tmp_path, part, there):
    def new(has):
        model = BertForMaskedLM(CONFIG)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = linear_schedule(optimizer, 0, 9) if part == "a scheduler" and has else None
        precision = "fp16" if part != "a scheduler" and has else None
        return AMPTrainer(model, optimizer, schedule, output_dir=tmp_path, mixed_precision=precision, progress=False)

    new(there).train([collate(examples(), "of_tokens")], max_steps=1)
    other = new(not there)
    before = copy.deepcopy(other.model.state_dict())
    was, has = ("with", "without") if there else ("without", "with")
    with pytest.raises(ValueError, match=f"00000001.pt was saved {was} {part}, and this trainer is {has}; expected"):
        other.resume()
    assert all(torch.equal(x, before[name]) for name, x in other.model.state_dict().items()) and other.step == 0


def test_a_checkpoint_with_other_parameter_groups_is_refused_before_anything_changes(tmp_path):
    def new(layers):
        model = BertForMaskedLM(CONFIG)
        freeze(model, layers, embeddings=False)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3))
        return AMPTrainer(model, optimizer, output_dir=tmp_path, progress=False)

    new(0).train([collate(examples(), "of_tokens")], max_steps=1)
    other = new(1)
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(ValueError, match="saved with groups of .* parameters in its optimizer, and this trainer has"):
        other.resume()
    assert all(torch.equal(x, before[name]) for name, x in other.model.state_dict().items()) and other.step == 0


def test_other_settings_than_the_checkpoint_s_are_told_of(tmp_path):
    def new(accumulation, precision, **settings):
        model = BertForMaskedLM(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        options = {"gradient_accumulation_steps": accumulation, "mixed_precision": precision, "progress": False}
        return AMPTrainer(model, optimizer, output_dir=tmp_path, **options)

    new(1, None).train([collate(examples(), "of_tokens")], max_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new(1, None, foreach=False).resume()
    with pytest.warns(UserWarning) as told:
        other = new(2, "bf16", weight_decay=0.5, betas=(0.5, 0.9))
        other.max_grad_norm = 2.0
        other.resume()
    said = "\n".join(str(each.message) for each in told)
    assert "weight_decay are the checkpoint's, [0.01], instead of [0.5]" in said and "betas are" in said
    assert "mixed_precision None, and this trainer has 'bf16'" in said
    assert "gradient_accumulation_steps 1, and this trainer has 2" in said
    assert "max_grad_norm 1.0, and this trainer has 2.0" in said


def test_one_run_at_a_time_has_a_directory(tmp_path):
    """Processes that the run forks, such as workers, do not keep others out when it has ended. Tables in the directory
    are those of a trainer."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    in_another_process = functools.partial(subprocess.run, [sys.executable, "-c", code, tmp_path / ".lock"])
    forked = []

    def another(trainer, event, values):
        if event != "train":
            return
        with pytest.raises(RuntimeError, match=f"another run trains in {tmp_path}"):
            sgd(BertForMaskedLM(CONFIG), tmp_path).train(batches, max_steps=1)
        assert b"BlockingIOError" in in_another_process(capture_output=True).stderr
        forked.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
        forked[-1].start()

    batches = [collate(examples(), "of_tokens")]
    sgd(BertForMaskedLM(CONFIG), tmp_path, callbacks=[another]).train(batches, max_steps=1)
    in_another_process(check=True)
    for each in forked:
        assert each.is_alive()
        each.kill()
    for damaged in (b"step,loss\nfoo,1\n", b"step\n1\n\xff\n"):
        (tmp_path / "train.csv").write_bytes(damaged)
        again = sgd(BertForMaskedLM(CONFIG), tmp_path)
        again.resume()
        with pytest.raises(ValueError, match="train.csv is no table of a trainer: .*expected a step at the start"):
            again.train(batches, max_steps=2)


@pytest.mark.slow
def test_a_killed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path):
    """The run gets SIGKILL in the middle of a step, and then while it writes a checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the launched processes
    uninterrupted = process.alone(tmp_path / "one", 6)
    torch.set_num_threads(threads)
    assert process.launch(tmp_path / "two", 6, "--die", "step").returncode == -signal.SIGKILL
    assert process.launch(tmp_path / "two", 6, "--die", "save").returncode == -signal.SIGKILL
    left = sorted(re.sub(r"[0-9a-f]{8}\.part", "<random>.part", path.name) for path in (tmp_path / "two").iterdir())
    checkpoints = ["checkpoint-00000002.pt", "checkpoint-00000003.pt", "checkpoint-00000004.pt.<random>.part"]
    assert left == [".lock", *checkpoints, "train.csv"]
    resumed = process.launch(tmp_path / "two", 6)
    assert resumed.stdout.strip() == uninterrupted, resumed.stderr
    left = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert left == [".lock", "checkpoint-00000005.pt", "checkpoint-00000006.pt", "train.csv"]


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path):
    """A limit on the file size makes the write fail halfway, as a full disk does."""
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 10)
    trainer.train(process.shuffled(), max_steps=2)
    (checkpoint,) = trainer.checkpoints()
    whole, limits = checkpoint.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="checkpoint-00000002.pt"):
            trainer.save()  # overwrites the old one
        assert checkpoint.read_bytes() == whole
        with pytest.raises(OSError, match="checkpoint-00000003.pt") as raised:
            trainer.train(process.shuffled(), max_steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno and not isinstance(raised.value, FileExistsError)
    assert trainer.checkpoints() == [checkpoint] and checkpoint.read_bytes() == whole
    assert not list(tmp_path.glob("*.part"))
    again = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 10)
    assert again.resume() and again.step == 2
    again.train(process.shuffled(), max_steps=4)


@pytest.mark.parametrize(("limit", "kept"), [(3, [8, 10, 11]), (None, [2, 4, 6, 8, 10, 11])])
def test_the_newest_checkpoints_are_kept(tmp_path, limit, kept):
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 20, save_total_limit=limit)
    (tmp_path / "checkpoint-best.pt").touch()  # not the trainer's
    assert not trainer.resume()
    trainer.train(process.shuffled(), max_steps=11, save_steps=2)
    assert [int(path.stem[-8:]) for path in trainer.checkpoints()] == kept
    other = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 20)
    assert other.resume() and other.step == 11 and other.optimizer.state
    with pytest.raises(FileExistsError, match="checkpoint-00000011.pt, and this run is at step 0; call resume"):
        process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 20).train(process.shuffled(), max_steps=1)


@pytest.mark.parametrize("damage", ["cut off", "a bit flipped", "something else", "other weights"])
def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path, damage):
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 10)
    trainer.train(process.shuffled(), max_steps=1)
    (path,) = trainer.checkpoints()
    data = bytearray(path.read_bytes())
    if damage == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "a bit flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "something else":
        torch.save({"model": {}}, path)
    changes = {"hidden_size": 16} if damage == "other weights" else {}
    other = process.trainer_of(BertForMaskedLM(CONFIG.changed(**changes)), tmp_path, 10)
    before = copy.deepcopy(other.model.state_dict())
    expected = rf"{path} is .*; there is no checkpoint before it"
    with pytest.raises(RuntimeError if changes else ValueError, match="wrong shape" if changes else expected):
        other.resume()
    assert all(torch.equal(x, before[name]) for name, x in other.model.state_dict().items()) and other.step == 0
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "checkpoint-00000099.pt")


def test_beside_a_damaged_checkpoint_the_one_before_it_is_named(tmp_path):
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 10)
    for steps in (1, 2):
        trainer.train(process.shuffled(), max_steps=steps)
    before, newest = trainer.checkpoints()
    newest.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{newest} is not a checkpoint, .*; {before} is the checkpoint before it"):
        trainer.resume()
    trainer.load(before)
    assert trainer.step == 1


def test_a_loader_that_has_shrunk_is_refused(tmp_path):
    trainer = process.trainer_of(BertForMaskedLM(CONFIG), tmp_path, 20)
    trainer.train(process.shuffled(), max_steps=10)
    trainer.resume()
    with pytest.raises(ValueError, match="the run is at batch 10 of its epoch; the loader has 4 batches"):
        trainer.train(list(process.shuffled())[:4], max_steps=11)
