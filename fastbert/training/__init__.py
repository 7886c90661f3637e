"""Training: losses over batches of unequal size, ELECTRA, contrastive training, and a trainer that resumes bit for bit.

The same script runs under `python` and, with several GPUs, under `torchrun`::

    model = distribute(BertForMaskedLM(config))
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=5e-4), fused=True)
    scheduler = linear_schedule(optimizer, warmup_steps=1000, max_steps=20_000)
    trainer = AMPTrainer(model, optimizer, scheduler, mixed_precision="bf16", output_dir="runs/mlm")
    trainer.resume()  # from the newest checkpoint, if there is one
    trainer.train(loader, max_steps=20_000, eval_loader=held_out, eval_steps=500, save_steps=500)

A step's loss is the mean over all labels of the step, however they are distributed over micro-batches and processes;
it is not a mean of means. See docs/training.md.
"""

from fastbert.modes import evaluating
from fastbert.training.best import Best
from fastbert.training.contrastive import ContrastiveModel, ContrastiveOutput, GradCache
from fastbert.training.contrastive_losses import (
    CoSENT,
    CosineMSE,
    InBatchNegatives,
    MarginMSE,
    Matryoshka,
    Triplet,
    contrastive_loss,
)
from fastbert.training.distributed import distribute
from fastbert.training.electra import ElectraPretraining, ElectraPretrainingOutput
from fastbert.training.late_interaction import (
    MaxSimDistillation,
    MaxSimMargins,
    MaxSimNegatives,
    MultiVectorModel,
    MultiVectorOutput,
    Texts,
)
from fastbert.training.losses import (
    compute_classification_loss,
    compute_loader_loss,
    compute_mlm_loader_loss,
    compute_mlm_loss,
    label_counts,
    loss_terms,
    to_device,
)
from fastbert.training.parameters import freeze, parameter_groups
from fastbert.training.schedules import constant_schedule, cosine_schedule, linear_schedule, polynomial_schedule
from fastbert.training.splade import Flops, Splade, SpladeWarmup
from fastbert.training.state import set_seed
from fastbert.training.trainer import AMPTrainer

__all__ = [
    "AMPTrainer",
    "Best",
    "CoSENT",
    "ContrastiveModel",
    "ContrastiveOutput",
    "CosineMSE",
    "ElectraPretraining",
    "ElectraPretrainingOutput",
    "Flops",
    "GradCache",
    "InBatchNegatives",
    "MarginMSE",
    "Matryoshka",
    "MaxSimDistillation",
    "MaxSimMargins",
    "MaxSimNegatives",
    "MultiVectorModel",
    "MultiVectorOutput",
    "Texts",
    "Splade",
    "SpladeWarmup",
    "Triplet",
    "compute_classification_loss",
    "compute_loader_loss",
    "compute_mlm_loader_loss",
    "compute_mlm_loss",
    "constant_schedule",
    "contrastive_loss",
    "cosine_schedule",
    "distribute",
    "evaluating",
    "freeze",
    "label_counts",
    "linear_schedule",
    "loss_terms",
    "parameter_groups",
    "polynomial_schedule",
    "set_seed",
    "to_device",
]
