"""Attention: scores, masks, softmax, dropout and the weighted sum, in float32."""

import sys

import operations

OPERATIONS = (
    "attention",
    "attention_backward",
)

if __name__ == "__main__":
    sys.exit(operations.main("attention", __doc__, OPERATIONS))
