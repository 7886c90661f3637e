"""Models as a service: `fastbert serve`, or `create_app(Service([load(directory)]))` under any ASGI server.

Needs the extra `serve`: FastAPI, uvicorn, orjson, prometheus-client.
"""

from fastbert.require import require

for _module, _package in (("fastapi", "fastapi"), ("orjson", "orjson"), ("prometheus_client", "prometheus-client")):
    require(_module, _package)

from fastbert.serving.app import create_app  # noqa: E402
from fastbert.serving.models import ServedModel, load  # noqa: E402
from fastbert.serving.queue import TokenQueue  # noqa: E402
from fastbert.serving.service import Limits, Service  # noqa: E402

__all__ = ["Limits", "ServedModel", "Service", "TokenQueue", "create_app", "load"]
