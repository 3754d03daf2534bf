"""Graphs: neighbours of nodes."""

from lsq.graphs.adjacency import Adjacency

__all__ = ["Adjacency"]
