from itertools import accumulate

import pytest
import torch
from op_suite import HALF, device_for

import fastbert
from fastbert import backends, ops, padding, testing
from fastbert.ops import op
from fastbert.ops.padding import PLACES


def mask_of(*rows):
    return torch.tensor(rows)


RIGHT = mask_of([1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1])
LEFT = mask_of([0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1])
INTERIOR = mask_of([1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0])


@pytest.mark.parametrize("mask", [RIGHT, LEFT, INTERIOR], ids=("right", "left", "interior-and-empty"))
@pytest.mark.parametrize("form", ["int64", "bool", "float", "4d-bool", "4d-additive", "4d-rows", "3d", "values"])
def test_masks_people_pass(mask, form):
    visible = mask.bool()
    forms = {
        "int64": mask,
        "bool": visible,
        "float": mask.float(),
        "values": mask * -7,  # nonzero is visible
        "4d-bool": visible[:, None, None, :],
        "4d-additive": torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None, None, :],
        "4d-rows": visible[:, None, None, :].expand(-1, 1, 4, -1).clone(),
        "3d": torch.where(visible, 0.0, -1e4)[:, None, :],
    }
    packing = padding.plan(forms[form], 3, 4, torch.device("cpu"))
    lengths = mask.sum(1)
    assert packing.cu_seqlens.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert packing.cu_seqlens.dtype == torch.int32 and packing.max_seqlen == int(lengths.max())
    assert packing.indices.tolist() == visible.flatten().nonzero().flatten().tolist()
    assert packing.positions().tolist() == visible.nonzero()[:, 1].tolist()
    x = torch.randn(3, 4, 5)
    assert torch.equal(packing.unpack(packing.pack(x)), x * visible[..., None])


def test_no_mask_and_a_full_one_need_no_gather():
    for mask in (None, torch.ones(2, 3)):
        packing = padding.plan(mask, 2, 3, torch.device("cpu"))
        assert packing.indices is None and packing.cu_seqlens.tolist() == [0, 3, 6] and packing.max_seqlen == 3


@pytest.mark.parametrize(("batch", "seqlen"), [(0, 4), (2, 0)])
def test_an_empty_batch(batch, seqlen):
    for mask in (None, torch.ones(batch, seqlen), torch.zeros(batch, 1, 1, seqlen)):
        packing = padding.plan(mask, batch, seqlen, torch.device("cpu"))
        assert packing.cu_seqlens.tolist() == [0] * (batch + 1)
        assert packing.unpack(packing.pack(torch.zeros(batch, seqlen, 3))).shape == (batch, seqlen, 3)


def test_all_zero_mask_has_no_tokens():
    packing = padding.plan(torch.zeros(2, 3), 2, 3, torch.device("cpu"))
    assert packing.cu_seqlens.tolist() == [0, 0, 0] and packing.pack(torch.ones(2, 3, 4)).shape == (0, 4)
    assert torch.equal(packing.unpack(torch.ones(0, 4)), torch.zeros(2, 3, 4))


CAUSAL = torch.ones(4, 4).tril().bool()


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (CAUSAL[None, None].expand(3, 1, -1, -1), ValueError, "is no key-padding mask"),
        (torch.randint(0, 2, (3, 1, 4, 4)).bool() | CAUSAL, ValueError, "is no key-padding mask"),
        (torch.where(CAUSAL, 0.0, -1e4).expand(3, 1, -1, -1), ValueError, "is no key-padding mask"),
        (torch.stack([RIGHT, LEFT], 1)[:, :, None].expand(-1, -1, 4, -1), ValueError, "is no key-padding mask"),
        (torch.randn(3, 1, 1, 4), ValueError, "is no key-padding mask"),  # a bias
        (-torch.rand(3, 1, 1, 4), ValueError, "is no key-padding mask"),  # a bias that has only penalties
        (torch.tensor([[0.0, 0.0, -1e4, -1e4]] * 3), ValueError, "is no key-padding mask"),  # an additive mask in 2-D
        (torch.ones(3, 5), ValueError, r"attention_mask has shape \(3, 5\); expected \(B, S\) = \(3, 4\)"),
        (torch.ones(4), ValueError, r"attention_mask has shape \(4,\)"),
        (torch.ones(3, 12, 4, 5), ValueError, r"expected \(B, S\), \(B, 1, 1, S\)"),
        (torch.ones(3, 4, dtype=torch.complex64), TypeError, "torch.complex64"),
        ([[1, 1, 1, 0]] * 3, TypeError, "attention_mask is a list"),
        (torch.ones(3, 4, device="meta"), ValueError, "attention_mask on meta"),
    ],
)
def test_other_masks_are_refused(mask, error, words):
    with pytest.raises(error, match=words):
        padding.plan(mask, 3, 4, torch.device("cpu"))


def test_an_additive_mask_in_two_dimensions_is_refused_in_compiled_code():
    cu_seqlens = torch.compile(lambda mask: padding.plan(mask, 2, 4, mask.device).cu_seqlens, backend="aot_eager")
    assert cu_seqlens(RIGHT[1:].float()).tolist() == [0, *RIGHT[1:].sum(1).cumsum(0)]
    with pytest.raises(RuntimeError, match="an additive mask in two dimensions is not supported"):
        cu_seqlens((1 - RIGHT[1:].float()) * -1e4)


def test_head_masks_that_agree_are_padding_masks():
    mask = RIGHT.bool()[:, None, None, :].expand(3, 12, 4, 4)
    assert padding.plan(mask, 3, 4, torch.device("cpu")).cu_seqlens.tolist() == [0, 3, 4, 8]


@pytest.fixture(params=backends.BACKENDS)
def backend(request):
    device = device_for(request.param, "padding", torch.float32)
    with fastbert.backend(request.param):
        yield device


def test_where_the_tokens_are(backend):
    for shape in ((1, 1), (3, 7), (5, 64), (2, 1000)):
        rows = (torch.rand(shape) < 0.6).tolist()
        ends = [sum(map(sum, rows[:n])) for n in range(len(rows) + 1)]
        places = [b * shape[1] + s for b, row in enumerate(rows) for s, seen in enumerate(row) if seen]
        transposed = torch.tensor(rows, device=backend).T.contiguous().T
        packing = padding.plan(transposed, *shape, transposed.device)
        assert packing.cu_seqlens.tolist() == ends and packing.max_seqlen >= max(map(sum, rows))
        if packing.indices is not None:
            assert packing.indices.tolist() == places and packing.max_seqlen == max(map(sum, rows))


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_places_of_random_masks(name):
    device = device_for(name, "padding", torch.bool)
    for shape, share in (((1, 1), 1.0), ((3, 7), 0.6), ((5, 64), 0.9), ((2, 9), 0.0), ((4, 1), 0.5), ((2101, 3), 0.7)):
        visible = torch.rand(shape) < share
        places, ends, facts = PLACES(name, visible.to(device))
        rows = ["".join(" #"[token] for token in row) for row in visible.tolist()]
        lengths = [row.count("#") for row in rows]
        flat = visible.flatten()
        assert torch.equal(places.cpu(), torch.cat([flat.nonzero(), (~flat).nonzero()]).squeeze(1))
        assert ends.tolist() == [*accumulate(lengths, initial=0)]
        in_runs = all(len(row.split()) <= 1 for row in rows)
        assert facts.tolist() == [sum(lengths), max(lengths), all(row[0] == "#" for row in rows), in_runs]


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_row_that_is_alone_among_many(name):
    """Of 300 rows only one begins with a gap, only one has a gap within, and only one is long: 40, 290 and 299."""
    device = device_for(name, "padding", torch.bool)
    for rows in ((40, 299, 290), (299, 40, 290), (290, 299, 40)):
        for kind, facts in enumerate(([300, 1, 0, 1], [301, 2, 1, 0], [302, 3, 1, 1])):
            mask = torch.tensor([[1, 0, 0]] * 300, dtype=torch.bool, device=device)
            mask[rows[kind]] = torch.tensor(([0, 1, 0], [1, 0, 1], [1, 1, 1])[kind], dtype=torch.bool)
            assert PLACES(name, mask)[2].tolist() == facts


def test_places_of_all_tokens(backend):
    """Tokens that are not visible follow the visible ones, in order. Mask bytes other than 0 and 1 count as visible."""
    mask = torch.tensor([[2, 0, 255], [0, 128, 0]], dtype=torch.uint8, device=backend).view(torch.bool)
    places, ends, facts = PLACES(backends.choose("padding", backend, torch.bool, backward=False), mask)
    assert places.tolist() == [0, 2, 4, 1, 3, 5] and ends.tolist() == [0, 2, 3] and facts.tolist() == [3, 2, 0, 0]
    for shape in ((0, 4), (2, 0)):
        places, ends, facts = PLACES(
            backends.choose("padding", backend, torch.bool, backward=False),
            torch.ones(shape, dtype=torch.bool, device=backend),
        )
        assert places.shape == (0,) and ends.tolist() == [0] * (shape[0] + 1) and facts.tolist() == [0, 0, 1, 1]


def test_operators_and_their_fakes(backend):
    name = backends.choose("padding", backend, torch.float32, backward=False)
    if name == "reference":
        pytest.skip("the reference backend is plain PyTorch: it has no operator of its own")
    operators = getattr(torch.ops, op.NAMESPACE[name])
    indices = torch.tensor([0, 2, 3, 5, 11], device=backend)
    for primitive, args in (
        (operators.padding_pack, (torch.randn(3, 4, 5, device=backend), indices)),
        (operators.padding_pack, (torch.randn(3, 5, 4, device=backend).mT, indices)),
        (operators.padding_unpack, (torch.randn(5, 2, 3, device=backend), indices, 3, 4)),
    ):
        torch.library.opcheck(primitive.default, args, test_utils=("test_schema", "test_faketensor"))
    visible = torch.rand(3, 4, device=backend) < 0.5
    torch.library.opcheck(operators.padding_places.default, (visible,), test_utils=("test_schema", "test_faketensor"))
    if name != "cpu":  # places on a GPU are not checked: those out of range are left out
        places = torch.tensor([-1, 12, 2, 1], device=backend)
        out = operators.padding_unpack(torch.ones(4, 2, device=backend), places, 1, 2)
        assert out.tolist() == [[[0, 0], [1, 1]]]
        out = operators.padding_pack(torch.ones(1, 2, 2, device=backend), torch.tensor([-1, 2, 1], device=backend))
        assert out.tolist() == [[0, 0], [0, 0], [1, 1]]
    else:
        with pytest.raises(IndexError, match="indices holds 12"):
            operators.padding_unpack(torch.ones(1, 3), torch.tensor([12]), 3, 4)


@pytest.mark.parametrize("width", (1, 1500), ids=("scalars", "rows-wider-than-a-tile"))
@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16))
def test_every_dtype_over_many_places(backend, dtype, width):
    """More tokens than a tile of the Triton kernels has, in another order than their places."""
    batch, seqlen, shape = (30, 50, ()) if width == 1 else (3, 4, (width,))
    x = torch.randint(0, 100, (batch, seqlen, *shape), device=backend).to(dtype)
    indices = torch.randperm(batch * seqlen, device=backend)[: batch * seqlen * 4 // 5]
    packed = ops.pack(x, indices)
    assert packed.dtype == dtype and torch.equal(packed, x.flatten(0, 1)[indices])
    truth = torch.zeros_like(x.flatten(0, 1))
    truth[indices] = packed
    assert torch.equal(ops.unpack(packed, indices, batch, seqlen).flatten(0, 1), truth)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, *HALF))
def test_pack_and_unpack_are_exact_both_ways(backend, dtype):
    name = backends.choose("padding", backend, torch.float32, backward=True)
    if reason := backends.why_not(name, "padding", backend, dtype, backward=True):
        pytest.skip(reason)
    x, indices = torch.randn(3, 4, 5).to(backend, dtype), torch.tensor([0, 2, 3, 5, 11], device=backend)
    there = testing.evaluate(lambda x: ops.pack(x, indices), {"x": x})
    assert torch.equal(there.outputs["output"], x.flatten(0, 1)[indices])
    truth = testing.evaluate(lambda x: ops.pack_ref(x, indices), {"x": x})
    assert torch.equal(there.gradients["dx"], truth.gradients["dx"])
    rows = x.flatten(0, 1)[:5]
    back = testing.evaluate(lambda x: ops.unpack(x, indices, 3, 4), {"x": rows})
    truth = testing.evaluate(lambda x: ops.unpack_ref(x, indices, 3, 4), {"x": rows})
    assert torch.equal(back.outputs["output"], truth.outputs["output"])
    assert torch.equal(back.gradients["dx"], truth.gradients["dx"])


def test_non_contiguous_tensors(backend):
    x, indices = torch.randn(3, 4, 5, device=backend), torch.tensor([0, 2, 3, 5, 11], device=backend)
    ways = {
        "pack": lambda x, indices: ops.pack(x, indices),
        "unpack": lambda x, indices: ops.unpack(x.flatten(0, 1)[:5], indices, 3, 4),
        "unpack of rows that lie apart": lambda x, indices: ops.unpack(x[0], indices[:4], 3, 4),
    }
    apart = {"x": testing.strided(x), "indices": testing.strided(indices)}
    for name, way in ways.items():
        expected = testing.evaluate(way, {"x": x, "indices": indices})
        got = testing.evaluate(way, apart, strided_gradients=True)
        assert torch.equal(got.outputs["output"], expected.outputs["output"]), name
        assert torch.equal(got.gradients["dx"], expected.gradients["dx"]), name


def test_nothing_to_unpack(backend):
    indices = torch.zeros(0, dtype=torch.int64, device=backend)
    assert torch.equal(ops.unpack(torch.ones(0, 4, device=backend), indices, 2, 3).cpu(), torch.zeros(2, 3, 4))


def test_unaligned_memory(backend):
    """Rows of 32 bytes that start one element into their memory."""
    indices, rows = torch.tensor([0, 2, 3, 5, 11], device=backend), torch.randn(97, device=backend)[1:].view(12, 8)
    packed = ops.pack(rows.view(3, 4, 8), indices)
    assert torch.equal(packed, rows[indices])
    assert torch.equal(ops.unpack(rows[1:6], indices, 3, 4).flatten(0, 1)[indices], rows[1:6])


def test_packing_integers_and_second_derivatives(backend):
    indices = torch.tensor([1, 4], device=backend)
    assert ops.pack(torch.arange(6, device=backend).view(2, 3), indices).tolist() == [1, 4]
    x = torch.randn(2, 3, 2, device=backend, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.pack(x, indices).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.pack(torch.ones(2, 3), torch.tensor([0, 6])), IndexError, r"indices\[1\] is 6"),
        (lambda: ops.pack(torch.ones(2, 3), torch.tensor([0, 0, 1])), ValueError, "repeated entries"),
        (lambda: ops.unpack(torch.ones(2, 3), torch.tensor([1, 1]), 1, 4), ValueError, "repeated entries"),
        (lambda: ops.pack(torch.ones(3), torch.tensor([0])), ValueError, r"expected \(B, S, ...\)"),
        (lambda: ops.pack(torch.ones(2, 3), torch.tensor([0.0])), TypeError, "indices is torch.float32"),
        (lambda: ops.unpack(torch.ones(2, 3), torch.tensor([0]), 1, 4), ValueError, r"indices has shape \(1,\)"),
        (lambda: ops.unpack(torch.ones(1, 3), torch.tensor([4]), 1, 4), IndexError, r"indices\[0\] is 4"),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_int32_indices(backend):
    indices = torch.tensor([1, 4], dtype=torch.int32, device=backend)
    x = torch.randn(2, 3, 2, device=backend, requires_grad=True)
    y = ops.unpack(ops.pack(x, indices), indices, 2, 3)
    y.sum().backward()
    assert x.grad.flatten(0, 1)[:, 0].tolist() == [0, 1, 0, 0, 1, 0]


def test_positions_of_packed_sequences():
    cu_seqlens = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert padding.packed_positions(cu_seqlens, 5).tolist() == [0, 1, 2, 0, 1]


def test_first_tokens():
    x, cu_seqlens = torch.arange(1.0, 6)[:, None], torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32)
    assert padding.first_tokens(x, cu_seqlens).flatten().tolist() == [1, 0, 4, 0]
    assert padding.first_tokens(x[:0], cu_seqlens * 0).flatten().tolist() == [0, 0, 0, 0]
