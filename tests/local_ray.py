"""A Ray cluster on this machine, for tests."""

import contextlib
import os
import subprocess

import pytest

import fastbert

ray = pytest.importorskip("ray")


@contextlib.contextmanager
def cluster():
    """A cluster with four CPUs, whose processes can import what the test can."""
    paths = [os.path.dirname(os.path.dirname(fastbert.__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def processes(kind):
    """The ids of the processes of an actor class, found by the title that Ray gives them."""
    found = subprocess.run(["pgrep", "-f", f"ray::{kind}"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]
