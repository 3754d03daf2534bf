import asyncio
from collections.abc import Callable

import pytest

from lsq.serving import SearchOptions
from lsq.serving.http.batcher import Batcher, Metrics, QueueFull
from lsq.serving.translator import RefusedLine

BEAM, OTHER = SearchOptions(beam=2), SearchOptions(beam=3)


def with_waiting(echo, requests: list[tuple[list[str], SearchOptions]], act: Callable, queue=1000):
    """Run the coroutine act(batcher, tasks of requests that wait); nobody is at work before it."""

    async def run() -> object:
        batcher, tasks = Batcher(echo, queue, Metrics()), []
        for lines, options in requests:
            waiting = batcher.waiting
            tasks.append(asyncio.create_task(batcher.translate(lines, [""] * len(lines), options)))
            while batcher.waiting == waiting:
                await asyncio.sleep(0.001)
        return await act(batcher, tasks)

    return asyncio.run(run())


def test_one_of_each_request_in_turn(echo):
    """A long request does not keep short ones waiting; 64 words are 21 sentences of 3."""
    order = []

    async def act(batcher, tasks) -> None:
        for name, task in enumerate(tasks):
            task.add_done_callback(lambda _, name=name: order.append(name))
        async with batcher.at_work():
            await asyncio.gather(*tasks)

    with_waiting(echo, [(["w1 w1"] * 60, BEAM), (["w2 w2"], BEAM), (["w3 w3"] * 2, BEAM)], act)
    assert order == [1, 2, 0] and [count for count, _ in echo.batches] == [21, 21, 21]


def test_other_options_are_another_batch_and_get_their_turn(echo):
    async def act(batcher, tasks) -> None:
        async with batcher.at_work():
            await asyncio.gather(*tasks)

    with_waiting(echo, [(["w1 w1"] * 60, BEAM), (["w2"], OTHER), (["w3"], BEAM)], act)
    assert [options for _, options in echo.batches[:3]] == [BEAM, OTHER, BEAM]
    assert sum(count for count, _ in echo.batches) == 62


def test_what_is_cancelled_is_not_translated(echo):
    async def act(batcher, tasks) -> list:
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert batcher.waiting == 1
        async with batcher.at_work():
            return await tasks[1]

    ((best,),) = with_waiting(echo, [(["w1"] * 3, BEAM), (["w2"], BEAM)], act)
    assert best.text == "w2" and echo.batches == [(1, BEAM)]


def test_what_cannot_be_taken_is_refused_at_once(echo):
    async def act(batcher, tasks) -> None:
        async def translate(*lines: str) -> list:
            return await batcher.translate([*lines], [""] * len(lines), BEAM)

        # of the last, nobody looks at the last line
        for lines, alone in ((["w2"] * 2, False), (["w2"] * 4, True), (["w2"] * 4 + ["\0"], True)):
            with pytest.raises(QueueFull) as full:
                await translate(*lines)
            assert full.value.alone is alone
        with pytest.raises(RefusedLine, match="line 2"):
            await translate("w1", "\0")
        assert [best.text for (best,) in await translate("", " ")] == ["", ""]
        tasks[0].cancel()

    with_waiting(echo, [(["w1"] * 2, BEAM)], act, queue=3)
    assert echo.batches == []
