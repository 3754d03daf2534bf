"""The folder for fairseq's --user-dir: importing it registers lsq's model, architectures, tasks,
criterion and optimizer."""

import lsq.fairseq  # noqa: F401
