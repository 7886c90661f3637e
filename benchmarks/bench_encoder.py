"""BertModel and BertEncoder, forward, and forward and backward, against everybody under benchmarks/contenders.

No optimizer here, which is everybody's (bench_mlm.py has a whole step). Weights and inputs are random and new in every
run. What is timed with dropout is verified without.
`pytest benchmarks/bench_encoder.py` runs one contender at a time; `python -m benchmarks.run` interleaves them.
"""

import pytest
import torch

from benchmarks import cases, contenders, models
from benchmarks.cases import Setup, Spec
from benchmarks.contenders.interface import ENCODER, MODEL
from benchmarks.sizes import make_batch

PARTS = (MODEL, ENCODER)
DIRECTIONS = (cases.FORWARD, cases.BACKWARD, cases.DROPOUT)


def setup(spec: Spec, device: str) -> Setup:
    size, batch = spec.size, make_batch(spec.size, spec.lengths, device)
    if spec.part == ENCODER:
        inputs = {"hidden_states": torch.randn(batch.tokens, size.config.hidden_size, dtype=spec.kind, device=device)}
    else:
        inputs = {"input_ids": torch.randint(1, size.config.vocab_size, (batch.tokens,), device=device)}
    return models.setup(spec, batch, inputs, device)


def report(spec: Spec, how: cases.How):
    return cases.report(spec, setup(spec, how.device), how)


# ---- pytest-benchmark


@pytest.mark.parametrize(("part", "who"), [(part, c.name) for part in PARTS for c in contenders.of(part, slow=True)])
@pytest.mark.parametrize("direction", (cases.FORWARD, cases.BACKWARD))
@pytest.mark.parametrize("distribution", ("full", "half"))
def test_encoder(alone, part, distribution, direction, who):
    alone(setup, part, distribution, direction, who)
