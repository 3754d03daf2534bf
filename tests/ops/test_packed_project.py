"""PackedProject and PackedWeight: the integers of Project, for every instruction, few rows and
many, 8 bits and 4."""

import ctypes
from pathlib import Path

import pytest
import torch

from lsq import gemm
from lsq.models.sparsity import choose
from lsq.native import loader, sources, tiles
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.packed_project import PackedProject, PackedWeight
from lsq.ops.project import Project
from lsq.program.values import Rows, Weight
from lsq.quant import Grain
from lsq.quant.formats import GROUP, Int4
from tests.ops.compare import by_row, compare, empty, on_cpu, rounded, to_round, weight_format_of

LEVELS = [
    level
    for level, needed in loader._REQUIRED.items()
    if needed <= loader.cpu_features() and (loader._FOLDER / f"libcpu_{level}.so").exists()
]


def sparse_codes(columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some groups of four hold fewer than two."""
    codes, scale = codes_of(columns, inner)
    return codes * choose(torch.rand(columns, inner)) * (torch.rand(columns, inner) > 0.1), scale


def codes_of(columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-127, 128, (columns, inner), dtype=torch.int8), 0.001 + 0.01 * torch.rand(
        columns
    )


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("columns, inner", [(16, 16), (48, 80), (97, 64), (272, 208)])
def test_packed_codes_are_the_codes(instructions, columns, inner):
    codes, scale = codes_of(columns, inner)
    assert torch.equal(PackedWeight.of(codes, scale, instructions).codes(), codes)


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("columns, inner", [(16, 16), (48, 80), (97, 64), (272, 208), (130, 4)])
def test_sparse_codes_take_less_room(instructions, columns, inner):
    codes, scale = sparse_codes(columns, inner)
    packed = PackedWeight.of_sparse(codes, scale, instructions)
    assert torch.equal(packed.codes(), codes)
    assert packed.tiles.numel() < PackedWeight.of(codes, scale, instructions).tiles.numel() * 0.65


def test_three_of_four_are_refused():
    codes, scale = sparse_codes(70, 64)
    codes[69, 60:63] = 1
    with pytest.raises(ValueError, match="not 2:4 sparse"):
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
    for options in (
        {"out": empty(rows, columns)},
        {"out": empty(rows, columns), "bias": torch.randn(columns)},
        {"rounded": to_round(rows, columns, 2.0, clipped=False), "bias": torch.randn(columns)},
        {"rounded": to_round(rows, columns, 2.0, clipped=False), "activation": Activation.relu},
        {
            "rounded": to_round(rows, columns, 2.0, bits=5, clipped=False),
            "activation": Activation.gelu,
        },
        {"rounded": to_round(rows, columns, 2.0, clipped=False), "activation": Activation.silu},
        {"out": empty(rows, columns), "activation": Activation.squared_relu},
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
        (0, 32, 64),
        (1, 16, 16),
        (1, 100, 4160),
        (2, 32, 64),
        (3, 48, 80),
        (4, 33, 640),
        (5, 64, 100),
        (6, 16, 160),
        (7, 97, 64),
        (8, 96, 64),
        (9, 33, 640),
        (13, 33, 40),
        (17, 544, 208),
        (32, 64, 640),
        (161, 96, 576),
    ],
)
def test_products_with_int4(instructions, rows, columns, inner):
    torch.manual_seed(rows)
    form, stored, scale = int4_of(columns, inner)
    packed = PackedWeight.of_int4(stored, scale, inner, instructions)
    unpacked = PackedWeight.of(form.unpack(stored, inner), scale, instructions)
    x, bias = rounded(rows, inner).bare(), torch.randn(columns)
    options = {"x": x, "bias": bias, "activation": Activation.gelu, "out": empty(rows, columns)}
    found, wanted = (
        on_cpu(PackedProject(weight=weight, **options)).out for weight in (packed, unpacked)
    )
    assert torch.equal(found, wanted)
    compare(PackedProject(weight=packed, **options))


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
    with pytest.raises(ValueError, match="'none' cannot run here; there are "):
        PackedWeight.of_int4(stored, scale, 16, "none")
    with pytest.raises(ValueError, match="'none' cannot run here; there are "):
        PackedWeight.of(form.unpack(stored, 16), scale, "none")


@pytest.mark.parametrize("form", [lambda x: x, by_row], ids=["one scale", "a scale for each row"])
def test_integers_are_those_of_project(form):
    torch.manual_seed(0)
    rows, columns, inner = 37, 288, 128
    (codes, scale), x, bias = (
        codes_of(columns, inner),
        form(rounded(rows, inner)).bare(),
        torch.randn(columns),
    )
    shared = {"bias": bias, "rounded": to_round(rows, columns, 2.0, clipped=False)}
    plain = on_cpu(
        Project(
            x=Rows(coded=x),
            weight=Weight(format=weight_format_of(), codes=codes, scale=scale),
            nonlinearity=Nonlinearity(activation=Activation.relu),
            **shared,
        )
    )
    packed = on_cpu(
        PackedProject(
            x=x, weight=PackedWeight.of(codes, scale), activation=Activation.relu, **shared
        )
    )
    assert torch.equal(packed.rounded.codes, plain.rounded.codes)


def test_nan_poisons_the_scale():
    weight = PackedWeight.of(*codes_of(64, 64))
    weight.scale[40] = float("nan")
    found = compare(
        PackedProject(
            x=rounded(2, 64).bare(), weight=weight, rounded=to_round(2, 64, 1.0, clipped=False)
        )
    )
    assert found.rounded.scale.isnan()


@pytest.mark.parametrize("level", LEVELS)
def test_every_library_expands_sparse_weights(level, monkeypatch):
    library = sources.load(loader._FOLDER / f"libcpu_{level}.so", "cpu")
    monkeypatch.setattr(loader, "library", lambda: library)
    tiles.usable.cache_clear()
    try:
        for instructions in tiles.usable():
            weight = PackedWeight.of_sparse(*sparse_codes(80, 144), instructions)
            for rows in (2, 40):
                compare(
                    PackedProject(x=rounded(rows, 144).bare(), weight=weight, out=empty(rows, 80))
                )
    finally:
        tiles.usable.cache_clear()
