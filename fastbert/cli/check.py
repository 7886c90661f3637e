"""`fastbert check`: the accuracy rule applied to a user's checkpoint and text.

For every dtype and backend that runs on this machine, it computes hidden states, logits, the loss and all gradients of
a padded batch, in evaluation mode. The truth is transformers' eager model in float64, with weights rounded to the
dtype; for a BERT, `reference.py` must agree with it. The bounds (`fastbert.testing`) come from the errors of
transformers' eager and SDPA models in that dtype; for float32 on a CPU, they cover both of PyTorch's matrix libraries.
fastbert and transformers each read the checkpoint, so fastbert's conversion of it is checked as well.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastbert
from fastbert import backends, checkpoint, reference, testing
from fastbert.auto import classes_of
from fastbert.checkpoint import Checkpoint
from fastbert.cli.common import new_console
from fastbert.config import BertConfig
from fastbert.files import write_text
from fastbert.labels import IGNORED
from fastbert.model import BertModel, Saveable
from fastbert.testing import Result, Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DEFAULT = "default"  # no backend forced
BACKENDS = (DEFAULT, *backends.BACKENDS)
TRUTH = "truth"  # instead of a backend: reference.py against transformers, in float64
_LOGITS = {  # our name -> transformers', where they differ
    name: {"seq_relationship_logits": "sop_logits"}.get(name)
    for name in ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")
}
_OF_TOKENS = {"ForQuestionAnswering", "ForReplacedTokenDetection"}  # logits (B, S), no classes
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "spm.model", "sentencepiece.bpe.model", "spiece.model")


@dataclass(frozen=True)
class Line(Row):
    """A row of the report. difference: between fastbert and transformers with SDPA in the same dtype."""

    difference: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Check:
    """The result for one dtype and backend. kernels: the operations that each backend ran."""

    dtype: str
    backend: str
    lines: list[Line]
    kernels: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)


@dataclass(frozen=True)
class Omission:
    """A dtype and backend that was not checked, and why."""

    dtype: str
    backend: str
    reason: str


@dataclass
class Report:
    """The results of `run`. ok: a backend was checked, and every row obeys the rule."""

    model: str
    architecture: str
    device: str
    batch: str
    checks: list[Check] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.compared and all(check.ok for check in self.checks)

    @property
    def compared(self) -> bool:
        """Whether any backend was checked: a backend that is named may not run here."""
        return any(check.backend != TRUTH for check in self.checks)

    def write(self, path: Path, **about: object) -> None:
        """Writes JSON. about: further entries (versions, machine)."""
        values = {"ok": self.ok, **about, **asdict(self)}
        for check, written in zip(self.checks, values["checks"], strict=True):
            for line, row in zip(check.lines, written["lines"], strict=True):
                row["ok"] = line.ok
        write_report(path, values)


def write_report(path: Path, values: dict[str, object]) -> None:
    write_text(path, json.dumps(_finite(values), indent=1) + "\n")


def _finite(value):
    """NaN and infinity as strings, as JSON has neither."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run(
    directory: str | Path,
    texts: list[str],
    *,
    device: str = "cpu",
    dtypes: list[str] = tuple(DTYPES),
    names: list[str] = BACKENDS,
    max_length: int = 128,
    tell: Callable[[str], None] = lambda what: None,
) -> Report:
    """Checks a model and its tokenizer, from a directory or by a name on the hub, on one batch of texts.

    dtypes: from DTYPES. names: from BACKENDS. max_length: in tokens; longer texts are cut. tell: called before each
    run with its name. Raises FileNotFoundError, ValueError and RuntimeError for a model, tokenizer or texts that
    cannot be used.
    """
    torch.empty(0, device=device)  # reports a missing device before a model is read
    subject = Subject.read(directory, device)
    sample = make_sample(subject, texts, max_length)
    mask = sample.inputs["attention_mask"]
    batch = f"{len(texts)} texts, {int(mask.sum())} tokens, padded to {' x '.join(map(str, mask.shape))}"
    report = Report(str(directory), subject.name, device, batch)
    for dtype in dtypes:
        tell(f"{dtype}: transformers")
        try:
            yardstick = Yardstick.measure(subject, DTYPES[dtype], sample)
        except _NotFinite as problem:
            report.omissions.append(Omission(dtype, "all", str(problem)))
            continue
        report.checks += [Check(dtype, TRUTH, [line]) for line in yardstick.reference]
        for name in names:
            tell(f"{dtype}: {name}")
            found = _repeats(report, dtype, name) or _check(subject, dtype, name, sample, yardstick)
            (report.checks if isinstance(found, Check) else report.omissions).append(found)
    return report


def _repeats(report: Report, dtype: str, name: str) -> Omission | None:
    """Skips a backend if the default run used only this backend."""
    found = next((c for c in report.checks if (c.dtype, c.backend) == (dtype, DEFAULT)), None)
    return Omission(dtype, name, f"that is what {DEFAULT} ran") if found and list(found.kernels) == [name] else None


# ---- the model, in both libraries


class Subject(NamedTuple):
    """A checkpoint, and the class that its config.json names."""

    found: Checkpoint
    ours_class: type[Saveable]
    arguments: dict[str, bool]  # for from_pretrained, in both libraries
    device: str

    @classmethod
    def read(cls, source: str | Path, device: str) -> "Subject":
        found = checkpoint.load(source)
        family, names = found.config.family, found.config.extra.get("architectures") or ()
        known = classes_of(family)
        ours_class = next((known[name] for name in names if name in known), BertModel)
        pools = ours_class is BertModel and family.pooler_dense
        return cls(found, ours_class, {"add_pooling_layer": found.has_pooler} if pools else {}, device)

    @property
    def config(self) -> BertConfig:
        return self.found.config

    @property
    def kind(self) -> str:
        """The class without its prefix: "Model", or one of the family's heads."""
        return self.ours_class.kind

    @property
    def name(self) -> str:
        """transformers' name of the class."""
        return self.config.family.class_name(self.kind)

    def ours(self, dtype: torch.dtype) -> Saveable:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = self.ours_class.from_pretrained(self.found, dtype=dtype, **self.arguments)
        if caught:  # missing parameters are random, and differ between the libraries
            raise ValueError(str(caught[0].message))
        return model.to(self.device)

    def theirs(self, dtype: torch.dtype, attention: str):
        """transformers' model. attention: the implementation; ignored for DeBERTa and MPNet, which have only one."""
        import transformers

        attention = "eager" if self.config.family.relative else attention
        options = {"attn_implementation": attention, "local_files_only": True, **self.arguments}
        with _quiet():
            model = getattr(transformers, self.name).from_pretrained(self.found.directory, dtype=dtype, **options)
        return model.to(self.device).eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' progress bars and its lists of unused weights."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


# ---- the batch


class Sample(NamedTuple):
    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    visible: Tensor  # (sequences, S) bool
    of_tokens: bool  # whether all logits are (B, S)


def make_sample(subject: Subject, texts: list[str], max_length: int) -> Sample:
    """The texts as a padded batch with labels for the model's head."""
    pairs = subject.kind == "ForMultipleChoice"
    texts = texts[: len(texts) // 2 * 2] if pairs else texts
    if not texts:
        raise ValueError("expected at least one text to check on (two for multiple choice)")
    tokenizer = _tokenizer(subject.found.directory)
    inputs = _inputs(subject, tokenizer, texts, max_length)
    visible = inputs["attention_mask"].bool()
    labels = _labels(subject, inputs, visible)
    if subject.kind == "ForMaskedLM" and tokenizer.mask_token_id is not None:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(labels["labels"] != IGNORED, tokenizer.mask_token_id)
    if pairs:
        inputs = {name: value.unflatten(0, (-1, 2)) for name, value in inputs.items()}
    moved = ({name: tensor.to(subject.device) for name, tensor in part.items()} for part in (inputs, labels))
    return Sample(*moved, visible.to(subject.device), subject.kind in _OF_TOKENS)


def _inputs(subject: Subject, tokenizer, texts: list[str], max_length: int) -> dict[str, Tensor]:
    limit = min(max_length, subject.config.max_sequence_length)
    if limit <= 2:
        raise ValueError(f"max_length is {limit}; expected more than the special tokens")
    if subject.kind == "ForQuestionAnswering":  # avoids padding, which transformers scores and fastbert does not
        limit = min(map(len, tokenizer(texts, truncation=True, max_length=limit)["input_ids"]))
    inputs = tokenizer(
        texts,
        truncation=True,
        max_length=limit,
        padding=True,
        padding_side="right",
        return_token_type_ids=subject.config.family.token_types,
        return_attention_mask=True,
        return_tensors="pt",
    )
    largest, vocabulary = int(inputs["input_ids"].max()), subject.config.vocab_size
    if largest >= vocabulary:
        raise ValueError(f"the tokenizer gives id {largest}, the model embeds {vocabulary} tokens")
    return dict(inputs)


def _tokenizer(directory: Path):
    from transformers import AutoTokenizer

    if not any((directory / name).exists() for name in _TOKENIZERS):  # transformers would make one up
        raise FileNotFoundError(f"{directory} has no tokenizer: expected one of {', '.join(_TOKENIZERS)}")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged tokenizer can raise anything
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error


def _labels(subject: Subject, inputs: dict[str, Tensor], visible: Tensor) -> dict[str, Tensor]:
    """Labels for the head's loss: every fifth token, or classes in turn; {} without a head."""
    batch, seqlen = visible.shape
    classes, row, column = subject.config.num_labels, torch.arange(batch), torch.arange(seqlen)
    chosen = visible & (column % 5 == 1)
    words = inputs["input_ids"].masked_fill(~chosen, IGNORED)
    match subject.kind:
        case "ForMaskedLM":
            return {"labels": words}
        case "ForPreTraining":
            return {"labels": words, subject.config.family.heads[subject.kind].pair_label: row % 2}
        case "ForReplacedTokenDetection":
            return {"labels": chosen.long().masked_fill(~visible, IGNORED)}
        case "ForNextSentencePrediction":
            return {"labels": row % 2}
        case "ForMultipleChoice":
            return {"labels": row[: batch // 2] % 2}
        case "ForTokenClassification":
            return {"labels": ((row[:, None] + column) % classes).masked_fill(~visible, IGNORED)}
        case "ForQuestionAnswering":
            return {"start_positions": row % seqlen, "end_positions": (row + seqlen // 2) % seqlen}
        case "ForSequenceClassification":
            return {"labels": _classes(subject.config, row)}
    return {}


def _classes(config: BertConfig, row: Tensor) -> Tensor:
    classes = config.num_labels
    problem = config.problem_type or ("regression" if classes == 1 else "single_label_classification")
    if problem == "single_label_classification":
        return row % classes
    several = ((row[:, None] + torch.arange(classes)) % 3 == 0).float()
    return several.squeeze(1) if classes == 1 else several


# ---- a run, and transformers' runs to compare it with


class Run(NamedTuple):
    """states: hidden states and pooled output. scores: logits and loss, whose bounds use another factor."""

    states: dict[str, Tensor]
    scores: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the parameters
    at_scores: dict[str, Tensor]  # gradients of the logits that the loss depends on


def compute(model: torch.nn.Module, sample: Sample) -> Run:
    """Runs either library's model forward, and backward from its loss or, without a loss, from random signs."""
    dtype = next(model.parameters()).dtype
    labels = {name: t.to(dtype) if t.is_floating_point() else t for name, t in sample.labels.items()}
    out = model(**sample.inputs, **labels, output_hidden_states=True)
    states, logits = _states(out, sample), _logits(out)
    for tensor in logits.values():
        tensor.retain_grad()
    scores = _scores(logits, sample)
    if sample.labels:
        scores["loss"] = out.loss.to(dtype)  # ours is float32 or better
        out.loss.backward()
    else:
        ends = list(states.values())[len(out.hidden_states) - 1 :]
        torch.autograd.backward(ends, [_signs(end) for end in ends])
    parameters = model.named_parameters(remove_duplicate=False)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}
    if isinstance(model, Saveable):
        gradients = model.to_hugging_face(gradients)
    detached = ({name: t.detach() for name, t in part.items()} for part in (states, scores))
    return Run(*detached, gradients, {f"d{name}": t.grad for name, t in logits.items() if t.grad is not None})


@torch.no_grad()
def predict(model: torch.nn.Module, sample: Sample) -> Run:
    """Runs only the forward of either library's model, without loss and gradients."""
    out = model(**sample.inputs, output_hidden_states=True)
    return Run(_states(out, sample), _scores(_logits(out), sample), {}, {})


def _states(out, sample: Sample) -> dict[str, Tensor]:
    states = {f"hidden state {i}": state[sample.visible] for i, state in enumerate(out.hidden_states)}
    pooled = getattr(out, "pooler_output", None)
    return states if pooled is None else states | {"pooled output": pooled}


def _logits(out) -> dict[str, Tensor]:
    logits = {name: getattr(out, name, getattr(out, other or name, None)) for name, other in _LOGITS.items()}
    return {name: tensor for name, tensor in logits.items() if tensor is not None}


def _scores(logits: dict[str, Tensor], sample: Sample) -> dict[str, Tensor]:
    """The logits; those with one row per token lose their padding: (tokens, ...)."""
    return {name: t[sample.visible] if t.dim() == 3 or sample.of_tokens else t for name, t in logits.items()}


def _signs(output: Tensor) -> Tensor:
    """Random 2^-8 and -2^-8, which are exact in every dtype and small enough for gradients in float16."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, output.shape, generator=generator) * 2 - 1
    return (signs / 256).to(output.device, output.dtype)


class _NotFinite(ValueError):
    """transformers' result has NaN or infinity, so there is nothing to compare with."""


class Yardstick(NamedTuple):
    truth: Run
    contenders: list[Run]  # transformers in the dtype, first with SDPA
    reference: list[Line]  # one for a BERT, none for other families

    @classmethod
    def measure(
        cls, subject: Subject, dtype: torch.dtype, sample: Sample, run: Callable[..., Run] = compute
    ) -> "Yardstick":
        """Runs transformers' models. run: `compute`, or `predict` for the forward alone."""
        exact = subject.theirs(dtype, "eager").double()
        truth, lines = run(exact, sample), []
        if subject.config.model_type == "bert":
            lines.append(_reference_line(subject, exact, sample))
        if subject.kind == "ForReplacedTokenDetection" and "loss" in truth.scores:  # transformers rounds it to float32
            labels = sample.labels["labels"][sample.visible].double()
            truth.scores["loss"] = F.binary_cross_entropy_with_logits(truth.scores["logits"], labels)
        models = [subject.theirs(dtype, "sdpa"), subject.theirs(dtype, "eager")]
        if subject.device == "cpu" and dtype == torch.float32:
            models.append(testing.on_onednn(subject.theirs(dtype, "sdpa")))
        contenders = [run(model, sample) for model in models]
        for name, tensor in ((name, t) for found in contenders for part in found for name, t in part.items()):
            if not tensor.isfinite().all():
                raise _NotFinite(f"transformers' own {name} is not finite")
        return cls(truth, contenders, lines)


def _reference_line(subject: Subject, exact: torch.nn.Module, sample: Sample) -> Line:
    """The worst of reference.py's hidden states in float64, compared with the truth."""
    inputs = {name: value.flatten(0, -2) for name, value in sample.inputs.items()}
    with torch.device("meta"):
        model = reference.BertModel(subject.config)
    body = exact.base_model.state_dict()
    if not any(name.startswith("pooler.") for name in body):
        model.pooler = torch.nn.Identity()
    model.load_state_dict(body, assign=True)
    with torch.no_grad():
        states, _ = model.eval()(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
        truths = exact.base_model(**inputs, output_hidden_states=True).hidden_states
    ours, truth = (
        Result({f"hidden state {i}": state[sample.visible] for i, state in enumerate(part)}, {})
        for part in (states, truths)
    )
    worst = max(testing.compare(ours, truth, []), key=_badness)
    return Line(f"reference.py, worst: {worst.name}", worst.error, worst.bound, worst.baseline)


def _check(subject: Subject, dtype: str, name: str, sample: Sample, yardstick: Yardstick) -> Check | Omission:
    before = backends.calls()
    model = subject.ours(DTYPES[dtype])
    try:
        with fastbert.backend(None if name == DEFAULT else name):
            mine = compute(model, sample)
    except RuntimeError as error:
        refusal = f"backend {name!r} cannot run "
        if not str(error).startswith(refusal):
            raise
        return Omission(dtype, name, str(error).removeprefix(refusal))
    return Check(dtype, name, rule(mine, yardstick), _kernels(before))


def rule(mine: Run, yardstick: Yardstick) -> list[Line]:
    """Applies the rule to every output and gradient; returns a row for each output and for the worst gradient only."""
    truth, contenders = yardstick.truth, yardstick.contenders
    # The scale includes the gradients of the logits: a classifier's bias gets their sum, which may cancel to 0.
    scale = truth.at_scores
    states, scores = (
        testing.compare(*_results((mine, truth), part, scale), _results(contenders, part, scale), factor=factor)
        for part, factor in (("states", 3.0), ("scores", 2.0))
    )
    sdpa = contenders[0]
    rows = [row for row in states if row.name in mine.states] + [row for row in scores if row.name in mine.scores]
    outputs = [_line(row, mine.states | mine.scores, sdpa.states | sdpa.scores) for row in rows]
    gradients = [row for row in states if row.name in mine.gradients]
    if not gradients:
        return outputs
    worst = max(gradients, key=_badness)
    obey = f"worst; {sum(row.ok for row in gradients)} of {len(gradients)} gradients obey"
    return [*outputs, _line(worst, mine.gradients, sdpa.gradients, obey)]


def _results(runs: Iterable[Run], part: str, scale: dict[str, Tensor]) -> list[Result]:
    """States with gradients, or only scores. scale: more gradients, to include in the search for the largest."""
    return [Result(getattr(run, part), run.gradients | scale if part == "states" else {}) for run in runs]


def _line(row: Row, ours: dict[str, Tensor], theirs: dict[str, Tensor], note: str = "") -> Line:
    difference = float((ours[row.name].double() - theirs[row.name].double()).abs().max())
    return Line(row.name, row.error, row.bound, row.baseline, difference, note)


def _badness(row: Row) -> float:
    """The share of its bound that an error uses; NaN is the worst."""
    if math.isnan(row.error):
        return math.inf
    return row.error / row.bound if row.bound else row.error


def _kernels(before: dict[tuple[str, str], int]) -> dict[str, list[str]]:
    ran = sorted((name, op) for (op, name), n in backends.calls().items() if n > before.get((op, name), 0))
    return {name: [op for other, op in ran if other == name] for name, _ in ran}


# ---- the table


def show(report: Report) -> None:
    """Prints a table for each dtype, what was not checked, and the verdict."""
    console = new_console()
    title = f"{report.architecture} in {report.model}, on {report.device}: {report.batch}"
    console.print(title, highlight=False, soft_wrap=True)
    for dtype in dict.fromkeys(check.dtype for check in report.checks):
        print_whole(console, _table(dtype, [check for check in report.checks if check.dtype == dtype]))
    for omission in report.omissions:
        line = f"not checked: {omission.dtype}, {omission.backend}: {omission.reason}"
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    lines = [line for check in report.checks for line in check.lines]
    broken = sum(not line.ok for line in lines)
    verdict = f"{broken} of {len(lines)} rows break the accuracy rule" if broken else f"all {len(lines)} rows obey"
    verdict = verdict if report.compared else "no backend was checked"
    console.print(verdict, style="bold green" if report.ok else "bold red", highlight=False)


def print_whole(console, table) -> None:
    """Prints a table whose names stay whole, to be searched and copied; a narrow terminal then wraps its lines."""
    from rich.measure import Measurement

    before = console.width
    console.width = max(before, Measurement.get(console, console.options.update(max_width=1000), table).minimum)
    console.print(table)
    console.width = before


def _table(dtype: str, checks: list[Check]):
    from rich import box
    from rich.table import Table

    title = f"{dtype}: largest errors, and how far fastbert and transformers are apart"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("backend", no_wrap=True)
    words = [word for check in checks for line in check.lines for word in line.name.split()]
    table.add_column("tensor", min_width=max(map(len, words)))
    for column in ("fastbert", "allowed", "theirs", "apart"):
        table.add_column(column, justify="right", no_wrap=True)
    for check in checks:
        for i, line in enumerate(check.lines):
            error = f"[{'green' if line.ok else 'bold red'}]{line.error:.1e} {'ok' if line.ok else 'NO'}[/]"
            numbers = [f"{number:.1e}" for number in (line.bound, line.baseline, line.difference)]
            if check.backend == TRUTH:
                numbers[1:] = ["", ""]
            last = i == len(check.lines) - 1
            name = f"{line.name} ({line.note})" if line.note else line.name
            table.add_row("" if i else check.backend, name, error, *numbers, end_section=last)
    return table


def default_texts(count: int) -> list[str]:
    """Passages of Python's documentation of increasing length, so that there is padding."""
    from fastbert.cli.demo import python_documentation

    passages = [passage for _, passage in python_documentation()]
    chosen = passages[:: max(1, len(passages) // count)][:count]
    return [passage[: 60 + 540 * (i + 1) // count] for i, passage in enumerate(chosen)]


def spread(texts: list[str], count: int) -> list[str]:
    """At most `count` texts that are not blank, spread over the whole list."""
    texts = [text for text in texts if text.strip()]
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]
