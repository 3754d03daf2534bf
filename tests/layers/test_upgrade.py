"""Checkpoints of earlier versions load, with one warning."""

import pytest
import torch

from lsq.layers import FeedForward, TransformerEncoderLayer, upgrade
from tests.layers.shapes import config_of


@pytest.mark.parametrize("build", [TransformerEncoderLayer, FeedForward])
def test_a_checkpoint_of_an_older_version_is_measured_again(build, caplog):
    """Products were rounded before their bias, under clips that are gone, and blocks counted for
    themselves."""
    layer = build(config_of())
    prefix = "feed_forward." if build is TransformerEncoderLayer else ""
    state = layer.state_dict() | {
        "calibrated": torch.tensor(True),
        prefix + "hidden_clip": torch.ones(1),
    }
    if prefix:
        state |= {
            "feed_forward.calibrated": torch.tensor(True),
            "feed_forward.passes": torch.tensor(3),
        }
    upgrade._warn.cache_clear()
    for _ in range(2):
        layer.load_state_dict(state)
        assert not layer.schedule.calibrated and caplog.text.count("of an older version") == 1
    layer.load_state_dict(layer.state_dict() | {"calibrated": torch.tensor(True)})
    assert layer.schedule.calibrated
