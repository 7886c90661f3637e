"""The command `fastbert`: search, embed, check, info."""

import argparse
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F

import fastbert
from fastbert import backends

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0 on success, 1 for a check that fails, 2 with one line on stderr for what a user can mend."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except (OSError, ValueError, TypeError, RuntimeError, AssertionError, ModuleNotFoundError) as error:
        print(f"fastbert: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fastbert", description="BERT encoders without work on padding.")
    parser.add_argument("--version", action="version", version=f"fastbert {fastbert.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    search = commands.add_parser("search", help="find the passages that answer a question")
    search.add_argument("question", nargs="+", help="one or several, in quotes")
    search.add_argument("--text", type=Path, help="passages to search, one a line (default: Python's documentation)")
    search.add_argument("--top", type=int, default=3, help="passages to show for each question (default: 3)")
    search.set_defaults(run=_search)

    embed = commands.add_parser("embed", help="embed the lines of a text file")
    embed.add_argument("file", type=Path, help="one text a line")
    embed.add_argument("--output", type=Path, help="where the (lines, C) float32 array goes (default: FILE.npy)")
    embed.set_defaults(run=_embed)

    for command in (search, embed):
        command.add_argument("--model", type=Path, help="a BERT directory (default: all-MiniLM-L6-v2, if installed)")
        command.add_argument("--dtype", choices=DTYPES, default="float32")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    _add_check(commands)

    info = commands.add_parser("info", help="what a bug report needs: versions, backends, architectures, driver")
    info.set_defaults(run=_info)
    return parser


def _add_check(commands) -> None:
    from fastbert.check import BACKENDS

    check = commands.add_parser("check", help="compare your model on your text with float64 and with transformers")
    check.add_argument("--model", type=Path, help="a BERT directory (default: all-MiniLM-L6-v2, if installed)")
    check.add_argument("--text", type=Path, help="texts, one a line (default: Python's documentation)")
    check.add_argument("--json", type=Path, metavar="OUT", help="write the report there as well")
    check.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    check.add_argument("--dtypes", nargs="+", choices=[*DTYPES, "float64"], default=[*DTYPES, "float64"])
    check.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    check.add_argument("--max-length", type=int, default=64, help="tokens of a text (default: 64)")
    check.add_argument("--batch", type=int, default=4, help="texts to check on (default: 4)")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    """1 where the accuracy rule is broken, else 0."""
    from rich.console import Console

    from fastbert import check
    from fastbert.sentences import minilm

    if args.batch < 1:
        raise ValueError(f"--batch is {args.batch}; expected at least 1")
    texts = check.spread(_lines(args.text), args.batch) if args.text else check.default_texts(args.batch)
    with Console(stderr=True).status("reading") as status:
        report = check.run(
            args.model or minilm(),
            texts,
            device=args.device,
            dtypes=args.dtypes,
            names=args.backends,
            max_length=args.max_length,
            tell=status.update,
        )
    check.show(report)
    if args.json:
        report.write(args.json, versions=_versions(), machine=dict(_machine()))
    return 0 if report.ok else 1


def _search(args: argparse.Namespace) -> None:
    from fastbert.sentences import python_documentation

    if args.top < 1:
        raise ValueError(f"--top is {args.top}; expected at least 1")
    passages = (
        [(args.text.name, line) for line in _lines(args.text) if line.strip()] if args.text else python_documentation()
    )
    encoder = _encoder(args)
    vectors = _encode(encoder, [passage for _, passage in passages])
    show_results(encoder, vectors, passages, args.question, args.top)


def show_results(encoder, vectors, passages: list[tuple[str, str]], questions: list[str], top: int) -> None:
    """Prints the best passages for each question, by cosine similarity of `vectors` (N, C)."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console()
    scores = F.normalize(encoder.encode(questions), dim=-1) @ F.normalize(vectors, dim=-1).T
    for question, row in zip(questions, scores, strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        best = row.topk(min(top, len(passages)))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            source, passage = passages[index]
            console.print(Panel(Text(passage), title=f"{score:.3f}  {source}", title_align="left"))


def _embed(args: argparse.Namespace) -> None:
    import numpy

    texts = _lines(args.file)
    encoder = _encoder(args)
    output = args.output or args.file.with_name(args.file.name + ".npy")
    with output.open("wb") as file:  # before the work: a folder that is not there is better known now
        vectors = _encode(encoder, texts)
        numpy.save(file, vectors.cpu().numpy())
    print(f"{output}: {tuple(vectors.shape)} float32")


def _lines(path: Path) -> list[str]:
    """The lines of a file, blank ones too: the row of an array is the line of the text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text.removesuffix("\n").split("\n")


def _encoder(args: argparse.Namespace):
    from fastbert.sentences import SentenceEncoder, minilm

    return SentenceEncoder.from_pretrained(args.model or minilm(), dtype=DTYPES[args.dtype], device=args.device)


def _encode(encoder, texts: list[str]):
    """Embeddings with a progress bar, and a line that says how fast."""
    from rich.progress import Progress

    start = time.perf_counter()
    with Progress(transient=True) as bar:
        task = bar.add_task("encoding", total=len(texts))
        vectors = encoder.encode(texts, progress=lambda done: bar.advance(task, done))
    seconds = time.perf_counter() - start
    print(f"{len(texts)} texts in {seconds:.1f} s on {encoder.device}", file=sys.stderr)
    return vectors


def _info(args: argparse.Namespace) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    for name, value in [("versions", versions), *_machine()]:
        print(f"{name + ':':20}{value}")
    print()
    fastbert.explain()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "fastbert": fastbert.__version__}
    return versions | {
        name: _version(name) for name in ("torch", "triton", "transformers", "tokenizers", "safetensors")
    }


def _machine() -> list[tuple[str, str]]:
    processor = backends.cpuinfo("model name") or platform.processor()
    lines = [
        ("system", f"{platform.system()} {platform.machine()}, {processor}, {os.cpu_count()} cores"),
        ("torch", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"),
        ("GPU", _gpu()),
        ("driver", f"serves CUDA {backends.driver_version() / 1000:.1f}" if backends.driver_version() else "none"),
    ]
    lines += [(name, str(value)) for name, value in backends.build_info().items()]
    if backends.EXTENSION_PROBLEM:
        lines.append(("kernels", backends.EXTENSION_PROBLEM))
    return lines


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that PyTorch sees"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{', '.join(names)}, {capability}"


if __name__ == "__main__":
    sys.exit(main())
