"""The clip of least squared error of formats that have no search of their own."""

import pytest
import torch

from lsq.ops.clip_search import least_error_clip
from lsq.ops.fake_quantize import FakeQuantize
from lsq.quant import SMALLEST_CLIP, octav_clip
from lsq.quant.numbers import scaled_format
from lsq.run.backends import backend


def error(x: torch.Tensor, clip: torch.Tensor, name: str) -> torch.Tensor:
    form = scaled_format(name)
    given = form.grain.columns is None
    values = FakeQuantize(x=x, clip=clip, out=x, form=form, given=given).reference()[0]
    return (values - x).square().sum(1)


@pytest.mark.parametrize("name", ["fp4-e2m1/row", "nf4/row", "vsquant4", "nvfp4"])
def test_no_clip_of_a_fine_grid_is_much_better(name):
    torch.manual_seed(3)
    x = torch.distributions.StudentT(4.0).sample((5, 96))
    found = least_error_clip(scaled_format(name), x, backend("cpu"), per_row=True)
    at_best = error(x, found, name)
    for share in torch.linspace(0.05, 2, 60):
        assert (
            at_best <= 1.15 * error(x, x.abs().amax(1) * share, name)
        ).all()  # short rows are rugged


def test_integers_agree_with_octav():
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    found = least_error_clip(scaled_format("int4/row"), x, backend("cpu"), per_row=True)
    best = octav_clip(x, 4, per_channel=True)
    assert (error(x, found, "int4/row") <= 1.05 * error(x, best, "int4/row")).all()


def test_a_row_of_zeros_gets_the_mean_clip():
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0], [3.0, 3.0]])
    found = least_error_clip(scaled_format("nvfp4"), x, backend("reference"), per_row=True)
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0, 3.0]))
    nothing = least_error_clip(
        scaled_format("nvfp4"), torch.zeros(2, 4), backend("reference"), per_row=False
    )
    assert nothing == SMALLEST_CLIP
