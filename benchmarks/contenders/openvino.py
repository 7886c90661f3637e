"""OpenVINO on the CPU. It computes the padding."""

import copy
import functools
import warnings

import torch
from torch import Tensor, nn

from benchmarks.contenders import padded
from benchmarks.contenders.interface import MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch

_PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16"}


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    subject.theirs.eval()
    engine = compiled(subject.theirs, dtype, has_mask=not batch.is_full)

    def run(**arguments: Tensor) -> Tensor:
        # Shared memory on both sides: no copy is timed. The result lives until the next call.
        arrays = {name: x.numpy() for name, x in arguments.items()}
        return torch.from_numpy(engine(arrays, share_inputs=True, share_outputs=True)[0])

    mask = None if batch.is_full else batch.mask.long()
    return Way(run, padded.prepare(batch, mask), padded.collect(subject, batch))


@functools.lru_cache(2)
def compiled(model: nn.Module, dtype: torch.dtype, has_mask: bool):
    """For one request at a time, on as many threads as PyTorch has; for batches of any shape."""
    import openvino

    example = {"input_ids": torch.ones(2, 8, dtype=torch.int64)}
    example |= {"attention_mask": torch.ones(2, 8, dtype=torch.int64).tril(4)} if has_mask else {}
    options = {
        "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of what transformers decides by the mask, which the example has
        converted = openvino.convert_model(copy.deepcopy(model).float(), example_input=example)
    return openvino.compile_model(converted, "CPU", options)


CONTENDER = Contender(
    "OpenVINO",
    (MODEL,),
    make,
    needs=("openvino",),
    install="pip install openvino",
    devices=("cpu",),
    dtypes=tuple(_PRECISION),
    inference=True,
)
