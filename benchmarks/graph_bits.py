"""Measures which nodes of a graph need more bits, those of low or of high degree.

Trained float models get codes of 2 to 6 bits for nodes, by buckets of degrees, without training
after that; weights have 8 bits. Of the mixes whose buckets have so many bits in the mean, each side
takes the one with the least divergence from the float model (KL, in nats) on the nodes of
validation, or the least sum of the divergences of single buckets ("allocated"). Figures are of
other nodes, those of the test; for the "karate" club both are the same.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from functools import partial

import common
import graph_quality as quality
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from lsq.study.graph_allocation import GraphAllocator

BUCKETS = 4
WIDTHS = (2, 3, 4, 6, 8)
MOST = 6
"""Most bits of nodes in mixes; 8 are those of all other tensors."""
LOW, HIGH, ALIKE = "more for low degrees", "more for high degrees", "the same for all"
BEST, ALLOCATED = "best of all", "allocated"
TASKS = {
    **{name: make for name, make in quality.TASKS.items() if name != "GIN, small graphs"},
    "GraphSAGE, 64 wide": lambda seed, quick: quality.drawn(
        seed,
        partial(GraphSAGE, hidden_channels=64, num_layers=quality.LAYERS, dropout=quality.DROPOUT),
        quick,
    ),
}
Mix = tuple[int, ...]
"""Bits of buckets, from low to high degrees."""


def fits(mix: Mix, side: str) -> bool:
    """Whether a side may take a mix."""
    rising = mix == tuple(sorted(mix))
    falling = mix == tuple(sorted(mix, reverse=True))
    return {
        LOW: falling and not rising,
        HIGH: rising and not falling,
        ALIKE: rising and falling,
    }.get(side, True)


def divergence(before: Tensor, now: Tensor) -> float:
    before, now = before.double().log_softmax(1), now.double().log_softmax(1)
    return float((before.exp() * (before - now)).sum(1).mean())


def measured(task: quality.Nodes, seed: int, epochs: int, means: list[float]) -> Iterator[dict]:
    """Train a model of a seed, and yield a row for each mean and side."""
    torch.manual_seed(seed)
    model, data = task.model(), task.data
    quality.fit(task, model, epochs)
    allocator = GraphAllocator(
        model.eval(),
        data.x,
        data.edge_index,
        nodes=data.val_mask,
        buckets=BUCKETS,
        widths=WIDTHS,
        by_layer=False,
    )
    with torch.no_grad():
        floats = model(data.x, data.edge_index)
    counts = list(allocator.buckets.values())
    layers = allocator.uniform(max(WIDTHS))[len(counts) :]
    allowed = [width for width in WIDTHS if width <= MOST]
    found = {}
    for mix in itertools.product(allowed, repeat=len(counts)):
        if statistics.mean(mix) <= max(means):
            y = allocator.predictions((*map(WIDTHS.index, mix), *layers))
            on = {
                mask: divergence(floats[data[mask]], y[data[mask]])
                for mask in ("val_mask", "test_mask")
            }
            right = quality.percent((y.argmax(1) == data.y)[data.test_mask])
            alone = sum(allocator.costs[at][WIDTHS.index(bits)] for at, bits in enumerate(mix))
            found[mix] = on["val_mask"], alone, on["test_mask"], right
    reference = quality.percent((floats.argmax(1) == data.y)[data.test_mask])
    for mean in means:
        for side in (LOW, HIGH, ALIKE, ALLOCATED, BEST):
            mixes = [m for m in found if fits(m, side) and statistics.mean(m) <= mean]
            if side == ALIKE:
                mixes = [mix for mix in mixes if mix[0] == mean]
            if mixes:
                mix = min(mixes, key=lambda mix: found[mix][side == ALLOCATED])
                bits = sum(map(lambda n, b: n * b, counts, mix)) / sum(counts)
                yield {
                    "mean": mean,
                    "side": side,
                    "buckets": allocator.buckets,
                    "mix": mix,
                    "bits": bits,
                    "divergence": found[mix][2],
                    "lost": reference - found[mix][3],
                }


def compared(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for each mean and side. Errors are standard errors of differences from the first
    side of a mean, paired by seed."""
    every: dict[tuple, list[dict]] = {}
    for seed in options.seeds:
        task = TASKS[name](seed, options.quick)
        for row in measured(task, seed, options.epochs or task.epochs, options.means):
            every.setdefault((row["mean"], row["side"]), []).append(row)
        print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    for (mean, side), rows in every.items():
        row = {"task": name, "mean": mean, "side": side}
        row["mixes"] = " / ".join(" ".join(map(str, one["mix"])) for one in rows)
        row["bits"] = statistics.mean(one["bits"] for one in rows)
        for figure in ("divergence", "lost"):
            values = [one[figure] for one in rows]
            apart = [
                one - first[figure] for one, first in zip(values, every[mean, LOW], strict=True)
            ]
            several = len(values) > 1
            row[figure] = statistics.mean(values)
            row[f"{figure}_difference"] = statistics.mean(apart)
            row[f"{figure}_error"] = (
                statistics.stdev(apart) / len(apart) ** 0.5 if several else None
            )
        yield row


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="NAME",
        help=", ".join(TASKS),
    )
    parser.add_argument(
        "--seeds",
        type=common.positive,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        metavar="SEED",
        help="of graphs, weights and dropout",
    )
    parser.add_argument(
        "--means",
        type=float,
        nargs="+",
        default=[2.5, 3, 4],
        metavar="BITS",
        help="most bits of a bucket in the mean",
    )
    parser.add_argument("--epochs", type=common.positive, metavar="N", help="of each training")
    options = common.parse(parser, arguments)
    if options.quick:
        options.epochs = 2
    table = [row for name in options.tasks for row in compared(name, options)]
    conditions = common.conditions(
        options,
        packages=("torch_geometric", "pymetis", "scikit-learn"),
        buckets=BUCKETS,
        widths=WIDTHS,
        most=MOST,
    )
    common.report("graph_bits", table, conditions, options)


if __name__ == "__main__":
    main()
