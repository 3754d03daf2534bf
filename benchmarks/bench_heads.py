"""Splitting products into attention heads and merging them again, with bias and rounding."""

import sys

import operations

OPERATIONS = (
    "split_heads",
    "split_heads_backward",
    "merge_heads",
    "merge_heads_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("heads", __doc__, OPERATIONS))
