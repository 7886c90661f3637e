"""The command serve: models over HTTP."""

import argparse
import json
import logging
import math
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import Any

import torch

from fastbert.cli.common import add_runtime, lines, model_options
from fastbert.require import require

KEEP_ALIVE = 75  # seconds; clients and load balancers keep idle connections for less, so that they close them first


def add(commands) -> None:
    serve = commands.add_parser("serve", help="serve models over HTTP: embeddings, classes, reranking, masks, entities")
    option = serve.add_argument
    several = "a directory, or a name on the hub; may be given more than once"
    option("--model", action="append", required=True, metavar="[NAME=]DIR", help=several)
    option("--host", default="127.0.0.1", help="0.0.0.0 for all networks (default: this machine alone)")
    option("--port", type=int, default=8080, help="(default: 8080)")
    option("--api-key-file", type=Path, metavar="FILE", help="keys that clients send as Bearer tokens, one a line")
    many = "texts or pairs in a request (default: 32; OpenAI's route 2048, Cohere's 1000)"
    option("--max-inputs", type=int, metavar="N", help=many)
    option("--max-body", type=int, default=2_000_000, metavar="BYTES", help="of a request (default: 2000000)")
    option("--max-requests", type=int, default=512, metavar="N", help="at once; others are refused, 429 (default: 512)")
    cut = "cut texts at the model's length unless a request says otherwise (default: they are refused, 413)"
    option("--auto-truncate", action="store_true", help=cut)
    waiting = "that may wait; beyond them requests are refused, 429 (default: 1048576)"
    option("--waiting-tokens", type=int, default=1 << 20, metavar="N", help=waiting)
    option(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="of a request, waiting included (default: 60)"
    )
    batches = "batches computed at once, with --threads shared between them; on processors (default: 1)"
    option("--workers", type=int, default=1, metavar="N", help=batches)
    add_runtime(serve, None, "4096, on a GPU 16384")
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> None:
    uvicorn = require("uvicorn", "'uvicorn[standard]'")
    from fastbert.serving import Limits, Service, create_app

    keys, models = _keys(args.api_key_file), [_model(args, given) for given in args.model]
    limits = Limits(
        args.max_inputs, args.max_body, args.batch_tokens, args.waiting_tokens, args.timeout, workers=args.workers,
        requests=args.max_requests,
    )  # fmt: skip
    torch.set_num_threads(max(1, torch.get_num_threads() // limits.workers))
    listening = _listening(args.host, args.port)
    app = create_app(Service(models, limits, auto_truncate=args.auto_truncate), keys)
    warnings.filterwarnings("ignore", message=".*: cut there")  # clients ask for truncation
    _log_lines()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(args.timeout) + 1,
            timeout_keep_alive=KEEP_ALIVE,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # for the time before uvicorn sets its handlers, and after
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    host = f"[{args.host}]" if ":" in args.host else args.host
    what = ", ".join(f"{model.name} ({model.task})" for model in models)
    print(f"http://{host}:{listening.getsockname()[1]} serves {what}", flush=True)
    server.run(sockets=[listening])


def _log_lines() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class JsonLines(logging.Formatter):
    """{"time", "level", "request": {...}} for the service's own records, {"time", "level", "message"} for others."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname}
        facts = isinstance(record.msg, dict)
        line |= {"request": record.msg} if facts else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _model(args: argparse.Namespace, given: str) -> Any:
    """Loads the model of NAME=DIR, or of only a directory or a name on the hub."""
    from fastbert.serving import load

    name, equals, source = given.partition("=")
    if not equals or os.path.exists(given):
        name, source = "", given
    options = model_options(argparse.Namespace(**vars(args) | {"model": source}))
    return load(source, name or None, **options)


def _keys(path: Path | None) -> list[str]:
    """The API keys in a file. Raises ValueError for a file without text, which would let everybody in."""
    return [line.strip() for line in lines(path) if line.strip()] if path else []


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}") from None
