"""How gradients travel between workers, and which workers share a node."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lsq.config import require_choice, require_positive, require_whole
from lsq.config.checks import accept, warn, without_constants
from lsq.quant import GRADIENT

COMPRESSED = ("gcq", "int8", "int8_hier", "lean", "lean5")
"""Modes whose codes lsq makes."""
MODES = ("auto", *COMPRESSED, "bf16", "fp16")
GCQ_ADVISED_WORKERS = 16
"""With more workers, gcq has fewer than 7 codes on each side of zero, and a warning says so."""
BLOCK = 128
"""Neighbouring values that share a scale, a bfloat16; blocks of 64 would send 1.5 % more."""
ROW = 1024
"""gcq: neighbouring values that share a clip."""
QUANTILE = 0.99
"""gcq: share of a row's magnitudes that lie within its clip."""
CONSTANT = {
    "block": BLOCK,
    "rounding": "nearest",
    "error_feedback": False,
    "row": ROW,
    "quantile": QUANTILE,
}
"""Fields of version 0.1 that can no longer be chosen, and their values."""


def _of_this_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make fields of GradientConfig from the fields of version 0.1."""
    fields = {name: value for name, value in given.items() if name != "seed"}
    if "seed" in given:
        warn("seed decides nothing now, since no mode rounds at random: leave it out")
    if "rounding" in fields and fields["rounding"] is None:
        fields["rounding"] = "nearest"
    return without_constants(fields, CONSTANT)


@accept(_of_this_version)
@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """How the workers of a training average their gradients.

    Formulas and figures: docs/distributed.md.
    """

    mode: str = "auto"
    """"int8" (two hops, for one GPU a node), "int8_hier" (floats inside a node, int8 between
    nodes), "lean" and "lean5" (4.5 and 5.25 bits, between nodes if there are several; CPU), "gcq"
    (LightSeq's scheme, for few workers), "bf16" or "fp16" (PyTorch's own hooks), or "auto": floats,
    bf16, int8 or lean, as a trial at the start says.
    """
    node_size: int | None = None
    """Workers on a node; None: what torchrun started there (LOCAL_WORLD_SIZE), or else on one
    host."""
    timeout_s: float = 600.0
    """Seconds after which an exchange fails if a worker does not take part."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        if self.node_size is not None:
            require_whole("node_size", self.node_size)
        require_positive("timeout_s", self.timeout_s)


def kept_largest(values: int) -> int:
    """Return which magnitude of a row of `values` values is its gcq clip; 1: the largest."""
    # 100 * (1 - 0.99) is a little more than 1
    return max(1, math.ceil(round(values * (1 - QUANTILE), 6)))


def gcq_levels(workers: int) -> int:
    """Return the largest code that each worker may send under gcq, so that int8 sums cannot
    overflow. Raises ValueError: it is 0."""
    levels = GRADIENT.largest // workers
    if levels == 0:
        raise ValueError(
            f"mode gcq sums codes in int8, so that each of {workers} workers may send codes up to"
            f" {GRADIENT.largest} // {workers} = 0: every gradient would be zero; choose int8 or"
            " int8_hier, whose precision does not fall with the number of workers"
        )
    return levels


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One worker among all that average their gradients. Nodes have equal size; ranks are counted
    node by node, as torchrun does."""

    world_size: int
    rank: int
    node_size: int
    """Workers on each node."""

    @property
    def nodes(self) -> int:
        return self.world_size // self.node_size

    @property
    def all_neighbours(self) -> list[list[int]]:
        """The ranks on each node, in order."""
        ranks = list(range(self.world_size))
        return [ranks[at : at + self.node_size] for at in ranks[:: self.node_size]]

    @property
    def all_counterparts(self) -> list[list[int]]:
        """The ranks at the same position of every node, one list for each position."""
        return [list(range(at, self.world_size, self.node_size)) for at in range(self.node_size)]


def find_topology(
    world_size: int,
    rank: int,
    node_size: int | None,
    hosts: Callable[[], Sequence[str]],
    environment: Mapping[str, str] = os.environ,
) -> Topology:
    """Return the Topology for `node_size`, or else for the size that torchrun gives
    (LOCAL_WORLD_SIZE), or else for the hosts. `hosts`: returns the name of each worker's host, in
    order of ranks. Raises ValueError: nodes of this size do not divide the workers, or hosts have
    different numbers of workers."""
    if node_size is None:
        launched = environment.get("LOCAL_WORLD_SIZE")
        node_size = _node_size_of(hosts()) if launched is None else int(launched)
    if world_size % node_size:
        raise ValueError(
            f"{world_size} workers cannot be divided into nodes of {node_size} (node_size, or what"
            " torchrun started: LOCAL_WORLD_SIZE); start as many workers on every node, or set"
            " node_size to a divisor"
        )
    return Topology(world_size=world_size, rank=rank, node_size=node_size)


def _node_size_of(hosts: Sequence[str]) -> int:
    nodes = [(host, len(list(workers))) for host, workers in groupby(hosts)]
    if len({count for _, count in nodes}) > 1 or len({host for host, _ in nodes}) < len(nodes):
        listed = ", ".join(f"{count} on {host}" for host, count in nodes[:8])
        raise ValueError(
            f"workers are spread over hosts unevenly ({listed}{', ...' if len(nodes) > 8 else ''});"
            " start as many on every host, counted host by host, or choose mode int8, which knows"
            " of no nodes"
        )
    return nodes[0][1]
