"""Code that the training examples share: mainly a training in pure PyTorch beside fastbert's, and their comparison.

The plain run is `fastbert/reference.py` on the padded batch, without any of fastbert's operations. Dropout is on: its
masks are made by `fastbert.random`, in plain PyTorch, from the same key that fastbert's forward draws. Training
amplifies rounding errors, so a third run, `nudged`, shows how much: it is the plain run, but before each step every
weight is moved by one unit in its last place. (Moved only once, it is too near: each step of any other implementation
rounds differently.) Two curves coincide if fastbert stays about as near to the plain run (see FACTOR).
"""

import argparse
import copy
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
import transformers
from torch import Tensor, nn

import fastbert
from fastbert import random, reference
from fastbert.training import AMPTrainer, linear_schedule, parameter_groups

FACTOR = 3  # times nudged's distance is allowed, as for gradients in the accuracy rule (fastbert/testing.py)
ROUNDINGS = 4  # of the loss are allowed on top: early on, nudged often has the very same loss


def options(doc: str, **more: int) -> argparse.Namespace:
    """Parses --steps, --output (a folder, which is created) and other numbers. doc: starts with the description."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in {"steps": 300, **more}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=Path("build/examples"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def writable(name: str) -> Path:
    """A path, as an option's `type`. Its folder is created at once, so that nothing fails after hours of training."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def fit(model: nn.Module, loader, steps: int, lr: float) -> None:
    """Trains as most people do. The loader's order and dropout depend on the seeds alone."""
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=lr))
    schedule = linear_schedule(optimizer, steps // 10, steps)
    with tempfile.TemporaryDirectory() as checkpoints:  # none of these runs is long enough to keep them
        AMPTrainer(model, optimizer, schedule, output_dir=checkpoints).train(loader, max_steps=steps)


def endless(loader):
    """Yields the loader's batches without end, in a new order in each epoch."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


class PlainBert(nn.Module):
    """reference.py's BERT on the batches of PackingCollator, padded, with fastbert's dropout. Subclasses add heads."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.bert = config, reference.BertModel(config)

    def encode(self, batch: dict) -> tuple[Tensor, Tensor]:
        """The last hidden state of real tokens (T, C), and the pooled output (B, C)."""
        lengths = batch["cu_seqlens"].diff().long()
        visible = torch.arange(batch["max_seqlen"]) < lengths[:, None]
        ids = torch.zeros(visible.shape, dtype=torch.int64).masked_scatter(visible, batch["input_ids"])
        masks = dropout_masks(self.config, random.new_key(), visible) if self.training else None
        states, pooled = self.bert(ids, visible, masks=masks)
        return states[-1][visible], pooled


def dropout_masks(config, key: Tensor, visible: Tensor) -> dict[int, Tensor]:
    """Dropout masks by the contract of fastbert.random, for every site, on the grid of a padded batch."""
    (batch, seqlen), tokens = visible.shape, int(visible.sum())
    p, q = config.hidden_dropout_prob, config.attention_probs_dropout_prob

    def rows(site: int) -> Tensor:
        kept = random.row_keep(key, site, tokens, config.hidden_size, p) * random.keep_scale(p, random.ROW_BITS)
        return torch.ones(batch, seqlen, config.hidden_size).masked_scatter(visible[..., None], kept.float())

    masks = {random.EMBEDDING_SITE: rows(random.EMBEDDING_SITE)}
    for layer in range(config.num_hidden_layers):
        weights, *others = random.layer_sites(layer)
        keep = random.attention_keep(key, weights, batch, config.num_attention_heads, seqlen, q)
        masks[weights] = keep * random.keep_scale(q, random.ATTENTION_BITS)
        masks |= {site: rows(site) for site in others}
    return masks


class Run:
    """A model in training: its optimizer, its losses, its seconds. loss: a function that returns a batch's loss. A run
    called "nudged" is nudged before each step."""

    def __init__(self, name: str, model: nn.Module, loss, steps: int, lr: float, seed: int = 0) -> None:
        self.name, self.model, self.loss, self.seed = name, model.train(), loss, seed
        self.optimizer = torch.optim.AdamW(parameter_groups(model, lr=lr))
        warm = max(1, steps // 10)
        schedule = lambda step: min((step + 1) / warm, (steps - step) / (steps - warm + 1))  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.losses, self.seconds = [], 0.0

    def step(self, batch: dict) -> None:
        if self.name == "nudged":
            nudge(self.model)
        start = time.perf_counter()
        torch.manual_seed(self.seed + len(self.losses))  # decides all dropout of this step
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Moves every weight to the next number of its dtype, up or down at random."""
    for parameter in model.parameters():
        up = torch.rand_like(parameter) < 0.5
        parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))


def three_runs(model: nn.Module, plain: nn.Module, steps: int, lr: float) -> list[Run]:
    """The runs fastbert, plain and nudged, all from the same weights."""
    nudged = copy.deepcopy(plain)
    losses = {
        "fastbert": (model, lambda batch: model(**batch).loss),
        "plain": (plain, plain),
        "nudged": (nudged, nudged),
    }
    return [Run(name, part, loss, steps, lr) for name, (part, loss) in losses.items()]


def train(runs: list[Run], batches, steps: int) -> None:
    """Trains all runs on the same batches, step by step, with a progress bar; which run goes first alternates."""
    from rich.progress import Progress

    with Progress(*Progress.get_default_columns(), "loss {task.fields[loss]:.3f}") as bar:
        task = bar.add_task("training, each in turn", total=steps, loss=0.0)
        for step, batch in zip(range(steps), batches, strict=False):
            for run in runs[:: -1 if step % 2 else 1]:
                run.step(batch)
            bar.update(task, advance=1, loss=runs[0].losses[-1])


def verdict(runs: list[Run], path: Path) -> int:
    """Plots the curves, prints how far they are apart; returns 0 if they coincide, else 1. runs: as of three_runs."""
    shared = len(runs[1].losses)  # fastbert's run may be longer
    losses = [torch.tensor(run.losses[:shared], dtype=torch.float64) for run in runs]
    apart, drift = ((curve - losses[1]).abs() for curve in (losses[0], losses[2]))
    plot(runs, apart, drift, path)
    for run in runs:
        pace = f"{run.seconds / len(run.losses) * 1e3:6.0f} ms a step"
        print(f"{run.name:9}{pace}, loss at step {shared}: {run.losses[shared - 1]:.6f}")
    # Compared at every step, so that an early difference is not excused by how far rounding has led by the end.
    allowed = FACTOR * drift.cummax(0).values + ROUNDINGS * torch.finfo(torch.float32).eps * losses[1].max()
    ok = bool((apart <= allowed).all())  # False for NaN
    print(f"largest difference of the losses over {shared} steps: fastbert {apart.max():.1e}, nudged {drift.max():.1e}")
    print(f"allowed at each step: {FACTOR} x the largest of nudged so far, and {ROUNDINGS} roundings of the loss")
    print(f"the curves {'coincide' if ok else 'DO NOT COINCIDE'} ({path})")
    return 0 if ok else 1


def agreement(what: str, scores: dict[str, list[float]], margin: float) -> dict:
    """Prints and returns two libraries' means over the seeds, and whether they agree within a margin.

    Of one seed both have the same weights and batches, so their differences are compared, seed by seed. The mean of the
    differences must be within the margin, and its standard error within half of it, so that noise does not hide a
    difference.
    """
    means = {name: mean(of_seeds) for name, of_seeds in scores.items()}
    apart, error = difference(scores)
    agree = apart <= margin and not is_noisy(scores, margin)
    spread = max(max(of_seeds) - min(of_seeds) for of_seeds in scores.values())
    shown = (f"{name} {means[name]:.3f} ({min(x):.3f} to {max(x):.3f})" for name, x in scores.items())
    found = f"{apart:.3f} ± {error:.3f} apart, {margin} allowed: {'they agree' if agree else 'TOO FAR, OR TOO NOISY'}"
    print(f"{what}: {', '.join(shown)}; {found}")
    return means | {"apart": apart, "standard_error": error, "spread": spread, "agree": agree}


def difference(scores: dict[str, list[float]]) -> tuple[float, float]:
    """How far the means of two libraries are apart, and the standard error of that."""
    differences = [ours - theirs for ours, theirs in zip(*scores.values(), strict=True)]
    return abs(mean(differences)), stdev(differences) / len(differences) ** 0.5


def is_noisy(scores: dict[str, list[float]], margin: float) -> bool:
    return difference(scores)[1] > margin / 2


def scores_of(results: list[dict], names: tuple[str, str]) -> dict[str, dict[str, list[float]]]:
    """The scores of two libraries for each seed, by the kind of score."""
    kinds = results[0][names[0]]["scores"]
    return {kind: {name: [result[name]["scores"][kind] for result in results] for name in names} for kind in kinds}


def enough_seeds(run: Callable[[int], dict], names: tuple[str, str], seeds: int, margin: float) -> list[dict]:
    """run(seed) for so many seeds, and for up to as many more while a score is too noisy to tell (`agreement`)."""
    results = []
    for seed in range(2 * seeds):
        if seed < seeds or any(is_noisy(both, margin) for both in scores_of(results, names).values()):
            results.append(run(seed))
    return results


def write_json(path: Path, found: dict) -> None:
    """Writes JSON with a line for each entry, and with the versions, device and threads of the measurement."""
    found = found | {part.__name__: part.__version__ for part in (fastbert, torch, transformers)}
    found |= {"python": platform.python_version()}  # its documentation is the text of some examples
    found |= {"device": "cuda" if torch.cuda.is_available() else "cpu", "threads": torch.get_num_threads()}
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def plot(runs: list[Run], apart: Tensor, drift: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, on a machine without a screen
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    for run, style in zip(runs[:2], ("-", "--"), strict=True):
        above.plot(run.losses, style, label=run.name)
    above.set_ylabel("training loss")
    for name, values in (("fastbert", apart), ("nudged", drift)):
        below.semilogy(values.clamp(min=1e-9), label=f"{name} - plain")
    below.set(xlabel="step", ylabel="difference of the losses")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
