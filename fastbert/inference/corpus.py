"""Embeds corpora larger than memory into Parquet files, by a job that may be killed and started again.

A directory holds

- part-00000.parquet, ...: columns `row`, a text's number in the input, from 0; `text`; and `embedding`, an Arrow list
  of fixed size. Each part but the last has the number of rows that manifest.json says (shard_rows)
- manifest.json: the encoder, prompt, precision and input of the embeddings, and the number of rows once all are written
- index.usearch: after `build_index`, an approximate index
"""

import json
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbert.data.rows import texts_of_file
from fastbert.files import alone_in, replacing, write_text
from fastbert.inference.fingerprint import fingerprint
from fastbert.inference.sentences import SentenceEncoder
from fastbert.inference.vectors import best_of, check_count, nearest, require_tensor
from fastbert.model import require_class
from fastbert.ops.numbers import wide
from fastbert.require import require

SHARD_ROWS = 16384
PRECISIONS = ("float32", "float16")
MANIFEST, INDEX, PART = "manifest.json", "index.usearch", "part-{:05d}.parquet"
# Rows of an index that one thread adds. Rows that several threads add at once may not be linked with each other, and
# then no search finds them: one in a thousand of a small index, one in ten thousand after so many.
ONE_THREAD = 4096
METRICS = {"cosine": "cos", "dot": "ip", "euclidean": "l2sq"}  # usearch's names

Files = str | Path | Iterable[str | Path]


# ---- the job


class Part(NamedTuple):
    """The rows of one file: the number of the first row, and the texts."""

    path: Path
    first: int
    texts: list[str]


class Recipe(NamedTuple):
    """How a part is made. encoder: the encoder's fingerprint. options: for `SentenceEncoder.encode`."""

    encoder: str
    prompt: str
    precision: str
    keep_texts: bool
    options: dict[str, Any]


Progress = Callable[[int], None] | None
Engine = Callable[[Recipe, Iterator[Part], Progress], None]


def embed_corpus(
    encoder: SentenceEncoder,
    files: Files,
    directory: str | Path,
    *,
    column: str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    precision: str = "float32",
    keep_texts: bool = True,
    shard_rows: int = SHARD_ROWS,
    engine: Engine | None = None,
    progress: Progress = None,
    **options: Any,
) -> "EmbeddedCorpus":
    """Embeds the texts of files into a directory, part by part; parts that exist already are kept.

    files: lines of text, JSON lines, CSV or Parquet, as `texts_of_file` reads them, with `column`. prompt, prompt_name:
    what goes before each text; None as `SentenceEncoder.encode_document`. options: for `encode`. precision: "float32"
    or "float16" in the files. keep_texts: whether the files hold the texts too. shard_rows: rows of a part, which is
    what is in memory at once and what a kill loses. engine: computes the parts in other processes, such as
    `fastbert.inference.ray.RayEngine`. progress: called with numbers of texts, existing parts included.

    A part is replaced whole, so a job that is killed at any moment and started again ends with the same files as one
    that was not killed. Raises ValueError if the directory belongs to another encoder, prompt, precision or input,
    naming which, for files without text, for an embedding that is not finite, and as `texts_of_file`; RuntimeError
    while another process writes there.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"embed_corpus: precision is {precision!r}; expected {' or '.join(PRECISIONS)}")
    require_class("embed_corpus", "encoder", encoder, SentenceEncoder)
    if not isinstance(shard_rows, int) or shard_rows < 1:
        raise ValueError(f"embed_corpus: shard_rows is {shard_rows!r}; expected a positive int")
    require("pyarrow.parquet", "pyarrow")
    files, directory = [files] if isinstance(files, (str, Path)) else list(files), Path(directory).absolute()
    if prompt is None:
        prompt = encoder.prompts.get("document", "") if prompt_name is None else encoder.prompt_of(prompt_name)[0]
    recipe = Recipe(fingerprint(encoder), prompt, precision, keep_texts, options)
    width = options.get("truncate_dim") or encoder.width
    manifest = recipe._asdict() | {
        "width": width,
        "similarity": encoder.similarity_name,
        "column": "text" if column is None else column,
        "shard_rows": shard_rows,
        "files": [_identity(Path(file)) for file in files],
    }
    del manifest["options"]
    directory.mkdir(parents=True, exist_ok=True)
    with alone_in(directory, "writes embeddings to"):
        for left in directory.glob("part-*.part"):  # left by a run that was killed while it wrote a part
            left.unlink()
        _agree(directory, manifest)
        texts, rows = chain.from_iterable(texts_of_file(file, column) for file in files), 0

        def missing() -> Iterator[Part]:
            nonlocal rows
            while found := list(islice(texts, shard_rows)):
                part = Part(directory / PART.format(rows // shard_rows), rows, found)
                rows += len(found)
                if not _is_there(part, width):
                    yield part
                elif progress:
                    progress(len(found))

        (engine or partial(_in_this_process, encoder))(recipe, missing(), progress)
        if not rows:
            raise ValueError(f"embed_corpus: {', '.join(map(str, files)) or 'no file'} holds no text")
        if manifest["files"] != [_identity(Path(file)) for file in files]:
            raise ValueError(
                f"embed_corpus: the files changed while they were read; delete {directory}, and begin again"
            )
        write_text(directory / MANIFEST, json.dumps(manifest | {"rows": rows}, indent=1) + "\n")
    return EmbeddedCorpus(directory)


def _in_this_process(encoder: SentenceEncoder, recipe: Recipe, parts: Iterator[Part], progress: Progress) -> None:
    for part in parts:
        write_part(encoder, recipe, part, progress)


def write_part(encoder: SentenceEncoder, recipe: Recipe, part: Part, progress: Progress = None) -> None:
    """Embeds the texts of a part, and writes its file whole."""
    arrow, parquet = require("pyarrow", "pyarrow"), require("pyarrow.parquet", "pyarrow")
    vectors = encoder.encode(part.texts, prompt=recipe.prompt, progress=progress, **recipe.options)
    vectors = vectors.cpu().to(getattr(torch, recipe.precision))
    if len(wrong := (~vectors.isfinite()).any(1).nonzero()):
        text = part.texts[int(wrong[0])]
        raise ValueError(
            f"the embedding of row {part.first + int(wrong[0])} is not finite in {recipe.precision}: {text[:60]!r}; "
            "expected finite numbers, as float32 has for most models"
        )
    columns = {"row": arrow.array(np.arange(part.first, part.first + len(vectors)))}
    if recipe.keep_texts:
        columns["text"] = arrow.array(part.texts, arrow.string())
    numbers = arrow.array(vectors.reshape(-1).numpy())
    columns["embedding"] = arrow.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    with replacing(part.path) as file:
        parquet.write_table(
            arrow.table(columns),
            file,
            compression={"row": "zstd", "text": "zstd"},
            use_dictionary=False,
            write_page_checksum=True,
        )


def count_texts(files: Files) -> int | None:
    """About how many texts there are, to estimate the time left: lines, or rows of Parquet. None if one is x.gz."""
    total = 0
    for path in [Path(files)] if isinstance(files, (str, Path)) else map(Path, files):
        if path.suffix.lower() == ".gz":
            return None
        if path.suffix.lower() == ".parquet":
            total += require("pyarrow.parquet", "pyarrow").read_metadata(path).num_rows
        else:
            with path.open("rb") as file:
                total += sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))  # noqa: B023
    return total


def _identity(path: Path) -> dict[str, Any]:
    """A file's name without folders, its size and a hash of its content."""
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "blake2b": found.hexdigest()}


def _agree(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest if there are no parts yet; else raises ValueError if it differs from the existing one."""
    parts = sorted(directory.glob("part-*.parquet"))
    if parts and not (directory / MANIFEST).exists():
        raise ValueError(f"{directory} has {parts[0].name} and no {MANIFEST}: whose it is nobody knows")
    there = _manifest(directory) if (directory / MANIFEST).exists() else None
    if not parts:  # a run that ended before its first part settled nothing
        (directory / INDEX).unlink(missing_ok=True)  # an index of earlier embeddings
        write_text(directory / MANIFEST, json.dumps(manifest | {"rows": None}, indent=1) + "\n")
        return
    for name, value in manifest.items():
        if there.get(name) != value:
            other = "other files" if name == "files" else f"another {name}"
            raise ValueError(
                f"{directory} was begun with {other}: {_shown(there.get(name), value)}, now "
                f"{_shown(value, there.get(name))}; expected the same, or another directory"
            )


def _shown(value: Any, other: Any) -> str:
    """An entry of a manifest, for a message; of files, those that the other entry has not."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = [each for each in value if not isinstance(other, list) or each not in other] or value
        shown = (f"{each.get('name')} ({each.get('bytes')} bytes, {each.get('blake2b')})" for each in value)
        return ", ".join(shown)[:300]
    return f"{value!r:.300}"


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} has no {MANIFEST}; expected embeddings of `fastbert embed`") from None
    except ValueError as error:
        raise ValueError(f"{directory / MANIFEST} is damaged: {error}") from None
    counts = {"width": 1, "shard_rows": 1, "rows": 0}
    if not isinstance(found, dict) or not {"encoder", "similarity", "keep_texts", *counts} <= found.keys():
        raise ValueError(f"{directory / MANIFEST} is not of embeddings")
    for name, least in counts.items():
        value = found[name]
        if not (isinstance(value, int) and value >= least) and not (name == "rows" and value is None):
            raise ValueError(f"{directory / MANIFEST} is damaged: {name} is {value!r}")
    return found


def _is_there(part: Part, width: int) -> bool:
    """Whether the part's file exists. Raises ValueError if it has other rows or cannot be read."""
    if not part.path.exists():
        return False
    table = _read(part.path, ["row", "embedding"])
    rows, kind = table["row"].to_numpy(), table.schema.field("embedding").type
    if len(rows) != len(part.texts) or rows[0] != part.first or getattr(kind, "list_size", None) != width:
        given = f"{len(rows)} rows from {rows[0] if len(rows) else 'none'} on, {kind}"
        expected = f"{len(part.texts)} from {part.first} on, {width} numbers each"
        raise ValueError(f"{part.path} has {given}; expected {expected}: delete it")
    return True


def _read(path: Path, columns: list[str]) -> Any:
    arrow = require("pyarrow", "pyarrow")
    try:
        return require("pyarrow.parquet", "pyarrow").read_table(
            path, columns=columns, memory_map=True, page_checksum_verification=True
        )
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is missing or damaged: {error}; delete it, and run the same `fastbert embed` again"
        ) from None


# ---- its result


class EmbeddedCorpus:
    """A directory of embeddings. `search` compares with all of them, one part in memory at a time, or uses an index."""

    def __init__(self, directory: str | Path) -> None:
        """Raises FileNotFoundError without a manifest, ValueError for a damaged one and for an unfinished job."""
        self.directory, self.manifest = Path(directory), _manifest(Path(directory))
        if self.manifest["rows"] is None:
            raise ValueError(f"{directory} is not complete: run the same `fastbert embed` again")
        self.width, self._shard_rows = self.manifest["width"], self.manifest["shard_rows"]
        self._encoder: weakref.ref[SentenceEncoder] | None = None  # the one last verified to be the corpus's

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedCorpus, (self.directory,)  # an open index and the encoder are not pickled

    def __len__(self) -> int:
        return self.manifest["rows"]

    @property
    def parts(self) -> list[Path]:
        """The files, in the order of their rows."""
        return [self.directory / PART.format(number) for number in range(-(-len(self) // self._shard_rows))]

    def vectors(self, part: Path) -> Tensor:
        """(rows, C) embeddings of a part, float32 or float16 as stored. Raises ValueError for a damaged part."""
        column = _read(part, ["embedding"])["embedding"].combine_chunks()
        return torch.from_numpy(np.array(column.flatten()).reshape(-1, self.width))

    def texts(self, rows: Iterable[int] | Tensor | np.ndarray) -> list[str]:
        """The texts of rows, by their numbers (N,). Raises IndexError for a row that does not exist, ValueError if
        texts were not kept, TypeError for anything but integers."""
        if not self.manifest["keep_texts"]:
            raise ValueError(f"{self.directory} has no texts: they were not kept")
        try:
            rows = [operator.index(row) for row in (rows.tolist() if isinstance(rows, (Tensor, np.ndarray)) else rows)]
        except TypeError:
            raise TypeError(f"texts: rows are {rows!r:.60}; expected integers, (N,)") from None
        if wrong := [row for row in rows if not 0 <= row < len(self)]:
            raise IndexError(f"there is no row {wrong[0]}; expected 0 to {len(self) - 1}")
        found: dict[int, str] = {}
        for number in sorted({row // self._shard_rows for row in rows}):
            column = _read(self.directory / PART.format(number), ["text"])["text"]
            first = number * self._shard_rows
            found |= {row: column[row - first].as_py() for row in rows if row // self._shard_rows == number}
        return [found[row] for row in rows]

    def search(
        self, encoder: SentenceEncoder, queries: Tensor, k: int, *, index: bool = False, any_encoder: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(scores, rows), each (N, min(k, len)): the rows most similar to each of the queries (N, C), best first.

        encoder: made the queries, and its measure is used. Its fingerprint is compared with the corpus's the first time
        it is given. index: searches in the index of `build_index`, approximately, instead of all vectors. any_encoder:
        accepts another encoder, such as the same one in another precision. Raises ValueError for an encoder other than
        the corpus's, or with another measure than an index has, other shapes, a k below 1, numbers that are not finite
        and a score that is NaN; TypeError for anything but a tensor of a floating-point type.
        """
        if index and encoder.similarity_name != self.manifest["similarity"]:
            measures = f"{self.manifest['similarity']!r}, and the encoder's is {encoder.similarity_name!r}"
            raise ValueError(f"search: the index's measure is {measures}; expected the same, or a search without it")
        if not any_encoder and (self._encoder is None or self._encoder() is not encoder):
            if fingerprint(encoder) != self.manifest["encoder"]:
                raise ValueError(
                    f"{self.directory} has embeddings of another encoder; expected the queries' own (any_encoder, or "
                    "--any-encoder, accepts the same model in another precision)"
                )
            self._encoder = weakref.ref(encoder)
        require_tensor("search", queries)
        check_count("search", k)
        if queries.dim() != 2 or queries.shape[1] != self.width:
            raise ValueError(f"search: queries has shape {tuple(queries.shape)}; expected (N, {self.width})")
        if not queries.is_floating_point():
            raise TypeError(f"search: queries are {queries.dtype}; expected a floating-point type, as `encode` gives")
        if len(wrong := (~queries.isfinite()).any(1).nonzero()):
            raise ValueError(f"search: queries[{int(wrong[0])}] has NaN or infinity; expected finite numbers")
        return self._in_index(queries, k) if index else self._in_all(encoder, wide(queries), k)

    def _in_all(self, encoder: SentenceEncoder, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best, rows = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        rows = rows.to(queries.device)
        for number, part in enumerate(self.parts):
            vectors = self.vectors(part).to(queries)
            scores, found = nearest(queries, vectors, k, encoder.similarity)
            found = found + number * self._shard_rows
            best, rows = best_of(torch.cat([best, scores], 1), torch.cat([rows, found], 1), k)
        return best, rows

    def build_index(self, precision: str = "float16", progress: Callable[[int], None] | None = None) -> Path:
        """Writes index.usearch, an HNSW graph of all vectors by the package `usearch`. precision: of its numbers,
        "float16", "float32" or "int8", which keeps directions alone. Raises ValueError for another, for a similarity
        that usearch lacks, and for int8 where lengths count: unless vectors are compared by cosines or have length 1.
        """
        measure, numbers = self.manifest["similarity"], {"float16": "f16", "float32": "f32", "int8": "i8"}
        if measure not in METRICS or precision not in numbers:
            expected = f"one of {', '.join(METRICS)}, and {', '.join(numbers)}"
            raise ValueError(f"build_index: similarity is {measure!r}, precision {precision!r}; expected {expected}")
        usearch = require("usearch.index", "usearch")
        metric = METRICS["cosine" if precision == "int8" else measure]
        index = usearch.Index(ndim=self.width, metric=metric, dtype=numbers[precision])
        for number, part in enumerate(self.parts):
            vectors = self.vectors(part).numpy()
            if precision == "int8" and measure != "cosine" and not _has_length_one(vectors):
                raise ValueError(f"build_index: int8 keeps no lengths, which {measure!r} needs; expected float16")
            rows, alone = np.arange(len(vectors)) + number * self._shard_rows, max(0, ONE_THREAD - len(index))
            index.add(rows[:alone], vectors[:alone], threads=1)
            index.add(rows[alone:], vectors[alone:])
            if progress:
                progress(len(vectors))
        path = self.directory / INDEX
        with replacing(path) as file:
            index.save(file.name)
        self.__dict__.pop("_index", None)
        return path

    @cached_property
    def _index(self) -> Any:
        path = self.directory / INDEX
        if not path.exists():
            raise FileNotFoundError(
                f"{self.directory} has no {INDEX}; expected one, by `fastbert index {self.directory}`"
            )
        try:
            index = require("usearch.index", "usearch").Index.restore(str(path), view=True)
        except (RuntimeError, ValueError):
            index = None
        if index is None or len(index) != len(self) or index.ndim != self.width:
            raise ValueError(f"{path} is damaged, or of other embeddings: build it again")
        return index

    def _in_index(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        k = min(k, len(self))
        self._index.expansion_search = max(self._index.expansion_search, 2 * k)
        found, shape = self._index.search(queries.float().cpu().numpy(), k), (len(queries), k)
        counts = np.atleast_1d(getattr(found, "counts", len(found)))
        if counts.min(initial=k) < k:
            raise ValueError(
                f"search: the index found {counts.min()} of {k} rows: k is a large share of all rows, or many equal "
                "vectors hide others; search without the index"
            )
        distances = torch.from_numpy(np.asarray(found.distances, np.float32).reshape(shape))
        rows = torch.from_numpy(np.asarray(found.keys).astype(np.int64).reshape(shape))
        if self.manifest["similarity"] != "euclidean":
            return 1 - distances, rows
        squares = 2 * distances if self._index.dtype.name == "I8" else distances  # of cosines, in int8
        return -squares.clamp(min=0).sqrt(), rows


def _has_length_one(vectors: np.ndarray) -> bool:
    return bool((np.abs(np.linalg.norm(vectors.astype(np.float32), axis=1) - 1) < 1e-3).all())
