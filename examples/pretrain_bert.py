"""Pretrains a small BERT as BERT was, on masked tokens and next sentences: from raw text to a model that fills masks.

    python examples/pretrain_bert.py [--steps 4500] [--output DIR]

The text is the documentation that ships with Python; the end of every topic is held out. The baseline only knows how
common each token is: its loss is the cross-entropy of the held-out labels under the training text's frequencies,
add-one smoothed. Exit status 1 if the model's loss is not at least MARGIN nats below that.
"""

import functools
import sys
import warnings

import torch
from common import fit, options
from torch.utils.data import ConcatDataset

from fastbert import BertConfig, BertForPreTraining
from fastbert.cli.demo import python_documentation
from fastbert.data import NSPDataset, PackingCollator, create_dataloader, save_tokenizer, train_tokenizer
from fastbert.inference import MaskFiller
from fastbert.training import compute_mlm_loader_loss, evaluating

MARGIN = 0.5  # nats
LENGTH, BUDGET = 192, 512  # tokens of a pair, and of a batch
SENTENCES = [
    "an exception is raised if the [MASK] is not found.",
    "the function returns a new [MASK] object.",
    "if the list is [MASK], the result is false.",
]


def documents() -> tuple[list[list[str]], list[list[str]]]:
    """(for training, held out): lists of paragraphs; the last eighth of each topic is held out."""
    topics = {}
    for topic, paragraph in python_documentation(120):
        topics.setdefault(topic, []).append(paragraph)
    ends = [len(topic) - len(topic) // 8 for topic in topics.values()]
    parts = [(topic[:end], topic[end:]) for topic, end in zip(topics.values(), ends, strict=True)]
    return [begin for begin, _ in parts], [end for _, end in parts]


def pairs(documents, tokenizer, seeds) -> ConcatDataset:
    """Sentence pairs, with other random next sentences for each seed, so that no pair is learned by heart."""
    make = functools.partial(NSPDataset, documents, tokenizer, max_length=LENGTH, label_name="next_sentence_label")
    return ConcatDataset([make(seed=seed) for seed in seeds])


def loss_by_frequency(texts, tokenizer, batches) -> float:
    ids = [i for text in tokenizer.encode_batch(texts, add_special_tokens=False) for i in text.ids]
    counts = torch.tensor(ids).bincount(minlength=tokenizer.get_vocab_size()) + 1
    labels = torch.cat([batch["labels"][batch["labelled_rows"]] for batch in batches])
    return -(counts / counts.sum()).log()[labels].mean().item()


def next_sentence_accuracy(model, batches) -> float:
    with evaluating(model):
        guesses = torch.cat([model(**batch).seq_relationship_logits.argmax(-1) for batch in batches])
    return (guesses == torch.cat([batch["next_sentence_label"] for batch in batches])).float().mean().item()


def main() -> int:
    args = options(__doc__, steps=4500)
    warnings.filterwarnings("ignore", "NSPDataset: .* cut there")  # each draw has a few pairs that are too long
    training, held_out = documents()
    texts = [paragraph for topic in training for paragraph in topic]
    tokenizer = train_tokenizer(texts, vocab_size=2000)
    collator = PackingCollator(tokenizer, mlm_probability=0.15, seed=0)
    loader = create_dataloader(pairs(training, tokenizer, range(8)), collator, max_tokens=BUDGET)
    batches = list(create_dataloader(pairs(held_out, tokenizer, range(8, 12)), collator, max_tokens=BUDGET))

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": LENGTH}
    # A model this narrow learns sooner from wider initial weights than 0.02; a training this short needs no dropout.
    sizes |= {"initializer_range": 0.06, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForPreTraining(BertConfig(**sizes))
    fit(model, loader, args.steps, lr=1.5e-3)
    model.save_pretrained(args.output / "pretrained_bert")
    save_tokenizer(tokenizer, args.output / "pretrained_bert")

    loss, baseline = compute_mlm_loader_loss(model, batches, "cpu"), loss_by_frequency(texts, tokenizer, batches)
    ok = loss < baseline - MARGIN
    print(f"held-out loss of masked tokens: {loss:.3f}; by frequency alone {baseline:.3f}")
    print(f"that is {baseline - loss:.3f} nats less: {'' if ok else 'NOT '}the {MARGIN} that are expected, or more")
    print(f"held-out next sentences: {next_sentence_accuracy(model, batches):.1%} right; by chance 50 %")
    fill = MaskFiller.from_pretrained(args.output / "pretrained_bert")
    for sentence, (best,) in zip(SENTENCES, fill(SENTENCES), strict=True):
        print(f"  {sentence}  {', '.join(guess.token for guess in best)}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
