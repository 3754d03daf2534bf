"""Finds out which process of a training is gone; a failed exchange alone does not tell.

When a process dies or hangs, the others only see a closed connection or a timeout. So a process
whose exchange fails calls the roll in the store of the process group (it lies in torchrun's agent,
or with init_method tcp:// in rank 0). A thread of every process answers. A process that has not
answered after a few seconds is named. A process that ends with its own error leaves it in the store
as its last words.
"""

import atexit
import contextlib
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

from torch import distributed

PATIENCE_S = 5.0
"""Seconds that the roll call waits; torchrun gives a process 30 from SIGTERM to SIGKILL."""
PERIOD_S = 0.5
"""Seconds between two looks whether the roll is called."""
FAILURES = re.compile(
    r"/gloo/|\bgloo timeout\b|timed out waiting \d+ ?ms|wait timeout|\bnccl"
    r" (communicator|error|operation|work)\b"
    r"|watchdog caught collective|socket timeout|connection (closed|reset) by peer|broken pipe",
    re.IGNORECASE,
)
"""Occurs in the messages of failed exchanges."""
NOISE = (
    (re.compile(r"Got the following error when running the callback: \w+: "), ""),
    (re.compile(r"\[\S*/gloo/\S*\] "), "gloo: "),
    (re.compile(r"\. This is typically caused by.*"), ""),
)
"""Text that DDP and gloo add around the reason: (pattern, replacement)."""


class ExchangeFailed(RuntimeError):
    """An exchange between the processes failed or ran out of time."""


class RankLost(ExchangeFailed):
    """An exchange failed because processes are gone; the message says which."""


class RollCall:
    """The part of one process in the roll calls of a group.

    `store`: only one thread may use it, so pass a clone. `host`: where this process runs, in words.
    `store_host`: who is gone if the store is gone, in words.
    """

    def __init__(
        self, store: distributed.Store, rank: int, size: int, *, host: str, store_host: str
    ):
        self.rank, self.size, self.host, self.store_host = rank, size, host, store_host
        self._store = distributed.PrefixStore("lsq/roll_call", store)
        self.group: Callable[[], object] = lambda: None
        """Returns the process group while it exists."""
        self._last_words: str | None = None
        self._lost: str | None = None
        self._called, self._ends, self._wake, self._done = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._watch, name="lsq-roll-call", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        """Call the roll, unless somebody has. Return who is gone, in words; None: all answered."""
        self._called.set()
        self._wake.set()
        # If the store's host is stopped, not gone, requests to the store never return.
        if not self._done.wait(2 * (PATIENCE_S + PERIOD_S)) or self._lost is None:
            return self.store_host
        return self._lost or None

    def leave(self, last_words: str | None = None) -> None:
        """End the part of this process, and leave `last_words`. Waits for the thread: if it came
        back from C++ while the interpreter ends, it would abort the process."""
        self._last_words = last_words
        self._ends.set()
        self._wake.set()
        self._thread.join(max(10.0, 2 * PATIENCE_S))

    def _watch(self) -> None:
        """Answer and call the roll; an error of the store means that the store is gone."""
        try:
            store = self._store
            store.set(f"host/{self.rank}", self.host)
            while not self._ends.is_set():
                if self._called.is_set():
                    store.set("called", "")
                if store.check(["called"]):
                    self._lost = self._call()
                    # the store may live here: let the other ranks see the call before it ends
                    if self.rank == 0:
                        self._ends.wait(2 * PERIOD_S)
                    break
                self._wake.wait(PERIOD_S)
            if self._last_words is not None:
                store.set(f"last_words/{self.rank}", self._last_words)
        except RuntimeError:
            self._lost = None
        finally:
            self._done.set()

    def _call(self) -> str:
        """Answer, wait for the others, and return in words who has not answered."""
        store, deadline = self._store, time.monotonic() + PATIENCE_S
        store.set(f"here/{self.rank}", "")
        while not store.check([f"here/{rank}" for rank in range(self.size)]):
            if time.monotonic() > deadline or self._ends.wait(min(PERIOD_S, 0.1)):
                break
        missing = [rank for rank in range(self.size) if not store.check([f"here/{rank}"])]
        if not missing:
            return ""
        named = [
            f"rank {rank} (of {self.size}, {self._read(f'host/{rank}') or 'host not known yet'})"
            for rank in missing
        ]
        last_words = {rank: self._read(f"last_words/{rank}") for rank in missing}
        words = [f"; rank {rank} ended with {said}" for rank, said in last_words.items() if said]
        return (
            f"{' and '.join(named)} no longer"
            f" answer{'s' if len(missing) == 1 else ''}{''.join(words)}"
        )

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


_current: RollCall | None = None
"""A registry, since code that sees an exchange fail has no access to the roll call."""


def register() -> None:
    """Take part in the roll calls of the default process group. Every process must call it, and
    again for a new group. Does nothing with one process."""
    global _current
    if not distributed.is_available() or not distributed.is_initialized():
        return
    group = distributed.group.WORLD
    if _current is not None and _current.group() is group:
        return
    unregister()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size == 1:
        return
    _current = RollCall(
        group.get_group_store().clone(),
        rank,
        size,
        host=f"host {socket.gethostname()}, process id {os.getpid()}",
        store_host=_store_host(),
    )
    _current.group = weakref.ref(group)
    atexit.unregister(unregister)
    atexit.register(unregister)


def unregister(last_words: str | None = None) -> None:
    global _current
    if _current is not None:
        _current.leave(last_words)
        _current = None


def is_exchange_failure(error: BaseException) -> bool:
    """Return whether `error`, or an error that led to it, is a failed exchange."""
    return any(
        isinstance(one, (ExchangeFailed, distributed.DistError))
        or (isinstance(one, RuntimeError) and FAILURES.search(str(one)) is not None)
        for one in _chain(error)
    )


def name_the_lost(error: BaseException) -> BaseException:
    """Call the roll if `error` is a failed exchange, and return the error to raise.

    RankLost names the processes that are gone. ExchangeFailed has the words of `error`, if all
    answered or nobody has registered. For any other error, `error` itself is returned.
    """
    if isinstance(error, ExchangeFailed) or not is_exchange_failure(error):
        return error
    *_, last = _chain(error)
    root = next((one for one in _chain(error) if isinstance(one, RuntimeError)), last)
    reason = _first_line(root)  # the exchange's own message
    if _current is None:
        return ExchangeFailed(reason)
    lost = _current.lost()
    # DDP passes on the message alone, which another thread may have completed already
    if lost is not None:
        return RankLost(reason if reason.startswith(lost) else f"{lost}: {reason}")
    answer = (
        f"; all {_current.size} ranks still answer, so one is slow, or they are not at the same"
        " exchange"
    )
    return ExchangeFailed(reason if reason.endswith(answer) else reason + answer)


@contextlib.contextmanager
def naming_the_lost(before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within this context, raise a failed exchange as `name_the_lost` returns it, after calling
    `before`. Any other error that ends this process becomes its last words for the others."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_exchange_failure(error):
            before()
        else:
            unregister(f"{type(error).__name__}: {_first_line(error)}")
        raise_named(error)


def raise_named(error: BaseException) -> NoReturn:
    named = name_the_lost(error)
    if named is error:
        raise error
    raise named from error


def _store_host() -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"torchrun's agent on the first machine ({address}), which hosts the store, no"
            " longer answers"
        )
    return "rank 0, which hosts the store, no longer answers"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    line = (str(getattr(error, "message", error)) or type(error).__name__).splitlines()[0]
    for pattern, replacement in NOISE:
        line = pattern.sub(replacement, line)
    return line
