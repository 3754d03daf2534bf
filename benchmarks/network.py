"""Two pretended machines on this one: network namespaces joined by one cable of a chosen rate.

Linux, root, `ip` and `tc` (iproute2) are needed. Each end of the cable is a veth interface whose
outgoing packets pass a token bucket (tc-tbf). Processes inside one namespace reach each other
through its loopback, which is not limited.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

INTERFACE = "lsq0"
"""Name of the network card, the same on both nodes."""
NODES = 2
PREFIX = "lsq-bench"
BURST = "256kb"
LATENCY = "50ms"


def obstacle() -> str | None:
    """Why namespaces cannot be made here; None if nothing is known to be in the way."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return (
            "network namespaces need root; run it as root, in a container with CAP_SYS_ADMIN"
            " and"
            " CAP_NET_ADMIN"
        )
    return None


class Network:
    """The two nodes, while the `with` block lasts; SIGTERM and SIGHUP end it in order, as Ctrl-C
    does.

    Nodes that an earlier process left behind because it was killed are removed first.

    Raises:
        OSError: they cannot be made; says what the tool said.
    """

    def __init__(self):
        reason = obstacle()
        if reason is not None:
            raise OSError(reason)
        self.nodes = [f"{PREFIX}-{os.getpid()}-{number}" for number in range(NODES)]
        self.processes: list[subprocess.Popen] = []
        self.handlers: dict = {}

    def __enter__(self) -> "Network":
        remove_leftovers()
        self.handlers = {
            number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
        }
        try:
            for node in self.nodes:
                tool("ip", "netns", "add", node)
            first, second = self.nodes
            end = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
            tool("ip", "link", "add", INTERFACE, "netns", first, *end)
            for number, node in enumerate(self.nodes, start=1):
                tool("ip", "-n", node, "addr", "add", f"10.213.0.{number}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    tool("ip", "-n", node, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def limit(self, rate: str) -> None:
        """Let each node send no more than `rate`, in the notation of tc ("100mbit")."""
        for node in self.nodes:
            bucket = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
            tool(
                "ip",
                "netns",
                "exec",
                node,
                "tc",
                "qdisc",
                "replace",
                "dev",
                INTERFACE,
                "root",
                *bucket,
            )

    def start(self, node: int, command: list[str], **options) -> subprocess.Popen:
        """Start a command on a node, with gloo bound to its network card; it is killed when the
        network goes."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.nodes[node], *command], env=environment, **options
        )
        self.processes.append(process)
        return process


def sent_bytes() -> int:
    """Bytes that the network card of this process's node has sent; to be called on a node."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def remove_leftovers() -> None:
    """Remove nodes whose maker no longer lives."""
    for line in tool("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        maker = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if (
            name.startswith(f"{PREFIX}-")
            and maker.isdigit()
            and not Path(f"/proc/{maker}").exists()
        ):
            tool("ip", "netns", "del", name)


def leave(number: int, _frame) -> None:
    """Signal handler: end by an exception, so that what is open is closed."""
    raise SystemExit(128 + number)


def tool(*command: str) -> str:
    """Run a command; what it printed.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
