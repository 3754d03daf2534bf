"""What modules leave to optimizers: who limits clips, and whose codes count."""

import copy
import dataclasses
import pickle

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.program.values import Weight
from lsq.quant import Grain, WeightFormat
from lsq.run import stamp, upkeep


def offered(rows=4, columns=200):
    """(weight, clip, rounded) of which an optimizer has made the codes."""
    weight, clip = (
        torch.nn.Parameter(torch.randn(rows, columns)),
        torch.nn.Parameter(torch.ones(rows)),
    )
    codes = torch.zeros(rows, columns, dtype=torch.int8)
    form = WeightFormat(name="weight", bits=8, grain=Grain.ROW)
    rounded = Weight(format=form, codes=codes, scale=torch.ones(rows))
    upkeep.offer(weight, clip, rounded)
    upkeep.made(weight)
    return weight, clip, rounded


def test_codes_that_were_made_count():
    weight, clip, rounded = offered()
    assert upkeep.current(weight, clip, rounded)
    assert not upkeep.current(
        weight, clip, dataclasses.replace(rounded, codes=rounded.codes.clone())
    )
    assert not upkeep.current(
        weight, clip, dataclasses.replace(rounded, transposed=rounded.codes.t().contiguous())
    )
    upkeep.withdraw(weight)
    assert not upkeep.current(weight, clip, rounded)


def test_codes_that_a_pass_has_written_do_not_count():
    for other in (False, True):
        weight, clip, rounded = offered()
        upkeep.offer(
            torch.nn.Parameter(weight.detach().clone()) if other else weight, clip, rounded
        )
        assert not upkeep.current(weight, clip, rounded)


@pytest.mark.parametrize("which", [0, 1])
def test_counted_changes_and_other_memory_are_seen(which):
    for change in ("add_", "data"):
        found = offered()
        with torch.no_grad():
            if change == "data":
                found[which].data = found[which].data.clone()
            else:
                found[which][0].add_(1.0)
        assert not upkeep.current(*found)


@pytest.mark.parametrize("which", [0, 1])
def test_changes_through_data_are_seen_but_of_few_values(which):
    found = offered()
    found[which].data.mul_(1.001)
    assert not upkeep.current(*found)


@pytest.mark.parametrize("which", [0, 1])
def test_the_step_of_another_optimizer_is_seen(which, monkeypatch):
    """Also of one that steps through `.data`, as fairseq's do, and where values cannot be
    compared."""
    monkeypatch.setattr(stamp, "_sample", lambda tensor: tensor.detach()[:0])
    weight, clip, rounded = found = offered()
    upkeep.remember([clip], 0.01)
    found[which].grad, mine = torch.ones_like(found[which]), torch.optim.SGD([clip], lr=1.0)
    for _ in range(2):
        upkeep.take(mine, [clip])
        upkeep.made(weight)
        assert upkeep.current(weight, clip, rounded)
        FairseqAdam([found[which]], lr=0.1).step()
        assert not upkeep.current(weight, clip, rounded)


def test_clips_are_remembered_unless_an_optimizer_limits_them():
    clip = torch.nn.Parameter(torch.ones(3))
    upkeep.remember([clip], 0.01)
    assert torch.equal(upkeep.of(clip).before, clip) and upkeep.of(clip).limit == 0.01
    optimizer = torch.optim.SGD([clip], lr=1.0)
    upkeep.take(optimizer, [clip])
    upkeep.remember([clip], 0.01)
    assert upkeep.of(clip).before is None
    other = torch.optim.SGD([clip], lr=1.0)
    clip.grad = torch.ones(3)
    other.step()
    assert (upkeep.of(clip).before == 1).all() and (clip == 0).all()
    upkeep.take(optimizer, [clip])
    del optimizer
    upkeep.remember([clip], 0.01)
    assert (upkeep.of(clip).before == 0).all()


def test_copies_of_parameters_know_nothing():
    weight, clip, rounded = offered()
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert upkeep.of(other).rounded is None
    assert upkeep.current(weight, clip, rounded)


def test_nothing_outlives_a_parameter():
    before = len(upkeep._kept)
    offered()
    assert len(upkeep._kept) <= before
