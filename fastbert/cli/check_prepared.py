"""`fastbert check --prepare`: what `fastbert.prepare` costs, on a user's checkpoint and text.

The prepared model is compared with the original in float32: embeddings, labels, logits, the size of its weights and its
speed. Each dense layer gets a signal-to-noise ratio: the power of its exact output over the power of the prepared
layer's error, both for the layer's input in the original model, so that errors of earlier layers do not count. For fp32
and bf16 the accuracy rule (`fastbert.cli.check`) applies to the forward as well.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.cli.check import Line, Run, Sample, Subject, Yardstick, make_sample, predict, print_whole, rule
from fastbert.cli.check import write_report as write_values
from fastbert.cli.common import new_console
from fastbert.labels import IGNORED
from fastbert.preparation import prepare
from fastbert.prepared import PRECISIONS, QUANTIZED, PreparedLinear, home

ROUNDS = 5  # of timing
WORST = 8  # layers in the table; the file has all


@dataclass(frozen=True)
class Change:
    """How a head's logits change. same: the share of `count` texts or tokens with equal decisions; None: regression."""

    name: str
    difference: float
    same: float | None
    count: int


@dataclass(frozen=True)
class Layer:
    """A prepared layer. sqnr: its signal-to-noise ratio in dB, infinite for an exact layer."""

    name: str
    sqnr: float


class Pair(NamedTuple):
    """A number for the original model, and one for the prepared model."""

    before: float
    after: float


@dataclass
class Report:
    """The results of `run`. cosines: for each text, between the two models' mean hidden states. layers: worst first.
    dense: megabytes of the prepared layers; whole: of the model. milliseconds: for the batch. lines: rows of the
    accuracy rule."""

    model: str
    architecture: str
    batch: str
    precision: str
    skip: list[str]
    threads: int
    device: str
    cosines: list[float] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    dense: Pair = Pair(math.nan, math.nan)
    whole: Pair = Pair(math.nan, math.nan)
    milliseconds: Pair = Pair(math.nan, math.nan)
    lines: list[Line] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)

    @property
    def mean_cosine(self) -> float:
        return statistics.fmean(self.cosines)

    @property
    def worst_cosine(self) -> float:
        return math.nan if any(map(math.isnan, self.cosines)) else min(self.cosines)

    def write(self, path: Path, **about: object) -> None:
        """Writes JSON. about: further entries (versions, machine)."""
        pairs = {name: getattr(self, name)._asdict() for name in ("dense", "whole", "milliseconds")}
        values = {"ok": self.ok, **about, **asdict(self), **pairs}
        values["lines"] = [asdict(line) | {"ok": line.ok} for line in self.lines]
        write_values(path, values | {"mean_cosine": self.mean_cosine, "worst_cosine": self.worst_cosine})


def run(
    directory: str | Path,
    texts: list[str],
    precision: str,
    *,
    skip: Iterable[str] = (),
    device: str | None = None,
    max_length: int = 128,
    tell: Callable[[str], None] = lambda what: None,
) -> Report:
    """Compares a model, from a directory or by a name on the hub, with its prepared version on one batch of texts.

    precision and skip: as for `fastbert.prepare`, with names in fastbert's model. device: None for the one that the
    precision is for. max_length and tell: as for `fastbert.cli.check.run`.
    Raises the same errors as those two functions.
    """
    subject, skip = Subject.read(directory, device or str(home(precision))), list(skip)
    sample = make_sample(subject, texts, max_length)
    models = Models.of(subject, precision, skip)
    batch = f"{len(sample.visible)} texts, {int(sample.visible.sum())} tokens"
    report = Report(str(directory), subject.name, batch, precision, skip, torch.get_num_threads(), subject.device)
    tell(f"{precision}: results")
    before, after = (predict(model, sample) for model in models)
    report.cosines = cosines(before, after, sample)
    report.changes = [change(subject, sample, name, before, after) for name in before.scores]
    tell(f"{precision}: layer by layer")
    report.layers, (report.dense, report.whole) = models.layers(sample), models.megabytes()
    tell(f"{precision}: milliseconds")
    report.milliseconds = models.milliseconds(sample)
    if precision not in QUANTIZED:
        tell(f"{precision}: transformers")
        yardstick = Yardstick.measure(subject, PRECISIONS[precision], sample, predict)
        report.lines = [*yardstick.reference, *rule(after, yardstick)]
    return report


# ---- results


def cosines(before: Run, after: Run, sample: Sample) -> list[float]:
    """The cosine similarity between two models' means of the last hidden states, for each text."""
    return F.cosine_similarity(*(_means(run, sample) for run in (before, after)), dim=-1).tolist()


def _means(run: Run, sample: Sample) -> Tensor:
    """The mean of each text's last hidden states, (sequences, C) float64."""
    last = [state for name, state in run.states.items() if name.startswith("hidden state")][-1]
    return torch.stack([part.mean(0) for part in last.double().split(sample.visible.sum(1).tolist())])


def change(subject: Subject, sample: Sample, name: str, before: Run, after: Run) -> Change:
    """Compares the logits of that name."""
    logits = [run.scores[name].double() for run in (before, after)]
    difference = float((logits[0] - logits[1]).abs().max())
    decided = [decisions(subject, sample, each) for each in logits]
    if decided[0] is None:
        return Change(name, difference, None, 0)
    same = (decided[0] == decided[1]).flatten(1).all(1) if decided[0].dim() > 1 else decided[0] == decided[1]
    return Change(name, difference, float(same.double().mean()), len(same))


def decisions(subject: Subject, sample: Sample, logits: Tensor) -> Tensor | None:
    """A head's decision for each text or token: the likeliest class, or which of several labels hold; None: regression.

    For a masked-LM head only the labelled tokens count, which are masked in its input: it sees all others.
    """
    kind, problem, one = subject.kind, subject.config.problem_type, subject.config.num_labels == 1
    if kind == "ForReplacedTokenDetection":
        return logits > 0
    if kind == "ForSequenceClassification" and (one or problem not in (None, "single_label_classification")):
        return None if (problem or "regression") == "regression" else logits > 0
    if kind == "ForQuestionAnswering":  # its sample has no padding
        logits = logits.view(sample.visible.shape)
    if kind in ("ForMaskedLM", "ForPreTraining") and len(logits) == int(sample.visible.sum()):
        logits = logits[(sample.labels["labels"] != IGNORED)[sample.visible]]
    return logits.argmax(-1)


# ---- the two models


class Models(NamedTuple):
    original: nn.Module
    prepared: nn.Module

    @classmethod
    def of(cls, subject: Subject, precision: str, skip: list[str]) -> "Models":
        original = subject.ours(torch.float32)
        return cls(original, prepare(original, precision, skip=skip))

    @property
    def packed(self) -> dict[str, PreparedLinear]:
        """The layers that are prepared, by name."""
        modules = self.prepared.named_modules()
        return {name: module for name, module in modules if isinstance(module, PreparedLinear) and module.numbers()}

    @torch.inference_mode()
    def layers(self, sample: Sample) -> list[Layer]:
        """The signal-to-noise ratio of each prepared layer, for its inputs in the original model; the worst first."""
        powers = {name: _Powers(layer) for name, layer in self.packed.items()}
        hooks = [self.original.get_submodule(name).register_forward_hook(hook) for name, hook in powers.items()]
        try:
            self.original(**sample.inputs)
        finally:
            for hook in hooks:
                hook.remove()
        layers = [Layer(name, power.decibels) for name, power in powers.items()]
        return sorted(layers, key=lambda layer: -math.inf if math.isnan(layer.sqnr) else layer.sqnr)

    def megabytes(self) -> tuple[Pair, Pair]:
        """The sizes of the prepared layers, and of the whole models."""
        plain = sum(_bytes(self.original.get_submodule(name)) for name in self.packed)
        small = sum(layer.bytes() for layer in self.packed.values())
        whole = Pair(_bytes(self.original) / 1e6, (_bytes(self.prepared) + small) / 1e6)
        return Pair(plain / 1e6, small / 1e6), whole

    @torch.inference_mode()
    def milliseconds(self, sample: Sample) -> Pair:
        """Each model's median over ROUNDS forwards, which alternate, after one warm-up forward of each."""
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 + ROUNDS):
            for model, spent in zip(self, seconds, strict=True):
                start = time.perf_counter()
                model(**sample.inputs)
                if sample.visible.is_cuda:
                    torch.cuda.synchronize()
                spent.append(time.perf_counter() - start)
        return Pair(*(1000 * statistics.median(spent[1:]) for spent in seconds))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class _Powers:
    """A forward hook of a dense layer, which adds up the powers of its output and of the prepared layer's error."""

    def __init__(self, prepared: PreparedLinear) -> None:
        self.prepared, self.signal, self.noise = prepared, 0.0, 0.0

    def __call__(self, linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        exact = output.double()
        self.signal += float(exact.square().sum())
        self.noise += float((self.prepared(*inputs).double() - exact).square().sum())

    @property
    def decibels(self) -> float:
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


# ---- the tables


def show(report: Report) -> None:
    """Prints what changed, the worst layers and, where the accuracy rule applies, its rows and the verdict."""
    console = new_console()
    title = f"{report.architecture} in {report.model}, prepared for {report.precision}: {report.batch}"
    console.print(title, highlight=False, soft_wrap=True)
    for table in (_costs(report), _layers(report), *([_rule(report)] if report.lines else [])):
        print_whole(console, table)
    broken = sum(not line.ok for line in report.lines)
    verdict = (
        f"{broken} of {len(report.lines)} rows break the accuracy rule"
        if broken
        else f"all {len(report.lines)} rows obey"
    )
    if report.lines:
        console.print(verdict, style="bold red" if broken else "bold green", highlight=False)


def _table(title: str, *columns: str):
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _costs(report: Report):
    table = _table("what preparing costs, and gives", "", "float32", report.precision)
    table.add_row("cosine of embeddings, mean", "1", f"{report.mean_cosine:.6f}")
    table.add_row("cosine of embeddings, worst", "1", f"{report.worst_cosine:.6f}")
    for change in report.changes:
        if change.same is not None:
            table.add_row(f"{change.name}: same label, of {change.count}", "100 %", f"{change.same:.1%}")
        table.add_row(f"{change.name}: largest difference", "", f"{change.difference:.2e}")
    for name, pair in (("dense layers, MB", report.dense), ("whole model, MB", report.whole)):
        table.add_row(name, *(f"{number:.1f}" for number in pair))
    place = f"{report.threads} thread{'s' if report.threads > 1 else ''}" if report.device == "cpu" else report.device
    table.add_row(f"the batch, ms ({place})", *(f"{number:.1f}" for number in report.milliseconds))
    return table


def _layers(report: Report):
    worst = report.layers[:WORST]
    title = f"signal to noise: the worst {len(worst)} of {len(report.layers)}"
    table = _table(title, "layer", "dB")
    for layer in worst:
        table.add_row(layer.name, f"{layer.sqnr:.1f}")
    return table


def _rule(report: Report):
    table = _table("the accuracy rule: largest errors", "tensor", "fastbert", "allowed", "theirs")
    for line in report.lines:
        error = f"[{'green' if line.ok else 'bold red'}]{line.error:.1e} {'ok' if line.ok else 'NO'}[/]"
        table.add_row(line.name, error, f"{line.bound:.1e}", f"{line.baseline:.1e}")
    return table
