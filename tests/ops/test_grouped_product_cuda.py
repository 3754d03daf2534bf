"""GroupedProduct on CUDA: a kernel in the emulator, or on a GPU."""

import pytest
import torch

from lsq.native import tiles
from lsq.native.compiler import compile_kernels
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_grouped_product import product_of
from tests.sampling import first


@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(
    "rows, columns, inner", first([(41, 80, 272), (1, 16, 16), (130, 48, 144)], 1)
)
@pytest.mark.parametrize("of_rows", [False, True])
def test_products(group, rows, columns, inner, of_rows):
    compare_cuda(product_of(rows, columns, inner, group, of_rows=of_rows))


def turns():
    """Three steps along K and more, and three groups."""
    for group in (16, 128):
        compare_cuda(product_of(150, 144, 528, group))


@pytest.mark.skipif(
    len(tiles.usable()) < 2, reason="plain C++ without fused multiply-adds adds up otherwise"
)
@pytest.mark.parametrize("group", [16, 32, 128])
def test_bits_are_those_of_the_cpu(group):
    operation = product_of(41, 80, 272, group)
    found = run(operation)
    operation.out = torch.empty(41, 80)
    operation.cpu(*(torch.empty(shape, dtype=dtype) for shape, dtype in operation.cpu_scratch()))
    assert torch.equal(found.out, operation.out)


@pytest.mark.parametrize("rows, inner", [(0, 32), (3, 0)])
def test_products_of_nothing(rows, inner):
    compare_cuda(product_of(rows, 32, inner, 32))


def test_widths_that_tiles_do_not_take_are_refused():
    with pytest.raises(ValueError, match="inner width of an int8 product is 40.*multiple of 16"):
        run(product_of(7, 32, 40, 32))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("rows", [64, 128])
def test_nothing_spills(target, rows):
    for group in (16, 32, 128):
        (entry,) = (
            product_of(rows, 64, 64, group)
            .bind(lambda one: torch.empty(one.shape, dtype=one.dtype))
            .cuda()
        )
        (taken,) = compile_kernels(
            entry.kernel.source, entry.kernel.defines, target
        ).resources.values()
        assert not taken.spill_bytes
