"""The checks that C++ primitives make when Python's are bypassed, and the checks of values in tensor subclasses."""

from dataclasses import replace

import fuzz
import pytest
import torch
from op_suite import VALUE_ERROR
from torch import Tensor

import fastbert
from fastbert import ops

SIZES = fuzz.Sizes(T=5, C=7, K=3, H=2, D=4, dtype=torch.float32, parameters=torch.float32, residual=torch.float32)
REFUSALS = (VALUE_ERROR, IndexError)
# (primitive, argument): arguments whose dtype or size is free while all other arguments stay the same.
ANY_DTYPE = {("padding_pack", "x"), ("padding_unpack", "x"), ("attention_fwd", "qkv")}
ANY_ROWS = {("padding_places", "visible"), ("padding_pack", "x"), ("padding_pack", "indices")} | {
    (f"{op}_{direction}", name)
    for op, names in {
        "attention": ("cu_seqlens",),
        "relative_attention": ("cu_seqlens",),
        "encoder_layer": ("cu_seqlens",),
        "embedding": ("word", "position", "token_type"),
    }.items()
    for direction in ("fwd", "bwd")
    for name in names
}
ANY_ROWS |= {(f"{op}_fwd", "x") for op in ("linear", "packed_linear", "dense_gelu", "bias_gelu", "layer_norm")} | {
    ("attention_fwd", "qkv"),
    ("relative_attention_fwd", "qkv"),
    ("encoder_layer_fwd", "hidden"),
    ("packed_layer_fwd", "hidden"),
    ("packed_layer_fwd", "cu_seqlens"),
    ("packed_linear_max_fwd", "x"),
    ("packed_linear_max_fwd", "cu_seqlens"),
    ("linear_max_fwd", "x"),
    ("linear_max_fwd", "cu_seqlens"),
    ("linear_max_bwd", "x"),
}
ANY_HEADS = {("attention_fwd", "qkv"), ("padding_pack", "x")}
ANY_COLUMNS = {("padding_places", "visible"), ("padding_pack", "x"), ("padding_unpack", "x")}


def tensor_arguments():
    """All tensor arguments. encoder_layer also gets 3 heads: it is a whole layer for an odd number of heads, and for an
    even one the part that follows attention."""
    for primitive in fuzz.ON_CPU:
        for sizes in (SIZES, replace(SIZES, H=3)) if primitive.startswith("encoder_layer") else (SIZES,):
            args = fuzz.right_call(primitive, sizes)
            schema = getattr(torch.ops.fastbert, primitive).default._schema.arguments
            for place, (argument, value) in enumerate(zip(schema, args, strict=True)):
                if isinstance(value, Tensor):
                    name = f"{primitive}-{argument.name}-{sizes.H}"
                    yield pytest.param(primitive, place, argument.name, sizes, id=name)


def call(primitive, place, change, sizes=SIZES):
    """A call that is correct except for one argument. An unreadable page follows each tensor."""
    args = [fuzz.guarded(a) if isinstance(a, Tensor) else a for a in fuzz.right_call(primitive, sizes)]
    args[place] = fuzz.guarded(change(args[place]))
    return getattr(torch.ops.fastbert, primitive)(*args)


def wrong_dtypes(name, tensor):
    """The dtypes that have to be refused for this argument while all others stay the same."""
    if not tensor.is_floating_point():
        return (torch.float32, torch.uint8, torch.int16, torch.complex64)
    exact = ("dy", "dout", "mean", "rstd", "lse", "out", "preactivation")  # other arguments may be narrower
    return (torch.float64, torch.int64, torch.complex64) + (torch.float16, torch.bfloat16) * (name in exact)


@pytest.mark.parametrize(("primitive", "place", "name", "sizes"), list(tensor_arguments()))
def test_a_wrong_tensor_is_refused(primitive, place, name, sizes):
    """Tensors of another dtype, with an additional dimension, or with a row or column more or less raise an error."""
    refused = pytest.raises(REFUSALS)
    tensor = fuzz.right_call(primitive, sizes)[place]
    call(primitive, place, lambda tensor: tensor, sizes)
    for dtype in () if (primitive, name) in ANY_DTYPE else wrong_dtypes(name, tensor):
        with refused:
            call(primitive, place, lambda tensor, dtype=dtype: tensor.to(dtype), sizes)
    if name != "rng" and not name.startswith("x"):
        with refused:
            call(primitive, place, lambda tensor: tensor[None], sizes)
    for dim in range(tensor.dim()):
        free = (primitive, name) in (ANY_ROWS, ANY_COLUMNS, ANY_HEADS, ANY_HEADS)[dim]
        beside_context = primitive == "encoder_layer_fwd" and name == "hidden" and sizes.H % 2 == 0
        if free and not beside_context:  # a context has as many rows as hidden
            continue
        with refused:
            call(primitive, place, lambda tensor, dim=dim: torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim), sizes)
        with refused:
            call(primitive, place, lambda tensor, dim=dim: tensor.narrow(dim, 0, tensor.shape[dim] - 1), sizes)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("table", [0, 1, 2], ids=["input_ids", "position_ids", "token_type_ids"])
def test_an_id_is_below_the_table_s_size(direction, table):
    primitive, place = f"embedding_{direction}", table + (direction == "bwd")
    size = len(fuzz.right_call(primitive, SIZES)[place + 3])
    for wrong in (size, -1):
        with pytest.raises(IndexError, match=rf"ids\[4\] is {wrong}; expected 0 <= \w+ < {size}"):
            call(primitive, place, lambda ids, wrong=wrong: torch.cat([ids[:4], torch.tensor([wrong])]))
    call(primitive, place, lambda ids: torch.cat([ids[:4], torch.tensor([size - 1])]))


def test_unpacking_more_rows_than_there_are():
    for x, indices in ((torch.randn(0, 16), torch.arange(7)), (torch.randn(6, 16), torch.arange(7))):
        with pytest.raises(VALUE_ERROR, match=r"padding_unpack: indices has shape \[7\]; expected"):
            torch.ops.fastbert.padding_unpack(fuzz.guarded(x), indices, 2, 6)
    with pytest.raises(VALUE_ERROR, match="x has shape"):
        torch.ops.fastbert.padding_unpack(torch.tensor(1.0), torch.tensor([0]), 1, 1)


def test_a_mask_of_other_bytes_than_0_and_1():
    mask = torch.tensor([[2, 0, 255], [0, 128, 0]], dtype=torch.uint8).view(torch.bool)
    places, ends, facts = torch.ops.fastbert.padding_places(mask)
    assert (places.tolist(), ends.tolist(), facts.tolist()) == ([0, 2, 4, 1, 3, 5], [0, 2, 3], [3, 2, 0, 0])


# ---- values in tensor subclasses


class Tagged(Tensor):
    """A subclass that adds nothing, like the subclasses that libraries have for images or for metadata."""


def tagged(tensor):
    return tensor.as_subclass(Tagged)


BAD_VALUES = {
    "cu_seqlens": lambda: ops.attention(
        torch.randn(5, 3, 2, 4), tagged(torch.tensor([0, 3, 2**20], dtype=torch.int32)), 5
    ),
    "max_seqlen": lambda: ops.attention(torch.randn(5, 3, 2, 4), tagged(torch.tensor([0, 5], dtype=torch.int32)), 3),
    "input_ids": lambda: ops.embedding(
        tagged(torch.tensor([0, 5])), torch.tensor([0, 1]), None, *torch.randn(2, 5, 8), None, *torch.randn(2, 8)
    ),
    "labels": lambda: ops.cross_entropy(
        torch.randn(2, 4), torch.randn(5, 4), torch.randn(5), tagged(torch.tensor([0, 5]))
    ),
    "indices": lambda: ops.pack(torch.randn(2, 3), tagged(torch.tensor([0, 6]))),
    "repeated": lambda: ops.unpack(torch.randn(2, 3), tagged(torch.tensor([1, 1])), 1, 4),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_in_a_subclass_are_looked_at(name):
    with fastbert.backend("reference"), pytest.raises((IndexError, ValueError), match=name):
        BAD_VALUES[name]()
