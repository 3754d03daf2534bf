"""Graphs: which edges lead to a node (`Adjacency`)."""

from lsq.graphs.adjacency import Adjacency

__all__ = ["Adjacency"]
