"""A cluster of Ray on this machine, for tests."""

import contextlib
import os
import subprocess

import pytest

import fastbert

ray = pytest.importorskip("ray")


@contextlib.contextmanager
def cluster():
    """Of four processes, which import what the test imports."""
    paths = [os.path.dirname(os.path.dirname(fastbert.__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def processes(kind):
    """The ids of the processes of an actor's class, as Ray names them."""
    found = subprocess.run(["pgrep", "-f", f"ray::{kind}"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]
