"""How many rows are multiplied by packed fields in registers: from a file that `lsq tune` wrote for
this processor, or by the rule of csrc/cpu/field_kernels.cpp.

For more rows, codes are unpacked to tiles. The result is the same.
"""

import functools
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lsq.files import json_file
from lsq.files.json_file import check_choice, check_text, check_whole, shown
from lsq.native.processor import cpu_model

logger = logging.getLogger(__name__)

FORMAT = 1
BY_RULE = -1
MOST = 16
"""Most rows for which registers are tried."""
NAME = "registers.json"
KINDS = (*(f"{bits}" for bits in range(1, 9)), *(f"{bits} bytes" for bits in range(1, 5)))
"""Stored types with one scale for each output: bits, and the table of codes that are not affine."""
_REMEDY = "delete the file, or write it again: lsq tune --device cpu"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was measured for a stored type. Raises ValueError: a field is wrong."""

    kind: str
    """One of KINDS."""
    instructions: str
    """Instructions that multiply, as in lsq.native.tiles."""
    rows: int
    """Rows up to which registers are faster; 0: never."""
    gain: float
    """Time by the rule over the time with `rows`, of all rows that were tried."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_text("instructions", self.instructions)
        check_whole("rows", self.rows, 0, MOST)
        json_file.check_number("gain", self.gain, 1e6)


def kind_of(bits: int, decode: str) -> str:
    """Return the name of codes of so many bits; `decode`: affine, bytes or words."""
    return f"{bits}" if decode == "affine" else f"{bits} {decode}"


def path() -> Path | None:
    """Return the file in the user's folder; None: there is no home folder."""
    from lsq.gemm.configuration_file import user_folder  # loads what GPUs need

    folder = user_folder()
    return None if folder is None else folder.parent / "cpu" / NAME


def write(where: Path, entries: list[Tuned]) -> None:
    """Write a file for this processor, whole or not at all."""
    head = {"format": FORMAT, "processor": cpu_model()}
    json_file.write(where, head, "entries", [asdict(entry) for entry in entries])
    _tuned.cache_clear()


def read(where: Path) -> dict[tuple[str, str], int]:
    """Return (kind, instructions) -> rows. Raises ValueError: the file is damaged, or for another
    processor or version; OSError: it cannot be read."""

    def build(content: Any) -> dict[tuple[str, str], int]:
        json_file.check_fields(content, ["format", "processor", "entries"], "")
        for name, here in (("format", FORMAT), ("processor", cpu_model())):
            if content[name] != here:
                raise ValueError(f"{name} is {shown(content[name])}; here it is {shown(here)}")
        entries = json_file.sequence(
            content["entries"], "entries", lambda one, at: json_file.record(Tuned, one, at)
        )
        return {(one.kind, one.instructions): one.rows for one in entries}

    return json_file.read(where, build, _REMEDY)


def most_rows(kind: str, instructions: str) -> int:
    """Return the rows up to which registers multiply; BY_RULE: nothing is tuned."""
    return _tuned().get((kind, instructions), BY_RULE)


@functools.cache
def _tuned() -> dict[tuple[str, str], int]:
    where = path()
    try:
        return {} if where is None else read(where)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        logger.warning("not used: %s", error)
        return {}
