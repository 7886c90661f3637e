"""Importing fastbert imports PyTorch alone. Its rooms are imported when used, other libraries by what needs them."""

import subprocess
import sys

import pytest

import fastbert

OTHERS = """transformers triton tokenizers matplotlib sklearn onnx onnxscript onnxruntime rich seqeval pyarrow usearch
    fastapi uvicorn orjson tensorboard torch._dynamo""".split()

# In one process, because each takes seconds to import PyTorch.
CODE = f"""
import sys

def light(statement):
    exec(statement, globals())
    imported = [name for name in {OTHERS} if name in sys.modules]
    assert not imported, (statement, imported)

light("import fastbert")
assert "fastbert.training" not in sys.modules and "data" in dir(fastbert)
light("fastbert.metrics, fastbert.data.get_tokenizer")
light("import fastbert.inference.export, fastbert.cli.check")
fastbert.training.AMPTrainer
"""


def test_other_libraries_and_rooms_are_imported_when_they_are_needed():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_there_is_no_room_of_another_name():
    with pytest.raises(AttributeError, match="module 'fastbert' has no attribute 'nonsense'"):
        _ = fastbert.nonsense
