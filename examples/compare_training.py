"""Fine-tunes all-MiniLM-L6-v2 with fastbert and with plain transformers for three tasks: how good, how fast.

    python examples/compare_training.py [--tasks classes tags answers] [--seeds 3] [--steps N] [--output DIR]

compare_tasks.py has the tasks. For each seed both libraries begin with the same weights and take the same examples in
the same order, step by step in turn: packed in fastbert, padded by transformers' own collator for its own class.
Dropout differs. Where the seeds are too noisy to tell, up to as many more are trained. Exit status 1 if, for any score,
the means of the two are further apart than MARGIN, still too noisy, or below LEARNED. fastbert's model of the first
seed is kept in DIR, for `fastbert classify`, `tag` and `answer`.
"""

import argparse
import functools
import sys
import warnings
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
import transformers
from common import Run, agreement, endless, enough_seeds, scores_of, train, writable, write_json
from compare_tasks import Task, answers, classes, tags

import fastbert
from fastbert.cli.demo import minilm
from fastbert.data import PackingCollator, create_dataloader, get_tokenizer, save_tokenizer
from fastbert.training import to_device

BATCH_SIZE, LEARNING_RATE = 8, 3e-4
MARGIN = 0.05  # of scores; two and a half standard errors of the noisiest, with three seeds
LEARNED = 0.4  # for every score; after one step none is above 0.29
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = "fastbert", "transformers"
TASKS = {"classes": classes, "tags": tags, "answers": answers}


def both_forms(collators: dict, examples: list[dict]) -> dict[str, dict]:
    """A batch for each library: packed, and padded to its longest example."""
    examples = [{name: value for name, value in one.items() if name != "word_ids"} for one in examples]
    return {name: to_device(collate(examples), DEVICE) for name, collate in collators.items()}


def new_runs(task: Task, seed: int, steps: int) -> list[Run]:
    """The runs of both libraries, from the same weights, with the same new head."""
    torch.manual_seed(seed)
    labels = {"num_labels": len(task.labels), "id2label": dict(enumerate(task.labels))} if task.labels else {}
    ours = getattr(fastbert, task.head).from_pretrained(minilm(), dtype=torch.float32, **labels)
    theirs = getattr(transformers, task.head)(transformers.BertConfig(**ours.config.to_dict()))
    theirs.load_state_dict(fastbert.hf.state_dict(ours))
    losses = {
        "fastbert": (ours.to(DEVICE), lambda batch: ours(**batch["fastbert"]).loss),
        "transformers": (theirs.to(DEVICE), lambda batch: theirs(**batch["transformers"]).loss),
    }
    return [Run(name, *both, steps, LEARNING_RATE, seed=1000 * seed) for name, both in losses.items()]


def fine_tune(task: Task, seed: int, steps: int, output: Path) -> dict:
    """Returns scores and speed of both; padding does not count as tokens. The model of the first seed is kept."""
    padding = task.padding(transformers.AutoTokenizer.from_pretrained(minilm()))
    collate = functools.partial(both_forms, {"fastbert": PackingCollator(), "transformers": padding})
    batches = list(islice(endless(create_dataloader(task.parts[0], collate, BATCH_SIZE, seed=seed)), steps))
    held_out, runs = create_dataloader(task.parts[1], collate, BATCH_SIZE, shuffle=False), new_runs(task, seed, steps)
    train(runs, batches, steps)
    tokens, places = (sum(batch[run.name]["input_ids"].numel() for batch in batches) for run in runs)
    result = {"seed": seed, "padding": 1 - tokens / places}
    for run in runs:
        scores = task.evaluate(run.model, [batch[run.name] for batch in held_out], DEVICE)
        scores = {name: scores[name] for name in ("f1", "exact_match") if name in scores}
        result[run.name] = {"scores": scores, "tokens_per_second": tokens / run.seconds, "last_loss": run.losses[-1]}
    if seed == 0:
        runs[0].model.save_pretrained(output)
        save_tokenizer(get_tokenizer(minilm()), output)
    return result


def verdict(task: str, results: list[dict]) -> dict:
    """Prints and returns the results of the seeds: the means of each score, and whether all agree and show learning."""
    found = {kind: agreement(f"{task}, {kind}", both, MARGIN) for kind, both in scores_of(results, NAMES).items()}
    agree = all([score.pop("agree") for score in found.values()])
    learned = min(score[name] for score in found.values() for name in NAMES) >= LEARNED
    speed = {name: mean(result[name]["tokens_per_second"] for result in results) for name in NAMES}
    padding, ratio = mean(result["padding"] for result in results), speed["fastbert"] / speed["transformers"]
    shown = ", ".join(f"{name} {tokens:.0f} tokens/s" for name, tokens in speed.items())
    print(f"{task}: {shown}, {ratio:.2f} x; {padding:.0%} of a padded batch is padding")
    speeds = {"tokens_per_second": speed, "speed_ratio": ratio, "padding": padding}
    if not learned:
        print(f"{task}: NOT LEARNED, expected scores of {LEARNED} or more")
    return {"agree": agree, "learned": learned, **found, **speeds, "seeds": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--steps", type=int, help="of each training, instead of the task's own number")
    parser.add_argument(
        "--seeds", type=int, default=3, help="at least 2: they say how far chance leads; then up to as many more"
    )
    parser.add_argument("--output", type=Path, default=Path("build/examples"), help="for a model of each")
    parser.add_argument("--json", type=writable, help="where to write what was measured")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds is {args.seeds}; expected at least 2")
    warnings.simplefilter("ignore", UserWarning)  # the head is new, and texts are cut, on purpose
    found = {}
    for name in args.tasks:
        task = TASKS[name]()
        steps = args.steps or task.steps
        run = functools.partial(fine_tune, task, steps=steps, output=args.output / name)
        results = enough_seeds(run, NAMES, args.seeds, MARGIN)
        found[name] = {"steps": steps, **verdict(name, results)}
    if args.json:
        write_json(args.json, found)
    return 0 if all(task["agree"] and task["learned"] for task in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
