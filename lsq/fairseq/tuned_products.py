"""What is said of tuned products when a training is over."""

import logging
import os
from pathlib import Path

from lsq import files
from lsq.gemm import lookup
from lsq.gemm.tuner import coverage, product_list

logger = logging.getLogger(__name__)


def check(path: str | None) -> None:
    """Refuse, before a training, a file that `report` could not write after it.

    Raises:
        ValueError: it is a folder, or its own folder is missing or cannot be written.
    """
    if path and (os.path.isdir(path) or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise ValueError(
            f"--lsq-gemm-coverage {path} cannot be written; name a file in a folder that is there"
        )


def report(path: str | None) -> None:
    """Log which products of each device were tuned, and list the others in `path` for `lsq tune
    --shapes`.

    Nothing is written if none ran.
    """
    asked = [table for table in lookup.tables() if table.uses()]
    for table in asked:
        logger.info(coverage.text(table))
    if path and asked:
        missed = dict.fromkeys(key for table in asked for key in coverage.missed(table))
        files.write_text(Path(path), product_list.text(list(missed)))
