"""Graphs: which edges lead to a node (`Adjacency`), their parts, and batches of parts."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.graphs.adjacency import Adjacency
    from lsq.graphs.loader import ClusterLoader
    from lsq.graphs.metis import partition

__all__ = ["Adjacency", "ClusterLoader", "partition"]

_FILES = {"Adjacency": "adjacency", "ClusterLoader": "loader", "partition": "metis"}

__getattr__ = lazily(__name__, _FILES)
