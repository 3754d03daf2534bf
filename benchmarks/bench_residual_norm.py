"""Bias, dropout, residual, LayerNorm and rounding between two blocks."""

import sys

import operations

OPERATIONS = (
    "bias_dropout_residual_layer_norm",
    "bias_dropout_residual_layer_norm_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("residual_norm", __doc__, OPERATIONS))
