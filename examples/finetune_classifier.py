"""Fine-tunes all-MiniLM-L6-v2 to tell which area of Python's documentation a passage is from.

    python examples/finetune_classifier.py [--steps 300] [--output DIR]

Batches are packed: they hold no padding. The same training runs in pure PyTorch beside it, with the same dropout; exit
status 1 if the two loss curves do not coincide, or if no more passages are recognised than by always guessing the
commonest area.
"""

import itertools
import sys
import warnings

import torch
import torch.nn.functional as F
from common import PlainBert, options, three_runs, train, verdict
from sklearn.metrics import accuracy_score, classification_report
from tokenizers import Tokenizer
from torch import nn

from fastbert import BertForSequenceClassification, hf
from fastbert.cli.demo import minilm, python_documentation
from fastbert.data import PackingCollator, TokenBudgetSampler

LENGTH, BUDGET = 40, 160  # tokens of a passage, and of a batch
AREAS = (  # large topics
    "specialnames",
    "compound",
    "types",
    "string-methods",
    "debugger",
    "typesseq",
    "formatstrings",
    "typesmapping",
)


class PlainClassifier(PlainBert):
    """The classifier in plain PyTorch. The head's dropout is PyTorch's own, and draws the same as fastbert's head."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, batch):
        _, pooled = self.encode(batch)
        logits = self.classifier(F.dropout(pooled, self.config.head_dropout, self.training))
        return F.cross_entropy(logits, batch["labels"])


def labelled_passages(tokenizer):
    """(for training, held out): every eighth passage is held out."""
    passages = [(topic, text) for topic, text in python_documentation(200) if topic in AREAS]
    encodings = tokenizer.encode_batch([text for _, text in passages])
    pairs = zip(passages, encodings, strict=True)
    examples = [{"input_ids": encoding.ids, "labels": AREAS.index(topic)} for (topic, _), encoding in pairs]
    return [example for i, example in enumerate(examples) if i % 8], examples[::8]


def batches(examples, collator):
    """Yields batches without end, in a new order in each epoch."""
    sampler = TokenBudgetSampler([len(example["input_ids"]) for example in examples], BUDGET)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from (collator([examples[i] for i in batch]) for batch in sampler)


@torch.no_grad()
def predict(model, batch):
    return model.eval()(**batch).logits.argmax(-1)


def main() -> int:
    args = options(__doc__)
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    training, held_out = labelled_passages(tokenizer)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the classifier is new: that is the point
        model = BertForSequenceClassification.from_pretrained(
            minilm(), dtype=torch.float32, num_labels=len(AREAS), id2label=dict(enumerate(AREAS))
        )
    plain = PlainClassifier(model.config)
    plain.load_state_dict(hf.state_dict(model))
    for part in (model, plain):
        part.bert.embeddings.requires_grad_(False)  # half of all weights, and few of their words occur
    runs = three_runs(model, plain, args.steps, lr=1e-4)
    collator = PackingCollator()
    validation = collator(held_out)
    before = accuracy_score(validation["labels"], predict(model, validation))
    model.train()
    train(runs, batches(training, collator), args.steps)

    guesses = predict(model, validation)
    areas = {"labels": range(len(AREAS)), "target_names": AREAS, "zero_division": 0}
    print(classification_report(validation["labels"], guesses, **areas))
    after = accuracy_score(validation["labels"], guesses)
    commonest = validation["labels"].bincount().max().item() / len(guesses)
    print(f"held-out accuracy {before:.0%} -> {after:.0%} (the commonest area everywhere: {commonest:.0%})")
    return verdict(runs, args.output / "finetune_classifier.png") or int(after <= commonest)


if __name__ == "__main__":
    sys.exit(main())
