"""Models by their names on the Hugging Face hub, through `huggingface_hub` and its cache."""

import errno
import re
from collections.abc import Iterable
from pathlib import Path

# configurations and tokenizers, also in sentence-transformers' folders, and ColBERT's settings
FILES = ("*.json", "vocab.txt", "merges.txt", "spm.model", "artifact.metadata")
# weights of the model and of layers after it: sentence-transformers' Dense, BGE-M3's linear layers
_SAFE, _PICKLED = (("model.safetensors", "model-*-of-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*-of-*.bin"))
OF_MODEL, PICKLED_MODEL = ((*names, *(f"*_Transformer/{name}" for name in names)) for names in (_SAFE, _PICKLED))
WEIGHTS = (*OF_MODEL, "*_Dense/model.safetensors", "*_linear.pt")
PICKLED_DENSE = ("*_Dense/pytorch_model.bin",)
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")


def directory_of(source: str | Path, *, weights: bool = True) -> Path:
    """The directory itself, or for a model's name on the hub the directory of its files in the hub's cache.

    source: a directory, or a name such as "bert-base-uncased" or "intfloat/e5-small@main", at a branch, a tag or a
    commit. Files that are not in the cache are downloaded: only those that fastbert reads, and weights only if
    `weights`. Raises FileNotFoundError for a directory that does not exist, and for a name that is neither in the cache
    nor available; the message says how to put it there. Raises OSError if the cache cannot be written.
    """
    if source and Path(source).is_dir():
        return Path(source)
    name = NAME.fullmatch(source) if isinstance(source, str) else None
    if name is None:
        raise FileNotFoundError(f"there is no directory {source or repr(source)}")
    folder = _snapshot(*name.groups(), (*FILES, *WEIGHTS) if weights else FILES)
    if weights and (missing := _pickled_patterns(folder)):
        folder = _snapshot(*name.groups(), missing)
    if weights and not _has_any(folder, *OF_MODEL, *PICKLED_MODEL):
        raise FileNotFoundError(f"the hub's cache has not all of {source}: run `hf download {name[1]}` with a network")
    return folder


def _pickled_patterns(folder: Path) -> list[str]:
    """The patterns of pickled weights that stand in for safetensors that the folder does not have."""
    patterns = []
    if not _has_any(folder, *OF_MODEL):
        patterns += PICKLED_MODEL
    if any(not (part / "model.safetensors").exists() for part in folder.glob("*_Dense")):
        patterns += PICKLED_DENSE
    return patterns


def _has_any(folder: Path, *patterns: str) -> bool:
    return any(path for pattern in patterns for path in folder.glob(pattern))


def _snapshot(name: str, revision: str | None, patterns: Iterable[str]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        message = f"there is no directory {name}; for models by name: pip install huggingface_hub"
        raise FileNotFoundError(message) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise FileNotFoundError(f"there is no directory {name}, and no such model on the hub: {reason}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        if getattr(error, "errno", None) in _OF_DISK:
            raise
        raise FileNotFoundError(
            f"there is no directory {name}, the hub's cache does not have it, and the hub cannot be reached: run "
            f"`hf download {name}` where there is a network, or name a directory"
        ) from error
