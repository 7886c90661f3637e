"""A masked-LM training step, 15 % of the real tokens labelled, against transformers' BertForMaskedLM.

Forward and backward of the loss, and the whole step with fused AdamW, both with dropout; what is timed is verified
without dropout first, the loss and every gradient. Weights and ids are random and new in every run. The bound and the
floor count the head on labelled rows, which is all that has to be computed.
`pytest benchmarks/bench_mlm.py` runs one contender at a time; `python -m benchmarks.run --groups mlm` interleaves them.
"""

import pytest
import torch
from torch import Tensor

from benchmarks import cases, contenders, harness, models
from benchmarks.cases import Setup, Spec
from benchmarks.contenders.interface import MASKED_LM, Way, timed
from benchmarks.sizes import Batch, Size, make_batch

PARTS = (MASKED_LM,)
DIRECTIONS = (cases.DROPOUT, cases.STEP)
SHARE = 0.15  # of the real tokens


def setup(spec: Spec, device: str) -> Setup:
    batch = make_batch(spec.size, spec.lengths, device)
    inputs = masked(spec.size, batch, device)
    labelled = len(inputs["labelled_rows"])
    start = whole_step if spec.direction == cases.STEP else timed
    return models.setup(spec, batch, inputs, device, labelled, start=start, facts={"labelled": labelled})


def masked(size: Size, batch: Batch, device: str) -> dict[str, Tensor]:
    """Ids and labels (T,) of a packed batch, and the rows that have a label."""
    ids = torch.randint(1, size.config.vocab_size, (batch.tokens,), device=device)
    rows = torch.randperm(batch.tokens, device=device)[: max(1, round(SHARE * batch.tokens))].sort().values
    labels = torch.full_like(ids, -100)
    labels[rows] = torch.randint(1, size.config.vocab_size, rows.shape, device=device)
    return {"input_ids": ids, "labels": labels, "labelled_rows": rows}


def whole_step(way: Way, inputs: dict[str, Tensor], backward: bool) -> harness.Call:
    """Forward, backward, and a step of fused AdamW so small that weights stay what they are for."""
    arguments = way.prepare(**inputs)
    optimizer = torch.optim.AdamW(way.module.parameters(), lr=1e-6, fused=True)

    def call() -> None:
        optimizer.zero_grad()
        way.run(**arguments).backward()
        optimizer.step()

    return call


def report(spec: Spec, how: cases.How):
    return cases.report(spec, setup(spec, how.device), how)


# ---- pytest-benchmark


@pytest.mark.parametrize("who", [c.name for c in contenders.of(MASKED_LM, slow=True)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_masked_lm(alone, distribution, direction, who):
    alone(setup, MASKED_LM, distribution, direction, who)
