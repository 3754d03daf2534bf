"""Embedding of tokens and positions, with dropout."""

import sys

import operations

OPERATIONS = (
    "embedding",
    "embedding_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("embedding", __doc__, OPERATIONS))
