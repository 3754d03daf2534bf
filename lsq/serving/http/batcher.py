"""Translation of waiting requests in batches, in one thread, and a service's counters."""

import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis
from lsq.serving.translator import Part, Source, TextTranslator, Translation

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of a service, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        seconds, counts = {"buckets": SECONDS, **own}, {"buckets": SENTENCES, **own}
        self.requests = Counter("lsq_requests", "requests, by HTTP status", ["status"], **own)
        self.request_seconds = Histogram("lsq_request_seconds", "header to answer", **seconds)
        self.sentences = Counter("lsq_sentences", "sentences translated", **own)
        self.batch_sentences = Histogram("lsq_batch_sentences", "sentences of a batch", **counts)
        self.batch_seconds = Histogram("lsq_batch_seconds", "to translate a batch", **seconds)
        self.waiting = Gauge("lsq_waiting_sentences", "sentences that wait", **own)


class Interrupted(Exception):
    """Nobody waits for this batch any more."""


class QueueFull(Exception):
    """Too many sentences wait; `alone`: this request has more than the queue takes."""

    def __init__(self, alone: bool):
        super().__init__("too many sentences wait")
        self.alone = alone


class Job:
    """A request: its parts, indices of those that wait, and hypotheses of finished parts."""

    def __init__(self, options: SearchOptions, parts: list[Part]):
        self.options, self.parts = options, parts
        self.done: asyncio.Future = asyncio.get_running_loop().create_future()
        self.waiting = deque(range(len(parts)))
        self.results: dict[int, list[Hypothesis]] = {}
        self.left = False  # whether nobody waits for it any more


Batch = list[tuple[Job, int]]
"""(job, number of a part); all jobs have the same SearchOptions."""


class Batcher:
    """Translates requests in batches; at most `queue` sentences of all requests may wait."""

    def __init__(self, translator: TextTranslator, queue: int, metrics: Metrics):
        self.translator, self.queue, self.metrics = translator, queue, metrics
        self._jobs: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "translator")
        self._ended = False

    @property
    def waiting(self) -> int:
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
        """Translate lines as `TextTranslator.translate` does; QueueFull if too many sentences wait.

        If it is cancelled, its waiting parts are dropped. The batch in progress is interrupted
        unless it has sentences of other requests.
        """
        sources = await asyncio.to_thread(self._sources, lines, prefixes)
        parts = [part for source in sources for part in source.parts]
        if self.waiting + len(parts) > self.queue:
            raise QueueFull(alone=False)
        results: list[list[Hypothesis]] = []
        if parts:
            job = Job(options, parts)
            self._jobs.append(job)
            self._arrived.set()
            try:
                results = await job.done
            finally:
                job.left = True
                if job in self._jobs:
                    self._jobs.remove(job)
        return self.translator.joined(sources, results, options)

    def _sources(self, lines: list[str], prefixes: list[str]) -> list[Source]:
        """Prepare all lines; QueueFull as soon as they have more parts than the queue takes."""
        sources, parts = [], 0
        for number, (line, prefix) in enumerate(zip(lines, prefixes, strict=True)):
            sources.append(self.translator.source(number, line, prefix))
            parts += len(sources[-1].parts)
            if parts > self.queue:
                raise QueueFull(alone=True)
        return sources

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            if batch := self._next():
                await self._translate(batch)
            else:
                self._arrived.clear()

    def _next(self) -> Batch:
        """Take parts of the first request and, in turn, of all requests with the same options."""
        if not self._jobs:
            return []
        options, batch, longest = self._jobs[0].options, [], 0
        limit = self.translator.limit(options)
        jobs = deque(job for job in self._jobs if job.options == options)
        while jobs:
            job = jobs.popleft()
            number = job.waiting[0]
            longest = max(longest, len(job.parts[number].words))
            if batch and not limit.holds(len(batch) + 1, longest):
                break
            batch.append((job, job.waiting.popleft()))
            if job.waiting:
                jobs.append(job)
            else:
                self._jobs.remove(job)
        self._jobs.rotate(-1)
        return batch

    async def _translate(self, batch: Batch) -> None:
        """Translate a batch; if that fails, translate each of its requests alone."""
        batch = [(job, number) for job, number in batch if not job.left]
        jobs = dict.fromkeys(job for job, _ in batch)
        if not batch:
            return

        def check() -> None:
            if self._ended or all(job.left for job in jobs):
                raise Interrupted

        parts, options = [job.parts[number] for job, number in batch], batch[0][0].options
        start = time.perf_counter()
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._thread, self.translator.search, parts, options, check
            )
        except Interrupted:
            return
        except Exception as error:
            for own in jobs:
                if len(jobs) > 1:
                    await self._translate([(job, number) for job, number in batch if job is own])
                    continue
                if own in self._jobs:
                    self._jobs.remove(own)
                if not own.done.done():
                    own.done.set_exception(error)
            return
        self.metrics.batch_seconds.observe(time.perf_counter() - start)
        self.metrics.batch_sentences.observe(len(parts))
        self.metrics.sentences.inc(len(parts))
        for (job, number), hypotheses in zip(batch, results, strict=True):
            job.results[number] = hypotheses
            if len(job.results) == len(job.parts) and not job.done.done():
                job.done.set_result([job.results[number] for number in range(len(job.parts))])
