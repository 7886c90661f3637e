"""A transformers model, its accelerated copy, and what both compute of a padded batch."""

import copy

import small_models
import torch
import transformers
from small_models import DEVICE, randomised

import fastbert

LENGTHS, SEQLEN = [7, 1, 12], 12
SIZES = small_models.SIZES | {"num_hidden_layers": 3, "intermediate_size": 96}
DISTILBERT = {"vocab_size": 99, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 32}
CONFIGS = {
    "bert": SIZES,
    "roberta": SIZES | {"pad_token_id": 1},
    "xlm-roberta": SIZES | {"pad_token_id": 1},
    "camembert": SIZES | {"pad_token_id": 1},
    "electra": SIZES | {"embedding_size": 32},  # the widths differ, so a projection follows the embeddings
    "distilbert": DISTILBERT,
    "albert": SIZES | {"embedding_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    "deberta-v2": small_models.CONFIGS["deberta-v2"] | SIZES,
    "mpnet": SIZES,
}
RELATIVE = ("deberta-v2", "mpnet")  # for these, transformers' attention is eager
HEADS = {
    "base": transformers.AutoModel,
    "sequence": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
    "mlm": transformers.AutoModelForMaskedLM,
    "pretraining": transformers.AutoModelForPreTraining,
    "choice": transformers.AutoModelForMultipleChoice,
}
DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    *("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
)


def build(family="bert", head="base", dtype=torch.float64, attention="sdpa", dropout=None, **changes):
    """A tiny transformers model with random weights, including nontrivial biases and LayerNorm parameters."""
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family] | changes)
    for name in DROPOUTS if dropout is not None else ():
        if hasattr(config, name):
            setattr(config, name, dropout)
    config._attn_implementation = "eager" if family in RELATIVE else attention
    return randomised(HEADS[head].from_config(config)).to(dtype)


def batch(model, lengths=LENGTHS, side="right", seqlen=SEQLEN):
    """Random ids and their attention mask; padding holds the family's padding token."""
    mask = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(2, 99, mask.shape)
    padding = model.config.pad_token_id or 0
    return {"input_ids": torch.where(mask.bool(), ids, padding).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def labels(model, head, inputs):
    """Labels for heads of tokens, -100 at padding, and of sequences; none for other heads."""
    mask = inputs["attention_mask"]
    if head in ("mlm", "tokens"):
        return {"labels": torch.randint(2, mask.shape, device=DEVICE).masked_fill(mask == 0, -100)}
    return {"labels": torch.tensor([1, 0, 1], device=DEVICE)} if head == "sequence" else {}


def accelerated(model):
    """An accelerated copy of the model, and the copy's report."""
    copied = copy.deepcopy(model)
    return copied, fastbert.accelerate(copied)


def pair(*args, train=False, side="right", **options):
    """A model, an accelerated copy, the copy's report, and a batch."""
    original = build(*args, **options).train(train)
    return original, *accelerated(original), batch(original, side=side)


def visible(output, inputs):
    """The tensors of an output by name. Tensors with a row for each token keep only the rows of visible tokens."""
    mask = inputs["attention_mask"].bool()
    result = {}
    for name, value in output.items():
        for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            token = tensor.dim() > 1 and tensor.shape[:2] == mask.shape
            result[f"{name} {i}"] = tensor[mask] if token else tensor
    return result


def assert_packed(report, times=1):
    """Asserts that exactly `times` forwards ran packed, and that none fell back."""
    assert (report.packed, report.fallbacks.total()) == (times, 0), report


def assert_fell_back(report, words):
    assert report.packed == 0 and report.fallbacks.total() == 1, report
    assert words in next(iter(report.fallbacks)), report


def equal(one, two, bound=1e-12):
    """Asserts that two sets of tensors are equal by the accuracy rule for float64."""
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.shape == two[name].shape, name
        assert (tensor - two[name]).detach().abs().max() <= bound * two[name].detach().abs().max(), name


def decoder(**changes):
    return {"is_decoder": True, "use_cache": False, **changes}
