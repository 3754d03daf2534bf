"""Weights packed as codes with scales of groups, and the projections that multiply them, beside
decoded values."""

import pytest
import torch

from lsq.native import loader, sources, tiles
from lsq.ops.fake_quantize import FakeQuantize, decode_weight
from lsq.ops.grouped_product import GroupedCodes, common_group
from lsq.ops.grouped_weight import pack_weight, unpacked_values
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.program.values import Dropout, Rows, Weight
from lsq.quant.numbers import scaled_format
from lsq.run.backends import backend
from tests.ops.compare import KEY, assert_close, compare, empty
from tests.ops.test_packed_project import LEVELS

PAIRS = (
    ("mxint8", "mxint8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("vsquant4", "vsquant4"),
    ("int4/group32", "int8/row"),
    ("int6/row", "int8/tensor"),
    ("int4/group48", "int8/group48"),
)
"""Formats of weights and of activations."""


def weight_of(columns: int, inner: int, name: str, group: int, *, in_out: bool = False) -> Weight:
    """With its decoded values and packed."""
    form, values = scaled_format(name), torch.randn(columns, inner)
    packed = torch.full((tiles.packed_group_bytes(columns, inner, group),), 85, dtype=torch.uint8)
    weight = Weight(
        format=form,
        values=values.t().contiguous() if in_out else values,
        clip=torch.full((columns,), 2.5),
        in_out=in_out,
        decoded=torch.empty(columns, inner),
        grouped=packed,
        group=group,
    )
    backend("cpu").run(decode_weight(weight))
    pack_weight(weight, backend("cpu").run)
    return weight


def encoded(x: torch.Tensor, name: str, group: int) -> FakeQuantize:
    form = scaled_format(name)
    codes = torch.empty(x.shape, dtype=torch.int8)
    coded = GroupedCodes(
        codes=codes, scale=torch.empty(len(x), form.grain.grid(x.shape)[1]), group=group
    )
    operation = FakeQuantize(x=x, out=torch.empty_like(x), coded=coded, form=form)
    backend("cpu").run(operation)
    return operation


def check_projection(rows, columns, inner, names, *, bias=True, end=None, in_out=False) -> None:
    """That of codes is the reference's, and that of decoded values, but for how floats are
    summed."""
    torch.manual_seed(rows)
    group = common_group(*map(scaled_format, names))
    weight = weight_of(columns, inner, names[0], group, in_out=in_out)
    x, bias = (
        encoded(torch.randn(rows, inner), names[1], group),
        torch.randn(columns) if bias else None,
    )
    given = {"x": Rows(floats=x.out), "weight": weight, "bias": bias, "nonlinearity": end}
    found = compare(Project(**given, groups=x.coded, out=empty(rows, columns)))
    assert_close(
        found.out, compare(Project(**given, out=empty(rows, columns))).out, None, "decoded"
    )


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("columns, inner", [(1, 1), (33, 100), (64, 256), (5, 515)])
def test_packed_values_are_the_decoded_ones(names, columns, inner):
    torch.manual_seed(inner)
    weight = weight_of(columns, inner, names[0], common_group(*map(scaled_format, names)))
    assert torch.equal(unpacked_values(weight), weight.decoded)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    "rows, columns, inner", [(1, 40, 64), (7, 33, 100), (41, 64, 130), (9, 16, 515)]
)
def test_products_are_those_of_decoded_values(names, rows, columns, inner):
    check_projection(rows, columns, inner, names)


@pytest.mark.parametrize("activation", [Activation.relu, Activation.gelu])
def test_ends(activation):
    dropout = Dropout(key=KEY, subsequence=3, probability=0.2)
    check_projection(
        7, 40, 100, PAIRS[2], bias=False, end=Nonlinearity(activation=activation, dropout=dropout)
    )


def test_weights_in_out():
    check_projection(3, 40, 96, PAIRS[0], in_out=True)


@pytest.mark.parametrize("level", LEVELS)
def test_every_library_multiplies_packed_weights(level, monkeypatch):
    library = sources.load(loader._FOLDER / f"libcpu_{level}.so", "cpu")
    monkeypatch.setattr(loader, "library", lambda: library)
    tiles.usable.cache_clear()
    try:
        for rows in (2, 40):
            check_projection(rows, 33, 100, PAIRS[3])
    finally:
        tiles.usable.cache_clear()


def test_nan_in_a_weight_poisons_its_output_alone():
    weight = weight_of(40, 64, "int6/row", 128)
    weight.values[3, 2] = torch.nan
    pack_weight(weight, backend("cpu").run)
    assert torch.equal(unpacked_values(weight).isnan().any(1), torch.arange(40) == 3)


@pytest.mark.parametrize(
    "a, b, group",
    [
        ("mxint8", "mxfp4", 32),
        ("nvfp4", "int8/tensor", 16),
        ("int8/row", "int6/row", 128),
        ("mxint8", "nvfp4", None),
        ("int8/group24", "int8/group24", None),
        ("fp8-e4m3/row", "int8/row", None),
        ("int8/channel", "int8/row", None),
    ],
)
def test_formats_that_have_a_product_together(a, b, group):
    assert (
        common_group(scaled_format(a), scaled_format(b))
        == group
        == common_group(scaled_format(b), scaled_format(a))
    )
