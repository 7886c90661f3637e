"""Distils a BERT into one of half its layers, as DistilBERT was made (Sanh et al., 2019).

    python examples/distill.py [--layers 3] [--steps 200] [--teacher-steps 1200] [--output DIR]

A teacher with twice --layers is trained first, on text that ships with Python. The student begins with every other
layer of the teacher, its embeddings and its head, and learns from three losses: the teacher's distribution over the
vocabulary (KL at a temperature, at the masked tokens), the direction of its last hidden states (cosine), and the
masked-LM loss. Two students without a teacher see the same batches and masks: one from the same start, one from
scratch. Exit status 1 unless the distilled one is the best.
"""

import re
import sys
import time

import torch
import torch.nn.functional as F
from common import fit, options
from torch import Tensor, nn

from fastbert import BertConfig, BertForMaskedLM, BertHeadOutput
from fastbert.cli.demo import python_documentation
from fastbert.data import create_mlm_dataloader, save_tokenizer, train_tokenizer

LENGTH, BUDGET = 128, 1024  # tokens of a text, and of a batch
TEMPERATURE = 2.0
SOFT, HARD, COSINE = 5.0, 2.0, 1.0  # weights of the three losses: DistilBERT's


def at_masks(model: BertForMaskedLM, labelled_rows: Tensor, labels: Tensor, **inputs) -> tuple[Tensor, Tensor]:
    """The last hidden states of all tokens (T, C), and the logits of the masked ones (L, V)."""
    hidden = model.bert(**inputs).last_hidden_state
    return hidden, model.cls.predictions(hidden[labelled_rows], model.bert.embeddings.word_embeddings.weight)


class Distillation(nn.Module):
    """A student whose loss is the weighted sum of the three losses."""

    def __init__(self, student: BertForMaskedLM, teacher: BertForMaskedLM) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> "Distillation":
        super().train(mode)
        self.teacher.eval()  # without dropout
        return self

    def forward(self, **batch) -> BertHeadOutput:
        hidden, logits = at_masks(self.student, **batch)
        taught_hidden, taught = at_masks(self.teacher, **batch)
        soft, taught = (F.log_softmax(scores / TEMPERATURE, -1) for scores in (logits, taught))
        # Gradients of soft targets shrink with the square of the temperature (Hinton et al., 2015).
        kl = F.kl_div(soft, taught, reduction="batchmean", log_target=True) * TEMPERATURE**2
        masked_lm = F.cross_entropy(logits, batch["labels"][batch["labelled_rows"]])
        cosine = 1 - F.cosine_similarity(hidden, taught_hidden, dim=-1).mean()
        return BertHeadOutput(SOFT * kl + HARD * masked_lm + COSINE * cosine)


def half_of(teacher: BertForMaskedLM) -> BertForMaskedLM:
    """Layers 0, 2, 4, ... of the teacher, its embeddings and its head."""
    student = BertForMaskedLM(teacher.config.changed(num_hidden_layers=teacher.config.num_hidden_layers // 2))
    state = teacher.state_dict()
    sources = {name: re.sub(r"(?<=layer\.)\d+", lambda at: str(2 * int(at[0])), name) for name in student.state_dict()}
    student.load_state_dict({name: state[source] for name, source in sources.items()})
    return student


@torch.no_grad()
def side_by_side(models: dict[str, BertForMaskedLM], batches: list[dict]) -> dict[str, float]:
    """Prints a line for each model, measured batch by batch in turn; returns their losses."""
    losses, found, seconds = (dict.fromkeys(models, 0.0) for _ in range(3))
    tokens, masks = (sum(len(batch[name]) for batch in batches) for name in ("input_ids", "labelled_rows"))
    for batch in batches:
        labels = batch["labels"][batch["labelled_rows"]]
        for name, model in models.items():
            start = time.perf_counter()
            _, logits = at_masks(model.eval(), **batch)
            seconds[name] += time.perf_counter() - start
            losses[name] += F.cross_entropy(logits, labels, reduction="sum").item() / masks
            found[name] += (logits.argmax(-1) == labels).sum().item() / masks
    print(f"{'held-out text':30} loss   found   parameters   tokens/s")
    for name, model in models.items():
        size, speed = sum(parameter.numel() for parameter in model.parameters()), tokens / seconds[name]
        print(f"{name:29}{losses[name]:6.3f}{found[name]:8.1%}{size:13,}{speed:11,.0f}")
    return losses


def main() -> int:
    args = options(__doc__, steps=200, teacher_steps=1200, layers=3)
    texts = [passage for _, passage in python_documentation(300)]
    training = [text for i, text in enumerate(texts) if i % 10]
    tokenizer = train_tokenizer(training, vocab_size=2000)
    loader, held_out = (
        create_mlm_dataloader(part, tokenizer, max_tokens=BUDGET, max_length=LENGTH) for part in (training, texts[::10])
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": LENGTH}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "num_hidden_layers": 2 * args.layers}
    teacher = BertForMaskedLM(BertConfig(**sizes, initializer_range=0.05))  # 0.02 is slow to learn at this width
    fit(teacher, loader, args.teacher_steps, lr=1e-3)
    students = {"distilled": half_of(teacher), "the same start": half_of(teacher)}
    students["from scratch"] = BertForMaskedLM(students["distilled"].config)
    for name, student in students.items():
        fit(Distillation(student, teacher) if name == "distilled" else student, loader, args.steps, lr=1e-3)
    losses = side_by_side({"teacher": teacher, **students}, 3 * list(held_out))
    students["distilled"].save_pretrained(args.output / "distilled")
    save_tokenizer(tokenizer, args.output / "distilled")
    best = min(students, key=losses.get)
    print(f"the best student: {best} ({args.output / 'distilled'} has the distilled one)")
    return 0 if best == "distilled" else 1


if __name__ == "__main__":
    sys.exit(main())
