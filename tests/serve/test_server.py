import socket

import pytest

from lsq.serve.server import bound


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
        with pytest.raises(OSError, match=f"cannot serve at 127.0.0.1, port {port}: Address already in use"):
            bound("127.0.0.1", port)
    with pytest.raises(OSError, match="^cannot serve at 192.0.2.1, port 0: Cannot assign requested address$"):
        bound("192.0.2.1", 0)
    with pytest.raises(OSError, match="^cannot serve at no.such.host.invalid, port 0: Name or service not known$"):
        bound("no.such.host.invalid", 0)
    with pytest.raises(ValueError, match="--host is empty"):
        bound("", 0)


def test_a_signal_ends_it_and_a_second_one_at_once(serve, echo):
    server = serve(echo).server
    server.stop()
    assert server.should_exit and not server.force_exit
    server.stop()
    assert server.force_exit
