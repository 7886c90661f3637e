"""A service on a real socket. Tests that import this are skipped if the packages of a service are missing."""

import contextlib
import socket
import threading

import pytest
from serving.served import wait_for

httpx, uvicorn, fastapi = (pytest.importorskip(needed) for needed in ("httpx", "uvicorn", "fastapi"))
for needed in ("orjson", "prometheus_client"):
    pytest.importorskip(needed)

NAMES = "sentences", "reranker", "classes", "tags", "masks"  # the models that save_models saves


@contextlib.contextmanager
def listening(app):
    """Serves an application; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
