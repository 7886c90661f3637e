"""Engines for inference, with transformers' weights: PyTorch's own fast path, ONNX Runtime, OpenVINO, CTranslate2.

They run one request at a time, on as many threads as PyTorch has, and are built for batches of any shape. ONNX Runtime
and OpenVINO also compute padding.
"""

import copy
import functools
import json
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.contenders.hugging_face import with_attention
from benchmarks.contenders.interface import MODEL, Runnable, Subject
from fastbert import BertConfig

NO_POSITIONS = "it has no scores that depend on distances"

# ---- torch.nn.TransformerEncoder: PyTorch's fused inference, on nested tensors where there is padding


def torch_encoder(subject: Subject) -> Runnable | str:
    """BERT as its post-norm form, with erf GELU and one eps. Embeddings, if the part has them, are transformers'."""
    if subject.config.family.relative:
        return NO_POSITIONS
    if subject.config.hidden_act != "gelu" or subject.config.num_attention_heads % 2:
        return "its fast path needs erf GELU and an even number of heads"
    subject.theirs.eval()
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)  # says that it is a prototype
    is_model = subject.part == MODEL
    encoder = encoder_like(subject.theirs.encoder if is_model else subject.theirs, subject)
    embed = subject.theirs.embeddings if is_model else lambda hidden_states: hidden_states

    def run(src_key_padding_mask: Tensor | None = None, **arguments: Tensor) -> Tensor:
        return encoder(embed(**arguments), src_key_padding_mask=src_key_padding_mask)

    mask = None if subject.batch.is_full else ~subject.batch.mask
    return Runnable(run, subject.padded(mask, "src_key_padding_mask"), subject.packed)


def encoder_like(theirs: nn.Module, subject: Subject) -> nn.TransformerEncoder:
    """transformers' BertEncoder as a TransformerEncoder with the same weights."""
    config: BertConfig = subject.config
    layer = nn.TransformerEncoderLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        dtype=subject.dtype,
        device=subject.batch.device,
    )
    # mask_check would synchronise with the GPU to see whether padding is on the right, which it is.
    encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=True, mask_check=False)
    for copied, source in zip(encoder.layers, theirs.layer, strict=True):
        copied.load_state_dict(_weights(source))
    return encoder.eval().requires_grad_(False)


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of a BertLayer, under TransformerEncoderLayer's names."""
    attention, heads = layer.attention.output, layer.attention.self
    projections = (heads.query, heads.key, heads.value)
    found = {
        "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
        "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
    }
    modules = {"self_attn.out_proj": attention.dense, "norm1": attention.LayerNorm, "linear1": layer.intermediate.dense}
    modules |= {"linear2": layer.output.dense, "norm2": layer.output.LayerNorm}
    for name, module in modules.items():
        found |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return found


# ---- ONNX Runtime, after its own optimizer for transformers

NAMES = ("input_ids", "attention_mask")


def onnxruntime(subject: Subject) -> Runnable | str:
    """ONNX Runtime; always with a mask, because the graph has one."""
    if subject.config.family.relative:
        return "its optimizer knows BERT's attention"
    session, prepare = onnx_session(subject.theirs), subject.padded(subject.batch.mask.long())

    def arrays(**packed: Tensor) -> dict[str, object]:
        return {"feed": {name: x.int().numpy() for name, x in prepare(**packed).items()}}

    return Runnable(lambda feed: torch.from_numpy(session.run(None, feed)[0]), arrays, subject.packed)


@functools.lru_cache(2)
def onnx_session(model: nn.Module):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = onnx_fused(model, Path(folder))
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_fused(model: nn.Module, folder: Path) -> Path:
    """Exports and optimizes a model. Raises RuntimeError if the optimizer did not fuse everything: that would not be
    ONNX Runtime at its best.

    The optimizer recognises the graph of PyTorch's older exporter, for eager attention with a mask, and fuses it into
    one node for the embeddings, and per layer Attention, BiasGelu and two SkipLayerNormalizations; releases before 1.31
    do not.
    """
    import onnxruntime
    from onnxruntime.transformers import optimizer

    config, plain = model.config, str(folder / "plain.onnx")
    onnx_export(model, plain)
    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)
    sizes = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
    graph = optimizer.optimize_model(plain, "bert", **sizes, opt_level=0)
    layers, counts = config.num_hidden_layers, graph.get_fused_operator_statistics()
    expected = {"EmbedLayerNormalization": 1, "Attention": layers, "BiasGelu": layers}
    expected |= {"SkipLayerNormalization": 2 * layers}
    if missing := {name: counts.get(name, 0) for name, count in expected.items() if counts.get(name, 0) != count}:
        raise RuntimeError(f"ONNX Runtime {onnxruntime.__version__}'s optimizer made {missing}; expected {expected}")
    graph.change_graph_inputs_to_int32()
    graph.save_model_to_file(str(folder / "fused.onnx"))
    return folder / "fused.onnx"


def onnx_export(model: nn.Module, path: str) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = with_attention(model, "eager").eval()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    names = {"input_names": NAMES, "output_names": ("last_hidden_state",)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {name: {0: "batch", 1: "seqlen"} for name in NAMES}
        torch.onnx.export(Body(), tuple(_example().values()), path, dynamo=False, dynamic_axes=axes, **names)


def _example() -> dict[str, Tensor]:
    """Example inputs with padding, which tracing has to see."""
    ids = torch.ones(2, 8, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids.tril(4)}


# ---- OpenVINO

_PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16"}


def openvino(subject: Subject) -> Runnable:
    subject.theirs.eval()
    engine, mask = openvino_model(subject.theirs, subject.dtype, not subject.batch.is_full), subject.mask()

    def run(**arguments: Tensor) -> Tensor:
        # Inputs and outputs share memory, so no copy is timed. The result is valid until the next call.
        arrays = {name: x.numpy() for name, x in arguments.items()}
        return torch.from_numpy(engine(arrays, share_inputs=True, share_outputs=True)[0])

    return Runnable(run, subject.padded(mask), subject.packed)


@functools.lru_cache(2)
def openvino_model(model: nn.Module, dtype: torch.dtype, has_mask: bool):
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    example = {name: x for name, x in _example().items() if has_mask or name == "input_ids"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of branches on the mask; the example has one
        converted = openvino.convert_model(copy.deepcopy(model).float(), example_input=example)
    return openvino.compile_model(converted, "CPU", options)


# ---- CTranslate2: the one engine that skips padding as well


def ctranslate2(subject: Subject, compute_type: str = "float32") -> Runnable | str:
    if subject.config.family.relative:
        return NO_POSITIONS
    engine, lengths = ctranslate2_model(subject.theirs, compute_type), subject.batch.lengths

    def prepare(input_ids: Tensor) -> dict[str, object]:
        return {"inputs": [row.tolist() for row in input_ids.split(lengths)]}

    def run(inputs: list[list[int]]) -> Tensor:
        import numpy

        return torch.from_numpy(numpy.asarray(engine.forward_batch(inputs).last_hidden_state))

    def collect(hidden: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(hidden, lengths, strict=True)])

    return Runnable(run, prepare, collect)


@functools.lru_cache(2)
def ctranslate2_model(model: nn.Module, compute_type: str = "float32"):
    import ctranslate2
    import transformers

    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # the converter wants a pooler, which is not there
    log.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        _save(model, Path(folder))
        target = str(Path(folder) / "converted")
        ctranslate2.converters.TransformersConverter(folder).convert(target)
        log.set_verbosity(verbosity)
        log.enable_progress_bar() if bars else None
        threads = torch.get_num_threads()
        return ctranslate2.Encoder(target, compute_type=compute_type, inter_threads=1, intra_threads=threads)


def _save(model: nn.Module, folder: Path) -> None:
    """Saves a checkpoint that CTranslate2's converter can read: with a vocabulary, and with a removed config entry."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(config["vocab_size"] - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    config |= {"position_embedding_type": "absolute", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))
