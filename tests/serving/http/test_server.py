import concurrent.futures
import resource
import socket

import pytest
from starlette.responses import Response
from starlette.routing import Route

from lsq.serving.http.server import REFUSED, bound, make_room
from tests.serving.http.conftest import Served, wait_for


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_any_port_that_is_free(host):
    try:
        with bound(host, 0) as address:
            assert address.getsockname()[1] > 0
    except OSError:
        if host == "127.0.0.1" or socket.has_dualstack_ipv6():
            raise


def test_addresses_in_use_are_named():
    with bound("127.0.0.1", 0) as address:
        address.listen()
        port = address.getsockname()[1]
        with pytest.raises(
            OSError, match=f"cannot serve at 127.0.0.1, port {port}: Address already in use"
        ):
            bound("127.0.0.1", port)
    for host, error, message in (
        ("192.0.2.1", OSError, "^cannot serve at .*, port 0: Cannot assign requested address$"),
        ("no.such.host.invalid", OSError, "^cannot serve at .*: Name or service not known$"),
        ("", ValueError, "--host is empty"),
        ("\udcff", ValueError, r"--host '\\udcff' is no address .*; give one, e.g. 127.0.0.1"),
    ):
        with pytest.raises(error, match=message):
            bound(host, 0)


def never_reading(served: Served) -> socket.socket:
    """A client with little room for answers."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    found.connect(("127.0.0.1", served.port))
    found.settimeout(20)
    return found


def test_a_client_that_reads_no_answer_is_left(serve, echo):
    """Of an answer with so many bytes that no buffer of the system takes them."""
    served = serve(echo, read_seconds=0.3)
    long = b"x" * 2**24
    routes = served.server.config.app.router.routes
    routes.append(Route("/long", lambda request: Response(long)))
    with never_reading(served) as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: len(served.server.server_state.connections) == 1)
        wait_for(lambda: not served.server.server_state.connections)
    status, answer = served.ask("GET", "/long")
    assert (status, len(answer)) == (200, len(long))


def test_a_client_that_sends_more_and_more_before_it_is_answered_is_left(serve, echo):
    served = serve(echo, request_bytes=1000)
    body = b'{"text": "w1"}'
    request = (
        b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    with never_reading(served) as client, pytest.raises(OSError):
        while True:
            client.sendall(request * 100)
    assert served.translate("w1")[0] == 200


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, (3152, 4096)),
        (3200, 4096, None),
        (1024, resource.RLIM_INFINITY, (3152, resource.RLIM_INFINITY)),
    ],
)
def test_room_for_connections(monkeypatch, soft, hard, expected):
    chosen = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: chosen.append(limits))
    make_room(2000)
    assert chosen == ([] if expected is None else [expected])


def test_connections_that_the_system_does_not_allow(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2000))
    with pytest.raises(
        ValueError, match="--limit-connections is 2048, and the 2000 files .* are enough for 848"
    ):
        make_room(2048)


def test_more_connections_than_are_told_that_they_are_too_many(serve, echo):
    served = serve(echo, connections=2)
    connected = served.server.server_state.connections
    clients = [served.connect() for _ in range(100)]
    assert clients[-1].recv(1) == b""
    assert len(connected) == 2 + REFUSED
    for client in clients:
        client.close()
    wait_for(lambda: not connected)
    assert served.translate("w1")[0] == 200


@pytest.mark.parametrize("signals", [1, 2])
def test_who_is_not_answered_at_the_end_is_told_so(serve, echo, caplog, signals):
    """At the first signal after a time, at the second at once; what is at work is interrupted, and
    nothing fails."""
    served = serve(echo, shutdown_seconds=0.1 if signals == 1 else 1000)
    echo.may_go.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        found = [clients.submit(served.translate, "w1") for _ in range(2)]
        assert echo.at_work.wait(20)
        wait_for(lambda: len(served.server.server_state.tasks) == 2)
        for _ in range(signals - 1):
            served.server.stop()
        served.end()
        error = {"error": "the service has ended before this was translated"}
        assert [each.result() for each in found] == [(503, error)] * 2
    assert echo.interrupted == 1
    assert not [record for record in caplog.records if record.exc_info]
