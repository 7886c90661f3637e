"""Fine-tunes all-MiniLM-L6-v2 with fastbert and with plain transformers: how good, how fast.

    python examples/compare_training.py [--steps 80] [--seeds 3] [--json PATH]

The task is that of finetune_classifier.py: from which area of Python's documentation is a passage? For each seed both
begin with the same weights and take the same examples in the same order, each in turn: packed in fastbert, padded by
transformers' own collator for its own BertForSequenceClassification. Dropout differs. Exit status 1 where the mean
macro-F1 of the two is further apart than the best and the worst seed of either.
"""

import argparse
import functools
import itertools
import json
import platform
import sys
import warnings
from pathlib import Path
from statistics import mean

import torch
import transformers
from common import Run, train
from finetune_classifier import AREAS

import fastbert
from fastbert.cli.demo import minilm, python_documentation
from fastbert.data import ClassificationDataset, PackingCollator, create_dataloader, get_tokenizer
from fastbert.metrics import compute_precision_recall_f1
from fastbert.training import evaluating, to_device

LENGTH, BATCH_SIZE, LEARNING_RATE = 96, 8, 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def passages() -> list[ClassificationDataset]:
    """Three quarters for training, and every fourth held out."""
    found = [(text, AREAS.index(topic)) for topic, text in python_documentation(100) if topic in AREAS]
    parts = [one for i, one in enumerate(found) if i % 4], found[::4]
    tokenizer = get_tokenizer(minilm())
    return [ClassificationDataset(*zip(*part, strict=True), tokenizer, max_length=LENGTH) for part in parts]


def both_forms(collators: dict, examples: list[dict]) -> dict[str, dict]:
    """A batch for each: packed, and padded to its longest example."""
    return {name: to_device(collate(examples), DEVICE) for name, collate in collators.items()}


def new_runs(seed: int, steps: int) -> list[Run]:
    """Of the same weights, with the same new classifier."""
    torch.manual_seed(seed)
    ours = fastbert.BertForSequenceClassification.from_pretrained(minilm(), dtype=torch.float32, num_labels=len(AREAS))
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**ours.config.to_dict()))
    theirs.load_state_dict(fastbert.hf.state_dict(ours))
    losses = {
        "fastbert": (ours.to(DEVICE), lambda batch: ours(**batch["fastbert"]).loss),
        "transformers": (theirs.to(DEVICE), lambda batch: theirs(**batch["transformers"]).loss),
    }
    return [Run(name, *both, steps, LEARNING_RATE, seed=1000 * seed) for name, both in losses.items()]


def stream(loader):
    """Without end, in a new order in each epoch."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def fine_tune(seed: int, steps: int) -> dict:
    """Macro-F1 and speed of both; a token of padding is none."""
    padding = transformers.DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained(minilm()))
    collate = functools.partial(both_forms, {"fastbert": PackingCollator(), "transformers": padding})
    training, held_out = (create_dataloader(part, collate, BATCH_SIZE, seed=seed) for part in passages())
    batches, held_out, runs = list(itertools.islice(stream(training), steps)), list(held_out), new_runs(seed, steps)
    train(runs, batches, steps)
    tokens, places = (sum(batch[run.name]["input_ids"].numel() for batch in batches) for run in runs)
    result = {"seed": seed, "padding": 1 - tokens / places}
    for run in runs:
        with evaluating(run.model):
            guesses = torch.cat([run.model(**batch[run.name]).logits.argmax(-1) for batch in held_out])
        labels = torch.cat([batch[run.name]["labels"] for batch in held_out])
        f1 = compute_precision_recall_f1(guesses, labels, num_classes=len(AREAS)).f1
        result[run.name] = {"macro_f1": f1, "tokens_per_second": tokens / run.seconds, "last_loss": run.losses[-1]}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2: they say how far chance leads")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds is {args.seeds}; expected at least 2")
    warnings.simplefilter("ignore", UserWarning)  # the classifier is new, and texts are cut: that is the point
    results = [fine_tune(seed, args.steps) for seed in range(args.seeds)]
    speed, scores = {}, {}
    for name in ("fastbert", "transformers"):
        scores[name] = [result[name]["macro_f1"] for result in results]
        speed[name] = mean(result[name]["tokens_per_second"] for result in results)
        low, high = min(scores[name]), max(scores[name])
        print(f"{name:13} macro-F1 {mean(scores[name]):.3f} ({low:.3f} to {high:.3f}), {speed[name]:.0f} tokens/s")
    spread = max(max(of_seeds) - min(of_seeds) for of_seeds in scores.values())
    apart = abs(mean(scores["fastbert"]) - mean(scores["transformers"]))
    ratio, padding = speed["fastbert"] / speed["transformers"], mean(result["padding"] for result in results)
    print(f"training speed, fastbert / transformers: {ratio:.2f} x, where {padding:.0%} of a padded batch is padding")
    print(f"the means are {apart:.3f} apart, seeds {spread:.3f}: {'they agree' if apart <= spread else 'TOO FAR'}")
    if args.json:
        found = {"apart": apart, "spread": spread, "speed_ratio": ratio, "steps": args.steps, "seeds": results}
        found |= {"device": DEVICE, "processor": platform.processor(), "threads": torch.get_num_threads()}
        found |= {part.__name__: part.__version__ for part in (fastbert, torch, transformers)}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2))
    return 0 if apart <= spread else 1


if __name__ == "__main__":
    sys.exit(main())
