"""Signal-to-noise of a model's int8 modules while it trains; those with too much noise go on in
floats."""

from lsq.observe.monitor import Monitor, monitor
from lsq.observe.reading import Bounds, Reading

__all__ = ["Bounds", "Monitor", "Reading", "monitor"]
