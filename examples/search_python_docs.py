"""Searches Python's own documentation with all-MiniLM-L6-v2, and shows how much faster fastbert is than transformers.

    python examples/search_python_docs.py ["a question" ...]

The ratio depends on the order of the texts, so two are measured: as they arrive, where transformers pads short texts to
the longest in the batch; and sorted by length, as sentence-transformers does with all texts at once, when hardly any
padding is left. Both libraries take the same batches in turn; padding is not counted. Exit status 1: embeddings differ.
"""

import sys
import time
import warnings

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import BertModel
from transformers.utils import logging

from fastbert import backends
from fastbert.cli import show_results
from fastbert.cli.demo import minilm, python_documentation
from fastbert.inference import SentenceEncoder

QUESTIONS = [
    "when is a default argument evaluated?",
    "does the finally clause run after a return?",
    "how do I split a string into words?",
]
BATCH = 32  # texts
EVERY = 4  # one batch in so many is measured, so that the demo takes a minute or two
SAME = 1e-5  # largest difference of two embeddings of length 1; float32 rounds to about 1e-7


class TransformersEncoder:
    """The same model as people run it with transformers: SDPA, a padded batch, mean over visible tokens."""

    def __init__(self, directory, device):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.model = BertModel.from_pretrained(directory, add_pooling_layer=False, attn_implementation="sdpa")
        self.model = self.model.float().to(device).eval()

    @torch.inference_mode()
    def embed(self, ids):
        longest = max(map(len, ids))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in ids], device=self.model.device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in ids], device=self.model.device)
        hidden = self.model(padded, attention_mask=mask).last_hidden_state * mask[..., None]
        return F.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=-1)


def batches(texts):
    return [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]


def padding(work, ids):
    """The share of the padded batches that is padding."""
    lengths = [[len(ids[i]) for i in batch] for batch in work]
    return 1 - sum(map(sum, lengths)) / sum(max(batch) * len(batch) for batch in lengths)


def compare(encoders, work, ids, device, done):
    """Seconds of each encoder, and the largest difference between two embeddings."""
    seconds, difference = dict.fromkeys(encoders, 0.0), 0.0
    for turn, batch in enumerate(work):
        results = {}
        for name in list(encoders)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            results[name] = encoders[name].embed([ids[i] for i in batch])
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - start
        difference = max(difference, (results["fastbert"] - results["transformers"]).abs().max().item())
        done(len(batch))
    return seconds, difference


def main():
    warnings.filterwarnings("once", message=".* texts are longer than")
    warnings.showwarning = lambda message, *where, **more: print(message)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    passages = python_documentation(300)
    texts = [text for _, text in passages]
    ours = SentenceEncoder.from_pretrained(minilm(), dtype=torch.float32, device=device)
    encoders = {"transformers": TransformersEncoder(minilm(), device), "fastbert": ours}
    ids = ours.tokenize(texts)
    by_length = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    ways = {"as they arrive": batches(range(len(ids)))[::EVERY], "sorted by length": batches(by_length)[::EVERY]}
    for encoder in encoders.values():  # warm up
        encoder.embed(ids[:BATCH])

    differences = []
    table = Table("texts", "padding", *(f"{name}\nreal tokens/s" for name in encoders), "fastbert is")
    with Progress(transient=True) as bar:
        for way, work in ways.items():
            tokens = sum(len(ids[i]) for batch in work for i in batch)
            task = bar.add_task(f"{way}, each in turn", total=sum(map(len, work)))
            seconds, difference = compare(encoders, work, ids, device, lambda done, task=task: bar.advance(task, done))
            differences.append(difference)
            rates = [f"{tokens / elapsed:.0f}" for elapsed in seconds.values()]
            ratio = seconds["transformers"] / seconds["fastbert"]
            table.add_row(way, f"{padding(work, ids):.0%}", *rates, f"{ratio:.2f} x as fast")
        task = bar.add_task("encoding all passages", total=len(texts))
        vectors = ours.encode(texts, progress=lambda done: bar.advance(task, done))

    print(f"{len(passages)} passages, of which one in {EVERY} is measured, float32 on {device}")
    Console().print(table)
    print(f"largest difference between two embeddings: {max(differences):.1e}")
    ran = sorted({f"{op}: {name}" for (op, name), runs in backends.calls().items() if runs and op.endswith("_fwd")})
    print(f"kernels that ran: {', '.join(ran)}")
    show_results(ours, vectors, passages, sys.argv[1:] or QUESTIONS, top=1)
    return 0 if max(differences) <= SAME else 1


if __name__ == "__main__":
    sys.exit(main())
