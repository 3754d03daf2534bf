"""Step time of every way to average gradients, on two pretended nodes of two processes each, over a
slow network.

The nodes are network namespaces on this machine, joined by a cable of a limited rate: each end is a
veth interface whose outgoing packets pass a token bucket (tc-tbf). Linux, root, `ip` and `tc`
(iproute2) are needed. Before and after each measurement the bytes that the network cards have sent
are read. The model computes next to nothing on purpose: `no exchange` is a step without
communication. All processes share this machine's cores. With `--backward` the backward pass sleeps
in each layer, as if a GPU computed; `perfect` is the time of a step whose wire and backward pass
never wait for anything but the first gradient.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import common
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, compress_gradients

INTERFACE = "lsq0"
"""Name of the network card, the same on both nodes."""
NODES = 2
PREFIX = "lsq-bench"
BURST = "256kb"
LATENCY = "50ms"


def obstacle() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return (
            "network namespaces need root; run it as root, in a container with CAP_SYS_ADMIN and"
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
        """Start a command on a node, with gloo on its network card; it ends with the network."""
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
    """Run a command and return its output; raises OSError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


NO_EXCHANGE = "no exchange"
EXACT = "exact"
"""DistributedDataParallel without a hook: an all-reduce in float32."""
BASELINE = "bf16"
SIDES = (NO_EXCHANGE, EXACT, "bf16", "gcq", "int8", "int8_hier", "lean", "lean5")
TIMEOUT = timedelta(minutes=5)
"""A process that waits longer for another gives up."""
WORKER_SECONDS = 1800
"""A measurement at one rate takes at most this long."""


class Sleep(torch.autograd.Function):
    """The identity; its backward pass sleeps."""

    @staticmethod
    def forward(context, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Layer(nn.Linear):
    """Sleeps when the gradient of its weight is there."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sleep.apply(x, self.seconds) if self.seconds else x)


class Sides:
    """The same model for every side, with gradients averaged in its way."""

    def __init__(self, options: dict):
        self.models, width = {}, options["width"]
        for name in options["sides"]:
            torch.manual_seed(1)
            layers = [Layer(width, width, bias=False) for _ in range(options["layers"])]
            for layer in layers:
                layer.seconds = options["backward"] / 1e3 / len(layers)
            model = DistributedDataParallel(
                nn.Sequential(*layers), bucket_cap_mb=options["bucket_mb"]
            )
            self.models[name] = model
            if name not in (NO_EXCHANGE, EXACT):
                compress_gradients(
                    model, GradientConfig(mode=name, node_size=options["processes_per_node"])
                )
        generator = torch.Generator().manual_seed(distributed.get_rank())
        self.x = torch.randn(options["batch"], width, generator=generator, requires_grad=True)

    def step(self, name: str) -> None:
        """Forward and backward pass; gradients are averaged on the way."""
        model = self.models[name]
        model.zero_grad(set_to_none=True)
        if name == NO_EXCHANGE:
            with model.no_sync():
                model(self.x).square().mean().backward()
        else:
            model(self.x).square().mean().backward()

    def error(self, name: str) -> float:
        """Relative error of the gradient that the last step left, against the exact mean."""
        found, exact = (
            torch.cat([weight.grad.flatten() for weight in self.models[side].parameters()])
            for side in (name, EXACT)
        )
        return ((found - exact).norm() / exact.norm()).item()


def worker(rank: int, folder: Path) -> None:
    """One process of the group: takes part in every measurement; writes its own figures."""
    options = json.loads((folder / "options.json").read_text())
    torch.set_num_threads(1)
    count = NODES * options["processes_per_node"]
    store = distributed.FileStore(str(folder / "store"), count)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT
    )
    sides = Sides(options)
    found = {name: {"seconds": [], "bytes": []} for name in options["sides"]}
    for round_number in range(-options["warm_up"], options["rounds"]):
        for name in options["sides"]:
            distributed.barrier()
            sent, start = sent_bytes(), time.perf_counter()
            for _ in range(options["steps"]):
                sides.step(name)
            elapsed = time.perf_counter() - start
            distributed.barrier()
            if round_number >= 0:
                found[name]["seconds"].append(elapsed / options["steps"])
                found[name]["bytes"].append((sent_bytes() - sent) / options["steps"])
        if rank == 0:
            print(f"round {round_number + 1} of {options['rounds']}", file=sys.stderr, flush=True)
    for name in options["sides"]:
        if name != NO_EXCHANGE:
            found[name]["error"] = sides.error(name)
    (folder / f"figures{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(nodes: Network, options: dict) -> list[dict]:
    """Run the processes of one measurement; what each of them found, by rank.

    Raises:
        RuntimeError: a process failed; its last lines are shown.
    """
    processes = options["processes_per_node"]
    count = NODES * processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(options))
        started = []
        for rank in range(count):
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(rank), name]
            with (folder / f"log{rank}").open("w") as log:
                output = {"stdout": log, "stderr": None if rank == 0 else log}
                started.append(nodes.start(rank // processes, command, **output))
        wait(started, folder)
        return [json.loads((folder / f"figures{rank}.json").read_text()) for rank in range(count)]


def wait(started: list[subprocess.Popen], folder: Path) -> None:
    """Until all have ended, or one of them has failed."""
    deadline = time.monotonic() + WORKER_SECONDS
    while any(process.poll() is None for process in started):
        failed = [rank for rank, process in enumerate(started) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for rank, process in enumerate(started):
        if process.poll() != 0:
            lines = (folder / f"log{rank}").read_text().splitlines()[-20:]
            why = (
                f"failed with status {process.returncode}"
                if process.returncode
                else "did not end in time"
            )
            raise RuntimeError("\n".join([f"process {rank} {why}", *lines]))


def bits_per_second(rate: str) -> float:
    """Of a rate as tc writes it; ValueError: in another unit."""
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit]


def rows(rate: str, found: list[dict], work: dict) -> list[dict]:
    """One row for each side.

    A round takes as long as its slowest process; a node's card counts once.
    """
    parameters = work["layers"] * work["width"] ** 2
    cards = [found[node * work["processes_per_node"]] for node in range(NODES)]
    timings = {}
    for side in found[0]:
        rounds = zip(*(figures[side]["seconds"] for figures in found), strict=True)
        timings[side] = common.timing([max(times) for times in rounds])
    made = []
    for side, timing in timings.items():
        sent = max(common.timing(card[side]["bytes"]).median for card in cards)
        wire = sent * 8 / bits_per_second(rate) + work["backward"] / 1e3 / work["layers"]
        perfect = max(timings[NO_EXCHANGE].fastest, wire)
        made.append(
            {
                "rate": rate,
                "side": side,
                "milliseconds": 1e3 * timing.median,
                "fastest": 1e3 * timing.fastest,
                "computing": timings[NO_EXCHANGE].median / timing.median,
                "bytes_per_parameter": sent / parameters,
                "error": found[0][side].get("error"),
                "ratio": timings[BASELINE].median / timing.median,
            }
            | ({"perfect": 1e3 * perfect} if work["backward"] else {})
        )
    return made


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit", "100mbit"], help="of the cable, as tc writes them"
    )
    shape: dict = {"type": common.positive, "metavar": "N"}
    parser.add_argument("--layers", **shape, default=4, help="of the model")
    parser.add_argument("--width", **shape, default=1024, help="of the model")
    parser.add_argument("--processes", **shape, default=2, help="on each node")
    parser.add_argument("--bucket-mb", **shape, default=25, help="megabytes of DDP's buckets")
    parser.add_argument("--backward", **shape, default=0, help="milliseconds of a backward pass")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE")
    options = common.parse(parser)
    reason = obstacle()
    if reason is not None:
        parser.error(reason)
    if options.quick:
        options.rates = options.rates[:1]
    if options.quick:
        options.layers, options.width = 2, 32
    sides = [NO_EXCHANGE, EXACT, BASELINE]
    sides += [side for side in options.sides if side not in sides]
    work = {name: getattr(options, name) for name in ("layers", "width", "bucket_mb", "backward")}
    work |= {"batch": 4, "steps": 1, "warm_up": 1 if options.quick else 2, "sides": sides}
    work |= {"rounds": options.rounds, "processes_per_node": options.processes}
    figures = []
    with Network() as nodes:
        for rate in options.rates:
            nodes.limit(rate)
            figures += rows(rate, measure(nodes, work), work)
    conditions = common.conditions(
        options,
        **{key: value for key, value in work.items() if key not in ("rounds", "sides")},
        baseline=BASELINE,
        backend="gloo",
        nodes=NODES,
        parameters=options.layers * options.width**2,
        network=f"veth pair, tbf with a burst of {BURST} and a queue of {LATENCY} on both ends",
        kernel=os.uname().release,
    )
    common.report("network", figures, conditions, options)


if __name__ == "__main__":
    main()
