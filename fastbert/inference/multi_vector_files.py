"""Directories of multi-vector encoders: sentence-transformers', PyLate's, and those of ColBERT's own code.

Directories are read as sentence-transformers 6.2 reads them. PyLate (before release 4) keeps its settings in
config_sentence_transformers.json and has only Transformer and Dense as modules. ColBERT's code writes the model under
the architecture HF_ColBERT, with linear.weight among its weights, and its settings to artifact.metadata.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fastbert import checkpoint
from fastbert.files import write_text
from fastbert.inference.sentence_files import (
    PACKAGES,
    SETTINGS,
    Dense,
    max_length_of,
    read_dense,
    read_json,
    read_modules,
    settings_of,
    write_dense,
    write_json,
    write_modules,
)

PUNCTUATION = tuple(string.punctuation)
TASKS = ("query", "document")
SIMILARITIES = ("maxsim", "meanmaxsim")
_PYLATE = tuple(
    "query_length document_length do_query_expansion attend_to_expansion_tokens attend_to_mask_tokens query_prefix "
    "document_prefix skiplist_words".split()
)
FORMATS = ("sentence-transformers", "colbert")


@dataclass(frozen=True)
class QueryExpansion:
    """Tokens appended to a query until it has `length` tokens, special ones included; each gives a vector too.

    attend: True lets the query's tokens attend to them, and them to each other; False lets them attend only to the
    query, as in ColBERT. strategy: "fixed" cuts longer queries at length, "min" does not. token: None for the mask
    token. Names and meanings are those of sentence-transformers. Raises ValueError for invalid values.
    """

    length: int = 32
    attend: bool = False
    strategy: str = "fixed"
    token: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"QueryExpansion: length is {self.length!r}; expected a positive int")
        if self.strategy not in ("fixed", "min") or not isinstance(self.attend, bool):
            given = f"strategy is {self.strategy!r} and attend is {self.attend!r}"
            raise ValueError(f"QueryExpansion: {given}; expected 'fixed' or 'min', and a bool")


class Recipe(NamedTuple):
    """The settings in a directory. folder: the model's. markers: parts of prompts that have to stay one token each."""

    folder: Path
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = {}
    query_length: int | None = None
    document_length: int | None = None
    expansion: QueryExpansion | None = None
    skip_words: tuple[str, ...] = ()
    skip_tasks: tuple[str, ...] = ("document",)
    similarity: str = "maxsim"
    max_length: int | None = None
    markers: tuple[str, ...] = ()


# ---- reading


def read(directory: Path) -> Recipe:
    """The settings in a directory. Raises ValueError if its kind, or a module or setting in it, is not supported."""
    modules = read_modules(directory)
    if modules:
        return _modules(directory, modules)
    if "HF_ColBERT" in (read_json(directory / "config.json").get("architectures") or []):
        return _colbert(directory)
    raise ValueError(
        f"{directory} has no modules.json, and its architecture is not HF_ColBERT; expected the directory of a "
        "multi-vector encoder. To make one of this model: MultiVectorEncoder(model, tokenizer, dense=[Dense(...)])"
    )


def _modules(directory: Path, modules: list[dict[str, Any]]) -> Recipe:
    settings = read_json(directory / "config_sentence_transformers.json")
    kind = settings.get("model_type") or "SentenceTransformer"
    pylate = kind == "ColBERT" or (kind == "SentenceTransformer" and "query_prefix" in settings)
    if not pylate and kind != "MultiVectorEncoder":
        raise ValueError(f"{directory} is of a {kind}; expected a MultiVectorEncoder, or PyLate's ColBERT")
    folders = [directory / module["path"] for module in modules]
    parts = _parts(directory, [module["type"] for module in modules])
    if pylate and {"MultiVectorMask", "Normalize"} & set(parts):
        raise ValueError(f"{directory} is of a ColBERT with {', '.join(parts)}; expected Transformer and Dense alone")
    own = dict(zip(parts, folders, strict=True))
    recipe = Recipe(
        folders[0],
        tuple(read_dense(f, "token_embeddings") for part, f in zip(parts, folders, strict=True) if part == "Dense"),
        pylate or "Normalize" in own,
        {name: text for name, text in (settings.get("prompts") or {}).items() if text},
        similarity=_similarity(settings),
        max_length=max_length_of(folders[0], directory),
    )
    if not pylate:
        _check_normalize(own.get("Normalize"))
        recipe = recipe._replace(**_lengths(folders[0]))
        return recipe._replace(**_skipping(own["MultiVectorMask"])) if "MultiVectorMask" in own else recipe
    return _pylate(recipe, settings)


def _parts(directory: Path, types: Sequence[str]) -> list[str]:
    """The modules' names: Transformer, any number of Dense, then at most one MultiVectorMask and one Normalize, in
    either order. Raises ValueError for others."""
    names = [kind.rsplit(".", 1)[-1] for kind in types]
    after = names[1:]
    while after and after[0] == "Dense":
        del after[0]
    known = all(kind.startswith(PACKAGES) for kind in types)
    if (
        not known
        or names[:1] != ["Transformer"]
        or sorted(after) != sorted({"MultiVectorMask", "Normalize"} & {*after})
    ):
        expected = "Transformer[, Dense ...][, MultiVectorMask][, Normalize] of sentence-transformers or PyLate"
        raise ValueError(f"{directory} has the modules {', '.join(types)}; expected {expected}")
    return names


def _similarity(settings: dict[str, Any]) -> str:
    """The similarity. Names that are unknown here, such as PyLate's former "cosine" and "MaxSim", mean the default."""
    name = settings.get("similarity_fn_name")
    return name if name in SIMILARITIES else "maxsim"


def _check_normalize(folder: Path | None) -> None:
    if folder is None:
        return
    settings = read_json(folder / "config.json")
    names = {settings.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
    if names != {"token_embeddings"}:
        raise ValueError(f"{folder}: a Normalize of {', '.join(sorted(names))}; expected one of token_embeddings alone")


def _lengths(folder: Path) -> dict[str, Any]:
    settings = settings_of(folder)
    expansion = _expansion(folder, settings.get("query_expansion"))
    return {name: settings.get(name) for name in ("query_length", "document_length")} | {"expansion": expansion}


def _expansion(folder: Path, given: dict[str, Any] | None) -> QueryExpansion | None:
    if given is None:
        return None
    if not {"length", "strategy"} <= given.keys() <= {"length", "attend", "strategy", "token"}:
        raise ValueError(f"{folder}: query_expansion is {given}; expected strategy and length[, attend][, token]")
    return QueryExpansion(**given)


def _skipping(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / "config.json")
    if settings.get("keep_only_token_ids"):
        raise ValueError(f"{folder}: keep_only_token_ids is given, for documents that are images; expected none")
    tasks = settings.get("skiplist_tasks") or ["document"]
    tasks = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    return {"skip_words": tuple(settings.get("skiplist_words") or ()), "skip_tasks": tasks}


def _pylate(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    prefixes = {name: settings.get(f"{name}_prefix") or "" for name in TASKS if f"{name}_prefix" in settings}
    prompts = {name: prefix + recipe.prompts.get(name, "").removeprefix(prefix) for name, prefix in prefixes.items()}
    words = settings.get("skiplist_words")
    expansion, length = None, settings.get("query_length")
    if "query_expansion" in settings:
        expansion = _expansion(recipe.folder, settings["query_expansion"])
    elif settings.get("do_query_expansion") is not False and any(name in settings for name in _PYLATE):
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        expansion, length = QueryExpansion(length or 32, bool(attend)), None
    return recipe._replace(
        prompts={name: text for name, text in {**recipe.prompts, **prompts}.items() if text},
        query_length=length,
        document_length=settings.get("document_length"),
        expansion=expansion,
        skip_words=PUNCTUATION if words is None else tuple(words),
        markers=tuple(prefixes.values()),
    )


def _colbert(directory: Path) -> Recipe:
    settings = read_json(directory / "artifact.metadata")
    settings = settings.get("config", settings)
    for name, expected in (("similarity", "cosine"), ("interaction", "colbert")):
        if settings.get(name, expected) != expected:
            raise ValueError(f"{directory}: {name} is {settings[name]!r}; expected {expected!r}")
    markers = (settings.get("query_token_id") or "[unused0]", settings.get("doc_token_id") or "[unused1]")
    return Recipe(
        directory,
        (_linear(directory),),
        prompts={name: f"{marker} " for name, marker in zip(TASKS, markers, strict=True)},
        document_length=settings.get("doc_maxlen"),
        expansion=QueryExpansion(settings.get("query_maxlen") or 32, bool(settings.get("attend_to_mask_tokens"))),
        skip_words=PUNCTUATION if settings.get("mask_punctuation", True) else (),
        max_length=max_length_of(directory, directory),
        markers=tuple(f"{marker} " for marker in markers),
    )


def _linear(directory: Path) -> Dense:
    weight = checkpoint.read(directory).get("linear.weight")
    if weight is None or weight.dim() != 2:
        given = "none" if weight is None else f"of shape {tuple(weight.shape)}"
        raise ValueError(f"{directory}: linear.weight is {given}; expected (dim, hidden size), as HF_ColBERT has it")
    dense = Dense(weight.shape[1], weight.shape[0], bias=False, activation="Identity")
    dense.linear.weight = nn.Parameter(weight)
    return dense


# ---- writing


def write(recipe: Recipe) -> None:
    """Writes sentence-transformers' files, except the model's and the tokenizer's; modules.json last."""
    directory = recipe.folder
    kinds = ["Dense"] * len(recipe.dense) + ["MultiVectorMask"] + ["Normalize"] * recipe.normalize
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds, 1))]
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    for path, dense in zip(paths[1:], recipe.dense, strict=False):
        write_dense(directory / path, dense, **tokens)
    skipping = {"skiplist_words": list(recipe.skip_words), "skiplist_tasks": list(recipe.skip_tasks)}
    write_json(directory / paths[len(recipe.dense) + 1], skipping | {"keep_only_token_ids": None})
    if recipe.normalize:
        write_json(directory / paths[-1], tokens)
    lengths = {"max_seq_length": recipe.max_length, "query_length": recipe.query_length}
    lengths |= {"document_length": recipe.document_length, "query_expansion": _settings(recipe.expansion)}
    write_json(directory, lengths, SETTINGS)
    settings = {"model_type": "MultiVectorEncoder", "prompts": dict(recipe.prompts), "default_prompt_name": None}
    write_json(directory, settings | {"similarity_fn_name": recipe.similarity}, "config_sentence_transformers.json")
    types = {
        "": "base.modules.transformer.Transformer",
        "Dense": "base.modules.dense.Dense",
        "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        "Normalize": "base.modules.normalize.Normalize",
    }
    names = (f"sentence_transformers.{types[kind]}" for kind in ("", *kinds))
    write_modules(directory, dict(zip(paths, names, strict=True)))


def _settings(expansion: QueryExpansion | None) -> dict[str, Any] | None:
    return None if expansion is None else dict(vars(expansion))


def colbert_settings(recipe: Recipe) -> dict[str, Any]:
    """The content of artifact.metadata for a recipe. Raises ValueError for what ColBERT's settings cannot describe."""
    dense, expansion = recipe.dense, recipe.expansion
    markers = {name: recipe.prompts.get(name, "").removesuffix(" ") for name in TASKS}
    fits = {
        "one Dense without bias, activation and residual": len(dense) == 1
        and dense[0].linear.bias is None
        and isinstance(dense[0].activation, nn.Identity)
        and not dense[0].adds,
        "normalised vectors": recipe.normalize,
        "an expansion of a fixed length by the mask token": expansion is not None
        and (expansion.strategy, expansion.token) == ("fixed", None),
        "a single marker as the prompt of queries, and of documents": all(
            marker and not set(marker) & set(string.whitespace) for marker in markers.values()
        ),
        "documents skipping punctuation or nothing": recipe.skip_words in ((), PUNCTUATION)
        and recipe.skip_tasks == ("document",),
        "the similarity maxsim": recipe.similarity == "maxsim",
    }
    if missing := [what for what, there in fits.items() if not there]:
        raise ValueError(f"the format 'colbert' has no word for this encoder; expected {'; '.join(missing)}")
    return {
        "query_token_id": markers["query"],
        "doc_token_id": markers["document"],
        "query_token": "[Q]",
        "doc_token": "[D]",
        "dim": dense[0].linear.out_features,
        "doc_maxlen": recipe.document_length or recipe.max_length,
        "query_maxlen": expansion.length,
        "mask_punctuation": bool(recipe.skip_words),
        "attend_to_mask_tokens": expansion.attend,
        "similarity": "cosine",
    }


def write_colbert(recipe: Recipe, model: Any) -> None:
    """Writes ColBERT's own files, except the tokenizer's: one file of weights, config.json, artifact.metadata."""
    settings, directory = colbert_settings(recipe), recipe.folder
    state = model.to_hugging_face(model.state_dict(), tied=False)
    prefix = f"{model.config.family.prefix}."
    state = {name if name.startswith(prefix) else prefix + name: tensor for name, tensor in state.items()}
    config = {**model.config.to_dict(), "architectures": ["HF_ColBERT"], "dtype": str(model.dtype)[len("torch.") :]}
    checkpoint.write(
        directory, config, state | {"linear.weight": recipe.dense[0].linear.weight.detach().to(model.dtype)}
    )
    write_text(directory / "artifact.metadata", json.dumps(settings, indent=2) + "\n")
