import functools

import pytest
import torch
import torch.nn.functional as F
from op_suite import HALF, OpSuite, device_for, normal, pytest_generate_tests, slow_interpreted  # noqa: F401

from fastbert import backends, ops, random, testing
from fastbert.ops.op import PRIMITIVES

EPS = 1e-12
PADDING, POSITION_PADDING = 3, 2  # the rows of the word and position tables without a gradient


class TestEmbedding(OpSuite):
    op = "embedding"
    parameters = ("weight", "bias")
    shapes = [  # (ids shape, vocabulary, channels)
        pytest.param(((9,), 11, 7), id="odd-channels-and-repeated-ids"),
        pytest.param(((40,), 50, 768), id="bert-base", marks=slow_interpreted),
        pytest.param(((40,), 50, 384), id="minilm-whose-sums-fill-48-KiB", marks=slow_interpreted),
        pytest.param(((2, 5), 11, 16), id="two-dimensions"),
        pytest.param(((300,), 4, 5), id="many-tokens-to-the-row", marks=slow_interpreted),
        pytest.param(((5,), 5, 2056), id="channels-of-several-warps", marks=slow_interpreted),
        pytest.param(((3,), 5, 1024), id="the-most-channels-of-a-thread"),
        pytest.param(((5,), 5, 12), id="vectors-of-four-but-not-of-eight"),
    ]

    def inputs(self, shape, dtype, device):
        ids, rows, channels = shape
        word, position, token_type = torch.randint(rows, ids), torch.randint(6, ids), torch.randint(2, ids)
        word.view(-1)[:3] = torch.tensor([PADDING, 1, 1])[: word.numel()]
        return {
            "input_ids": word.to(device),
            "position_ids": position.to(device),
            "token_type_ids": token_type.to(device),
            "word": normal(rows, channels, dtype=dtype, device=device),
            "position": normal(6, channels, dtype=dtype, device=device),
            "token_type": normal(2, channels, dtype=dtype, device=device),
            "weight": normal(channels, dtype=dtype, device=device),
            "bias": normal(channels, dtype=dtype, device=device),
        }

    def empty(self, dtype, device):
        return self.inputs(((0,), 5, 8), dtype, device)

    def test_a_float32_bias_beside_a_16_bit_weight_gets_a_float32_gradient(self, backend):
        backend.require(torch.bfloat16, backward=True)
        inputs = self.inputs(((257,), 5, 8), torch.bfloat16, backend.device)
        inputs["bias"] = inputs["bias"].float().requires_grad_()
        y = ops.embedding(**inputs)
        y.backward(torch.ones_like(y))
        assert inputs["bias"].grad.tolist() == [257.0] * 8  # bfloat16 has 256 and 258

    def factor_of(self, y):
        return 1

    def ours(self, **inputs):
        dropout = self.dropout_arguments(inputs["input_ids"])
        return ops.embedding(**inputs, eps=EPS, padding_idx=PADDING, position_padding_idx=POSITION_PADDING, **dropout)

    def summed(self, input_ids, position_ids, token_type_ids, word, position, token_type, **_):
        z = F.embedding(input_ids, word, padding_idx=PADDING)
        return (
            z
            + F.embedding(position_ids, position, padding_idx=POSITION_PADDING)
            + F.embedding(token_type_ids, token_type)
        )

    def truth(self, **inputs):
        z = self.summed(**inputs)
        z = z - z.mean(-1, keepdim=True)
        y = z / (z.square().mean(-1, keepdim=True) + EPS).sqrt() * inputs["weight"] + inputs["bias"]
        return y * self.factor_of(y)

    def contenders(self):
        def fused(**inputs):
            z = self.summed(**inputs)
            wide = inputs["weight"].dtype  # float32 parameters: as under autocast
            y = F.layer_norm(z.to(wide), z.shape[-1:], inputs["weight"], inputs["bias"], EPS).to(z.dtype)
            return y * self.factor_of(y)

        return [fused, lambda **i: self.truth(**i).to(i["word"].dtype)]

    def primitive_calls(self, inputs):
        *tables, weight, bias = inputs.values()
        dy = torch.ones(*tables[0].shape, weight.shape[0], device=weight.device, dtype=weight.dtype)
        stats = [torch.ones(tables[0].shape, device=weight.device) for _ in range(2)]
        rng = random.new_key(weight.device)
        yield "embedding_fwd", (*tables, weight, bias, rng, EPS, 0.1, 0)
        for need in ([True] * 4, [False] * 4, [True, False, True, False]):
            yield "embedding_bwd", (dy, *tables, weight, *stats, rng, 0.1, 0, PADDING, need)

    def test_gradcheck(self, backend, monkeypatch):
        """The ids have no padding: padding rows get no gradient, and finite differences would disagree."""
        build = self.inputs

        def without_padding(*arguments):
            inputs = build(*arguments)
            for name, padding in (("input_ids", PADDING), ("position_ids", POSITION_PADDING)):
                inputs[name] = torch.where(inputs[name] == padding, 4, inputs[name])
            return inputs

        monkeypatch.setattr(self, "inputs", without_padding)
        super().test_gradcheck(backend)

    def test_padding_row_gets_no_gradient(self, backend):
        backend.require(torch.float32, backward=True)
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        inputs["position_ids"].view(-1)[:2] = torch.tensor([POSITION_PADDING, 4])
        gradients = testing.evaluate(self.ours, inputs).gradients
        for name, padding, other in (("dword", PADDING, 1), ("dposition", POSITION_PADDING, 4)):
            assert gradients[name][padding].abs().sum() == 0 and gradients[name][other].abs().sum() > 0

    def test_without_token_types(self, backend):
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        zeros = inputs | {"token_type": torch.zeros_like(inputs["token_type"])}
        without = inputs | {"token_type": None, "token_type_ids": None}
        both = backend.why_not(torch.float32, True) is None
        one, two = (testing.evaluate(self.ours, i, gradients=both) for i in (zeros, without))
        assert torch.equal(one.outputs["output"], two.outputs["output"])
        for name in two.gradients:
            assert torch.equal(one.gradients[name], two.gradients[name]), name

    def test_int32_ids(self, backend):
        inputs = self.inputs(self.shapes[0].values[0], torch.float32, backend.device)
        narrow = {n: t.int() if n.endswith("_ids") else t for n, t in inputs.items()}
        both = backend.why_not(torch.float32, True) is None
        one, two = (testing.evaluate(self.ours, i, gradients=both) for i in (narrow, inputs))
        assert torch.equal(one.outputs["output"], two.outputs["output"])
        assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in two.gradients)

    @pytest.mark.parametrize("channels", [7, 16])
    def test_tables_of_several_dtypes(self, backend, channels):
        """The results are those of float32 tables, with the gradients rounded: converting to float32 loses nothing."""
        for dtype in HALF:
            backend.require(dtype, backward=True)
        inputs = self.inputs(((9,), 11, channels), torch.float32, backend.device)
        for wide, narrow in (("word", "position"), ("position", "word"), ("token_type", "word"), (None, "position")):
            dtypes = {n: torch.bfloat16 for n in ("word", "position", "token_type")}
            dtypes |= {narrow: torch.float16} | ({wide: torch.float32} if wide else {})
            mixed = inputs | {n: inputs[n].to(dtype) for n, dtype in dtypes.items()}
            same = mixed | {n: mixed[n].float() for n in dtypes}
            one, two = (testing.evaluate(self.ours, i) for i in (mixed, same))
            assert torch.equal(one.outputs["output"], two.outputs["output"])
            for name, gradient in one.gradients.items():
                assert torch.equal(gradient, two.gradients[name].to(gradient.dtype)), (name, dtypes)

    @pytest.mark.slow_on("triton")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=("float32", "float16"))
    def test_unaligned_memory(self, backend, dtype):
        backend.require(dtype)
        inputs = self.inputs(((9,), 11, 264), dtype, backend.device)
        names = ("word", "position", "token_type", "weight", "bias", "dy")
        self.assert_accurate_unaligned(backend, inputs, dtype, *names)

    def test_parameters_may_begin_anywhere(self, backend):
        backend.require(torch.float16)
        inputs = self.inputs(((3,), 5, 768), torch.float16, backend.device)
        self.assert_bits_whatever_parameters_begin_at(backend, inputs)


class TestEmbeddingDropout(TestEmbedding):
    key, p, site = 99, 0.25, 0

    def factor_of(self, y):
        bits = random.row_bits(torch.tensor([self.key]), self.site, y[..., 0].numel(), y.shape[-1]).view(y.shape)
        return ((bits >= 16384).double() * 4 / 3).to(y.device, y.dtype)


TABLE_ROWS = 9
RUNS = {  # (id, how often); Triton's kernels have chunks of 128 sorted ids and tiles of 16 chunks
    "one-id-in-every-row": [(4, 2400)],
    "more-chunks-than-a-tile-to-the-row": [(0, 1), (1, 128 * 17), (2, 128)],
    "runs-that-end-with-chunks": [(1, 128), (2, 256), (5, 127), (6, 1)],
    "runs-that-end-a-row-off": [(0, 127), (1, 129), (2, 1), (3, 128), (8, 2)],
    "both-ends-of-the-table": [(0, 130), (8, 130)],
    "out-of-range": [(-7, 70), (0, 70), (8, 3), (9, 200), (2**40, 1)],  # these count as the nearest id in range
}


@pytest.fixture
def triton_device():
    device = device_for("triton", "embedding", torch.float32)
    return device


def triton_table_gradient(dz, ids, table, padding_idx):
    from fastbert.triton.sums import by_id

    return by_id(dz.to(table.device), ids.to(table.device), table, padding_idx).cpu()


@pytest.mark.parametrize(
    ("runs", "padding_idx"),
    [
        pytest.param(runs, -1, id=name, marks=[pytest.mark.slow] * (sum(count for _, count in runs) > 400))
        for name, runs in RUNS.items()
    ]
    + [pytest.param(RUNS["out-of-range"], 8, id="padding")],
)
def test_table_gradients_in_triton_are_exact_for_integers(triton_device, runs, padding_idx):
    ids = torch.cat([torch.full((count,), id) for id, count in runs])
    ids = ids[torch.randperm(ids.numel())]
    dz = torch.randint(-9, 10, (ids.numel(), 3)).float()
    truth = torch.zeros(TABLE_ROWS, 3).index_add_(0, ids.clamp(0, TABLE_ROWS - 1), dz)
    if padding_idx >= 0:
        truth[padding_idx] = 0
    for unused in (0, 2000):  # rows of the table beyond these ids: there are more ids than rows, or fewer
        if unused and ids.max() >= TABLE_ROWS:
            break
        table = torch.zeros(TABLE_ROWS + unused, 3, device=triton_device)
        gradient = triton_table_gradient(dz, ids, table, padding_idx)
        assert torch.equal(gradient[:TABLE_ROWS], truth) and not gradient[TABLE_ROWS:].any()


def test_a_run_over_more_chunks_than_are_read_at_once_in_triton(triton_device, monkeypatch):
    from fastbert.triton import common, sums

    small = common.Config({"CHUNK": 16, "ROWS": 4, "COLUMNS": 16})
    monkeypatch.setitem(sums.BY_ID, 80, lambda channels: small)
    ids = torch.tensor([0] * 16 + [1] * 100 + [2] * 3 + [4] * 73)[torch.randperm(192)]
    dz = torch.randint(-9, 10, (192, 20)).float()
    table = torch.zeros(5, 20, device=triton_device)
    assert torch.equal(triton_table_gradient(dz, ids, table, -1), torch.zeros(5, 20).index_add_(0, ids, dz))


def test_table_gradients_in_triton_are_added_up_in_float32(triton_device):
    """2048 and 300 ones: a sum in float16 would stay at 2048. There are more columns than a tile has."""
    dz, ids = torch.ones(301, 300), torch.ones(301, dtype=torch.int32)
    dz[0] = 2048
    gradient = triton_table_gradient(dz, ids, torch.zeros(2, 300, device=triton_device, dtype=torch.float16), -1)
    assert gradient.dtype == torch.float16 and (gradient[0] == 0).all() and (gradient[1] == 2348).all()


@pytest.fixture(params=["triton", "cuda"])
def on_device(request):
    """A backend for GPUs, whose operators do not check ids, and the device to run it on."""
    device = device_for(request.param, "embedding", torch.float32)
    return request.param, device


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=("int64", "int32"))
@pytest.mark.parametrize("channels", [7, 264])
def test_an_id_out_of_range_gives_nan(on_device, dtype, channels):
    """In its own row alone; and in the gradients, so that no training goes on with the wrong row."""
    backend, device = on_device
    last = dict(input_ids=10, position_ids=5, token_type_ids=1)
    inputs = TestEmbedding().inputs(((4,), 11, channels), torch.float32, device)
    forward, backward = (functools.partial(PRIMITIVES[f"embedding_{d}"], backend) for d in ("fwd", "bwd"))
    tame, *_ = forward(*inputs.values(), None, EPS, 0.0, 0)
    for name, end in last.items():
        for id in (-1, end + 1):
            wild = inputs | {name: torch.cat([inputs[name][:3], torch.tensor([id], device=device)]).to(dtype)}
            y, *statistics = forward(*wild.values(), None, EPS, 0.0, 0)
            assert torch.equal(y[:3], tame[:3]) and y[3].isnan().all(), (name, id)
            *args, _ = wild.values()
            gradients = backward(torch.ones_like(y), *args, *statistics, None, 0.0, 0, -1, [True] * 4)
            assert all(gradient.isnan().any() for gradient in gradients[:4]), (name, id)


def equal_with_nan(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    ("rows", "halves"),
    [
        pytest.param((1100, 9, 9), 136, id="sorted-listed-in-passing-vectors-in-two-blocks"),
        pytest.param((9, 17, 17), 3, id="all-listed-elements"),
        pytest.param((1100, 9, 9), 3, id="sorted-listed-in-passing-elements", marks=pytest.mark.slow),
        pytest.param((9, 17, 17), 136, id="all-listed-vectors-in-two-blocks", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_table_gradients_in_cuda_are_exact_for_integers(runs, rows, halves):
    """With tables of zeros and rows of dy that add up to 0, dz is dy."""
    device = device_for("cuda", "embedding", torch.float32, backward=True)
    ids = torch.cat([torch.full((count,), id) for id, count in runs])
    ids = torch.stack([ids[torch.randperm(ids.numel())] for _ in rows])
    dy = torch.randint(-9, 10, (ids.shape[1], halves)).float()
    dy = torch.cat([dy, -dy], 1)
    wild = torch.stack([(i < 0) | (i >= n) for n, i in zip(rows, ids, strict=True)]).any(0)
    dz = dy.masked_fill(wild[:, None], torch.nan)
    truths = [torch.zeros(n, 2 * halves).index_add_(0, i.clamp(0, n - 1), dz) for n, i in zip(rows, ids, strict=True)]
    truths[0][4] = 0  # the padding row
    tables = [torch.zeros(n, 2 * halves, device=device) for n in rows]
    weight, zeros, ones = torch.ones(2 * halves), torch.zeros(ids.shape[1]), torch.ones(ids.shape[1])
    weight, zeros, ones, ids, dy = (x.to(device) for x in (weight, zeros, ones, ids, dy))
    found = PRIMITIVES["embedding_bwd"]("cuda", dy, *ids, *tables, weight, zeros, ones, None, 0.0, 0, 4, [True] * 4)
    for one, truth in zip(found, truths, strict=False):
        assert equal_with_nan(one.cpu(), truth)
    assert torch.equal(found[4], dy.sum(0)) and (found[3].isnan().all() if wild.any() else found[3].abs().sum() == 0)
    for need in ([False, False, True, False], [True, False, False, False]):
        some = PRIMITIVES["embedding_bwd"]("cuda", dy, *ids, *tables, weight, zeros, ones, None, 0.0, 0, 4, need)
        for one, other, needed in zip(some, found, [*need, need[3]], strict=True):
            assert equal_with_nan(one, other) if needed else one.numel() == 0


def test_table_gradients_in_cuda_are_added_up_in_float32():
    """2048 and 300 ones: in float16 a sum would stay at 2048. The tokens of one table are sorted, those of another are
    listed, and those of the third are added up in passing."""
    device = device_for("cuda", "embedding", torch.float16, backward=True)
    half = dict(dtype=torch.float16, device=device)
    tables = [torch.zeros(n, 8, **half) for n in (1100, 9, 2)]
    ids = torch.ones(3, 301, dtype=torch.int32, device=device)
    dy = torch.ones(301, 8, **half)
    dy[0] = 2048
    dy[:, 4:] *= -1
    statistics = torch.zeros(301, device=device), torch.ones(301, device=device)
    arguments = dy, *ids, *tables, torch.ones(8, **half), *statistics, None, 0.0, 0, -1, [True] * 4
    for gradient in PRIMITIVES["embedding_bwd"]("cuda", *arguments)[:3]:
        assert gradient.dtype == torch.float16 and gradient.abs().sum() == 8 * 2348 and gradient[1, 0] == 2348


def test_a_table_without_rows_serves_no_ids(on_device):
    backend, device = on_device
    if backend != "cuda":
        pytest.skip("Triton's kernels take it for zeros")
    inputs = TestEmbedding().inputs(((3,), 11, 7), torch.float32, device)
    inputs["position"] = torch.zeros(0, 7, device=device)
    with pytest.raises(IndexError, match=r"position_ids has shape \[0, 7\] beside 3 ids"):
        PRIMITIVES["embedding_fwd"](backend, *inputs.values(), None, EPS, 0.0, 0)


def good():
    return TestEmbedding().inputs(((9,), 11, 7), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("input_ids", torch.tensor([0, 11] + [0] * 7), IndexError, r"\[1\] is 11; expected 0 <= input_ids < 11"),
        ("input_ids", torch.tensor([0, 1, -1] + [0] * 6), IndexError, r"input_ids\[2\] is -1"),
        ("position_ids", torch.full((9,), 6), IndexError, r"position_ids\[0\] is 6"),
        ("token_type_ids", torch.full((9,), 2), IndexError, r"token_type_ids\[0\] is 2"),
        ("input_ids", torch.zeros(9), TypeError, "input_ids is torch.float32; expected torch.int64 or torch.int32"),
        ("position_ids", torch.zeros(8).long(), ValueError, r"has shape \(8,\); expected input_ids' = \(9,\)"),
        ("position", torch.zeros(6, 8), ValueError, r"position has shape \(6, 8\)"),
        ("weight", torch.zeros(8), ValueError, r"weight has shape \(8,\)"),
        ("token_type", None, ValueError, "go together"),
        ("input_ids", torch.zeros(9, device="meta").long(), ValueError, "input_ids on meta"),
    ],
)
def test_bad_input_is_refused(name, value, error, words):
    with pytest.raises(error, match=words):
        ops.embedding(**good() | {name: value})


def test_bad_padding_idx_is_refused():
    with pytest.raises(ValueError, match="padding_idx is 11"):
        ops.embedding(**good(), padding_idx=11)
    with pytest.raises(ValueError, match="position_padding_idx is -1; expected 0 <= position_padding_idx < 6"):
        ops.embedding(**good(), position_padding_idx=-1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_place_of_an_id_is_said_in_the_shape_of_the_ids(backend):
    if problem := backends.why_not(backend, "embedding", "cpu", torch.float32):
        pytest.skip(problem)
    inputs = {name: x.view(3, 3) if name.endswith("_ids") else x for name, x in good().items()}
    inputs["input_ids"][1, 2] = 11
    with backends.backend(backend), pytest.raises(IndexError, match=r"input_ids\[1, 2\] is 11; expected 0 <="):
        ops.embedding(**inputs)
