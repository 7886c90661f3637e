"""Export to ONNX and torch.export: graphs of standard operators, compared with the model before they are kept.

The `reference` backend is plain PyTorch, so a model traced under it contains none of fastbert's operators, whatever its
head and family. Sizes in a graph cannot depend on a mask, so all rows of a padded batch are computed, visible ones
first (`fastbert.padding.plan`); docs/export.md says what this costs.
"""

import contextlib
import copy
import glob
import importlib.util
import io
import logging
import os
import re
import secrets
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbert import backends, testing
from fastbert.config import BertConfig
from fastbert.files import part_folder, replacing
from fastbert.model import Saveable, class_name
from fastbert.modes import evaluating
from fastbert.prepared import holds_prepared
from fastbert.testing import Result, Row

FACTOR = 4.0  # an exported model's error against float64 may be this many times the model's own
OPSET = 20  # the first version with Gelu
_LARGE = 3 << 29  # bytes; protobuf's files end at 2 GiB
_WEIGHTS = re.compile(r"(\.[0-9a-f]{8})?\.data")  # after the model's name
_ONNX_DTYPES = (torch.float32, torch.float16)
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Run = Callable[..., dict[str, Tensor]]
Batch = dict[str, Tensor]
Names = tuple[tuple[str, ...], tuple[str, ...]]  # of the inputs, of the outputs


@dataclass(frozen=True)
class Exported:
    """A written file, the names of its inputs and outputs, and the errors of its outputs against float64."""

    path: Path
    format: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: tuple[Row, ...]


def export(model: Saveable, path: str | Path, format: str = "onnx") -> Exported:
    """Writes the model's forward in evaluation mode, without labels, to a file that runs without fastbert.

    model: BertModel or one with a head, of any family, on a CPU, in a dtype that the format supports. path: is replaced
    only after all checks have passed; an ONNX model above 1.5 GB keeps its weights beside it, in a file with a new name
    for each export, PATH.<8 hex digits>.data, so that an interrupted export leaves the earlier one as it was. format:
    "onnx", or "torch-export" for `torch.export.load(path).module()`. The file's inputs are int64 tensors by name:
    input_ids, attention_mask and, in families with several token types, token_type_ids, each (batch, length), or
    (batch, choices, length) for multiple choice; batch is at least 1, length at most the model's, which must be 2 or
    more. Its outputs are those of the model: last_hidden_state, pooler_output, logits, ...; sentence_embedding of
    BertForSparseEmbedding.

    The file is read again, and computes the traced batch and four of other shapes, padded left, right and in between.
    The error of every output against float64 may be FACTOR times the model's plus one rounding of the largest value,
    and padding must be equal. Raises RuntimeError otherwise, and for a graph with operators other than PyTorch's or
    ONNX's; ValueError and TypeError for invalid arguments; ModuleNotFoundError that says what to install.
    """
    path = Path(path)
    _check(model, path, format)
    with _on_cpu(), evaluating(model), _quiet(), part_folder(path) as folder:
        batches = _batches(model)
        program = _trace(model, batches[0])
        names = tuple(batches[0]), tuple(_Inference(model)(**batches[0]))
        file = folder / path.name
        _FORMATS[format].write(program, names, file)
        rows = _verify(model, _FORMATS[format].read(file, names), batches, _of_tokens(program, names[1]))
        weights = [made.name for made in folder.iterdir() if made != file]
        for name in (*weights, file.name):  # the model last, which names the weights
            os.replace(folder / name, path.with_name(name))
    for old in path.parent.glob(f"{glob.escape(path.name)}.*data"):  # of earlier exports
        if old.name not in weights and _WEIGHTS.fullmatch(old.name.removeprefix(path.name)):
            old.unlink()
    return Exported(path, format, *names, tuple(rows))


def _check(model: Saveable, path: Path, format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"export: format is {format!r}; expected one of {', '.join(map(repr, FORMATS))}")
    if not isinstance(model, Saveable):
        raise TypeError(f"export: model is a {class_name(model)}; expected a fastbert.BertModel, or one with a head")
    if holds_prepared(model):
        raise ValueError(
            "export: fastbert.prepare has packed the model's weights for this processor; export the original, and "
            "quantise the file with its runtime's tools"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise ValueError(f"export: the model is on {', '.join(sorted(devices))}; expected it on the CPU")
    if path.suffix != _FORMATS[format].suffix or not path.parent.is_dir() or path.is_dir():
        expected = f"a name that ends in {_FORMATS[format].suffix}, in an existing folder"
        raise ValueError(f"export: path is {path}; expected {expected}")
    if (longest := model.config.max_sequence_length) < 2:  # torch.export would fix the length
        given = f"max_position_embeddings {model.config.max_position_embeddings}, which is {longest} token a sequence"
        raise ValueError(f"export: the model has {given}; expected 2 or more, as the length is free in the file")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None] if format == "onnx" else []
    if missing:
        raise ModuleNotFoundError(f"export to ONNX needs {', '.join(missing)}: pip install {' '.join(missing)}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if format == "onnx" and not dtypes <= set(_ONNX_DTYPES):
        given, expected = (", ".join(map(str, some)) for some in (dtypes, _ONNX_DTYPES))
        raise TypeError(f"export: the model is {given}; expected one of {expected}, which onnxruntime computes")


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Without the caller's default device, and without autocast: that would become part of the file, where inputs have
    other dtypes than when it was traced."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's messages about torchvision and its internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- the graph


class _Inference(nn.Module):
    """A model as a function from named tensors to named tensors."""

    def __init__(self, model: Saveable) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Batch:
        if attention_mask.shape != input_ids.shape:  # tells the trace that their sizes are equal
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected that of input_ids")
        output = self.model(input_ids, attention_mask, token_type_ids)
        if isinstance(output, Tensor):  # BertForSparseEmbedding's
            return {"sentence_embedding": output}
        return {name: value for name, value in output._asdict().items() if value is not None}


def _trace(model: Saveable, batch: Batch) -> torch.export.ExportedProgram:
    largest = {"length": model.config.max_sequence_length}
    sizes = [torch.export.Dim(name, max=largest.get(name)) for name in _axes(batch["input_ids"].dim())]
    shapes = dict.fromkeys(batch, dict(enumerate(sizes)))
    with backends.backend("reference"):
        program = torch.export.export(_Inference(model), (), batch, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains local paths
    _refuse_custom_operators(program)
    return program


def _refuse_custom_operators(program: torch.export.ExportedProgram) -> None:
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    other = sorted(str(t) for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace != "aten")
    if other:
        raise RuntimeError(f"export: the graph has the operators {', '.join(other)}; expected PyTorch's own alone")


def _axes(dims: int) -> list[str]:
    return ["batch", "length"] if dims == 2 else ["batch", "choices", "length"]


def _of_tokens(program: torch.export.ExportedProgram, outputs: tuple[str, ...]) -> set[str]:
    """The outputs with an entry for each token: their symbolic sizes begin with the input's."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    signature = program.graph_signature
    expected = list(map(str, values[signature.user_inputs[0]].shape))
    sizes = [list(map(str, values[name].shape)) for name in signature.user_outputs]
    return {name for name, found in zip(outputs, sizes, strict=True) if found[: len(expected)] == expected}


# ---- torch.export


def _write_program(program: torch.export.ExportedProgram, names: Names, file: Path) -> None:
    whole = io.BytesIO()  # where torch writes a file itself, a full disk ends the process (SIGABRT in a destructor)
    torch.export.save(program, whole)
    with replacing(file) as out:
        out.write(whole.getbuffer())


def _read_program(file: Path, names: Names) -> Run:
    return torch.export.load(file).module()


# ---- ONNX


def _translations() -> dict[Callable, Callable]:
    """ONNX for operators of the reference backend that torch.onnx lacks or translates badly."""
    from onnxscript import opset20 as op

    aten, int64 = torch.ops.aten, 7

    def argsort(x, stable):
        """(N,) small integers. ONNX has no stable sort, so this is TopK of distinct numbers in the same order."""
        rows = op.Shape(x)
        number = op.Range(0, op.Squeeze(rows), 1)
        return op.TopK(op.Add(op.Mul(op.Cast(x, to=int64), rows), number), rows, largest=0)[1]

    def searchsorted(ends, values, right=False):
        """ONNX has no binary search, so this counts, for each of (N,) values, the (B,) ends before it."""
        ends, values = op.Cast(ends, to=int64), op.Unsqueeze(op.Cast(values, to=int64), [-1])
        before = op.LessOrEqual(ends, values) if right else op.Less(ends, values)
        return op.ReduceSum(op.Cast(before, to=int64), [-1], keepdims=0)

    def index(x, indices):
        """One Gather. torch.onnx uses GatherND for several indices, and is wrong if their dtypes differ."""
        row, count = op.Cast(indices[0], to=int64), len(indices)
        for axis in range(1, count):
            row = op.Add(op.Mul(row, op.Shape(x, start=axis, end=axis + 1)), op.Cast(indices[axis], to=int64))
        if count > 1:
            x = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), op.Shape(x, start=count), axis=0))
        return op.Gather(x, row)

    return {aten.argsort.stable: argsort, aten.searchsorted.Tensor: searchsorted, aten.index.Tensor: index}


def _write_onnx(program: torch.export.ExportedProgram, names: Names, file: Path) -> None:
    inputs, outputs = names
    onnx = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=inputs,
        output_names=outputs,
        custom_translation_table=_translations(),
        verbose=False,
    )
    sizes = onnx.model.graph.inputs[0].shape
    onnx.rename_axes(dict(zip(sizes, _axes(len(sizes)), strict=True)))
    others = {node.domain for node in onnx.model.graph if node.domain} | {str(name) for name in onnx.model.functions}
    if others:
        raise RuntimeError(f"export: the graph has operators of {', '.join(sorted(others))}; expected ONNX's own alone")
    size = sum(each.const_value.nbytes for each in onnx.model.graph.initializers.values())
    if size < _LARGE:
        onnx.save(file, external_data=False)
    else:
        import onnx_ir

        onnx_ir.save(onnx.model, file, external_data=f"{file.name}.{secrets.token_hex(4)}.data")


def _read_onnx(file: Path, names: Names) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no narrower base
        raise RuntimeError(f"export: onnxruntime cannot load the model: {error}") from error

    def run(**batch: Tensor) -> Batch:
        found = session.run(names[1], {name: tensor.numpy() for name, tensor in batch.items()})
        return {name: torch.from_numpy(array) for name, array in zip(names[1], found, strict=True)}

    return run


class _Format(NamedTuple):
    suffix: str
    write: Callable[[torch.export.ExportedProgram, Names, Path], None]
    read: Callable[[Path, Names], Run]


_FORMATS = {
    "onnx": _Format(".onnx", _write_onnx, _read_onnx),
    "torch-export": _Format(".pt2", _write_program, _read_program),
}
FORMATS = tuple(_FORMATS)


# ---- the check


def _batches(model: Saveable) -> list[Batch]:
    """Padded batches of several shapes, the same in every call; the first is traced."""
    generator, longest = torch.Generator().manual_seed(0), model.config.max_sequence_length
    ragged = [(7, 1, 11), (1,), (5,), (2, 13, 0, 9, 1, 6), (longest, 3)]  # visible tokens in each row
    batches = []
    for turn, lengths in enumerate(ragged):
        lengths = torch.tensor(lengths).clamp(max=longest)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        if turn == 3:  # padding on the left and, unless distances count columns, between tokens
            mask[:3] = mask[:3].flip(1)
            if model.config.family.relative is None:
                mask[5] = mask[5][torch.randperm(mask.shape[1], generator=generator)]
        if model.kind == "ForMultipleChoice":
            mask = torch.stack([mask.roll(choice, 0) for choice in range((2, 1, 3, 2, 3)[turn])], 1)
        batches.append(_batch(model.config, mask.long(), generator))
    return batches


def _batch(config: BertConfig, mask: Tensor, generator: torch.Generator) -> Batch:
    tables = {"input_ids": config.vocab_size, "token_type_ids": config.type_vocab_size}
    if not config.family.token_types or config.type_vocab_size <= 1:
        del tables["token_type_ids"]
    ids = {name: torch.randint(size, mask.shape, generator=generator) for name, size in tables.items()}
    return {"input_ids": ids.pop("input_ids"), "attention_mask": mask, **ids}


def _verify(model: Saveable, run: Run, batches: list[Batch], of_tokens: set[str]) -> list[Row]:
    """The rows of the check. Raises RuntimeError with the table if one fails."""
    found, ours = (_collect(call, batches, of_tokens) for call in (run, _Inference(model)))
    for name, expected in ours.padding.items():
        if not torch.equal(found.padding[name], expected):
            raise RuntimeError(f"export: {name} is not equal at padding")
    truth = _collect(_Inference(copy.deepcopy(model).double()), batches, of_tokens)
    with backends.backend("reference"):
        plain = _collect(_Inference(model), batches, of_tokens)
    rows = testing.compare(found.result, truth.result, [ours.result, plain.result], factor=FACTOR)
    if not all(row.ok for row in rows):
        table = "\n".join(map(str, rows))
        raise RuntimeError(f"export: the exported model does not compute what the model does:\n{table}")
    return rows


class _Collected(NamedTuple):
    """All batches together, by output: values of visible tokens or whole sequences, and values at padding."""

    result: Result
    padding: dict[str, Tensor]


def _collect(run: Run, batches: list[Batch], of_tokens: set[str]) -> _Collected:
    values, padding = defaultdict(list), defaultdict(list)
    for batch in batches:
        visible = batch["attention_mask"] != 0
        for name, output in run(**batch).items():
            values[name].append((output[visible] if name in of_tokens else output).flatten())
            if name in of_tokens:
                padding[name].append(output[~visible].flatten())
    visible_values, padding_values = (
        {name: torch.cat(parts) for name, parts in found.items()} for found in (values, padding)
    )
    return _Collected(Result(visible_values, {}), padding_values)
