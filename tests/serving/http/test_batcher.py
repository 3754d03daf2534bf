import asyncio

import pytest

from lsq.serving import SearchOptions
from lsq.serving.http.batcher import Batcher, Metrics, QueueFull
from lsq.serving.translator import RefusedLine

BEAM, OTHER = SearchOptions(beam=2), SearchOptions(beam=3)


async def filled(
    batcher: Batcher, *requests: tuple[list[str], SearchOptions]
) -> list[asyncio.Task]:
    """Requests that wait; nobody is at work yet."""
    tasks = []
    for lines, options in requests:
        waiting = batcher.waiting
        tasks.append(asyncio.create_task(batcher.translate(lines, [""] * len(lines), options)))
        while batcher.waiting == waiting:
            await asyncio.sleep(0.001)
    return tasks


def test_one_of_each_request_in_turn(echo):
    """A long request does not keep short ones waiting; 64 words are 21 sentences of 3."""

    async def run() -> list[list[str]]:
        batcher, order = Batcher(echo, 1000, Metrics()), []
        long, *short = await filled(
            batcher, (["w1 w1"] * 60, BEAM), (["w2 w2"], BEAM), (["w3 w3"] * 2, BEAM)
        )
        async with batcher.at_work():
            for name, task in (("short", short[0]), ("short", short[1]), ("long", long)):
                task.add_done_callback(lambda _, name=name: order.append(name))
            await asyncio.gather(long, *short)
        return order

    assert asyncio.run(run()) == ["short", "short", "long"]
    assert [count for count, _ in echo.batches] == [21, 21, 21]


def test_other_options_are_another_batch_and_get_their_turn(echo):
    async def run() -> None:
        batcher = Batcher(echo, 1000, Metrics())
        tasks = await filled(batcher, (["w1 w1"] * 60, BEAM), (["w2"], OTHER), (["w3"], BEAM))
        async with batcher.at_work():
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [options for _, options in echo.batches[:3]] == [BEAM, OTHER, BEAM]
    assert sum(count for count, _ in echo.batches) == 62


def test_what_is_cancelled_is_not_translated(echo):
    async def run() -> None:
        batcher = Batcher(echo, 1000, Metrics())
        first, second = await filled(batcher, (["w1"] * 3, BEAM), (["w2"], BEAM))
        first.cancel()
        await asyncio.sleep(0.01)
        assert batcher.waiting == 1
        async with batcher.at_work():
            assert [found[0].text for found in await second] == ["w2"]

    asyncio.run(run())
    assert echo.batches == [(1, BEAM)]


def test_what_cannot_be_taken_is_refused_at_once(echo):
    async def run() -> None:
        batcher = Batcher(echo, 3, Metrics())
        (waiting,) = await filled(batcher, (["w1"] * 2, BEAM))
        for lines, alone in ((["w2"] * 2, False), (["w2"] * 4, True)):
            with pytest.raises(QueueFull) as full:
                await batcher.translate(lines, [""] * len(lines), BEAM)
            assert full.value.alone is alone
        with pytest.raises(QueueFull):  # and nobody looks at the last line
            await batcher.translate(["w2"] * 4 + ["\0"], [""] * 5, BEAM)
        with pytest.raises(RefusedLine, match="line 2"):
            await batcher.translate(["w1", "\0"], ["", ""], BEAM)
        assert [found[0].text for found in await batcher.translate(["", " "], ["", ""], BEAM)] == [
            "",
            "",
        ]
        waiting.cancel()

    asyncio.run(run())
    assert echo.batches == []


def test_what_is_counted():
    metrics = Metrics()
    metrics.watch(lambda: 7)
    metrics.answered(200, 0.03)
    metrics.answered(503, 0.001)
    with metrics.batch(5):
        pass
    with pytest.raises(RuntimeError), metrics.batch(100):
        raise RuntimeError
    lines = metrics.text().decode().splitlines()
    for line in (
        'lsq_requests_total{status="200"} 1.0',
        'lsq_requests_total{status="503"} 1.0',
        'lsq_request_seconds_bucket{le="0.01"} 1.0',
        'lsq_request_seconds_bucket{le="0.05"} 2.0',
        "lsq_sentences_total 5.0",
        'lsq_batch_sentences_bucket{le="4.0"} 0.0',
        'lsq_batch_sentences_bucket{le="8.0"} 1.0',
        "lsq_waiting_sentences 7.0",
    ):
        assert line in lines
