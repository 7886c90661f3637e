import pytest
import torch
import torch.nn.functional as F
from op_suite import OpSuite, normal, one_element_in, pytest_generate_tests, slow_interpreted  # noqa: F401

from fastbert import ops, testing
from fastbert.ops.op import PRIMITIVES


def ends_of(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def of_each(x, weight, bias, cu_seqlens, largest):
    """largest() of the logits of each sequence; no sequence may be empty."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    texts = x.split(cu_seqlens.diff().tolist()) if len(cu_seqlens) > 1 else []
    tops = [largest(F.linear(text, weight, bias)) for text in texts]
    return torch.stack(tops) if tops else x.new_zeros(0, weight.shape[0]) + 0 * (x.sum() + weight.sum() + bias.sum())


class TestLinearMax(OpSuite):
    op = "linear_max"
    parameters = ("weight", "bias")
    shapes = [  # (lengths, channels, classes)
        pytest.param(((3, 1, 5), 7, 11), id="odd"),
        pytest.param(((2, 3), 5, 4101), id="more-classes-than-are-held-at-a-time", marks=slow_interpreted),
        pytest.param(((150, 1, 77), 10, 33), id="more-rows-than-a-tile"),
        pytest.param(((4, 9), 700, 20), id="more-channels-than-a-tile"),
        pytest.param(((1,), 16, 64), id="whole-vectors-of-one-token"),
        pytest.param(((16,) * 40, 3, 200), id="many-sequences", marks=slow_interpreted),
    ]

    def inputs(self, shape, dtype, device):
        lengths, channels, classes = shape
        return {
            "x": normal(sum(lengths), channels, dtype=dtype, device=device),
            "weight": normal(classes, channels, dtype=dtype, device=device, scale=channels**-0.5),
            "bias": normal(classes, dtype=dtype, device=device),
            "cu_seqlens": ends_of(lengths, device),
        }

    def empty(self, dtype, device):
        return self.inputs(((), 8, 4), dtype, device)

    def ours(self, x, weight, bias, cu_seqlens):
        return ops.linear_max(x, weight, bias, cu_seqlens)

    def truth(self, x, weight, bias, cu_seqlens):
        return of_each(x, weight, bias, cu_seqlens, lambda logits: logits.max(0).values)

    def contenders(self):
        def amax(x, weight, bias, cu_seqlens):
            return of_each(x, weight, bias, cu_seqlens, lambda logits: logits.amax(0))

        return [self.truth, amax]

    def primitive_calls(self, inputs):
        x, weight, bias, ends = inputs.values()
        for need_rows in (True, False):
            yield "linear_max_fwd", (x, weight, bias, ends, need_rows)
        yield "linear_max_fwd", (x, weight, None, ends, True)
        dy = torch.ones(len(ends) - 1, len(weight), dtype=x.dtype, device=x.device)
        rows = ends[:-1, None].expand(dy.shape).contiguous()
        for need in ((True, True), (True, False), (False, True)):
            yield "linear_max_bwd", (dy, x, weight, rows, *need)

    def integers(self, device, lengths=(4, 0, 70, 1, 0), channels=5, classes=70, dtype=torch.float32):
        """Inputs of small integers: logits are exact, and many are equal."""
        draw = lambda *shape: torch.randint(-1, 2, shape).to(device, dtype)  # noqa: E731
        x, weight, bias = draw(sum(lengths), channels), draw(classes, channels), draw(classes)
        return {"x": x, "weight": weight, "bias": bias, "cu_seqlens": ends_of(lengths, device)}

    def test_first_of_equal_rows_wins_and_empty_sequences_are_infinitely_low(self, backend):
        """As with torch.max, the first of equal rows gets the gradient; amax would share it among them."""
        inputs = self.integers(backend.device)
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
        y = self.ours(**leaves)
        dy = torch.randint(-2, 3, y.shape, device=y.device).to(y.dtype)
        y.backward(dy)
        x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
        expected, dx = torch.full_like(y, -torch.inf), torch.zeros_like(x)
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(bias)
        ends, classes = inputs["cu_seqlens"].tolist(), torch.arange(len(weight))
        for b, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
            if first == last:
                continue
            top = (x[first:last] @ weight.T + bias).max(0)
            equal = (x[first:last] @ weight.T + bias == top.values).sum(0)
            assert last - first == 1 or equal.max() > 1
            expected[b], rows = top.values, first + top.indices
            for v in classes:
                dx[rows[v]] += dy[b, v] * weight[v]
            dweight += dy[b, :, None] * x[rows]
            dbias += dy[b]
        assert torch.equal(y, expected)
        for name, grad in (("x", dx), ("weight", dweight), ("bias", dbias)):
            assert torch.equal(leaves[name].grad, grad), name
        assert y.isneginf().any(-1).tolist() == [False, True, False, False, True]
        assert (y.relu().log1p()[1] == 0).all()

    def test_rows_of_the_maxima(self, backend):
        inputs = self.integers(backend.device)
        y, rows = PRIMITIVES["linear_max_fwd"](backend.name, *inputs.values(), True)
        assert rows.dtype == torch.int32 and (rows[[1, 4]] == -1).all()
        logits = inputs["x"] @ inputs["weight"].T + inputs["bias"]
        first, last = inputs["cu_seqlens"][2:4].tolist()
        assert torch.equal(rows[2], (first + logits[first:last].max(0).indices).int())
        assert torch.equal(rows[0], logits[:4].max(0).indices.int())
        without, nothing = PRIMITIVES["linear_max_fwd"](backend.name, *inputs.values(), False)
        assert torch.equal(without, y) and nothing.shape == (0,) and nothing.dtype == torch.int32

    def test_nothing_but_empty_sequences(self, backend):
        inputs = self.integers(backend.device, lengths=(0, 0))
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
        y = self.ours(**leaves)
        y.relu().log1p().sum().backward()
        assert y.shape == (2, 70) and y.isneginf().all()
        assert all((leaves[name].grad == 0).all() for name in ("x", "weight", "bias"))

    def test_no_bias(self, backend):
        inputs = self.integers(backend.device, lengths=(4, 9))
        inputs["bias"] = None
        leaves = {"x": inputs["x"].requires_grad_(), "weight": inputs["weight"].requires_grad_()}
        y = self.ours(**inputs)
        y.sum().backward()
        zero = torch.zeros(70, device=backend.device)
        expected = testing.evaluate(self.truth, {**inputs, "bias": zero}, dtype=torch.float64)
        assert torch.equal(y.double(), expected.outputs["output"])
        loss = self.ours(**inputs | {"bias": zero.requires_grad_()}).sum()
        grads = torch.autograd.grad(loss, [*leaves.values(), zero])
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves.values(), grads, strict=False))
        assert torch.equal(grads[2], torch.full_like(zero, 2))

    def test_nan_counts_as_the_largest_and_infinities_are_numbers(self, backend):
        """The first NaN of a class wins; a class that the bias rules out has its maximum in the first row."""
        x = torch.tensor([[1.0], [3.0], [2.0], [5.0], [1.0]], device=backend.device)
        weight = torch.tensor([[1.0], [torch.nan], [0.0], [0.0], [1.0]], device=backend.device)
        bias = torch.tensor([0.0, 0.0, -torch.inf, torch.inf, -torch.inf], device=backend.device)
        y, rows = PRIMITIVES["linear_max_fwd"](backend.name, x, weight, bias, ends_of((3, 2), x.device), True)
        rest = [torch.nan, -torch.inf, torch.inf, -torch.inf]
        assert torch.equal(y.nan_to_num(7e7), torch.tensor([[3, *rest], [5, *rest]], device=y.device).nan_to_num(7e7))
        assert rows.tolist() == [[1, 0, 0, 0, 0], [3, 3, 3, 3, 3]]
        x[1] = x[2] = torch.nan
        y, rows = PRIMITIVES["linear_max_fwd"](backend.name, x, weight[:1], None, ends_of((3, 2), x.device), True)
        assert y.isnan().tolist() == [[True], [False]] and rows.tolist() == [[1], [3]]

    @pytest.mark.parametrize("channels", (1, 64))
    def test_a_nan_row_among_many(self, backend, channels):
        """A NaN stays in its sequence, whichever tile it is in, and no later row replaces it."""
        inputs = self.integers(backend.device, lengths=(70, 90, 5), channels=channels)
        inputs["x"][100], inputs["x"][103] = torch.nan, torch.nan
        y, rows = PRIMITIVES["linear_max_fwd"](backend.name, *inputs.values(), True)
        assert y.isnan().all(-1).tolist() == [False, True, False] and not y[[0, 2]].isnan().any()
        assert (rows[1] == 100).all()

    def test_zero_gradients_and_live_ones_do_not_mix(self, backend):
        """A relu after the op leaves only a few gradients, in some sequences none. The zeros must not spread NaN."""
        inputs = self.integers(backend.device, lengths=(70, 4, 30))
        _, rows = PRIMITIVES["linear_max_fwd"](backend.name, *inputs.values(), True)
        dy = torch.zeros(3, 70, device=backend.device)
        dy[0, 3], dy[0, 69], dy[2, 5] = 2, -1, 3
        inputs["weight"][6], inputs["x"][71] = torch.nan, torch.nan  # the gradients of these are 0
        dx, dweight = PRIMITIVES["linear_max_bwd"](backend.name, dy, inputs["x"], inputs["weight"], rows, True, True)
        expected = torch.zeros_like(dx)
        expected[rows[0, 3]] += 2 * inputs["weight"][3]
        expected[rows[0, 69]] -= inputs["weight"][69]
        expected[rows[2, 5]] += 3 * inputs["weight"][5]
        of_weight = torch.zeros_like(dweight)
        of_weight[3], of_weight[69], of_weight[5] = (
            factor * inputs["x"][rows[place]] for factor, place in ((2, (0, 3)), (-1, (0, 69)), (3, (2, 5)))
        )
        if backend.name == "reference":  # it multiplies whole matrices, so NaN spreads
            assert dx.isnan().all() and dweight.isnan().all()
        else:
            assert torch.equal(dx, expected) and torch.equal(dweight, of_weight)

    def test_memory_of_the_forward_does_not_hold_all_logits(self, backend):
        """No tensor of T V numbers: 60 tokens and 30000 classes would be 7 MB."""
        if backend.name == "triton" and backend.device == "cpu":
            backend.skip("the interpreter's memory says nothing")
        inputs = self.inputs(((60,), 4, 30000), torch.float32, backend.device)
        with torch.profiler.profile(profile_memory=True) as profile:
            PRIMITIVES["linear_max_fwd"](backend.name, *inputs.values(), True)
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert largest < 60 * 30000 * 4 / 2

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
    def test_unaligned_memory(self, backend, dtype):
        backend.require(dtype)
        inputs = self.integers(backend.device, lengths=(9, 40), channels=32, classes=64, dtype=dtype)
        expected = testing.evaluate(self.ours, inputs)
        got = testing.evaluate(one_element_in(self.ours), inputs)
        for name, value in {**expected.outputs, **expected.gradients}.items():
            assert torch.equal({**got.outputs, **got.gradients}[name], value), name


def test_the_reference_twin_is_differentiable_twice():
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    ends = ends_of((3, 0, 1), "cpu")
    call = lambda *leaves: ops.linear_max_ref(*leaves, ends)[[0, 2]]  # noqa: E731
    leaves = [t.requires_grad_() for t in (x, weight, torch.randn(5, dtype=torch.float64))]
    assert torch.autograd.gradgradcheck(call, leaves)
    found = ops.linear_max_ref(x, weight, None, ends)
    fused = ops.linear_max(x, weight, None, ends)
    assert (found - fused)[[0, 2]].abs().max() <= 1e-12 and found[1].isneginf().all() and fused[1].isneginf().all()
    assert ops.linear_max_ref(x[:0], weight, None, ends[:1]).shape == (0, 5)


GOOD = {"x": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "bias": torch.zeros(5)}
GOOD["cu_seqlens"] = torch.tensor([0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(1, 2, 4)}, ValueError, r"linear_max: x has shape \(1, 2, 4\); expected \(T, C\)"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"weight has shape \(5, 3\)"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\); expected \(C,\) = \(5,\)"),
        ({"weight": torch.zeros(5, 4).half()}, TypeError, "weight is torch.float16"),
        ({"cu_seqlens": torch.tensor([0, 2])}, TypeError, "cu_seqlens is torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}, ValueError, "cu_seqlens ends at 1"),
        ({"cu_seqlens": torch.tensor([0, 2, 1, 2], dtype=torch.int32)}, ValueError, "never to fall"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.linear_max(**GOOD | change)


def test_autocast_decides_the_dtype():
    inputs = {**GOOD, "x": torch.randn(2, 4), "weight": torch.randn(5, 4).double().float()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.linear_max(**inputs)
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    assert y.dtype == torch.bfloat16 and torch.equal(y, ops.linear_max(**halves))
