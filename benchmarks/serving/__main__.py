"""`fastbert serve` beside infinity and a plain service, with the same model and threads, loaded in turn.

    python -m benchmarks.serving --infinity PATH/TO/infinity_emb [--seconds 10] [--rounds 3] [--output FILE]
    python -m benchmarks.serving --endurance 300 --clients 64 [--output FILE]

All services are up all the time; one is loaded at a time, in an order that changes from round to round. Texts are of
Python's documentation, cut so that they have 8 to 256 tokens, uniformly in the logarithm; one request has one text.
infinity wants an environment of its own, because it pins older libraries; it runs with its defaults, which for BERT are
BetterTransformer's nested tensors. --endurance loads fastbert alone with MOST clients, after those of --clients.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import numpy as np

from benchmarks import provenance
from benchmarks.options import duration, output, positive
from benchmarks.serving.client import PATH, body_of, load
from fastbert.cli.demo import minilm, python_documentation
from fastbert.data import get_tokenizer
from fastbert.inference import SentenceEncoder

SHORTEST, LONGEST, TEXTS = 8, 256, 512
OURS, MOST, EVERY = "fastbert", 256, 15.0  # MOST clients; seconds between readings of memory
PACKAGES = ("infinity_emb", "torch", "transformers", "optimum", "fastapi", "uvicorn")


@dataclass
class Running:
    process: subprocess.Popen
    address: str
    model: str
    log: IO[bytes]

    def megabytes(self) -> float:
        """Resident memory of the process and its children."""
        pids = [self.process.pid, *_children(self.process.pid)]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in map(int, found) for pid in (child, *_children(child))]


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The services' commands by name; PORT stands for the service's port."""
    directory, threads = str(minilm()), str(options.threads)
    found = {
        OURS: [sys.executable, "-m", "fastbert.cli", "serve", "--model", f"minilm={directory}", "--port", "PORT",
               "--threads", threads],
    }  # fmt: skip
    if options.endurance:
        return found
    found |= {f"{OURS} {more}": [*found[OURS], *more.split()] for more in options.also}
    found["plain"] = [sys.executable, "-m", "benchmarks.serving.plain", directory, "PORT", threads]
    if options.infinity:
        found["infinity"] = [
            options.infinity, "v2", "--model-id", directory, "--served-model-name", "minilm", "--url-prefix", "/v1",
            "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--port", "PORT", "--log-level", "warning",
        ]  # fmt: skip
    return found


@contextlib.contextmanager
def running(name: str, command: list[str], threads: int) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    words = [port if word == "PORT" else word for word in command]
    log = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would stop the service)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, env=environment)
    service = Running(process, f"http://127.0.0.1:{port}", "minilm", log)
    try:
        _wait(name, service)
        yield service
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(name: str, service: Running, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{service.address}/health").status_code == 200:
                return
        if service.process.poll() is not None or time.monotonic() > deadline:
            service.log.seek(0)
            raise SystemExit(f"{name} does not serve: {service.log.read().decode()[-2000:]}")
        time.sleep(0.2)


def texts_of_all_lengths(seed: int) -> list[str]:
    tokenizer, rng = get_tokenizer(minilm()), random.Random(seed)
    words = " ".join(text for _, text in python_documentation(4000)).split()
    found = []
    while len(found) < TEXTS:
        length = round(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        start = rng.randrange(len(words) - LONGEST)
        text = " ".join(words[start : start + length])
        ids = tokenizer.encode(text).ids[1 : length - 1]
        found.append(tokenizer.decode(ids))
    return found


def check(services: dict[str, Running], texts: list[str]) -> dict[str, float]:
    """The largest difference between a service's and SentenceEncoder's embeddings of 16 texts; all are unit vectors.
    Ends the program for one that rounding, or the precision that the service was asked for, does not explain."""
    expected, found = SentenceEncoder.from_pretrained(minilm()).encode(texts[:16]).numpy(), {}
    for name, service in services.items():
        body = {"model": service.model, "input": texts[:16]}
        data = httpx.post(service.address + PATH, json=body, timeout=60).raise_for_status().json()["data"]
        found[name] = float(np.abs(np.array([one["embedding"] for one in data]) - expected).max())
        if found[name] > (0.05 if re.search("bf16|int8|bfloat16|float16", name) else 1e-5):
            raise SystemExit(f"{name} gives other embeddings: they differ by {found[name]:.1e}")
    return found


def measure(services: dict[str, Running], bodies: list[bytes], clients: int, options: argparse.Namespace) -> list[dict]:
    """A row for each service: the medians over the rounds of its results with so many clients."""
    rounds: dict[str, list[dict]] = {name: [] for name in services}
    for number in range(options.rounds):
        names = list(services)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = sum(os.times()[:2])
            facts = load(services[name].address, bodies, clients, options.seconds).facts()
            own = (sum(os.times()[:2]) - before) / (options.seconds * os.cpu_count())
            rounds[name].append(facts | {"generator": round(own, 3), "rss_mb": round(services[name].megabytes())})
            print(f"{clients:4d} clients  {name:10s} {json.dumps(rounds[name][-1])}", flush=True)
    return [{"service": name, "clients": clients, **middle(found)} for name, found in rounds.items()]


def endure(service: Running, bodies: list[bytes], seconds: float) -> dict[str, object]:
    """fastbert's results, and its memory at intervals: a service grows most in its first requests."""
    memory, ended = [], threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY):
            memory.append(round(service.megabytes(), 1))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        facts = load(service.address, bodies, MOST, seconds).facts()
    finally:
        ended.set()
        watching.join()
    print(f"{MOST:4d} clients  {OURS:10s} {seconds:g} s {json.dumps(facts)}, MB {memory}", flush=True)
    return {"service": OURS, "clients": MOST, "seconds": seconds, **facts, "rss_mb": memory}


def middle(rounds: list[dict]) -> dict[str, object]:
    """The median of each number, the requests a second of every round, and the statuses of all rounds together."""
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0] if name != "statuses"}
    statuses: dict[str, int] = {}
    for one in rounds:
        for status, count in one["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    return {**found, "rounds": [one["requests_per_s"] for one in rounds], "statuses": statuses}


def _versions(program: str) -> dict[str, str]:
    """The versions of PACKAGES in a program's own environment."""
    found = shutil.which(program)
    if found is None:
        raise SystemExit(f"there is no program {program}")
    look = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PACKAGES}}}))"
    return json.loads(subprocess.check_output([Path(found).with_name("python"), "-c", look]))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infinity", metavar="PROGRAM", help="infinity_emb, in an environment of its own")
    also = "options of `fastbert serve`, which runs once more with them, as --also='--precision int8'; may be repeated"
    parser.add_argument("--also", metavar="OPTIONS", action="append", default=[], help=also)
    parser.add_argument("--clients", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=duration, default=10.0, help="of a round (default: 10)")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: 3)")
    parser.add_argument("--endurance", type=duration, metavar="SECONDS", help="fastbert alone, so long")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of each service (default: all)")
    parser.add_argument("--output", type=output, metavar="FILE", help="JSON lines")
    options = parser.parse_args(words)
    if options.endurance and (options.infinity or options.also):
        parser.error("--endurance is of fastbert alone; expected it without --infinity and --also")
    head, texts, rows = provenance.head(), texts_of_all_lengths(0), []
    if options.infinity:
        head["infinity"] = _versions(options.infinity)
    mixed = [body_of(text, "minilm") for text in texts]
    with contextlib.ExitStack() as stack:
        services = {
            name: stack.enter_context(running(name, command, options.threads))
            for name, command in commands(options).items()
        }
        differences = check(services, texts)
        for service in services.values():
            load(service.address, mixed, 8, 3.0)
        for clients in options.clients:
            rows += measure(services, mixed, clients, options)
        if options.endurance:
            rows.append(endure(services[OURS], mixed, options.endurance))
    head |= {"threads": options.threads, "seconds": options.seconds, "differences": differences}
    if options.output:
        options.output.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))


if __name__ == "__main__":
    main()
