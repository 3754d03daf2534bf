"""The fairseq plugin. Importing it registers models, architectures, tasks, criterion and optimizer.

fairseq imports it through `--user-dir $(lsq user-dir)`; docs/fairseq.md says how to use it.
"""

# compatibility first: it prepares fairseq for this PyTorch
from lsq.fairseq import compatibility  # noqa: F401  isort: skip
from lsq.fairseq import (  # noqa: F401  isort: skip
    architectures,
    criterion,
    language_model,
    model,
    optimizer,
    task,
)
