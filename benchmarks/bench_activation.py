"""Bias, activation, dropout and rounding between the products of the feed-forward block."""

import sys

import operations

OPERATIONS = (
    "bias_activation_dropout",
    "bias_activation_dropout_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("activation", __doc__, OPERATIONS))
