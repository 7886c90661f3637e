"""python -m benchmarks.run: every case, contenders interleaved, a table for each and one JSON file for each group.

A file is written anew after every case, so a run that is stopped leaves what it has. `pytest benchmarks` runs the same
cases one at a time under pytest-benchmark.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import fastbert
from benchmarks import bench_encoder, bench_hf, bench_mlm, bench_ops, floor, harness, provenance, sizes

RESULTS = Path(__file__).resolve().parent / "results"
GROUPS = ("encoder", "hf", "mlm", "ops")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sizes.NAMES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="small shapes, few rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder of the JSON files; default benchmarks/results/<device>")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--dtypes", nargs="+", choices=bench_ops.DTYPES, help="default: what the device is good for")
    parser.add_argument("--layers", type=int, help="layers of the encoders; default: each size's own")
    parser.add_argument("--rounds", type=int, help="default: 5 for small sizes, 20")
    parser.add_argument("--verify-only", action="store_true", help="accuracy of every contender, no times, no files")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the baselines as contenders")
    parser.add_argument("--seed", type=int, help="of weights and inputs; default: a new one")
    parser.add_argument("--commit", help="for the results, where the tree has no git history")
    return parser.parse_args(words)


def dtypes(options: argparse.Namespace) -> list[str]:
    if options.device == "cuda":
        return options.dtypes or ["bfloat16"]
    return options.dtypes or ["float32", *["bfloat16"] * provenance.has_bfloat16_products()]


def reports(group: str, options: argparse.Namespace) -> Iterator[harness.Report]:
    full, device = options.size == "full", options.device
    rounds = options.rounds or (20 if full else 5)
    how = {"rounds": 0 if options.verify_only else rounds, "limit": 10.0 if full else 1.0, "compiled": options.compile}
    if group == "ops":
        return bench_ops.reports(sizes.for_ops(options.size, device), dtypes(options), device, **how)
    found = sizes.for_encoders(options.size, device, options.layers)
    if group == "encoder":
        return bench_encoder.reports(found, dtypes(options), device, **how)
    how.pop("compiled")
    if group == "mlm":
        return bench_mlm.reports(found, dtypes(options), device, **how)
    return bench_hf.reports(found, options.size, dtypes(options), device, **how)


def measured_with(options: argparse.Namespace) -> dict[str, object]:
    """What a results file says beside its reports."""
    ceilings = {name: asdict(floor.ceilings(options.device, bench_ops.DTYPES[name])) for name in dtypes(options)}
    return provenance.environment(options.commit) | {"seed": options.seed, "ceilings": ceilings}


def run_group(group: str, options: argparse.Namespace) -> list[str]:
    """Prints and writes the reports of a group; returns fastbert's contenders that were wrong or failed."""
    name = "_".join([group, *[options.size] * (options.size != "full"), *["compile"] * options.compile])
    path = (options.out or RESULTS / options.device) / f"{name}.json"
    environment = None if options.verify_only else measured_with(options)
    done = []
    for report in reports(group, options):
        print(report.table(), end="\n\n", flush=True)
        done.append(report)
        if environment:
            harness.write(path, done, environment)
    return [row.name for report in done for row in report.rows if row.problem and row.name.startswith("fastbert")]


def main(words: list[str] | None = None) -> int:
    """1 if a contender of fastbert was wrong or failed."""
    options = arguments(words)
    options.seed = torch.seed() if options.seed is None else options.seed
    torch.manual_seed(options.seed)
    machine = provenance.machine()
    if machine["load"] > 0.5 * machine["cores"]:
        print(f"warning: load {machine['load']} on {machine['cores']} cores: others are busy, times will be too long\n")
    bad = [name for group in options.groups for name in run_group(group, options)]
    fastbert.explain()
    print(f"\n{len(bad)} contenders of fastbert were wrong or failed" if bad else "\nfastbert was right everywhere")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
