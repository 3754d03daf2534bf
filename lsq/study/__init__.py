"""Errors of number formats in the tensors of a model, and their cost in loss."""

from lsq.study.allocation import Allocation, Allocator, weight_groups
from lsq.study.costs import Cost, Costs, TensorCosts, correlation, read_costs
from lsq.study.errors import DEFAULT_FORMATS, Errors, measure, measure_tensors
from lsq.study.pictures import draw, draw_costs, draw_front
from lsq.study.refinement import KeptMixes, Refined, refine
from lsq.study.sensitivity import Keep, sensitivity

__all__ = [
    "DEFAULT_FORMATS",
    "Allocation",
    "Allocator",
    "Cost",
    "Costs",
    "Errors",
    "Keep",
    "KeptMixes",
    "Refined",
    "TensorCosts",
    "correlation",
    "draw",
    "draw_costs",
    "draw_front",
    "measure",
    "measure_tensors",
    "read_costs",
    "refine",
    "sensitivity",
    "weight_groups",
]
