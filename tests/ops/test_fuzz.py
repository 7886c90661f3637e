"""Thousands of wrong calls of the C++ primitives, in another process: if it crashes, the message names the call."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastbert import backends

pytestmark = pytest.mark.skipif(backends._cpu_problem() is not None, reason=str(backends._cpu_problem()))


@pytest.mark.parametrize("examples", [50, pytest.param(5000, marks=pytest.mark.slow)])
def test_wrong_calls_raise_or_keep_their_promise(examples, tmp_path):
    call = tmp_path / "call"
    call.touch()
    words = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz.py")), str(examples), str(call)]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run(words, capture_output=True, text=True, timeout=900, env=env)
    code = result.returncode
    assert code >= 0, f"{signal.Signals(-code).name} in {call.read_text()}\n{result.stderr[-3000:]}"
    assert code == 0, result.stdout[-2000:] + result.stderr[-6000:]
    calls, returned = (int(word) for word in result.stdout.split() if word.isdigit())
    assert calls >= examples and returned >= examples // 10, result.stdout
