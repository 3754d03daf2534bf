"""Decoded values on CUDA: the bits of the CPU, and their gradients; kernels in the emulator, or on
a GPU."""

import pytest
import torch

from lsq.native.compiler import compile_kernels
from lsq.native.geometry import WIDEST, row_defines
from lsq.ops.fake_quantize import FakeQuantize, FakeQuantizeGradient, RoundAtRandom
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.program.values import Dropout
from lsq.quant import pack_bits
from lsq.quant.numbers import scaled_format
from tests.ops.compare import KEY, empty
from tests.ops.cuda import DTYPES, ORDERS, compare_cuda, in_dtype, run
from tests.ops.test_fake_quantize import FORMATS, same_bits, values

MULTIPLES = ("int4/row/uint4", "nvfp4", "int4/block4x16/uint4", "vsquant4")
"""Whose scales are multiples of others."""


def fake(x, clip, form, *, bits: bool = False) -> FakeQuantize:
    given = (
        clip is not None
        and form.grain.columns is None
        and (form.grain.rows is None) == (len(clip) == 1)
    )
    clipped = empty(-(-x.numel() // 8), dtype=torch.uint8) if bits else None
    return FakeQuantize(
        x=x, clip=clip, out=empty(*x.shape), clipped=clipped, form=form, given=given
    )


def compare_bits(operation: FakeQuantize, dtype: torch.dtype = torch.float32) -> None:
    """Every bit is the reference's, which is the CPU's, whatever the order of threads."""
    narrow = in_dtype(operation, dtype)
    results = in_dtype(narrow, torch.float32).reference()
    wanted, bits = results["out"], results["clipped"]
    for order in ORDERS:
        found = run(narrow, order=order)
        assert same_bits(found.out.float(), wanted.to(dtype).float()), (
            operation.form.name,
            operation.x.shape,
        )
        assert operation.clipped is None or torch.equal(found.clipped, bits)


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("shape", [(7, 37), (33, 48), (1, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_format(name, shape, special):
    """No clip, one clip whose clipped bits are kept, and a clip for each row, one of them NaN."""
    form, x = scaled_format(name), values(shape, special)
    clips = torch.linspace(0.5, 3, shape[0])
    clips[3:4] = torch.nan
    compare_bits(fake(x, None, form))
    compare_bits(fake(x, torch.tensor([1.7]), form, bits=True))
    compare_bits(fake(x, clips, form))


@pytest.mark.parametrize("name", ["int6/row", "nvfp4", "fp8-e4m3/tensor"])
def test_values_in_bfloat16(name):
    compare_bits(
        fake(values((33, 48), True), torch.tensor([1.7]), scaled_format(name), bits=True),
        torch.bfloat16,
    )


@pytest.mark.parametrize("name", MULTIPLES)
def test_multiples_of_scales_over_several_blocks_of_threads(name):
    x = torch.randn(41, 272)
    for clip in (None, torch.tensor([1.7]), 1 + torch.rand(41)):
        compare_bits(fake(x, clip, scaled_format(name)))


@pytest.mark.parametrize(
    "scale", [0.0, 1e-45, 2.0**-127, 2.0**-126, 1.5 * 2.0**-127, 1.0, 1.0001, 2.0**127, 3e38]
)
def test_powers_of_two_of_scales_of_any_size(scale):
    x = torch.tensor([[scale] * 8]) * 127
    compare_bits(fake(x, None, scaled_format("mxint8")))


def test_nothing_is_done_to_no_rows():
    assert not fake(torch.randn(0, 48), torch.ones(1), scaled_format("nvfp4")).cuda()


def gradient_of(
    rows: int, columns: int, activation: Activation | None = None
) -> FakeQuantizeGradient:
    x, end = torch.randn(rows, columns), None
    if activation is not None:
        kept = {"positive": pack_bits(x > 0)} if activation is Activation.relu else {"before": x}
        end = Nonlinearity(
            activation=activation, dropout=Dropout(key=KEY, subsequence=3, probability=0.2), **kept
        )
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
def test_the_gradient_goes_straight_through(activation, shape, dtype):
    compare_cuda(gradient_of(*shape, activation), dtype)


def test_the_gradient_of_the_clip_alone():
    operation = gradient_of(41, 48)
    operation.added = operation.dx = operation.sum = None
    compare_cuda(operation)


def test_a_width_that_no_vector_fits_is_refused():
    with pytest.raises(ValueError, match="rows of 41 values cannot run on CUDA.*multiple of 8"):
        run(gradient_of(7, 41))


def at_random(rows: int, columns: int) -> RoundAtRandom:
    x = torch.randn(rows, columns)
    x[:1] *= 1e-37  # vanishes
    x[1:2, 0] = torch.inf
    return RoundAtRandom(x=x, key=KEY, subsequence=5, out=empty(rows, columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 48), (7, 37), (41, 48), (3, 1), (9, 1040)])
def test_gradients_are_rounded_at_random(shape, dtype):
    operation = in_dtype(at_random(*shape), dtype)
    wanted = in_dtype(operation, torch.float32).reference()["out"]
    for order in ORDERS:
        assert same_bits(
            run(operation, order=order).out.float() + 0.0, wanted.to(dtype).float() + 0.0
        )


def turns():
    """Three turns of the loops over rows and their columns."""
    compare_bits(fake(values((7, 37), True), torch.ones(7), scaled_format("nvfp4")))
    compare_cuda(at_random(41, 784))


def gradient_turns():
    for rows, columns in ((41, 48), (11, 1040)):
        compare_cuda(gradient_of(rows, columns))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_nothing_spills(target):
    sources = [
        ("fake_quantize.cu", {"WHOLE": whole, "FLOAT": dtype})
        for whole in (0, 1)
        for dtype in (0, 1)
    ]
    sources += [
        ("fake_quantize_gradient.cu", {"ACTIVATION": 2, "FLOAT": dtype, **row_defines(columns)})
        for columns in (512, 4096, WIDEST)
        for dtype in (0, 1)
    ]
    for source, defines in sources:
        found = compile_kernels(source, tuple(sorted(defines.items())), target).resources
        assert not any(taken.spill_bytes for taken in found.values()), (source, defines)
