"""Translation of requests that wait at the same time together, in one thread, in turns; and what a
service counts."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis
from lsq.serving.translator import Part, Source, TextTranslator, Translation

logger = logging.getLogger(__name__)

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one service, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self._requests = Counter(
            "lsq_requests", "requests for translations, by HTTP status", ["status"], **own
        )
        self._request_seconds = Histogram(
            "lsq_request_seconds", "from a request's header to its answer", buckets=SECONDS, **own
        )
        self._sentences = Counter("lsq_sentences", "sentences translated", **own)
        self._batch_sentences = Histogram(
            "lsq_batch_sentences", "sentences of a batch", buckets=SENTENCES, **own
        )
        self._batch_seconds = Histogram(
            "lsq_batch_seconds", "to translate a batch", buckets=SECONDS, **own
        )
        self._waiting = Gauge("lsq_waiting_sentences", "sentences that wait", **own)

    def watch(self, waiting: Callable[[], int]) -> None:
        """Call `waiting` for the number of sentences that wait whenever metrics are shown."""
        self._waiting.set_function(waiting)

    @contextlib.contextmanager
    def batch(self, sentences: int) -> Iterator[None]:
        """Count the batch that is translated within this context, if that succeeds."""
        start = time.perf_counter()
        yield
        self._batch_seconds.observe(time.perf_counter() - start)
        self._batch_sentences.observe(sentences)
        self._sentences.inc(sentences)

    def answered(self, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests.labels(str(status)).inc()
        self._request_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Interrupted(Exception):
    """Nobody waits for this batch any more."""


class QueueFull(Exception):
    """Too many sentences wait; `alone`: this request has more than the queue takes."""

    def __init__(self, alone: bool):
        super().__init__("too many sentences wait")
        self.alone = alone


@dataclass(kw_only=True, eq=False)
class Job:
    """A request that is being translated."""

    options: SearchOptions
    parts: list[Part]
    done: asyncio.Future
    """Of the hypotheses of all parts, or an exception."""
    waiting: deque[int] = field(init=False)
    """Numbers of the parts whose translation has not begun."""
    results: dict[int, list[Hypothesis]] = field(default_factory=dict)
    left: bool = False
    """Whether nobody waits for it any more."""

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.parts)))


Batch = list[tuple[Job, int]]
"""Parts of jobs by their numbers; all of one SearchOptions."""


class Batcher:
    """Translates requests in batches.

    Args:
        translator: translates the batches.
        queue: sentences that may wait, of all requests.
        metrics: counts batches.
    """

    def __init__(self, translator: TextTranslator, queue: int, metrics: Metrics):
        self.translator, self.queue, self.metrics = translator, queue, metrics
        self._jobs: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "translator")
        self._ended = False

    @property
    def waiting(self) -> int:
        """Number of sentences whose translation has not begun."""
        return sum(len(job.waiting) for job in self._jobs)

    @contextlib.asynccontextmanager
    async def at_work(self):
        """Translate requests within this context; its end interrupts the batch in progress."""
        worker = asyncio.create_task(self._work())
        try:
            yield
        finally:
            self._ended = True
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker
            self._thread.shutdown()

    async def translate(
        self, lines: list[str], prefixes: list[str], options: SearchOptions
    ) -> list[list[Translation]]:
        """Translate lines; see `TextTranslator.translate`.

        If it is cancelled, its waiting parts are dropped, and the batch in progress is interrupted
        unless it has sentences of others.

        Raises:
            RefusedLine: see `TextTranslator.translate`.
            QueueFull: too many sentences wait.
            ValueError: the options allow no translation.
        """
        sources = await asyncio.to_thread(self._sources, lines, prefixes)
        parts = [part for source in sources for part in source.parts]
        if self.waiting + len(parts) > self.queue:
            raise QueueFull(alone=False)
        results: list[list[Hypothesis]] = []
        if parts:
            job = Job(options=options, parts=parts, done=asyncio.get_running_loop().create_future())
            self._jobs.append(job)
            self._arrived.set()
            try:
                results = await job.done
            finally:
                job.left = True
                self._forget(job)
        return self.translator.joined(sources, results, options)

    def _sources(self, lines: list[str], prefixes: list[str]) -> list[Source]:
        """Prepare all lines, but no more once they have more parts than the queue takes."""
        sources, parts = [], 0
        for number, (line, prefix) in enumerate(zip(lines, prefixes, strict=True)):
            sources.append(self.translator.source(number, line, prefix))
            parts += len(sources[-1].parts)
            if parts > self.queue:
                raise QueueFull(alone=True)
        return sources

    def _forget(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            batch = self._next()
            if not batch:
                self._arrived.clear()
                continue
            await self._translate(batch)

    def _next(self) -> Batch:
        """Take parts of the request whose turn it is, and of those with the same options: one of
        each in turn."""
        if not self._jobs:
            return []
        options, batch, longest = self._jobs[0].options, [], 0
        limit = self.translator.limit(options)
        for job, number in self._in_turn([job for job in self._jobs if job.options == options]):
            longest = max(longest, len(job.parts[number].words))
            if batch and not limit.holds(len(batch) + 1, longest):
                break
            job.waiting.popleft()
            batch.append((job, number))
        for job in {id(job): job for job, _ in batch}.values():
            if not job.waiting:
                self._forget(job)
        self._jobs.rotate(-1)
        return batch

    @staticmethod
    def _in_turn(jobs: list[Job]) -> Iterator[tuple[Job, int]]:
        while jobs:
            jobs = [job for job in jobs if job.waiting]
            for job in jobs:
                yield job, job.waiting[0]

    async def _translate(self, batch: Batch) -> None:
        """Translate a batch. If it fails, translate each of its requests alone, so that none fails
        for another."""
        batch = [(job, number) for job, number in batch if not job.left]
        if not batch:
            return
        jobs = {id(job): job for job, _ in batch}.values()
        try:
            results = await self._search(batch, jobs)
        except Interrupted:
            return
        except Exception as error:
            if len(jobs) > 1:
                for own in jobs:
                    await self._translate([(job, number) for job, number in batch if job is own])
                return
            for job in jobs:
                self._forget(job)
                if not job.done.done():
                    job.done.set_exception(error)
            return
        for (job, number), hypotheses in zip(batch, results, strict=True):
            job.results[number] = hypotheses
            if len(job.results) == len(job.parts) and not job.done.done():
                job.done.set_result([job.results[number] for number in range(len(job.parts))])

    async def _search(self, batch: Batch, jobs: Collection[Job]) -> list[list[Hypothesis]]:
        parts, options = [job.parts[number] for job, number in batch], batch[0][0].options

        def check() -> None:
            if self._ended or all(job.left for job in jobs):
                raise Interrupted

        with self.metrics.batch(len(parts)):
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self.translator.search, parts, options, check
            )
