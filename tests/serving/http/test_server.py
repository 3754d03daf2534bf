import concurrent.futures
import socket

import pytest

from lsq.serving.http import server
from lsq.serving.http.server import listen
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


def test_connections_are_limited(serve, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    served = serve()
    with served.connect(), served.connect():
        wait_for(lambda: served.ask("GET", "/health")[0] == 503)
    wait_for(lambda: not served.server.server_state.connections)
    assert served.translate("w1")[0] == 200


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
