"""lsq's own int8 products on the CPU: tiles that stay in the caches, with the epilogue in the same
pass.

The loops are in csrc/cpu; tiles.h says how operands are packed. This file says which instructions
they can use, and hands products over.
"""

import ctypes
import functools

import torch

from lsq.native import loader

PLAIN = "plain"
INSTRUCTIONS = {PLAIN: 0, "avx_vnni": 1, "avx512_vnni": 2, "amx": 3}
"""Instructions that multiply, the slowest first -> their numbers in csrc/cpu/tiles.h. "plain" is
C++ for processors without the others."""
PAIR = 32
"""Rows and columns that a kernel takes at a time: two tiles."""
INNER = 64
"""Inner elements of a tile."""
ALIGNMENT = 64
"""Bytes; the address of packed codes is a multiple."""
SPARSE_BLOCK = 1280
"""Bytes of two neighbouring tiles of a sparse weight; see csrc/cpu/sparse_tiles.h."""


@functools.cache
def usable() -> tuple[str, ...]:
    """Return the INSTRUCTIONS that processor and system allow, the fastest first, "plain" last."""
    if not loader.available():
        return ()
    function = loader.function("lsq_tiles_usable")
    function.restype = ctypes.c_int64
    return tuple(
        name for name, number in reversed(INSTRUCTIONS.items()) if function(ctypes.c_int64(number))
    )


def fastest() -> str:
    return (usable() or (PLAIN,))[0]


def preferred() -> tuple[str, ...]:
    """Return the usable instructions without "plain", unless it is the only one."""
    return usable()[:-1] or usable()


def vectorised() -> bool:
    """Return whether faster instructions than plain C++ multiply here."""
    return preferred() not in ((), (PLAIN,))


def packed_bytes(columns: int, inner: int) -> int:
    """Return the bytes of packed codes [N, K]: whole tiles, and a sum for each column."""
    return -(-columns // PAIR) * PAIR * (-(-inner // INNER) * INNER + 4)


def packed_sparse_bytes(columns: int, inner: int) -> int:
    """Return the bytes of packed 2:4 sparse codes, which store two of four."""
    pairs = -(-columns // PAIR)
    return pairs * (-(-inner // INNER) * SPARSE_BLOCK + 4 * PAIR)


class _Codes(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("transposed", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "_Codes":
        transposed = (
            matrix.stride(-1) != 1
            and matrix.shape[0] > 1
            or matrix.stride(0) == 1
            and matrix.shape[1] > 1
        )
        return cls(
            matrix.data_ptr(), matrix.stride(1) if transposed else matrix.stride(0), transposed
        )


class TileProduct(ctypes.Structure):
    """a int8 [M, K] times b int8 [N, K] transposed, as csrc/cpu/tiles.h declares it. Both may be
    transposed views; neither is kept alive. `memory`: packed_bytes(N, K) at a multiple of
    ALIGNMENT; None for loops that pack columns themselves. `strip`: rows that a thread takes at a
    time; 0: as many as suit the caches."""

    _fields_ = [
        ("a", _Codes),
        ("b", _Codes),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("instructions", ctypes.c_int64),
        ("strip", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
    ]

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        instructions: str,
        memory: torch.Tensor | None,
    ) -> "TileProduct":
        """Describe a product. Raises ValueError: these instructions are not usable here."""
        if instructions not in usable():  # `usable` also asks the system to allow them
            raise ValueError(
                f"{instructions!r} cannot run here; there are {', '.join(map(repr, usable()))}"
            )
        (rows, inner), columns = a.shape, b.shape[0]
        number, address = INSTRUCTIONS[instructions], None if memory is None else memory.data_ptr()
        return cls(_Codes.of(a), _Codes.of(b), rows, columns, inner, number, 0, address)

    @property
    def packed(self):
        return ctypes.byref(self)
