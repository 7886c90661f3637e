import math

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from op_suite import VALUE_ERROR, normal, pytest_generate_tests, slow_interpreted  # noqa: F401
from test_attention import AttentionSuite, ends

from fastbert import ops, random, testing
from fastbert.ops import RelativePositions
from fastbert.ops.op import PRIMITIVES


def log_buckets(longest, buckets):
    """DeBERTa's 2 * buckets slots, for distances up to longest - 1: exact up to buckets / 2, then wider and wider."""
    distance = torch.arange(1 - longest, longest)
    middle = buckets // 2
    far = (distance.abs().double() / middle).clamp(min=1).log() / math.log((longest - 1) / middle) * (middle - 1)
    far = distance.sign() * (far.ceil() + middle).long()
    return (torch.where(distance.abs() <= middle, distance, far) + buckets).clamp(0, 2 * buckets - 1).int()


def two_sided(longest, buckets):
    """Slots like T5's and MPNet's: one half for keys before the query, one for keys after it. They are not monotone."""
    distance = torch.arange(1 - longest, longest)
    return (distance.abs().clamp(max=buckets - 1) + buckets * (distance < 0)).int()


SLOTS = {
    "log": log_buckets(40, 8),  # 16 slots; longer sequences go beyond them
    "one each": torch.arange(2 * 70 - 1).int(),
    "two-sided": two_sided(12, 6),
    "any": torch.tensor([3, 0, 0, 5, 2, 2, 4, 1, 1, 5, 0]).int(),
    "all alike": torch.zeros(1).int(),
}
SHORT = (3, 1, 2, 0, 1, 4, 2, 1, 3, 2, 1)
KQB, KQ, K, Q, B = ({*letters} for letters in ("kqb", "kq", "k", "q", "b"))


def of_distances(q, k, slots, keys, queries, bias):
    """What tables add to the scores of one sequence, gathered for each pair of tokens. q, k: (H, S, D)."""
    place, farthest = torch.arange(q.shape[1], device=q.device), len(slots) // 2
    slot = slots[(place[:, None] - place).clamp(-farthest, farthest) + farthest].long()
    scores = q.new_zeros(())
    if keys is not None:
        scores = scores + torch.einsum("hid,ijhd->hij", q, keys[slot].to(q.dtype))
    if queries is not None:
        scores = scores + torch.einsum("hjd,ijhd->hij", k, queries[slot].to(q.dtype))
    return scores * q.shape[-1] ** -0.5 + (0 if bias is None else bias[:, slot].to(q.dtype))


class RelativeSuite(AttentionSuite):
    op = "relative_attention"
    parameters = ("keys", "queries", "bias")
    shapes = [  # (lengths, heads, head size, slots, which tables)
        pytest.param(((5, 0, 3), 2, 8, "log", KQB), id="an-empty-sequence-and-all-tables"),
        pytest.param(((1, 17, 64), 1, 5, "log", KQ), id="one-token-a-whole-tile-and-odd-sizes", marks=slow_interpreted),
        pytest.param(((16, 15, 17), 2, 64, "one each", KQ), id="around-16-a-slot-each", marks=slow_interpreted),
        pytest.param(((30, 63), 2, 16, "two-sided", B), id="a-bias-of-slots-not-monotone", marks=slow_interpreted),
        pytest.param(((19, 26), 2, 8, "any", KQB), id="slots-in-no-order", marks=slow_interpreted),
        pytest.param(((21, 4), 3, 12, "log", K), id="keys-alone"),
        pytest.param(((21, 4), 3, 12, "log", Q), id="queries-alone", marks=slow_interpreted),
        pytest.param(((33,), 1, 8, "all alike", Q), id="one-slot"),
        pytest.param((SHORT, 2, 8, "any", KQB), id="sequences-that-share-a-program", marks=slow_interpreted),
        pytest.param(((129, 3), 1, 24, "log", KQ), id="several-tiles", marks=slow_interpreted),
    ]

    def inputs(self, shape, dtype, device):
        lengths, heads, size, slots, tables = shape
        slots = SLOTS[slots].to(device)
        width = int(slots.max()) + 1
        shapes = {"keys": (width, heads, size), "queries": (width, heads, size), "bias": (heads, width)}
        tables = {n: normal(*s, dtype=dtype, device=device) if n[0] in tables else None for n, s in shapes.items()}
        return {
            "qkv": normal(sum(lengths), 3, heads, size, dtype=dtype, device=device),
            "cu_seqlens": ends(lengths, device),
            "slots": slots,
        } | tables

    def empty(self, dtype, device):
        return self.inputs(((0, 0), 2, 8, "log", KQB), dtype, device)

    def ours(self, qkv, cu_seqlens, slots, keys, queries, bias):
        longest = 5 if torch.compiler.is_compiling() else self.longest(cu_seqlens)
        positions = RelativePositions(slots, keys, queries, bias)
        return ops.relative_attention(qkv, cu_seqlens, longest, positions, **self.dropout_arguments(qkv))

    def one_sequence(self, q, k, v, sequence, slots, keys, queries, bias):
        """Attention of one sequence that indexes the tables for every pair of tokens."""
        scores = q @ k.mT * q.shape[-1] ** -0.5 + of_distances(q, k, slots, keys, queries, bias)
        return (scores.softmax(-1) * self.factors(q, sequence, q.shape[1])) @ v

    def truth(self, qkv, cu_seqlens, **tables):
        attend = lambda q, k, v, sequence: self.one_sequence(q, k, v, sequence, **tables)  # noqa: E731
        return self.by_sequence(attend, qkv, cu_seqlens)

    def of_positions(self, q, k, slots, keys, queries, bias):
        """The positions' scores of one sequence, (H, S, S), gathered from products with whole tables."""
        place, farthest = torch.arange(q.shape[1], device=q.device), len(slots) // 2
        slot = slots[(place[:, None] - place).clamp(-farthest, farthest) + farthest].long()
        scores = q.new_zeros(q.shape[0], *slot.shape)
        for x, table, turn in ((q, keys, False), (k, queries, True)):
            if table is not None:
                each = x @ table.to(x.dtype).permute(1, 2, 0) * q.shape[-1] ** -0.5  # (H, S, W)
                index = (slot.mT if turn else slot).expand_as(scores)
                scores = scores + (each.gather(-1, index).mT if turn else each.gather(-1, index))
        return scores if bias is None else scores + bias[:, slot].to(q.dtype)

    def as_sdpa(self, qkv, cu_seqlens, **tables):
        """SDPA with the positions' scores as its mask, one sequence at a time."""

        def attend(q, k, v, _):
            mask = self.of_positions(q, k, **tables)
            return F.scaled_dot_product_attention(q[None], k[None], v[None], mask[None])[0]

        return self.by_sequence(attend, qkv, cu_seqlens)

    def gathered(self, qkv, cu_seqlens, **tables):
        """Attention as in transformers' DeBERTa, with the contract's dropout, which SDPA does not have."""

        def attend(q, k, v, sequence):
            scores = q @ k.mT * q.shape[-1] ** -0.5 + self.of_positions(q, k, **tables)
            return (scores.softmax(-1) * self.factors(q, sequence, q.shape[1])) @ v

        return self.by_sequence(attend, qkv, cu_seqlens)

    def contenders(self):
        return [self.truth, self.gathered if self.p else self.as_sdpa]

    @pytest.mark.parametrize(
        ("lengths", "size"),
        [
            pytest.param((1100, 3), 40, id="blocks of keys", marks=pytest.mark.slow),
            pytest.param((300,), 64, id="exact distances and wide buckets"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
    def test_long_sequences(self, backend, lengths, size, dtype):
        if backend.name != "cpu":
            backend.skip("for the kernel on CPUs, which takes keys in blocks")
        inputs = self.inputs((lengths, 1, size, "log", KQB), dtype, backend.device)
        inputs["slots"] = log_buckets(512, 256).to(backend.device)
        width = {"keys": (512, 1, size), "queries": (512, 1, size), "bias": (1, 512)}
        inputs |= {n: normal(*s, dtype=dtype, device=backend.device) for n, s in width.items()}
        testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    def primitive_calls(self, inputs):
        qkv, cu_seqlens, *tables = inputs.values()
        if tables[-1] is not None:
            tables[-1] = tables[-1].float()
        rng, rest = random.new_key(qkv.device), (0.5, 0.1)
        lse = torch.ones(qkv.shape[2], qkv.shape[0], device=qkv.device)
        yield "relative_attention_fwd", (qkv, *tables, cu_seqlens, 5, *rest, rng, 3)
        yield "relative_attention_fwd", (qkv, *tables, cu_seqlens, 5, 0.5, 0.0, None, 3)
        for wanted in (True, False):
            args = (qkv[:, 0], qkv, qkv[:, 1], lse, *tables, cu_seqlens, 5, *rest, rng, 3, wanted)
            yield "relative_attention_bwd", args

    test_shared_memory_of_every_size = test_on_sm_75 = test_on_sm_80 = None
    test_sm_75_refuses_heads_that_its_shared_memory_cannot_hold = None


class TestRelativeAttention(RelativeSuite):
    def test_without_positions_it_is_attention(self, backend):
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        zeros = {name: torch.zeros_like(inputs[name]) for name in ("keys", "queries", "bias")}
        out, plain = self.ours(**inputs | zeros), ops.attention(inputs["qkv"], inputs["cu_seqlens"], 5)
        assert (out - plain).abs().max() <= 2**-22 * plain.abs().max()

    def test_a_large_bias_that_is_everywhere_the_same_changes_nothing(self, backend):
        """A tile's rows after a sequence's end have that bias too: exp(300) is infinite, and must not reach others."""
        backend.require(torch.float32, backward=True)
        qkv = normal(8, 3, 2, 8, dtype=torch.float32, device=backend.device).requires_grad_()
        cu_seqlens, bias = ends((5, 3), backend.device), torch.full((2, 1), 300.0, device=backend.device)
        positions = RelativePositions(SLOTS["all alike"].to(backend.device), bias=bias)
        shifted = ops.relative_attention(qkv, cu_seqlens, 5, positions)
        plain = ops.attention(qkv, cu_seqlens, 5)
        gradients = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (shifted, plain)]
        for one, two in ((shifted, plain), gradients):
            assert (one - two).abs().max() <= 300 * 2**-22 * two.abs().max()  # the scores' rounding

    def test_alibi(self, backend):
        """Press et al., 2022: slopes 2**(-8 h / H) times the distance, in both directions."""
        heads, length = 4, 37
        qkv = normal(length, 3, heads, 16, dtype=torch.float32, device=backend.device)
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device=backend.device)
        distance = torch.arange(length, device=backend.device)
        slots = (torch.arange(2 * length - 1, device=backend.device) - length + 1).abs().int()
        positions = RelativePositions(slots, bias=-slopes[:, None] * distance)
        out = ops.relative_attention(qkv, ends((length,), backend.device), length, positions)
        q, k, v = qkv.double().permute(1, 2, 0, 3)
        apart = (distance[:, None] - distance).abs()
        truth = ((q @ k.mT / 4 - slopes[:, None, None] * apart).softmax(-1) @ v).transpose(0, 1)
        assert (out - truth).abs().max() <= 2**-21 * truth.abs().max()

    def test_weights_are_those_that_were_applied(self, backend):
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        qkv, cu_seqlens, *tables = inputs.values()
        weights = ops.attention_weights(qkv, cu_seqlens, 5, positions=RelativePositions(*tables))
        v = qkv[5:, 2].permute(1, 0, 2)
        assert (weights[2, :, :3, :3] @ v - self.ours(**inputs)[5:].transpose(0, 1)).abs().max() <= 1e-6

    def test_frozen_tables_get_no_gradient_and_do_not_change_the_others(self, backend):
        backend.require(torch.float32, backward=True)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        grads = []
        for frozen in (False, True):
            leaves = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in inputs.items()}
            leaves |= {n: leaves[n].detach() for n in ("keys", "queries", "bias") if frozen}
            self.ours(**leaves).square().sum().backward()
            grads.append(leaves["qkv"].grad)
            assert frozen == (leaves["keys"].grad is None)
        assert torch.equal(*grads)

    @slow_interpreted
    def test_slots_out_of_range_are_clamped(self, backend):
        """Compiled code does not check slots: nothing outside the tables may be read."""
        if backend.name == "reference":
            backend.skip("plain PyTorch indexes with what it is given")
        qkv, cu_seqlens, slots, *tables = self.inputs(self.shapes[0].values[0], torch.float32, backend.device).values()
        for bad in (-5, 10**9, -(2**31)):
            wrong = torch.full_like(slots, bad)
            args = (wrong, *tables, cu_seqlens, 5, 0.3, 0.0, None, 0)
            out, lse = PRIMITIVES["relative_attention_fwd"](backend.name, qkv, *args)
            grads = PRIMITIVES["relative_attention_bwd"](backend.name, torch.ones_like(out), qkv, out, lse, *args, True)
            assert not out.isnan().any() and not any(grad.isnan().any() for grad in grads)

    def test_primitives_refuse_what_they_would_read_out_of_bounds(self, backend):
        """Compiled code calls primitives without Python's checks."""
        if backend.name == "reference":
            backend.skip("plain PyTorch checks its own indices")
        if backend.name == "triton":
            backend.skip("its primitives are checked by nobody, those of attention too")
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        self.ours(**inputs)
        wrong = {
            "slots": (inputs["slots"].long(), inputs["slots"][1:], inputs["slots"][None]),
            "keys": (inputs["keys"][..., 1:], inputs["keys"][1:], inputs["keys"].half(), inputs["keys"][0]),
            "queries": (inputs["queries"][:, 1:], inputs["queries"][1:], inputs["queries"].double()),
            "bias": (inputs["bias"][:, 1:], inputs["bias"][1:], inputs["bias"].half(), inputs["bias"][0]),
        }
        calls = [{name: tensor} for name, tensors in wrong.items() for tensor in tensors]
        calls += [{"keys": None, "queries": None, "bias": bias} for bias in (None, inputs["bias"][:, :0])]
        for change in calls:
            qkv, cu_seqlens, *tables = (inputs | change).values()
            args = (*tables, cu_seqlens, 5, 0.3, 0.0, None, 0)
            with pytest.raises(VALUE_ERROR, match="relative_attention: .* expected"):
                PRIMITIVES["relative_attention_fwd"](backend.name, qkv, *args)
            saved = (qkv[:, 0], qkv, qkv[:, 0], qkv.new_ones(2, 8))
            with pytest.raises(VALUE_ERROR, match="relative_attention: .* expected"):
                PRIMITIVES["relative_attention_bwd"](backend.name, *saved, *args, True)

    @slow_interpreted
    def test_every_row_is_written_whatever_cu_seqlens_holds(self, backend):
        """Compiled code does not check cu_seqlens. Tokens outside every sequence get zeros, also as gradients."""
        if backend.name == "reference":
            backend.skip("plain PyTorch indexes with what it is given")
        qkv, _, *tables = self.inputs(((5, 3), 2, 8, "log", KQB), torch.float32, backend.device).values()
        for last in ([0, 5], [0, 5, 2, 5], [0, 5, 800], [-7, 5, 8], [3, 5, 5], [2**31 - 1, -(2**31), 8], [0]):
            cu_seqlens = torch.tensor(last, dtype=torch.int32, device=backend.device)
            args = (*tables, cu_seqlens, 8, 0.3, 0.0, None, 0)
            with cuda_on_cpu.overlap():  # the sequences overlap
                out, lse = PRIMITIVES["relative_attention_fwd"](backend.name, qkv, *args)
                grads = PRIMITIVES["relative_attention_bwd"](backend.name, out + 1, qkv, out, lse, *args, True)
            assert not out.isnan().any() and not any(grad.isnan().any() for grad in grads)
            if last in ([0, 5], [0]):
                assert all((x[last[-1] :] == 0).all() for x in (out, lse.T, grads[0]))
                assert all((grad == 0).all() for grad in grads) == (last == [0])

    @pytest.mark.parametrize("tables", (KQB, K, Q, B), ids=("all", "keys", "queries", "bias"))
    def test_what_no_distance_needs_is_not_looked_at(self, backend, tables):
        """Entries for distances that no two tokens have may be NaN, say in a table that is only partly initialised."""
        if backend.name != "cuda":
            backend.skip("for kernels that take tables by tiles of distances")
        inputs = self.inputs(((5, 3), 2, 8, "one each", tables), torch.float32, backend.device)
        unused = torch.ones(139, dtype=torch.bool)
        unused[65:74] = False  # distances from -4 to 4
        results = []
        for poison in (0.0, torch.nan, torch.inf):
            for name in ("keys", "queries", "bias"):
                if inputs[name] is not None:
                    (inputs[name].mT if name == "bias" else inputs[name])[unused] = poison
            results.append(testing.evaluate(self.ours, inputs))
        for name, value in {**results[0].outputs, **results[0].gradients}.items():
            assert all(torch.equal({**r.outputs, **r.gradients}[name], value) for r in results), name

    @pytest.mark.slow_on("cuda")
    def test_longer_max_seqlen_changes_nothing_but_rounding(self, backend):
        """On a GPU a longer max_seqlen makes fewer groups of sequences for gradients of tables, here of 3, 3 and 2."""
        backend.require(torch.float32, backward=True)
        if backend.name == "reference":
            backend.skip("plain PyTorch computes a grid of 522 by 522")
        if backend.name == "triton" and backend.device == "cpu":
            backend.skip("the interpreter takes minutes")
        inputs = self.inputs(((2, 1, 3, 5, 0, 4, 2, 5), 8, 4, "log", KQB), torch.float32, backend.device)
        qkv, cu_seqlens, *tables = inputs.values()
        qkv = torch.cat([qkv, qkv.new_ones(500, *qkv.shape[1:])])  # tokens of no sequence
        results = []
        for longest in (5, 522):
            args = (*tables, cu_seqlens, longest, 0.3, 0.0, None, 0)
            out, lse = PRIMITIVES["relative_attention_fwd"](backend.name, qkv, *args)
            grads = PRIMITIVES["relative_attention_bwd"](backend.name, qkv[:, 1], qkv, out, lse, *args, True)
            results.append((out, lse, *grads))
        for one, two in zip(*results, strict=True):
            assert (one - two).abs().max() <= 2**-21 * one.abs().max()

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("float32", "float16"))
    def test_the_largest_head_size_in_little_shared_memory(self, backend, dtype):
        backend.require_emulation()
        inputs = self.inputs(((70, 9), 1, 128, "log", KQB), dtype, backend.device)
        with cuda_on_cpu.shared_memory(99):
            testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    def test_sm_75_takes_heads_of_80(self, backend):
        backend.require_emulation()
        inputs = self.inputs(((40, 9), 1, 80, "log", KQB), torch.float16, backend.device)
        with cuda_on_cpu.turing():
            testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)
            larger = self.inputs(((9,), 1, 88, "log", KQB), torch.float16, backend.device)
            larger["qkv"].requires_grad_()
            with pytest.raises(RuntimeError, match="too little shared memory for heads of this size"):
                self.ours(**larger).sum().backward()

    @pytest.mark.parametrize("tables", [KQB, B], ids=["all tables", "bias"])
    @pytest.mark.parametrize(
        "scale", [-0.3, *(pytest.param(x, marks=slow_interpreted) for x in (0.0, 1e-5, 1e-35, 2.0))]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scales(self, backend, dtype, scale, tables):
        """The bias, which scale does not multiply, is part of the scores whatever scale is."""
        backend.require(dtype, backward=True)
        inputs = self.inputs(((5, 0, 21), 2, 24, "log", tables), dtype, backend.device)
        inputs = {n: x.float() if n == "bias" else x for n, x in inputs.items() if x is not None}
        exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        results = []
        for given in (inputs, exact):
            tensors = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in given.items()}
            qkv, cu_seqlens, slots, *_ = tensors.values()
            positions = RelativePositions(slots, **{n: tensors[n] for n in self.parameters if n in tensors})
            attend = ops.relative_attention_ref if given is exact else ops.relative_attention
            out = attend(qkv, cu_seqlens, 21, positions, scale=scale)
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape, dtype=torch.double).to(dtype).to(out))
            results.append([out, *[x.grad for x in tensors.values() if x.grad is not None]])
        bound = 1e-5 if dtype == torch.float32 else 0.04
        for found, expected in zip(*results, strict=True):
            assert (found - expected).abs().max() <= bound * expected.abs().max() + 1e-30

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_bias_at_the_end_of_the_range(self, backend, dtype):
        """A bias that is the same everywhere changes nothing: the other scores are 0, so all weights are equal."""
        backend.require(dtype)
        qkv = torch.randn(4, 3, 1, 64, device=backend.device, dtype=dtype)
        qkv[:, 1] = 0
        slots = torch.zeros(1, dtype=torch.int32, device=backend.device)
        bias = torch.full((1, 1), -2e38, device=backend.device)  # Triton multiplies scores by log2(e)
        positions = RelativePositions(slots, bias=bias)

        def ours(qkv):
            return ops.relative_attention(qkv, ends((4,), backend.device), 4, positions, scale=0.1)

        def means(qkv):
            return qkv[:, 2].mean(0).expand(4, -1, -1)

        testing.assert_accurate(ours, means, [means], {"qkv": qkv}, gradients=False)

    @pytest.mark.parametrize("logit", [1e3, 1e8, -1e8])
    def test_equal_logits_of_any_size(self, backend, logit):
        """Ill-conditioned, as for `attention`: rounding the log-sum-exp loses ln 4, but the weights still are 1 / 4.

        Here the table of distances makes the scores large.
        """
        backend.require(torch.float32, backward=True)
        qkv = torch.randn(4, 3, 1, 8, device=backend.device)
        qkv[:, 0], qkv[:, 1] = 1, 0
        keys = torch.zeros(1, 1, 8, device=backend.device)
        keys[..., 0] = logit
        positions = RelativePositions(torch.zeros(1, dtype=torch.int32, device=backend.device), keys)
        qkv.requires_grad_()
        out = ops.relative_attention(qkv, ends((4,), backend.device), 4, positions, scale=0.3)
        dout = torch.randn_like(out)
        (dqkv,) = torch.autograd.grad(out, qkv, dout)
        torch.testing.assert_close(out, qkv[:, 2].mean(0).expand_as(out).detach(), rtol=2**-21, atol=2**-22)
        torch.testing.assert_close(dqkv[:, 2], dout.mean(0).expand_as(dout), rtol=2**-21, atol=2**-22)

    def test_sequences_do_not_see_each_other(self, backend):
        inputs = self.inputs(((5, 7, 6), 2, 16, "log", KQB), torch.float32, backend.device)
        clean = self.ours(**inputs)
        for poison in (torch.nan, torch.inf, 1e30):
            qkv = inputs["qkv"].clone()
            qkv[5:12] = poison
            dirty = self.ours(**inputs | {"qkv": qkv})
            assert torch.equal(clean[:5], dirty[:5]) and torch.equal(clean[12:], dirty[12:])


@slow_interpreted  # the random bits are those of attention, by the same code
class TestRelativeAttentionDropout(RelativeSuite):
    key, p, site = 0x123456789ABCDEF, 0.1, 5


QKV = torch.zeros(8, 3, 2, 4)
SLOT, TABLE = torch.tensor([0, 1, 2]).int(), torch.zeros(3, 2, 4)


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        ((SLOT, TABLE, None, None), TypeError, "positions is a tuple; expected RelativePositions"),
        (RelativePositions(SLOT), ValueError, "keys, queries and bias are None"),
        (RelativePositions(SLOT.long(), TABLE), TypeError, "slots is torch.int64; expected a torch.int32"),
        (RelativePositions([0, 1, 2], TABLE), TypeError, "slots is list"),
        (RelativePositions(SLOT[:2], TABLE), ValueError, r"slots has shape \(2,\); expected \(2 L - 1,\)"),
        (RelativePositions(SLOT + 1, TABLE), IndexError, r"slots\[2\] is 3; expected 0 <= slots < 3"),
        (RelativePositions(SLOT - 1, None, TABLE), IndexError, r"slots\[0\] is -1"),
        (RelativePositions(SLOT, TABLE[:, :1]), ValueError, r"keys has shape \(3, 1, 4\); expected \(W, H, D\)"),
        (RelativePositions(SLOT, TABLE, TABLE[:2]), ValueError, r"queries has shape \(2, 2, 4\)"),
        (RelativePositions(SLOT, TABLE[:0]), ValueError, "the tables have no slot"),
        (RelativePositions(SLOT, TABLE[0, 0, 0]), ValueError, r"keys has shape \(\); expected \(W, H, D\)"),
        (RelativePositions(SLOT, bias=TABLE[0, 0, 0]), ValueError, r"bias has shape \(\); expected \(H, W\)"),
        (RelativePositions(SLOT, bias=torch.zeros(3, 3)), ValueError, r"bias has shape \(3, 3\); expected \(H, W\)"),
        (RelativePositions(SLOT, TABLE.double()), TypeError, "keys is torch.float64"),
        (RelativePositions(SLOT, TABLE.to("meta")), ValueError, "expected all tensors on one device"),
    ],
)
def test_bad_positions(positions, error, words):
    with pytest.raises(error, match=words):
        ops.relative_attention(QKV, ends((5, 3)), 5, positions)
