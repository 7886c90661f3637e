"""search, embed, similarity."""

import argparse
import sys
import time
from pathlib import Path

from fastbert.cli.common import DTYPES, add_json, add_model, lines, write_json


def add(commands) -> None:
    search = commands.add_parser("search", help="find the passages that answer a question")
    search.add_argument("question", nargs="+", help="one or several, in quotes")
    search.add_argument("--text", type=Path, help="passages to search, one a line (default: Python's documentation)")
    search.add_argument("--top", type=int, default=3, help="passages to show for each question (default: 3)")
    search.set_defaults(run=_search)

    embed = commands.add_parser("embed", help="embed the lines of a text file")
    embed.add_argument("file", type=Path, help="one text a line")
    embed.add_argument("--output", type=Path, help="where the (lines, C) float32 array goes (default: FILE.npy)")
    embed.set_defaults(run=_embed)

    similarity = commands.add_parser("similarity", help="compare texts, each with each, by the cosine of embeddings")
    similarity.add_argument("texts", nargs="+", metavar="TEXT", help="two or more, in quotes")
    add_json(similarity)
    similarity.set_defaults(run=_similarity)

    for command in (search, embed, similarity):
        add_model(command, required=False)


def _search(args: argparse.Namespace) -> None:
    from fastbert.cli.demo import documentation_passages

    if args.top < 1:
        raise ValueError(f"--top is {args.top}; expected at least 1")
    if args.text:
        passages = [(args.text.name, line) for line in lines(args.text) if line.strip()]
    else:
        passages = documentation_passages()
    encoder = _encoder(args)
    vectors = _encode(encoder, [passage for _, passage in passages])
    show_results(encoder, vectors, passages, args.question, args.top)


def show_results(encoder, vectors, passages: list[tuple[str, str]], questions: list[str], top: int) -> None:
    """Prints the best passages for each question by cosine similarity. passages: (title, text). vectors: (N, C)."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from fastbert.inference import similarity

    console, scores = Console(), similarity(encoder.encode(questions), vectors)
    for question, row in zip(questions, scores, strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        best = row.topk(min(top, len(passages)))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            source, passage = passages[index]
            console.print(Panel(Text(passage), title=f"{score:.3f}  {source}", title_align="left"))


def _embed(args: argparse.Namespace) -> None:
    import numpy

    from fastbert.files import replacing

    texts = lines(args.file)
    encoder = _encoder(args)
    output = args.output or args.file.with_name(args.file.name + ".npy")
    with replacing(output) as file:
        numpy.save(file, _encode(encoder, texts).cpu().numpy())
    print(f"{output}: {(len(texts), encoder.model.config.hidden_size)} float32")


def _similarity(args: argparse.Namespace) -> None:
    from fastbert.inference import similarity

    if len(args.texts) < 2 or not all(text.strip() for text in args.texts):
        raise ValueError("expected at least two texts, and none that is empty")
    cosines = similarity(_encoder(args).encode(args.texts)).tolist()
    if args.json:
        write_json({"texts": args.texts, "similarity": cosines})
        return
    for row, text in zip(cosines, args.texts, strict=True):
        print(" ".join(f"{cosine:7.4f}" for cosine in row), f" {text}")


def _encoder(args: argparse.Namespace):
    from fastbert.cli.demo import minilm
    from fastbert.inference import SentenceEncoder

    return SentenceEncoder.from_pretrained(args.model or minilm(), dtype=DTYPES[args.dtype], device=args.device)


def _encode(encoder, texts: list[str]):
    """Embeddings, with a progress bar and a line about the time it took."""
    from rich.progress import Progress

    start = time.perf_counter()
    with Progress(transient=True) as bar:
        task = bar.add_task("encoding", total=len(texts))
        vectors = encoder.encode(texts, progress=lambda done: bar.advance(task, done))
    seconds = time.perf_counter() - start
    print(f"{len(texts)} texts in {seconds:.1f} s on {encoder.device}", file=sys.stderr)
    return vectors
