"""Several parameters as one."""

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from lsq.models.fused_weights import Joined, lie_together


def parts(*rows: int, width: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(count, width)) for count in rows]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("width", [3, None])
def test_values_and_gradients_are_those_of_cat(together, width):
    found = parts(2, 5, 1)
    if width is None:
        found = [nn.Parameter(one[:, 0].detach().clone()) for one in found]
    expected = torch.cat([one.detach() for one in found])
    kept = lie_together(found) if together else None
    whole = Joined.apply(kept, *found)
    assert torch.equal(whole, expected)
    assert (whole.data_ptr() == found[0].data_ptr()) is together
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward()
    assert torch.equal(torch.cat([one.grad for one in found]), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_place_stay_together(dtype):
    found = [nn.Parameter(one.to(dtype)) for one in parts(2, 4)]
    kept = lie_together(found)
    with torch.no_grad():
        found[1].fill_(7.0)
    whole = Joined.apply(kept, *found)
    assert whole.data_ptr() == kept.data_ptr() and (whole[2:] == 7.0).all()


def test_what_has_moved_is_copied():
    found = parts(2, 4)
    kept = lie_together(found)
    found[1].data = torch.full((4, 3), 7.0)
    whole = Joined.apply(kept, *found)
    assert whole.data_ptr() != kept.data_ptr() and (whole[2:] == 7.0).all()


def test_nothing_is_shared_for_others(tmp_path):
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)])
    lie_together([one.weight for one in model])
    save_model(model, str(tmp_path / "model.safetensors"))
    assert len({one.weight.untyped_storage().data_ptr() for one in model}) == 2


def test_what_others_hold_stays():
    shared = torch.randn(8, 3)
    for kept in (
        [nn.Parameter(shared[:3]), *parts(2)],
        [*parts(2), nn.Parameter(torch.randn(2, 3).bfloat16())],
    ):
        before = [one.data_ptr() for one in kept]
        assert lie_together(kept) is None
        assert [one.data_ptr() for one in kept] == before
    (one,) = parts(2)
    assert lie_together([one, one]) is None
    assert len(Joined.apply(None, one, one)) == 4
