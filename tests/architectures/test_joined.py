"""Several parameters as one."""

import pytest
import torch
from torch import nn

from lsq.architectures.joined import Joined, lie_together


def parts(*rows: int, width: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(count, width)) for count in rows]


def storages(found: list[torch.Tensor]) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in found}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("width", [3, None])
def test_values_and_gradients_are_those_of_cat(together, width):
    found = parts(2, 5, 1)
    if width is None:
        found = [nn.Parameter(one[:, 0].detach().clone()) for one in found]
    expected = torch.cat([one.detach() for one in found])
    if together:
        lie_together(found)
    whole = Joined.apply(*found)
    assert torch.equal(whole, expected)
    assert (whole.data_ptr() == found[0].data_ptr()) is together
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward()
    assert torch.equal(torch.cat([one.grad for one in found]), weight)


def test_steps_in_place_stay_together():
    found = parts(2, 4)
    lie_together(found)
    with torch.no_grad():
        found[1].fill_(7.0)
    assert (Joined.apply(*found)[2:] == 7.0).all()


def test_what_others_hold_stays():
    shared = torch.randn(8, 3)
    found = [nn.Parameter(shared[:4]), nn.Parameter(shared[4:])]
    assert Joined.apply(*found).data_ptr() == shared.data_ptr()
    for kept in ([nn.Parameter(shared[:3]), *parts(2)], [*parts(2), nn.Parameter(torch.randn(2, 3).bfloat16())]):
        before = [one.data_ptr() for one in kept]
        lie_together(kept)
        assert [one.data_ptr() for one in kept] == before
    (one,) = parts(2)
    lie_together([one, one])
    assert len(Joined.apply(one, one)) == 4
    assert len(storages(found)) == 1
