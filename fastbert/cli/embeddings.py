"""search, embed, similarity."""

import argparse
import sys
import time
from pathlib import Path

from fastbert.cli.common import add_json, add_model, add_texts, lines, model_options, no_files, texts_of, write_json
from fastbert.cli.progress import progress


def add(commands) -> None:
    search = commands.add_parser("search", help="find the passages that answer a question")
    search.add_argument("question", nargs="+", help="one or several, in quotes")
    search.add_argument("--text", type=Path, help="passages to search, one a line (default: Python's documentation)")
    search.add_argument("--top", type=int, default=3, help="passages to show for each question (default: 3)")
    search.set_defaults(run=_search)

    embed = commands.add_parser("embed", help="embed texts, to an array")
    add_texts(embed, "one or several, in quotes")
    embed.add_argument("--output", type=Path, metavar="PATH.npy", help="the (texts, C) array (default: FILE.npy)")
    embed.set_defaults(run=_embed)

    similarity = commands.add_parser("similarity", help="compare texts, each with each, by the cosine of embeddings")
    add_texts(similarity, "two or more, in quotes")
    add_json(similarity)
    similarity.set_defaults(run=_similarity)

    for command in (search, embed, similarity):
        add_model(command, required=False)


def _search(args: argparse.Namespace) -> None:
    from fastbert.cli.demo import documentation_passages

    if args.top < 1:
        raise ValueError(f"--top is {args.top}; expected at least 1")
    no_files(args.question)
    if args.text:
        passages = [(args.text.name, line) for line in lines(args.text) if line.strip()]
    else:
        passages = documentation_passages()
    encoder = _encoder(args)
    vectors = _encode(args, encoder, [passage for _, passage in passages])
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

    texts = texts_of(args, blank=True)
    if args.output is None and args.text is None:
        raise ValueError("expected --output PATH.npy for texts of the command line")
    output = args.output or args.text.with_name(args.text.name + ".npy")
    if output.suffix not in (".npy", ""):
        raise ValueError(f"--output is {output}; expected a name that ends in .npy")
    encoder = _encoder(args)
    with replacing(output) as file:
        numpy.save(file, _encode(args, encoder, texts).cpu().numpy())
    print(f"{output}: {(len(texts), encoder.model.config.hidden_size)} float32")


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
    from fastbert.cli.demo import minilm
    from fastbert.inference import SentenceEncoder

    return SentenceEncoder.from_pretrained(args.model or minilm(), **model_options(args))


def _encode(args: argparse.Namespace, encoder, texts: list[str]):
    """Embeddings, with progress and a line about the time it took."""
    start = time.perf_counter()
    with progress("encoding", len(texts)) as advance:
        vectors = encoder.encode(texts, tokens_per_batch=args.batch_tokens, progress=advance)
    seconds = time.perf_counter() - start
    print(f"{len(texts)} texts in {seconds:.1f} s on {encoder.device}", file=sys.stderr)
    return vectors
