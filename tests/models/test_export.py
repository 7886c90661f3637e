"""Exported files compute the model's outputs without fastbert, for every head and family; failures leave no file."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from small_models import TINY, batch, hugging_face, ours

import fastbert
from fastbert import BertConfig, BertModel, backends, testing
from fastbert.inference import export
from fastbert.testing import Result

HEADS = ["BertModel", *(n for n in fastbert.__all__ if n.startswith("BertFor") and not n.endswith("Output"))]
FAMILIES = {  # each with the features that only it has
    "bert": {},
    "roberta": {"type_vocab_size": 1, "pad_token_id": 1},  # positions after pad_token_id
    "distilbert": {},  # no token types, no pooler
    "albert": {"embedding_size": 16},  # a projection, one layer run twice
    "electra": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
    | {"share_att_key": True, "conv_kernel_size": 3},  # position slots, which are constants in a file
    "mpnet": {},
}
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")), reason="no ONNX"
)
FORMATS = ["torch-export", pytest.param("onnx", marks=needs_onnx)]
WIDTHS = [("torch-export", torch.bfloat16), ("torch-export", torch.float64)]
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}


def model_of(name, family="bert", **changes):
    """A small model with parameters that are not trivial; skips the test if the family has no such head."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"vocab_size": 99, "max_position_embeddings": 32, **FAMILIES[family], **changes}
    try:
        model = getattr(fastbert, name)(BertConfig(model_type=family, **sizes))
    except ValueError as error:
        pytest.skip(str(error))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def run_alone(format, *arguments):
    """Runs RUN[format] in a process that can import neither fastbert nor, for ONNX, PyTorch."""
    without = ["fastbert", "torch"] if format == "onnx" else ["fastbert"]
    code = f"import pickle, sys\nsys.modules.update(dict.fromkeys({without}))\n" + textwrap.dedent(RUN[format])
    answer = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-3000:]


RUN = {  # arguments: the file, batches of NumPy arrays, where its outputs go
    "onnx": """
        import onnxruntime
        session = onnxruntime.InferenceSession(sys.argv[1])
        batches = pickle.load(open(sys.argv[2], "rb"))
        names = [output.name for output in session.get_outputs()]
        found = [dict(zip(names, session.run(names, batch))) for batch in batches]
        pickle.dump(found, open(sys.argv[3], "wb"))
    """,
    "torch-export": """
        import torch
        program = torch.export.load(sys.argv[1]).module()
        found = []
        for batch in pickle.load(open(sys.argv[2], "rb")):
            with torch.no_grad():
                output = program(**{name: torch.from_numpy(ids) for name, ids in batch.items()})
            found.append({name: tensor.numpy() for name, tensor in output.items()})
        pickle.dump(found, open(sys.argv[3], "wb"))
    """,
}


# A new process takes long to load either; the test of a head below loads files in this one.
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_the_file_alone_computes_what_transformers_does(tmp_path, format):
    """Shapes that the export did not check obey the same bound: export.FACTOR times transformers' own error."""
    theirs, sdpa = (hugging_face(attention=attention, num_hidden_layers=1).cpu() for attention in ("eager", "sdpa"))
    truth = copy.deepcopy(theirs).double()
    sdpa.load_state_dict(theirs.state_dict())
    path = tmp_path / f"model{ENDINGS[format]}"
    done = export.export(ours(theirs), path, format)
    assert done.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert done.outputs == ("last_hidden_state", "pooler_output")
    sizes = (([1], 1), ([4, 4], 4), ([32, 2, 17], 32), ([1, 3], 6), ([2] * 9, 2))
    batches = [{name: ids.cpu().numpy() for name, ids in batch(*size).items()} for size in sizes]
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))
    run_alone(format, path, tmp_path / "batches", tmp_path / "outputs")
    for inputs, found in zip(batches, pickle.loads((tmp_path / "outputs").read_bytes()), strict=True):
        inputs, found = ({name: torch.from_numpy(array) for name, array in part.items()} for part in (inputs, found))
        visible = inputs["attention_mask"].bool()
        assert not found["last_hidden_state"][~visible].any()
        results = []
        for model in (truth, theirs, sdpa):
            with torch.no_grad():
                output = model(**inputs)
            results.append((output.last_hidden_state[visible], output.pooler_output))
        results = [Result(dict(enumerate(part)), {}) for part in results]
        mine = Result({0: found["last_hidden_state"][visible], 1: found["pooler_output"]}, {})
        testing.assert_rows(testing.compare(mine, results[0], results[1:], factor=export.FACTOR))


@pytest.mark.slow
def test_a_head_with_two_outputs_that_are_lowest_at_padding(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):  # which has no say
        check(tmp_path, "BertForQuestionAnswering", "bert", "torch-export", num_hidden_layers=1)


@pytest.mark.slow
def test_the_default_device_has_no_say(tmp_path):
    model = model_of("BertModel", num_hidden_layers=1).eval()
    with torch.device("meta"):
        exported = export.export(model, tmp_path / "model.pt2", "torch-export")
    assert [row.ok for row in exported.rows] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
def test_every_head_of_every_family(tmp_path, name, family, format):
    check(tmp_path, name, family, format)


def check(tmp_path, name, family, format, **changes):
    """export() compares outputs itself. This checks that it did, with a strict bound, for every output of the head."""
    model = model_of(name, family, **changes)
    done = export.export(model, tmp_path / f"model{ENDINGS[format]}", format)
    token_types = family not in ("roberta", "distilbert", "deberta-v2", "mpnet")
    assert done.inputs == ("input_ids", "attention_mask", "token_type_ids")[: 2 + token_types]
    own = {"BertModel": ("last_hidden_state", "pooler_output"), "BertForSparseEmbedding": ("sentence_embedding",)}
    assert all("logits" in output or output in own.get(name, ()) for output in done.outputs)
    assert [row.name for row in done.rows] == list(done.outputs) and all(row.ok for row in done.rows)
    assert all(0 < row.baseline < 1e-5 and row.error < 1e-5 for row in done.rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == [done.path.name] and model.training


@pytest.mark.slow
@pytest.mark.parametrize("format, dtype", [*WIDTHS, pytest.param("onnx", torch.float16, marks=needs_onnx)], ids=str)
def test_other_dtypes(tmp_path, format, dtype):
    model = model_of("BertModel").to(dtype)
    assert export.export(model, tmp_path / f"model{ENDINGS[format]}", format).outputs[0] == "last_hidden_state"


@pytest.mark.slow
@needs_onnx
def test_onnx_says_what_its_sizes_are_and_nothing_of_this_machine(tmp_path, monkeypatch):
    import onnx
    from torch.onnx._internal.exporter import _onnx_program

    export.export(model_of("BertForMultipleChoice"), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    sizes = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.output)}
    assert sizes.pop("logits") == ["batch", "choices"]
    assert all(size == ["batch", "choices", "length"] for size in sizes.values()) and len(sizes) == 3
    assert {node.domain for node in graph.node} == {""}
    assert fastbert.__path__[0].encode() not in (tmp_path / "model.onnx").read_bytes()
    # A model that is too large for one file has its weights in a second one.
    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0)
    model = model_of("BertModel")
    export.export(model, tmp_path / "large.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "large.onnx", "large.onnx.data"}
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert (tmp_path / "large.onnx.data").stat().st_size >= 4 * matrices


# ---- refused


@pytest.fixture
def earlier(tmp_path):
    """A file of an earlier export; asserts afterwards that it is unchanged."""
    (tmp_path / "model.pt2").write_text("earlier")
    yield tmp_path / "model.pt2"
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert (tmp_path / "model.pt2").read_text() == "earlier"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("BertModel", lambda x: x * (1 + 1e-5), "does not compute what the model does:\nlast_hidden_state"),
        ("BertForTokenClassification", lambda x: x + 1e-7 * (x == 0), "logits is not equal at padding"),
    ],
)
def test_a_wrong_file_is_not_kept(earlier, monkeypatch, name, changed, words):
    def wrong(file, names):
        program = torch.export.load(file).module()
        return lambda **inputs: {name: changed(value) for name, value in program(**inputs).items()}

    monkeypatch.setitem(export._FORMATS, "torch-export", export._FORMATS["torch-export"]._replace(read=wrong))
    with pytest.raises(RuntimeError, match=words):
        export.export(model_of(name, num_hidden_layers=1), earlier, "torch-export")


@pytest.mark.skipif(backends.EXTENSION is None, reason="without kernels everything is plain PyTorch")
def test_custom_operators_are_not_written(earlier, monkeypatch):
    monkeypatch.setattr(export.backends, "backend", lambda name: torch.no_grad())  # the kernels stay in the graph
    with pytest.raises(RuntimeError, match="has the operators fastbert.add_layer_norm_fwd.default, fastbert.attention"):
        export.export(model_of("BertModel", num_hidden_layers=1), earlier, "torch-export")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"format": "tflite"}, ValueError, "format is 'tflite'; expected one of 'onnx', 'torch-export'"),
        ({"path": "model.onnx"}, ValueError, "expected a name that ends in .pt2"),
        ({"path": "nowhere/model.pt2"}, ValueError, "in an existing folder"),
        ({"model": transformers.BertModel}, TypeError, "a transformers.BertModel; expected a fastbert.BertModel"),
        ({"model": "meta"}, ValueError, "the model is on meta; expected it on the CPU"),
        ({"model": "prepared"}, ValueError, "has packed the model's weights .* export the original"),
        ({"positions": 1}, ValueError, "has max_position_embeddings 1, .* expected 2 or more"),
        ({"format": "onnx", "dtype": torch.bfloat16}, TypeError, "torch.bfloat16; expected one of torch.float32"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_refused_at_once(earlier, change, error, words):
    if change.get("format") == "onnx":
        pytest.importorskip("onnxscript")
    model = BertModel(TINY.changed(max_position_embeddings=change.get("positions", 32))).to(change.get("dtype"))
    if change.get("model") == "meta":
        model = model.to("meta")
    elif change.get("model") == "prepared":
        model = fastbert.prepare(model.eval(), "fp32")
    elif "model" in change:
        model = hugging_face()
    format = change.get("format", "torch-export")
    path = earlier.parent / change.get("path", f"model{ENDINGS.get(format, '.pt2')}")
    with pytest.raises(error, match=words):
        export.export(model, path, format)


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_process(tmp_path):
    """It raises an OSError, where torch's own writer would end the process, in a destructor."""
    code = """
import resource, sys, torch
from pathlib import Path
from fastbert.inference.export import _write_program
program = torch.export.export(torch.nn.Linear(300, 300), (torch.ones(1, 300),))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    _write_program(program, ((), ()), Path(sys.argv[1]))
except OSError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.pt2")], capture_output=True, text=True)
    assert run.returncode == 0 and "File too large" in run.stdout, (run.returncode, run.stdout, run.stderr[-2000:])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_the_earlier_file(tmp_path, format):
    """Exporting raises an OSError, where torch's own writer would end the process."""
    code = """
import resource, sys
from fastbert import BertConfig, BertModel
from fastbert.inference.export import export
sizes = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, vocab_size=9999)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    export(BertModel(BertConfig(**sizes)), sys.argv[1], sys.argv[2])
except OSError as error:
    print(error)
"""
    path = tmp_path / f"model{ENDINGS[format]}"
    path.write_text("earlier")
    run = subprocess.run([sys.executable, "-c", code, str(path), format], capture_output=True, text=True)
    assert run.returncode == 0 and "File too large" in run.stdout, (run.returncode, run.stdout, run.stderr[-2000:])
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_missing_packages_are_named(earlier, monkeypatch):
    found = importlib.util.find_spec
    without_onnx = lambda name: None if name.startswith("onnx") else found(name)  # noqa: E731
    monkeypatch.setattr(export.importlib.util, "find_spec", without_onnx)
    with pytest.raises(ModuleNotFoundError, match="pip install onnx onnxscript onnxruntime"):
        export.export(BertModel(TINY), earlier.with_suffix(".onnx"))


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForQuestionAnswering"])
def test_jit_trace_is_refused_with_what_to_use(name):
    model, ids = model_of(name), torch.ones(2, 3, dtype=torch.int64)
    for arguments in ((ids,), (ids, torch.ones_like(ids))):
        with pytest.raises(RuntimeError, match="torch.jit.trace would fix the mask.*use torch.export or torch.compile"):
            torch.jit.trace(lambda *inputs: model(*inputs)[-1], arguments)


@pytest.mark.slow  # four exports
@needs_onnx
def test_weights_in_a_file_of_their_own_belong_to_one_export(tmp_path, monkeypatch):
    """Whenever an export of a large model is interrupted, the file computes the earlier one or the new one."""
    monkeypatch.setattr(export, "_LARGE", 1000)
    models, path = [model_of("BertModel").eval() for _ in range(3)], tmp_path / "m.onnx"
    ids = torch.randint(1, 99, (2, 7))
    mask = torch.ones_like(ids)

    def computes(model):
        run = export._read_onnx(path, (("input_ids", "attention_mask"), ("last_hidden_state",)))
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return (run(**inputs)["last_hidden_state"] - model(ids).last_hidden_state).abs().max() < 1e-4

    export.export(models[0], path)
    assert computes(models[0]) and len(list(tmp_path.iterdir())) == 2
    replace, moved = os.replace, []

    def interrupted(source, target):
        if moved.append(target) or len(moved) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(export.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export.export(models[1], path)
    assert computes(models[0])
    monkeypatch.setattr(export, "_LARGE", 1 << 40)
    export.export(models[2], path)
    assert computes(models[2]) and list(tmp_path.iterdir()) == [path]
