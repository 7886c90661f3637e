import functools

import cuda_on_cpu
import pytest
import torch
import torch.nn.functional as F
from op_suite import HALF, OpSuite, normal, one_element_in, pytest_generate_tests, slow_interpreted  # noqa: F401

import fastbert
from fastbert import ops, random, testing
from fastbert.ops.op import PRIMITIVES


def ends(lengths, device="cpu"):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@pytest.fixture(params=[True, False], ids=["by-length", "any-length"])
def tiles(request, backend, monkeypatch):
    """The test also runs in Triton's kernels for any length, which short sequences otherwise do not reach."""
    if not request.param:
        if backend.name != "triton":
            backend.skip("only Triton's are chosen in Python")
        monkeypatch.setattr("fastbert.triton.attention_tiles.SHORT", -1)


class AttentionSuite(OpSuite):
    op = "attention"
    test_float32_parameters_beside_half_activations = None  # it has no parameters
    shapes = [  # (lengths, heads, head size)
        pytest.param(((5, 0, 3), 2, 8), id="an-empty-sequence"),
        pytest.param(((1, 17, 64), 1, 5), id="one-token-a-whole-tile-and-odd-sizes"),
        pytest.param(((16, 15, 17), 2, 64), id="around-16"),
        pytest.param(((32, 31, 1, 0, 9), 3, 40), id="several-in-a-block"),
        pytest.param(((15, 0, 16, 1, 16, 7), 2, 24), id="more-than-a-tile-of-16-a-sequence-holds"),
        pytest.param(((64, 63, 65), 2, 32), id="around-64", marks=slow_interpreted),
        pytest.param(((129, 127), 1, 128), id="around-128", marks=pytest.mark.slow_on("triton", "cuda")),
        pytest.param(((129, 3), 2, 64), id="a-program-with-two-key-tiles"),
        pytest.param(((40,), 3, 96), id="unusual-head-size"),
    ]

    def inputs(self, shape, dtype, device):
        lengths, heads, head_dim = shape
        return {
            "qkv": normal(sum(lengths), 3, heads, head_dim, dtype=dtype, device=device),
            "cu_seqlens": ends(lengths, device),
        }

    def empty(self, dtype, device):
        return self.inputs(((0, 0), 2, 8), dtype, device)

    def longest(self, cu_seqlens):
        return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())

    def factors(self, q, sequence, length):
        """The factors by which dropout multiplies the attention weights of one sequence, (H, S, S)."""
        if not self.p:
            return 1
        bits = random.attention_bits(torch.tensor([self.key]), self.site, sequence + 1, q.shape[0], length, length)
        return ((bits[-1] >= 26).double() * (256 / 230)).to(q.device, q.dtype)  # round(0.1 * 2**8) = 26

    def ours(self, qkv, cu_seqlens):
        longest = 5 if torch.compiler.is_compiling() else self.longest(cu_seqlens)
        return ops.attention(qkv, cu_seqlens, longest, **self.dropout_arguments(qkv))

    def by_sequence(self, attend, qkv, cu_seqlens):
        rows = [qkv[:0, 0]]
        for sequence, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            q, k, v = qkv[start:end].permute(1, 2, 0, 3)
            rows.append(attend(q, k, v, sequence).transpose(0, 1))
        return torch.cat(rows)

    def explicit(self, q, k, v, sequence):
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return (weights * self.factors(q, sequence, q.shape[1])) @ v

    def truth(self, qkv, cu_seqlens):
        return self.by_sequence(self.explicit, qkv, cu_seqlens)

    def contenders(self):
        def fused(q, k, v, sequence):
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]

        kinds = [self.explicit] if self.p else [self.explicit, fused]
        return [functools.update_wrapper(functools.partial(self.by_sequence, kind), kind) for kind in kinds]

    @pytest.mark.parametrize(
        "dtype",
        [
            pytest.param(torch.float32, id="float32"),
            pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize(
        ("lengths", "head_dim"),
        [((1100, 3, 513), 72), ((4096,), 16)],
        ids=["blocks of keys and of columns", "sums that lose digits in one chain"],
    )
    def test_long_sequences(self, backend, lengths, head_dim, dtype):
        if backend.name != "cpu":
            backend.skip("for the kernel on CPUs, which takes keys in blocks")
        if len(lengths) == 1 and self.p:
            backend.skip("its sums are those without dropout")
        inputs = self.inputs((lengths, 1, head_dim), dtype, backend.device)
        testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    def primitive_calls(self, inputs):
        qkv, cu_seqlens = inputs.values()
        rng, rest = random.new_key(qkv.device), (0.5, 0.1)
        lse = torch.ones(qkv.shape[2], qkv.shape[0], device=qkv.device)
        yield "attention_fwd", (qkv, cu_seqlens, 5, *rest, rng, 3)
        yield "attention_fwd", (qkv, cu_seqlens, 5, 0.5, 0.0, None, 3)
        yield "attention_bwd", (qkv[:, 0], qkv, qkv[:, 1], lse, cu_seqlens, 5, *rest, rng, 3)

    @pytest.mark.parametrize(
        ("kibibytes", "lengths", "heads", "head_dim"),
        [
            pytest.param(227, (300, 20), 6, 32, id="a-block-walks-over-two-tiles-of-rows"),
            pytest.param(227, (300, 20), 6, 64, id="and-a-block-of-warpgroups", marks=pytest.mark.slow),
            pytest.param(140, (270,), 1, 64, id="three-tiles-rotate-forward"),
            pytest.param(99, (270,), 1, 64, id="two-tiles-rotate-in-two-blocks"),
            pytest.param(163, (330,), 1, 128, id="three-tiles-rotate-backward"),
            pytest.param(99, (200,), 1, 128, id="two-tiles-rotate"),
        ],
    )
    def test_shared_memory_of_every_size(self, backend, kibibytes, lengths, heads, head_dim):
        """The CUDA kernels choose their tiles by the shared memory of the device."""
        backend.require_emulation()
        inputs = self.inputs((lengths, heads, head_dim), torch.float16, backend.device)
        with cuda_on_cpu.shared_memory(kibibytes):
            testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    @pytest.mark.parametrize(
        ("lengths", "head_dim", "dtype"),
        [
            pytest.param((90, 0, 21), 64, torch.float16, id="usual"),
            pytest.param((201,), 64, torch.float16, id="tiles-rotate"),
            pytest.param((65, 130), 24, torch.float16, id="narrow"),
            pytest.param((40,), 120, torch.float16, id="too-wide-for-tensor-cores"),
            pytest.param((33, 5), 64, torch.bfloat16, id="a-type-without-tensor-cores"),
        ],
    )
    def test_on_sm_75(self, backend, lengths, head_dim, dtype):
        """sm_75 has no cp.async, and its tensor cores multiply only fp16: the emulator fails if a kernel uses more."""
        backend.require_emulation()
        inputs = self.inputs((lengths, 2, head_dim), dtype, backend.device)
        with cuda_on_cpu.turing():
            testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    @pytest.mark.parametrize(
        "dtype", (HALF[0], pytest.param(HALF[1], marks=pytest.mark.slow)), ids=("bfloat16", "float16")
    )
    @pytest.mark.parametrize(
        ("kibibytes", "lengths", "head_dim"),
        [
            pytest.param(163, (90, 0, 21), 64, id="usual"),
            pytest.param(163, (577, 65), 64, id="tiles-rotate"),
            pytest.param(163, (130, 33), 40, id="filled-up"),
            pytest.param(99, (270,), 64, id="two-tiles-rotate-in-two-blocks"),
            pytest.param(99, (100,), 64, id="eight-warps-where-no-second-block-fits"),
        ],
    )
    def test_on_sm_80(self, backend, kibibytes, lengths, head_dim, dtype):
        """On sm_80 each warp computes products by itself; on sm_90 warpgroups do."""
        backend.require_emulation()
        inputs = self.inputs((lengths, 1, head_dim), dtype, backend.device)
        with cuda_on_cpu.ampere(kibibytes):
            testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs)

    def test_sm_75_refuses_heads_that_its_shared_memory_cannot_hold(self, backend):
        backend.require_emulation()
        inputs = self.inputs(((9,), 1, 128), torch.float16, backend.device)
        inputs["qkv"].requires_grad_()
        with cuda_on_cpu.turing(), pytest.raises(RuntimeError, match="too little shared memory for heads of this size"):
            self.ours(**inputs).sum().backward()


class TestAttention(AttentionSuite):
    @pytest.mark.parametrize("scale", [8**-0.5, 30.0], ids=["usual", "scores of hundreds"])
    @pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=("float32", "bfloat16", "float16"))
    def test_lse(self, backend, dtype, scale):
        """The saved log-sum-exp is part of the contract: the backward may run on another backend than the forward.
        Weights that are rounded to bfloat16 are computed with a relative error of 2**-18."""
        backend.require(dtype)
        inputs = self.inputs(((5, 0, 3), 2, 8), dtype, backend.device)
        if scale == 30:
            inputs["qkv"][:5, 1] = inputs["qkv"][0, 1]  # equal scores: else lse is the largest score
        _, lse = PRIMITIVES["attention_fwd"](backend.name, *inputs.values(), 5, scale, 0.0, None, 0)
        q, k, _ = inputs["qkv"][:5].double().permute(1, 2, 0, 3)
        truth = (q @ k.transpose(-1, -2) * scale).logsumexp(-1)
        bound = (1e-6, 3e-6)[dtype == torch.bfloat16] * truth.abs().max()
        assert lse.dtype == torch.float32 and (lse[:, :5] - truth).abs().max() <= bound

    def test_uniform_weights_give_exact_means(self, backend):
        """Equal scores over 2**n keys and integer values: the mean is exact in every dtype."""
        for dtype in (torch.float32, *HALF):
            if backend.why_not(dtype, False):
                continue
            qkv = torch.zeros(24, 3, 2, 32, dtype=dtype, device=backend.device)
            qkv[:, 2] = torch.randint(-8, 8, (24, 2, 32), device=backend.device)
            out = ops.attention(qkv, ends((16, 8), backend.device), 16)
            expected = torch.cat(
                [qkv[:16, 2].float().mean(0).expand(16, 2, 32), qkv[16:, 2].float().mean(0).expand(8, 2, 32)]
            )
            assert torch.equal(out, expected.to(dtype))

    def with_scale(self, scale):
        """Our op, and plain PyTorch with the scale after the product and before it."""

        def after(q, k, v, _):
            return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v

        def before(q, k, v, _):
            return (q * scale @ k.transpose(-1, -2)).softmax(-1) @ v

        def plain(attend):
            return lambda qkv, cu_seqlens: self.by_sequence(attend, qkv, cu_seqlens)

        ours = lambda qkv, cu_seqlens: ops.attention(qkv, cu_seqlens, 9, scale=scale)  # noqa: E731
        return ours, [plain(after), plain(before)]

    @pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=("float32", "bfloat16", "float16"))
    @pytest.mark.parametrize("scale", [0.0, 1.0, -30.0])
    def test_scale(self, backend, scale, dtype):
        backend.require(dtype)
        inputs = self.inputs(((9, 4), 2, 16), dtype, backend.device)
        ours, plain = self.with_scale(scale)
        both = backend.why_not(dtype, True) is None
        testing.assert_accurate(ours, plain[0], plain, inputs, gradients=both)

    @pytest.mark.parametrize(("size", "scale"), [(1.5e19, 0.0), (1.5e19, 5e-39), (1e-19, 3e38)])
    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
    def test_scores_at_the_end_of_the_range(self, backend, dtype, size, scale):
        """Finite scores give finite results even if their differences overflow, or the scale times log2(e) does."""
        backend.require(dtype)
        if scale > 1 and backend.name in ("triton", "cuda"):
            backend.skip("scale times log2(e) is infinite there")
        qkv = torch.randn(4, 3, 1, 8, dtype=dtype, device=backend.device)
        qkv[:, :2] = 0
        qkv[:, 0, :, 0] = size
        qkv[:, 1, 0, 0] = size * torch.tensor([1, -1, 0, 0.7])
        ours, (plain, _) = self.with_scale(scale)
        inputs = {"qkv": qkv, "cu_seqlens": ends((4,), backend.device)}
        testing.assert_accurate(ours, plain, [plain], inputs, gradients=False)

    def test_large_logits(self, backend):
        """Logits of hundreds, where exp overflows unless the maximum is subtracted. The backward computes
        exp(score - lse) from two float32 numbers of that size, so the error of its weights, and so of the gradients,
        is 2**-23 of the largest logit."""
        inputs = self.inputs(((9, 4), 2, 16), torch.float32, backend.device)
        ours, (plain, _) = self.with_scale(30.0)
        logit = 30 * (inputs["qkv"][:, 0, None] * inputs["qkv"][None, :, 1]).sum(-1).abs().max()
        both = backend.why_not(torch.float32, True) is None
        result = testing.evaluate(ours, inputs, gradients=both)
        truth = testing.evaluate(plain, inputs, dtype=torch.float64, gradients=both)
        pairs = [(result.outputs, truth.outputs, 2**-20), (result.gradients, truth.gradients, 2**-22 * logit)]
        for got, want, bound in pairs:
            for name, tensor in got.items():
                assert (tensor - want[name]).abs().max() <= bound * want[name].abs().max(), name

    @pytest.mark.usefixtures("tiles")
    @pytest.mark.parametrize("scale", [0.125, 0.3])  # a power of two, and one that rounds
    @pytest.mark.parametrize("logit", [1e3, 1e6, 2.0**24, 1e8, 1e30, -1e8])
    def test_equal_logits_of_any_size(self, backend, logit, scale):
        """Four equal scores give four weights of 1/4, even where rounding the log-sum-exp has lost ln 4."""
        backend.require(torch.float32, backward=True)
        qkv = torch.randn(4, 3, 1, 8, device=backend.device)
        qkv[:, 0], qkv[:, 1] = logit, 1
        qkv.requires_grad_()
        cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=backend.device)
        out = ops.attention(qkv, cu_seqlens, 4, scale=scale)
        dout = torch.randn_like(out)
        (dqkv,) = torch.autograd.grad(out, qkv, dout)
        torch.testing.assert_close(out, qkv[:, 2].mean(0).expand_as(out).detach(), rtol=2**-21, atol=2**-22)
        torch.testing.assert_close(dqkv[:, 2], dout.mean(0).expand_as(dout), rtol=2**-21, atol=2**-22)

    def test_every_row_has_its_own_sum(self, backend):
        """The first 64 queries have small scores, the others scores of hundreds, so tiles of any size have both as
        neighbours. The bounds are those of test_large_logits."""
        backend.require(torch.float32, backward=True)
        inputs = self.inputs(((112,), 1, 16), torch.float32, backend.device)
        inputs["qkv"][:64, 0] *= 0.01
        inputs["qkv"][64:, 0] *= 100
        logit = (inputs["qkv"][:, 0, 0] @ inputs["qkv"][:, 1, 0].mT).abs().max()
        _, (plain, _) = self.with_scale(1.0)
        ours = lambda qkv, cu_seqlens: ops.attention(qkv, cu_seqlens, 112, scale=1.0)  # noqa: E731
        result, truth = testing.evaluate(ours, inputs), testing.evaluate(plain, inputs, dtype=torch.float64)
        pairs = [(result.outputs, truth.outputs), (result.gradients, truth.gradients)]
        for got, want in pairs:
            for name, tensor in got.items():
                assert (tensor - want[name]).abs().max() <= 2**-22 * logit * want[name].abs().max(), name

    @pytest.mark.usefixtures("tiles")
    @pytest.mark.parametrize(
        ("size", "rows", "heads"),
        [
            pytest.param(((5, 7, 6), 2, 16), slice(5, 12), slice(None), id="sequences"),
            pytest.param(((65,), 3, 12), slice(None), 1, id="heads-shorter-than-a-tile", marks=slow_interpreted),
        ],
    )
    @pytest.mark.parametrize(
        "dtype",
        (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow_on("triton", "cuda")), torch.float16),
        ids=("float32", "bfloat16", "float16"),
    )
    def test_sequences_and_heads_do_not_see_each_other(self, backend, dtype, size, rows, heads):
        """NaN, infinity and 1e30 in one sequence or head do not change the bits of the others, forward and backward."""
        backend.require(dtype)
        inputs = self.inputs(size, dtype, backend.device)
        both = backend.why_not(dtype, True) is None
        clean = testing.evaluate(self.ours, inputs, gradients=both)
        for poison in (torch.nan, torch.inf, 1e30):
            qkv = inputs["qkv"].clone()
            qkv[rows, :, heads] = torch.tensor(poison).to(qkv)  # 1e30 is infinite in float16
            dirty = testing.evaluate(self.ours, inputs | {"qkv": qkv}, gradients=both)
            for name, a in {**clean.outputs, **clean.gradients}.items():
                b = {**dirty.outputs, **dirty.gradients}[name]
                a[rows, ..., heads, :] = b[rows, ..., heads, :] = 0
                assert torch.equal(a, b), name

    def test_longer_max_seqlen_changes_nothing_but_rounding(self, backend):
        inputs = self.inputs(((5, 3), 2, 8), torch.float32, backend.device)
        one, two = (ops.attention(*inputs.values(), m) for m in (5, 100))
        assert (one - two).abs().max() <= 2**-22 * one.abs().max()

    @pytest.mark.usefixtures("tiles")
    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("float32", "float16"))
    def test_token_outside_every_sequence_gets_zeros(self, backend, dtype):
        """A GPU does not check that cu_seqlens covers all tokens. The rest gets zeros, not what memory held before."""
        backend.require(dtype)
        heads = 33 if backend.name == "cuda" else 2  # more than a warp has lanes
        qkv, cu_seqlens = self.inputs(((5, 3), heads, 8), dtype, backend.device)["qkv"], ends((5,), backend.device)
        rest = (5, 0.3, 0.0, None, 0)
        out, lse = PRIMITIVES["attention_fwd"](backend.name, qkv, cu_seqlens, *rest)
        assert torch.equal(out[5:], torch.zeros_like(out[5:])) and not out[:5].isnan().any()
        assert torch.equal(lse[:, 5:], torch.zeros_like(lse[:, 5:]))
        dqkv = PRIMITIVES["attention_bwd"](backend.name, torch.ones_like(out), qkv, out, lse, cu_seqlens, *rest)
        assert torch.equal(dqkv[5:], torch.zeros_like(dqkv[5:])) and not dqkv[:5].isnan().any()
        if backend.name != "cpu":  # the CPU refuses a cu_seqlens that does not begin with 0
            later = torch.tensor([2, 5], dtype=torch.int32, device=backend.device)
            out, _ = PRIMITIVES["attention_fwd"](backend.name, qkv, later, *rest)
            assert torch.equal(out[:2], torch.zeros_like(out[:2])) and out[2:5].abs().amax(-1).all()

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("float32", "float16"))
    def test_no_sequence_at_all(self, backend, dtype):
        backend.require(dtype)
        qkv = self.inputs(((5,), 2, 8), dtype, backend.device)["qkv"]
        cu_seqlens = torch.zeros(1, dtype=torch.int32, device=backend.device)
        if backend.name in ("reference", "triton"):
            backend.skip("it takes a sequence")
        out, _ = PRIMITIVES["attention_fwd"](backend.name, qkv, cu_seqlens, 5, 0.3, 0.0, None, 0)
        assert torch.equal(out, torch.zeros_like(out))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
    @pytest.mark.parametrize("length", [85, 1109], ids=["one block of keys", "blocks of keys"])
    def test_the_largest_score_anywhere(self, backend, length, dtype):
        """The key with the largest score has weight 1 and all others 0, whichever block, vector, slot or thread has it.

        After 64 keys, or after the blocks of the CPU kernel, follow a whole vector and a part of one, whatever the
        vector size.
        """
        if length > 85 and backend.name != "cpu":
            backend.skip("for the kernel on CPUs, which takes keys in blocks")
        backend.require(dtype)
        few = backend.rounds_fma_twice or length > 85  # the interpreter is slow
        places = torch.arange(0, length, 21 if few else 1)  # one for each head
        qkv = torch.randn(length, 3, len(places), 8).to(dtype)
        qkv[:, 0], qkv[:, 1] = 1, 0
        qkv[places, 1, torch.arange(len(places)), 0] = 400
        out = ops.attention(qkv.to(backend.device), ends((length,), backend.device), length, scale=1.0).cpu()
        assert torch.equal(out, qkv[places, 2, torch.arange(len(places))].expand_as(out))

    def test_a_block_of_keys_whose_scores_are_minus_infinity(self, backend):
        qkv = torch.randn(600, 3, 1, 8, device=backend.device)
        qkv[:, 0], qkv[:, 1], qkv[:550, 1] = 1e20, 0, -1e20
        inputs = {"qkv": qkv, "cu_seqlens": ends((600,), backend.device)}
        testing.assert_accurate(self.ours, self.truth, self.contenders(), inputs, gradients=False)

    def test_what_lies_behind_an_odd_number_of_keys(self, backend):
        """With an odd number of keys, products of pairs read one number too many: in the forward from the row's own
        scores, one of which is -inf here, and in the backward what another sequence left behind, NaN here."""
        backend.require(torch.bfloat16, backward=True)
        alone = normal(5, 3, 1, 8, dtype=torch.bfloat16, device=backend.device)
        alone[:, 0], alone[:, 1], alone[2, 1] = 1e19, 0, -1e19
        alone[:, 0, :, 1:] = alone[2, 1, :, 1:] = 0
        alone[2, 1, :, 0] = -1e20
        before = torch.full((6, 3, 1, 8), torch.nan, dtype=torch.bfloat16, device=backend.device)
        results = []
        for qkv, lengths in ((alone, (5,)), (torch.cat([before, alone]), (6, 5))):
            qkv = qkv.clone().requires_grad_()
            out = ops.attention(qkv, ends(lengths, backend.device), max(lengths), scale=1.0)
            out.backward(torch.ones_like(out))
            results.append((out[-5:].detach(), qkv.grad[-5:]))
        for one, behind in zip(*results, strict=True):
            assert torch.equal(one, behind) and one.isfinite().all()
        expected = alone[[0, 1, 3, 4], 2].float().mean(0)
        assert ((results[0][0].float() - expected).abs() <= 2**-7 * expected.abs()).all()

    @pytest.mark.parametrize("small", [0, 8], ids=["every-row", "the-lower-half-of-a-fragment"])
    @pytest.mark.parametrize("factor", [30.0, 8e3])
    @pytest.mark.parametrize("dtype", HALF, ids=("bfloat16", "float16"))
    def test_equal_logits_of_any_size_in_half_precision(self, backend, dtype, factor, small):
        """Like test_equal_logits_of_any_size; a fused multiply-add does not subtract sums of 64 products of 8000 x 8000
        exactly.

        small: the number of rows before the others whose logits are 0.
        """
        backend.require(dtype, backward=True)
        if backend.name == "triton":
            backend.skip("its exponent is fused, good for logits to 2**30")
        tokens = 4 + small
        qkv = normal(tokens, 3, 1, 64, dtype=dtype, device=backend.device)
        qkv[:, 0], qkv[:, 1], qkv[:small, 0] = factor, factor, 0
        qkv.requires_grad_()
        out = ops.attention(qkv, ends((tokens,), backend.device), tokens, scale=0.3)
        dout = torch.randn_like(out)
        (dqkv,) = torch.autograd.grad(out, qkv, dout)
        bounds = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
        torch.testing.assert_close(out, qkv[:, 2].mean(0).expand_as(out).detach(), **bounds)
        torch.testing.assert_close(dqkv[:, 2], dout.mean(0).expand_as(dout), **bounds)

    @pytest.mark.parametrize("dtype", HALF, ids=("bfloat16", "float16"))
    def test_unaligned_memory(self, backend, dtype):
        backend.require(dtype)
        inputs = self.inputs(((5, 3), 2, 16), dtype, backend.device)
        expected = testing.evaluate(self.ours, inputs)
        got = testing.evaluate(one_element_in(self.ours), inputs)
        for name, tensor in {**expected.outputs, **expected.gradients}.items():
            assert torch.equal({**got.outputs, **got.gradients}[name], tensor), name

    @pytest.mark.usefixtures("tiles")
    def test_every_row_is_written_whatever_max_seqlen_says(self, backend):
        """A GPU does not check max_seqlen: one that is too small loses tokens, whose rows are zeros, and reads nothing
        outside the tensors. The CPU kernel takes the lengths from cu_seqlens and loses none.
        """
        inputs = self.inputs(((5, 3), 2, 8), torch.float32, backend.device)
        inputs["qkv"][3:5] *= 1 if backend.name == "cpu" else torch.nan  # lost tokens must not reach the output
        out, whole = (
            PRIMITIVES["attention_fwd"](backend.name, *inputs.values(), n, 0.3, 0.0, None, 0)[0] for n in (3, 5)
        )
        lost = whole[3:5] if backend.name == "cpu" else torch.zeros_like(out[3:5])
        assert not out.isnan().any() and torch.equal(out[3:5], lost)

    @pytest.mark.usefixtures("tiles")
    def test_foreign_cu_seqlens_are_clamped(self, backend):
        """Compiled code does not check cu_seqlens: every row is written, and nothing outside the tensors is read."""
        if backend.name == "reference":
            backend.skip("plain PyTorch indexes with what it is given")
        qkv = self.inputs(((5, 3), 2, 8), torch.float32, backend.device)["qkv"]
        for ends in ([0, 5, 2, 5], [0, 5, 800], [-7, 5, 8], [0, 5, 3], [3, 5, 5], [2**31 - 1, -(2**31), 8]):
            cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=backend.device)
            args = (qkv, cu_seqlens, 8, 0.3, 0.0, None, 0)
            with cuda_on_cpu.overlap():  # the sequences overlap
                out, lse = PRIMITIVES["attention_fwd"](backend.name, *args)
                args = (torch.ones_like(out), qkv, out, lse, cu_seqlens, *args[2:])
                dqkv = PRIMITIVES["attention_bwd"](backend.name, *args)
            assert not out.isnan().any() and not dqkv.isnan().any()

    @pytest.mark.slow_on("reference")
    def test_compiles_with_dynamic_head_sizes(self, backend):
        inputs = self.inputs(((5, 3), 2, 8), torch.float32, backend.device)
        expected = self.ours(**inputs)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda qkv, cu: ops.attention(qkv, cu, 5), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        assert torch.equal(compiled(*inputs.values()), expected)

    def test_weights_under_autocast_are_those_that_were_applied(self, backend):
        inputs = self.inputs(((5, 3), 2, 8), torch.bfloat16, "cpu")
        self.ours(**self.inputs(((5, 3), 2, 8), torch.float32, backend.device))
        expected = ops.attention_weights(*inputs.values(), 5)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ops.attention_weights(*inputs.values(), 5), expected)

    def test_autocast(self, backend):
        backend.require(torch.bfloat16)
        inputs = self.inputs(((5, 3), 2, 8), torch.float32, backend.device)
        expected = self.ours(inputs["qkv"].bfloat16(), inputs["cu_seqlens"])
        with torch.autocast(backend.device, torch.bfloat16):
            assert torch.equal(self.ours(**inputs), expected)

    def test_weights(self, backend):
        inputs = self.inputs(((5, 0, 3), 2, 8), torch.float32, backend.device)
        weights = ops.attention_weights(*inputs.values(), 5)
        v = inputs["qkv"][5:, 2].permute(1, 0, 2)
        out = self.ours(**inputs)
        assert (weights[2, :, :3, :3] @ v - out[5:].transpose(0, 1)).abs().max() <= 1e-6
        assert (
            weights[1].abs().sum() == 0 and weights[2, :, 3:].abs().sum() == 0 and weights[2, :, :, 3:].abs().sum() == 0
        )


class TestAttentionDropout(AttentionSuite):
    """With dropout: the truth multiplies by the mask that fastbert.random specifies."""

    key, p, site = -0x123456789ABCDEF, 0.1, 7

    @pytest.mark.usefixtures("tiles")
    @pytest.mark.parametrize(
        "p", [1 / 256, 0.1, 255 / 256, *(pytest.param(p, marks=slow_interpreted) for p in (0.5, 0.9))]
    )
    @pytest.mark.parametrize("length", [27, 70])
    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("float32", "float16"))
    def test_dropped_weights_are_the_contract_s(self, backend, dtype, length, p):
        """One-hot values show in the output which keys were dropped. The values' gradients show it for the diagonal."""
        backend.require(dtype, backward=True)
        threshold, arguments = round(p * 256), self.dropout_arguments(torch.empty(0, device=backend.device))
        qkv = torch.zeros(length, 3, 1, 128 if length > 64 else 32, device=backend.device, dtype=dtype)
        qkv[:, 2, 0, :length] = torch.eye(length, device=backend.device)
        qkv.requires_grad_()
        out = ops.attention(qkv, ends((length,), backend.device), length, **arguments | {"dropout_p": p})
        key = torch.tensor([self.key])
        kept = random.attention_bits(key, self.site, 1, 1, length, length)[0, 0].to(backend.device) >= threshold
        assert torch.equal(out[:, 0, :length] > 0, kept)
        (gradient,) = torch.autograd.grad(out[:, 0, :length].diagonal().sum(), qkv)  # query i's weight of key i
        assert torch.equal(gradient[:, 2, 0, :length].diagonal() > 0, kept.diagonal())


class TestQkvAttention:
    def test_is_a_projection_and_attention(self):
        hidden, weight, bias = torch.randn(8, 12), torch.randn(36, 12), torch.randn(36)
        cu_seqlens = ends((5, 3))
        out = ops.qkv_attention(hidden, weight, bias, 3, cu_seqlens, 5)
        for start, end in ((0, 5), (5, 8)):
            q, k, v = (
                F.linear(hidden[start:end], w, b).view(-1, 3, 4).transpose(0, 1)
                for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True)
            )
            truth = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
            assert (out[start:end] - truth).abs().max() <= 1e-5

    def test_float32_parameters_and_autocast_give_the_activation_s_dtype(self):
        hidden, weight, bias = torch.randn(8, 12).bfloat16(), torch.randn(36, 12), torch.randn(36)
        out = ops.qkv_attention(hidden, weight, bias, 3, ends((5, 3)), 5)
        assert out.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ops.qkv_attention(hidden.float(), weight, bias, 3, ends((5, 3)), 5), out)


QKV = torch.zeros(8, 3, 2, 4)


@pytest.mark.parametrize(
    ("qkv", "cu_seqlens", "max_seqlen", "error", "words"),
    [
        (QKV, ends((5, 3)).long(), 5, TypeError, "cu_seqlens is torch.int64; expected a torch.int32 tensor"),
        (QKV, [0, 5, 8], 5, TypeError, "cu_seqlens is list"),
        (QKV, torch.tensor([[0, 8]], dtype=torch.int32), 8, ValueError, r"cu_seqlens has shape \(1, 2\)"),
        (QKV, torch.tensor([0, 6, 5, 8], dtype=torch.int32), 8, ValueError, "never to fall"),
        (QKV, torch.tensor([1, 8], dtype=torch.int32), 8, ValueError, "start at 0"),
        (QKV, ends((5, 2)), 5, ValueError, "ends at 7; expected the number of tokens, 8"),
        (QKV, ends((5, 4)), 5, ValueError, "ends at 9"),
        (QKV, ends((5, 3)), 4, ValueError, "max_seqlen is 4; expected at least the longest sequence, 5"),
        (QKV[:0], ends(()), -1, ValueError, "max_seqlen is -1; expected at least the longest sequence, 0"),
        (QKV, ends((5, 3)), torch.tensor(5), TypeError, "max_seqlen is a Tensor; expected an int"),
        (QKV[:, :2], ends((5, 3)), 5, ValueError, r"qkv has shape \(8, 2, 2, 4\); expected \(T, 3, H, D\)"),
        (QKV.long(), ends((5, 3)), 5, TypeError, "qkv is torch.int64"),
        (QKV, ends((5, 3)).to("meta"), 5, ValueError, "qkv on cpu, cu_seqlens on meta"),
    ],
)
def test_bad_input_is_refused(qkv, cu_seqlens, max_seqlen, error, words):
    with pytest.raises(error, match=words):
        ops.attention(qkv, cu_seqlens, max_seqlen)


def test_bad_dropout_and_heads_are_refused():
    with pytest.raises(ValueError, match="8 random bits an element round to 0 / 256"):
        ops.attention(QKV, ends((5, 3)), 5, dropout_p=0.001, rng=random.new_key())
    with pytest.raises(ValueError, match="round to 256 / 256"):
        ops.attention(QKV, ends((5, 3)), 5, dropout_p=0.999, rng=random.new_key())
    with pytest.raises(ValueError, match="num_heads is 5; expected a divisor of C = 12"):
        ops.qkv_attention(torch.zeros(8, 12), torch.zeros(36, 12), torch.zeros(36), 5, ends((5, 3)), 5)
    with pytest.raises(ValueError, match=r"weight has shape \(35, 12\); expected \(3C, C\) = \(36, 12\)"):
        ops.qkv_attention(torch.zeros(8, 12), torch.zeros(35, 12), torch.zeros(35), 3, ends((5, 3)), 5)


def test_a_backend_without_the_kernel_says_so():
    refusal = pytest.raises(RuntimeError, match="backend 'cuda' cannot run attention: it")
    with cuda_on_cpu.uninstalled(), fastbert.backend("cuda"), refusal:
        ops.attention(QKV, ends((5, 3)), 5)
