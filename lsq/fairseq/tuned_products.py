"""Tuned products in fairseq: which files are used, and what is said of them when a training is over."""

import logging
from pathlib import Path

from lsq import gemm
from lsq.gemm import lookup
from lsq.tune import coverage

logger = logging.getLogger(__name__)


def use_file(path: str | None) -> None:
    """Take tuned products from this file alone; None: from the user's folder and the package.

    Raises:
        ValueError: the file is damaged or was made for another device.
        OSError: it cannot be read.
    """
    if path:
        gemm.set_files([Path(path)])


def report(path: str | None) -> None:
    """Log which products were tuned, and write the report to `path` for `lsq tune --missing`; nothing if none ran."""
    found = coverage.of(lookup.table())
    if not found.lines:
        return
    logger.info(found.text())
    if path:
        coverage.write(Path(path), found)
