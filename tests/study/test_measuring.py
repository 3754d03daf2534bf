"""Errors against the same computed by hand; what is reported and what is refused."""

import math

import pytest
import torch
from torch import nn

from lsq.quant.numbers import METHODS, scaled_format, signal_to_noise
from lsq.study import DEFAULT_FORMATS, measure, measure_tensors


@pytest.mark.parametrize("clip", METHODS)
def test_errors_are_those_of_the_format(clip):
    x = torch.randn(9, 70)
    (entry,) = measure_tensors(
        {"x": x}, formats=("int4/row", "nvfp4"), clip=clip, percentile=99.0
    ).entries
    for error, name in zip(entry.errors, ("int4/row", "nvfp4"), strict=True):
        form = scaled_format(name)
        found = form.decode(form.encode(x, clip, percentile=99.0))
        assert error.format == name and error.bits == form.bits_per_value((9, 70))
        assert error.signal_to_noise == signal_to_noise(x, found)
        assert error.largest == pytest.approx(
            float((found - x).abs().max() / x.abs().max()), rel=1e-6
        )
    assert not entry.sampled and entry.problem is None


def test_all_formats_of_the_default_are_there():
    errors = measure_tensors({"x": torch.randn(64, 128)})
    assert tuple(error.format for error in errors.entries[0].errors) == DEFAULT_FORMATS
    assert all(
        5 < error.signal_to_noise < 60 for error in errors.entries[0].errors if error.bits > 2.5
    )


def test_bits_are_those_of_the_whole_tensor():
    (entry,) = measure_tensors({"x": torch.randn(64, 128)}, formats=["nvfp4"], sample=300).entries
    assert entry.values == 2 * 128 and entry.sampled
    assert entry.errors[0].bits == scaled_format("nvfp4").bits_per_value((64, 128))


def test_extreme_tensors_have_figures():
    """Also where scales are denormal, or nearly infinite."""
    x = torch.randn(8, 64).clamp(-3, 3)
    for scale in (1e-43, 1e-38, 1e-30, 1e37):
        for entry in measure_tensors({"x": x * scale}).entries:
            assert entry.problem is None
            assert not any(
                math.isnan(error.signal_to_noise) or math.isnan(error.largest)
                for error in entry.errors
            )


def test_a_model_and_its_medians():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    x = torch.randn(40, 64)
    errors = measure(
        model, lambda: model(x).square().mean(), formats=("int8/row", "int3/row", "int8/row")
    )
    assert errors.formats == ("int8/row", "int3/row") and errors.kinds == (
        "weight",
        "activation",
        "gradient",
    )
    first, second = errors.medians("weight")
    assert (first.format, second.format) == ("int3/row", "int8/row")
    lowest = min(
        (entry.errors[0].signal_to_noise, entry.name)
        for entry in errors.entries
        if entry.kind == "weight"
    )
    assert (second.least, second.where) == lowest
    assert second.signal_to_noise > first.signal_to_noise + 25


def test_what_cannot_be_measured_is_said():
    broken, rows = torch.ones(3, 4), torch.ones(5, 4)
    broken[1, 1], rows[2] = math.nan, 0
    errors = measure_tensors(
        {"broken": broken, "zeros": torch.zeros(2, 2), "rows": rows, "large": torch.randn(99, 64)},
        formats=["int8/row"],
        sample=640,
    )
    assert errors.remarks() == [
        "not measured: weight broken: 1 of 12 values are NaN or infinite",
        "not measured: weight zeros: all its values are zero",
        "rows of zeros, which were left out: weight rows (1 of 5)",
        "of 1 large tensors evenly spaced rows were looked at, at most 640 values",
    ]
    assert str(errors).endswith("\n".join(errors.remarks()))


def test_what_is_refused():
    tensors = {"x": torch.ones(2, 3)}
    for options, message in (
        ({"formats": ["mxfp5"]}, "no number format is called 'mxfp5' .did you mean mxfp4"),
        ({"formats": []}, "formats are none"),
        ({"clip": "best"}, "clip is 'best'; allowed: 'absmax', "),
        ({"percentile": 0}, "percentile is 0; it must be above 0"),
        ({"sample": 0}, "sample is 0; it must be a whole number above 0"),
        ({"chosen": ["y"]}, "no tensor is called 'y'; there are x"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_tensors(tensors, **options)
    with pytest.raises(ValueError, match="there is no float tensor with two or more"):
        measure_tensors({"bias": torch.ones(3)})
