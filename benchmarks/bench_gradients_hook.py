"""What averaging gradients costs the processor: the hooks' own work on a bucket, with a network
that takes no time.

A process group whose collectives do nothing stands in for the other workers. `copy` reads and
writes the bucket once. Times are those of one worker, per MB (10^6 bytes) of float32 gradients.
"""

import common
import torch
from bench_gradients_wire import BLOCK, QUANTILE, ROW, Bucket
from torch import Tensor, distributed
from torch.futures import Future

from lsq.dist.codec import Codec
from lsq.dist.gcq import GCQ
from lsq.dist.hooks import PYTORCH_HOOKS
from lsq.dist.scratch import Scratch
from lsq.dist.two_hop import TwoHop

CLUSTERS = ((2, 2), (4, 8))
"""(nodes, workers of a node)."""
BUCKET, QUICK_BUCKET = 25 * 2**20 // 4, 4096
"""Values: as many as DDP puts into one bucket."""
BASELINE = "copy"


class SilentGroup(distributed.ProcessGroup):
    """Collectives that return at once; until `filled`, they make up results of the worker's own
    data."""

    def __init__(self, size: int):
        super().__init__(0, size)
        self.filled = False

    def allreduce(self, tensors: list[Tensor], options) -> "SilentGroup":
        """Leaves the tensors as they are."""
        self.result = tensors
        return self

    def all_to_all_single(self, out: Tensor, given: Tensor, *options) -> "SilentGroup":
        """Every worker sends what this one does."""
        if not self.filled:
            out.copy_(given.repeat(2)[: out.numel()])
        return self

    def all_gather_single(self, out: Tensor, own: Tensor, *options) -> "SilentGroup":
        """Every worker has what this one has."""
        if not self.filled:
            out.copy_(own.repeat(self.size()))
        return self

    alltoall_base = all_to_all_single  # their names before PyTorch 2.13
    _allgather_base = all_gather_single

    def wait(self) -> bool:
        """As a collective's result: nothing to wait for."""
        return True

    def get_future(self) -> Future:
        """As a collective's result: a future of the tensors."""
        future: Future = Future()
        future.set_result(self.result)
        return future


def sides(nodes: int, node_size: int, values: int) -> dict:
    """Name -> a function that averages a bucket of float32 gradients [values].

    Each has a bucket of its own. Without workers that add to it, it shrinks with every call of some
    sides, in a whole measurement not to subnormal numbers.
    """
    device = torch.device("cpu")
    everyone, neighbours, counterparts = map(SilentGroup, (nodes * node_size, node_size, nodes))
    groups = (everyone, neighbours, counterparts)

    def codec(bits: int) -> Codec:
        return Codec(block=BLOCK, first_bits=bits, stochastic=bits == 4, device=device)

    exchanges = {
        "gcq": GCQ(everyone, ROW, QUANTILE, Scratch(device)),
        "int8": TwoHop(everyone, codec(8), Scratch(device)),
        "int8_hier": TwoHop(counterparts, codec(8), Scratch(device), neighbours),
        "int4_hier": TwoHop(counterparts, codec(4), Scratch(device), neighbours),
    }
    buckets = {name: torch.randn(values) for name in (BASELINE, "bf16", *exchanges)}
    target = torch.empty(values)
    made = {
        BASELINE: lambda: target.copy_(buckets[BASELINE]),
        "bf16": lambda: PYTORCH_HOOKS["bf16"](everyone, Bucket(buckets["bf16"])).wait(),
    }
    for name, exchange in exchanges.items():
        made[name] = lambda exchange=exchange, bucket=buckets[name]: exchange.average(bucket)
        made[name]()
    for group in groups:
        group.filled = True
    return made


def main() -> None:
    parser = common.parser(__doc__)
    options = common.parse(parser)
    values = QUICK_BUCKET if options.quick else BUCKET
    megabytes = 4 * values / 1e6
    rows = []
    for nodes, node_size in CLUSTERS:
        timings = common.alternate(sides(nodes, node_size, values), rounds=options.rounds)
        for side, timing in timings.items():
            rows.append(
                {
                    "nodes": nodes,
                    "workers": nodes * node_size,
                    "side": side,
                    "microseconds_per_megabyte": 1e6 * timing.median / megabytes,
                    "fastest": 1e6 * timing.fastest / megabytes,
                    "ratio": timings[BASELINE].median / timing.median,
                }
            )
    conditions = common.conditions(options, baseline=BASELINE, values=values, block=BLOCK, row=ROW)
    common.report("gradients_hook", rows, conditions, options)


if __name__ == "__main__":
    main()
