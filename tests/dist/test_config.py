import pytest

from lsq.dist import GradientConfig
from lsq.dist.config import gcq_levels, kept_largest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "int7"}, ["mode", "'int7'", "'int8_hier'"]),
        ({"block": 100}, ["block", "100", "256"]),
        ({"rounding": "down"}, ["rounding", "'down'", "'stochastic'"]),
        ({"mode": "gcq", "rounding": "stochastic"}, ["gcq", "nearest"]),
        ({"mode": "bf16", "error_feedback": True}, ["error_feedback", "bf16", "int8"]),
        (
            {"mode": "fp16", "rounding": "stochastic"},
            ["rounding", "fp16", "int8", "leave rounding out"],
        ),
        ({"node_size": 0}, ["node_size", "0", "whole number above 0"]),
        ({"node_size": 2.0}, ["node_size", "2.0"]),
        ({"row": None}, ["row", "None"]),
        ({"row": True}, ["row", "True"]),
        ({"quantile": 0.0}, ["quantile", "0.0", "at most 1"]),
        ({"timeout_s": -1}, ["timeout_s", "-1"]),
        ({"seed": "x"}, ["seed", "'x'"]),
        ({"seed": 2**32}, ["seed", "4294967296", "4294967295"]),
    ],
)
def test_values_that_are_not_allowed_are_named(options, words):
    with pytest.raises(ValueError) as raised:
        GradientConfig(**options)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_rounding_goes_by_mode_unless_it_is_given():
    assert not GradientConfig(mode="int8").stochastic
    assert GradientConfig(mode="int4_hier").stochastic
    assert GradientConfig(mode="int8", rounding="stochastic").stochastic
    assert not GradientConfig(mode="int4_hier", rounding="nearest").stochastic


def test_clip_of_gcq_is_a_quantile():
    assert [kept_largest(values, 0.99) for values in (1, 10, 100, 101, 1024)] == [1, 1, 1, 2, 11]
    assert kept_largest(1024, 1.0) == 1


def test_levels_of_gcq():
    assert [gcq_levels(workers) for workers in (2, 16, 32, 127)] == [63, 7, 3, 1]
    with pytest.raises(ValueError, match=r"128 workers.*127 // 128 = 0.*int8_hier"):
        gcq_levels(128)
