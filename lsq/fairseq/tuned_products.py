"""What is said of tuned products when a training is over."""

import logging
from pathlib import Path

from lsq import files
from lsq.gemm import lookup
from lsq.tune import coverage, product_list

logger = logging.getLogger(__name__)


def report(path: str | None) -> None:
    """Log which products were tuned, and list the others in `path` for `lsq tune --shapes`; nothing if none ran."""
    table = lookup.table()
    if not table.uses():
        return
    logger.info(coverage.text(table))
    if path:
        files.write_text(Path(path), product_list.text(coverage.missed(table)))
