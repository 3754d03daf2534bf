"""What modules and optimizers know of parameters: who limits clips, and whose codes count."""

import copy
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.program.values import Weight
from lsq.quant import Grain, WeightFormat
from lsq.run import parameter_state, stamp
from lsq.run.parameter_state import WeightCodes, drop, remember, state_of, steps, take, withdraw

NAMES = frozenset(("codes", "scale"))


def written(rows=4, columns=200):
    """(codes, weight, clip): codes that an optimizer has written."""
    weight = torch.nn.Parameter(torch.randn(rows, columns))
    clip = torch.nn.Parameter(torch.ones(rows))
    codes = WeightCodes((id(weight), id(clip)))
    made = torch.zeros(rows, columns, dtype=torch.int8)
    codes.tensors = {"codes": made, "scale": torch.ones(rows)}
    form = WeightFormat(name="weight", bits=8, grain=Grain.ROW)
    codes.rounded = Weight(format=form, codes=made, scale=codes.tensors["scale"])
    codes.rounded_names, codes.clip = NAMES, weakref.ref(clip)
    state_of(weight).codes = codes
    codes.written(weight)
    steps.watch()
    return codes, weight, clip


def test_importing_lsq_hooks_no_optimizer():
    code = (
        "import lsq, lsq.optim, lsq.layers, lsq.models, torch.optim.optimizer as of;"
        "lsq.convert(__import__('torch').nn.Sequential(__import__('torch').nn.Linear(64, 64)));"
        "assert not of._global_optimizer_pre_hooks and not of._global_optimizer_post_hooks"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_codes_that_an_optimizer_wrote_count():
    codes, weight, clip = written()
    assert codes.current(NAMES, weight, clip)
    assert not codes.current(NAMES | {"transposed"}, weight, clip)
    withdraw(weight)
    assert not codes.current(NAMES, weight, clip)


def test_codes_of_another_module_do_not_count():
    codes, weight, clip = written()
    state_of(weight).codes = WeightCodes(codes.owner)
    assert not codes.current(NAMES, weight, clip)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", ["add_", "data", "through data"])
def test_changes_of_weight_and_clip_are_seen(which, change):
    codes, *found = written()
    with torch.no_grad():
        if change == "data":
            found[which].data = found[which].data.clone()
        elif change == "add_":
            found[which][0].add_(1.0)
        else:
            found[which].data.mul_(1.001)
    assert not codes.current(NAMES, *found)


@pytest.mark.parametrize("which", [0, 1])
def test_the_step_of_another_optimizer_is_seen(which, monkeypatch):
    """Also of one that steps through `.data`, as fairseq's do, and where values cannot be
    compared."""
    monkeypatch.setattr(stamp, "_sample", lambda tensor: tensor.detach()[:0])
    codes, weight, clip = written()
    changed = (weight, clip)[which]
    remember([clip], 0.01)
    changed.grad, mine = torch.ones_like(changed), torch.optim.SGD([clip], lr=1.0)
    for _ in range(2):
        take(mine, [clip])
        codes.written(weight)
        assert codes.current(NAMES, weight, clip)
        FairseqAdam([changed], lr=0.1).step()
        assert not codes.current(NAMES, weight, clip)


def test_clips_are_remembered_unless_an_optimizer_limits_them():
    steps.watch()
    clip = torch.nn.Parameter(torch.ones(3))
    remember([clip], 0.01)
    assert torch.equal(state_of(clip).before, clip) and state_of(clip).limit == 0.01
    optimizer = torch.optim.SGD([clip], lr=1.0)
    take(optimizer, [clip])
    remember([clip], 0.01)
    assert state_of(clip).before is None
    other = torch.optim.SGD([clip], lr=1.0)
    clip.grad = torch.ones(3)
    other.step()
    assert (state_of(clip).before == 1).all() and (clip == 0).all()
    take(optimizer, [clip])
    del optimizer
    remember([clip], 0.01)
    assert (state_of(clip).before == 0).all()


def test_copies_of_parameters_know_nothing():
    codes, weight, clip = written()
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert state_of(other).codes is None
    assert codes.current(NAMES, weight, clip)


def test_nothing_outlives_a_parameter_or_is_left_of_one_that_is_dropped():
    before = len(parameter_state._states)
    codes, weight, clip = written()
    drop(weight)
    assert weakref.getweakrefcount(weight) == 0
    del codes, weight, clip
    assert len(parameter_state._states) <= before
