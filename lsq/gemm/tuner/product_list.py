"""Lists of products as CSV: written by `lsq tune --list` and trainings, read by `lsq tune
--shapes`."""

import csv
import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsq.files import json_file
from lsq.gemm.product_key import ProductKey

FIELDS = [field.name for field in dataclasses.fields(ProductKey)]
NEEDED = ("op", "m", "n", "k")
_DIGITS = re.compile("[0-9]{1,19}")


def text(keys: Sequence[ProductKey]) -> str:
    """Return products as CSV: op, m, n, k, and the other fields that any product needs."""
    rows = [{"op": key.op, **key.fields()} for key in keys]
    used = {name for row in rows for name in row} | set(NEEDED)
    file = io.StringIO()
    writer = csv.DictWriter(file, [name for name in FIELDS if name in used], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def read(path: Path) -> list[ProductKey]:
    """Read the products of a CSV file. Its heading has fields of ProductKey; op, m, n and k are
    needed. Raises ValueError: the file is wrong; the message says where; OSError: it cannot be
    read."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            if reader.fieldnames is None:
                raise ValueError(f"the file is empty; its heading must be {','.join(FIELDS)}")
            missing = [name for name in NEEDED if name not in reader.fieldnames]
            if missing:
                raise ValueError(
                    f"no column {', '.join(missing)}; the heading is {','.join(FIELDS)}"
                )
            return [_key(row) for row in reader]
        except (csv.Error, ValueError) as error:
            raise ValueError(
                f"{path}: line {max(1, reader.line_num)}: {error} (correct the file)"
            ) from None


def _key(row: dict[str | None, Any]) -> ProductKey:
    if None in row or None in row.values():
        raise ValueError("the heading and this line have different numbers of columns")
    texts = {name: cell.strip() for name, cell in row.items()}
    values = {
        name: int(cell) if _DIGITS.fullmatch(cell) else cell for name, cell in texts.items() if cell
    }
    return json_file.record(ProductKey, values, "")
