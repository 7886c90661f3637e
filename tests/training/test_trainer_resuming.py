"""AMPTrainer's checkpoints where the next run is not the same: other data, directories, rates; more states; stops."""

import itertools

import pytest
import torch
import trainer_process as process
from test_trainer_options import digest, trainer_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

from fastbert import BertForMaskedLM
from fastbert.data import PackingCollator, create_dataloader
from fastbert.training import AMPTrainer, Best, InBatchNegatives, Splade, SpladeWarmup, distribute, linear_schedule

SPLADE = Splade(InBatchNegatives(), 1.0)
MASKS = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0], seed=1)


def resumable(batch_size):
    return create_dataloader(process.examples(), MASKS, batch_size)


@pytest.mark.parametrize("first", [lambda: resumable(4), process.shuffled])
@pytest.mark.parametrize("stop", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
def test_two_phases_go_on_wherever_they_were_interrupted(tmp_path, first, stop):
    def run(name, *ends):
        trainer = trainer_of(tmp_path, name)
        trainer.resume()
        for loader, end in zip((first(), resumable(3)), ends, strict=False):
            trainer.train(loader, end)
        return trainer

    one = run("one", 3, 8)
    run("two", *((min(3, stop), stop) if stop > 3 else (stop,)))
    two = run("two", 3, 8)
    assert digest(one) == digest(two) and two.epoch == 1 and two.position == 5


def test_each_phase_makes_the_evaluations_that_it_owes(tmp_path):
    def run(name, stop=None):
        def interrupt(trainer, event, values):
            if event == "train" and trainer.step == stop:  # saved by hand before the evaluation that is due
                trainer.save()
                raise KeyboardInterrupt

        trainer = trainer_of(tmp_path, name, callbacks=[interrupt], best=Best())
        trainer.resume()
        for value, end in ((1.0, 2), (2.0, 4)):
            trainer.train(resumable(4), end, eval_loader=[], metric=lambda *_, value=value: value, eval_steps=2)
        return trainer

    one = run("one")
    for stop in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            run("two", stop)
    two = run("two")
    assert digest(one) == digest(two)
    assert len({(tmp_path / name / "evaluation.csv").read_text() for name in ("one", "two")}) == 1


def test_a_new_epoch_may_have_other_data(tmp_path):
    one = trainer_of(tmp_path)
    one.train(resumable(4), 2)
    two = trainer_of(tmp_path)
    two.load(one.checkpoints()[-1])
    with pytest.raises(ValueError, match="the state is of another loader: batch_size 4"):
        two.train(resumable(3), 4)
    two.load(one.checkpoints()[-1], new_epoch=True)
    two.train(resumable(3), 4)
    assert (two.epoch, two.position) == (1, 2)


def test_the_best_checkpoint_may_be_in_another_directory(tmp_path):
    def evaluations(*values):
        given = iter(values)
        return {"eval_loader": [], "metric": lambda *_: next(given), "eval_steps": 1}

    one = trainer_of(tmp_path, "one", best=Best())
    one.train(process.shuffled(), 3, **evaluations(3.0, 1.0, 2.0))
    two = trainer_of(tmp_path, "two", best=Best())
    two.load(one.best_checkpoint())
    two.train(process.shuffled(), 4, **evaluations(2.0, 2.0))
    again = trainer_of(tmp_path, "two", best=Best())
    again.resume()
    assert two.best_checkpoint() == one.best_checkpoint() == again.best_checkpoint()
    third = trainer_of(tmp_path, "three", best=Best())
    third.load(one.best_checkpoint())
    third.train(process.shuffled(), 3, **evaluations(0.5))
    assert third.best_checkpoint() == third.checkpoints()[-1]


class Lazily(IterableDataset):
    """Draws while it is iterated, as a buffer does that shuffles a stream."""

    def __iter__(self):
        buffer = process.examples()
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_that_draws_while_it_is_iterated_is_replayed(tmp_path, workers):
    seen = []

    def collate(examples):
        seen.extend(tuple(example["input_ids"]) for example in examples)
        return MASKS(examples)

    def run(name, *ends):
        for end in ends:
            trainer = trainer_of(tmp_path, name)
            trainer.resume()
            trainer.train(DataLoader(Lazily(), 2, collate_fn=collate, num_workers=workers), end)
        return digest(trainer)

    assert run("one", 12) == run("two", 5, 12)
    texts = {tuple(example["input_ids"]) for example in process.examples()}
    assert workers or (set(seen[:24]) == texts and seen[:24] == [*seen[24:34], *seen[-14:]])  # 5 batches, then the rest


def test_more_states_are_saved_and_required(tmp_path):
    """A moving average of the weights, as torch computes it."""

    def new(**more):
        trainer = trainer_of(tmp_path)
        average = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        update = lambda t, event, values: event == "train" and average.update_parameters(t.model)  # noqa: E731
        trainer = process.trainer_of(trainer.model, tmp_path / "run", 12, callbacks=[update], states={"ema": average})
        return trainer, average

    whole, expected = new()
    whole.train(process.shuffled(), 4, save_steps=2)
    again, found = new()
    again.load(whole.checkpoints()[0])
    again.output_dir = tmp_path / "other"
    again.output_dir.mkdir()
    again.train(process.shuffled(), 4)
    assert found.n_averaged == 4
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    with pytest.raises(ValueError, match=r"was saved with states\['ema'\], and this trainer is without"):
        trainer_of(tmp_path).load(whole.checkpoints()[0])
    with pytest.raises(TypeError, match=r"states\['ema'\] is 3; expected state_dict and load_state_dict"):
        trainer_of(tmp_path, states={"ema": 3})


@pytest.mark.parametrize("within", [lambda schedule: schedule, lambda schedule: SpladeWarmup(SPLADE, 2, schedule)])
def test_a_schedule_may_be_extended(tmp_path, within):
    """The step after the old end has the new schedule's rate. Other rates than the checkpoint's are told of."""

    def new(lr, steps):
        process.seed()
        model = BertForMaskedLM(process.CONFIG)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = within(linear_schedule(optimizer, 0, steps))
        return AMPTrainer(model, optimizer, schedule, output_dir=tmp_path, progress=False)

    new(1e-2, 4).train(process.shuffled(), 4)
    trainer = new(1e-2, 8)
    trainer.resume()
    used = []
    trainer.loggers.append(lambda values, step: used.append(values["train/learning_rate"]))
    trainer.train(process.shuffled(), 6)
    assert used == pytest.approx([0.5e-2, 0.375e-2])
    with pytest.warns(UserWarning, match=r"learning rates are the checkpoint's, \[0.01\], instead of \[0.5\]"):
        new(0.5, 8).resume()


@pytest.mark.parametrize("event, end", [("begin", 0), ("train", 1), ("evaluation", 2), ("save", 2)])
def test_training_stops_wherever_a_callback_says_so(tmp_path, event, end):
    stop = lambda trainer, told, values: told == event and trainer.stop()  # noqa: E731
    trainer = trainer_of(tmp_path, callbacks=[stop])
    trainer.train(process.shuffled(), 6, eval_loader=[], metric=lambda *_: 1.0, eval_steps=2, save_steps=2)
    assert trainer.step == end and [int(path.stem[-8:]) for path in trainer.checkpoints()] == [end][: end > 0]


def test_gradients_that_overflow_at_any_scale_end_the_run(tmp_path):
    trainer = trainer_of(tmp_path, mixed_precision="fp16")
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match="overflow whatever the scale of the loss"):
        trainer.train(process.shuffled(), 300)
    assert 30 < trainer.skipped_steps < 60


def test_a_scheduler_that_waits_for_a_metric_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    with pytest.raises(TypeError, match="scheduler is a ReduceLROnPlateau"):
        AMPTrainer(trainer.model, trainer.optimizer, scheduler, output_dir=tmp_path)


def test_an_evaluation_of_a_share_is_refused(tmp_path):
    trainer, share = trainer_of(tmp_path), create_dataloader(process.examples(), MASKS, 4, rank=0, world_size=2)
    for evaluate in (trainer.evaluate, lambda loader: trainer.train(process.shuffled(), 1, eval_loader=loader)):
        with pytest.raises(ValueError, match="divided among 2 processes, each of which would evaluate its share alone"):
            evaluate(share)
    with pytest.raises(ValueError, match="a number named 'step'"):
        trainer.evaluate(process.shuffled(), lambda *_: {"step": 1.0})


def test_processes_at_different_steps_are_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer, "_largest", lambda *numbers: [7, 0])
    with pytest.raises(ValueError, match="processes are at steps 0 to 7; expected one output_dir"):
        trainer.train(process.shuffled(), 1)


def test_options_of_ddp_are_passed_on(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    try:
        model = distribute(BertForMaskedLM(process.CONFIG), find_unused_parameters=True)
        assert model.find_unused_parameters
    finally:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def masks_of(loader):
    return [batch["input_ids"].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_without_a_seed_follow_torch_s(workers):
    """Whatever the number of workers; with a seed for each process, as AMPTrainer sets it, no two mask alike."""
    collator = PackingCollator(mlm_probability=0.3, mask_token_id=4, vocab_size=99, special_ids=[0])
    made = [create_dataloader(process.examples(), collator, 12, num_workers=workers) for _ in range(3)]
    found = []
    for loader, seed in zip(made, (1, 1, 2), strict=True):
        torch.manual_seed(seed)
        found.append(masks_of(loader))
    assert found[0] == found[1] != found[2]


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"input_ids": torch.randint(99, (5,)).tolist()}


def test_workers_of_different_ranks_draw_different_numbers():
    loaders = [
        create_dataloader(Drawing(), PackingCollator(), 3, rank=rank, world_size=2, num_workers=1) for rank in (0, 1)
    ]
    one, two, again = masks_of(loaders[0]), masks_of(loaders[1]), masks_of(loaders[0])
    assert all(a != b for a, b in itertools.combinations((one, two, again), 2))


def test_loaders_that_share_a_collator_have_epochs_of_their_own():
    one, two = resumable(6), resumable(6)
    before = masks_of(two)
    one.set_epoch(3)
    assert masks_of(two) == before != masks_of(one)
    assert masks_of(one) == masks_of(one)
    with pytest.warns(UserWarning, match="epoch 3 again, with the same order and masks; call set_epoch"):
        next(iter(one))


def test_seeds_are_not_each_other_s_epochs():
    def order(seed, epoch):
        loader = create_dataloader(process.examples(), MASKS, 6, seed=seed)
        loader.set_epoch(epoch)
        return list(loader.batch_sampler)

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
