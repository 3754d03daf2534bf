"""Graphs: which edges lead to a node (`Adjacency`), and their parts (`partition`)."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.graphs.adjacency import Adjacency
    from lsq.graphs.metis import partition

__all__ = ["Adjacency", "partition"]

__getattr__ = lazily(__name__, {"Adjacency": "adjacency", "partition": "metis"})
