"""Pretrains a small BERT on the documentation that ships with Python, and fills masks with it.

    python examples/pretrain_mlm.py [--steps 300] [--alone 900] [--output DIR]

A WordPiece vocabulary is trained first, with `tokenizers`. Batches are packed: they hold no padding. The same training
runs in pure PyTorch beside it, with the same dropout; exit status 1 if the two loss curves do not coincide. After
--steps fastbert goes on alone: a BERT takes about a thousand steps to learn more than which words are common. Exit
status 1 also if it has learned no more than that.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from common import PlainBert, options, three_runs, train, verdict
from sklearn.metrics import accuracy_score
from tokenizers import BertWordPieceTokenizer
from torch import nn

from fastbert import BertConfig, BertForMaskedLM, hf
from fastbert.cli.demo import python_documentation
from fastbert.data import PackingCollator, TokenBudgetSampler

LENGTH, BUDGET = 128, 1024  # tokens of a text, and of a batch
SENTENCES = [
    "an exception is raised if the [MASK] is not found.",
    "the function returns a new [MASK] object.",
    "if the list is [MASK], the result is false.",
]


class PlainMaskedLM(PlainBert):
    """The masked-LM head in plain PyTorch, on all tokens."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.bert.pooler = nn.Identity()  # Hugging Face's BertForMaskedLM has none
        size = config.hidden_size
        transform = {"dense": nn.Linear(size, size), "LayerNorm": nn.LayerNorm(size, eps=config.layer_norm_eps)}
        predictions = nn.ModuleDict({"transform": nn.ModuleDict(transform)})
        predictions.register_parameter("bias", nn.Parameter(torch.zeros(config.vocab_size)))
        self.cls = nn.ModuleDict({"predictions": predictions})

    def forward(self, batch):
        head = self.cls["predictions"]
        transform = head["transform"]
        hidden = transform["LayerNorm"](F.gelu(transform["dense"](self.encode(batch)[0])))
        logits = F.linear(hidden, self.bert.embeddings.word_embeddings.weight, head.bias)
        return F.cross_entropy(logits, batch["labels"])


def new_tokenizer(texts):
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=2000, min_frequency=3, show_progress=False)
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


def batches(examples, collator):
    """Yields batches without end, with a new order and new masks in each epoch."""
    sampler = TokenBudgetSampler([len(example["input_ids"]) for example in examples], BUDGET)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        collator.set_epoch(epoch)
        yield from (collator([examples[i] for i in batch]) for batch in sampler)


@torch.no_grad()
def validate(model, batch):
    """The loss, the share of masked tokens that are found, and the share of the commonest one among them."""
    out = model.eval()(**batch, skip_logits=False)
    labels, logits = (tensor[batch["labelled_rows"]] for tensor in (batch["labels"], out.logits))
    commonest = labels.mode().values.expand_as(labels)
    return out.loss.item(), accuracy_score(labels, logits.argmax(-1)), accuracy_score(labels, commonest)


@torch.no_grad()
def fill(model, tokenizer, sentence):
    ids = torch.tensor(tokenizer.encode(sentence).ids)
    logits = model(ids[None]).logits[0, ids == tokenizer.token_to_id("[MASK]")]
    return ", ".join(tokenizer.id_to_token(i) for i in logits[0].topk(5).indices.tolist())


def main() -> int:
    args = options(__doc__, alone=900)
    texts = [passage for _, passage in python_documentation(300)]
    tokenizer = new_tokenizer(texts)
    examples = [{"input_ids": encoding.ids} for encoding in tokenizer.encode_batch(texts)]
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), **sizes, max_position_embeddings=LENGTH, initializer_range=0.08
    )
    model, plain = BertForMaskedLM(config), PlainMaskedLM(config)
    plain.load_state_dict({name: t for name, t in hf.state_dict(model).items() if ".decoder." not in name})
    runs = three_runs(model, plain, args.steps + args.alone, lr=2e-3)
    collator = PackingCollator(tokenizer, mlm_probability=0.15, seed=0)
    held_out = collator(examples[::10])
    before = validate(model, held_out)
    model.train()
    stream = batches([example for i, example in enumerate(examples) if i % 10], collator)
    train(runs, stream, args.steps)
    train(runs[:1], stream, args.alone)
    loss, found, commonest = validate(model, held_out)
    print(f"held-out loss {before[0]:.2f} -> {loss:.2f}")
    learned = found > commonest or not args.alone
    few = "" if learned else ", TOO FEW"
    print(f"masked tokens found: {found:.0%}{few} (the commonest everywhere: {commonest:.0%})")
    for sentence in SENTENCES:
        print(f"  {sentence}  {fill(model, tokenizer, sentence)}")
    return verdict(runs, args.output / "pretrain_mlm.png") or int(not learned)


if __name__ == "__main__":
    sys.exit(main())
