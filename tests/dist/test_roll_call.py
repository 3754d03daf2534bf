import json
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from lsq.dist import roll_call
from lsq.dist.roll_call import (
    ExchangeFailed,
    RankLost,
    RollCall,
    is_exchange_failure,
    naming_the_lost,
)
from tests.dist.processes import CONTEXT, run
from tests.sampling import first

CLOSED = RuntimeError(
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is"
    " typically caused by a remote worker crashing.\nmore"
)
REASON = "gloo: Connection closed by peer [127.0.0.1]:1"


@pytest.fixture
def start(monkeypatch):
    """start(store, rank, size) -> a RollCall on a host named after the rank; ended after the
    test."""
    started = []

    def start(store, rank: int, size: int, patience_s: float = 1.0) -> RollCall:
        monkeypatch.setattr(roll_call, "PATIENCE_S", patience_s)
        monkeypatch.setattr(roll_call, "PERIOD_S", 0.02)
        started.append(RollCall(store, rank, size, host=f"host h{rank // 2}", store_host="nobody"))
        return started[-1]

    yield start
    for one in started:
        one.leave()


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.01)


def test_all_answer(start):
    store = distributed.HashStore()
    calls = [start(store, rank, 3) for rank in range(3)]
    assert [calls[rank].lost() for rank in (1, 0, 2)] == [None] * 3


def test_the_silent_ones_are_named_with_their_places(start):
    store = distributed.HashStore()
    calls = [start(store, rank, 5) for rank in range(5)]
    wait_until(lambda: calls[0]._store.check([f"host/{rank}" for rank in range(5)]))
    for rank in (1, 2, 3):
        calls[rank].leave("ValueError: sentence 7 is too long" if rank == 3 else None)
    expected = (
        "rank 1 (of 5, host h0) and rank 2 (of 5, host h1) and rank 3 (of 5, host h1) no longer"
        " answer; rank 3 ended with ValueError: sentence 7 is too long"
    )
    assert calls[4].lost() == expected
    assert calls[0].lost() == expected, "it answered the call of another, and has the same result"


def test_one_that_never_came(start):
    store = distributed.HashStore()
    call = start(store, 0, 2, patience_s=0.1)
    assert call.lost() == "rank 1 (of 2, host not known yet) no longer answers"


def test_a_store_that_is_gone_or_does_not_answer(start):
    """As when its host is stopped: connections stay, requests never return."""
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("127.0.0.1", server.port, is_master=False)
    call = start(client, 1, 2, patience_s=0.1)
    del server
    assert call.lost() == "nobody"
    answer = threading.Event()

    class Silent(distributed.Store):
        def set(self, key, value):
            answer.wait(30)
            raise RuntimeError("the test is over")

    call = start(Silent(), 1, 2, patience_s=0.1)
    assert call.lost() == "nobody"
    answer.set()


def test_leaving_waits_for_a_slow_store(start):
    """A thread inside the store while the interpreter ends would abort the process."""

    class Slow(distributed.Store):
        def set(self, key, value):
            time.sleep(0.5)

        def check(self, keys):
            return False

    call = start(Slow(), 1, 2, patience_s=0.1)
    call.leave()
    assert not call._thread.is_alive()


TIMED_OUT = "[..unbound_buffer.cc:78] Gloo: Timed out waiting 1000ms for recv operation"


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (CLOSED, True),
        (RuntimeError(TIMED_OUT), True),
        (distributed.DistBackendError("NCCL error"), True),
        (distributed.DistNetworkError("The client socket has timed out"), True),
        (RankLost("rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("Missing key gloomy.weight"), False),
        (NotImplementedError("not implemented for backend gloo"), False),
        (ValueError("gloo is not a mode"), False),
        (FileNotFoundError("nowhere"), False),
    ],
)
def test_which_errors_are_of_exchanges(error, failed):
    assert is_exchange_failure(error) == failed


def test_without_processes_nothing_is_named():
    roll_call.register()
    assert roll_call._current is None
    with pytest.raises(ExchangeFailed) as failed, naming_the_lost():
        raise CLOSED
    assert str(failed.value) == REASON and not isinstance(failed.value, RankLost)
    assert failed.value.__cause__ is CLOSED
    with pytest.raises(ZeroDivisionError), naming_the_lost():
        _ = 1 / 0
    with pytest.raises(RankLost, match="^rank 1$"), naming_the_lost():
        raise RankLost("rank 1")
    with pytest.raises(ExchangeFailed, match=re.escape(REASON)), naming_the_lost():
        try:
            raise CLOSED
        except RuntimeError:
            raise SystemExit(143)  # noqa: B904  as a signal's handler does


def _anew(rank: int, folder: str) -> tuple[bool, int]:
    """(whether the second group has roll calls of its own, this process's rank in them)."""
    roll_call.register()
    first = roll_call._current
    roll_call.register()
    assert roll_call._current is first
    distributed.barrier()  # the other process may still be making its connections
    distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/anew", rank=1 - rank, world_size=2
    )
    roll_call.register()
    return roll_call._current is not first and not first._thread.is_alive(), roll_call._current.rank


def test_a_new_group_has_roll_calls_of_its_own(tmp_path):
    assert run(_anew, 2, str(tmp_path)) == [(True, 1), (True, 0)]


def _ring(rank: int, folder: str, how: int, place: str) -> None:
    """Exchange in a ring of four; rank 2 gets the signal `how`, or fails by itself; the others
    write what they saw."""
    torch.set_num_threads(1)
    method = f"file://{folder}/store" if place == "file" else f"tcp://127.0.0.1:{place}"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=4)
    distributed.group.WORLD.set_timeout(timedelta(seconds=4))
    roll_call.PATIENCE_S, roll_call.PERIOD_S = 4.0, 0.05
    roll_call.register()
    distributed.barrier()
    time.sleep(0.3)  # until they know each other
    try:
        with naming_the_lost():
            for update in range(1000):
                if rank == (0 if how == -1 else 2) and update == 5:
                    if how == 0:
                        raise ValueError("sentence 7 is too long")
                    os.kill(os.getpid(), how if how > 0 else signal.SIGKILL)
                distributed.all_reduce(torch.ones(1000))
    except (ExchangeFailed, ValueError) as error:
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump([type(error).__name__, str(error)], file)
    finally:
        os._exit(0)  # without the group's own farewell, which needs the others


def _run(tmp_path, how: int, place: str = "file") -> tuple[dict[int, list[str]], int]:
    """{rank: [type, message]} of those that could tell, and the process id of the one that is
    gone."""
    started = [
        CONTEXT.Process(target=_ring, args=(rank, str(tmp_path), how, place)) for rank in range(4)
    ]
    for process in started:
        process.start()
    lost = started[0 if how == -1 else 2]
    for process in started:
        if process is not lost or how == 0:
            process.join(60)
    for process in started:
        process.kill()
        process.join(10)
    told = {rank: tmp_path / f"{rank}.json" for rank in range(4)}
    return {
        rank: json.loads(file.read_text()) for rank, file in told.items() if file.exists()
    }, lost.pid


@pytest.mark.thorough
@pytest.mark.parametrize("number", first([signal.SIGKILL, signal.SIGSTOP], 1))
def test_every_survivor_names_the_one_that_is_gone(tmp_path, number):
    told, process = _run(tmp_path, number)
    assert sorted(told) == [0, 1, 3]
    for kind, message in told.values():
        assert kind == "RankLost"
        assert message.startswith(
            f"rank 2 (of 4, host {socket.gethostname()}, process id {process}) no longer answers: "
        )
        assert re.search("gloo.*(Connection (closed|reset) by peer|Timed out)", message)


@pytest.mark.thorough
def test_last_words_of_the_one_that_failed(tmp_path):
    told, process = _run(tmp_path, 0)
    assert told.pop(2) == ["ValueError", "sentence 7 is too long"]
    assert sorted(told) == [0, 1, 3]
    for _, message in told.values():
        assert (
            "no longer answers; rank 2 ended with ValueError: sentence 7 is too long: " in message
        )


def test_the_store_dies_with_rank_0(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told, _ = _run(tmp_path, -1, str(port))
    assert sorted(told) == [1, 2, 3]
    for kind, message in told.values():
        assert kind == "RankLost" and message.startswith(
            "rank 0, which hosts the store, no longer answers: "
        )
