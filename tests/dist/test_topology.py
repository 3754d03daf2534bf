import pytest

from lsq.dist.topology import find_topology, node_size_of


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
        node_size_of(hosts)


@pytest.mark.parametrize(("node_size", "environment"), [(3, {}), (None, {"LOCAL_WORLD_SIZE": "3"})])
def test_nodes_that_do_not_fit_are_named(node_size, environment):
    with pytest.raises(
        ValueError, match="4 workers .* nodes of 3 .node_size, or what torchrun started"
    ):
        find_topology(4, 1, node_size, nobody, environment)
