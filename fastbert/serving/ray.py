"""The service on Ray Serve: replicas of the same application, each with its own models and token queue."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastbert.require import require
from fastbert.serving.app import create_app
from fastbert.serving.models import load
from fastbert.serving.service import Limits, Service

_SERVICES: list[Service] = []  # of this process, which is a replica


def _kept(service: Service) -> Service:
    _SERVICES.append(service)
    return service


class _Replica:
    def check_health(self) -> None:
        """Raises RuntimeError if inference hangs: Ray Serve, which asks every few seconds, then starts another one."""
        for service in _SERVICES:
            if reason := service.queue.stalled:
                raise RuntimeError(reason)


def create_deployment(
    models: Mapping[str, str | Path],
    limits: Limits = Limits(),  # noqa: B008
    api_keys: Iterable[str] = (),
    *,
    threads: int = 1,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Returns a deployment for `ray.serve.run`. A replica batches by tokens itself, without Ray Serve's batching. One
    whose inference hangs (as `/health` says) is replaced.

    models: directories by name, visible to all machines. options: those of `fastbert.serving.load`. threads: for each
    replica. deployment: options of `ray.serve.deployment`, such as {"num_replicas": 4, "ray_actor_options":
    {"num_cpus": 2}}; "max_ongoing_requests" is 1024 by default. Raises ModuleNotFoundError without Ray.
    """
    serve = require("ray.serve", "ray[serve]")
    sources, keys = {name: str(source) for name, source in models.items()}, tuple(api_keys)

    def build() -> Any:
        import torch

        torch.set_num_threads(threads)
        loaded = [load(source, name, **options) for name, source in sources.items()]
        return create_app(_kept(Service(loaded, limits)), keys)

    settings = {"name": "fastbert", "max_ongoing_requests": 1024} | dict(deployment or {})
    return serve.deployment(serve.ingress(build)(_Replica), **settings).bind()
