"""gated_kept: what it measures at one block."""

import math

import gated_kept
import torch


def test_one_block():
    torch.manual_seed(0)
    block = gated_kept.GatedBlock(gated_kept.ACTIVATIONS["silu"])
    y = block(torch.randn(2, 40, gated_kept.HIDDEN))
    y.backward(torch.randn_like(y))
    found = {row["way"]: row for row in gated_kept.look(block, 1, 0)}
    assert {*gated_kept.WAYS, *gated_kept.MIDDLES} < set(found)
    assert found["float32"]["dx"] == found["float32"]["dw"] == math.inf
    assert (
        found["bfloat16"]["dx"]
        > found["int8 by row"]["dx"]
        > found["the gradient's own rounding"]["dx"]
        > 20
    )
    exact, rounded = found["float32"]["h"], found["the product in int8, one clip"]["h"]
    assert exact > rounded > exact - 9
    chosen, other = found[gated_kept.CHOSEN], found["h under the largest of all"]
    assert chosen["h"] > other["h"] + 3 and chosen["dx"] == other["dx"]
    assert [line["kept"] for line in gated_kept.summary(list(found.values()))] == list(found)
