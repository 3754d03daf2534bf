"""GroupedProduct: by every instruction, against float64, and bit by bit against each other."""

import math

import pytest
import torch

from lsq.native import loader, tiles
from lsq.ops.grouped_product import GroupedCodes, GroupedProduct, packed_bytes
from lsq.quant.numbers import scaled_format
from tests.ops.compare import compare, empty


def codes_of(rows, inner, group, scale_rows, scale_columns) -> GroupedCodes:
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    return GroupedCodes(
        codes=codes, scale=0.01 + torch.rand(scale_rows, scale_columns), group=group
    )


def product_of(rows, columns, inner, group, *, of_rows=False) -> GroupedProduct:
    """Of scales of groups; `of_rows`: a has one scale for each row."""
    groups = -(-inner // group)
    a = codes_of(rows, inner, group, rows, 1 if of_rows else groups)
    b = codes_of(columns, inner, group, columns, groups)
    return GroupedProduct(a=a, b=b, out=empty(rows, columns))


def assert_exact(found: GroupedProduct, out: torch.Tensor) -> None:
    """Within what float32 sums of as many numbers lose, in any order."""
    exact = found.a.decode().double() @ found.b.decode().double().t()
    sizes = found.a.decode().double().abs() @ found.b.decode().double().abs().t()
    assert ((out - exact).abs() <= 2.0**-23 * (2 + found.inner // found.b.group) * sizes).all()


def by(product: GroupedProduct, instructions: str) -> torch.Tensor:
    """out [M, N], of b that was packed before."""
    product = product.bind(
        lambda one: one if isinstance(one, torch.Tensor) else torch.full(one.shape, math.nan)
    )
    packed, rows = (torch.full(shape, 85, dtype=dtype) for shape, dtype in product.cpu_scratch())
    packed = packed[-packed.data_ptr() % 64 :][: packed_bytes(product)]
    loader.call("lsq_pack_grouped", product, packed)
    product.multiply(packed, rows, instructions)
    return product.out


@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(
    "rows, columns, inner", [(1, 1, 1), (7, 33, 100), (41, 64, 130), (70, 97, 256), (9, 16, 515)]
)
@pytest.mark.parametrize("of_rows", [False, True])
def test_products(group, rows, columns, inner, of_rows):
    product = product_of(rows, columns, inner, group, of_rows=of_rows)
    assert_exact(product, compare(product).out)
    bits = [by(product, instructions) for instructions in tiles.usable()]
    fast = bits[:-1] if loader.library()._name.endswith("v1.so") else bits
    assert all(torch.equal(one, fast[0]) for one in fast)
    for one in bits:
        assert_exact(product, one)


@pytest.mark.parametrize(
    "shape_a, shape_b", [((1, 1), (1, 1)), ((5, 1), (40, 1)), ((1, 1), (40, 3)), ((5, 3), (1, 1))]
)
def test_scales_that_rows_and_groups_share(shape_a, shape_b):
    a, b = codes_of(5, 80, 32, *shape_a), codes_of(40, 80, 32, *shape_b)
    product = GroupedProduct(a=a, b=b, out=empty(5, 40))
    assert_exact(product, compare(product).out)


@pytest.mark.parametrize("rows, columns, inner", [(0, 32, 64), (3, 0, 64), (3, 32, 0)])
def test_products_of_nothing(rows, columns, inner):
    assert not compare(product_of(rows, columns, inner, 32)).out.any()


def test_sums_at_their_ends():
    """All codes -127 or 127, and -128, which no format gives."""
    product = product_of(33, 32, 256, 128)
    for low in (-128, -127):
        product.a.codes.fill_(low), product.b.codes.fill_(low)
        assert_exact(product, compare(product).out)


def test_nan_stays_in_its_row_and_column():
    product = product_of(5, 40, 100, 32)
    product.a.scale[3, 1] = product.b.scale[7, 2] = math.nan
    missing = compare(product).out.isnan()
    assert missing[3].all() and missing[:, 7].all() and missing.sum() == 44


@pytest.mark.parametrize(
    "name",
    [
        "int8/group32",
        "mxint8",
        "int4/group16",
        "vsquant4",
        "nvfp4",
        "mxfp4",
        "int8/row",
        "ternary/tensor",
    ],
)
def test_formats_whose_products_are_those_of_their_values(name):
    form, x, weight = scaled_format(name), torch.randn(7, 100), torch.randn(33, 100)
    a, b = GroupedCodes.of(x, form), GroupedCodes.of(weight, form, "mse")
    assert torch.equal(a.decode(), form.decode(form.encode(x)))
    assert torch.equal(b.decode(), form.decode(form.encode(weight, "mse")))
    product = GroupedProduct(a=a, b=b, out=empty(7, 33))
    assert_exact(product, compare(product).out)


def test_rows_meet_groups():
    a = GroupedCodes.of(torch.randn(7, 100), scaled_format("int8/row")).regrouped(32)
    b = GroupedCodes.of(torch.randn(33, 100), scaled_format("int4/group32"))
    product = GroupedProduct(a=a, b=b, out=empty(7, 33))
    assert_exact(product, compare(product).out)
    with pytest.raises(ValueError, match="groups of 32, which cannot become groups of 64"):
        b.regrouped(64)


@pytest.mark.parametrize(
    "name", ["fp8-e4m3/row", "log4.3/row", "nf4-64", "int8/channel", "int8/block4x16"]
)
def test_formats_that_have_no_int8_product_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} has no product of int8 codes: choose"):
        GroupedCodes.of(torch.randn(8, 64), scaled_format(name))


def test_operands_that_do_not_fit_are_refused():
    def product(a, b):
        return GroupedProduct(a=a, b=b, out=empty(5, 40))

    with pytest.raises(ValueError, match="groups have 24 values; a product takes multiples of 16"):
        product(codes_of(5, 48, 24, 5, 2), codes_of(40, 48, 24, 40, 2))
    with pytest.raises(
        ValueError, match="a has rows of 64 values in groups of 32, b of 48 in groups of 32"
    ):
        product(codes_of(5, 64, 32, 5, 2), codes_of(40, 48, 32, 40, 2))
    with pytest.raises(
        ValueError, match=r"of b have the shape \[2, 40\].*take \[40, 2\] or \[40, 1\] or \[1, 1\]"
    ):
        product(codes_of(5, 64, 32, 5, 2), codes_of(40, 64, 32, 2, 40))
