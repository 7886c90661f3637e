"""Tags functions, keywords and exceptions with a DeBERTa: transformers' own model, as it is and accelerated.

    python examples/tag_with_deberta.py [--model DIR_OR_NAME] [--steps 80] [--output DIR]

Both begin with the same weights and take the same padded batches, in turn, without dropout. Without --model, the model
is a small DeBERTa-v3 with random weights and all-MiniLM-L6-v2's tokenizer; a directory or a name on the hub, such as
"microsoft/deberta-v3-base", gives a pretrained model with its own tokenizer. compare_tasks.py has the data. Exit status
1 if the loss curves differ by more than a change of all weights in their last place explains (common.py), or the scores
by more than 0.02. The accelerated model is kept in DIR.
"""

import argparse
import copy
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import transformers
from common import Run, endless, train, verdict
from compare_tasks import TAGS, tag_examples

import fastbert
from fastbert import BertConfig, metrics
from fastbert.cli.demo import minilm
from fastbert.data import TokenClassificationDataset, create_dataloader, get_tokenizer, save_tokenizer
from fastbert.training import to_device

BATCH_SIZE, LEARNING_RATE, LONGEST = 8, 3e-4, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def new_model(name: str | None) -> transformers.PreTrainedModel:
    labels = {"num_labels": len(TAGS), "id2label": dict(enumerate(TAGS))}
    if name is not None:
        kind = transformers.AutoModelForTokenClassification
        return kind.from_pretrained(name, dtype=torch.float32, **labels, **NO_DROPOUT)
    config = BertConfig.preset("microsoft/deberta-v3-small").changed(**SMALL, **NO_DROPOUT, **labels, vocab_size=30522)
    return transformers.DebertaV2ForTokenClassification(transformers.DebertaV2Config(**config.to_dict()))


def loaders(name: str | None) -> list:
    """The loaders of padded batches for training, and of held-out ones."""
    source = name or minilm()
    tokenizer, padding = get_tokenizer(source), transformers.AutoTokenizer.from_pretrained(source)
    pad = transformers.DataCollatorForTokenClassification(padding)

    def collate(examples: list[dict]) -> dict:
        wanted = "input_ids", "labels"
        batch = pad([{name: one[name] for name in wanted} for one in examples])
        return to_device(dict(batch), DEVICE)

    parts = [
        TokenClassificationDataset(*zip(*part, strict=True), tokenizer, max_length=LONGEST) for part in tag_examples()
    ]
    return [create_dataloader(part, collate, BATCH_SIZE, shuffle=part is parts[0]) for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory, or a name on the hub, of a DeBERTa-v2 or v3")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", type=Path, default=Path("build/examples/deberta"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    plain, (training, held_out) = new_model(args.model).to(DEVICE), loaders(args.model)
    models = {"fastbert": copy.deepcopy(plain), "plain": plain, "nudged": copy.deepcopy(plain)}
    report = fastbert.accelerate(models["fastbert"])
    runs = [
        Run(name, model, lambda batch, model=model: model(**batch).loss, args.steps, LEARNING_RATE)
        for name, model in models.items()
    ]
    train(runs, islice(endless(training), args.steps), args.steps)
    print(report)
    evaluate = partial(metrics.evaluate_entity_metrics, id2label=TAGS)
    scores = {run.name: evaluate(run.model, list(held_out), DEVICE)["f1"] for run in runs}
    print("F1 of entities held out:", ", ".join(f"{name} {score:.3f}" for name, score in scores.items()))
    status = verdict(runs, args.output / "loss.png")
    models["fastbert"].save_pretrained(args.output)
    save_tokenizer(get_tokenizer(args.model or minilm()), args.output)
    return status or int(abs(scores["fastbert"] - scores["plain"]) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
