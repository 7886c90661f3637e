"""A SentenceEncoder on several processes gives the same vectors, and no failure ends in a hang."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_models import sentence_encoder

import fastbert
from fastbert import backends
from fastbert.inference import Dense
from fastbert.inference import workers as workers_module

TEXTS = [f"{'word ' * (i % 7)}number {i}" for i in range(40)]


@pytest.fixture(scope="module")
def one_thread():
    """One thread here, as in each worker: a library's matrix products may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def encoder():
    return sentence_encoder(dense=[Dense(48, 20)], prompts={"query": "find: "}, include_prompt=False)


@pytest.fixture(scope="module")
def workers(encoder, one_thread):
    with encoder.workers(2) as workers:
        yield workers


def pids(workers):
    return list(workers._executor._processes)


def test_two_processes_give_the_same_bits(encoder, workers):
    done = []
    for options in ({"tokens_per_batch": 30}, {"truncate_dim": 7, "prompt_name": "query"}, {"prompt": "see "}):
        found = encoder.encode(TEXTS, workers=workers, progress=done.append, **options)
        assert torch.equal(found, encoder.encode(TEXTS, **options)), options
    assert sum(done) == 3 * len(TEXTS) and len(done) > 10 and len(pids(workers)) == 2
    assert torch.equal(encoder.encode_query(TEXTS, workers=workers), encoder.encode_query(TEXTS))
    assert encoder.encode([], workers=workers).shape == (0, 20)


def test_weights_are_shared(encoder, workers):
    """They are shared with workers that run already: a change here takes effect there."""
    weight = encoder.model.encoder.layer[0].output.dense.bias
    assert weight.is_shared() and encoder.dense[0].linear.weight.is_shared()
    before = encoder.encode(TEXTS, workers=workers)
    with torch.no_grad():
        weight += 1.0
    try:
        after = encoder.encode(TEXTS, workers=workers)
        assert torch.equal(after, encoder.encode(TEXTS)) and not torch.equal(after, before)
    finally:
        with torch.no_grad():
            weight -= 1.0


def test_a_failure_is_raised_and_the_workers_go_on(encoder, workers):
    with pytest.raises(TypeError, match=r"texts\[1\] is a int; expected a string"):
        encoder.encode(["a", 1], workers=workers)
    with pytest.raises(IndexError, match="30522"):  # in a worker, between valid batches
        list(workers.embed([[[101, 102]], [[101, 30522, 102]], *[[[101, 102]]] * 50]))
    with pytest.raises(ValueError, match="workers are those of another encoder"):
        sentence_encoder().encode(TEXTS, workers=workers)
    assert torch.equal(encoder.encode(TEXTS, workers=workers), encoder.encode(TEXTS))


def test_a_worker_that_is_killed_is_an_error():
    """Killed in the middle of its work or before it, it causes an error, and nothing hangs. The pool is its own."""
    encoder = sentence_encoder()
    with fastbert.backend("reference"):  # the workers take it over
        workers = encoder.workers(1)
    assert set(dict(workers._submit(backends.forced).result()).values()) == {"reference"}
    assert workers._submit(torch.get_num_threads).result() == torch.get_num_threads()
    (pid,) = pids(workers)
    killed = []

    def kill(count):
        if not killed:
            os.kill(pid, signal.SIGKILL)
        killed.append(count)

    with pytest.raises(RuntimeError, match="EncoderWorkers: a process has ended before its work was done"):
        encoder.encode(TEXTS * 50, tokens_per_batch=30, workers=workers, progress=kill)
    assert 0 < sum(killed) < len(TEXTS) * 50
    with pytest.raises(RuntimeError, match="EncoderWorkers: a process has ended"):
        encoder.encode(TEXTS, workers=workers)
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_process_is_refused(encoder):
    for devices in (0, []):
        with pytest.raises(ValueError, match="workers of no process; expected at least 1"):
            encoder.workers(devices)


@pytest.mark.slow
def test_a_process_that_cannot_begin_says_why(encoder):
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA|invalid device"):
        encoder.workers(["cpu", device])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_prepared_models_work_too(one_thread, precision):
    encoder = sentence_encoder()
    encoder.model = fastbert.prepare(encoder.model, precision)
    with encoder.workers(["cpu", "cpu"]) as workers:
        assert torch.equal(encoder.encode(TEXTS, workers=workers), encoder.encode(TEXTS))


SCRIPT = """
import torch
from fastbert.inference import SentenceEncoder


def main():
    encoder = SentenceEncoder.from_pretrained("encoder")
    with encoder.workers(2) as workers:
        assert torch.equal(encoder.encode(["a", "b c"] * 9, workers=workers), encoder.encode(["a", "b c"] * 9))
    print("equal")


{call}
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_from_a_script(tmp_path, guarded):
    """Without a __main__ guard, workers would start workers of their own: an error, not a hang."""
    sentence_encoder().save_pretrained(tmp_path / "encoder")
    call = 'if __name__ == "__main__":\n    main()' if guarded else "main()"
    (tmp_path / "script.py").write_text(SCRIPT.replace("{call}", call))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fastbert.__file__).parents[1])}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    ended = subprocess.run([sys.executable, "script.py"], **options)
    assert (ended.returncode == 0) == guarded and ("equal" in ended.stdout) == guarded, ended.stderr[-3000:]
    assert guarded or "EncoderWorkers: a process has ended before its work was done" in ended.stderr


KILLED = """
import os, sys
import torch
sys.path.insert(0, sys.argv[1])
from small_models import sentence_encoder


if __name__ == "__main__":
    workers = sentence_encoder().workers(2)
    print(*workers._executor._processes, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    tests = Path(__file__).resolve().parent.parent
    script = [sys.executable, str(tmp_path / "script.py"), str(tests)]
    run = subprocess.run(script, stdout=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode == -9
    pids, deadline = list(map(int, run.stdout.split())), time.monotonic() + 20
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: setattr(encoder, "normalize", not encoder.normalize),
        lambda encoder: encoder.model.load_state_dict(copy.deepcopy(encoder.model.state_dict()), assign=True),
        lambda encoder: encoder.model.double(),
    ],
)
def test_an_encoder_that_has_changed_needs_new_workers(workers, encoder, change):
    changed = copy.copy(encoder)
    changed.model = copy.deepcopy(encoder.model)
    own = copy.copy(workers)
    own.encoder, own._state = changed, workers_module._state(changed)
    change(changed)
    with pytest.raises(RuntimeError, match="the encoder has changed since they started; start new ones"):
        changed.encode(TEXTS, workers=own)


def test_an_encoder_that_cannot_be_sent_is_an_error_at_once(encoder, monkeypatch):
    broken = copy.copy(encoder)
    broken.model = copy.deepcopy(encoder.model)
    broken.model.register_forward_hook(lambda *given: None)
    with pytest.raises((AttributeError, pickle.PicklingError), match="[Cc]an't (pickle|get local object)"):
        broken.workers(2)

    def full(arguments):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(workers_module.ForkingPickler, "dumps", full)
    with pytest.raises(RuntimeError, match="shared memory is too small for the weights; in a container, give it more"):
        encoder.workers(2)
