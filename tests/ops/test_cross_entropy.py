import functools
import math

import pytest
import torch
import torch.nn.functional as F
from op_suite import HALF, VALUE_ERROR, OpSuite, normal, pytest_generate_tests, slow_interpreted  # noqa: F401

from fastbert import ops, testing
from fastbert.ops.cross_entropy import cross_entropy_of_rows
from fastbert.ops.op import PRIMITIVES


class TestCrossEntropy(OpSuite):
    op = "cross_entropy"
    parameters = ("weight", "bias")
    multiplies = True
    shapes = [  # (tokens, channels, classes)
        pytest.param((9, 7, 11), id="odd"),
        pytest.param((33, 64, 1000), id="many-classes"),
        pytest.param((2, 3, 2), id="two-tokens"),
        pytest.param((4, 5, 9001), id="more-classes-than-tiles-hold"),
        pytest.param((1600, 3, 5), id="more-rows-than-a-block-has-threads", marks=slow_interpreted),
        pytest.param((290, 1026, 600), id="blocks-of-rows-and-classes-and-chains-of-sums", marks=slow_interpreted),
    ]

    def inputs(self, shape, dtype, device):
        tokens, channels, classes = shape
        labels = torch.randint(classes, (tokens,))
        labels[::3] = -100
        return {
            "hidden": normal(tokens, channels, dtype=dtype, device=device),
            "weight": normal(classes, channels, dtype=dtype, device=device, scale=channels**-0.5),
            "bias": normal(classes, dtype=dtype, device=device),
            "labels": labels.to(device),
        }

    def empty(self, dtype, device):
        return self.inputs((0, 8, 4), dtype, device)

    def ours(self, hidden, weight, bias, labels):
        return ops.cross_entropy(hidden, weight, bias, labels)

    def truth(self, hidden, weight, bias, labels):
        rows = labels != -100
        logits = hidden[rows] @ weight.T + bias
        picked = logits.gather(1, labels[rows, None]).squeeze(1)
        return (logits.exp().sum(1).log() - picked).sum() / max(int(rows.sum()), 1)

    def contenders(self):
        def half(hidden, weight, bias, labels):
            return F.cross_entropy(F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype)), labels)

        def upcast(hidden, weight, bias, labels):
            logits = F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
            return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)

        return [half, upcast]

    def primitive_calls(self, inputs):
        hidden, weight, bias, labels = inputs.values()
        yield "cross_entropy_fwd", (hidden, weight, bias, labels, -100, False)
        yield "cross_entropy_fwd", (hidden, weight, bias, labels, -100, True)
        dlogits = hidden @ weight.T
        dloss = torch.ones((), device=hidden.device)
        for need in ((True, True), (True, False), (False, True)):
            yield "cross_entropy_bwd", (dloss, hidden, weight, labels, dlogits, -100, *need)

    @slow_interpreted
    @pytest.mark.parametrize("dtype", HALF, ids=("bfloat16", "float16"))
    def test_many_rows_and_a_number_of_classes_that_is_no_multiple_of_8(self, backend, dtype):
        """On a GPU all rows, even those without a label, are multiplied by a weight padded with classes of zeros."""
        backend.require(dtype, backward=True)
        inputs = self.inputs((257, 16, 1030), dtype, backend.device)
        self.assert_accurate(backend, inputs, dtype, cross_entropy_of_rows)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            testing.evaluate(cross_entropy_of_rows, inputs)
        products = [set(sum(event.input_shapes, [])) for event in profile.events() if event.name == "aten::mm"]
        if backend.name in ("cuda", "triton"):
            assert len(products) == 3 and all(1032 in sizes and 1030 not in sizes for sizes in products)

    @pytest.mark.parametrize("dtype", HALF, ids=("bfloat16", "float16"))
    def test_classes_of_zeros_stay_zeros(self, backend, dtype):
        """The classes that pad the weight keep a gradient of zero, even if rows without a label hold NaN. A contiguous
        copy of the logits' gradient, which lacks these classes, gives the same gradients."""
        backend.require(dtype, backward=True)
        if backend.name not in ("cuda", "triton"):
            backend.skip("it multiplies by the weight as it is")
        inputs = self.inputs((257, 8, 1030), dtype, backend.device)
        hidden, weight, _, labels = inputs.values()
        clean = hidden.clone()
        hidden[labels == -100] = torch.nan
        _, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *inputs.values(), -100, True)
        assert (dlogits.as_strided((257, 2), dlogits.stride(), 1030) == 0).all() and not dlogits.isnan().any()
        dloss = torch.ones((), device=backend.device)
        for gradients in zip(
            *(
                PRIMITIVES["cross_entropy_bwd"](backend.name, dloss, clean, weight, labels, d, -100, True, True)
                for d in (dlogits, dlogits.contiguous())
            ),
            strict=True,
        ):
            torch.testing.assert_close(*gradients)

    def test_no_labelled_row_is_zero(self, backend):
        inputs = self.inputs((4, 3, 5), torch.float32, backend.device)
        inputs["hidden"].requires_grad_()
        loss = self.ours(**inputs | {"labels": torch.full((4,), -100, device=backend.device)})
        loss.backward()
        assert loss == 0 and inputs["hidden"].grad.abs().sum() == 0

    def test_uniform_logits_cost_the_logarithm_of_the_classes(self, backend):
        hidden = torch.zeros(4, 3, device=backend.device)
        labels = torch.tensor([0, 1, -100, 7], device=backend.device)
        weight, bias = torch.ones(8, 3, device=backend.device), torch.zeros(8, device=backend.device)
        loss = ops.cross_entropy(hidden, weight, bias, labels)
        assert abs(loss.item() - 2.0794415416798357) < 1e-6  # ln 8

    def test_confident_logits_do_not_overflow(self, backend):
        weight = torch.eye(4, device=backend.device) * 3e4
        loss = ops.cross_entropy(weight[:1] / 3e4, weight, weight[0] * 0, torch.tensor([1], device=backend.device))
        assert loss.item() == 3e4

    @slow_interpreted
    def test_float16_gradients_survive_loss_scaling_and_its_absence(self, backend):
        """Softmax gives each of 9000 classes 1e-6, which would be 0 in float16 if divided by 64 rows before rounding.

        Together they weigh as much as the label: over the first channel, where all weights are 1, they cancel it.
        """
        backend.require(torch.float16, backward=True)
        inputs = self.inputs((96, 16, 9001), torch.float16, backend.device)
        inputs["labels"][inputs["labels"] != -100] = 0
        inputs["hidden"] *= 0.1
        inputs["hidden"][:, 0] = inputs["weight"][:, 0] = 1
        inputs["bias"] = torch.where(torch.arange(9001) == 0, 20 * math.log(2), 0.0).to(inputs["bias"])
        for scale in (1.0, 65536.0):

            def gradients(call, dtype=None, scale=scale):
                return testing.evaluate(lambda **given: call(**given) * scale, inputs, dtype=dtype).gradients

            found, truth = gradients(self.ours), gradients(self.truth, torch.float64)
            error = (found["dhidden"] - truth["dhidden"]).abs().max()
            assert error <= 0.02 * truth["dhidden"].abs().max()
            assert torch.isfinite(found["dweight"]).all()
            small, right = found["dweight"][1:, 0], truth["dweight"][1:, 0]  # means of those 1e-6
            assert (small - right).abs().max() <= 0.1 * right.abs().max()

    def test_other_ignore_index(self, backend):
        inputs = self.inputs((9, 7, 11), torch.float32, backend.device)
        other = inputs | {"labels": torch.where(inputs["labels"] == -100, 5, inputs["labels"])}
        loss = ops.cross_entropy(**other, ignore_index=5)
        truth = F.cross_entropy(inputs["hidden"] @ inputs["weight"].T + inputs["bias"], other["labels"], ignore_index=5)
        assert abs(loss - truth) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=("float32", "float16"))
    def test_unaligned_memory(self, backend, dtype):
        """All rows have a label: otherwise those that have one would be copied, and the copy is aligned."""
        backend.require(dtype)
        inputs = self.inputs((9, 8, 16), dtype, backend.device)
        inputs["labels"].clamp_(min=0)
        self.assert_accurate_unaligned(backend, inputs, dtype, "hidden", "weight", "bias", "dy")

    @pytest.mark.parametrize("labels", (torch.int64, torch.int32), ids=("int64", "int32"))
    def test_rows_without_a_label_that_nobody_left_out(self, backend, labels):
        """Compiled graphs pass rows without a label to the primitive. These may hold NaN, and may be all the rows."""
        inputs = self.inputs((9, 7, 5000), torch.float32, backend.device)
        inputs["labels"] = inputs["labels"].to(labels)
        labelled = inputs["labels"] != -100
        inputs["hidden"][~labelled] = float("nan")
        loss, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *inputs.values(), -100, True)
        assert abs(loss - self.truth(**inputs)) < 1e-5
        assert (dlogits[~labelled] == 0).all() and dlogits[labelled].sum(1).abs().max() < 1e-5
        inputs["labels"][:] = -100
        loss, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *inputs.values(), -100, True)
        assert loss == 0 and (dlogits == 0).all()

    @pytest.mark.parametrize("shift", [0.0, -88.7, -443.5, -1e30], ids=str)
    def test_classes_that_bias_rules_out(self, backend, shift):
        """Logits of -inf that fill whole vectors and tiles, from the first class on, do not change the other classes,
        whose logits may be large or small."""
        if shift < -1e9 and backend.name != "cpu":
            backend.skip("its log-sum-exp is rounded at the size of the logits, and loses the logarithm")
        inputs = self.inputs((9, 7, 5000), torch.float32, backend.device)
        inputs["labels"][inputs["labels"] != -100] = 4990
        inputs["bias"][:4500] = -torch.inf
        truth = self.truth(**inputs) if shift > -1e9 else torch.tensor(math.log(500))  # no other digit is left
        inputs["bias"] += shift
        loss, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *inputs.values(), -100, True)
        bound = 1e-5 * max(1, min(-shift, 100))  # logits, or their log-sum-exp, are rounded at the shift's size
        assert abs(loss - truth) < bound
        assert (dlogits[:, :4500] == 0).all() and dlogits.sum(1).abs().max() < bound

    @slow_interpreted
    @pytest.mark.parametrize(("dtype", "labels"), ((torch.float32, torch.int64), (torch.float16, torch.int32)))
    @pytest.mark.parametrize("classes", (1, 11, 77))
    def test_every_class_as_a_label(self, backend, dtype, labels, classes):
        """With equal logits, each class is a label: within vectors of any type, and after the last whole vector."""
        backend.require(dtype)
        hidden = torch.zeros(classes, 3, dtype=dtype, device=backend.device)
        target = torch.arange(classes, dtype=labels, device=backend.device)
        bias = torch.full((classes + 1,), 0.5, dtype=dtype, device=backend.device)[1:]  # not at a multiple of 16 bytes
        args = hidden, hidden + 1, bias, target, -100
        loss, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *args, True)
        assert abs(loss.item() - math.log(classes)) < 1e-6
        onehot = torch.eye(classes, device=backend.device)
        assert (dlogits.float() - (1 / classes - onehot)).abs().max() < torch.finfo(dtype).eps
        assert torch.equal(PRIMITIVES["cross_entropy_fwd"](backend.name, *args, False)[0], loss)

    def test_second_derivative_by_the_bias_alone_is_refused(self, backend):
        self.assert_no_second_derivative_by(backend, "bias")

    def test_columns_of_zeros_are_not_looked_for_in_the_memory_of_others(self, backend):
        """A hook for saved tensors may keep them in one buffer, with its rows where ours were."""
        backend.require(torch.float16, backward=True)
        inputs = self.inputs((256, 8, 1029), torch.float16, backend.device)

        def put(tensor):
            if tensor.dim() != 2 or tensor.shape[1] != 1029:
                return tensor
            pool = tensor.new_full((tensor.shape[0] + 9, tensor.stride(0)), torch.nan)
            return pool.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

        def hooked(**inputs):
            with torch.autograd.graph.saved_tensors_hooks(put, lambda tensor: tensor):
                return self.ours(**inputs)

        self.assert_accurate(backend, inputs, torch.float16, hooked)

    def test_no_class_and_no_label(self, backend):
        if backend.name == "reference":
            backend.skip("torch gathers nothing from rows of no class")
        hidden, labels = torch.ones(3, 4, device=backend.device), torch.full((3,), -100, device=backend.device)
        args = hidden, hidden.new_empty(0, 4), hidden.new_empty(0), labels, -100, True
        loss, dlogits = PRIMITIVES["cross_entropy_fwd"](backend.name, *args)
        assert loss == 0 and dlogits.shape == (3, 0)

    @pytest.mark.parametrize("wild", [-1, 11, 2**40, -(2**40)])
    def test_a_label_that_is_no_class_is_an_error_or_nan(self, backend, wild):
        """Also where no check looks at values, as in a compiled graph; other rows are as they were."""
        if backend.name == "reference":
            backend.skip("it runs on what was checked before")
        inputs = self.inputs((3, 7, 11), torch.float32, backend.device)
        forward = functools.partial(PRIMITIVES["cross_entropy_fwd"], backend.name)
        tame, wild = (inputs | {"labels": torch.tensor([4, x, -100], device=backend.device)} for x in (10, wild))
        if backend.name == "cpu":
            with pytest.raises(IndexError, match=r"labels\[1\] is -?\d+; expected 0 <= labels < 11"):
                forward(*wild.values(), -100, True)
            return
        loss, dlogits = forward(*wild.values(), -100, True)
        assert loss.isnan() and dlogits[1].isnan().all()
        assert torch.equal(dlogits[::2], forward(*tame.values(), -100, True)[1][::2])

    @pytest.mark.parametrize(
        ("direction", "place", "value", "words"),
        [
            ("fwd", 0, torch.zeros(3, 1, 7), r"hidden has shape \[3, 1, 7\]; expected \(T, C\)"),
            ("fwd", 1, torch.zeros(11, 6), r"weight has shape \[11, 6\]; expected \[11, 7\]"),
            ("fwd", 2, torch.zeros(11).half(), "bias is Half; expected Float"),
            ("fwd", 3, torch.zeros(2).long(), r"labels has shape \[2\]; expected \[3\]"),
            ("fwd", 3, torch.zeros(3), "labels is Float; expected Long or Int"),
            ("bwd", 0, torch.zeros(()).double(), "dloss is Double; expected Float"),
            ("bwd", 4, torch.zeros(3, 10), r"dlogits has shape \[3, 10\]; expected \[3, 11\]"),
        ],
    )
    def test_the_primitive_checks_what_it_reads(self, backend, direction, place, value, words):
        if backend.name not in ("cpu", "cuda"):
            backend.skip("for the C++ primitive")
        hidden, weight, bias, labels = self.inputs((3, 7, 11), torch.float32, backend.device).values()
        args = [hidden, weight, bias, labels, -100, True]
        if direction == "bwd":
            args = [bias[0], hidden, weight, labels, hidden @ weight.T, -100, True, True]
        args[place] = value.to(backend.device)
        with pytest.raises(VALUE_ERROR, match=words):
            PRIMITIVES[f"cross_entropy_{direction}"](backend.name, *args)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": torch.tensor([0, 5])}, IndexError, r"labels\[1\] is 5; expected 0 <= labels < 5"),
        ({"labels": torch.tensor([0, -1])}, IndexError, r"labels\[1\] is -1"),
        ({"labels": torch.zeros(2)}, TypeError, "labels is torch.float32"),
        ({"labels": torch.zeros(3).long()}, ValueError, r"labels has shape \(3,\)"),
        ({"hidden": torch.zeros(1, 2, 4)}, ValueError, r"hidden has shape \(1, 2, 4\); expected \(T, C\)"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\); expected \(C,\) = \(5,\)"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "bias": torch.zeros(5)}
    good["labels"] = torch.tensor([0, 1])
    with pytest.raises(error, match=words):
        ops.cross_entropy(**good | change)


def test_a_bias_is_needed():
    with pytest.raises(TypeError, match=r"cross_entropy: bias is a NoneType; expected a tensor, \(V,\)"):
        ops.cross_entropy(torch.randn(4, 8), torch.randn(9, 8), None, torch.ones(4).long())


def test_only_the_bias_may_need_a_gradient():
    hidden, weight, labels = torch.randn(5, 8), torch.randn(9, 8), torch.tensor([1, -100, 3, 0, 8])
    ours, theirs = (torch.zeros(9, requires_grad=True) for _ in range(2))
    ops.cross_entropy(hidden, weight, ours, labels).backward()
    F.cross_entropy(hidden @ weight.T + theirs, labels).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
