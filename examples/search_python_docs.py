"""Searches Python's own documentation with all-MiniLM-L6-v2, in fastbert and in transformers side by side.

    python examples/search_python_docs.py ["a question" ...]

Both encode the same passages in the same batches (sorted by length), one batch each in turn, at the same precision.
What is compared: real tokens a second, padding not counted, and the largest difference between two embeddings.
"""

import sys
import time

import torch
import torch.nn.functional as F
from rich.progress import Progress
from transformers import BertModel
from transformers.utils import logging

from fastbert import backends
from fastbert.cli import show_results
from fastbert.cli.demo import minilm, python_documentation
from fastbert.inference.sentences import SentenceEncoder, batches

QUESTIONS = [
    "how do I catch several exceptions in one clause?",
    "which value does a function return when it has no return statement?",
    "what happens to the loop variable after a for loop?",
]


class TransformersEncoder:
    """The same model as people run it with transformers: SDPA, a padded batch, mean over visible tokens."""

    def __init__(self, directory, device):
        logging.disable_progress_bar()
        self.model = BertModel.from_pretrained(directory, add_pooling_layer=False, attn_implementation="sdpa")
        self.model = self.model.float().to(device).eval()

    @torch.inference_mode()
    def embed(self, ids):
        longest = max(map(len, ids))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in ids], device=self.model.device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in ids], device=self.model.device)
        hidden = self.model(padded, attention_mask=mask).last_hidden_state * mask[..., None]
        return F.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=-1)


def timed(encoder, ids, device):
    start = time.perf_counter()
    vectors = encoder.embed(ids)
    if device == "cuda":
        torch.cuda.synchronize()
    return vectors, time.perf_counter() - start


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    passages = python_documentation()
    ours = SentenceEncoder.from_pretrained(minilm(), dtype=torch.float32, device=device)
    encoders = {"fastbert": ours, "transformers": TransformersEncoder(minilm(), device)}
    ids = ours.tokenize([passage for _, passage in passages])
    work = list(batches([len(i) for i in ids], 2048))
    for encoder in encoders.values():  # warm up
        encoder.embed([ids[i] for i in work[-1][:8]])

    seconds, difference = dict.fromkeys(encoders, 0.0), 0.0
    vectors = torch.empty(len(ids), ours.model.config.hidden_size, device=device)
    with Progress() as bar:
        task = bar.add_task("encoding, each in turn", total=len(ids))
        for turn, batch in enumerate(work):
            results = {}
            for name in list(encoders)[:: 1 if turn % 2 else -1]:
                results[name], elapsed = timed(encoders[name], [ids[i] for i in batch], device)
                seconds[name] += elapsed
            difference = max(difference, (results["fastbert"] - results["transformers"]).abs().max().item())
            vectors[batch] = results["fastbert"]
            bar.advance(task, len(batch))

    tokens = sum(map(len, ids))
    print(f"{len(passages)} passages, {tokens} tokens, float32 on {device}, {torch.get_num_threads()} threads")
    for name, elapsed in seconds.items():
        print(f"{name:13} {tokens / elapsed:8.0f} real tokens/s")
    print(f"fastbert / transformers: {seconds['transformers'] / seconds['fastbert']:.2f} x")
    print(f"largest difference between two embeddings: {difference:.1e}")
    ran = sorted({f"{op}: {name}" for (op, name), runs in backends.calls().items() if runs and op.endswith("_fwd")})
    print(f"kernels that ran: {', '.join(ran)}")
    show_results(ours, vectors, passages, sys.argv[1:] or QUESTIONS, top=1)


if __name__ == "__main__":
    main()
