"""torch.nn.TransformerEncoder with BERT's weights: PyTorch's own fused inference, on nested tensors where there is
padding.

BERT is its post-norm form with erf GELU and one eps. Embeddings, where they belong to the part, stay transformers'.
"""

import warnings

import torch
from torch import Tensor, nn

from benchmarks.contenders import padded
from benchmarks.contenders.interface import ENCODER, MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch
from fastbert import BertConfig

MASK = "src_key_padding_mask"


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way | str:
    if subject.config.hidden_act != "gelu" or subject.config.num_attention_heads % 2:
        return "its fast path needs erf GELU and an even number of heads"
    subject.theirs.eval()
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)  # says that it is a prototype
    theirs = subject.theirs.encoder if subject.part == MODEL else subject.theirs
    encoder = copy_of(theirs, subject.config, dtype, device)
    embed = subject.theirs.embeddings if subject.part == MODEL else None

    def run(**arguments: Tensor) -> Tensor:
        mask = arguments.pop(MASK, None)
        hidden = embed(**arguments) if embed else arguments["hidden_states"]
        return encoder(hidden, src_key_padding_mask=mask)

    mask = None if batch.is_full else ~batch.mask
    return Way(run, padded.prepare(batch, mask, MASK), padded.collect(subject, batch))


def copy_of(theirs: nn.Module, config: BertConfig, dtype: torch.dtype, device: str) -> nn.TransformerEncoder:
    """transformers' BertEncoder as a TransformerEncoder with the same weights."""
    layer = nn.TransformerEncoderLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        dtype=dtype,
        device=device,
    )
    # mask_check would wait for the GPU to see that padding is on the right: it is.
    encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=True, mask_check=False)
    for ours, source in zip(encoder.layers, theirs.layer, strict=True):
        ours.load_state_dict(_weights(source))
    return encoder.eval().requires_grad_(False)


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """Those of a BertLayer, under TransformerEncoderLayer's names."""
    own, heads = layer.attention, layer.attention.self
    projections = (heads.query, heads.key, heads.value)
    found = {
        "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
        "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
    }
    for name, module in (
        ("self_attn.out_proj", own.output.dense),
        ("norm1", own.output.LayerNorm),
        ("linear1", layer.intermediate.dense),
        ("linear2", layer.output.dense),
        ("norm2", layer.output.LayerNorm),
    ):
        found |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return found


CONTENDER = Contender("torch.nn.TransformerEncoder", (MODEL, ENCODER), make, inference=True)
