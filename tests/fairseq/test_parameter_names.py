"""Names of fairseq's transformer and this model's, there and back."""

import pytest
import torch

from lsq.fairseq.parameter_names import rename, restore
from tests.fairseq.comparison import assert_equal_states

FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --task translation"


def test_projections_are_concatenated_in_order(build):
    fairseq_state = build(FAIRSEQ)[1].state_dict()
    renamed = rename(fairseq_state)
    layer = "decoder.layers.1."
    for parts, theirs, ours in (
        ("qkv", "self_attn.{}_proj.weight", "self_attn.qkv_weight"),
        ("kv", "encoder_attn.{}_proj.bias", "encoder_attn.key_value_bias"),
        ("q", "encoder_attn.{}_proj.weight", "encoder_attn.query_weight"),
        ("o", "self_attn.{}ut_proj.bias", "self_attn.out_bias"),
        ("f", "{}c2.weight", "feed_forward.fc2_weight"),
    ):
        joined = [fairseq_state[layer + theirs.format(part)] for part in parts]
        assert torch.equal(renamed[layer + ours], torch.cat(joined))


@pytest.mark.parametrize(
    "options", ["", "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding"]
)
def test_restored_names_are_those_of_fairseq(build, options):
    state = build(f"{FAIRSEQ} {options}")[1].state_dict()
    state = {name: value for name, value in state.items() if value.numel() > 1}
    assert_equal_states(restore(rename(state)), state)
