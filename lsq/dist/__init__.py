"""Codes of gradients and updates between workers, and all else that processes exchange."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.dist.config import GradientConfig
    from lsq.dist.hooks import GradientCompression, compress_gradients
    from lsq.dist.local_updates import LocalUpdates

__all__ = ["GradientCompression", "GradientConfig", "LocalUpdates", "compress_gradients"]
__getattr__ = lazily(
    __name__,
    {
        "GradientCompression": "hooks",
        "GradientConfig": "config",
        "LocalUpdates": "local_updates",
        "compress_gradients": "hooks",
    },
)
