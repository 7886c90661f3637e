"""Our attention behind `transformers`' attention interface: an alternative to `accelerate` that changes less.

transformers builds a mask once per forward and passes it to every layer's attention. Our mask is a `Packing`: the
places of the tokens are found once, and each attention packs and unpacks with them. Everything except an encoder's
self-attention with a key-padding mask runs transformers' SDPA attention. In cross-attention the mask is that of the
keys, so packing would drop queries, even where there are as many queries as keys.

A keyword that nobody here knows is refused: models pass what changes their attention (sinks, a selection of keys) by
keyword, and SDPA ignores what it does not know.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastbert import ops, padding, random

NAME = "fastbert"  # without "flash": sentence-transformers has a loader of its own for such names
# Keywords of transformers' attention functions that change no result here: settings, and what masks have said already.
HARMLESS = frozenset(
    "output_attentions output_hidden_states output_router_logits return_dict use_cache num_items_in_batch "
    "cache_position position_ids seq_idx sliding_window cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "deterministic".split()
)


# Keywords that change the weights, and that transformers' SDPA computes, once `register` has looked.
_for_sdpa: frozenset[str] = frozenset()


def register() -> str:
    global _for_sdpa
    from transformers import AttentionInterface
    from transformers.integrations import sdpa_attention
    from transformers.masking_utils import AttentionMaskInterface

    # The first versions ignored it.
    _for_sdpa = frozenset(["position_bias"] if hasattr(sdpa_attention, "create_position_bias_mask") else [])
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)  # without a mask function, transformers passes no mask at all
    return NAME


def mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function for transformers: returns a Packing for bidirectional masks, else SDPA's mask."""
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    visible = kwargs.get("attention_mask")
    bidirectional = kwargs.get("mask_function") is bidirectional_mask_function
    if not bidirectional or visible is None or visible.shape[1] != kwargs.get("kv_length"):
        return sdpa_mask(*args, **kwargs)
    return padding.plan(visible, *visible.shape, visible.device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for transformers: query, key and value (B, H, S, D) to the output, (B, S, H, D), and the
    attention weights if `output_attentions` asks for them. Raises ValueError for keywords that it does not know."""
    given = {name for name, value in kwargs.items() if value is not None}
    if unknown := given - HARMLESS - _for_sdpa:
        raise ValueError(
            f"fastbert: {type(module).__name__} passes {', '.join(sorted(unknown))} to its attention, which fastbert's "
            'does not know; use another one, as with set_attn_implementation("eager")'
        )
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    packing = attention_mask
    if packing is None and not causal:
        packing = padding.plan(None, query.shape[0], query.shape[2], query.device)
    theirs = causal or _may_cross(module) or not given.isdisjoint(_for_sdpa)
    if theirs or not _serves(packing, query, key, value, dropout):
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    qkv = packing.pack(torch.stack([x.transpose(1, 2) for x in (query, key, value)], 2))  # (T, 3, H, D)
    arguments = {
        "scale": scaling,
        "dropout_p": dropout,
        "rng": random.new_key(query.device) if dropout else None,
    }
    sequences = (packing.cu_seqlens, packing.max_seqlen)
    out = packing.unpack(ops.attention(qkv, *sequences, **arguments))
    if not kwargs.get("output_attentions"):
        return out, None
    return out, packing.unpack_weights(ops.attention_weights(qkv, *sequences, **arguments))


def _may_cross(module: nn.Module) -> bool:
    """Whether the queries may belong to other tokens than the keys. Attention of an encoder-decoder model counts unless
    it says that it is the encoder's."""
    config = getattr(module, "config", None)
    if getattr(config, "is_decoder", False) or "Cross" in type(module).__name__:
        return True
    return getattr(module, "is_decoder", getattr(config, "is_encoder_decoder", False))


def _serves(packing: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    same = query.shape == key.shape == value.shape
    return isinstance(packing, padding.Packing) and same and random.is_expressible(dropout, random.ATTENTION_BITS)


def _sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, padding.Packing):
        visible = None if attention_mask.indices is None else attention_mask.visible()
        attention_mask = None if visible is None else visible[:, None, None, :]
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
