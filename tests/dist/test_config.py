import pytest

from lsq.dist import GradientConfig
from lsq.dist.config import gcq_levels, kept_largest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "int7"}, ["mode", "'int7'", "'int8_hier'"]),
        ({"mode": "int4_hier"}, ["'int4_hier' is gone", "take 'int8_hier'"]),
        ({"block": 64}, ["block is 64", "always 128 now"]),
        ({"rounding": "stochastic"}, ["rounding is 'stochastic'", "always 'nearest' now"]),
        ({"error_feedback": True}, ["error_feedback is True", "always False now"]),
        ({"node_size": 0}, ["node_size", "0", "whole number above 0"]),
        ({"node_size": 2.0}, ["node_size", "2.0"]),
        ({"quantile": 1.0}, ["quantile is 1.0", "always 0.99 now"]),
        ({"timeout_s": -1}, ["timeout_s", "-1"]),
    ],
)
def test_values_that_are_not_allowed_are_named(options, words):
    with pytest.raises(ValueError) as raised:
        GradientConfig(**options)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_fields_of_version_0_1_with_their_defaults():
    with pytest.warns(FutureWarning, match="block is always 128 now: leave it out"):
        found = GradientConfig(
            mode="int8", block=128, rounding=None, error_feedback=False, row=1024, seed=7
        )
    assert found == GradientConfig(mode="int8")


def test_clip_of_gcq_is_a_quantile():
    assert [kept_largest(values, 0.99) for values in (1, 10, 100, 101, 1024)] == [1, 1, 1, 2, 11]
    assert kept_largest(1024, 1.0) == 1


def test_levels_of_gcq():
    assert [gcq_levels(workers) for workers in (2, 16, 32, 127)] == [63, 7, 3, 1]
    with pytest.raises(ValueError, match=r"128 workers.*127 // 128 = 0.*int8_hier"):
        gcq_levels(128)
