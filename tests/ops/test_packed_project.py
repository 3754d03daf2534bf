"""PackedWeight and PackedProject: the integers of Project, for every instruction."""

import ctypes
from pathlib import Path

import pytest
import torch

from lsq import gemm
from lsq.models.sparsity import choose
from lsq.native import loader, tiles
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.ops.project import Project
from lsq.program.values import Rows, Weight
from lsq.quant import Grain
from lsq.quant.formats import GROUP, Int4
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import (
    by_row,
    compare,
    empty,
    on_cpu,
    refused,
    rounded,
    to_round,
    weight_format_of,
)


def sparse_codes(columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some groups of four hold fewer than two."""
    codes, scale = codes_of(columns, inner)
    return codes * choose(torch.rand(columns, inner)) * (torch.rand(columns, inner) > 0.1), scale


def codes_of(columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (columns, inner), dtype=torch.int8)
    return codes, 0.001 + 0.01 * torch.rand(columns)


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("columns, inner", [(16, 16), (48, 80), (97, 64), (272, 208), (130, 4)])
def test_sparse_codes_take_less_room(instructions, columns, inner):
    codes, scale = sparse_codes(columns, inner)
    packed = PackedWeight.of_sparse(codes, scale, instructions)
    dense = PackedWeight.of(codes, scale, instructions)
    assert torch.equal(packed.codes(), codes) and torch.equal(dense.codes(), codes)
    assert packed.tiles.numel() < dense.tiles.numel() * 0.65


def test_three_of_four_are_refused():
    codes, scale = sparse_codes(70, 64)
    codes[69, 60:63] = 1
    with refused("not 2:4 sparse"):
        PackedWeight.of_sparse(codes, scale)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize(
    "rows, columns, inner",
    [(0, 32, 64), (1, 16, 16), (3, 48, 80), (8, 64, 4224), (17, 544, 208), (161, 96, 576)],
)
def test_products_and_their_ends(instructions, rows, columns, inner, sparse):
    torch.manual_seed(rows)
    if sparse:
        weight = PackedWeight.of_sparse(*sparse_codes(columns, inner), instructions)
    else:
        weight = PackedWeight.of(*codes_of(columns, inner), instructions)
    out, to = empty(rows, columns), to_round(rows, columns, 2.0, clipped=False)
    few, bias = to_round(rows, columns, 2.0, bits=5, clipped=False), torch.randn(columns)
    for options in (
        {"out": out},
        {"out": out, "bias": bias},
        {"rounded": to, "bias": bias},
        {"rounded": to, "activation": Activation.relu},
        {"rounded": few, "activation": Activation.gelu},
        {"rounded": to, "activation": Activation.silu},
        {"out": out, "activation": Activation.squared_relu},
    ):
        compare(PackedProject(x=rounded(rows, inner).bare(), weight=weight, **options))


def int4_of(columns: int, inner: int) -> tuple[Int4, torch.Tensor, torch.Tensor]:
    """(format, what is stored, scale), with multipliers of both signs and codes of all values."""
    form, groups = Int4(name="int4", bits=8, grain=Grain.ROW), -(-inner // GROUP)
    stored = torch.randint(-128, 128, (columns, groups, 1 + GROUP // 2), dtype=torch.int8)
    stored[..., 0] = torch.randint(-15, 16, (columns, groups))
    beyond = torch.arange(groups * GROUP).view(groups, 2, GROUP // 2) >= inner  # stored as zeros
    stored[..., 1:] &= ~(torch.where(beyond[:, 0], 15, 0) | torch.where(beyond[:, 1], 240, 0)).to(
        torch.int8
    )
    return form, stored.flatten(1), 0.001 + 0.01 * torch.rand(columns)


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("columns, inner", [(16, 16), (48, 80), (97, 64), (272, 208), (5, 100)])
def test_int4_is_packed_as_it_is(instructions, columns, inner):
    form, stored, scale = int4_of(columns, inner)
    packed = PackedWeight.of_int4(stored, scale, inner, instructions)
    assert torch.equal(packed.codes(), form.unpack(stored, inner))
    assert len(packed.tiles) <= 0.56 * len(PackedWeight.of(form.unpack(stored, inner), scale).tiles)


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize(
    "rows, columns, inner",
    [
        *((0, 32, 64), (1, 16, 16), (1, 100, 4160), (2, 32, 64), (3, 48, 80)),
        *((4, 33, 640), (5, 64, 100), (6, 16, 160), (7, 97, 64), (8, 96, 64)),
        *((9, 33, 640), (13, 33, 40), (17, 544, 208), (32, 64, 640), (161, 96, 576)),
    ],
)
def test_products_with_int4(instructions, rows, columns, inner):
    torch.manual_seed(rows)
    form, stored, scale = int4_of(columns, inner)
    packed = PackedWeight.of_int4(stored, scale, inner, instructions)
    unpacked = PackedWeight.of(form.unpack(stored, inner), scale, instructions)
    x, bias = rounded(rows, inner).bare(), torch.randn(columns)
    options = {"x": x, "bias": bias, "activation": Activation.gelu, "out": empty(rows, columns)}
    found = compare(PackedProject(weight=packed, **options))
    assert torch.equal(found.out, on_cpu(PackedProject(weight=unpacked, **options)).out)


def test_rows_up_to_which_codes_stay_in_registers():
    """Beyond them the kernels of int8 multiply what is unpacked."""
    found = loader.function("lsq_int4_rows")
    found.restype = ctypes.c_int64
    level = Path(loader.library()._name).stem
    of_level = {"libcpu_v4": {"avx512_vnni": 8, "amx": 4}, "libcpu_v3": {"avx_vnni": 4}}
    for name, rows in of_level.get(level, {}).items():
        assert found(ctypes.c_int64(tiles.INSTRUCTIONS[name])) == rows
    assert found(ctypes.c_int64(tiles.INSTRUCTIONS[tiles.PLAIN])) == 1


@pytest.mark.parametrize("instructions", tiles.usable())
def test_int4_of_the_largest_sums(instructions):
    columns, inner = 32, 128
    form = int4_of(1, 1)[0]
    # pairs of -8
    stored = torch.full((columns, inner // GROUP, 1 + GROUP // 2), -120, dtype=torch.int8)
    stored[..., 0] = torch.where(torch.arange(columns) % 2 == 0, 15, -15)[:, None]
    x, scale = rounded(8, inner).bare(), torch.ones(columns)
    x.codes[:2] = torch.tensor([[127], [-127]])
    packed = PackedWeight.of_int4(stored.flatten(1), scale, inner, instructions)
    out = on_cpu(PackedProject(x=x, weight=packed, out=empty(8, columns))).out
    expected = gemm.reference(x.codes, form.unpack(stored.flatten(1), inner)).float() * x.scale
    assert torch.equal(out, expected) and (out[0, 0] / x.scale).round() == -8 * 15 * 127 * inner


def test_instructions_that_are_not_there():
    form, stored, scale = int4_of(16, 16)
    with refused("'none' cannot run here; there are "):
        PackedWeight.of_int4(stored, scale, 16, "none")
    with refused("'none' cannot run here; there are "):
        PackedWeight.of(form.unpack(stored, 16), scale, "none")


@pytest.mark.parametrize("form", [lambda x: x, by_row], ids=["one scale", "a scale for each row"])
def test_integers_are_those_of_project(form):
    rows, columns, inner, activation = 37, 288, 128, Activation.relu
    (codes, scale), x = codes_of(columns, inner), form(rounded(rows, inner)).bare()
    to = to_round(rows, columns, 2.0, clipped=False)
    shared = {"bias": torch.randn(columns), "rounded": to}
    weight = Weight(format=weight_format_of(), codes=codes, scale=scale)
    end = Nonlinearity(activation=activation)
    plain = on_cpu(Project(x=Rows(coded=x), weight=weight, nonlinearity=end, **shared))
    packed = PackedWeight.of(codes, scale)
    found = on_cpu(PackedProject(x=x, weight=packed, activation=activation, **shared))
    assert torch.equal(found.rounded.codes, plain.rounded.codes)


def test_nan_poisons_the_scale():
    weight, to = PackedWeight.of(*codes_of(64, 64)), to_round(2, 64, 1.0, clipped=False)
    weight.scale[40] = float("nan")
    x = rounded(2, 64).bare()
    assert compare(PackedProject(x=x, weight=weight, rounded=to)).rounded.scale.isnan()


@pytest.mark.parametrize("level", LEVELS)
def test_every_library_expands_sparse_weights(level):
    with library_of(level):
        for instructions in tiles.usable():
            weight = PackedWeight.of_sparse(*sparse_codes(80, 144), instructions)
            for rows in (2, 40):
                x, out = rounded(rows, 144).bare(), empty(rows, 80)
                compare(PackedProject(x=x, weight=weight, out=out))
