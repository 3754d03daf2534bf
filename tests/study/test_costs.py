import dataclasses
import json
import math

import pytest

from lsq.study import correlation
from lsq.study.costs import Cost, Costs, TensorCosts, read_costs, write_costs

COST = Cost(bits=4.5, cost=-0.25, divergence=0.75, first=-0.5, second=0.125, error=0.01)
LOST = dataclasses.replace(COST, cost=None, divergence=None)
TENSOR = {"name": "a.weight", "shape": (3, 4), "rows": 5, "transposed": False}
COSTS = Costs(
    about={"model": "a", "numbers": [1, 2]},
    weights="abc",
    clip="mse",
    formats=("int4/row", "nvfp4"),
    loss=2.5,
    count=10.0,
    samples=3,
    finished=True,
    tensors=(
        TensorCosts(kind="weight", values=12, formats={"int4/row": COST, "nvfp4": LOST}, **TENSOR),
        TensorCosts(
            kind="activation", values=20, formats={"int4/row": COST, "nvfp4": COST}, **TENSOR
        ),
    ),
)


@pytest.fixture
def content(tmp_path) -> dict:
    write_costs(tmp_path / "costs.json", COSTS)
    return json.loads((tmp_path / "costs.json").read_text())


def test_what_is_written_is_read(tmp_path, content):
    assert read_costs(tmp_path / "costs.json") == COSTS
    assert (content["format"], content["version"]) == ("lsq-sensitivity", 3)
    assert content["tensors"][0]["formats"]["nvfp4"]["cost"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


REMOVED = object()


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("version", 1, "version are 'lsq-sensitivity' and 1; they must be"),
        ("format", REMOVED, "format and version are None"),
        ("loss", "low", "loss is 'low'"),
        ("about", 3, "about is 3"),
        ("finished", "yes", "finished is 'yes'; it must be true or false"),
        ("tensors 1 kind", "bias", r"tensors\[1\].kind is 'bias'; allowed: 'weight'"),
        ("tensors 1 kind", "weight", "weight of a.weight, which stands there twice"),
        ("tensors 0 shape", [3, -4], r"tensors\[0\].shape\[1\] is -4"),
        ("tensors 0 formats", [], "must be an object"),
        ("tensors 0 formats nvfp4", REMOVED, r"tensors\[0\].formats has not the names"),
        ("tensors 0 formats nvfp4 bits", None, "nvfp4.bits is None"),
        ("tensors 0 formats nvfp4 bits", -4.5, "bits is -4.5; it must be 0"),
        ("tensors 0 formats nvfp4 first", REMOVED, "no field 'first'"),
    ],
)
def test_another_file_is_refused(tmp_path, content, where, value, named):
    *outer, name = where.split()
    part = content
    for key in outer:
        part = part[int(key) if isinstance(part, list) else key]
    if value is REMOVED:
        del part[name]
    else:
        part[name] = value
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=named) as refused:
        read_costs(path)
    assert str(path) in str(refused.value) and "delete it and measure again" in str(refused.value)


def test_differences_name_both_settings():
    assert COSTS.difference(dataclasses.replace(COSTS, loss=2.500001, tensors=())) == ""
    assert COSTS.difference(dataclasses.replace(COSTS, loss=2.6)) == "loss: 2.5 before, 2.6 now"
    other = dataclasses.replace(COSTS, clip="kl", samples=4)
    assert COSTS.difference(other) == "clip: mse before, kl now; samples: 3 before, 4 now"


def costs_of(pairs) -> Costs:
    """Of tensors with (measured, second term) in one format."""
    tensors = []
    for number, (cost, second) in enumerate(pairs):
        formats = {"int4/row": dataclasses.replace(COST, cost=cost, first=0.0, second=second)}
        tensors.append(dataclasses.replace(COSTS.tensors[0], name=f"t{number}", formats=formats))
    return dataclasses.replace(COSTS, formats=("int4/row",), tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 100), (3, 1000)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        # 1 - 6 sum d^2 / (n (n^2 - 1)) with sum d^2 = 4
        ([(1, 1), (2, 3), (3, 2), (4, 5), (5, 4)], 0.8),
        ([(1, 1), (1, 2), (2, 3)], math.sqrt(3) / 2),  # ranks 1.5, 1.5, 3 and 1, 2, 3
        ([(1, 1), (None, 0), (2, 2)], 1.0),
    ],
)
def test_rank_correlation(pairs, expected):
    assert correlation(costs_of(pairs), "weight") == pytest.approx(expected)


def test_no_rank_correlation_of_too_few():
    for pairs, kind in (([(1, 1)], "weight"), ([(1, 1), (1, 2)], "weight"), ([], "activation")):
        assert math.isnan(correlation(costs_of(pairs), kind))


def test_table():
    lines = COSTS.table("github").splitlines()
    assert lines[0] == "Loss 2.5000, a mean over 10; estimates from 3 gradients."
    assert [line.replace(" ", "") for line in lines[2:7]] == [
        "|costofweights|int4/row|nvfp4|",
        lines[3],
        "|a.weight|-0.25000|notfinite|",
        "|sum|-0.25000|notfinite|",
        "|bitsofavalue|4.50|4.50|",
    ]
    assert any(line.startswith("| cost of activations") for line in lines)
    assert "Rank correlation" not in COSTS.table()  # of one cost
    assert "term: 0.800." in costs_of([(1, 1), (2, 3), (3, 2), (4, 5), (5, 4)]).table()
