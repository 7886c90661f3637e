"""A pytest plugin for the tests of other projects: it seeds each test, and writes the outcomes to a file.

    python -m pytest -p hf.suite_plugin --results=results.json --accelerate tests/models/bert

With --accelerate, every model of fastbert's families that a test makes, from its class or by from_pretrained, alone or
inside a sentence-transformers model, goes through fastbert.accelerate as soon as it has its weights.
"""

import functools
import importlib
import json
import random
import sys
from collections import Counter

import numpy as np
import torch
from torch import nn

from fastbert import backends, families, hf

outcomes: dict[str, str] = {}
forwards: Counter[str] = Counter()  # "packed", or the reason for falling back, over all models and their copies
making = 0  # how many nested calls that make a model are running


def pytest_addoption(parser):
    parser.addoption("--results", required=True, help="a JSON file: each test's outcome, and what fastbert did")
    parser.addoption("--accelerate", action="store_true", help="run every model that tests make through fastbert")


def pytest_configure(config):
    if config.getoption("accelerate"):
        accelerate_what_is_made()


def pytest_runtest_setup(item):
    """Seeds each test: inputs are often random, and tests that fail by chance then fail in every run or in none."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    if common := sys.modules.get("tests.test_modeling_common"):
        common.global_rng.seed(0)


def pytest_runtest_logreport(report):
    """A failure in set-up, a subtest or tear-down fails the test; else its last outcome before tear-down counts."""
    if report.failed or (report.when != "teardown" and outcomes.get(report.nodeid) != "failed"):
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    calls = {f"{primitive} {backend}": count for (primitive, backend), count in backends.calls().items()}
    results = {"outcomes": outcomes, "packed": forwards.pop("packed", 0), "fallbacks": forwards, "calls": calls}
    with open(session.config.getoption("results"), "w") as file:
        json.dump(results, file, indent=1)


# ---- fastbert.accelerate for every model that is made


def accelerate_what_is_made():
    from transformers import PreTrainedModel

    hf.Report.ran_packed, hf.Report.fell_back = counted(hf.Report.ran_packed), counted(hf.Report.fell_back)
    for cls in classes():
        cls.__init__ = accelerated(cls.__init__)
    PreTrainedModel.from_pretrained = classmethod(accelerated(PreTrainedModel.from_pretrained.__func__))


def counted(method):
    @functools.wraps(method)
    def wrapper(report, reason="packed"):
        if not torch.compiler.is_compiling():
            forwards[reason] += 1
        return method(report) if reason == "packed" else method(report, reason)

    return wrapper


def classes() -> list[type]:
    """The classes with an __init__ among the families' models and sentence-transformers' models around them."""
    import sentence_transformers
    from transformers import PreTrainedModel

    modules = [importlib.import_module(name.rpartition(".")[0]) for name in families.FAMILIES]
    found = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    models = [cls for cls in found if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel]
    around = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
    models += [getattr(sentence_transformers, name) for name in around if hasattr(sentence_transformers, name)]
    return [cls for cls in models if "__init__" in vars(cls)]


def accelerated(make):
    """Wraps `make`, an __init__ or from_pretrained. A model made inside another is accelerated with the outer one."""

    @functools.wraps(make)
    def wrapper(first, *args, **kwargs):
        global making
        making += 1
        try:
            made = make(first, *args, **kwargs)
        finally:
            making -= 1
        if making == 0:
            accelerate(first if made is None else made)
        return made

    return wrapper


def accelerate(made: nn.Module | tuple) -> None:
    """made: a model, or from_pretrained's tuple of it and loading info. One on the meta device has no weights yet."""
    model = made[0] if isinstance(made, tuple) else made
    known = any(families.key_of(module) for module in model.modules())
    if known and not any(parameter.is_meta for parameter in model.parameters()):
        hf.accelerate(model)
