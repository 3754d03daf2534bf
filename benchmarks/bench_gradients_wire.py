"""What averaging gradients costs: bytes on the nodes' network cards, counted message by message and
by the formula, and the time of codes.

The exchanges of lsq.dist run as they are, with a thread for each worker and a process group that
counts (CountingGroup). All-reduce and all-gather are counted as rings, all-to-all directly;
`direct_gather` shows what cards send if all-gather is direct, too. Ranks are counted node by node.
The bucket is 4 MiB of float32. `pack_ns`, `add_ns` and `unpack_ns` are the fastest nanoseconds of
a value: of a worker's own values, of those that WORKERS sent, and of the means; with one thread the
processor's.
"""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import common
import torch
from torch import Tensor, distributed
from torch.futures import Future

from lsq.dist.config import BLOCK, ROW, Topology
from lsq.dist.hooks import PYTORCH_HOOKS, exchange_of, own_groups
from lsq.dist.two_hop import CODECS, Codec

SECONDS = 60
"""A worker that waits longer for a message gives up."""


class Wires:
    def __init__(self):
        self.bytes: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) -> bytes that went over."""
        self._lock = threading.Lock()
        self._waiting: defaultdict[tuple[int, int], queue.SimpleQueue] = defaultdict(
            queue.SimpleQueue
        )

    def send(self, sender: int, receiver: int, tensor: Tensor) -> None:
        """Count a tensor's bytes and leave a copy of it for the receiver."""
        with self._lock:
            self.bytes[sender, receiver] += tensor.numel() * tensor.element_size()
            waiting = self._waiting[sender, receiver]
        waiting.put(tensor.clone())

    def receive(self, sender: int, receiver: int, tensor: Tensor) -> None:
        """Wait for the sender's next tensor and write it to `tensor`."""
        with self._lock:
            waiting = self._waiting[sender, receiver]
        tensor.copy_(waiting.get(timeout=SECONDS))


class Done:
    """What a collective returns: it is done already."""

    def __init__(self, result: list[Tensor]):
        self._result = result

    def wait(self) -> bool:
        return True

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self._result)
        return future


class CountingGroup(distributed.ProcessGroup):
    """One worker's view of a group.

    Args:
        wires: between the workers, shared by all groups.
        ranks: of the group's workers.
        rank: of this worker, one of them.
        gather: "ring" or "direct".
    """

    def __init__(self, wires: Wires, ranks: Sequence[int], rank: int, gather: str = "ring"):
        super().__init__(list(ranks).index(rank), len(ranks))
        self.wires, self.ranks, self.own, self.gather = wires, list(ranks), rank, gather

    def allreduce(self, tensors: list[Tensor], options) -> Done:
        """Ring: N - 1 steps that add up (or take the larger), N - 1 that pass on."""
        combine = torch.maximum if options.reduceOp == distributed.ReduceOp.MAX else torch.add
        place, size = self.rank(), self.size()
        pieces = tensors[0].view(-1).tensor_split(size)
        for step in range(size - 1):
            self._send(place + 1, pieces[(place - step) % size])
            piece = pieces[(place - step - 1) % size]
            received = torch.empty_like(piece)
            self._receive(place - 1, received)
            piece.copy_(combine(piece, received))
        self._pass_round(pieces, first=place + 1)
        return Done(tensors)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, received: list[int], sent: list[int], *options
    ) -> Done:
        """Every worker to every other."""
        incoming = out.split(received or out.numel() // self.size())
        outgoing = given.split(sent or given.numel() // self.size())
        incoming[self.rank()].copy_(outgoing[self.rank()])
        self._exchange(outgoing, incoming)
        return Done([out])

    def all_gather_single(self, out: Tensor, own: Tensor, *options) -> Done:
        """Ring: N - 1 steps that pass on; or every worker to every other."""
        pieces = out.chunk(self.size())
        pieces[self.rank()].copy_(own)
        if self.gather == "direct":
            self._exchange([own] * self.size(), pieces)
        else:
            self._pass_round(pieces, first=self.rank())
        return Done([out])

    alltoall_base = all_to_all_single  # their names before PyTorch 2.13
    _allgather_base = all_gather_single

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        others = [place for place in range(self.size()) if place != self.rank()]
        for place in others:
            self._send(place, outgoing[place])
        for place in others:
            self._receive(place, incoming[place])

    def _pass_round(self, pieces: Sequence[Tensor], first: int) -> None:
        """Every worker gets all pieces; it begins with its complete one, number `first`."""
        place, size = self.rank(), self.size()
        for step in range(size - 1):
            self._send(place + 1, pieces[(first - step) % size])
            self._receive(place - 1, pieces[(first - step - 1) % size])

    def _send(self, place: int, tensor: Tensor) -> None:
        self.wires.send(self.own, self.ranks[place % self.size()], tensor)

    def _receive(self, place: int, tensor: Tensor) -> None:
        self.wires.receive(self.ranks[place % self.size()], self.own, tensor)


def run(workers: int, work: Callable[[int], object]) -> list:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))


CLUSTERS = ((4, 8), (2, 2))
"""(nodes, workers of a node)."""
BUCKET, QUICK_BUCKET = 2**20, 4096
WORKERS = 8
SCALE_BYTES = torch.bfloat16.itemsize
MODES = ("float", "bf16", "gcq", "int8", "int8_hier", "lean", "lean5")
BASELINE = "bf16"


class Bucket:
    """As much of DDP's GradBucket as PyTorch's hooks use."""

    def __init__(self, values: Tensor):
        self._values = values

    def buffer(self) -> Tensor:
        return self._values


def average(mode: str, topology: Topology, wires: Wires, gather: str, values: Tensor) -> None:
    """Replace a worker's `values`, float32 [v], by the mean; all workers call it at once."""

    def group(ranks: list[int]) -> CountingGroup:
        return CountingGroup(wires, ranks, topology.rank, gather)

    if mode in PYTORCH_HOOKS:
        everyone = group(list(range(topology.world_size)))
        PYTORCH_HOOKS[mode](everyone, Bucket(values)).wait()
        return
    groups = own_groups(
        mode,
        topology,
        lambda parts: group(next(part for part in parts if topology.rank in part)),
    )
    exchange_of(mode, groups, values.device).average(values)


def count(
    mode: str, nodes: int, node_size: int, bucket: int, gather: str = "ring"
) -> tuple[float, float, list]:
    """Bytes a value on the busiest card and within a node, and every worker's mean, float32 [v]."""
    wires, workers = Wires(), nodes * node_size
    gradients = [
        torch.randn(bucket, generator=torch.Generator().manual_seed(rank))
        for rank in range(workers)
    ]

    def work(rank: int) -> None:
        topology = Topology(world_size=workers, rank=rank, node_size=node_size)
        average(mode, topology, wires, gather, gradients[rank])

    run(workers, work)
    across, within = [0] * nodes, [0] * nodes
    for (sender, receiver), sent in wires.bytes.items():
        same = sender // node_size == receiver // node_size
        (within if same else across)[sender // node_size] += sent
    return max(across) / bucket, max(within) / bucket, gradients


def formula(mode: str, nodes: int, node_size: int) -> float:
    """Bytes a value on a node's card, for buckets so large that padding does not count."""
    workers, codes = nodes * node_size, 1 + SCALE_BYTES / BLOCK
    once = (workers - 1) / workers  # what each worker of a ring sends on in one round
    between = (nodes - 1) / nodes
    return {
        "float": 2 * once * 4,
        "bf16": 2 * once * 2,
        "gcq": 2 * once * (1 + 4 / ROW),
        "int8": (node_size * between + once) * codes,
        "int8_hier": 2 * between * codes,
        "lean": 2 * between * 4.5 / 8,
        "lean5": 2 * between * 5.25 / 8,
    }[mode]


def nanoseconds(codec: Codec, values: int, options) -> dict[str, float]:
    """Of a value, in each step of a worker among WORKERS."""
    first, second = codec.first(values, WORKERS), codec.second(values, WORKERS)
    x = torch.randn(values) * torch.randn(values // 32).exp().repeat_interleave(32)
    sent = torch.empty(WORKERS, first.message_bytes, dtype=torch.uint8)
    sums, mean = torch.empty(WORKERS, second.message_bytes, dtype=torch.uint8), x.clone()
    steps = {
        "pack": lambda: codec.pack(x[None], first, sent),
        "add": lambda: codec.add(sent, first, sums[0], second, 1 / WORKERS),
        "unpack": lambda: codec.unpack(sums, second, mean),
    }
    steps["pack"]()
    for shard in range(WORKERS):
        codec.add(sent, first, sums[shard], second, 1 / WORKERS)
    timings = common.alternate(steps, rounds=options.rounds, clock=common.clock_of(options))
    return {f"{step}_ns": 1e9 * timing.fastest / values for step, timing in timings.items()}


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    options = common.parse(parser)
    bucket = QUICK_BUCKET if options.quick else BUCKET
    times = {mode: nanoseconds(CODECS[mode], bucket, options) for mode in CODECS}
    none = dict.fromkeys(times["int8"])
    rows = []
    for nodes, node_size in CLUSTERS:
        counted = {mode: count(mode, nodes, node_size, bucket) for mode in MODES}
        for mode, (across, within, _) in counted.items():
            expected = formula(mode, nodes, node_size)
            rows.append(
                {
                    "nodes": nodes,
                    "workers": nodes * node_size,
                    "mode": mode,
                    "card_bytes_per_value": across,
                    "formula": expected,
                    "off_percent": 100 * (across / expected - 1),
                    "direct_gather": count(mode, nodes, node_size, bucket, "direct")[0],
                    "within_node": within,
                    "ratio": counted[BASELINE][0] / across,
                    **times.get(mode, none),
                }
            )
    conditions = common.conditions(
        options,
        baseline=BASELINE,
        values=bucket,
        block=BLOCK,
        row=ROW,
        all_reduce="ring",
        all_to_all="direct",
        all_gather="ring",
        workers=WORKERS,
        clock=common.clock_of(options).__name__,
    )
    common.report("gradients_wire", rows, conditions, options)


if __name__ == "__main__":
    main()
