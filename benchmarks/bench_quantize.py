"""Rounding of activations and weights to int8."""

import sys

import operations

OPERATIONS = (
    "quantize",
    "quantize_weight",
)

if __name__ == "__main__":
    sys.exit(operations.main("quantize", __doc__, OPERATIONS))
