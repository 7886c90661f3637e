"""Directories of sentence-transformers: reads and writes the modules that follow the model, and the prompts."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor, nn

from fastbert import checkpoint
from fastbert.data.tokenizer import get_tokenizer
from fastbert.files import replacing, write_text
from fastbert.heads import SPARSE_ACTIVATIONS
from fastbert.pooling import check_mode
from fastbert.warn import warn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Mish", "ReLU6", "Softplus")
PACKAGES = ("sentence_transformers.", "pylate.")  # whose classes modules.json may name
SETTINGS = "sentence_bert_config.json"  # sentence-transformers', of the model and its tokenizer, in the model's folder
_OLD_SETTINGS = [
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# Settings that readers look at, or refuse by themselves, and one that changes nothing but the speed.
_FOLLOWED = (
    "max_seq_length do_lower_case query_length document_length query_expansion transformer_task unpad_inputs".split()
)
_OUTPUTS = "last_hidden_state", "logits"
_OTHER_TASKS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"
_LEGACY = {  # names before sentence-transformers 5.4, in the order in which vectors are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def new_activation(owner: str, name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"{owner}: activation is {name!r}; expected {', '.join(ACTIVATIONS)}")
    return getattr(nn, name)()


class Dense(nn.Module):
    """A dense layer applied after the pooling, or to each token: activation(linear(x)), (B, in_features) -> (B,
    out_features)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "Tanh",
        residual: bool = False,
    ) -> None:
        """activation: the name of its class, one of ACTIVATIONS. residual: adds x to the result, through a linear layer
        without bias if the sizes differ. Raises ValueError for another activation."""
        super().__init__()
        self.linear, self.activation = nn.Linear(in_features, out_features, bias), new_activation("Dense", activation)
        self.adds = residual
        if residual and in_features != out_features:
            self.residual = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.linear.weight.dtype)
        out = self.activation(self.linear(given))
        if self.adds:
            out = out + (self.residual(given) if hasattr(self, "residual") else given)
        return out.to(x.dtype)


class Recipe(NamedTuple):
    """The settings in a directory. folder: the model's."""

    folder: Path
    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    include_prompt: bool = True
    prompts: Mapping[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None


class SparseRecipe(NamedTuple):
    """The settings in a directory of a sparse encoder. folder: the model's."""

    folder: Path
    activation: str = "relu"
    prompts: Mapping[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "dot"
    max_length: int | None = None
    max_active_dims: int | None = None


# ---- reading


def read(directory: Path) -> Recipe:
    """The settings in a directory; mean pooling, normalised, without modules.json. Raises ValueError for what is not
    supported."""
    modules = read_modules(directory)
    if not modules:
        _check_whole(directory, "1_Pooling")
        _check_head(directory)
        return Recipe(directory, max_length=max_length_of(directory, directory))
    kinds = kinds_of(directory, modules)
    middle = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(middle) - {"Dense"}:
        expected = "Transformer, Pooling[, Dense ...][, Normalize]"
        raise ValueError(f"{directory} has the modules {', '.join(kinds)}; expected {expected}")
    folders = [directory / module["path"] for module in modules]
    _check_one_length(folders[0])
    _check_task(folders[0], "feature-extraction")
    if not (folders[1] / "config.json").exists():
        raise ValueError(f"{directory} has a pooling, but no {folders[1].name}/config.json; expected one")
    pooling = read_json(folders[1] / "config.json")
    more = read_json(directory / "config_sentence_transformers.json")
    return Recipe(
        folders[0],
        _pooling(directory, pooling),
        tuple(read_dense(folder) for folder in folders[2 : 2 + len(middle)]),
        kinds[-1] == "Normalize",
        pooling.get("include_prompt", True),
        more.get("prompts") or {},
        more.get("default_prompt_name"),
        more.get("similarity_fn_name") or "cosine",
        max_length_of(folders[0], directory),
    )


def _check_whole(directory: Path, pooling: str) -> None:
    if (directory / pooling / "config.json").exists():
        raise ValueError(f"{directory} has a pooling and no modules.json: saving was interrupted; save it again")


def _check_head(directory: Path) -> None:
    """Warns of a model that was fine-tuned for other than embeddings. Raises ValueError for one of ColBERT's."""
    head = (read_json(directory / "config.json").get("architectures") or [""])[0]
    if head == "HF_ColBERT":
        raise ValueError(f"{directory} has a vector for each token, as ColBERT; expected one for each text")
    if head.endswith(_OTHER_TASKS):
        warn(f"{directory} holds a {head}, whose head is left out: embeddings are pooled from its encoder's tokens")


def read_modules(directory: Path) -> list[dict[str, Any]]:
    """The modules that modules.json lists; none without it. Raises ValueError if one has no type or no path."""
    path = directory / "modules.json"
    modules = read_json(path, list)
    for module in modules:
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise ValueError(f"{path} lists {module}; expected modules with a type and a path")
    return modules


def kinds_of(directory: Path, modules: list[dict[str, Any]]) -> list[str]:
    """The classes of modules. Raises ValueError for classes that are not sentence-transformers' or PyLate's."""
    for module in modules:
        if not module["type"].startswith(PACKAGES):
            expected = "sentence_transformers'; code that comes with a model is not run"
            raise ValueError(f"{directory} has a module of the class {module['type']}; expected one of {expected}")
    return [module["type"].rsplit(".", 1)[-1] for module in modules]


def settings_of(folder: Path) -> dict[str, Any]:
    """sentence-transformers' settings of the model in a folder; empty without a file of them. Raises ValueError for
    those that change its vectors and are not supported."""
    name = next((name for name in (SETTINGS, *_OLD_SETTINGS) if (folder / name).exists()), SETTINGS)
    settings = read_json(folder / name)
    for key, value in settings.items():
        if value and not _changes_nothing(key, value):
            raise ValueError(f"{folder / name}: {key} is {value!r}, which is not supported; expected none")
    return settings


def _changes_nothing(key: str, value: Any) -> bool:
    """Whether a setting is followed, or says only how sentence-transformers is to run the model."""
    if key in ("model_args", "model_kwargs"):
        return value.keys() <= {"attn_implementation", "torch_dtype", "dtype", "add_pooling_layer"}
    if key == "modality_config":
        return value in [{"text": {"method": "forward", "method_output_name": n}} for n in _OUTPUTS]
    return key in _FOLLOWED or (key == "module_output_name" and value in ("token_embeddings", "scores"))


def _pooling(directory: Path, settings: dict[str, Any]) -> tuple[str, ...]:
    given = settings.get("pooling_mode") or [mode for name, mode in _LEGACY.items() if settings.get(name)] or "mean"
    try:
        return tuple(map(check_mode, [given] if isinstance(given, str) else given))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None


def read_dense(folder: Path, feature: str = "sentence_embedding") -> Dense:
    """Reads a Dense. feature: the only input and output that is accepted, and the default if config.json names none."""
    settings = read_json(folder / "config.json")
    names = {settings.get(key) or feature for key in ("module_input_name", "module_output_name")}
    if names != {feature}:
        raise ValueError(f"{folder}: a Dense of {', '.join(sorted(names))}; expected one of {feature} alone")
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if missing := [key for key in ("in_features", "out_features") if not isinstance(settings.get(key), int)]:
        raise ValueError(f"{folder / 'config.json'} has no {missing[0]}; expected a number")
    sizes = settings["in_features"], settings["out_features"], settings.get("bias", True)
    residual = settings.get("use_residual", False)
    dense = Dense(*sizes, activation_name(folder, "activation_function", activation), residual)
    try:
        dense.load_state_dict(checkpoint.read(folder))
    except RuntimeError as error:
        raise RuntimeError(f"{folder}: {error}") from None
    return dense


def activation_name(owner: object, name: str, path: str) -> str:
    """The class name in path, such as "torch.nn.modules.activation.Tanh". Raises ValueError unless it is torch.nn's."""
    if not path.startswith("torch.nn."):
        raise ValueError(f"{owner}: {name} is {path!r}; expected one of torch.nn's")
    return path.rsplit(".", 1)[-1]


def read_sparse(directory: Path) -> SparseRecipe:
    """The settings in a directory; activation "relu" without modules.json, as for the first SPLADE models. Raises
    ValueError for what is not supported."""
    modules = read_modules(directory)
    if not modules:
        _check_whole(directory, "1_SpladePooling")
        return SparseRecipe(directory, max_length=max_length_of(directory, directory))
    kinds, folders = kinds_of(directory, modules), [directory / module["path"] for module in modules]
    if len(kinds) != 2 or kinds[0] not in ("MLMTransformer", "Transformer") or kinds[1] != "SpladePooling":
        expected = "MLMTransformer (or Transformer for fill-mask), SpladePooling"
        raise ValueError(f"{directory} has the modules {', '.join(kinds)}; expected {expected}")
    _check_one_length(folders[0])
    task = settings_of(folders[0]).get("transformer_task")
    if task != "fill-mask" and (task or kinds[0] == "Transformer"):
        raise ValueError(f"{directory}: transformer_task is {task!r}; expected 'fill-mask'")
    pooling, more = read_json(folders[1] / "config.json"), read_json(directory / "config_sentence_transformers.json")
    if (strategy := pooling.get("pooling_strategy", "max")) != "max":
        raise ValueError(f"{directory}: pooling_strategy is {strategy!r}; expected 'max'")
    if (activation := pooling.get("activation_function", "relu")) not in SPARSE_ACTIVATIONS:
        expected = " or ".join(map(repr, SPARSE_ACTIVATIONS))
        raise ValueError(f"{directory}: activation_function is {activation!r}; expected {expected}")
    return SparseRecipe(
        folders[0],
        activation,
        more.get("prompts") or {},
        more.get("default_prompt_name"),
        more.get("similarity_fn_name") or "dot",
        max_length_of(folders[0], directory),
        more.get("max_active_dims"),
    )


def read_cross_encoder(directory: Path) -> dict[str, Any]:
    """activation and max_length, None where the directory does not say. Raises ValueError for what is not supported.

    Since release 5.4, sentence-transformers writes modules.json, with the activation in a configuration file beside it.
    """
    modules = read_modules(directory)
    if not modules:
        return {"activation": None, "max_length": _tokenizer_length(directory)}
    kinds = kinds_of(directory, modules)
    if kinds != ["Transformer"]:
        raise ValueError(f"{directory} has the modules {', '.join(kinds)}; expected Transformer alone")
    _check_task(directory / modules[0]["path"], "sequence-classification")
    settings = read_json(directory / "config_sentence_transformers.json")
    if prompt := (settings.get("prompts") or {}).get(settings.get("default_prompt_name")):
        raise ValueError(f"{directory} has the default prompt {prompt!r}; expected none: put it before your queries")
    path = settings.get("activation_fn")
    activation = path and activation_name(directory, "activation_fn", path)
    return {"activation": activation, "max_length": max_length_of(directory, directory)}


def read_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer in the model's folder, with texts put into lower case first if sentence-transformers' file says so,
    unless a step of its own does."""
    from tokenizers import normalizers

    tokenizer = get_tokenizer(folder)
    given = tokenizer.normalizer
    steps = list(given) if isinstance(given, normalizers.Sequence) else [] if given is None else [given]
    lowers = any(isinstance(step, normalizers.Lowercase) for step in steps)
    if settings_of(folder).get("do_lower_case") and not lowers:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    return tokenizer


def _check_task(folder: Path, expected: str) -> None:
    if (task := settings_of(folder).get("transformer_task")) not in (None, expected):
        raise ValueError(f"{folder}: transformer_task is {task!r}; expected {expected!r}")


def _check_one_length(folder: Path) -> None:
    settings = settings_of(folder)
    for name in ("query_length", "document_length"):
        if settings.get(name) is not None:
            expected = "max_seq_length alone, for queries and documents"
            raise ValueError(f"{folder / SETTINGS}: {name} is {settings[name]}; expected {expected}")


def max_length_of(folder: Path, directory: Path) -> int | None:
    """The maximum length in sentence-transformers' file or else, as since release 6, in the tokenizer's; or None."""
    settings = settings_of(folder) or settings_of(directory)
    return settings.get("max_seq_length") or _tokenizer_length(folder)


def _tokenizer_length(folder: Path) -> int | None:
    longest = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return None if longest is None or longest >= 1e20 else int(longest)  # larger values mean "unknown"


def read_json(path: Path, kind: type = dict) -> Any:
    """The file's content; empty without a file. Raises ValueError for invalid JSON, and for content of another kind."""
    if not path.exists():
        return kind()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a {kind.__name__}")
    return content


# ---- writing: modules.json is deleted first and written last, so that a directory is refused if a save was interrupted


def begin(directory: Path, pooling: str | None = None) -> None:
    """pooling: the folder of its settings. One without modules.json tells of a save that was interrupted."""
    directory.mkdir(parents=True, exist_ok=True)
    if pooling is not None and not (directory / pooling / "config.json").exists():
        (directory / pooling).mkdir(exist_ok=True)
        write_json(directory / pooling, {})
    (directory / "modules.json").unlink(missing_ok=True)


def write(recipe: Recipe, width: int) -> None:
    """Writes all files except the model's and the tokenizer's. width: of the vectors that a pooling mode makes."""
    directory, modules = recipe.folder, ["Transformer", "Pooling", *["Dense"] * len(recipe.dense)]
    modules += ["Normalize"] * recipe.normalize
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules) if i)]
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    modes = recipe.pooling[0] if len(recipe.pooling) == 1 else list(recipe.pooling)
    pooling = {"word_embedding_dimension": width, "pooling_mode": modes, "include_prompt": recipe.include_prompt}
    # both spellings: releases before 5.4 only know the names in _LEGACY
    write_json(directory / "1_Pooling", pooling | {name: mode in recipe.pooling for name, mode in _LEGACY.items()})
    for path, dense in zip(paths[2:], recipe.dense, strict=False):
        write_dense(directory / path, dense)
    names = dict(zip(paths, (f"sentence_transformers.models.{kind}" for kind in modules), strict=True))
    _write_shared(recipe, names, {})


def write_sparse(recipe: SparseRecipe, width: int) -> None:
    """As `write`. Modules have the names of releases before 5.4, which later ones understand."""
    folder, module = recipe.folder / "1_SpladePooling", "sentence_transformers.sparse_encoder.models"
    folder.mkdir(exist_ok=True)
    pooling = {"pooling_strategy": "max", "activation_function": recipe.activation, "word_embedding_dimension": width}
    write_json(folder, pooling)
    names = {"": f"{module}.MLMTransformer", folder.name: f"{module}.SpladePooling"}
    more = {} if recipe.max_active_dims is None else {"max_active_dims": recipe.max_active_dims}
    _write_shared(recipe, names, {"model_type": "SparseEncoder", **more})


def _write_shared(recipe: Recipe | SparseRecipe, modules: Mapping[str, str], more: Mapping[str, Any]) -> None:
    """modules: the class of each by its folder. more: further entries of config_sentence_transformers.json."""
    directory = recipe.folder
    write_json(directory, {"max_seq_length": recipe.max_length, "do_lower_case": False}, SETTINGS)
    settings = {"prompts": dict(recipe.prompts), "default_prompt_name": recipe.default_prompt_name}
    settings["similarity_fn_name"] = recipe.similarity
    write_json(directory, settings | more, "config_sentence_transformers.json")
    write_modules(directory, modules)


def write_modules(directory: Path, modules: Mapping[str, str]) -> None:
    """Writes modules.json, the last file. modules: the class of each by its folder."""
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules.items())]
    write_json(directory, listed, "modules.json")


def write_dense(folder: Path, dense: Dense, **more: str) -> None:
    linear = dense.linear
    settings = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    settings |= {"activation_function": activation_path(dense.activation)} | more
    write_json(folder, settings | ({"use_residual": True} if dense.adds else {}))
    with replacing(folder / "model.safetensors") as file:
        save_file({name: tensor.contiguous() for name, tensor in dense.state_dict().items()}, file.name)


def activation_path(activation: nn.Module) -> str:
    """The path of the activation's class, which `activation_name` reads."""
    return f"{type(activation).__module__}.{type(activation).__name__}"


def write_json(folder: Path, content: Any, name: str = "config.json") -> None:
    write_text(folder / name, json.dumps(content, indent=2) + "\n")


def width_after(width: int, dense: Iterable["Dense"]) -> int:
    """How many numbers these layers make of `width` numbers. Raises ValueError for a layer that takes another width."""
    for i, each in enumerate(dense):
        if each.linear.in_features != width:
            raise ValueError(f"dense[{i}] takes {each.linear.in_features} numbers; expected {width}")
        width = each.linear.out_features
    return width
