"""Int8 gradients between workers, and what processes say to each other."""

from lsq.dist.config import GradientConfig
from lsq.dist.hooks import GradientCompression, compress_gradients

__all__ = ["GradientCompression", "GradientConfig", "compress_gradients"]
