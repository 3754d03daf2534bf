"""Which tensors are looked at, and how much of them."""

import math

import pytest
import torch
from torch import nn

from lsq.study.tensors import as_rows, chosen_by, parameters_of, take, weights_of


def test_large_tensors_are_sampled_by_whole_rows():
    x = torch.arange(7 * 5.0).view(7, 5)
    assert torch.equal(take("x", "weight", x, 35).values, x)
    few = take("x", "weight", x, 14)
    assert torch.equal(few.values, x[[0, 3]]) and few.shape == (7, 5)
    assert take("x", "weight", x, 1).values.shape == (1, 5)
    assert take("x", "weight", x.view(7, 1, 5).double(), 99).values.dtype == torch.float32
    kept = take("x", "weight", x)
    x.zero_()
    assert kept.values.any()


def test_problems_are_found_in_all_of_a_tensor():
    def sample(tensor, *largest):
        return take("x", "weight", tensor, *largest)

    x = torch.ones(6, 4)
    assert sample(x).problem is None
    x[5, 1], x[4, 0] = math.nan, -math.inf
    assert sample(x, 4).problem == "2 of 24 values are NaN or infinite"
    assert sample(torch.zeros(2, 3)).problem == "all its values are zero"
    assert sample(torch.zeros(0, 3)).problem == sample(torch.zeros(3, 0)).problem
    # in float32
    assert sample(torch.full((2, 2), 1e300, dtype=torch.float64)).unusable == 4
    assert sample(torch.full((2, 2), 1e30, dtype=torch.bfloat16)).unusable == 0
    rows = torch.ones(5, 3).index_fill(0, torch.tensor([1, 4]), 0.0)
    found = sample(rows, 6)
    assert found.zero_rows == 2 and torch.equal(found.values, torch.ones(2, 3))
    assert len(sample(rows).values) == 3


def test_weights_are_floats_of_two_dimensions_each_once():
    table, codes = torch.ones(4, 3), torch.ones(2, 2, dtype=torch.int8)
    tensors = {"a": table, "again": table, "bias": torch.ones(3), "codes": codes, "b": table.t()}
    found = weights_of(tensors | {"step": 3, "empty": torch.ones(0, 3)})
    assert [name for name, _ in found] == ["a", "b", "empty"]
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert list(parameters_of(model)) == ["0.weight"]


def test_kernels_are_rows():
    shapes = {(4, 3, 2, 2): (4, 12), (4, 3, 5): (4, 15), (2, 8, 64): (2, 8, 64), (4, 3): (4, 3)}
    assert {shape: as_rows(torch.ones(shape)).shape for shape in shapes} == shapes


def test_names_are_chosen_by_patterns():
    names = [f"layers.{i}.fc{j}" for i in range(3) for j in (1, 2)]
    assert chosen_by([], names) == set(names)
    assert chosen_by(["*.fc2", "layers.0.*"], names) == {*names[:2], "layers.1.fc2", "layers.2.fc2"}
    with pytest.raises(ValueError, match=r"called 'fc\?'; there are layers.0.fc1, .* and 1 more"):
        chosen_by(["*fc1", "fc?"], names)
