"""asyncio clients: each sends a request, reads the whole answer, and sends the next, over one connection."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from urllib.parse import urlsplit

import numpy as np

PATH = "/v1/embeddings"
TIMEOUT = 120.0


@dataclass
class Load:
    """The results of a load. seconds: of each request that was answered with 200; statuses: of all requests."""

    duration: float = 0.0
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, object]:
        p50, p95, p99 = (round(float(p) * 1e3, 2) for p in np.percentile(self.seconds or [np.nan], [50, 95, 99]))
        rate = round(len(self.seconds) / self.duration, 2)
        return {"requests_per_s": rate, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "statuses": dict(self.statuses)}


def body_of(text: str, model: str) -> bytes:
    return json.dumps({"model": model, "input": text}).encode()


def load(address: str, bodies: list[bytes], clients: int, duration: float) -> Load:
    """Sends requests from so many clients for so many seconds; each client begins at another place in the bodies."""
    return asyncio.run(_load(address, bodies, clients, duration))


async def _load(address: str, bodies: list[bytes], clients: int, duration: float) -> Load:
    result, start = Load(), time.perf_counter()
    ends = start + duration
    await asyncio.gather(*(_client(address, _from(bodies, i, clients), ends, result) for i in range(clients)))
    result.duration = time.perf_counter() - start
    return result


def _from(bodies: list[bytes], client: int, clients: int) -> Iterator[bytes]:
    first = client * len(bodies) // clients
    while True:
        yield from islice(bodies, first, None)
        first = 0


async def _client(address: str, bodies: Iterator[bytes], ends: float, result: Load) -> None:
    while time.perf_counter() < ends:
        try:
            await _connection(address, bodies, ends, result)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            result.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.1)


async def _connection(address: str, bodies: Iterator[bytes], ends: float, result: Load) -> None:
    """Sends requests until the time is over, or the service closes the connection."""
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        while time.perf_counter() < ends:
            start = time.perf_counter()
            status, headers, _ = await asyncio.wait_for(exchange(reader, writer, next(bodies)), TIMEOUT)
            result.statuses[str(status)] += 1
            if status == 200:
                result.seconds.append(time.perf_counter() - start)
            else:
                await asyncio.sleep(min(float(headers.get("retry-after", 0.1)), 1.0))
    finally:
        writer.close()


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Sends one POST; returns the status, headers and body of the answer."""
    kind = "Content-Type: application/json"
    lines = (f"POST {PATH} HTTP/1.1", "Host: localhost", kind, f"Content-Length: {len(body)}")
    writer.write("\r\n".join((*lines, "", "")).encode() + body)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
