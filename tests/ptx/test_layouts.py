"""The project's layouts of fragments, shared memory and descriptors are CuTe's.

The functions run in the emulator, and as NVRTC compiles them in the interpreter.
"""

import shutil
from pathlib import Path

import numpy
import pytest
import torch

from lsq.models.sparsity import choose
from lsq.native.launch import Kernel
from tests.emulator import emulated
from tests.ptx.interpreter import Module, ptx_of
from tests.ptx.layouts import LANES, WORDS, matrix_load, table, tables

KERNELS = Path(__file__).parent / "kernels"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


class InEmulator:
    """A file of kernels, compiled by g++."""

    def __init__(self, source: str, **defines: int):
        self._module = emulated.Module(str(KERNELS / source), defines=tuple(defines.items()))

    def launch(self, name: str, threads: int, *arguments, shared: int = 0) -> None:
        self._module.launch(name, 1, threads, *arguments, shared=shared)


class InInterpreter:
    """A file of kernels, compiled by NVRTC."""

    def __init__(self, source: str, **defines: int):
        pytest.importorskip("cuda.bindings.nvrtc")
        kernel = Kernel(
            source=str(KERNELS / source), name="", defines=tuple(sorted(defines.items()))
        )
        self._module = Module(ptx_of(kernel, "compute_90a"))

    def launch(self, name: str, threads: int, *arguments, shared: int = 0) -> None:
        self._module.launch(name, *arguments, block=(threads, 1, 1), shared=shared)


@pytest.fixture(params=[InEmulator, InInterpreter])
def kernels(request):
    return request.param


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fragments(layout: numpy.ndarray, matrix: torch.Tensor) -> torch.Tensor:
    """What each lane holds of a matrix [rows, columns]."""
    return matrix.t().reshape(-1)[torch.from_numpy(layout)].contiguous()


def whole(layout: numpy.ndarray, held: torch.Tensor, rows: int) -> torch.Tensor:
    """The matrix that lanes hold."""
    flat = torch.empty(layout.size, dtype=held.dtype)
    flat[torch.from_numpy(layout.reshape(-1).copy())] = held.reshape(-1)
    return flat.reshape(-1, rows).t()


def multiply(kernels, kind: int, name: str, a, b, sums, kept=None) -> torch.Tensor:
    """sums [16, 8] of fragments that lie as CuTe says."""
    operands = [
        fragments(tables()[f"{name} {operand}"], matrix) for operand, matrix in (("A", a), ("B", b))
    ]
    held = fragments(table(f"{name} C"), sums)
    kept = torch.zeros(LANES, dtype=torch.int32) if kept is None else kept
    kernels("layouts.cu", KIND=kind, COLUMNS=64).launch(
        "product_of_fragments", LANES, *operands, kept, held
    )
    return whole(table(f"{name} C"), held, 16)


def test_a_product_of_int8(kernels):
    a, b = integers(16, 32), integers(8, 32)
    sums = torch.randint(-999, 999, (16, 8), dtype=torch.int32)
    found = multiply(kernels, 0, "mma.m16n8k32.s8", a, b, sums)
    assert torch.equal(found, sums + a.int() @ b.int().t())


def test_a_product_of_bits(kernels):
    a, b = torch.randint(2, (16, 256)), torch.randint(2, (8, 256))
    sums = torch.randint(-999, 999, (16, 8), dtype=torch.int32)
    name = "mma.m16n8k256.b1"
    packed = [
        numpy.packbits(fragments(table(f"{name} {operand}"), bits).numpy(), 1, "little")
        for operand, bits in (("A", a), ("B", b))
    ]
    held = fragments(table(f"{name} C"), sums)
    given = (*map(torch.from_numpy, packed), torch.zeros(LANES, dtype=torch.int32), held)
    kernels("layouts.cu", KIND=1, COLUMNS=64).launch("product_of_fragments", LANES, *given)
    assert torch.equal(whole(table(f"{name} C"), held, 16), sums + (a @ b.t()).int())


def test_a_product_of_bfloat16(kernels):
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    sums = torch.randn(16, 8)
    found = multiply(kernels, 2, "mma.m16n8k16.bf16", a, b, sums)
    expected = (sums.double() + a.double() @ b.double().t()).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_sparse_product(kernels):
    a, b = integers(16, 64), integers(8, 64)
    chosen = choose(torch.rand(16, 64))
    sums = torch.randint(-999, 999, (16, 8), dtype=torch.int32)
    name = "mma.sp.m16n8k64.s8"
    stored = a[chosen].reshape(16, 32)
    places = chosen.reshape(16, 16, 4).nonzero()[:, 2].reshape(16, 16, 2)
    nibbles = fragments(tables()[f"{name} metadata"], places[..., 0] | places[..., 1] << 2)
    kept = (nibbles << 4 * torch.arange(8)).sum(1).int()
    found = multiply(kernels, 3, name, stored, b, sums, kept)
    assert torch.equal(found, sums + (a * chosen).int() @ b.int().t())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [0, 1])
def test_loads_of_matrices(kernels, count, transposed):
    x = torch.arange(32 * 8, dtype=torch.int16)
    out = torch.empty(LANES, 2 * count, dtype=torch.int16)
    source = str(emulated.FOLDER / "tensor_cores.cu")
    kernels(source, COUNT=count, TURNED=transposed).launch("matrices", LANES, x, out, 16, 0, 0)
    expected = matrix_load(f"ldmatrix.x{count}" + ".trans" * transposed)
    assert numpy.array_equal(out.numpy(), expected)


def swizzled(matrix: torch.Tensor) -> torch.Tensor:
    """Rows of 128 bytes as CuTe's layout for wgmma with that swizzle has them."""
    chunks = numpy.array(WORDS["wgmma chunks of layout_type 1"])
    pattern = matrix.reshape(-1, 64, 16)
    found = torch.empty_like(pattern)
    found[:, torch.from_numpy(chunks)] = pattern
    return found.reshape(matrix.shape)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_product_of_a_warpgroup(kernels, columns):
    """Of the second quarter of rows of 128 values."""
    a, b = integers(64, 128), integers(columns, 128)
    name = f"wgmma.m64n{columns}k32.s8 C"
    out = torch.empty(128, columns // 2, dtype=torch.int32)
    kernels("layouts.cu", KIND=0, COLUMNS=columns, WGMMA=1).launch(
        "product_of_warpgroup", 128, swizzled(a), swizzled(b), out, shared=128 * (64 + columns)
    )
    found = whole(table(name), out, 64)
    assert torch.equal(found, a[:, 32:64].int() @ b[:, 32:64].int().t())


@pytest.mark.parametrize("by, layout_type", [("", 2), ("WGMMA", 1), ("FIELD_BITS", 1)])
def test_places(kernels, by, layout_type):
    """Rows of 64 bytes, and of 128 by wgmma or beside packed fields."""
    pattern = numpy.array(WORDS[f"wgmma chunks of layout_type {layout_type}"])
    chunks, descriptors = torch.empty(64, len(pattern) // 8).int(), torch.zeros(2).long()
    given = kernels("layouts.cu", KIND=0, COLUMNS=64, **({by: 1} if by else {}))
    given.launch("places", 64, chunks, descriptors, shared=1024)
    expected = pattern + len(pattern) * numpy.arange(8)[:, None]
    assert numpy.array_equal(chunks.numpy().reshape(expected.shape), expected)


def test_descriptors(kernels):
    chunks, descriptors = torch.empty(64, 8).int(), torch.zeros(2).long()
    given = kernels("layouts.cu", KIND=0, COLUMNS=64, WGMMA=1)
    given.launch("places", 64, chunks, descriptors, shared=1024)
    plain = WORDS["descriptor of a [64, 128] int8 without its address"]
    assert descriptors[0].item() % 2**64 == plain
    assert descriptors[1].item() == 32 >> 4
