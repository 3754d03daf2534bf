"""Rotary embeddings on CUDA: kernels in the emulator, or on a GPU."""

import pytest

from lsq.native import compiler
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_rotation import gradient_of, rotate

CASES = [
    {"rows": 7, "width": 64},
    {"width": 24, "rotated": 16},
    {"rows": 3, "width": 128, "queries": 3, "keys": 1},
]
"""One vector of a thread, with columns that stay; two."""


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes(options, normed, dtype):
    forward = rotate(**options, normed=normed)
    compare_cuda(forward, dtype)
    compare_cuda(gradient_of(forward), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [0, 41])
def test_ends(rows, normed):
    forward = rotate(rows, width=32, normed=normed, to=0.9)
    compare_cuda(forward, exact=not normed)
    compare_cuda(gradient_of(forward, to_rounded=True))


def test_heads_that_kernels_do_not_have_are_refused():
    for options in ({"width": 12, "rotated": 8}, {"width": 24, "rotated": 24}):
        with pytest.raises(
            ValueError,
            match="columns of which .* are rotated cannot run on CUDA.*multiple of 8.* of 16",
        ):
            rotate(**options).cuda()


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("normed", [0, 1])
def test_kernels_compile_without_spills(target, normed):
    for columns, lanes, heads in ((1536, 128, 16), (3072, 256, 40)):
        defines = (
            ("COLUMNS", columns),
            ("FLOAT", 1),
            ("HEADS", heads),
            ("LANES", lanes),
            ("NORMED", normed),
            ("ROUNDED", 1),
            ("ROTATED", 64),
            ("WIDTH", 64),
        )
        found = compiler.compile_kernels("rotation.cu", defines, target).resources
        assert len(found) == 2 and not any(taken.spill_bytes for taken in found.values())
