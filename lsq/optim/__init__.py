"""Adam, which also writes the codes of lsq's weights and limits the steps of their clips."""

from lsq.optim.adam import Adam

__all__ = ["Adam"]
