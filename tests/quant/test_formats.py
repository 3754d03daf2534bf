"""Formats of weights, and a packed one of the test's own on its way through layers."""

import pytest
import torch

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, VocabularyProjection
from lsq.layers.linear import linear
from lsq.layers.programs import Mode
from lsq.observe import observe
from lsq.ops.rounding import UnpackWeight
from lsq.quant import WEIGHT_FORMATS, Grain, WeightFormat
from lsq.run.backends import backend


class Turned(WeightFormat):
    """Codes from the last to the first, and a byte of nothing behind them."""

    packed = True

    @property
    def unpacked(self):
        return WeightFormat(name="int8", bits=self.bits, grain=self.grain)

    def stored_columns(self, columns):
        return columns + 1

    def encode(self, values, clip):
        codes, scale = super().encode(values, clip)
        return torch.nn.functional.pad(codes.flip(1), (0, 1)), scale

    def unpack(self, stored, columns):
        return stored[:, :columns].flip(1)


@pytest.fixture(autouse=True)
def turned(monkeypatch):
    """The format by that name."""
    monkeypatch.setitem(
        WEIGHT_FORMATS, "turned", lambda bits, grain: Turned(name="turned", bits=bits, grain=grain)
    )


@pytest.mark.parametrize("grain, clips", [(Grain.ROW, 7), (Grain.TENSOR, 1)])
def test_int8_stores_what_products_read(grain, clips):
    form = WEIGHT_FORMATS["int8"](5, grain)
    values, clip = torch.randn(7, 16), 0.5 + torch.rand(clips)
    stored, scale = form.encode(values, clip)
    wanted = quant.quantize(values, clip, 5)
    assert torch.equal(stored, wanted.codes) and torch.equal(scale, wanted.scale.expand(7))
    assert not form.packed and form.stored_columns(16) == 16 and form.unpack(stored, 16) is stored


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="weight_format is 'int3': allowed are 'int8', .*'turned'"):
        QuantConfig(weight_format="int3")


def layers(**options):
    """The same layers for the same options but for their format; on the reference, which alone
    knows this one."""
    torch.manual_seed(0)
    config = QuantConfig(clips="learned", **options)
    made = QuantizedLinear(32, 16, quant=config), VocabularyProjection(33, 32, quant=config)
    for layer in made:
        layer.backend = backend("reference")
    return made


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "clip_gradient": "lsq"}]
)
def test_a_packed_format_changes_nothing_that_products_see(options):
    found = []
    for name in ("int8", "turned"):
        linear, vocabulary = layers(weight_format=name, **options)
        torch.manual_seed(1)
        x = torch.randn(5, 32, requires_grad=True)
        loss, _ = vocabulary.loss(x, torch.arange(5))
        with observe(linear) as statistics:
            (loss + linear(x).square().sum()).backward()
        gradients = [
            p.grad for layer in (linear, vocabulary) for p in layer.parameters() if p.requires_grad
        ]
        found.append(([loss, x.grad, *gradients], statistics))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def test_no_unpacked_codes_wait_for_the_backward_pass():
    mode = Mode(training=True, backward=True, backend=backend("reference"))
    program = linear(QuantConfig(weight_format="turned"), 5, 32, 16, mode, bias=True)
    unpacking = [i for i, one in enumerate(program.operations) if isinstance(one, UnpackWeight)]
    assert len(unpacking) == 2 and unpacking[0] < program.forward_length <= unpacking[1]
    assert all(one.shape != (16, 32) for one in program.saved)
    assert program.weights["weight"].codes.shape == (16, 33)


def test_codes_that_are_kept_are_the_packed_ones():
    linear, _ = layers(weight_format="turned")
    linear.eval()
    linear(torch.randn(5, 32))
    assert {tuple(codes.shape) for codes in linear.weight_state.kept.values()} == {(16, 33), (16,)}
