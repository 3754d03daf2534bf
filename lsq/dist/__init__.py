"""Int8 gradients between workers, and everything else that processes exchange."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.dist.config import GradientConfig
    from lsq.dist.hooks import GradientCompression, compress_gradients

__all__ = ["GradientCompression", "GradientConfig", "compress_gradients"]
__getattr__ = lazily(
    __name__,
    {"GradientCompression": "hooks", "GradientConfig": "config", "compress_gradients": "hooks"},
)
