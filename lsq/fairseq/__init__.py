"""The fairseq plugin. Importing it registers model, architectures, task, criterion and optimizer.

fairseq imports it through `--user-dir $(lsq user-dir)`; docs/fairseq.md says how to use it.
"""

from lsq.fairseq import (  # isort: skip
    compatibility,  # first: it prepares fairseq for this PyTorch
    architectures,
    criterion,
    language_model,
    model,
    optimizer,
    task,
)

__all__ = [
    "architectures",
    "compatibility",
    "criterion",
    "language_model",
    "model",
    "optimizer",
    "task",
]
