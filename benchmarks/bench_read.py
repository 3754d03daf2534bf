"""Reading a product by itself: float values with bias, and the rounding of their gradient."""

import sys

import operations

OPERATIONS = (
    "read_product",
    "read_product_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("read", __doc__, OPERATIONS))
