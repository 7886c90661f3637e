"""The training examples, a short run of each: they train, they draw, and they notice curves that come apart."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from models import minilm

import fastbert

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Runs an example for so many steps: its status, and what it prints."""
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.use_deterministic_algorithms(False)  # as people run it: memory is not filled
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small mostly wait for the other thread

    def run(name, steps):
        arguments = ["--steps", str(steps), "--output", str(tmp_path)]
        arguments += ["--alone", "0"] if name == "pretrain_mlm" else []
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        status = importlib.import_module(name).main()
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return status, capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["pretrain_mlm", pytest.param("finetune_classifier", marks=pytest.mark.slow)])
def test_twenty_steps_coincide(example, name):
    if name == "finetune_classifier":
        minilm()
    status, output = example(name, 20)
    assert status == 0 and "the curves coincide" in output and "held-out" in output


def test_other_masks_are_noticed(example, monkeypatch):
    """The plain run draws another key: same statistics, other elements."""
    common = importlib.import_module("common")
    right = common.dropout_masks
    monkeypatch.setattr(common, "dropout_masks", lambda config, key, visible: right(config, key + 1, visible))
    status, output = example("pretrain_mlm", 2)
    assert status == 1 and "DO NOT COINCIDE" in output


def test_a_gradient_that_is_wrong_is_noticed(example, monkeypatch):
    """One percent off in half of each layer, and nothing wrong in any forward."""
    right = fastbert.ops.dense_gelu

    def wrong(*arguments):
        y = right(*arguments)
        return y.detach() + 0.99 * (y - y.detach())

    monkeypatch.setattr(fastbert.ops, "dense_gelu", wrong)
    status, output = example("pretrain_mlm", 5)
    assert status == 1 and "DO NOT COINCIDE" in output
