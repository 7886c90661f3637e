"""The best rates of this device: a large copy, products of random numbers; its clocks, and whether ncu can count.

    python -m benchmarks.gpu.ceilings --out FILE

`benchmarks.run --ceilings FILE` then uses the same ceilings for every case. FILE also has the rates of BERT-base's
products on 16384 tokens, and those of a masked-LM head's product with 30522 logits a row, BERT's vocabulary, and with
30528, the next multiple of 16.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import floor
from benchmarks.harness import rounded

TOKENS, LABELLED = 16384, 2458
SHAPES = [(TOKENS, 768, 2304), (TOKENS, 768, 768), (TOKENS, 768, 3072), (TOKENS, 3072, 768)]
SHAPES += [(LABELLED, 768, 30522), (LABELLED, 768, 30528)]
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
COUNTED = "import torch; torch.ones(64, device='cuda').mul_(2); torch.cuda.synchronize()"


def measure(device: str) -> dict[str, object]:
    kinds = (torch.bfloat16, torch.float16, torch.float32) if device == "cuda" else (torch.float32,)
    name_of = lambda kind: str(kind).removeprefix("torch.")  # noqa: E731
    before = clocks()
    copy, products = floor.bandwidth(device), {name_of(kind): floor.product_rate(device, kind) for kind in kinds}
    after = clocks()
    shapes = SHAPES if device == "cuda" else []
    found = {" x ".join(map(str, shape)): floor.product_rate(device, kinds[0], [shape]) for shape in shapes}
    return {
        "device": floor.device_name(device),
        "clocks": {CLOCKS: [before, after]},
        "bandwidth": rounded(copy),
        "products": {name: rounded(rate) for name, rate in products.items()},
        f"shapes in {name_of(kinds[0])}": {name: rounded(rate) for name, rate in found.items()},
        "no ncu": why_no_counters(),
    }


def clocks() -> str | None:
    """The present clocks, power and temperature; None without nvidia-smi."""
    return output("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0")


def why_no_counters() -> str | None:
    """The reason why ncu cannot read a small kernel's counters here; None if it can."""
    if not shutil.which("ncu"):
        return "ncu is not installed"
    metric = "sm__cycles_elapsed.max"
    ncu = "ncu", "--clock-control", "none", "--metrics", metric, "--launch-count", "1"
    found = output(*ncu, sys.executable, "-c", COUNTED) or ""
    errors = [line for line in found.splitlines() if "==ERROR==" in line]
    return None if metric in found and not errors else (errors or ["ncu shows no counter"])[0]


def output(*words: str) -> str | None:
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ceilings", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = json.dumps(measure("cuda" if torch.cuda.is_available() else "cpu"), indent=1) + "\n"
    options.out.write_text(found, encoding="utf-8")
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
