"""Prometheus metrics with the names and meanings of text-embeddings-inference's, so that its dashboards work."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from fastbert.serving.queue import Batch, Done

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = tuple(2**n for n in range(16))


class Metrics:
    """The service's metrics. Counts are gauges that only grow, because a counter's name would get a suffix."""

    def __init__(self, waiting: Callable[[], tuple[int, int]]) -> None:
        """waiting: returns the numbers of requests and tokens in the queue."""
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"te_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"te_{name}", what, registry=registry, buckets=buckets)

        self.requests = gauge("request_count", "requests", "method")
        self.successes = gauge("request_success", "requests that were answered", "method")
        self.failures = gauge("request_failure", "requests that were not", "err")
        self.duration = histogram("request_duration", "seconds of a request, all of it", SECONDS)
        self.length = histogram("request_input_length", "tokens of a text", SIZES)
        self.tokenization = histogram("request_tokenization_duration", "seconds", SECONDS)
        self.queued = histogram("request_queue_duration", "seconds a request waited", SECONDS)
        self.inference = histogram("request_inference_duration", "seconds a request was computed", SECONDS)
        self.batch_size = histogram("batch_next_size", "texts in a batch", SIZES)
        self.batch_tokens = histogram("batch_next_tokens", "tokens in a batch", SIZES)
        gauge("queue_size", "requests that wait").set_function(lambda: waiting()[0])
        gauge("queue_tokens", "tokens that wait").set_function(lambda: waiting()[1])

    def computed(self, batch: Batch, seconds: float) -> None:
        self.batch_size.observe(len(batch.rows))
        self.batch_tokens.observe(batch.tokens)

    def done(self, lengths: Sequence[int], tokenizing: float, done: Done) -> None:
        for length in lengths:
            self.length.observe(length)
        self.tokenization.observe(tokenizing)
        self.queued.observe(done.waited)
        self.inference.observe(done.computed)

    def text(self) -> bytes:
        return generate_latest(self.registry)
