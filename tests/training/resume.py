"""python resume.py CHECKPOINT STEPS [DIE]: trains to STEPS, saving after each, from CHECKPOINT where there is one.

With DIE the process kills itself (SIGKILL) in the middle of the step of that number. Prints a digest of the parameters.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch

from fastbert import BertConfig, BertModel

CONFIG = BertConfig(
    vocab_size=99,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=32,
)


def save(path: Path, state: dict) -> None:
    """Whole or not at all: a process can die while it writes."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def train(path: Path, steps: int, die: int | None) -> str:
    torch.manual_seed(0)
    model = BertModel(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    done = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        done = state["step"]
    for step in range(done + 1, steps + 1):
        ids = torch.randint(1, 99, (3, 12))
        optimizer.zero_grad()
        model(ids).pooler_output.square().sum().backward()
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        rng = torch.get_rng_state()
        save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "step": step})
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    print(train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None))
