"""Processes of one attempt meet in a part of the store that earlier attempts know nothing of."""

import threading
import time
from datetime import timedelta

import pytest
from torch import distributed

from lsq.dist import attempts, roll_call
from lsq.dist.attempts import own_part
from lsq.dist.roll_call import RollCall


def meet(store, late: int, size: int = 3) -> list:
    """The parts of all ranks, of which `late` comes last."""
    found = [None] * size

    def come(rank: int) -> None:
        time.sleep(0.2 * (rank == late))
        found[rank] = own_part(store, rank, size)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    return found


@pytest.mark.parametrize("late", [0, 2])
def test_an_attempt_finds_nothing_of_earlier_ones(late, monkeypatch):
    """Whoever comes first or last; roll calls name who is gone, though all answered in the attempt
    before."""
    monkeypatch.setattr(roll_call, "PATIENCE_S", 0.3)
    monkeypatch.setattr(roll_call, "PERIOD_S", 0.02)
    store = distributed.HashStore()
    for attempt in range(3):
        parts = meet(store, late)
        assert not parts[0].check(["key"])
        parts[0].set("key", str(attempt))
        assert [part.get("key") for part in parts] == [str(attempt).encode()] * 3
        calls = [
            RollCall(part, rank, 3, host="here", store_host="") for rank, part in enumerate(parts)
        ]
        while not parts[0].check([f"lsq/roll_call/host/{rank}" for rank in range(3)]):
            time.sleep(0.01)
        if attempt == 2:
            calls[1].leave()
        lost = calls[0].lost()
        for call in calls:
            call.leave()
        assert lost == (None if attempt < 2 else "rank 1 (of 3, here) no longer answers")


def test_a_rank_0_that_does_not_come_is_missed():
    store = distributed.HashStore()
    meet(store, 0, size=2)
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(
        TimeoutError, match="rank 0 did not come to the store of this training; rank 1 has waited"
    ):
        own_part(store, 1, 2)


def test_one_process_needs_nobody():
    assert own_part(distributed.HashStore(), 0, 1).set("key", "value") is None
    assert attempts.METHOD == "lsq://"
