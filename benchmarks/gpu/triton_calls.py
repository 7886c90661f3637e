"""Calls of every Triton primitive that between them reach every configuration worth compiling ahead of time.

On meta tensors: nothing is computed, and large shapes cost nothing. BERT's widths, and packed tokens, whose number is
as a rule no multiple of 16. bfloat16 is called in more ways than the other types, which compile to much the same.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastbert.triton import KERNELS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BERT = (768, 1024)  # hidden sizes
WIDE = (128, 2048, 4096, 8192)  # the other widths that row ops have configurations for
TOKENS = 8191
EPS, SITE, IGNORED = 1e-12, 4, -100


class Calls:
    """Calls primitives by name, and knows which it has called."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __call__(self, name: str, *args):
        self.called.add(name)
        return KERNELS[name](*args)


def run() -> None:
    """Makes all the calls. Raises RuntimeError if a primitive is left out."""
    call = Calls()
    for op in (layer_norm, add_layer_norm, bias_gelu, embedding, padding, dense_gelu, linear, cross_entropy, attention):
        op(call)
    if missing := KERNELS.keys() - call.called:
        raise RuntimeError(f"benchmarks/gpu/triton_calls.py does not call {', '.join(sorted(missing))}")


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
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


# ---- row ops


def layer_norm(call: Calls) -> None:
    for dtype, channels in [*itertools.product(DTYPES, BERT), *((torch.bfloat16, width) for width in WIDE)]:
        x, weight = new(TOKENS, channels, dtype=dtype), new(channels, dtype=dtype)
        _, mean, rstd = call("layer_norm_fwd", x, weight, weight, EPS)
        for need_dparams in (True, False) if channels == 768 else (True,):
            call("layer_norm_bwd", x, x, weight, mean, rstd, need_dparams)


def add_layer_norm(call: Calls) -> None:
    for dtype, channels in itertools.product(DTYPES, BERT):
        _add_layer_norm(call, dtype, dtype, channels, 0.1, x_bias=True)
    for channels in WIDE:
        _add_layer_norm(call, torch.bfloat16, torch.bfloat16, channels, 0.1, x_bias=True)
    for residual_dtype in (torch.bfloat16, torch.float32):
        _add_layer_norm(call, torch.bfloat16, residual_dtype, 5120, 0.1, x_bias=True)  # 3 chunks of the backward
    _add_layer_norm(call, torch.float32, torch.float32, 8192, 0.1, x_bias=True)
    for residual_dtype in (torch.bfloat16, torch.float32):  # float32 as under autocast
        _add_layer_norm(call, torch.bfloat16, residual_dtype, 768, 0.0, x_bias=False)
    _add_layer_norm(call, torch.bfloat16, torch.float32, 768, 0.1, x_bias=True)


def _add_layer_norm(call: Calls, dtype, residual_dtype, channels: int, p: float, x_bias: bool) -> None:
    x, residual = (new(TOKENS, channels, dtype=d) for d in (dtype, residual_dtype))
    weight, shift = new(channels), new(channels, dtype=dtype) if x_bias else None
    y, mean, rstd = call("add_layer_norm_fwd", x, residual, weight, weight, shift, key(p), EPS, p, SITE)
    call("add_layer_norm_bwd", y, x, residual, weight, mean, rstd, shift, key(p), p, SITE, True)


def bias_gelu(call: Calls) -> None:
    for dtype, hidden in itertools.product(DTYPES, BERT):
        x, bias = new(TOKENS, 4 * hidden, dtype=dtype), new(4 * hidden, dtype=dtype)
        for approximate in ("none", "tanh") if dtype == torch.bfloat16 else ("none",):
            call("bias_gelu_fwd", x, bias, approximate)
            for need_dbias in (True, False) if dtype == torch.bfloat16 else (True,):
                call("bias_gelu_bwd", x, x, bias, approximate, need_dbias)


def embedding(call: Calls) -> None:
    for dtype, channels in itertools.product(DTYPES, BERT):
        _embedding(call, dtype, channels, 0.1)
    _embedding(call, torch.bfloat16, 768, 0.0)
    for channels in WIDE:
        _embedding(call, torch.bfloat16, channels, 0.1)


def _embedding(call: Calls, dtype: torch.dtype, channels: int, p: float) -> None:
    ids = new(TOKENS, dtype=torch.int64)
    tables = [new(rows, channels, dtype=dtype) for rows in (30522, 512, 2)]
    inputs, weight = (ids, ids, ids, *tables), new(channels, dtype=dtype)
    y, mean, rstd = call("embedding_fwd", *inputs, weight, weight, key(p), EPS, p, SITE)
    call("embedding_bwd", y, *inputs, weight, mean, rstd, key(p), p, SITE, 0, [True] * 4)


def padding(call: Calls) -> None:
    call("padding_plan", torch.ones(2, 4, dtype=torch.bool))  # launches no kernel of ours, and reads its result
    indices = new(TOKENS, dtype=torch.int64)
    for dtype, width in [*itertools.product(DTYPES, BERT), (torch.int64, 1)]:
        packed = call("padding_pack", new(32, 512, width, dtype=dtype), indices)
        call("padding_unpack", packed, indices, 32, 512)


# ---- matrix products


def dense_gelu(call: Calls) -> None:
    for tokens, hidden in itertools.product((127, 255, 511, 1023, 4095), BERT):
        _dense_gelu(call, torch.bfloat16, tokens, hidden, 4 * hidden)
        _dense_gelu(call, torch.bfloat16, tokens, hidden, hidden)  # of a masked-LM head
    _dense_gelu(call, torch.bfloat16, TOKENS, 768, 3072, "tanh")
    for dtype, precision in ((torch.float16, "none"), (torch.float32, "tf32"), (torch.float32, "ieee")):
        with products(precision):
            _dense_gelu(call, dtype, TOKENS, 768, 3072)
    for dtype in DTYPES[:2]:
        _dense_gelu(call, dtype, TOKENS, 765, 3072)  # rows that no descriptor can describe


def _dense_gelu(call: Calls, dtype, tokens: int, inner: int, channels: int, approximate: str = "none") -> None:
    x, weight, bias = (new(*shape, dtype=dtype) for shape in ((tokens, inner), (channels, inner), (channels,)))
    for save in (True, False):
        y, preactivation = call("dense_gelu_fwd", x, weight, bias, approximate, save)
    call("dense_gelu_bwd", y, x, weight, y, approximate, True, True)


def linear(call: Calls) -> None:
    x = new(TOKENS, 768)
    call("linear_fwd", x, new(3072, 768), new(3072))  # a library's: no kernel of ours


def cross_entropy(call: Calls) -> None:
    for dtype, need_dlogits in itertools.product(DTYPES, (True, False)):
        hidden, weight, labels = new(1221, 768, dtype=dtype), new(30522, 768, dtype=dtype), new(1221, dtype=torch.int64)
        loss, dlogits = call("cross_entropy_fwd", hidden, weight, weight[:, 0], labels, IGNORED, need_dlogits)
    call("cross_entropy_bwd", loss, hidden, weight, labels, new(1221, 30522, dtype=dtype), IGNORED, True, True)


# ---- attention


def attention(call: Calls) -> None:
    for size, longest in itertools.product((32, 64, 128), (128, 512, 2048)):
        for p in (0.0, 0.1) if size == 64 else (0.1,):
            _attention(call, torch.bfloat16, size, p, longest)
    for dtype, precision in ((torch.float16, "none"), (torch.float32, "tf32"), (torch.float32, "ieee")):
        with products(precision):
            for longest in (128, 2048):
                _attention(call, dtype, 64, 0.1, longest)


def _attention(call: Calls, dtype: torch.dtype, size: int, p: float, longest: int) -> None:
    qkv, ends = new(TOKENS, 3, 768 // size, size, dtype=dtype), new(33, dtype=torch.int32)
    out, lse = call("attention_fwd", qkv, ends, longest, size**-0.5, p, key(p), SITE)
    call("attention_bwd", out, qkv, out, lse, ends, longest, size**-0.5, p, key(p), SITE)
