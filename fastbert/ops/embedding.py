"""embedding: the sum of word, position and token-type rows, LayerNorm and dropout, in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert import backends, random
from fastbert.ops import checks
from fastbert.ops.layer_norm import drop_rows, norm_backward, norm_forward, statistics
from fastbert.ops.numbers import in_one_dtype, narrow, wide
from fastbert.ops.op import Primitive, first_derivative_only, needs_grad

# ---- plain PyTorch


def embedding_ref(
    input_ids: Tensor,
    position_ids: Tensor,
    token_type_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`embedding` in plain PyTorch; it can be differentiated any number of times."""
    z = wide(F.embedding(input_ids, word, padding_idx))
    z = z + wide(F.embedding(position_ids, position, position_padding_idx))
    if token_type is not None:
        z = z + wide(F.embedding(token_type_ids, token_type))
    y = F.layer_norm(z, weight.shape, wide(weight), wide(bias), eps)
    return drop_rows(y, dropout_p, rng, site).to(_result_dtype(word, position, token_type))


def _result_dtype(*tables: Tensor | None) -> torch.dtype:
    dtypes = [table.dtype for table in tables if table is not None]
    return torch.promote_types(torch.promote_types(dtypes[0], dtypes[1]), dtypes[-1])


def _sum(input_ids, position_ids, token_type_ids, word, position, token_type):
    z = wide(word[input_ids]) + wide(position[position_ids])
    return z if token_type is None else z + wide(token_type[token_type_ids])


def _table_gradient(dz: Tensor, ids: Tensor | None, table: Tensor | None, needed: bool, padding_idx: int) -> Tensor:
    """The sums of dz's rows by id, in float32, in a fixed order (sorted by id on a GPU) and without atomics."""
    if not needed:
        return dz.new_empty(0)
    return torch.ops.aten.embedding_dense_backward(dz, ids, table.shape[0], padding_idx, False).to(table.dtype)


def _forward(
    input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng, eps, dropout_p, site
):
    z = _sum(input_ids, position_ids, token_type_ids, word, position, token_type)
    y, mean, rstd = norm_forward(z, weight, bias, eps)
    y = drop_rows(y, dropout_p, rng, site)
    return narrow(y, _result_dtype(word, position, token_type)), mean, rstd


def _backward(
    dy, input_ids, position_ids, token_type_ids, word, position, token_type, weight, mean, rstd, rng,
    dropout_p, site, padding_idx, need,
):  # fmt: skip
    dy = drop_rows(wide(dy), dropout_p, rng, site)
    z = _sum(input_ids, position_ids, token_type_ids, word, position, token_type)
    dz, *dparams = norm_backward(dy, z, weight, mean, rstd, need[3])
    return (
        _table_gradient(dz, input_ids, word, need[0], padding_idx),
        _table_gradient(dz, position_ids, position, need[1], -1),
        _table_gradient(dz, token_type_ids, token_type, need[2], -1),
        *dparams,
    )


# ---- schemas


def _fake_forward(
    input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng, eps, dropout_p, site
):
    y = word.new_empty((*input_ids.shape, word.shape[1]), dtype=_result_dtype(word, position, token_type))
    return y, statistics(y), statistics(y)


def _fake_backward(
    dy, input_ids, position_ids, token_type_ids, word, position, token_type, weight, mean, rstd, rng,
    dropout_p, site, padding_idx, need,
):  # fmt: skip
    tables = (word, position, token_type)
    dtables = [
        t.new_empty(t.shape) if n else dy.new_empty(0, dtype=mean.dtype) for t, n in zip(tables, need[:3], strict=True)
    ]
    return *dtables, *(weight.new_empty(weight.shape if need[3] else (0,)) for _ in range(2))


_INPUTS = (
    "Tensor input_ids, Tensor position_ids, Tensor? token_type_ids,"
    " Tensor word, Tensor position, Tensor? token_type, Tensor weight, "
)
FWD = Primitive(
    "embedding_fwd",
    f"({_INPUTS}Tensor bias, Tensor? rng, float eps, float dropout_p, SymInt site)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    _fake_forward,
    _forward,
)
BWD = Primitive(
    "embedding_bwd",
    f"(Tensor dy, {_INPUTS}Tensor mean, Tensor rstd, Tensor? rng,"
    " float dropout_p, SymInt site, int padding_idx, bool[] need)"  # need: word, position, token type, LayerNorm
    " -> (Tensor dword, Tensor dposition, Tensor dtoken_type, Tensor dweight, Tensor dbias)",
    _fake_backward,
    _backward,
)


# ---- the op


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, backend, input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng,
        eps, dropout_p, site, padding_idx, position_padding_idx,
    ):  # fmt: skip
        inputs = (input_ids, position_ids, token_type_ids, word, position, token_type, weight)
        y, mean, rstd = FWD(backend, *inputs, bias, rng, eps, dropout_p, site)
        ctx.save_for_backward(*inputs, mean, rstd, rng)
        ctx.backend, ctx.dropout_p, ctx.site, ctx.padding_idx = backend, dropout_p, site, padding_idx
        ctx.position_padding_idx = position_padding_idx
        return y

    @staticmethod
    @first_derivative_only("embedding")
    def backward(ctx, saved, dy):
        needs = ctx.needs_input_grad
        need = [needs[4], needs[5], needs[6], needs[7] or needs[8]]
        grads = BWD(ctx.backend, dy, *saved, ctx.dropout_p, ctx.site, ctx.padding_idx, need)
        dword, dposition, dtoken_type, dweight, dbias = grads
        if need[1] and ctx.position_padding_idx is not None:
            dposition[ctx.position_padding_idx] = 0
        return None, None, None, None, dword, dposition, dtoken_type if need[2] else None, dweight, dbias, *[None] * 6


def _check(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, **padding):
    op = "embedding"
    if (token_type is None) != (token_type_ids is None):
        raise ValueError(f"{op}: token_type and token_type_ids go together; expected both or neither")
    ids, tables = {"input_ids": input_ids, "position_ids": position_ids}, {"word": word, "position": position}
    if token_type is not None:
        ids["token_type_ids"], tables["token_type"] = token_type_ids, token_type
    checks.integers(op, **ids)
    checks.floats(op, tables, {"weight": weight, "bias": bias})
    checks.same_device(op, {**ids, "word": word})
    for name, tensor in tables.items():
        checks.shape(op, name, tensor, (None, word.shape[-1]), "(rows, C)", "C as word has")
    for name, tensor in (("weight", weight), ("bias", bias)):
        checks.shape(op, name, tensor, (word.shape[-1],), "(C,)", "the last dimension of word")
    for name, tensor in ids.items():
        checks.shape(op, name, tensor, tuple(input_ids.shape), "input_ids'")
    if word.shape[-1] == 0:
        raise ValueError(f"{op}: word has shape {tuple(word.shape)}; expected (rows, C) with C > 0")
    for (name, row), table in zip(padding.items(), (word, position), strict=True):
        if row is not None and not 0 <= row < table.shape[0]:
            raise ValueError(f"{op}: {name} is {row}; expected 0 <= {name} < {table.shape[0]}")


def embedding(
    input_ids: Tensor,
    position_ids: Tensor,
    token_type_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """BERT's embeddings: the sum of three table rows, LayerNorm and dropout.

    input_ids, position_ids, token_type_ids: (...), int64 or int32, of one shape. word (V, C), position (P, C),
    token_type (K, C): the tables; token_type and its ids may both be None. weight, bias: (C,), LayerNorm's. Dtypes as
    in `add_layer_norm`. padding_idx, position_padding_idx: the word row and the position row that get no gradient
    (RoBERTa's models have both). dropout_p, rng, site: as in `add_layer_norm`; element t of the flattened ids is token
    t. Returns (..., C) in the promoted dtype of the tables. The tables' gradients are summed in float32 in a fixed
    order. Raises IndexError (an id out of range: always on a CPU, under FASTBERT_CHECK=1 on a GPU, where it otherwise
    gives NaN), ValueError, TypeError.

    Equivalent to::

        z = F.embedding(input_ids, word, padding_idx)
        z = z + F.embedding(position_ids, position, position_padding_idx)
        z = z + F.embedding(token_type_ids, token_type)
        F.dropout(F.layer_norm(z, weight.shape, weight, bias, eps), dropout_p)
    """
    rows = {"padding_idx": padding_idx, "position_padding_idx": position_padding_idx}
    _check(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, **rows)
    checks.dropout("embedding", dropout_p, rng, word.device, random.ROW_BITS)
    weight, bias = in_one_dtype(weight, bias)
    live = needs_grad(word, position, token_type, weight, bias)
    backend = backends.choose("embedding", word.device.type, word.dtype, backward=live, size=word.shape[1])
    if backend != "cpu":  # the cpu kernel checks the ids itself
        checks.index_range("embedding", "input_ids", input_ids, word.shape[0])
        checks.index_range("embedding", "position_ids", position_ids, position.shape[0])
        if token_type is not None:
            checks.index_range("embedding", "token_type_ids", token_type_ids, token_type.shape[0])
    inputs = (input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, rng)
    if not live:
        return FWD(backend, *inputs, eps, dropout_p, site)[0]
    row = -1 if padding_idx is None else padding_idx
    return _Embedding.apply(backend, *inputs, eps, dropout_p, site, row, position_padding_idx)
