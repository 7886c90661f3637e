"""AMPTrainer's options: schedules, a seed, the best checkpoint, early stopping, callbacks, loggers, signals."""

import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
import trainer_process as process
import transformers
from test_trainer import rows, sgd
from torch import nn
from torch.utils.data import DataLoader

from fastbert import BertForMaskedLM
from fastbert.data import create_mlm_dataloader, train_tokenizer
from fastbert.training import (
    AMPTrainer,
    Best,
    constant_schedule,
    cosine_schedule,
    linear_schedule,
    polynomial_schedule,
    set_seed,
    signals,
)

# ---- schedules


def rates(schedule, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return found


def optimizer():
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (2.0, 0.5)], lr=2.0)


SCHEDULES = {
    "linear": (linear_schedule, {}),
    "cosine": (cosine_schedule, {}),
    "polynomial": (polynomial_schedule, {}),
    "polynomial of power 2": (polynomial_schedule, {"power": 2.0}),
    "constant_with_warmup": (lambda optimizer, warmup, _: constant_schedule(optimizer, warmup), {}),
}


@pytest.mark.parametrize("warmup, steps", [(0, 7), (3, 10), (9, 10)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_transformers(name, warmup, steps):
    """Each group's rate is the same, up to rounding, until the last step; after it our rates stay constant."""
    make, options = SCHEDULES[name]
    kind = name.partition(" ")[0]
    more = {"lr_end": 0.0, **options} if kind == "polynomial" else {}
    theirs = transformers.get_scheduler(kind, optimizer(), warmup, steps, scheduler_specific_kwargs=more)
    found = rates(make(optimizer(), warmup, steps, **options), steps + 4)
    assert found[: steps + 1] == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in rates(theirs, steps + 1)]
    assert found[steps + 1 :] == [found[steps]] * 3


def test_a_polynomial_ends_at_its_share_of_each_rate():
    """transformers divides lr_end by the optimizer's default rate, which here is the first group's."""
    theirs = transformers.get_polynomial_decay_schedule_with_warmup(optimizer(), 2, 9, lr_end=0.2, power=1.5)
    found = rates(polynomial_schedule(optimizer(), 2, 9, power=1.5, end=0.1), 10)
    assert found == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in rates(theirs, 10)]
    assert found[-1] == pytest.approx([0.2, 0.05])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda o: linear_schedule(o, -1, 5), "linear_schedule: warmup_steps is -1; expected 0 to max_steps - 1, 4"),
        (lambda o: cosine_schedule(o, 5, 5), "cosine_schedule: warmup_steps is 5; expected 0 to max_steps - 1, 4"),
        (lambda o: polynomial_schedule(o, -1, 5), "polynomial_schedule: warmup_steps is -1; expected 0 to"),
        (lambda o: polynomial_schedule(o, 0, 5, power=0.0), "power is 0.0; expected a positive number"),
        (lambda o: polynomial_schedule(o, 0, 5, end=2.0), "end is 2.0; expected 0 to 1, a share of the rate"),
        (lambda o: constant_schedule(o, -1), "constant_schedule: warmup_steps is -1; expected at least 0"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(optimizer())


# ---- a seed


def trainer_of(tmp_path, name="run", **options):
    """A trainer of a small masked LM with dropout, with the same initial weights each time."""
    process.seed()
    return process.trainer_of(BertForMaskedLM(process.CONFIG), tmp_path / name, 12, **options)


def digest(trainer):
    return process.digest(trainer.checkpoints()[-1])


def test_a_seed_decides_what_training_draws(tmp_path):
    """A seed determines dropout, order and masks, whatever was drawn before."""

    def run(name, draws, seed):
        trainer = trainer_of(tmp_path, name)
        torch.rand(draws), np.random.rand(draws), random.random()
        trainer = process.trainer_of(trainer.model, tmp_path / name, 12, seed=seed)
        trainer.train(process.shuffled(), max_steps=2)
        return digest(trainer)

    assert run("a", 1, 7) == run("b", 5, 7) != run("c", 1, 8)


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, True])
def test_a_seed_that_is_none_is_refused(tmp_path, seed):
    with pytest.raises(ValueError, match=f"seed is {seed!r}; expected an integer from 0 to"):
        set_seed(seed)
    if seed is not True:  # the trainer adds its rank, which makes True a number
        with pytest.raises(ValueError, match="expected an integer from 0 to"):
            trainer_of(tmp_path, seed=seed)


# ---- the best checkpoint, and stopping early


def scripted(values):
    """A metric that gives these values in turn, the first one after the first step."""
    return lambda model, loader, device: {"f1": values[trainers[-1].step - 1], "loss": 1.0}


trainers = []


def train(trainer, values, steps, **options):
    trainers.append(trainer)
    every = {"eval_steps": 1, "save_steps": 1, "eval_loader": []}
    return trainer.train(process.shuffled(), max_steps=steps, metric=scripted(values), **every, **options)


def kept(trainer):
    return [int(path.stem[-8:]) for path in trainer.checkpoints()]


def test_the_best_checkpoint_is_kept_beside_the_last_ones(tmp_path):
    values = [0.1, 0.5, 0.2, float("nan"), 0.5, 0.3, 0.6, 0.1, 0.2, 0.3]

    def new():
        return trainer_of(tmp_path, best=Best("f1", larger_is_better=True), save_total_limit=2)

    trainer = new()
    assert trainer.best_checkpoint() is None
    train(trainer, values, 5)
    assert kept(trainer) == [2, 4, 5] and trainer.best_checkpoint().stem.endswith("2")
    again = new()
    assert again.resume() and (again.best.value, again.best.step, again.best.waited) == (0.5, 2, 3)
    train(again, values, 6)
    assert kept(again) == [2, 5, 6]
    train(again, values, 10)
    assert kept(again) == [7, 9, 10]

    best = torch.load(again.best_checkpoint(), weights_only=True)
    again.load(again.best_checkpoint())
    assert again.step == 7
    assert all(torch.equal(x, best["model"][name]) for name, x in again.model.state_dict().items())


def test_the_best_checkpoint_is_written_when_none_is_due(tmp_path):
    trainer = trainer_of(tmp_path, best=Best(min_improvement=0.5))
    trainers.append(trainer)
    metric = lambda *_: [3.0, 2.6, 2.4, 9.0, 1.95, 9.0][trainer.step - 1]  # noqa: E731
    trainer.train(process.shuffled(), max_steps=6, eval_loader=[], metric=metric, eval_steps=1)
    assert kept(trainer) == [3, 6] and trainer.best.step == 3  # 2.4 is better than 3 by more than 0.5, 1.95 is not


def test_a_run_stops_when_no_evaluation_is_better(tmp_path):
    """It stops as well if it was interrupted while it waited, and does not go on later unless it gets more patience."""
    values = [0.1, 0.5, 0.2, 0.5, 0.55, 0.9, 0.9, 0.9, 0.9]

    def new(name, patience=3):
        best = Best("f1", larger_is_better=True, patience=patience, min_improvement=0.1)
        return trainer_of(tmp_path, name, best=best)

    one = new("one")
    assert train(one, values, 9)["f1"] == 0.55 and one.step == 5 and kept(one) == [2, 4, 5]
    train(new("two"), values, 4)
    two = new("two")
    two.resume()
    train(two, values, 9)
    assert two.step == 5 and digest(one) == digest(two)
    assert train(two, values, 9)["f1"] == 0.55 and two.step == 5
    patient = new("two", patience=4)
    patient.resume()
    train(patient, values, 7)
    assert patient.step == 7 and patient.best.step == 6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"patience": 0}, "patience is 0; expected at least 1, or None"),
        ({"min_improvement": -0.1}, "min_improvement is -0.1; expected a number that is not negative"),
        ({"min_improvement": float("nan")}, "min_improvement is nan"),
    ],
)
def test_a_best_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=f"Best: {message}"):
        Best(**options)


@pytest.mark.parametrize("metric, larger", [("loss", False), ("mlm_loss", False), ("rmse", False), ("f1", True)])
def test_the_name_of_a_metric_tells_which_is_better(metric, larger):
    best = Best(metric)
    assert [best.record(value, step) for step, value in enumerate((0.5, 0.9, 0.1), 1)] == [True, larger, not larger]
    assert best.value == (0.9 if larger else 0.1)


def test_options_of_train_that_cannot_be_followed_are_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    for options in ({"eval_steps": 1}, {"metric": lambda *_: 0.0}):
        with pytest.raises(ValueError, match="are for evaluations; expected an eval_loader"):
            trainer.train(process.shuffled(), 1, **options)
    with pytest.raises(ValueError, match="max_steps is 2.5; expected a whole number"):
        trainer.train(process.shuffled(), 2.5)
    with pytest.raises(TypeError, match="metric returned None; expected a number"):
        trainer.evaluate(process.shuffled(), lambda *_: None)
    assert trainer.evaluate(process.shuffled(), lambda *_: {"f1": np.array(0.5)}) == {"f1": 0.5}
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="the optimizer has no parameter of the model"):
        AMPTrainer(trainer.model, other, output_dir=tmp_path)


def test_another_kind_of_optimizer_or_loader_is_refused(tmp_path):
    trainer_of(tmp_path).train(process.shuffled(), 1)
    trainer = trainer_of(tmp_path)
    trainer.optimizer = torch.optim.Adagrad(trainer.model.parameters())
    with pytest.raises(ValueError, match=r"was saved with \w+ as its optimizer, and this trainer has Adagrad"):
        trainer.resume()
    loader = create_mlm_dataloader(["one two three"] * 8, train_tokenizer(["one two three"], vocab_size=99), 2)
    trainer_of(tmp_path / "loader").train(loader, 1)
    again = trainer_of(tmp_path / "loader")
    again.resume()
    with pytest.raises(ValueError, match="this one has 0; expected a loader of the same kind"):
        again.train(list(loader), 2)


def test_a_best_without_its_metric_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, best=Best("accuracy"))
    with pytest.raises(ValueError, match="best needs evaluations to choose from; expected eval_loader and eval_steps"):
        trainer.train(process.shuffled(), max_steps=1)
    with pytest.raises(ValueError, match="metric is 'accuracy', and the evaluation has f1, loss"):
        train(trainer, [1.0], 1)
    with pytest.raises(TypeError, match="best is 'loss'; expected a Best, or None"):
        trainer_of(tmp_path, best="loss")


def test_a_checkpoint_of_another_metric_is_refused_and_one_of_none_is_not(tmp_path):
    trainer_of(tmp_path).train(process.shuffled(), max_steps=1)
    trainer = trainer_of(tmp_path, best=Best("f1"))
    assert trainer.resume()
    train(trainer, [0.0, 0.5], 2)
    other = trainer_of(tmp_path, best=Best("loss"))
    with pytest.raises(ValueError, match="metric is 'loss'; expected 'f1', as the checkpoint has"):
        other.resume()
    assert other.step == 0
    assert trainer_of(tmp_path).resume()


# ---- resuming with another vocabulary


def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path):
    """That happens if a script trains its tokenizer anew, on other texts."""

    def run(texts):
        tokenizer = train_tokenizer(texts, vocab_size=99)
        loader = create_mlm_dataloader(["one two three"] * 8, tokenizer, 2)
        trainer = trainer_of(tmp_path)
        trainer.resume()
        trainer.train(loader, max_steps=trainer.step + 1)
        return trainer.step

    assert [run(["one two three"]), run(["one two three"])] == [1, 2]
    with pytest.raises(ValueError, match="vocabulary .* expected the tokenizer of that run, saved rather than trained"):
        run(["three two one zero"])


# ---- callbacks and loggers


def test_callbacks_are_told_in_order_and_may_stop(tmp_path):
    told = []

    def callback(trainer, event, values):
        told.append((event, trainer.step, *sorted(values)))
        if event == "train" and trainer.step == 3:
            trainer.stop()

    trainer = trainer_of(tmp_path, callbacks=[callback])
    loader = list(process.masking_loader())[:2]
    result = trainer.train(process.shuffled(), max_steps=9, eval_loader=loader, eval_steps=2, save_steps=2)
    numbers = ("epoch", "gradient_norm", "learning_rate", "loss", "seconds", "skipped_steps")
    assert told == [
        ("begin", 0),
        ("train", 1, *numbers),
        ("train", 2, *numbers),
        ("evaluation", 2, "loss"),
        ("save", 2),
        ("train", 3, *numbers),
        ("save", 3),
        ("end", 3, "loss"),
    ]
    assert result["loss"] == float(rows(tmp_path / "run" / "evaluation.csv")[0]["loss"])
    trainer.train(process.shuffled(), max_steps=4)  # a stop ends only that call
    assert trainer.step == 4 and told[-1] == ("end", 4)


def test_callbacks_do_not_change_what_training_draws(tmp_path):
    def run(name, *callbacks):
        trainer = trainer_of(tmp_path, name, callbacks=callbacks)
        trainer.train(process.shuffled(), max_steps=4, save_steps=1)
        return digest(trainer)

    def draw(trainer, event, values):
        torch.rand(3), np.random.rand(3), random.random()

    assert run("without") == run("with", draw)


def test_loggers_are_given_dicts_and_steps(tmp_path):
    logged = []
    trainer = trainer_of(tmp_path, loggers=[lambda values, step: logged.append((step, values))])
    trainer.train(process.shuffled(), max_steps=2, eval_loader=list(process.masking_loader())[:2], eval_steps=2)
    assert [(step, {name.partition("/")[0] for name in values}) for step, values in logged] == [
        (1, {"train"}),
        (2, {"train"}),
        (2, {"evaluation"}),
    ]
    table = rows(tmp_path / "run" / "train.csv")
    assert [values["train/loss"] for _, values in logged[:2]] == [float(row["loss"]) for row in table]
    assert list(table[0]) == ["step", "epoch", "loss", "learning_rate", "gradient_norm", "skipped_steps"]


@pytest.mark.parametrize("name", ["callbacks", "loggers"])
def test_what_cannot_be_called_is_refused(tmp_path, name):
    with pytest.raises(TypeError, match=f"AMPTrainer: {name} has 3; expected what can be called"):
        sgd(BertForMaskedLM(process.CONFIG), tmp_path, **{name: [3]})


# ---- signals


def signalling(number, at, times=1):
    """A forward hook that sends this process a signal in the middle of a step."""

    def hook(*_):
        if trainers[-1].step == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return hook


class Terminated(Exception):
    pass


@pytest.fixture
def handlers():
    """SIGINT and SIGTERM raise during the test; afterwards, the handlers are restored."""

    def terminated(*_):
        raise Terminated

    ours = signal.default_int_handler, terminated  # where tests run in the background, SIGINT may be ignored
    before = signal.signal(signal.SIGINT, ours[0]), signal.signal(signal.SIGTERM, ours[1])
    yield ours
    signal.signal(signal.SIGINT, before[0]), signal.signal(signal.SIGTERM, before[1])


def handled():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_the_run_after_the_step_which_is_saved(tmp_path, handlers, number, error):
    """An evaluation that is due then is left to the run that goes on."""
    metric = lambda model, *_: float(next(model.parameters()).detach().sum())  # noqa: E731
    evaluation = {"eval_loader": [], "metric": metric, "eval_steps": 2}
    one = trainer_of(tmp_path, "one", best=Best())
    one.train(process.shuffled(), max_steps=5, **evaluation)
    for end in (2, 5):
        trainers.append(trainer_of(tmp_path, "two", best=Best()))
        trainers[-1].resume()
        if end == 2:
            trainers[-1].model.register_forward_hook(signalling(number, at=1))
            with pytest.raises(error):
                trainers[-1].train(process.shuffled(), max_steps=5, **evaluation)
            assert not (tmp_path / "two" / "evaluation.csv").exists()
        else:
            trainers[-1].train(process.shuffled(), max_steps=5, **evaluation)
        assert trainers[-1].step == end and kept(trainers[-1])[-1] == end and handled() == handlers
    assert digest(one) == digest(trainers[-1])
    assert len({(tmp_path / name / "evaluation.csv").read_text() for name in ("one", "two")}) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_at_once_is_one(tmp_path, handlers, number):
    """A scheduler signals torchrun and its processes, and torchrun passes it on to them."""
    trainers.append(trainer_of(tmp_path))
    trainers[-1].model.register_forward_hook(signalling(number, at=1, times=2))
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        trainers[-1].train(process.shuffled(), max_steps=5)
    assert trainers[-1].step == 2 and kept(trainers[-1]) == [2] and handled() == handlers


def test_a_second_signal_ends_the_run_at_once(tmp_path, handlers, capfd, monkeypatch):
    monkeypatch.setattr(signals, "ONE_REQUEST", -1)
    trainers.append(trainer_of(tmp_path))
    trainers[-1].model.register_forward_hook(signalling(signal.SIGINT, at=1, times=2))
    with pytest.raises(KeyboardInterrupt):
        trainers[-1].train(process.shuffled(), max_steps=5, save_steps=1)
    assert trainers[-1].step == 1 and kept(trainers[-1]) == [1] and handled() == handlers
    assert "SIGINT: training ends after this step; again to end it at once" in capfd.readouterr().err


def test_signals_are_as_they_were_after_a_run_an_error_and_in_threads(tmp_path, handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup: it stays ignored
    trainers.append(trainer_of(tmp_path))
    trainers[-1].model.register_forward_hook(signalling(signal.SIGINT, at=0))
    trainers[-1].train(process.shuffled(), max_steps=2)
    assert handled() == (signal.SIG_IGN, handlers[1]) and trainers[-1].step == 2
    with pytest.raises(ValueError, match="the loader has no batch"):
        trainer_of(tmp_path, "empty").train([], max_steps=2)
    assert handled() == (signal.SIG_IGN, handlers[1])
    thread = threading.Thread(target=trainers[-1].train, args=(process.shuffled(), 3))
    thread.start()
    thread.join()
    assert trainers[-1].step == 3


def test_workers_outlive_the_signal_of_the_terminal(tmp_path, handlers):
    """A terminal's signal reaches the workers too, but the step that is being finished may still need them."""
    loader = process.shuffled(workers=1)
    loader = DataLoader(loader.dataset, 2, shuffle=True, collate_fn=loader.collate_fn, num_workers=1, prefetch_factor=1)
    trainers.append(trainer_of(tmp_path, gradient_accumulation_steps=6))

    def interrupt(trainer, event, values):
        if event == "train":
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGINT)

    trainers[-1].callbacks.append(interrupt)
    trainers[-1].train(loader, max_steps=2)
    assert trainers[-1].step == 2


class Stuck(torch.utils.data.Dataset):
    """A data set whose fifth example never arrives."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        time.sleep(60 if i == 4 else 0)
        return process.examples()[i]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, about the dead worker
@pytest.mark.parametrize("event", ["train", "save"], ids=["in a step", "while it waits for data"])
def test_a_signal_that_workers_die_of_is_saved_too(tmp_path, handlers, event):
    """A cluster's scheduler sends the signal to all processes of a job, workers included."""

    def terminate(trainer, now, values):
        if now == event and trainer.step == 2:
            everyone = os.getpid(), *(child.pid for child in multiprocessing.active_children())
            # Sent by another process, because workers take SIGTERM from their parent for a normal end.
            subprocess.run(f"kill -TERM {' '.join(map(str, everyone))}", shell=True, check=True)
            time.sleep(0.2)  # until they are dead

    collator = process.masking_loader().collate_fn
    loader = DataLoader(Stuck(), 2, collate_fn=collator, num_workers=1, prefetch_factor=1, timeout=2)
    trainer = trainer_of(tmp_path, callbacks=[terminate])
    with pytest.raises(Terminated):
        trainer.train(loader, max_steps=4, save_steps=2)
    assert trainer.step == 2 and kept(trainer) == [2] and handled() == handlers
    again = trainer_of(tmp_path)
    again.resume()
    again.train([collator(process.examples()[:2])] * 3, max_steps=3)
    assert callable(signal.getsignal(signal.SIGCHLD))  # torch's own handler is back


@pytest.mark.slow  # only here does SIGTERM end the process, unlike above
def test_a_terminated_process_has_saved(tmp_path):
    ended = process.launch(tmp_path, 6, "--die", "terminated")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir())[-2:] == ["checkpoint-00000004.pt", "train.csv"]
