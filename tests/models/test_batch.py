"""How a batch's masks say what is packed."""

import pytest
import torch

from lsq.models.batch import encoder_packing_of, packing_of

PRESENT = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]])
SEES = PRESENT.bool()[:, None, None].expand(2, 1, 3, 4)


def test_masks_of_a_memory():
    states = torch.randn(2, 4, 8)
    for mask in (
        PRESENT,
        PRESENT.bool(),
        SEES,
        SEES[:, :, :1],
        torch.zeros(SEES.shape).masked_fill(~SEES, -1e9),
    ):
        packing = encoder_packing_of(mask, (2, 4))
        assert packing.cu_seqlens.tolist() == [0, 3, 4]
        assert torch.equal(packing.pack(states), states[PRESENT.bool()])
    for mask in (None, torch.ones(2, 4), torch.zeros(1, 1, 3, 4)):
        assert encoder_packing_of(mask, (2, 4)).cu_seqlens.tolist() == [0, 4, 8]


def test_masks_that_no_memory_is_packed_by():
    each = SEES.clone()
    each[0, 0, 1, 0] = False
    assert encoder_packing_of(each, (2, 4)) is None
    nothing = PRESENT.clone()
    nothing[1] = 0
    assert encoder_packing_of(nothing, (2, 4)) is None


def test_the_same_mask_is_looked_at_once():
    mask = PRESENT.clone()
    found = encoder_packing_of(mask, (2, 4))
    assert encoder_packing_of(mask, (2, 4)) is found
    mask[1] = 1
    assert encoder_packing_of(mask, (2, 4)).cu_seqlens.tolist() == [0, 3, 7]


def test_a_mask_that_has_gone_is_not_that_of_a_pass_without_one():
    with torch.inference_mode():
        padded = packing_of(PRESENT.clone(), (2, 4))
    assert padded.cu_seqlens.tolist() == [0, 3, 4]
    assert packing_of(None, (2, 4)).cu_seqlens.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.numpy().fill(1),
        lambda mask: mask.data.fill_(1),
        lambda mask: mask.fill_(1),
    ],
    ids=["numpy", "data", "in place"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_others_have_written_to_is_looked_at_again(write, inference):
    with torch.inference_mode(inference):
        mask = PRESENT.clone()
        assert encoder_packing_of(mask, (2, 4)).cu_seqlens.tolist() == [0, 3, 4]
        write(mask)
        assert encoder_packing_of(mask, (2, 4)).cu_seqlens.tolist() == [0, 4, 8]


def test_what_inference_mode_has_made_is_of_use_in_training():
    for mask in (None, PRESENT.clone()):
        with torch.inference_mode():
            packing = encoder_packing_of(mask, (2, 4))
        assert encoder_packing_of(mask, (2, 4)) is packing
        assert not packing.cu_seqlens.is_inference()


def test_masks_that_hide_in_part_or_from_some_heads():
    zeros, present = torch.zeros(2, 1, 1, 4), PRESENT.bool()[:, None, None]
    assert encoder_packing_of(zeros.masked_fill(~present, -2.0), (2, 4)) is None
    assert packing_of(zeros.masked_fill(~present, -2.0), (2, 4)) is None
    assert packing_of(zeros.masked_fill(~present, -1e4), (2, 4)) is not None
    heads = torch.ones(2, 3, 4, 4, dtype=torch.bool)
    heads[:, 1, :, 0] = False
    assert packing_of(heads, (2, 4)) is None


def test_masks_that_are_no_tensors():
    """Such as a BlockMask of FlexAttention."""
    assert packing_of([1, 1, 1, 0], (1, 4)) is None
    assert encoder_packing_of([1, 1, 1, 0], (1, 4)) is None
