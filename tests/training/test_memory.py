"""Memory use stays flat although every batch has another size."""

import subprocess
import sys

import pytest

CODE = """
import random, sys
import torch, transformers, fastbert

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def step():
    batch, length = random.randint(1, 8), random.randint(8, 256)
    lengths = torch.tensor([length, *(random.randint(4, length) for _ in range(batch - 1))])
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(1, 999, mask.shape)
    labels = ids.masked_fill(torch.rand(mask.shape) > 0.15, -100)
    model(ids, mask, labels=labels).loss.backward()
    model.zero_grad()

torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=1000)
if sys.argv[1] == "fastbert":
    model = fastbert.BertForMaskedLM(fastbert.BertConfig(**sizes))
else:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
if sys.argv[1] == "accelerated":
    fastbert.accelerate(model)
model.train()
step()
before = resident()
for _ in range(2000):
    step()
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_on_random_sizes_grows_hardly_more_than_transformers():
    growth = {}
    for name in ("fastbert", "accelerated", "transformers"):
        run = subprocess.run([sys.executable, "-c", CODE, name], capture_output=True, text=True, check=True)
        growth[name] = float(run.stdout)
    assert max(growth["fastbert"], growth["accelerated"]) <= 1.3 * growth["transformers"], growth
