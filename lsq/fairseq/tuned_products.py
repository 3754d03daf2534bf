"""Tuned products in fairseq: which files are used, and what is said of them when a training is over."""

import logging
from pathlib import Path

from lsq import files, gemm
from lsq.gemm import lookup
from lsq.tune import coverage, product_list

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
    """Log which products were tuned, and list the others in `path` for `lsq tune --shapes`; nothing if none ran."""
    table = lookup.table()
    if not table.uses():
        return
    logger.info(coverage.text(table))
    if path:
        files.write_text(Path(path), product_list.text(coverage.missed(table)))
