"""Optimizers that know what the layers of lsq want of one."""

from lsq.optim.adam import Adam

__all__ = ["Adam"]
