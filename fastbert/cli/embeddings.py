"""The commands search, embed, index and similarity."""

import argparse
import os
import sys
import time
from pathlib import Path

from fastbert.cli.common import (
    TEXT_FILE,
    add_json,
    add_model,
    add_text_file,
    add_texts,
    check_column,
    lines,
    model_options,
    new_console,
    no_files,
    texts_of,
    write_json,
)
from fastbert.cli.progress import progress

OF_FILES = {
    "vectors": "float32",
    "no_texts": False,
    "engine": None,
    "workers": 1,
    "shard_rows": 16384,
}


def add(commands) -> None:
    search = commands.add_parser("search", help="find the passages that answer a question")
    search.add_argument("question", nargs="+", help="one or several, in quotes")
    add_text_file(search, help=f"{TEXT_FILE} (default: Python's documentation)")
    search.add_argument("--corpus", type=Path, metavar="DIR", help="embeddings of `fastbert embed FILE --output DIR`")
    search.add_argument("--index", action="store_true", help="by the corpus's index, approximately, not by all of it")
    other = "accepts embeddings of another model, such as the same one in another --precision"
    search.add_argument("--any-encoder", action="store_true", help=other)
    search.add_argument("--prompt-name", metavar="NAME", help="of the questions (default: the model's for queries)")
    search.add_argument("--top", type=int, default=3, help="passages to show for each question (default: 3)")
    add_json(search)
    search.set_defaults(run=_search)

    embed = commands.add_parser("embed", help="embed texts to an array, or files larger than memory to Parquet")
    add_texts(embed, "one or several, in quotes; or files: text, .jsonl, .csv, .tsv, .parquet")
    output = "the (texts, C) array (default: FILE.npy); of files a directory, and a run that was ended goes on there"
    embed.add_argument("--output", type=Path, metavar="PATH.npy|DIR", help=output)
    embed.add_argument("--prompt-name", metavar="NAME", help="before each text (default: the model's for documents)")
    option = embed.add_argument_group("files").add_argument
    option("--vectors", choices=("float32", "float16"), help="numbers in the files")
    option("--no-texts", action="store_true", help="leaves the texts out")
    option("--engine", choices=("ray",), help="computes on a cluster of Ray (default: in this process)")
    option("--workers", type=int, metavar="N", help="of the engine, of --threads each (default: 1)")
    option("--shard-rows", type=int, metavar="N", help="of a file (default: 16384)")
    embed.set_defaults(run=_embed, **OF_FILES)

    index = commands.add_parser("index", help="an approximate index of a directory of embeddings, by usearch")
    index.add_argument("directory", type=Path, metavar="DIR")
    index.add_argument("--precision", default="float16", choices=("float32", "float16", "int8"), help="(float16)")
    index.set_defaults(run=_index)

    similarity = commands.add_parser("similarity", help="compare texts, each with each, by the cosine of embeddings")
    add_texts(similarity, "two or more, in quotes")
    add_json(similarity)
    similarity.set_defaults(run=_similarity)

    for command in (search, embed, similarity):
        add_model(command, required=False)


def _search(args: argparse.Namespace) -> None:
    from fastbert.cli.demo import python_documentation
    from fastbert.data.rows import reader_of

    check_column(args)
    if args.top < 1:
        raise ValueError(f"--top is {args.top}; expected at least 1")
    if not all(question.strip() for question in no_files(args.question)):
        raise ValueError("a question is empty")
    if args.corpus:
        _search_corpus(args)
        return
    for option in ("index", "any_encoder"):
        if getattr(args, option):
            raise ValueError(f"--{option.replace('_', '-')} is of a corpus; expected --corpus DIR with it")
    if args.text:
        between = ":" if reader_of(args.text) is None else " row "
        found = enumerate(lines(args.text, args.column), 1)
        passages = [(f"{args.text.name}{between}{number}", line) for number, line in found if line.strip()]
    else:
        passages = python_documentation(300)  # all-MiniLM-L6-v2 cuts texts at 256 tokens, and was trained on 128
    encoder = _encoder(args)
    encoder.prompt_of(args.prompt_name)  # raises for an unknown name before anything is computed
    vectors = _encode(args, encoder, [passage for _, passage in passages])
    _answer(args, _best(encoder, vectors, passages, args.question, args.top, args.prompt_name))


def _search_corpus(args: argparse.Namespace) -> None:
    from fastbert.inference import EmbeddedCorpus

    if args.text:
        raise ValueError("--text and --corpus are both given; expected one of them")
    corpus, encoder = EmbeddedCorpus(args.corpus), _encoder(args)
    questions = encoder.encode_query(args.question, prompt_name=args.prompt_name)
    scores, rows = corpus.search(encoder, questions, args.top, index=args.index, any_encoder=args.any_encoder)
    best = []
    for values, found in zip(scores.tolist(), rows.tolist(), strict=True):
        texts = corpus.texts(found) if corpus.manifest["keep_texts"] else [""] * len(found)
        best.append([(value, f"row {row}", text) for value, row, text in zip(values, found, texts, strict=True)])
    _answer(args, best)


Passages = list[tuple[float, str, str]]  # score, source and text of each, the best first


def _answer(args: argparse.Namespace, best: list[Passages]) -> None:
    if args.json:
        found = [[dict(zip(("score", "source", "text"), one, strict=True)) for one in passages] for passages in best]
        write_json([{"question": q, "passages": p} for q, p in zip(args.question, found, strict=True)])
    else:
        _show(args.question, best)


def show_results(encoder, vectors, passages: list[tuple[str, str]], questions: list[str], top: int) -> None:
    """Prints the best passages for each question by the encoder's measure. passages: (title, text). vectors: (N, C)."""
    _show(questions, _best(encoder, vectors, passages, questions, top))


def _best(
    encoder, vectors, passages: list[tuple[str, str]], questions: list[str], top: int, prompt_name: str | None = None
) -> list[Passages]:
    from fastbert.inference import nearest

    asked = encoder.encode_query(questions, prompt_name=prompt_name)
    scores, places = nearest(asked, vectors, top, encoder.similarity)
    pairs = (zip(*row, strict=True) for row in zip(scores.tolist(), places.tolist(), strict=True))
    return [[(score, *passages[place]) for score, place in found] for found in pairs]


def _show(questions: list[str], best: list[Passages]) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console = new_console()
    for question, passages in zip(questions, best, strict=True):
        console.print(Text(f"\n{question}", style="bold"))
        for score, source, passage in passages:
            console.print(Panel(Text(passage), title=Text(f"{score:.3f}  {source}"), title_align="left"))


def _embed(args: argparse.Namespace) -> None:
    import numpy

    from fastbert.files import replacing

    if args.texts and args.output and args.output.suffix != ".npy":
        _embed_files(args)
        return
    if given := [name for name, default in OF_FILES.items() if getattr(args, name) != default]:
        raise ValueError(f"--{given[0].replace('_', '-')} is for files; expected `fastbert embed FILE --output DIR`")
    if args.output is None and str(args.text) == "-":
        raise ValueError("expected --output PATH.npy for texts of stdin")
    texts = texts_of(args, blank=True)
    if args.output is None and args.text is None:
        raise ValueError("expected --output PATH.npy for texts of the command line")
    output = args.output or args.text.with_name(args.text.name + ".npy")
    _check_ending(output, args.text)
    encoder = _encoder(args)
    with replacing(output) as file:  # opened before the work, to report an unwritable path at once
        found = _encode(args, encoder, texts, args.prompt_name).cpu().numpy()
        numpy.save(file, found)
    print(f"{output}: {found.shape} {found.dtype}")


def _check_ending(output: Path, text: Path | None) -> None:
    """Raises ValueError for a name without .npy. A pipe or a device may have any."""
    if output.suffix == ".npy" or (output.exists() and not output.is_file() and not output.is_dir()):
        return
    of_file = text is not None and str(text) != "-"
    other = f", or `fastbert embed {text} --output {output}` for a directory" if of_file else ""
    raise ValueError(f"--output is {output}; expected a name that ends in .npy{other}")


def _embed_files(args: argparse.Namespace) -> None:
    from fastbert.inference import embed_corpus
    from fastbert.inference.corpus import count_texts

    if args.text:
        raise ValueError(f"--text {args.text} is beside files; expected all files before --output, or --text alone")
    if missing := [text for text in args.texts if not os.path.isfile(text)]:
        where = f"--output {args.output} is a directory, for files; texts go to --output PATH.npy"
        raise ValueError(f"there is no file {missing[0]!r} ({where})")
    if args.output.is_file():
        raise ValueError(f"--output {args.output} is a file; expected a directory")
    encoder, start = _encoder(args), time.perf_counter()
    with progress("encoding", count_texts(args.texts)) as advance:
        corpus = embed_corpus(
            encoder, args.texts, args.output, column=args.column, prompt_name=args.prompt_name,
            precision=args.vectors, keep_texts=not args.no_texts, shard_rows=args.shard_rows, progress=advance,
            tokens_per_batch=args.batch_tokens, engine=_engine(args),
        )  # fmt: skip
    seconds = time.perf_counter() - start
    print(f"{args.output}: {(len(corpus), corpus.width)} {args.vectors} in {len(corpus.parts)} files, {seconds:.1f} s")


def _engine(args: argparse.Namespace):
    if args.engine is None:
        if args.workers != 1:
            raise ValueError(f"--workers is {args.workers}; expected --engine ray with it")
        return None
    from fastbert.inference.ray import RayEngine

    return RayEngine(_source(args), args.workers, num_cpus=args.threads or 1, **model_options(args))


def _index(args: argparse.Namespace) -> None:
    from fastbert.inference import EmbeddedCorpus

    corpus = EmbeddedCorpus(args.directory)
    with progress("indexing", len(corpus)) as advance:
        path = corpus.build_index(args.precision, progress=advance)
    print(f"{path}: {len(corpus)} vectors, {path.stat().st_size} bytes")


def _similarity(args: argparse.Namespace) -> None:
    from fastbert.inference import similarity

    texts = texts_of(args)
    if len(texts) < 2 or not all(text.strip() for text in texts):
        raise ValueError("expected at least two texts, and none that is empty")
    cosines = similarity(_encoder(args).encode(texts, tokens_per_batch=args.batch_tokens)).tolist()
    if args.json:
        write_json({"texts": texts, "similarity": cosines})
        return
    for row, text in zip(cosines, texts, strict=True):
        print(" ".join(f"{cosine:7.4f}" for cosine in row), f" {text}")


def _encoder(args: argparse.Namespace):
    from fastbert.inference import SentenceEncoder

    return SentenceEncoder.from_pretrained(_source(args), **model_options(args))


def _source(args: argparse.Namespace):
    from fastbert.cli.demo import minilm

    return args.model or minilm()


def _encode(args: argparse.Namespace, encoder, texts: list[str], prompt_name: str | None = None):
    """Encodes texts, with progress and a line about the time it took."""
    start = time.perf_counter()
    with progress("encoding", len(texts)) as advance:
        vectors = encoder.encode_document(
            texts, prompt_name=prompt_name, tokens_per_batch=args.batch_tokens, progress=advance
        )
    seconds = time.perf_counter() - start
    print(f"{len(texts)} texts in {seconds:.1f} s on {encoder.device}", file=sys.stderr)
    return vectors
