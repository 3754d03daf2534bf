"""How gradients travel: values that are refused, gcq's clips and levels, nodes."""

import pytest

from lsq.dist import GradientConfig
from lsq.dist.config import find_topology, gcq_levels, kept_largest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "int7"}, ["mode", "'int7'", "'int8_hier'"]),
        ({"mode": "int4_hier"}, ["'int4_hier'", "'int8_hier'", "'lean'"]),
        ({"block": 64}, ["block is 64", "always 128 now"]),
        ({"rounding": "stochastic"}, ["rounding is 'stochastic'", "always 'nearest' now"]),
        ({"error_feedback": True}, ["error_feedback is True", "always False now"]),
        ({"node_size": 0}, ["node_size", "0", "whole number above 0"]),
        ({"node_size": 2.0}, ["node_size", "2.0"]),
        ({"node_size": True}, ["node_size is True", "whole number above 0"]),
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


@pytest.mark.parametrize("given", [{"rounding": None}, {"rounding": "nearest"}, {"seed": 0}])
def test_fields_that_decide_nothing_warn(given):
    with pytest.warns(FutureWarning, match=f"{next(iter(given))} .*leave it out"):
        assert GradientConfig(**given) == GradientConfig()


def test_clip_of_gcq_is_a_quantile():
    assert [kept_largest(values) for values in (1, 10, 100, 101, 1024)] == [1, 1, 1, 2, 11]


def test_levels_of_gcq():
    assert [gcq_levels(workers) for workers in (2, 16, 32, 127)] == [63, 7, 3, 1]
    with pytest.raises(ValueError, match=r"128 workers.*127 // 128 = 0.*int8_hier"):
        gcq_levels(128)


def nobody() -> list[str]:
    raise AssertionError("hosts were asked")


def test_nodes_come_from_torchrun():
    found = find_topology(16, 11, None, nobody, {"LOCAL_WORLD_SIZE": "8"})
    assert (found.node_size, found.nodes) == (8, 2)
    assert found.all_neighbours == [list(range(8)), list(range(8, 16))]
    assert found.all_counterparts[3] == [3, 11]


def test_a_given_node_size_goes_first():
    found = find_topology(6, 4, 2, nobody, {"LOCAL_WORLD_SIZE": "6"})
    assert found.nodes == 3
    assert (found.all_neighbours, found.all_counterparts) == (
        [[0, 1], [2, 3], [4, 5]],
        [[0, 2, 4], [1, 3, 5]],
    )


def test_without_torchrun_hosts_tell():
    assert find_topology(3, 1, None, lambda: ["a"] * 3, {}).nodes == 1
    assert find_topology(6, 1, None, lambda: ["b", "b", "a", "a", "c", "c"], {}).nodes == 3


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_uneven_hosts_are_named(hosts):
    with pytest.raises(ValueError, match="on a, 1 on b.*mode int8"):
        find_topology(4, 1, None, lambda: hosts, {})


@pytest.mark.parametrize(("node_size", "environment"), [(3, {}), (None, {"LOCAL_WORLD_SIZE": "3"})])
def test_nodes_that_do_not_fit_are_named(node_size, environment):
    with pytest.raises(
        ValueError, match="4 workers .* nodes of 3 .node_size, or what torchrun started"
    ):
        find_topology(4, 1, node_size, nobody, environment)
