"""What number formats cost: the errors that they make in the weights, activations and gradients of a model."""

from lsq.errors.measuring import DEFAULT_FORMATS, measure, measure_tensors
from lsq.errors.picture import draw
from lsq.errors.table import Errors

__all__ = ["DEFAULT_FORMATS", "Errors", "draw", "measure", "measure_tensors"]
