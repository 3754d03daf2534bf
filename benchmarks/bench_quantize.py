"""Rounding of activations, weights and gradients to int8, and the optimizer's step that leaves a weight as codes."""

import sys

import operations

OPERATIONS = (
    "quantize",
    "quantize_weight",
)

if __name__ == "__main__":
    sys.exit(operations.main("quantize", __doc__, OPERATIONS, on_gpu=("quantize_transpose", "adam")))
