"""Products with a weight as layers run them: with rounding of sums, masks and gradients of clips."""

import sys

import operations

OPERATIONS = (
    "linear_int8",
    "linear_int32",
    "linear_input_gradient",
    "linear_weight_gradient",
)

if __name__ == "__main__":
    sys.exit(operations.main("linear_operations", __doc__, OPERATIONS))
