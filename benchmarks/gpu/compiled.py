"""What kernels compile to: a full table under build/, and a short one in docs/ that is committed and compared.

A line of the full table is one variant of a kernel. A line of the short one is a kernel on an architecture: the most
registers, spilled bytes and shared memory of any of its variants, and all noteworthy instructions.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report import ROOT, markdown

FULL = ("kernel", "variant", "launch", "registers", "spilled", "shared", "instructions")
SHORT = ("kernel", "GPU", "variants", "registers", "spilled", "shared", "instructions")


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel. launch: threads, and other parameters of a launch. problem: why it cannot be used."""

    kernel: str
    variant: str
    launch: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def cells(self) -> list[str]:
        counts = ", ".join(f"{name} {count}" for name, count in self.instructions.items() if count)
        numbers = map(str, (self.registers, self.spilled, self.shared))
        return [self.kernel, self.variant, self.launch, *numbers, counts or "none"]


Kernels = Mapping[int, Sequence[Compiled]]  # by architecture: 90 is sm_90


def full(kernels: Kernels) -> str:
    return "\n".join(f"## sm_{gpu}\n\n{markdown(FULL, [v.cells for v in found])}\n" for gpu, found in kernels.items())


def short(kernels: Kernels) -> list[list[str]]:
    """Lines of the short table, all architectures of a kernel together."""
    names, found = dict.fromkeys(variant.kernel for variants in kernels.values() for variant in variants), []
    for name in names:
        for gpu, variants in kernels.items():
            if same := [variant for variant in variants if variant.kernel == name]:
                most = [str(max(getattr(v, what) for v in same)) for what in ("registers", "spilled", "shared")]
                used = sorted({what for v in same for what, count in v.instructions.items() if count})
                found.append([name, f"sm_{gpu}", str(len(same)), *most, ", ".join(used) or "none"])
    return found


def differences(kernels: Kernels, head: str, committed: str, independent: Sequence[str]) -> list[str]:
    """The lines that only the new or only the committed short table has, for these architectures.

    independent: the columns to compare if another version of the compiler wrote the committed table.
    """
    compiler = re.compile(r"^Compiler: .*?\. ", re.MULTILINE)
    columns = SHORT if compiler.findall(head) == compiler.findall(committed) else independent
    places, gpus = [SHORT.index(name) for name in columns], {f"sm_{gpu}" for gpu in kernels}
    there = (row.strip("| ").split(" | ") for row in re.findall(r"^\| .*", committed, re.MULTILINE))
    there = [row for row in there if row[1] in gpus]
    now, then = ({" | ".join(row[i] for i in places) for row in rows} for rows in (short(kernels), there))
    return [f"+ {row}" for row in sorted(now - then)] + [f"- {row}" for row in sorted(then - now)]


def main(
    name: str,
    doc: str,
    gpus: Sequence[int],
    compile_all: Callable[[Sequence[int], Sequence[str]], Kernels],
    head: Callable[[], str],
    independent: Sequence[str],
) -> int:
    """Writes build/NAME.md and the short table docs/NAME.md; or prints tables, if only a part of the kernels is wanted;
    or compares with the short table. Returns the exit status: 1 for a problem or a difference."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{name}", description=doc.splitlines()[0])
    parser.add_argument("--arch", nargs="+", type=int, choices=gpus, default=list(gpus))
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[], help="print variants that have one in them")
    parser.add_argument("--check", action="store_true", help=f"compare with docs/{name}.md instead of writing it")
    options = parser.parse_args()
    if options.check and options.only:
        parser.error("--check compares all kernels; expected it without --only")
    kernels = compile_all(options.arch, options.only)
    every = [(gpu, variant) for gpu, variants in kernels.items() for variant in variants]
    found = [f"sm_{gpu}: {v.problem}: {' | '.join(v.cells)}" for gpu, v in every if v.problem]
    report, whole = ROOT / "docs" / f"{name}.md", ROOT / "build" / f"{name}.md"
    if options.check:
        found += differences(kernels, head(), report.read_text(encoding="utf-8"), independent)
    elif options.only or set(options.arch) != set(gpus):
        print(full(kernels))
    else:
        whole.parent.mkdir(exist_ok=True)
        whole.write_text(f"{head()}\n{full(kernels)}", encoding="utf-8")
        report.write_text(f"{head()}\n{markdown(SHORT, short(kernels))}\n", encoding="utf-8")
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0
