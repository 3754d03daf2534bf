"""Which worker sits where: nodes of equal size, ranks counted node by node as torchrun does."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One worker's place among all that average their gradients."""

    world_size: int
    rank: int
    node_size: int
    """Workers on each node."""

    @property
    def nodes(self) -> int:
        """How many there are."""
        return self.world_size // self.node_size

    @property
    def all_neighbours(self) -> list[list[int]]:
        """The ranks on each node, in order: a part for each node."""
        return [
            list(range(first, first + self.node_size))
            for first in range(0, self.world_size, self.node_size)
        ]

    @property
    def all_counterparts(self) -> list[list[int]]:
        """The ranks with the same place on every node, in order of nodes: a part for each place."""
        return [
            list(range(place, self.world_size, self.node_size)) for place in range(self.node_size)
        ]


def find_topology(
    world_size: int,
    rank: int,
    node_size: int | None,
    hosts: Callable[[], Sequence[str]],
    environment: Mapping[str, str] = os.environ,
) -> Topology:
    """The Topology for a node size that was given, or that torchrun says (LOCAL_WORLD_SIZE), or as
    hosts tell.

    Args:
        world_size: number of workers.
        rank: of this one.
        node_size: workers on each node, or None.
        hosts: the name of each worker's host, in order of ranks; called where nothing else tells.
        environment: of this process.

    Raises:
        ValueError: nodes of that size do not divide the workers, or hosts have different numbers of
            workers.
    """
    if node_size is None:
        launched = environment.get("LOCAL_WORLD_SIZE")
        node_size = node_size_of(hosts()) if launched is None else int(launched)
    if world_size % node_size:
        raise ValueError(
            f"{world_size} workers cannot be divided into nodes of {node_size} (node_size, or what"
            " torchrun started: "
            "LOCAL_WORLD_SIZE); start as many workers on every node, or set node_size to a divisor"
        )
    return Topology(world_size=world_size, rank=rank, node_size=node_size)


def node_size_of(hosts: Sequence[str]) -> int:
    """Workers on each node, from the name of each worker's host, in order of ranks.

    Raises:
        ValueError: hosts have different numbers of workers, or ranks are not counted host by host.
    """
    nodes = [(host, len(list(workers))) for host, workers in groupby(hosts)]
    if len({count for _, count in nodes}) > 1 or len({host for host, _ in nodes}) < len(nodes):
        listed = ", ".join(f"{count} on {host}" for host, count in nodes[:8])
        raise ValueError(
            f"workers are spread over hosts unevenly ({listed}{', ...' if len(nodes) > 8 else ''});"
            " start as many on "
            "every host, counted host by host, or choose mode int8, which knows of no nodes"
        )
    return nodes[0][1]
