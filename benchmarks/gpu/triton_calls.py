"""Calls of every Triton primitive, which together reach every configuration worth compiling ahead of time.

Tensors are on the meta device: nothing is computed, and large shapes cost nothing. Widths are BERT's; tokens are
packed, so their number is usually no multiple of 16. bfloat16 is called in more ways than the other types, which
compile to much the same code.
"""

import contextlib
from collections.abc import Iterator
from itertools import chain, product

import torch
from torch import Tensor

from fastbert.triton import KERNELS

FP32, FP16, BF16 = DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BERT = (768, 1024)  # hidden sizes
WIDE = (128, 2048, 4096, 8192)  # the other widths that row ops have configurations for
TOKENS = 8191
EPS, SITE, IGNORED = 1e-12, 4, -100
PRECISIONS = ((FP16, "none"), (FP32, "tf32"), (FP32, "ieee"))

Call = tuple  # a primitive's name, then its arguments


def run() -> None:
    """Makes all the calls. Raises RuntimeError if a primitive is left out."""
    called = set()
    with_products = dense_gelu(), cross_entropy(), linear_max()
    for name, *args in chain(rows(), padding(), *with_products, attention(), relative_attention()):
        KERNELS[name](*args)
        called.add(name)
    if missing := KERNELS.keys() - called:
        raise RuntimeError(f"benchmarks/gpu/triton_calls.py does not call {', '.join(sorted(missing))}")


def new(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def key(p: float) -> Tensor | None:
    return new(1, dtype=torch.int64) if p else None


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """PyTorch's setting for float32 products."""
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def rows() -> Iterator[Call]:
    narrow, wide = list(product(DTYPES, BERT)), [(BF16, channels) for channels in WIDE]
    for dtype, channels in narrow + wide:
        yield from layer_norm(dtype, channels)
    for dtype, channels in narrow + wide + [(BF16, 5120), (FP32, 8192)]:  # 5120: 3 chunks in the backward
        yield from add_layer_norm(dtype, dtype, channels, 0.1, x_bias=True)
    yield from add_layer_norm(BF16, BF16, 768, 0.0, x_bias=False)
    for channels, p, x_bias in ((5120, 0.1, True), (768, 0.1, True), (768, 0.0, False)):  # as under autocast
        yield from add_layer_norm(BF16, FP32, channels, p, x_bias)
    for dtype, hidden in narrow:
        yield from bias_gelu(dtype, 4 * hidden)
    for dtype, channels, p in [*((*item, 0.1) for item in narrow + wide), (BF16, 768, 0.0)]:
        yield from embedding(dtype, channels, p)


def layer_norm(dtype: torch.dtype, channels: int) -> Iterator[Call]:
    x, weight, each = new(TOKENS, channels, dtype=dtype), new(channels, dtype=dtype), new(TOKENS)
    yield "layer_norm_fwd", x, weight, weight, EPS
    for need_dparams in (True, False) if channels == 768 else (True,):
        yield "layer_norm_bwd", x, x, weight, each, each, need_dparams


def add_layer_norm(
    dtype: torch.dtype, residual_dtype: torch.dtype, channels: int, p: float, x_bias: bool
) -> Iterator[Call]:
    x, residual = (new(TOKENS, channels, dtype=d) for d in (dtype, residual_dtype))
    y = new(TOKENS, channels, dtype=torch.promote_types(dtype, residual_dtype))
    weight, shift, each = new(channels), new(channels, dtype=dtype) if x_bias else None, new(TOKENS)
    yield "add_layer_norm_fwd", x, residual, weight, weight, shift, key(p), EPS, p, SITE
    yield "add_layer_norm_bwd", y, x, residual, weight, each, each, shift, key(p), p, SITE, True


def bias_gelu(dtype: torch.dtype, channels: int) -> Iterator[Call]:
    x, bias = new(TOKENS, channels, dtype=dtype), new(channels, dtype=dtype)
    for approximate in ("none", "tanh") if dtype == BF16 else ("none",):
        yield "bias_gelu_fwd", x, bias, approximate
        for need_dbias in (True, False) if dtype == BF16 else (True,):
            yield "bias_gelu_bwd", x, x, bias, approximate, need_dbias


def embedding(dtype: torch.dtype, channels: int, p: float) -> Iterator[Call]:
    ids, y, each = new(TOKENS, dtype=torch.int64), new(TOKENS, channels, dtype=dtype), new(TOKENS)
    inputs = (ids, ids, ids, *(new(size, channels, dtype=dtype) for size in (30522, 512, 2)))
    weight = new(channels, dtype=dtype)
    yield "embedding_fwd", *inputs, weight, weight, key(p), EPS, p, SITE
    yield "embedding_bwd", y, *inputs, weight, each, each, key(p), p, SITE, 0, [True] * 4


def padding() -> Iterator[Call]:
    yield "padding_places", torch.ones(2, 4, dtype=torch.bool)  # no kernels of ours
    indices = new(TOKENS, dtype=torch.int64)
    for dtype, width in [*product(DTYPES, BERT), (torch.int64, 1)]:
        yield "padding_pack", new(32, 512, width, dtype=dtype), indices
        yield "padding_unpack", new(TOKENS, width, dtype=dtype), indices, 32, 512


def dense_gelu() -> Iterator[Call]:
    x, weight = new(TOKENS, 768), new(3072, 768)
    yield "linear_fwd", x, weight, new(3072)  # a library's product, and so are its gradients: no kernels of ours
    yield "linear_bwd", new(TOKENS, 3072), x, weight, True, True
    for tokens, hidden in product((127, 255, 511, 1023, 4095), BERT):
        for channels in (4 * hidden, hidden):  # of a layer, of a masked-LM head
            yield from _dense_gelu(BF16, tokens, hidden, channels)
    yield from _dense_gelu(BF16, TOKENS, 768, 3072, "tanh")
    for dtype, precision in PRECISIONS:
        with products(precision):
            yield from _dense_gelu(dtype, TOKENS, 768, 3072)
    for dtype in (FP32, FP16):
        yield from _dense_gelu(dtype, TOKENS, 765, 3072)  # rows whose stride no descriptor can describe


def _dense_gelu(
    dtype: torch.dtype, tokens: int, inner: int, channels: int, approximate: str = "none"
) -> Iterator[Call]:
    x, weight, bias = (new(*shape, dtype=dtype) for shape in ((tokens, inner), (channels, inner), (channels,)))
    y = new(tokens, channels, dtype=dtype)
    for save in (True, False):
        yield "dense_gelu_fwd", x, weight, bias, approximate, save
    yield "dense_gelu_bwd", y, x, weight, y, approximate, True, True


def cross_entropy() -> Iterator[Call]:
    labels = new(1221, dtype=torch.int64)
    for dtype, need_dlogits in product(DTYPES, (True, False)):
        hidden, weight = new(1221, 768, dtype=dtype), new(30522, 768, dtype=dtype)
        yield "cross_entropy_fwd", hidden, weight, weight[:, 0], labels, IGNORED, need_dlogits
    logits = new(1221, 30522, dtype=BF16)
    yield "cross_entropy_bwd", new(), hidden, weight, labels, logits, IGNORED, True, True


def linear_max() -> Iterator[Call]:
    ends = new(65, dtype=torch.int32)
    for dtype, precision in ((BF16, "none"), *PRECISIONS):
        x, weight, dy = (new(*size, dtype=dtype) for size in ((TOKENS, 768), (30522, 768), (64, 30522)))
        with products(precision):
            for need_rows in (True, False):
                yield "linear_max_fwd", x, weight, weight[:, 0], ends, need_rows
            yield "linear_max_bwd", dy, x, weight, new(64, 30522, dtype=torch.int32), True, True
    yield "linear_max_fwd", x, weight, None, ends, True


def attention() -> Iterator[Call]:
    for size, longest in product((32, 64, 128), (16, 32, 64, 128, 512, 2048)):
        for p in (0.0, 0.1) if size == 64 else (0.1,):
            yield from _attention(BF16, size, p, longest)
    for size, longest in product((63, 127), (16, 32)):  # short sequences, rows not readable 16 bytes at a time
        yield from _attention(BF16, size, 0.1, longest)
    for (dtype, precision), (size, longest) in product(PRECISIONS, ((128, 16), (128, 32), (64, 128), (64, 2048))):
        with products(precision):
            yield from _attention(dtype, size, 0.1, longest)


def _attention(dtype: torch.dtype, size: int, p: float, longest: int) -> Iterator[Call]:
    heads = 768 // size
    qkv, out = new(TOKENS, 3, heads, size, dtype=dtype), new(TOKENS, heads, size, dtype=dtype)
    ends, lse = new(33, dtype=torch.int32), new(heads, TOKENS)
    yield "attention_fwd", qkv, ends, longest, size**-0.5, p, key(p), SITE
    yield "attention_bwd", out, qkv, out, lse, ends, longest, size**-0.5, p, key(p), SITE


def relative_attention() -> Iterator[Call]:
    every = (True, True, True)  # with tables for the rows of queries and of keys, and with a bias
    for size in (32, 64, 128):
        yield from _relative_attention(BF16, size, 0.1, every)
    for tables in ((True, True, False), (True, False, False), (False, True, False), (False, False, True)):
        yield from _relative_attention(BF16, 64, 0.0, tables)
    for dtype, precision in PRECISIONS:
        with products(precision):
            yield from _relative_attention(dtype, 64, 0.1, every)


def _relative_attention(
    dtype: torch.dtype, size: int, p: float, tables: tuple[bool, bool, bool], longest: int = 512
) -> Iterator[Call]:
    heads = 768 // size
    qkv, out = new(TOKENS, 3, heads, size, dtype=dtype), new(TOKENS, heads, size, dtype=dtype)
    ends, lse = new(33, dtype=torch.int32), new(heads, TOKENS)
    shapes = (512, heads, size), (512, heads, size), (heads, 512)
    slots, types = new(2 * longest - 1, dtype=torch.int32), (dtype, dtype, FP32)
    given = [new(*shape, dtype=d) if there else None for there, shape, d in zip(tables, shapes, types, strict=True)]
    rest = slots, *given, ends, longest, size**-0.5, p, key(p), SITE
    yield "relative_attention_fwd", qkv, *rest
    yield "relative_attention_bwd", out, qkv, out, lse, *rest, True
