"""What a service counts, as Prometheus reads it."""

import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lsq_requests",
            "requests for translations, by HTTP status",
            ["status"],
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "lsq_request_seconds",
            "from a request's header to its answer",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._sentences = Counter("lsq_sentences", "sentences translated", registry=self.registry)
        self._batch_sentences = Histogram(
            "lsq_batch_sentences", "sentences of a batch", buckets=SENTENCES, registry=self.registry
        )
        self._batch_seconds = Histogram(
            "lsq_batch_seconds", "to translate a batch", buckets=SECONDS, registry=self.registry
        )
        self._waiting = Gauge(
            "lsq_waiting_sentences", "sentences that wait", registry=self.registry
        )

    def watch(self, waiting: Callable[[], int]) -> None:
        """Ask `waiting` how many sentences wait whenever somebody wants to know."""
        self._waiting.set_function(waiting)

    @contextlib.contextmanager
    def batch(self, sentences: int) -> Iterator[None]:
        """Within this context a batch is translated; it counts if that succeeds."""
        start = time.perf_counter()
        yield
        self._batch_seconds.observe(time.perf_counter() - start)
        self._batch_sentences.observe(sentences)
        self._sentences.inc(sentences)

    def answered(self, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(str(status)).inc()
        self._request_seconds.observe(seconds)

    def text(self) -> bytes:
        """All of it, in the text format."""
        return generate_latest(self.registry)
