"""Checkpoints in Hugging Face's format: config.json and model.safetensors, under Hugging Face's parameter names.

Our models of all families have the parameter names of `transformers`' BERT, except that q, k and v are one `qkv`, and
that the masked-LM decoder is not stored, because it is the word embeddings. So names are translated in two steps: from
the family's to BERT's (`Names`, by the facts in `fastbert/families.py`), then from BERT's to ours.
"""

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastbert import hub, prepared
from fastbert.config import BertConfig
from fastbert.families import BY_MODEL_TYPE, OURS, Family, Head
from fastbert.files import replacing, write_text
from fastbert.ops.checks import FLOATS
from fastbert.warn import warn

_PARTS = ("query", "key", "value")
BODY = ("embeddings.", "encoder.", "pooler.")  # prefixes of all names in a bare BertModel
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DataParallel and torch.compile put before every name
TIED = {  # second names of tensors in Hugging Face's models -> first names
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Those that states may have. transformers up to 5.20 has this one for DeBERTa-v2's decoder, which is the table itself.
_TIED_IN_STATES = TIED | {"cls.predictions.weight": "bert.embeddings.word_embeddings.weight"}


class Names:
    """Translates parameter names between a family and BERT, module by module.

    head: also translate the names of this head. encoder: names are relative to the encoder, not to the model.
    """

    def __init__(self, family: Family, head: Head | None = None, *, encoder: bool = False) -> None:
        bert = BY_MODEL_TYPE["bert"]
        self._prefixes, self._stacks = (bert.prefix, family.prefix), (bert.encoder, family.encoder)
        self._inside = tuple(f"{stack}." if encoder else "" for stack in self._stacks)
        self._layers = (f"{bert.stack}.{{}}.", f"{family.stack}.{{}}." + "albert_layers.0." * family.grouped)
        parts = dict(zip(bert.layer.with_parameters, family.layer.with_parameters, strict=True))
        parts |= dict(zip(OURS.of_positions, family.layer.of_positions, strict=False))
        modules = {"pooler.dense": family.pooler_dense, "embeddings.project": family.projection}
        modules = {ours: theirs for ours, theirs in modules.items() if theirs} | dict(head.names if head else {})
        self._parts = (parts, {theirs: ours for ours, theirs in parts.items()})
        self._modules = (modules, {theirs: ours for ours, theirs in modules.items()})
        self.tied = TIED if head is None or head.decoder else {}

    def theirs(self, name: str) -> str:
        """BERT's name -> the family's."""
        return self._translate(name, 0)

    def ours(self, name: str) -> str:
        """The family's name -> BERT's. BERT's own names and ours are returned unchanged."""
        own, family = (f"{prefix}." for prefix in self._prefixes)
        return self._translate(name.replace(own, family, 1) if name.startswith(own) else name, 1)

    def _translate(self, name: str, source: int) -> str:
        target = 1 - source
        name = self._inside[source] + name
        prefix = f"{self._prefixes[source]}."
        prefixed, name = name.startswith(prefix), name.removeprefix(prefix)
        name = self._renamed(name, source, target)
        name = f"{self._prefixes[target]}.{name}" if prefixed else name
        return name.removeprefix(self._inside[target])

    def _renamed(self, name: str, source: int, target: int) -> str:
        layer = re.escape(self._layers[source]).replace(r"\{\}", r"(\d+)")
        if found := re.fullmatch(rf"{layer}(.+)\.(\w+)", name):
            index, part, kind = found.groups()
            return f"{self._layers[target].format(index)}{self._parts[source].get(part, part)}.{kind}"
        module, _, kind = name.rpartition(".")
        if module in self._modules[source]:
            return f"{self._modules[source][module]}.{kind}"
        root, rest = name.partition(".")[::2]
        return f"{self._stacks[target]}.{rest}" if rest and root == self._stacks[source] else name


BERT = Names(BY_MODEL_TYPE["bert"])


def merge_qkv(state: dict[str, Tensor], prefix: str) -> None:
    """Replaces `<prefix>self.{query,key,value}.*` by `<prefix>qkv.*` in place, where all three exist."""
    for kind in ("weight", "bias", prepared.SCALE):
        names = [f"{prefix}self.{part}.{kind}" for part in _PARTS]
        if not all(name in state for name in names):
            continue
        parts = [state.pop(name) for name in names]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(f"{name}: {tuple(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise RuntimeError(f"expected one shape for queries, keys and values; {shapes}")
        if len(kinds := {part.dtype for part in parts}) > 1 and not kinds.isdisjoint(prepared.QUANTIZED.values()):
            found = ", ".join(f"{name}: {part.dtype}" for name, part in zip(names, parts, strict=True))
            raise RuntimeError(f"expected one dtype for queries, keys and values; {found}")
        state[f"{prefix}qkv.{kind}"] = torch.cat(parts)


def to_ours(state: Mapping[str, Tensor], names: Names = BERT) -> dict[str, Tensor]:
    """Renames a state from Hugging Face's names, including old ones (gamma and beta, position_ids), or ours, to ours.

    If some names have the prefix `bert.` (or the family's), the others belong to a head and are dropped.
    """
    state = _in_bert_names(state, names)
    if any(name.startswith("bert.") for name in state):
        state = {name.removeprefix("bert."): t for name, t in state.items() if name.startswith("bert.")}
    return _modern(state)


def to_ours_with_head(state: Mapping[str, Tensor], names: Names = BERT, *, predicts: bool = True) -> dict[str, Tensor]:
    """`to_ours` for a model with a head: heads are kept, and names of a bare BertModel get the prefix `bert.`.

    predicts: whether the model has a masked-LM head. If so, raises RuntimeError if its decoder differs from the word
    embeddings.
    """
    state = _in_bert_names(state, names)
    if not any(name.startswith("bert.") for name in state):
        state = {f"bert.{name}" if name.startswith(BODY) else name: t for name, t in state.items()}
    state = _modern(state)
    for name, source in _TIED_IN_STATES.items():
        tied = state.pop(name, None)
        if tied is not None and not _same(state.setdefault(source, tied), tied) and predicts:
            one, other = names.theirs(name), names.theirs(source)
            raise RuntimeError(f"{one} differs from {other}; fastbert computes masked-LM heads that tie them")
    return state


def _in_bert_names(state: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """The state under BERT's names, without wrappers' prefixes. Raises RuntimeError for a tensor that comes twice."""
    while prefix := next((p for p in WRAPPERS if state and all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        ours = names.ours(name)
        bare = ours.removeprefix("bert.")
        if ours in result or (bare.startswith(BODY) and {bare, f"bert.{bare}"} & result.keys()):
            raise RuntimeError(f"{name} comes twice, by two names; expected it once")
        result[ours] = tensor
    return result


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or one.is_meta or other.is_meta or torch.equal(one, other.to(one.device))


def _modern(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames gamma and beta, drops position_ids, merges q, k and v."""
    state = {name: tensor for name, tensor in state.items() if not name.endswith("embeddings.position_ids")}
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        state = {name.removesuffix(old) + new if name.endswith(old) else name: t for name, t in state.items()}
    for name in list(state):
        if name.endswith("attention.self.query.weight"):
            merge_qkv(state, name.removesuffix("self.query.weight"))
    return state


def to_hugging_face(state: Mapping[str, Tensor], names: Names = BERT, *, tied: bool = True) -> dict[str, Tensor]:
    """Renames a state from our names to Hugging Face's, bit for bit. Only tied tensors share memory.

    tied: with the second names of tied tensors, which transformers' `state_dict` has and files do not.
    """
    result = {}
    for name, tensor in state.items():
        if "attention.qkv." not in name:
            result[name] = tensor
            continue
        for part, piece in zip(_PARTS, tensor.chunk(3), strict=True):
            result[_of_part(name, part)] = piece.clone()
    if tied and "cls.predictions.bias" in result:
        result |= {name: result[source] for name, source in names.tied.items() if source in result}
    return {names.theirs(name): tensor for name, tensor in result.items()}


def _of_part(name: str, part: str) -> str:
    return name.replace("attention.qkv.", f"attention.self.{part}.")


def check(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], names: Names = BERT) -> None:
    """Raises RuntimeError that lists names that are missing or unexpected, and wrong shapes."""
    if found := misfit(expected, given, names):
        raise RuntimeError(found)


def misfit(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], names: Names = BERT) -> str:
    """What is wrong with the names and shapes of a state; "" if nothing is."""
    missing = set(to_hugging_face_names(expected.keys() - given.keys(), names))
    unexpected = set(to_hugging_face_names(given.keys() - expected.keys(), names))
    problems = _listed("missing", missing - unexpected)  # in both: of queries, keys and values not all are there
    problems += _listed("unexpected", unexpected - missing)
    problems += _listed(
        "wrong shape",
        (
            f"{names.theirs(name)}: {tuple(given[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in given and given[name].shape != tensor.shape
        ),
    )
    return "the checkpoint does not fit the model; " + "; ".join(problems) if problems else ""


def to_hugging_face_names(ours: Iterable[str], names: Names = BERT) -> list[str]:
    """The names, sorted, that a Hugging Face checkpoint has for these names of ours."""
    return sorted({names.theirs(_of_part(name, part)) for name in ours for part in _PARTS})


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [f"{what}: {shown}"] if names else []


class Checkpoint:
    """A directory with a model. Its configuration and its tensors are each read once, on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def config(self) -> BertConfig:
        """Without a prepared model's entry if its floats are no longer those that fastbert has written: transformers
        reads these, and keeps entries that it does not know."""
        metadata = _metadata(self.directory)
        config = BertConfig.read(self.directory, interrupted_save(self.directory, metadata))
        if "quantization_config" not in config.extra and prepared.CONFIG_ENTRY not in metadata.get("config", ""):
            config.extra = prepared.without_entries(config.extra)
        return config

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors under the file's names. Models from `make` share their memory unless a conversion copies them."""
        return read(self.directory)

    @property
    def has_pooler(self) -> bool:
        return any("pooler." in name for name in self.tensors)

    def make(
        self, build: Callable[[BertConfig], nn.Module], dtype: torch.dtype | str | None, **selecting: Any
    ) -> nn.Module:
        """The model with these tensors, in evaluation mode. Names and shapes are checked before weights are allocated.

        build: makes a model from the configuration; the model's method `select`, which gets the arguments `selecting`,
        drops and adds tensors, under our names. dtype: a torch dtype or its name; as stored when None or "auto".
        Raises what `read` raises, ValueError for a dtype that models cannot have, and RuntimeError for names or shapes
        that do not fit.
        """
        dtype, config = dtype_of(dtype), self.config
        try:
            if (layers := config.layer_groups or config.num_hidden_layers) > len(self.tensors):
                raise RuntimeError(f"the configuration has {layers} layers; the file has fewer tensors")
            with torch.device("meta"):
                model = build(config)
            precision, skip = prepared.outline(model, config) or (None, ())
            device = self._home(precision) if precision else None
            state = model.select(model.to_ours(self.tensors), self.directory, **selecting)
            _check_dtypes(state, dtype, precision)
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise RuntimeError(f"{self.directory}: {error}") from None
        model = model.to(device, dtype).eval()
        try:
            return prepared.freeze(model, precision, skip) if precision else model
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from None

    def _home(self, precision: str) -> torch.device:
        try:
            return prepared.home(precision)
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from None


def load(source: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint in a directory, or of a model by its name on the hub (`fastbert.hub`).

    A Checkpoint is returned unchanged, so that its files are not read again.
    """
    return source if isinstance(source, Checkpoint) else Checkpoint(hub.directory_of(source))


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """The torch dtype with this name, or `given` itself; None and "auto" give None, which means as stored. Raises
    ValueError for anything else."""
    if given is None or given == "auto":
        return None
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {given!r}; expected 'auto' or one of {', '.join(map(str, FLOATS))}")
    return dtype


def _check_dtypes(state: Mapping[str, Tensor], dtype: torch.dtype | None, precision: str | None) -> None:
    """Raises ValueError or RuntimeError if the model cannot have these dtypes.

    precision: that of a prepared model, which decides its dtype; quantised weights are checked by their modules.
    """
    if precision:
        only = prepared.PRECISIONS[precision]
        if dtype not in (None, only):
            raise ValueError(f"dtype is {dtype}; the model was prepared as {precision}, expected None or {only}")
        quantized = prepared.QUANTIZED.values()
        state, dtype = {name: tensor for name, tensor in state.items() if tensor.dtype not in quantized}, only
    found = {tensor.dtype: name for name, tensor in state.items()}
    for kind, name in found.items():
        if kind not in FLOATS:
            raise RuntimeError(f"{name} is {kind}; expected one of {', '.join(map(str, FLOATS))}")
    if dtype is None and len(found) > 1:
        raise RuntimeError(f"the tensors are {', '.join(sorted(map(str, found)))}; pass the dtype that all should have")


def read(directory: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names in the file.

    Reads the first of model.safetensors, the files that model.safetensors.index.json names, pytorch_model.bin, and the
    files that pytorch_model.bin.index.json names (of .bin files tensors only, never code). Raises FileNotFoundError if
    none of these exists or one of the shards is missing, ValueError for a corrupt or truncated file.
    """
    directory = Path(directory)
    for name, reader in (("model.safetensors", load_file), ("pytorch_model.bin", _unpickled)):
        if (directory / name).exists():
            return _read(directory / name, reader)
        if (index := directory / f"{name}.index.json").exists():
            return _read_shards(directory, index, reader)
    raise FileNotFoundError(f"{directory} holds no model.safetensors and no pytorch_model.bin, nor an index of either")


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Reads a state dict that torch.save wrote: tensors only, never code. Raises ValueError for anything else."""
    return _read(path, _unpickled)


def _unpickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_shards(directory: Path, index: Path, reader: Callable[[Path], Any]) -> dict[str, Tensor]:
    names = _read(index, lambda path: json.loads(path.read_text(encoding="utf-8"))["weight_map"], kind=str)
    state: dict[str, Tensor] = {}
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard or not (directory / shard).exists():
            raise FileNotFoundError(f"{index} names {shard}, which {directory} does not hold")
        state |= _read(directory / shard, reader)
    if missing := sorted(names.keys() - state.keys()):
        raise ValueError(f"{index} names {missing[0]} and {len(missing)} in all that no file holds")
    return state


def _read(path: Path, reader: Callable[[Path], Any], kind: type = Tensor) -> dict[str, Any]:
    try:
        values = reader(path)
    except PermissionError:
        raise
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error):
            raise ValueError(f"{path} is corrupt or truncated: {error}") from error
        reason = "holds more than tensors, perhaps code, which is never run; expected tensors alone"
        raise ValueError(f"{path} {reason}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} is corrupt or truncated: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(n, str) and isinstance(v, kind) for n, v in values.items()):
        raise ValueError(f"{path} holds no state dict (names and tensors, nothing around them)")
    return values


# ---- writing


def write(directory: str | Path, config: dict, state: Mapping[str, Tensor]) -> None:
    """Replaces model.safetensors and config.json, each as a whole. state: under Hugging Face's names.

    Two files cannot be replaced at once. So the weights, which are written first, also hold the new configuration and
    the hash of the config.json that it replaces: `interrupted_save` finds it if a save was killed between the two.
    Raises RuntimeError for sharded tensors.
    """
    if sharded := [name for name, tensor in state.items() if hasattr(tensor, "full_tensor")]:
        raise RuntimeError(
            f"{sharded[0]} is sharded (FSDP2): gather the state with fastbert.training.distributed.whole in all "
            "processes, and load it in the first into a model that is not sharded"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors, seen = {}, set()
    for name, tensor in state.items():  # safetensors has no aliases: tied tensors are written twice
        tied = tensor.data_ptr() in seen
        tensors[name] = tensor.detach().clone() if tied else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    metadata = {"format": "pt", "config": text, "replaces": _digest(directory / "config.json")}
    with replacing(directory / "model.safetensors") as file:
        save_file(tensors, file.name, metadata=metadata)
    write_text(directory / "config.json", text)


def _metadata(directory: Path) -> dict[str, str]:
    """What `write` has written into the weights' file beside the tensors."""
    try:
        with safe_open(directory / "model.safetensors", "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):  # `read` reports what is wrong
        return {}


def interrupted_save(directory: Path, metadata: Mapping[str, str]) -> str | None:
    """The configuration in the weights' file, if config.json is still the one that the save should have replaced."""
    given, replaced = metadata.get("config"), metadata.get("replaces")
    if given is None or replaced != _digest(directory / "config.json") or replaced == _digest(given):
        return None
    warn(f"{directory}: saving was interrupted after the weights; the configuration is theirs, not that in config.json")
    return given


def _digest(source: Path | str) -> str:
    """The SHA-256 of a file ("" if it does not exist) or of a text."""
    if isinstance(source, Path):
        return hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else ""
    return hashlib.sha256(source.encode()).hexdigest()
