"""Which tiles of attention's kernels are the fastest on this GPU, written where the kernels read them.

    python -m benchmarks.gpu.sweep [--out DIR] [--minutes 2]

All candidates of a kernel are compiled first, as many at a time as there are processors. Those that do not compile,
spill, or need more shared memory than there is are rejected; so are those whose results differ from the results of the
tiles in use. The others are timed with dropout and without, and the fastest is written to
fastbert/triton/attention_tuned.py, and to DIR, if it beats the tiles in use by MARGIN. Without a GPU, two candidates of
each kernel run under TRITON_INTERPRET=1, on tiny shapes, and only DIR is written to.
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import triton
from torch import Tensor

from benchmarks import harness
from benchmarks.gpu import triton_report
from fastbert.triton import attention, attention_tuned
from fastbert.triton.attention_tuned import TUNED
from fastbert.triton.common import Config, architecture

FILE = Path(attention_tuned.__file__)
MARGIN = 1.02  # less is noise
AGREES = 1e-2  # relative distance of two results in 16 bits
SAMPLES = 7
DROPOUT = (0.0, 0.1)
Choice = Config | int
Seconds = Callable[[harness.Call], float]


def _tiles(M: Sequence[int], N: Sequence[int], stages: Sequence[int], **more: bool) -> list[Config]:
    found = itertools.product(M, N, (4, 8), stages)
    return [Config({"M": m, "N": n, **more}, warps, depth) for m, n, warps, depth in found]


# kernel -> candidates, whether it belongs to the backward, sequence length. The length is the one that most batches are
# cut to; twice that for `queries`, a kernel that only runs for sequences longer than ONE_PASS.
KERNELS: dict[str, tuple[Sequence[Choice], bool, int]] = {
    "forward": (_tiles((64, 128), (32, 64, 128), (2, 3, 4), RELOAD=False), False, 512),
    "keys": (_tiles((64, 128), (64, 128), (1, 2)), True, 512),
    "queries": (_tiles((64, 128), (32, 64, 128), (1, 2, 3)), True, 1024),
    "one_pass": ((0, 512), True, 512),
}


@dataclass(frozen=True)
class Target:
    """One kernel on one batch, with all that the keys of attention_tuned.py distinguish."""

    kernel: str
    qkv: Tensor
    cu_seqlens: Tensor
    candidates: Sequence[Choice]
    backward: bool
    few: bool

    @property
    def key(self) -> tuple[str, int, int, int, bool]:
        bits = 8 * self.qkv.element_size()
        return self.kernel, architecture(self.qkv.device), self.qkv.shape[-1], bits, self.few

    @functools.cached_property
    def calls(self) -> list[Callable[[], Tensor]]:
        """The forward or the backward, without dropout and with it."""
        return [self._call(p) for p in DROPOUT]

    def _call(self, p: float) -> Callable[[], Tensor]:
        rng = torch.tensor([7], device=self.qkv.device) if p else None
        rest = self.cu_seqlens, int(self.cu_seqlens[1]), self.qkv.shape[-1] ** -0.5, p, rng, 0
        if not self.backward:
            return lambda: attention.forward(self.qkv, *rest)[0]
        saved = attention.forward(self.qkv, *rest)
        return functools.partial(attention.backward, torch.randn_like(saved[0]), self.qkv, *saved, *rest)


def targets(device: str) -> Iterator[Target]:
    """BERT-base's heads, in batches that fill the GPU and that do not; small ones in the interpreter."""
    small, dtype = device == "cpu", torch.float16 if device == "cpu" else torch.bfloat16
    for few, (kernel, (candidates, backward, seqlen)) in itertools.product((False, True), KERNELS.items()):
        if few and kernel == "one_pass":
            continue  # it needs more programs than such a batch has
        heads, batch, seqlen = (1, 1 if few else 4, 65) if small else (12, 1 if few else 32, seqlen)
        qkv = torch.randn(batch * seqlen, 3, heads, 64, device=device, dtype=dtype)
        ends = torch.arange(0, batch * seqlen + 1, seqlen, device=device, dtype=torch.int32)
        yield Target(kernel, qkv, ends, candidates[:2] if small else candidates, backward, few)


@contextlib.contextmanager
def trial(key: tuple, choice: Choice) -> Iterator[None]:
    """Within this block, the kernels use the choice."""
    before = dict(TUNED)
    TUNED[key] = choice
    try:
        yield
    finally:
        TUNED.clear()
        TUNED.update(before)


# ---- one kernel


def compiled(target: Target) -> list[Choice]:
    """The candidates that fit, compiled into Triton's cache; all of them in the interpreter."""
    if triton.knobs.runtime.interpret:
        return list(target.candidates)
    gpu, calls, needed = architecture(target.qkv.device), target.calls, []
    for choice in target.candidates:
        with trial(target.key, choice):
            needed.append(triton_report.variants(gpu, lambda: [call() for call in calls]))
    every = list(dict.fromkeys(itertools.chain(*needed)))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        done = pool.map(triton_report.compile, every, [gpu] * len(every))
        bad = {variant for variant, one in zip(every, done, strict=True) if one.problem}
    return [choice for choice, variants in zip(target.candidates, needed, strict=True) if bad.isdisjoint(variants)]


def fastest(target: Target, seconds: Seconds) -> tuple[Choice | None, float]:
    """(the best candidate, its speed relative to the tiles in use); (None, 1.0) if none is faster by MARGIN."""
    right, now = [call() for call in target.calls], [seconds(call) for call in target.calls]
    best, most = None, MARGIN
    for choice in compiled(target):
        with trial(target.key, choice):
            times = sum(now) / tried(target, right, seconds)
        best, most = (choice, times) if times > most else (best, most)
    return best, most if best is not None else 1.0


def tried(target: Target, right: list[Tensor], seconds: Seconds) -> float:
    """The seconds of a choice; infinite if its results are not near `right`, or it cannot run."""
    try:
        found = ((call().float(), expected.float()) for call, expected in zip(target.calls, right, strict=True))
        if all(float((y - expected).norm()) <= AGREES * float(expected.norm()) for y, expected in found):
            return sum(map(seconds, target.calls))
    except triton.runtime.errors.TritonError as error:  # out of resources
        print(f"{target.kernel}: {error}")
    return math.inf


def timer(device: str) -> Seconds:
    once = harness.busy_timer(device) if device == "cuda" else harness.host_timer()
    samples = SAMPLES if device == "cuda" else 1
    return lambda call: median(once(call, 1) for _ in range(samples))


# ---- all of them


def sweep(wanted: Iterator[Target], seconds: Seconds, deadline: float = math.inf) -> None:
    """Puts each winner into TUNED at once, so that the kernels after it are timed together with it."""
    for target in wanted:
        if time.monotonic() > deadline:
            print(f"{target.key}: no time was left")
            continue
        choice, times = fastest(target, seconds)
        if choice is not None:
            TUNED[target.key] = choice
        print(f"{target.key}: {'stays' if choice is None else f'{choice}, {times:.2f} times as fast'}", flush=True)


def text() -> str:
    """attention_tuned.py with what TUNED holds now."""
    head = FILE.read_text(encoding="utf-8").partition("TUNED:")[0]
    words = lambda choice: (  # noqa: E731
        f"Config({choice.tiles}, {choice.num_warps}, {choice.num_stages})" if isinstance(choice, Config) else choice
    )
    lines = "".join(f"    {key}: {words(choice)},\n" for key, choice in sorted(TUNED.items())).replace("'", '"')
    found = f"{{\n{lines}}}" if lines else "{}"
    return f"{head}TUNED: dict[tuple[str, int, int, int, bool], Config | int] = {found}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for a copy of the winners")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no kernel begins after that")
    options = parser.parse_args()
    device, deadline = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic() + 60 * options.minutes
    if device == "cpu" and not triton.knobs.runtime.interpret:
        parser.error("no GPU; TRITON_INTERPRET=1 tries it out")
    sweep(targets(device), timer(device), deadline)
    places = [FILE] * (device == "cuda") + ([options.out / FILE.name] if options.out else [])
    for place in places:
        place.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
