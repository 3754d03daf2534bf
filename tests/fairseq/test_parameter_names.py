"""Names of fairseq's transformer and this model's, there and back."""

import pytest
import torch

from lsq.fairseq.parameter_names import rename, restore

FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --task translation"


def test_projections_are_concatenated_in_order(build):
    fairseq_state = build(FAIRSEQ)[1].state_dict()
    renamed = rename(fairseq_state)
    old, new = "decoder.layers.1.", "decoder.layers.1."
    joined = [fairseq_state[f"{old}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(renamed[new + "self_attn.qkv_weight"], torch.cat(joined))
    joined = [fairseq_state[f"{old}encoder_attn.{part}_proj.bias"] for part in "kv"]
    assert torch.equal(renamed[new + "encoder_attn.key_value_bias"], torch.cat(joined))
    assert (
        renamed[new + "encoder_attn.query_weight"]
        is fairseq_state[old + "encoder_attn.q_proj.weight"]
    )
    assert renamed[new + "self_attn.out_bias"] is fairseq_state[old + "self_attn.out_proj.bias"]
    assert renamed[new + "feed_forward.fc2_weight"] is fairseq_state[old + "fc2.weight"]


@pytest.mark.parametrize(
    "options", ["", "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding"]
)
def test_restored_names_are_those_of_fairseq(build, options):
    state = {
        name: value
        for name, value in build(f"{FAIRSEQ} {options}")[1].state_dict().items()
        if value.numel() > 1
    }
    restored = restore(rename(state))
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], value) for name, value in state.items())
