"""Trains graph networks in float and with integers of 8 to 2 bits, over several seeds, and compares
how many nodes or graphs they classify right.

Sides have the same weights to begin with, batches and AdamW of PyTorch. Counted is the test
accuracy, in percent, where that of validation is best. Each seed draws its own graph; the "karate"
club (Zachary 1977) and the neighbours of scikit-learn's "digits" are real.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import common
import drawn_graphs as graphs
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, GIN, global_mean_pool

import lsq
from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.graphs import ClusterLoader

LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 0.01, 5e-4, 0.5
LAYERS = 3
EVERY = 2
"""Epochs from one validation to the next."""
NEIGHBOURS = 8
"""Nearest images of an image of a digit."""
SMALL_COUNTS = {"train": 400, "val": 200, "test": 800}
"""Small graphs."""


class Task:
    """A data set and a model."""

    epochs: int

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batches(self) -> Iterable[Data]:
        """Yield the batches of an epoch."""
        raise NotImplementedError

    def score_together(self) -> None:
        """Let `right` read the whole graph at once, if it is in parts."""

    def right(self, model: nn.Module) -> tuple[float, float]:
        """Return the percentages of validation and of test that a model in eval mode gets right."""
        raise NotImplementedError


def logits(model: nn.Module, data: Data) -> Tensor:
    edges = data.edge_index if data.edge_index is not None else data.adj_t
    return model(data.x, edges) if data.batch is None else model(data.x, edges, data.batch)


class Nodes(Task):
    """Classes of nodes, by Cluster-GCN."""

    def __init__(self, data: Data, kind: Callable[..., nn.Module], epochs: int, parts: int = 1):
        self.data, self.kind, self.epochs = data, kind, epochs
        self.loader = ClusterLoader(data, parts=parts, batch=-(-parts // 4))
        self.held_out = list(ClusterLoader(data, parts=parts, batch=-(-parts // 4), shuffle=False))

    def score_together(self) -> None:
        self.held_out = [self.data]

    def model(self) -> nn.Module:
        return self.kind(self.data.num_features, out_channels=int(self.data.y.max()) + 1)

    def batches(self) -> Iterable[Data]:
        return self.loader

    def right(self, model: nn.Module) -> tuple[float, float]:
        hits = torch.cat([logits(model, one).argmax(1) == one.y for one in self.held_out])
        val, test = (
            torch.cat([one[mask] for one in self.held_out]) for mask in ("val_mask", "test_mask")
        )
        return percent(hits[val]), percent(hits[test])


class Pooled(nn.Module):
    """A graph network, the mean over the nodes of each graph, and a layer of classes."""

    def __init__(self, features: int, hidden: int, classes: int):
        super().__init__()
        self.nodes = GIN(features, hidden, LAYERS, dropout=DROPOUT, norm="batch_norm")
        self.classes = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return self.classes(global_mean_pool(self.nodes(x, edges), batch))


class Graphs(Task):
    """Classes of small dense graphs."""

    def __init__(self, seed: int, hidden: int, epochs: int, quick: bool):
        self.hidden, self.epochs = hidden, epochs
        counts = [count // 20 if quick else count for count in SMALL_COUNTS.values()]
        drawn = list(graphs.draw_small(sum(counts), seed=seed))
        ends = [counts[0], counts[0] + counts[1]]
        self.loader = DataLoader(drawn[: ends[0]], batch_size=64, shuffle=True)
        self.held_out = [
            Batch.from_data_list(part) for part in (drawn[ends[0] : ends[1]], drawn[ends[1] :])
        ]

    def model(self) -> nn.Module:
        return Pooled(graphs.SMALL.features, self.hidden, graphs.SMALL.classes)

    def batches(self) -> Iterable[Data]:
        return self.loader

    def right(self, model: nn.Module) -> tuple[float, float]:
        first, second = (percent(logits(model, one).argmax(1) == one.y) for one in self.held_out)
        return first, second


def percent(hits: Tensor) -> float:
    return 100 * hits.float().mean().item()


def gcn(hidden: int) -> Callable[..., nn.Module]:
    return partial(GCN, hidden_channels=hidden, num_layers=LAYERS, dropout=DROPOUT)


def gin(hidden: int) -> Callable[..., nn.Module]:
    return partial(
        GIN, hidden_channels=hidden, num_layers=LAYERS, dropout=DROPOUT, norm="batch_norm"
    )


def drawn(seed: int, kind: Callable[..., nn.Module], quick: bool) -> Task:
    size = graphs.QUICK if quick else graphs.LEARNED
    return Nodes(graphs.draw(size, seed), kind, epochs=40, parts=size.parts)


def karate(seed: int, quick: bool) -> Task:
    """Four of 34 people are known; the rest is for validation and test alike."""
    from torch_geometric.datasets import KarateClub

    data = KarateClub()[0]
    data.val_mask = data.test_mask = ~data.train_mask
    return Nodes(data, gcn(16), epochs=100)


def digits(seed: int, quick: bool) -> Task:
    """1,797 images of 8 x 8 points; edges lead from the nearest images, both ways."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    found = load_digits()
    near = kneighbors_graph(found.data, NEIGHBOURS)
    near = (near + near.T).tocoo()
    edges = torch.stack([torch.from_numpy(part).long() for part in (near.row, near.col)])
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    masks = torch.zeros(3, len(order), dtype=torch.bool)
    for mask, nodes in zip(masks, order.split([100, 200, len(order) - 300]), strict=True):
        mask[nodes] = True
    data = Data(
        x=torch.tensor(found.data, dtype=torch.float32) / 8 - 1,
        y=torch.tensor(found.target),
        edge_index=edges,
        **dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True)),
    )
    return Nodes(data, gcn(128), epochs=60, parts=8)


TASKS: dict[str, Callable[[int, bool], Task]] = {
    "GCN, 16 wide": lambda seed, quick: drawn(seed, gcn(16), quick),
    "GCN, 128 wide": lambda seed, quick: drawn(seed, gcn(128), quick),
    "GIN, 64 wide": lambda seed, quick: drawn(seed, gin(64), quick),
    "GIN, small graphs": lambda seed, quick: Graphs(seed, 64, 24, quick),
    "karate, GCN": karate,
    "digits, GCN": digits,
}
FLOAT = "float32"
SIDES: dict[str, QuantConfig | None] = {
    FLOAT: None,
    "8 bits": QuantConfig(),
    "8 bits, gradients in floats": QuantConfig(backward="float"),
    "8 bits, learned clips": QuantConfig(clips="learned"),
    "6 bits": QuantConfig(bits=6),
    "4 bits": QuantConfig(bits=4),
    "4 bits, gradients in floats": QuantConfig(bits=4, backward="float"),
    "3 bits": QuantConfig(bits=3),
    "2 bits": QuantConfig(bits=2),
    "2 bits, gradients in floats": QuantConfig(bits=2, backward="float"),
    "weights of 2 bits": QuantConfig(weight_format="int2/row"),
    "ternary weights": QuantConfig(weight_format="ternary/row"),
    "ternary weights, 4 bits": QuantConfig(weight_format="ternary/row", bits=4),
}
DEFAULT = (FLOAT, "8 bits", "6 bits", "4 bits", "3 bits", "2 bits", "ternary weights")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose matrices decay."""
    every = list(model.parameters())
    decay = [one for one in every if one.dim() > 1]
    keep = [one for one in every if one.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decay}, {"params": keep, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    right: float
    """Percent of the test."""
    processor_seconds: float


def train(task: Task, quant: QuantConfig | None, seed: int, epochs: int) -> Trained:
    torch.manual_seed(seed)
    model = task.model()
    if quant is not None:
        lsq.convert(model, quant, minimum_width=DIMENSION_MULTIPLE)
    begun = time.process_time()
    right = max(fit(task, model, epochs))[1]
    return Trained(right=right, processor_seconds=time.process_time() - begun)


def fit(task: Task, model: nn.Module, epochs: int) -> list[tuple[float, float]]:
    """Train a model; return what is right now and then, in percent of validation and of test."""
    optimizer, found = optimizer_of(model), []
    for epoch in range(1, epochs + 1):
        for batch in task.batches():
            chosen = batch.get("train_mask", slice(None))
            cross_entropy(logits(model, batch)[chosen], batch.y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch % EVERY == 0 or epoch == epochs:
            with torch.no_grad():
                found.append(task.right(model.eval()))
            model.train()
    return found


def rows(name: str, found: dict[str, list[Trained]]) -> Iterator[dict]:
    """Yield a row for each side. The spread is the standard deviation of seeds; the error is the
    standard error of the difference from the first side, paired by seed."""
    baseline = [one.right for one in next(iter(found.values()))]
    for side, trained in found.items():
        right = [one.right for one in trained]
        apart = [one - other for one, other in zip(right, baseline, strict=True)]
        several = len(right) > 1
        yield {
            "task": name,
            "side": side,
            "seeds": " / ".join(f"{one:.1f}" for one in right),
            "mean": statistics.mean(right),
            "spread": statistics.stdev(right) if several else None,
            "difference": statistics.mean(apart),
            "error": statistics.stdev(apart) / len(apart) ** 0.5 if several else None,
            "processor_seconds": statistics.mean(one.processor_seconds for one in trained),
        }


def compared(name: str, options: argparse.Namespace) -> Iterator[dict]:
    found: dict[str, list[Trained]] = {side: [] for side in options.sides}
    for seed in options.seeds:
        for side in options.sides:
            task = TASKS[name](seed, options.quick)
            if options.together:
                task.score_together()
            epochs = options.epochs or task.epochs
            found[side].append(train(task, SIDES[side], seed, epochs))
    print(f"{name}: done", file=sys.stderr, flush=True)
    return rows(name, found)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    for option, known, default in (("tasks", TASKS, list(TASKS)), ("sides", SIDES, DEFAULT)):
        parser.add_argument(
            f"--{option}",
            nargs="+",
            choices=known,
            default=default,
            metavar="NAME",
            help=", ".join(known),
        )
    parser.add_argument(
        "--seeds",
        type=common.positive,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        metavar="SEED",
        help="of graphs, weights, dropout and rounding",
    )
    parser.add_argument(
        "--together", action="store_true", help="score the whole graph at once, not parts of it"
    )
    parser.add_argument("--epochs", type=common.positive, metavar="N", help="of each training")
    options = common.parse(parser, arguments)
    if options.quick:
        options.epochs = 2
    table = [row for name in options.tasks for row in compared(name, options)]
    conditions = common.conditions(
        options,
        packages=("torch_geometric", "pymetis", "scikit-learn"),
        baseline=options.sides[0],
        together=options.together,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        dropout=DROPOUT,
    )
    common.report("graph_quality", table, conditions, options)


if __name__ == "__main__":
    main()
