"""Decoded values: loops against the format's own encode and decode, bit by bit, and their
gradients."""

import pytest
import torch

from lsq.ops.fake_quantize import FakeQuantize, FakeQuantizeGradient, RoundAtRandom
from lsq.ops.grouped_product import GroupedCodes
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.program.values import Dropout
from lsq.quant import pack_bits
from lsq.quant.numbers import scaled_format
from tests.ops.compare import KEY, compare, empty, on_cpu, on_reference

FORMATS = (
    "int8/tensor",
    "int4/row",
    "int6/group16",
    "nvfp4",
    "vsquant4",
    "vsquant6",
    "mxint8",
    "mxfp4",
    "fp8-e4m3/tensor",
    "fp8-e5m2/row",
    "log4.3/row",
    "nf4-64",
    "ternary/group32",
    "int4/channel",
    "int4/block4x16",
    "int3/row/e8m0",
    "lloyd3-laplacian/tensor/bfloat16",
    "int4/block4x16/uint4",
    "int5/tensor/e4m3",
)
SHAPES = ((7, 37), (64, 96), (1, 1), (33, 16), (5, 8))


def values(shape: tuple[int, int], special: bool) -> torch.Tensor:
    """With zeros, a row of zeros, and, if special, a NaN, an infinity and a column of tiny
    values."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * 3
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[2:3] = 0.0
    if special:
        x[:, :1] *= 1e-30
        x[0, 0], x[-1, -1] = torch.nan, torch.inf
    return x


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    missing = found.isnan()
    both = (
        tensor.masked_fill(missing, 0.0).contiguous().view(torch.int32)
        for tensor in (found, wanted)
    )
    return torch.equal(missing, wanted.isnan()) and torch.equal(*both)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_values_are_those_of_the_format(name, special):
    """No clip, one clip whose clipped bits are kept, and a clip for each row, one of them NaN."""
    form = scaled_format(name)
    for shape in SHAPES:
        x = values(shape, special)
        clips = torch.linspace(0.5, 3, shape[0])
        clips[3:4] = torch.nan
        packed = empty(-(-x.numel() // 8), dtype=torch.uint8)
        for clip, clipped in ((None, None), (torch.tensor([1.7]), packed), (clips, None)):
            given = (
                clip is not None
                and form.grain.columns is None
                and (form.grain.rows is None) == (len(clip) == 1)
            )
            operation = FakeQuantize(
                x=x, clip=clip, out=empty(*shape), clipped=clipped, form=form, given=given
            )
            results = operation.reference()
            wanted, bits = results["out"], results["clipped"]
            found = on_cpu(operation)
            assert same_bits(found.out, wanted), (shape, clip)
            assert clipped is None or torch.equal(found.clipped, bits)


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_clip_values_are_what_encode_and_decode_give(name):
    form, x = scaled_format(name), values((33, 37), special=False)
    wanted = form.decode(form.encode(x))
    assert torch.equal(FakeQuantize(x=x, out=x, form=form).reference()["out"], wanted)


@pytest.mark.parametrize(
    "name", ["int8/tensor", "int6/row", "nvfp4", "vsquant4", "mxint8", "mxfp4", "int4/block4x16"]
)
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_codes_with_scales_of_groups_are_the_values(name, special):
    """No clip, one, and one for each row: on the CPU and by the reference."""
    form = scaled_format(name)
    for rows, columns in SHAPES:
        x, grid = values((rows, columns), special), form.grain.grid((rows, columns))
        for clip in (None, torch.tensor([1.7]), torch.linspace(0.5, 3, rows)):
            given = (
                clip is not None
                and form.grain.columns is None
                and (form.grain.rows is None) == (len(clip) == 1)
            )
            codes, scale = empty(rows, columns, dtype=torch.int8), empty(rows, grid[1])
            coded = GroupedCodes(codes=codes, scale=scale, group=form.grain.columns or 128)
            operation = FakeQuantize(
                x=x, clip=clip, out=empty(rows, columns), coded=coded, form=form, given=given
            )
            found, wanted = on_cpu(operation), on_reference(operation)
            assert same_bits(found.coded.scale, wanted.coded.scale)
            again = found.coded.decode()
            assert same_bits(again, wanted.coded.decode())
            missing = again.isnan()  # what shares a scale with NaN, too
            assert (
                torch.equal(again[~missing], found.out[~missing])
                and missing[found.out.isnan()].all()
            )


def test_what_the_clip_gives_is_what_rounding_gives():
    """int8/tensor under a clip, by hand."""
    x = torch.tensor([[0.4, -0.6, 2.0, -9.0]])
    clip = torch.tensor([1.27])
    form = scaled_format("int8/tensor")
    found = on_cpu(FakeQuantize(x=x, clip=clip, out=empty(1, 4), form=form, given=True)).out
    torch.testing.assert_close(found, torch.tensor([[0.4, -0.6, 1.27, -1.27]]))


@pytest.mark.parametrize("activation", [None, Activation.relu, Activation.gelu])
@pytest.mark.parametrize("shape", [(7, 40), (65, 96), (1, 8)])
def test_the_gradient_goes_straight_through(activation, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    end = None
    if activation is not None:
        dropout = Dropout(key=KEY, subsequence=3, probability=0.2)
        kept = {"positive": pack_bits(x > 0)} if activation is Activation.relu else {"before": x}
        end = Nonlinearity(activation=activation, dropout=dropout, **kept)
    compare(
        FakeQuantizeGradient(
            gradient=torch.randn(shape),
            out=x.round(),
            clipped=pack_bits(x.abs() > 1.5),
            nonlinearity=end,
            added=torch.randn(shape),
            dx=empty(*shape),
            sum=empty(shape[1]),
            dclip=empty(1),
        )
    )


@pytest.mark.parametrize("shape", [(7, 37), (64, 96), (3, 1)])
def test_gradients_are_rounded_at_random(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[0] *= 1e-37  # vanishes
    x[1, 0] = torch.inf
    operation = RoundAtRandom(x=x, key=KEY, subsequence=5, out=empty(*shape))
    found, wanted = on_cpu(operation).out, operation.reference()["out"]
    assert same_bits(found + 0.0, wanted + 0.0)
    assert not found[0].any() and found[1].isnan().all()
