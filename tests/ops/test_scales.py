"""Scales that are written before anything is rounded."""

import torch

from lsq.ops.rounding import Add, Round
from lsq.ops.scales import TOGETHER, StartScales, start_together
from lsq.program.values import StartedScale
from tests.ops.compare import by_row, empty, on_reference, to_round


def scales(clips) -> StartScales:
    """The operation that starts those of these clips, for 8 bits."""
    each = [
        StartedScale(clip=torch.tensor([clip]), scale=empty(1), largest=127.0) for clip in clips
    ]
    return StartScales(scales=each)


def test_a_scale_is_the_clip_by_the_largest_code():
    found = on_reference(scales([127.0, 2.54]))
    assert [one.scale.item() for one in found.scales] == [1.0, torch.tensor(2.54).div(127).item()]


def test_all_roundings_of_a_pass_are_started_together():
    rounding = [
        Round(x=empty(3, 8), rounded=to_round(3, 8, 0.5 + number, bits=4))
        for number in range(TOGETHER + 2)
    ]
    first, second = start_together([*rounding, Add(a=empty(3), b=empty(3), out=empty(3))])
    for number, one in enumerate(rounding):
        made = (*first.scales, *second.scales)[number]
        assert (
            one.rounded.started
            and made.scale is one.rounded.scale
            and made.clip is one.rounded.clip
        )
        assert made.largest == 7.0
    assert [len(first.scales), len(second.scales)] == [TOGETHER, 2] and start_together([]) == []


def test_scales_of_rows_are_known_later():
    rounding = Round(x=empty(3, 8), rounded=by_row(to_round(3, 8, 0.5)))
    assert start_together([rounding]) == [] and not rounding.rounded.started
