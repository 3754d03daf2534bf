"""PackedWeight, and the operations that read one: the integers of Project, for every instruction,
few rows and many, 8 bits and 4; best words, wanted ones, and all."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lsq import gemm
from lsq.models.sparsity import choose
from lsq.native import loader, tiles
from lsq.ops.next_words import NextWords
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.packed_project import PackedProject, PackedWeight
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
    on_reference,
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
    return torch.randint(-127, 128, (columns, inner), dtype=torch.int8), 0.001 + 0.01 * torch.rand(
        columns
    )


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("columns, inner", [(16, 16), (48, 80), (97, 64), (272, 208), (130, 4)])
def test_sparse_codes_take_less_room(instructions, columns, inner):
    codes, scale = sparse_codes(columns, inner)
    packed, dense = (
        pack(codes, scale, instructions) for pack in (PackedWeight.of_sparse, PackedWeight.of)
    )
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
    with refused("'none' cannot run here; there are "):
        PackedWeight.of_int4(stored, scale, 16, "none")
    with refused("'none' cannot run here; there are "):
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
def test_every_library_expands_sparse_weights(level):
    with library_of(level):
        for instructions in tiles.usable():
            weight = PackedWeight.of_sparse(*sparse_codes(80, 144), instructions)
            for rows in (2, 40):
                compare(
                    PackedProject(x=rounded(rows, 144).bare(), weight=weight, out=empty(rows, 80))
                )


def next_words(rows, words, best, asked, *, every=False, instructions=None, inner=64):
    torch.manual_seed(rows + words)
    padded = -(-words // 16) * 16
    codes, scale = (
        torch.randint(-127, 128, (padded, inner), dtype=torch.int8),
        0.001 + 0.001 * torch.rand(padded),
    )
    return NextWords(
        x=rounded(rows, inner).bare(),
        packed_weight=PackedWeight.of(codes, scale, instructions),
        vocabulary=words,
        wanted=torch.randint(0, words, (rows, asked)) if asked else None,
        wanted_scores=empty(rows, asked) if asked else None,
        words=empty(rows, best, dtype=torch.int64) if best else None,
        scores=empty(rows, best) if best else None,
        every=empty(rows, words) if every else None,
    )


def same(operation):
    found, expected = on_cpu(operation), on_reference(operation)
    if operation.words is not None:
        assert torch.equal(found.words, expected.words)
    for name in ("scores", "wanted_scores", "every"):
        if getattr(operation, name) is not None:
            assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=2e-6)
    return found


@pytest.mark.parametrize(
    "rows, words, best, asked",
    [
        (1, 2, 2, 1),
        (3, 255, 7, 2),
        (2, 1000, 1000, 0),
        (65, 700, 8, 1),
        (5, 4099, 20, 3),
        (7, 37, 0, 2),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_words_against_the_reference(rows, words, best, asked, every):
    same(next_words(rows, words, best, asked, every=every))


@pytest.mark.parametrize("instructions", tiles.usable())
def test_words_by_every_instruction(instructions):
    same(next_words(9, 601, 5, 1, instructions=instructions, inner=80))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_weights_of_4_bits(rows):
    operation, form = (
        next_words(rows, 601, 5, 1, inner=80),
        Int4(name="int4", bits=8, grain=Grain.ROW),
    )
    stored, scale = form.encode(torch.randn(608, 80), torch.tensor([3.0]))
    found = []
    for packed in (
        PackedWeight.of_int4(stored, scale, 80),
        PackedWeight.of(form.unpack(stored, 80), scale),
    ):
        operation.packed_weight = packed
        found.append(same(operation))
    assert torch.equal(found[0].words, found[1].words) and torch.equal(
        found[0].scores, found[1].scores
    )


def test_of_equal_words_the_lower_number_comes_first():
    operation = next_words(2, 800, 12, 0)
    operation.packed_weight = PackedWeight.of(
        torch.ones(800, 64, dtype=torch.int8), torch.full((800,), 0.01)
    )
    assert same(operation).words.tolist() == [list(range(12))] * 2


def test_nan_reaches_the_scores():
    operation = next_words(2, 300, 4, 1)
    operation.x.scale.fill_(float("nan"))
    found = on_cpu(operation)
    assert found.scores.isnan().all() and found.words.ge(0).all() and found.words.lt(300).all()
