"""ONNX Runtime on the CPU, after its own optimizer for transformers. It computes the padding.

The optimizer knows the graph of PyTorch's older exporter, of eager attention with a mask, and makes of it one node for
the embeddings, and per layer Attention, BiasGelu and two SkipLayerNormalizations. A graph that it does not recognise is
refused here: that would not be ONNX Runtime at its best. What 1.30 makes is; what 1.31 makes is not.
"""

import functools
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.contenders import padded
from benchmarks.contenders.hf_eager import with_attention
from benchmarks.contenders.interface import MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch

NAMES = ("input_ids", "attention_mask")


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    session = optimized(subject.theirs)
    prepare = padded.prepare(batch, batch.mask.long())

    def arrays(**packed: Tensor) -> dict[str, object]:
        return {"feed": {name: x.int().numpy() for name, x in prepare(**packed).items()}}

    return Way(lambda feed: torch.from_numpy(session.run(None, feed)[0]), arrays, padded.collect(subject, batch))


@functools.lru_cache(2)
def optimized(model: nn.Module):
    """A session for one request at a time, on as many threads as PyTorch has; for batches of any shape."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = fused(model, Path(folder))
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def fused(model: nn.Module, folder: Path) -> Path:
    """Exports and optimizes. Raises RuntimeError if the optimizer left something as it was."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    config, plain = model.config, str(folder / "plain.onnx")
    export(model, plain)
    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)
    graph = optimizer.optimize_model(
        plain, "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=0
    )
    layers, counts = config.num_hidden_layers, graph.get_fused_operator_statistics()
    expected = {"EmbedLayerNormalization": 1, "Attention": layers, "BiasGelu": layers}
    expected |= {"SkipLayerNormalization": 2 * layers}
    if missing := {name: counts.get(name, 0) for name, count in expected.items() if counts.get(name, 0) != count}:
        raise RuntimeError(f"ONNX Runtime {onnxruntime.__version__}'s optimizer made {missing}; expected {expected}")
    graph.change_graph_inputs_to_int32()
    graph.save_model_to_file(str(folder / "fused.onnx"))
    return folder / "fused.onnx"


def export(model: nn.Module, path: str) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = with_attention(model, "eager").eval()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones(2, 8, dtype=torch.int64)
    mask = ids.tril(4)  # with padding, which tracing has to see
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Body(),
            (ids, mask),
            path,
            dynamo=False,
            input_names=NAMES,
            output_names=("last_hidden_state",),
            dynamic_axes={name: {0: "batch", 1: "seqlen"} for name in NAMES},
        )


CONTENDER = Contender(
    "ONNX Runtime",
    (MODEL,),
    make,
    needs=("onnxruntime", "onnx", "onnxscript"),
    install="pip install 'onnxruntime>=1.31' onnx onnxscript",
    devices=("cpu",),
    dtypes=(torch.float32,),
    inference=True,
)
