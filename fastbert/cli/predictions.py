"""The commands fill-mask, classify, tag, answer and rerank: `fastbert.inference`, with results as text or JSON."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastbert.cli.common import add_json, add_model, add_texts, model_options, no_files, read, texts_of, write_json
from fastbert.cli.progress import progress


def add(commands) -> None:
    fill = commands.add_parser("fill-mask", help="fill the masks of texts")
    add_texts(fill, 'with [MASK] (or <mask>, as the tokenizer has it), in quotes: "Paris is the [MASK] of France."')
    fill.add_argument("--top", type=int, default=5, help="tokens to show for each mask (default: 5)")
    fill.set_defaults(run=_fill_mask)

    classify = commands.add_parser("classify", help="label texts")
    add_texts(classify, "one or several, in quotes")
    classify.add_argument("--top", type=int, help="labels to show for each text (default: all)")
    classify.set_defaults(run=_classify)

    tag = commands.add_parser("tag", help="find the entities of texts")
    add_texts(tag, "one or several, in quotes")
    tag.set_defaults(run=_tag)

    answer = commands.add_parser("answer", help="find the answer to a question in a text")
    answer.add_argument("question", help="in quotes")
    answer.add_argument("--context", type=Path, required=True, metavar="FILE", help="the text, of any length")
    answer.add_argument("--top", type=int, default=1, help="answers to show (default: 1)")
    answer.add_argument("--max-answer-length", type=int, default=30, help="tokens of an answer (default: 30)")
    answer.set_defaults(run=_answer)

    rerank = commands.add_parser("rerank", help="sort documents by how well they answer a query")
    rerank.add_argument("query", help="in quotes")
    add_texts(rerank, "documents, one or several, in quotes")
    rerank.add_argument("--top", type=int, help="documents to show (default: all)")
    rerank.set_defaults(run=_rerank)

    for command in (fill, classify, tag, answer, rerank):
        add_model(command, required=True)
        add_json(command)


def _model(kind: type, args: argparse.Namespace):
    return kind.from_pretrained(args.model, tokens_per_batch=args.batch_tokens, **model_options(args))


def _each(kind: type, args: argparse.Namespace, **options: Any) -> tuple[list[str], list[list]]:
    """The texts, and a list of results for each: empty for a blank line of a file, so that they can be joined."""
    texts = texts_of(args, blank=True)
    asked = [text for text in texts if args.texts or text.strip()]
    found = iter(_model(kind, args)(asked, **options))
    return texts, [next(found) if args.texts or text.strip() else [] for text in texts]


def _fill_mask(args: argparse.Namespace) -> None:
    from fastbert.inference import MaskFiller

    texts, results = _each(MaskFiller, args, top_k=args.top)
    if args.json:
        masks = [[[asdict(fill) for fill in fills] for fills in masks] for masks in results]
        write_json([{"text": text, "masks": found} for text, found in zip(texts, masks, strict=True)])
        return
    for text, masks in zip(texts, results, strict=True):
        print(text)
        for fills in masks:
            for fill in fills:
                print(f"  {fill.score:.4f}  {fill.token:16} {fill.text}")
            print()


def _classify(args: argparse.Namespace) -> None:
    from fastbert.inference import TextClassifier

    texts, results = _each(TextClassifier, args, top_k=args.top)
    _show(args, "labels", texts, results, lambda label: label.label)


def _tag(args: argparse.Namespace) -> None:
    from fastbert.inference import EntityTagger

    texts, results = _each(EntityTagger, args)
    _show(args, "entities", texts, results, lambda one: f"{one.start:5}-{one.end:<5} {one.label:8} {one.text}")


def _show(
    args: argparse.Namespace, name: str, texts: list[str], results: list[list], line: Callable[[Any], str]
) -> None:
    """Shows a list of results for each text: as JSON, or as lines with scores."""
    if args.json:
        write_json([{"text": t, name: [asdict(one) for one in found]} for t, found in zip(texts, results, strict=True)])
        return
    for text, found in zip(texts, results, strict=True):
        print(text)
        for one in found:
            print(f"  {one.score:.4f}  {line(one)}")


def _answer(args: argparse.Namespace) -> None:
    from fastbert.inference import QuestionAnswerer

    no_files([args.question], "--context")
    context = read(args.context)
    answerer = _model(QuestionAnswerer, args)
    (found,) = answerer([args.question], [context], top_k=args.top, max_answer_length=args.max_answer_length)
    if args.json:
        answers = [asdict(answer) for answer in found.best]
        write_json({"question": args.question, "answers": answers, "no_answer": found.no_answer})
        return
    for answer in found.best:
        print(f"{answer.score:.4f}  {answer.text}")
    print(f"{found.no_answer:.4f}  (no answer)")


def _rerank(args: argparse.Namespace) -> None:
    from fastbert.inference import CrossEncoder

    no_files([args.query])
    texts = texts_of(args)
    encoder = _model(CrossEncoder, args)
    with progress("scoring", len(texts)) as advance:
        found = encoder.rank(args.query, texts, args.top, return_documents=True, progress=advance)
    if args.json:
        write_json({"query": args.query, "documents": found})
        return
    for one in found:
        print(f"{one['score']:.4f}  {one['text']}")
