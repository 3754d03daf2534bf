"""An HTTP server that waits for no client forever and ends cleanly."""

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from lsq.serving.http.requests import Limits

BACKLOG = 256
"""Connections that the system holds until they are accepted, all in one go."""
ACCEPTED = 4 * BACKLOG
"""Connections, at most, that asyncio has accepted and the server has not seen yet."""
REFUSED = 64
"""Connections above the limit that are kept until they have an answer that says so; further ones
are closed at once."""
LAST_SECONDS = 1.0
"""For answers that the service ends at once."""
OTHER_FILES = 64
"""Files that the process has open beside its connections."""


class Protocol(H11Protocol):
    """A connection that ends if no whole header arrives in time, if nobody reads its answers, or if
    more than a request is sent before the answer to the last one; uvicorn would wait, or hold all
    of it."""

    limits: Limits
    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _ahead = 0
    """Bytes that were sent before the answer to the last request."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Handle a new client."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections + REFUSED:
            transport.abort()
        else:
            self._expect()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the client."""
        answering = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        self._ahead = self._ahead + len(data) if answering else 0
        if self._ahead > self.limits.request_bytes:
            self.transport.abort()
            return
        super().data_received(data)
        self._expect()

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        self._forget()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(error)

    def on_response_complete(self) -> None:
        """Handle the end of an answer, which the system may hold in part."""
        cycle = self.cycle
        super().on_response_complete()
        self._watch_reader(cycle)

    def _watch_reader(self, cycle: object) -> None:
        """Start the clock if part of an answer is not read."""
        if self._reading is None and self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(
                self.limits.read_seconds, self._look_at_reader, cycle
            )

    def _look_at_reader(self, cycle: object) -> None:
        self._reading = None
        if self.cycle is not cycle:  # it has got further since then
            self._watch_reader(self.cycle)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()

    def _expect(self) -> None:
        """Start the clock for a header; between requests uvicorn has its own."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.receive_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM when what has arrived is answered, and at once on a second one.

    Args:
        config: uvicorn's.
        ready: called when clients can connect.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]):
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; called by uvicorn."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; called by uvicorn. After a second signal, cancel requests, which answers their
        clients, and end the lifespan, too."""
        await super().shutdown(sockets)
        if self.force_exit:
            tasks = list(self.server_state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=LAST_SECONDS)
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server on signals within this context; uvicorn would raise them again after its
        clean end."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():  # others get no signals
            numbers = ()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Answer what has arrived and end; called again, end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def server_of(application: Starlette, limits: Limits, ready: Callable[[], object]) -> Server:
    """Make a server; its `serve(sockets=[...])` is a coroutine, and `ready` is called when clients
    can connect."""
    patient = type("Protocol", (Protocol,), {"limits": limits})
    config = uvicorn.Config(
        application,
        http=patient,
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        log_config=None,
        log_level="error",
        access_log=False,  # of what clients do wrong, there may be no end
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=limits.shutdown_seconds,
    )
    return Server(config, ready)


def make_room(connections: int) -> None:
    """Allow this process so many connections; each is an open file, and many systems begin with
    1,024.

    Raises:
        ValueError: the system allows fewer.
    """
    others = ACCEPTED + REFUSED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and connections + others > hard:
        raise ValueError(
            f"--limit-connections is {connections}, and the {hard} files that this system lets a"
            f" process open (ulimit -Hn) are enough for {max(hard - others, 0)}"
        )
    if soft != resource.RLIM_INFINITY and connections + others > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (connections + others, hard))


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; port 0: any that is free.

    Raises:
        ValueError: there is no address, or it is none.
        OSError: it is in use, or not of this machine.
    """
    if not host:
        raise ValueError(
            "--host is empty; give an address, e.g. 127.0.0.1, or 0.0.0.0 for all of this machine"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address_socket = socket.socket(family)
    try:
        address_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address_socket.bind((host, port))
    except OSError as error:
        address_socket.close()
        raise OSError(f"cannot serve at {host}, port {port}: {error.strerror}") from error
    except (TypeError, UnicodeError) as error:
        address_socket.close()
        raise ValueError(
            f"--host {host!r} is no address ({error}); give one, e.g. 127.0.0.1"
        ) from None
    return address_socket
