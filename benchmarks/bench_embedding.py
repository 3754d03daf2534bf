"""Embedding of tokens and positions, with dropout."""

import operations

OPERATIONS = (
    "embedding",
    "embedding_backward",
)

if __name__ == "__main__":
    operations.main("embedding", __doc__, OPERATIONS)
