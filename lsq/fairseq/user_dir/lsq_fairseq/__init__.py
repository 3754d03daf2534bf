"""The folder for fairseq's --user-dir: importing it registers lsq's model, architectures, task and
criterion."""

import lsq.fairseq  # noqa: F401
