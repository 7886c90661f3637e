"""Trains all-MiniLM-L6-v2 to find texts, with fastbert and with sentence-transformers: how good, how fast.

    python examples/compare_retrieval.py [--seeds 3] [--steps N] [--output DIR] [--json FILE]

retrieval_pairs.py has the texts, and nDCG@10 says how well the held-out ones are found: by the original model, whose
mean pooling was trained for this on a billion pairs, by BM25, and by the model after this training. For each seed both
libraries begin with the same weights and take the same pairs in the same order, step by step in turn; dropout differs.
Exit status 1 if any seed of fastbert gains less than GAIN, or the means of the two libraries are further apart than
MARGIN, or too noisy to tell. fastbert's model of the first seed is kept in DIR, for `fastbert search` etc.
"""

import argparse
import sys
import warnings
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from common import Run, agreement, endless, scores_of, train, writable, write_json
from retrieval_pairs import KINDS, Pairs, by_vectors, by_words, parts
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn.utils.rnn import pad_sequence

import fastbert
from fastbert.cli.demo import minilm
from fastbert.data import ContrastiveCollator, ContrastiveDataset, create_dataloader, get_tokenizer
from fastbert.inference import SentenceEncoder
from fastbert.training import ContrastiveModel, InBatchNegatives

PAIRS, LENGTH, STEPS, LEARNING_RATE = 64, 128, 32, 1.5e-4  # pairs in a batch; tokens at which texts are cut
GAIN, MARGIN = 0.03, 0.01  # nDCG@10
NAMES = "fastbert", "sentence-transformers"


def both_forms(examples: list[dict]) -> dict:
    """A batch for each library: packed, and with each column padded to its longest text."""
    packed = ContrastiveCollator()(examples)
    texts = packed["input_ids"].split(packed["cu_seqlens"].diff().tolist())
    return {"fastbert": packed, "sentence-transformers": [padded(texts[:PAIRS]), padded(texts[PAIRS:])]}


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = pad_sequence(texts, batch_first=True)
    visible = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": visible, "token_type_ids": torch.zeros_like(ids)}


def new_runs(seed: int, steps: int) -> list[Run]:
    encoder = fastbert.BertModel.from_pretrained(minilm(), add_pooling_layer=False, dtype=torch.float32)
    ours, theirs = ContrastiveModel(encoder, InBatchNegatives()), SentenceTransformer(str(minilm()), device="cpu")
    loss = MultipleNegativesRankingLoss(theirs)
    losses = {
        "fastbert": (ours, lambda batch: ours(**batch["fastbert"]).loss),
        "sentence-transformers": (theirs, lambda batch: loss(batch["sentence-transformers"], None)),
    }
    return [Run(name, *both, steps, LEARNING_RATE, seed=1000 * seed) for name, both in losses.items()]


def trained(data: ContrastiveDataset, held_out: dict[str, Pairs], seed: int, steps: int, output: Path) -> dict:
    """Trains both; returns their scores and times. Padding does not count as tokens."""
    loader = create_dataloader(data, both_forms, PAIRS, seed=seed, drop_last=True)
    batches, runs = list(islice(endless(loader), steps)), new_runs(seed, steps)
    train(runs, batches, steps)
    ours, theirs = (run.model.eval() for run in runs)
    encoder = SentenceEncoder(ours.encoder, get_tokenizer(minilm()), max_length=LENGTH)
    theirs.max_seq_length = LENGTH
    scores = by_vectors(encoder.encode, held_out), by_vectors(theirs.encode, held_out)
    tokens = sum(len(batch["fastbert"]["input_ids"]) for batch in batches)
    places = sum(column["input_ids"].numel() for batch in batches for column in batch["sentence-transformers"])
    if seed == 0:
        encoder.save_pretrained(output)
    found = {run.name: {"scores": score, "seconds": run.seconds} for run, score in zip(runs, scores, strict=True)}
    return {"seed": seed, "padding": 1 - tokens / places, **found}


def verdict(before: dict, words: dict, results: list[dict]) -> dict:
    """Prints and returns the results of the seeds, and whether they prove the example's point."""
    found, proved = {}, True
    for kind in KINDS:
        both = scores_of(results, NAMES)[kind]
        found[kind] = {"before": before[kind], "BM25": words[kind], **agreement(f"{kind}, nDCG@10", both, MARGIN)}
        gain = min(both["fastbert"]) - before[kind]
        print(f"  before {before[kind]:.3f}, BM25 {words[kind]:.3f}; the worst seed gained {gain:.3f}, {GAIN} expected")
        proved &= gain >= GAIN and found[kind]["agree"]
    seconds = {name: mean(result[name]["seconds"] for result in results) for name in NAMES}
    padding, ratio = mean(result["padding"] for result in results), seconds[NAMES[1]] / seconds["fastbert"]
    print(", ".join(f"{name} {s:.0f} s" for name, s in seconds.items()), f"{ratio:.2f} x; {padding:.0%} is padding")
    return found | {"proved": proved, "seconds": seconds, "speed_ratio": ratio, "padding": padding, "seeds": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2: they say how far chance leads")
    parser.add_argument("--output", type=Path, default=Path("build/examples/retrieval"), help="for a model")
    parser.add_argument("--json", type=writable, help="where to write what was measured")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds is {args.seeds}; expected at least 2")
    warnings.simplefilter("ignore", UserWarning)  # texts are cut on purpose
    training, held_out = parts()
    questions, texts = zip(*training, strict=True)
    data = ContrastiveDataset({"question": questions, "text": texts}, get_tokenizer(minilm()), max_length=LENGTH)
    untrained = SentenceEncoder.from_pretrained(minilm(), dtype=torch.float32, max_length=LENGTH)
    before, words = by_vectors(untrained.encode, held_out), by_words(held_out)
    results = [trained(data, held_out, seed, args.steps, args.output) for seed in range(args.seeds)]
    held = {kind: len(pairs) for kind, pairs in held_out.items()}
    found = {"pairs": len(data), "held_out": held, "steps": args.steps}
    found |= verdict(before, words, results)
    write_json(args.json, found) if args.json else None
    return 0 if found["proved"] else 1


if __name__ == "__main__":
    sys.exit(main())
