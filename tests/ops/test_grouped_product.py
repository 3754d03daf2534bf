"""Products of codes with scales of groups, by every instruction; packed weights."""

import math

import pytest
import torch

from lsq.native import loader, tiles
from lsq.ops.fake_quantize import FakeQuantize, pack_weight, packed_groups
from lsq.ops.grouped_product import GroupedCodes, common_group
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.program.values import Rows, Weight
from lsq.quant.numbers import FLOAT32, Grain, ScaledFormat, scaled_format
from lsq.quant.stored import Decode, field_bytes, stored_type
from lsq.quant.tables import integer
from lsq.run.backends import backend
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import assert_close, compare, dropout_of, empty, on_cpu, refused

INT8 = integer(8)


def codes_of(rows, inner, group, scale_rows, scale_columns) -> GroupedCodes:
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    return GroupedCodes(
        codes=codes, scale=0.01 + torch.rand(scale_rows, scale_columns), group=group
    )


def product_of(rows, columns, inner, group, *, of_rows=False) -> Project:
    """Of scales of groups; `of_rows`: x has one scale for each row."""
    groups = -(-inner // group)
    x = codes_of(rows, inner, group, rows, 1 if of_rows else groups)
    return packed_product(x, codes_of(columns, inner, group, columns, groups))


def packed_product(x: GroupedCodes, codes: GroupedCodes) -> Project:
    """x times a weight of these codes in int8."""
    group, columns = codes.group, codes.codes.shape[0]
    grain = Grain(1, group) if codes.scale.shape[1] > 1 else Grain.ROW
    form = ScaledFormat(name="int8", number=INT8, grain=grain, scales=FLOAT32)
    memory = memory_of(form, codes.codes.shape, group)
    weight = Weight(format=form, values=codes.decode(), grouped=memory, group=group)
    ranks, stored = (codes.codes.int() + 127).to(torch.uint8), stored_type(INT8)
    scale = codes.scale.expand(columns, -1).contiguous()
    packed_groups(weight).fill(stored.stored(ranks), scale, stored.unit)
    out = empty(len(x.codes), columns)
    return Project(x=Rows(floats=x.decode()), weight=weight, groups=x, out=out)


def memory_of(form: ScaledFormat, shape: tuple[int, int], group: int) -> torch.Tensor:
    """Memory of fields, filled with ones and zeros."""
    size = field_bytes(shape, stored_type(form.number), group, form.grain.grid(shape)[1])
    return torch.full((size + tiles.ALIGNMENT,), 85, dtype=torch.uint8)


def assert_exact(found: Project) -> None:
    """Within what float32 sums of as many numbers lose, in any order."""
    x, weight = found.groups.decode().double(), found.weight.values.double()
    allowed = 2.0**-23 * (2 + x.shape[1] // found.weight.group) * (x.abs() @ weight.abs().t())
    assert ((found.out - x @ weight.t()).abs() <= allowed).all()


@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(
    "rows, columns, inner", [(1, 1, 1), (7, 33, 100), (41, 64, 130), (70, 97, 256), (9, 16, 515)]
)
@pytest.mark.parametrize("of_rows", [False, True])
def test_products(group, rows, columns, inner, of_rows, monkeypatch):
    product = product_of(rows, columns, inner, group, of_rows=of_rows)
    assert_exact(compare(product))
    found = []
    for instructions in tiles.usable():
        monkeypatch.setattr(tiles, "usable", lambda chosen=instructions: (chosen,))
        found.append(on_cpu(product))
        assert_exact(found[-1])
        monkeypatch.undo()
    fast = found[:-1] if loader.library()._name.endswith("v1.so") else found
    assert all(torch.equal(one.out, fast[0].out) for one in fast)


@pytest.mark.parametrize("shape_x, shape_weight", [((1, 1), (40, 3)), ((5, 3), (40, 1))])
def test_scales_that_rows_and_groups_share(shape_x, shape_weight):
    x, codes = codes_of(5, 80, 32, *shape_x), codes_of(40, 80, 32, *shape_weight)
    assert_exact(compare(packed_product(x, codes)))


def test_sums_at_their_ends():
    """All codes -127 and 127, and codes of x of -128, which no format gives."""
    for low in (-128, -127):
        for high in (-127, 127):
            x, codes = (codes_of(rows, 256, 128, rows, 2) for rows in (33, 32))
            x.codes.fill_(low), codes.codes.fill_(high)
            assert_exact(compare(packed_product(x, codes)))


def test_nan_stays_in_its_row_and_column():
    x, codes = codes_of(5, 100, 32, 5, 4), codes_of(40, 100, 32, 40, 4)
    x.scale[3, 1] = codes.scale[7, 2] = math.nan
    missing = compare(packed_product(x, codes)).out.isnan()
    assert missing[3].all() and missing[:, 7].all() and missing.sum() == 44


def test_groups_of_one_size_cannot_become_others():
    with refused("groups of 32, which cannot become groups of 64"):
        codes_of(33, 100, 32, 33, 4).regrouped(64)


PAIRS = (
    ("mxint8", "mxint8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("vsquant4", "vsquant4"),
    ("int4/group32", "int8/row"),
    ("int6/row", "int8/tensor"),
    ("int4/group48", "int8/group48"),
    ("int3/group48", "int8/row"),
    ("nf4/group64", "int8/row"),
    ("lloyd3-gaussian/row", "int8/tensor"),
    ("ternary/row", "int8/row"),
)
"""Formats of weights and of activations."""


def group_of(names: tuple[str, str], inner: int) -> int | None:
    weight, x = map(scaled_format, names)
    return common_group(x, weight, inner)


def weight_of(columns: int, inner: int, name: str, group: int, *, in_out: bool = False) -> Weight:
    """With its decoded values and packed."""
    form, values = scaled_format(name), torch.randn(columns, inner)
    packed = memory_of(form, (columns, inner), group)
    weight = Weight(
        format=form,
        values=values.t().contiguous() if in_out else values,
        clip=torch.full((columns,), 2.5),
        in_out=in_out,
        decoded=torch.empty(columns, inner),
        grouped=packed,
        group=group,
    )
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
    """Of codes: as the reference, and as decoded values, but for sums of floats."""
    torch.manual_seed(rows)
    group = group_of(names, inner)
    weight = weight_of(columns, inner, names[0], group, in_out=in_out)
    x = encoded(torch.randn(rows, inner), names[1], group)
    given = {"bias": torch.randn(columns) if bias else None, "nonlinearity": end}
    given |= {"x": Rows(floats=x.out), "weight": weight, "out": empty(rows, columns)}
    found = compare(Project(**given, groups=x.coded)).out
    wanted = compare(Project(**given)).out
    if stored_type(scaled_format(names[0]).number).decode is Decode.WORDS:
        assert (found - wanted).abs().max() <= 2.0**-14 * wanted.abs().max()
    else:
        assert_close(found, wanted, None, "decoded")


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize("columns, inner", [(1, 1), (33, 100), (64, 256), (5, 515)])
def test_packed_values_are_the_decoded_ones(names, columns, inner):
    torch.manual_seed(inner)
    weight = weight_of(columns, inner, names[0], group_of(names, inner))
    rounded = 1.01 * 2.0**-16 * weight.clip.max()  # words have 32639 steps
    assert (packed_groups(weight).values() - weight.decoded).abs().max() <= rounded


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    "rows, columns, inner", [(1, 40, 64), (7, 33, 100), (41, 64, 130), (9, 16, 515)]
)
def test_products_are_those_of_decoded_values(names, rows, columns, inner):
    check_projection(rows, columns, inner, names)


@pytest.mark.parametrize("activation", [Activation.relu, Activation.gelu])
def test_ends_of_packed_weights(activation):
    end = Nonlinearity(activation=activation, dropout=dropout_of(0.2))
    check_projection(7, 40, 100, PAIRS[2], bias=False, end=end)


def test_weights_in_out():
    check_projection(3, 40, 96, PAIRS[0], in_out=True)


@pytest.mark.parametrize("name", ["int2/group16", "int3/group64", "nf4/row", "mxfp4", "int8/row"])
@pytest.mark.parametrize("rows, columns, inner", [(1, 33, 64), (3, 40, 100), (70, 16, 515)])
def test_floats_are_rounded_to_sixteen_bits(name, rows, columns, inner):
    """Each row on its own: beside the float product, within a step of its largest magnitude."""
    torch.manual_seed(rows)
    weight = weight_of(columns, inner, name, common_group(None, scaled_format(name), inner))
    weight.decoded = None
    x = torch.randn(rows, inner) * 10 ** torch.linspace(-9, 9, rows)[:, None]
    x[-1, 0] = 1e4 * x[-1, 1]  # an outlier
    found = on_cpu(Project(x=Rows(floats=x), weight=weight, out=empty(rows, columns))).out
    values = packed_groups(weight).values().double()
    step = x.abs().amax(1, keepdim=True).double() / 32639
    allowed = (0.51 * step + 1e-6 * x.abs().double()) @ values.abs().t()
    assert ((found - x.double() @ values.t()).abs() <= allowed + 1e-6 * found.abs()).all()


def test_rows_that_are_not_finite_become_nan_alone():
    weight = weight_of(40, 64, "nf4/group64", 64)
    weight.decoded, x = None, torch.randn(5, 64)
    x[1, 3], x[4, 0] = math.nan, -math.inf
    x[2] = 0.0
    found = on_cpu(Project(x=Rows(floats=x), weight=weight, out=empty(5, 40))).out
    assert found.isnan().all(1).tolist() == [False, True, False, False, True]
    assert not found[2].any() and not found[[0, 2, 3]].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_every_library_multiplies_packed_weights(level):
    with library_of(level):
        for rows in (2, 40):
            check_projection(rows, 33, 100, PAIRS[3])


def test_nan_in_a_weight_poisons_its_output_alone():
    weight = weight_of(40, 64, "int6/row", 128)
    weight.values[3, 2] = torch.nan
    pack_weight(weight, backend("cpu").run)
    assert torch.equal(packed_groups(weight).values().isnan().any(1), torch.arange(40) == 3)


@pytest.mark.parametrize(
    "weight, x, inner, group",
    [
        ("mxfp4", "mxint8", 100, 32),
        ("nvfp4", "int8/tensor", 100, 16),
        ("int6/row", "int8/row", 100, 128),
        ("int6/row", "int8/row", 100_000, 65_792),
        ("nf4/row", "int8/row", 1000, 256),
        ("nf4/group512", "int8/row", 1000, None),
        ("mxint8", "nvfp4", 100, None),
        ("int8/group24", "int8/group24", 100, None),
        ("fp8-e4m3/row", "int8/row", 100, None),
        ("nf4/row", "nf4/row", 100, None),
        ("int8/channel", "int8/row", 100, None),
    ],
)
def test_formats_that_have_a_product_together(weight, x, inner, group):
    assert common_group(scaled_format(x), scaled_format(weight), inner) == group
