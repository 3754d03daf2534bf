import concurrent.futures
import contextlib
import resource
import socket

import pytest
from starlette.responses import Response
from starlette.routing import Route

from lsq.serving.http import server
from lsq.serving.http.server import REFUSED, listen
from tests.serving.http.conftest import wait_for


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_any_port_that_is_free(host):
    try:
        with listen(host, 0) as address:
            assert address.getsockname()[1] > 0
    except OSError:
        if host == "127.0.0.1" or socket.has_dualstack_ipv6():
            raise


def test_addresses_in_use_are_named():
    with listen("127.0.0.1", 0) as address:
        port = address.getsockname()[1]
        with pytest.raises(
            OSError, match=f"cannot serve at 127.0.0.1, port {port}: Address already in use"
        ):
            listen("127.0.0.1", port)
    for host, error, message in (
        ("192.0.2.1", OSError, "^cannot serve at .*, port 0: Cannot assign requested address$"),
        ("no.such.host.invalid", OSError, "^cannot serve at .*: Name or service not known$"),
        ("", ValueError, "--host is empty"),
        ("\udcff", ValueError, r"--host '\\udcff' is no address .*; give one, e.g. 127.0.0.1"),
    ):
        with pytest.raises(error, match=message):
            listen(host, 0)


def test_clients_that_do_nothing_are_left(serve, monkeypatch):
    """No request, half a header, half a second one, an answer of so many bytes that no buffer of
    the system takes them."""
    monkeypatch.setattr(server, "CLIENT_SECONDS", 0.3)
    served, long = serve(), b"x" * 2**24
    served.server.config.app.router.routes.append(Route("/long", lambda request: Response(long)))
    with served.connect() as silent, served.connect() as slow, served.connect() as second:
        slow.sendall(b"POST /translate HTTP/1.1\r\nHost:")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200 ")
        second.sendall(b"GET")
        for client in (silent, slow, second):
            with contextlib.suppress(ConnectionResetError):
                while client.recv(4096):
                    pass
    with served.connect() as reader:
        reader.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: len(served.server.server_state.connections) == 1)
        wait_for(lambda: not served.server.server_state.connections)
    assert served.translate("w1")[0] == 200


def test_connections_are_limited(serve, monkeypatch):
    """Some are told that they are too many, further ones are closed."""
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    served = serve()
    connected = served.server.server_state.connections
    clients = [served.connect(), served.connect()]
    wait_for(lambda: served.ask("GET", "/health")[0] == 503)
    clients += [served.connect() for _ in range(100)]
    assert clients[-1].recv(1) == b""
    assert len(connected) == 2 + REFUSED
    for client in clients:
        client.close()
    wait_for(lambda: not connected)
    assert served.translate("w1")[0] == 200


def test_a_client_that_sends_on_and_on_and_reads_no_answer_is_left(serve, monkeypatch):
    """Nothing is read of it while an earlier answer waits."""
    monkeypatch.setattr(server, "CLIENT_SECONDS", 0.3)
    served, body = serve(), b'{"text": "w1"}'
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with served.connect() as client, pytest.raises(ConnectionError):
        while True:
            client.sendall((head + body) * 100)
    assert served.translate("w1")[0] == 200


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 2000, [(2000, 2000)]),
        (1024, resource.RLIM_INFINITY, [(server.FILES, resource.RLIM_INFINITY)]),
        (server.FILES, server.FILES, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_system_is_asked_for_room_for_connections(monkeypatch, soft, hard, expected):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    listen("127.0.0.1", 0).close()
    assert asked == expected


@pytest.mark.parametrize("signals", [1, 2])
def test_who_is_not_answered_at_the_end_is_told_so(serve, echo, caplog, monkeypatch, signals):
    """At the first signal after a time, at the second at once; what is at work is interrupted, and
    nothing fails."""
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 0.1 if signals == 1 else 1000)
    served = serve()
    echo.may_go.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(served.translate, "w1") for _ in range(2)]
        assert echo.at_work.wait(20)
        wait_for(lambda: len(served.server.server_state.tasks) == 2)
        for _ in range(signals - 1):
            served.server.stop()
        served.end()
        error = {"error": "the service has ended before this was translated"}
        assert [each.result() for each in answers] == [(503, error)] * 2
    assert echo.interrupted == 1
    assert not [record for record in caplog.records if record.exc_info]
