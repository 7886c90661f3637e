"""All contenders: fastbert, and what it is measured against. A new one needs a function and a line here.

Tables have the same order; docs/benchmarks.md says how to add a contender.
"""

import functools

import torch
from torch.nn.attention import SDPBackend

from benchmarks.contenders import engines, hugging_face, ours, pytorch
from benchmarks.contenders.interface import CLASSIFIER, ENCODER, HALF, MASKED_LM, MODEL, MODULES, OPS, Contender
from fastbert import backends

_HF = {"needs": ("transformers",)}
_FLASH = {"needs": ("flash_attn",), "install": "pip install flash-attn --no-build-isolation"}
_GPU = {"devices": ("cuda",)}
_GPU_HALF = {"devices": ("cuda",), "dtypes": HALF}
_GPU_BF16 = {"devices": ("cuda",), "dtypes": (torch.bfloat16,)}
_CPU = {"devices": ("cpu",), "dtypes": (torch.float32,)}
_ONNX = {"needs": ("onnxruntime", "onnx", "onnxscript"), "install": "pip install 'onnxruntime>=1.31' onnx onnxscript"}
_LIGER = {"needs": ("liger_kernel",), "install": "pip install liger-kernel"}

HF_SDPA = Contender("transformers sdpa", MODULES, hugging_face.sdpa, **_HF, yardstick=True)
PYTORCH = Contender("PyTorch", OPS, pytorch.plain, yardstick=True)
_WHOLE_MODELS = (MODEL, CLASSIFIER, MASKED_LM)
ACCELERATED = Contender("fastbert.accelerate", _WHOLE_MODELS, ours.accelerated, **_HF)
_PREPARED = (torch.float32, torch.bfloat16)
_INT8 = functools.partial(ours.prepared, precision="int8")
_FP8 = functools.partial(ours.prepared, precision="fp8")
_CTRANSLATE2_INT8 = functools.partial(engines.ctranslate2, compute_type="int8")
_SKIPPING = functools.partial(ours.accelerated, skip_logits=True)
_CUDNN = functools.partial(pytorch.sdpa_by, SDPBackend.CUDNN_ATTENTION)
_SDPA_FLASH = functools.partial(pytorch.sdpa_by, SDPBackend.FLASH_ATTENTION)

ALL: tuple[Contender, ...] = (
    # the baselines, PyTorch's own
    HF_SDPA,
    PYTORCH,
    Contender("PyTorch, labelled rows", ("cross_entropy",), pytorch.labelled_rows, yardstick=True),
    Contender("PyTorch, oneDNN", ("linear", "dense_gelu", "qkv_attention"), pytorch.onednn, **_CPU, yardstick=True),
    # fastbert
    Contender("fastbert", (*MODULES, *OPS), ours.plain),
    Contender("fastbert, packed input", (MODEL, ENCODER, MASKED_LM), ours.packed),
    ACCELERATED,
    Contender("fastbert.accelerate, skip_logits", (MASKED_LM,), _SKIPPING, **_HF),
    Contender("fastbert.prepare", (MODEL,), ours.prepared, devices=("cpu",), dtypes=_PREPARED, inference=True),
    Contender("fastbert.prepare, int8", (MODEL,), _INT8, **_CPU, inference=True, quantized=True),
    Contender("fastbert.prepare, fp8", (MODEL,), _FP8, **_GPU_BF16, inference=True, quantized=True),
    Contender("fastbert.graph", (MODEL,), ours.graphed, **_GPU, inference=True),
    *(Contender(f"fastbert, {name}", OPS, functools.partial(ours.forced, name)) for name in backends.BACKENDS),
    # others
    Contender("transformers eager", MODULES, hugging_face.eager, **_HF, yardstick=True),
    Contender("transformers flash_attention_2", _WHOLE_MODELS, hugging_face.flash, **_FLASH, **_GPU_HALF),
    Contender("transformers, torch.compile", MODULES, hugging_face.compiled, **_HF, slow_to_make=True),
    Contender("PyTorch, torch.compile", OPS, pytorch.compiled, slow_to_make=True),
    Contender("PyTorch SDPA, cuDNN", ("attention",), _CUDNN, **_GPU_HALF),
    Contender("PyTorch SDPA, FlashAttention", ("attention",), _SDPA_FLASH, **_GPU_HALF),
    Contender("PyTorch SDPA, jagged", ("attention",), pytorch.jagged),
    Contender("PyTorch varlen_attn", ("attention",), pytorch.varlen, **_GPU_HALF),
    Contender("flash-attention", ("attention",), pytorch.flash_attention, **_FLASH, **_GPU_HALF),
    Contender("Liger", ("layer_norm", "cross_entropy"), pytorch.liger, **_LIGER, **_GPU),
    Contender("torch.nn.TransformerEncoder", (MODEL, ENCODER), engines.torch_encoder, inference=True),
    Contender("ONNX Runtime", (MODEL,), engines.onnxruntime, **_ONNX, **_CPU, inference=True),
    Contender(
        "OpenVINO", (MODEL,), engines.openvino, ("openvino",), devices=("cpu",), dtypes=_PREPARED, inference=True
    ),
    Contender("CTranslate2", (MODEL,), engines.ctranslate2, needs=("ctranslate2",), **_CPU, inference=True),
    Contender(
        "CTranslate2, int8", (MODEL,), _CTRANSLATE2_INT8, ("ctranslate2",), **_CPU, inference=True, quantized=True
    ),
)
NAMES = tuple(contender.name for contender in ALL)


def baseline(part: str) -> Contender:
    """The contender that ratios refer to, and whose computation in float64 is the truth."""
    return PYTORCH if part in OPS else HF_SDPA


def of(part: str, names: list[str] | None = None, slow: bool = False) -> list[Contender]:
    """The contenders of one part, the baseline first. names: only these, beside PyTorch's own, by which all are judged;
    None for all except those that are slow to make. slow: includes the slow ones."""
    found = [c for c in ALL if part in c.parts]
    wanted = [c.name for c in found if not c.slow_to_make] if names is None else names
    return [c for c in found if c.yardstick or c.name in wanted or (slow and c.slow_to_make)]
