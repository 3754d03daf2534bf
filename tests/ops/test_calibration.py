"""The search for the clip of least error against lsq.quant's; calibration of many tensors."""

import pytest
import torch

from lsq import quant
from lsq.ops.calibration import Calibration, LeastErrorClip, least_error_clip
from lsq.ops.calibration_cuda import HELD, MOST_WARPS, RUN
from lsq.ops.fake_quantize import FakeQuantize
from lsq.quant import SMALLEST_CLIP, octav_clip
from lsq.quant.numbers import scaled_format
from lsq.run.backends import backend
from tests.ops.compare import compare, empty, format_of, on_cpu, refused
from tests.ops.cuda import DTYPES, ORDERS, run
from tests.quant.fake import fake_quantize


def clip_of(x: torch.Tensor, bits: int = 8, before=None, turned: bool = False) -> LeastErrorClip:
    """The clip of each row of x; `turned`: in memory its columns stand one after another."""
    return LeastErrorClip(
        x=x.t().contiguous() if turned else x,
        by_columns=turned,
        bits=bits,
        before=before,
        clip=empty(len(x)),
        unusable=empty(len(x), dtype=torch.int64),
    )


def measured(x, method: str = "mse", bits: int = 8, *, target: str = "cpu", **options):
    """The clip of x, as layers measure it."""
    clip = torch.empty(len(x) if options.get("per_channel") else 1)
    calibration = Calibration(backend(target))
    calibration.measure("x", x, clip, method, format_of(bits), **options)
    calibration.finish()
    return clip


def error(x, clip, bits):
    return (fake_quantize(x, clip, bits) - x).double().square().reshape(len(clip), -1).sum(1)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy", "uniform"])
def test_error_is_as_small_as_the_reference_finds(kind, per_channel, bits):
    x = {
        "normal": torch.randn(7, 1001),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((7, 1001)),
        "heavy": torch.distributions.StudentT(3.0).sample((7, 1001)),
        "uniform": torch.rand(7, 1001) - 0.5,
    }[kind]
    found = measured(x, bits=bits, per_channel=per_channel)
    expected = quant.octav_clip(x, bits, per_channel)
    assert found.shape == expected.shape == (7 if per_channel else 1,)
    assert (error(x, found, bits) <= error(x, expected, bits) * 1.001).all()


def test_sample_of_a_long_tensor():
    x = torch.randn(1200, 1024)
    found, expected = measured(x), quant.octav_clip(x)
    assert (error(x, found, 8) <= error(x, expected, 8) * 1.001).all()


def test_rows_of_zeros_get_the_mean_of_the_others():
    x = torch.tensor([[0.0, 0.0], [0.0, -3.0], [2.0, 2.0], [0.0, 1e-30]])
    found = compare(clip_of(x))
    torch.testing.assert_close(found.clip, torch.tensor([2.5, 3.0, 2.0, 2.5]), rtol=2e-3, atol=0.0)
    assert on_cpu(clip_of(torch.zeros(3, 2))).clip.tolist() == [quant.SMALLEST_CLIP] * 3


def test_values_that_are_not_finite_are_counted_and_measured_as_zeros():
    x = torch.randn(4, 33)
    poisoned, zeroed = x.clone(), x.clone()
    where = (torch.tensor([0, 2, 2, 3]), torch.tensor([5, 0, 32, 7]))
    poisoned[where] = torch.tensor([float("nan"), float("inf"), float("-inf"), float("nan")])
    zeroed[where] = 0.0
    found = compare(clip_of(poisoned))
    assert found.unusable.tolist() == [1, 0, 2, 1]
    assert torch.equal(found.clip, on_cpu(clip_of(zeroed)).clip)


def of_many_kinds(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns]: normal, heavy-tailed and uniform rows in turn."""
    x = torch.randn(rows, columns)
    x[1::3] = torch.distributions.StudentT(3.0).sample(x[1::3].shape)
    x[2::3] = torch.rand(x[2::3].shape) - 0.5
    return x


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_the_error_near_a_clip_of_before_is_as_small_as_anew(factor, bits):
    """To 2 % on average: roundings of 768 values may be lucky, with 22 chances, not 131."""
    x = of_many_kinds(60, 768)
    anew = quant.octav_clip(x, bits, per_channel=True)
    found = compare(clip_of(x, bits, before=factor * anew)).clip
    ratio = error(x, found, bits) / error(x, anew, bits)
    assert ratio.mean() <= 1.025 and ratio.max() <= 1.15 and (found / anew - 1).abs().max() <= 0.12


@pytest.mark.parametrize(
    "before", [1e-8, 1e-3, 0.4, 2.5, 1e3, 0.0, -1.0, float("inf"), float("nan")]
)
def test_a_clip_of_before_that_is_far_off_or_no_clip_changes_nothing(before):
    x = torch.randn(5, 768)
    anew = on_cpu(clip_of(x)).clip
    wrong = anew * torch.tensor([before, 1.0, before, before, before])
    found = compare(clip_of(x, before=wrong)).clip
    assert torch.equal(found[[0, 2, 3, 4]], anew[[0, 2, 3, 4]])
    torch.testing.assert_close(found, anew, rtol=0.1, atol=0.0)


def test_a_clip_takes_the_place_of_the_one_before():
    x = torch.randn(7, 341)
    clip = measured(x, per_channel=True) * 1.05
    expected = on_cpu(clip_of(x, before=clip.clone())).clip
    calibration = Calibration(backend("cpu"))
    calibration.measure("x", x, clip, "mse", format_of(8), again=True, per_channel=True)
    calibration.finish()
    assert torch.equal(clip, expected)


@pytest.mark.parametrize("rows, columns", [(1, 5), (16, 33), (41, 100)])
def test_columns_have_the_clips_of_rows(rows, columns):
    x = of_many_kinds(rows, columns)
    x[0, 3], x[-1, 0] = float("nan"), float("-inf")
    wanted = on_cpu(clip_of(x))
    found = compare(clip_of(x, turned=True))
    assert torch.equal(found.clip, wanted.clip) and torch.equal(found.unusable, wanted.unusable)
    near = on_cpu(clip_of(x, before=wanted.clip))
    assert torch.equal(on_cpu(clip_of(x, before=wanted.clip, turned=True)).clip, near.clip)
    kept = x.nan_to_num(0.0, 0.0, 0.0).t().contiguous().t()
    found = (measured(one, per_channel=True) for one in (kept, kept.contiguous()))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floats_are_measured_as_float32(dtype):
    x = torch.randn(3, 17, 8).to(dtype)
    for per_channel in (False, True):
        found = measured(x, per_channel=per_channel)
        assert torch.equal(found, measured(x.float(), per_channel=per_channel))


def test_other_methods_are_the_quantisers():
    x = torch.randn(41, 16)
    torch.testing.assert_close(measured(x, "absmax"), x.abs().amax().reshape(1))
    wanted = quant.calibrate(x, "percentile", percentile=70.0)
    assert torch.equal(measured(x, "percentile", percentile=70.0), wanted)


def test_the_first_tensor_that_cannot_be_measured_is_named():
    calibration, sound = Calibration(backend("cpu")), torch.randn(5, 8)
    bad = sound.clone()
    bad[2, 3:5] = float("nan")
    for name, x in {"good": sound, "first": bad, "second": bad / 0.0}.items():
        calibration.measure(name, x, torch.empty(1), "mse", format_of(8))
    with refused("^first: cannot calibrate on a tensor in which 2 of 40 values are NaN or inf"):
        calibration.finish()
    calibration.finish()  # nothing since


@pytest.mark.parametrize("method", ["mse", "absmax"])
def test_an_empty_tensor_is_refused_at_once(method):
    with refused(r"^x: cannot calibrate on an empty tensor \(shape \[0, 8\]\)"):
        measured(torch.empty(0, 8), method)


def rounding_error(x: torch.Tensor, clip: torch.Tensor, name: str) -> torch.Tensor:
    form = scaled_format(name)
    given = form.grain.columns is None
    values = FakeQuantize(x=x, clip=clip, out=x, form=form, given=given).reference()["out"]
    return (values - x).square().sum(1)


@pytest.mark.parametrize("name", ["fp4-e2m1/row", "nf4/row", "vsquant4", "nvfp4"])
def test_no_clip_of_a_fine_grid_is_much_better(name):
    torch.manual_seed(3)
    x = torch.distributions.StudentT(4.0).sample((5, 96))
    found = least_error_clip(scaled_format(name), x, backend("cpu"), per_row=True)
    at_best = rounding_error(x, found, name)
    for share in torch.linspace(0.05, 2, 60):
        error_of_share = rounding_error(x, x.abs().amax(1) * share, name)
        assert (at_best <= 1.15 * error_of_share).all()  # short rows are rugged


def test_integers_agree_with_octav():
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    found = least_error_clip(scaled_format("int4/row"), x, backend("cpu"), per_row=True)
    best = octav_clip(x, 4, per_channel=True)
    errors = [rounding_error(x, clip, "int4/row") for clip in (found, best)]
    assert (errors[0] <= 1.05 * errors[1]).all()


def test_a_row_of_zeros_gets_the_mean_clip():
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0], [3.0, 3.0]])
    found = least_error_clip(scaled_format("nvfp4"), x, backend("reference"), per_row=True)
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0, 3.0]))
    zeros, reference = torch.zeros(2, 4), backend("reference")
    nothing = least_error_clip(scaled_format("nvfp4"), zeros, reference, per_row=False)
    assert nothing == SMALLEST_CLIP


def compare_bits(x: torch.Tensor, bits: int = 8, dtype=torch.float32, **options) -> None:
    """In any order of threads, the clips and counts of the CPU. `options`: see `clip_of`."""
    narrow = x.to(dtype)
    wanted = on_cpu(clip_of(narrow.float(), bits, **options))
    for order in ORDERS:
        found = run(clip_of(narrow, bits, **options), order=order)
        assert torch.equal(found.clip, wanted.clip) and torch.equal(found.unusable, wanted.unusable)


def turns() -> None:
    """Three turns of all loops: over runs of a warp, over joined runs, over rows."""
    compare_bits(torch.randn(1, (2 * MOST_WARPS + 1) * RUN + 5))
    some = torch.randn(70, 16)
    some[::3] = 0.0
    compare_bits(some)


HEAVY = torch.distributions.StudentT(2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns", [(1, 1), (7, 33), (3, 512), (5, 1000), (2, 4104), (2, HELD + 9)]
)
def test_rows_on_cuda(rows, columns, dtype):
    compare_bits(torch.randn(rows, columns), dtype=dtype)


@pytest.mark.parametrize("bits", [2, 4])
def test_few_bits_and_outliers_on_cuda(bits):
    compare_bits(HEAVY.sample((5, 777)), bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 1000])
def test_near_clips_of_before_on_cuda(columns, dtype):
    """Of which some are far off, and some are none."""
    x = torch.randn(7, columns)
    factor = torch.tensor([1.0, 1.1, 0.9, 3.0, 1e-3, 0.0, float("nan")])
    compare_bits(x, dtype=dtype, before=factor * on_cpu(clip_of(x)).clip)


@pytest.mark.parametrize("rows, columns", [(1, 8), (9, 40), (16, 1000)])
def test_columns_on_cuda(rows, columns):
    x = torch.randn(rows, columns)
    x[0, 7] = float("inf")
    compare_bits(x, turned=True)
    compare_bits(x, turned=True, before=on_cpu(clip_of(x)).clip)


def test_a_sample_zeros_and_values_that_are_not_finite_on_cuda():
    values = 2**18 + 8
    assert quant.sample_stride(values) == 3
    x = torch.randn(1, values)
    x[0, 1] = float("inf")  # between two that are looked at
    compare_bits(x)
    x = torch.randn(70, 40)
    x[[0, 31, 32, 33, 64, 69]] = 0.0
    x[5, 6], x[7, 39], x[8] = float("nan"), float("-inf"), float("inf")
    compare_bits(x)
    compare_bits(torch.zeros(2, 8))
