"""How a batch's masks say what is packed."""

import torch

from lsq.architectures.batch import everything, memory_packing_of, packing_of

PRESENT = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]])
SEES = PRESENT.bool()[:, None, None].expand(2, 1, 3, 4)


def test_masks_of_a_memory():
    states = torch.randn(2, 4, 8)
    for mask in (PRESENT, PRESENT.bool(), SEES, SEES[:, :, :1], torch.zeros(SEES.shape).masked_fill(~SEES, -1e9)):
        packing = memory_packing_of(mask, (2, 4))
        assert packing.starts.tolist() == [0, 3, 4]
        assert torch.equal(packing.pack(states), states[PRESENT.bool()])
    for mask in (None, torch.ones(2, 4), torch.zeros(1, 1, 3, 4)):
        assert memory_packing_of(mask, (2, 4)).starts.tolist() == [0, 4, 8]


def test_masks_that_no_memory_is_packed_by():
    each = SEES.clone()
    each[0, 0, 1, 0] = False
    assert memory_packing_of(each, (2, 4)) is None
    nothing = PRESENT.clone()
    nothing[1] = 0
    assert memory_packing_of(nothing, (2, 4)) is None


def test_the_same_mask_is_looked_at_once():
    mask = PRESENT.clone()
    found = memory_packing_of(mask, (2, 4))
    assert memory_packing_of(mask, (2, 4)) is found
    mask[1] = 1
    assert memory_packing_of(mask, (2, 4)).starts.tolist() == [0, 3, 7]


def test_what_inference_mode_has_made_is_of_use_in_training():
    for mask in (None, PRESENT.clone()):
        with torch.inference_mode():
            packing = memory_packing_of(mask, (2, 4))
        assert memory_packing_of(mask, (2, 4)) is packing
        assert not packing.starts.is_inference()


def test_masks_that_hide_in_part_or_from_some_heads():
    zeros, present = torch.zeros(2, 1, 1, 4), PRESENT.bool()[:, None, None]
    assert memory_packing_of(zeros.masked_fill(~present, -2.0), (2, 4)) is None
    assert packing_of(zeros.masked_fill(~present, -2.0), (2, 4), everything) is None
    assert packing_of(zeros.masked_fill(~present, -1e4), (2, 4), everything) is not None
    heads = torch.ones(2, 3, 4, 4, dtype=torch.bool)
    heads[:, 1, :, 0] = False
    assert packing_of(heads, (2, 4), everything) is None
