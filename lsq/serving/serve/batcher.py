"""Translates the requests that wait at the same time together, in one thread, in turns."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lsq.serving.decode import Hypothesis, SearchOptions
from lsq.serving.serve.metrics import Metrics
from lsq.serving.translate import Translation, Translator
from lsq.serving.translate.translator import Part, Source

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """Nobody waits for this batch any more."""


class QueueFull(Exception):
    """Too many sentences wait; `alone`: this request has more than the queue takes."""

    def __init__(self, alone: bool):
        super().__init__("too many sentences wait")
        self.alone = alone


@dataclass(kw_only=True, eq=False)
class Job:
    """A request at work."""

    options: SearchOptions
    parts: list[Part]
    done: asyncio.Future
    """Of the hypotheses of all parts, or what went wrong."""
    waiting: deque[int] = field(init=False)
    """Numbers of the parts that nobody translates yet."""
    found: dict[int, list[Hypothesis]] = field(default_factory=dict)
    left: bool = False
    """Whether nobody waits for it any more."""

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.parts)))


Batch = list[tuple[Job, int]]
"""Parts of jobs by their numbers; all of one SearchOptions."""


class Batcher:
    """Translates requests in batches.

    Args:
        translator: what translates.
        queue: sentences that may wait, of all requests.
        metrics: what is told of batches.
    """

    def __init__(self, translator: Translator, queue: int, metrics: Metrics):
        self.translator, self.queue, self.metrics = translator, queue, metrics
        self._jobs: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "translator")
        self._ended = False

    @property
    def waiting(self) -> int:
        """Sentences that nobody translates yet."""
        return sum(len(job.waiting) for job in self._jobs)

    @contextlib.asynccontextmanager
    async def at_work(self):
        """Within this context requests are translated; a batch that is at work at its end is
        interrupted."""
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
        """The translations of each line; see `Translator.translate`.

        When cancelled, what waits of it is forgotten, and the batch at work is interrupted unless
        it has sentences of others.

        Raises:
            RefusedLine: see `Translator.translate`.
            QueueFull: too many sentences wait.
            ValueError: the options allow no translation.
        """
        sources = await asyncio.to_thread(self._sources, lines, prefixes)
        parts = [part for source in sources for part in source.parts]
        if self.waiting + len(parts) > self.queue:
            raise QueueFull(alone=False)
        found: list[list[Hypothesis]] = []
        if parts:
            job = Job(options=options, parts=parts, done=asyncio.get_running_loop().create_future())
            self._jobs.append(job)
            self._arrived.set()
            try:
                found = await job.done
            finally:
                job.left = True
                self._forget(job)
        return self.translator.joined(sources, found, options)

    def _sources(self, lines: list[str], prefixes: list[str]) -> list[Source]:
        """All lines as they are translated; no more are looked at once they have more parts than
        the queue takes."""
        found, parts = [], 0
        for number, (line, prefix) in enumerate(zip(lines, prefixes, strict=True)):
            found.append(self.translator.source(number, line, prefix))
            parts += len(found[-1].parts)
            if parts > self.queue:
                raise QueueFull(alone=True)
        return found

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
        """Parts of the request whose turn it is, and of those with the same options: one of each in
        turn."""
        if not self._jobs:
            return []
        first, batch, longest = self._jobs[0], [], 0
        limit = self.translator.limit(first.options)
        for job, number in self._in_turn(
            [job for job in self._jobs if job.options == first.options]
        ):
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
        """Translate a batch; where it fails, each request of it alone, so that one does not fail
        for another."""
        batch = [(job, number) for job, number in batch if not job.left]
        if not batch:
            return
        jobs = {id(job): job for job, _ in batch}.values()
        try:
            found = await self._search(batch, jobs)
        except Interrupted:
            return
        except Exception as error:
            if len(jobs) > 1:
                for one in jobs:
                    await self._translate([(job, number) for job, number in batch if job is one])
                return
            for job in jobs:
                self._forget(job)
                if not job.done.done():
                    job.done.set_exception(error)
            return
        for (job, number), hypotheses in zip(batch, found, strict=True):
            job.found[number] = hypotheses
            if len(job.found) == len(job.parts) and not job.done.done():
                job.done.set_result([job.found[number] for number in range(len(job.parts))])

    async def _search(self, batch: Batch, jobs: Collection[Job]) -> list[list[Hypothesis]]:
        parts, options = [job.parts[number] for job, number in batch], batch[0][0].options

        def look() -> None:
            if self._ended or all(job.left for job in jobs):
                raise Interrupted

        with self.metrics.batch(len(parts)):
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self.translator.search, parts, options, look
            )
