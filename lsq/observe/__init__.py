"""Statistics of rounded tensors (`observe`, `Signals`) and noise of modules (`lsq.monitor`)."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.observe.monitor import Monitor
    from lsq.observe.noise import Bounds, Reading
    from lsq.observe.signals import Signals
    from lsq.observe.statistics import TensorStatistics, observe, quantized_tensors

_FILES = {
    "Monitor": "monitor",
    "Bounds": "noise",
    "Reading": "noise",
    "Signals": "signals",
    "TensorStatistics": "statistics",
    "observe": "statistics",
    "quantized_tensors": "statistics",
}
__all__ = [
    "Bounds",
    "Monitor",
    "Reading",
    "Signals",
    "TensorStatistics",
    "observe",
    "quantized_tensors",
]
__getattr__ = lazily(__name__, _FILES)
