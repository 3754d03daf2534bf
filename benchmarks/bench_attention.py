"""Attention: scores, masks, softmax, dropout and the weighted sum, in float32."""

import operations

OPERATIONS = (
    "attention",
    "attention_backward",
)

if __name__ == "__main__":
    operations.main("attention", __doc__, OPERATIONS)
