"""`fastbert serve` as a process: what it prints, logs and refuses, and how it ends."""

import gzip
import http.client
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving.over_http import httpx
from serving.served import TEXTS

from fastbert import cli
from fastbert.cli.serve import JsonLines
from fastbert.serving.app import Facts


def started(*arguments):
    """Starts `fastbert serve`; returns the process, its first line and its address, once it listens."""
    command = [sys.executable, "-m", "fastbert.cli", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    threading.Timer(120, process.kill).start()
    first = process.stdout.readline()
    assert (found := re.match(r"(http://127\.0\.0\.1:\d+) serves ", first)), process.communicate()
    return process, first, found[1]


def test_it_serves_until_it_is_told_to_end(directory, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-key\n\nsecond-key\n")
    models = ["--model", f"one={directory / 'sentences'}", "--model", directory / "tags"]
    process, first, address = started(*models, "--api-key-file", keys, "--threads", "1", "--max-inputs", "3")
    assert first.strip().endswith("one (embeddings), tags (token classification)")
    with httpx.Client(base_url=address, headers={"authorization": "Bearer second-key"}, timeout=20) as client:
        assert len(client.post("/embed", json={"inputs": TEXTS[:3]}).json()) == 3
        assert client.post("/embed", json={"inputs": TEXTS}).status_code == 413
        assert client.post("/embed", headers={"authorization": "Bearer third-key"}, json={}).status_code == 401
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    requests = [json.loads(line)["request"] for line in log.splitlines()]
    assert all(list(json.loads(line)) == ["time", "level", "request"] for line in log.splitlines())
    assert [(one["path"], one["status"]) for one in requests] == [("/embed", s) for s in (200, 413, 401)]
    assert "-key" not in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_as_soon_as_it_has_begun(directory, number):
    process, _, _ = started("--model", directory / "sentences")
    process.send_signal(number)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0 and not log


def test_lines_of_the_log_are_json():
    def line(name, message, level=logging.WARNING, error=None):
        logger = logging.getLogger(name)
        exception = error and (type(error), error, None)
        record = logger.makeRecord(name, level, "f", 1, message, (), exception)
        return json.loads(JsonLines().format(record))

    found = line("uvicorn.error", 'Invalid "HTTP" request received.')
    assert found == {"time": found["time"], "level": "WARNING", "message": 'Invalid "HTTP" request received.'}
    found = line("fastbert.serving", Facts(path="/"), logging.ERROR, ValueError("two\nlines"))
    assert found["request"] == {"path": "/"} and found["exception"] == "ValueError: two\nlines"


@pytest.mark.slow
def test_idle_connections_stay_open_longer_than_clients_keep_them(directory):
    """httpx drops idle connections after five seconds. If the server did too, a request could meet a closed one."""
    process, _, address = started("--model", directory / "tags")
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    for pause in (6, 0):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b""
        time.sleep(pause)
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.slow
def test_spans_go_where_the_environment_says(directory, monkeypatch):
    pytest.importorskip("fastapi.telemetry")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            found.append((self.path, gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
        process, _, address = started("--model", directory / "sentences")
        assert httpx.post(f"{address}/embed", json={"inputs": "a secret"}, timeout=20).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        collector.shutdown()
    assert process.returncode == 0, log
    spans = b"".join(data for path, data in found if path == "/v1/traces")
    assert b"/embed" in spans and b"/health" not in spans and b"secret" not in spans


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--model", "{directory}/nobody"], "nobody"),
        (["--model", "{directory}"], "config.json"),
        (["--model", "{directory}/tags", "--model", "tags={directory}/masks"], "each with a name of its own"),
        (["--model", "{directory}/tags", "--api-key-file", "{directory}/empty"], "empty holds no text"),
        (["--model", "{directory}/tags", "--api-key-file", "{directory}/missing"], "missing"),
        (["--model", "{directory}/tags", "--port", "{taken}"], "cannot listen on 127.0.0.1, port {taken}: "),
        (["--model", "{directory}/tags", "--port", "99999"], "cannot listen on 127.0.0.1, port 99999: "),
        (["--model", "{directory}/tags", "--timeout", "0"], "timeout is 0.0; expected a number above 0"),
        (["--model", "{directory}/tags", "--timeout", "inf"], "timeout is inf; expected a number above 0, and below"),
        (["--model", "{directory}/tags", "--workers", "0"], "workers is 0; expected a number above 0"),
        (["--model", "{directory}/tags", "--max-inputs", "-1"], "inputs is -1; expected a number above 0"),
    ],
)
def test_what_it_refuses_in_one_line(directory, capsys, arguments, says):
    (directory / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"directory": directory, "taken": taken.getsockname()[1]}
        assert cli.main(["serve", *(one.format(**names) for one in arguments)]) == 2
        assert says.format(**names) in capsys.readouterr().err.splitlines()[-1]
