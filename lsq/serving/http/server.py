"""An HTTP server that ends cleanly."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

CONNECTIONS = 512
"""Most clients at the same time; further ones get an error."""
BACKLOG = 256
"""Most connections that the system holds until the server accepts them."""
SHUTDOWN_SECONDS = 30.0
"""Time to answer what has arrived when the service ends."""


class Server(uvicorn.Server):
    """Ends on SIGINT or SIGTERM once what has arrived is answered, and at once on a second one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server on signals; uvicorn would raise them again after its clean end."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        # other threads get no signals
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Answer what has arrived, then end; a second call cancels requests, which answers them."""
        if self.should_exit:
            for task in list(self.server_state.tasks):
                task.get_loop().call_soon_threadsafe(task.cancel)
        self.should_exit = True


def server_of(application: Starlette) -> Server:
    """Make a server; its `serve(sockets=[...])` is a coroutine."""
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        log_config=None,
        log_level="error",
        access_log=False,  # clients could fill it without end
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address (port 0: any free port); clients that come early wait for the server.

    Raises:
        ValueError: the host is empty or no address.
        OSError: the address is in use, or not of this machine.
    """
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
