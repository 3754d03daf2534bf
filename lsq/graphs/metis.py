"""Cuts a graph into parts with few edges between them (METIS), and keeps the parts in a file."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lsq import extras, files
from lsq.graphs.adjacency import Adjacency

logger = logging.getLogger(__name__)

LARGEST_SEED = 2**31 - 1


def partition(
    adjacency: Adjacency, parts: int, seed: int = 0, file: str | os.PathLike | None = None
) -> torch.Tensor:
    """Return the part of each node, int32 [N], from 0 to parts - 1. A part may be empty.

    METIS sees an undirected graph without loops and repeated edges. The parts are as large as each
    other, and few edges lead from one to another.

    Args:
        parts: 1 to N.
        seed: of METIS, from 0 to LARGEST_SEED.
        file: where the parts are kept. If it exists they are read from it, in place of cutting.

    Raises:
        ValueError: `parts` or `seed` is not allowed; the file is damaged, or of another graph,
            number of parts or seed.
        OSError: the file cannot be read or written.
        MissingPackage: pymetis is not installed.
    """
    check_parts(adjacency, parts)
    if not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed!r}; it must be a whole number from 0 to {LARGEST_SEED}")
    adjacency = adjacency.to("cpu")
    if file is None:
        return _cut(adjacency, parts, seed)
    path = Path(file)
    graph = _checksum(adjacency.indptr, adjacency.indices)
    wanted = {"graph": graph, "parts": str(parts), "seed": str(seed)}
    if path.exists():
        return _read(path, wanted)
    found = _cut(adjacency, parts, seed)
    content = save({"part": found}, {**wanted, "checksum": _checksum(found)})
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, lambda opened: opened.write(content), mark=f".{os.getpid()}")
    return found


def check_parts(adjacency: Adjacency, parts: int) -> None:
    """Raise ValueError unless the graph can be cut into so many parts."""
    if not isinstance(parts, int) or not 1 <= parts <= adjacency.nodes:
        raise ValueError(
            f"parts is {parts!r}; it must be a whole number from 1 to the number of nodes,"
            f" {adjacency.nodes}"
        )


def _cut(adjacency: Adjacency, parts: int, seed: int) -> torch.Tensor:
    if parts == 1:
        return torch.zeros(adjacency.nodes, dtype=torch.int32, device="cpu")
    extras.require("partition", "graphs")
    import pymetis

    edges = _distinct(adjacency)
    both = _distinct(Adjacency.from_edges(torch.cat([edges, edges.flip(0)], 1), adjacency.nodes))
    if both.shape[1] > edges.shape[1]:
        logger.warning(
            "the graph is not symmetric; METIS cuts it as if each edge led both ways, and batches"
            " keep its edges as they are"
        )
    undirected = Adjacency.from_edges(both, adjacency.nodes)
    dtype = pymetis.zero_copy_dtype()
    csr = [part.numpy().astype(dtype) for part in (undirected.indptr, undirected.indices)]
    options = pymetis.Options(seed=seed)
    found = pymetis.part_graph(parts, pymetis.CSRAdjacency(*csr), options=options).vertex_part
    return torch.tensor(found, dtype=torch.int32, device="cpu")


def _distinct(adjacency: Adjacency) -> torch.Tensor:
    """Return the edges int32 [2, E], each once, without those from a node to itself."""
    reverse = adjacency.transposed  # its indices rise within each row
    edges = torch.stack([reverse.targets, reverse.indices])
    kept = edges[0] != edges[1]
    kept[1:] &= (edges[:, 1:] != edges[:, :-1]).any(0)
    return edges[:, kept]


def _read(path: Path, wanted: dict[str, str]) -> torch.Tensor:
    """Return the parts in a file. Raises ValueError: it is damaged or another cut."""
    remedy = "remove it, and it is made anew, or name another file"
    try:
        with safe_open(path, "pt") as opened:
            found, given = opened.get_tensor("part"), opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no partition ({error}); {remedy}") from None
    if given.get("checksum") != _checksum(found):
        raise ValueError(f"{path} is damaged: its checksum is another; {remedy}")
    if given.get("graph") != wanted["graph"]:
        raise ValueError(f"{path} is the partition of another graph; {remedy}")
    for name in ("parts", "seed"):
        if given.get(name) != wanted[name]:
            raise ValueError(
                f"{path} was cut with {name}={given.get(name)}, not {wanted[name]}; give"
                f" {name}={given.get(name)}, or {remedy}"
            )
    return found


def _checksum(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()
