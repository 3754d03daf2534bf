"""Models whose weights are rounded to 4 bits: near what they were, stored in half, and computed
with as they stand."""

import pytest
import torch

from lsq.quant import Grain
from lsq.quant.formats import Int4, format_choice
from lsq.serving.decoding_model import model_of, tensors_of
from lsq.serving.engine import Engine
from lsq.serving.int4 import least_squares, with_int4
from tests.serving.models import EOS, MIX, WHOLE_MIX, small_model

FORM = Int4(name="int4", bits=8, grain=Grain.ROW)


def decoded(stored, scale, columns):
    return FORM.unpack(stored, columns) * scale[:, None]


def test_no_clip_that_is_tried_is_better():
    torch.manual_seed(0)
    values = torch.distributions.Laplace(0.0, 1.0).sample((40, 100)) * (1 + 9 * torch.rand(40, 1))
    stored, scale = least_squares(values, FORM)
    error = (decoded(stored, scale, 100) - values).square().sum(1)
    for part in (1.0, 0.8, 0.64):
        other = (
            (decoded(*FORM.encode(values, part * values.abs().amax(1)), 100) - values)
            .square()
            .sum(1)
        )
        assert (error <= other * 1.0001).all()
    assert 10 * (values.square().sum() / error.sum()).log10() > 18.5


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_stays_visible():
    torch.manual_seed(0)
    values = torch.randn(4, 40)
    values[0], values[1, 3], values[2, 5] = 0, torch.nan, torch.inf
    stored, scale = least_squares(values, FORM)
    assert not decoded(stored, scale, 40)[0].any()
    assert scale.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_values_whose_squares_are_no_floats(size):
    torch.manual_seed(0)
    values = torch.randn(4, 40)
    wanted, found = (
        decoded(*least_squares(values * factor, FORM), 40) / factor for factor in (1.0, size)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "options", [{}, {"quant": {"weight_granularity": "tensor", "bits": 6}}, {"encoder_layers": 0}]
)
def test_a_model(options):
    before = model_of(small_model(**options))
    after = with_int4(before)
    assert after.architecture.decoder.config.quant.weight_format == "int4"
    assert list(after.tensors) == list(tensors_of(after.architecture))
    for name, tensor in before.tensors.items():
        if name.endswith(".codes"):
            assert after.tensors[name].nbytes == len(tensor) * -(-tensor.shape[1] // 32) * 17
            weight = name.removesuffix(".codes")
            old = tensor * before.tensors[weight + ".scale"][:, None]
            new = decoded(after.tensors[name], after.tensors[weight + ".scale"], tensor.shape[1])
            assert (new - old).norm() < 0.13 * old.norm()
        elif not name.endswith(".scale"):
            assert after.tensors[name] is tensor
    assert with_int4(after) is after


@pytest.mark.parametrize(
    ("mix", "stay"),
    [
        (MIX, {"int4", "int3/row", "int2/row", "ternary/tensor"}),
        (WHOLE_MIX + ",*encoder_attn.out*=int2/row", {"int2/row"}),
        ("int4,*fc2*=int6/row", {"int4"}),
    ],
)
def test_weights_of_a_mix_with_more_bits_are_rounded(mix, stay):
    before = model_of(small_model(quant={"weight_format": mix}))
    after, rounded = with_int4(before), 0
    for name, tensor in before.tensors.items():
        if not name.endswith(".codes"):
            continue
        weight = name.removesuffix(".codes")
        side = before.architecture.stacks[weight.partition(".")[0]]
        form = format_choice(side.config.quant.weight_format).of(weight)
        assert (after.tensors[name] is tensor) == (form in stay), form
        assert isinstance(after.architecture.format_of(weight), Int4) == (
            form == "int4" or form not in stay
        )
        rounded += form not in stay
    assert rounded and with_int4(after) is after


@pytest.mark.parametrize("form", ["int2/row", "int4/tensor"])
def test_narrow_models_stay(form):
    before = model_of(small_model(quant={"weight_format": form}))
    assert with_int4(before) is before


def test_it_decodes_nearly_as_before():
    model, scores = model_of(small_model()), []
    for each in (model, with_int4(model)):
        engine = Engine(each)
        engine.begin([torch.tensor([5, 9, 17, EOS])], rows=1, steps=2)
        scores.append(engine.step_all(torch.tensor([EOS]), torch.tensor([0])))
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.5
