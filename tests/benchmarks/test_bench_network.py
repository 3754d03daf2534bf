"""The pretended network: whether it can be made is said, and nothing of it stays."""

import os
import signal
import subprocess

import bench_network
import pytest
from bench_network import Network

needs_network = pytest.mark.skipif(
    bench_network.obstacle() is not None, reason=f"no pretended network: {bench_network.obstacle()}"
)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(bench_network.shutil, "which", lambda tool: None)
    assert "ip and tc not found" in bench_network.obstacle()
    monkeypatch.setattr(bench_network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(OSError, match="root"):
        Network()


def test_rates():
    assert [bench_network.bits_per_second(rate) for rate in ("100mbit", "1gbit")] == [1e8, 1e9]


def existing() -> str:
    return bench_network.tool("ip", "netns", "list")


@needs_network
def test_nodes_go_with_the_block_and_their_processes_with_them():
    with pytest.raises(KeyError), Network() as nodes:
        assert all(node in existing() for node in nodes.nodes)
        nodes.limit("100mbit")
        process = nodes.start(1, ["sleep", "100"])
        raise KeyError
    assert process.poll() is not None
    assert not any(node in existing() for node in nodes.nodes)


@needs_network
def test_a_signal_ends_the_block():
    with pytest.raises(SystemExit), Network() as nodes:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not any(node in existing() for node in nodes.nodes)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@needs_network
def test_each_node_counts_what_it_sends():
    with Network() as nodes:
        counter = f"/sys/class/net/{bench_network.INTERFACE}/statistics/tx_bytes"
        shown = nodes.start(0, ["cat", counter], stdout=subprocess.PIPE)
        assert int(shown.communicate()[0]) < 2000


@needs_network
def test_nodes_of_a_dead_process_are_removed():
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"{bench_network.PREFIX}-{dead.pid}-0"
    bench_network.tool("ip", "netns", "add", left)
    with Network():
        assert left not in existing()
