"""FlashAttention's two operators of torch.ops.aten, which torch.nn.attention.varlen calls, for CPU tensors, in float32.

They take what the real ones take and refuse the rest. Like these they write only rows of sequences: others are NaN.
"""

import contextlib
import dataclasses
import functools

import torch

from fastbert import backends

ROWS = 64  # of a tile of queries: rows up to max_q are written in whole tiles
HALF = (torch.bfloat16, torch.float16)


def _sequences(tensors, ends, longest):
    """Slices of the sequences; raises where the real kernels would read what is not there, or unaligned."""
    for x in tensors:
        tokens, _, head_dim = x.shape
        assert x.stride(2) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == x.stride(1) % 8 == 0
        assert head_dim % 8 == 0 and head_dim <= 256
    assert ends.dtype == torch.int32 and longest > 0 and len(ends) > 1
    assert 0 <= int(ends.min()) and int(ends.max()) <= tokens
    return [slice(a, b) for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False) if b > a]


def _written(rows, longest):
    return slice(rows.start, min(rows.stop, rows.start + -(-longest // ROWS) * ROWS))


def _heads_first(x, rows):
    return x[rows].float().transpose(0, 1)  # [H, S, D]


def forward(q, k, v, ends, ends_k, longest, longest_k, dropout_p, is_causal, return_debug_mask, *, scale, **options):
    assert dropout_p == 0 and not is_causal and longest == longest_k and torch.equal(ends, ends_k)
    assert (options.pop("window_size_left"), options.pop("window_size_right")) == (-1, -1)
    assert not any(value is not None for value in options.values()), options
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for rows in _sequences((q, k, v), ends, longest):
        mine = _written(rows, longest)
        scores = _heads_first(q, mine) @ _heads_first(k, rows).mT * scale
        lse[:, mine] = scores.logsumexp(-1)
        out[mine] = (scores.softmax(-1) @ _heads_first(v, rows)).transpose(0, 1).to(q.dtype)
    nothing = torch.zeros(2, dtype=torch.uint64)
    return out, lse, nothing, torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype)


def backward(dout, q, k, v, out, lse, ends, ends_k, longest, longest_k, dropout_p, is_causal, *rng, scale, **window):
    rng_state, _ = rng
    assert dropout_p == 0 and not is_causal and longest == longest_k and rng_state.shape == (2,)
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    assert window == {"window_size_left": -1, "window_size_right": -1}
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (q, k, v))
    for rows in _sequences((dout, q, k, v, out), ends, longest):
        mine = _written(rows, longest)
        do, qs, ks, vs = _heads_first(dout, mine), *(_heads_first(x, r) for x, r in ((q, mine), (k, rows), (v, rows)))
        p = (qs @ ks.mT * scale - lse[:, mine, None]).exp()
        delta = (do * _heads_first(out, mine)).sum(-1, keepdim=True)
        ds = p * (do @ vs.mT - delta) * scale
        for grad, part, value in ((dq, mine, ds @ ks), (dk, rows, ds.mT @ qs), (dv, rows, p.mT @ do)):
            grad[part] = value.transpose(0, 1).to(q.dtype)
    return dq, dk, dv


@functools.cache
def _register():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


@contextlib.contextmanager
def installed(dtypes=(*HALF, torch.float32)):
    """Within this block backend "varlen" runs on CPU tensors of these dtypes; float32 shows a wrong layout best."""
    _register()
    kernels = backends.KERNELS["attention"]
    before = backends.SERVES["varlen"], backends._PROBLEMS["varlen"], kernels["varlen"]
    use(("cpu",), lambda: None, dataclasses.replace(kernels["varlen"], dtypes=dtypes))
    try:
        yield
    finally:
        use(*before)


def use(serves, problem, kernel):
    backends.SERVES["varlen"], backends._PROBLEMS["varlen"] = serves, problem
    backends.KERNELS["attention"]["varlen"] = kernel
    backends.why_not.cache_clear()
