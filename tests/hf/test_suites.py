"""Runs transformers' own tests of seven families, and sentence-transformers' tests, through fastbert.accelerate.

Every test that passes without it has to pass with it. The tests are not in this repository: suites.py downloads them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf import suites

SUITES = {  # name: the project, and the tests of it to run
    "bert": ("transformers", "tests/models/bert/test_modeling_bert.py"),
    "roberta": ("transformers", "tests/models/roberta/test_modeling_roberta.py"),
    "xlm-roberta": ("transformers", "tests/models/xlm_roberta/test_modeling_like_roberta.py"),
    "camembert": ("transformers", "tests/models/camembert/test_modeling_like_roberta.py"),
    "electra": ("transformers", "tests/models/electra/test_modeling_electra.py"),
    "distilbert": ("transformers", "tests/models/distilbert/test_modeling_distilbert.py"),
    "albert": ("transformers", "tests/models/albert/test_modeling_albert.py"),
    "sentence-transformers: dense": ("sentence-transformers", "tests/sentence_transformer"),
    "sentence-transformers: sparse": ("sentence-transformers", "tests/sparse_encoder"),
    "sentence-transformers: cross": ("sentence-transformers", "tests/cross_encoder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_passes_accelerated_what_passes_without(suite, tmp_path):
    plain, fast = run(suite, tmp_path / "plain"), run(suite, tmp_path / "fast", "--accelerate")
    passed, passed_fast = passing(plain), passing(fast)
    print(f"{suite}: {len(passed)} tests pass, {len(passed & passed_fast)} of them accelerated;", end=" ")
    print(f"forwards packed: {fast['packed']}, fallen back: {sum(fast['fallbacks'].values())}")
    assert passed and not plain["calls"]
    assert fast["packed"] > 0 and any(call.startswith("attention_fwd") for call in fast["calls"])
    assert not passed - passed_fast


def run(suite: str, results: Path, *options: str) -> dict:
    """Returns what suite_plugin.py wrote about one run, which has no network, so that results are alike everywhere."""
    project, tests = SUITES[suite]
    root = suites.tests_of(project)
    if not root.is_dir():
        pytest.skip(f"there is no {root}: `make suites` gets it")
    command = [sys.executable, "-m", "pytest", "-p", "hf.suite_plugin", f"--results={results}", *options, tests]
    quiet = ["-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider", "-o", "log_cli=false", "-m", "not slow"]
    paths = os.pathsep.join(str(Path(__file__).parents[up]) for up in (1, 2))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(suites.cache() / "hub")}
    offline |= {"HF_DATASETS_CACHE": str(suites.cache() / "datasets")}
    environment = os.environ | {"PYTHONPATH": paths} | offline
    environment.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run([*command, *quiet], cwd=root, env=environment, capture_output=True, text=True, timeout=3000)
    assert results.is_file(), ended.stdout[-5000:] + ended.stderr[-5000:]
    print(ended.stdout[-20000:])
    return json.loads(results.read_text())


def passing(results: dict) -> set[str]:
    return {test for test, outcome in results["outcomes"].items() if outcome == "passed"}
