"""Where the time of BERT-base's forward and training step goes on the device, and how long it waits for the host.

    python -m benchmarks.gpu.host_gaps --out FILE [--size tiny]

Profiles one warm call of each: the device's time by kernel, and the gaps in which no kernel runs. Prints tables and
writes them to FILE as JSON. Without a GPU, PyTorch's operators take the place of kernels, to try the tool out.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import batch, bench_models, cases, contenders, report
from benchmarks.cases import FORWARD, STEP, Spec
from benchmarks.contenders.interface import MASKED_LM, MODEL

MOST = 30  # kernels, and gaps, that are named


@dataclass(frozen=True)
class Span:
    """A kernel's run, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


def profiled(call: Callable[[], object], device: str) -> list[Span]:
    """The kernels that one call runs on the device."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]) as found:
        call()
        wait()
    if device == "cuda":
        events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
        events = [event for event in events if not event.is_user_annotation]  # of an optimizer's step: no kernel
    else:
        events = [event for event in found.events() if event.cpu_parent is None]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events]


def summary(spans: Sequence[Span]) -> dict[str, object]:
    """Microseconds: in all, in gaps, by kernel with its number of runs, and the longest gaps with the next kernel."""
    by_name, gaps, reached = defaultdict(list), [], None
    for span in sorted(spans, key=lambda span: span.start):
        by_name[span.name].append(span.end - span.start)
        if reached is not None and span.start > reached:
            gaps.append((span.start - reached, span.name))
        reached = max(span.end, reached or span.end)
    kernels = sorted(((sum(times), len(times), name) for name, times in by_name.items()), reverse=True)
    return {
        "span": round(reached - min(span.start for span in spans), 1) if spans else 0,
        "idle": round(sum(gap for gap, _ in gaps), 1),
        "launches": len(spans),
        "kernels": [[round(time, 1), count, name] for time, count, name in kernels],
        "gaps": [[round(gap, 1), name] for gap, name in sorted(gaps, reverse=True)[:MOST]],
    }


def table(title: str, found: dict) -> str:
    share = 100 * found["idle"] / max(found["span"], 1e-9)
    head = f"{title}: {found['launches']} launches in {found['span']} us, idle for {found['idle']} us ({share:.0f} %)"
    kernels = [[str(time), str(count), name[:80]] for time, count, name in found["kernels"][:MOST]]
    gaps = [[str(gap), name[:80]] for gap, name in found["gaps"][:10]]
    tables = report.aligned(("us", "runs", "kernel"), kernels), report.aligned(("gap us", "before"), gaps)
    return "\n\n".join((head, *tables))


def calls(size: batch.Size, device: str) -> dict[str, Callable[[], object]]:
    """fastbert's forward of a half-full batch, and a masked-LM model's whole step."""
    found, ours = {}, next(contender for contender in contenders.ALL if contender.name == "fastbert")
    for part, direction in ((MODEL, FORWARD), (MASKED_LM, STEP)):
        setup = bench_models.setup(Spec(part, size, "half", cases.dtypes(device)[0], direction), device)
        subject = setup.to_time() if setup.to_time else setup.exact
        found[f"{part}, {direction}"] = setup.start(ours.make(subject), subject.inputs, subject.backward)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.host_gaps", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=(*batch.SMALL, "full"), default="full")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = batch.SMALL.get(options.size) or batch.size_of("32x128")
    found = {name: summary(profiled(call, device)) for name, call in calls(size, device).items()}
    print(*(table(name, one) for name, one in found.items()), sep="\n\n")
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
