"""Floors and bounds by hand, ceilings that are measured, and the time of a device without its host."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from bench.measured import ROW_OPS, Clock, line, measure, read, shown, tiny
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import batch, bench_models, bench_ops, comparison, floor, harness, provenance, report, run
from benchmarks.cases import ALONE, BACKWARD, FORWARD
from benchmarks.contenders.interface import MODEL
from benchmarks.gpu import ceilings as gpu_ceilings
from fastbert import backends


def test_floor_formulas_by_hand():
    """Two sequences of 3 and 1 tokens, hidden size 2, 5 layers: 24·4·4 + 4·2·10 operations a layer."""
    ceilings = floor.Ceilings(1.0, 1.0, 1.0, 1.0, "")
    work = lambda **how: floor.of_model(5, 2, [3, 1], ceilings, **how)  # noqa: E731
    assert work().flops == 5 * (384 + 80) and work(step=True).flops == 5 * (3 * 384 + 3.5 * 80)
    assert work(vocab=7, labelled=2).flops == 5 * (384 + 80) + 2 * (8 + 28)
    assert work().bytes == 5 * (52 * 2 * 4 + 24 * 4) and work(step=True).bytes == 5 * (168 * 2 * 4 + 72 * 4)
    adamw = 7 * 4 * 10  # bytes, in the rest; a masked-LM head's products are not
    assert work(element=4, parameters=10).bytes - work(element=4).bytes == adamw
    assert work(element=4, parameters=10).rest - work(element=4).rest == adamw
    head, plain = work(step=True, vocab=7, labelled=2), work(step=True)
    assert head.rest == plain.rest and head.floor - plain.floor == head.flops - plain.flops == 3 * 2 * (8 + 28)


def test_the_floor_of_a_narrow_feed_forward():
    """Four tokens, hidden size 2 and 4 in the middle: 8 weights of h² in all, and fewer elements a token."""
    work = lambda **how: floor.of_model(1, 2, [4], floor.Ceilings(1.0, 1.0, 1.0, 1.0, ""), intermediate=4, **how)  # noqa: E731
    assert work().flops == 2 * 4 * (4 * 4 + 2 * 2 * 4) + 4 * 2 * 16
    assert work(element=1).bytes == (4 + 2 + 3 + 3 + 4 + 6) * 8 + 8 * 4
    assert work(element=1, step=True).bytes == (3 * 12 + 4 + 2 + 12 + 14) * 8 + 3 * 8 * 4


BASE, LARGE = (12, 768), (24, 1024)
# Attention's rates are FlashAttention 3's at S = 512, D = 64, as published (arXiv:2407.08608).
H100 = floor.Ceilings(800e12, 333e12, 272e12, 3.0e12, "H100 SXM")


@pytest.mark.parametrize(
    ("bert", "size", "seqlen", "step", "teraflops", "milliseconds"),
    [
        (BASE, 32, 128, False, 0.715, 1.12),
        (BASE, 32, 512, False, 3.09, 5.01),
        (LARGE, 32, 128, False, 2.53, 3.76),
        (BASE, 32, 128, True, 2.16, 3.26),
        (LARGE, 32, 512, True, 32.6, 50.9),
        (LARGE, 1, 128, False, 0.079, 0.256),
    ],
)
def test_floor_on_an_h100(bert, size, seqlen, step, teraflops, milliseconds):
    """The figures were computed by hand from the formulas, before this code was written. With three digits, they may be
    off by 0.6 % (with two, by 2.5 %)."""
    work = floor.of_model(*bert, [seqlen] * size, H100, step=step)
    assert work.flops / 1e12 == pytest.approx(teraflops, rel=0.025 if teraflops < 0.1 else 6e-3)
    assert work.floor * 1e3 == pytest.approx(milliseconds, rel=6e-3)


def test_a_run_measures_its_ceilings(monkeypatch):
    monkeypatch.setattr(floor, "product_rate", lambda device, dtype: 700e12)
    monkeypatch.setattr(floor, "bandwidth", lambda device: 2.9e12)
    found = floor.ceilings.__wrapped__("cuda", torch.bfloat16)
    assert (found.product, found.attention_forward, found.bandwidth) == (700e12, 700e12, 2.9e12)
    assert "measured" in found.origin


def test_ceilings_come_from_a_file_of_this_device(monkeypatch, tmp_path, capsys):
    """`benchmarks.run --ceilings` takes the file of `benchmarks.gpu.ceilings`, and refuses that of another device."""
    monkeypatch.setattr(floor, "_kept", {})
    file = tmp_path / "ceilings.json"
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(file)])
    assert gpu_ceilings.main() == 0
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"bandwidth": 7e9, "products": {"float32": 3e11}}))
    words = [*ROW_OPS, "--rounds", "2", "--out", str(tmp_path), "--ceilings", str(file)]
    assert run.main(words) == 0
    head, _ = read(tmp_path / "ops_tiny.jsonl")
    assert (head["ceilings"]["float32"]["product"], head["ceilings"]["float32"]["bandwidth"]) == (3e11, 7e9)
    for wrong, message in (
        (kept | {"device": "NVIDIA H200"}, f"has the ceilings of NVIDIA H200, and this is {provenance.machine()}"),
        (kept | {"device": kept["device"].replace("1 threads", "64 threads")}, "has the ceilings of"),
        ([], "is no file of benchmarks.gpu.ceilings"),
        ({}, "is no file of benchmarks.gpu.ceilings"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit):
            run.main(words)
        assert message in capsys.readouterr().err
    floor.ceilings.cache_clear()


def test_the_floor_of_a_backward_alone():
    """It has two of three matrix products and 2.5 of attention's 3.5, and moves what both directions move, less the
    forward's bytes."""
    ceilings = floor.Ceilings(1.0, 2.0, 5.0, 1.0, "")
    parts = [floor.of_op(1, 10, 100, 0, *way, ceilings) for way in ((True, False), (False, True), (True, True))]
    assert [part.flops for part in parts] == [110, 20 + 250, 30 + 350]
    assert [part.floor for part in parts] == [10 + 50, 20 + 50, 30 + 100]
    work = lambda direction: bench_ops.setup(tiny("bias_gelu", "full", direction), "cpu").work()  # noqa: E731
    assert work(ALONE).bytes == work(BACKWARD).bytes - work(FORWARD).bytes > work(FORWARD).bytes


T, C, V = sum(batch.draw("half", 3, 17)), 128, 1000  # tokens, channels and words of the tiny size


@pytest.mark.parametrize(
    ("op", "direction", "flops", "moved"),
    [
        ("linear", BACKWARD, 3 * 2 * T * C * 3 * C, 3 * (T * C + T * 3 * C + C * 3 * C)),
        ("linear", ALONE, 2 * 2 * T * C * 3 * C, 2 * (T * C + T * 3 * C + C * 3 * C)),
        ("attention", BACKWARD, 3.5 * 4 * C * sum(n * n for n in batch.draw("half", 3, 17)), 12 * T * C),
        ("linear_max", FORWARD, 2 * T * C * V, T * C + C * V + 3 * V),
        ("linear_max", BACKWARD, 2 * T * C * V + 2 * 2 * 3 * C * V, 3 * (T * C + C * V + 3 * V)),
        ("layer_norm", FORWARD, 0, 2 * T * C),
    ],
)
def test_operations_and_bytes_of_ops_by_hand(op, direction, flops, moved):
    """PyTorch counts those of the bound: of the products alone, and of linear_max's forward, because a maximum has a
    gradient in one row of a sequence."""
    setup = bench_ops.setup(tiny(op, "half", direction), "cpu")
    assert (setup.work().flops, setup.work().bytes) == (flops, 4 * moved)
    with FlopCounterMode(display=False) as counter:
        [call() for name, call in setup.bounds.items() if name == harness.PRODUCTS]
    assert counter.get_total_flops() == {"attention": 0, "linear_max": 2 * T * C * V}.get(op, flops)


def test_the_bound_of_a_model_is_every_product_of_every_layer():
    size = batch.SMALL["tiny"]
    size = dataclasses.replace(size, config=dataclasses.replace(size.config, num_hidden_layers=2))
    spec = dataclasses.replace(tiny(MODEL, "half", BACKWARD), size=size)
    with FlopCounterMode(display=False) as counter:
        bench_models.products(spec, batch.make_batch(spec.size, "half", "cpu"))[harness.PRODUCTS]()
    assert counter.get_total_flops() == 2 * 3 * 24 * T * C * C


def test_a_backward_alone_runs_no_forward():
    spec = tiny("layer_norm", "full", ALONE)
    call, _ = comparison.alone(spec, bench_ops.setup(spec, "cpu"), "fastbert")
    before = backends.calls()
    first, second = call(), call()
    ran = {primitive for (primitive, _), n in backends.calls().items() if n > before.get((primitive, _), 0)}
    assert ran == {"layer_norm_bwd"} and all(map(torch.equal, first, second))


class Device:
    """A fake GPU for `harness.busy_timer`: it sleeps and works in stream order, while the host goes on."""

    def __init__(self, monkeypatch):
        self.host = self.busy = 0.0  # seconds: the host's clock, and when the device will be done
        self.slept = []
        device = self

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                self.time = max(device.host, device.busy)

            def query(self):
                return self.time <= device.host

            def synchronize(self):
                device.host = max(device.host, self.time)

            def elapsed_time(self, end):
                return 1e3 * (end.time - self.time)

        monkeypatch.setattr(harness, "FLUSHED", 1)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (self.slept.append(cycles), self.work(cycles * 1e-9)))

    def work(self, seconds):
        self.busy = max(self.host, self.busy) + seconds

    def call(self, host, device, waits=False):
        """Launches work on the device, and may wait for it."""

        def run():
            self.host += host
            self.work(device)
            self.host = max(self.host, self.busy) if waits else self.host

        return run


def test_device_time_is_without_the_host(monkeypatch):
    """For a slow host the sleep is prolonged, once; a call that waits for the device has no device time (NaN)."""
    device = Device(monkeypatch)
    timer, slow = harness.busy_timer("cpu"), device.call(host=3e-3, device=2e-5)
    assert timer(slow, 1) == pytest.approx(2e-5) and len(device.slept) == 3  # 1, 2 and 4 ms
    assert timer(slow, 2) == pytest.approx(2e-5) and device.slept[3:] == [4 * harness.SHORTEST] * 2
    assert math.isnan(timer(device.call(host=1e-6, device=1e-3, waits=True), 1))
    clock = Clock()

    def call():
        slow()
        clock.now += 1.0

    found = measure(clock, {"base": 1.0, "slow": call}, device_timer=timer)
    facts = line(found, "slow")
    assert facts["device"] == pytest.approx(20) and len(facts["device_samples"]) == 5
    assert "device ms" in shown(found) and "0.02000" in shown(found)
    assert report.share({**facts, "floor": 5}, "floor") == pytest.approx(25)  # for an op, of its device time
    assert "device" not in line(measure(Clock(), {"base": 1.0}), "base")
