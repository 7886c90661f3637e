"""Everybody that fastbert is measured against, one file each, and fastbert itself.

A new one is a file with a CONTENDER (see interface.py; docs/benchmarks.md says how) and a line in ALL, which is in the
order of tables.
"""

from benchmarks.contenders import (
    ctranslate2,
    flash_attention,
    hf_compile,
    hf_eager,
    hf_flash,
    hf_sdpa,
    liger,
    onnxruntime,
    openvino,
    ours,
    ours_accelerated,
    ours_forced,
    ours_graph,
    ours_packed,
    pytorch,
    pytorch_compile,
    pytorch_labelled,
    pytorch_onednn,
    sdpa_jagged,
    torch_encoder,
    varlen_attn,
)
from benchmarks.contenders.interface import OPS, Contender

ALL: tuple[Contender, ...] = (
    # the baselines, PyTorch's own
    hf_sdpa.CONTENDER,
    pytorch.CONTENDER,
    pytorch_labelled.CONTENDER,
    pytorch_onednn.CONTENDER,
    # fastbert
    ours.CONTENDER,
    ours_packed.CONTENDER,
    *ours_accelerated.CONTENDERS,
    ours_graph.CONTENDER,
    *ours_forced.CONTENDERS,
    # others
    hf_eager.CONTENDER,
    hf_flash.CONTENDER,
    hf_compile.CONTENDER,
    pytorch_compile.CONTENDER,
    sdpa_jagged.CONTENDER,
    varlen_attn.CONTENDER,
    flash_attention.CONTENDER,
    liger.CONTENDER,
    torch_encoder.CONTENDER,
    onnxruntime.CONTENDER,
    openvino.CONTENDER,
    ctranslate2.CONTENDER,
)
NAMES = tuple(contender.name for contender in ALL)


def baseline(part: str) -> Contender:
    """The one that ratios are to, and whose computation in float64 is the truth."""
    return pytorch.CONTENDER if part in OPS else hf_sdpa.CONTENDER


def of(part: str, names: list[str] | None = None, slow: bool = False) -> list[Contender]:
    """Those of one part, the baseline first. names: only these, beside PyTorch's own, by which all are judged; None
    for all but those slow to make. slow: those as well."""
    found = [c for c in ALL if part in c.parts]
    wanted = [c.name for c in found if not c.slow_to_make] if names is None else names
    return [c for c in found if c.yardstick or c.name in wanted or (slow and c.slow_to_make)]
