"""Errors of number formats in the tensors of a model, and their cost in loss."""

from lsq.study.allocate import allocate, timed
from lsq.study.allocation import Allocation, Allocator, Groups, groups_of
from lsq.study.codebooks import train_codebooks
from lsq.study.costs import Cost, Costs, TensorCosts, correlation, read_costs
from lsq.study.errors import DEFAULT_FORMATS, Errors, measure, measure_tensors, worst_error
from lsq.study.graph_allocation import GraphAllocation, GraphAllocator
from lsq.study.pictures import draw, draw_costs, draw_front
from lsq.study.resources import Budget
from lsq.study.search import Found, KeptMixes, Search, search
from lsq.study.sensitivity import Keep, estimate, sensitivity

__all__ = [
    "DEFAULT_FORMATS",
    "Allocation",
    "Allocator",
    "Budget",
    "Cost",
    "Costs",
    "Errors",
    "Found",
    "GraphAllocation",
    "GraphAllocator",
    "Groups",
    "Keep",
    "KeptMixes",
    "Search",
    "TensorCosts",
    "allocate",
    "correlation",
    "draw",
    "draw_costs",
    "draw_front",
    "estimate",
    "groups_of",
    "measure",
    "measure_tensors",
    "read_costs",
    "search",
    "sensitivity",
    "timed",
    "train_codebooks",
    "worst_error",
]
