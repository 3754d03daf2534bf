"""Calibration on the test device: what a step launches and waits for, and what it says of NaN and
infinity."""

import copy

import pytest
import torch

from lsq.layers import TransformerDecoderLayer, TransformerEncoderLayer
from lsq.native.launch_list import LaunchList
from lsq.run.backends import backend
from tests.device.standin import PLACE
from tests.device.watch import Record, watched
from tests.layers.shapes import HIDDEN, config_of

LAYERS = {"encoder": TransformerEncoderLayer, "decoder": TransformerDecoderLayer}
MOST = (
    {"encoder": (17, 23), "decoder": (18, 41)},
    {"encoder": (49, 23), "decoder": (77, 41)},
    {"encoder": (40, 27), "decoder": (58, 48)},
)
"""(launches of PyTorch, lists of lsq) in the first pass, in one that widens clips, and in one that
measures weights."""


def inputs(layer, place: torch.device) -> list[torch.Tensor]:
    """x, and a memory if it is a decoder's."""
    shapes = [(7, 3, HIDDEN), (9, 3, HIDDEN)][: 1 + isinstance(layer, TransformerDecoderLayer)]
    return [torch.randn(shape).to(place) for shape in shapes]


def step(layer, *given: torch.Tensor) -> tuple[Record, int]:
    """What PyTorch did in a training step, and how many lists lsq ran."""
    runs, run = [], LaunchList.run
    with pytest.MonkeyPatch.context() as patch, watched() as record:
        patch.setattr(LaunchList, "run", lambda self: (runs.append(self), run(self)))
        layer(*given).square().sum().backward()
    return record, len(runs)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_that_calibrates_waits_once_at_most(name):
    layer = LAYERS[name](config_of(backward="int8", calibration_passes=2)).to(PLACE)
    given = inputs(layer, PLACE)
    step(copy.deepcopy(layer), *given)  # a process zeroes its words for tickets once, in any step
    found = [step(layer, *given) for _ in range(3)]
    for (record, lists), most, waits in zip(found, MOST, (1, 0, 1), strict=True):
        launches, most_lists = most[name]
        assert len(record.waits) == waits, record.table(record.waits)
        assert len(record.launches) <= launches, record.table(record.launches)
        assert lists <= most_lists


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_clips_are_the_emulators_bit_by_bit(name):
    torch.manual_seed(3)
    here = LAYERS[name](config_of(backward="int8"))
    here.backend = backend("emulated")
    there = copy.deepcopy(here).to(PLACE)
    there.backend = None
    given = inputs(here, torch.device("cpu"))
    torch.manual_seed(3)
    here(*given)
    torch.manual_seed(3)
    there(*(x.to(PLACE) for x in given))
    for clip, (path, expected) in zip(there.clips().values(), here.clips().items(), strict=True):
        assert torch.equal(clip.cpu(), expected), path


@pytest.mark.thorough
@pytest.mark.parametrize("part, values", [("input", "1 of 144"), ("weight", "1 of 5376")])
def test_what_is_not_finite_is_named_and_measured_again(part, values):
    layer = TransformerEncoderLayer(config_of(backward="int8", calibration_passes=2)).to(PLACE)
    x = torch.randn(1, 3, HIDDEN).to(PLACE)
    if part == "weight":
        layer(x).sum().backward()
        layer(x).sum().backward()
        named = layer.feed_forward.fc1_weight
    else:
        named = x
    with torch.no_grad():
        kept = named.clone()
        named.view(-1)[5] = float("nan")
    with pytest.raises(
        ValueError, match=f"{part}: cannot calibrate on a tensor in which {values} values are NaN"
    ):
        layer(x)
    with torch.no_grad():
        named.copy_(kept)
    assert layer(x).isfinite().all().item()
    assert layer.schedule.calibrated
