"""An HTTP server that waits for no client forever and ends cleanly."""

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 1024
"""Clients at the same time. Up to REFUSED further clients get an error; others are closed."""
REFUSED = 64
BACKLOG = 256
"""Connections that the system holds until they are accepted, all in one go."""
CLIENT_SECONDS = 20.0
"""A client that neither sends a header nor reads its answer for so long, or twice, is left."""
SHUTDOWN_SECONDS = 30.0
"""For answers to what has arrived when the service ends."""
FILES = 4096
"""Open files that the process asks the system for: connections, and those waiting for one."""


class Protocol(H11Protocol):
    """A connection, closed if its client does nothing; uvicorn would wait."""

    _waited_in: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS + REFUSED:
            transport.abort()
        else:
            self._timer = self.loop.call_later(CLIENT_SECONDS, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)

    def _look(self) -> None:
        """Close a connection that waits for its client as it did at the last look."""
        no_header = self.cycle is None or self.cycle.response_complete
        waits = no_header or self.transport.get_write_buffer_size() > 0
        if waits and self._waited_in is self.cycle:
            self.transport.abort()
            return
        self._waited_in = self.cycle if waits else self
        self._timer = self.loop.call_later(CLIENT_SECONDS, self._look)


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM when what has arrived is answered, and at once on a second one."""

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
        """Answer what has arrived and end; called again, cancel requests, which answers them."""
        if self.should_exit:
            for task in list(self.server_state.tasks):
                task.get_loop().call_soon_threadsafe(task.cancel)
        self.should_exit = True


def server_of(application: Starlette) -> Server:
    """Make a server; its `serve(sockets=[...])` is a coroutine."""
    config = uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        log_config=None,
        log_level="error",
        access_log=False,  # of what clients do wrong, there may be no end
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address, with room for connections; port 0: any that is free.

    Clients that connect before the server runs wait for it.

    Raises:
        ValueError: the host is empty or no address.
        OSError: it is in use, or not of this machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if not host:
        raise ValueError(
            "--host is empty; give an address, e.g. 127.0.0.1, or 0.0.0.0 for all of this machine"
        )
    address = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address.bind((host, port))
        address.listen(BACKLOG)
    except OSError as error:
        address.close()
        raise OSError(f"cannot serve at {host}, port {port}: {error.strerror}") from error
    except (TypeError, UnicodeError) as error:
        address.close()
        raise ValueError(
            f"--host {host!r} is no address ({error}); give one, e.g. 127.0.0.1"
        ) from None
    return address
