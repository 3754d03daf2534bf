"""What modules and optimizers know of parameters: changes, codes that count, who limits clips."""

import copy
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.native import loader
from lsq.program.values import Weight
from lsq.quant import Grain, WeightFormat
from lsq.run import parameter_state
from lsq.run.parameter_state import (
    SAMPLES,
    SMALL,
    Stamp,
    WeightCodes,
    checksum,
    drop,
    remember,
    state_of,
    steps,
    take,
    withdraw,
)

NAMES = frozenset(("codes", "scale"))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    "rows, dtype", [(1, torch.bfloat16), (7, torch.float32), (20_001, torch.float32)]
)
def test_a_checksum_sees_every_value_and_their_order(monkeypatch, library, rows, dtype):
    monkeypatch.setattr(loader, "available", lambda: library)
    x = torch.arange(1, 1 + 3 * rows).reshape(rows, 3).to(dtype)
    flat, before = x.view(-1), checksum(x)
    assert checksum(x.clone()) == before == checksum(x.t().contiguous().t())
    for position in (0, len(flat) // 2, -1):
        kept, flat[position] = flat[position].item(), -7.0
        assert checksum(x) != before
        flat[position] = kept
    flat[[0, -1]] = flat[[-1, 0]]
    assert checksum(x) != before


def add(x):
    with torch.no_grad():
        x[3].add_(1.0)


def add_to_data(x):
    x.data[3] += 1


def add_by_numpy(x):
    x.detach().numpy()[3] += 1


def move(x):
    x.data = x.data.clone()


CHANGES = pytest.mark.parametrize("change", [add, add_to_data, add_by_numpy, move])


@CHANGES
def test_one_value_is_seen(change):
    x = torch.nn.Parameter(torch.randn(1000))
    stamp = Stamp([x])
    assert stamp.holds([x])
    change(x)
    assert not stamp.holds([x])
    assert stamp.same_values([x]) == (change is move)


def test_of_large_tensors_few_rows_compare_samples():
    x = torch.nn.Parameter(torch.zeros(2 * SMALL))
    stamp = Stamp([x])
    x.data[1] = 1.0
    assert stamp.holds([x], rows=1) and not stamp.holds([x], rows=64)
    x.data[: 2 * x.numel() // SAMPLES] = 1.0
    assert not stamp.holds([x], rows=1)


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        x = torch.ones(5)
    stamp = Stamp([x])
    assert stamp.holds([x])
    with torch.inference_mode():
        x[0] = 2.0
    assert not stamp.holds([x])


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


@pytest.mark.thorough
def test_importing_lsq_hooks_no_optimizer():
    code = (
        "import lsq, lsq.optim, lsq.layers, lsq.models, torch.optim.optimizer as of;"
        "lsq.convert(__import__('torch').nn.Sequential(__import__('torch').nn.Linear(64, 64)));"
        "assert not of._global_optimizer_pre_hooks and not of._global_optimizer_post_hooks"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_codes_that_an_optimizer_wrote_count_for_their_module():
    codes, weight, clip = written()
    assert codes.current(NAMES, weight, clip)
    assert not codes.current(NAMES | {"transposed"}, weight, clip)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert state_of(other).codes is None
    withdraw(weight)
    assert not codes.current(NAMES, weight, clip)
    codes, weight, clip = written()
    state_of(weight).codes = WeightCodes(codes.owner)  # another module's
    assert not codes.current(NAMES, weight, clip)


@pytest.mark.parametrize("which", [0, 1])
@CHANGES
def test_changes_of_weight_and_clip_are_seen(which, change):
    codes, *found = written()
    change(found[which])
    assert not codes.current(NAMES, *found)


@pytest.mark.parametrize("which", [0, 1])
def test_the_step_of_another_optimizer_is_seen(which, monkeypatch):
    """Also of one that steps through `.data`, as fairseq's do, and where values cannot be
    compared."""
    monkeypatch.setattr(parameter_state, "_sample", lambda tensor: tensor.detach()[:0])
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


def test_nothing_outlives_a_parameter_or_is_left_of_one_that_is_dropped():
    before = len(parameter_state.steps.states)
    codes, weight, clip = written()
    drop(weight)
    assert weakref.getweakrefcount(weight) == 0
    del codes, weight, clip
    assert len(parameter_state.steps.states) <= before
