"""Decoded values against the format's own encode and decode, and their gradients."""

import pytest
import torch

from lsq.ops.fake_quantize import FakeQuantize, FakeQuantizeGradient, RoundAtRandom
from lsq.ops.grouped_product import GroupedCodes
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.quant import pack_bits
from lsq.quant.numbers import scaled_format
from tests.ops.compare import KEY, dropout_of, empty, on_cpu, on_reference, refused
from tests.ops.cuda import DTYPES, ORDERS, compare_cuda, in_dtype, run
from tests.ops.gradient_checks import assert_same_tensor

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
SHAPES = ((7, 37), (64, 96), (1, 1), (33, 48), (5, 8))


def values(shape: tuple[int, int], special: bool) -> torch.Tensor:
    """With a row of zeros; `special`: NaN, infinity and a column of tiny values."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator) * 3
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[2:3] = 0.0
    if special:
        x[:, :1] *= 1e-30
        x[0, 0], x[-1, -1] = torch.nan, torch.inf
    return x


def fake(x, clip, name: str, *, bits: bool = False, coded=None) -> FakeQuantize:
    """Of x [M, N]; `bits`: which are clipped is wanted as well."""
    form = scaled_format(name)
    by_clip = clip is not None and form.grain.columns is None
    clipped = empty(-(-x.numel() // 8), dtype=torch.uint8) if bits else None
    given = by_clip and (form.grain.rows is None) == (len(clip) == 1)
    options = {"form": form, "given": given, "coded": coded}
    return FakeQuantize(x=x, clip=clip, out=empty(*x.shape), clipped=clipped, **options)


def compare_bits(runs, operation: FakeQuantize, dtype: torch.dtype = torch.float32) -> None:
    """Every bit is the reference's, whatever the order of threads."""
    narrow = in_dtype(operation, dtype)
    results = in_dtype(narrow, torch.float32).reference()
    for found in runs(narrow):
        wanted = results["out"].to(dtype).float()
        assert_same_tensor(found.out.float(), wanted, operation.form.name)
        assert operation.clipped is None or torch.equal(found.clipped, results["clipped"])


def on_cuda(operation: FakeQuantize) -> list[FakeQuantize]:
    return [run(operation, order=order) for order in ORDERS]


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_format(name, shape, special, runs):
    """No clip, one clip whose clipped bits are kept, and a clip for each row, one of them NaN."""
    x, clips = values(shape, special), torch.linspace(0.5, 3, shape[0])
    clips[3:4] = torch.nan
    compare_bits(runs, fake(x, None, name))
    compare_bits(runs, fake(x, torch.tensor([1.7]), name, bits=True))
    compare_bits(runs, fake(x, clips, name))


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
            codes, scale = empty(rows, columns, dtype=torch.int8), empty(rows, grid[1])
            coded = GroupedCodes(codes=codes, scale=scale, group=form.grain.columns or 128)
            operation = fake(x, clip, name, coded=coded)
            found, wanted = on_cpu(operation), on_reference(operation)
            assert_same_tensor(found.coded.scale, wanted.coded.scale)
            again = found.coded.decode()
            assert_same_tensor(again, wanted.coded.decode())
            missing = again.isnan()  # what shares a scale with NaN, too
            assert torch.equal(again[~missing], found.out[~missing])
            assert missing[found.out.isnan()].all()


def test_what_the_clip_gives_is_what_rounding_gives():
    """int8/tensor under a clip, by hand."""
    x = torch.tensor([[0.4, -0.6, 2.0, -9.0]])
    found = on_cpu(fake(x, torch.tensor([1.27]), "int8/tensor")).out
    torch.testing.assert_close(found, torch.tensor([[0.4, -0.6, 1.27, -1.27]]))


@pytest.mark.parametrize("name", ["int6/row", "nvfp4", "fp8-e4m3/tensor"])
def test_values_in_bfloat16_on_cuda(name):
    operation = fake(values((33, 48), True), torch.tensor([1.7]), name, bits=True)
    compare_bits(on_cuda, operation, torch.bfloat16)


@pytest.mark.parametrize("name", ["int4/row/uint4", "nvfp4", "int4/block4x16/uint4", "vsquant4"])
def test_multiples_of_scales_over_several_blocks_of_threads_on_cuda(name):
    x = torch.randn(41, 272)
    for clip in (None, torch.tensor([1.7]), 1 + torch.rand(41)):
        compare_bits(on_cuda, fake(x, clip, name))


@pytest.mark.parametrize(
    "scale", [0.0, 1e-45, 2.0**-127, 2.0**-126, 1.5 * 2.0**-127, 1.0, 1.0001, 2.0**127, 3e38]
)
def test_powers_of_two_of_scales_of_any_size_on_cuda(scale):
    compare_bits(on_cuda, fake(torch.tensor([[scale] * 8]) * 127, None, "mxint8"))


def test_nothing_is_done_to_no_rows():
    assert not fake(torch.randn(0, 48), torch.ones(1), "nvfp4").cuda()


def gradient_of(rows: int, columns: int, activation=None) -> FakeQuantizeGradient:
    x, end = torch.randn(rows, columns), None
    if activation is not None:
        kept = {"positive": pack_bits(x > 0)} if activation is Activation.relu else {"before": x}
        end = Nonlinearity(activation=activation, dropout=dropout_of(0.2), **kept)
    return FakeQuantizeGradient(
        gradient=torch.randn(rows, columns),
        out=x.round(),
        clipped=pack_bits(x.abs() > 1.5),
        nonlinearity=end,
        added=torch.randn(rows, columns),
        dx=empty(rows, columns),
        sum=empty(columns),
        dclip=empty(1),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, Activation.relu, Activation.gelu])
@pytest.mark.parametrize("shape", [(0, 48), (41, 48), (11, 1040)])
def test_the_gradient_goes_straight_through(activation, shape, dtype, compared):
    compared(gradient_of(*shape, activation), dtype)


def test_the_gradient_of_the_clip_alone(compared):
    operation = gradient_of(41, 48)
    operation.added = operation.dx = operation.sum = None
    compared(operation)


def test_a_width_that_no_vector_fits_is_refused_on_cuda():
    with refused("rows of 41 values cannot run on CUDA.*multiple of 8"):
        run(gradient_of(7, 41))


def at_random(rows: int, columns: int) -> RoundAtRandom:
    x = torch.randn(rows, columns)
    x[:1] *= 1e-37  # vanishes
    x[1:2, 0] = torch.inf
    return RoundAtRandom(x=x, key=KEY, subsequence=5, out=empty(rows, columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 48), (7, 37), (41, 48), (3, 1), (9, 1040)])
def test_gradients_are_rounded_at_random(shape, dtype, where, runs):
    operation = in_dtype(at_random(*shape), torch.float32 if where == "cpu" else dtype)
    wanted = in_dtype(operation, torch.float32).reference()["out"].to(operation.x.dtype).float()
    for made in runs(operation):
        found = made.out.float()
        assert_same_tensor(found + 0.0, wanted + 0.0)
        assert not found[:1].any() and found[1:2].isnan().all()


def turns():
    """Three turns of the loops over rows and their columns."""
    compare_bits(on_cuda, fake(values((7, 37), True), torch.ones(7), "nvfp4"))
    compare_cuda(at_random(41, 784))


def gradient_turns():
    for rows, columns in ((41, 48), (11, 1040)):
        compare_cuda(gradient_of(rows, columns))
