"""What number formats cost: the errors that they make in the weights, activations and gradients of
a model, and what those cost in loss.
"""

from lsq.errors.costs import Cost, Costs, TensorCosts, read_costs
from lsq.errors.costs_picture import draw_costs
from lsq.errors.costs_table import correlation
from lsq.errors.measuring import DEFAULT_FORMATS, measure, measure_tensors
from lsq.errors.picture import draw
from lsq.errors.sensitivity import Keep, sensitivity
from lsq.errors.table import Errors

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
