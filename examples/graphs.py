"""A GCN of PyTorch Geometric learns in int8 which group each member of a club belongs to, from four
members that are known.

    python examples/graphs.py               # seconds
    python examples/graphs.py --float       # the same once more in float32, for comparison

The data (Zachary 1977) is part of PyTorch Geometric, so nothing is downloaded. Large graphs are
trained in batches of parts (Cluster-GCN); so is this one. `pip install ".[graphs]"` brings what is
needed.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCN

import lsq
from lsq.graphs import ClusterLoader
from lsq.optim import Adam


def train(side: str, given: argparse.Namespace) -> float:
    """Train; the share of the other members whose group is found."""
    torch.manual_seed(given.seed)
    club = KarateClub()
    data = club[0]
    model = GCN(data.num_features, given.hidden, given.layers, club.num_classes, dropout=0.5)
    if side == "int8":
        print(lsq.convert(model))
    optimizer = Adam(model.parameters(), lr=0.01)
    batches = ClusterLoader(data, parts=given.parts, batch=given.batch, seed=given.seed)
    for _ in range(given.epochs):
        for batch in batches:
            if batch.train_mask.any():
                found = model(batch.x, batch.adj_t)[batch.train_mask]
                cross_entropy(found, batch.y[batch.train_mask]).backward()
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    return right[~data.train_mask].float().mean().item()


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train; the accuracy by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--float", action="store_true", help="train in float32 as well, and compare"
    )
    numbers = {"epochs": 200, "parts": 4, "batch": 3, "hidden": 16, "layers": 3, "seed": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    given = parser.parse_args(words)
    sides = ("float32", "int8") if given.float else ("int8",)
    results = {side: train(side, given) for side in sides}
    for side, share in results.items():
        print(f"{side:8} finds the group of {share:.0%} of the other members")
    return results


if __name__ == "__main__":
    main()
