"""Projection onto the vocabulary with label-smoothed cross-entropy, without storing logits."""

import sys

import operations

OPERATIONS = (
    "vocabulary_cross_entropy",
    "vocabulary_cross_entropy_gradient",
)

if __name__ == "__main__":
    sys.exit(operations.main("cross_entropy", __doc__, OPERATIONS))
