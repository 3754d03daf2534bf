"""CuTe's layouts of tensor cores' operands, as tables of numbers.

cute_layouts.cpp makes layouts.json from CUTLASS's headers: the project's own reading of the PTX
manual has no part in it.
"""

import ast
import functools
import json
from pathlib import Path

import numpy

LANES = 32
WORDS = json.loads(Path(__file__).with_name("layouts.json").read_text())


def table(name: str) -> numpy.ndarray:
    """[lanes, values] -> row + rows * column, of a layout "shape:stride"."""
    shape, stride = (ast.literal_eval(part.replace("_", "")) for part in WORDS[name].split(":"))
    lanes, values = (_offsets(*mode) for mode in zip(shape, stride, strict=True))
    return lanes[:, None] + values


def _offsets(shape, stride) -> numpy.ndarray:
    """Offsets of all coordinates of a mode; the first one runs fastest."""
    if isinstance(shape, int):
        return numpy.arange(shape) * stride
    found = numpy.zeros(1, dtype=int)
    for mode in zip(shape, stride, strict=True):
        found = (_offsets(*mode)[:, None] + found).reshape(-1)
    return found


def matrix_load(name: str) -> numpy.ndarray:
    """[lanes, 2 * words] -> 8 * lane + column of the two-byte value that lane's row gives."""
    source, destination = table(f"{name} source"), table(f"{name} destination")
    from_bit = {}
    for lane in reversed(range(LANES)):  # of lanes that give the same row the first one
        from_bit |= {bit: 8 * lane + at for at, bit in enumerate(source[lane, ::16])}
    return numpy.vectorize(from_bit.__getitem__)(destination[:, ::16])


def stored(name: str, rows: int) -> numpy.ndarray:
    """The layout of a sparse operand's stored values: every second one of each row."""
    row, column = table(name)[:, ::2] % rows, table(name)[:, ::2] // rows
    return row + rows * (column // 2)


def groups(name: str, rows: int) -> numpy.ndarray:
    """[lanes, groups of four columns] -> row + rows * group, of a sparse operand's metadata."""
    row, column = table(name)[:, ::4] % rows, table(name)[:, ::4] // rows
    return row + rows * (column // 4)


@functools.cache
def tables() -> dict[str, numpy.ndarray]:
    """All of them, as the interpreter takes them."""
    found = {}
    for name, content in WORDS.items():
        if isinstance(content, list):
            found[name] = content
        elif name.startswith("ldmatrix"):
            load = name.rpartition(" ")[0]
            found[load] = matrix_load(load)
        elif name.endswith("metadata"):
            found[name] = groups(name, 16)
        elif name.startswith("mma.sp") and name.endswith("A"):
            found[name] = stored(name, 16)
        elif isinstance(content, str):
            found[name] = table(name)
    return {name: numpy.ascontiguousarray(of, dtype=numpy.int32) for name, of in found.items()}
