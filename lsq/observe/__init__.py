"""Looks at the quantisers of a model: what each rounds (`observe`, `Signals`), and the noise of
whole modules (`monitor`)."""

from lsq.observe.monitor import Monitor, monitor
from lsq.observe.noise import Bounds, Reading
from lsq.observe.signals import Signals
from lsq.observe.statistics import TensorStatistics, mean_squares, observe, quantized_tensors

__all__ = [
    "Bounds",
    "Monitor",
    "Reading",
    "Signals",
    "TensorStatistics",
    "mean_squares",
    "monitor",
    "observe",
    "quantized_tensors",
]
