"""What number formats cost: the errors that they make in the weights, activations and gradients of
a model, and what those cost in loss.
"""

from lsq.study.costs import Cost, Costs, TensorCosts, read_costs
from lsq.study.costs_picture import draw_costs
from lsq.study.costs_table import correlation
from lsq.study.measuring import DEFAULT_FORMATS, measure, measure_tensors
from lsq.study.picture import draw
from lsq.study.sensitivity import Keep, sensitivity
from lsq.study.table import Errors

__all__ = [
    "DEFAULT_FORMATS",
    "Cost",
    "Costs",
    "Errors",
    "Keep",
    "TensorCosts",
    "correlation",
    "draw",
    "draw_costs",
    "measure",
    "measure_tensors",
    "read_costs",
    "sensitivity",
]
