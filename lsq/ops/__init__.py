"""Fused operations. Importing this package registers them all."""

from lsq.ops import (
    activation,
    adam,
    attention,
    cross_entropy,
    embedding,
    gradient_messages,
    heads,
    linear,
    linear_gradient,
    quantize,
    quantize_transpose,
    read,
    residual_norm,
)

__all__ = [
    "activation",
    "adam",
    "attention",
    "cross_entropy",
    "embedding",
    "gradient_messages",
    "heads",
    "linear",
    "linear_gradient",
    "quantize",
    "quantize_transpose",
    "read",
    "residual_norm",
]
