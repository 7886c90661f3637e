"""The accuracy rule judges everything else, so it is tested with results that it must refuse."""

import pytest
import torch

from fastbert import testing
from fastbert.testing import Result


def result(output, gradient=None):
    return Result({"y": torch.tensor(output)}, {} if gradient is None else {"dx": torch.tensor(gradient)})


TRUTH = Result({"y": torch.tensor([1.0, 2.0]).double()}, {"dx": torch.tensor([4.0, 0.0]).double()})
U = 2**-23


@pytest.mark.parametrize(
    ("output", "gradient", "ok"),
    [
        ([1.0, 2.0], [4.0, 0.0], True),
        ([1.0, 2.0 + 2 * U], [4.0, 0.0], True),  # u * max |truth|
        ([1.0 + 5e-3, 2.0], [4.0, 0.0], True),  # 2 e = 6e-3
        ([1.0 + 7e-3, 2.0], [4.0, 0.0], False),
        ([1.0, 2.0], [4.0, 0.028], True),  # 3 e = 0.03
        ([1.0, 2.0], [4.0, 0.031], False),
        ([1.0, float("nan")], [4.0, 0.0], False),
        ([1.0, float("inf")], [4.0, 0.0], False),
        ([1.0, 2.0], [float("nan"), 0.0], False),
    ],
)
def test_bounds(output, gradient, ok):
    contender = result([1.003, 2.0], [4.01, 0.0])
    rows = testing.compare(result(output, gradient), TRUTH, [contender])
    assert all(row.ok for row in rows) is ok
    if not ok:
        with pytest.raises(AssertionError, match="the accuracy rule is broken"):
            testing.assert_rows(rows)


def test_the_worst_contender_counts():
    contenders = [result([1.0, 2.0], [4.0, 0.0]), result([1.003, 2.0], [4.0, 0.0])]
    rows = testing.compare(result([1.005, 2.0], [4.0, 0.0]), TRUTH, contenders)
    assert rows[0].ok and rows[0].baseline == pytest.approx(3e-3, rel=1e-3)


def test_float64_has_a_bound_of_its_own():
    close, off = (Result({"y": torch.tensor([1.0, 2.0 + d], dtype=torch.float64)}, {}) for d in (1e-12, 3e-12))
    truth = Result(TRUTH.outputs, {})
    assert testing.compare(close, truth, [off])[0].ok and not testing.compare(off, truth, [off])[0].ok


def test_shapes_and_names_must_agree():
    with pytest.raises(AssertionError, match=r"shape \(1,\); the truth has \(2,\)"):
        testing.compare(result([1.0], [4.0, 0.0]), TRUTH, [])
    with pytest.raises(AssertionError, match="gradients are"):
        testing.compare(result([1.0, 2.0]), TRUTH, [])


def test_evaluate_gives_gradients_of_every_float_input():
    inputs = {"x": torch.tensor([2.0]), "scale": 3.0, "ids": torch.tensor([1]), "unused": torch.ones(2)}
    got = testing.evaluate(lambda x, scale, ids, unused: (x * scale, x * ids), inputs)
    g0, g1 = (testing._cotangent(torch.ones(1), seed) for seed in (0, 1))
    assert got.gradients.keys() == {"dx", "dunused"} and got.outputs.keys() == {"output 0", "output 1"}
    assert torch.equal(got.gradients["dx"], 3 * g0 + g1) and got.gradients["dunused"].abs().sum() == 0
    assert inputs["x"].grad is None


def test_a_strided_input_arrives_strided():
    inputs = {
        "apart": testing.strided(torch.arange(6.0).view(2, 3)),
        "dense": torch.arange(6.0).view(2, 3).mT,
        "expanded": torch.ones(1).expand(2, 3),
        "empty": torch.ones(0, 3)[:, ::2],
    }
    assert not inputs["apart"].is_contiguous() and inputs["apart"].stride() == (2, 4)
    seen = {}
    got = testing.evaluate(lambda **leaves: seen.update(leaves) or leaves["apart"].sum(), inputs)
    for name, tensor in inputs.items():
        assert seen[name].stride() == tensor.stride() and torch.equal(seen[name], tensor)
        assert seen[name].is_leaf and seen[name].data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert torch.equal(got.gradients["dapart"], testing._cotangent(torch.ones(()), 0).expand(2, 3))


def test_output_gradients_are_strided_where_that_is_asked_for():
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            strides.append(dy.stride())
            return dy

    strides, inputs = [], {"x": torch.ones(2, 3)}
    call = lambda x: Seen.apply(x)  # noqa: E731 - torch 2.11's apply takes no keywords
    one, two = (testing.evaluate(call, inputs, strided_gradients=strided) for strided in (False, True))
    assert strides == [(3, 1), (2, 4)] and torch.equal(one.gradients["dx"], two.gradients["dx"])


@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float16, float("nan")), (torch.int32, 2**31 - 1), (torch.bool, True)], ids=str
)
def test_strided_copies_have_something_else_between_their_elements(dtype, gap):
    tensor = torch.tensor([[0, 1, 0], [1, 0, 1]]).to(dtype)
    apart = testing.strided(tensor)
    assert torch.equal(apart, tensor) and apart.dtype == dtype
    between = apart.as_strided((5,), (2,), 1)
    assert torch.equal(between.nan_to_num(7), torch.full((5,), gap, dtype=dtype).nan_to_num(7))


def unavailable(x):
    raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")


def test_a_contender_that_cannot_run_is_left_out_by_name():
    triple, inputs = lambda x: 3 * x, {"x": torch.tensor([1.0, 2.0])}
    with pytest.warns(UserWarning, match="left out of the accuracy rule: unavailable: pack_vnni2"):
        rows = testing.assert_accurate(triple, triple, [unavailable, triple], inputs)
    assert [row.name for row in rows] == ["output", "dx"]


def test_no_contender_that_can_run_is_an_error():
    triple, inputs = lambda x: 3 * x, {"x": torch.tensor([1.0])}
    with pytest.raises(RuntimeError, match="none of PyTorch's implementations can run this call:\nunavailable: pack_"):
        testing.assert_accurate(triple, triple, [unavailable], inputs)


def test_a_contender_that_is_called_wrongly_is_an_error():
    triple = lambda x: 3 * x  # noqa: E731
    with pytest.raises(TypeError):
        testing.assert_accurate(triple, triple, [triple, lambda y: y], {"x": torch.tensor([1.0])})
