"""Training without AMPTrainer (see test_trainer.py): mixed precision, frozen layers, export, several processes."""

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_models import DEVICE, batch, hugging_face, ours
from torch.utils.flop_counter import FlopCounterMode

import fastbert.flops
from fastbert import BertModel, backends, testing
from fastbert.testing import Result

HERE = Path(__file__).resolve().parent
LENGTHS, SEQLEN = [7, 1, 12], 12
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return fastbert.checkpoint.to_hugging_face(found) if isinstance(model, BertModel) else found


def loss_of(model, inputs):
    out = model(**inputs)
    mask = inputs["attention_mask"][..., None]
    return (out.last_hidden_state.sin() * mask).sum() / mask.sum() + out.pooler_output.sin().mean()


# ---- mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_gradients_are_as_accurate_as_pytorch(dtype):
    theirs = hugging_face(attention="sdpa", **NO_DROPOUT)
    # Several batches: by chance, the largest error of one can be three times PyTorch's.
    batches = [batch(LENGTHS, SEQLEN) for _ in range(4)]
    truth, mine = copy.deepcopy(theirs).double(), ours(theirs)
    results = []
    for model, enabled in ((truth, False), (mine, True), (theirs, True)):
        found = []
        for inputs in batches:
            model.zero_grad()
            with torch.autocast(DEVICE, dtype, enabled=enabled):
                loss = loss_of(model, inputs)
            (loss * 2**10).backward()  # as a GradScaler does: unscaled, fp16's smallest gradients would be 0
            assert all(p.grad.dtype == p.dtype for p in model.parameters())
            found.append(gradients(model))
        results.append(Result({}, {name: torch.stack([each[name] for each in found]) / 2**10 for name in found[0]}))
    testing.assert_rows(testing.compare(results[1], results[0], results[2:]))


# ---- gradients


def test_nothing_is_computed_for_frozen_layers(monkeypatch):
    """If the lower layers are frozen, the backward stops above them; a layer with frozen weights computes no gradients
    for them. `tests/ops/test_encoder_layer.py` tests this for a layer that runs in one call."""
    monkeypatch.setattr(backends, "find", lambda *args, **kwargs: None)
    model, inputs = ours(hugging_face()).train(), batch(LENGTHS, SEQLEN)

    def backward(**changes):
        before = backends.calls()
        loss = model(**inputs, **changes).last_hidden_state.sin().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        ran = Counter()
        for (name, by), n in backends.calls().items():
            ran[name] += n - before.get((name, by), 0)
        return ran, counter.get_total_flops()

    _, everything = backward()
    model.requires_grad_(False)
    model.encoder.layer[2].requires_grad_(True)
    ran, top = backward()
    assert ran["attention_bwd"] == 1 and ran["add_layer_norm_bwd"] == 2 and ran["embedding_bwd"] == 0
    assert top < everything / 2.5

    model.requires_grad_(False)
    model.encoder.layer[0].output.LayerNorm.requires_grad_(True)  # gradients pass the layers above, without dw
    ran, passed = backward()
    assert ran["attention_bwd"] == 2
    of_dense = 2 * sum(LENGTHS) * 48 * (3 * 48 + 48 + 2 * 96)  # dx of qkv, of the output, and of the MLP's two layers
    of_attention = 5 * 2 * sum(length**2 for length in LENGTHS) * 48
    assert passed == 2 * (of_dense + of_attention)


# ---- export and processes


def test_exports_with_dynamic_shapes():
    model = ours(hugging_face())
    size = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("S", min=2, max=32)}
    inputs, others = batch(LENGTHS, SEQLEN), batch([3, 9], 9)
    program = torch.export.export(model, (), inputs, dynamic_shapes={name: size for name in inputs}).module()
    for some in (inputs, others):
        assert (program(**some).last_hidden_state - model(**some).last_hidden_state).abs().max() <= 1e-5


def test_exports_packed_with_dynamic_shapes():
    model = ours(hugging_face())
    shapes = {
        "input_ids": {0: torch.export.Dim("T", min=2, max=4096)},
        "cu_seqlens": {0: torch.export.Dim("ends", min=3, max=64)},
        "max_seqlen": torch.export.Dim.AUTO,
    }

    def packed(*ends):
        ids = torch.randint(1, 99, (ends[-1],), device=DEVICE)
        longest = max(b - a for a, b in zip(ends, ends[1:], strict=False))
        ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        return {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": longest}

    inputs, others = packed(0, 7, 8, 20), packed(0, 17, 30)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for some in (inputs, others):
        assert (program(**some).last_hidden_state - model(**some).last_hidden_state).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_the_gradients_of_one(kind):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    answer = subprocess.run(
        [*command, str(HERE / "distributed.py"), kind],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0 and answer.stdout.count("equal") == 2, answer.stderr[-3000:]
