"""Bytes that averaging gradients puts on the nodes' network cards: counted message by message, and
by the formula.

The exchanges of lsq.dist run as they are, with a thread for each worker and a process group that
counts (counting_group.py). All-reduce and all-gather are counted as rings, all-to-all directly;
`direct_gather` shows what cards send if all-gather is direct, too. Ranks are counted node by node.
The bucket is 4 MiB of float32.
"""

import common
import torch
from counting_group import CountingGroup, Wires, run
from torch import Tensor

from lsq.dist.collectives import Scratch
from lsq.dist.config import BLOCK, ROW
from lsq.dist.gcq import GCQ
from lsq.dist.hooks import PYTORCH_HOOKS
from lsq.dist.topology import Topology
from lsq.dist.two_hop import TwoHop

CLUSTERS = ((4, 8), (2, 2))
"""(nodes, workers of a node)."""
BUCKET, QUICK_BUCKET = 2**20, 4096
SCALE_BYTES = torch.bfloat16.itemsize
MODES = ("float", "bf16", "gcq", "int8", "int8_hier")
BASELINE = "bf16"


class Bucket:
    """As much of DDP's GradBucket as PyTorch's hooks use."""

    def __init__(self, values: Tensor):
        self._values = values

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._values


def average(mode: str, topology: Topology, wires: Wires, gather: str, values: Tensor) -> None:
    """Replace one worker's `values`, float32 [v], by the mean of all workers; all call it at the
    same time."""

    def group(ranks: list[int]) -> CountingGroup:
        return CountingGroup(wires, ranks, topology.rank, gather)

    everyone, scratch = list(range(topology.world_size)), Scratch(values.device)
    if mode in PYTORCH_HOOKS:
        PYTORCH_HOOKS[mode](group(everyone), Bucket(values)).wait()
        return
    exchanges = {
        "gcq": lambda: GCQ(group(everyone), scratch),
        "int8": lambda: TwoHop(group(everyone), scratch),
    }
    if mode in exchanges:
        exchanges[mode]().average(values)
        return
    neighbours, counterparts = (
        group(next(part for part in parts if topology.rank in part))
        for parts in (topology.all_neighbours, topology.all_counterparts)
    )
    TwoHop(counterparts, scratch, neighbours).average(values)


def count(
    mode: str, nodes: int, node_size: int, bucket: int, gather: str = "ring"
) -> tuple[float, float, list]:
    """Bytes a value that the busiest node's card sends, those within a node, and every worker's
    mean, float32 [v]."""
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
    }[mode]


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    options = common.parse(parser)
    bucket = QUICK_BUCKET if options.quick else BUCKET
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
    )
    common.report("gradients_wire", rows, conditions, options)


if __name__ == "__main__":
    main()
